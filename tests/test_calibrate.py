"""`densegrpo calibrate` on the 8x8 toy, psi files in training, and the report."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from densegrpo_jax import calibrate, cli, flow, parallel
from densegrpo_jax.calibrate import Calibration, Figure
from densegrpo_jax.config import Parallel
from densegrpo_jax.flow import calibration
from densegrpo_jax.scenes import toy
from densegrpo_jax.train import calibration_report, loop, metrics, phases, psi
from densegrpo_jax_configs.variants import change

T = 4
SIGMAS = flow.sd3_sigmas(T)
NOWHERE = np.zeros(T, bool)


pytestmark = pytest.mark.usefixtures("plain_dispatch")


def config(workdir, **sections):
    """The toy with four steps on SD3's grid and two groups of four."""
    small = {
        "prompts": {"per_step": 2, "group_size": 4},
        "sampling": {"num_steps": T, "grid": "sd3"},
        "optimizer": {"updates": 1, "micro_batch": 24},
        "evaluation": {"every": 0},
        "parallel": {"devices": 1},
        "run": {"steps": 1, "workdir": workdir, "report_every": 0},
    }
    base = cli.load_config("toy")
    for name in small | sections:
        changes = small.get(name, {}) | (sections[name] if isinstance(sections.get(name), dict) else {})
        base = dataclasses.replace(base, **{name: dataclasses.replace(getattr(base, name), **changes) if changes else sections[name]})
    return base


def result(workdir, **options):
    path = calibrate.calibrate(config(workdir), Calibration(**options))
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """psi.json after six iterations of 32 trajectories."""
    jax.config.update("jax_debug_key_reuse", False)
    workdir = tmp_path_factory.mktemp("calibrated")
    return calibrate.calibrate(config(workdir), Calibration(iterations=6, trajectories=32, average=2))


# --- the search --------------------------------------------------------------------------------------------------------


def test_noise_that_the_reward_sees_is_turned_down(calibrated):
    """On SD3's grid the last trained step leaves far too much noise, which the toy's squared error sees: it falls by eps2 an iteration."""
    found = json.loads(calibrated.read_text())
    values = np.array(found["trace"]["value"])
    np.testing.assert_allclose(values[:, T - 2], 0.7 - 0.01 * np.arange(6), rtol=1e-12)
    assert found["shares"]["negative"][T - 2] > 0.8 and found["shares"]["positive"][0] > 0.2
    np.testing.assert_allclose(found["multiplier"], [*values[-2:, : T - 1].mean(0), 0.7])
    np.testing.assert_allclose(found["psi"], found["multiplier"] * flow.flow_scale(SIGMAS))
    assert found["calibrated"] == [True, True, True, False] and found["not_calibrated"] == [3]
    assert found["iterations"] == 6 and found["averaged"] == 2 and not found["came_to_rest"]
    assert found["settings"]["rewards"] == ["toy_spot"] and found["settings"]["trajectories"] == 32
    assert "toy" in found["name"]


def test_a_killed_search_ends_with_the_same_file(tmp_path, calibrated):
    options = {"trajectories": 32, "average": 2}
    workdir = tmp_path / "run"
    result(workdir, iterations=3, **options)
    with (workdir / "calibration" / "trace.jsonl").open("a") as file:
        file.write('{"step": 3, "value": [0.6')  # killed while writing
    result(workdir, iterations=6, **options)
    assert (workdir / "calibration" / "psi.json").read_bytes() == calibrated.read_bytes()
    before = (workdir / "calibration" / "trace.jsonl").read_bytes()
    result(workdir, iterations=6, **options)  # nothing left to do
    assert (workdir / "calibration" / "trace.jsonl").read_bytes() == before


def test_no_key_is_used_twice_key_reuse(tmp_path):
    result(tmp_path, iterations=1)


def test_the_search_stops_at_rest(tmp_path):
    found = result(tmp_path, iterations=50, average=2, trajectories=8, rest=1.0)
    assert found["came_to_rest"] and found["iterations"] == 4


def test_a_search_of_other_settings_is_refused(tmp_path):
    result(tmp_path, iterations=1)
    with pytest.raises(ValueError, match=r"trajectories: 8 -> 16"):
        result(tmp_path, iterations=1, trajectories=16)
    with pytest.raises(ValueError, match=r"calibration: .*'eps2': 0.01.* -> .*'eps2': 0.02"):
        result(tmp_path, iterations=1, eps2=0.02)
    with pytest.raises(ValueError, match=r"exploration: .*'noise_level': 0.5"):
        calibrate.calibrate(config(tmp_path, exploration={"noise_level": 0.5}), Calibration(iterations=1))


def test_a_reward_that_never_changes_moves_nothing(tmp_path):
    changed = config(tmp_path, rewards=("same",))
    path = calibrate.calibrate(
        changed, Calibration(iterations=2), extra_rewards={"same": lambda images, prompts, metadata: np.ones(len(images))}
    )
    found = json.loads(path.read_text())
    assert found["multiplier"] == [0.7] * T and found["shares"]["zero"][:3] == [1.0] * 3


def test_failed_scores_are_left_out_and_counted(tmp_path):
    def sometimes(images, prompts, metadata):
        scores = toy.spot_reward(images, prompts)
        scores[: len(scores) // 8] = np.nan  # images come trajectory by trajectory
        return scores

    calibrate.calibrate(config(tmp_path, rewards=("s",)), Calibration(iterations=1), extra_rewards={"s": sometimes})
    (record,) = metrics.read(tmp_path / "calibration" / "trace.jsonl")
    assert record["failed"] == T - 1  # trajectory 0 at every trained step
    assert np.sum([record[name] for name in ("positive", "negative", "zero")], axis=0)[:3].tolist() == [7, 7, 7]


@pytest.mark.parametrize("mode", ["printed", "multiplier"])
def test_printed_rule(tmp_path, mode):
    found = result(tmp_path, iterations=3, trajectories=5, mode=mode)
    values, unit = np.array(found["trace"]["value"]), flow.flow_scale(SIGMAS) if mode == "printed" else np.ones(T)
    np.testing.assert_allclose(values[0], 0.7 * unit)
    signs = [np.array(found["trace"][name]) for name in ("positive", "negative")]
    expected = np.where(np.abs(signs[0] - signs[1]) < 2, 0.01, -0.01)
    np.testing.assert_allclose(np.diff(values, axis=0)[:, :3], expected[:-1, :3], atol=1e-12)
    np.testing.assert_allclose(found["multiplier"][0], values[:, 0].mean() / unit[0])


def test_the_printed_rule_with_many_trajectories_is_warned_of(tmp_path, capsys):
    result(tmp_path, iterations=0, mode="printed")
    assert "calls a symmetric level balanced with probability 0.27 only" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["scaled", "printed"])
def test_a_start_value_needs_no_reward(tmp_path, mode):
    found = result(tmp_path, iterations=0, start="excess_noise", excess=1.1, mode=mode)
    kernel = flow.psi_sde(SIGMAS, np.array(found["psi"]))
    ratio = calibration.noise_ratio(kernel, SIGMAS)
    np.testing.assert_allclose(ratio[:2], 1.1)
    assert found["multiplier"][2] == pytest.approx(max(0.01, calibration.psi_for_ratio(SIGMAS, 1.1)[2] / flow.flow_scale(SIGMAS)[2]))
    assert found["multiplier"][3] == 0.7  # not calibrated: as the run has it


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ({"window": "all"}, [True] * 4),
        ({"window": "fixed", "window_start": 1, "window_size": 2}, [False, True, True, False]),
        ({"window": "random", "window_start": 1, "window_size": 1}, [False, True, True, True]),
        ({"window": "sliding", "window_size": 2}, [True] * 4),
        ({"last_noise": True}, [True, True, True, False]),
    ],
    ids=str,
)
def test_every_level_that_training_may_reach_is_calibrated(tmp_path, window, expected):
    path = calibrate.calibrate(config(tmp_path, exploration=window), Calibration(iterations=1))
    assert psi.read(path).calibrated.tolist() == expected
    changed = config(tmp_path, exploration=window | {"psi": path})
    for step in range(3):  # and training with it has what it needs at every step
        tables = phases.sampler(changed, SIGMAS, 3.0, step)
        plain = phases.sampler(config(tmp_path, exploration=window), SIGMAS, 3.0, step)
        assert (tables.trained == plain.trained).all() and ((tables.kernel.std > 0) == (plain.kernel.std > 0)).all()


@pytest.mark.mesh
def test_the_result_does_not_depend_on_chunks_or_devices(tmp_path, calibrated):
    chunked = config(tmp_path, sampling={"num_steps": T, "grid": "sd3", "chunk": 8, "decode_chunk": 5})
    path = calibrate.calibrate(chunked, Calibration(iterations=6, trajectories=32, average=2))
    assert json.loads(path.read_text()) == json.loads(calibrated.read_text())

    found = []
    for settings in (Parallel(devices=1), Parallel(fsdp=2)):
        changed = dataclasses.replace(config(tmp_path), parallel=settings)
        mesh = parallel.make(settings)
        with parallel.within(mesh):
            s = calibrate.setting(changed, mesh=mesh)
            found.append(calibrate.make_draw(s)(s.tables.kernel, 0, [i % 9 for i in range(30)], np.arange(30)))
    one, eight = found  # which share 30 trajectories as if they were 32
    np.testing.assert_array_equal(one.trajectory.noise, eight.trajectory.noise)
    np.testing.assert_allclose(one.clean, eight.clean, atol=2e-5)
    for name, gains in one.gains.items():
        assert gains.shape == eight.gains[name].shape == (T, 30)
        np.testing.assert_allclose(gains, eight.gains[name], atol=2e-4)


@pytest.mark.mesh
def test_devices_and_chunks_that_do_not_fit_are_refused(tmp_path):
    uneven = dataclasses.replace(config(tmp_path, sampling={"chunk": 4}), parallel=Parallel())
    with pytest.raises(ValueError, match=r"sampling.chunk = 4: 8 devices do not share it evenly; choose a multiple of 8"):
        calibrate.calibrate(uneven, Calibration(iterations=1, trajectories=30))


def test_gains_are_those_of_training(tmp_path):
    """With the kernel and completions of a training step, the same latents come out as `phases.make_sample` makes from the same noise."""
    s = calibrate.setting(config(tmp_path, completion={"steps": "all", "solver": "euler", "paired": True}))
    drawn = calibrate.make_draw(s)(s.tables.kernel, 3, [0, 1, 2, 3], np.arange(4))
    x, noise = drawn.trajectory.latents[0], drawn.trajectory.noise
    velocity = s.policy.velocity(s.policy.params, None, None)
    trajectory, clean = flow.rollout_and_complete(velocity, x, s.tables.kernel, SIGMAS, noise, s.tables.scheme, cond=drawn.cond)
    np.testing.assert_allclose(drawn.trajectory.latents, trajectory.latents, atol=2e-5)
    np.testing.assert_allclose(drawn.clean[:-1], clean, atol=2e-5)
    assert len(s.tables.scheme) == 4 + 3  # a paired baseline for each trained step
    assert np.isfinite(drawn.gains["total"][:3]).all() and np.isnan(drawn.gains["total"][3]).all()


def test_without_noise_there_is_no_gain(tmp_path):
    """Of completions by a coarse solver only against the noise-free step; the paper's own are consistent as they are."""

    def largest(consistent, **completion):
        s = calibrate.setting(config(tmp_path, completion=completion), consistent=consistent)
        drawn = calibrate.make_draw(s)(flow.ode(SIGMAS), 0, [0, 1, 2, 3], np.arange(4))
        return np.abs(drawn.gains["total"][: T - 1]).max(), len(s.tables.scheme)

    assert largest(True, steps="respaced 2", solver="dpmpp2m") == (pytest.approx(0.0, abs=2e-3), 2 * T - 1)
    assert largest(False, steps="respaced 2", solver="dpmpp2m")[0] > 0.01
    assert largest(True, steps="all", solver="euler") == (pytest.approx(0.0, abs=2e-3), T)


# --- psi files in training ---------------------------------------------------------------------------------------------


def test_both_samplers_read_the_same_noise(tmp_path, calibrated):
    tables = [
        phases.sampler(config(tmp_path, exploration={"sampler": sampler, "psi": calibrated}), SIGMAS, 3.0, 0)
        for sampler in ("flow_sde", "psi_sde")
    ]
    for a, b in zip(tables[0].kernel, tables[1].kernel):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    expected = psi.read(calibrated).psi[:3] * np.sqrt(-np.diff(SIGMAS))[:3]
    np.testing.assert_allclose(tables[0].kernel.std, [*expected, 0.0])  # the last step stays an ODE step


@pytest.mark.parametrize(
    ("sigmas", "changes", "reason"),
    [
        (flow.uniform_sigmas(T), {}, r"is for another grid \(level 3 is 0.0089 there and 0.2500 here\)"),
        (flow.sd3_sigmas(5), {}, "is for 4 steps, sampling.num_steps is 5"),
        (SIGMAS, {"sampler": "cps"}, "goes with exploration.sampler flow_sde or psi_sde, not cps"),
        (SIGMAS, {"window": "all"}, r"no calibrated value for the trained steps \[3\]"),
        (SIGMAS, {"window": "random", "window_size": 2}, r"no calibrated value for the trained steps \[3\]"),
    ],
)
def test_a_psi_file_that_does_not_fit_is_refused(tmp_path, calibrated, sigmas, changes, reason):
    changed = config(tmp_path, exploration=changes | {"psi": calibrated}, sampling={"num_steps": len(sigmas) - 1, "grid": "sd3"})
    with pytest.raises(ValueError, match=reason):
        phases.sampler(changed, sigmas, 3.0, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: "{", "not a psi file .*JSONDecodeError"),
        (lambda d: json.dumps([d]), "not a psi file .*TypeError"),
        (lambda d: json.dumps({k: v for k, v in d.items() if k != "psi"}), "not a psi file .*KeyError: 'psi'"),
        (lambda d: json.dumps(d | {"psi": d["psi"][1:]}), r"shapes \(5,\), \(3,\), \(4,\), \(4,\)"),
        (lambda d: json.dumps(d | {"psi": [0.5, *d["psi"][1:]]}), "edited by hand"),
        (lambda d: json.dumps(d | {"psi": [-x for x in d["psi"]], "multiplier": [-x for x in d["multiplier"]]}), "not negative"),
        (lambda d: json.dumps(d | {"psi": [float("nan")] * 4}), "finite"),
    ],
)
def test_a_broken_psi_file_is_named(tmp_path, calibrated, change, reason):
    path = tmp_path / "psi.json"
    path.write_text(change(json.loads(calibrated.read_text())))
    with pytest.raises(ValueError, match=reason):
        psi.read(path)


@pytest.mark.parametrize("settings", ["a", [1], {"model": "tiny"}])
def test_settings_of_another_form_are_refused(tmp_path, calibrated, settings):
    path = tmp_path / "psi.json"
    path.write_text(json.dumps(json.loads(calibrated.read_text()) | {"settings": settings}))
    with pytest.raises(ValueError, match="its settings are not those"):
        psi.strange(config(tmp_path, exploration={"psi": path}))


def test_a_run_keeps_its_psi_and_counts_steps_without_gains(tmp_path, calibrated, capsys):
    path, workdir = tmp_path / "psi.json", tmp_path / "run"
    path.write_bytes(calibrated.read_bytes())

    def train(steps):
        run = {"steps": steps, "workdir": workdir, "save_every": 1, "report_every": 0}
        changed = config(workdir, exploration={"psi": path}, run=run, rewards=("same",))
        loop.train(changed, extra_rewards={"same": lambda images, prompts, metadata: np.zeros(len(images))})

    train(1)
    assert "was calibrated with rewards = ['toy_spot'], and this run has ['same']" in capsys.readouterr().out
    assert (workdir / "psi.json").read_bytes() == path.read_bytes()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"multiplier": [0.5] * T, "psi": (0.5 * flow.flow_scale(SIGMAS)).tolist()}))
    with pytest.raises(ValueError, match="has changed since this run began"):
        train(3)
    path.write_bytes(calibrated.read_bytes())
    train(3)
    quiet = [record["gains"]["quiet"]["positive"] for record in metrics.read(workdir / "metrics.jsonl")]
    assert quiet == [[1, 1, 1, 0], [2, 2, 2, 0], [3, 3, 3, 0]]  # the count went on with the run


def test_psi_files_that_ship_are_whole_found_by_name_and_made_for_the_config_of_that_name():
    for path in psi.PACKAGED.glob("*.json"):
        found = psi.read(Path(path.stem))
        assert psi.strange(change(cli.load_config(path.stem), exploration={"psi": Path(path.stem)})) == []
        assert found.calibrated.any() and "/" not in json.loads(path.read_text())["settings"]["model"]["path"]
    with pytest.raises(ValueError, match="nothing: there is no such file, and the psi files that ship are"):
        psi.find(Path("nothing"))


# --- the warning in training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "sampler", "objective", "said"),
    [
        (flow.sd3_sigmas, "cps", {}, True),
        (flow.sd3_sigmas, "cps", {"step_weights": "tempflow"}, False),
        (flow.sd3_sigmas, "cps", {"ratio": "guard"}, False),
        (flow.uniform_sigmas, "cps", {}, False),
        (flow.sd3_sigmas, "flow_sde", {}, False),
    ],
)
def test_a_step_that_outweighs_the_others_is_warned_of(grid, sampler, objective, said):
    settings = change(cli.load_config("toy"), exploration={"sampler": sampler}, objective=objective)
    tables = phases.sampler(settings, grid(10), 3.0, step=0)
    lines = phases.outweighed(settings, tables)
    assert len(lines) == said
    if said:  # against the derivative itself
        one = jnp.ones((1, 4))
        rows = [tables.kernel.at(step) for step in np.flatnonzero(tables.trained)]
        pull = [float(jnp.linalg.norm(jax.grad(lambda v, k=k: flow.log_ratio(k, v, one, one).sum())(one))) for k in rows]
        assert f"step 8 has so little noise that its log-probabilities pull {max(pull) / np.median(pull):.0f} times" in lines[0]


def test_a_step_with_gains_of_one_sign_is_warned_of():
    trained, quiet = np.array([True, True, False]), None
    gains = {"positive": np.array([0.5, 0.0, 0.0]), "negative": np.array([0.5, 1.0, 0.0]), "count": np.array([8, 8, 8])}
    missing = gains | {"count": np.zeros(3)}
    for _ in range(metrics.MANY - 1):
        quiet = metrics.quiet(quiet, gains, trained)
    quiet = metrics.quiet(quiet, missing, trained)  # outside a window: no news
    record = {"step": 0, "reward": 0.0, "clip": 0.0, "images_per_second": 1.0, "gains": gains | {"quiet": quiet}}
    assert "warning" not in metrics.line(record, 1)
    quiet = metrics.quiet(quiet, gains, trained)
    assert quiet["positive"].tolist() == [0, 20, 0] and quiet["negative"].tolist() == [0, 0, 0]
    line = metrics.line(record | {"gains": gains | {"quiet": metrics.plain(quiet)}}, 1)
    assert "no positive gain for 20 steps or more at denoising steps [1]" in line and "negative" not in line
    assert metrics.quiet(quiet, gains | {"positive": np.full(3, 0.1)}, trained)["positive"].tolist() == [0, 0, 0]


# --- the report --------------------------------------------------------------------------------------------------------


def test_rank_correlation_within_groups():
    a = np.array([[1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0, 2.0, np.nan]])
    b = np.array([[2.0, 4.0, 8.0, 1.0, 2.0, 3.0, 3.0, 2.0, 1.0]])
    assert calibration_report.rank_correlation(a, b, 3) == [1.0]  # one group is constant, one has a failure
    assert np.isnan(calibration_report.rank_correlation(a[:, 3:6], b[:, 3:6], 3)).all()


def test_balance_is_clustered_by_prompt():
    gains = np.repeat([[1.0, -1.0, 1.0, 1.0, -1.0, 1.0]], 4, axis=1).reshape(1, -1)
    found = calibration_report.balance(np.vstack([np.zeros(24), gains]), gains, members=4)
    assert found["positive"] == pytest.approx([4 / 6])
    assert found["positive_error"] == pytest.approx([np.std([1, 0, 1, 1, 0, 1], ddof=1) / np.sqrt(6)])
    assert found["std"] == [0.0] and found["difference"] == [1.0]


def test_the_report_measures_once_and_is_one_file(tmp_path, calibrated, monkeypatch):
    folder = tmp_path / "calibration"
    folder.mkdir()
    found = json.loads(calibrated.read_text()) | {"name": "<script>"}
    found["settings"]["rewards"] = ["<script>"]
    (folder / "psi.json").write_text(json.dumps(found))
    s = calibrate.setting(config(tmp_path))
    options = Figure(levels=(0.5,), prompts=9, members=3, accuracy_prompts=2, accuracy_members=4)
    text = calibration_report.write(s, folder, options).read_text()
    assert "Balance of the gains" in text and "reference, 40 steps" in text and "<script>" not in text
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)
    assert all((folder / name).stat().st_size > 10_000 for name in ("balance.png", "accuracy.png"))

    numbers = json.loads((folder / "report.json").read_text())
    for name, m in numbers["measured"].items():
        predicted, seen = (np.array(m[f"excess_{kind}"][: T - 1], float) for kind in ("predicted", "measured"))
        np.testing.assert_allclose(seen, predicted, rtol=0.25, err_msg=name)
        total = m["rewards"]["total"]
        assert m["rewards"]["toy_spot"] == total and len(total["reward"]) == T + 1
        np.testing.assert_allclose(np.add(total["positive"], total["negative"])[: T - 1] + total["zero"][: T - 1], 1.0)
    accuracy = numbers["accuracy"]
    reference = accuracy[calibration_report.REFERENCE]
    assert reference["rank"] == [1.0] * T and reference["difference"] == [0.0] * T and reference["evaluations"] == 40.0
    assert accuracy["n=k euler"]["difference"][0] < accuracy["n=1 euler"]["difference"][0]

    monkeypatch.setattr(calibration_report, "measure", None)
    monkeypatch.setattr(calibration_report, "accuracy", None)
    calibration_report.write(s, folder, options)  # draws again what was measured
    assert json.loads((folder / "report.json").read_text()) == numbers


# --- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], None),
        (["nowhere"], "no config 'nowhere'"),
        (["toy", "--exploration.sampler", "cps"], "psi belongs to flow_sde and psi_sde"),
        (["toy", "--calibration.trajectories", "3"], "cannot tell gains of one sign from balance below 4"),
        (["toy", "--calibration.iterations", "-1"], "must be at least 0"),
        (["toy", "--calibration.decided", "2"], "a share is between 0 and 1"),
        (["toy", "--calibration.low", "2"], "low must be smaller"),
        (["toy", "--rewards", "nothing"], "unknown reward 'nothing'"),
        (["toy", "--sampling.chunk", "0"], "sampling.chunk = 0: must be from 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(tmp_path, capsys, arguments, reason):
    if arguments and arguments[0] == "toy":
        arguments = [*arguments, "--run.workdir", str(tmp_path / "run")]
    code = cli.main(["calibrate", *arguments])
    said = capsys.readouterr()
    if reason is None:
        assert code == 0 and "toy" in said.out
    else:
        assert code == 2 and reason in said.err and "Traceback" not in said.err


def test_the_command_prints_the_levels(tmp_path, capsys):
    small = ["--prompts.per-step", "2", "--prompts.group-size", "2", "--sampling.num-steps", str(T), "--run.workdir", str(tmp_path)]
    assert cli.main(["calibrate", "toy", *small, "--calibration.iterations", "1"]) == 0
    said = capsys.readouterr().out
    assert "iteration 1/1" in said and "step 3   multiplier 0.700" in said and "not calibrated" in said
    assert f"--exploration.psi {tmp_path}/calibration/psi.json" in said


# --- the benchmark -----------------------------------------------------------------------------------------------------


def test_the_benchmark_sums_seeds_and_keeps_what_it_has(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import calibration as benchmark

    def row(grid, positive, error):
        of = {
            "positive": [positive, None],
            "negative": [0.5, 0.5],
            "std": [1.0, 1.0],
            "reward": [0.1, 0.2, 0.3],
            "positive_error": [error, None],
        }
        result = {"rewards": {"r": of, "total": of}, "excess_predicted": [1.5, None], "excess_measured": [1.4, None]}
        return {"grid": grid, "sampler": "cps", "rewards": ["r"], "result": result}

    one, two = benchmark.summary_of_signs([row("sd3", 0.2, 0.03), row("sd3", 0.4, 0.04), row("uniform", 0.5, 0.1)])
    assert one["positive"] == [pytest.approx(0.3), None] and one["positive_error"] == [pytest.approx(0.025), None] and one["seeds"] == 2
    assert two["grid"] == "uniform" and two["scored"] == "r" and two["reward"] == [0.1, 0.2, 0.3] and two["excess_predicted"] == [1.5, None]

    calls = []
    for seed in (0, 1, 0):
        benchmark.once(tmp_path / "log.jsonl", {"seed": seed}, lambda seed=seed: calls.append(seed) or {"x": seed})
    assert calls == [0, 1]

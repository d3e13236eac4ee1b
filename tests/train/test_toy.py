"""The thin slice through all floors: the trainer on the 8x8 toy, as a user runs it."""

import dataclasses
import functools
import json
import os
import re
import resource
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from densegrpo_jax import cli
from densegrpo_jax.train import checkpoint, metrics, phases, report
from densegrpo_jax.train.loop import train
from densegrpo_jax_configs.variants import VARIANTS

pytestmark = pytest.mark.usefixtures("plain_dispatch")


def config(workdir: Path, **sections):
    base = cli.load_config("toy")
    quick = {"run": {"steps": 2, "workdir": workdir, "save_every": 1, "report_every": 0}, "evaluation": {"every": 0}}
    for name, changes in quick.items():
        sections[name] = changes | sections.get(name, {})
    changed = {k: dataclasses.replace(getattr(base, k), **v) if isinstance(v, dict) else v for k, v in sections.items()}
    return dataclasses.replace(base, **changed)


def steps(workdir):
    return metrics.read(workdir / "metrics.jsonl")


def without_clock(record):
    return {
        k: v
        for k, v in record.items()
        if k not in ("seconds", "phase_seconds", "images_per_second", "reward_health", "reward_wait", "speed")
    }


def test_reward_rises_steeply(tmp_path):
    path = train(config(tmp_path, run={"steps": 40}, evaluation={"every": 20}))
    evaluations = metrics.read(tmp_path / "evaluation.jsonl")
    assert [e["done"] for e in evaluations] == [0, 20, 40]
    mean, error = report.paired_difference(evaluations[0], evaluations[-1])
    assert mean > 0.15 and mean > 8 * error
    text = path.read_text()
    assert "Before and after" in text and "data:image/png;base64" in text
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)  # one file that needs nothing beside it


def test_first_update_is_on_policy_and_later_ones_move(tmp_path):
    train(config(tmp_path))
    for record in steps(tmp_path):
        assert record["first_update"]["ratio_min"] == pytest.approx(1.0, abs=1e-6)
        assert record["first_update"]["clip_above"] == record["first_update"]["clip_below"] == 0.0
        assert record["last_update"]["ratio_max"] > 1.0 + 1e-5
        worst = [v for v in record["log_ratio_before"]["delta_log_prob_max"] if v is not None]
        assert len(worst) == 9 and max(worst) < 1e-6


def test_seconds_hold_the_updates_which_the_host_does_not_wait_for(tmp_path, monkeypatch):
    original, pause = phases.make_update, 0.3

    def slow(*args):
        def nap(x):
            time.sleep(pause)
            return x

        late = jax.jit(lambda x: jax.pure_callback(nap, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
        update = original(*args)

        def call(*given):
            state, numbers, log_ratio = update(*given)
            return state, numbers, late(log_ratio)

        return call

    monkeypatch.setattr(phases, "make_update", slow)
    train(config(tmp_path))
    for record in steps(tmp_path):
        assert record["phase_seconds"]["updates"] >= pause  # a lower bound, as the callback sleeps so long
        assert record["seconds"] == pytest.approx(sum(record["phase_seconds"].values()))


def test_the_same_command_continues_bitwise(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config(whole, run={"steps": 4}))
    train(config(parts, run={"steps": 2}))
    train(config(parts, run={"steps": 4}))
    assert [without_clock(r) for r in steps(whole)] == [without_clock(r) for r in steps(parts)]
    trees = [_restored(w) for w in (whole, parts)]
    for a, b in zip(*map(jax.tree.leaves, trees)):
        np.testing.assert_array_equal(a, b)


def _restored(workdir):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager((workdir / "checkpoints").absolute()) as manager:
        return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore())


# Calls of the reward: base, steps 1 and 2, evaluation, steps 3 and 4, evaluation, base and adapter at the end.
@pytest.mark.parametrize(("call", "done"), [(4, 2), (8, 4)])
def test_a_signal_during_an_evaluation_stops_the_run_after_it(tmp_path, capsys, call, done):
    calls = []

    def signalled(images, prompts, metadata):
        calls.append(len(images))
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return np.asarray(images, np.float64).mean(axis=(1, 2, 3))

    sections = {
        "prompts": {"per_step": 2, "group_size": 8}, "sampling": {"num_steps": 4, "chunk": None}, "optimizer": {"updates": 1},
        "evaluation": {"every": 2, "num_steps": 4, "images_per_prompt": 1, "final_prompts": 4}, "run": {"steps": 4, "keep_best": False},
    }  # fmt: skip
    run = dataclasses.replace(config(tmp_path, **sections), rewards=("own",))
    train(run, extra_rewards={"own": signalled})
    assert checkpoint.steps(tmp_path)[-1] == done == len(steps(tmp_path))
    assert ("stopped after step 2" if done == 2 else "stopped during the comparison") in capsys.readouterr().out
    train(run, extra_rewards={"own": signalled})
    assert len(steps(tmp_path)) == 4 and (tmp_path / "final.jsonl").read_text().count("\n") == 2


def test_another_config_in_the_same_folder_is_refused(tmp_path):
    train(config(tmp_path, run={"steps": 1}))
    with pytest.raises(ValueError, match=r"objective.clip_range: 0.001 -> 0.01"):
        train(config(tmp_path, objective={"clip_range": 0.01}))
    with pytest.raises(ValueError, match=r"run.seed: 0 -> 1"):
        train(config(tmp_path, run={"seed": 1}))
    assert len(steps(tmp_path)) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_runs(tmp_path, variant):
    settings = VARIANTS[variant](config(tmp_path))
    train(settings)
    record = steps(tmp_path)[-1]
    assert np.isfinite(record["reward"]) and record["masked"] == 0 and record["last_update"]["grad_norm"] > 0
    assert ("gains" in record) == (variant not in ("flow_grpo", "coca"))
    assert record["first_update"]["ratio_min"] == pytest.approx(1.0, abs=1e-6)
    assert settings == config(tmp_path) or variant != "no_guidance"  # the toy has no guidance to leave out; every other variant acts
    assert settings != config(tmp_path) or variant == "no_guidance"


def test_variants_chain_and_name_the_work_folder():
    settings = cli.load_config("toy:cps:guard")
    assert (settings.exploration.sampler, settings.objective.ratio) == ("cps", "guard")
    assert settings.run.workdir == Path("runs/toy-cps-guard")
    with pytest.raises(ValueError, match="no variant 'cpps'; there are: dense_grpo"):
        cli.load_config("toy:cpps")


@pytest.mark.parametrize(
    "sections",
    [
        {"exploration": {"window": "fixed", "window_start": 2, "window_size": 3}},
        {"exploration": {"last_noise": True}},
        {"objective": {"beta": 0.04, "kl_mode": "code"}},
        {"objective": {"recompute_old_log_prob": True}},
        {"completion": {"steps": "2", "solver": "euler", "paired": True}},
        {"completion": {"steps": "1", "solver": "midpoint", "tile": None}},
        {"completion": {"steps": "respaced 2", "solver": "euler"}},
        {"completion": {"steps": "all", "solver": "ab2", "tail": "skip_call"}, "sampling": {"grid": "sd3"}},
        {"sampling": {"chunk": 24, "grid": "sd3", "shift": 2.0}},
        {"adapter": {"rank": 0}},
        {"optimizer": {"minibatch": "trajectories", "updates": 2, "micro_batch": 100, "ema_decay": 0.0}},
        {"credit": {"gamma": 0.5, "over": "joint", "std": "global"}},
        {"prompts": {"per_step": 11, "group_size": 8}},
    ],
    ids=lambda sections: "+".join(f"{k}.{n}={v}" for k, s in sections.items() for n, v in s.items()),
)
def test_every_setting_acts(tmp_path, sections):
    train(config(tmp_path, run={"steps": 1}, **sections))
    record = steps(tmp_path)[-1]
    assert np.isfinite(record["reward"]) and np.isfinite(record["last_update"]["grad_norm"]) and record["last_update"]["grad_norm"] > 0


def test_no_key_is_used_twice_key_reuse(tmp_path):
    train(config(tmp_path, run={"steps": 1}, evaluation={"every": 1}))


def test_recomputed_old_log_probs_make_the_first_ratio_exactly_one(tmp_path):
    train(config(tmp_path, objective={"recompute_old_log_prob": True}))
    for record in steps(tmp_path):
        assert record["first_update"]["ratio_min"] == record["first_update"]["ratio_max"] == 1.0


def test_kl_is_zero_at_the_base_and_grows(tmp_path):
    train(config(tmp_path, objective={"beta": 0.01}))
    first, second = steps(tmp_path)
    assert first["first_update"]["kl"] == 0.0 and second["last_update"]["kl"] > 0.0


def test_nothing_is_compiled_after_the_first_step(tmp_path):
    compiled = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    counts = []
    for n in (1, 4):
        compiled.clear()
        train(config(tmp_path / str(n), run={"steps": n, "save_every": n}))
        counts.append(len(compiled))
    assert counts[0] > 0 and counts[1] <= counts[0]


def test_failed_scores_are_masked_and_counted(tmp_path):
    from densegrpo_jax.scenes import toy

    def sometimes(images, prompts, metadata):
        scores = toy.spot_reward(images, prompts)
        scores[::7] = np.nan
        return scores

    train(config(tmp_path, rewards=("sometimes",)), extra_rewards={"sometimes": sometimes})
    for record in steps(tmp_path):
        assert record["masked"] == -(-96 * 11 // 7)
        assert 0.4 < record["reward"] < 0.9  # failed scores are not zeros in the mean


small = {"run": {"steps": 1}, "prompts": {"per_step": 1}, "optimizer": {"updates": 2}}


def test_host_rewards_score_while_sampling_goes_on_with_the_same_result(tmp_path, monkeypatch):
    from densegrpo_jax import rewards
    from densegrpo_jax.rewards.base import host
    from densegrpo_jax.scenes import toy

    calls = []

    def spot(images, prompts, metadata):
        calls.append(len(images))
        return toy.spot_reward(images, prompts)

    settings = {"rewards": ("spot",), "sampling": {"num_steps": 4, "chunk": 12, "decode_chunk": 30}, **small}
    train(config(tmp_path / "overlapped", **settings), extra_rewards={"spot": host(spot, 2)})
    assert calls == [30] * 4  # two chunks, each 12 x 5 images in two parts
    train(config(tmp_path / "whole", **settings), extra_rewards={"spot": spot})
    monkeypatch.setattr(rewards, "score_parts", functools.partial(rewards.score_parts, overlap=False))
    train(config(tmp_path / "in_turn", **settings), extra_rewards={"spot": host(spot, 2)})
    overlapped, whole, in_turn = (steps(tmp_path / name)[0] for name in ("overlapped", "whole", "in_turn"))
    assert without_clock(overlapped) == without_clock(in_turn)
    assert overlapped["reward"] == pytest.approx(whole["reward"], abs=1e-5)
    assert 0.0 < overlapped["reward_wait"] < 1.0 and 0.0 < overlapped["images"]["brightness"] < 1.0


def test_training_goes_on_with_a_server_that_is_sick_and_takes_no_false_zero(tmp_path, capsys):
    from densegrpo_jax.config import RewardServer
    from tests.rewards.test_http import start

    process, url = start()
    try:
        names, server = ("toy_spot", f"mean@{url}/sick"), RewardServer(timeout=2.0, attempts=1, batch=10, on_failure="mask")
        train(config(tmp_path, rewards=names, reward_server=server, sampling={"num_steps": 4}, **small))
    finally:
        process.kill()
        process.wait()
    (record,) = steps(tmp_path)
    health = record["reward_health"]["mean"]
    assert health["scores"] == 120 and 60 <= health["masked"] < 120 and record["masked"] == health["masked"]
    assert record["rewards"]["mean"] == 0.25  # whatever was scored
    assert record["reward_wait"] * record["seconds"] < 12 * 2.0  # 12 requests, of which one hangs
    assert np.isfinite(record["last_update"]["grad_norm"])
    assert f"reward 'mean': {health['masked']} of 120 images could not be scored" in capsys.readouterr().out


def test_what_is_wrong_with_a_reward_is_named_once_and_counted_at_every_step(tmp_path, capsys):
    train(config(tmp_path, rewards=("flat",)), extra_rewards={"flat": lambda images, prompts, metadata: np.full(len(images), 0.5)})
    assert [r["reward_health"]["flat"]["constant"] for r in steps(tmp_path)] == [1, 1]
    assert capsys.readouterr().out.count("reward 'flat': all 1056 of 1056 scores are equal") == 1


def test_normalised_rewards_do_not_count_for_their_units(tmp_path):
    def corner(images, prompts, metadata):
        return np.asarray(images, np.float64)[:, 0, 0, 0]

    records = {}
    settings = {"rewards": ("toy_spot", "corner=-1"), "credit": {"reward_normalization": "group"}, **small}
    for scale in (1.0, 100.0):
        workdir, rewards = tmp_path / str(scale), {"corner": lambda *args, s=scale: s * corner(*args)}
        train(config(workdir, **settings), extra_rewards=rewards)
        records[scale] = steps(workdir)[0]
    assert records[1.0]["advantage_abs"] == pytest.approx(records[100.0]["advantage_abs"], abs=1e-6)
    assert records[1.0]["reward"] != records[100.0]["reward"]  # what is shown stays in the rewards' own units


def test_a_reward_of_the_wrong_length_is_named(tmp_path):
    with pytest.raises(ValueError, match="reward 'short' returned scores of shape"):
        train(config(tmp_path, rewards=("short",)), extra_rewards={"short": lambda images, prompts, metadata: np.zeros(3)})


def test_own_credit_plugs_in(tmp_path):
    def last_half(rewards, groups):
        gains = np.diff(rewards, axis=0)
        gains[: len(gains) // 2] = 0.0
        return gains

    train(config(tmp_path), credit_method=last_half)
    advantage = steps(tmp_path)[-1]["advantage_abs"]
    assert not any(advantage[:5]) and all(advantage[5:])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], None),
        (["nowhere"], "no config 'nowhere'"),
        (["toy", "--optimizer.updates", "7"], "choose one of"),
        (["toy", "--prompts.group-size", "1"], "must be from 2 to"),
        (["toy", "--rewards", "nothing"], "unknown reward 'nothing'"),
        (["toy", "--rewards", "toy_spot=much"], "no finite weight"),
        (["toy", "--prompts.train", "nowhere.txt"], "no such file"),
        (["toy", "--sampling.guidance-scale", "3"], "no unconditional branch"),
        (["toy", "--sampling.shift", "2"], "has no effect"),
        (["toy", "--exploration.noise-level", "0"], "no step is both in the window and noisy"),
        (["toy", "--exploration.window", "fixed", "--exploration.window-start", "9"], "does not fit"),
        (["toy", "--completion.steps", "half"], "choose 'all'"),
        (["toy", "--completion.tail", "skip_node"], "re-spaced completions do not use them"),
        (["toy", "--sampling.chunk", "7"], "does not divide"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(tmp_path, capsys, arguments, reason):
    if arguments and arguments[0] == "toy":
        arguments = [*arguments, "--run.workdir", str(tmp_path / "run")]
    code = cli.main(["train", *arguments])
    said = capsys.readouterr()
    if reason is None:
        assert code == 0 and "toy" in said.out
    else:
        assert code == 2 and reason in said.err and "Traceback" not in said.err
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_prompt_file_with_bad_bytes_is_refused_with_its_line(tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"a spot at the centre\n\xff\xfe\n")
    assert cli.main(["train", "toy", "--prompts.train", str(path), "--run.workdir", str(tmp_path / "run")]) == 2
    assert "line 2" in capsys.readouterr().err


def test_report_escapes_what_users_write(tmp_path):
    train(config(tmp_path, run={"steps": 1}, evaluation={"every": 1}))
    prompts = tmp_path / "samples" / "prompts.json"
    texts = json.loads(prompts.read_text())
    prompts.write_text(json.dumps(["<script>alert(1)</script>", *texts[1:]]))
    assert "<script>" not in report.write(tmp_path).read_text()


def test_a_full_disk_is_named_and_costs_no_checkpoint(tmp_path):
    limit, calls = resource.getrlimit(resource.RLIMIT_FSIZE), []

    def spread(images, prompts, metadata):
        calls.append(len(images))
        if len(calls) == 2:  # during the second step files stop growing at what metrics need and a checkpoint exceeds
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limit[1]))
        return np.asarray(images).std(axis=(1, 2, 3))

    settings = config(tmp_path, rewards=("spread",), run={"steps": 3})
    try:
        with pytest.raises(OSError, match=r"checkpoint of step 2 .*File too large.* that of step 1 stands"):
            train(settings, extra_rewards={"spread": spread})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    train(settings, extra_rewards={"spread": spread})
    assert [r["step"] for r in steps(tmp_path)] == [0, 1, 2]


def test_a_constant_reward_teaches_nothing_and_is_named(tmp_path, capsys):
    train(config(tmp_path, rewards=("flat",)), extra_rewards={"flat": lambda images, prompts, metadata: np.ones(len(images))})
    assert "reward 'flat': all" in capsys.readouterr().out
    for record in steps(tmp_path):
        assert record["equal_groups"] == 1.0 and record["last_update"]["grad_norm"] == 0.0

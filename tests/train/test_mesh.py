"""Runs on eight devices give what one device gives."""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from densegrpo_jax import cli, parallel, pipeline, policy
from densegrpo_jax.config import Parallel
from densegrpo_jax.plan import aot, collectives, recipe, search
from densegrpo_jax.plan.chips import topology
from densegrpo_jax.rewards.base import host
from densegrpo_jax.train import checkpoint, loop, metrics, phases, profile
from densegrpo_jax_configs.variants import change

pytestmark = [pytest.mark.mesh, pytest.mark.usefixtures("plain_dispatch")]

SMALL = {
    "prompts": {"per_step": 2, "group_size": 8},
    "sampling": {"num_steps": 4, "chunk": 8},
    "optimizer": {"updates": 2, "micro_batch": 16, "eps": 1e-4},  # so large that Adam does not divide rounding by rounding
    "evaluation": {"every": 2, "num_steps": 4, "images_per_prompt": 1},
    "run": {"steps": 3, "save_every": 1, "report_every": 0, "compilation_cache": False},
}
CLOCK = ("seconds", "phase_seconds", "images_per_second", "reward_health", "reward_wait", "speed")


def config(workdir, settings: Parallel, name="toy", **sections):
    changes = {key: SMALL.get(key, {}) | sections.get(key, {}) for key in SMALL | sections}
    changes["run"] = changes["run"] | {"workdir": workdir}
    return dataclasses.replace(change(cli.load_config(name), **changes), parallel=settings)


def numbers(value) -> dict[str, np.ndarray]:
    """Arrays of a record by path."""
    return {jax.tree_util.keystr(path): np.array(leaf, float) for path, leaf in jax.tree.leaves_with_path(value) if leaf is not None}


def told(record):
    """What a record says: without the clock, and without gains of steps that are not trained, whose signs are those of rounding."""

    def of_trained(value):
        return {k: of_trained(v) for k, v in value.items()} if isinstance(value, dict) else [value[t] for t in record["trained"]]

    gains = {"gains": of_trained(record["gains"])} if "gains" in record else {}
    return {k: v for k, v in record.items() if k not in (*CLOCK, "kind")} | gains


def same(one, other, rtol=1e-5, atol=0.0):
    """Metrics, evaluations and all that is saved, to rounding."""
    for file in ("metrics.jsonl", "evaluation.jsonl"):
        for a, b in zip(metrics.read(one / file), metrics.read(other / file), strict=True):
            left, right = numbers(told(a)), numbers(told(b))
            assert left.keys() == right.keys()
            for name in left:
                least = max(2e-5, rtol / 5) if "images" in name else rtol / 5  # a pixel may be rounded the other way
                np.testing.assert_allclose(right[name], left[name], rtol=rtol, atol=least, err_msg=name)
    close(one, other, rtol, atol)


def close(one, other, rtol=1e-5, atol=0.0):
    """All that the last checkpoint holds, to rounding: to a share of an array's largest value; `atol` is for weights alone."""
    done = checkpoint.steps(one)[-1]
    trees = [checkpoint._read(checkpoint.folder_of(w) / str(done)) for w in (one, other)]
    for (path, a), b in zip(jax.tree.leaves_with_path(trees[0]), jax.tree.leaves(trees[1]), strict=True):
        scale, least = np.abs(a).max() + 1e-12, 0.0 if path[0].key == "opt_state" else atol
        assert np.abs(np.asarray(a, np.float64) - b).max() <= max(rtol * scale, least), jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone")
    loop.train(config(workdir, Parallel(devices=1)))
    return workdir


@pytest.mark.parametrize("settings", [Parallel(), *(Parallel(fsdp=n) for n in (2, 4, 8)), Parallel(devices=4, fsdp=4)])
def test_meshes_agree_with_one_device(tmp_path, alone, settings):
    loop.train(config(tmp_path, settings))
    same(alone, tmp_path)


def test_noise_is_bitwise_the_same_and_lies_with_its_trajectory(tmp_path):
    found = []
    for settings in (Parallel(devices=1), Parallel(fsdp=2)):
        run = config(tmp_path, settings)
        mesh = parallel.make(settings)
        with jax.set_mesh(mesh) if mesh else jax.default_device(None):
            model = policy.load(run, mesh)
            tables = phases.sampler(run, policy.sigmas(run, model, 4), 1.0, 0)
            ids = parallel.over_rows(mesh, np.arange(16))
            cond = parallel.everywhere(mesh, model.encode(["a spot at the top left"] * 2))
            sample = phases.make_sample(run, model, tables)
            trajectory, clean = sample(model.params, None, cond, None, np.int32(3), ids, ids)
        found.append(trajectory)
        if mesh:
            for x in (trajectory.latents, trajectory.velocity, trajectory.noise, clean):
                assert {shard.data.shape[1] for shard in x.addressable_shards} == {2}  # 16 trajectories on 8 devices
    np.testing.assert_array_equal(found[0].noise, found[1].noise)
    np.testing.assert_array_equal(found[0].latents[0], found[1].latents[0])
    np.testing.assert_allclose(found[0].latents, found[1].latents, atol=1e-5)


def test_nothing_is_compiled_after_the_second_step_and_the_old_state_is_given_up(tmp_path, monkeypatch):
    compiled, seen, states = [], [], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if event == "/jax/core/compile/backend_compile_duration" else None
    )
    original = phases.make_update

    def watched(*args):
        update = original(*args)

        def call(state, *rest):
            states.append(state)
            return update(state, *rest)

        return call

    monkeypatch.setattr(phases, "make_update", watched)

    def spread(images, prompts, metadata):
        seen.append(len(compiled))
        return np.asarray(images, np.float64).std(axis=(1, 2, 3))

    run = config(
        tmp_path,
        Parallel(fsdp=2),
        evaluation={"every": 0},
        run={"steps": 4, "save_every": 100, "profile": 1},
        sampling={"decode_chunk": 20},
    )
    loop.train(dataclasses.replace(run, rewards=("own",)), extra_rewards={"own": host(spread)})  # in pieces, and parts of them
    assert len(seen) > 2 * 4 and len(set(seen[len(seen) // 2 :])) == 1
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    for record in metrics.read(tmp_path / "metrics.jsonl"):
        assert sum(record["phase_seconds"].values()) == pytest.approx(record["seconds"])
        assert ("phases" in record["speed"]) == (record["step"] == 1)  # where each is waited for, and which is traced
    assert all(leaf.is_deleted() for state in states for leaf in jax.tree.leaves(state.trained))


def test_each_phase_is_compiled_once_and_evaluation_adds_its_own_sizes(tmp_path):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **of: compiled.append(of["fun_name"]) if event == "/jax/core/compile/backend_compile_duration" else None
    )
    sections = {
        "model": {"scan_unroll": 1},
        "sampling": {"num_steps": 3, "chunk": 8},
        "prompts": {"per_step": 1, "group_size": 8},
        "objective": {"recompute_old_log_prob": True, "beta": 0.01},
        "evaluation": {"every": 2, "num_steps": 3, "images_per_prompt": 1, "prompts": 16, "final_prompts": 0},
        "run": {"steps": 4},
    }
    loop.train(config(tmp_path, Parallel(fsdp=2), "scenes_preference", **sections))
    count = {name: compiled.count(f"jit({name})") for name in ("_encode", "sample", "recompute", "update")}
    assert count == dict.fromkeys(count, 1), count
    both = {name: compiled.count(f"jit({name})") for name in ("decode", "_score_chunks", "generate")}  # of base and adapter the last
    assert both == dict.fromkeys(both, 2), both
    record = metrics.read(tmp_path / "metrics.jsonl")[1]
    assert set(record["speed"]["phases"]) == {"encode", "sample", "decode", "reward", "recompute", "update"}
    assert all(took > 0 for took in record["speed"]["phases"].values())


def test_trajectories_are_held_once_and_not_while_the_next_are_sampled(tmp_path, monkeypatch):
    held = {"sample": [], "recompute": [], "update": []}

    def watched(name):
        original = getattr(phases, f"make_{name}")

        def make(*args):
            program = original(*args)

            def call(*given):
                held[name].append(sum(x.nbytes for x in jax.live_arrays() if x.ndim == 5))
                return program(*given)

            return call

        monkeypatch.setattr(phases, f"make_{name}", make)

    for name in held:
        watched(name)
    run = config(tmp_path, Parallel(devices=1), evaluation={"every": 0}, objective={"recompute_old_log_prob": True})
    loop.train(run)
    T, L, latent = run.sampling.num_steps, 5, 4 * 8 * 8  # three trained steps have levels on both sides, four; and the end
    step = 16 * latent * (3 * T + 1 + L)
    assert held == {"sample": [0] * 3, "recompute": [step] * 3, "update": [step] * 6}


def test_the_memory_of_a_step_is_that_of_its_largest_phase(tmp_path, monkeypatch):
    """Pictures are gone before recomputing, trajectories before the next sampling."""
    began, made, original = {}, {}, profile.Watch.phase

    def phase(self, name, function):
        def called(*args):
            began.setdefault(name, []).append(sum(x.nbytes for x in jax.live_arrays()))
            result = jax.block_until_ready(function(*args))
            made[name] = sum(x.nbytes for x in jax.tree.leaves(result) if isinstance(x, jax.Array))
            return result

        return original(self, name, called)

    monkeypatch.setattr(profile.Watch, "phase", phase)
    sections = {
        "model": {"scan_unroll": 1},
        "prompts": {"per_step": 2, "group_size": 8},
        "sampling": {"num_steps": 4, "chunk": 16, "decode_chunk": 16},
        "objective": {"recompute_old_log_prob": True},
        "evaluation": {"every": 0, "final_prompts": 0},
        "run": {"save_every": 100},  # a save looks at each device's part of an array, which is counted beside the array then
    }
    loop.train(config(tmp_path, Parallel(devices=1), "scenes_preference", **sections))
    base, trajectories = began["sample"][2], made["sample"]
    found = {name: (began[name][-1] - base) / trajectories for name in began}
    assert abs(began["sample"][1] - base) < 0.02 * trajectories and abs(found["encode"]) < 0.05  # nothing is left of the last step
    assert 1 < found["reward"] < 1.3 and made["decode"] > 0.2 * trajectories  # trajectories, and the pictures
    assert all(abs(found[name] - 1) < 0.05 for name in ("recompute", "update")), found  # trajectories alone
    adds = [made[name] for name in ("sample", "decode", "recompute")]
    peak = max(began[name][-1] - base + made[name] for name in ("sample", "decode", "reward", "recompute"))
    assert peak < 0.95 * sum(adds)


def test_phases_do_not_talk_to_the_host():
    run = config(Path("unused"), Parallel(), "scenes_preference", model={"dtype": "bfloat16"})
    made = recipe.read(run)
    made = made._replace(configs=aot.with_layers(made.configs, 2))
    mesh, settings = parallel.make(Parallel()), search.configured(made, topology("v6e:2x4"), 1)._replace(attention="xla")
    for name in aot.programs(made):
        for program, arguments in aot.build(name, made, settings, mesh):
            with parallel.within(mesh):
                text = program.lower(*arguments).as_text()
            assert "stablehlo" in text and not re.search("callback|infeed|outfeed|stablehlo.send|stablehlo.recv", text), name


def test_all_weights_are_shared_where_all_are_trained(tmp_path, monkeypatch):
    placed, original = [], phases.make_update
    monkeypatch.setattr(phases, "make_update", lambda config, policy, state=None: placed.append(state) or original(config, policy, state))
    for name, settings in (("one", Parallel(devices=1)), ("mesh", Parallel(fsdp=4))):
        loop.train(config(tmp_path / name, settings, adapter={"rank": 0}, evaluation={"every": 0}, run={"steps": 1}))
    close(tmp_path / "one", tmp_path / "mesh")
    kernels = [leaf for leaf in jax.tree.leaves(placed[1]) if leaf.ndim == 2 and max(leaf.shape) % 4 == 0]
    assert len(kernels) > 4  # of weights, moments and average
    assert all(4 * np.prod(leaf.sharding.shard_shape(leaf.shape)) == leaf.size for leaf in kernels)


def test_devices_along_tensor_share_the_products_of_each_trajectory(tmp_path):
    found, work = [], []
    for settings in (Parallel(devices=1), Parallel(devices=4, tensor=4)):
        run = config(tmp_path, settings, "scenes_preference")
        mesh = parallel.make(settings)
        with jax.set_mesh(mesh) if mesh else jax.default_device(None):
            model = policy.load(run, mesh)
            x = np.random.default_rng(0).normal(size=(2, *model.shape)).astype(np.float32)
            inputs = parallel.over_rows(mesh, (x, np.full(2, 0.5, np.float32), model.encode(["a red circle"] * 2)))
            program = jax.jit(lambda params, x, sigma, cond, of=model: of.velocity(params, None, None)(x, sigma, cond))
            found.append(np.asarray(program(model.params, *inputs)))
            work.append(program.lower(model.params, *inputs).compile().cost_analysis()["flops"])
    np.testing.assert_allclose(found[1], found[0], atol=2e-5)
    assert work[1] < 0.3 * work[0]  # a quarter, and what all of them do


def test_what_devices_that_share_weights_receive_does_not_grow_with_their_trajectories(tmp_path):
    """They gather weights, forward and backward, and never each other's tokens."""
    settings, received = Parallel(devices=4, fsdp=4), []
    run = config(tmp_path, settings, "scenes_preference")
    mesh = parallel.make(settings)
    with parallel.within(mesh):
        model = policy.load(run, mesh)
        trained = parallel.everywhere(mesh, model.start())
        program = jax.jit(
            jax.grad(lambda trained, params, x, sigma, cond: (model.velocity(params, trained, None)(x, sigma, cond) ** 2).mean())
        )
        for rows in (16, 64):
            x, cond = np.zeros((rows, *model.shape), np.float32), model.encode(["a red circle"] * rows)
            inputs = parallel.over_rows(mesh, (x, np.full(rows, 0.5, np.float32), cond))
            found = collectives.received(program.lower(trained, model.params, *inputs).compile().as_text())
            received.append(sum(size for _, size in found.values()))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params["network"]))
    assert received[1] < 1.2 * received[0] and received[1] < 3 * weights, (received, weights)


def test_a_run_goes_on_with_other_devices_and_in_other_pieces(tmp_path, alone):
    pieces = {"sampling": {"chunk": 16}, "optimizer": {"micro_batch": 8, "remat": True}, "model": {"attention": "xla"}}
    for steps, settings, sections in ((1, Parallel(fsdp=2), {}), (3, Parallel(devices=1), pieces)):
        loop.train(config(tmp_path, settings, run={"steps": steps}, evaluation={"every": 0}, **sections))
    assert [r["step"] for r in metrics.read(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    close(alone, tmp_path)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"prompts": {"group_size": 6, "per_step": 2}}, "gives 12 trajectories, which 8 devices do not share evenly"),
        ({"sampling": {"chunk": 4}}, r"sampling.chunk = 4 .* parts that 8 devices share evenly; choose one of \[8, 16\]"),
        ({"optimizer": {"updates": 4}}, "leaves 12 pairs an update, which 8 devices do not share evenly; choose one of"),
    ],
)
def test_what_the_devices_cannot_share_is_refused(tmp_path, sections, reason):
    with pytest.raises(ValueError, match=reason):
        loop.train(config(tmp_path, Parallel(), **sections))


@pytest.mark.parametrize(
    "shared", [Parallel(fsdp=2, tensor=2), *(pytest.param(p, marks=pytest.mark.slow) for p in (Parallel(fsdp=4), Parallel(tensor=4)))]
)
def test_a_model_folder_with_guidance_shared_weights_and_a_scorer_on_the_devices(tmp_path, shared):
    sections = {
        "model": {"scan_unroll": 1},
        "sampling": {"num_steps": 3, "chunk": 8, "guidance_scale": 2.0},
        "prompts": {"per_step": 1, "group_size": 8},
        "evaluation": {"every": 0, "final_prompts": 0},
        "run": {"steps": 1},
    }
    for name, settings in (("one", Parallel(devices=1, encoders="host")), ("mesh", shared)):
        loop.train(config(tmp_path / name, settings, "scenes_preference", **sections))
    same(tmp_path / "one", tmp_path / "mesh", rtol=5e-4)  # gradients through a network in float32, whose products are cut up differently


def test_copies_of_the_text_encoders_share_the_prompts_and_those_that_wait_on_the_host_come_in_shares_and_go(monkeypatch):
    calls = []

    def seen(configs, dtype, length, params, ids):
        widest = max(jax.tree.leaves(params), key=lambda leaf: leaf.size)
        share = np.prod(widest.sharding.shard_shape(widest.shape)) / widest.size
        flops = original.lower(configs, dtype, length, params, ids).compile().cost_analysis()["flops"]
        calls.append((share, len(ids["text_encoder"]), flops))
        return original(configs, dtype, length, params, ids)

    original = pipeline._encode
    monkeypatch.setattr(pipeline, "_encode", seen)
    encoded = {}
    for name, settings in {"one": Parallel(devices=1), "host": Parallel(fsdp=4, encoders="host"), "device": Parallel(fsdp=4)}.items():
        mesh = parallel.make(settings)
        with parallel.within(mesh):
            made = policy.load(config("unused", settings, "scenes_preference"), mesh)
            before = sum(leaf.nbytes for leaf in jax.live_arrays())
            encoded[name] = jax.tree.map(np.asarray, made.encode(["a red cube", "two blue balls"]))
            assert sum(leaf.nbytes for leaf in jax.live_arrays()) - before < 1e5, name  # nothing but what was encoded stays
    one, host, device = calls
    assert one[0] == 1 and host[0] == device[0] == 1 / 4 and {call[1] for call in calls} == {8}
    assert host[2] < one[2] / 4  # of each device; two copies share the prompts, and four devices the products of each
    for name in ("host", "device"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), encoded["one"], encoded[name])

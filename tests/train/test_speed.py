"""What a run says of its speed."""

import jax
import numpy as np
import pytest

from densegrpo_jax import cli, policy
from densegrpo_jax.plan import recipe, roofline
from densegrpo_jax.plan.chips import CHIPS, of_device, topology
from densegrpo_jax.plan.roofline import Settings
from densegrpo_jax.train import metrics, phases, speed
from densegrpo_jax_configs.variants import change


def test_devices_are_known_by_what_jax_calls_them():
    named = {
        "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU v6e": "v6e",
        "NVIDIA A100-SXM4-40GB": "a100-40", "NVIDIA A100-SXM4-80GB": "a100-80", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200",
    }  # fmt: skip
    assert {kind: of_device(kind).name for kind in named} == named
    assert set(named.values()) == set(CHIPS)
    assert [of_device(kind) for kind in ("cpu", "TPU v2", "NVIDIA H100 PCIe", "NVIDIA L4")] == [None] * 4


def test_useful_work_does_not_depend_on_chips_and_settings():
    found = recipe.read(cli.load_config("sd35_medium_pickscore"))
    lean = Settings(4, 16, 16, 16, True, "splash", "host")
    there = sum(phase.useful for phase in roofline.phases(found, lean, topology("v5e:4x4")) if phase.name != "evaluation")
    assert roofline.useful(found) == pytest.approx(there, rel=1e-12)
    passes = 2 * found.trajectories * found.price.evaluations  # guided
    assert roofline.useful(found) > passes * found.network.flops


def test_speed_is_per_device_and_second(monkeypatch):
    config = change(cli.load_config("scenes_preference"), model={"dtype": "bfloat16"})
    tables = phases.sampler(config, policy.sigmas(config, _grid(), config.sampling.num_steps), 1.0, 0)
    monkeypatch.setattr(speed.chips, "of_device", lambda kind: CHIPS["v5e"])
    done = speed.meter(config, devices=4)(tables)
    batch = config.prompts.per_step * config.prompts.group_size
    assert done.images == batch * (len(tables.scheme) + 1) and done.peak == 4 * CHIPS["v5e"].peak
    found = speed.speed(done, seconds=2.0, compiling=0.5)
    assert found["images"] == done.images / 8 and found["compile_seconds"] == 0.5
    assert found["mfu"] == pytest.approx(found["tflops"] * 1e12 / CHIPS["v5e"].peak)
    assert speed.meter(change(config, model={"dtype": "float32"}), 1)(tables).peak == CHIPS["v5e"].peak_float32


def test_each_step_s_own_window_is_counted():
    config = change(cli.load_config("scenes_preference"), exploration={"window": "sliding", "window_size": 4})
    work, found = speed.meter(config, 1), []
    for step in (0, 150):  # the window stands at the first steps, then at the last
        tables = phases.sampler(config, policy.sigmas(config, _grid(), config.sampling.num_steps), 1.0, step)
        found.append(work(tables))
        assert found[-1].images == 24 * config.prompts.per_step * (len(tables.scheme) + 1)
    assert found[0].evaluations > found[1].evaluations and found[0].flops > found[1].flops


def _grid():
    return policy.Policy({}, None, None, None, None, (16, 16, 4), lambda n: np.linspace(1, 0, n + 1), 1.0, None, "")


def test_what_is_not_known_is_null_and_compilation_is_seen():
    config = cli.load_config("toy")
    tables = phases.sampler(config, policy.sigmas(config, _grid(), config.sampling.num_steps), 1.0, 0)
    before = speed.compiled()
    jax.jit(lambda x: x * 3.25 + 1)(np.ones(7, np.float32))
    found = speed.speed(speed.meter(config, 1)(tables), 1.0, speed.compiled() - before)
    assert [found[name] for name in ("tflops", "mfu", "peak_gib")] == [None] * 3 and found["compile_seconds"] > 0
    record = {"step": 0, "reward": 0.0, "clip": 0.0, "images_per_second": 1.0, "speed": found}
    assert "MFU" not in metrics.line(record, 1)
    assert "MFU 41%" in metrics.line(record | {"speed": found | {"mfu": 0.412}}, 1)

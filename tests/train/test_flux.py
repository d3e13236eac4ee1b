"""The trainer on a FLUX folder: it does not know which model it trains. The folder is the tiny FLUX's with random weights."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

import densegrpo_jax_configs.flux_scenes as flux_scenes
from densegrpo_jax import cli, policy, scenes
from densegrpo_jax.config import Evaluation, Exploration, Optimizer, Prompts, Run
from densegrpo_jax.models import lora
from densegrpo_jax.pipeline import abstract_params
from densegrpo_jax.scenes import export, tiny_flux
from densegrpo_jax.train import checkpoint, metrics
from densegrpo_jax.train.loop import train
from tests.models.compare import drawn

pytestmark = pytest.mark.usefixtures("plain_dispatch")


def write(folder, **changes):
    """A random FLUX of one block of each kind."""
    pipe = tiny_flux.frozen(Path(scenes.__file__).parent / "tiny_sd3")
    config = dataclasses.replace(tiny_flux.FLUX, num_layers=1, num_single_layers=1, **changes)
    configs = pipe.configs._replace(transformer=config, shift=tiny_flux.SHIFT if config.guidance_embeds else 1.0)
    export.write_folder(folder, configs, {**pipe.params, "transformer": drawn(abstract_params(configs, "transformer"), std=0.08)})
    return folder


def small(folder, workdir, **changes):
    base = flux_scenes.get_config()
    base = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, path=str(folder), scan_unroll=1),
        prompts=dataclasses.replace(base.prompts, per_step=1, group_size=4),
        sampling=dataclasses.replace(base.sampling, num_steps=3, chunk=None),
        optimizer=Optimizer(updates=2, micro_batch=4, learning_rate=1e-3),
        evaluation=Evaluation(every=2, num_steps=2, images_per_prompt=1, prompts=2),
        run=Run(steps=2, workdir=workdir, save_every=2, report_every=2),
    )
    return dataclasses.replace(base, **changes)


def test_two_steps_through_all_phases(tmp_path):
    folder, workdir = write(tmp_path / "flux"), tmp_path / "run"
    train(small(folder, workdir))
    first, second = metrics.read(workdir / "metrics.jsonl")
    assert first["first_update"]["ratio_min"] == pytest.approx(1.0, abs=1e-5) == first["first_update"]["ratio_max"]
    assert second["last_update"]["grad_norm"] > 0.0
    adapter, _ = checkpoint.trained_adapter(workdir)
    assert lora.count_modules(adapter.lora) == 12 + 3
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(adapter.lora))
    assert cli.main(["export", str(workdir), "--out", str(tmp_path / "merged"), "--format", "merged"]) == 0
    assert policy.load(small(tmp_path / "merged", workdir)).name.startswith("FluxPipeline")


def test_the_schedule_and_the_guidance_are_the_models(tmp_path):
    config = small(write(tmp_path / "flux"), tmp_path / "run")
    loaded = policy.load(config)
    assert loaded.shape == (8, 8, 16)
    np.testing.assert_allclose(loaded.shift, np.exp(0.5 + (1.15 - 0.5) / (4096 - 256) * (16 - 256)))  # 16 tokens
    cond = loaded.encode(["a red circle", ""])
    x = jax.random.normal(jax.random.key(0), (1, *loaded.shape))
    first = jax.tree.map(lambda leaf: leaf[:1], cond)
    sigma = np.full(1, 0.5, np.float32)
    v = loaded.velocity(loaded.params, None, cond)(x, sigma, first)  # an unconditional branch is offered and not taken
    np.testing.assert_array_equal(v, loaded.velocity(loaded.params, None, None)(x, sigma, first))
    other = dataclasses.replace(config, sampling=dataclasses.replace(config.sampling, guidance_scale=1.0))
    assert np.abs(policy.load(other).velocity(loaded.params, None, None)(x, sigma, first) - v).max() > 1e-3


def test_a_network_distilled_without_guidance_is_refused_what_it_cannot_do(tmp_path):
    folder = write(tmp_path / "schnell", guidance_embeds=False)
    config = small(folder, tmp_path / "run")
    with pytest.raises(ValueError, match="guidance scale 3: this FLUX has no input for it"):
        policy.load(config)
    config = dataclasses.replace(config, sampling=dataclasses.replace(config.sampling, guidance_scale=1.0))
    with pytest.raises(ValueError, match=r"'flow_sde' reads a score .* choose one of cps, ddim_sde"):
        policy.load(config)
    loaded = policy.load(dataclasses.replace(config, exploration=Exploration(sampler="cps")))
    np.testing.assert_allclose(loaded.grid(4), [1.0, 0.75, 0.5, 0.25, 0.0])


def test_resolutions_are_checked(tmp_path):
    config = small(write(tmp_path / "flux"), tmp_path / "run")
    wrong = dataclasses.replace(config, model=dataclasses.replace(config.model, resolution=(36, 32)), prompts=Prompts())
    with pytest.raises(ValueError, match="height = 36: the model takes multiples of 8; nearest: 32 and 40"):
        policy.load(wrong)

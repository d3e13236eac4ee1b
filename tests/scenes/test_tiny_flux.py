"""The tiny FLUX: what its training asks of the network, and its folder, read by us and by diffusers with the same result."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from densegrpo_jax import flow, pipeline, scenes
from densegrpo_jax.families import Conditioning
from densegrpo_jax.models import flux
from densegrpo_jax.scenes import export, pretrain, tiny_flux, tokenizers, world
from tests.models.compare import drawn

PROMPTS = ["a red circle to the left of a blue star", 'a sign that reads "TEA"']
SHIPPED = Path(scenes.__file__).parent / "tiny_sd3"


@pytest.fixture(scope="module")
def random_pipe():
    """The shipped autoencoder and text encoders with a transformer that is random everywhere."""
    pipe = tiny_flux.frozen(SHIPPED)
    shapes = jax.eval_shape(tiny_flux.init, jax.random.key(0))
    return dataclasses.replace(pipe, params={**pipe.params, "transformer": drawn(shapes, std=0.08)})


@pytest.fixture(scope="module")
def folder(random_pipe, tmp_path_factory):
    path = tmp_path_factory.mktemp("random") / "tiny_flux"
    export.write_folder(path, random_pipe.configs, random_pipe.params)
    return path


def test_the_folder_holds_what_was_written(random_pipe, folder):
    pipe = pipeline.load(folder, jnp.float32)
    assert pipe.configs == random_pipe.configs
    assert pipe.params.keys() == random_pipe.params.keys()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.float16(a), np.float16(b)), pipe.params, random_pipe.params)
    ours, theirs = (pipeline.encode_prompts(p, PROMPTS, tokenizers.MAX_LENGTH) for p in (pipe, random_pipe))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parity
def test_diffusers_draws_the_same_pictures(folder):
    torch = pytest.importorskip("torch")
    from diffusers import FluxPipeline

    pipe = pipeline.load(folder, jnp.float32)
    cond = pipeline.encode_prompts(pipe, PROMPTS, tokenizers.MAX_LENGTH)
    shape = pipeline.latent_shape(pipe.configs, world.SIZE, world.SIZE)
    noise = flow.initial_noise(jax.random.key(0), 0, jnp.arange(2), shape)
    ours = tiny_flux._draw(pipe.configs, pipe.params["transformer"], pipe.params["vae"], noise, cond)
    reference = FluxPipeline.from_pretrained(folder, dtype=torch.float32)
    reference.set_progress_bar_config(disable=True)
    latents = torch.from_numpy(np.array(noise)).permute(0, 3, 1, 2)
    theirs = reference(
        PROMPTS,
        height=world.SIZE,
        width=world.SIZE,
        num_inference_steps=tiny_flux.STEPS,
        guidance_scale=tiny_flux.GUIDANCE,
        latents=reference._pack_latents(latents, *latents.shape),
        max_sequence_length=tokenizers.MAX_LENGTH,
        output_type="np",
    ).images
    assert theirs.std() > 0.02
    np.testing.assert_allclose(ours, theirs, atol=2e-3, rtol=0)


def test_the_loss_asks_for_the_flow_at_scale_one_and_for_guided_velocities_above(random_pipe, monkeypatch):
    """A stand-in predicts 3 where the text is there, 1 where it is empty, and its scale besides: all it can be asked for is known."""

    class Predicts:
        def __init__(self, config, **options):
            pass

        def apply(self, variables, x, t, context, pooled, guidance):
            text = jnp.where(pooled.mean(-1) > 0, 3.0, 1.0) * (guidance == 1)
            return (variables["params"] * guidance + text)[:, None, None, None] + jnp.zeros_like(x)

    monkeypatch.setattr(flux, "FluxTransformer", Predicts)
    batch = {"latents": jnp.zeros((2, 8, 8, 16)), "context": jnp.ones((2, 3, 4)), "pooled": jnp.ones((2, 4))}
    empty = Conditioning(jnp.zeros((1, 3, 4)), jnp.zeros((1, 4)))
    seen = set()
    for seed in range(8):
        _, noise_key, scale_key = jax.random.split(jax.random.key(seed), 3)
        noise = jax.random.normal(noise_key, (2, 8, 8, 16))
        scale = 1 + 4 * jnp.maximum(jax.random.uniform(scale_key, (2,), minval=-1.0), 0.0)
        predicted = 0.5 * scale + 3.0 * (scale == 1)
        expected = jnp.square((predicted - 2.0 * (scale - 1))[:, None, None, None] - noise).mean()
        np.testing.assert_allclose(tiny_flux.loss(0.5, jax.random.key(seed), batch, empty)[0], expected, rtol=1e-5)
        seen |= set(np.asarray(scale == 1).tolist())
    assert seen == {True, False}


def test_the_stage_trains_and_writes_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_flux, "POOL", 128)
    monkeypatch.setattr(tiny_flux, "STEPS", 2)
    monkeypatch.setattr(tiny_flux, "FLUX", dataclasses.replace(tiny_flux.FLUX, num_layers=1, num_single_layers=1))
    pretrain.main(pretrain.Settings(tmp_path, stages=("flux",), flux_steps=2, save_every=2))
    written = pipeline.load(tmp_path / "tiny_flux", jnp.float32)
    assert written.configs.transformer.num_single_layers == 1
    assert np.abs(written.params["transformer"]["proj_out"]["kernel"]).max() > 0  # it starts at zero
    assert (tmp_path / "flux.png").exists()

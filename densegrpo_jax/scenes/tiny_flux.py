"""The tiny FLUX: FLUX.1-dev's architecture at a small size, trained on the tiny SD3's autoencoder and text encoders, which stay frozen.

It does not ship. `python -m densegrpo_jax.scenes.pretrain --workdir DIR --stages flux` trains it and writes the folder DIR/tiny_flux.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax import flow, pipeline
from densegrpo_jax.families import Conditioning, Configs, DynamicShift
from densegrpo_jax.models import flux, vae
from densegrpo_jax.pipeline import Pipeline
from densegrpo_jax.scenes import tiny_model, world
from densegrpo_jax.scenes.training import Run, fit, pooled_batches

FLUX = flux.FluxConfig(
    in_channels=tiny_model.VAE.latent_channels * flux.PACK**2,
    num_layers=2,
    num_single_layers=4,
    attention_head_dim=32,
    num_attention_heads=4,
    joint_attention_dim=tiny_model.T5.d_model,
    pooled_projection_dim=tiny_model.TEXT.hidden_size,
    guidance_embeds=True,
    axes_dims_rope=(8, 12, 12),
)
SHIFT = DynamicShift((256, 0.5), (4096, 1.15))  # as FLUX.1-dev's
MAX_GUIDANCE = 5.0  # largest guidance scale of the training
GUIDANCE, STEPS = 3.0, 20  # of the pictures that measure it
POOL = 8192  # drawn scenes held at a time


def frozen(folder: Path) -> Pipeline:
    """A FLUX pipeline of a tiny SD3's folder: its autoencoder, CLIP without the projection, and T5; the transformer is still missing."""
    sd3 = pipeline.load(folder, jnp.float32, only=("vae", "text_encoder", "text_encoder_3"))
    text = {name: value for name, value in sd3.params["text_encoder"].items() if name != "text_projection"}
    configs = Configs(
        family="FluxPipeline",
        shift=SHIFT,
        transformer=FLUX,
        vae=sd3.configs.vae,
        text_encoder=dataclasses.replace(sd3.configs.text_encoder, projection_dim=None),
        text_encoder_2=sd3.configs.text_encoder_3,
    )
    params = {"vae": sd3.params["vae"], "text_encoder": text, "text_encoder_2": sd3.params["text_encoder_3"]}
    tokenizers = {"tokenizer": sd3.tokenizers["tokenizer"], "tokenizer_2": sd3.tokenizers["tokenizer_3"]}
    return Pipeline(configs, params, tokenizers, sd3.dtype)


def init(key: jax.Array) -> dict:
    """Random parameters of the transformer."""
    side = world.SIZE // tiny_model.VAE.downsampling
    shapes = (1, side, side, FLUX.latent_channels), (1,), (1, 1, FLUX.joint_attention_dim), (1, FLUX.pooled_projection_dim), (1,)
    return flux.FluxTransformer(FLUX).init(key, *map(jnp.zeros, shapes))["params"]


def loss(params: Any, key: jax.Array, batch: dict, empty: Conditioning) -> tuple[jax.Array, dict]:
    """Flow matching with guidance as an input: told a scale w, the network predicts noise - data + (w - 1) (v_cond - v_uncond), where the
    two velocities are its own at w = 1, held fixed (in the manner of Tang et al. 2025, arXiv 2502.12154). Half of the scales are 1.

    Args:
      params: the transformer's.
      key: of times, noise and scales.
      batch: "latents" [B, h, w, C], "context" [B, S, D], "pooled" [B, E].
      empty: conditioning of the empty prompt, [1, ...].
    """
    time_key, noise_key, scale_key = jax.random.split(key, 3)
    data, cond = batch["latents"], Conditioning(batch["context"], batch["pooled"])
    t = jax.nn.sigmoid(jax.random.normal(time_key, data.shape[:1]))
    noise = jax.random.normal(noise_key, data.shape)
    mix = t[:, None, None, None]
    x = (1 - mix) * data + mix * noise
    scale = 1 + (MAX_GUIDANCE - 1) * jnp.maximum(jax.random.uniform(scale_key, t.shape, minval=-1.0), 0.0)
    velocity = partial(flux.FluxTransformer(FLUX, scan_unroll=FLUX.num_single_layers).apply, {"params": params})
    both = jax.tree.map(lambda c, e: jnp.concatenate([c, jnp.broadcast_to(e, c.shape)]), cond, empty)
    plain = velocity(jnp.concatenate([x, x]), jnp.concatenate([t, t]), *both, jnp.ones(2 * len(t)))
    v_cond, v_uncond = jnp.split(jax.lax.stop_gradient(plain), 2)
    target = noise - data + (scale - 1)[:, None, None, None] * (v_cond - v_uncond)
    return jnp.square(velocity(x, t, *cond, scale) - target).mean(), {}


def draw(pipe: Pipeline, params: Any, prompts: list[str], key: jax.Array) -> np.ndarray:
    """Pictures of prompts by Euler's method on the model's own grid, uint8 [N, 32, 32, 3]."""
    cond = pipeline.encode_prompts(pipe, prompts, tiny_model.LENGTH, batch_size=64)
    shape = pipeline.latent_shape(pipe.configs, world.SIZE, world.SIZE)
    images = _draw(pipe.configs, params, pipe.params["vae"], jax.random.normal(key, (len(prompts), *shape)), cond)
    return np.asarray(pipeline.to_uint8(images)[0])


@partial(jax.jit, static_argnums=0)
def _draw(configs, params, vae_params, noise, cond):
    velocity = pipeline.velocity(pipeline.network(configs), params, guidance_scale=GUIDANCE)
    plan = flow.plan(pipeline.sigmas(configs, STEPS, noise.shape[1:]))
    return pipeline.decode(configs, vae_params, flow.integrate(lambda x, sigma: velocity(x, sigma, cond), noise, plan))


def train(run: Run, steps: int, folder: Path) -> Pipeline:
    """Trains the transformer; measured by the mean partial score of pictures for 112 fixed held-out requests with fixed noise.

    Args:
      run: where, from which seed, and how often to save.
      steps: optimiser steps, batches of 32.
      folder: of the tiny SD3.

    Returns:
      The whole pipeline.
    """
    pipe = frozen(folder)
    requests = tiny_model.heldout_requests(16, (run.seed, 97))
    encode_text = partial(pipeline.encode_prompts, pipe, max_sequence_length=tiny_model.LENGTH, batch_size=64)
    vae_params, vae_config = pipe.params["vae"], pipe.configs.vae
    encode = jax.jit(lambda x: vae.normalize_latents(vae_config, vae.encode(vae_params, vae_config, tiny_model.to_signed(x))[0]))

    def make(number):
        _, images, drawn = tiny_model.draw_pool((run.seed, 4, number), POOL)
        left_out = np.random.default_rng((run.seed, 5, number)).random(POOL) < tiny_model.EMPTY_CAPTION
        cond = encode_text(["" if out else request["prompt"] for out, request in zip(left_out, drawn, strict=True)])
        latents = np.concatenate([np.asarray(encode(part)) for part in np.split(images, POOL // 128)])
        return {"latents": latents, "context": np.asarray(cond.context), "pooled": np.asarray(cond.pooled)}

    def measure(params):
        images = draw(pipe, params, [request["prompt"] for request in requests], jax.random.key(run.seed + 1))
        tiny_model.save_grid(run.workdir / "flux.png", images)
        row = tiny_model.heldout_scores(images, requests)
        return {"score": row["partial"], **row}

    batches = partial(pooled_batches, make, size=POOL, batch=32, passes=6, seed=run.seed)
    with_empty = partial(loss, empty=encode_text([""]))
    params = init(jax.random.key(run.seed))
    params = fit("flux", run, params, with_empty, batches, steps, peak=1.5e-3, ema_decay=0.999, measure=measure)
    return dataclasses.replace(pipe, params={**pipe.params, "transformer": params})

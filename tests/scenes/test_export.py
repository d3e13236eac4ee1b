"""The written folders: read by our own loaders, and by diffusers and transformers with the same result; and the shipped models."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from densegrpo_jax import flow, pipeline, scenes
from densegrpo_jax.models import vae
from densegrpo_jax.rewards import clip as clip_reward
from densegrpo_jax.scenes import checker, export, scorer, tiny_model, tokenizers, world
from densegrpo_jax.scenes.training import Run

PROMPTS = ["a red circle to the left of a blue star", 'a sign that reads "TEA"', "two large crosses"]
SHIPPED = Path(scenes.__file__).parent


def bold(init, seed):
    """Random parameters in which every branch shows, also what starts at zero; without running `init`."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        fan_in = leaf.shape[-2] if len(leaf.shape) > 1 else 16
        return jnp.asarray((path[-1].key == "scale") + 0.7 * fan_in**-0.5 * rng.normal(size=leaf.shape), jnp.float32)

    return jax.tree.map_with_path(draw, jax.eval_shape(init))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("random") / "tiny_sd3"
    flow_params = bold(lambda: tiny_model.init_flow(jax.random.key(0)), 0)
    vae_params = bold(lambda: vae.init(jax.random.key(0), tiny_model.VAE), 1)
    config = tiny_model.with_scale(scaling_factor=1.25, shift_factor=0.02)
    export.write_sd3(path, flow_params, vae_params, config)
    return path, flow_params, vae_params, config


def draw(folder, steps=4):
    """The pictures of PROMPTS by our pipeline in float32, as [N, 32, 32, 3] in [0, 1], and the noise they came from."""
    pipe = pipeline.load(folder, dtype=jnp.float32)
    cond = pipeline.encode_prompts(pipe, PROMPTS, tokenizers.MAX_LENGTH)
    noise = flow.initial_noise(jax.random.key(0), 0, jnp.arange(len(PROMPTS)), pipeline.latent_shape(pipe.configs, world.SIZE, world.SIZE))
    velocity = pipeline.velocity(pipeline.network(pipe.configs), pipe.params["transformer"])
    x, sigmas = noise, pipeline.sigmas(pipe.configs, steps)
    for now, after in itertools.pairwise(sigmas):
        x = x + (after - now) * velocity(x, jnp.full(len(x), now), cond)
    return np.asarray(pipeline.decode(pipe.configs, pipe.params["vae"], x)), noise


def test_the_folder_holds_what_was_written(folder):
    path, flow_params, vae_params, config = folder
    pipe = pipeline.load(path, dtype=jnp.float32)
    assert pipe.configs.transformer == tiny_model.MMDIT and pipe.configs.vae == config and pipe.configs.text_encoder == tiny_model.TEXT
    for name, params in {**flow_params, "vae": vae_params}.items():
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.float16(a), np.float16(b)), pipe.params[name], params)
    assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) < 10e6


def test_its_conditioning_is_that_of_the_training(folder, tmp_path):
    path, flow_params, _, _ = folder
    pipe = pipeline.load(path, dtype=jnp.float32)
    cond = pipeline.encode_prompts(pipe, PROMPTS, tokenizers.MAX_LENGTH)
    rounded = jax.tree.map(lambda a: a.astype(jnp.float16).astype(jnp.float32), flow_params)
    context, pooled = tiny_model.encode_text(rounded, tiny_model.Tokens(tmp_path)(PROMPTS))
    np.testing.assert_allclose(cond.context, context, atol=2e-5)
    np.testing.assert_allclose(cond.pooled, pooled, atol=2e-5)


def draws_the_same_as_diffusers(path):
    torch = pytest.importorskip("torch")
    from diffusers import StableDiffusion3Pipeline

    ours, noise = draw(path)
    reference = StableDiffusion3Pipeline.from_pretrained(path, dtype=torch.float32)
    theirs = reference(
        PROMPTS,
        num_inference_steps=4,
        guidance_scale=1.0,
        latents=torch.from_numpy(np.array(noise)).permute(0, 3, 1, 2),
        max_sequence_length=tokenizers.MAX_LENGTH,
        output_type="np",
    ).images
    assert ours.shape == theirs.shape == (len(PROMPTS), world.SIZE, world.SIZE, 3)
    assert theirs.std() > 0.02
    assert np.abs(ours - theirs).max() < 2e-3


@pytest.mark.parity
def test_diffusers_draws_the_same_pictures(folder):
    draws_the_same_as_diffusers(folder[0])


@pytest.mark.parity
def test_transformers_gives_the_same_score(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import CLIPModel

    params = bold(lambda: scorer.init(0)["clip"], 2)
    export.write_scorer(tmp_path, params)
    images = world.draw_batch([world.sample_scene(n) for n in range(len(PROMPTS))])
    ours = np.asarray(clip_reward.load(tmp_path)(images, PROMPTS, [{}] * len(PROMPTS)))

    model = CLIPModel.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.from_numpy(tiny_model.Tokens(tmp_path)(PROMPTS)["clip"].astype(np.int64))
    pixels = torch.from_numpy(np.array(scorer.prepare(images))).permute(0, 3, 1, 2)
    with torch.no_grad():
        theirs = model(input_ids=tokens, pixel_values=pixels).logits_per_image.diagonal().numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-3)


# ---- the models that ship


def test_the_shipped_folders_are_small():
    for name, limit in (("tiny_sd3", 10e6), ("preference_clip", 4e6)):
        files = [file for file in (SHIPPED / name).rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) <= limit
        assert {file.suffix for file in files} <= {".json", ".txt", ".safetensors"}


@pytest.mark.parity
def test_diffusers_draws_the_shipped_models_pictures():
    draws_the_same_as_diffusers(SHIPPED / "tiny_sd3")


def test_the_shipped_model_draws_what_is_asked(tmp_path):
    pipe = pipeline.load(SHIPPED / "tiny_sd3", dtype=jnp.float32)
    requests = tiny_model.heldout_requests(8, (0, 92))
    ids = tiny_model.Tokens(tmp_path)([request["prompt"] for request in requests])
    images = tiny_model.sample_images(pipe.params, pipe.params["vae"], pipe.configs.vae, ids, jax.random.key(0), steps=20)
    asked = checker.judge(images, requests, "partial").mean()
    mixed_up = checker.judge(np.roll(images, 8, 0), requests, "partial").mean()  # against another tag
    assert asked > 0.5 and asked > 2 * mixed_up


def test_the_shipped_scorer_orders_the_shipped_models_pictures_as_the_judge_does(tmp_path):
    pipe = pipeline.load(SHIPPED / "tiny_sd3", dtype=jnp.float32)
    run, tokens = Run(tmp_path, 0, 1), tiny_model.Tokens(tmp_path)
    drawn = scorer.draw_groups(run, tokens, pipe.params, pipe.params["vae"], pipe.configs.vae, 96, "heldout", 3)  # captions of no training
    found = scorer.agreement({"clip": clip_reward.load_scorer(SHIPPED / "preference_clip").params}, drawn)
    assert found["partial/clear"] >= 0.85 and found["partial/all"] > 0.8 and found["rank"] > 0.4


def test_the_shipped_scorer_prefers_what_is_asked():
    scenes = [world.sample_scene((0, 91, n), "heldout") for n in range(128)]
    images, requests = world.draw_batch(scenes), [world.metadata(scene, n) for n, scene in enumerate(scenes)]
    reward = clip_reward.load(SHIPPED / "preference_clip")
    prompts = [request["prompt"] for request in requests]
    right = np.asarray(reward(images, prompts, requests))
    wrong = np.asarray(reward(images, [scorer.spoil(request, (n, 0))["prompt"] for n, request in enumerate(requests)], requests))
    assert (right > wrong).mean() > 0.75
    grain = np.random.default_rng(0).normal(size=images.shape)
    for level in (16, 32):
        noisy = np.clip(images + level * grain, 0, 255).astype(np.uint8)
        assert (right > np.asarray(reward(noisy, prompts, requests))).mean() > 0.85

"""Trains the tiny models of the scenes world from nothing: `python -m densegrpo_jax.scenes.pretrain --workdir DIR`.

Three stages, each resumed from its last checkpoint when the command is given again:

1. vae: an AutoencoderKL on drawn scenes.
2. flow: an SD3 transformer by flow matching, its two CLIP text encoders and its T5 encoder trained along with it.
3. scorer: a small CLIP that prefers pictures that show what was asked (see `train_scorer`).

`export` then writes the ordinary diffusers and transformers folders that ship with the package.
"""

import dataclasses
import itertools
import json
import operator
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from safetensors.numpy import load_file, save_file

from densegrpo_jax.models import clip, sd3, t5, vae
from densegrpo_jax.scenes import checker, tokenizers, world

HERE = Path(__file__).parent
VOCAB_CLIP, VOCAB_T5 = len(tokenizers.clip_vocabulary()[0]), len(tokenizers.t5_vocabulary())
LENGTH = tokenizers.MAX_LENGTH

VAE = vae.VAEConfig(
    latent_channels=16,
    block_out_channels=(16, 24, 32),
    layers_per_block=1,
    norm_num_groups=8,
    use_quant_conv=False,
    use_post_quant_conv=False,
    mid_block_add_attention=False,
)
TEXT = clip.CLIPTextConfig(
    vocab_size=VOCAB_CLIP,
    hidden_size=64,
    intermediate_size=256,
    projection_dim=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=LENGTH,
    eos_token_id=VOCAB_CLIP - 1,
)
T5 = t5.T5Config(
    vocab_size=VOCAB_T5,
    d_model=128,
    d_kv=32,
    d_ff=256,
    num_layers=2,
    num_heads=4,
    relative_attention_num_buckets=16,
    relative_attention_max_distance=LENGTH,
    feed_forward_proj="gated-gelu",
)
MMDIT = sd3.SD3Config(
    sample_size=world.SIZE // VAE.downsampling,
    patch_size=2,
    in_channels=VAE.latent_channels,
    num_layers=5,
    attention_head_dim=32,
    num_attention_heads=4,
    joint_attention_dim=T5.d_model,
    caption_projection_dim=128,
    pooled_projection_dim=2 * TEXT.projection_dim,
    out_channels=VAE.latent_channels,
    pos_embed_max_size=world.SIZE // VAE.downsampling // 2,
    qk_norm="rms_norm",
)
# Weight of the KL summed over an image, against the mean squared error of its pixels in [-1, 1]: strong at first, for a smooth code; weak
# in the last quarter, so that the decoder shows noise in its latents as those of large models do.
KL_WEIGHTS = (5e-6, 3e-7)
EMPTY_CAPTION = 0.05  # share of captions left empty, so that guidance is possible
ODE_STEPS = 40


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line can change.

    Attributes:
      workdir: for checkpoints and logs.
      stages: what to run, in this order.
      seed: of everything.
      vae_steps: optimiser steps of stage 1, batches of 32.
      flow_steps: optimiser steps of stage 2, batches of 32.
      scorer_steps: optimiser steps of stage 3.
      save_every: optimiser steps between checkpoints.
      out: where `export` puts tiny_sd3 and preference_clip.
    """

    workdir: Path
    stages: tuple[str, ...] = ("vae", "flow", "scorer", "export")
    seed: int = 0
    vae_steps: int = 2000
    flow_steps: int = 12000
    scorer_steps: int = 4000
    save_every: int = 500
    out: Path = HERE


# ---- a training loop that survives a kill


def save_leaves(path: Path, tree: Any) -> None:
    """Writes the arrays of a pytree, in order, to one safetensors file that appears when it is complete."""
    leaves = {f"{n:05d}": np.asarray(leaf) for n, leaf in enumerate(jax.tree.leaves(tree))}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_suffix(".partial")
    save_file(leaves, partial_path)
    os.replace(partial_path, path)


def load_leaves(path: Path, like: Any) -> Any:
    """Reads what `save_leaves` wrote into the structure of `like`.

    Raises:
      ValueError: the file holds another number or shape of arrays.
    """
    saved = load_file(path)
    leaves, structure = jax.tree.flatten(like)
    arrays = [saved[name] for name in sorted(saved)]
    if [a.shape for a in arrays] != [np.shape(leaf) for leaf in leaves]:
        raise ValueError(f"{path} holds the state of another model; delete it or choose another --workdir")
    return jax.tree.unflatten(structure, [jnp.asarray(a) for a in arrays])


def fit(
    name: str,
    settings: Settings,
    params: Any,
    loss: Callable,
    batches: Callable[[int], Iterator],
    steps: int,
    peak: float,
    ema_decay: float,
    measure: Callable | None = None,
) -> Any:
    """Minimises `loss` by Adam: warm-up, constant rate, linear decay over the last quarter.

    Args:
      name: of the stage; names its files in the workdir.
      settings: of the run.
      params: initial parameters, a pytree.
      loss: (params, key, batch) -> (scalar, dict of scalars to log).
      batches: start step -> iterator over batches from there on.
      steps: optimiser steps.
      peak: learning rate.
      ema_decay: of the averaged parameters.
      measure: averaged parameters -> dict with "score", logged at every save; the best score's parameters are kept. None: the last are.

    Returns:
      The averaged parameters with the best score.
    """
    # The rate of a step does not depend on `steps` until the decay, so that a longer run can continue a shorter one.
    schedule = optax.join_schedules(
        [optax.linear_schedule(0.0, peak, 300), optax.constant_schedule(peak), optax.linear_schedule(peak, 0.02 * peak, steps // 4)],
        [300, steps - steps // 4],
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99))
    state = {"params": params, "ema": params, "opt": optimizer.init(params), "step": jnp.zeros((), jnp.int32), "best": jnp.full((), -1e9)}
    state = jax.tree.map(jnp.copy, state)  # donated below, so no array may be in it twice
    folder = settings.workdir
    checkpoint, best = folder / f"{name}.safetensors", folder / f"{name}_best.safetensors"
    if checkpoint.exists():
        state = load_leaves(checkpoint, state)

    @partial(jax.jit, donate_argnums=0)
    def update(state, batch):
        key = jax.random.fold_in(jax.random.key(settings.seed), state["step"])
        (value, logs), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], key, batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        decay = jnp.minimum(ema_decay, (state["step"] + 1.0) / (state["step"] + 10.0))
        ema = optax.incremental_update(params, state["ema"], 1 - decay)
        return {**state, "params": params, "ema": ema, "opt": opt, "step": state["step"] + 1}, {"loss": value, **logs}

    stream = batches(int(state["step"]))
    began, seen = time.time(), []
    while int(state["step"]) < steps:
        state, logs = update(state, next(stream))
        seen.append(logs)
        step = int(state["step"])
        if step % settings.save_every == 0 or step == steps:
            row = {"stage": name, "step": step, "seconds": round(time.time() - began, 1)}
            row |= {key: float(np.mean([np.asarray(logs[key]) for logs in seen])) for key in seen[0]}
            if measure is not None:
                row |= measure(state["ema"])
            if row.get("score", step) > float(state["best"]):
                state["best"] = jnp.asarray(row.get("score", step), jnp.float32)
                save_leaves(best, state["ema"])
            save_leaves(checkpoint, state)
            with (folder / "log.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(" ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()), flush=True)
            began, seen = time.time(), []
    return load_leaves(best, params)


def pooled_batches(make: Callable[[int], dict], start: int, size: int, batch: int, passes: int, seed: int) -> Iterator:
    """Yields batches from step `start` on, out of pools of `size` rows that `make(number)` provides, each passed through `passes` times.

    The batch of a step depends on nothing but the step, so a resumed run sees what it would have seen.
    """
    per_pass, current, pool = size // batch, None, None
    for step in itertools.count(start):
        number, within = divmod(step, per_pass * passes)
        if number != current:
            pool, current = make(number), number
        turn, position = divmod(within, per_pass)
        rows = np.random.default_rng((seed, number, turn)).permutation(size)[position * batch : (position + 1) * batch]
        yield jax.tree.map(operator.itemgetter(rows), pool)


# ---- stage 1: the autoencoder


def draw_pool(seed, count: int, split: str = "train") -> tuple[np.ndarray, list[dict]]:
    """Returns `count` drawn scenes, uint8 [count, 32, 32, 3], and their requests."""
    scenes = [world.sample_scene((*seed, n), split, any_letters=split == "train") for n in range(count)]
    return world.draw_batch(scenes), [world.metadata(scene, (*seed, n, 1)) for n, scene in enumerate(scenes)]


def to_signed(images) -> jax.Array:
    """uint8 -> float32 in [-1, 1]."""
    return jnp.asarray(images, jnp.float32) / 127.5 - 1.0


def to_pixels(images) -> np.ndarray:
    """Float in [-1, 1] -> uint8."""
    return np.rint(np.clip(np.asarray(images) * 127.5 + 127.5, 0, 255)).astype(np.uint8)


def vae_loss(params, key, batch):
    """Squared and absolute error of the pixels, and the KL of the latents to the unit normal."""
    images = to_signed(batch["images"])
    mean, logvar = vae.encode(params, VAE, images)
    latents = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, mean.shape)
    error = vae.decode(params, VAE, latents) - images
    kl = 0.5 * (mean**2 + jnp.exp(logvar) - 1.0 - logvar).sum((1, 2, 3)).mean()
    square, absolute = (error**2).mean(), jnp.abs(error).mean()
    return square + 0.1 * absolute + batch["kl_weight"] * kl, {"mse": square, "kl": kl, "std": jnp.exp(0.5 * logvar).mean()}


def train_vae(settings: Settings) -> Any:
    """Stage 1; measured by the judge's mean partial score of reconstructed held-out scenes."""
    images, requests = draw_pool((settings.seed, 99), 512, "heldout")

    @jax.jit
    def reconstruct(params, images):
        return vae.decode(params, VAE, vae.encode(params, VAE, to_signed(images))[0])

    def measure(params):
        again = np.concatenate([np.asarray(reconstruct(params, part)) for part in np.split(images, 8)])
        error = np.mean((again - np.asarray(to_signed(images))) ** 2)
        scores = {mode: float(checker.judge(to_pixels(again), requests, mode).mean()) for mode in ("strict", "partial")}
        return {"score": scores["partial"] - float(error), "psnr": float(10 * np.log10(4 / error)), **scores}

    def make(number):
        return {"images": draw_pool((settings.seed, 1, number), 8192)[0]}

    def batches(start):
        pooled = pooled_batches(make, start, size=8192, batch=32, passes=8, seed=settings.seed)
        for step, batch in enumerate(pooled, start):
            yield batch | {"kl_weight": np.float32(KL_WEIGHTS[step >= settings.vae_steps - settings.vae_steps // 4])}

    params = vae.init(jax.random.key(settings.seed), VAE)
    return fit("vae", settings, params, vae_loss, batches, settings.vae_steps, peak=2e-3, ema_decay=0.995, measure=measure)


def with_latent_scale(params: Any, seed: int) -> vae.VAEConfig:
    """Returns the autoencoder's config with the scaling and shift that make latents of drawn scenes zero-mean and unit-variance."""
    latents = np.asarray(jax.jit(lambda x: vae.encode(params, VAE, to_signed(x))[0])(draw_pool((seed, 98), 512)[0]))
    return dataclasses.replace(VAE, scaling_factor=round(1 / float(latents.std()), 4), shift_factor=round(float(latents.mean()), 4))


# ---- stage 2: the flow


class Tokens:
    """The two tokenizers, loaded from files written into the workdir: captions -> {"clip": [B, 16], "t5": [B, 16]}."""

    def __init__(self, folder: Path):
        from transformers import CLIPTokenizer, T5Tokenizer

        for name, write in (("clip_tokenizer", tokenizers.write_clip_tokenizer), ("t5_tokenizer", tokenizers.write_t5_tokenizer)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            write(folder / name)
        self.clip = CLIPTokenizer.from_pretrained(folder / "clip_tokenizer")
        self.t5 = T5Tokenizer.from_pretrained(folder / "t5_tokenizer")

    def __call__(self, captions: list[str]) -> dict[str, np.ndarray]:
        options = {"padding": "max_length", "max_length": LENGTH, "truncation": True, "return_tensors": "np"}
        ids = {"clip": self.clip(captions, **options).input_ids, "t5": self.t5(captions, **options).input_ids}
        return {name: values.astype(np.int32) for name, values in ids.items()}


TEXT_ENCODERS = {"text_encoder": clip.CLIPText(TEXT), "text_encoder_2": clip.CLIPText(TEXT), "text_encoder_3": t5.T5Encoder(T5)}
TRANSFORMER = sd3.SD3Transformer(MMDIT, scan_unroll=MMDIT.num_layers)


def init_flow(key: jax.Array) -> dict:
    """Returns random parameters of the three text encoders and the transformer."""
    keys = jax.random.split(key, 4)
    ids = jnp.zeros((1, LENGTH), jnp.int32)
    params = {name: module.init(k, ids)["params"] for (name, module), k in zip(TEXT_ENCODERS.items(), keys[:3], strict=True)}
    side = MMDIT.sample_size
    arrays = jnp.zeros((1, side, side, VAE.latent_channels)), jnp.zeros(1), jnp.zeros((1, 2 * LENGTH, T5.d_model))
    params["transformer"] = TRANSFORMER.init(keys[3], *arrays, jnp.zeros((1, MMDIT.pooled_projection_dim)))["params"]
    return params


def encode_text(params, ids) -> tuple[jax.Array, jax.Array]:
    """Returns SD3's context [B, 32, 128] and pooled text [B, 128]: CLIP features side by side, T5's after them in sequence."""
    one, two = (TEXT_ENCODERS[name].apply({"params": params[name]}, ids["clip"]) for name in ("text_encoder", "text_encoder_2"))
    three = TEXT_ENCODERS["text_encoder_3"].apply({"params": params["text_encoder_3"]}, ids["t5"])
    both = jnp.concatenate([one.penultimate, two.penultimate], -1)
    both = jnp.pad(both, ((0, 0), (0, 0), (0, three.shape[-1] - both.shape[-1])))
    return jnp.concatenate([both, three], 1), jnp.concatenate([one.pooled, two.pooled], -1)


def flow_loss(params, key, batch):
    """Flow matching: x_t = (1 - t) x_0 + t e, the network predicts e - x_0; t is logit-normal."""
    time_key, noise_key = jax.random.split(key)
    data = batch["latents"]
    t = jax.nn.sigmoid(jax.random.normal(time_key, data.shape[:1]))
    noise = jax.random.normal(noise_key, data.shape)
    mix = t[:, None, None, None]
    context, pooled = encode_text(params, batch["ids"])
    velocity = TRANSFORMER.apply({"params": params["transformer"]}, (1 - mix) * data + mix * noise, t, context, pooled)
    return ((velocity - (noise - data)) ** 2).mean(), {}


@partial(jax.jit, static_argnames="steps")
def sample_latents(params, ids, noise, steps: int = ODE_STEPS):
    """Euler's method on the uniform grid from 1 to 0, in chunks of 32 pictures."""
    context, pooled = encode_text(params, ids)
    sigmas = jnp.linspace(1.0, 0.0, steps + 1)

    def chunk(args):
        x, context, pooled = args

        def step(x, pair):
            velocity = TRANSFORMER.apply({"params": params["transformer"]}, x, jnp.full(x.shape[:1], pair[0]), context, pooled)
            return x + (pair[1] - pair[0]) * velocity, None

        return jax.lax.scan(step, x, (jnp.stack([sigmas[:-1], sigmas[1:]], 1)))[0]

    parts = jax.tree.map(lambda a: a.reshape(-1, 32, *a.shape[1:]), (noise, context, pooled))
    return jax.lax.map(chunk, parts).reshape(noise.shape)


def sample_images(params, vae_params, vae_config, ids, key, steps: int = ODE_STEPS) -> np.ndarray:
    """Draws pictures for token ids, uint8 [N, 32, 32, 3]; N is padded to a multiple of 32 within."""
    count = len(ids["clip"])
    padded = -(-count // 32) * 32
    ids = jax.tree.map(lambda a: np.concatenate([a, np.repeat(a[-1:], padded - count, 0)]), ids)
    noise = jax.random.normal(key, (padded, MMDIT.sample_size, MMDIT.sample_size, VAE.latent_channels))
    return decode_latents(vae_params, vae_config, sample_latents(params, ids, noise, steps))[:count]


def decode_latents(vae_params, vae_config, latents) -> np.ndarray:
    """Latents of the flow [N, 8, 8, 16], N a multiple of 32, to pictures, uint8 [N, 32, 32, 3]."""
    return to_pixels(_decode(vae_params, vae.denormalize_latents(vae_config, latents)))


@jax.jit
def _decode(vae_params, latents):
    parts = latents.reshape(-1, 32, *latents.shape[1:])
    return jax.lax.map(lambda part: vae.decode(vae_params, VAE, part), parts).reshape(-1, world.SIZE, world.SIZE, 3)


def heldout_scores(images, requests) -> dict[str, float]:
    """Returns strict, partial and soft means over tags, and the strict score of each tag."""
    tags = np.array([request["tag"] for request in requests])
    row = {}
    for mode in checker.MODES:
        scores = checker.judge(images, requests, mode)
        by_tag = {tag: float(scores[tags == tag].mean()) for tag in world.TAGS if (tags == tag).any()}
        row[mode] = float(np.mean(list(by_tag.values())))
        if mode == "strict":
            row |= {f"strict/{tag}": value for tag, value in by_tag.items()}
    return row


def heldout_requests(per_tag: int, seed: int) -> list[dict]:
    """Returns `per_tag` held-out requests of each tag; phrasings may repeat where a tag has few."""
    return [
        world.metadata(world.sample_scene((seed, 97, n), "heldout", tag), (seed, 97, n, 1)) for tag in world.TAGS for n in range(per_tag)
    ]


def train_flow(settings: Settings, vae_params, vae_config) -> Any:
    """Stage 2; measured by the mean partial score of pictures for 112 fixed held-out requests with fixed noise."""
    tokens = Tokens(settings.workdir)
    requests = heldout_requests(16, settings.seed)
    ids = tokens([request["prompt"] for request in requests])
    encode = jax.jit(lambda x: vae.normalize_latents(vae_config, vae.encode(vae_params, VAE, to_signed(x))[0]))

    def make(number):
        images, captions = draw_pool((settings.seed, 2, number), 16384)
        captions = [request["prompt"] for request in captions]
        for n in np.flatnonzero(np.random.default_rng((settings.seed, 3, number)).random(len(captions)) < EMPTY_CAPTION):
            captions[n] = ""
        return {"latents": np.concatenate([np.asarray(encode(part)) for part in np.split(images, 128)]), "ids": tokens(captions)}

    def measure(params):
        images = sample_images(params, vae_params, vae_config, ids, jax.random.key(settings.seed + 1))
        save_grid(settings.workdir / "flow.png", images)
        row = heldout_scores(images, requests)
        return {"score": row["partial"], **row}

    batches = partial(pooled_batches, make, size=16384, batch=32, passes=6, seed=settings.seed)
    params = init_flow(jax.random.key(settings.seed))
    return fit("flow", settings, params, flow_loss, batches, settings.flow_steps, peak=1e-3, ema_decay=0.999, measure=measure)


def save_grid(path: Path, images, columns: int = 16, zoom: int = 3) -> None:
    """Writes pictures [N, H, W, 3] as one PNG; what does not fill a row is left out."""
    from PIL import Image

    rows = len(images) // columns
    n, height, width, _ = images.shape
    grid = images[: rows * columns].reshape(rows, columns, height, width, 3).transpose(0, 2, 1, 3, 4)
    image = Image.fromarray(grid.reshape(rows * height, columns * width, 3))
    image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST).save(path)


def main(settings: Settings) -> None:
    """Runs the stages asked for."""
    settings.workdir.mkdir(parents=True, exist_ok=True)
    if "vae" in settings.stages:
        train_vae(settings)
    vae_params = load_leaves(settings.workdir / "vae_best.safetensors", vae.init(jax.random.key(0), VAE))
    vae_config = with_latent_scale(vae_params, settings.seed)
    if "flow" in settings.stages:
        train_flow(settings, vae_params, vae_config)


if __name__ == "__main__":
    main(tyro.cli(Settings))

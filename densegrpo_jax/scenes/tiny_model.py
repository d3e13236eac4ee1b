"""The tiny SD3: its configuration, and how its autoencoder and its flow are trained from nothing.

Everything is Stable Diffusion 3's architecture at a small size: a 16-channel AutoencoderKL that divides sides by four, 16 image tokens
of 2x2 latents, two CLIP text encoders, T5, and five MMDiT blocks of width 128.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax.models import clip, sd3, t5, vae
from densegrpo_jax.scenes import checker, tokenizers, world
from densegrpo_jax.scenes.training import Run, fit, pooled_batches

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
KL_WEIGHT = 1e-6  # of the KL summed over an image, against the mean squared error of its pixels in [-1, 1]
GRAIN = 0.3  # largest standard deviation, in those units, of the noise in half of the autoencoder's pictures
EMPTY_CAPTION = 0.05  # share of captions left empty, so that guidance is possible
ODE_STEPS = 40


# ---- stage 1: the autoencoder


def draw_pool(seed, count: int, split: str = "train") -> tuple[list[world.Scene], np.ndarray, list[dict]]:
    """Returns `count` scenes, their pictures uint8 [count, 32, 32, 3], and their requests."""
    scenes = [world.sample_scene((*seed, n), split, any_letters=split == "train") for n in range(count)]
    return scenes, world.draw_batch(scenes), [world.metadata(scene, (*seed, n, 1)) for n, scene in enumerate(scenes)]


def to_signed(images) -> jax.Array:
    """uint8 -> float32 in [-1, 1]."""
    return jnp.asarray(images, jnp.float32) / 127.5 - 1.0


def to_pixels(images) -> np.ndarray:
    """Float in [-1, 1] -> uint8."""
    return np.rint(np.clip(np.asarray(images) * 127.5 + 127.5, 0, 255)).astype(np.uint8)


def vae_loss(params, key, batch):
    """Squared and absolute error of the pixels, and the KL of the latents to the unit normal.

    Half of the pictures are grainy, to be reproduced with their grain. Flat drawings alone have so few bits that the decoder would learn
    to wipe out any noise in its latents; a large model's decoder shows it, and rewards should see it.
    """
    latent_key, grain_key, level_key = jax.random.split(key, 3)
    images = to_signed(batch["images"])
    count = len(images)
    level = GRAIN * jnp.maximum(jax.random.uniform(level_key, (count, 1, 1, 1), minval=-1.0), 0.0)
    grain = jax.random.normal(grain_key, (count, world.SIZE // 2, world.SIZE // 2, 3))  # as fine as the latents can hold
    images = images + level * jax.image.resize(grain, images.shape, "linear")
    mean, logvar = vae.encode(params, VAE, images)
    latents = mean + jnp.exp(0.5 * logvar) * jax.random.normal(latent_key, mean.shape)
    error = vae.decode(params, VAE, latents) - images
    kl = 0.5 * (mean**2 + jnp.exp(logvar) - 1.0 - logvar).sum((1, 2, 3)).mean()
    square, absolute = (error**2).mean(), jnp.abs(error).mean()
    return square + 0.1 * absolute + KL_WEIGHT * kl, {"mse": square, "kl": kl, "std": jnp.exp(0.5 * logvar).mean()}


def train_vae(run: Run, steps: int) -> Any:
    """Stage 1; measured by the judge's mean partial score of reconstructed held-out scenes."""
    _, images, requests = draw_pool((run.seed, 99), 512, "heldout")

    @jax.jit
    def reconstruct(params, images):
        return vae.decode(params, VAE, vae.encode(params, VAE, to_signed(images))[0])

    def measure(params):
        again = np.concatenate([np.asarray(reconstruct(params, part)) for part in np.split(images, 8)])
        error = np.mean((again - np.asarray(to_signed(images))) ** 2)
        scores = {mode: float(checker.judge(to_pixels(again), requests, mode).mean()) for mode in ("strict", "partial")}
        return {"score": scores["partial"] - float(error), "psnr": float(10 * np.log10(4 / error)), **scores}

    def make(number):
        return {"images": draw_pool((run.seed, 1, number), 8192)[1]}

    batches = partial(pooled_batches, make, size=8192, batch=32, passes=8, seed=run.seed)
    params = vae.init(jax.random.key(run.seed), VAE)
    return fit("vae", run, params, vae_loss, batches, steps, peak=2e-3, ema_decay=0.995, measure=measure)


def with_scale(scaling_factor: float, shift_factor: float) -> vae.VAEConfig:
    """Returns the autoencoder's config with the scaling and shift of its latents."""
    return dataclasses.replace(VAE, scaling_factor=scaling_factor, shift_factor=shift_factor)


def with_measured_scale(params: Any, seed: int) -> vae.VAEConfig:
    """Returns the config with the scaling and shift that make latents of drawn scenes zero-mean and unit-variance."""
    latents = np.asarray(jax.jit(lambda x: vae.encode(params, VAE, to_signed(x))[0])(draw_pool((seed, 98), 512)[1]))
    return with_scale(round(1 / float(latents.std()), 4), round(float(latents.mean()), 4))


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


def heldout_requests(per_tag: int, seed) -> list[dict]:
    """Returns `per_tag` held-out requests of each tag; `seed` is a tuple of ints. Requests may repeat where a tag has few."""
    return [world.metadata(world.sample_scene((*seed, n), "heldout", tag), (*seed, n, 1)) for tag in world.TAGS for n in range(per_tag)]


def train_flow(run: Run, steps: int, vae_params, vae_config) -> Any:
    """Stage 2; measured by the mean partial score of pictures for 112 fixed held-out requests with fixed noise."""
    tokens = Tokens(run.workdir)
    requests = heldout_requests(16, (run.seed, 97))
    ids = tokens([request["prompt"] for request in requests])
    encode = jax.jit(lambda x: vae.normalize_latents(vae_config, vae.encode(vae_params, VAE, to_signed(x))[0]))

    def make(number):
        _, images, captions = draw_pool((run.seed, 2, number), 16384)
        captions = [request["prompt"] for request in captions]
        for n in np.flatnonzero(np.random.default_rng((run.seed, 3, number)).random(len(captions)) < EMPTY_CAPTION):
            captions[n] = ""
        return {"latents": np.concatenate([np.asarray(encode(part)) for part in np.split(images, 128)]), "ids": tokens(captions)}

    def measure(params):
        images = sample_images(params, vae_params, vae_config, ids, jax.random.key(run.seed + 1))
        save_grid(run.workdir / "flow.png", images)
        row = heldout_scores(images, requests)
        return {"score": row["partial"], **row}

    batches = partial(pooled_batches, make, size=16384, batch=32, passes=6, seed=run.seed)
    params = init_flow(jax.random.key(run.seed))
    return fit("flow", run, params, flow_loss, batches, steps, peak=1.5e-3, ema_decay=0.999, measure=measure)


def save_grid(path: Path, images, columns: int = 16, zoom: int = 3) -> None:
    """Writes pictures [N, H, W, 3] as one PNG; what does not fill a row is left out."""
    from PIL import Image

    rows = len(images) // columns
    height, width = images.shape[1:3]
    grid = images[: rows * columns].reshape(rows, columns, height, width, 3).transpose(0, 2, 1, 3, 4)
    image = Image.fromarray(grid.reshape(rows * height, columns * width, 3))
    image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST).save(path)

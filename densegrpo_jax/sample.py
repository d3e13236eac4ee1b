"""`densegrpo sample`: images of a model folder, with or without an adapter, as one PNG that says how it was made."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from PIL import Image, PngImagePlugin
from tqdm import tqdm

from densegrpo_jax import flow, pipeline
from densegrpo_jax.models import adapter as adapters
from densegrpo_jax.models import lora as loras
from densegrpo_jax.pipeline import Conditioning, Pipeline


@dataclasses.dataclass(frozen=True)
class Sample:
    """Draw images and write them as one grid: a row per prompt, a column per image."""

    model: tyro.conf.Positional[str]
    """Folder in diffusers layout, or Hugging Face id."""
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["-p"])]
    """One or more prompts."""
    out: Path = Path("samples.png")
    """PNG file to write; settings and seed are stored in its metadata under "densegrpo"."""
    lora: Path | None = None
    """Adapter to apply: safetensors file or folder written by this package, diffusers or PEFT."""
    negative_prompt: str = ""
    """What classifier-free guidance leads away from; without effect at guidance 1 and for FLUX."""
    images: int = 1
    """Images per prompt."""
    height: int | None = None
    """Pixels; default: the model's own size."""
    width: int | None = None
    """Pixels; default: the model's own size."""
    steps: int = 40
    """Euler steps on the folder's own noise schedule."""
    guidance: float | None = None
    """Guidance scale, at least 1; default: the model's own, 4.5 for Stable Diffusion 3, 3.5 for FLUX.1-dev, 1 (none) for FLUX.1-schnell.
    Classifier-free guidance, that of Stable Diffusion 3, takes twice the time; FLUX.1-dev's is an input of its network."""
    seed: int = 0
    """Image i of the run starts from noise (seed, i), whatever the batch size."""
    max_sequence_length: int = 256
    """Tokens of T5; the networks see padding, so use the value of training."""
    batch_size: int = 4
    """Images sampled at once."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the networks; latents and decoding are float32 always."""
    variant: str | None = None
    """Weights to read, "fp16" or "bf16"; default: the unnamed ones."""

    def __post_init__(self):
        ranges = {
            "images": (1, 10_000),
            "height": (1, 100_000),
            "width": (1, 100_000),
            "steps": (1, flow.grid.TRAIN_STEPS),
            "guidance": (1.0, 1000.0),
            "seed": (0, 2**63 - 1),
            "max_sequence_length": (1, pipeline.MAX_T5_LENGTH),
            "batch_size": (1, 10_000),
        }
        for field, (low, high) in ranges.items():
            if getattr(self, field) is not None and not low <= getattr(self, field) <= high:
                raise ValueError(f"{field} = {getattr(self, field)}: must be from {low} to {high}")
        if not self.prompt:
            raise ValueError("prompt: give at least one")
        if self.out.suffix.lower() != ".png":
            raise ValueError(f"out = {self.out}: must be a .png file")


def main(args: Sample) -> Path:
    """Samples and writes the grid.

    Args:
      args: the settings.

    Returns:
      The file.

    Raises:
      ValueError: a folder, adapter, size or setting that does not work, said before anything is computed; or images that are not finite.
    """
    out = args.out.expanduser()
    if not out.parent.is_dir():
        raise ValueError(f"out = {args.out}: the folder {out.parent} does not exist")
    folder = pipeline.find_folder(args.model, args.variant)
    configs = pipeline.read_configs(folder)
    side = pipeline.default_side(configs)
    height, width = args.height or side, args.width or side
    shape = pipeline.latent_shape(configs, height, width)
    guidance = pipeline.default_guidance(configs) if args.guidance is None else args.guidance
    guided = pipeline.needs_uncond(configs, guidance)
    lora = None
    if args.lora is not None:
        table, shapes = pipeline.name_table(configs, "transformer"), pipeline.abstract_params(configs, "transformer")
        lora = adapters.read_adapter(args.lora, table, shapes).lora  # alpha = rank, so the network's lora_scale stays 1
        print(f"adapter {args.lora}: {loras.count_modules(lora)} layers, rank {adapters.rank(lora)}")

    pipe = pipeline.load(folder, jnp.dtype(args.dtype), variant=args.variant)
    texts = [*args.prompt, args.negative_prompt] if guided else [*args.prompt]
    for warning in pipeline.truncated(pipe, texts, args.max_sequence_length):
        print(f"warning: {warning}")
    cond = pipeline.encode_prompts(pipe, texts, args.max_sequence_length)
    uncond = jax.tree.map(lambda x: x[-1:], cond) if guided else None
    rows = np.repeat(np.arange(len(args.prompt)), args.images)  # image -> its prompt
    noise = flow.initial_noise(jax.random.key(args.seed), 0, jnp.arange(len(rows)), shape)
    cond = jax.tree.map(lambda x: x[rows], cond)
    images = draw(pipe, noise, cond, uncond, guidance, args.steps, lora, args.batch_size, progress=True)

    settings = {**dataclasses.asdict(args), "height": height, "width": width, "guidance": guidance}
    info = PngImagePlugin.PngInfo()
    info.add_text("densegrpo", json.dumps(settings, default=str))
    Image.fromarray(grid(images, args.images)).save(out, pnginfo=info)
    print(f"{len(images)} images of {height} x {width} in {out}")
    return out


def draw(
    pipe: Pipeline,
    noise: jax.Array,
    cond: Conditioning,
    uncond: Conditioning | None = None,
    guidance_scale: float = 1.0,
    num_steps: int = 40,
    lora: dict | None = None,
    batch_size: int = 4,
    progress: bool = False,
) -> np.ndarray:
    """Samples with Euler steps on the folder's schedule, as diffusers does.

    Args:
      pipe: the loaded folder.
      noise: starting latents [B, h, w, C], float32.
      cond: conditioning of each image, [B, ...].
      uncond: conditioning to lead away from, [1, ...] for all; None for no classifier-free guidance.
      guidance_scale: see `pipeline.velocity`.
      num_steps: T.
      lora: adapter with alpha = rank.
      batch_size: images at once; the last batch is filled up, so that one program serves all.
      progress: show a progress bar if on a terminal.

    Returns:
      uint8 images [B, H, W, 3].

    Raises:
      ValueError: the network's output is not finite.
    """
    count = len(noise)
    batch_size = min(batch_size, count)
    sigmas = jnp.asarray(pipeline.sigmas(pipe.configs, num_steps, noise.shape[1:]), jnp.float32)
    model = pipeline.network(pipe.configs, pipe.dtype)
    images = []
    with tqdm(total=-(-count // batch_size) * num_steps, disable=None if progress else True, unit="step") as bar:
        for start in range(0, count, batch_size):
            rows = np.minimum(np.arange(start, start + batch_size), count - 1)
            x, batch = noise[rows], jax.tree.map(lambda leaf, rows=rows: leaf[rows], cond)
            for i in range(num_steps):
                x = _euler_step(model, pipe.params["transformer"], lora, x, sigmas[i], sigmas[i + 1], batch, uncond, guidance_scale)
                bar.update()
            image, finite = jax.device_get(_pixels(pipe.configs, pipe.params["vae"], x))
            if not finite.all():
                raise ValueError(f"image {start + int(np.argmin(finite))} is not finite: try dtype float32, or another adapter")
            images.append(image[: count - start])
    return np.concatenate(images)


@partial(jax.jit, static_argnums=0)
def _euler_step(model, params, lora, x, sigma, sigma_next, cond, uncond, guidance_scale):
    velocity = pipeline.velocity(model, params, lora, uncond, guidance_scale)
    return x + (sigma_next - sigma) * velocity(x, jnp.full(x.shape[:1], sigma), cond)


@partial(jax.jit, static_argnums=0)
def _pixels(configs, params, x):
    return pipeline.to_uint8(pipeline.decode(configs, params, x, chunk=1))


def grid(images: np.ndarray, columns: int, gap: int = 4) -> np.ndarray:
    """Images [B, H, W, 3] side by side, `columns` to a row, `gap` white pixels between them."""
    B, H, W, C = images.shape
    rows = -(-B // columns)
    sheet = np.full((rows * (H + gap) - gap, columns * (W + gap) - gap, C), 255, np.uint8)
    for i, image in enumerate(images):
        top, left = i // columns * (H + gap), i % columns * (W + gap)
        sheet[top : top + H, left : left + W] = image
    return sheet

"""Rewards that are a CLIP's agreement of image and prompt: PickScore, CLIPScore, HPSv2.1, the tiny world's preference scorer.

score = exp(logit_scale) * cosine(image, prompt) / divisor, or the cosine itself, with any CLIPModel folder of transformers
(safetensors). The image is prepared on the device as CLIPImageProcessor does it, resized by antialiased bicubic, cropped, normalised;
for HPSv2.1 as its authors' program does it.

What scorers on the device have in common stands here too: reading their folders, preparing images, scoring in chunks.

Legend: N images, P width of the shared space.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax.flow.rollout import in_chunks
from densegrpo_jax.models import clip
from densegrpo_jax.models.weights import find_folder, open_weights, read_json, read_params
from densegrpo_jax.rewards.base import Reward

# What divides the logit. PickScore (Kirstain et al. 2023, arXiv 2305.01569) is the logit itself; Flow-GRPO's program trains on
# PickScore / 26, and its CLIPScore is the logit / 30. None: the cosine, which is what HPSv2.1 (Wu et al. 2023, arXiv 2306.09341) is.
KINDS = {"pickscore": 1.0, "pickscore_26": 26.0, "clipscore": 30.0, "hpsv2": None}

BICUBIC = 3  # PIL's number of the filter
FILES = ("*.json", "merges.txt", "vocab.txt", "model*.safetensors")  # what a scorer's folder has
TEXT_BATCH = 32  # prompts encoded at once, so that one program serves all


@dataclasses.dataclass(frozen=True)
class ImageProcessing:
    """How pixels become the vision tower's input; names and defaults of transformers' CLIPImageProcessor.

    Attributes:
      size: length of the shorter edge after resizing, or (height, width), or None: not resized.
      crop_size: (height, width) cut out of the middle, or None: not cropped.
      image_mean, image_std: of the channels, of values in [0, 1].
      framed: the longer edge is `size`, black fills the square, and nothing is rounded or cut off while resizing, as torchvision does
        it with floating images: the way of HPSv2's program.
    """

    size: int | tuple[int, int] | None = 224
    crop_size: tuple[int, int] | None = (224, 224)
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    framed: bool = False

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ImageProcessing":
        """Reads preprocessor_config.json, also of older versions, where sizes are plain numbers.

        Raises:
          ValueError: an option of a value that is not implemented; it is named.
        """
        fixed = {"resample": BICUBIC, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "do_pad": False}
        for key, value in fixed.items():
            if (found := values.get(key)) is not None and not math.isclose(found, value):
                raise ValueError(f"{key} = {found!r} is not supported, only {value!r}")
        size, crop = values.get("size", cls.size), values.get("crop_size", cls.crop_size)
        if isinstance(size, Mapping):
            known = {("shortest_edge",), ("height", "width")}
            if tuple(sorted(size)) not in known:
                raise ValueError(f"size = {size!r} is not supported, only a shortest_edge or a height and width")
            size = size["shortest_edge"] if "shortest_edge" in size else (size["height"], size["width"])
        if isinstance(crop, Mapping):
            crop = (crop["height"], crop["width"])
        return cls(
            size if values.get("do_resize", True) else None,
            ((crop, crop) if isinstance(crop, int) else tuple(crop)) if values.get("do_center_crop", True) else None,
            tuple(values.get("image_mean", cls.image_mean)),
            tuple(values.get("image_std", cls.image_std)),
        )


class Spec(NamedTuple):
    """What a scorer computes, hashable.

    Attributes:
      config: of both towers.
      processing: of the images.
      divisor: of the logit, None for the cosine; see `KINDS`.
      dtype: of the towers' computation.
    """

    config: clip.CLIPConfig
    processing: ImageProcessing
    divisor: float | None
    dtype: Any


class Scorer(NamedTuple):
    """A loaded scorer: what it computes, its parameters, and the tokenizer of its prompts."""

    spec: Spec
    params: dict
    tokenizer: Any


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def load(
    model: str | Path, kind: str = "pickscore", dtype: Any = jnp.float32, chunk: int = 32, mesh: jax.sharding.Mesh | None = None
) -> Reward:
    """The reward of a CLIP folder; see `load_scorer` and `as_reward`."""
    return as_reward(load_scorer(model, kind, dtype, mesh), chunk, mesh)


def load_scorer(model: str | Path, kind: str = "pickscore", dtype: Any = jnp.float32, mesh: jax.sharding.Mesh | None = None) -> Scorer:
    """Reads a CLIPModel with its tokenizer and its image processor's settings.

    Args:
      model: folder, or Hugging Face id.
      kind: the scale of the score, one of `KINDS`.
      dtype: of the weights and the computation, float32 or bfloat16; cosines are float32 in any case.
      mesh: of devices of this process over which the weights are replicated; None for one device.

    Raises:
      ValueError: an unknown kind or dtype, or a folder that cannot be read; the file or option is named.
    """
    if kind not in KINDS:
        raise ValueError(f"kind = {kind!r}: choose one of {', '.join(KINDS)}")
    folder, config, processing = open_folder(model, clip.CLIPConfig, lambda config: config.vision.image_size, dtype)
    tokenizer = _read_tokenizer(folder, config.text)
    return Scorer(spec_of(kind, config, processing, dtype), _read_params(folder, config, dtype, mesh), tokenizer)


def spec_of(kind: str, config: clip.CLIPConfig, processing: ImageProcessing, dtype: Any = jnp.float32) -> Spec:
    """What a scorer of that kind computes, with the settings of its folder."""
    if kind == "hpsv2":
        processing = dataclasses.replace(processing, size=config.vision.image_size, crop_size=None, framed=True)
    return Spec(config, processing, KINDS[kind], jnp.dtype(dtype))


def open_folder(model: str | Path, kind: Any, side: Callable[[Any], int], dtype: Any) -> tuple[Path, Any, ImageProcessing]:
    """A scorer's folder with its configuration and its image processor's settings.

    Args:
      model: folder, or Hugging Face id, of which configs, tokenizer and safetensors are downloaded.
      kind: class of the configuration, with `from_json`.
      side: gives the side of the vision tower's images, which the processor must crop to.
      dtype: that the scorer is to have.

    Raises:
      ValueError: a dtype other than float32 and bfloat16, or a folder that cannot be read.
    """
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype {jnp.dtype(dtype).name}: choose float32 or bfloat16")
    folder = find_folder(model, files=FILES)
    try:
        config = kind.from_json(read_json(folder / "config.json"))
        processing = ImageProcessing.from_json(_read_processing(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder}: {error}") from error
    size = (side(config),) * 2
    if processing.crop_size not in (None, size):
        raise ValueError(f"{folder}: images are cropped to {processing.crop_size}, but the vision tower takes {size}")
    return folder, config, processing


def _read_processing(folder: Path) -> dict:
    """Settings of the image processor: in a file of their own, or nested since version 5 of transformers."""
    nested = folder / "processor_config.json"
    values = read_json(nested).get("image_processor") if nested.exists() else None
    return values or read_json(folder / "preprocessor_config.json")


def replicated(mesh: jax.sharding.Mesh | None) -> jax.sharding.Sharding | None:
    """Where the parameters of a scorer are: on every device of `mesh`, or the default one."""
    return None if mesh is None else jax.sharding.NamedSharding(mesh, jax.P())


def shapes(config: clip.CLIPConfig) -> dict:
    """The parameters of a CLIP, without values."""
    side = config.vision.image_size
    inputs = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, side, side, config.vision.num_channels))
    return jax.eval_shape(clip.CLIP(config).init, jax.random.key(0), *inputs)["params"]


def _read_params(folder: Path, config: clip.CLIPConfig, dtype: Any, mesh: jax.sharding.Mesh | None) -> dict:
    tensors = open_weights(folder)
    params = read_params(tensors, clip.name_table(config), shapes(config), dtype, replicated(mesh), ignored=clip.IGNORED)
    # The temperature stays float32: rounded to bfloat16 it would change every score by up to one percent.
    scale = np.float32(tensors["logit_scale"].view[...])
    return {**params, "logit_scale": jax.device_put(scale, params["logit_scale"].sharding)}


def open_tokenizer(folder: Path, kind: str) -> Any:
    """The tokenizer in a folder, of that class of transformers.

    Raises:
      ValueError: it cannot be read.
    """
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for what it cannot parse
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{folder}: not a readable tokenizer ({reason})") from error


def _read_tokenizer(folder: Path, config: clip.CLIPTextConfig) -> Any:
    tokenizer = open_tokenizer(folder, "CLIPTokenizer")
    # Without its files a tokenizer loads all the same, empty. The tower pools at the end token, so it must be the same one.
    end = tokenizer.eos_token_id
    if len(tokenizer) > config.vocab_size or end != (len(tokenizer) - 1 if config.eos_token_id == clip.LEGACY_EOS else config.eos_token_id):
        raise ValueError(
            f"{folder}: its tokenizer has {len(tokenizer)} tokens and ends texts with {end}; "
            f"the model embeds {config.vocab_size} and looks for {config.eos_token_id}"
        )
    return tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Scoring


def prepare(processing: ImageProcessing, images: jax.Array) -> jax.Array:
    """Resizes, crops and normalises images as CLIPImageProcessor does, which resizes with PIL; or see `ImageProcessing.framed`.

    Args:
      processing: what to do.
      images: [N, H, W, 3]. Of uint8 the resized image is PIL's, bit by bit (but for very tall ones, which Pillow resizes vertically
        first since version 13); floating ones in [0, 1] are resized without rounding to bytes, and can be differentiated.

    Returns:
      float32 [N, h, w, 3].

    Raises:
      ValueError: images of another type, or smaller than the crop.
    """
    is_bytes = images.dtype == jnp.uint8
    if images.ndim != 4 or images.shape[-1] != 3 or not (is_bytes or jnp.issubdtype(images.dtype, jnp.floating)):
        raise ValueError(f"images must be [N, H, W, 3], uint8 or floating in [0, 1], got {images.dtype} {images.shape}")
    if processing.framed:
        x, is_bytes = images.astype(jnp.float32) / (255.0 if is_bytes else 1.0), False
        resize = _resize
    else:
        x, resize = images.astype(jnp.float32), _resize_bytes if is_bytes else _resize_in_range
    height, width = _resized(processing, images.shape[1:3])
    if x.shape[2] != width:
        x = resize("dow,nhwc->dnhoc", x, _bicubic(x.shape[2], width))
    if x.shape[1] != height:
        x = resize("doh,nhwc->dnowc", x, _bicubic(x.shape[1], height))
    if processing.framed:
        h, w = processing.size - height, processing.size - width
        x = jnp.pad(x, ((0, 0), (h // 2, h - h // 2), (w // 2, w - w // 2), (0, 0)))
        height, width = x.shape[1:3]
    h, w = processing.crop_size or (height, width)
    if h > height or w > width:
        raise ValueError(f"images of {images.shape[1:3]} are resized to {(height, width)}, which is smaller than the crop {(h, w)}")
    top, left = (height - h) // 2, (width - w) // 2
    x = x[:, top : top + h, left : left + w] / (255.0 if is_bytes else 1.0)
    mean, std = (jnp.array(values, jnp.float32)[None, None, None] for values in (processing.image_mean, processing.image_std))
    return (x - mean) / std


def _resized(processing: ImageProcessing, shape: tuple[int, int]) -> tuple[int, int]:
    size = processing.size
    if size is None:
        return shape
    if not isinstance(size, int):
        return size
    height, width = shape
    if processing.framed:
        return tuple(max(round(edge * size / max(shape)), 1) for edge in shape)
    return (size, int(size * width / height)) if height <= width else (int(size * height / width), size)


@cache
def _bicubic(old: int, new: int) -> np.ndarray:
    """Weights [new, old] of a resized line: Keys' cubic (a = -1/2), as wide as the coarser of the two grids, cut at the edges."""
    scale = old / new
    centers = (np.arange(new) + 0.5) * scale - 0.5
    x = np.abs(np.arange(old)[None] - centers[:, None]) / max(scale, 1.0)
    near, far = (1.5 * x - 2.5) * x**2 + 1.0, ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    weights = np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
    return weights / weights.sum(1, keepdims=True)


def _resize(equation: str, x: jax.Array, weights: np.ndarray) -> jax.Array:
    """One axis."""
    return jnp.einsum(equation, jnp.asarray(weights[None], jnp.float32), x, precision="highest")[0]


def _resize_in_range(equation: str, x: jax.Array, weights: np.ndarray) -> jax.Array:
    """One axis of images in [0, 1], where they stay."""
    return jnp.clip(_resize(equation, x, weights), 0.0, 1.0)


def _resize_bytes(equation: str, x: jax.Array, weights: np.ndarray) -> jax.Array:
    """One axis of images in 0 .. 255, in PIL's fixed-point arithmetic: weights of 22 bits, the sum rounded half up.

    The weights are multiplied as three digits to the base 256. Digits and pixels are exact even in the bfloat16 that a TPU multiplies
    in, and sums of up to 256 products are exact in float32.
    """
    k = np.trunc(weights * 2**22 + np.copysign(0.5, weights)).astype(np.int64)
    digits = np.stack([k >> 16, k >> 8 & 255, k & 255])  # [3, new, old]; the first carries the sign
    sums = jnp.einsum(equation, jnp.asarray(digits, jnp.float32), x).astype(jnp.int32)
    total = (sums[0] << 16) + (sums[1] << 8) + sums[2] + 2**21
    return jnp.clip(total >> 22, 0, 255).astype(jnp.float32)


def score(params: Mapping, spec: Spec, images: jax.Array, texts: jax.Array) -> jax.Array:
    """Scores of images with their own texts; differentiable in the images where they are floating.

    Args:
      params: the scorer's.
      spec: the scorer's.
      images: [N, H, W, 3], uint8, or floating in [0, 1].
      texts: [N, P] of `embed_texts`.

    Returns:
      [N] float32.
    """
    model = clip.CLIP(spec.config, spec.dtype)
    seen = model.apply({"params": params}, prepare(spec.processing, images), method="embed_images")
    cosine = jnp.sum(seen * texts, axis=-1)
    return cosine if spec.divisor is None else jnp.exp(params["logit_scale"].astype(jnp.float32)) / spec.divisor * cosine


def embed_texts(scorer: Scorer, prompts: Sequence[str], known: dict[str, np.ndarray] | None = None) -> np.ndarray:
    """Unit vectors [N, P] of prompts, float32. What is too long is cut, as CLIP's users do.

    Args:
      scorer: loaded.
      prompts: N texts.
      known: what was encoded before, used and extended.
    """
    known = {} if known is None else known
    new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
    length = min(scorer.tokenizer.model_max_length, scorer.spec.config.text.max_position_embeddings)
    for start in range(0, len(new), TEXT_BATCH):
        batch = new[start : start + TEXT_BATCH]
        filled = batch + [""] * (TEXT_BATCH - len(batch))
        ids = scorer.tokenizer(filled, padding="max_length", max_length=length, truncation=True).input_ids
        known.update(zip(batch, np.asarray(_embed_texts(scorer.params, scorer.spec, np.asarray(ids, np.int32)))))
    return np.stack([known[prompt] for prompt in prompts])


@partial(jax.jit, static_argnames="spec")
def _embed_texts(params, spec, ids):
    return clip.CLIP(spec.config, spec.dtype).apply({"params": params}, ids, method="embed_text")


def as_reward(scorer: Scorer, chunk: int = 32, mesh: jax.sharding.Mesh | None = None) -> Reward:
    """The scorer as a reward: images in chunks, every prompt encoded once.

    Args:
      scorer: loaded, on `mesh` if there is one.
      chunk: images scored at a time, which bounds the memory; rounded up to what the devices share evenly.
      mesh: of devices of this process that share each chunk; None for one device.

    Returns:
      The reward. It compiles once for each number and size of images.

    Raises:
      ValueError: a chunk below 1.
    """
    known: dict[str, np.ndarray] = {}
    return chunked_reward(chunk, mesh, score, scorer.params, scorer.spec, lambda prompts: embed_texts(scorer, prompts, known))


def chunked_reward(
    chunk: int, mesh: jax.sharding.Mesh | None, score: Callable, params: Mapping, spec: Any, encode: Callable[[Sequence[str]], Any]
) -> Reward:
    """The reward of a scorer on the device; see `as_reward` for what is common.

    Args:
      chunk, mesh: as there.
      score: (params, spec, images, texts) -> [N].
      params: where `mesh` says.
      spec: hashable.
      encode: prompts -> what `score` takes as texts, a tree of arrays [N, ...].
    """
    devices = 1 if mesh is None else mesh.size
    if chunk < 1:
        raise ValueError(f"chunk = {chunk}: must be at least 1")
    place = jax.tree.leaves(params)[0].sharding if mesh is None else jax.sharding.NamedSharding(mesh, jax.P(mesh.axis_names))

    def reward(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> np.ndarray:
        if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(prompts):
            raise ValueError(f"expected uint8 images [{len(prompts)}, H, W, 3], one a prompt, got {images.dtype} {images.shape}")
        count = len(prompts)
        size = at_once(count, chunk, devices)
        extra = -count % size

        def padded(x):
            return (jnp.pad if isinstance(x, jax.Array) else np.pad)(x, ((0, extra), *((0, 0),) * (x.ndim - 1)))

        images, texts = jax.device_put((padded(images), jax.tree.map(padded, encode(prompts))), place)
        return np.asarray(_score_chunks(score, size, params, spec, images, texts))[:count]

    return reward


def at_once(count: int, chunk: int, devices: int) -> int:
    """Of `count` images, how many are scored at a time by devices that share them evenly."""
    return -(-min(chunk, count) // devices) * devices


@partial(jax.jit, static_argnames=("score", "chunk", "spec"))
def _score_chunks(score, chunk, params, spec, images, texts):
    return in_chunks(lambda images, texts: (score(params, spec, images, texts),), chunk, (0, 0), (0,))(images, texts)[0]

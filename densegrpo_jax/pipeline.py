"""From text to image with a model folder: prompts -> conditioning, guided velocity, latents -> pixels. Functions over plain data.

`load` reads a folder; everything else takes configs (static) and parameters (arrays) apart, so that it can be called inside jit.

Legend: P prompts, B trajectories, S text tokens (CLIP's and T5's), D their width, E pooled width, h, w latent sides, C channels.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax import parallel
from densegrpo_jax.families import FAMILIES, Conditioning, Configs, DynamicShift
from densegrpo_jax.flow.grid import flux_shift
from densegrpo_jax.flow.rollout import in_chunks
from densegrpo_jax.models import t5, vae
from densegrpo_jax.models.source import Source
from densegrpo_jax.models.weights import COMPONENTS, TOKENIZERS, find_folder, open_weights, read_json, read_params

MAX_T5_LENGTH = 512  # T5's training length, diffusers' limit too


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A loaded model folder.

    Attributes:
      configs: see `Configs`.
      params: parameters by component: "transformer", "vae", "text_encoder", ...; those that were asked for.
      tokenizers: by component: "tokenizer", "tokenizer_2", "tokenizer_3".
      dtype: of the transformer's and the encoders' computation.
    """

    configs: Configs
    params: dict[str, dict]
    tokenizers: dict[str, Any]
    dtype: Any


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def read_configs(folder: Path) -> Configs:
    """Reads model_index.json, the component configs and the scheduler's.

    Raises:
      ValueError: a missing or broken file, another kind of model, or an option that is not supported; each is named.
    """
    index = read_json(folder / "model_index.json")
    family = index.get("_class_name")
    if family not in FAMILIES:
        raise ValueError(f"{folder / 'model_index.json'}: {family!r} is not supported; choose one of {', '.join(FAMILIES)}")
    networks = {}
    for name, network in FAMILIES[family].networks.items():
        if (index.get(name) or [None])[0] is None:
            if network.required:
                raise ValueError(f"{folder / 'model_index.json'}: has no {name}, which {family} needs here")
            continue
        path = folder / name / "config.json"
        values = read_json(path)
        try:
            networks[name] = network.config.from_json(values)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error
    configs = Configs(family, _read_shift(folder / "scheduler" / "scheduler_config.json", FAMILIES[family].dynamic), **networks)
    if misfits := FAMILIES[family].misfits(configs):
        raise ValueError(f"{folder}: its components do not fit together: {'; '.join(misfits)}")
    return configs


def components(configs: Configs) -> tuple[str, ...]:
    """Names of the components that the folder has."""
    return tuple(name for name in COMPONENTS if getattr(configs, name) is not None)


def _read_shift(path: Path, dynamic: bool) -> float | DynamicShift:
    """The shift that a scheduler's config asks for; a dynamic one only where the family may have it."""
    values = read_json(path)
    dynamic = dynamic and bool(values.get("use_dynamic_shifting"))
    plain = {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "use_dynamic_shifting": dynamic,
        "time_shift_type": "exponential",
        "use_karras_sigmas": False,
        "use_exponential_sigmas": False,
        "use_beta_sigmas": False,
        "invert_sigmas": False,
        "stochastic_sampling": False,
        "shift_terminal": None,
    }
    for field, value in plain.items():
        if (values.get(field) or value) != value:
            raise ValueError(f"{path}: {field} = {values[field]!r} is not supported, only {value!r}")

    def number(field: str, default: float) -> float:
        value = values.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{path}: {field} = {value!r} must be a positive number")
        return value

    if not dynamic:
        return float(number("shift", 1.0))
    base, top = (number(f"{end}_image_seq_len", tokens) for end, tokens in (("base", 256), ("max", 4096)))
    if base >= top:
        raise ValueError(f"{path}: base_image_seq_len = {base} must be below max_image_seq_len = {top}")
    return DynamicShift((base, float(number("base_shift", 0.5))), (top, float(number("max_shift", 1.15))))


def name_table(configs: Configs, component: str) -> dict[str, Source]:
    """The name table of a component; see models/source.py."""
    return FAMILIES[configs.family].networks[component].name_table(getattr(configs, component))


def abstract_params(configs: Configs, component: str) -> dict:
    """Shapes of a component's parameters, as a nested dict of `jax.ShapeDtypeStruct`."""
    init = FAMILIES[configs.family].networks[component].init
    return jax.eval_shape(lambda key: init(key, getattr(configs, component)), jax.random.key(0))


def load(
    model: str | Path,
    dtype: Any = jnp.bfloat16,
    only: Sequence[str] | None = None,
    variant: str | None = None,
    sharding: Callable[[str, dict], Any] | None = None,
) -> Pipeline:
    """Reads a model folder in diffusers layout.

    Args:
      model: the folder, or a Hugging Face id.
      dtype: float32 or bfloat16, of the transformer and the text encoders, their weights included. The autoencoder is float32.
      only: the components whose parameters to read; None for all. Configs and tokenizers are read always.
      variant: which weights, "fp16" or "bf16"; None for the unnamed ones.
      sharding: (component, shapes) -> where its parameters go, see `weights.read_params`; None for one device.

    Returns:
      The pipeline.

    Raises:
      ValueError: another dtype, an unknown component, or a folder that cannot be read; the file or option is named.
    """
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype {jnp.dtype(dtype).name}: choose float32 or bfloat16 (float16 overflows in T5 and in long training)")
    folder = find_folder(model, variant)
    configs = read_configs(folder)
    present = components(configs)
    if unknown := sorted(set(only or ()) - set(present)):
        raise ValueError(f"{folder}: has no component {', '.join(unknown)}; it has {', '.join(present)}")
    tokenizers = _read_tokenizers(folder, configs)
    params = {}
    for name in present if only is None else only:
        network, shapes = FAMILIES[configs.family].networks[name], abstract_params(configs, name)
        tensors = open_weights(folder / name, variant)
        if network.prefix and not any(tensor.startswith(network.prefix) for tensor in tensors):
            tensors = {network.prefix + tensor: stored for tensor, stored in tensors.items()}
        params[name] = read_params(
            tensors,
            name_table(configs, name),
            shapes,
            jnp.float32 if name == "vae" else dtype,
            sharding(name, shapes) if sharding else None,
            network.tied,
            network.ignored,
        )
    return Pipeline(configs, params, tokenizers, jnp.dtype(dtype))


def _read_tokenizers(folder: Path, configs: Configs) -> dict[str, Any]:
    from transformers import CLIPTokenizer, T5TokenizerFast

    tokenizers = {}
    for name, encoder in zip(TOKENIZERS, COMPONENTS[2:]):
        if encoder in components(configs):
            cls = T5TokenizerFast if _is_t5(configs, encoder) else CLIPTokenizer
            try:
                tokenizers[name] = cls.from_pretrained(folder / name, local_files_only=True)
            except Exception as error:  # the tokenizers library raises bare Exception for what it cannot parse
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ValueError(f"{folder / name}: not a readable tokenizer ({reason})") from error
            tokenizer, config = tokenizers[name], getattr(configs, encoder)
            if len(tokenizer) > config.vocab_size:
                raise ValueError(f"{folder / name}: has {len(tokenizer)} tokens, but {encoder} embeds {config.vocab_size}")
            if cls is CLIPTokenizer and tokenizer.model_max_length > config.max_position_embeddings:
                raise ValueError(
                    f"{folder / name}: model_max_length {tokenizer.model_max_length} exceeds the {config.max_position_embeddings} "
                    f"positions of {encoder}"
                )
    return tokenizers


def _is_t5(configs: Configs, encoder: str) -> bool:
    return isinstance(getattr(configs, encoder), t5.T5Config)


# ---------------------------------------------------------------------------------------------------------------------
# Text


def encode_prompts(
    pipe: Pipeline,
    prompts: Sequence[str],
    max_sequence_length: int = 256,
    batch_size: int = 8,
    cache: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] | None = None,
) -> Conditioning:
    """Encodes prompts as diffusers' pipeline of the folder's family does.

    Padding tokens are not masked, so the network sees `max_sequence_length`: use one value in training, sampling and evaluation. The
    negative prompt is encoded like any other.

    On a mesh each copy of the encoders takes a share of the prompts. Encoders that wait in the machine's memory are brought to the devices,
    used, and let go.

    Args:
      pipe: with the text encoders' parameters.
      prompts: P texts; the empty one is allowed. What is too long is cut, see `truncated`.
      max_sequence_length: T5 tokens, 1 to 512.
      batch_size: prompts encoded at once, at least; one for each copy of the encoders where they are more. The last batch is filled up, so
        that one program serves all.
      cache: what was encoded before, used and extended; a prompt of SD3.5 takes 5 MB of host memory in float32.

    Returns:
      Conditioning in the pipeline's dtype, with context [P, L + max_sequence_length, D], L the length of CLIP's sequences (SD3), or
      [P, max_sequence_length, D] (FLUX).

    Raises:
      ValueError: no prompts, a prompt that is not text, or a length out of range.
    """
    if isinstance(prompts, str) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"prompts must be one or more texts in a list, got {prompts!r:.80}")
    _clip_length(pipe, max_sequence_length)
    cache = {} if cache is None else cache
    new = [prompt for prompt in dict.fromkeys(prompts) if (prompt, max_sequence_length) not in cache]
    encoders = _encoders(pipe) if new else {}
    batch_size = -(-batch_size // parallel.copies()) * parallel.copies()
    for start in range(0, len(new), batch_size):
        batch = new[start : start + batch_size]
        ids = _tokenize(pipe, batch + [""] * (batch_size - len(batch)), max_sequence_length)
        context, pooled = jax.device_get(_encode(pipe.configs, pipe.dtype, max_sequence_length, encoders, ids))
        cache.update({(prompt, max_sequence_length): (context[i], pooled[i]) for i, prompt in enumerate(batch)})
    rows = [cache[prompt, max_sequence_length] for prompt in prompts]
    return Conditioning(*(jnp.asarray(np.stack(parts)) for parts in zip(*rows)))


def _encoders(pipe: Pipeline) -> dict[str, dict]:
    """The text encoders' parameters on the devices; those that are there already as they are."""
    encoders = {name: pipe.params[name] for name in components(pipe.configs) if name.startswith("text_encoder")}
    waiting = {name: tree for name, tree in encoders.items() if isinstance(jax.tree.leaves(tree)[0], np.ndarray)}
    return encoders | parallel.sent(waiting)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _encode(configs, dtype, max_sequence_length, params, ids):
    return parallel.whole(FAMILIES[configs.family].text(configs, dtype, max_sequence_length, params, parallel.by_copies(ids)))


def truncated(pipe: Pipeline, prompts: Sequence[str], max_sequence_length: int = 256) -> list[str]:
    """One line for every prompt that an encoder does not see to its end, saying which encoder and what is lost.

    Args: see `encode_prompts`.
    """
    clip_length, lines = _clip_length(pipe, max_sequence_length), []
    for prompt in dict.fromkeys(prompts):
        for name, tokenizer in pipe.tokenizers.items():
            long = _is_t5(pipe.configs, name.replace("tokenizer", "text_encoder"))
            limit = max_sequence_length if long else clip_length
            ids = tokenizer(prompt).input_ids
            if len(ids) > limit:
                lost = tokenizer.decode(ids[limit - 1 : -1])
                encoder = "T5" if long else f"CLIP ({name})"
                lines.append(f"{encoder} sees {limit} of {len(ids)} tokens of {prompt!r}; lost: {lost!r}")
    return lines


def _clip_length(pipe: Pipeline, max_sequence_length: int) -> int:
    """Length of CLIP's sequences; checks T5's."""
    if not 1 <= max_sequence_length <= MAX_T5_LENGTH:
        raise ValueError(f"max_sequence_length = {max_sequence_length}: choose 1 to {MAX_T5_LENGTH} T5 tokens")
    return pipe.tokenizers["tokenizer"].model_max_length


def _tokenize(pipe: Pipeline, prompts: list[str], max_sequence_length: int) -> dict[str, np.ndarray]:
    """Token ids [P, L] for each text encoder, cut and padded."""
    ids = {}
    for name, tokenizer in pipe.tokenizers.items():
        encoder = name.replace("tokenizer", "text_encoder")
        length = max_sequence_length if _is_t5(pipe.configs, encoder) else _clip_length(pipe, max_sequence_length)
        encoded = tokenizer(prompts, padding="max_length", max_length=length, truncation=True)
        ids[encoder] = np.asarray(encoded.input_ids, np.int32)
    return ids


# ---------------------------------------------------------------------------------------------------------------------
# Velocity


def network(configs: Configs, dtype: Any = jnp.float32, **options: Any) -> nn.Module:
    """The transformer as a module that maps (latents, sigma, context, pooled) and, where it `embeds_guidance`, the guidance scale to the
    velocity; `options` are its attributes (attention_impl, remat, scan_unroll, lora_scale)."""
    return FAMILIES[configs.family].transformer(configs.transformer, dtype=dtype, **options)


def needs_uncond(configs: Configs, guidance_scale: float) -> bool:
    """Whether guidance of this scale takes an unconditional branch: not at scale 1, and not where the scale is an input of the network.

    Raises:
      ValueError: a scale other than 1 for a FLUX without that input, such as FLUX.1-schnell: its distillation left nothing to guide.
    """
    if FAMILIES[configs.family].unconditional:
        return guidance_scale != 1.0
    if guidance_scale != 1.0 and not configs.transformer.guidance_embeds:
        raise ValueError(
            f"guidance scale {guidance_scale:g}: this FLUX has no input for it (FLUX.1-schnell is distilled without guidance); use 1"
        )
    return False


def default_guidance(configs: Configs) -> float:
    """The guidance scale that the model is published with: 4.5 for Stable Diffusion 3, 3.5 for FLUX.1-dev, 1 for FLUX.1-schnell."""
    if FAMILIES[configs.family].unconditional:
        return 4.5
    return 3.5 if configs.transformer.guidance_embeds else 1.0


def few_steps(configs: Configs) -> bool:
    """Whether the folder is of a network distilled to few steps: a FLUX without guidance input and on a fixed grid (FLUX.1-schnell).

    Its velocity leads to a clean image in one go, but is not that of a flow, so that no score can be read from it.
    """
    return not (FAMILIES[configs.family].unconditional or configs.transformer.guidance_embeds or isinstance(configs.shift, DynamicShift))


def velocity(
    model: nn.Module,
    params: Mapping,
    lora: Mapping | None = None,
    uncond: Conditioning | None = None,
    guidance_scale: float | jax.Array = 1.0,
    detach_uncond: bool = False,
) -> Callable[[jax.Array, jax.Array, Conditioning], jax.Array]:
    """The guided velocity as a function of latents, noise level and conditioning, for `flow.rollout` and the losses.

    v = v_uncond + guidance_scale (v_cond - v_uncond) (Ho and Salimans 2022, arXiv 2207.12598, with the scale of diffusers). Both
    branches go through the network in one call, stacked [B, 2, ...], so that a pair stays on the device of its trajectory. Where the
    scale is an input of the network (FLUX.1-dev), there is one branch.

    Args:
      model: of `network`.
      params: the transformer's base weights.
      lora: adapter, or None for the base model.
      uncond: conditioning to lead away from, one for all [1, ...] or one per trajectory [B, ...]; None: v = v_cond, one branch.
      guidance_scale: a number or a scalar array; of no effect without `uncond`, except as an input of the network.
      detach_uncond: let no gradient flow through v_uncond.

    Returns:
      velocity(x [B, h, w, C], sigma [B], cond with leading axis B) -> [B, h, w, C], float32.

    Raises:
      ValueError: `uncond` for a network whose input the scale is.
    """
    if model.embeds_guidance and uncond is not None:
        raise ValueError("the guidance scale is an input of this network, which has no unconditional branch: leave uncond out")
    variables = {"params": params} if lora is None else {"params": params, "lora": lora}

    def pair(first: jax.Array, second: jax.Array) -> jax.Array:  # [B, ...] twice -> [2B, ...], pairs adjacent
        first = jnp.broadcast_to(first, second.shape)
        return jnp.stack([first, second], axis=1).reshape(2 * second.shape[0], *second.shape[1:])

    def call(x: jax.Array, sigma: jax.Array, cond: Conditioning) -> jax.Array:
        if model.embeds_guidance:
            return model.apply(variables, x, sigma, *cond, jnp.full(x.shape[:1], guidance_scale, jnp.float32))
        if uncond is None:
            return model.apply(variables, x, sigma, *cond)
        v = model.apply(variables, pair(x, x), pair(sigma, sigma), *map(pair, uncond, cond))
        v = v.reshape(x.shape[0], 2, *v.shape[1:])
        v_uncond, v_cond = v[:, 0], v[:, 1]
        v_uncond = jax.lax.stop_gradient(v_uncond) if detach_uncond else v_uncond
        return v_uncond + guidance_scale * (v_cond - v_uncond)

    return call


def shift(configs: Configs, shape: tuple[int, ...] | None = None) -> float:
    """The shift of the folder's noise schedule.

    Args:
      configs: of the folder.
      shape: of the latents (h, w, C), where the shift follows the number of image tokens (FLUX.1-dev).

    Raises:
      ValueError: no shape for such a schedule.
    """
    if not isinstance(configs.shift, DynamicShift):
        return configs.shift
    if shape is None:
        raise ValueError(f"the noise schedule of this {configs.family} follows the size of the image: give the latents' shape")
    return flux_shift(shape[0] * shape[1] // configs.transformer.token_side**2, *configs.shift)


def sigmas(configs: Configs, num_steps: int, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """The noise levels [num_steps + 1] that diffusers' pipeline of the folder's family takes; `shape` as for `shift`."""
    return FAMILIES[configs.family].grid(num_steps, shift(configs, shape))


# ---------------------------------------------------------------------------------------------------------------------
# Images


def default_side(configs: Configs) -> int:
    """The side in pixels of the square images that the model is made for."""
    return configs.transformer.sample_size * configs.vae.downsampling


def latent_shape(configs: Configs, height: int, width: int) -> tuple[int, int, int]:
    """Shape (h, w, C) of the latents of an image.

    Raises:
      ValueError: a size that the model cannot make, with the nearest ones that it can.
    """
    transformer, factor = configs.transformer, configs.vae.downsampling
    unit, longest = factor * transformer.token_side, transformer.longest_side
    top = None if longest is None else longest * factor
    for name, side in (("height", height), ("width", width)):
        if side % unit or side < unit or (top and side > top):
            near = {max(multiple, unit) for multiple in (side // unit * unit, -(-side // unit) * unit)}
            near = " and ".join(str(n) for n in sorted({min(n, top) if top else n for n in near}))
            up_to = f" up to {top}" if top else ""
            raise ValueError(f"{name} = {side}: the model takes multiples of {unit}{up_to}; nearest: {near}")
    return height // factor, width // factor, transformer.latent_channels


def decode(configs: Configs, params: Mapping, latents: jax.Array, chunk: int | None = None) -> jax.Array:
    """Decodes latents of the diffusion model.

    Args:
      configs: of the folder.
      params: the autoencoder's.
      latents: [B, h, w, C].
      chunk: images at a time, which must divide B; bounds the memory. None for all at once.

    Returns:
      Images [B, H, W, 3] in [0, 1], float32; NaN where the decoder's output is not finite.
    """
    config = configs.vae

    def one(latents: jax.Array) -> tuple[jax.Array]:
        images = vae.decode(params, config, vae.denormalize_latents(config, latents))
        return (jnp.where(jnp.isfinite(images), jnp.clip(images / 2 + 0.5, 0.0, 1.0), jnp.nan),)

    return in_chunks(one, chunk, (0,), (0,))(latents)[0]


def to_uint8(images: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds images to bytes, saying which may be used.

    Args:
      images: [B, H, W, 3] in [0, 1].

    Returns:
      uint8 images, black where not finite, and [B] bool: the whole image is finite. Callers raise or mask where it is not.
    """
    finite = jnp.isfinite(images)
    return jnp.where(finite, jnp.round(images * 255.0), 0.0).astype(jnp.uint8), finite.all((1, 2, 3))

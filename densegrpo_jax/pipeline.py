"""From text to image with a model folder: prompts -> conditioning, guided velocity, latents -> pixels. Functions over plain data.

`load` reads a folder; everything else takes configs (static) and parameters (arrays) apart, so that it can be called inside jit.

Legend: P prompts, B trajectories, S text tokens (CLIP's and T5's), D their width, E pooled width, h, w latent sides, C channels.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax.flow.grid import sd3_sigmas
from densegrpo_jax.flow.rollout import in_chunks
from densegrpo_jax.models import clip, sd3, t5, vae
from densegrpo_jax.models.source import Source
from densegrpo_jax.models.weights import COMPONENTS, TOKENIZERS, find_folder, open_weights, read_json, read_params

MAX_T5_LENGTH = 512  # T5's training length, diffusers' limit too


class Network(NamedTuple):
    """How a component of a model folder is read.

    Attributes:
      config: dataclass with `from_json`.
      init: (key, config) -> random parameters; evaluated for shapes only.
      name_table: config -> where each parameter is found.
      tied, ignored: see `weights.read_params`.
      required: whether a folder may leave the component out.
    """

    config: Any
    init: Callable[[jax.Array, Any], dict]
    name_table: Callable[[Any], dict[str, Source]]
    tied: Mapping[str, str] = MappingProxyType({})
    ignored: tuple[str, ...] = ()
    required: bool = True


def _init_transformer(key: jax.Array, config: sd3.SD3Config) -> dict:
    p = config.patch_size
    arrays = (1, p, p, config.in_channels), (1,), (1, 1, config.joint_attention_dim), (1, config.pooled_projection_dim)
    return sd3.SD3Transformer(config).init(key, *map(jnp.zeros, arrays))["params"]


def _init_clip(key: jax.Array, config: clip.CLIPTextConfig) -> dict:
    return clip.CLIPText(config).init(key, jnp.zeros((1, 1), jnp.int32))["params"]


def _init_t5(key: jax.Array, config: t5.T5Config) -> dict:
    return t5.T5Encoder(config).init(key, jnp.zeros((1, 1), jnp.int32))["params"]


CLIP = Network(clip.CLIPTextConfig, _init_clip, clip.name_table, ignored=clip.IGNORED)

# The one place that knows which networks a kind of folder has.
FAMILIES: dict[str, dict[str, Network]] = {
    "StableDiffusion3Pipeline": {
        "transformer": Network(sd3.SD3Config, _init_transformer, sd3.name_table),
        "vae": Network(vae.VAEConfig, vae.init, vae.name_table),
        "text_encoder": CLIP,
        "text_encoder_2": CLIP,
        "text_encoder_3": Network(t5.T5Config, _init_t5, t5.name_table, tied=t5.TIED, required=False),
    }
}


class Configs(NamedTuple):
    """What a folder says about its model; hashable, so it may be a static argument of a jitted function.

    Attributes:
      family: class name in model_index.json.
      shift: of the noise schedule.
      transformer, vae, text_encoder, text_encoder_2, text_encoder_3: config of each component; None where a folder has none.
    """

    family: str
    shift: float
    transformer: Any
    vae: Any
    text_encoder: Any
    text_encoder_2: Any = None
    text_encoder_3: Any = None


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


class Conditioning(NamedTuple):
    """Encoded prompts: context [P, S, D] and pooled [P, E]."""

    context: jax.Array
    pooled: jax.Array


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
    for name, network in FAMILIES[family].items():
        if (index.get(name) or [None])[0] is None:
            if network.required:
                raise ValueError(f"{folder / 'model_index.json'}: has no {name}, which {family} needs here")
            continue
        path = folder / name / "config.json"
        try:
            networks[name] = network.config.from_json(read_json(path))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error
    configs = Configs(family, _read_shift(folder / "scheduler" / "scheduler_config.json"), **networks)
    _check_fit(folder, configs)
    return configs


def _check_fit(folder: Path, configs: Configs) -> None:
    """Refuses components that each are readable, but not made for each other."""
    transformer, short = configs.transformer, (configs.text_encoder, configs.text_encoder_2)
    if None in (encoder.projection_dim for encoder in short):
        raise ValueError(f"{folder}: its CLIP encoders must have a projection (CLIPTextModelWithProjection)")
    pairs = {
        "the transformer's in_channels and out_channels": (transformer.in_channels, transformer.channels_out),
        "the transformer's in_channels and the autoencoder's latent_channels": (transformer.in_channels, configs.vae.latent_channels),
        "the transformer's pooled_projection_dim and the CLIP encoders' projections": (
            transformer.pooled_projection_dim,
            sum(encoder.projection_dim for encoder in short),
        ),
    }
    if configs.text_encoder_3 is not None:
        pairs["the transformer's joint_attention_dim and T5's d_model"] = (transformer.joint_attention_dim, configs.text_encoder_3.d_model)
    for what, (first, second) in pairs.items():
        if first != second:
            raise ValueError(f"{folder}: its components do not fit together: {what} are {first} and {second}")
    if (width := sum(encoder.hidden_size for encoder in short)) > transformer.joint_attention_dim:
        raise ValueError(f"{folder}: the CLIP encoders' widths add to {width}, above joint_attention_dim {transformer.joint_attention_dim}")


def components(configs: Configs) -> tuple[str, ...]:
    """Names of the components that the folder has."""
    return tuple(name for name in COMPONENTS if getattr(configs, name) is not None)


def _read_shift(path: Path) -> float:
    values = read_json(path)
    plain = {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "use_dynamic_shifting": False,
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
    shift = values.get("shift", 1.0)
    if isinstance(shift, bool) or not isinstance(shift, int | float) or not 0 < shift < float("inf"):
        raise ValueError(f"{path}: shift = {shift!r} must be a positive number")
    return float(shift)


def name_table(configs: Configs, component: str) -> dict[str, Source]:
    """The name table of a component; see models/source.py."""
    return FAMILIES[configs.family][component].name_table(getattr(configs, component))


def abstract_params(configs: Configs, component: str) -> dict:
    """Shapes of a component's parameters, as a nested dict of `jax.ShapeDtypeStruct`."""
    init = FAMILIES[configs.family][component].init
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
        network, shapes = FAMILIES[configs.family][name], abstract_params(configs, name)
        params[name] = read_params(
            open_weights(folder / name, variant),
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
    for name, encoder, cls in zip(TOKENIZERS, COMPONENTS[2:], (CLIPTokenizer, CLIPTokenizer, T5TokenizerFast)):
        if encoder in components(configs):
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


# ---------------------------------------------------------------------------------------------------------------------
# Text


def encode_prompts(
    pipe: Pipeline,
    prompts: Sequence[str],
    max_sequence_length: int = 256,
    batch_size: int = 8,
    cache: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] | None = None,
) -> Conditioning:
    """Encodes prompts as Stable Diffusion 3 does (Esser et al. 2024, section 4.1, and diffusers' pipeline).

    Context: the last but one hidden states of both CLIP encoders side by side, padded with zeros to T5's width, then T5's output
    (zeros without T5). Pooled: the projected end-of-text states of both. Padding tokens are not masked, so the network sees
    `max_sequence_length`: use one value in training, sampling and evaluation. The negative prompt is encoded like any other.

    Args:
      pipe: with the text encoders' parameters.
      prompts: P texts; the empty one is allowed. What is too long is cut, see `truncated`.
      max_sequence_length: T5 tokens, 1 to 512.
      batch_size: prompts encoded at once; the last batch is filled up, so that one program serves all.
      cache: what was encoded before, used and extended; a prompt of SD3.5 takes 5 MB of host memory in float32.

    Returns:
      Conditioning with context [P, L + max_sequence_length, D], L the length of CLIP's sequences, in the pipeline's dtype.

    Raises:
      ValueError: no prompts, a prompt that is not text, or a length out of range.
    """
    if isinstance(prompts, str) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"prompts must be one or more texts in a list, got {prompts!r:.80}")
    _clip_length(pipe, max_sequence_length)
    cache = {} if cache is None else cache
    new = [prompt for prompt in dict.fromkeys(prompts) if (prompt, max_sequence_length) not in cache]
    for start in range(0, len(new), batch_size):
        batch = new[start : start + batch_size]
        ids = _tokenize(pipe, batch + [""] * (batch_size - len(batch)), max_sequence_length)
        encoders = {name: pipe.params[name] for name in ids}
        context, pooled = jax.device_get(_encode(pipe.configs, pipe.dtype, max_sequence_length, encoders, ids))
        cache.update({(prompt, max_sequence_length): (context[i], pooled[i]) for i, prompt in enumerate(batch)})
    rows = [cache[prompt, max_sequence_length] for prompt in prompts]
    return Conditioning(*(jnp.asarray(np.stack(parts)) for parts in zip(*rows)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _encode(configs, dtype, max_sequence_length, params, ids):
    short = [clip.CLIPText(getattr(configs, name), dtype).apply({"params": params[name]}, ids[name]) for name in COMPONENTS[2:4]]
    hidden = jnp.concatenate([output.penultimate for output in short], axis=-1)  # [P, L, D of both]
    pooled = jnp.concatenate([output.pooled for output in short], axis=-1)
    width = configs.transformer.joint_attention_dim
    if configs.text_encoder_3 is None:
        long = jnp.zeros((hidden.shape[0], max_sequence_length, width), dtype)
    else:
        long = t5.T5Encoder(configs.text_encoder_3, dtype).apply({"params": params["text_encoder_3"]}, ids["text_encoder_3"])
    hidden = jnp.pad(hidden, ((0, 0), (0, 0), (0, width - hidden.shape[-1])))
    return Conditioning(jnp.concatenate([hidden, long], axis=1), pooled)


def truncated(pipe: Pipeline, prompts: Sequence[str], max_sequence_length: int = 256) -> list[str]:
    """One line for every prompt that an encoder does not see to its end, saying which encoder and what is lost.

    Args: see `encode_prompts`.
    """
    clip_length, lines = _clip_length(pipe, max_sequence_length), []
    for prompt in dict.fromkeys(prompts):
        for name, tokenizer in pipe.tokenizers.items():
            limit = max_sequence_length if name == "tokenizer_3" else clip_length
            ids = tokenizer(prompt).input_ids
            if len(ids) > limit:
                lost = tokenizer.decode(ids[limit - 1 : -1])
                encoder = "T5" if name == "tokenizer_3" else f"CLIP ({name})"
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
        length = max_sequence_length if name == "tokenizer_3" else _clip_length(pipe, max_sequence_length)
        encoded = tokenizer(prompts, padding="max_length", max_length=length, truncation=True)
        ids[name.replace("tokenizer", "text_encoder")] = np.asarray(encoded.input_ids, np.int32)
    return ids


# ---------------------------------------------------------------------------------------------------------------------
# Velocity


def network(configs: Configs, dtype: Any = jnp.float32, **options: Any) -> nn.Module:
    """The transformer as a module that maps (latents, sigma, context, pooled) to the velocity; `options` are its attributes
    (attention_impl, remat, scan_unroll, lora_scale)."""
    return sd3.SD3Transformer(configs.transformer, dtype=dtype, **options)


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
    branches go through the network in one call, stacked [B, 2, ...], so that a pair stays on the device of its trajectory.

    Args:
      model: of `network`.
      params: the transformer's base weights.
      lora: adapter, or None for the base model.
      uncond: conditioning to lead away from, one for all [1, ...] or one per trajectory [B, ...]; None: v = v_cond, one branch.
      guidance_scale: a number or a scalar array; of no effect without `uncond`.
      detach_uncond: let no gradient flow through v_uncond.

    Returns:
      velocity(x [B, h, w, C], sigma [B], cond with leading axis B) -> [B, h, w, C], float32.
    """
    variables = {"params": params} if lora is None else {"params": params, "lora": lora}

    def pair(first: jax.Array, second: jax.Array) -> jax.Array:  # [B, ...] twice -> [2B, ...], pairs adjacent
        first = jnp.broadcast_to(first, second.shape)
        return jnp.stack([first, second], axis=1).reshape(2 * second.shape[0], *second.shape[1:])

    def call(x: jax.Array, sigma: jax.Array, cond: Conditioning) -> jax.Array:
        if uncond is None:
            return model.apply(variables, x, sigma, *cond)
        v = model.apply(variables, pair(x, x), pair(sigma, sigma), *map(pair, uncond, cond))
        v = v.reshape(x.shape[0], 2, *v.shape[1:])
        v_uncond, v_cond = v[:, 0], v[:, 1]
        v_uncond = jax.lax.stop_gradient(v_uncond) if detach_uncond else v_uncond
        return v_uncond + guidance_scale * (v_cond - v_uncond)

    return call


def sigmas(configs: Configs, num_steps: int) -> np.ndarray:
    """The noise levels [num_steps + 1] of the folder's scheduler, as its FlowMatchEulerDiscreteScheduler in diffusers has them."""
    return sd3_sigmas(num_steps, configs.shift)


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
    unit = factor * transformer.patch_size
    top = transformer.pos_embed_max_size * unit
    for name, side in (("height", height), ("width", width)):
        if side % unit or not unit <= side <= top:
            near = sorted({min(max(multiple, unit), top) for multiple in (side // unit * unit, -(-side // unit) * unit)})
            raise ValueError(f"{name} = {side}: the model takes multiples of {unit} up to {top}; nearest: {' and '.join(map(str, near))}")
    return height // factor, width // factor, transformer.in_channels


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

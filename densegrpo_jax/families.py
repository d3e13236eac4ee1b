"""The kinds of model folder: which networks each has, how its text becomes conditioning, and what must fit together.

Adding a family is adding an entry to FAMILIES; everything else asks there.

Legend: P prompts, S text tokens, D their width, E pooled width.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax.flow.grid import sd3_sigmas, uniform_sigmas
from densegrpo_jax.models import clip, flux, sd3, t5, vae
from densegrpo_jax.models.source import Source
from densegrpo_jax.models.weights import COMPONENTS


class DynamicShift(NamedTuple):
    """A shift exp(mu), mu on the line through two points (image tokens, mu); see `flow.flux_shift`."""

    base: tuple[int, float]
    top: tuple[int, float]


class Configs(NamedTuple):
    """What a folder says about its model; hashable, so it may be a static argument of a jitted function.

    Attributes:
      family: class name in model_index.json.
      shift: of the noise schedule, a number or a rule.
      transformer, vae, text_encoder, text_encoder_2, text_encoder_3: config of each component; None where a folder has none.
    """

    family: str
    shift: float | DynamicShift
    transformer: Any
    vae: Any
    text_encoder: Any
    text_encoder_2: Any = None
    text_encoder_3: Any = None


class Conditioning(NamedTuple):
    """Encoded prompts: context [P, S, D] and pooled [P, E]."""

    context: jax.Array
    pooled: jax.Array


class Network(NamedTuple):
    """How a component of a model folder is read.

    Attributes:
      config: dataclass with `from_json`.
      init: (key, config) -> random parameters; evaluated for shapes only.
      name_table: config -> where each parameter is found.
      tied, ignored: see `weights.read_params`.
      required: whether a folder may leave the component out.
      prefix: of all torch names, which some writers leave out.
    """

    config: Any
    init: Callable[[jax.Array, Any], dict]
    name_table: Callable[[Any], dict[str, Source]]
    tied: Mapping[str, str] = MappingProxyType({})
    ignored: tuple[str, ...] = ()
    required: bool = True
    prefix: str = ""


class Family(NamedTuple):
    """A kind of model folder.

    Attributes:
      networks: its components.
      transformer: module class of the velocity.
      grid: (number of steps, shift) -> noise levels.
      dynamic: whether the shift may follow the size of the image.
      unconditional: whether guidance takes an unconditional branch.
      text: (configs, dtype, T5 tokens, encoders' parameters, token ids) -> context and pooled.
      misfits: configs -> what does not fit together, a line each.
    """

    networks: dict[str, Network]
    transformer: type[nn.Module]
    grid: Callable[[int, float], np.ndarray]
    dynamic: bool
    unconditional: bool
    text: Callable[[Configs, Any, int, dict], Conditioning]
    misfits: Callable[[Configs], list[str]]


# ---------------------------------------------------------------------------------------------------------------------
# Networks


def _init_sd3(key: jax.Array, config: sd3.SD3Config) -> dict:
    p = config.patch_size
    arrays = (1, p, p, config.in_channels), (1,), (1, 1, config.joint_attention_dim), (1, config.pooled_projection_dim)
    return sd3.SD3Transformer(config).init(key, *map(jnp.zeros, arrays))["params"]


def _init_flux(key: jax.Array, config: flux.FluxConfig) -> dict:
    p, guidance = config.token_side, ((1,),) if config.guidance_embeds else ()
    arrays = (1, p, p, config.latent_channels), (1,), (1, 1, config.joint_attention_dim), (1, config.pooled_projection_dim), *guidance
    return flux.FluxTransformer(config).init(key, *map(jnp.zeros, arrays))["params"]


def _init_clip(key: jax.Array, config: clip.CLIPTextConfig) -> dict:
    return clip.CLIPText(config).init(key, jnp.zeros((1, 1), jnp.int32))["params"]


def _init_t5(key: jax.Array, config: t5.T5Config) -> dict:
    return t5.T5Encoder(config).init(key, jnp.zeros((1, 1), jnp.int32))["params"]


CLIP = Network(clip.CLIPTextConfig, _init_clip, clip.name_table, ignored=clip.IGNORED)
T5 = Network(t5.T5Config, _init_t5, t5.name_table, tied=t5.TIED)
VAE = Network(vae.VAEConfig, vae.init, vae.name_table)


# ---------------------------------------------------------------------------------------------------------------------
# Text


def _sd3_text(configs: Configs, dtype: Any, max_sequence_length: int, params: dict, ids: dict) -> Conditioning:
    """Context: the last but one hidden states of both CLIP encoders side by side, padded with zeros to T5's width, then T5's output
    (zeros without T5). Pooled: the projected end-of-text states of both (Esser et al. 2024, section 4.1)."""
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


def _flux_text(configs: Configs, dtype: Any, max_sequence_length: int, params: dict, ids: dict) -> Conditioning:
    """Context: T5's output. Pooled: CLIP's end-of-text state, which has no projection."""
    short = clip.CLIPText(configs.text_encoder, dtype).apply({"params": params["text_encoder"]}, ids["text_encoder"])
    long = t5.T5Encoder(configs.text_encoder_2, dtype).apply({"params": params["text_encoder_2"]}, ids["text_encoder_2"])
    return Conditioning(long, short.pooled)


# ---------------------------------------------------------------------------------------------------------------------
# What must fit together


def _differ(pairs: Mapping[str, tuple[int, int]]) -> list[str]:
    return [f"{what} are {first} and {second}" for what, (first, second) in pairs.items() if first != second]


def _common_misfits(configs: Configs) -> list[str]:
    """What would not fit in a folder of any family."""
    transformer = configs.transformer
    return _differ(
        {
            "the transformer's in_channels and out_channels": (transformer.in_channels, transformer.channels_out),
            "the transformer's in_channels (unpacked) and the autoencoder's latent_channels": (
                transformer.latent_channels,
                configs.vae.latent_channels,
            ),
        }
    )


def _sd3_misfits(configs: Configs) -> list[str]:
    transformer, short = configs.transformer, (configs.text_encoder, configs.text_encoder_2)
    if None in (encoder.projection_dim for encoder in short):
        return ["its CLIP encoders must have a projection (CLIPTextModelWithProjection)"]
    pairs = {
        "the transformer's pooled_projection_dim and the CLIP encoders' projections": (
            transformer.pooled_projection_dim,
            sum(encoder.projection_dim for encoder in short),
        )
    }
    if configs.text_encoder_3 is not None:
        pairs["the transformer's joint_attention_dim and T5's d_model"] = (transformer.joint_attention_dim, configs.text_encoder_3.d_model)
    width = sum(encoder.hidden_size for encoder in short)
    wide = [f"the CLIP encoders' widths add to {width}, above joint_attention_dim {transformer.joint_attention_dim}"]
    return _common_misfits(configs) + _differ(pairs) + (wide if width > transformer.joint_attention_dim else [])


def _flux_misfits(configs: Configs) -> list[str]:
    transformer, short = configs.transformer, configs.text_encoder
    if short.projection_dim is not None:
        return ["its CLIP encoder must have no projection (CLIPTextModel)"]
    return _common_misfits(configs) + _differ(
        {
            "the transformer's pooled_projection_dim and CLIP's hidden_size": (transformer.pooled_projection_dim, short.hidden_size),
            "the transformer's joint_attention_dim and T5's d_model": (transformer.joint_attention_dim, configs.text_encoder_2.d_model),
        }
    )


# ---------------------------------------------------------------------------------------------------------------------
# The families

FAMILIES = {
    "StableDiffusion3Pipeline": Family(
        networks={
            "transformer": Network(sd3.SD3Config, _init_sd3, sd3.name_table),
            "vae": VAE,
            "text_encoder": CLIP,
            "text_encoder_2": CLIP,
            "text_encoder_3": T5._replace(required=False),
        },
        transformer=sd3.SD3Transformer,
        grid=sd3_sigmas,
        dynamic=False,
        unconditional=True,
        text=_sd3_text,
        misfits=_sd3_misfits,
    ),
    "FluxPipeline": Family(
        networks={
            "transformer": Network(flux.FluxConfig, _init_flux, flux.name_table),
            "vae": VAE,
            "text_encoder": CLIP._replace(prefix="text_model."),  # transformers 5 writes a CLIPTextModel without
            "text_encoder_2": T5,
        },
        transformer=flux.FluxTransformer,
        grid=uniform_sigmas,
        dynamic=True,
        unconditional=False,
        text=_flux_text,
        misfits=_flux_misfits,
    ),
}

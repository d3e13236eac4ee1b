"""CLIP's text and vision towers, alone or together (Radford et al. 2021, arXiv 2103.00020; the layout of transformers).

`CLIPText` conditions Stable Diffusion and FLUX, `CLIP` scores images against texts. The layers of a tower are stacked and
scanned. Text is expected to be padded on the right: attention is causal, so no padding mask is needed up to the end token.

Legend: B batch, S tokens, N patches, D width, H heads, P width of the shared space.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax.models.attention import attention
from densegrpo_jax.models.component_json import TRANSFORMERS_KEYS, read_fields
from densegrpo_jax.models.layers import Dense, LayerNorm, patchify
from densegrpo_jax.models.source import Source

ACTIVATIONS = {
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu": partial(jax.nn.gelu, approximate=False),
}

# Constants that older versions of transformers stored among the weights.
IGNORED = ("text_model.embeddings.position_ids", "vision_model.embeddings.position_ids")

# A configuration may say 2 where the tokenizer's end token is another: then the end is the largest id (as in OpenAI's code).
LEGACY_EOS = 2


@dataclass(frozen=True)
class CLIPTextConfig:
    """Shape of the text tower, with the names and defaults of transformers' CLIPTextConfig."""

    vocab_size: int = 49408
    hidden_size: int = 512  # D
    intermediate_size: int = 2048
    projection_dim: int | None = 512  # P; None: no projection, the pooled output has width D
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"  # or "gelu"
    layer_norm_eps: float = 1e-5
    eos_token_id: int = 49407  # the first one is pooled; 2: the largest id is

    def __post_init__(self):
        _check(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "CLIPTextConfig":
        """Reads text_encoder/config.json. A CLIPTextModel (FLUX) has no projection, a CLIPTextModelWithProjection (SD3) has.

        Raises:
          ValueError: an unknown key, or an option of a value that is not implemented; both are named.
        """
        config = cls(**_read(cls, values, "clip_text_model"))
        return replace(config, projection_dim=None) if values.get("architectures") == ["CLIPTextModel"] else config


@dataclass(frozen=True)
class CLIPVisionConfig:
    """Shape of the vision tower, with the names and defaults of transformers' CLIPVisionConfig."""

    hidden_size: int = 768  # D
    intermediate_size: int = 3072
    projection_dim: int = 512  # P
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "quick_gelu"  # or "gelu"
    layer_norm_eps: float = 1e-5

    def __post_init__(self):
        _check(self)
        if self.image_size % self.patch_size:
            raise ValueError(f"CLIPVisionConfig: image_size {self.image_size} must be a multiple of patch_size {self.patch_size}")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "CLIPVisionConfig":
        """Reads the config.json of a CLIPVisionModelWithProjection; raises as `CLIPTextConfig.from_json`."""
        return cls(**_read(cls, values, "clip_vision_model"))


@dataclass(frozen=True)
class CLIPConfig:
    """Both towers, as transformers' CLIPConfig; their `projection_dim` is the shared one."""

    text: CLIPTextConfig
    vision: CLIPVisionConfig
    logit_scale_init_value: float = 2.6592

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "CLIPConfig":
        """Reads the config.json of a CLIPModel.

        Older files describe each tower twice; as in transformers, `text_config_dict` then replaces `text_config`, and what it
        leaves out takes its default.

        Raises:
          ValueError: as `CLIPTextConfig.from_json`.
        """
        towers = ("text_config", "vision_config", "text_config_dict", "vision_config_dict")
        _read(cls, {key: value for key, value in values.items() if key not in towers}, "clip")
        shared = {"projection_dim": values.get("projection_dim", 512)}
        text, vision = ((values.get(f"{t}_config_dict") or values.get(f"{t}_config") or {}) for t in ("text", "vision"))
        return cls(
            replace(CLIPTextConfig.from_json(text), **shared),
            replace(CLIPVisionConfig.from_json(vision), **shared),
            values.get("logit_scale_init_value", cls.logit_scale_init_value),
        )


def _read(cls, values, model_type):
    fixed = {"model_type": model_type, "is_decoder": False, "add_cross_attention": False, "pruned_heads": {}}
    return read_fields(cls, values, fixed, TRANSFORMERS_KEYS | {"projection_dim"})


def _check(config) -> None:
    name = type(config).__name__
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(f"{name}: hidden_size {config.hidden_size} must be a multiple of num_attention_heads {config.num_attention_heads}")
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(f"{name}: hidden_act {config.hidden_act!r} is not supported, only {' and '.join(ACTIVATIONS)}")


# ---------------------------------------------------------------------------------------------------------------------
# Layers


class Block(nn.Module):
    """Pre-norm attention and MLP of either tower.

    Attributes:
      config: of the tower.
      dtype: of the computation.
      lora_scale: alpha / rank of adapters.
    """

    config: CLIPTextConfig | CLIPVisionConfig
    dtype: jnp.dtype
    lora_scale: float

    @nn.compact
    def __call__(self, carry: tuple[jax.Array, jax.Array], bias: jax.Array | None) -> tuple[tuple[jax.Array, jax.Array], None]:
        """Maps (x [B, S, D], anything) to (result of the same shape, x); `bias` [1, 1, S, S] goes to the attention logits.

        Handing on its input lets the scan end with the last two hidden states without keeping all of them.
        """
        x = before = carry[0]
        cfg, D, L = self.config, self.config.hidden_size, self.config.num_hidden_layers
        norm = partial(LayerNorm, eps=cfg.layer_norm_eps, dtype=self.dtype)

        def dense(name, features, std):
            init = nn.initializers.normal(std)
            return Dense(features, dtype=self.dtype, lora_scale=self.lora_scale, kernel_init=init, name=name)

        # Initial scales of transformers' CLIP: what enters the residual stream is small in deep towers.
        small = D**-0.5 * (2 * L) ** -0.5
        y = norm(name="layer_norm1")(x)
        heads = (*x.shape[:2], cfg.num_attention_heads, D // cfg.num_attention_heads)
        q, k, v = (dense(name, D, small)(y).reshape(heads) for name in ("q_proj", "k_proj", "v_proj"))  # [B, S, H, D / H]
        x = x + dense("out_proj", D, D**-0.5)(attention(q, k, v, bias=bias).reshape(x.shape))
        y = dense("fc1", cfg.intermediate_size, (2 * D) ** -0.5)(norm(name="layer_norm2")(x))
        return (x + dense("fc2", D, small)(ACTIVATIONS[cfg.hidden_act](y)), before), None


def _layers(config, dtype, remat, scan_unroll, lora_scale, x, bias):
    """The tower's stacked blocks; returns the output of the last and of the one before it."""
    block = nn.remat(Block, prevent_cse=False) if remat else Block
    stack = nn.scan(
        block,
        variable_axes={"params": 0, "lora": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=config.num_hidden_layers,
        unroll=min(scan_unroll, config.num_hidden_layers),
    )
    return stack(config, dtype, lora_scale, name="layers")((x, x), bias)[0]


class TextOutput(NamedTuple):
    """What the text tower gives.

    Attributes:
      penultimate: output of the last block but one, not normed, [B, S, D] (Stable Diffusion 3's context).
      last: output of the last block, normed, [B, S, D].
      pooled: `last` at the end token, projected, [B, P], or [B, D] without projection.
    """

    penultimate: jax.Array
    last: jax.Array
    pooled: jax.Array


class CLIPText(nn.Module):
    """The text tower (transformers' CLIPTextModelWithProjection, or CLIPTextModel without `projection_dim`).

    Attributes:
      config: shape.
      dtype: of the computation and output, float32 or bfloat16; norm statistics and softmax stay in float32.
      remat: recompute each block in the backward pass.
      scan_unroll: blocks per step of the scan.
      lora_scale: alpha / rank of adapters.
    """

    config: CLIPTextConfig
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    scan_unroll: int = 1
    lora_scale: float = 1.0

    @nn.compact
    def __call__(self, ids: jax.Array) -> TextOutput:
        """Encodes token ids [B, S], S <= max_position_embeddings, padded on the right.

        Ids outside the vocabulary give NaN. A text without end token is pooled at its first token, as in transformers.

        Raises:
          ValueError: ids of another shape or not integers.
        """
        cfg, S = self.config, ids.shape[-1]
        if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer) or S > cfg.max_position_embeddings:
            raise ValueError(
                f"ids must be integers [B, S] with S at most {cfg.max_position_embeddings} positions, got {ids.dtype} {ids.shape}"
            )
        embed = partial(nn.Embed, dtype=self.dtype, embedding_init=nn.initializers.normal(0.02))
        x = embed(cfg.vocab_size, cfg.hidden_size, name="token_embedding")(ids)  # [B, S, D]
        x = x + embed(cfg.max_position_embeddings, cfg.hidden_size, name="position_embedding")(jnp.arange(S))[None]
        causal = jnp.where(np.tri(S, dtype=bool), 0.0, jnp.finfo(jnp.float32).min)[None, None]
        x, penultimate = _layers(cfg, self.dtype, self.remat, self.scan_unroll, self.lora_scale, x, causal)
        last = LayerNorm(eps=cfg.layer_norm_eps, dtype=self.dtype, name="final_layer_norm")(x)
        end = jnp.argmax(ids if cfg.eos_token_id == LEGACY_EOS else ids == cfg.eos_token_id, axis=-1)
        pooled = jnp.take_along_axis(last, end[:, None, None], axis=1)[:, 0]  # [B, D]
        if cfg.projection_dim is not None:
            pooled = _projection(cfg, self.dtype, "text_projection")(pooled)
        return TextOutput(penultimate, last, pooled)


class CLIPVision(nn.Module):
    """The vision tower (transformers' CLIPVisionModelWithProjection).

    Attributes: as `CLIPText`.
    """

    config: CLIPVisionConfig
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    scan_unroll: int = 1
    lora_scale: float = 1.0

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Encodes normalised images [B, image_size, image_size, 3] to [B, P].

        Raises:
          ValueError: images of another shape.
        """
        cfg, D = self.config, self.config.hidden_size
        size = (cfg.image_size, cfg.image_size, cfg.num_channels)
        if pixels.ndim != 4 or pixels.shape[1:] != size:
            raise ValueError(f"pixels must be [B, {size[0]}, {size[1]}, {size[2]}], got {pixels.shape}")
        small = nn.initializers.normal(0.02)
        kernel = self.param("patch_embedding", small, (cfg.patch_size, cfg.patch_size, cfg.num_channels, D), jnp.float32)
        token = self.param("class_embedding", nn.initializers.normal(D**-0.5), (D,), jnp.float32)
        patches = patchify(pixels.astype(self.dtype), cfg.patch_size)  # [B, N, patch * patch * 3]
        x = patches @ kernel.astype(self.dtype).reshape(-1, D)
        token = jnp.broadcast_to(token.astype(self.dtype)[None, None], (x.shape[0], 1, D))
        x = jnp.concatenate([token, x], axis=1)  # [B, 1 + N, D]
        positions = self.param("position_embedding", small, (x.shape[1], D), jnp.float32)
        norm = partial(LayerNorm, eps=cfg.layer_norm_eps, dtype=self.dtype)
        x = norm(name="pre_layernorm")(x + positions.astype(self.dtype)[None])
        x, _ = _layers(cfg, self.dtype, self.remat, self.scan_unroll, self.lora_scale, x, None)
        self.sow("intermediates", "tokens", x)  # for who asks: apply(..., mutable=["intermediates"])
        return _projection(cfg, self.dtype, "visual_projection")(norm(name="post_layernorm")(x[:, 0]))


def _projection(config, dtype, name: str) -> Dense:
    init = nn.initializers.normal(config.hidden_size**-0.5)
    return Dense(config.projection_dim, use_bias=False, dtype=dtype, kernel_init=init, name=name)


class CLIP(nn.Module):
    """Both towers and their temperature (transformers' CLIPModel).

    Attributes: as `CLIPText`.
    """

    config: CLIPConfig
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    scan_unroll: int = 1
    lora_scale: float = 1.0

    def setup(self):
        settings = (self.dtype, self.remat, self.scan_unroll, self.lora_scale)
        self.text_model = CLIPText(self.config.text, *settings)
        self.vision_model = CLIPVision(self.config.vision, *settings)
        self.logit_scale = self.param("logit_scale", nn.initializers.constant(self.config.logit_scale_init_value), (), jnp.float32)

    def embed_text(self, ids: jax.Array) -> jax.Array:
        """Unit vectors [B, P] of texts, ids [B, S]; float32."""
        return _unit(self.text_model(ids).pooled)

    def embed_images(self, pixels: jax.Array) -> jax.Array:
        """Unit vectors [B, P] of normalised images [B, H, W, 3]; float32."""
        return _unit(self.vision_model(pixels))

    def __call__(self, ids: jax.Array, pixels: jax.Array) -> jax.Array:
        """Scores of every image with every text, exp(logit_scale) * cosine: [images, texts], float32."""
        images, texts = self.embed_images(pixels), self.embed_text(ids)
        return jnp.exp(self.logit_scale.astype(jnp.float32)) * jnp.matmul(images, texts.T, precision="highest")


def _unit(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


# ---------------------------------------------------------------------------------------------------------------------
# Names


def name_table(config: CLIPTextConfig | CLIPVisionConfig | CLIPConfig) -> dict[str, Source]:
    """Where each parameter of `CLIPText`, `CLIPVision` or `CLIP` is found in the published files, one to one.

    The names are those of CLIPTextModelWithProjection, CLIPVisionModelWithProjection and CLIPModel. The prefix "text_model." is
    that of the files also where there is no projection (CLIPTextModel, whose torch module lost it in transformers 5).
    `IGNORED` may be in the files too.
    """
    if isinstance(config, CLIPConfig):
        table = {"logit_scale": Source(("logit_scale",))}
        for tower in ("text", "vision"):
            table |= {f"{tower}_model/{path}": source for path, source in name_table(getattr(config, tower)).items()}
        return table
    table: dict[str, Source] = {}

    def add(path: str, names: list[str], stacked: bool = False, weight: str = "kernel") -> None:
        transform = "transpose" if weight == "kernel" else "none"
        table[f"{path}/{weight}"] = Source(tuple(f"{name}.weight" for name in names), transform, stacked)
        table[f"{path}/bias"] = Source(tuple(f"{name}.bias" for name in names), "none", stacked)

    if isinstance(config, CLIPTextConfig):
        prefix = "text_model"
        for name in ("token_embedding", "position_embedding"):
            table[f"{name}/embedding"] = Source((f"{prefix}.embeddings.{name}.weight",))
        add("final_layer_norm", [f"{prefix}.final_layer_norm"], weight="scale")
        if config.projection_dim is not None:
            table["text_projection/kernel"] = Source(("text_projection.weight",), "transpose")
    else:
        prefix = "vision_model"
        table["class_embedding"] = Source((f"{prefix}.embeddings.class_embedding",))
        table["patch_embedding"] = Source((f"{prefix}.embeddings.patch_embedding.weight",), "conv")
        table["position_embedding"] = Source((f"{prefix}.embeddings.position_embedding.weight",))
        add("pre_layernorm", [f"{prefix}.pre_layrnorm"], weight="scale")  # spelt so in the files
        add("post_layernorm", [f"{prefix}.post_layernorm"], weight="scale")
        table["visual_projection/kernel"] = Source(("visual_projection.weight",), "transpose")
    blocks = [f"{prefix}.encoder.layers.{i}" for i in range(config.num_hidden_layers)]
    for name in ("layer_norm1", "layer_norm2"):
        add(f"layers/{name}", [f"{block}.{name}" for block in blocks], stacked=True, weight="scale")
    for part, names in (("self_attn", ("q_proj", "k_proj", "v_proj", "out_proj")), ("mlp", ("fc1", "fc2"))):
        for name in names:
            add(f"layers/{name}", [f"{block}.{part}.{name}" for block in blocks], stacked=True)
    return table

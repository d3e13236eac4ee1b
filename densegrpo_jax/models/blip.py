"""BLIP's vision tower and its text encoder that looks at the image, with a head that scores (Li et al. 2022, arXiv 2201.12086).

The network of ImageReward (Xu et al. 2023, arXiv 2304.05977): a vision transformer; BERT whose every layer attends first to the
text, then to the image's tokens; five linear layers on the first text token. Names and configuration are those of transformers'
BlipForImageTextRetrieval, with the head besides.

Legend: B batch, S text tokens, N image tokens, D width, H heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from densegrpo_jax.models import score_head
from densegrpo_jax.models.attention import attention
from densegrpo_jax.models.component_json import TRANSFORMERS_KEYS, read_fields
from densegrpo_jax.models.layers import Dense, LayerNorm, patchify
from densegrpo_jax.models.source import Source

CHANNELS = 3
# Training and decoding options, and the projections of the contrastive loss, which scores do not use.
IGNORED_KEYS = TRANSFORMERS_KEYS | {
    "attention_probs_dropout_prob", "hidden_dropout_prob", "image_text_hidden_size", "label_smoothing", "projection_dim",
}  # fmt: skip


@dataclass(frozen=True)
class BLIPTextConfig:
    """Shape of the text encoder, with the names and defaults of transformers' BlipTextConfig."""

    vocab_size: int = 30524
    hidden_size: int = 768  # D
    encoder_hidden_size: int = 768  # D of the vision tower
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    max_position_embeddings: int = 512
    layer_norm_eps: float = 1e-12


@dataclass(frozen=True)
class BLIPVisionConfig:
    """Shape of the vision tower, with the names and defaults of transformers' BlipVisionConfig."""

    hidden_size: int = 768  # D
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    image_size: int = 384
    patch_size: int = 16
    layer_norm_eps: float = 1e-5


@dataclass(frozen=True)
class BLIPConfig:
    """Both parts, as transformers' BlipConfig."""

    text: BLIPTextConfig
    vision: BLIPVisionConfig

    def __post_init__(self):
        for part in (self.text, self.vision):
            if part.hidden_size % part.num_attention_heads:
                name, heads = type(part).__name__, part.num_attention_heads
                raise ValueError(f"{name}: hidden_size {part.hidden_size} must be a multiple of num_attention_heads {heads}")
        if self.vision.image_size % self.vision.patch_size:
            sides = f"image_size {self.vision.image_size} must be a multiple of patch_size {self.vision.patch_size}"
            raise ValueError(f"BLIPVisionConfig: {sides}")
        if self.text.encoder_hidden_size != self.vision.hidden_size:
            widths = f"encoder_hidden_size {self.text.encoder_hidden_size}, but the vision tower's is {self.vision.hidden_size}"
            raise ValueError(f"BLIPTextConfig: {widths}")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "BLIPConfig":
        """Reads config.json.

        Raises:
          ValueError: an unknown key, an option of a value that is not implemented, or parts that do not fit; they are named.
        """
        top = {key: value for key, value in values.items() if key not in ("text_config", "vision_config")}
        read_fields(cls, top, {"model_type": "blip"}, IGNORED_KEYS)
        vision = {"model_type": "blip_vision_model", "hidden_act": "gelu", "num_channels": CHANNELS}
        text = {"model_type": "blip_text_model", "hidden_act": "gelu", "is_decoder": True}  # so that it has cross-attention
        return cls(
            BLIPTextConfig(**read_fields(BLIPTextConfig, values.get("text_config") or {}, text, IGNORED_KEYS)),
            BLIPVisionConfig(**read_fields(BLIPVisionConfig, values.get("vision_config") or {}, vision, IGNORED_KEYS)),
        )


# ---------------------------------------------------------------------------------------------------------------------
# Layers

_small = nn.initializers.normal(0.02)


def _modules(config, dtype):
    """The linear layer and the norm of a part, with its settings."""
    return partial(Dense, dtype=dtype, kernel_init=_small), partial(LayerNorm, eps=config.layer_norm_eps, dtype=dtype)


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def _layers(block, config, dtype, x, *inputs):
    stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=config.num_hidden_layers)
    return stack(config, dtype, name="layers")(x, *inputs)[0]


class VisionBlock(nn.Module):
    """Attention and MLP, each after a norm."""

    config: BLIPVisionConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        """Maps x [B, N, D] to the same shape."""
        cfg, (B, N, D) = self.config, x.shape
        dense, norm = _modules(cfg, self.dtype)
        qkv = dense(3 * D, name="qkv")(norm(name="layer_norm1")(x))
        q, k, v = jnp.moveaxis(qkv.reshape(B, N, 3, cfg.num_attention_heads, -1), 2, 0)  # [B, N, H, D / H]
        x = x + dense(D, name="projection")(attention(q, k, v).reshape(x.shape))
        y = _gelu(dense(cfg.intermediate_size, name="fc1")(norm(name="layer_norm2")(x)))
        return x + dense(D, name="fc2")(y), None


class BLIPVision(nn.Module):
    """The vision tower (transformers' BlipVisionModel).

    Attributes:
      config: shape.
      dtype: of the computation and output, float32 or bfloat16; norm statistics and softmax stay in float32.
    """

    config: BLIPVisionConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Encodes normalised images [B, image_size, image_size, 3] to [B, 1 + N, D]: the class token, then the patches.

        Raises:
          ValueError: images of another shape.
        """
        cfg, D = self.config, self.config.hidden_size
        size = (cfg.image_size, cfg.image_size, CHANNELS)
        if pixels.ndim != 4 or pixels.shape[1:] != size:
            raise ValueError(f"pixels must be [B, {size[0]}, {size[1]}, {size[2]}], got {pixels.shape}")
        kernel = self.param("patch_embedding", _small, (cfg.patch_size, cfg.patch_size, CHANNELS, D), jnp.float32)
        bias = self.param("patch_bias", nn.initializers.zeros, (D,), jnp.float32)
        token = self.param("class_embedding", _small, (1, 1, D), jnp.float32)
        x = patchify(pixels.astype(self.dtype), cfg.patch_size) @ kernel.astype(self.dtype).reshape(-1, D)
        x = x + bias.astype(self.dtype)[None, None]
        token = jnp.broadcast_to(token.astype(self.dtype), (x.shape[0], 1, D))
        x = jnp.concatenate([token, x], axis=1)
        x = x + self.param("position_embedding", _small, (1, *x.shape[1:]), jnp.float32).astype(self.dtype)
        x = _layers(VisionBlock, cfg, self.dtype, x)
        return _modules(cfg, self.dtype)[1](name="post_layernorm")(x)


class TextBlock(nn.Module):
    """Attention to the text, attention to the image and MLP, a norm after each sum."""

    config: BLIPTextConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, image: jax.Array, bias: jax.Array) -> tuple[jax.Array, None]:
        """Maps x [B, S, D], with the image's tokens [B, N, D'] and the logits' bias [B, 1, S, S], to the shape of x."""
        cfg, D = self.config, x.shape[-1]
        dense, norm = _modules(cfg, self.dtype)

        def attend(name, x, y, bias):
            q, k, v = (
                dense(D, name=f"{name}_{part}")(z).reshape(*z.shape[:2], cfg.num_attention_heads, -1)
                for part, z in (("query", x), ("key", y), ("value", y))
            )
            y = dense(D, name=f"{name}_output")(attention(q, k, v, bias=bias).reshape(x.shape))
            return norm(name=f"{name}_norm")(x + y)

        x = attend("attention", x, x, bias)
        x = attend("crossattention", x, image, None)
        y = dense(D, name="output")(_gelu(dense(cfg.intermediate_size, name="intermediate")(x)))
        return norm(name="output_norm")(x + y), None


class BLIPText(nn.Module):
    """The text encoder (transformers' BlipTextModel, used as an encoder).

    Attributes: as `BLIPVision`.
    """

    config: BLIPTextConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, ids: jax.Array, mask: jax.Array, image: jax.Array) -> jax.Array:
        """Encodes texts that look at images.

        Args:
          ids: token ids [B, S], S <= max_position_embeddings.
          mask: [B, S], 1 for tokens and 0 for padding.
          image: tokens of the vision tower, [B, N, encoder_hidden_size].

        Returns:
          [B, S, D]; what stands at padding means nothing.

        Raises:
          ValueError: ids or mask of another shape, or ids that are not integers.
        """
        cfg, S = self.config, ids.shape[-1]
        if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer) or S > cfg.max_position_embeddings or mask.shape != ids.shape:
            raise ValueError(
                f"ids must be integers [B, S] with S at most {cfg.max_position_embeddings} positions, and mask of their shape, "
                f"got {ids.dtype} {ids.shape} and {mask.shape}"
            )
        embed = partial(nn.Embed, dtype=self.dtype, embedding_init=_small)
        x = embed(cfg.vocab_size, cfg.hidden_size, name="word_embeddings")(ids)  # [B, S, D]
        x = x + embed(cfg.max_position_embeddings, cfg.hidden_size, name="position_embeddings")(jnp.arange(S))[None]
        x = _modules(cfg, self.dtype)[1](name="embeddings_norm")(x)
        bias = jnp.where(mask[:, None, None] != 0, 0.0, jnp.finfo(jnp.float32).min)  # [B, 1, 1, S]
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], S, S))
        return _layers(TextBlock, cfg, self.dtype, x, image.astype(self.dtype), bias)


class BLIPScorer(nn.Module):
    """Both parts and the head on the first text token: ImageReward's network.

    Attributes:
      config: shape.
      dtype: as `BLIPVision`; the head computes in float32.
    """

    config: BLIPConfig
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        self.vision_model = BLIPVision(self.config.vision, self.dtype)
        self.text_encoder = BLIPText(self.config.text, self.dtype)
        self.mlp = score_head.ScoreHead()

    def __call__(self, ids: jax.Array, mask: jax.Array, pixels: jax.Array) -> jax.Array:
        """Scores of normalised images [B, H, W, 3] with their texts (see `BLIPText`): [B], float32."""
        return self.mlp(self.text_encoder(ids, mask, self.vision_model(pixels))[:, 0])


# ---------------------------------------------------------------------------------------------------------------------
# Names


def name_table(config: BLIPConfig) -> dict[str, Source]:
    """Where each parameter of `BLIPScorer` is found: the names of BlipForImageTextRetrieval, and the head as "mlp.layers.N"."""
    table = {f"mlp/{path}": source for path, source in score_head.name_table("mlp").items()}

    def add(path: str, names: list[str], weight: str = "kernel", stacked: bool = True) -> None:
        transform = "transpose" if weight == "kernel" else "none"
        table[f"{path}/{weight}"] = Source(tuple(f"{name}.weight" for name in names), transform, stacked)
        table[f"{path}/bias"] = Source(tuple(f"{name}.bias" for name in names), "none", stacked)

    embeddings = "vision_model.embeddings"
    for name in ("class_embedding", "position_embedding"):
        table[f"vision_model/{name}"] = Source((f"{embeddings}.{name}",))
    table["vision_model/patch_embedding"] = Source((f"{embeddings}.patch_embedding.weight",), "conv")
    table["vision_model/patch_bias"] = Source((f"{embeddings}.patch_embedding.bias",))
    add("vision_model/post_layernorm", ["vision_model.post_layernorm"], "scale", stacked=False)
    blocks = [f"vision_model.encoder.layers.{i}" for i in range(config.vision.num_hidden_layers)]
    for path in ("layer_norm1", "layer_norm2"):
        add(f"vision_model/layers/{path}", [f"{block}.{path}" for block in blocks], "scale")
    for path, name in (("qkv", "self_attn.qkv"), ("projection", "self_attn.projection"), ("fc1", "mlp.fc1"), ("fc2", "mlp.fc2")):
        add(f"vision_model/layers/{path}", [f"{block}.{name}" for block in blocks])

    embeddings = "text_encoder.embeddings"
    for name in ("word_embeddings", "position_embeddings"):
        table[f"text_encoder/{name}/embedding"] = Source((f"{embeddings}.{name}.weight",))
    add("text_encoder/embeddings_norm", [f"{embeddings}.LayerNorm"], "scale", stacked=False)
    blocks = [f"text_encoder.encoder.layer.{i}" for i in range(config.text.num_hidden_layers)]
    dense, norms = {"intermediate": "intermediate.dense", "output": "output.dense"}, {"output_norm": "output.LayerNorm"}
    for name in ("attention", "crossattention"):
        dense |= {f"{name}_{part}": f"{name}.self.{part}" for part in ("query", "key", "value")}
        dense[f"{name}_output"], norms[f"{name}_norm"] = f"{name}.output.dense", f"{name}.output.LayerNorm"
    for paths, weight in ((dense, "kernel"), (norms, "scale")):
        for path, name in paths.items():
            add(f"text_encoder/layers/{path}", [f"{block}.{name}" for block in blocks], weight)
    return table

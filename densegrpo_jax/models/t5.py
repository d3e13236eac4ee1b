"""T5's encoder (Raffel et al. 2019, arXiv 1910.10683), the T5 v1.1 of Stable Diffusion 3 and FLUX.

Logits are not scaled, positions enter only as a learned bias of the logits that all layers share, norms are RMS norms, and no
layer has a bias. Layers are stacked and scanned.

Legend: B batch, S tokens, D width, H heads.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax.models.attention import attention
from densegrpo_jax.models.component_json import TRANSFORMERS_KEYS, read_fields
from densegrpo_jax.models.layers import Dense, RMSNorm
from densegrpo_jax.models.source import Source

# What transformers calls the activation of each kind of feed-forward layer.
FEED_FORWARD = {"gated-gelu": "gelu_new", "relu": "relu"}

# Stored a second time by some writers, under the name that the encoder itself gives it.
TIED = {"encoder.embed_tokens.weight": "shared.weight"}


@dataclass(frozen=True)
class T5Config:
    """Shape of the encoder, with the names and defaults of transformers' T5Config."""

    vocab_size: int = 32128
    d_model: int = 512  # D
    d_kv: int = 64  # width of a head
    d_ff: int = 2048
    num_layers: int = 6
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "relu"  # or "gated-gelu" (v1.1)

    def __post_init__(self):
        if self.feed_forward_proj not in FEED_FORWARD:
            raise ValueError(f"T5Config: feed_forward_proj {self.feed_forward_proj!r} is not supported, only {' and '.join(FEED_FORWARD)}")
        if not 1 <= self.relative_attention_num_buckets // 4 < self.relative_attention_max_distance:
            raise ValueError(
                f"T5Config: relative_attention_num_buckets {self.relative_attention_num_buckets} must be at least 4, and a quarter of it "
                f"less than relative_attention_max_distance {self.relative_attention_max_distance}"
            )

    @property
    def gated(self) -> bool:
        """The feed-forward layer is gelu(x W0) * (x W1), not relu(x W)."""
        return self.feed_forward_proj == "gated-gelu"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "T5Config":
        """Reads the config.json of a T5EncoderModel.

        Raises:
          ValueError: an unknown key, or an option of a value that is not implemented; both are named.
        """
        kind = values.get("feed_forward_proj", cls.feed_forward_proj)
        fixed = {
            "model_type": "t5",
            "is_decoder": False,
            "add_cross_attention": False,
            "pruned_heads": {},
            "is_gated_act": kind.startswith("gated"),
            "dense_act_fn": FEED_FORWARD.get(kind, values.get("dense_act_fn")),  # an unknown kind is refused by that name
        }
        return cls(**read_fields(cls, values, fixed, TRANSFORMERS_KEYS | {"scale_decoder_outputs"}))


def relative_buckets(tokens: int, buckets: int, max_distance: int) -> np.ndarray:
    """Which bias a query at position i (row) uses for a key at position j (column).

    Half of the buckets are for keys after the query; in each half, distances below a quarter of all buckets have their own,
    larger ones share buckets that widen logarithmically, and all from `max_distance` on share the last.

    Args:
      tokens: S.
      buckets: how many there are.
      max_distance: from where on distances are not told apart.

    Returns:
      int32 [S, S].
    """
    offset = np.arange(tokens)[None] - np.arange(tokens)[:, None]
    half, exact = buckets // 2, buckets // 4
    distance = np.abs(offset)
    ratio = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    far = np.minimum(exact + (ratio * (half - exact)).astype(int), half - 1)
    return (half * (offset > 0) + np.where(distance < exact, distance, far)).astype(np.int32)


class Block(nn.Module):
    """Pre-norm self-attention and feed-forward layer.

    Attributes:
      config: of the encoder.
      dtype: of the computation.
      lora_scale: alpha / rank of adapters.
    """

    config: T5Config
    dtype: jnp.dtype
    lora_scale: float

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array) -> tuple[jax.Array, None]:
        """Maps x [B, S, D] to the same shape; `bias` [1 or B, H, S, S] goes to the attention logits."""
        cfg, (B, S, D) = self.config, x.shape
        norm = partial(RMSNorm, eps=cfg.layer_norm_epsilon, dtype=self.dtype)
        inner = cfg.num_heads * cfg.d_kv

        def dense(name, features, std):
            init = nn.initializers.normal(std)
            return Dense(features, use_bias=False, dtype=self.dtype, lora_scale=self.lora_scale, kernel_init=init, name=name)

        # Initial scales of the original: queries make up for the missing 1 / sqrt(d_kv) of the logits.
        y = norm(name="attention_norm")(x)
        stds = {"q": (D * cfg.d_kv) ** -0.5, "k": D**-0.5, "v": D**-0.5}
        q, k, v = (dense(name, inner, std)(y).reshape(B, S, cfg.num_heads, cfg.d_kv) for name, std in stds.items())
        x = x + dense("o", D, inner**-0.5)(attention(q, k, v, bias=bias, scale=1.0).reshape(B, S, inner))
        y = norm(name="ff_norm")(x)
        if cfg.gated:
            y = jax.nn.gelu(dense("wi_0", cfg.d_ff, D**-0.5)(y)) * dense("wi_1", cfg.d_ff, D**-0.5)(y)
        else:
            y = jax.nn.relu(dense("wi", cfg.d_ff, D**-0.5)(y))
        return x + dense("wo", D, cfg.d_ff**-0.5)(y), None


class T5Encoder(nn.Module):
    """Token ids -> hidden states (transformers' T5EncoderModel).

    Attributes:
      config: shape.
      dtype: of the computation and output, float32 or bfloat16; norm statistics, position bias and softmax stay in float32.
        float16 is refused: the residual stream of published models exceeds its range.
      remat: recompute each block in the backward pass.
      scan_unroll: blocks per step of the scan.
      lora_scale: alpha / rank of adapters.
    """

    config: T5Config
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    scan_unroll: int = 1
    lora_scale: float = 1.0

    @nn.compact
    def __call__(self, ids: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Encodes a batch of texts.

        Args:
          ids: [B, S] integers; those outside the vocabulary give NaN.
          mask: [B, S], true where a token may be attended to; None for all. Stable Diffusion 3 and FLUX attend to the padding.

        Returns:
          [B, S, D], normed.

        Raises:
          ValueError: ids or mask of another shape, ids that are not integers, or dtype float16.
        """
        cfg, S = self.config, ids.shape[-1]
        if self.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"T5Encoder computes in float32 or bfloat16, not {jnp.dtype(self.dtype).name}")
        if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"ids must be integers [B, S], got {ids.dtype} {ids.shape}")
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(f"mask must have the shape of ids, {ids.shape}, got {mask.shape}")
        x = nn.Embed(cfg.vocab_size, cfg.d_model, dtype=self.dtype, embedding_init=nn.initializers.normal(1.0), name="token_embedding")(ids)

        buckets = relative_buckets(S, cfg.relative_attention_num_buckets, cfg.relative_attention_max_distance)
        init = nn.initializers.normal(cfg.d_model**-0.5)
        table = self.param("relative_attention_bias", init, (cfg.relative_attention_num_buckets, cfg.num_heads), jnp.float32)
        bias = table.astype(jnp.float32)[buckets].transpose(2, 0, 1)[None]  # [1, H, S, S]
        if mask is not None:
            bias = bias + jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)[:, None, None]  # [B, H, S, S]

        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        stack = nn.scan(
            block,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=cfg.num_layers,
            unroll=min(self.scan_unroll, cfg.num_layers),
        )
        x, _ = stack(cfg, self.dtype, self.lora_scale, name="layers")(x, bias)
        return RMSNorm(cfg.layer_norm_epsilon, self.dtype, name="final_layer_norm")(x)


def name_table(config: T5Config) -> dict[str, Source]:
    """Where each parameter is found in the published files of a T5EncoderModel, one to one; `TIED` may be in them too."""
    table = {
        "token_embedding/embedding": Source(("shared.weight",)),
        "relative_attention_bias": Source(("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",)),
        "final_layer_norm/scale": Source(("encoder.final_layer_norm.weight",)),
    }
    attention_names = {name: f"layer.0.SelfAttention.{name}" for name in ("q", "k", "v", "o")}
    feed_forward = ("wi_0", "wi_1", "wo") if config.gated else ("wi", "wo")
    norms = {"attention_norm": "layer.0.layer_norm", "ff_norm": "layer.1.layer_norm"}
    for ours, theirs in {**attention_names, **{name: f"layer.1.DenseReluDense.{name}" for name in feed_forward}, **norms}.items():
        names = tuple(f"encoder.block.{i}.{theirs}.weight" for i in range(config.num_layers))
        leaf, transform = ("scale", "none") if ours in norms else ("kernel", "transpose")
        table[f"layers/{ours}/{leaf}"] = Source(names, transform, stacked=True)
    return table

"""The transformer of FLUX.1 (Black Forest Labs 2024), equal to diffusers' FluxTransformer2DModel.

Double blocks, the joint blocks of Stable Diffusion 3 with rotary positions, come first; single blocks then treat text and image as one
stream. Each kind is stacked and scanned: `blocks` and `single_blocks`. Latents go in and come out as images, and are packed within: a
token is 2x2 of them. Image tokens stand before the text here, which attention does not notice.

FLUX.1-dev is distilled from guided samples and takes the guidance scale as an input (`guidance_embeds`): one pass, no unconditional
branch. FLUX.1-schnell takes none.

Legend: B batch, N image tokens, S text tokens, C channels, H heads, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from densegrpo_jax.models.component_json import read_fields
from densegrpo_jax.models.layers import Dense, normalize, patchify, rotary_table, unpatchify
from densegrpo_jax.models.mmdit import (
    EPS,
    Attention,
    JointBlock,
    Modulation,
    Rotary,
    add_blocks,
    add_ends,
    add_joint_blocks,
    along_batch,
    condition,
    gated,
    modulate,
    scanned,
)
from densegrpo_jax.models.source import Source

PACK = 2  # side of the latents that make one token


@dataclass(frozen=True)
class FluxConfig:
    """Shape of the transformer, with the field names and defaults of diffusers' transformer/config.json."""

    in_channels: int = 64  # of a packed token: four times the latents'
    out_channels: int | None = None  # None: in_channels
    num_layers: int = 19  # double blocks
    num_single_layers: int = 38
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 4096  # width of T5's output
    pooled_projection_dim: int = 768  # width of CLIP's
    guidance_embeds: bool = False  # the guidance scale is an input
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)  # widths of a head that turn by a constant, the row, the column

    def __post_init__(self):
        wrong = []
        if self.in_channels % PACK**2 or self.channels_out % PACK**2:
            wrong.append(f"in_channels {self.in_channels} and out_channels {self.channels_out} must be multiples of {PACK**2}")
        if min(self.num_layers, self.num_single_layers) < 1:
            wrong.append(f"num_layers {self.num_layers} and num_single_layers {self.num_single_layers} must be at least 1")
        if len(self.axes_dims_rope) != 3 or any(n % 2 for n in self.axes_dims_rope) or sum(self.axes_dims_rope) != self.attention_head_dim:
            wrong.append(f"axes_dims_rope {self.axes_dims_rope} must be three even numbers that add to {self.attention_head_dim}")
        if wrong:
            raise ValueError("FLUX transformer config: " + "; ".join(wrong))

    @property
    def width(self) -> int:
        """D, width of the streams."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def channels_out(self) -> int:
        """Channels of a packed velocity."""
        return self.in_channels if self.out_channels is None else self.out_channels

    @property
    def latent_channels(self) -> int:
        """C of the latents."""
        return self.in_channels // PACK**2

    @property
    def token_side(self) -> int:
        """Side of the latents that make one token; sides of latents are multiples of it."""
        return PACK

    @property
    def longest_side(self) -> int | None:
        """Longest side of latents; None: positions have no end."""
        return None

    @property
    def sample_size(self) -> int:
        """Side of the square latents that the model is made for; no folder says it."""
        return 128

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "FluxConfig":
        """Reads the content of transformer/config.json.

        Raises:
          ValueError: another class of model, an unknown key, or a value that is not supported.
        """
        fixed = {"_class_name": "FluxTransformer2DModel", "patch_size": 1}
        return cls(**read_fields(cls, values, fixed, {"_diffusers_version", "_name_or_path"}))


class SingleBlock(nn.Module):
    """One block of a single stream, attention and feed-forward side by side, in the form that `scanned` wants."""

    heads: int
    dtype: jnp.dtype
    impl: str
    lora_scale: float

    @nn.compact
    def __call__(self, x: jax.Array, given: tuple[jax.Array, Rotary]) -> tuple[jax.Array, None]:
        """Maps tokens [B, N + S, D], modulated by c [B, D]."""
        c, rotary = given
        D = x.shape[-1]
        dense = partial(Dense, dtype=self.dtype, lora_scale=self.lora_scale)
        shift, scale, gate = Modulation(3, self.lora_scale, name="norm")(c)
        y = modulate(normalize(x, EPS), shift, scale, self.dtype)
        attend = Attention(self.heads, True, self.dtype, self.impl, self.lora_scale, projected=False, name="attn")
        wide = jax.nn.gelu(along_batch(dense(4 * D, name="proj_mlp"), y), approximate=True)
        out = along_batch(dense(D, name="proj_out"), jnp.concatenate([attend(y, rotary=rotary)[0], wide], axis=-1))
        return gated(x, gate, out), None


class FluxTransformer(nn.Module):
    """Velocity network of FLUX.1. Collections: `params` (base weights, any float type) and, optional, `lora` (adapters).

    Attributes:
      config: the shape.
      dtype: of the token computation (float32 or bfloat16). Norm statistics, embeddings of time, guidance and pooled text, modulation,
        rotation and softmax are float32 always.
      attention_impl: see `attention`.
      remat: recompute each block in the backward pass instead of keeping its activations.
      scan_unroll: blocks per iteration of the layer scans; more is faster on CPU and slower to compile.
      lora_scale: alpha / rank of the adapters.
    """

    config: FluxConfig
    dtype: jnp.dtype = jnp.float32
    attention_impl: str = "auto"
    remat: bool = False
    scan_unroll: int = 1
    lora_scale: float = 1.0

    @property
    def embeds_guidance(self) -> bool:
        """Whether the guidance scale is an input."""
        return self.config.guidance_embeds

    @nn.compact
    def __call__(
        self, latents: jax.Array, sigma: jax.Array, context: jax.Array, pooled: jax.Array, guidance: jax.Array | None = None
    ) -> jax.Array:
        """Predicts the velocity noise - data.

        Args:
          latents: noisy latents, [B, H, W, in_channels / 4].
          sigma: noise level of each, in [0, 1], [B]; the network sees the time 1000 sigma.
          context: T5's output, [B, S, joint_attention_dim].
          pooled: CLIP's pooled output, [B, pooled_projection_dim].
          guidance: guidance scale of each, [B], for networks with `guidance_embeds`, and for them alone.

        Returns:
          [B, H, W, channels_out / 4], float32.

        Raises:
          ValueError: shapes that do not fit the config, odd sides, or guidance missing or not taken.
        """
        cfg, B = self.config, latents.shape[0]
        given = tuple(array.shape for array in (latents, sigma, context, pooled))
        sizes = (*latents.shape[1:3], cfg.latent_channels), (), (*context.shape[1:2], cfg.joint_attention_dim)
        wanted = tuple((B, *size) for size in (*sizes, (cfg.pooled_projection_dim,)))
        if given != wanted:
            raise ValueError(f"FluxTransformer: latents, sigma, context, pooled have shapes {given}; expected {wanted}")
        if (None if guidance is None else guidance.shape) != ((B,) if cfg.guidance_embeds else None):
            need = f"needs guidance of shape {(B,)}" if cfg.guidance_embeds else "has no guidance embedder and takes no guidance"
            raise ValueError(f"FluxTransformer: this network {need}, got {None if guidance is None else guidance.shape}")

        dense = partial(Dense, dtype=self.dtype, lora_scale=self.lora_scale)
        x = dense(cfg.width, name="x_embedder")(patchify(latents, PACK, channels_first=True))  # [B, N, D]
        context = dense(cfg.width, name="context_embedder")(context)  # [B, S, D]
        scalars = {"timestep_embedder": sigma} | ({"guidance_embedder": guidance} if cfg.guidance_embeds else {})
        c = condition(cfg.width, self.lora_scale, scalars, pooled)  # [B, D]
        N, S = x.shape[1], context.shape[1]
        cos, sin = rotary_table(cfg.axes_dims_rope, latents.shape[1] // PACK, latents.shape[2] // PACK)  # [N, D/2H]
        with_text = jnp.pad(cos, ((0, S), (0, 0)), constant_values=1.0), jnp.pad(sin, ((0, S), (0, 0)))  # text does not turn

        double, single = (
            scanned(block, length, self.remat, self.scan_unroll)
            for block, length in ((JointBlock, cfg.num_layers), (SingleBlock, cfg.num_single_layers))
        )
        options = self.dtype, self.attention_impl, self.lora_scale
        (x, context), _ = double(cfg.num_attention_heads, True, *options, name="blocks")((x, context), (c, (cos, sin)))
        x = jnp.concatenate([x, context], axis=1)  # [B, N + S, D]
        x, _ = single(cfg.num_attention_heads, *options, name="single_blocks")(x, (c, with_text))

        scale, shift = Modulation(2, self.lora_scale, name="norm_out")(c)
        x = modulate(normalize(x[:, :N], EPS), shift, scale, self.dtype)
        x = dense(cfg.channels_out, kernel_init=nn.initializers.zeros, name="proj_out")(x)
        return unpatchify(x.astype(jnp.float32), PACK, *latents.shape[1:3], channels_first=True)


def name_table(config: FluxConfig) -> dict[str, Source]:
    """Where each parameter is found in the state dict of diffusers' FluxTransformer2DModel, one to one.

    The name of a layer for adapter files is that of its kernel's tensor without ".weight".
    """
    table: dict[str, Source] = {}
    guidance = ["guidance_embedder"] if config.guidance_embeds else []
    add_ends(table, ["x_embedder", "context_embedder"], ["timestep_embedder", *guidance, "text_embedder"])
    prefixes = [f"transformer_blocks.{i}." for i in range(config.num_layers)]
    add_joint_blocks(table, "blocks", prefixes, qk_norm=True)
    prefixes = [f"single_transformer_blocks.{i}." for i in range(config.num_single_layers)]
    linears = ["norm.linear", "proj_mlp", "proj_out", "attn.to_q", "attn.to_k", "attn.to_v"]
    add_blocks(table, "single_blocks", prefixes, linears, ["attn.norm_q", "attn.norm_k"])
    return table

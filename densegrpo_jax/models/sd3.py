"""The transformer of Stable Diffusion 3 and 3.5 (MMDiT; Esser et al. 2024, arXiv 2403.03206), equal to diffusers' SD3Transformer2DModel.

Image and text tokens are two streams with their own weights that meet in joint attention; a vector made of the time and the
pooled text modulates every block. Consecutive blocks of one kind are stacked and scanned: `blocks_0` holds the blocks from
layer 0 on, and so forth (SD3.5-Medium: 13 blocks with a second, image-only attention, 10 without, and the last block).

Legend: B batch, N image tokens, S text tokens, C channels, H heads, D width.
"""

from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from densegrpo_jax.models.layers import Dense, normalize, patchify, position_table, unpatchify
from densegrpo_jax.models.mmdit import EPS, JointBlock, Modulation, add_ends, add_joint_blocks, condition, modulate, scanned
from densegrpo_jax.models.source import Source


@dataclass(frozen=True)
class SD3Config:
    """Shape of the transformer, with the field names and defaults of diffusers' transformer/config.json."""

    sample_size: int = 128  # side of the square latent the position table is scaled to
    patch_size: int = 2
    in_channels: int = 16
    num_layers: int = 18
    attention_head_dim: int = 64
    num_attention_heads: int = 18
    joint_attention_dim: int = 4096  # width of the text encoders' output
    caption_projection_dim: int = 1152  # width of the text stream
    pooled_projection_dim: int = 2048
    out_channels: int | None = 16  # None: in_channels
    pos_embed_max_size: int = 96  # side of the position table, in patches; latents use its centre
    dual_attention_layers: tuple[int, ...] = ()  # blocks with a second, image-only attention
    qk_norm: str | None = None  # None or "rms_norm"

    def __post_init__(self):
        width, dual = self.width, self.dual_attention_layers
        wrong = []
        if self.qk_norm not in (None, "rms_norm"):
            wrong.append(f"qk_norm {self.qk_norm!r} is not supported, only null and 'rms_norm' are")
        if not isinstance(self.pos_embed_max_size, int):
            wrong.append(f"pos_embed_max_size {self.pos_embed_max_size!r} is not supported, it must be a whole number")
        if self.caption_projection_dim != width or width % 4:
            wrong.append(f"num_attention_heads x attention_head_dim = {width} must be caption_projection_dim and a multiple of 4")
        if any(not 0 <= i < self.num_layers for i in dual):
            wrong.append(f"dual_attention_layers {dual} must lie below num_layers {self.num_layers}")
        if wrong:
            raise ValueError("SD3 transformer config: " + "; ".join(wrong))

    @property
    def width(self) -> int:
        """D, width of both streams."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def channels_out(self) -> int:
        """Channels of the velocity."""
        return self.in_channels if self.out_channels is None else self.out_channels

    @property
    def latent_channels(self) -> int:
        """C of the latents."""
        return self.in_channels

    @property
    def token_side(self) -> int:
        """Side of the latents that make one token; sides of latents are multiples of it."""
        return self.patch_size

    @property
    def longest_side(self) -> int | None:
        """Longest side of latents; None if there is none."""
        return self.pos_embed_max_size * self.patch_size

    @classmethod
    def from_json(cls, values: dict) -> "SD3Config":
        """Reads the content of transformer/config.json.

        Raises:
          ValueError: another class of model, an unknown key, or a value that is not supported.
        """
        name = values.get("_class_name", "SD3Transformer2DModel")
        if name != "SD3Transformer2DModel":
            raise ValueError(f"expected the config of an SD3Transformer2DModel, got {name}")
        known = {field.name for field in fields(cls)}
        options = {key: value for key, value in values.items() if not key.startswith("_")}
        if unknown := sorted(set(options) - known):
            raise ValueError(f"SD3 transformer config: unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return cls(**{**options, "dual_attention_layers": tuple(options.get("dual_attention_layers", ()))})


class Group(NamedTuple):
    """Consecutive blocks of one kind, scanned together under the name `blocks_{first}`."""

    first: int
    length: int
    dual: bool  # with a second attention over the image tokens alone
    last: bool  # the block whose text stream ends in its attention


def block_groups(config: SD3Config) -> list[Group]:
    """The runs of equal blocks, in order."""
    groups: list[Group] = []
    for i in range(config.num_layers):
        dual, last = i in config.dual_attention_layers, i == config.num_layers - 1
        if groups and groups[-1].dual == dual and not last:
            groups[-1] = groups[-1]._replace(length=groups[-1].length + 1)
        else:
            groups.append(Group(i, 1, dual, last))
    return groups


class PatchEmbed(nn.Module):
    """Patches to tokens, plus the centre of a fixed position table (not trained)."""

    config: SD3Config
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, latents: jax.Array) -> jax.Array:
        """Maps latents [B, H, W, C] to tokens [B, N, D]."""
        cfg, D = self.config, self.config.width
        h, w = latents.shape[1] // cfg.patch_size, latents.shape[2] // cfg.patch_size
        if max(h, w) > cfg.pos_embed_max_size:
            raise ValueError(
                f"latents of {latents.shape[1]} x {latents.shape[2]} make {h} x {w} patches, but the position table has "
                f"{cfg.pos_embed_max_size} a side: the longest latent side is {cfg.pos_embed_max_size * cfg.patch_size}"
            )
        tokens = Patches(D, cfg.patch_size, self.dtype, name="proj")(latents)

        def init_table(_, shape):
            return position_table(D, cfg.pos_embed_max_size, cfg.sample_size // cfg.patch_size).reshape(shape)

        table = jax.lax.stop_gradient(self.param("table", init_table, (1, cfg.pos_embed_max_size**2, D)))
        table = table.reshape(1, cfg.pos_embed_max_size, cfg.pos_embed_max_size, D).astype(jnp.float32)
        top, left = (cfg.pos_embed_max_size - h) // 2, (cfg.pos_embed_max_size - w) // 2
        return (tokens + table[:, top : top + h, left : left + w].reshape(1, h * w, D)).astype(self.dtype)


class Patches(nn.Module):
    """The patch convolution, written as a product: its windows do not overlap. "kernel" [p, p, C, D], "bias" [D]."""

    features: int
    patch: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, latents: jax.Array) -> jax.Array:
        """Maps [B, H, W, C] to [B, N, D] in float32."""
        shape = (self.patch, self.patch, latents.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.xavier_uniform(in_axis=(0, 1, 2)), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        patches = patchify(latents, self.patch).astype(self.dtype)
        tokens = jnp.matmul(patches, kernel.reshape(-1, self.features).astype(self.dtype), preferred_element_type=jnp.float32)
        return tokens + bias.astype(jnp.float32)[None, None]


class SD3Transformer(nn.Module):
    """Velocity network of SD3 and SD3.5. Collections: `params` (base weights, any float type) and, optional, `lora` (adapters).

    Attributes:
      config: the shape.
      dtype: of the token computation (float32 or bfloat16). Norm statistics, time and pooled-text embedding, modulation,
        position table and softmax are float32 always.
      attention_impl: see `attention`.
      remat: recompute each block in the backward pass instead of keeping its activations.
      scan_unroll: blocks per iteration of the layer scan; more is faster on CPU and slower to compile.
      lora_scale: alpha / rank of the adapters.
    """

    config: SD3Config
    dtype: jnp.dtype = jnp.float32
    attention_impl: str = "auto"
    remat: bool = False
    scan_unroll: int = 1
    lora_scale: float = 1.0

    embeds_guidance = False  # guidance takes an unconditional branch

    @nn.compact
    def __call__(self, latents: jax.Array, sigma: jax.Array, context: jax.Array, pooled: jax.Array) -> jax.Array:
        """Predicts the velocity noise - data.

        Args:
          latents: noisy latents, [B, H, W, in_channels].
          sigma: noise level of each, in [0, 1], [B]; the network sees the time 1000 sigma.
          context: text tokens, [B, S, joint_attention_dim].
          pooled: pooled text, [B, pooled_projection_dim].

        Returns:
          [B, H, W, out_channels], float32.

        Raises:
          ValueError: shapes that do not fit the config, or sides that are no multiple of the patch or exceed the position table.
        """
        cfg, B = self.config, latents.shape[0]
        given = tuple(array.shape for array in (latents, sigma, context, pooled))
        sizes = (*latents.shape[1:3], cfg.in_channels), (), (*context.shape[1:2], cfg.joint_attention_dim), (cfg.pooled_projection_dim,)
        wanted = tuple((B, *size) for size in sizes)
        if given != wanted:
            raise ValueError(f"SD3Transformer: latents, sigma, context, pooled have shapes {given}; expected {wanted}")

        x = PatchEmbed(cfg, self.dtype, name="pos_embed")(latents)  # [B, N, D]
        context = Dense(cfg.width, dtype=self.dtype, lora_scale=self.lora_scale, name="context_embedder")(context)  # [B, S, D]
        c = condition(cfg.width, self.lora_scale, {"timestep_embedder": sigma}, pooled)  # [B, D]
        for first, length, dual, last in block_groups(cfg):
            stack = scanned(JointBlock, length, self.remat, self.scan_unroll)
            block = partial(stack, cfg.num_attention_heads, bool(cfg.qk_norm), self.dtype, self.attention_impl, self.lora_scale)
            (x, context), _ = block(dual, last, name=f"blocks_{first}")((x, context), (c, None))

        scale, shift = Modulation(2, self.lora_scale, name="norm_out")(c)
        x = modulate(normalize(x, EPS), shift, scale, self.dtype)
        features = cfg.patch_size**2 * cfg.channels_out
        x = Dense(features, dtype=self.dtype, lora_scale=self.lora_scale, kernel_init=nn.initializers.zeros, name="proj_out")(x)
        return unpatchify(x.astype(jnp.float32), cfg.patch_size, latents.shape[1], latents.shape[2])


def name_table(config: SD3Config) -> dict[str, Source]:
    """Where each parameter is found in the state dict of diffusers' SD3Transformer2DModel, one to one.

    The name of a layer for adapter files is that of its kernel's tensor without ".weight".
    """
    table = {
        "pos_embed/proj/kernel": Source(("pos_embed.proj.weight",), "conv"),
        "pos_embed/proj/bias": Source(("pos_embed.proj.bias",)),
        "pos_embed/table": Source(("pos_embed.pos_embed",)),
    }

    add_ends(table, ["context_embedder"], ["timestep_embedder", "text_embedder"])
    for first, length, dual, last in block_groups(config):
        prefixes = [f"transformer_blocks.{i}." for i in range(first, first + length)]
        add_joint_blocks(table, f"blocks_{first}", prefixes, bool(config.qk_norm), dual, last)
    return table

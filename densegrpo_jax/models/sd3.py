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
from jax.lax import Precision

from densegrpo_jax.models.attention import attention
from densegrpo_jax.models.layers import (
    Dense,
    MLPEmbedding,
    RMSNorm,
    normalize,
    patchify,
    position_table,
    timestep_embedding,
    unpatchify,
)
from densegrpo_jax.models.source import Source

EPS = 1e-6  # of every norm
TIME_CHANNELS = 256  # of the sinusoidal time embedding


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


class Modulation(nn.Module):
    """Shifts, scales and gates of a block, in full float32: a linear map of silu(time + pooled text), zero at init (adaLN-Zero)."""

    parts: int
    lora_scale: float

    @nn.compact
    def __call__(self, c: jax.Array) -> list[jax.Array]:
        """Maps c [B, D] to `parts` arrays [B, 1, D]."""
        features = self.parts * c.shape[-1]
        dense = Dense(
            features, lora_scale=self.lora_scale, precision=Precision.HIGHEST, kernel_init=nn.initializers.zeros, name="linear"
        )
        return jnp.split(dense(c)[:, None], self.parts, axis=-1)


class Attention(nn.Module):
    """Attention over the image tokens, joined by the text tokens if there are any; heads of q and k are RMS-normalised on request."""

    config: SD3Config
    dtype: jnp.dtype
    impl: str
    lora_scale: float
    text_ends: bool = False  # nothing is read from the text stream afterwards

    @nn.compact
    def __call__(self, x: jax.Array, context: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
        """Maps x [B, N, D] and context [B, S, D] or None to their attention outputs; None where there is no text output."""
        B, N, D = x.shape
        dense = partial(Dense, D, dtype=self.dtype, lora_scale=self.lora_scale)

        def heads(name, tokens, norm=None):
            y = dense(name=name)(tokens).reshape(B, -1, self.config.num_attention_heads, self.config.attention_head_dim)
            return RMSNorm(EPS, self.dtype, name=norm)(y) if norm and self.config.qk_norm else y

        q, k, v = heads("to_q", x, "norm_q"), heads("to_k", x, "norm_k"), heads("to_v", x)  # [B, N, H, D/H]
        if context is not None:
            context_q = heads("add_q_proj", context, "norm_added_q")  # in the last block only for its weights' sake
            q = q if self.text_ends else jnp.concatenate([q, context_q], axis=1)  # [B, N + S, H, D/H]
            k = jnp.concatenate([k, heads("add_k_proj", context, "norm_added_k")], axis=1)
            v = jnp.concatenate([v, heads("add_v_proj", context)], axis=1)
        out = attention(q, k, v, impl=self.impl).reshape(B, -1, D)
        has_text = context is not None and not self.text_ends
        return dense(name="to_out_0")(out[:, :N]), dense(name="to_add_out")(out[:, N:]) if has_text else None


class FeedForward(nn.Module):
    """Two linear layers with tanh gelu between, four times as wide inside."""

    dtype: jnp.dtype
    lora_scale: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [B, N, D] to the same shape."""
        D = x.shape[-1]
        dense = partial(Dense, dtype=self.dtype, lora_scale=self.lora_scale)
        return dense(D, name="net_2")(jax.nn.gelu(dense(4 * D, name="net_0_proj")(x), approximate=True))


class Block(nn.Module):
    """One MMDiT block, in the form that `nn.scan` wants: (streams, c) -> (streams, None)."""

    config: SD3Config
    dual: bool
    last: bool
    dtype: jnp.dtype
    impl: str
    lora_scale: float

    @nn.compact
    def __call__(self, streams: tuple[jax.Array, jax.Array], c: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        """Maps image tokens [B, N, D] and text tokens [B, S, D], modulated by c [B, D]."""
        x, context = streams
        attend = partial(Attention, self.config, self.dtype, self.impl, self.lora_scale)
        modulation = partial(Modulation, lora_scale=self.lora_scale)

        def modulated(y, shift, scale):  # y is float32, and so is all of this up to the cast
            return (y * (1 + scale) + shift).astype(self.dtype)

        def add(y, gate, update):
            return (y + gate * update).astype(self.dtype)

        shift, scale, gate, ff_shift, ff_scale, ff_gate, *second = modulation(9 if self.dual else 6, name="norm1")(c)
        x_norm, context_norm = normalize(x, EPS), normalize(context, EPS)
        if self.last:
            context_scale, context_shift = modulation(2, name="norm1_context")(c)
        else:
            context_shift, context_scale, context_gate, *context_ff = modulation(6, name="norm1_context")(c)

        out, context_out = attend(text_ends=self.last, name="attn")(
            modulated(x_norm, shift, scale), modulated(context_norm, context_shift, context_scale)
        )
        x = add(x, gate, out)
        if self.dual:
            shift2, scale2, gate2 = second
            x = add(x, gate2, attend(name="attn2")(modulated(x_norm, shift2, scale2))[0])
        feed_forward = partial(FeedForward, self.dtype, self.lora_scale)
        x = add(x, ff_gate, feed_forward(name="ff")(modulated(normalize(x, EPS), ff_shift, ff_scale)))
        if not self.last:
            ff_shift, ff_scale, ff_gate = context_ff
            context = add(context, context_gate, context_out)
            context = add(context, ff_gate, feed_forward(name="ff_context")(modulated(normalize(context, EPS), ff_shift, ff_scale)))
        return (x, context), None


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
        embed = partial(MLPEmbedding, cfg.width, self.lora_scale)
        time = timestep_embedding(1000 * sigma.astype(jnp.float32), TIME_CHANNELS)
        c = embed(name="timestep_embedder")(time) + embed(name="text_embedder")(pooled)
        c = jax.nn.silu(c)  # [B, D], float32

        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        for group in block_groups(cfg):
            stack = nn.scan(
                block,
                variable_axes={"params": 0, "lora": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=group.length,
                unroll=min(self.scan_unroll, group.length),
            )
            blocks = stack(cfg, group.dual, group.last, self.dtype, self.attention_impl, self.lora_scale, name=f"blocks_{group.first}")
            (x, context), _ = blocks((x, context), c)

        scale, shift = Modulation(2, self.lora_scale, name="norm_out")(c)
        x = normalize(x, EPS) * (1 + scale) + shift
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

    def add_linear(path, names, stacked=False):
        table[f"{path}/kernel"] = Source(tuple(f"{name}.weight" for name in names), "transpose", stacked)
        table[f"{path}/bias"] = Source(tuple(f"{name}.bias" for name in names), "none", stacked)

    for name in ("context_embedder", "norm_out.linear", "proj_out"):
        add_linear(name.replace(".", "/"), [name])
    for embedder in ("timestep_embedder", "text_embedder"):
        for linear in ("linear_1", "linear_2"):
            add_linear(f"{embedder}/{linear}", [f"time_text_embed.{embedder}.{linear}"])
    for first, length, dual, last in block_groups(config):
        linears = ["norm1.linear", "norm1_context.linear", "ff.net.0.proj", "ff.net.2"]
        linears += [f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")]
        linears += [] if last else ["attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2"]
        linears += [f"attn2.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")] if dual else []
        norms = [f"attn.{name}" for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")]
        norms += ["attn2.norm_q", "attn2.norm_k"] if dual else []
        prefixes = [f"transformer_blocks.{i}." for i in range(first, first + length)]
        for name in linears:
            path = name.replace(".0", "_0").replace(".2", "_2").replace("_0.proj", "_0_proj").replace(".", "/")
            add_linear(f"blocks_{first}/{path}", [prefix + name for prefix in prefixes], stacked=True)
        for name in norms if config.qk_norm else []:
            names = tuple(f"{prefix}{name}.weight" for prefix in prefixes)
            table[f"blocks_{first}/{name.replace('.', '/')}/scale"] = Source(names, "none", stacked=True)
    return table

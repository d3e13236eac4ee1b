"""The convolutional autoencoder of Stable Diffusion and FLUX (diffusers' AutoencoderKL), channels last.

Legend: B images, H and W their sides, h and w the latents' sides (H / f, W / f with f = 2^(levels - 1)), C channels.

Two things differ from the torch module in form, not in result: group norm first reduces each channel over space, which XLA
fuses well, and nearest upsampling with the 3x3 convolution after it is one step on the small image (2.25 times fewer
multiplications; see `upsample_conv`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax.models.attention import attention
from densegrpo_jax.models.component_json import read_fields
from densegrpo_jax.models.layers import Dense
from densegrpo_jax.models.source import Source

EPS = 1e-6  # of every group norm
LOGVAR_RANGE = (-30.0, 20.0)  # the encoder's log-variance is clipped to this


@dataclasses.dataclass(frozen=True)
class VAEConfig:
    """An AutoencoderKL, with the names and defaults of its config.json.

    Attributes:
      in_channels: of the images that are encoded.
      out_channels: of the images that are decoded.
      latent_channels: C of the latents.
      block_out_channels: width of each level, from full resolution down; every level but the last halves the sides.
      layers_per_block: residual blocks a level in the encoder; the decoder has one more.
      norm_num_groups: of every group norm; divides every width.
      scaling_factor: what latents are multiplied by for the diffusion model.
      shift_factor: what is subtracted before that.
      use_quant_conv: a 1x1 convolution after the encoder (Stable Diffusion 1 and 2, not 3, not FLUX).
      use_post_quant_conv: the same before the decoder.
      mid_block_add_attention: single-head attention over all positions at the lowest resolution.
    """

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 4
    block_out_channels: tuple[int, ...] = (64,)
    layers_per_block: int = 1
    norm_num_groups: int = 32
    scaling_factor: float = 0.18215
    shift_factor: float | None = None
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    def __post_init__(self):
        if not self.block_out_channels or any(width % self.norm_num_groups for width in self.block_out_channels):
            raise ValueError(
                f"VAEConfig: block_out_channels {self.block_out_channels} must be multiples of norm_num_groups {self.norm_num_groups}"
            )

    @property
    def downsampling(self) -> int:
        """f: image side / latent side."""
        return 2 ** (len(self.block_out_channels) - 1)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "VAEConfig":
        """Reads diffusers' vae/config.json.

        Raises:
          ValueError: an unknown key, or an option of another value than is implemented; both are named.
        """
        widths = values.get("block_out_channels", cls.block_out_channels)
        levels = len(widths) if isinstance(widths, list | tuple) else 0
        fixed = {
            "_class_name": "AutoencoderKL",
            "act_fn": "silu",
            "down_block_types": ["DownEncoderBlock2D"] * levels,
            "up_block_types": ["UpDecoderBlock2D"] * levels,
            "latents_mean": None,
            "latents_std": None,
        }
        # sample_size only matters for tiling, force_upcast only for float16, which is not offered.
        ignored = {"_diffusers_version", "_name_or_path", "sample_size", "force_upcast"}
        return cls(**read_fields(cls, values, fixed, ignored))


def normalize_latents(config: VAEConfig, latents: jax.Array) -> jax.Array:
    """Latents as the encoder gives them -> as the diffusion model sees them: (z - shift_factor) scaling_factor."""
    return (latents - (config.shift_factor or 0.0)) * config.scaling_factor


def denormalize_latents(config: VAEConfig, latents: jax.Array) -> jax.Array:
    """Latents of the diffusion model -> as the decoder takes them: z / scaling_factor + shift_factor."""
    return latents / config.scaling_factor + (config.shift_factor or 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Layers

_conv_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def _conv(x: jax.Array, kernel: jax.Array, strides: tuple[int, int], padding: tuple) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel.astype(x.dtype), strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


# For a nearest-upsampled row, output 2i + phase sees rows i - 1 + phase and i + phase of the small image; row t of
# PHASES[phase] says which of the kernel's three rows fall on the t-th of them.
PHASES = np.array([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]], np.float32)  # [phase, tap, kernel row]


def upsample_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Nearest upsampling by two, then a 3x3 convolution with zero padding, without making the large image.

    Each output pixel sees only 2x2 pixels of `x`, so the nine weights fold into four, one set for each of the four output
    phases: four 2x2 convolutions of `x`, interleaved.

    Args:
      x: [B, H, W, C].
      kernel: [3, 3, C, O].

    Returns:
      [B, 2H, 2W, O].
    """
    B, H, W, _ = x.shape
    folded = jnp.einsum("atk,bul,klio->abtuio", PHASES, PHASES, kernel.astype(jnp.float32), precision="highest")  # [2, 2, 2, 2, C, O]
    rows = [
        jnp.stack([_conv(x, folded[a, b], (1, 1), ((1 - a, a), (1 - b, b))) for b in (0, 1)], axis=3)  # [B, H, W, 2, O]
        for a in (0, 1)
    ]
    return jnp.stack(rows, axis=2).reshape(B, 2 * H, 2 * W, kernel.shape[-1])


class Conv(nn.Module):
    """Convolution with bias: "kernel" [size, size, in, features] and "bias" [features] in `params`.

    Attributes:
      features: output channels.
      size: 1 or 3; sides are kept by zero padding.
      resample: "down" halves the sides (stride 2, padded below and right only), "up" doubles them (see `upsample_conv`).
      dtype: of the computation and of the output.
    """

    features: int
    size: int = 3
    resample: str | None = None
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [B, H, W, in] to [B, H', W', features]."""
        kernel = self.param("kernel", _conv_init, (self.size, self.size, x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        x = x.astype(self.dtype)
        if self.resample == "up":
            y = upsample_conv(x, kernel)
        elif self.resample == "down":
            y = _conv(x, kernel, (2, 2), ((0, 1), (0, 1)))
        else:
            y = _conv(x, kernel, (1, 1), ((self.size // 2,) * 2,) * 2)
        return y + bias.astype(self.dtype)[None, None, None]


class GroupNorm(nn.Module):
    """Group norm over space and the channels of a group, in float32; "scale" and "bias" [C] in `params`.

    Attributes:
      groups: how many groups of consecutive channels.
      dtype: of the output.
    """

    groups: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [B, H, W, C] to the same shape."""
        B, _, _, C = x.shape
        scale = self.param("scale", nn.initializers.ones, (C,), jnp.float32).astype(jnp.float32)[None, None, None]
        bias = self.param("bias", nn.initializers.zeros, (C,), jnp.float32).astype(jnp.float32)[None, None, None]

        def mean(t):  # of space, then of the group; [B, H, W, C] -> [B, 1, 1, C]
            grouped = t.mean((1, 2)).reshape(B, self.groups, C // self.groups).mean(-1)
            return jnp.repeat(grouped, C // self.groups, axis=-1)[:, None, None]

        x = x.astype(jnp.float32)
        x = x - mean(x)
        return (x * (jax.lax.rsqrt(mean(jnp.square(x)) + EPS) * scale) + bias).astype(self.dtype)


class ResBlock(nn.Module):
    """Two normed 3x3 convolutions around a skip connection, which is a 1x1 convolution where the width changes.

    Attributes:
      features: output channels.
      groups: of the norms.
      dtype: of the computation.
    """

    features: int
    groups: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [B, H, W, in] to [B, H, W, features]."""
        y = jax.nn.silu(GroupNorm(self.groups, self.dtype, name="norm1")(x))
        y = Conv(self.features, dtype=self.dtype, name="conv1")(y)
        y = jax.nn.silu(GroupNorm(self.groups, self.dtype, name="norm2")(y))
        y = Conv(self.features, dtype=self.dtype, name="conv2")(y)
        if x.shape[-1] != self.features:
            x = Conv(self.features, size=1, dtype=self.dtype, name="conv_shortcut")(x)
        return x + y


class SpatialAttention(nn.Module):
    """Single-head self-attention over all positions, with a skip connection.

    Attributes:
      groups: of the norm.
      dtype: of the computation.
    """

    groups: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [B, h, w, C] to the same shape."""
        B, h, w, C = x.shape
        y = GroupNorm(self.groups, self.dtype, name="group_norm")(x).reshape(B, h * w, C)
        q, k, v = (Dense(C, dtype=self.dtype, name=name)(y)[:, :, None] for name in ("to_q", "to_k", "to_v"))  # [B, N, 1, C]
        y = attention(q, k, v, impl="xla").reshape(B, h * w, C)  # heads this wide are beyond the flash kernels
        return x + Dense(C, dtype=self.dtype, name="to_out")(y).reshape(x.shape)


# ---------------------------------------------------------------------------------------------------------------------
# Networks


def _middle(config: VAEConfig, block: type, dtype, x: jax.Array) -> jax.Array:
    """What encoder and decoder do at the lowest resolution."""
    width, groups = config.block_out_channels[-1], config.norm_num_groups
    x = block(width, groups, dtype, name="mid_resnet_0")(x)
    if config.mid_block_add_attention:
        x = SpatialAttention(groups, dtype, name="mid_attention")(x)
    return block(width, groups, dtype, name="mid_resnet_1")(x)


class Encoder(nn.Module):
    """Images -> mean and log-variance of their latents.

    Attributes:
      config: sizes.
      dtype: of the computation, float32 or bfloat16; norm statistics and softmax stay in float32.
      remat: recompute each residual block in the backward pass.
    """

    config: VAEConfig
    dtype: jnp.dtype = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(self, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Encodes a batch.

        Args:
          images: in [-1, 1], [B, H, W, in_channels]; H and W multiples of `config.downsampling`.

        Returns:
          Mean and log-variance, [B, h, w, latent_channels] each, float32, before `normalize_latents`.

        Raises:
          ValueError: images of another shape.
        """
        config, dtype = self.config, self.dtype
        _check_dtype(dtype)
        if images.ndim != 4 or images.shape[-1] != config.in_channels or any(n % config.downsampling for n in images.shape[1:3]):
            raise ValueError(
                f"images must be [B, H, W, {config.in_channels}] with H and W multiples of {config.downsampling}, got {images.shape}"
            )
        block = nn.remat(ResBlock) if self.remat else ResBlock
        x = Conv(config.block_out_channels[0], dtype=dtype, name="conv_in")(images)
        for level, width in enumerate(config.block_out_channels):
            for layer in range(config.layers_per_block):
                x = block(width, config.norm_num_groups, dtype, name=f"down_{level}_resnet_{layer}")(x)
            if level < len(config.block_out_channels) - 1:
                x = Conv(width, resample="down", dtype=dtype, name=f"down_{level}_downsample")(x)
        x = _middle(config, block, dtype, x)
        x = jax.nn.silu(GroupNorm(config.norm_num_groups, dtype, name="norm_out")(x))
        x = Conv(2 * config.latent_channels, dtype=dtype, name="conv_out")(x)
        if config.use_quant_conv:
            x = Conv(2 * config.latent_channels, size=1, dtype=dtype, name="quant_conv")(x)
        mean, logvar = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return mean, jnp.clip(logvar, *LOGVAR_RANGE)


class Decoder(nn.Module):
    """Latents -> images.

    Attributes:
      config: sizes.
      dtype: of the computation, float32 or bfloat16; norm statistics and softmax stay in float32.
      remat: recompute each residual block in the backward pass.
    """

    config: VAEConfig
    dtype: jnp.dtype = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(self, latents: jax.Array) -> jax.Array:
        """Decodes a batch.

        Args:
          latents: [B, h, w, latent_channels], after `denormalize_latents`.

        Returns:
          Images [B, H, W, out_channels], float32, nominally in [-1, 1] and not clipped.

        Raises:
          ValueError: latents of another shape.
        """
        config, dtype = self.config, self.dtype
        _check_dtype(dtype)
        if latents.ndim != 4 or latents.shape[-1] != config.latent_channels:
            raise ValueError(f"latents must be [B, h, w, {config.latent_channels}], got {latents.shape}")
        block = nn.remat(ResBlock) if self.remat else ResBlock
        x = latents
        if config.use_post_quant_conv:
            x = Conv(config.latent_channels, size=1, dtype=dtype, name="post_quant_conv")(x)
        x = Conv(config.block_out_channels[-1], dtype=dtype, name="conv_in")(x)
        x = _middle(config, block, dtype, x)
        for level, width in enumerate(reversed(config.block_out_channels)):
            for layer in range(config.layers_per_block + 1):
                x = block(width, config.norm_num_groups, dtype, name=f"up_{level}_resnet_{layer}")(x)
            if level < len(config.block_out_channels) - 1:
                x = Conv(width, resample="up", dtype=dtype, name=f"up_{level}_upsample")(x)
        x = jax.nn.silu(GroupNorm(config.norm_num_groups, dtype, name="norm_out")(x))
        return Conv(config.out_channels, dtype=dtype, name="conv_out")(x).astype(jnp.float32)


def init(key: jax.Array, config: VAEConfig) -> dict:
    """Random parameters {"encoder": ..., "decoder": ...} for training from scratch; `jax.eval_shape` of it gives the shapes."""
    side = config.downsampling
    encoder_key, decoder_key = jax.random.split(key)
    return {
        "encoder": Encoder(config).init(encoder_key, jnp.zeros((1, side, side, config.in_channels)))["params"],
        "decoder": Decoder(config).init(decoder_key, jnp.zeros((1, 1, 1, config.latent_channels)))["params"],
    }


def encode(params: Mapping, config: VAEConfig, images: jax.Array, dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Mean and log-variance of the latents of `images`; see `Encoder`. `params` as `init` gives them."""
    return Encoder(config, dtype).apply({"params": params["encoder"]}, images)


def decode(params: Mapping, config: VAEConfig, latents: jax.Array, dtype=jnp.float32) -> jax.Array:
    """Images of `latents`; see `Decoder`. `params` as `init` gives them. Latents of the diffusion model go through
    `denormalize_latents` first."""
    return Decoder(config, dtype).apply({"params": params["decoder"]}, latents)


def _check_dtype(dtype) -> None:
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"the autoencoder computes in float32 or bfloat16, not {jnp.dtype(dtype).name}: float16 overflows to black images")


# ---------------------------------------------------------------------------------------------------------------------
# Names


def name_table(config: VAEConfig) -> dict[str, Source]:
    """Where each parameter of `init` is found in diffusers' AutoencoderKL, one to one."""
    table: dict[str, Source] = {}

    def add(ours: str, theirs: str, transform: str = "conv") -> None:
        weight = "scale" if transform == "none" else "kernel"
        table[f"{ours}/{weight}"] = Source((f"{theirs}.weight",), transform)
        table[f"{ours}/bias"] = Source((f"{theirs}.bias",))

    def add_resnet(ours: str, theirs: str, widens: bool) -> None:
        for part in ("1", "2"):
            add(f"{ours}/norm{part}", f"{theirs}.norm{part}", "none")
            add(f"{ours}/conv{part}", f"{theirs}.conv{part}")
        if widens:
            add(f"{ours}/conv_shortcut", f"{theirs}.conv_shortcut")

    def add_levels(ours: str, theirs: str, widths: tuple[int, ...], layers: int, sampler: str) -> None:
        for level, width in enumerate(widths):
            for layer in range(layers):
                widens = layer == 0 and width != widths[max(level - 1, 0)]
                add_resnet(f"{ours}_{level}_resnet_{layer}", f"{theirs}.{level}.resnets.{layer}", widens)
            if level < len(widths) - 1:
                add(f"{ours}_{level}_{sampler}", f"{theirs}.{level}.{sampler}rs.0.conv")

    for side in ("encoder", "decoder"):
        for name in ("conv_in", "conv_out"):
            add(f"{side}/{name}", f"{side}.{name}")
        add(f"{side}/norm_out", f"{side}.conv_norm_out", "none")
        for layer in (0, 1):
            add_resnet(f"{side}/mid_resnet_{layer}", f"{side}.mid_block.resnets.{layer}", False)
        if config.mid_block_add_attention:
            add(f"{side}/mid_attention/group_norm", f"{side}.mid_block.attentions.0.group_norm", "none")
            for name in ("to_q", "to_k", "to_v", "to_out"):
                suffix = ".0" if name == "to_out" else ""
                add(f"{side}/mid_attention/{name}", f"{side}.mid_block.attentions.0.{name}{suffix}", "transpose")
    widths = config.block_out_channels
    add_levels("encoder/down", "encoder.down_blocks", widths, config.layers_per_block, "downsample")
    add_levels("decoder/up", "decoder.up_blocks", widths[::-1], config.layers_per_block + 1, "upsample")
    if config.use_quant_conv:
        add("encoder/quant_conv", "quant_conv")
    if config.use_post_quant_conv:
        add("decoder/post_quant_conv", "post_quant_conv")
    return table

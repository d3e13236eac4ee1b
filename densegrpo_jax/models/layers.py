"""Layers shared by all networks: a linear layer that adapters attach to, norms, patch and time embeddings.

The linear layer and the layer norm carry hand-written derivatives. They compute what autodiff would, in an order that XLA
runs two to four times faster on CPU (autodiff's weight gradient is a doubly transposed product with a transposed copy), and
they are ordinary traced functions: they shard, scan, vmap and rematerialise. Forward-mode differentiation is not available.

Legend: B batch, S tokens, D width, R adapter rank.
"""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import Precision, dot_general, optimization_barrier


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])  # [tokens, D]


def _product_over_tokens(x: jax.Array, g: jax.Array, dtype, precision) -> jax.Array:
    """x^T g for x [tokens, in], g [tokens, out] -> [in, out], accumulated and returned in `dtype`."""
    return dot_general(x, g, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _linear(x, kernel, precision):
    return jnp.matmul(x, kernel.astype(x.dtype), precision=precision)


def _linear_fwd(x, kernel, precision):
    return _linear(x, kernel, precision), (x, kernel)


def _linear_bwd(precision, residuals, g):
    x, kernel = residuals
    dx = jnp.matmul(g, kernel.astype(x.dtype).T, precision=precision)
    return dx, _product_over_tokens(_flat(x), _flat(g), kernel.dtype, precision)


_linear.defvjp(_linear_fwd, _linear_bwd)


def _adapted(x, kernel, a, b, precision):
    """x (W + A B). One product in float32; in lower precision W + A B would round the adapter away, so two there."""
    if x.dtype == jnp.float32:
        return jnp.matmul(x, kernel.astype(x.dtype) + jnp.matmul(a, b, precision=precision), precision=precision)
    low_rank = jnp.matmul(jnp.matmul(x, a.astype(x.dtype), precision=precision), b.astype(x.dtype), precision=precision)
    return jnp.matmul(x, kernel.astype(x.dtype), precision=precision) + low_rank


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _lora_linear(x, kernel, a, b, precision):
    return _adapted(x, kernel, a, b, precision)


def _lora_linear_fwd(x, kernel, a, b, precision):
    return _lora_linear(x, kernel, a, b, precision), (x, kernel, a, b)


def _lora_linear_bwd(precision, residuals, g):
    x, kernel, a, b = residuals
    dx = _adapted(g, kernel.T, b.T, a.T, precision)  # g (W + A B)^T
    x, g = _flat(x), _flat(g)
    xa = jnp.matmul(x, a.astype(x.dtype), precision=precision)  # [tokens, R]
    gb = jnp.matmul(g, b.astype(g.dtype).T, precision=precision)  # [tokens, R]
    # The narrow result comes out as [R, in]; the barrier keeps XLA from turning it back into the slow [in, R] product.
    da = optimization_barrier(_product_over_tokens(gb, x, a.dtype, precision)).T
    db = _product_over_tokens(xa, g, b.dtype, precision)
    return dx, _product_over_tokens(x, g, kernel.dtype, precision), da, db  # an unused weight gradient is dead code


_lora_linear.defvjp(_lora_linear_fwd, _lora_linear_bwd)


class Dense(nn.Module):
    """Linear layer y = x W + bias + lora_scale (x A) B, the last term only where the collection `lora` has this path.

    Collection `params`: "kernel" [in, features], "bias" [features]. Optional collection `lora`: "a" [in, R], "b" [R, features],
    kept in float32 and cast at use. Without it the layer is bitwise the base layer.

    Attributes:
      features: output width.
      use_bias: add a bias.
      dtype: of the computation and of the output; parameters are cast at use.
      lora_scale: alpha / rank of the adapter.
      precision: of the matrix products; HIGHEST where float32 must stay float32 on TPU and GPU.
      kernel_init: initialiser of the kernel (training from scratch).
    """

    features: int
    use_bias: bool = True
    dtype: jnp.dtype = jnp.float32
    lora_scale: float = 1.0
    precision: Precision | None = None
    kernel_init: Callable = nn.initializers.xavier_uniform()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [..., in] to [..., features] in `dtype`.

        Raises:
          ValueError: the adapter's shapes do not fit this layer.
        """
        width = x.shape[-1]
        kernel = self.param("kernel", self.kernel_init, (width, self.features), jnp.float32)
        x = x.astype(self.dtype)
        if self.has_variable("lora", "a"):
            a, b = self.get_variable("lora", "a"), self.get_variable("lora", "b")
            if b is None or a.shape != (width, a.shape[-1]) or b.shape != (a.shape[-1], self.features):
                raise ValueError(
                    f"adapter at {'/'.join(self.path)}: a {a.shape} and b {None if b is None else b.shape} do not fit a "
                    f"kernel of shape {(width, self.features)}; expected a [{width}, R] and b [R, {self.features}]"
                )
            y = _lora_linear(x, kernel, a, self.lora_scale * b, self.precision)
        else:
            y = _linear(x, kernel, self.precision)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
            y = y + jnp.expand_dims(bias.astype(self.dtype), range(y.ndim - 1))
        return y


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def normalize(x: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / sqrt(variance + eps) over the last axis, computed and returned in float32.

    Args:
      x: [..., D], any float type.
      eps: added to the variance.
    """
    return _normalize_fwd(x, eps)[0]


def _normalize_fwd(x, eps):
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.square(x32 - mean).mean(-1, keepdims=True) + eps)
    return (x32 - mean) * rstd, (x, mean, rstd)


def _normalize_bwd(eps, residuals, g):
    x, mean, rstd = residuals
    y = (x.astype(jnp.float32) - mean) * rstd
    dx = rstd * (g - g.mean(-1, keepdims=True) - y * (g * y).mean(-1, keepdims=True))
    return (dx.astype(x.dtype),)


normalize.defvjp(_normalize_fwd, _normalize_bwd)


class LayerNorm(nn.Module):
    """Layer norm over the last axis with float32 statistics; "scale" and "bias" [D] in `params` when `affine`.

    Attributes:
      affine: multiply by a learned scale and add a learned bias.
      eps: added to the variance.
      dtype: of the output.
    """

    affine: bool = True
    eps: float = 1e-6
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [..., D] to the same shape in `dtype`."""
        y = normalize(x, self.eps)
        if self.affine:
            lead = range(x.ndim - 1)
            scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
            bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), jnp.float32)
            y = y * jnp.expand_dims(scale.astype(jnp.float32), lead) + jnp.expand_dims(bias.astype(jnp.float32), lead)
        return y.astype(self.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) times a learned "scale" [D], over the last axis, computed in float32.

    Attributes:
      eps: added to the mean square.
      dtype: of the output.
    """

    eps: float = 1e-6
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [..., D] to the same shape in `dtype`."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        x = x.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps)
        return (y * jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))).astype(self.dtype)


def timestep_embedding(t: jax.Array, dim: int, max_period: float = 10000.0) -> jax.Array:
    """Sinusoidal embedding of times, cosines first, in float32.

    Args:
      t: times, [B] (diffusion models use 1000 sigma).
      dim: even width of the embedding.
      max_period: longest period.

    Returns:
      [B, dim]: cos(t w_i) then sin(t w_i), w_i = max_period^(-i / (dim / 2)).

    Raises:
      ValueError: `t` is not a vector or `dim` is odd.
    """
    if t.ndim != 1 or dim % 2:
        raise ValueError(f"timestep_embedding needs t of shape [B] and an even dim, got t {t.shape} and dim {dim}")
    half = dim // 2
    # Angles reach 1000, where one more rounding of a frequency is seen in the output: so these are constants, with the float32
    # exponent that the networks were trained with and a correctly rounded exponential.
    exponent = np.float32(-np.log(max_period)) * np.arange(half, dtype=np.float32) / np.float32(half)
    frequencies = np.exp(exponent.astype(np.float64)).astype(np.float32)
    angles = t.astype(jnp.float32)[:, None] * frequencies[None]  # [B, dim/2]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class MLPEmbedding(nn.Module):
    """Two linear layers with silu between, in full float32: what turns times and pooled text into the modulation vector.

    Attributes:
      features: output width.
      lora_scale: alpha / rank of the adapter.
    """

    features: int
    lora_scale: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [B, in] to [B, features], float32."""
        dense = partial(Dense, self.features, lora_scale=self.lora_scale, precision=Precision.HIGHEST)
        return dense(name="linear_2")(jax.nn.silu(dense(name="linear_1")(x)))


def patchify(x: jax.Array, patch: int, channels_first: bool = False) -> jax.Array:
    """Cuts images into patches, row by row; within a patch the order is row, column, channel.

    Args:
      x: [B, H, W, C].
      patch: side of a patch.
      channels_first: within a patch the order is channel, row, column.

    Returns:
      [B, H/patch * W/patch, patch * patch * C].

    Raises:
      ValueError: H or W is not a multiple of `patch`.
    """
    B, H, W, C = x.shape
    if H % patch or W % patch:
        raise ValueError(f"latents of {H} x {W} cannot be cut into patches of {patch}: both sides must be multiples of {patch}")
    x = x.reshape(B, H // patch, patch, W // patch, patch, C)
    order = (0, 1, 3, 5, 2, 4) if channels_first else (0, 1, 3, 2, 4, 5)
    return x.transpose(order).reshape(B, (H // patch) * (W // patch), patch * patch * C)


def unpatchify(x: jax.Array, patch: int, height: int, width: int, channels_first: bool = False) -> jax.Array:
    """Inverse of `patchify`: [B, N, patch * patch * C] -> [B, height, width, C].

    Raises:
      ValueError: the number of patches or their size does not fit.
    """
    B, N, D = x.shape
    h, w = height // patch, width // patch
    if N != h * w or D % (patch * patch):
        raise ValueError(f"{N} patches of {D} numbers do not make an image of {height} x {width} with patch {patch}")
    C = D // (patch * patch)
    inside, order = ((C, patch, patch), (0, 1, 4, 2, 5, 3)) if channels_first else ((patch, patch, C), (0, 1, 3, 2, 4, 5))
    return x.reshape(B, h, w, *inside).transpose(order).reshape(B, height, width, C)


def position_table(dim: int, grid: int, base: int) -> jax.Array:
    """Two-dimensional sine-cosine position table; the sines are made in float64 and rounded to float32.

    Args:
      dim: width, a multiple of 4: half for the column, half for the row, each sines then cosines.
      grid: positions per side.
      base: side of the grid that positions are counted in: a step is base / grid.

    Returns:
      [grid * grid, dim], row by row, float32.

    Raises:
      ValueError: `dim` is not a multiple of 4.
    """
    if dim % 4:
        raise ValueError(f"position_table needs a width that is a multiple of 4, got {dim}")
    steps = np.arange(grid, dtype=np.float32) / np.float32(grid / base)
    omega = 10000.0 ** -(np.arange(dim // 4) / (dim / 4))
    angles = steps.astype(np.float64)[:, None] * omega[None]
    line = jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), jnp.float32)  # [grid, dim/2]
    column = jnp.broadcast_to(line[None], (grid, grid, dim // 2))
    row = jnp.broadcast_to(line[:, None], (grid, grid, dim // 2))
    return jnp.concatenate([column, row], axis=2).reshape(grid * grid, dim)


def rotary_table(axes: tuple[int, ...], rows: int, columns: int, theta: float = 10000.0) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of the rotary position embedding of a grid; the angles are made in float64 and the table rounded to float32.

    Args:
      axes: even widths of a head that turn by a position that is always 0, by the row, and by the column.
      rows, columns: of the grid.
      theta: the longest period is about 2 pi theta.

    Returns:
      cos, sin: [rows * columns, sum(axes) / 2] each, row by row: entry i of an axis turns by position theta^(-2 i / width).

    Raises:
      ValueError: not three axes, or an odd width. Reference: Su et al. 2021, arXiv 2104.09864, section 3.4.2.
    """
    if len(axes) != 3 or any(width % 2 for width in axes):
        raise ValueError(f"rotary_table needs three even widths, got {axes}")
    row, column = np.divmod(np.arange(rows * columns), columns)
    angles = [
        position[:, None] * theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
        for width, position in zip(axes, (np.zeros_like(row), row, column))
    ]
    angles = np.concatenate(angles, axis=1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns consecutive pairs of each head by its position's angles, in float32.

    Args:
      x: [B, N, H, D].
      cos, sin: [N, D/2] each.

    Returns:
      [B, N, H, D] in the type of x.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)  # [B, N, H, D/2, 2]
    first, second = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[None, :, None], sin[None, :, None]
    return jnp.stack([first * cos - second * sin, first * sin + second * cos], axis=-1).reshape(x.shape).astype(x.dtype)

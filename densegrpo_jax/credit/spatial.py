"""Spatial credit: log-probabilities, ratios and advantages per image token instead of per image.

The loss of a token is `objective.surrogate(token_log_ratio(...), advantage[:, None] * token_credit(...), clip_range)`, averaged over
tokens; log-ratios are sums over a token here, not means over the image, so that a clip range of .2 is usual.

Reference: SGA-Flow-GRPO, arXiv 2609.32340, and its released code; what is said to be ours is not in them.
Shapes: B trajectories, N image tokens (a patch of the latent grid, row by row), H W C height, width, channels of the latents.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from densegrpo_jax.flow import kernels
from densegrpo_jax.flow.kernels import Kernel

# Keeps a gradient map that is mostly constant finite; gradients of a mean-like reward are about 1e-6 a pixel.
MAD_EPS = 1e-12


def sum_per_token(values: jax.Array, patch: int = 2) -> jax.Array:
    """Sums an array like the latents over the channels, and for an unpacked grid over patches.

    Args:
      values: [B, H, W, C] with H and W multiples of `patch`, or packed [B, N, C].
      patch: side of the transformer's patch, in latent pixels; not used for packed values.

    Returns:
      [B, N].

    Raises:
      ValueError: another rank, or a size that `patch` does not divide.
    """
    if values.ndim == 3:
        return values.sum(axis=-1)
    if values.ndim != 4 or values.shape[1] % patch or values.shape[2] % patch:
        raise ValueError(f"expected [B, N, C], or [B, H, W, C] with H and W multiples of patch {patch}; got shape {values.shape}")
    b, h, w, c = values.shape
    return values.reshape(b, h // patch, patch, w // patch, patch, c).sum(axis=(2, 4, 5)).reshape(b, -1)


def token_log_prob(kernel: Kernel, x: jax.Array, velocity: jax.Array, x_next: jax.Array, patch: int = 2) -> jax.Array:
    """Log-density of a step, summed per token; the sum over tokens is the joint log-density.

    Args:
      kernel: leaves scalar or [B]; where std is 0 there is no density and the result is 0.
      x, velocity, x_next: [B, H, W, C] or packed [B, N, C], f32.
      patch: see `sum_per_token`.

    Returns:
      [B, N].

    Raises:
      ValueError: shapes that differ, or a type below f32.
    """
    _check(x, velocity, x_next)
    std, live = _safe_std(kernel, x)
    z = (x_next - kernels.transition_mean(kernel, x, velocity)) / std
    return jnp.where(live, sum_per_token(-0.5 * z**2 - jnp.log(std) - 0.5 * jnp.log(2 * jnp.pi), patch), 0.0)


def token_log_ratio(kernel: Kernel, velocity_new: jax.Array, velocity_old: jax.Array, noise: jax.Array, patch: int = 2) -> jax.Array:
    """Log of new over old density of a step, per token: `kernels.log_ratio` with sums over tokens in place of its mean.

    log r = -sum(e d + d^2 / 2) with d = v_coef (v_old - v_new) / std and the injected noise e; exactly 0 when the velocities agree.

    Args:
      kernel: leaves scalar or [B]; where std is 0 the result is 0.
      velocity_new, velocity_old, noise: [B, H, W, C] or packed [B, N, C], f32.
      patch: see `sum_per_token`.

    Returns:
      [B, N].

    Raises:
      ValueError: shapes that differ, or a type below f32.
    """
    _check(velocity_new, velocity_old, noise)
    std, live = _safe_std(kernel, noise)
    d = _per_trajectory(kernel.v_coef, noise) / std * (velocity_old - velocity_new)
    return jnp.where(live, -sum_per_token(noise * d + 0.5 * d**2, patch), 0.0)


def pixel_credit(gradient: jax.Array, *, temperature: float = 0.1, sign: Literal[-1, 1] = -1) -> jax.Array:
    """The credit of each pixel from the size of the reward's gradient: sigmoid(sign * (g - median) / MAD / temperature).

    For several differentiable rewards add their maps and clip to [0, 1].

    Args:
      gradient: [B, H, W], norm over RGB of d reward / d image.
      temperature: in units of the median absolute deviation (MAD).
      sign: -1 as released (a large gradient means little credit), or +1 (much).

    Returns:
      [B, H, W] in [0, 1].

    Raises:
      ValueError: wrong rank, or a temperature or sign out of range.
    """
    if gradient.ndim != 3:
        raise ValueError(f"gradient must be [B, H, W], got shape {gradient.shape}; take the norm over RGB first")
    if sign not in (-1, 1) or not temperature > 0:
        raise ValueError(f"sign must be -1 or 1 and temperature positive, got sign={sign}, temperature={temperature}")
    offset = gradient - jnp.median(gradient, axis=(1, 2), keepdims=True)
    mad = jnp.median(jnp.abs(offset), axis=(1, 2), keepdims=True)
    return jax.nn.sigmoid(sign * offset / (mad + MAD_EPS) / temperature)


def token_credit(
    credit: jax.Array, token_pixels: int = 16, *, normalise: Literal["max1", "mean1"] = "max1", confidence: float = 1.0
) -> jax.Array:
    """Pools a credit map to tokens and sets its level.

    Args:
      credit: [B, H, W] of `pixel_credit`, H and W multiples of `token_pixels`.
      token_pixels: image pixels along a token's side: the VAE's factor (8) times the patch (2).
      normalise: "max1" shifts the map so that its largest token is 1 (released); "mean1" divides by the mean, which keeps the average
        step size of the unweighted method (ours).
      confidence: in [0, 1]; the result is confidence * c + 1 - confidence.

    Returns:
      [B, N], factors for the advantage of each token.

    Raises:
      ValueError: wrong shape or option.
    """
    if credit.ndim != 3 or credit.shape[1] % token_pixels or credit.shape[2] % token_pixels:
        raise ValueError(f"credit must be [B, H, W] with H and W multiples of token_pixels {token_pixels}, got shape {credit.shape}")
    if normalise not in ("max1", "mean1"):
        raise ValueError(f'normalise must be "max1" or "mean1", got {normalise!r}')
    if not 0 <= confidence <= 1:
        raise ValueError(f"confidence must lie in [0, 1], got {confidence}")
    pooled = sum_per_token(credit[..., None], token_pixels) / token_pixels**2  # [B, N]
    if normalise == "max1":
        pooled = pooled + 1 - pooled.max(axis=-1, keepdims=True)
    else:
        pooled = pooled / pooled.mean(axis=-1, keepdims=True)
    return confidence * pooled + (1 - confidence)


def _check(first: jax.Array, *others: jax.Array) -> None:
    if any(x.shape != first.shape for x in others):
        raise ValueError(f"latents, velocities and noise must share one shape; got {[x.shape for x in (first, *others)]}")
    if any(jnp.finfo(x.dtype).bits < 32 for x in (first, *others)):
        raise ValueError(f"log-probabilities need f32 inputs, got {[x.dtype.name for x in (first, *others)]}")


def _per_trajectory(value: jax.Array, like: jax.Array) -> jax.Array:
    """A scalar or [B] as [B, 1, ...] beside `like` [B, ...]."""
    return jnp.broadcast_to(jnp.asarray(value, like.dtype), like.shape[:1]).reshape(-1, *[1] * (like.ndim - 1))


def _safe_std(kernel: Kernel, like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """std beside `like`, its zeros replaced by 1 so that no gradient meets 0 / 0; and [B, 1], True where it was not 0."""
    std = _per_trajectory(kernel.std, like)
    live = std > 0
    return jnp.where(live, std, 1.0), live.reshape(-1, 1)

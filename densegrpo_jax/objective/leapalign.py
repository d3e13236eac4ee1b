"""LeapAlign: the gradient of a differentiable reward through a whole trajectory, in two leaps.

Reference: LeapAlign, arXiv 2604.15311.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient


def leap(
    velocity: Callable[[jax.Array, jax.Array], jax.Array],
    x_k: jax.Array,
    x_j: jax.Array,
    x_0: jax.Array,
    sigma_k: jax.Array,
    sigma_j: jax.Array,
    *,
    alpha: float,
    min_distance: float = 0.1,
) -> tuple[jax.Array, jax.Array]:
    """The final latent of a trajectory, unchanged in value, with the gradient of two leaps k -> j -> 0 in place of all its steps.

    Its derivative is -j dv_j - (k - j) dv_k + alpha j (k - j) (dv_j / dx_j) dv_k, with k, j for the sigmas and d for d / d theta.

    Args:
      velocity: (x, sigma [B]) -> velocity like x, closing over the trained weights.
      x_k, x_j, x_0: [B, ...] latents of an ODE trajectory at sigma_k > sigma_j > 0; constants.
      sigma_k, sigma_j: [B].
      alpha: in [0, 1], how much of the nested term (v_j through x_j) is kept.
      min_distance: floor of the distances in the weight.

    Returns:
      x_0 [B, ...] with the gradient, and the weight [B] without one: 1 / (sum of both leaps' floored mean absolute errors).

    Raises:
      ValueError: shapes that do not fit.
    """
    if not x_k.shape == x_j.shape == x_0.shape or not sigma_k.shape == sigma_j.shape == x_k.shape[:1]:
        raise ValueError(f"latents {x_k.shape}, {x_j.shape}, {x_0.shape} must agree and sigmas {sigma_k.shape}, {sigma_j.shape} be [B]")

    def expand(sigma):  # [B] -> [B, 1, ...]
        return sigma.reshape(-1, *[1] * (x_k.ndim - 1))

    def distance(x, leapt):  # [B]
        return jnp.maximum(jnp.abs(x - leapt).reshape(len(x), -1).mean(axis=-1), min_distance)

    leapt_j = x_k - expand(sigma_k - sigma_j) * velocity(x_k, sigma_k)
    carried_j = _with_gradient_of(x_j, leapt_j)
    damped_j = _with_gradient_of(x_j, alpha * leapt_j)
    leapt_0 = carried_j - expand(sigma_j) * velocity(damped_j, sigma_j)
    weight = 1 / (distance(x_j, leapt_j) + distance(x_0, leapt_0))
    return _with_gradient_of(x_0, leapt_0), stop_gradient(weight)


def loss(reward: jax.Array, weight: jax.Array, *, threshold: float) -> jax.Array:
    """The hinge w max(0, threshold - reward) of each trajectory, to be minimised.

    Args:
      reward: [B], of the decoded result of `leap`.
      weight: [B], of `leap`.
      threshold: reward from which on nothing is pushed any more (the paper's lambda), in units of the reward.

    Returns:
      [B].
    """
    return weight * jnp.maximum(0.0, threshold - reward)


def _with_gradient_of(value: jax.Array, carrier: jax.Array) -> jax.Array:
    """`value` to the last bit, with the gradient of `carrier`."""
    return stop_gradient(value) + (carrier - stop_gradient(carrier))

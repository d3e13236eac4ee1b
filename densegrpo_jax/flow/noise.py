"""Noise that is addressed, not consumed: key = fold_in(seed, epoch, denoising step, trajectory id).

The same address gives bitwise the same noise under any batch split, order, mesh or number of hosts.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import ndtri


def initial_noise(key: jax.Array, epoch: int | jax.Array, ids: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x at sigma = 1. For a start shared within a group give the group's id for each of its members.

    Args:
      key: typed root key of the run.
      epoch: training step (or a constant for evaluation).
      ids: [B] global ids of the trajectories (or of their groups).
      shape: of one latent.

    Returns:
      [B, *shape] f32.
    """
    return _normal(jax.random.fold_in(jax.random.fold_in(key, epoch), 0), ids, shape)


def step_noise(key: jax.Array, epoch: int | jax.Array, ids: jax.Array, num_steps: int, shape: tuple[int, ...]) -> jax.Array:
    """The noise of every denoising step, [T, B, *shape] f32; see `initial_noise` for the arguments."""
    root = jax.random.fold_in(key, epoch)
    keys = jax.vmap(lambda i: jax.random.fold_in(root, i))(jnp.arange(1, num_steps + 1))
    return jax.vmap(lambda k: _normal(k, ids, shape))(keys)


def _normal(key: jax.Array, ids: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Standard normals [B, *shape], each trajectory from its own key: the halves of 32 random bits pick two of 2^16 quantiles.

    Their scaled sum is normal to high accuracy and up to 5.9 standard deviations. A look-up, one addition and one product round in one way
    only, while XLA's inverse error function differs in its last digit between vector lanes and what is left over, that is, with the
    way in which a batch is split.
    """
    bits = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(key, i), shape, jnp.uint32))(ids)
    table = jnp.asarray(_quantiles())
    return (table[bits >> 16] + table[bits & 0xFFFF]) * jnp.float32(0.5**0.5)


@cache
def _quantiles() -> np.ndarray:
    """2^16 standard normal quantiles, scaled to variance 1."""
    quantiles = ndtri((np.arange(2**16) + 0.5) / 2**16)
    return (quantiles / np.sqrt(np.mean(quantiles**2))).astype(np.float32)

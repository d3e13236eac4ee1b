"""Noise that is addressed, not consumed: key = fold_in(seed, epoch, denoising step, trajectory id).

The same address gives bitwise the same noise under any batch split, order, mesh or number of hosts.
"""

import jax
import jax.numpy as jnp


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
    return jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32))(ids)

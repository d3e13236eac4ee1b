"""The stochastic sampler: one `lax.scan` over the grid that keeps what training and completion need."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax.flow import kernels
from densegrpo_jax.flow.kernels import Kernel
from densegrpo_jax.flow.solvers import Velocity


class Trajectory(NamedTuple):
    """What the sampler did, in sampling order, time first, f32 (0 = noise, T = image; the papers' level is k = T - i).

    Attributes:
      latents: [T+1, B, ...].
      velocity: [T, B, ...] guided velocity at latents[:-1] under the sampling weights.
      noise: [T, B, ...] the standard normal that was injected; zeros at ODE steps.
      sigmas: [T+1].
      log_prob: [T, B] mean over dimensions; 0 at ODE steps.
    """

    latents: jax.Array
    velocity: jax.Array
    noise: jax.Array
    sigmas: jax.Array
    log_prob: jax.Array


def rollout(
    velocity: Velocity,
    x_init: jax.Array,
    kernel: Kernel,
    sigmas: np.ndarray,
    noise: jax.Array,
    *,
    cond: Any = None,
    chunk: int | None = None,
) -> Trajectory:
    """Samples x_T .. x_0 with the kernel of each step (DenseGRPO eq. 6).

    Args:
      velocity: `velocity(x [B, ...], sigma [B])`, or `velocity(x, sigma, cond)` if `cond` is given; returns f32 like x.
      x_init: [B, ...] f32 latents at sigmas[0].
      kernel: table [T] from `flow.kernels`.
      sigmas: grid [T+1].
      noise: [T, B, ...] standard normal, addressed by `flow.noise.step_noise`.
      cond: pytree with leading axis B, sliced along with the trajectories.
      chunk: trajectories at a time (it must divide B); smaller working sets are faster on CPU and bound memory anywhere.

    Returns:
      Trajectory.
    """
    num_steps = check_rollout(x_init, kernel, sigmas, noise)
    table = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), kernel)
    levels = jnp.asarray(sigmas, jnp.float32)

    def walk(x_init, noise, cond):
        call = bind(velocity, cond)

        def one(x, i):
            row = jax.tree.map(lambda leaf: leaf[i], table)
            v = call(x, jnp.full(x.shape[:1], levels[i]))
            x_next = kernels.step(row, x, v, noise[i])
            return x_next, (x_next, v)

        _, (later, velocities) = jax.lax.scan(one, x_init, jnp.arange(num_steps))
        return jnp.concatenate([x_init[None], later]), velocities

    latents, velocities = in_chunks(walk, chunk, (0, 1, 0), (1, 1))(x_init, noise, cond)
    return as_trajectory(latents, velocities, noise, table, levels)


# --- shared with completion ------------------------------------------------------------------------------------------


def as_trajectory(latents: jax.Array, velocity: jax.Array, noise: jax.Array, table: Kernel, levels: jax.Array) -> Trajectory:
    """Adds log-probs and blanks the noise of ODE steps, which was drawn but not injected."""
    live = table.std > 0.0
    noise = jnp.where(live.reshape((-1,) + (1,) * (noise.ndim - 1)), noise, 0.0)
    return Trajectory(latents, velocity, noise, levels, jax.vmap(kernels.log_prob_of_noise)(table, noise))


def bind(velocity: Velocity, cond: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return velocity if cond is None else lambda x, sigma: velocity(x, sigma, cond)


def in_chunks(fn: Callable, chunk: int | None, in_axes: tuple[int, ...], out_axes: tuple[int, ...]) -> Callable:
    """`fn` over slices of the trajectory axis, one after the other (`lax.map`), as one compiled body.

    Chunk j takes rows j, j + n, j + 2n, ... so that a batch axis sharded over devices stays sharded within each chunk.
    """

    def chunked(*args):
        batch = args[0].shape[in_axes[0]]
        size = batch if chunk is None else chunk
        if size < 1 or batch % size:
            valid = [n for n in range(1, batch + 1) if batch % n == 0]
            raise ValueError(f"chunk = {chunk} does not divide the {batch} trajectories; choose one of {valid}")
        if size == batch:
            return fn(*args)
        count = batch // size

        def split(x, axis):
            x = x.reshape(*x.shape[:axis], size, count, *x.shape[axis + 1 :])
            return jnp.moveaxis(x, axis + 1, 0)

        def join(x, axis):
            x = jnp.moveaxis(x, 0, axis + 1)
            return x.reshape(*x.shape[:axis], batch, *x.shape[axis + 2 :])

        parts = tuple(jax.tree.map(lambda x, a=axis: split(x, a), arg) for arg, axis in zip(args, in_axes))
        outs = jax.lax.map(lambda part: fn(*part), parts)
        return tuple(jax.tree.map(lambda x, a=axis: join(x, a), out) for out, axis in zip(outs, out_axes))

    return chunked


def check_rollout(x_init: jax.Array, kernel: Kernel, sigmas: np.ndarray, noise: jax.Array) -> int:
    """Shapes and dtypes of a rollout; returns T.

    Raises:
      ValueError: naming the argument that does not fit.
    """
    num_steps = len(sigmas) - 1
    if kernel.std.shape != (num_steps,):
        raise ValueError(f"the kernel has shape {kernel.std.shape}, the grid has {num_steps} steps: build both from the same sigmas")
    if noise.shape != (num_steps, *x_init.shape):
        raise ValueError(f"noise has shape {noise.shape}, expected [T, B, ...] = {(num_steps, *x_init.shape)}")
    for name, array in (("x_init", x_init), ("noise", noise)):
        if array.dtype != jnp.float32:
            raise ValueError(f"{name} is {array.dtype}: latents and noise are float32, as log-probabilities depend on them")
    return num_steps

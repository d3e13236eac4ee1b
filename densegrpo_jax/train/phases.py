"""The compiled phases of a training step: sample and complete, decode, update; and the ODE sampler of evaluation.

Each is a pure function of arrays, jitted once. Trajectories are the batch axis; the network sees the group folded into its batch.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax import flow, parallel
from densegrpo_jax.config import Config, Exploration
from densegrpo_jax.flow.rollout import in_chunks
from densegrpo_jax.objective import Rows, grpo_loss
from densegrpo_jax.policy import Policy
from densegrpo_jax.train import psi
from densegrpo_jax.train import state as states
from densegrpo_jax.train.state import TrainState

METHODS_WITHOUT_COMPLETIONS = ("flow_grpo", "coca")


class Sampler(NamedTuple):
    """How trajectories are made in one training step: static tables, decided on the host.

    Attributes:
      sigmas: [T+1].
      kernel: table [T].
      trained: [T] bool, steps that enter the loss: in the window and noisy.
      scheme: completions; its first `len(levels)` branches give the rewards at `levels`, the rest are the paired baselines.
      levels: sampling indices that are completed.
    """

    sigmas: np.ndarray
    kernel: flow.Kernel
    trained: np.ndarray
    scheme: tuple[flow.Branch, ...]
    levels: np.ndarray


class Batch(NamedTuple):
    """What the update reads: trajectory; kernel [T]; advantage, weight [T, B]; cond [P, ...] and group_of [B], the index into it."""

    trajectory: flow.Trajectory
    kernel: flow.Kernel
    advantage: jax.Array
    weight: jax.Array
    cond: Any
    uncond: Any
    group_of: jax.Array


# --- static tables -----------------------------------------------------------------------------------------------------


def window(config: Config, step: int) -> flow.Window:
    """The noise window of a training step."""
    e, num_steps = config.exploration, config.sampling.num_steps
    if e.window == "all":
        return flow.all_steps(num_steps)
    if e.window == "all_but_last":
        return flow.all_but_last(num_steps, e.last_noise)
    if e.window == "fixed":
        return flow.fixed(num_steps, e.window_start, e.window_size)
    if e.window == "random":
        return flow.random(num_steps, e.window_size, config.run.seed, step, first=e.window_start)
    return flow.sliding(num_steps, e.window_size, step, every=e.window_every)


def widest(e: Exploration, num_steps: int) -> Exploration:
    """The settings whose one window is the union of all windows of a run: what is calibrated, and what a psi file must cover."""
    if e.window == "random":
        return dataclasses.replace(e, window="fixed", window_size=num_steps - e.window_start)
    return dataclasses.replace(e, window="all") if e.window == "sliding" else e


def sampler(config: Config, sigmas: np.ndarray, shift: float, step: int) -> Sampler:
    """Tables of a training step.

    Args:
      config: the run.
      sigmas: grid [T+1].
      shift: of the grid; re-spaced completions follow it.
      step: training step; matters to random and sliding windows only.
    """
    chosen, e = window(config, step), config.exploration
    level: float | np.ndarray = e.noise_level
    if e.psi is not None:
        union = window(dataclasses.replace(config, exploration=widest(e, config.sampling.num_steps)), step)
        level = psi.noise_level(e.psi, e.sampler, sigmas, union.trained)
    kernel = flow.only_where(flow.SAMPLERS[e.sampler](sigmas, level), sigmas, chosen.stochastic)
    trained = chosen.trained & (kernel.std > 0.0)
    if not trained.any():
        raise ValueError("no step is both in the window and noisy: raise exploration.noise_level or widen exploration.window")
    levels = np.zeros(len(sigmas) - 1, bool)
    if config.credit.method not in METHODS_WITHOUT_COMPLETIONS:
        first, last = np.flatnonzero(trained)[[0, -1]]
        levels[first : last + 2] = True  # the rewards on both sides of every trained step
    c = config.completion
    kind, _, count = c.steps.partition(" ")
    if kind == "respaced":
        if not count.isdigit():
            raise ValueError(f"completion.steps = {c.steps!r}: write the number of steps, such as 'respaced 5'")
        if c.tail != "keep":
            raise ValueError(f"completion.tail = {c.tail!r} is about the sampler's levels; re-spaced completions do not use them")
        scheme = flow.substep_branches(sigmas, int(count), shift, c.solver, levels=levels)
    else:
        scheme = flow.branches(sigmas, int(c.steps) if c.steps.isdigit() else c.steps, c.solver, tail=c.tail, levels=levels)
    if c.paired and scheme:
        scheme = scheme + flow.paired(sigmas, scheme, np.flatnonzero(trained))
    return Sampler(sigmas, kernel, trained, scheme, np.flatnonzero(levels))


OUTWEIGHS = 10.0  # times the pull of the typical step, from which on it is said


def outweighed(config: Config, tables: Sampler) -> list[str]:
    """A line if one trained step moves the weights far more than the others: the derivative of its log-probability by the velocity goes as
    the velocity's weight in the mean over the std of the noise."""
    o, trained = config.objective, np.flatnonzero(tables.trained)
    pull = np.abs(tables.kernel.v_coef[trained]) / tables.kernel.std[trained]
    most = pull.max() / np.median(pull)
    if most < OUTWEIGHS or o.step_weights != "none" or o.ratio == "guard":
        return []
    return [
        f"denoising step {trained[pull.argmax()]} has so little noise that its log-probabilities pull {most:.0f} times as much as the "
        "typical step's; set objective.step_weights to tempflow, or leave the step out (exploration.window)"
    ]


# --- phases ------------------------------------------------------------------------------------------------------------


def make_sample(config: Config, policy: Policy, tables: Sampler) -> Callable:
    """(params, trained, cond [P, ...], uncond, step, ids [b], start_ids [b]) -> Trajectory, clean latents [branches + 1, b, ...].

    `ids` are those of the step's trajectories, or some of them. The last clean latent is the trajectory's own end.
    """

    @jax.jit
    def sample(params, trained, cond, uncond, step, ids, start_ids):
        key = jax.random.key(config.run.seed)
        x = flow.initial_noise(key, step, start_ids, policy.shape)
        noise = flow.step_noise(key, step, ids, config.sampling.num_steps, policy.shape)
        rows = jax.tree.map(lambda leaf: leaf[ids // config.prompts.group_size], cond)
        velocity = policy.velocity(params, trained, uncond)
        if tables.scheme:
            trajectory, clean = flow.rollout_and_complete(
                velocity, x, tables.kernel, tables.sigmas, noise, tables.scheme, cond=rows, chunk=config.sampling.chunk,
                tile=config.completion.tile, tail=config.completion.tail,
            )  # fmt: skip
            return parallel.by_rows((trajectory, jnp.concatenate([clean, trajectory.latents[-1:]])), axis=1)
        trajectory = flow.rollout(velocity, x, tables.kernel, tables.sigmas, noise, cond=rows, chunk=config.sampling.chunk)
        return parallel.by_rows((trajectory, trajectory.latents[-1:]), axis=1)

    return sample


@jax.jit
def join(pieces: list[tuple[flow.Trajectory, jax.Array]]) -> tuple[flow.Trajectory, jax.Array]:
    """Trajectories and clean latents that were sampled in pieces, along their axis of trajectories."""
    trajectories, clean = zip(*pieces)
    leaves = {name: [getattr(t, name) for t in trajectories] for name in flow.Trajectory._fields if name != "sigmas"}
    joined = {name: jnp.concatenate(parts, axis=1) for name, parts in leaves.items()}
    return flow.Trajectory(sigmas=trajectories[0].sigmas, **joined), jnp.concatenate(clean, axis=1)


@jax.jit
def by_trajectory(clean: jax.Array) -> jax.Array:
    """[L, B, ...] as [B * L, ...]: what a device has sampled stays with it."""
    return clean.swapaxes(0, 1).reshape(-1, *clean.shape[2:])


@partial(jax.jit, static_argnums=1)
def every_nth(latents: jax.Array, size: int, i: int) -> jax.Array:
    """Rows i, i + n, i + 2n, ... of [N, ...], n = N / size: an equal share of what each device holds. [size, ...]"""
    return jax.lax.dynamic_index_in_dim(latents.reshape(size, -1, *latents.shape[1:]), i, 1, keepdims=False)


def make_decode(config: Config, policy: Policy, devices: int = 1) -> Callable:
    """(params, latents [N, ...]) -> uint8 images [N, H, W, 3], and which are finite [N]."""

    @jax.jit
    def decode(params, latents):
        def some(latents):
            images = policy.decode(params, latents)
            finite = jnp.all(jnp.isfinite(images), axis=(1, 2, 3))
            return jnp.round(jnp.where(finite[:, None, None, None], images, 0.0) * 255.0).astype(jnp.uint8), finite

        return in_chunks(some, decode_size(config, latents.shape[0], devices), (0,), (0, 0))(latents)

    return decode


def decode_size(config: Config, count: int, devices: int = 1) -> int:
    """Of `count` images, how many are decoded at a time: the largest divisor that is at most `sampling.decode_chunk` and that the devices
    share evenly, if there is one; one image a device where they are more."""
    most = min(max(config.sampling.decode_chunk, devices), count)
    divisors = [d for d in range(1, most + 1) if count % d == 0]
    return max([d for d in divisors if d % devices == 0] or divisors)


def make_generate(config: Config, policy: Policy, sigmas: np.ndarray) -> Callable:
    """(params, trained, cond [N, ...], uncond, ids [N], draw) -> clean latents [N, ...] by the Euler ODE from fixed noise.

    Other numbers `draw` stand for other noise.
    """
    ode = flow.plan(sigmas)

    @jax.jit
    def generate(params, trained, cond, uncond, ids, draw):
        x = flow.initial_noise(jax.random.key(EVALUATION_SEED), draw, ids, policy.shape)
        velocity = policy.velocity(params, trained, uncond)
        run = lambda x, cond: (flow.integrate(partial(_with_cond, velocity, cond), x, ode),)  # noqa: E731
        return in_chunks(run, config.sampling.chunk, (0, 0), (0,))(x, cond)[0]

    return generate


EVALUATION_SEED = 20_260_128  # evaluation noise is the same for every run, step and method


def _with_cond(velocity, cond, x, sigma):
    return velocity(x, sigma, cond)


def make_update(config: Config, policy: Policy, placed: TrainState | None = None) -> Callable:
    """(state, params, batch, order [micro-batches, rows, 2], fresh) -> state, metrics, log-ratios [micro-batches, rows].

    `order` holds (step, trajectory) pairs; gradients are averaged over all of them in one scan. With `fresh` the weights are those that
    sampled: with recomputed log-probs the old velocity is then this graph's own, so the ratio is exactly 1. The log-ratios returned are
    against the stored velocities in any case: before an update they are the rounding between the two graphs. On a mesh, `placed` is a
    state whose places the new one keeps.
    """
    kept = {} if placed is None else {"out_shardings": (jax.tree.map(lambda leaf: leaf.sharding, placed), None, None)}
    o = config.objective
    recompute = recomputes(config)

    def rows_of(batch: Batch, pairs):
        t, b = pairs[:, 0], pairs[:, 1]
        trajectory = batch.trajectory
        rows = Rows(
            jax.tree.map(lambda leaf: leaf[t], batch.kernel),
            trajectory.velocity[t, b],
            trajectory.noise[t, b],
            batch.advantage[t, b],
            batch.weight[t, b],
        )
        return rows, trajectory.latents[t, b], trajectory.sigmas[t], jax.tree.map(lambda leaf: leaf[batch.group_of[b]], batch.cond)

    def loss(trained, params, batch: Batch, pairs, fresh):
        rows, x, sigma, cond = rows_of(batch, pairs)
        velocity = policy.velocity(params, trained, batch.uncond)(x, sigma, cond)
        log_r = flow.log_ratio(rows.kernel, velocity, rows.velocity, rows.noise)
        if recompute:
            old = jnp.where(fresh, jax.lax.stop_gradient(velocity), rows.velocity)
            rows = rows._replace(velocity=old)
        reference = None
        if o.beta > 0.0:
            reference = jax.lax.stop_gradient(policy.velocity(params, None, batch.uncond)(x, sigma, cond))
        value, metrics = grpo_loss(velocity, rows, o.clip_range, velocity_ref=reference, beta=o.beta, kl_mode=o.kl_mode, ratio=o.ratio)
        return value, (metrics, log_r)

    @partial(jax.jit, donate_argnums=0, **kept)
    def update(state: TrainState, params, batch: Batch, order, fresh):
        def one(total, pairs):
            grads, (metrics, log_r) = jax.grad(loss, has_aux=True)(state.trained, params, batch, pairs, fresh)
            return jax.tree.map(jnp.add, total, grads), (metrics, log_r)

        zeros = jax.tree.map(jnp.zeros_like, state.trained)
        total, (metrics, log_r) = jax.lax.scan(one, zeros, order)
        grads = jax.tree.map(lambda g: g / order.shape[0], total)
        state, norms = states.apply_gradients(config, state, grads)
        reduce = {"ratio_min": jnp.min, "ratio_max": jnp.max}
        return state, {k: reduce.get(k, jnp.mean)(v) for k, v in metrics.items()} | norms, log_r

    return update


def make_recompute(config: Config, policy: Policy) -> Callable:
    """(params, trained, batch, order) -> batch whose old velocities and noise come from the update's forward pass, and the log-ratios
    [T, B] of that pass to the rollout's: the drift between the two graphs."""

    @jax.jit
    def recompute(params, trained, batch: Batch, order):
        def one(carry, pairs):
            velocity, noise, drift = carry
            t, b = pairs[:, 0], pairs[:, 1]
            trajectory = batch.trajectory
            x, cond = trajectory.latents[t, b], jax.tree.map(lambda leaf: leaf[batch.group_of[b]], batch.cond)
            v = policy.velocity(params, trained, batch.uncond)(x, trajectory.sigmas[t], cond)
            kernel = jax.tree.map(lambda leaf: leaf[t], batch.kernel)
            std = kernel.std.reshape((-1,) + (1,) * (x.ndim - 1))
            e = (trajectory.latents[t + 1, b] - flow.transition_mean(kernel, x, v)) / std
            log_r = flow.log_ratio(kernel, v, trajectory.velocity[t, b], trajectory.noise[t, b])
            return (velocity.at[t, b].set(v), noise.at[t, b].set(e), drift.at[t, b].set(log_r)), None

        velocity, noise = batch.trajectory.velocity, batch.trajectory.noise
        carry = velocity, noise, jnp.zeros(velocity.shape[:2], jnp.float32)
        (velocity, noise, drift), _ = jax.lax.scan(one, carry, order)
        return batch._replace(trajectory=batch.trajectory._replace(velocity=velocity, noise=noise)), drift

    return recompute


def recomputes(config: Config) -> bool:
    """Whether old log-probs are recomputed: as configured, by default where the network computes in bfloat16."""
    chosen = config.objective.recompute_old_log_prob
    return config.model.dtype == "bfloat16" if chosen is None else chosen


def update_order(config: Config, trained: np.ndarray, step: int, micro: int) -> np.ndarray:
    """Which (step, trajectory) pairs each update takes, addressed by (seed, step): [U, micro-batches, micro, 2]."""
    batch = config.prompts.per_step * config.prompts.group_size
    rng = np.random.default_rng([config.run.seed, step, 1])
    steps = np.flatnonzero(trained)
    pairs = np.stack(np.meshgrid(steps, np.arange(batch), indexing="ij"), axis=-1)  # [trained, B, 2]
    if config.optimizer.minibatch == "trajectories":
        pairs = pairs[:, rng.permutation(batch)].swapaxes(0, 1).reshape(-1, 2)
    else:
        pairs = rng.permutation(pairs.reshape(-1, 2))
    return pairs.reshape(config.optimizer.updates, -1, micro, 2).astype(np.int32)

"""Completions: from every latent of a stochastic trajectory to a clean latent by a short ODE (DenseGRPO eq. 8).

A completion scheme is a list of branches, each a level to start from and an ODE plan. `rollout_and_complete` walks the noise levels once:
at each level the SDE latent and all live branches go through the network, and a branch takes its first velocity from the SDE step that
it starts at. With the paper's n = k and T = 10 that is 55 evaluations a trajectory instead of 65.
"""

from math import ceil
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax.flow import kernels
from densegrpo_jax.flow.grid import shift_sigma, unshift_sigma
from densegrpo_jax.flow.kernels import Kernel
from densegrpo_jax.flow.rollout import Trajectory, as_trajectory, bind, check_rollout, in_chunks
from densegrpo_jax.flow.solvers import Plan, Solver, Velocity, apply_row, integrate, plan

Tail = Literal["keep", "skip_node", "skip_call"]


class Branch(NamedTuple):
    """An ODE path that leaves the trajectory at step `start` (0 = initial noise)."""

    start: int
    plan: Plan


# --- schemes ---------------------------------------------------------------------------------------------------------


def level_nodes(level: int, steps: int | str) -> list[int]:
    """Levels that an n-step completion visits: floor(k j / n) for j = n .. 0, n cut to k (densegrpo.md 3.2).

    Args:
      level: k, the level that it starts from, 1 to T.
      steps: n; "all" for n = k; "k/c" for n = ceil(k / c).
    """
    if steps == "all":
        n = level
    elif isinstance(steps, str) and steps.startswith("k/") and steps[2:].isdigit() and int(steps[2:]) > 0:
        n = ceil(level / int(steps[2:]))
    elif isinstance(steps, int) and steps >= 1:
        n = min(steps, level)
    else:
        raise ValueError(f"steps = {steps!r}: choose 'all', a positive number, or 'k/c' such as 'k/2'")
    return [level * j // n for j in range(n, -1, -1)]


def branches(
    sigmas: np.ndarray,
    steps: int | str = "all",
    solver: Solver = "euler",
    *,
    tail: Tail = "keep",
    levels: np.ndarray | None = None,
) -> tuple[Branch, ...]:
    """Completions on the sampler's own grid, one per level (DenseGRPO's ODE_n).

    Args:
      sigmas: grid [T+1].
      steps: n (see `level_nodes`).
      solver: see `flow.solvers.plan`.
      tail: what becomes of the last interior level, which is all but clean on SD3's grid (0.0089): "keep" it, "skip_node" in
        completions (its own completion stays), or "skip_call": also spare the sampler's network call there (see `rollout_and_complete`).
      levels: [T] which starts are wanted, in sampling order; all by default.

    Returns:
      Branches in sampling order.
    """
    _check_tail(tail)
    num_steps = len(sigmas) - 1
    starts = np.ones(num_steps, bool) if levels is None else np.asarray(levels, bool)
    if starts.shape != (num_steps,):
        raise ValueError(f"levels has shape {starts.shape}, the grid has {num_steps} steps")
    result = []
    for start in np.flatnonzero(starts):
        nodes = level_nodes(num_steps - int(start), steps)
        if tail != "keep":
            nodes = [k for i, k in enumerate(nodes) if k != 1 or i == 0]
        path = np.asarray(sigmas, np.float64)[[num_steps - k for k in nodes]]
        path = path[np.append(True, np.diff(path) < 0.0)]  # a repeated level is one node
        result.append(Branch(int(start), plan(path, solver)))
    return tuple(result)


def substep_branches(
    sigmas: np.ndarray, substeps: int, shift: float = 1.0, solver: Solver = "euler", *, levels: np.ndarray | None = None
) -> tuple[Branch, ...]:
    """Completions by at most `substeps` steps laid anew between the start and 0 (Stepwise-Flow-GRPO, T' = 5).

    Args:
      sigmas: grid [T+1].
      substeps: T'; fewer are taken where fewer sampler steps remain.
      shift: schedule shift; nodes are uniform in the unshifted time (SD3: 3, FLUX: exp(mu)).
      solver: see `flow.solvers.plan`.
      levels: [T] which starts are wanted; all by default.
    """
    if substeps < 1:
        raise ValueError(f"substeps = {substeps}: at least one step is needed to reach the image")
    num_steps = len(sigmas) - 1
    wanted = range(num_steps) if levels is None else np.flatnonzero(levels)
    result = []
    for start in wanted:
        n = min(substeps, num_steps - int(start))
        path = shift_sigma(np.linspace(unshift_sigma(sigmas[start], shift), 0.0, n + 1), shift)
        path[0] = sigmas[start]
        result.append(Branch(int(start), plan(path, solver)))
    return tuple(result)


def paired(sigmas: np.ndarray, scheme: tuple[Branch, ...], starts: np.ndarray | None = None) -> tuple[Branch, ...]:
    """Baselines for grid-consistent gains: for each branch from level i+1, the same plan from the ODE step out of x_i.

    The gain R(x_{i+1}) - R(x_i - h v_i), both sides completed by the same map, is 0 without noise under every solver and n. The baseline of
    the last step is the noise-free final latent.

    Args:
      sigmas: grid [T+1].
      scheme: branches of the levels after the wanted steps.
      starts: steps i that get a baseline; all by default.

    Returns:
      Branches, one per start.
    """
    by_start = {branch.start: branch.plan for branch in scheme}
    num_steps = len(sigmas) - 1
    result = []
    for start in range(num_steps) if starts is None else map(int, starts):
        first = plan(np.asarray(sigmas)[start : start + 2], "euler")
        rest = by_start.get(start + 1)
        if rest is None and start + 1 < num_steps:
            raise ValueError(f"a paired scheme needs a branch from every level; level {start + 1} has none")
        result.append(Branch(start, first if rest is None else Plan(*(np.concatenate(pair) for pair in zip(first, rest)))))
    return tuple(result)


# --- cost ------------------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Per trajectory: network evaluations (of which `padding` are wasted on filling tiles) and sequential network calls."""

    evaluations: int
    calls: int
    padding: int


def cost(num_steps: int, scheme: tuple[Branch, ...], *, tile: int | None = 1, reuse: bool = True, tail: Tail = "keep") -> Cost:
    """What sampling and completing one trajectory costs (densegrpo.md 9).

    Args:
      num_steps: T.
      scheme: branches.
      tile: as in `rollout_and_complete`.
      reuse: False counts the naive loop, which evaluates the velocity at the start of each branch again, one branch after the other.
      tail: "skip_call" spares the sampler's last evaluation.
    """
    if not reuse:
        total = num_steps + sum(len(branch.plan) for branch in scheme)
        return Cost(total, total, 0)
    rounds = _rounds(num_steps, scheme, tail)
    evaluations = sum(len(items) for items in rounds)
    if tile is None:
        return Cost(evaluations, len(rounds), 0)
    calls = sum(ceil(len(items) / tile) for items in rounds)
    return Cost(calls * tile, calls, calls * tile - evaluations)


# --- running ---------------------------------------------------------------------------------------------------------


def complete(velocity: Velocity, latents: jax.Array, scheme: tuple[Branch, ...], *, cond: Any = None) -> jax.Array:
    """The naive loop: each branch by itself from given latents, evaluating its start anew. The reference for the walk.

    Args:
      velocity: see `rollout`.
      latents: [T+1, B, ...] of a trajectory.
      scheme: branches.
      cond: pytree with leading axis B.

    Returns:
      Clean latents [len(scheme), B, ...].
    """
    call = bind(velocity, cond)
    return jnp.stack([integrate(call, latents[branch.start], branch.plan) for branch in scheme])


def rollout_and_complete(
    velocity: Velocity,
    x_init: jax.Array,
    kernel: Kernel,
    sigmas: np.ndarray,
    noise: jax.Array,
    scheme: tuple[Branch, ...],
    *,
    cond: Any = None,
    chunk: int | None = None,
    tile: int | None = 1,
    tail: Tail = "keep",
) -> tuple[Trajectory, jax.Array]:
    """Samples and completes in one walk over the noise levels.

    Args:
      velocity: see `rollout`; it gets the noise level of every row, as one call may mix branches. Rows are trajectory-major, and
        `cond` is repeated to match.
      x_init: [B, ...] f32.
      kernel: table [T]; may be traced, so that one program serves many (Algorithm 1 changes it in every iteration).
      sigmas: grid [T+1].
      noise: [T, B, ...].
      scheme: branches, from `branches`, `substep_branches` or `paired`.
      cond: pytree with leading axis B.
      chunk: trajectories walked at a time; must divide B.
      tile: latents per trajectory in one network call. A number compiles one network body and loops over it, so that neither memory nor
        program grows with T; None puts a whole level into one call, T calls in all, and compiles each.
      tail: "skip_call" takes the last step with the velocity of the one before, x - sigma v; its kernel must be an ODE step.

    Returns:
      Trajectory, and the clean latents [len(scheme), B, ...].
    """
    _check_tail(tail)
    num_steps = check_rollout(x_init, kernel, sigmas, noise)
    traced = isinstance(kernel.std, jax.core.Tracer)  # nobody can look into it
    if tail == "skip_call" and (num_steps < 2 or (not traced and kernel.std[-1] != 0.0)):
        raise ValueError("tail = 'skip_call' needs at least two steps and no noise at the last: use windows.all_but_last")
    if tile is not None and tile < 1:
        raise ValueError(f"tile = {tile}: give a positive number of latents per trajectory, or None for a whole level")
    table = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), kernel)
    levels = jnp.asarray(sigmas, jnp.float32)
    calls = _calls(_rounds(num_steps, scheme, tail), np.asarray(sigmas), scheme, tile)
    chain_calls = num_steps - (tail == "skip_call")

    def walk(x_init, noise, cond):
        batch, shape = x_init.shape[0], x_init.shape[1:]
        slots = len(scheme) + 2  # 0: the SDE chain, 1 ..: branches, last: a bin for padding
        x = jnp.zeros((batch, slots, *shape), jnp.float32).at[:, 0].set(x_init)
        latents = jnp.zeros((num_steps + 2, batch, *shape), jnp.float32).at[0].set(x_init)  # the last row is a bin too
        velocities = jnp.zeros((num_steps + 1, batch, *shape), jnp.float32)

        def call(carry, item: _Call):
            x, m, latents, velocities = carry
            width = item.slot.shape[0]
            rows = None if cond is None else jax.tree.map(lambda leaf: jnp.repeat(leaf, width, axis=0), cond)
            x_in, m_in = x[:, item.slot], m[:, item.slot]  # [B, width, ...]
            v = bind(velocity, rows)(x_in.reshape(batch * width, *shape), jnp.tile(item.sigma, batch)).reshape(x_in.shape)
            x_out, m_out = jax.vmap(apply_row, in_axes=(0, 1, 1, 1), out_axes=1)(item.coef, x_in, m_in, v)
            # the first item of a call may be the chain: it takes noise, is recorded, and branches start from its velocity
            chain_x, chain_v = x_in[:, 0], v[:, 0]
            row = jax.tree.map(lambda leaf: leaf[item.step], table)
            chain_next = jnp.where(item.is_chain, kernels.step(row, chain_x, chain_v, noise[item.step]), x_out[:, 0])
            x = x.at[:, item.slot].set(x_out.at[:, 0].set(chain_next))
            m = m.at[:, item.slot].set(m_out)
            latents = latents.at[jnp.where(item.is_chain, item.step + 1, num_steps + 1)].set(chain_next)
            velocities = velocities.at[jnp.where(item.is_chain, item.step, num_steps)].set(chain_v)
            spawn_x, spawn_m = jax.vmap(apply_row, in_axes=(0, None, None, None), out_axes=1)(item.spawn_coef, chain_x, chain_x, chain_v)
            return (x.at[:, item.spawn].set(spawn_x), m.at[:, item.spawn].set(spawn_m), latents, velocities), None

        carry = x, jnp.zeros_like(x), latents, velocities
        if tile is None:
            for item in calls:
                carry, _ = call(carry, jax.tree.map(jnp.asarray, item))
        else:
            carry, _ = jax.lax.scan(call, carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *calls))
        x, _, latents, velocities = carry
        latents, velocities = latents[: num_steps + 1], velocities[:num_steps]
        clean = jnp.moveaxis(x[:, 1 : len(scheme) + 1], 1, 0)
        if chain_calls < num_steps:
            last = latents[-2] - levels[-2] * velocities[-2]
            latents, velocities = latents.at[-1].set(last), velocities.at[-1].set(velocities[-2])
            for i, branch in enumerate(scheme):
                if branch.start == num_steps - 1:
                    clean = clean.at[i].set(last)
        return latents, velocities, clean

    latents, velocities, clean = in_chunks(walk, chunk, (0, 1, 0), (1, 1, 1))(x_init, noise, cond)
    return as_trajectory(latents, velocities, noise, table, levels), clean


# --- inside ----------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """One network call of the walk: static tables, stacked for the scan."""

    slot: np.ndarray  # [width]
    sigma: np.ndarray  # [width]
    coef: np.ndarray  # [width, 2, 3]; zeros for the chain, which has the kernel's
    is_chain: np.ndarray  # the first item is the SDE chain
    step: np.ndarray
    spawn: np.ndarray  # [starts] slots of the branches that leave from this chain step
    spawn_coef: np.ndarray  # [starts, 2, 3]


def _rounds(num_steps: int, scheme: tuple[Branch, ...], tail: Tail) -> list[list[tuple[int, int]]]:
    """Work of each sequential round: (-1, step) for the chain first, then (branch, evaluation)."""
    chain = num_steps - (tail == "skip_call")
    last = max([chain] + [branch.start + len(branch.plan) for branch in scheme if branch.start < chain])
    rounds = []
    for r in range(last):
        items = [(-1, r)] if r < chain else []
        items += [(i, r - b.start) for i, b in enumerate(scheme) if b.start < chain and 1 <= r - b.start < len(b.plan)]
        if items:
            rounds.append(items)
    return rounds


def _calls(rounds, sigmas: np.ndarray, scheme: tuple[Branch, ...], tile: int | None) -> list[_Call]:
    num_steps = len(sigmas) - 1
    leaving = [[i for i, branch in enumerate(scheme) if branch.start == step] for step in range(num_steps)]
    most = max([1] + [len(branches) for branches in leaving])
    bin_slot, idle = len(scheme) + 1, np.zeros((2, 3))

    def row(i, e):  # (slot, sigma, coef) of one latent
        if i == -1:
            return 0, sigmas[e], idle
        return i + 1, scheme[i].plan.sigmas[e], scheme[i].plan.coef[e]

    calls = []
    for items in rounds:
        width = len(items) if tile is None else tile
        for begin in range(0, len(items), width):
            part = items[begin : begin + width]
            rows = [row(*item) for item in part]
            rows += [(bin_slot, rows[0][1], idle)] * (width - len(part))
            slot, sigma, coef = zip(*rows)
            is_chain, step = part[0][0] == -1, part[0][1]
            spawn = leaving[step] if is_chain else []
            spawn_coef = [scheme[i].plan.coef[0] for i in spawn] + [idle] * (most - len(spawn))
            calls.append(
                _Call(
                    slot=np.array(slot, np.int32),
                    sigma=np.array(sigma, np.float32),
                    coef=np.array(coef, np.float32),
                    is_chain=np.array(is_chain),
                    step=np.array(step if is_chain else 0, np.int32),
                    spawn=np.array([i + 1 for i in spawn] + [bin_slot] * (most - len(spawn)), np.int32),
                    spawn_coef=np.array(spawn_coef, np.float32),
                )
            )
    return calls


def _check_tail(tail: str) -> None:
    if tail not in ("keep", "skip_node", "skip_call"):
        raise ValueError(f"tail = {tail!r}: choose 'keep', 'skip_node' or 'skip_call'")

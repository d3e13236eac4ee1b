"""Calibration of the exploration: which noise scale psi each step takes (DenseGRPO Algorithm 1; densegrpo.md 5).

The search counts the signs of the gains at each step. A level whose signs are balanced gets more noise, another less. What moves is
either the literal scale psi, as printed, or the multiplier b of psi = b sqrt(t / (1 - t)), in which Flow-GRPO's a is written.
Steps run in sampling order; arrays are numpy, on the host.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from densegrpo_jax.flow import kernels
from densegrpo_jax.flow.completion import Branch
from densegrpo_jax.flow.kernels import Kernel
from densegrpo_jax.flow.rollout import bind, in_chunks
from densegrpo_jax.flow.solvers import Velocity, apply_row

# --- the rule ----------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """When a level counts as balanced, and how far a level moves.

    Attributes:
      eps1: a level of n gains that are not 0 is balanced while |positive - negative| < eps1, ...
      scaled: ... or < eps1 + sqrt(n). With eps1 alone and n even or above 7, symmetric gains too are mostly called unbalanced.
      eps2: what the moved number rises or falls by.
      decided: share of the gains that must not be 0 for the level to move at all. The printed rule, 0, takes a discrete reward that
        hardly ever changes for a balanced one and widens without limit.
    """

    eps1: float = 2.0
    scaled: bool = True
    eps2: float = 0.01
    decided: float = 0.5


class Signs(NamedTuple):
    """Numbers [T] of gains above, below and at 0."""

    positive: np.ndarray
    negative: np.ndarray
    zero: np.ndarray


def signs(gains: np.ndarray) -> Signs:
    """Counts the signs of gains [T, N]; NaN, a score that failed, counts nowhere."""
    gains = np.asarray(gains, np.float64)
    if gains.ndim != 2:
        raise ValueError(f"gains must be [T, N], got shape {gains.shape}")
    return Signs((gains > 0).sum(1), (gains < 0).sum(1), (gains == 0).sum(1))


def threshold(rule: Rule, n: np.ndarray | int) -> np.ndarray:
    """The difference of the counts at which n gains are unbalanced."""
    return rule.eps1 + np.sqrt(n) * rule.scaled


def direction(counts: Signs, rule: Rule) -> np.ndarray:
    """1 where a level is balanced (widen), -1 where it is not (narrow), 0 where the counts do not tell; [T].

    They do not tell where too few gains differ from 0: less than `rule.decided` of them, or so few that even all of one sign would pass.
    """
    n = counts.positive + counts.negative
    tells = (n >= rule.decided * (n + counts.zero)) & (n >= threshold(rule, n))
    balanced = np.abs(counts.positive - counts.negative) < threshold(rule, n)
    return np.where(tells, np.where(balanced, 1, -1), 0)


def advance(value: np.ndarray, counts: Signs, rule: Rule, low: np.ndarray, high: np.ndarray, moving: np.ndarray) -> np.ndarray:
    """One update of Algorithm 1, lines 5 to 9.

    Args:
      value: [T] psi or multiplier.
      counts: of the gains of this iteration.
      rule: see `Rule`.
      low, high: [T] bounds.
      moving: [T] bool, the levels that are calibrated; the others stay.

    Returns:
      [T].
    """
    moved = np.clip(np.round(value + rule.eps2 * direction(counts, rule), 12), low, high)  # 0.69, not 0.6899999999999999
    return np.where(moving, moved, value)


def chance_balanced(rule: Rule, n: int) -> float:
    """Probability that n gains of random sign count as balanced; below 1/2 the rule narrows even a symmetric level (densegrpo.md 5.4)."""
    passing = np.abs(2 * np.arange(n + 1) - n) < threshold(rule, n)
    return float(stats.binom.pmf(np.arange(n + 1)[passing], n, 0.5).sum())


def settled(values: np.ndarray, average: int, eps2: float, share: float) -> bool:
    """Whether the search has come to rest: no level's mean over the last iterations differs much from that of those before.

    Args:
      values: [iterations, T].
      average: iterations in a mean.
      eps2: step of the rule; a level that always moves one way shifts its mean by average * eps2.
      share: of that shift which still counts as rest; 0 for never.
    """
    if len(values) < 2 * average or share == 0.0:
        return False
    shift = np.mean(values[-average:], axis=0) - np.mean(values[-2 * average : -average], axis=0)
    return bool(np.all(np.abs(shift) <= share * average * eps2 * (1 + 1e-9)))  # sums of steps round


# --- excess noise ------------------------------------------------------------------------------------------------------


def noise_ratio(kernel: Kernel, sigmas: np.ndarray) -> np.ndarray:
    """Noise that a step leaves over the noise that belongs to its level, under an exact velocity, [T]; any sampler's table.

    With x = (1 - t) data + t e and v = e - data the step leaves (x_coef t + v_coef) e and std z. 1 for ODE, CPS and DDIM-SDE; for
    Flow-SDE it is `flow.excess_noise`. Infinite where noise is left on the image.
    """
    t, s = np.asarray(sigmas, np.float64)[:-1], np.asarray(sigmas, np.float64)[1:]
    left = np.hypot(kernel.x_coef * t + kernel.v_coef, kernel.std)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.isclose(left, s, rtol=1e-12, atol=1e-15), 1.0, left / s)


def psi_for_ratio(sigmas: np.ndarray, ratio: float) -> np.ndarray:
    """The largest psi whose step leaves at most `ratio` times the noise of its level: a start, or an answer, without any reward.

    psi^2 = 2 t (sqrt(1 + (ratio^2 - 1) s^2 / h^2) - 1), the inverse of `flow.excess_noise`; 0 for a step to the image.

    Args:
      sigmas: grid [T+1].
      ratio: above 1, such as 1.05.

    Returns:
      [T].
    """
    if not ratio > 1.0:
        raise ValueError(f"ratio = {ratio}: noise cannot be added without excess; give a number above 1, such as 1.05")
    sigmas = np.asarray(sigmas, np.float64)
    t, s, h = sigmas[:-1], sigmas[1:], -np.diff(sigmas)
    with np.errstate(divide="ignore", invalid="ignore"):
        psi = np.sqrt(2.0 * t * (np.sqrt(1.0 + (ratio**2 - 1.0) * s**2 / h**2) - 1.0))
    return np.where(h > 0.0, psi, 0.0)


# --- trajectories that are there ------------------------------------------------------------------------------------------


def complete_from(
    velocity: Velocity,
    latents: jax.Array,
    velocities: jax.Array,
    scheme: tuple[Branch, ...],
    *,
    cond: Any = None,
    chunk: int | None = None,
) -> jax.Array:
    """Completes the latents of a trajectory that is there, each branch from the velocity already known at its start.

    One compiled network body, whatever the branches, and no evaluation more than they need.

    Args:
      velocity: see `flow.rollout`.
      latents: [T+1, B, ...].
      velocities: [T, B, ...] at latents[:-1].
      scheme: branches.
      cond: pytree with leading axis B.
      chunk: trajectories at a time; must divide B.

    Returns:
      Clean latents [len(scheme), B, ...].
    """
    longest = max(len(branch.plan) for branch in scheme)

    def padded(leaf: np.ndarray) -> np.ndarray:
        return np.concatenate([leaf, np.zeros((longest - len(leaf), *leaf.shape[1:]))])

    start = jnp.array([branch.start for branch in scheme])
    length = jnp.array([len(branch.plan) for branch in scheme])
    level = jnp.asarray(np.stack([padded(branch.plan.sigmas) for branch in scheme]), jnp.float32)  # [branches, longest]
    coef = jnp.asarray(np.stack([padded(branch.plan.coef) for branch in scheme]), jnp.float32)  # [branches, longest, 2, 3]

    def walk(latents, velocities, cond):
        call = bind(velocity, cond)

        def one(_, branch):
            start, length, level, coef = branch
            x = latents[start]
            first = apply_row(coef[0], x, jnp.zeros_like(x), velocities[start])

            def row(e, carry):
                v = call(carry[0], jnp.full(x.shape[:1], level[e]))
                return apply_row(coef[e], *carry, v)

            return None, jax.lax.fori_loop(1, length, row, first)[0]

        return (jax.lax.scan(one, None, (start, length, level, coef))[1],)

    return in_chunks(walk, chunk, (1, 1, 0), (1,))(latents, velocities, cond)[0]


def table(sigmas: np.ndarray, psi: np.ndarray, stochastic: np.ndarray) -> Kernel:
    """The kernel of Algorithm 1: Flow-SDE with psi where `stochastic`, ODE steps elsewhere."""
    return kernels.only_where(kernels.psi_sde(sigmas, psi), sigmas, stochastic)

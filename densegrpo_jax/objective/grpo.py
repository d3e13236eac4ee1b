"""The clipped policy-gradient objective on sampled denoising steps (DenseGRPO eq. 3-4).

A row is one denoising step of one trajectory; a minibatch may mix steps. The network enters only by its velocity at the row's latent.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax.flow import kernels
from densegrpo_jax.flow.kernels import Kernel

RatioForm = Literal["standard", "guard"]


class Rows(NamedTuple):
    """Sampled steps, M rows.

    Attributes:
      kernel: transition table, leaves [M].
      velocity: [M, ...] under the sampling weights.
      noise: [M, ...] that was injected.
      advantage: [M] normalised and clipped.
      weight: [M] of the row in the policy term: 0 for a masked score, else its step weight.
    """

    kernel: Kernel
    velocity: jax.Array
    noise: jax.Array
    advantage: jax.Array
    weight: jax.Array


def surrogate(log_ratio: jax.Array, advantage: jax.Array, clip_range: float) -> jax.Array:
    """-min(r A, clip(r, 1 - e, 1 + e) A), elementwise: what is minimised (DenseGRPO eq. 3)."""
    ratio = jnp.exp(log_ratio)
    return jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, 1.0 - clip_range, 1.0 + clip_range))


def grpo_loss(
    velocity: jax.Array,
    rows: Rows,
    clip_range: float,
    *,
    velocity_ref: jax.Array | None = None,
    beta: float = 0.0,
    kl_mode: Literal["exact", "code"] = "exact",
    ratio: RatioForm = "standard",
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Clipped surrogate plus beta times the KL to a reference, both averaged over the M rows.

    Rows of weight 0 keep their place, so shapes and the effective step size do not depend on how many there are; their KL still counts.

    Args:
      velocity: [M, ...] under the weights being trained.
      rows: the sampled steps.
      clip_range: e; ratios come from log-probs averaged over dimensions, so 1e-4 to 1e-3 is usual.
      velocity_ref: [M, ...] of the reference (the network without its adapter); needed when beta > 0.
      beta: weight of the KL.
      kl_mode: see `kernels.kl`.
      ratio: "guard" takes GRPO-Guard's normalised log-ratio; give its step weights (`guard_weights`) in `rows.weight`.

    Returns:
      The loss, and metrics: loss terms, mean and extreme ratio, share clipped above and below, approximate KL (half the mean
      squared log-ratio).
    """
    if ratio not in ("standard", "guard"):
        raise ValueError(f"ratio = {ratio!r}: choose 'standard' or 'guard'")
    if beta > 0.0 and velocity_ref is None:
        raise ValueError(f"beta = {beta} needs velocity_ref, the velocity of the reference policy")
    measure = kernels.guarded_log_ratio if ratio == "guard" else kernels.log_ratio
    log_r = measure(rows.kernel, velocity, rows.velocity, rows.noise)  # [M]
    policy = jnp.mean(rows.weight * surrogate(log_r, rows.advantage, clip_range))
    divergence = 0.0 if velocity_ref is None else jnp.mean(kernels.kl(rows.kernel, velocity, velocity_ref, kl_mode))
    loss = policy + beta * divergence
    taking_part = (rows.weight > 0.0) & (rows.advantage != 0.0)
    share = jnp.maximum(jnp.sum(taking_part), 1)
    r = jnp.exp(log_r)
    above = taking_part & (rows.advantage > 0.0) & (r > 1.0 + clip_range)
    below = taking_part & (rows.advantage < 0.0) & (r < 1.0 - clip_range)
    return loss, {
        "loss": loss,
        "policy_loss": policy,
        "kl": jnp.asarray(divergence),
        "ratio_mean": jnp.mean(r),
        "ratio_min": jnp.min(r),
        "ratio_max": jnp.max(r),
        "clip_above": jnp.sum(above) / share,
        "clip_below": jnp.sum(below) / share,
        "approx_kl": 0.5 * jnp.mean(log_r**2),
    }


def guard_weights(sigmas: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """GRPO-Guard's gradient balance (arXiv 2510.22319): 1 / h per step, mean 1 over the trained steps; [T], 0 where untrained.

    For Flow-SDE the derivative of the normalised log-ratio is proportional to h, so every step then pulls alike.
    """
    h = -np.diff(np.asarray(sigmas, np.float64))
    return _mean_one(np.divide(1.0, h, out=np.zeros_like(h), where=h > 0.0), trained)


def tempflow_weights(kernel: Kernel, trained: np.ndarray) -> np.ndarray:
    """TempFlow-GRPO's step weights: the injected std, mean 1 over the trained steps (arXiv 2508.04324); [T]."""
    return _mean_one(np.asarray(kernel.std, np.float64), trained)


def step_metrics(log_ratio: jax.Array, trained: np.ndarray) -> dict[str, np.ndarray]:
    """Health of the log-ratio per step, from [T, B] values taken before any update (then pure rounding) or after.

    Returns:
      mean and largest |delta log_prob| per step [T], NaN where untrained.
    """
    size = np.abs(np.asarray(log_ratio, np.float64))
    blank = np.where(np.asarray(trained, bool), 1.0, np.nan)
    return {"delta_log_prob_mean": size.mean(1) * blank, "delta_log_prob_max": size.max(1) * blank}


def _mean_one(weight: np.ndarray, trained: np.ndarray) -> np.ndarray:
    weight = np.where(np.asarray(trained, bool), weight, 0.0)
    live = weight > 0.0
    if not live.any():
        raise ValueError("no trained step has a positive weight: the window holds only deterministic or empty steps")
    return weight / weight[live].mean()

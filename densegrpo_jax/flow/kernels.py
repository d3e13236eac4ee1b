"""One-step transitions as Gaussian kernels.

Every sampler here has a mean that is linear in the latent and in the velocity,

    p(x_next | x) = N(x_coef x + v_coef v, std^2 I),

so a sampler on a grid is a table of three numbers a step, built once in float64. Sampling, log-probability, ratio and
KL are then the same few lines for all of them. Notation: t = sigma of the step, s = sigma of the next level,
h = t - s > 0, v the (guided) velocity. A step with std = 0 is an ODE step: it has no density, and everything
below returns exactly 0 for it, in value and in gradient.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


class Kernel(NamedTuple):
    """Transition table. Leaves are [T] for a grid, scalars for one step, or [B] where a minibatch mixes steps.

    Attributes:
      x_coef: weight of the latent in the mean.
      v_coef: weight of the velocity in the mean (negative).
      std: standard deviation of the injected noise; 0 marks a deterministic step.
      scale: the noise scale whose square Flow-GRPO's code puts under its KL: std without sqrt(h) for the SDEs, std for
        CPS and DDIM-SDE.
    """

    x_coef: Array
    v_coef: Array
    std: Array
    scale: Array

    def at(self, step: Array | int) -> "Kernel":
        """The kernel of one step, or of a vector of steps."""
        return Kernel(*(jnp.asarray(leaf, jnp.float32)[step] for leaf in self))


# --- samplers: grid -> table -----------------------------------------------------------------------------------------


def ode(sigmas: np.ndarray) -> Kernel:
    """Euler steps of the probability-flow ODE: x - h v (densegrpo.md 2.1)."""
    h = -np.diff(np.asarray(sigmas, np.float64))
    zero = np.zeros_like(h)
    return Kernel(np.ones_like(h), -h, zero, zero)


def psi_sde(sigmas: np.ndarray, psi: float | np.ndarray) -> Kernel:
    """Flow-SDE with the noise scale given literally, one number per level (DenseGRPO eq. 6 and 11).

    mean = x (1 - psi^2 h / (2 t)) - v h (1 + psi^2 (1 - t) / (2 t)); std = psi sqrt(h). A constant is DanceGRPO's SDE.

    Args:
      sigmas: grid [T+1].
      psi: noise scale per step [T] or a scalar, >= 0.
    """
    t, s = _levels(sigmas)
    scale = _per_step("psi", psi, t)
    return _where_moving(t, s, _langevin(t, t - s, scale))


def flow_sde(sigmas: np.ndarray, noise_level: float | np.ndarray) -> Kernel:
    """Flow-GRPO's SDE: scale = a sqrt(t / (1 - t)) (Flow-GRPO eq. 9).

    Where t = 1 the t inside (1 - t) is replaced by the first level below 1, which makes the injected std of a first step exactly a.

    Args:
      sigmas: grid [T+1].
      noise_level: a, a scalar or a multiplier per step [T] (DenseGRPO's psi in multiplier form).
    """
    t, _ = _levels(sigmas)
    return psi_sde(sigmas, _per_step("noise_level", noise_level, t) * flow_scale(sigmas))


def flow_scale(sigmas: np.ndarray) -> np.ndarray:
    """sqrt(t / (1 - t)) per step [T] with Flow-GRPO's rule at t = 1: what turns a multiplier into a literal psi."""
    t, _ = _levels(sigmas)
    return np.sqrt(t / (1.0 - _below_one(t, sigmas)))


def dance_sde(sigmas: np.ndarray, eta: float | np.ndarray) -> Kernel:
    """DanceGRPO's SDE: the noise scale is the constant eta (0.3 in its recipes)."""
    return psi_sde(sigmas, eta)


def cps(sigmas: np.ndarray, noise_level: float | np.ndarray) -> Kernel:
    """Coefficients-preserving sampling (arXiv 2509.05952): std = s sin(a pi / 2), noise and signal weights stay the flow's.

    Args:
      sigmas: grid [T+1].
      noise_level: a in [0, 1].
    """
    t, s = _levels(sigmas)
    level = _per_step("noise_level", noise_level, t)
    if np.any(level > 1.0):
        raise ValueError(f"noise_level = {noise_level}: CPS takes 0 to 1")
    return _where_moving(t, s, _ddim(t, s, s * np.sin(0.5 * np.pi * level)))


def ddim_sde(sigmas: np.ndarray, eta: float | np.ndarray, first_step: Literal["skip", "clamp"] = "skip") -> Kernel:
    """Stepwise-Flow-GRPO's DDIM-like SDE: std = eta s sqrt(1 - t) (arXiv 2603.28718).

    Args:
      sigmas: grid [T+1].
      eta: in [0, 1].
      first_step: at t = 1 the formula gives no noise: "skip" leaves that step deterministic, "clamp" puts the first level below 1 for t.
    """
    if first_step not in ("skip", "clamp"):
        raise ValueError(f"first_step = {first_step!r}: choose 'skip' or 'clamp'")
    t, s = _levels(sigmas)
    level = _per_step("eta", eta, t)
    if np.any(level > 1.0):
        raise ValueError(f"eta = {eta}: the DDIM-SDE takes 0 to 1")
    inside = _below_one(t, sigmas) if first_step == "clamp" else t
    return _where_moving(t, s, _ddim(t, s, level * s * np.sqrt(1.0 - inside)))


SAMPLERS: dict[str, Callable[..., Kernel]] = {
    "flow_sde": flow_sde,
    "psi_sde": psi_sde,
    "dance_sde": dance_sde,
    "cps": cps,
    "ddim_sde": ddim_sde,
}
"""Samplers by name; each takes (sigmas, noise level)."""


def only_where(kernel: Kernel, sigmas: np.ndarray, stochastic: np.ndarray) -> Kernel:
    """Keeps the kernel where `stochastic` [T] is true and puts plain ODE steps elsewhere (noise windows)."""
    stochastic = np.asarray(stochastic, bool)
    if stochastic.shape != kernel.std.shape:
        raise ValueError(f"stochastic has shape {stochastic.shape}, the kernel has {kernel.std.shape[0]} steps")
    return Kernel(*(np.where(stochastic, a, b) for a, b in zip(kernel, ode(sigmas))))


def excess_noise(sigmas: np.ndarray, psi: np.ndarray) -> np.ndarray:
    """Noise std after one Flow-SDE step under an exact velocity, over the level s it should have (densegrpo.md 5.5), [T].

    tot = sqrt(s^2 + psi^2 h^2 / t + psi^4 h^2 / (4 t^2)); infinite where s = 0.
    """
    t, s = _levels(sigmas)
    h = t - s
    total = np.sqrt(s**2 + psi**2 * h**2 / t + psi**4 * h**2 / (4.0 * t**2))
    with np.errstate(divide="ignore"):
        return total / s


# --- one step --------------------------------------------------------------------------------------------------------


def transition_mean(kernel: Kernel, x: jax.Array, velocity: jax.Array) -> jax.Array:
    """Mean of the next latent; kernel leaves are scalars or [B], x and velocity [B, ...]."""
    return _rows(kernel.x_coef, x) * x + _rows(kernel.v_coef, x) * velocity


def step(kernel: Kernel, x: jax.Array, velocity: jax.Array, noise: jax.Array) -> jax.Array:
    """The next latent: mean + std * noise. [B, ...]"""
    return transition_mean(kernel, x, velocity) + _rows(kernel.std, x) * noise


def log_prob(kernel: Kernel, x: jax.Array, velocity: jax.Array, x_next: jax.Array) -> jax.Array:
    """Gaussian log-density of `x_next`, averaged over latent dimensions (Flow-GRPO's convention); [B], 0 for ODE steps."""
    std, live = _safe_std(kernel)
    z = (x_next - transition_mean(kernel, x, velocity)) / _rows(std, x)
    return _standard_log_density(z, std, live)


def log_prob_of_noise(kernel: Kernel, noise: jax.Array) -> jax.Array:
    """`log_prob` of a latent that was sampled with this noise, free of the rounding of x_next - mean. [B]"""
    std, live = _safe_std(kernel)
    return _standard_log_density(noise, std, live)


def log_ratio(kernel: Kernel, velocity_new: jax.Array, velocity_old: jax.Array, noise: jax.Array) -> jax.Array:
    """log of the probability ratio new / old of a sampled step, from the difference of the means.

    With d = v_coef (v_old - v_new) / std and the stored noise e, log r = -mean(e d + d^2 / 2): exact to the last digits,
    exactly 0 when the velocities agree (DenseGRPO eq. 4 with log-probs averaged over dimensions).

    Args:
      kernel: leaves scalar or [B].
      velocity_new: [B, ...] under the current weights.
      velocity_old: [B, ...] under the sampling weights.
      noise: [B, ...] the noise that was injected.

    Returns:
      [B]; 0 for ODE steps.
    """
    d, live = _mean_shift(kernel, velocity_old - velocity_new)
    return jnp.where(live, -_mean(noise * d + 0.5 * d * d), 0.0)


def guarded_log_ratio(kernel: Kernel, velocity_new: jax.Array, velocity_old: jax.Array, noise: jax.Array) -> jax.Array:
    """GRPO-Guard's normalised log-ratio: std (log r + |mean shift|^2 / (2 std^2)) = mean((mean_new - mean_old) noise). [B]"""
    shift = _rows(kernel.v_coef, noise) * (velocity_new - velocity_old)
    return jnp.where(jnp.asarray(kernel.std) > 0.0, _mean(shift * noise), 0.0)


def kl(kernel: Kernel, velocity: jax.Array, velocity_ref: jax.Array, mode: Literal["exact", "code"] = "exact") -> jax.Array:
    """KL between the step under `velocity` and under `velocity_ref`, averaged over latent dimensions (densegrpo.md 2.4).

    Args:
      kernel: leaves scalar or [B].
      velocity: [B, ...].
      velocity_ref: [B, ...] of the reference policy.
      mode: "exact" divides by 2 std^2; "code" by 2 scale^2 as Flow-GRPO's program does (leaving out the step length).

    Returns:
      [B]; 0 for ODE steps.
    """
    if mode not in ("exact", "code"):
        raise ValueError(f"kl mode = {mode!r}: choose 'exact' or 'code'")
    if mode == "code":
        kernel = kernel._replace(std=kernel.scale)
    d, live = _mean_shift(kernel, velocity - velocity_ref)
    return jnp.where(live, 0.5 * _mean(d * d), 0.0)


# --- inside ----------------------------------------------------------------------------------------------------------


def _levels(sigmas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sigmas = np.asarray(sigmas, np.float64)
    if sigmas.ndim != 1 or sigmas.size < 2:
        raise ValueError(f"sigmas is a grid [T+1] with T >= 1, got shape {sigmas.shape}")
    return sigmas[:-1], sigmas[1:]


def _per_step(name: str, value: float | np.ndarray, t: np.ndarray) -> np.ndarray:
    value = np.asarray(value, np.float64)
    if value.shape not in ((), t.shape):
        raise ValueError(f"{name} has shape {value.shape}: give one number, or one per step ({t.size})")
    if not np.all(np.isfinite(value)) or np.any(value < 0.0):
        raise ValueError(f"{name} = {value.tolist()}: noise levels are finite and not negative")
    return np.broadcast_to(value, t.shape)


def _below_one(t: np.ndarray, sigmas: np.ndarray) -> np.ndarray:
    """t, with 1 replaced by the first level below 1 (Flow-GRPO's rule against division by 0)."""
    return np.where(t == 1.0, np.max(sigmas, initial=0.0, where=np.asarray(sigmas) < 1.0), t)


def _langevin(t: np.ndarray, h: np.ndarray, scale: np.ndarray) -> Kernel:
    with np.errstate(divide="ignore", invalid="ignore"):
        return Kernel(
            x_coef=1.0 - scale**2 * h / (2.0 * t),
            v_coef=-h * (1.0 + scale**2 * (1.0 - t) / (2.0 * t)),
            std=scale * np.sqrt(h),
            scale=scale,
        )


def _ddim(t: np.ndarray, s: np.ndarray, std: np.ndarray) -> Kernel:
    """(1 - s) (x - t v) + sqrt(s^2 - std^2) (x + (1 - t) v), collected by x and v."""
    keep = np.sqrt(np.maximum(s**2 - std**2, 0.0))
    return Kernel(x_coef=(1.0 - s) + keep, v_coef=keep * (1.0 - t) - (1.0 - s) * t, std=std, scale=std)


def _where_moving(t: np.ndarray, s: np.ndarray, kernel: Kernel) -> Kernel:
    """Steps that go nowhere (s = t, or noise of measure zero) become ODE steps; so no table holds a NaN."""
    live = (t > s) & (kernel.std > 0.0)
    still = ode(np.append(t, s[-1]))
    return Kernel(*(np.where(live, a, b) for a, b in zip(kernel, still)))


def _rows(value: Array, like: jax.Array) -> jax.Array:
    """Broadcasts a scalar or [B] over the latent dimensions of `like` [B, ...]."""
    value = jnp.asarray(value, like.dtype)
    return value.reshape(value.shape + (1,) * (like.ndim - value.ndim))


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=tuple(range(1, x.ndim)))


def _safe_std(kernel: Kernel) -> tuple[jax.Array, jax.Array]:
    std = jnp.asarray(kernel.std, jnp.float32)
    return jnp.where(std > 0.0, std, 1.0), std > 0.0


def _mean_shift(kernel: Kernel, velocity_difference: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The shift of the mean in units of std, [B, ...], and which rows have a density."""
    std, live = _safe_std(kernel)
    return _rows(jnp.asarray(kernel.v_coef, jnp.float32) / std, velocity_difference) * velocity_difference, live


def _standard_log_density(z: jax.Array, std: jax.Array, live: jax.Array) -> jax.Array:
    return jnp.where(live, -0.5 * _mean(z * z) - jnp.log(std) - 0.5 * jnp.log(2.0 * jnp.pi), 0.0)

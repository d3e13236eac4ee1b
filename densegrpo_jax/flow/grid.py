"""Noise-level grids: sigma_0 = 1 (noise) down to sigma_T = 0 (image), in sampling order.

Grids are float64 numpy arrays `[T+1]`: they are built once, outside jit, and enter the program as f32 tables.
"""

from collections.abc import Sequence

import numpy as np

TRAIN_STEPS = 1000  # length of the training schedule that diffusers' scheduler derives its ends from


def shift_sigma(sigma: np.ndarray | float, shift: float) -> np.ndarray:
    """Moves noise levels towards noise: sigma -> shift sigma / (1 + (shift - 1) sigma); `shift = exp(mu)` is FLUX's form."""
    sigma = np.asarray(sigma, np.float64)
    return shift * sigma / (shift * sigma + (1.0 - sigma))  # this form keeps 1 at exactly 1


def unshift_sigma(sigma: np.ndarray | float, shift: float) -> np.ndarray:
    """The inverse of `shift_sigma`."""
    sigma = np.asarray(sigma, np.float64)
    return sigma / (sigma + shift * (1.0 - sigma))


def uniform_sigmas(num_steps: int, shift: float = 1.0) -> np.ndarray:
    """The plain grid 1, (T-1)/T, ..., 1/T, 0, shifted once.

    Args:
      num_steps: T, the number of steps, 1 to 1000.
      shift: 1 leaves the grid uniform.

    Returns:
      sigmas [T+1].
    """
    _check(num_steps, shift)
    return np.append(shift_sigma(np.linspace(1.0, 1.0 / num_steps, num_steps), shift), 0.0)


def sd3_sigmas(num_steps: int, shift: float = 3.0) -> np.ndarray:
    """The grid of Stable Diffusion 3: FlowMatchEuler with a static shift, as diffusers applies it.

    The last interior level is shifted twice: the scheduler's smallest sigma is already shifted when the grid is laid
    between the ends, and the grid is then shifted. With T = 10 and shift 3 the tail is 0.278, 0.0089, 0.

    Args:
      num_steps: T, 1 to 1000.
      shift: the scheduler's `shift`.

    Returns:
      sigmas [T+1].
    """
    _check(num_steps, shift)
    lowest = shift_sigma(1.0 / TRAIN_STEPS, shift)
    return np.append(shift_sigma(np.linspace(1.0, lowest, num_steps), shift), 0.0)


def flux_shift(num_tokens: int, base: tuple[int, float] = (256, 0.5), top: tuple[int, float] = (4096, 1.15)) -> float:
    """FLUX's dynamic shift exp(mu), mu linear in the number of image tokens (512 px: 1024 tokens, mu = 0.63).

    Args:
      num_tokens: image tokens after 2x2 packing.
      base: (tokens, mu) at the low end of the line.
      top: (tokens, mu) at the high end.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens = {num_tokens}: the number of image tokens must be at least 1")
    slope = (top[1] - base[1]) / (top[0] - base[0])
    return float(np.exp(base[1] + slope * (num_tokens - base[0])))


def flux_sigmas(num_steps: int, num_tokens: int) -> np.ndarray:
    """The grid of FLUX.1-dev: the uniform grid under the dynamic shift of `flux_shift`; sigmas [T+1]."""
    return uniform_sigmas(num_steps, flux_shift(num_tokens))


def custom_sigmas(values: Sequence[float]) -> np.ndarray:
    """A grid given by its values, checked: in [0, 1], never rising, from above 0 down to exactly 0.

    Repeated values are allowed; such a step moves nothing and is neither noised nor trained.

    Raises:
      ValueError: naming the first value that is out of order or out of range.
    """
    sigmas = np.asarray(values, np.float64)
    if sigmas.ndim != 1 or sigmas.size < 2:
        raise ValueError(f"a grid is a list of at least two noise levels, got shape {sigmas.shape}")
    if not np.all(np.isfinite(sigmas)) or sigmas.min() < 0.0 or sigmas.max() > 1.0:
        raise ValueError(f"noise levels lie in [0, 1], got {sigmas.tolist()}")
    rising = np.flatnonzero(np.diff(sigmas) > 0.0)
    if rising.size:
        i = int(rising[0])
        raise ValueError(f"noise levels fall from noise to image, but sigmas[{i + 1}] = {sigmas[i + 1]} > sigmas[{i}] = {sigmas[i]}")
    if sigmas[-1] != 0.0 or np.any(sigmas[:-1] == 0.0):
        raise ValueError(f"a grid ends at exactly 0 and is above 0 before that, got {sigmas.tolist()}")
    return sigmas


def _check(num_steps: int, shift: float) -> None:
    if not 1 <= num_steps <= TRAIN_STEPS:
        raise ValueError(f"num_steps = {num_steps}: choose 1 to {TRAIN_STEPS} sampling steps")
    if not (np.isfinite(shift) and shift > 0.0):
        raise ValueError(f"shift = {shift}: the schedule shift must be a positive number (SD3: 3, uniform: 1)")

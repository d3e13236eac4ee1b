"""Step credits -> advantages: statistics over the group of one prompt, on the host, in float64."""

from typing import Literal

import numpy as np


def deviations(values: np.ndarray) -> np.ndarray:
    """Values minus their mean, exactly 0 when all are equal.

    The first value is subtracted before the mean is taken: near rewards differ exactly in floating point, so nothing is lost
    to cancellation, and equal values give zeros whatever their rounding.

    Args:
      values: [N] float64, N >= 1.

    Returns:
      [N] float64.
    """
    shifted = values - values[:1]
    return shifted - shifted.mean()


def advantages(
    credit: np.ndarray,
    groups: np.ndarray,
    *,
    std: Literal["group", "global"] = "group",
    over: Literal["per_step", "joint"] = "per_step",
    eps: float = 1e-4,
    clip: float = 5.0,
    valid: np.ndarray | None = None,
) -> np.ndarray:
    """Centres credits on their group and divides by a standard deviation (population, two-pass).

    A = clip((c - mean) / (std + eps), -clip, clip). Members that are not valid get 0 and leave all others as if they did not exist.

    Args:
      credit: [T, B] credit of each denoising step, in units of the reward.
      groups: [B] integer group id of each trajectory (one group = the images of one prompt); any ids, order and sizes.
      std: "group" divides by the deviation within the group; "global" by that of the whole batch around the batch mean, which is
        what Flow-GRPO's published SD3.5 configurations do.
      over: "per_step" takes statistics at each step apart; "joint" over all steps of the group at once.
      eps: added to the standard deviation, in units of the reward.
      clip: bound on the absolute advantage; `math.inf` for none.
      valid: [B] or [T, B] bool, False where a score failed; None when none did.

    Returns:
      [T, B] float64 advantages.

    Raises:
      ValueError: wrong shape, dtype or option, or a valid credit that is not finite.

    Reference: DenseGRPO (arXiv 2601.20218) eq. 10 for "per_step"; Stepwise-Flow-GRPO (arXiv 2603.28718) for "joint".
    """
    credit, groups = np.asarray(credit, np.float64), np.asarray(groups)
    if credit.ndim != 2:
        raise ValueError(f"credit must be [T, B], got shape {credit.shape}")
    check_groups(groups, credit.shape[1])
    valid = broadcast_valid(valid, credit.shape)
    if not np.isfinite(credit[valid]).all():
        t, b = np.argwhere(valid & ~np.isfinite(credit))[0]
        raise ValueError(f"credit of step {t}, trajectory {b} is {credit[t, b]} but marked valid; mask failed scores with `valid`")
    if std not in ("group", "global"):
        raise ValueError(f'std must be "group" or "global", got {std!r}')
    if over not in ("per_step", "joint"):
        raise ValueError(f'over must be "per_step" or "joint", got {over!r}')
    if not (eps > 0 and clip > 0):
        raise ValueError(f"eps and clip must be positive, got eps={eps}, clip={clip}")

    advantage = np.zeros_like(credit)
    members_of = [groups == group for group in np.unique(groups)]
    blocks = [slice(t, t + 1) for t in range(len(credit))] if over == "per_step" else [slice(None)]
    for block in blocks:
        values, usable = credit[block], valid[block]  # [1 or T, B]
        batch_std = _rms(deviations(values[usable])) if usable.any() else 0.0
        for members in members_of:
            chosen = usable & members
            if not chosen.any():
                continue
            deviation = deviations(values[chosen])
            scale = batch_std if std == "global" else _rms(deviation)
            advantage[block][chosen] = np.clip(deviation / (scale + eps), -clip, clip)
    return advantage


def check_groups(groups: np.ndarray, batch: int) -> None:
    """Raises ValueError unless `groups` is an integer array [B] with B = `batch`."""
    if groups.shape != (batch,) or not np.issubdtype(groups.dtype, np.integer):
        raise ValueError(f"groups must be integer ids of shape ({batch},), one per trajectory; got {groups.dtype} of shape {groups.shape}")


def broadcast_valid(valid: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray:
    """A mask [B] or [rows, B] (None: all True) as a bool array of `shape` = (rows, B); ValueError if it is neither."""
    if valid is None:
        return np.ones(shape, bool)
    valid = np.asarray(valid)
    if valid.dtype != bool or valid.shape not in (shape, shape[1:]):
        raise ValueError(f"valid must be bool of shape {shape[1:]} or {shape}, got {valid.dtype} of shape {valid.shape}")
    return np.broadcast_to(valid, shape)


def _rms(deviation: np.ndarray) -> float:
    return np.sqrt(np.mean(deviation**2))

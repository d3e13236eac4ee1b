"""What a reward is, and how several are weighted.

A reward is a function `(images uint8 [N, H, W, 3], prompts: N texts, metadata: N dicts) -> scores [N]`, or
`-> (scores, valid [N])`. Images may be a device array; a host scorer calls `np.asarray`. A score that could not be made is NaN or
marked not valid: it is masked and counted, never taken for a number.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Reward = Callable[..., Any]


class Scores(NamedTuple):
    """value [N] float64, 0 where not valid; valid [N] bool."""

    value: np.ndarray
    valid: np.ndarray


def score(name: str, reward: Reward, images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> Scores:
    """Calls a reward and checks what it returns.

    Raises:
      ValueError: images, prompts and metadata, or the scores, of different numbers; with the reward's name.
    """
    count = len(prompts)
    if len(images) != count or len(metadata) != count:
        raise ValueError(f"reward {name!r}: {len(images)} images, {count} prompts and {len(metadata)} metadata; give one of each")
    result = reward(images, list(prompts), list(metadata))
    value, valid = result if isinstance(result, tuple) else (result, None)
    value = np.asarray(value, np.float64)
    valid = np.ones(count, bool) if valid is None else np.asarray(valid, bool)
    for what, array in (("scores", value), ("a validity mask", valid)):
        if array.shape != (count,):
            raise ValueError(f"reward {name!r} returned {what} of shape {array.shape} for {count} images; it must be one per image")
    valid = valid & np.isfinite(value)
    return Scores(np.where(valid, value, 0.0), valid)


def weighted_sum(scores: Mapping[str, Scores], weights: Mapping[str, float]) -> Scores:
    """Sum of weight times score; not valid where any part is not.

    Raises:
      ValueError: scores and weights of different rewards.
    """
    if scores.keys() != weights.keys() or not scores:
        raise ValueError(f"scores of {sorted(scores)} need a weight each, got weights for {sorted(weights)}")
    valid = np.logical_and.reduce([part.valid for part in scores.values()])
    value = sum(weights[name] * part.value for name, part in scores.items())
    return Scores(np.where(valid, value, 0.0), valid)

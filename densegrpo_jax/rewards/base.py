"""What a reward is, how a step's images are scored, and how several rewards are weighted.

A reward is a function `(images uint8 [N, H, W, 3], prompts: N texts, metadata: N dicts) -> scores [N]`, or
`-> (scores, valid [N])`. Images may be a device array; a host scorer calls `np.asarray`. A score that could not be made is NaN or
marked not valid: it is masked and counted, never taken for a number.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

Reward = Callable[..., Any]

NOISE = 1e-6  # spread relative to the values below which they are taken as equal: a float32 scorer's rounding


class Faults(NamedTuple):
    """How many scores are missing: NaN, infinite, marked not valid by the reward, or of an image that was not finite."""

    nan: int = 0
    infinite: int = 0
    masked: int = 0
    image: int = 0


class Scores(NamedTuple):
    """value [N] float64, 0 where not valid; valid [N] bool; why scores are missing."""

    value: np.ndarray
    valid: np.ndarray
    faults: Faults = Faults()


def host(reward: Reward, workers: int = 1) -> Reward:
    """Marks a reward that runs on the host and scores each image by itself: `score_parts` calls it while the device goes on.

    Args:
      reward: scores that do not depend on which images are scored together; safe to be called by `workers` threads at once.
      workers: calls that may run at a time.

    Returns:
      The same reward, with the attribute `workers`.

    Raises:
      ValueError: no workers.
    """
    if workers < 1:
        raise ValueError(f"workers = {workers}: must be at least 1")

    @wraps(reward)
    def marked(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> Any:
        return reward(images, prompts, metadata)

    marked.workers = workers
    return marked


def score(name: str, reward: Reward, images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> Scores:
    """Calls a reward and checks what it returns.

    Raises:
      ValueError: images, prompts and metadata, or the scores, of different numbers; with the reward's name.
    """
    count = len(prompts)
    if len(images) != count or len(metadata) != count:
        raise ValueError(f"reward {name!r}: {len(images)} images, {count} prompts and {len(metadata)} metadata; give one of each")
    if not count:  # a process may have no part of so few images
        return Scores(np.zeros(0), np.zeros(0, bool))
    result = reward(images, list(prompts), list(metadata))
    value, valid = result if isinstance(result, tuple) else (result, None)
    value = np.asarray(value, np.float64)
    valid = np.ones(count, bool) if valid is None else np.asarray(valid, bool)
    for what, array in (("scores", value), ("a validity mask", valid)):
        if array.shape != (count,):
            raise ValueError(f"reward {name!r} returned {what} of shape {array.shape} for {count} images; it must be one per image")
    faults = Faults(int((valid & np.isnan(value)).sum()), int((valid & np.isinf(value)).sum()), int((~valid).sum()))
    valid = valid & np.isfinite(value)
    return Scores(np.where(valid, value, 0.0), valid, faults)


class Scored(NamedTuple):
    """scores by reward; wait: seconds for which the caller stood still for each of them."""

    scores: dict[str, Scores]
    wait: dict[str, float]


def score_parts(
    scorers: Mapping[str, Reward],
    parts: Iterable[tuple[np.ndarray, Any, Any]],
    prompts: Sequence[str],
    metadata: Sequence[dict],
    overlap: bool = True,
    gather: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
) -> Scored:
    """Scores images that come off a device in parts. Host rewards score a part on threads of their own while the next one is made.

    Rewards that are not marked by `host` are called once, with all images in the order of their rows, after the last part.

    Args:
      scorers: rewards by name.
      parts: (rows [n], images uint8 [n, H, W, 3], finite [n]), where rows are places in the result; all parts together, of all
        processes, hold 0 .. N - 1. Arrays of a device that are still being computed are waited for where they are needed.
      prompts: M texts, which row r takes at r mod M: the same for each level of a batch.
      metadata: M dicts.
      overlap: False scores each part of host rewards before the next one is asked for; for comparison.
      gather: of several processes that score their own parts, brings rows [n, ...] of all of them together.

    Returns:
      Scores [N] of each reward. Images that are not finite are not valid.

    Raises:
      ValueError: what `score` raises, or rows that do not cover N. An error of a reward is passed on, and what waits is dropped.
    """
    on_host = {name: reward for name, reward in scorers.items() if getattr(reward, "workers", 0)}
    pools = {name: ThreadPoolExecutor(reward.workers, "reward") for name, reward in on_host.items() if overlap}
    wait = dict.fromkeys(scorers, 0.0)
    found: dict[str, list[Scores]] = {name: [] for name in scorers}
    running: dict[str, list[tuple[Any, Future]]] = {name: [] for name in on_host}
    kept = []

    def of(entries: Sequence, rows: np.ndarray) -> list:
        return [entries[row % len(entries)] for row in rows]

    def timed(name: str, call: Callable, *args: Any) -> None:
        began = time.perf_counter()
        found[name].append(call(*args))
        wait[name] += time.perf_counter() - began

    def finish(name: str, still: int) -> None:
        while len(running[name]) > still:
            finite, future = running[name].pop(0)
            np.asarray(finite)  # the device's time is not the reward's
            timed(name, future.result)

    try:
        for rows, images, finite in parts:
            texts, extra = of(prompts, rows), of(metadata, rows)
            kept.append((rows, images, finite))
            for name, reward in on_host.items():
                if overlap:
                    running[name].append((finite, pools[name].submit(score, name, reward, images, texts, extra)))
                    finish(name, 2 * reward.workers)  # bounds the images that wait
                else:
                    np.asarray(finite)
                    timed(name, score, name, reward, images, texts, extra)
        rows, finite = (np.concatenate([np.asarray(part[i]) for part in kept]) for i in (0, 2))
        every = gather(rows)
        if not np.array_equal(np.sort(every), np.arange(len(every))) or len(every) % len(prompts):
            raise ValueError(f"{len(every)} rows: the parts must hold each of 0 .. N - 1 once, N a multiple of the {len(prompts)} prompts")
        images = kept[0][1] if len(kept) == 1 else None
        for name in (name for name in scorers if name not in on_host):
            if images is None:
                images = np.concatenate([np.asarray(part[1]) for part in kept])
            timed(name, score, name, scorers[name], images, of(prompts, rows), of(metadata, rows))
        for name in on_host:
            finish(name, 0)
    finally:
        for pool in pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
    return Scored({name: _in_order(rows, finite, found[name], gather) for name in scorers}, wait)


def _in_order(rows: np.ndarray, finite: np.ndarray, found: list[Scores], gather: Callable) -> Scores:
    value, valid = (np.concatenate([getattr(part, field) for part in found]) for field in ("value", "valid"))
    rows, finite, value, valid = (gather(of_rows) for of_rows in (rows, finite, value, valid))
    faults = Faults(*np.sum(gather(np.array([part.faults for part in found])), axis=0).tolist())
    order = np.argsort(rows)
    kept = valid & finite
    return Scores(np.where(kept, value, 0.0)[order], kept[order], faults._replace(image=int((valid & ~finite).sum())))


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


def normalized_in_groups(scores: Scores, groups: np.ndarray) -> Scores:
    """Scores centred on their group and divided by its standard deviation, so that no reward counts for its units.

    The statistics are over all images of a group, also those of different noise levels: one affine map a group, which keeps gains
    between levels comparable. There is no epsilon, so that the reward's scale cancels; a group whose valid scores agree to a
    millionth becomes 0.

    Args:
      scores: [N] of one reward.
      groups: [N] group of each image.

    Returns:
      Scores of mean 0 and deviation 1 within each group.

    Raises:
      ValueError: another number of groups.
    """
    groups = np.asarray(groups)
    if groups.shape != scores.value.shape:
        raise ValueError(f"groups must be one an image, of shape {scores.value.shape}, got {groups.shape}")
    value = np.zeros_like(scores.value)
    for group in np.unique(groups):
        chosen = (groups == group) & scores.valid
        if chosen.any():
            members = scores.value[chosen]
            centred = (members - members[0]) - (members - members[0]).mean()
            std = np.sqrt(np.mean(centred**2))
            value[chosen] = centred / std if std > NOISE * np.abs(members).max() else 0.0
    return scores._replace(value=value)

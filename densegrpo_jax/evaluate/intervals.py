"""Means with bootstrap intervals, clustered by prompt."""

from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES, LEVEL = 2000, 0.95  # of the bootstrap, whose seed is fixed


def bootstrap(value: np.ndarray, cluster: np.ndarray, seed: int | Sequence[int] = 0) -> np.ndarray:
    """Means of resampled data: whole clusters are drawn with replacement, since images of one prompt are not independent.

    Args:
      value: [N] finite numbers.
      cluster: [N] what each belongs to, such as the index of its prompt.
      seed: of numpy's generator.

    Returns:
      [RESAMPLES] means over all values of the drawn clusters.
    """
    _, place = np.unique(cluster, return_inverse=True)
    sums, sizes = np.bincount(place, value), np.bincount(place)
    drawn = np.random.default_rng(seed).multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), size=RESAMPLES)
    return (drawn @ sums) / (drawn @ sizes)


def estimate(value: np.ndarray, prompt: np.ndarray, tag: Sequence[str | None]) -> dict:
    """Mean with its bootstrap interval, over all images and over those of each tag.

    Args:
      value: [N], NaN where a score is missing; those are left out and counted.
      prompt: [N] index of the prompt.
      tag: [N] kind of the prompt, None for none.

    Returns:
      "mean", "low", "high" (NaN where there is nothing; the interval also for a single prompt), "images", "prompts", "missing"; where
      there are tags, the same of each in "tags", and of the mean of the tags' means, GenEval's overall number, in "overall".
    """
    tags = np.array([t or "" for t in tag])
    result, _ = _interval(value, prompt, 0)
    if names := [name for name in sorted(set(tags)) if name]:
        parts = [_interval(value[tags == name], prompt[tags == name], [0, i + 1]) for i, name in enumerate(names)]
        result["tags"] = {name: part for name, (part, _) in zip(names, parts)}
        means, draws = [part["mean"] for part, _ in parts], [draws for _, draws in parts]
        result["overall"] = _with_interval(float(np.mean(means)), np.mean(draws, axis=0))
    return result


def _interval(value: np.ndarray, prompt: np.ndarray, seed: Any) -> tuple[dict, np.ndarray]:
    good = np.isfinite(value)
    clusters = len(np.unique(prompt[good]))
    draws = bootstrap(value[good], prompt[good], seed) if clusters > 1 else np.full(RESAMPLES, np.nan)
    mean = float(value[good].mean()) if clusters else float("nan")
    counts = {"images": int(good.sum()), "prompts": clusters, "missing": int((~good).sum())}
    return _with_interval(mean, draws) | counts, draws


def _with_interval(mean: float, draws: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"mean": mean, "low": float(low), "high": float(high)}


def summarize(items: list[dict]) -> dict:
    """`estimate` of every reward over the records of items.jsonl."""
    prompt, tag = np.array([r["prompt"] for r in items]), [r["tag"] for r in items]
    found = {name: estimate(scores_of(items, name), prompt, tag) for name in items[0]["scores"]}
    return {"rewards": found, "bootstrap": {"level": LEVEL, "resamples": RESAMPLES, "clusters": "prompts"}}


def scores_of(items: list[dict], name: str) -> np.ndarray:
    return np.array([np.nan if r["scores"][name] is None else r["scores"][name] for r in items], np.float64)


def text_lines(numbers: dict) -> list[str]:
    """The numbers of each reward for the terminal."""
    lines = []
    for name, whole in numbers["rewards"].items():
        kinds = {"": whole} | {f"  {tag}": part for tag, part in whole.get("tags", {}).items()}
        kinds |= {"  mean of tags": whole["overall"]} if "overall" in whole else {}
        for kind, part in kinds.items():
            interval = f"   [{part['low']:.4f}, {part['high']:.4f}]" if np.isfinite(part["low"]) else ""  # none of a single prompt
            lines.append(f"{kind or name:<26} {part['mean']:.4f}{interval}")
        if whole["missing"]:
            total = whole["missing"] + whole["images"]
            lines.append(f"warning: {name} gave no score for {whole['missing']} of {total} images; they are left out")
    return lines

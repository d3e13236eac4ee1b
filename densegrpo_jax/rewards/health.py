"""Is something wrong with a reward? Per training step: missing, constant or slow scores. Over evaluations: a witness that falls."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from densegrpo_jax.config import reward_name
from densegrpo_jax.rewards.base import Scored

SLOW, NOTICED = 0.5, 0.1  # share of a step that is spent waiting for one reward; and seconds, below which nobody minds
FROM_BASE, FROM_PEAK = 2.0, 3.0  # standard errors; the peak was chosen for its height, so a fall from it needs more

LINES = {
    "nan": "{} of {} scores are NaN",
    "infinite": "{} of {} scores are infinite",
    "masked": "{} of {} images could not be scored",
    "image": "{} of {} images are not finite",
    "constant": "all {} of {} scores are equal, so nothing is learned from them",
    "slow": "the step waited {} s for it; see docs/rewards.md on servers and overlap",
}


def step_health(scored: Scored, seconds: float) -> dict[str, dict[str, float]]:
    """What one training step says about its rewards.

    Args:
      scored: of the step.
      seconds: that the step took.

    Returns:
      For each reward: number of scores; how many are nan, infinite, masked (by the reward, failures of servers among them) or of an
      image that is not finite; wait, the seconds for which the step stood still for it; and constant and slow, 0 or 1.
    """
    result = {}
    for name, scores in scored.scores.items():
        value, wait = scores.value[scores.valid], scored.wait[name]
        constant, slow = value.size > 1 and bool((value == value[0]).all()), wait > max(SLOW * seconds, NOTICED)
        result[name] = {"scores": scores.value.size, **scores.faults._asdict(), "wait": wait, "constant": int(constant), "slow": int(slow)}
    return result


def complaints(health: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, str], str]:
    """What is wrong, for the log: (reward, kind) -> a sentence that names the reward."""
    result = {}
    for name, entry in health.items():
        for kind, line in LINES.items():
            if entry[kind]:
                number = {"constant": entry["scores"], "slow": f"{entry['wait']:.1f}"}.get(kind, entry[kind])
                result[name, kind] = f"reward {name!r}: {line.format(number, entry['scores'])}"
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Reward hacking


class Alarm(NamedTuple):
    """A witness that fell while what is optimised rose.

    Attributes:
      witness: its name.
      since: training steps done at the evaluation compared with, 0 for the base model.
      fall, fall_error: change of the witness since then (negative), and its standard error.
      rise, rise_error: change of the optimised total over the same time.
    """

    witness: str
    since: int
    fall: float
    fall_error: float
    rise: float
    rise_error: float

    def line(self) -> str:
        """For the log and the report."""
        return (
            f"possible reward hacking: {self.witness} fell by {-self.fall:.4g} (± {self.fall_error:.2g}) since step {self.since}, "
            f"while the optimised reward rose by {self.rise:.4g} (± {self.rise_error:.2g})"
        )


def paired_change(before: Sequence[float], after: Sequence[float], prompt: Sequence[int]) -> tuple[float, float]:
    """Mean difference of scores of the same prompts and noise, and its standard error clustered by prompt.

    Args:
      before, after: [N] scores, NaN or None where there is none.
      prompt: [N] which prompt each belongs to.

    Returns:
      (mean, standard error); NaN where nothing can be paired, and the error also where only one prompt can.
    """
    difference = np.array(after, np.float64) - np.array(before, np.float64)
    good, prompt = np.isfinite(difference), np.asarray(prompt)
    if not good.any():
        return float("nan"), float("nan")
    mean = difference[good].mean()
    sums = np.array([(difference[good & (prompt == p)] - mean).sum() for p in np.unique(prompt[good])])
    if len(sums) < 2:
        return float(mean), float("nan")
    return float(mean), float(np.sqrt(len(sums) / (len(sums) - 1) * (sums**2).sum()) / good.sum())


def alarms(evaluations: Sequence[Mapping[str, Any]], optimised: Sequence[str]) -> list[Alarm]:
    """Witnesses that are falling at the last evaluation while the optimised total is rising, both beyond chance.

    The last evaluation is compared with the first, the base model, at two standard errors; where nothing shows, with the one at which
    the witness was highest, at three, since that one was chosen for its height.

    Args:
      evaluations: records of evaluation.jsonl in their order, of the same prompts: "done", "prompt" [N], "total" [N] and "rewards", a
        dict of [N].
      optimised: the run's `rewards`, which are trained on; all others are witnesses.

    Returns:
      At most one alarm a witness.
    """
    optimised = {reward_name(entry) for entry in optimised}
    comparable = [record for record in evaluations if list(record["prompt"]) == list(evaluations[-1]["prompt"])]
    found = []
    for name in (name for name in (comparable[-1]["rewards"] if comparable else ()) if name not in optimised):
        known = [record for record in comparable if name in record["rewards"]]
        means = [_mean(record["rewards"][name]) for record in known]
        peak = int(np.argmax(np.where(np.isfinite(means), means, -np.inf)))
        for before, bound in ((known[0], FROM_BASE), (known[peak], FROM_PEAK)):
            after = known[-1]
            fall, fall_error = paired_change(before["rewards"][name], after["rewards"][name], after["prompt"])
            rise, rise_error = paired_change(before["total"], after["total"], after["prompt"])
            if fall < -bound * fall_error and rise > bound * rise_error:
                found.append(Alarm(name, before["done"], fall, fall_error, rise, rise_error))
                break
    return found


def _mean(scores: Sequence[float]) -> float:
    values = np.array(scores, np.float64)
    return float(values[np.isfinite(values)].mean()) if np.isfinite(values).any() else float("nan")

"""Is the run sick? Numbers of the update for the metrics, what to say on the terminal, and when to stop. Rewards: rewards/health.py."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from densegrpo_jax.config import Config
from densegrpo_jax.rewards.health import paired_change
from densegrpo_jax.train import checkpoint

EQUAL = 0.5  # share of groups without any spread, from which on the terminal says so
CLIPPED = 0.5  # share of clipped pairs
DRIFT = 0.5  # |log-ratio| between the graphs of rollout and update, in clip ranges
AWAY = 2.0  # factor by which contrast or latents have changed since the first step
BRIGHTER = 0.25  # change of brightness, of [0, 1]
SURE = 3.0  # standard errors by which a fall of the held-out reward must exceed chance
RECENT = 5  # steps whose median contrast counts


class Stopped(RuntimeError):
    """The run stopped by itself, as going on would waste it; says why, what is kept, and what to try."""


def nonfinite(before: Mapping[str, int] | None, grad_norms: Sequence[float], latents: np.ndarray) -> dict[str, int]:
    """What was not finite in a training step.

    Args:
      before: what this returned at the step before; None at the first.
      grad_norms: of the step's updates.
      latents: [B] whether the final latent of each trajectory is finite.

    Returns:
      latents: trajectories that are not finite; updates: left out in this step; in_a_row: the most updates left out in a row, counted
      over steps; open: those at the end; total: updates left out so far.
    """
    longest, row = 0, before["open"] if before else 0
    for norm in grad_norms:
        row = 0 if np.isfinite(norm) else row + 1
        longest = max(longest, row)
    skipped = int((~np.isfinite(np.asarray(grad_norms))).sum())
    total = (before["total"] if before else 0) + skipped
    return {"latents": int((~np.asarray(latents)).sum()), "updates": skipped, "in_a_row": longest, "open": row, "total": total}


def complaints(record: Mapping[str, Any], first: Mapping[str, Any], config: Config) -> dict[tuple[str, str], str]:
    """What is wrong with a step, for the terminal: (area, kind) -> a sentence with the number and what to try.

    Args:
      record: metrics of the step.
      first: metrics of the run's first step.
      config: the run.
    """
    said = {}
    bad, updates = record["nonfinite"], config.optimizer.updates
    if bad["latents"]:
        said["nonfinite", "latents"] = f"{bad['latents']} trajectories end in latents that are not finite"
    if bad["updates"]:
        said["nonfinite", "updates"] = f"{bad['updates']} of {updates} updates were left out, as their gradient is not finite"
    drift = _largest(record["log_prob_drift"]["delta_log_prob_max"])
    if drift > DRIFT * config.objective.clip_range:
        now = "" if record["recomputed"] else "; set objective.recompute_old_log_prob"
        said["update", "drift"] = (
            f"rollout and update differ by {drift:.1e} in log-probability before any update, with a clip range of "
            f"{config.objective.clip_range:g}{now}"
        )
    if record["equal_groups"] >= EQUAL:
        said["reward", "equal"] = f"in {record['equal_groups']:.0%} of the groups all rewards are equal, which teaches nothing"
    if (record["clip"] or 0.0) > CLIPPED:
        said["update", "clip"] = f"{record['clip']:.0%} of the pairs are clipped; lower optimizer.learning_rate or optimizer.updates"
    rms = record["last_update"]["grad_rms"] or 0.0  # None where it is not finite
    if 0.0 < rms < config.optimizer.eps:
        said["update", "eps"] = f"the gradient's RMS {rms:.1e} is below optimizer.eps = {config.optimizer.eps:g}; lower it"
    now, then = record["images"], first["images"]
    for name in ("contrast", "latent_std"):
        if then[name] and now[name] and not 1 / AWAY < now[name] / then[name] < AWAY:
            said["images", name] = f"{name.replace('_', ' ')} of the images is {now[name]:.3g}, {then[name]:.3g} at the first step"
    if abs((now["brightness"] or 0.0) - (then["brightness"] or 0.0)) > BRIGHTER:
        said["images", "brightness"] = f"brightness of the images is {now['brightness']:.2f}, {then['brightness']:.2f} at the first step"
    return said


def stop_if_sick(config: Config, steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Ends a run that cannot recover.

    Args:
      config: the run, with its limits `run.max_nonfinite`, `evaluation.collapse_reward` and `evaluation.collapse_contrast`.
      steps: metrics of its first step, then of those before now, at least the last five.
      evaluations: records of evaluation.jsonl, the base model first.

    Raises:
      Stopped: too many updates in a row were not finite, the images have lost their contrast, or the held-out reward has fallen below
        the base model's by more than chance and the limit.
    """
    e, limit = config.evaluation, config.run.max_nonfinite
    if steps and limit and (row := steps[-1].get("nonfinite", {}).get("in_a_row", 0)) >= limit:
        raise Stopped(
            f"{row} optimiser updates in a row had gradients that are not finite (run.max_nonfinite = {limit}); the weights are those "
            "before them. Try model.dtype float32, a lower optimizer.learning_rate, or look for a reward or prompt that breaks sampling"
        )
    if e.collapse_contrast and len(steps) > RECENT:
        first, now = steps[0]["images"]["contrast"], float(np.median([_number(s["images"]["contrast"]) for s in steps[-RECENT:]]))
        if first and now < e.collapse_contrast * first:
            share = f"less than evaluation.collapse_contrast = {e.collapse_contrast} of it"
            raise Stopped(_collapsed(config, f"the contrast of the images fell from {first:.3f} to {now:.3f}, {share}"))
    comparable = [r for r in evaluations if r["prompt"] == evaluations[-1]["prompt"]]
    if e.collapse_reward and len(comparable) > 1 and comparable[0]["done"] == 0:
        before, after = comparable[0], comparable[-1]
        spread = float(np.nanstd(np.array(before["total"], np.float64)))
        change, error = paired_change(before["total"], after["total"], after["prompt"])
        if change < -e.collapse_reward * spread and change < -SURE * error:
            fall = (
                f"the held-out reward is {-change:.4g} (± {error:.2g}) below the base model's, more than evaluation.collapse_reward = "
                f"{e.collapse_reward} standard deviations of its images ({spread:.3g})"
            )
            raise Stopped(_collapsed(config, fall))


def _collapsed(config: Config, fall: str) -> str:
    best = checkpoint.best(config.run.workdir)
    where = config.run.workdir
    kept = f"the best checkpoint so far is that of step {best.step}, kept in {where}" if best else "no checkpoint was evaluated"
    return (
        f"collapsed: {fall}; {kept}. Try a lower optimizer.learning_rate, more prompts.per_step, objective.beta > 0, or guidance and "
        "noise as low as they can be, in another run.workdir; 0 turns a limit off"
    )


def _largest(values: Sequence[float | None]) -> float:
    there = [v for v in map(_number, np.asarray(values, object).tolist()) if np.isfinite(v)]
    return max(there, default=0.0)


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)

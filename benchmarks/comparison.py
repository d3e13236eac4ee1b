"""Credit methods on the preference task of the tiny world, at equal updates and at equal time.

    python benchmarks/comparison.py [--arms NAME ...] [--seeds 0 1 2] [--workdir DIR] [--json PATH] [--picture PATH] [--quick]

Every arm is `densegrpo train scenes_preference` with one thing changed, so a killed run continues where it was, and several of these
commands may share a workdir if each takes other arms. `--tune` runs each arm at several learning rates on a seed of its own, short, and
prints what they reach; the table LEARNING_RATES was taken from there. Without it the arms run at their rates, and the summary of
all that the workdir holds is printed. Time is that of training steps (sampling, scoring, updates) without compilation, on the cores
that the process was given; the seconds of an arm are comparable with those of another only if all ran on the same ones.
"""

import argparse
import dataclasses
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np

from densegrpo_jax.cli import load_config
from densegrpo_jax.config import Config
from densegrpo_jax.train import metrics, report
from densegrpo_jax.train.loop import train
from densegrpo_jax_configs.variants import VARIANTS, change

ARMS = {  # arm -> variants of scenes_preference
    "flow_grpo": ("flow_grpo",),
    "dense_reward": ("dense_reward",),
    "dense_grpo, n = k": ("dense_grpo",),
    "dense_grpo, n = 3": ("n3",),
    "dense_grpo, as shipped": (),
}
LEARNING_RATES = {name: 2e-3 for name in ARMS}
TUNED_OVER = (5e-4, 1e-3, 2e-3, 4e-3)
TUNING_SEED = 100
EVALUATED = (256, 6)  # held-out prompts, images of each: 1536


def configured(arm: str, seed: int, rate: float, steps: int, every: int, workdir: Path) -> Config:
    """The run of an arm."""
    config = load_config("scenes_preference")
    for variant in ARMS[arm]:
        config = VARIANTS[variant](config)
    prompts, each = EVALUATED
    return change(
        config,
        optimizer={"learning_rate": rate},
        evaluation={"every": every, "prompts": prompts, "images_per_prompt": each, "final_prompts": 0},
        run={"steps": steps, "seed": seed, "workdir": workdir, "save_every": every, "report_every": 0},
    )


def name_of(arm: str) -> str:
    return arm.replace(", ", "_").replace(" = ", "").replace(" ", "_")


def curve(workdir: Path) -> dict | None:
    """Held-out gains of a run over its base: steps done, seconds of training until then, and per reward the mean and standard error."""
    records, steps = metrics.read(workdir / "evaluation.jsonl"), metrics.read(workdir / "metrics.jsonl")
    if len(records) < 2:
        return None
    typical = float(np.median([s["seconds"] for s in steps]))  # the first step of every start compiles
    gains = {name: [report.paired_difference(records[0], r, name) for r in records] for name in records[0]["rewards"]}
    base = {name: float(np.nanmean(np.array(values, float))) for name, values in records[0]["rewards"].items()}
    return {"done": [r["done"] for r in records], "seconds_per_step": typical, "base": base, "gains": gains}


def at_time(run: dict, reward: str, seconds: float) -> float | None:
    """The gain after so many seconds of training, between the two evaluations around; None beyond the last."""
    times = np.array(run["done"]) * run["seconds_per_step"]
    if times[-1] < seconds * 0.999:
        return None
    return float(np.interp(seconds, times, [mean for mean, _ in run["gains"][reward]]))


def spread(values: list) -> str:
    """Mean over seeds and its standard error."""
    values = np.array([v for v in values if v is not None], float)
    if not values.size:
        return "-"
    error = values.std(ddof=1) / np.sqrt(values.size) if values.size > 1 else float("nan")
    return f"{values.mean():+.3f} ({error:.3f}; {values.size})"


def summarise(runs: dict, updates: int, seconds: float) -> str:
    """A table in Markdown: each arm's held-out gains at equal updates and at equal time, mean over seeds (standard error; seeds)."""
    rewards = list(next(iter(runs.values()))[0]["gains"])
    head = [f"{r}, {updates} steps" for r in rewards] + [f"{r}, {seconds:.0f} s" for r in rewards]
    lines = ["| arm | lr | s / step | " + " | ".join(head) + " |", "|---" * (3 + len(head)) + "|"]
    for arm, seeds in runs.items():
        cells = [arm, f"{LEARNING_RATES[arm]:g}", f"{np.mean([r['seconds_per_step'] for r in seeds]):.2f}"]
        cells += [spread([at_time(r, reward, updates * r["seconds_per_step"]) for r in seeds]) for reward in rewards]
        cells += [spread([at_time(r, reward, seconds) for r in seeds]) for reward in rewards]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(runs: dict, path: Path) -> None:
    """Held-out gains against steps and against time, each seed a line, one panel a reward."""
    from matplotlib.figure import Figure

    rewards = list(next(iter(runs.values()))[0]["gains"])
    figure = Figure(figsize=(4.6 * len(rewards), 7), layout="constrained")
    axes = figure.subplots(2, len(rewards), squeeze=False)
    for n, (arm, seeds) in enumerate(runs.items()):
        for row, by_time in zip(axes, (False, True), strict=True):
            for axis, reward in zip(row, rewards, strict=True):
                for k, run in enumerate(seeds):
                    x = np.array(run["done"]) * (run["seconds_per_step"] if by_time else 1)
                    axis.plot(x, [m for m, _ in run["gains"][reward]], "o-", ms=3, color=f"C{n}", alpha=0.8, label=None if k else arm)
                axis.set_title(reward)
                axis.set_xlabel("seconds of training" if by_time else "training steps")
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="training steps of the slowest arm; the others go on as long as it")
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--longer", nargs="*", default=[], metavar="ARM=STEPS", help="steps of an arm that is faster than the slowest")
    parser.add_argument("--workdir", type=Path, default=Path("runs/comparison"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--tune", action="store_true", help="try learning rates instead")
    parser.add_argument("--quick", action="store_true", help="two steps each, one seed, few images: does it run?")
    args = parser.parse_args()
    steps, every, seeds = (2, 1, args.seeds[:1]) if args.quick else (args.steps, args.every, args.seeds)
    longer = dict(entry.rsplit("=", 1) for entry in args.longer)

    if args.tune:
        for rate in TUNED_OVER:
            for arm in args.arms:
                workdir = args.workdir / f"tune-{name_of(arm)}-{rate:g}"
                train(_small(configured(arm, TUNING_SEED, rate, steps, steps, workdir), args.quick))
                print(f"{arm}, lr {rate:g}: {curve(workdir)['gains']}", flush=True)
        return
    for seed in seeds:
        for arm in args.arms:
            count = int(longer.get(arm, steps))
            train(_small(configured(arm, seed, LEARNING_RATES[arm], count, every, args.workdir / f"{name_of(arm)}-{seed}"), args.quick))

    runs = {}
    for arm in ARMS:
        found = [curve(path) for path in sorted(args.workdir.glob(f"{name_of(arm)}-[0-9]*"))]
        if found := [run for run in found if run]:
            runs[arm] = found
    seconds = min(max(run["done"][-1] * run["seconds_per_step"] for run in found) for found in runs.values())
    print(summarise(runs, steps, seconds))
    if args.picture:
        draw(runs, args.picture)
    if args.json:
        packages = {name: version(name) for name in ("jax", "flax", "optax", "densegrpo_jax")}
        record = {
            "runs": runs, "learning_rates": LEARNING_RATES, "steps": steps, "seconds": seconds, "images": EVALUATED[0] * EVALUATED[1],
            "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "packages": packages,
        }  # fmt: skip
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def _small(config: Config, quick: bool) -> Config:
    if not quick:
        return config
    small = {"prompts": 4, "images_per_prompt": 2}
    return dataclasses.replace(change(config, evaluation=small, prompts={"per_step": 1, "group_size": 4}, optimizer={"updates": 1}))


if __name__ == "__main__":
    main()

"""Credit methods on the preference task of the tiny world, at equal updates and at equal time.

    python benchmarks/comparison.py tune|time|train|show [--arms NAME ...] [--seeds 0 1 2] [--workdir DIR] [--quick]
    python benchmarks/comparison.py show --picture PATH

Every arm is `densegrpo train scenes_preference` with one thing changed, so a killed run continues where it was, and several of these
commands may share a workdir if each takes other arms or seeds.

tune   every arm at the same learning rates, the same number of steps, on a seed of its own; LEARNING_RATES holds the best of each.
time   a few steps of every arm, in turns on the same cores: seconds a step (sampling, scoring, updates; no compilation, no evaluation).
train  every arm and seed at its rate, for as long as the slowest arm takes for `--steps`: faster arms do more steps.
show   gains at equal updates and at equal time, mean over seeds and its standard error; the record (--json) is brought up to date with
       what the workdir holds. Arms and times that the workdir does not have are those of the record.
"""

import argparse
import json
import math
import os
import platform
import shutil
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
    "dense_grpo, n = 3": ("dense_grpo", "n3"),
}
LEARNING_RATES = {"flow_grpo": 1e-3, "dense_reward": 5e-4, "dense_grpo, n = k": 2e-3, "dense_grpo, n = 3": 4e-3}
TUNED_OVER = (5e-4, 1e-3, 2e-3, 4e-3)
TUNING_SEED = 100
RECORD = Path(__file__).resolve().parents[1] / "docs" / "comparison.json"
WITNESSES = ("scenes_compose_strict",)
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
        evaluation={"every": every, "prompts": prompts, "images_per_prompt": each, "final_prompts": 0, "witnesses": WITNESSES},
        run={"steps": steps, "seed": seed, "workdir": workdir, "save_every": every or steps, "report_every": 0},
    )


def name_of(arm: str) -> str:
    return arm.replace(", ", "_").replace(" = ", "").replace(" ", "_")


def gains_of(workdir: Path) -> dict | None:
    """Held-out gains of a run over its base: steps done, and per reward the mean and standard error; None before the second evaluation."""
    records = metrics.read(workdir / "evaluation.jsonl")
    if len(records) < 2:
        return None
    names = [name for name in records[0]["rewards"] if all(name in r["rewards"] for r in records)]
    gains = {name: [report.paired_difference(records[0], r, name) for r in records] for name in names}
    base = {name: float(np.nanmean(np.array(records[0]["rewards"][name], float))) for name in names}
    return {"done": [r["done"] for r in records], "base": base, "gains": gains}


def share_base(workdir: Path) -> None:
    """Gives a new run the evaluation of the base model from another one's: its prompts and noise are those of every run."""
    path = workdir / "evaluation.jsonl"
    for other in sorted(workdir.parent.glob("*/evaluation.jsonl")) if not path.exists() else ():
        first = metrics.read(other)[:1]
        images = len(first[0]["prompt"]) if first and first[0]["done"] == 0 else 0
        if images == EVALUATED[0] * EVALUATED[1] and set(WITNESSES) <= first[0]["rewards"].keys():
            (workdir / "samples").mkdir(parents=True, exist_ok=True)
            shutil.copy(other.parent / "samples" / "000000.png", workdir / "samples")
            metrics.append(path, first[0])
            return


def seconds_of(workdir: Path, record: dict) -> dict[str, float]:
    """Arm -> seconds a step: as timed in the workdir, or of the record if nothing was timed there."""
    found = {}
    for arm in ARMS:
        steps = [s for path in sorted(workdir.glob(f"time-{name_of(arm)}-*")) for s in metrics.read(path / "metrics.jsonl")[1:]]
        if steps:
            found[arm] = float(np.median([s["seconds"] for s in steps]))  # without the first step of each run, which compiles
    return found or record.get("seconds_per_step", {})


def at(run: dict, reward: str, steps: float) -> float | None:
    """The gain after so many steps, between the two evaluations around; None beyond the last."""
    if run["done"][-1] < steps:
        return None
    return float(np.interp(steps, run["done"], [mean for mean, _ in run["gains"][reward]]))


def spread(values: list) -> str:
    """Mean over seeds and its standard error."""
    values = np.array([v for v in values if v is not None], float)
    if not values.size:
        return "-"
    error = values.std(ddof=1) / np.sqrt(values.size) if values.size > 1 else float("nan")
    return f"{values.mean():+.3f} ± {error:.3f}"


def common(runs: dict) -> list[str]:
    """Rewards that every run was measured by."""
    every = [run["gains"].keys() for seeds in runs.values() for run in seeds]
    return [name for name in every[0] if all(name in names for names in every)]


def summarise(runs: dict, rates: dict, seconds: dict, updates: int, budget: float) -> str:
    """A table in Markdown: each arm's held-out gains at equal updates and at equal time, mean over seeds ± standard error."""
    rewards = common(runs)
    head = [f"{r}, {updates} steps" for r in rewards] + [f"{r}, {budget:.0f} s" for r in rewards]
    lines = ["| arm | lr | s / step | seeds | " + " | ".join(head) + " |", "|---" * (4 + len(head)) + "|"]
    for arm, seeds in runs.items():
        cells = [arm, f"{rates[arm]:g}", f"{seconds[arm]:.2f}", str(len(seeds))]
        cells += [spread([at(r, reward, updates) for r in seeds]) for reward in rewards]
        cells += [spread([at(r, reward, int(budget / seconds[arm])) for r in seeds]) for reward in rewards]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(runs: dict, seconds: dict, path: Path) -> None:
    """Held-out gains against steps and against time: the mean over seeds, each seed a thin line; one panel a reward."""
    from matplotlib.figure import Figure

    rewards = common(runs)
    figure = Figure(figsize=(4.6 * len(rewards), 7), layout="constrained")
    axes = figure.subplots(2, len(rewards), squeeze=False)
    for n, (arm, seeds) in enumerate(runs.items()):
        for row, (scale, unit) in zip(axes, ((1.0, "training steps"), (seconds[arm], "seconds of training")), strict=True):
            for axis, reward in zip(row, rewards, strict=True):
                for run in seeds:
                    axis.plot(np.array(run["done"]) * scale, [m for m, _ in run["gains"][reward]], color=f"C{n}", alpha=0.35, lw=0.8)
                last = min(run["done"][-1] for run in seeds)
                shared = sorted({d for run in seeds for d in run["done"] if d <= last})
                middle = [np.mean([at(run, reward, d) for run in seeds]) for d in shared]
                axis.plot(np.array(shared) * scale, middle, "o-", ms=3, color=f"C{n}", label=arm)
                axis.set_title(reward)
                axis.set_xlabel(unit)
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=110)


# --- what it does ----------------------------------------------------------------------------------------------------------


def tune(args) -> None:
    for rate in TUNED_OVER:
        for arm in args.arms:
            workdir = args.workdir / f"tune-{name_of(arm)}-{rate:g}"
            train(small(configured(arm, TUNING_SEED, rate, args.steps, args.steps, workdir), args.quick))
            print(f"{arm}, lr {rate:g}: {gains_of(workdir)['gains']}", flush=True)


def time(args) -> None:
    for turn in range(2):
        for arm in args.arms:
            steps, workdir = 2 if args.quick else 6, args.workdir / f"time-{name_of(arm)}-{turn}"
            train(small(configured(arm, TUNING_SEED, LEARNING_RATES[arm], steps, 0, workdir), args.quick))
    print(seconds_of(args.workdir, {}))


def train_all(args) -> None:
    seconds = seconds_of(args.workdir, recorded(args))
    if missing := [arm for arm in ARMS if arm not in seconds]:
        raise SystemExit(f"no seconds a step of {', '.join(missing)} in {args.workdir}: run `{Path(__file__).name} time` first")
    for seed in args.seeds:
        for arm in args.arms:
            steps = math.ceil(args.steps * max(seconds.values()) / seconds[arm])
            every = args.every * math.ceil(steps / args.every / 6)  # many steps need no more points in the figure
            config = configured(arm, seed, LEARNING_RATES[arm], steps, every, args.workdir / f"{name_of(arm)}-{seed}")
            if not args.quick:
                share_base(config.run.workdir)
            train(small(config, args.quick))


def recorded(args) -> dict:
    """What --json holds from before."""
    return json.loads(args.json.read_text()) if args.json.exists() else {}


def show(args) -> None:
    record = recorded(args)
    seconds = seconds_of(args.workdir, record)
    runs, tuned = ({arm: record.get(what, {}).get(arm, {}) for arm in ARMS} for what in ("runs", "tuned"))
    for arm in ARMS:
        found = {path.name.rpartition("-")[2]: gains_of(path) for path in sorted(args.workdir.glob(f"{name_of(arm)}-[0-9]*"))}
        runs[arm] |= {seed: run for seed, run in found.items() if run}
        tried = {f"{rate:g}": gains_of(args.workdir / f"tune-{name_of(arm)}-{rate:g}") for rate in TUNED_OVER}
        tuned[arm] |= {rate: run for rate, run in tried.items() if run}
        for rate, run in tuned[arm].items():
            print(f"{arm:<24} lr {rate:<7}" + "".join(f" {name} {g[-1][0]:+.3f} ± {g[-1][1]:.3f} " for name, g in run["gains"].items()))
    packages = {name: version(name) for name in ("jax", "flax", "optax", "densegrpo_jax")}
    budget = args.steps * max(seconds.values(), default=0.0)
    record |= {
        "runs": runs, "tuned": tuned, "learning_rates": LEARNING_RATES, "seconds_per_step": seconds,
        "steps": args.steps, "budget_s": budget, "images": EVALUATED[0] * EVALUATED[1],
        "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "packages": packages,
    }  # fmt: skip
    args.json.write_text(json.dumps(record) + "\n")
    if missing := [arm for arm, of in runs.items() if of and arm not in seconds]:
        print(f"no table: no seconds a step of {', '.join(missing)}; run `time` first")
    elif there := {arm: list(of.values()) for arm, of in runs.items() if of}:
        print(summarise(there, LEARNING_RATES, seconds, args.steps, budget))
        if args.picture:
            draw(there, seconds, args.picture)


def small(config: Config, quick: bool) -> Config:
    if not quick:
        return config
    evaluation = {"prompts": 4, "images_per_prompt": 2}
    return change(config, evaluation=evaluation, prompts={"per_step": 1, "group_size": 4}, optimizer={"updates": 1})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "time", "train", "show"))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="steps of the slowest arm; tune: of every arm (default 40; tune 30)")
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--workdir", type=Path, default=Path("runs/comparison"))
    parser.add_argument("--json", type=Path, default=RECORD, help="the record")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--quick", action="store_true", help="two steps each, one seed, few images: does it run?")
    args = parser.parse_args()
    args.steps = args.steps or (30 if args.what == "tune" else 40)
    if args.quick:
        args.steps, args.every, args.seeds = 2, 1, args.seeds[:1]
        args.json = args.workdir / "comparison.json"
    {"tune": tune, "time": time, "train": train_all, "show": show}[args.what](args)


if __name__ == "__main__":
    main()

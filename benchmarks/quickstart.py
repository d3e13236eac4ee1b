"""The quickstart's run with several seeds: what the last comparison with the base model says.

    for seed in 0 1 2; do densegrpo train scenes_preference --run.seed $seed --run.workdir runs/quickstart-$seed; done
    python benchmarks/quickstart.py runs/quickstart-0 runs/quickstart-1 runs/quickstart-2 [--json docs/quickstart.json]

Prints, for each reward, the mean of the base and of the trained model and their difference with its standard error (clustered by prompt),
seed by seed; and the means of each kind of prompt over seeds. `runs/quickstart` of `bash launch/quickstart.sh` is seed 0.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np

from densegrpo_jax.train import metrics, report


def of_run(workdir: Path) -> dict:
    """What is kept of a run: its last comparison, the held-out gains on the way, seconds of a step, settings and versions."""
    pair = report.compared(workdir)
    if pair is None or pair[1]["done"] != json.loads((workdir / "config.json").read_text())["run"]["steps"]:
        raise SystemExit(f"{workdir}: this run has not come to its end")
    base, trained = pair
    live = metrics.read(workdir / "evaluation.jsonl")
    found = {}
    for name in trained["rewards"]:
        values = [np.array(record["rewards"][name], float) for record in pair]
        kinds = np.array(trained["kind"], object)
        found[name] = {
            "base": float(np.nanmean(values[0])),
            "trained": float(np.nanmean(values[1])),
            "difference": report.paired_difference(base, trained, name),
            "kinds": {kind: [float(np.nanmean(v[kinds == kind])) for v in values] for kind in sorted(set(kinds))},
            "on the way": [[record["done"], *report.paired_difference(live[0], record, name)] for record in live[1:]],
        }
    config = json.loads((workdir / "config.json").read_text())
    return {
        "seed": config["run"]["seed"],
        "steps": config["run"]["steps"],
        "images": len(trained["prompt"]),
        "prompts": len(set(trained["prompt"])),
        "seconds_per_step": float(np.median([step["seconds"] for step in metrics.read(workdir / "metrics.jsonl")])),
        "rewards": found,
        "config": config,
        "manifest": json.loads((workdir / "manifest.json").read_text()),
    }


def tables(runs: list[dict]) -> str:
    """The runs as Markdown: seed by seed, then by kind of prompt."""
    names = list(runs[0]["rewards"])
    lines = ["| seed | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for run in runs:
        cells = []
        for name in names:
            of = run["rewards"][name]
            (mean, error), digits = of["difference"], 2 if abs(of["base"]) > 2 else 3
            cells.append(f"{of['base']:.{digits}f} -> {of['trained']:.{digits}f}, {mean:+.3f} ± {error:.3f} ({mean / error:+.1f} se)")
        lines.append(f"| {run['seed']} | " + " | ".join(cells) + " |")
    lines += ["", "| kind | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for kind in runs[0]["rewards"][names[0]]["kinds"]:
        pairs = [np.mean([run["rewards"][name]["kinds"][kind] for run in runs], axis=0) for name in names]
        lines.append(f"| {kind} | " + " | ".join(f"{before:.3f} -> {after:.3f}" for before, after in pairs) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdirs", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, help="write what is kept of the runs here")
    args = parser.parse_args()
    runs = sorted((of_run(workdir) for workdir in args.workdirs), key=lambda run: run["seed"])
    print(tables(runs))
    if args.json:
        machine = f"{os.cpu_count()} cores, {next((line.partition(': ')[2] for line in cpu_lines()), 'processor unknown')}"
        args.json.write_text(json.dumps(metrics.plain({"hardware": machine, "runs": runs}), indent=1) + "\n")


def cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return [line for line in path.read_text().splitlines() if line.startswith("model name")] if path.exists() else []


if __name__ == "__main__":
    main()

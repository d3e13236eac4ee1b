"""Two questions about the exploration of DenseGRPO, answered with the tiny world.

    python benchmarks/calibration.py signs    [--reward NAME ...] [--workdir DIR] [--json PATH] [--quick]
    python benchmarks/calibration.py training [--reward NAME]     [--workdir DIR] [--json PATH] [--quick]

signs: are the gains of the last steps one-sided at a = 0.7, as the paper reports, and is it the sampler's excess noise? The tiny Stable
Diffusion 3 on SD3's grid (shift 3, tail 0.278, 0.0089, 0) and on the uniform grid, with Flow-SDE, which leaves more noise than a level
should have, and with CPS and DDIM-SDE, which do not. Per step: share of positive gains with its standard error (prompts are the unit,
as signs at late steps belong to the prompt), spread of the gains, mean reward, noise left over noise due. Every seed has prompts and
noise of its own. Several rewards are scored on the same images.

training: does calibrated psi train better than a = 0.7, with dense gains and with the sparse final reward? Two by two on SD3's grid, three
seeds, the same number of steps; psi is calibrated first, with the same reward, once. The figure is the held-out reward's difference to
the base model on the same prompts and noise, with its standard error (clustered by prompt).

Both can be killed at any time; the same command continues from --workdir.
"""

import argparse
import dataclasses
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

from densegrpo_jax import calibrate, cli, flow
from densegrpo_jax.calibrate import Calibration
from densegrpo_jax.config import Config
from densegrpo_jax.train import calibration_report, loop, metrics, report
from densegrpo_jax_configs.variants import change

GRIDS = ("sd3", "uniform")
SAMPLERS = {"flow_sde": 0.7, "cps": 0.7, "ddim_sde": 0.7}
CREDIT = ("dense_grpo", "flow_grpo")
NOISE = ("a = 0.7", "calibrated psi")


def base(args, grid: str, workdir: Path) -> Config:
    config = dataclasses.replace(cli.load_config(args.config), rewards=(args.reward[0],))
    return change(config, sampling={"grid": grid, "shift": None}, run={"workdir": workdir}, exploration={"psi": None})


def once(path: Path, key: dict, compute) -> dict:
    """A result of the journal under `path`, computed if it is not there yet."""
    for record in metrics.read(path):
        if record["key"] == key:
            return record["result"]
    print(", ".join(f"{name} {value}" for name, value in key.items()), flush=True)
    record = metrics.plain({"key": key, "result": compute()})
    metrics.append(path, record)
    return record["result"]


# --- signs -----------------------------------------------------------------------------------------------------------------


def signs(args) -> dict:
    rows = []
    for grid in GRIDS:
        loaded: list = []  # model, prompts and program, only if something is left to do
        for sampler, level in SAMPLERS.items():
            for seed in args.seeds:
                sizes = {"rewards": args.reward, "prompts": args.prompts, "members": args.members, "config": args.config}
                key = {"grid": grid, "sampler": sampler, "noise_level": level, "seed": seed} | sizes

                def compute(grid=grid, sampler=sampler, level=level, seed=seed, loaded=loaded):
                    if not loaded:
                        s = calibrate.setting(base(args, grid, args.workdir), also=tuple(args.reward))
                        loaded[:] = s, calibrate.make_draw(s)
                    s, draw = loaded
                    table = flow.SAMPLERS[sampler](s.tables.sigmas, level)
                    kernel = flow.only_where(table, s.tables.sigmas, s.tables.kernel.std > 0.0)
                    order = np.random.default_rng(seed).permutation(len(s.prompts.texts))
                    prompts = np.resize(order, args.prompts)
                    return calibration_report.measure(s, draw, kernel, prompts, args.members, epoch=2**20 + 2 + seed)

                rows.append(key | {"result": once(args.workdir / "signs.jsonl", key, compute)})
    return {"rows": rows, "summary": summary_of_signs(rows)}


def summary_of_signs(rows: list[dict]) -> list[dict]:
    """By grid, sampler and reward: means over seeds, and the standard error of the share over all prompts of all seeds."""
    result = []
    for grid, sampler in dict.fromkeys((row["grid"], row["sampler"]) for row in rows):
        found = [row["result"] for row in rows if (row["grid"], row["sampler"]) == (grid, sampler)]
        for reward in rows[0]["rewards"]:
            of = [m["rewards"][reward] for m in found]
            line = {"grid": grid, "sampler": sampler, "scored": reward, "seeds": len(of)}
            line |= {name: mean_of(of, name) for name in ("positive", "negative", "std", "reward")}
            squares = [{"square": np.square([report._number(v) for v in m["positive_error"]])} for m in of]
            line["positive_error"] = np.sqrt(np.array(mean_of(squares, "square")) / len(of))
            line |= {name: mean_of(found, name) for name in ("excess_predicted", "excess_measured")}
            result.append(metrics.plain(line))
    return result


def mean_of(found: list[dict], name: str) -> np.ndarray:
    """Mean of rows; null, where there is no number, stays none."""
    return np.mean([[report._number(v) for v in m[name]] for m in found], axis=0)


def print_signs(result: dict) -> None:
    for row in result["summary"]:
        print(f"\n{row['grid']} grid, {row['sampler']}, {row['scored']}, {row['seeds']} seeds")
        titles = {
            "positive": "share positive", "positive_error": "standard error", "negative": "share negative", "std": "spread of gains",
            "reward": "mean reward", "excess_predicted": "noise left/due", "excess_measured": "  measured",
        }  # fmt: skip
        for key, title in titles.items():
            print(f"{title:<16}" + "".join("      –" if v is None else f"{v:7.3f}" for v in row[key]))


# --- training --------------------------------------------------------------------------------------------------------------


def training(args) -> dict:
    config = base(args, args.grid, args.workdir / "psi")
    options = Calibration(iterations=2 if args.quick else 80, start="noise_level")
    psi = calibrate.calibrate(config, options)
    rows, witnesses = [], config.evaluation.witnesses[:1]  # strict
    for seed in args.seeds:
        for credit in CREDIT:
            for noise in NOISE:
                name = f"{credit}-{'psi' if noise == NOISE[1] else 'fixed'}-{seed}"
                key = {"grid": args.grid, "reward": args.reward[0], "credit": credit, "noise": noise, "seed": seed, "steps": args.steps}
                arm = change(
                    config,
                    credit={"method": credit},
                    exploration={"psi": psi if noise == NOISE[1] else None},
                    run={"seed": seed, "steps": args.steps, "workdir": args.workdir / name, "report_every": 0},
                    evaluation={
                        "every": 0,
                        "final_prompts": args.final_prompts,
                        "final_images_per_prompt": args.final_images,
                        "witnesses": witnesses,
                    },
                )

                def compute(arm=arm):
                    loop.train(arm)
                    before, after = report.compared(arm.run.workdir)
                    pairs = {reward: report.paired_difference(before, after, reward) for reward in after["rewards"]}
                    steps = metrics.read(arm.run.workdir / "metrics.jsonl")
                    seconds = float(np.median([step["seconds"] for step in steps]))
                    return {"difference": pairs, "seconds": seconds, "training_reward": [step["reward"] for step in steps]}

                rows.append(key | {"result": once(args.workdir / "training.jsonl", key, compute)})
    return {"rows": rows, "summary": summary_of_training(rows, args), "multiplier": json.loads(psi.read_text())["multiplier"]}


def summary_of_training(rows: list[dict], args) -> list[dict]:
    """By credit and reward: the seeds' differences to the base with either noise, and of psi to a = 0.7 on the same pictures; means over
    seeds with their standard errors."""
    result = []
    for credit in CREDIT:
        for reward in rows[0]["result"]["difference"]:
            line = {"credit": credit, "scored": reward, "seeds": len(args.seeds)}
            for noise in NOISE:
                of = [row["result"]["difference"][reward][0] for row in rows if (row["credit"], row["noise"]) == (credit, noise)]
                line[noise] = mean_and_error(of)
            of = []
            for seed in args.seeds:
                ends = [metrics.read(args.workdir / f"{credit}-{kind}-{seed}" / "final.jsonl")[-1] for kind in ("fixed", "psi")]
                of.append(report.paired_difference(*ends, reward)[0])
            result.append(line | {"psi over a = 0.7": mean_and_error(of)})
    return metrics.plain(result)


def mean_and_error(values: list[float]) -> list[float]:
    """Mean over seeds and its standard error, which one seed does not have."""
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    return [float(np.mean(values)), float(error)]


def print_training(result: dict) -> None:
    print("\nmultiplier of psi: " + " ".join(f"{b:.2f}" for b in result["multiplier"]))
    rewards = list(result["rows"][0]["result"]["difference"])
    print(f"{'credit':<12}{'noise':<16}{'seed':>5}  " + "".join(f"{name:>30}" for name in rewards) + f"{'s/step':>9}")
    for row in result["rows"]:
        found = row["result"]
        cells = "".join(f"{mean:>+20.4f} ± {error:.4f}" for mean, error in found["difference"].values())
        print(f"{row['credit']:<12}{row['noise']:<16}{row['seed']:>5}  {cells}{found['seconds']:9.2f}")
    print()
    for line in result["summary"]:
        cells = [f"{name} {line[name][0]:+.4f} ± {report._number(line[name][1]):.4f}" for name in (*NOISE, "psi over a = 0.7")]
        print(f"{line['credit']:<12}{line['scored']:<24}" + "   ".join(cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=("signs", "training"))
    parser.add_argument("--config", default="scenes_compose", help="model, prompts, completions and optimiser are taken from it")
    parser.add_argument("--reward", nargs="+", default=["scenes_compose_soft"], help="the first is the one that training optimises")
    parser.add_argument("--grid", choices=GRIDS, default="sd3", help="training: the grid")
    parser.add_argument("--prompts", type=int, default=384, help="signs: prompts a seed")
    parser.add_argument("--members", type=int, default=2, help="signs: trajectories a prompt")
    parser.add_argument("--steps", type=int, default=100, help="training: steps of every arm")
    parser.add_argument("--final-prompts", type=int, default=128, help="training: held-out prompts of the comparison at the end")
    parser.add_argument("--final-images", type=int, default=6, help="training: images of each of them")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="two commands may share a workdir if their seeds differ")
    parser.add_argument("--workdir", type=Path, default=Path("runs/calibration"))
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--quick", action="store_true", help="the 8x8 toy, one seed, few trajectories or steps: does it run at all")
    args = parser.parse_args()
    if args.quick:
        args.config, args.reward, args.prompts, args.members, args.seeds, args.steps = "toy", ["toy_spot"], 48, 2, [0], 2
        args.final_prompts, args.workdir = 9, args.workdir / "quick"
    args.workdir.mkdir(parents=True, exist_ok=True)
    about = {
        "question": args.question,
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("jax", "flax", "numpy")},
        "seeds": args.seeds,
    }
    print("\n".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    result = {"signs": signs, "training": training}[args.question](args)
    {"signs": print_signs, "training": print_training}[args.question](result)
    if args.json:
        args.json.write_text(json.dumps({"about": about} | result, indent=1) + "\n")


if __name__ == "__main__":
    main()

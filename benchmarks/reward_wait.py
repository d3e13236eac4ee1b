"""What share of a training step is spent waiting for a reward server, with scoring overlapped and in turn?

    python benchmarks/reward_wait.py [--json PATH] [--quick]

Trains the tiny Stable Diffusion 3 on a reward that a real `densegrpo serve-rewards` process on loopback gives, which takes a fixed time an
image (it sleeps, as a scorer on another machine would look from here). A step samples 24 trajectories of 5 steps in four chunks and
scores 5 images of each. In turn, each part is scored before the next is asked for. The rewards of both must be the same, bit by bit.
"""

import argparse
import dataclasses
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

from densegrpo_jax import cli, rewards
from densegrpo_jax.train import metrics
from densegrpo_jax.train.loop import train

SERVED = """
import time
def sleeper(images, prompts, metadata):
    time.sleep({} * len(images))
    return images.mean((1, 2, 3)) / 255.0
"""
in_turn = functools.partial(rewards.score_parts, overlap=False)


def measure(folder, milliseconds, steps):
    """{"overlapped", "in turn"} -> median seconds a step and share waited, without the first step, which compiles."""
    file = folder / "reward.py"
    file.write_text(SERVED.format(milliseconds / 1000.0))
    command = [sys.executable, "-c", "import sys; from densegrpo_jax import cli; sys.exit(cli.main())", "serve-rewards", "--port", "0"]
    server = subprocess.Popen([*command, "--reward", f"{file}:sleeper"], stdout=subprocess.PIPE, text=True)
    found, overlapped = {}, rewards.score_parts
    try:
        name = [server.stdout.readline() for _ in range(3)][2].split("'")[1]
        for way, score_parts in (("overlapped", overlapped), ("in turn", in_turn)):
            rewards.score_parts = score_parts
            base = cli.load_config("scenes_compose")
            config = dataclasses.replace(
                base,
                rewards=(name,),
                prompts=dataclasses.replace(base.prompts, per_step=1),
                sampling=dataclasses.replace(base.sampling, num_steps=5, chunk=6),
                optimizer=dataclasses.replace(base.optimizer, updates=1),
                evaluation=dataclasses.replace(base.evaluation, every=0, witnesses=()),
                run=dataclasses.replace(base.run, steps=steps, workdir=folder / way, save_every=steps, report_every=0),
            )
            train(config)
            records = metrics.read(folder / way / "metrics.jsonl")[1:]
            found[way] = {key: float(np.median([r[key] for r in records])) for key in ("seconds", "reward_wait")}
            found[way]["rewards"] = [r["reward"] for r in records]
    finally:
        rewards.score_parts = overlapped
        server.terminate()
        server.wait()
    if found["overlapped"].pop("rewards") != found["in turn"].pop("rewards"):
        raise AssertionError("the two ways trained differently")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one delay, two steps")
    args = parser.parse_args()
    delays, steps = ((10.0,), 3) if args.quick else ((2.0, 5.0, 10.0, 20.0), 12)
    rows = {}
    for delay in delays:
        with tempfile.TemporaryDirectory() as folder:
            rows[delay] = measure(Path(folder), delay, steps)
    print("| ms an image | in turn: s a step | waited | overlapped: s a step | waited |\n| --: | --: | --: | --: | --: |")
    for delay, ways in rows.items():
        cells = [f"{ways[way]['seconds']:.2f} | {ways[way]['reward_wait']:.0%}" for way in ("in turn", "overlapped")]
        print(f"| {delay:g} | {' | '.join(cells)} |")
    about = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    about |= {name: version(name) for name in ("jax", "numpy")}
    print(f"\n{about}, seed 0, {steps - 1} steps each")
    if args.json:
        args.json.write_text(json.dumps({"rows": {str(k): v for k, v in rows.items()}, "about": about}, indent=1))


if __name__ == "__main__":
    main()

"""How right, how robust and how fast the judge of the tiny world is.

    python benchmarks/scenes_judge.py [--json PATH] [--quick] [--picture PATH]

First table: mean scores of freshly drawn scenes of each tag, and of the same pictures against another scene's request. Second: mean scores
over all tags as pixel noise (standard deviation in levels of 255) or Gaussian blur (in pixels) grows. Third: pictures judged a second.
--picture writes a plate with two rows of drawn scenes for each tag.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path

import jax
import numpy as np
from scipy import ndimage

from densegrpo_jax.scenes import checker, tiny_model, world

NOISE = (0, 4, 8, 16, 24, 32, 48)
BLUR = (0.0, 0.4, 0.6, 0.8, 1.0, 1.5)


def draw(tag, count, seed):
    scenes = [world.sample_scene((seed, n), tag=tag) for n in range(count)]
    return world.draw_batch(scenes), [world.metadata(scene, n) for n, scene in enumerate(scenes)]


def means(images, requests):
    return {mode: round(float(checker.judge(images, requests, mode).mean()), 4) for mode in checker.MODES}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--quick", action="store_true", help="100 scenes a tag, not 500")
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()
    count = 100 if args.quick else 500

    drawn = {tag: draw(tag, count, args.seed) for tag in world.TAGS}
    right = {tag: means(*pair) for tag, pair in drawn.items()}
    wrong = {tag: means(np.roll(images, 1, 0), requests) for tag, (images, requests) in drawn.items()}
    part = count // 5
    images = np.concatenate([images[:part] for images, _ in drawn.values()])
    requests = [request for _, requests in drawn.values() for request in requests[:part]]
    grain = np.random.default_rng(args.seed).normal(size=images.shape)
    noise = {level: means(np.rint(np.clip(images + level * grain, 0, 255)).astype(np.uint8), requests) for level in NOISE}
    blur = {
        width: means(np.rint(ndimage.gaussian_filter(images.astype(np.float32), (0, width, width, 0))).astype(np.uint8), requests)
        for width in BLUR
    }
    rates = {}
    for mode in checker.MODES:  # compiled above
        began = time.perf_counter()
        checker.judge(images, requests, mode)
        rates[mode] = round(len(images) / (time.perf_counter() - began))

    columns = "".join(f"{mode:>9}" for mode in checker.MODES)
    print(f"{count} scenes a tag, seed {args.seed}\n{'tag':<15}{columns}   wrong:{columns}")
    for tag in world.TAGS:
        row, other = ("".join(f"{value:9.3f}" for value in table[tag].values()) for table in (right, wrong))
        print(f"{tag:<15}{row}         {other}")
    for name, table in (("noise", noise), ("blur", blur)):
        print(f"\n{name:<15}{columns}")
        for level, row in table.items():
            print(f"{level:<15}" + "".join(f"{value:9.3f}" for value in row.values()))
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "jax": jax.__version__, "numpy": np.__version__}
    print(f"\npictures a second: {rates}   {machine}")
    if args.picture:
        shown = np.concatenate([images[:32] for images, _ in drawn.values()])
        tiny_model.save_grid(args.picture, shown)
    if args.json:
        tables = {"right": right, "wrong": wrong, "noise": noise, "blur": blur, "rates": rates}
        result = {"seed": args.seed, "scenes": count, **tables, **machine}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

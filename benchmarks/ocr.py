"""When is reading the whole image as one line enough, and what does finding lines first cost?

    python benchmarks/ocr.py [--json PATH] [--quick]

Draws texts of the OCR prompts in one font on a plain background, and words of the tiny world; reads them with the reward's two engines:
"line" (recognition only, the reward `words`) and "page" (detection + recognition, the reward `ocr`). For each kind of image: the mean
reward, the share read without a fault, and milliseconds of CPU time an image, on one thread. Angles are
counter-clockwise, about the middle.
"""

import argparse
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from densegrpo_jax.prompts import ocr as prompts
from densegrpo_jax.rewards import ocr
from densegrpo_jax.scenes import world

FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
SIDES, ANGLES = (32, 64, 128, 256, 512), (5, 10, 20, 45, 90, 180)


def texts(words, count, seed):
    """Texts of so many words, as the generated prompts quote them."""
    found = (ocr.target_text(prompt) for prompt in prompts.generate(0, 40 * count, seed)[1])
    return [text for text in found if len(text.split()) == words][:count]


def draw(text, side, lines=1, angle=0):
    """uint8 [side, side, 3] with the text on so many lines, its longest 80 % of the width, or 55 % where it is rotated."""
    words = text.split()
    rows = [" ".join(words[i * len(words) // lines : (i + 1) * len(words) // lines]) for i in range(lines)]
    big = ImageFont.truetype(FONT, 100)
    longest = max(big.getlength(row) for row in rows)
    size = min(100 * side * (0.55 if angle else 0.8) / longest, side / 3)
    page = Image.new("RGB", (side, side), (236, 240, 228))
    font, middle = ImageFont.truetype(FONT, size), side / 2
    for i, row in enumerate(rows):
        place = (middle, middle + (i - (lines - 1) / 2) * 1.4 * size)
        ImageDraw.Draw(page).text(place, row, (40, 60, 120), font, anchor="mm")
    return np.asarray(page.rotate(angle, Image.Resampling.BICUBIC, fillcolor=(236, 240, 228)))


def kinds(count, seed):
    """Name -> (images, texts)."""
    one, two, four = (texts(words, count, seed) for words in (1, 2, 4))
    scenes = [world.sample_scene((seed, i), "heldout", "word") for i in range(count)]
    made = {"tiny world, 32 px": (list(world.draw_batch(scenes)), [scene.word for scene in scenes])}
    for side in SIDES:
        made[f"one word, {side} px"] = [draw(text, side) for text in one], one
    for name, chosen, lines in (("two words, one line", two, 1), ("two words, two lines", two, 2), ("four words, two lines", four, 2)):
        made[f"{name}, 512 px"] = [draw(text, 512, lines) for text in chosen], chosen
    for angle in ANGLES:
        made[f"one word, 256 px, rotated {angle}"] = [draw(text, 256, angle=angle) for text in one], one
    return made


def measure(read, images, targets):
    read(images[0])
    began = time.process_time()
    found = [read(image) for image in images]
    seconds = time.process_time() - began
    rewards = np.array([ocr.ocr_reward(text, target) for text, target in zip(found, targets)])
    return {"reward": float(rewards.mean()), "right": float((rewards == 1.0).mean()), "ms": 1e3 * seconds / len(images)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="3 images of a kind, not 40")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    count = 3 if args.quick else 40
    engines = {"line": ocr.load_engine(detect=False), "page": ocr.load_engine(detect=True)}
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {name: version(name) for name in ("rapidocr", "onnxruntime", "numpy")}
    print(f"{count} images of a kind, seed {args.seed}   {machine}")
    print("| image | line: reward | right | ms | page: reward | right | ms |\n| --- | --: | --: | --: | --: | --: | --: |")
    table = {}
    for kind, (images, targets) in kinds(count, args.seed).items():
        table[kind] = {name: measure(read, images, targets) for name, read in engines.items()}
        cells = [f"{row['reward']:.2f} | {row['right']:.2f} | {row['ms']:.0f}" for row in table[kind].values()]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "images": count, "machine": machine, "kinds": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()

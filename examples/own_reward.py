"""A reward of your own, plugged into the trainer from outside the package.

    python examples/own_reward.py                               # the tiny Stable Diffusion 3 learns to draw boldly
    python examples/own_reward.py toy --run.steps 20

A reward sees uint8 images [N, H, W, 3], N prompts and N dicts of metadata, and returns N scores; NaN where an image could not be
scored. `config.rewards` says which rewards count, and how much: ("contrast", "scenes_compose_soft=0.5") adds a built-in one at half weight.
"""

import dataclasses
import sys

import numpy as np
import tyro

from densegrpo_jax.cli import load_config
from densegrpo_jax.config import Config
from densegrpo_jax.train.loop import train


def contrast(images, prompts: list[str], metadata: list[dict]) -> np.ndarray:
    """Standard deviation of an image's pixels, in [0, 0.5]."""
    return (np.asarray(images) / 255.0).std(axis=(1, 2, 3))


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else "scenes_compose"
    options = [argument for argument in sys.argv[1:] if argument != name]
    base = dataclasses.replace(load_config(name), rewards=("contrast",))
    print(train(tyro.cli(Config, default=base, args=options), extra_rewards={"contrast": contrast}))

"""A credit method of your own, plugged into the trainer from outside the package.

    python examples/own_credit.py                               # the 8x8 toy, a minute
    python examples/own_credit.py scenes_preference --run.steps 20

DenseGRPO credits a step with its gain, R_{i+1} - R_i. Both are estimates, and the noise of R_i enters in full. Any multiple of R_i is
as good a baseline, since R_i was settled before the step was taken; the multiple that leaves the least variance is the slope of
R_{i+1} against R_i among the members of a group.
"""

import sys

import numpy as np
import tyro

from densegrpo_jax.cli import load_config
from densegrpo_jax.config import Config
from densegrpo_jax.train.loop import train


def regressed_gain(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """R_{i+1} - b_i R_i, with b_i the slope within groups. rewards [T+1, B], NaN where a score failed; groups [B] -> credit [T, B]."""
    centred = np.array(rewards)  # [T+1, B]
    for group in np.unique(groups):
        centred[:, groups == group] -= np.nanmean(rewards[:, groups == group], axis=1, keepdims=True)
    before, after = centred[:-1], centred[1:]
    slope = np.nansum(before * after, axis=1, keepdims=True) / np.maximum(np.nansum(before**2, axis=1, keepdims=True), 1e-12)  # [T, 1]
    return after - slope * before


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else "toy"
    options = [argument for argument in sys.argv[1:] if argument != name]
    print(train(tyro.cli(Config, default=load_config(name), args=options), credit_method=regressed_gain))

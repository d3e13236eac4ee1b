"""Noise windows: which steps of the sampler are stochastic, and which of those are trained.

Masks are numpy booleans [T], decided outside jit from (seed, training step), so every host and every restart agrees.
"""

from typing import Literal, NamedTuple

import numpy as np


class Window(NamedTuple):
    """stochastic [T]: noise is injected; trained [T]: the step enters the loss."""

    stochastic: np.ndarray
    trained: np.ndarray


def all_steps(num_steps: int) -> Window:
    """Every step is noisy and trained; a step whose std is 0 under the sampler drops out by itself."""
    mask = np.ones(num_steps, bool)
    return Window(mask, mask)


def all_but_last(num_steps: int, last_noise: bool = False) -> Window:
    """All steps but the last are trained. The last is an ODE step, or noisy but untrained as in Flow-GRPO's program.

    Args:
      num_steps: T, at least 2.
      last_noise: inject noise at the last step (parity with Flow-GRPO).
    """
    if num_steps < 2:
        raise ValueError(f"num_steps = {num_steps}: with one step there is none but the last; train it with all_steps")
    trained = np.arange(num_steps) < num_steps - 1
    return Window(np.ones(num_steps, bool) if last_noise else trained, trained)


def fixed(num_steps: int, start: int, size: int) -> Window:
    """Steps start .. start + size - 1 are noisy and trained, ODE elsewhere.

    Raises:
      ValueError: the window is empty or does not fit into the T steps.
    """
    if size < 1 or start < 0 or start + size > num_steps:
        raise ValueError(f"window of {size} steps from {start} does not fit into {num_steps} steps; start + size <= {num_steps}")
    steps = np.arange(num_steps)
    mask = (steps >= start) & (steps < start + size)
    return Window(mask, mask)


def random(num_steps: int, size: int, seed: int, step: int, first: int = 0, last: int | None = None, group: int = 0) -> Window:
    """A window whose start is drawn anew each training step (Flow-GRPO-Fast), the same for all members of a group.

    Args:
      num_steps: T.
      size: steps in the window.
      seed: of the run.
      step: training step; (seed, step, group) address the draw.
      first: earliest start.
      last: latest start, inclusive; by default the last that fits.
      group: draw a window of its own for this group; 0 for one window per training step.
    """
    last = num_steps - size if last is None else last
    fixed(num_steps, first, size)
    fixed(num_steps, last, size)
    if last < first:
        raise ValueError(f"window starts from first = {first} to last = {last}: last must not be smaller")
    start = np.random.default_rng([seed, step, group]).integers(first, last + 1)
    return fixed(num_steps, int(start), size)


def sliding(
    num_steps: int,
    size: int,
    step: int,
    every: int = 25,
    stride: int = 1,
    at_end: Literal["roll_back", "stay"] = "roll_back",
) -> Window:
    """MixGRPO's schedule: the window moves by `stride` every `every` training steps (arXiv 2507.21802).

    Args:
      num_steps: T.
      size: steps in the window (4 in the paper).
      step: training step.
      every: training steps between moves (25 in the paper).
      stride: steps moved at a time; 0 keeps it at the start (Flash*).
      at_end: start again at 0, or stay at the last place.
    """
    if every < 1 or stride < 0:
        raise ValueError(f"every = {every}, stride = {stride}: every is at least 1 and stride not negative")
    if at_end not in ("roll_back", "stay"):
        raise ValueError(f"at_end = {at_end!r}: choose 'roll_back' or 'stay'")
    fixed(num_steps, 0, size)
    moves, places = step // every, (num_steps - size) // max(stride, 1) + 1
    place = moves % places if at_end == "roll_back" else min(moves, places - 1)
    return fixed(num_steps, place * stride, size)

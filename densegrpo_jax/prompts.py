"""Prompt lists, and which prompts a training step takes. A prompt is identified by its place in the list, never by its text."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np


class PromptSet(NamedTuple):
    """texts and, for each, a dict of metadata (empty for plain text)."""

    texts: tuple[str, ...]
    metadata: tuple[dict, ...]


def _toy() -> PromptSet:
    from densegrpo_jax.scenes import toy

    return PromptSet(toy.PROMPTS, ({},) * len(toy.PROMPTS))


def _scenes(split: str, words: bool) -> PromptSet:
    """The first different requests of the tiny world's stream, in its own mixture of kinds; so a longer set begins with a shorter one."""
    from densegrpo_jax.scenes import world

    count = (96 if words else 1024) if split == "train" else (24 if words else 256)
    found: dict[str, dict] = {}
    for i in range(1_000_000):
        scene = world.sample_scene((0, i), split, "word" if words else None)
        if words or scene.tag != "word":
            request = world.metadata(scene, (0, i, 1))
            found.setdefault(request["prompt"], request)
        if len(found) == count:
            return PromptSet(tuple(found), tuple(found.values()))
    raise ValueError(f"the tiny world has fewer than {count} different prompts in its split {split!r}")


BUILT_IN = {
    "toy": _toy,
    **{f"scenes/{split}": partial(_scenes, split, False) for split in ("train", "heldout")},
    **{f"words/{split}": partial(_scenes, split, True) for split in ("train", "heldout")},
}
"""Prompt sets that come with the package: the toy's, and the tiny world's compositions and words, with GenEval metadata."""


def load(source: str) -> PromptSet:
    """Reads a text file with one prompt a line (empty lines are skipped), or a set of `BUILT_IN`.

    Raises:
      ValueError: no such file or set, bytes that are not UTF-8 (with the line), or no prompts in it.
    """
    if source in BUILT_IN:
        return BUILT_IN[source]()
    path = Path(source).expanduser()
    if not path.is_file():
        raise ValueError(f"prompts {source!r}: there is no such file, and the built-in sets are: {', '.join(BUILT_IN)}")
    texts = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            text = line.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 text ({error.reason} at byte {error.start})") from error
        if "\0" in text:
            raise ValueError(f"{path}, line {number}: holds a NUL byte; is this a text file?")
        if text:
            texts.append(text)
    if not texts:
        raise ValueError(f"{path}: holds no prompts; write one per line")
    return PromptSet(tuple(texts), ({},) * len(texts))


def of_step(count: int, per_step: int, seed: int, step: int) -> np.ndarray:
    """Indices [per_step] of the prompts of a training step: passes over shuffled lists, addressed by (seed, step).

    Every prompt comes once per pass; with fewer prompts than `per_step` some come twice, as groups of their own.
    """
    position = step * per_step + np.arange(per_step)
    shuffled = {p: np.random.default_rng([seed, int(p)]).permutation(count) for p in np.unique(position // count)}
    return np.array([shuffled[p // count][p % count] for p in position])

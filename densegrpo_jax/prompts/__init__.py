"""Prompt lists, and which prompts a training step takes. A prompt is identified by its place in the list, never by its text."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from densegrpo_jax.prompts import geneval

BAD_SHOWN = 20  # bad lines named in one error
LONGEST = 20_000  # characters of a line, as a reward server takes
HUB_COLUMNS = ("prompt", "caption", "text")  # where a hub data set keeps its prompts, if no column is named


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
    """Reads prompts; a place in the returned lists is what identifies one.

    Args:
      source: one of
        * a set of `BUILT_IN`;
        * a text file, one prompt a line (empty lines are skipped);
        * a `.jsonl` file, one JSON object a line with a "prompt"; the objects are the metadata, GenEval's for instance;
        * "FOLDER/train" or "FOLDER/test", a folder laid out as Flow-GRPO's: train_metadata.jsonl where there is one, else train.txt;
        * "hf:OWNER/NAME:SPLIT" or "hf:OWNER/NAME:SPLIT:COLUMN", a data set of the Hugging Face hub (needs the package `datasets`).

    Raises:
      ValueError: nothing of that name, no prompts in it, or bad lines: all of them with their numbers, as far as they fit.
    """
    if source in BUILT_IN:
        return BUILT_IN[source]()
    if source.startswith("hf:"):
        return _load_hub(source)
    path = Path(source).expanduser()
    if path.is_dir():
        raise ValueError(f"prompts {source!r} is a folder; say which part of it: {source.rstrip('/')}/train or {source.rstrip('/')}/test")
    if not path.exists() and path.name in ("train", "test") and path.parent.is_dir():
        choices = [path.parent / f"{path.name}_metadata.jsonl", path.parent / f"{path.name}.txt"]
        path = next((choice for choice in choices if choice.is_file()), None)
        if path is None:
            raise ValueError(f"prompts {source!r}: the folder holds neither {choices[0].name} nor {choices[1].name}")
    if not path.is_file():
        raise ValueError(f"prompts {source!r}: there is no such file, and the built-in sets are: {', '.join(BUILT_IN)}")
    parse = _parse_json if path.suffix == ".jsonl" else _parse_text
    return _collect(str(path), path.read_bytes().splitlines(), parse, "line")


def _collect(source: str, rows: Iterable, parse: Callable[[Any], dict | None], unit: str) -> PromptSet:
    """Parses rows into {"prompt", ...}; None is skipped, and what `parse` raises is gathered with the numbers of the rows."""
    found, bad = [], []
    for number, row in enumerate(rows, 1):
        try:
            if (entry := parse(row)) is not None:
                found.append(entry)
        except ValueError as error:
            bad.append(f"{unit} {number}: {error}")
    if bad:
        more = f"\n  and {len(bad) - BAD_SHOWN} more" if len(bad) > BAD_SHOWN else ""
        raise ValueError(f"{source}: {len(bad)} bad {unit}(s)\n  " + "\n  ".join(bad[:BAD_SHOWN]) + more)
    if not found:
        raise ValueError(f"{source}: holds no prompts; write one per line")
    return PromptSet(tuple(entry["prompt"] for entry in found), tuple(entry if len(entry) > 1 else {} for entry in found))


def _decode(line: bytes) -> str:
    try:
        text = line.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    if "\0" in text:
        raise ValueError("holds a NUL byte; is this a text file?")
    if len(text) > LONGEST:
        raise ValueError(f"has {len(text)} characters, at most {LONGEST} are read; is there one prompt a line?")
    return text


def _parse_text(line: bytes) -> dict | None:
    text = _decode(line)
    return {"prompt": text} if text else None


def _parse_json(line: bytes) -> dict | None:
    if not (text := _decode(line)):
        return None
    try:
        entry = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("not JSON (nested too deep)") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"].strip():
        raise ValueError('not an object with a "prompt"')
    if "include" in entry or "exclude" in entry:
        geneval.check_form(entry)
    return entry


def _load_hub(source: str) -> PromptSet:
    parts = source.removeprefix("hf:").split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise ValueError(f"prompts {source!r}: write hf:OWNER/NAME:SPLIT or hf:OWNER/NAME:SPLIT:COLUMN")
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f'prompts {source!r} need the package `datasets` ({error}): pip install "densegrpo_jax[datasets]"') from error
    try:
        data = datasets.load_dataset(parts[0], split=parts[1])
    except Exception as error:  # the hub, the network and the set's format each have errors of their own
        raise ValueError(f"prompts {source!r} could not be loaded: {type(error).__name__}: {error}") from error
    wanted = parts[2:] or [name for name in HUB_COLUMNS if name in data.column_names]
    if len(wanted) != 1 or wanted[0] not in data.column_names:
        raise ValueError(f"prompts {source!r}: name one of its columns, hf:OWNER/NAME:SPLIT:COLUMN; it has {', '.join(data.column_names)}")

    def parse(text: Any) -> dict | None:
        if not isinstance(text, str):
            raise ValueError(f"{type(text).__name__} instead of a text in column {wanted[0]!r}")
        return _parse_text(text.encode())

    return _collect(source, data[wanted[0]], parse, "row")


def describe(train: PromptSet, test: PromptSet | None = None) -> list[str]:
    """What a user should know of a prompt set, or of a pair, before training on one and evaluating on the other.

    Texts are compared without regard to case and spacing.

    Returns:
      Lines to print: numbers of prompts and of different ones, how many of each tag, and how much of test is in train too.
    """
    lines = []
    for name, prompts in (("train", train), ("test", test)):
        if prompts is None:
            continue
        different = len(set(map(_plain, prompts.texts)))
        tags = Counter(entry["tag"] for entry in prompts.metadata if isinstance(entry.get("tag"), str))
        repeated = f", {different} different" if different < len(prompts.texts) else ""
        kinds = f" ({', '.join(f'{tag} {count}' for tag, count in sorted(tags.items()))})" if tags else ""
        lines.append(f"{name}: {len(prompts.texts)} prompts{repeated}{kinds}")
    if test is not None and (shared := overlap(train, test)):
        first = f"the first is number {shared[0]}: {test.texts[shared[0]]!r}"
        lines.append(f"overlap: {len(shared)} of {len(test.texts)} test prompts are in train too, {first}")
    return lines


def overlap(train: PromptSet, test: PromptSet) -> list[int]:
    """Indices of the test prompts whose text, but for case and spacing, is in train."""
    seen = set(map(_plain, train.texts))
    return [index for index, text in enumerate(test.texts) if _plain(text) in seen]


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def of_step(count: int, per_step: int, seed: int, step: int) -> np.ndarray:
    """Indices [per_step] of the prompts of a training step: passes over shuffled lists, addressed by (seed, step).

    Every prompt comes once per pass; with fewer prompts than `per_step` some come twice, as groups of their own.
    """
    position = step * per_step + np.arange(per_step)
    shuffled = {p: np.random.default_rng([seed, int(p)]).permutation(count) for p in np.unique(position // count)}
    return np.array([shuffled[p // count][p % count] for p in position])

"""`densegrpo prompts`: makes prompt files, or says what is in some."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from densegrpo_jax import prompts
from densegrpo_jax.prompts import geneval, ocr


@dataclasses.dataclass(frozen=True)
class GenEval:
    """Write GenEval's six kinds of requests: train_metadata.jsonl and test_metadata.jsonl, for `FOLDER/train` and `FOLDER/test`."""

    out: Path
    """Folder to write in."""
    train: int = 50_000
    """Requests for training; a kind that has fewer than its share is repeated."""
    test: int = 100
    """Requests of each kind for testing, at most a quarter of what there is; none is asked twice."""
    exclude: tuple[str, ...] = ()
    """Prompt files with requests to leave out, as GenEval's own evaluation_metadata.jsonl."""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Ocr:
    """Write prompts that quote one to four words to be shown: train.txt and test.txt, for `FOLDER/train` and `FOLDER/test`."""

    out: Path
    """Folder to write in."""
    train: int = 10_000
    """Prompts for training."""
    test: int = 1000
    """Prompts for testing; none of their texts is in training."""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Check:
    """Say how many prompts there are, of what kinds, how many repeated, and what two sets share. Bad lines are named."""

    train: tyro.conf.Positional[str]
    """A prompt source: file, FOLDER/train, hf:OWNER/NAME:SPLIT, or a built-in set."""
    test: tyro.conf.Positional[str | None] = None
    """Another, to compare with."""


Command = (
    Annotated[GenEval, tyro.conf.subcommand("geneval")]
    | Annotated[Ocr, tyro.conf.subcommand("ocr")]
    | Annotated[Check, tyro.conf.subcommand("check")]
)


def main(args: GenEval | Ocr | Check) -> None:
    """Does what is asked, and prints what a user should know of the prompts.

    Raises:
      ValueError: what `prompts.load` and the generators raise; a file to write that is there already.
    """
    if getattr(args, "seed", 0) < 0:
        raise ValueError(f"seed = {args.seed}: must be at least 0")
    match args:
        case Check():
            sources = [source for source in (args.train, args.test) if source is not None]
            sets = [prompts.load(source) for source in sources]
            print("\n".join(prompts.describe(*sets) + [line for pair in zip(sources, sets) for line in unjudged(*pair)]))
        case GenEval():
            exclude = [request for source in args.exclude for request in _requests(source)]
            train, test = geneval.generate(args.train, args.test, args.seed, exclude=exclude)
            _write(args.out, {f"{part}_metadata.jsonl": list(map(json.dumps, rows)) for part, rows in (("train", train), ("test", test))})
        case Ocr():
            train, test = ocr.generate(args.train, args.test, args.seed)
            _write(args.out, {"train.txt": train, "test.txt": test})


def _requests(source: str) -> Sequence[dict]:
    found = prompts.load(source).metadata
    if not all("include" in request for request in found):
        raise ValueError(f"{source}: holds prompts without GenEval's metadata, so what they ask for is not known")
    return found


def _write(folder: Path, files: dict[str, list[str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        if (folder / name).exists():
            raise ValueError(f"{folder / name} is there already; name another folder, or move it away")
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    train, test = (prompts.load(str(folder / name)) for name in files)
    print("\n".join([*prompts.describe(train, test), *(f"wrote {folder / name}" for name in files)]))


def unjudged(source: str, found: prompts.PromptSet) -> list[str]:
    """At most one line: how many requests GenEval's scorer would refuse, and the most frequent reason."""
    reasons: Counter[str] = Counter()
    for request in found.metadata:
        if "include" in request:
            try:
                geneval.check_request(request)
            except ValueError as error:
                reasons[str(error)] += 1
    if not reasons:
        return []
    reason, count = reasons.most_common(1)[0]
    return [f"{source}: GenEval's scorer would refuse {reasons.total()} requests; {count} because: {reason}"]

"""Metrics of a run: JSON lines and TensorBoard always, W&B where asked for; and what the terminal shows."""

import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from densegrpo_jax.train import files

MANY = 20  # training steps without a positive, or a negative, gain at a denoising step, after which the terminal warns


def plain(value: Any) -> Any:
    """Numbers and arrays as JSON values; what is not finite becomes null."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(np.asarray(value).tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def append(path: Path, record: dict) -> None:
    """Adds one line, complete or not at all as far as a reader of whole lines is concerned."""
    files.append(path, json.dumps(plain(record)))


def read(path: Path) -> list[dict]:
    """All whole records; a torn last line (the process was killed while writing) is left out."""
    if not path.exists():
        return []
    records = []
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if i < len(lines) - 1:
                raise ValueError(f"{path}, line {i + 1}: not JSON; the file was changed by something other than this program") from error
    return records


def rewind(path: Path, step: int) -> list[dict]:
    """Drops what a resumed run will write again: records of `step` and later. Returns what is kept."""
    kept = [record for record in read(path) if record["step"] < step]
    if path.exists():
        files.write(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept


@contextmanager
def boards(workdir: Path, wandb: bool, start: int = 0) -> Iterator[list[Callable[[dict], None]]]:
    """Writers of records: TensorBoard under workdir/tensorboard, and Weights & Biases if asked for. Closed at the end.

    Args:
      workdir: of the run.
      wandb: whether Weights & Biases is asked for.
      start: the first step that will be written; TensorBoard then forgets what a killed run wrote from there on.

    Raises:
      ValueError: W&B was asked for and is not installed.
    """
    # Not SummaryWriter: it writes in a thread, which a full disk ends, and then its flush waits forever.
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary

    if wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError("run.wandb is set, but wandb is not installed: pip install 'densegrpo_jax[wandb]'")
    (workdir / "tensorboard").mkdir(exist_ok=True)
    board = EventsWriter(str(workdir / "tensorboard" / "events"))

    def to_tensorboard(record: dict) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in _scalars(record).items()]
        board.write_event(Event(wall_time=time.time(), step=record["step"], summary=Summary(value=values)))
        board.flush()

    run = None
    try:
        if start:
            board.write_event(Event(wall_time=time.time(), step=start, session_log=SessionLog(status=SessionLog.START)))
        if not wandb:
            yield [to_tensorboard]
            return
        import wandb as service

        run = service.init(dir=str(workdir), name=workdir.name, resume="allow", id=workdir.name)
        yield [to_tensorboard, lambda record: run.log(_scalars(record), step=record["step"])]
    finally:
        if run is not None:
            run.finish()
        with suppress(OSError):  # on a full disk what is still held back cannot be written, which was said where it happened
            board.close()


def _scalars(record: dict) -> dict[str, float]:
    """The numbers of a record under slash-joined names; vectors over steps one by one."""
    flat = _flat(plain(record))
    return {k: v for k, v in flat.items() if k != "step" and isinstance(v, int | float) and not isinstance(v, bool)}


def _flat(record: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, name + "/")
        elif isinstance(value, list):
            flat |= {f"{name}/{i}": v for i, v in enumerate(value)}
        else:
            flat[name] = value
    return flat


def bars(values: Any, low: float = 0.0, high: float = 1.0) -> str:
    """A row of block characters, one per value; a dot where there is none."""
    blocks = " ▁▂▃▄▅▆▇█"
    scale = [(v - low) / (high - low) if v is not None and math.isfinite(v) else None for v in np.asarray(values, float).tolist()]
    return "".join("·" if s is None else blocks[round(min(max(s, 0.0), 1.0) * 8)] for s in scale)


def quiet(before: dict | None, gains: dict, trained: np.ndarray) -> dict[str, np.ndarray]:
    """For how many training steps in a row each denoising step has had no positive, and no negative gain.

    Args:
      before: what this returned at the training step before; None at the first.
      gains: "positive", "negative" and "count" of `credit.gain_balance`, [T].
      trained: [T] bool; where a step is not trained now, or no gain is there, the number stays.

    Returns:
      "positive" and "negative", [T] integers.
    """
    seen = trained & (gains["count"] > 0)
    result = {}
    for sign in ("positive", "negative"):
        so_far = np.zeros(len(trained), int) if before is None else np.asarray(before[sign])
        result[sign] = np.where(seen, np.where(gains[sign] > 0, 0, so_far + 1), so_far)
    return result


def line(record: dict, total: int, left: float | None = None) -> str:
    """One training step for the terminal; `left` is an estimate of the seconds to the end, where nothing else shows it."""
    parts = [f"step {record['step'] + 1:>{len(str(total))}}/{total}", f"reward {record['reward']:.4f}"]
    if "gains" in record:
        parts.append(f"gains + {bars(record['gains']['positive'])}")
    parts += [f"clip {record['clip']:.1%}", f"{record['images_per_second']:.0f} images/s"]
    if (share := record.get("speed", {}).get("mfu")) is not None:
        parts.append(f"MFU {share:.0%}")
    for sign, count in record.get("gains", {}).get("quiet", {}).items():
        levels = np.flatnonzero(np.asarray(count) >= MANY).tolist()
        if levels:
            parts.append(f"warning: no {sign} gain for {MANY} steps or more at denoising steps {levels}; see docs/calibration.md")
    if record.get("masked"):
        parts.append(f"{record['masked']} scores failed")
    if left is not None:
        parts.append(f"{left / 60:.1f} min left")
    return "   ".join(parts)


def is_terminal() -> bool:
    return sys.stderr.isatty()

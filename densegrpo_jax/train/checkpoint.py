"""Checkpoints by orbax: what is trained, optimiser, EMA and counters, with the config beside them.

A checkpoint is workdir/checkpoints/STEP. It is written under another name, a manifest of its files beside it, and moved there when it is
whole and on disk; so what stands there was whole once, and what has happened to it since is seen by the manifest.
"""

import hashlib
import json
import math
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from densegrpo_jax import config as configs
from densegrpo_jax import parallel
from densegrpo_jax.config import Config
from densegrpo_jax.models.adapter import Adapter
from densegrpo_jax.train import files, metrics
from densegrpo_jax.train.state import TrainState

FREE_TO_CHANGE = ("run", "evaluation", "reward_server", "parallel")  # sections of the config that a continued run may change
FREE_FIELDS = (  # and fields of others: in which pieces and by which programs the same numbers are computed, to rounding
    "model.attention", "model.scan_unroll", "sampling.chunk", "sampling.decode_chunk", "completion.tile", "optimizer.micro_batch",
    "optimizer.remat",
)  # fmt: skip


def save(config: Config, state: TrainState) -> None:
    """Saves under the number of training steps done, whole or not at all, and removes what `retain` does not keep.

    Raises:
      OSError: it could not be written, because the disk is full, for instance; says which checkpoint stands.
    """
    folder, step = folder_of(config.run.workdir), int(state.step)
    target, scratch = folder / str(step), folder / f"{step}{UNFINISHED}"
    if target.exists():
        return
    try:
        if parallel.primary():
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        parallel.together("save")
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
            writer.save(scratch / ITEM, args=ocp.args.StandardSave(state._asdict()))
        if parallel.primary():
            files.write(scratch / MANIFEST, json.dumps({"step": step, "files": _hashes(scratch)}, indent=1))
            os.replace(scratch, target)
            files.sync_folder(folder)
        parallel.together("saved")
    except Exception as error:  # orbax passes on whatever the layers below it raise, with pages of context
        reason, before = re.search(r"Fail[^\[]*", str(error)), steps(config.run.workdir)
        stands = f"that of step {before[-1]} stands" if before else "there is none before it"
        raise OSError(
            f"the checkpoint of step {step} could not be written to {folder} "
            f"({reason.group().strip() if reason else error}); {stands}, and the same command continues from there"
        ) from error
    retain(config)


def retain(config: Config) -> None:
    """Keeps the last `run.keep` checkpoints, with `run.keep_best` also that of the best evaluation, and writes down which in
    workdir/checkpoints.json."""
    workdir, there = config.run.workdir, steps(config.run.workdir)
    if not (parallel.primary() and there):
        return
    found = best(workdir) if config.run.keep_best else None
    kept = sorted({*there[-config.run.keep :], *({found.step} if found else ())})
    record = {"latest": there[-1], "kept": kept, "best": found._asdict() if found else None}
    files.write(workdir / RECORD, json.dumps(record, indent=1))
    for step in set(there) - set(kept):
        gone = folder_of(workdir) / f"{step}{UNFINISHED}"  # in one move, so that a kill leaves no half of a checkpoint
        os.replace(folder_of(workdir) / str(step), gone)
        shutil.rmtree(gone)


class Best(NamedTuple):
    """step: training steps done; reward: mean held-out reward there, which is a maximum over evaluations and so no estimate."""

    step: int
    reward: float


def best(workdir: Path) -> Best | None:
    """Of the checkpoints that are there, that of the highest mean held-out reward; None where none was evaluated."""
    there, found = set(steps(workdir)), None
    for record in metrics.read(workdir / "evaluation.jsonl"):
        total = np.array(record["total"], np.float64)
        reward = float(total[np.isfinite(total)].mean()) if np.isfinite(total).any() else -math.inf
        if record["done"] in there and reward > (found.reward if found else -math.inf):
            found = Best(record["done"], reward)
    return found


def restore(config: Config, state: TrainState) -> TrainState:
    """The latest whole checkpoint, in the shapes and shardings of `state`; `state` itself where the run has never saved one.

    A checkpoint that is not whole is named in a warning and moved to checkpoints/damaged-STEP.

    Raises:
      OSError: there are checkpoints, or were, and none of them is whole.
    """
    workdir, folder = config.run.workdir, folder_of(config.run.workdir)
    damaged: dict[int, str] = {}
    step = None
    for step in reversed(steps(workdir)):
        if not (fault := damage(folder / str(step))):
            break
        damaged[step] = fault
    else:
        if damaged or (workdir / RECORD).exists():
            listed = "; ".join(f"step {k}: {v}" for k, v in damaged.items()) or "the folder is empty or gone"
            raise OSError(
                f"{folder}: no checkpoint is whole ({listed}), and a run that was saved is not begun anew by itself; put a checkpoint back "
                "from a copy, or give another run.workdir"
            )
        return state
    parallel.together("restore")
    for bad, fault in damaged.items() if parallel.primary() else ():
        aside = next(p for i in range(10**6) if not (p := folder / f"damaged-{bad}{f'-{i}' if i else ''}").exists())
        os.replace(folder / str(bad), aside)
        print(f"warning: the checkpoint of step {bad} is damaged ({fault}); moved to {aside}, continuing from step {step}", flush=True)
    if parallel.primary():
        for left in folder.glob(f"*{UNFINISHED}"):  # what a kill has interrupted
            shutil.rmtree(left)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state._asdict())
    return TrainState(**_read(folder / str(step), target))


# --- files -------------------------------------------------------------------------------------------------------------

MANIFEST = "manifest.json"  # in a checkpoint: its files with their sizes and hashes
RECORD = "checkpoints.json"  # in the work folder: which are kept, and the best
ITEM = "default"
UNFINISHED = ".unfinished"


def folder_of(workdir: Path) -> Path:
    return (workdir / "checkpoints").absolute()


def steps(workdir: Path) -> list[int]:
    """Training steps done of the checkpoints that are there, in order."""
    folder = folder_of(workdir)
    return sorted(int(p.name) for p in folder.iterdir() if p.is_dir() and p.name.isdecimal()) if folder.is_dir() else []


def damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint: the first that is missing, of another size or of other content; None if nothing."""
    try:
        expected = json.loads((checkpoint / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        if (checkpoint / "_CHECKPOINT_METADATA").exists():  # of orbax's manager, before there were manifests
            return None
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    for name, entry in expected.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
    with ThreadPoolExecutor(8) as pool:
        for name, found in zip(expected, pool.map(_sha256, (checkpoint / name for name in expected))):
            if found != expected[name]["sha256"]:
                return f"{name} has changed since it was written"
    return None


def _hashes(folder: Path) -> dict[str, dict]:
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(_sha256, paths)
        return {p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": h} for p, h in zip(paths, found)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(checkpoint: Path, target: dict | None = None) -> dict:
    """The saved tree, as `target` shapes and places it, or as numpy arrays, wherever the devices are that it was saved from."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        found = reader.restore(checkpoint / ITEM, args=ocp.args.StandardRestore(target, fallback_sharding=here))
    return found if target is not None else jax.device_get(found)


# --- what identifies a run -----------------------------------------------------------------------------------------------


def settle_config(config: Config) -> None:
    """Writes the config beside a new run; for an old one refuses changes that would make it another run.

    Raises:
      ValueError: listing each field that differs and may not.
    """
    path = config.run.workdir / "config.json"
    now = configs.to_json(config)
    if path.exists():
        before, after = _fixed_fields(json.loads(path.read_text())), _fixed_fields(now)
        changed = [f"{k}: {before.get(k)!r} -> {after.get(k)!r}" for k in sorted(before | after) if before.get(k) != after.get(k)]
        if changed:
            raise ValueError(
                f"{config.run.workdir} holds a run with other settings ({'; '.join(changed)}); "
                "give another run.workdir, or the old settings to continue it"
            )
    files.write(path, json.dumps(now, indent=1))


def _fixed_fields(values: dict) -> dict:
    """What identifies a run: every field that is not free, and the seed. Reward servers may move."""
    flat = {"run.seed": values["run"]["seed"]}
    for section, fields in values.items():
        if section not in FREE_TO_CHANGE:
            flat |= {f"{section}.{name}": v for name, v in fields.items()} if isinstance(fields, dict) else {section: fields}
    flat = {name: value for name, value in flat.items() if name not in FREE_FIELDS}
    flat["rewards"] = [re.sub("@http[^=]*", "", entry) for entry in values["rewards"]]
    return flat


class Trained(NamedTuple):
    """tree: the adapter, or all weights where adapter.rank = 0; settings: the run's config.json; step: training steps done."""

    tree: dict
    settings: dict
    step: int


def trained(workdir: Path, weights: Literal["ema", "last"] = "ema", step: int | None = None) -> Trained:
    """What a run has trained, for use outside the trainer.

    Args:
      workdir: of the run.
      weights: the running average that evaluation uses, or the last weights.
      step: which of the checkpoints that are kept; None for the latest.

    Raises:
      ValueError: no run there, or no such checkpoint, with those that there are.
    """
    if not (workdir / "config.json").is_file():
        raise ValueError(f"{workdir}: not the work folder of a run (it has no config.json)")
    settings = json.loads((workdir / "config.json").read_text())
    kept = steps(workdir)
    if not kept:
        raise ValueError(f"{workdir}: has no checkpoint yet")
    step = kept[-1] if step is None else step
    if step not in kept:
        raise ValueError(f"{workdir}: has no checkpoint of step {step}; it keeps {', '.join(map(str, kept))}")
    if fault := damage(folder_of(workdir) / str(step)):
        others = ", ".join(str(k) for k in kept if k != step) or "no other"
        raise ValueError(f"{workdir}: the checkpoint of step {step} is damaged ({fault}); it keeps also {others}")
    saved = _read(folder_of(workdir) / str(step))
    averaged = weights == "ema" and settings["optimizer"]["ema_decay"] > 0.0
    return Trained(saved["ema" if averaged else "trained"], settings, step)


def trained_adapter(workdir: Path, weights: Literal["ema", "last"] = "ema") -> tuple[Adapter, dict]:
    """The adapter of a run's latest checkpoint, for export.

    Args: see `trained`.

    Returns:
      The adapter, and the "model" section of the run's config.

    Raises:
      ValueError: what `trained` raises, or a run that trained all weights instead of an adapter.
    """
    found = trained(workdir, weights)
    if found.settings["adapter"]["rank"] == 0:
        raise ValueError(f"{workdir}: this run trained all weights (adapter.rank = 0), there is no adapter to export")
    return Adapter(found.tree, found.settings["adapter"]["alpha"]), found.settings["model"]

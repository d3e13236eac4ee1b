"""Checkpoints by orbax: what is trained, optimiser, EMA and counters, with the config beside them."""

import json
import re
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import orbax.checkpoint as ocp

from densegrpo_jax import config as configs
from densegrpo_jax.config import Config
from densegrpo_jax.models.adapter import Adapter
from densegrpo_jax.train.state import TrainState

FREE_TO_CHANGE = ("run", "evaluation", "reward_server")  # sections of the config that a continued run may change


def manager(config: Config) -> ocp.CheckpointManager:
    """Keeps the last `run.keep` checkpoints under workdir/checkpoints."""
    options = ocp.CheckpointManagerOptions(max_to_keep=config.run.keep, enable_async_checkpointing=False)
    return ocp.CheckpointManager((config.run.workdir / "checkpoints").absolute(), options=options)


def save(saver: ocp.CheckpointManager, state: TrainState) -> None:
    """Saves under the number of training steps done; returns when it is on disk.

    Raises:
      OSError: it could not be written, because the disk is full, for instance; says which checkpoint stands.
    """
    step, last = int(state.step), saver.latest_step()
    if last == step:
        return
    try:
        saver.save(step, args=ocp.args.StandardSave(state._asdict()))
        saver.wait_until_finished()
    except Exception as error:  # orbax passes on whatever the layers below it raise, with pages of context
        reason = re.search(r"Fail[^\[]*", str(error))
        stands = "there is none before it" if last is None else f"that of step {last} stands"
        raise OSError(
            f"the checkpoint of step {step} could not be written to {saver.directory} "
            f"({reason.group().strip() if reason else error}); {stands}, and the same command continues from there"
        ) from error


def restore(saver: ocp.CheckpointManager, state: TrainState) -> TrainState:
    """The latest checkpoint, in the shapes and shardings of `state`; `state` itself where there is none."""
    step = saver.latest_step()
    if step is None:
        return state
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state._asdict())
    return TrainState(**saver.restore(step, args=ocp.args.StandardRestore(target)))


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
    path.write_text(json.dumps(now, indent=1))


def _fixed_fields(values: dict) -> dict:
    """What identifies a run: every field outside the free sections, and the seed. Reward servers may move."""
    flat = {"run.seed": values["run"]["seed"]}
    for section, fields in values.items():
        if section not in FREE_TO_CHANGE:
            flat |= {f"{section}.{name}": v for name, v in fields.items()} if isinstance(fields, dict) else {section: fields}
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
    with ocp.CheckpointManager((workdir / "checkpoints").absolute()) as saver:
        kept = sorted(saver.all_steps())
        if not kept:
            raise ValueError(f"{workdir}: has no checkpoint yet")
        step = kept[-1] if step is None else step
        if step not in kept:
            raise ValueError(f"{workdir}: has no checkpoint of step {step}; it keeps {', '.join(map(str, kept))}")
        saved = saver.restore(step, args=ocp.args.StandardRestore())
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

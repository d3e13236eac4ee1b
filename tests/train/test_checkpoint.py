"""Checkpoints that are damaged, kept, and removed."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from densegrpo_jax.config import Config
from densegrpo_jax.train import checkpoint, files, metrics
from densegrpo_jax.train import state as states


def config(workdir: Path, **run) -> Config:
    base = Config()
    return dataclasses.replace(base, run=dataclasses.replace(base.run, workdir=workdir, **run))


def state(step: int) -> states.TrainState:
    fresh = states.init(Config(), {"a": jnp.full((64, 3), float(step)), "b": jnp.arange(5.0)})
    return fresh._replace(step=jnp.int32(step))


def saved(workdir: Path, *steps: int, **run) -> Config:
    c = config(workdir, **run)
    for step in steps:
        checkpoint.save(c, state(step))
    return c


def data_file(workdir: Path, step: int) -> Path:
    """The largest file of a checkpoint."""
    return max((p for p in (checkpoint.folder_of(workdir) / str(step)).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(workdir, step):
    path = data_file(workdir, step)
    os.truncate(path, path.stat().st_size // 2)
    return f"{path.name} has .* bytes instead of"


def remove(workdir, step):
    data_file(workdir, step).unlink()
    return "is missing"


def flip(workdir, step):
    path = data_file(workdir, step)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return "has changed since it was written"


def remove_manifest(workdir, step):
    (checkpoint.folder_of(workdir) / str(step) / checkpoint.MANIFEST).unlink()
    return "manifest.json is missing"


def break_manifest(workdir, step):
    (checkpoint.folder_of(workdir) / str(step) / checkpoint.MANIFEST).write_text('{"files": {')
    return "manifest.json cannot be read"


def empty(workdir, step):
    folder = checkpoint.folder_of(workdir) / str(step)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return "manifest.json is missing"


DAMAGES = (truncate, remove, flip, remove_manifest, break_manifest, empty)


def test_what_was_saved_comes_back_bitwise(tmp_path):
    c = saved(tmp_path, 1, 2)
    found = checkpoint.restore(c, states.init(c, state(0).trained))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state(2)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert checkpoint.restore(config(tmp_path / "new"), state(0)).step == 0


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, damage, capsys):
    c = saved(tmp_path, 1, 2)
    reason = damage(tmp_path, 2)
    with pytest.raises(ValueError, match=rf"the checkpoint of step 2 is damaged \(.*{reason}.*it keeps also 1"):
        (tmp_path / "config.json").write_text(json.dumps({"optimizer": {"ema_decay": 0.9}}))
        checkpoint.trained(tmp_path)
    before = sorted(p.name for p in (checkpoint.folder_of(tmp_path) / "2").rglob("*"))
    assert checkpoint.restore(c, state(0)).step == 1
    said = capsys.readouterr().out
    assert "warning: the checkpoint of step 2 is damaged" in said and "continuing from step 1" in said
    aside = checkpoint.folder_of(tmp_path) / "damaged-2"
    assert sorted(p.name for p in aside.rglob("*")) == before  # nothing is lost
    checkpoint.save(c, state(2))
    assert checkpoint.steps(tmp_path) == [1, 2] and checkpoint.restore(c, state(0)).step == 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_a_whole_one_a_run_is_not_begun_anew(tmp_path, damage):
    c = saved(tmp_path, 1, 2)
    for step in (1, 2):
        damage(tmp_path, step)
    for _ in range(2):  # nothing was moved, so it stays refused
        with pytest.raises(OSError, match=r"no checkpoint is whole .*step 2: .*step 1: .*put a checkpoint back"):
            checkpoint.restore(c, state(0))
    for step in (1, 2):
        os.rename(checkpoint.folder_of(tmp_path) / str(step), tmp_path / str(step))
    with pytest.raises(OSError, match="the folder is empty or gone"):
        checkpoint.restore(c, state(0))


def test_what_a_kill_leaves_half_written_is_not_taken_for_a_checkpoint(tmp_path):
    c = saved(tmp_path, 1)
    half = checkpoint.folder_of(tmp_path) / f"2{checkpoint.UNFINISHED}"
    half.mkdir()
    (half / "x").write_text("")
    assert checkpoint.steps(tmp_path) == [1] and checkpoint.restore(c, state(0)).step == 1
    assert not half.exists()


def evaluated(workdir: Path, done: int, *total: float | None) -> None:
    metrics.append(workdir / "evaluation.jsonl", {"step": done - 1, "done": done, "total": total})


def test_the_last_ones_and_the_best_are_kept_and_it_is_written_which(tmp_path):
    c = config(tmp_path, keep=2)
    evaluated(tmp_path, 0, 9.0)  # the base model is no checkpoint
    for step, total in ((1, (0.1, 0.3)), (2, (0.5, None)), (3, (0.4, 0.4)), (4, (None, None)), (5, (0.3, 0.3))):
        checkpoint.save(c, state(step))
        evaluated(tmp_path, step, *total)
        checkpoint.retain(c)
    assert checkpoint.steps(tmp_path) == [2, 4, 5]
    assert json.loads((tmp_path / checkpoint.RECORD).read_text()) == {"latest": 5, "kept": [2, 4, 5], "best": {"step": 2, "reward": 0.5}}
    assert checkpoint.damage(checkpoint.folder_of(tmp_path) / "2") is None
    without = dataclasses.replace(c, run=dataclasses.replace(c.run, keep_best=False))
    checkpoint.retain(without)
    assert checkpoint.steps(tmp_path) == [4, 5]


def test_a_save_that_fails_says_what_stands_and_leaves_nothing_open(tmp_path, monkeypatch):
    c = saved(tmp_path, 1)
    monkeypatch.setattr(files, "sync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"checkpoint of step 2 could not be written .*No space left.* that of step 1 stands"):
        checkpoint.save(c, state(2))
    monkeypatch.undo()
    assert checkpoint.restore(c, state(0)).step == 1
    checkpoint.save(c, state(2))
    assert checkpoint.steps(tmp_path) == [1, 2]


# --- files ---------------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write(path, "one")
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        files.write(path, "two")
    assert path.read_text() == "one"
    monkeypatch.undo()
    files.write(path, b"\xff")
    assert path.read_bytes() == b"\xff" and os.listdir(tmp_path) == ["a.json"]


def test_a_line_after_a_torn_one_is_never_glued_to_it(tmp_path):
    path = tmp_path / "m.jsonl"
    for step in range(3):
        metrics.append(path, {"step": step})
    for cut in range(1, 12):
        whole = path.read_bytes()
        os.truncate(path, len(whole) - cut)
        kept = metrics.rewind(path, 10)
        assert [r["step"] for r in kept] == list(range(len(kept)))
        for step in range(len(kept), 3):
            metrics.append(path, {"step": step})
        assert path.read_bytes() == whole


@pytest.fixture
def as_nobody():
    """Permissions count: root may write anywhere."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        yield
        os.seteuid(0)
    else:
        yield


def test_a_folder_that_cannot_be_written_is_named_with_its_field(tmp_path, as_nobody):
    folder = Path("/proc/densegrpo")
    with pytest.raises(OSError, match=r"run\.workdir = /proc/densegrpo: cannot be written to .*--run\.workdir"):
        files.writable(folder, "run.workdir")
    with pytest.raises(OSError, match=r"run\.workdir = /etc: cannot be written to \(Permission denied\)"):
        files.writable(Path("/etc"), "run.workdir")

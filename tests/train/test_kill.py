"""A real training process is killed by SIGKILL at random moments; the same command continues, to bitwise what it would have been."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from densegrpo_jax.train import checkpoint, loop, metrics

PROGRAM = [sys.executable, "-c", "import sys; from densegrpo_jax.cli import main; sys.exit(main())"]
SMALL = (
    "--prompts.per-step 2 --prompts.group-size 4 --sampling.num-steps 4 --optimizer.updates 2 --optimizer.micro-batch 12 "
    "--evaluation.every 3 --evaluation.num-steps 4 --evaluation.images-per-prompt 1 --run.save-every 2 --run.report-every 2 --run.keep 2 "
    "--evaluation.collapse-reward 0"  # the toy learns nothing at these sizes
)
CLOCK = ("seconds", "phase_seconds", "images_per_second", "reward_health", "reward_wait", "speed")
WATCHED = {  # what is seen to change just before a moment of interest
    "metrics.jsonl": "after an update",
    "checkpoints": "while a checkpoint is written or moved",
    "checkpoints.json": "after a checkpoint, before or in an evaluation or report",
    "evaluation.jsonl": "while an evaluation is written",
    "report.html": "after a report, in the next rollout",
    "report.html.tmp": "while a report is written",
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a command as a user does; compiled programs are kept, so that later starts are quick."""
    kept = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = os.environ | kept | {"JAX_NUM_CPU_DEVICES": "1"}

    def start(command: str, workdir, log):
        arguments = [*command.split(), "--run.workdir", str(workdir)]
        return subprocess.Popen([*PROGRAM, *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment)

    return start


def finish(start, command, workdir, log, code=0):
    with log.open("a") as file:
        assert start(command, workdir, file).wait(timeout=500) == code, log.read_text()[-3000:]


def kill(start, command, workdir, log, watched, changes, delay) -> None:
    """Kills the command `delay` seconds after a file or folder was seen to change so many times."""
    with log.open("a") as file:
        process = start(command, workdir, file)
        before, seen = _look(workdir / watched), 0
        while process.poll() is None and seen < changes:
            now = _look(workdir / watched)
            seen, before = seen + (now != before), now
            time.sleep(0.001)
        time.sleep(delay if process.poll() is None else 0.0)
        process.send_signal(signal.SIGKILL)
        code = process.wait()
    assert code == -signal.SIGKILL, f"it ended before, with code {code} (0: too few steps): {log.read_text()[-3000:]}"


def _look(path):
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns, sorted(os.listdir(path)) if path.is_dir() else None


def same(whole, parts, steps):
    """Whether two work folders hold the same run, wall-clock fields excepted."""
    lines = [[{k: v for k, v in r.items() if k not in CLOCK} for r in metrics.read(w / "metrics.jsonl")] for w in (whole, parts)]
    assert [r["step"] for r in lines[0]] == [r["step"] for r in lines[1]] == list(range(steps))
    assert lines[0] == lines[1]
    assert (whole / "evaluation.jsonl").read_text() == (parts / "evaluation.jsonl").read_text()
    assert json.loads((whole / checkpoint.RECORD).read_text()) == json.loads((parts / checkpoint.RECORD).read_text())
    assert checkpoint.steps(whole) == checkpoint.steps(parts) and steps in checkpoint.steps(whole)
    folders = [checkpoint.folder_of(w) / str(steps) for w in (whole, parts)]
    trees = [checkpoint._read(folder) for folder in folders]  # adapter, moments, average, counters
    assert set(trees[0]) == {"step", "trained", "opt_state", "ema", "updates", "skipped"}
    for (path, a), b in zip(jax.tree.leaves_with_path(trees[0]), jax.tree.leaves(trees[1]), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
    for folder in (*folders, parts):
        assert not list(folder.rglob("*.tmp")) and not list(folder.rglob(f"*{checkpoint.UNFINISHED}"))
    assert (parts / "report.html").read_text().endswith("</html>")


def moments(seed: int, count: int):
    """(watched, changes, delay): each kind of moment in turn, in a random order, with a random delay."""
    rng = random.Random(seed)
    kinds = list(WATCHED)[:count]
    kinds += rng.choices(list(WATCHED), k=count - len(kinds))
    rng.shuffle(kinds)
    return [(kind, rng.randint(1, 3), rng.choice((0.0, 0.02, 0.3)) * rng.random()) for kind in kinds]


@pytest.mark.timeout(3600)  # twenty-two starts of a process
@pytest.mark.parametrize(("kills", "steps"), [(5, 16), pytest.param(20, 60, marks=pytest.mark.slow)])
def test_killed_at_random_moments_the_same_command_ends_the_same(tmp_path, start, kills, steps):
    command, log = f"train toy {SMALL} --run.steps {steps}", tmp_path / "log"
    finish(start, command, tmp_path / "whole", log)
    happened = []
    for watched, changes, delay in moments(seed=steps, count=kills):
        kill(start, command, tmp_path / "parts", log, watched, changes, delay)
        at = [r["step"] for r in metrics.read(tmp_path / "parts" / "metrics.jsonl")]
        assert at == list(range(len(at)))  # what a reader sees meanwhile
        left = sorted(p.name for p in (tmp_path / "parts").rglob(f"*{checkpoint.UNFINISHED}"))
        happened.append(f"{WATCHED[watched]} (+{delay * 1000:.0f} ms), at step {len(at)}, half-written: {left or 'nothing'}")
    finish(start, command, tmp_path / "parts", log)
    print("\n".join(["killed", *happened]))
    same(tmp_path / "whole", tmp_path / "parts", steps)


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_calibration_ends_with_the_same_psi(tmp_path, start, kills):
    small = SMALL.partition("--evaluation")[0]
    command, log = f"calibrate toy {small} --calibration.iterations 12 --calibration.rest 0 --calibration.average 4", tmp_path / "log"
    finish(start, command, tmp_path / "whole", log)
    rng = random.Random(kills)
    for _ in range(kills):
        kill(start, command, tmp_path / "parts", log, "calibration/trace.jsonl", rng.randint(2, 3), 0.01 * rng.random())
    finish(start, command, tmp_path / "parts", log)
    whole, parts = ((tmp_path / name / "calibration" / "psi.json").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


@pytest.mark.slow
def test_killed_around_a_collapse_the_same_command_stops_the_same(tmp_path, start):
    harmful = SMALL.replace("collapse-reward 0", "collapse-reward 0.1") + " --optimizer.learning-rate 0.3"
    command, log, whole, parts = f"train toy {harmful} --run.steps 40", tmp_path / "log", tmp_path / "whole", tmp_path / "parts"
    finish(start, command, whole, log, code=3)
    evaluations, steps = len(metrics.read(whole / "evaluation.jsonl")), len(metrics.read(whole / "metrics.jsonl"))
    assert steps < 40 and "collapsed: the held-out reward" in log.read_text()
    with log.open("a") as file:
        for reached in (
            lambda: len(metrics.read(parts / "evaluation.jsonl")) == evaluations,  # all that the verdict needs is there
            lambda: (parts / "report.html.tmp").exists(),  # it has fallen, and the report is being written
        ):
            process = start(command, parts, file)
            while process.poll() is None and not reached():
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL, log.read_text()[-3000:]
    (parts / "report.html").unlink(missing_ok=True)
    finish(start, command, parts, log, code=3)
    same(whole, parts, steps)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_stop_saves_first(tmp_path, start, number):
    command, log = f"train toy {SMALL} --run.steps 1000 --run.save-every 1000 --run.no-keep-best --evaluation.every 0", tmp_path / "log"
    with log.open("w") as file:
        process = start(command, tmp_path / "run", file)
        while process.poll() is None and not metrics.read(tmp_path / "run" / "metrics.jsonl"):
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(timeout=300) == 0, log.read_text()[-3000:]
    done = len(metrics.read(tmp_path / "run" / "metrics.jsonl"))
    assert checkpoint.steps(tmp_path / "run") == [done]
    assert f"stopped after step {done}; everything is saved" in log.read_text()
    assert (tmp_path / "run" / "report.html").read_text().endswith("</html>")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(number, capsys):
    before = signal.getsignal(number)
    with loop._interruptible() as stop:
        assert signal.getsignal(number) != before  # or else the signal would end the tests
        signal.raise_signal(number)
        assert stop["asked"] and "again to stop at once" in capsys.readouterr().out
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) == before

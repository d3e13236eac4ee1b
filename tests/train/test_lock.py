"""One run per work folder."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from densegrpo_jax.train import lock

HOLD = """
import sys, time
from pathlib import Path
from densegrpo_jax.train import lock
with lock.held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def without_flock(monkeypatch):
    def refuse(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)


@pytest.mark.parametrize("flock", [True, False])
def test_the_second_is_refused_with_the_pid_of_the_first_until_that_is_dead(tmp_path, other, flock, monkeypatch):
    if not flock:
        without_flock(monkeypatch)
    with pytest.raises(ValueError, match=rf"another run works there \(pid {other.pid} on "), lock.held(tmp_path):
        pass
    assert json.loads((tmp_path / "lock").read_text())["pid"] == other.pid  # the refused one leaves no trace
    other.kill()
    other.wait()
    with lock.held(tmp_path):  # taken over without waiting
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / "lock").read_text() == ""


def test_a_later_process_of_the_same_number_is_not_the_holder(tmp_path, other, monkeypatch):
    without_flock(monkeypatch)
    said = json.loads((tmp_path / "lock").read_text())
    (tmp_path / "lock").write_text(json.dumps(said | {"started": said["started"] - 1}))
    with lock.held(tmp_path):
        pass


def elsewhere(tmp_path):
    (tmp_path / "lock").write_text(json.dumps({"pid": 7, "host": "another.machine", "started": 1}))


def test_of_another_machine_a_heartbeat_decides(tmp_path, capsys):
    elsewhere(tmp_path)
    stop = threading.Event()

    def beat():
        while not stop.wait(0.05):
            os.utime(tmp_path / "lock")

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ValueError, match=r"pid 7 on another\.machine"), lock.held(tmp_path, patience=1.0):
            pass
    finally:
        stop.set()
        thread.join()
    began = time.monotonic()
    with lock.held(tmp_path, patience=0.3):
        assert time.monotonic() - began >= 0.3
    assert "waiting for a sign of life" in capsys.readouterr().out


def test_the_holder_gives_signs_of_life_and_leaves_no_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.02)
    threads = threading.active_count()
    with lock.held(tmp_path):
        os.utime(tmp_path / "lock", (0, 0))
        deadline = time.monotonic() + 10
        while (tmp_path / "lock").stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / "lock").stat().st_mtime > 0
    assert threading.active_count() == threads


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": 3}', "\0\0"])
def test_a_lock_file_that_says_nothing_is_free(tmp_path, content):
    (tmp_path / "lock").write_text(content)
    with lock.held(tmp_path):
        pass


def test_two_threads_of_one_process_are_two_runs(tmp_path):
    with lock.held(tmp_path), pytest.raises(ValueError, match=f"pid {os.getpid()}"), lock.held(tmp_path):
        pass


def test_a_folder_that_is_deleted_meanwhile_is_let_go(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with lock.held(folder):
        (folder / "lock").unlink()
        folder.rmdir()

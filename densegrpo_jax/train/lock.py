"""One run per work folder: the second is refused with the pid of the first, and the lock of a dead one is taken over.

The file `lock` is locked with flock, which the kernel releases when the process ends however it ends, on the machine and on most network
file systems. Where flock is not offered, or does not reach other machines, what stands in the file decides: on this machine the process
that it names; of another one, its heartbeat.
"""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BEAT = 5.0  # seconds between the holder's signs of life
PATIENCE = 30.0  # seconds in which a holder on another machine must give one


@contextmanager
def held(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Holds the lock of a folder.

    Args:
      folder: which exists.
      patience: seconds to wait for a sign of life, where the lock is that of another machine and was not given back.

    Raises:
      ValueError: another run holds it, with its pid and machine.
    """
    path = folder / "lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    stop, beat = threading.Event(), None
    try:
        holder = _read(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            raise _refusal(folder, holder) from None
        except OSError:  # a file system without flock
            locked = False
        if holder and _lives(path, holder, locked, patience):
            raise _refusal(folder, holder)
        mine = _myself()
        _write(handle, mine)
        if not locked and (time.sleep(0.2) or _read(path) != mine):  # two at the same moment: the later one has it
            raise _refusal(folder, _read(path))
        beat = threading.Thread(target=_beat, args=(handle, stop), daemon=True, name="lock")
        beat.start()
        try:
            yield
        finally:
            stop.set()
            beat.join()
            if os.fstat(handle).st_nlink:  # not where the folder is gone
                _write(handle, {})
    finally:
        os.close(handle)


def _beat(handle: int, stop: threading.Event) -> None:
    while not stop.wait(BEAT):
        with suppress(OSError):  # a server that is away for a while
            os.utime(handle)


def _lives(path: Path, holder: dict, locked: bool, patience: float) -> bool:
    """Whether the process that the file names goes on."""
    if holder["host"] == socket.gethostname():
        return not locked and holder["pid"] != os.getpid() and _started(holder["pid"]) == holder["started"]
    print(f"{path.parent}: a run on {holder['host']} (pid {holder['pid']}) has not given it back; waiting for a sign of life", flush=True)
    seen, until = _changed(path), time.monotonic() + patience
    while time.monotonic() < until:
        time.sleep(min(1.0, patience))
        if _changed(path) != seen:
            return True
    return False


def _changed(path: Path) -> int:
    with path.open() as file:  # opening asks the server anew, where stat may answer from a cache
        return os.fstat(file.fileno()).st_mtime_ns


def _refusal(folder: Path, holder: dict) -> ValueError:
    who = f"pid {holder['pid']} on {holder['host']}" if holder else "which has just begun"
    return ValueError(f"run.workdir = {folder}: another run works there ({who}); wait for it, stop it, or give another run.workdir")


def _myself() -> dict:
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid())}


def _started(pid: int) -> int | None:
    """When a process of this machine began, in the kernel's ticks, which tells it from a later one of the same number; None: no such."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except FileNotFoundError:
        try:
            os.kill(pid, 0)  # no /proc here
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0


def _read(path: Path) -> dict:
    """What the file says of its holder; nothing after a clean end, or where it is not whole."""
    try:
        found = json.loads(path.read_text() or "{}")
        return found if found.keys() == _myself().keys() else {}
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError):
        return {}


def _write(handle: int, holder: dict) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode() if holder else b"", 0)
    os.fsync(handle)

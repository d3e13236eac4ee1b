"""Files of a run: whole or not there at all, whenever the process or the machine stops. The first of several processes writes them."""

import os
from pathlib import Path

from densegrpo_jax import parallel


def write(path: Path, content: str | bytes) -> None:
    """Writes a file under another name, waits until it is on disk, then gives it its name.

    Args:
      path: of the file; one that is there is replaced.
      content: all of it; text is written as UTF-8.
    """
    if not parallel.primary():
        return
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        sync(file)
    os.replace(scratch, path)
    sync_folder(path.parent)


def append(path: Path, line: str) -> None:
    """Adds a line at the end, in one call. Killed within it, a part of the line may stand there, which `metrics.read` leaves out."""
    if not parallel.primary():
        return
    with path.open("ab") as file:
        file.write(line.encode() + b"\n")
        sync(file)


def sync(file) -> None:
    """Returns when what was written to an open file is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def writable(folder: Path, field: str) -> None:
    """Makes a folder and tries to write in it.

    Args:
      folder: the folder.
      field: of the config that names it, for the message.

    Raises:
      OSError: that it is not possible, why, and what to do.
    """
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink(missing_ok=True)  # another process of the run tries at the same time
    except OSError as error:
        raise OSError(f"{field} = {folder}: cannot be written to ({error.strerror}); name a folder that can be, with --{field}") from error

"""JAX's persistent compilation cache in the work folder, so that a continued run starts sooner."""

import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

LEAST = 0.5  # seconds that compiling took, for a program to be kept


@contextmanager
def under(workdir: Path | None) -> Iterator[None]:
    """Keeps compiled programs in workdir/compilation_cache, apart for each kind of processor that sees the folder.

    They are machine code that is loaded and run, so the folder is this user's alone, and one that others may write to is not used. Where
    the user has chosen a folder (JAX_COMPILATION_CACHE_DIR), that one stays.

    Args:
      workdir: of the run; None for no cache.
    """
    if workdir is None or jax.config.jax_compilation_cache_dir is not None:
        yield
        return
    folder = (workdir / "compilation_cache").absolute()
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        print(f"warning: {folder} can be written to by others, so no compiled programs are taken from it; make it yours alone (mode 700)")
        yield
        return
    wanted = {"jax_compilation_cache_dir": str(folder / _processor()), "jax_persistent_cache_min_compile_time_secs": LEAST}
    before = {name: getattr(jax.config, name) for name in wanted}
    _set(wanted)
    try:
        yield
    finally:
        _set(before)


def _processor() -> str:
    """A name for the instructions that this machine knows: a program of another machine may hold some that it does not."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    flags = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    return hashlib.sha256("\n".join([platform.machine(), platform.processor(), *flags]).encode()).hexdigest()[:12]


def _set(values: dict) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # which asks for its folder once only

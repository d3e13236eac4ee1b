"""A trace of some training steps, for xprof or TensorBoard's profile tab."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


@contextmanager
def steps(folder: Path, first: int, count: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to be called with the number of each step before it begins: steps `first` .. `first + count - 1` are traced.

    Args:
      folder: for the trace.
      first: which step; not the run's first, which compiles.
      count: 0 for no trace.
    """
    on = False

    def switch(wanted: bool) -> None:
        nonlocal on
        if wanted != on:
            jax.profiler.start_trace(str(folder)) if wanted else jax.profiler.stop_trace()
            on = wanted

    try:
        yield lambda step: switch(first <= step < first + count)
    finally:
        switch(False)

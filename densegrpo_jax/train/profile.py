"""Where a step's time goes: a trace of some steps, for xprof or TensorBoard's profile tab, and the seconds of each phase."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import jax


class Watch:
    """Names phases for the trace, and in watched steps waits for each, so that its seconds are known; else it is not in the way."""

    def __init__(self, folder: Path, first: int, traced: int):
        self.folder, self.first, self.traced = folder, first, traced
        self.seconds: dict[str, float] = {}
        self.tracing = self.waiting = False

    def step(self, number: int) -> None:
        """Before the step of this number: begins or ends the trace."""
        self.seconds = {}
        self.waiting = self.first <= number < self.first + max(self.traced, 1)
        self._trace(self.first <= number < self.first + self.traced)

    def done(self, number: int, last: bool) -> None:
        """After the step of this number, the run's last or not: ends the trace with its last step, before evaluation and report."""
        if last or number + 1 >= self.first + self.traced:
            self._trace(False)

    def phase(self, name: str, function: Callable) -> Callable:
        """The function, known as a phase; another of the same name adds to it."""

        @wraps(function)
        def called(*args: Any) -> Any:
            with jax.profiler.TraceAnnotation(name):
                began = time.perf_counter()
                result = function(*args)
                if self.waiting:
                    jax.block_until_ready(result)
                    self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
            return result

        return called

    def _trace(self, wanted: bool) -> None:
        if wanted != self.tracing:
            jax.profiler.start_trace(str(self.folder)) if wanted else jax.profiler.stop_trace()
            self.tracing = wanted
            if not wanted:
                print(f"trace: {self.folder}", flush=True)


@contextmanager
def steps(folder: Path, first: int, traced: int) -> Iterator[Watch]:
    """Watches steps `first` .. `first + traced - 1`, and writes a trace of them; without a trace it watches `first`.

    Args:
      folder: for the trace; of several processes each needs its own.
      first: which step; not the run's first, which compiles.
      traced: 0 for no trace.
    """
    watch = Watch(folder, first, traced)
    try:
        yield watch
    finally:
        watch._trace(False)

"""Three hundred steps: what a run holds does not grow."""

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from densegrpo_jax import cli
from densegrpo_jax.train import checkpoint, metrics
from densegrpo_jax.train.loop import train
from tests.train.test_recovery import config, spread

STEPS, WARM = 300, 100


def resident() -> float:
    """MB of memory that this process holds, without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def run(workdir: Path) -> list[tuple[float, int, int]]:
    """Trains; returns memory, threads and programs compiled so far at every step."""
    compiled, seen = [], []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def watching(images, prompts, metadata):  # called once a step
        seen.append((resident(), threading.active_count(), len(compiled)))
        return spread(images, prompts, metadata)

    jax.monitoring.register_event_duration_secs_listener(listen)
    train(config(workdir, run={"steps": STEPS, "save_every": 25, "keep": 2}), extra_rewards={"own": watching})
    return seen


@pytest.mark.slow
def test_memory_threads_programs_and_files_of_a_long_run(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")} | {"JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run([sys.executable, "-m", __name__, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    memory, threads, programs = np.array(seen).T
    assert len(seen) == STEPS
    slope = np.polyfit(np.arange(WARM, STEPS), memory[WARM:], 1)[0] * 100
    print(f"memory {memory[0]:.1f}, {memory[WARM]:.1f}, {memory[-1]:.1f} MB at steps 1, {WARM}, {STEPS}; {slope:+.3f} MB per 100 steps")
    assert slope < 1.0
    assert programs[2:].max() == programs[2]  # nothing is compiled after the second step
    assert threads[WARM:].max() <= threads[:WARM].max()
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    sizes = np.array([len(line) for line in lines])
    assert len(lines) == STEPS and sizes.max() < 1.2 * sizes[0]  # so a run's file is steps x its first line
    (board,) = (tmp_path / "tensorboard").iterdir()
    assert board.stat().st_size < 1.5 * sizes.sum()
    assert checkpoint.steps(tmp_path) == [STEPS - 25, STEPS]
    assert metrics.read(tmp_path / "metrics.jsonl")[-1]["nonfinite"]["total"] == 0


if __name__ == "__main__":
    cli.one_arena()  # as `densegrpo train` does
    print(json.dumps(run(Path(sys.argv[1]))))

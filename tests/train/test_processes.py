"""Several processes of one run, as on several hosts, each with two devices: what one process with all of the devices gives."""

import dataclasses
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from densegrpo_jax import calibrate, cli, flow, parallel
from densegrpo_jax.config import Parallel
from densegrpo_jax.parallel import processes
from densegrpo_jax.train import checkpoint, loop, metrics
from tests.train.test_mesh import config, same

STEPS, LEARNING_RATE = 3, cli.load_config("toy").optimizer.learning_rate
RUN = """
import functools, json, os, sys
from pathlib import Path
import jax
import numpy as np
from densegrpo_jax import parallel
from densegrpo_jax.config import Parallel
from densegrpo_jax.train import checkpoint
from tests.train.test_processes import calibrated, noise, train
settings, workdir, steps, fatal = json.loads(sys.argv[1])
jax.distributed.initialize = functools.partial(jax.distributed.initialize, heartbeat_timeout_seconds=10)  # not 100: who is killed is missed
parallel.join(Parallel(**settings))
if fatal and settings["process"] == fatal[2]:  # gets this signal before it saves this step
    save = checkpoint.save
    checkpoint.save = lambda config, state: (state.step == fatal[0] and os.kill(os.getpid(), fatal[1]), save(config, state))
train(Path(workdir), Parallel(**settings), steps)
if settings["processes"] > 2 and not fatal:
    calibrated(Path(workdir), Parallel(**settings))
found = noise(Parallel(**settings))
if parallel.primary():
    np.save(Path(workdir) / "noise.npy", found)
"""


def brightness(images, prompts, metadata):
    """In 256 steps, as rounding of a latent by its last digit may change one pixel by one step, and the reward should not tell."""
    return np.floor(np.asarray(images, np.float64).mean(axis=(1, 2, 3))) / 255


def train(workdir, settings, steps):
    loop.train(dataclasses.replace(config(workdir, settings, run={"steps": steps}), rewards=("own",)), extra_rewards={"own": brightness})


def calibrated(workdir, settings) -> str:
    """What a search of three iterations writes, with a number of trajectories that devices do not share evenly."""
    run = dataclasses.replace(config(workdir, settings), rewards=("own",))
    options = calibrate.Calibration(iterations=3, trajectories=14, average=2)
    return calibrate.calibrate(run, options, extra_rewards={"own": brightness}).read_text()


def noise(settings):
    mesh = parallel.make(settings)
    with jax.set_mesh(mesh):
        made = jax.jit(lambda ids: flow.step_noise(jax.random.key(7), 3, ids, 4, (8, 8, 1)))(parallel.over_rows(mesh, np.arange(16)))
        assert not made.is_fully_addressable or jax.process_count() == 1
        return parallel.to_host(made)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        return taken.getsockname()[1]


def run(workdir, count, shared, fatal=None, *, log, program=RUN, steps=STEPS):
    """Starts the processes with a new log; returns their exit codes."""
    log.write_text("")
    coordinator = f"localhost:{free_port()}"
    started = []
    for process in range(count):
        settings = {"coordinator": coordinator, "processes": count, "process": process, **shared}
        argument = json.dumps((settings, str(workdir), steps, fatal))
        with log.open("a") as file:
            environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
            started.append(
                subprocess.Popen([sys.executable, "-c", program, argument], stdout=file, stderr=subprocess.STDOUT, env=environment)
            )
    began = time.monotonic()
    try:
        return [process.wait(timeout=500) for process in started]
    finally:
        for process in started:
            process.kill()
        print(f"{count} processes: {time.monotonic() - began:.0f} s")


@pytest.mark.mesh
@pytest.mark.usefixtures("plain_dispatch")
@pytest.mark.parametrize(
    ("count", "shared", "interruptions"),
    [
        (2, {}, [(2, signal.SIGKILL, 1)]),
        pytest.param(2, {}, [(2, signal.SIGKILL, 0)], marks=pytest.mark.slow),  # the one where they meet
        pytest.param(
            4,
            {"fsdp": 2, "tensor": 4},
            [(1, signal.SIGTERM, 1), (3, signal.SIGKILL, 1)],
            marks=[pytest.mark.slow, pytest.mark.timeout(2400)],
        ),
    ],
)
def test_processes_agree_with_one_also_after_one_of_them_was_stopped_or_killed(tmp_path, count, shared, interruptions):
    workdir, log, alone = tmp_path / "run", tmp_path / "log", tmp_path / "alone"
    one = Parallel(devices=2 * count, **shared)
    train(alone, one, STEPS)
    for step, number, victim in interruptions:
        codes = run(workdir, count, shared, fatal=(step, number, victim), log=log)
        if number == signal.SIGKILL:
            assert codes[victim] == -number and all(codes), log.read_text()[-3000:]  # the others do not wait forever
            assert checkpoint.steps(workdir)[-1] == step - 1
        else:  # all of them finish the next step
            assert not any(codes) and checkpoint.steps(workdir)[-1] == step + 1, log.read_text()[-3000:]
            assert log.read_text().count(f"stopped after step {step + 1}") == 1
    assert run(workdir, count, shared, log=log) == [0] * count, log.read_text()[-3000:]
    # Sums over processes are taken in another order. Where a gradient is about Adam's eps, that shows in the update, not in the moments.
    same(alone, workdir, atol=1e-3 * LEARNING_RATE)
    np.testing.assert_array_equal(np.load(workdir / "noise.npy"), noise(one))
    assert [r["step"] for r in metrics.read(workdir / "metrics.jsonl")] == list(range(STEPS))
    assert len(list((workdir / "tensorboard").iterdir())) == 1 + len(interruptions)  # one a start, of the first process
    assert (workdir / "report.html").read_text().endswith("</html>")
    assert log.read_text().count(f"step {STEPS}/{STEPS}") == 1  # and it alone speaks
    assert log.read_text().count(f"{count} processes with {2 * count} devices are one run") == 1
    if count > 2:
        assert (workdir / "calibration" / "psi.json").read_text() == calibrated(alone, one)
        assert log.read_text().count("iteration 3/3") == 1


FOLDER = {
    "model": {"scan_unroll": 1},
    "sampling": {"num_steps": 3, "chunk": 8, "guidance_scale": 2.0},
    "prompts": {"per_step": 1, "group_size": 8},
    "objective": {"beta": 0.0},
    "evaluation": {"every": 0, "final_prompts": 0},
}
RUN_FOLDER = """
import json, sys
from pathlib import Path
from densegrpo_jax import parallel
from densegrpo_jax.config import Parallel
from tests.train.test_processes import train_folder
settings, workdir, steps, _ = json.loads(sys.argv[1])
parallel.join(Parallel(**settings))
train_folder(Path(workdir), Parallel(**settings), steps)
"""


def train_folder(workdir, settings, steps):
    sections = FOLDER | {"run": {"steps": steps}, "adapter": {"rank": 0}, "optimizer": {"learning_rate": 1e-5}}
    loop.train(config(workdir, settings, "scenes_preference", **sections))


@pytest.mark.slow
@pytest.mark.mesh
@pytest.mark.usefixtures("plain_dispatch")
def test_processes_share_a_model_folder_all_of_whose_weights_are_trained(tmp_path):
    """Text encoders, guidance, a scorer on the devices, and weights and moments that no process has whole, saved by both."""
    shared, workdir, log = {"fsdp": 4, "encoders": "host"}, tmp_path / "run", tmp_path / "log"
    for steps in (1, 2):  # the second start reads what both have saved
        assert run(workdir, 2, shared, log=log, program=RUN_FOLDER, steps=steps) == [0, 0], log.read_text()[-3000:]
    train_folder(tmp_path / "alone", Parallel(devices=4, **shared), 2)
    same(tmp_path / "alone", workdir, rtol=5e-4, atol=1e-7)


RUN_APART = """
import json, sys
from pathlib import Path
from densegrpo_jax import parallel
from densegrpo_jax.config import Parallel
from tests.train.test_processes import train
settings, workdir, steps, _ = json.loads(sys.argv[1])
parallel.join(Parallel(**settings))
train(Path(f"{workdir}{settings['process']}"), Parallel(**settings), steps)
"""


@pytest.mark.mesh
def test_a_work_folder_that_not_all_see_is_refused_at_once(tmp_path):
    log = tmp_path / "log"
    assert all(run(tmp_path / "run", 2, {}, log=log, program=RUN_APART)), log.read_text()[-3000:]
    said = re.findall(r"ValueError: run.workdir = \S+ is not the same folder for all processes: several hosts need one", log.read_text())
    assert len(said) == 2, log.read_text()[-3000:]
    assert not list(tmp_path.glob("run*/metrics.jsonl"))


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, False),  # a shell within a job, not one of its tasks
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "a", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "a", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, True),
    ],
)
def test_one_box_is_never_taken_for_a_cluster(environment, several):
    assert bool(processes._tasks(environment)) == several


def test_a_host_of_a_cloud_tpu_slice_knows_by_its_metadata(tmp_path):
    class Metadata(http.server.BaseHTTPRequestHandler):
        said = "unused:unused:10.0.0.1,unused:unused:10.0.0.2"

        def do_GET(self):
            found = self.path.endswith("/instance/attributes/worker-network-endpoints") and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(self.said.encode())

        def log_message(self, *_):
            pass

    (tmp_path / "accel0").touch()
    there, none = (str(tmp_path / "accel*"),), (str(tmp_path / "vfio*"),)
    with http.server.HTTPServer(("localhost", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"localhost:{server.server_port}"
        assert processes._tpu_hosts(there, address) == "a Cloud TPU slice of 2 hosts"
        assert processes._tpu_hosts(none, address) is None  # no TPUs: not asked
        Metadata.said = "unused:unused:10.0.0.1"
        assert processes._tpu_hosts(there, address) is None
        server.shutdown()
    assert processes._tpu_hosts(there, f"localhost:{free_port()}") is None  # nobody answers


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--parallel.coordinator here", "write HOST:PORT"),
        ("--parallel.coordinator here:1", "give parallel.processes and parallel.process too"),
        ("--parallel.coordinator here:1 --parallel.processes 2 --parallel.process 2", "choose 0 to 1"),
        ("--parallel.processes 2", "goes with parallel.coordinator"),
    ],
)
def test_processes_that_cannot_meet_are_refused(arguments, reason, tmp_path, capsys):
    assert cli.main(["train", "toy", "--run.workdir", str(tmp_path / "run"), *arguments.split()]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_who_waits_for_processes_that_do_not_come_says_so_and_ends(tmp_path):
    program = "import sys; from densegrpo_jax.parallel import processes; processes.SAY, processes.LIMIT = 1.0, 3.0\n"
    program += "from densegrpo_jax.cli import main; sys.exit(main())"
    meeting = ["--parallel.coordinator", f"localhost:{free_port()}", "--parallel.processes", "2", "--parallel.process", "0"]
    arguments = ["train", "toy", "--run.workdir", str(tmp_path / "run"), *meeting]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr  # not 2, which is bad input
    assert "process 0 of 2" in done.stderr and "awaited since 1 s; start the same command with parallel.process = 0 to 1" in done.stderr
    assert "did not come within 3 s; giving up" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_where_there_is_no_cluster_it_says_so(tmp_path):  # jax joins before it has looked for devices, so not in this process
    program = "import sys; from densegrpo_jax.cli import main; sys.exit(main())"
    arguments = ["train", "toy", "--run.workdir", str(tmp_path / "run"), "--parallel.coordinator", "cluster"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and "JAX finds no cluster here" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()

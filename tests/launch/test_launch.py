"""The launch files: what they would run, with the cloud's commands replaced by ones that write down how they were called."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch", ROOT / "benchmarks" / "gpu_check.sh"])
yaml = pytest.importorskip("yaml")


@pytest.fixture
def cloud(tmp_path):
    """Runs a script with a fake gcloud, kubectl, srun, scontrol and git in front of the real ones; returns (process, calls)."""
    bin = tmp_path / "bin"
    bin.mkdir()
    log = tmp_path / "calls"
    for name in ("gcloud", "kubectl", "srun", "scontrol"):
        tool = bin / name
        tool.write_text(
            f'#!{sys.executable}\nimport json, sys\nopen({str(log)!r}, "a").write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")\n'
        )
        tool.chmod(0o755)

    def call(script, *arguments, env=None):
        ours = ("DENSEGRPO_VENV", "XLA_CLIENT_MEM_FRACTION", "LIBTPU_INIT_ARGS", "HF_TOKEN")  # which change what is run
        inherited = {name: value for name, value in os.environ.items() if name not in ours}
        environment = {**inherited, "PATH": f"{bin}:{os.environ['PATH']}", **(env or {})}
        done = subprocess.run(
            ["bash", LAUNCH / script, *arguments], capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL
        )
        return done, [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    return call


def printed(done):
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash_and_clean(script):
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "-x", "-P", ROOT, script], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout


# --- TPU VM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "kind", "image"),
    [
        ("v5e:4x4", "v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v6e:2x4", "v6e-8", "v2-alpha-tpuv6e"),
        ("v5p:2x2x2", "v5p-16", "v2-alpha-tpuv5"),  # counted in cores
        ("v4:2x2x1", "v4-8", "tpu-ubuntu2204-base"),
    ],
)
def test_tpu_slices_are_asked_for_by_the_name_that_plan_takes(cloud, topology, kind, image):
    _, calls = cloud("tpu_vm.sh", "create", "run1", "--topology", topology, "--spot", "--zone", "us-west1-c")
    assert calls == [
        ["gcloud", "compute", "tpus", "queued-resources", "create", "run1", "--node-id=run1", "--zone=us-west1-c",
         f"--accelerator-type={kind}", f"--runtime-version={image}", "--spot"]
    ]  # fmt: skip


def test_tpu_runs_start_on_all_hosts_with_a_log_each(cloud):
    _, calls = cloud("tpu_vm.sh", "run", "run1", "sd35_medium_pickscore", "--run.workdir", "../shared/a run", env={"HF_TOKEN": "secret"})
    (call,) = calls
    assert call[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "run1"] and "--worker=all" in call
    command = call[-1].removeprefix("--command=")
    subprocess.run(["bash", "-n", "-c", command], check=True)
    started = "HF_TOKEN=secret setsid nohup .venv/bin/densegrpo train sd35_medium_pickscore --parallel.coordinator cluster "
    assert started + "--run.workdir ../shared/a\\ run" in command
    assert ">>logs/$(hostname).log" in command and "echo $! >logs/pid" in command


def test_tpu_setup_brings_its_own_python_and_the_last_commit_to_every_host(cloud):
    done, calls = cloud("tpu_vm.sh", "setup", "run1", "--bucket", "my-bucket", "--dry-run")
    lines = printed(done)
    assert calls == [] and lines[0][:2] == ["git", "archive"]
    assert lines[1][4] == "scp" and "--worker=all" in lines[1]
    install, mount = (line[-1].removeprefix("--command=") for line in lines[2:])
    for command in (install, mount):
        subprocess.run(["bash", "-n", "-c", command], check=True)
    assert "uv venv --allow-existing --python 3.12" in install and "--editable '.[tpu,ocr]'" in install
    assert "gcsfuse --implicit-dirs --rename-dir-limit=100000 my-bucket ~/shared" in mount


def test_tpu_other_actions(cloud):
    for action, expected in {"status": "describe", "logs": "tail -n 20", "stop": "kill -TERM", "delete": "--force"}.items():
        done, _ = cloud("tpu_vm.sh", action, "run1", "--dry-run")
        assert done.returncode == 0 and expected in done.stdout
    done, _ = cloud("tpu_vm.sh", "fetch", "run1", "runs/x", "--dry-run")
    assert "run1:densegrpo/runs/x . --worker=0" in done.stdout
    done, _ = cloud("tpu_vm.sh", "run", "run1", "cfg", "--dry-run", env={"HF_TOKEN": "secret"})
    assert "secret" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tpu_vm.sh", "start", "x"], "unknown action start"),
        (["tpu_vm.sh", "create", "x", "--topology", "v5e-16"], "such as v5e:4x4"),
        (["tpu_vm.sh", "run", "x", "--run.steps", "3"], "needs a config"),
        (["tpu_vm.sh", "logs"], "needs the name"),
        (["gke.sh", "x", "--topology", "v5e:16", "--image", "i", "--bucket", "b", "cfg"], "such as v5e:4x4"),
        (["gke.sh", "x", "--topology", "v5e:4x4", "cfg"], "--image and --bucket are needed"),
        (["gke.sh", "Big_Name", "--topology", "v5e:4x4", "--image", "i", "--bucket", "b", "cfg"], "small letters"),
        (["gpu.sh", "--cuda", "11", "cfg"], "12 and 13 are possible"),
        (["gpu.sh", "--dry-run"], "name a config"),
        (["slurm.sbatch", "--run.steps", "3"], "name a config"),
    ],
)
def test_wrong_calls_say_what_is_missing(cloud, arguments, message):
    done, calls = cloud(*arguments)
    assert done.returncode != 0 and message in done.stderr and calls == []


# --- GKE ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "accelerator", "hosts", "chips"),
    [
        ("v5e:4x4", "tpu-v5-lite-podslice", 4, 4),
        ("v6e:2x4", "tpu-v6e-slice", 1, 8),
        ("v6e:16x16", "tpu-v6e-slice", 64, 4),
        ("v5p:2x2x2", "tpu-v5p-slice", 2, 4),
    ],
)
def test_jobset_has_a_pod_for_every_host(cloud, topology, accelerator, hosts, chips):
    arguments = [
        "--topology",
        topology,
        "--image",
        "repo/image:1",
        "--bucket",
        "bk",
        "--dry-run",
        "flux_dev_pickscore",
        "--a",
        'say "x"|&y',
    ]
    done, _ = cloud("gke.sh", "run1", *arguments)
    job = yaml.safe_load(done.stdout)["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert job["parallelism"] == job["completions"] == hosts and job["backoffLimit"] == 0
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology.partition(":")[2],
    }
    assert container["resources"]["limits"] == container["resources"]["requests"] == {"google.com/tpu": chips}
    assert container["args"] == ["flux_dev_pickscore", "--a", 'say "x"|&y', "--run.workdir", "/shared/run1"]
    assert container["image"] == "repo/image:1" and container["command"] == ["/densegrpo/launch/worker.sh"]
    assert pod["volumes"][0]["csi"]["volumeAttributes"]["bucketName"] == "bk" and not re.search("@[A-Z]+@", done.stdout)


def test_jobset_is_applied(cloud):
    done, calls = cloud("gke.sh", "run1", "--topology", "v5e:4x4", "--image", "i", "--bucket", "b", "toy")
    assert calls == [["kubectl", "apply", "-f", "-"]] and "kubectl logs" in done.stdout


# --- a worker that is taken away ---------------------------------------------------------------------------------------

TRAINER = f"""#!{sys.executable}
import signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("ready", sys.argv[1:], flush=True)
end = time.time() + 20
while not asked and time.time() < end and "quick" not in sys.argv:
    time.sleep(0.02)
print("saved", flush=True)
sys.exit(7 if "wrong" in sys.argv else 0)
"""


@pytest.fixture
def trainer(tmp_path):
    path = tmp_path / "trainer"
    path.write_text(TRAINER)
    path.chmod(0o755)
    return path


def terminated(command, env):
    """Runs a command until it is ready, sends SIGTERM to it alone, and returns its exit code and output."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})
    first = process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=20)
    return process.returncode, first + rest


def test_a_worker_passes_sigterm_on_and_asks_to_be_started_again(trainer):
    code, out = terminated(["bash", LAUNCH / "worker.sh", "cfg", "--a", "b c"], {"DENSEGRPO": str(trainer)})
    assert code == 143 and "['train', 'cfg', '--a', 'b c']" in out and out.endswith("saved\n")


@pytest.mark.parametrize(("words", "code"), [(["quick"], 0), (["quick", "wrong"], 7)])
def test_a_worker_that_ends_by_itself_has_the_trainers_exit_code(trainer, words, code):
    done = subprocess.run(["bash", LAUNCH / "worker.sh", *words], capture_output=True, env={**os.environ, "DENSEGRPO": str(trainer)})
    assert done.returncode == code


# --- SLURM, one box, SkyPilot ------------------------------------------------------------------------------------------


def test_slurm_starts_one_process_a_gpu(cloud):
    done, calls = cloud("slurm.sbatch", "flux_dev_pickscore", "--run.workdir", "/shared/x")
    assert done.returncode == 0, done.stderr
    assert calls == [
        ["srun", "--kill-on-bad-exit=1", "--label", ".venv/bin/densegrpo", "train", "flux_dev_pickscore", "--run.workdir", "/shared/x"]
    ]
    options = [line.split(maxsplit=1)[1] for line in (LAUNCH / "slurm.sbatch").read_text().splitlines() if line.startswith("#SBATCH")]
    assert "--ntasks-per-node=8" in options and "--gpus-per-node=8" in options and "--signal=B:TERM@300" in options
    done, _ = cloud("slurm.sbatch", "--dry-run", "toy")
    assert done.stdout.splitlines()[-1] == "srun --kill-on-bad-exit=1 --label .venv/bin/densegrpo train toy"


def test_slurm_saves_and_queues_again_when_time_is_over(cloud, trainer, tmp_path):
    (tmp_path / "bin" / "srun").write_text(TRAINER)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    code, out = terminated(["bash", LAUNCH / "slurm.sbatch", "toy"], {"PATH": path, "SLURM_JOB_ID": "17"})
    assert code == 0 and "saved\n" in out
    assert json.loads((tmp_path / "calls").read_text()) == ["scontrol", "requeue", "17"]


def test_one_box(cloud):
    done, _ = cloud("gpu.sh", "--cuda", "13", "--dry-run", "sd35_medium_pickscore", "--sampling.chunk", "32")
    assert ".[cuda13]" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        "env XLA_CLIENT_MEM_FRACTION=0.92 .venv/bin/densegrpo train sd35_medium_pickscore --sampling.chunk 32"
    )


def test_the_gpu_check_tries_everything_on_the_gpu(cloud):
    done, _ = cloud("../benchmarks/gpu_check.sh", "--dry-run", "out")
    words = [line for line in printed(done) if line[0] not in ("#", "==")]
    tests, quickstart, full_size = words[1:4]
    assert "JAX_PLATFORMS=cuda,cpu" in tests and "tests/models/test_attention.py" in tests  # else conftest takes CPUs
    assert all((ROOT / path).exists() for path in tests if path.startswith("tests/"))
    assert "JAX_PLATFORMS=cuda" in quickstart and "launch/quickstart.sh" in quickstart
    assert full_size[-2:] == ["--json", "out/full_size.json"]


def test_skypilot_task_runs_the_worker_with_its_options():
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert task["envs"]["CONFIG"] == "sd35_medium_pickscore" and task["resources"]["accelerators"] == "tpu-v6e-8"
    for step in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", task[step]], check=True)
    assert "launch/worker.sh" in task["run"] and "/shared" in task["file_mounts"]

"""The launch files: what they would run, with the cloud's commands replaced by ones that write down how they were called."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch", ROOT / "benchmarks" / "gpu_check.sh"])
yaml = pytest.importorskip("yaml")


@pytest.fixture
def cloud(tmp_path):
    """Runs a script with a fake gcloud, kubectl, sky, srun, scancel and scontrol in front of the real ones; returns (process, calls)."""
    bin = tmp_path / "bin"
    bin.mkdir()
    log = tmp_path / "calls"
    for name in ("gcloud", "kubectl", "sky", "srun", "scancel", "scontrol"):
        tool = bin / name
        tool.write_text(
            f'#!{sys.executable}\nimport json, sys\nopen({str(log)!r}, "a").write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")\n'
        )
        tool.chmod(0o755)

    def call(script, *arguments, env=None):
        ours = ("DENSEGRPO_VENV", "XLA_CLIENT_MEM_FRACTION", "LIBTPU_INIT_ARGS", "HF_TOKEN", "SLURM_CPUS_PER_TASK")  # change what is run
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


@pytest.mark.parametrize("script", ["tpu_vm.sh create", "gke.sh", "skypilot.sh"])
@pytest.mark.parametrize(
    ("topology", "slices"),
    [
        *((t, "of v5e choose one of 1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16") for t in ("v5e:3x3", "v5e:4x2", "v5e:16x32", "v5e:2x2x2")),
        ("v6e:48x1", "of v6e choose one of 1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"),
        *((t, "of v4 choose one of 2x2x1 2x2x2 2x2x4 2x4x4, or three multiples of 4") for t in ("v4:4x4", "v4:1x1x1", "v4:4x4x6")),
        *((t, "of v5p choose one of 2x2x1 2x2x2 2x2x4 2x4x4, or three multiples of 4") for t in ("v5p:8x4x4", "v5p:2x4x8", "v5p:4x4x4x4")),
    ],
)
def test_slices_that_there_are_not_are_refused_with_those_that_there_are(cloud, script, topology, slices):
    name, *action = script.split()
    options = [] if action else ["--image", "i", "--bucket", "b", "cfg"] if name == "gke.sh" else ["--bucket", "b", "cfg"]
    done, calls = cloud(name, *action, "x", "--topology", topology, *options)
    assert done.returncode == 2 and calls == [] and f"--topology {topology}: there is no such slice; {slices}" in done.stderr


@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:16x16", "v4:2x2x1", "v4:2x4x4", "v5p:4x4x4", "v5p:4x8x12", "v5p:16x16x24"])
def test_slices_that_there_are_are_asked_for(cloud, topology):
    done, calls = cloud("tpu_vm.sh", "create", "x", "--topology", topology)
    assert done.returncode == 0 and len(calls) == 1, done.stderr


def test_tpu_runs_start_on_all_hosts_with_a_log_each(cloud):
    _, calls = cloud("tpu_vm.sh", "run", "run1", "sd35_medium_pickscore", "--run.workdir", "../shared/a run", env={"HF_TOKEN": "secret"})
    (call,) = calls
    assert call[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "run1"] and "--worker=all" in call
    command = call[-1].removeprefix("--command=")
    subprocess.run(["bash", "-n", "-c", command], check=True)
    started = "HF_TOKEN=secret setsid nohup .venv/bin/densegrpo train sd35_medium_pickscore --parallel.coordinator cluster "
    assert started + "--run.workdir ../shared/a\\ run" in command
    assert ">>logs/$(hostname).log" in command and "echo $! >logs/pid" in command


def test_tpu_runs_get_libtpus_flags(cloud):
    done, _ = cloud("tpu_vm.sh", "run", "x", "cfg", "--dry-run", env={"LIBTPU_INIT_ARGS": "--a=1 --b"})
    assert "(LIBTPU_INIT_ARGS=--a=1\\ --b setsid" in printed(done)[0][-1]


@pytest.mark.parametrize("options", [["--run.workdir", "../shared/x"], ["--run.workdir=../shared/x"], ["--run.steps", "3"], []])
def test_a_tpu_run_without_a_work_folder_is_warned_that_all_hosts_must_see_it(cloud, options):
    done, calls = cloud("tpu_vm.sh", "run", "x", "cfg", *options)
    warned = "warning: no --run.workdir: on several hosts it must be a folder that all see" in done.stderr
    assert done.returncode == 0 and len(calls) == 1 and warned == (not any("workdir" in option for option in options))


def test_tpu_setup_brings_its_own_python_and_the_last_commit_to_every_host(cloud):
    done, calls = cloud("tpu_vm.sh", "setup", "run1", "--bucket", "my-bucket", "--dry-run")
    lines = printed(done)
    assert calls == [] and lines[0][:2] == ["git", "archive"]
    assert lines[1][4] == "scp" and "--worker=all" in lines[1]
    install, mount = (line[-1].removeprefix("--command=") for line in lines[2:])
    for command in (install, mount):
        subprocess.run(["bash", "-n", "-c", command], check=True)
    assert "uv venv --allow-existing --python 3.12" in install and "--editable '.[tpu,ocr]'" in install
    seen_at_once = "--metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0"
    assert f"gcsfuse --implicit-dirs --rename-dir-limit=100000 {seen_at_once} my-bucket ~/shared" in mount


@pytest.fixture
def repository(tmp_path):
    """A copy of the launch files with prompts beside them that git does not know, as a clone of Flow-GRPO holds them."""
    root = tmp_path / "repository"
    shutil.copytree(LAUNCH, root / "launch")
    for path in ("flow_grpo/.git/config", "flow_grpo/dataset/pickscore_sfw/train.txt", "flow_grpo/dataset/ocr/train.txt", "more/a b.txt"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("a red ball\n")
    return root


def test_tpu_setup_brings_prompts_to_the_same_place_on_every_host(cloud, repository, tmp_path):
    arguments = ["setup", "run1", "--data", "flow_grpo", "--data", "more/a b.txt", "--dry-run"]
    done, _ = cloud(repository / "launch/tpu_vm.sh", *arguments)
    archived, packed, code, data, unpacked = printed(done)
    assert archived[:2] == ["git", "archive"] and packed[0] == "tar"
    assert code[4:7] == ["scp", "/tmp/densegrpo.tar.gz", "run1:densegrpo.tar.gz"] and code[-1] == "--worker=all"
    assert data[4:7] == ["scp", "/tmp/densegrpo-data.tar.gz", "run1:densegrpo-data.tar.gz"] and data[-1] == "--worker=all"
    # What the two commands would do, with the host's home a folder here.
    home, here = tmp_path / "home", {**os.environ, "HOME": str(tmp_path / "home")}
    home.mkdir()
    archive = home / "densegrpo-data.tar.gz"
    subprocess.run([word.replace("/tmp/densegrpo-data.tar.gz", str(archive)) for word in packed], check=True, cwd=repository)
    (repository / "setup.py").touch()
    subprocess.run(["tar", "-czf", home / "densegrpo.tar.gz", "setup.py"], check=True, cwd=repository)
    unpack = unpacked[-1].removeprefix("--command=").partition(" && cd densegrpo")[0]
    subprocess.run(["bash", "-c", unpack], check=True, cwd=home, env=here)
    there = {str(path.relative_to(home / "densegrpo")) for path in (home / "densegrpo").rglob("*") if path.is_file()}
    assert there == {"setup.py", "more/a b.txt", "flow_grpo/dataset/pickscore_sfw/train.txt", "flow_grpo/dataset/ocr/train.txt"}


@pytest.mark.parametrize(
    ("folder", "message"),
    [("flow_grpo/dataset/none", "it is not in "), ("/tmp", "name it from the repository"), ("../repository/more", "name it from")],
)
def test_tpu_setup_refuses_prompts_that_would_not_be_found(cloud, repository, folder, message):
    done, calls = cloud(repository / "launch/tpu_vm.sh", "setup", "run1", "--data", folder)
    assert done.returncode == 2 and f"--data {folder}: {message}" in done.stderr and calls == []


def test_tpu_other_actions(cloud):
    for action, expected in {"status": "describe", "logs": "tail -n 20", "stop": "kill -TERM", "delete": "--force"}.items():
        done, _ = cloud("tpu_vm.sh", action, "run1", "--dry-run")
        assert done.returncode == 0 and expected in done.stdout
    done, _ = cloud("tpu_vm.sh", "fetch", "run1", "runs/x", "--dry-run")
    assert "run1:densegrpo/runs/x . --worker=0" in done.stdout
    done, _ = cloud("tpu_vm.sh", "run", "run1", "cfg", "--dry-run", env={"HF_TOKEN": "secret"})
    assert "HF_TOKEN=..." in done.stdout and "secret" not in done.stdout


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
        (["skypilot.sh", "x", "--gpus", "H100:8", "cfg"], "--bucket is needed"),
        (["skypilot.sh", "x", "--bucket", "b", "cfg"], "give --topology, such as v6e:2x4, or --gpus"),
        (["skypilot.sh", "x", "--bucket", "b", "--gpus", "H100:8", "--topology", "v6e:2x4", "cfg"], "give --topology, such as"),
        (["skypilot.sh", "x", "--bucket", "b", "--gpus", "8", "cfg"], "such as H100:8"),
        (["skypilot.sh", "x", "--bucket", "b", "--topology", "v6e:2x4", "--nodes", "2", "cfg"], "goes with --gpus"),
        (["skypilot.sh", "x", "--bucket", "b", "--gpus", "H100:8"], "name a config"),
        (["gpu.sh", "--cuda", "11", "cfg"], "12 and 13 are possible"),
        (["gpu.sh", "--dry-run"], "name a config"),
        (["gpu.sh", "cfg", "--dry-run"], "--dry-run stands before the config"),
        (
            ["gke.sh", "x", "--topology", "v5e:4x4", "--image", "i", "--bucket", "b", "cfg", "--dry-run"],
            "--dry-run stands before the config",
        ),
        (["skypilot.sh", "x", "--gpus", "H100:8", "--bucket", "b", "cfg", "--dry-run"], "--dry-run stands before the config"),
        (["tpu_vm.sh", "create", "x", "--topology", "v5e:4x4", "--sopt"], "unknown option --sopt"),
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
        ("v5e:1x1", "tpu-v5-lite-podslice", 1, 1),
        ("v6e:2x2", "tpu-v6e-slice", 1, 4),
        ("v6e:2x4", "tpu-v6e-slice", 1, 8),
        ("v4:2x2x4", "tpu-v4-podslice", 4, 4),
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
    volume = pod["volumes"][0]["csi"]["volumeAttributes"]
    assert volume["bucketName"] == "bk" and not re.search("@[A-Z]+@", done.stdout)
    assert {"metadata-cache:ttl-secs:0", "metadata-cache:negative-ttl-secs:0"} <= set(volume["mountOptions"].split(","))
    assert [variable["name"] for variable in container["env"]] == ["HF_TOKEN"]


def test_pods_get_libtpus_flags(cloud):
    flags = '--a=1 --b="c|d&e"'
    arguments = ["--topology", "v6e:2x4", "--image", "i", "--bucket", "b", "--dry-run", "toy"]
    done, _ = cloud("gke.sh", "x", *arguments, env={"LIBTPU_INIT_ARGS": flags})
    pod = yaml.safe_load(done.stdout)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert {"name": "LIBTPU_INIT_ARGS", "value": flags} in pod["containers"][0]["env"]


def test_what_would_fail_again_is_not_started_again(cloud):
    done, _ = cloud("gke.sh", "x", "--topology", "v6e:2x4", "--image", "i", "--bucket", "b", "--dry-run", "toy")
    spec = yaml.safe_load(done.stdout)["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    # The trainer's codes for bad input and for a run that stopped itself; not 1 and 143, an interrupted one.
    on_codes = {"containerName": container["name"], "operator": "In", "values": [2, 3]}
    assert job["podFailurePolicy"] == {"rules": [{"action": "FailJob", "onExitCodes": on_codes}]}
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # else Kubernetes takes no podFailurePolicy
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])  # JobSet refuses other names
    assert spec["failurePolicy"]["maxRestarts"] > 0


@pytest.mark.parametrize("prompts", ["flow_grpo/dataset/pickscore_sfw/train.txt", "data/geneval/train_metadata.jsonl"])
def test_the_image_has_the_prompts(prompts):
    assert "COPY . ." in (LAUNCH / "Dockerfile").read_text()
    left_out = (LAUNCH / "Dockerfile.dockerignore").read_text().split()
    parts = prompts.split("/")
    folders = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    assert not any(fnmatch(folder, pattern) for folder in folders for pattern in left_out)
    assert any(fnmatch("flow_grpo/.git", pattern) for pattern in left_out)


def test_jobset_is_applied(cloud):
    done, calls = cloud("gke.sh", "run1", "--topology", "v5e:4x4", "--image", "i", "--bucket", "b", "toy")
    assert calls == [["kubectl", "apply", "-f", "-"]] and "kubectl logs" in done.stdout
    assert " -c train " in done.stdout  # the bucket's sidecar has logs too


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


def told(command, env, *signals):
    """Runs a command until it is ready, sends signals to it alone, and returns its exit code and output.

    Args:
      signals: signal numbers, and functions that are called between them.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env})
    first = process.stdout.readline()
    for number in signals:
        time.sleep(0.1)
        number() if callable(number) else process.send_signal(number)
    rest, _ = process.communicate(timeout=20)
    return process.returncode, first + rest


def test_a_worker_passes_sigterm_on_and_asks_to_be_started_again(trainer):
    code, out = told(["bash", LAUNCH / "worker.sh", "cfg", "--a", "b c"], {"DENSEGRPO": str(trainer)}, signal.SIGTERM)
    assert code == 143 and "['train', 'cfg', '--a', 'b c']" in out and out.endswith("saved\n")


def test_a_worker_that_goes_wrong_after_sigterm_says_so(trainer):
    code, _ = told(["bash", LAUNCH / "worker.sh", "cfg", "wrong"], {"DENSEGRPO": str(trainer)}, signal.SIGTERM)
    assert code == 7


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
    assert "--ntasks-per-node=8" in options and "--gpus-per-node=8" in options and "--requeue" in options
    assert "--signal=B:USR1@300" in options  # to the shell alone: the trainer would die of it
    done, _ = cloud("slurm.sbatch", "--dry-run", "toy")
    assert done.stdout.splitlines()[-1] == "srun --kill-on-bad-exit=1 --label .venv/bin/densegrpo train toy"


@pytest.fixture
def slurm(cloud, trainer, tmp_path):
    """Runs the batch script as job 17 with one task; srun and scancel do with signals what Slurm's do. Returns (code, output, calls)."""
    tools = {
        # srun passes no SIGTERM on: "forcing job termination", its tasks are killed.
        "srun": """
            task = subprocess.Popen(sys.argv[3:])
            signal.signal(signal.SIGTERM, lambda *_: task.kill())
            (here / "task").write_text(str(task.pid))
            code = task.wait()
            sys.exit(code if code >= 0 else 128 - code)
        """,
        # A named signal goes to the steps of a job; 17.0 is there until the first requeue only.
        "scancel": """
            log()
            if sys.argv[1:] != ["--signal=TERM", "17"]:
                sys.exit("scancel: error: no such step")
            os.kill(int((here / "task").read_text()), signal.SIGTERM)
            time.sleep(0.5)  # the task, and srun, may end first
        """,
    }
    for name, body in tools.items():
        head = f"""\
            #!{sys.executable}
            import json, os, signal, subprocess, sys, time
            from pathlib import Path
            here = Path({str(tmp_path)!r})
            def log():
                open(here / "calls", "a").write(json.dumps([{name!r}, *sys.argv[1:]]) + chr(10))
        """
        (tmp_path / "bin" / name).write_text(textwrap.dedent(head) + textwrap.dedent(body))
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "densegrpo").symlink_to(trainer)

    def call(*words, signals=()):
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        env = {"PATH": path, "SLURM_JOB_ID": "17", "DENSEGRPO_VENV": str(venv)}
        code, out = told(["bash", LAUNCH / "slurm.sbatch", "toy", *words], env, *signals)
        log = tmp_path / "calls"
        return code, out, [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    return call


def test_slurm_saves_and_queues_again_when_time_is_over(slurm):
    code, out, calls = slurm(signals=[signal.SIGUSR1])
    assert calls == [["scancel", "--signal=TERM", "17"], ["scontrol", "requeue", "17"]]
    assert code == 0 and out.endswith("saved\nsaved; queueing again\n")


def test_slurm_does_not_queue_again_what_was_not_saved(slurm):
    code, out, calls = slurm("wrong", signals=[signal.SIGUSR1])
    assert calls == [["scancel", "--signal=TERM", "17"]] and code == 7
    assert "srun ended with status 7: not queued again" in out


def test_slurm_leaves_it_to_slurm_to_queue_again_what_was_preempted(slurm, tmp_path):
    def tell_task():  # as Slurm does
        os.kill(int((tmp_path / "task").read_text()), signal.SIGTERM)

    code, out, calls = slurm(signals=[signal.SIGTERM, tell_task])
    assert (code, calls) == (0, []) and out.endswith("saved\n")


@pytest.mark.parametrize(("words", "expected"), [(["quick"], 0), (["quick", "wrong"], 7)])
def test_a_slurm_job_that_ends_by_itself_has_the_trainers_exit_code(slurm, words, expected):
    code, _, calls = slurm(*words)
    assert (code, calls) == (expected, [])


def test_slurm_tasks_get_the_cores_of_the_job(cloud, tmp_path):
    (tmp_path / "bin" / "srun").write_text("#!/usr/bin/env bash\necho ${SRUN_CPUS_PER_TASK:-none}\n")
    assert cloud("slurm.sbatch", "toy", env={"SLURM_CPUS_PER_TASK": "8"})[0].stdout == "8\n"
    assert cloud("slurm.sbatch", "toy")[0].stdout == "none\n"


def test_one_box(cloud):
    done, _ = cloud("gpu.sh", "--cuda", "13", "--dry-run", "sd35_medium_pickscore", "--sampling.chunk", "32")
    assert ".[cuda13,ocr]" in done.stdout
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


def sky_task(cloud, *arguments, env=None):
    """(the task, the command) of a dry run."""
    done, calls = cloud("skypilot.sh", "run1", *arguments, "--bucket", "bk", "--dry-run", "cfg:v6e-2x4", "--a", "b c|&'$x", env=env)
    assert done.returncode == 0 and calls == [], done.stderr
    return yaml.safe_load(done.stdout), shlex.split(done.stdout.splitlines()[-1].removeprefix("# "))


def test_skypilot_takes_a_slice_by_the_name_that_plan_takes(cloud):
    task, command = sky_task(cloud, "--topology", "v5e:2x4")
    assert task["resources"] == {
        "accelerators": "tpu-v5litepod-8",
        "accelerator_args": {"tpu_vm": True, "runtime_version": "v2-alpha-tpuv5-lite"},
        "use_spot": False,
    }
    assert task["name"] == "run1" and task["num_nodes"] == 1 and "[tpu,ocr]" in task["setup"]
    assert task["file_mounts"]["/shared"] == {"source": "gs://bk", "mode": "MOUNT"} and task["workdir"] == "."
    assert command[:4] == ["sky", "launch", "--cluster", "run1"] and command[-1].endswith("densegrpo-run1.yaml")
    assert task["envs"] == task["secrets"] == {} and "--secret" not in command


def test_skypilot_on_gpus_asks_for_no_tpu(cloud):
    task, command = sky_task(cloud, "--gpus", "H100:8", "--nodes", "2", "--spot", "--managed")
    assert task["resources"] == {"accelerators": "H100:8", "use_spot": True} and task["num_nodes"] == 2
    assert "[cuda12,ocr]" in task["setup"] and "tpu" not in json.dumps(task)
    assert command[:5] == ["sky", "jobs", "launch", "--name", "run1"]


def test_skypilot_passes_tokens_and_flags_on(cloud):
    env = {"HF_TOKEN": "secret", "LIBTPU_INIT_ARGS": '--a=1 --b="c"'}
    task, command = sky_task(cloud, "--topology", "v6e:2x4", env=env)
    assert task["envs"] == {"LIBTPU_INIT_ARGS": env["LIBTPU_INIT_ARGS"]}
    assert task["secrets"] == {"HF_TOKEN": None} and command[-3:-1] == ["--secret", "HF_TOKEN"]  # its value is not written anywhere


@pytest.mark.parametrize("nodes", [1, 2])
def test_skypilot_runs_the_worker_with_its_options(cloud, trainer, tmp_path, nodes):
    task, _ = sky_task(cloud, "--gpus", "H100:8")
    for path in (tmp_path / "launch", tmp_path / ".venv/bin"):
        path.mkdir(parents=True)
    (tmp_path / "launch/worker.sh").symlink_to(LAUNCH / "worker.sh")
    (tmp_path / ".venv/bin/densegrpo").write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    (tmp_path / ".venv/bin/densegrpo").chmod(0o755)
    env = {"SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1"}
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)
    done = subprocess.run(["bash", "-c", task["run"]], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **env})
    several = ["--parallel.coordinator", "10.0.0.1:8476", "--parallel.processes", "2", "--parallel.process", "1"]
    expected = ["train", "cfg:v6e-2x4", "--a", "b c|&'$x", "--run.workdir", "/shared/run1", *(several if nodes > 1 else [])]
    assert json.loads(done.stdout) == expected, done.stderr


def test_skypilot_launches_the_task(cloud, tmp_path):
    done, calls = cloud("skypilot.sh", "run1", "--gpus", "H100:8", "--bucket", "bk", "toy", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0 and calls == [["sky", "launch", "--cluster", "run1", f"{tmp_path}/densegrpo-run1.yaml"]]
    assert yaml.safe_load((tmp_path / "densegrpo-run1.yaml").read_text())["name"] == "run1"


# --- the guide ---------------------------------------------------------------------------------------------------------


def test_the_guide_s_commands_are_ones_that_the_scripts_take(cloud, repository):
    guide = (ROOT / "docs" / "launching.md").read_text()
    blocks = "\n".join(re.findall("```bash\n(.*?)```", guide, re.DOTALL)).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in blocks.splitlines()]
    commands = [words[words.index("bash") + 1 :] for words in lines if "bash" in words]
    assert {Path(words[0]).name for words in commands} >= {"gpu.sh", "tpu_vm.sh", "gke.sh", "skypilot.sh"}
    for script, *words in commands:
        if script.startswith("launch/"):
            first = words[:2] if script.endswith("tpu_vm.sh") else words[:1] if script.endswith(("gke.sh", "skypilot.sh")) else []
            done, calls = cloud(repository / script, *first, "--dry-run", *words[len(first) :])
            assert done.returncode == 0 and calls == [], (script, words, done.stderr)
            assert done.stdout

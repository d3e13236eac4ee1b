"""`densegrpo doctor`: what it says of sound and of unsound configs, and its exit code."""

import dataclasses
from types import SimpleNamespace

import pytest

from densegrpo_jax import cli, doctor
from densegrpo_jax.train import loop
from densegrpo_jax_configs.variants import change


def lines(capsys) -> dict[str, list[str]]:
    """status -> the lines with it."""
    found = {"ok": [], "warn": [], "FAIL": []}
    for line in capsys.readouterr().out.splitlines()[:-1]:
        status, _, rest = line.partition(" ")
        found[status].append(rest.strip())
    return found


def test_the_toy_is_ready_and_nothing_is_left_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", "toy"]) == 0
    found = lines(capsys)
    assert not found["FAIL"]
    said = "\n".join(found["ok"])
    assert "3840 evaluations of the network" in said and "two steps on one prompt" in said and "by rounding alone" in said
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_there_fails_and_the_other_checks_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", "sd35_medium_pickscore", "--no-dry-run"]) == 1
    found = lines(capsys)
    missing = "weights: model.path: 'stabilityai/stable-diffusion-3.5-medium' is not a folder here"
    assert any(line.startswith(missing) for line in found["FAIL"])
    assert any(line.startswith("prompts: ") for line in found["FAIL"])
    ok = "\n".join(found["ok"])
    assert "1152 trajectories, 12672 images scored, 63360 evaluations" in ok and "checkpoints of" in ok


def test_the_tiny_model_is_looked_at_tensor_by_tensor(capsys):
    assert cli.main(["doctor", "scenes_preference", "--no-dry-run"]) == 0
    ok = "\n".join(lines(capsys)["ok"])
    assert "transformer: all 171 tensors are there" in ok and "scenes_preference: self-test" in ok


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--rewards", "ocr@http://127.0.0.1:9"], "reward: ocr: "),
        (["--exploration.psi", "nowhere"], "grid: exploration.psi = nowhere"),
        (["--optimizer.updates", "7"], "batch: optimizer.updates = 7"),
        (["--run.workdir", "/dev/null/run"], "disk: run.workdir = /dev/null/run"),
        (["--prompts.train", "nowhere.txt"], "prompts: prompts.train: prompts 'nowhere.txt'"),
    ],
)
def test_each_fault_is_named_by_its_check(arguments, line, capsys):
    assert cli.main(["doctor", "toy", "--no-dry-run", *arguments]) == 1
    failed = lines(capsys)["FAIL"]
    assert any(said.startswith(line) for said in failed), failed


@pytest.mark.parametrize(("noise", "status"), [(1e-5, "ok"), (5e-4, "warn"), (5e-3, "FAIL")])
def test_noise_of_log_probs_is_held_against_the_clip_range(noise, status, monkeypatch):
    step = {"seconds": 1.0, "log_ratio_before": {"delta_log_prob_max": [None, noise]}, "nonfinite": {"updates": 0}}
    monkeypatch.setattr(loop, "train", lambda config: None)
    monkeypatch.setattr(doctor.metrics, "read", lambda path: [step, step])
    config = cli.load_config("toy")
    config = dataclasses.replace(config, objective=dataclasses.replace(config.objective, clip_range=1e-3))
    assert [found[0] for found in doctor.dry_run(config)] == ["ok", status]


def test_a_field_out_of_range_is_bad_input(capsys):
    assert cli.main(["doctor", "toy", "--prompts.group-size", "1"]) == 2
    assert "prompts.group_size = 1" in capsys.readouterr().err


def test_repeated_prompts_are_a_warning(tmp_path):
    (path := tmp_path / "prompts.txt").write_text("a spot at the centre\n" * 3)
    config = cli.load_config("toy")
    config = dataclasses.replace(config, prompts=dataclasses.replace(config.prompts, train=str(path)))
    assert ("warn", "prompts.train repeats 2 prompts, which are then drawn more often") in list(doctor.prompts(config))


@pytest.mark.parametrize(("share", "status"), [(0.5, "ok"), (0.9, "warn"), (1.1, "FAIL")])
def test_memory_that_does_not_suffice_fails(share, status, monkeypatch):
    config = cli.load_config("scenes_preference")
    taken = sum(doctor._on_a_device(config, doctor._bytes(config)).values())
    monkeypatch.setattr(doctor, "_available", lambda: (taken / share, "the device"))
    ((found, text),) = doctor.memory(config)
    assert found == status and "transformer" in text and ("smaller prompts.per_step" in text) == (status != "ok")


@pytest.mark.parametrize(("checkpoints", "status"), [(50, "ok"), (6, "warn"), (3, "FAIL")])
def test_a_disk_without_room_for_the_checkpoints_fails(checkpoints, status, monkeypatch, tmp_path):
    config = change(cli.load_config("scenes_preference"), run={"keep": 3, "workdir": tmp_path / "run"})  # and the best, and a new one
    one = doctor._bytes(config)["trained weights, optimiser, average"]
    more = 2**28 if status == "ok" else 0
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=checkpoints * one + more))
    ((found, text),) = doctor.disk(config)
    assert found == status and str(tmp_path / "run") in text and ("lower run.keep" in text) == (status == "FAIL")


@pytest.mark.mesh
def test_the_dry_run_fills_the_devices(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", "toy", "--parallel.fsdp", "2"]) == 0
    ok = "\n".join(lines(capsys)["ok"])
    assert "8 of them taken, fsdp 2" in ok and "two steps on one prompt" in ok


def test_memory_is_that_of_one_device(monkeypatch):
    monkeypatch.setattr(doctor.parallel, "shares", lambda settings: 8 // settings.tensor)
    monkeypatch.setattr(doctor.jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    parts = {"transformer": 8.0, "text_encoder_3": 4.0, "vae": 2.0, "latents of a step": 16.0, "trained weights, optimiser, average": 6.0}
    config = change(cli.load_config("scenes_preference"), parallel={"fsdp": 4, "encoders": "host"})
    assert list(doctor._on_a_device(config, parts).values()) == [2.0, 0.0, 2.0, 2.0, 6.0]
    config = change(config, parallel={"encoders": "device"}, adapter={"rank": 0})
    assert list(doctor._on_a_device(config, parts).values()) == [2.0, 1.0, 2.0, 2.0, 1.5]
    config = change(config, parallel={"fsdp": 2, "tensor": 2})
    assert list(doctor._on_a_device(config, parts).values()) == [2.0, 1.0, 2.0, 4.0, 1.5]

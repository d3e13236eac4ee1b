"""Whole runs that meet trouble: they stop, say why, and go on once it is over."""

import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from densegrpo_jax import cli
from densegrpo_jax.train import cache, checkpoint, health, lock, loop, metrics, phases, report
from densegrpo_jax.train import state as states
from densegrpo_jax.train.loop import train
from densegrpo_jax_configs.variants import change

SMALL = {
    "prompts": {"per_step": 2, "group_size": 4},
    "sampling": {"num_steps": 4},
    "optimizer": {"updates": 2, "micro_batch": 12},
    "evaluation": {"every": 0, "num_steps": 4, "images_per_prompt": 1},
    "run": {"steps": 4, "save_every": 1, "report_every": 0},
}


pytestmark = pytest.mark.usefixtures("plain_dispatch")


def config(workdir, **sections):
    changes = {name: SMALL.get(name, {}) | sections.get(name, {}) for name in SMALL | sections}
    changes["run"] = changes["run"] | {"workdir": workdir}
    return dataclasses.replace(change(cli.load_config("toy"), **changes), rewards=("own",))


def spread(images, prompts, metadata):
    return np.asarray(images, np.float64).std(axis=(1, 2, 3))


def listed(folder):
    return {p.relative_to(folder): p.stat().st_mtime_ns for p in folder.rglob("*") if p.name != "lock"}


def test_a_second_run_in_the_folder_is_refused_and_changes_nothing(tmp_path):
    settings = config(tmp_path, run={"steps": 1})
    train(settings, extra_rewards={"own": spread})
    before = listed(tmp_path)
    with lock.held(tmp_path), pytest.raises(ValueError, match=f"another run works there .pid {os.getpid()} on"):
        train(settings, extra_rewards={"own": spread})
    assert listed(tmp_path) == before
    train(settings, extra_rewards={"own": spread})  # given back


def test_updates_that_are_not_finite_are_left_out_and_stop_the_run(tmp_path, monkeypatch, capsys):
    original = states.apply_gradients

    def poisoned(config, state, grads):
        return original(config, state, jax.tree.map(lambda g: jnp.where(state.step >= 1, jnp.nan, g), grads))

    monkeypatch.setattr(states, "apply_gradients", poisoned)
    settings = config(tmp_path, run={"max_nonfinite": 4})
    with pytest.raises(health.Stopped, match="4 optimiser updates in a row"):
        train(settings, extra_rewards={"own": spread})
    assert capsys.readouterr().out.count("warning: step 2: 2 of 2 updates were left out") == 1
    records = metrics.read(tmp_path / "metrics.jsonl")
    assert [r["nonfinite"]["updates"] for r in records] == [0, 2, 2] and records[-1]["nonfinite"]["total"] == 4
    first, last = (checkpoint._read(checkpoint.folder_of(tmp_path) / str(step)) for step in (1, 3))
    assert last["skipped"] == 4 and last["updates"] == 2
    for name in ("trained", "ema", "opt_state"):
        for a, b in zip(jax.tree.leaves(first[name]), jax.tree.leaves(last[name]), strict=True):
            np.testing.assert_array_equal(a, b)
    assert "4 updates were left out as not finite" in (tmp_path / "report.html").read_text()
    with pytest.raises(health.Stopped):  # the same command does not just go on
        train(settings, extra_rewards={"own": spread})
    monkeypatch.undo()
    train(config(tmp_path, run={"max_nonfinite": 0}), extra_rewards={"own": spread})
    assert [r["nonfinite"]["updates"] for r in metrics.read(tmp_path / "metrics.jsonl")] == [0, 2, 2, 0]


def test_a_collapse_stops_the_run_and_keeps_the_best_checkpoint(tmp_path):
    calls = []

    def falls(images, prompts, metadata):
        calls.append(len(images))  # base, step, evaluation, step, evaluation, ...
        return spread(images, prompts, metadata) - (100.0 if len(calls) >= 5 else 0.0)

    settings = config(tmp_path, evaluation={"every": 1}, run={"keep": 1})
    with pytest.raises(health.Stopped, match=r"held-out reward is .* below the base.*best checkpoint so far is that of step 1"):
        train(settings, extra_rewards={"own": falls})
    assert checkpoint.steps(tmp_path) == [1, 2]
    record = json.loads((tmp_path / checkpoint.RECORD).read_text())
    assert record["kept"] == [1, 2] and record["best"]["step"] == 1
    text = (tmp_path / "report.html").read_text()
    assert "step 1 had the highest held-out reward" in text and "no result of the run" in text
    assert report.compared(tmp_path)[1]["done"] == 2  # what is reported is the last, not the highest


def test_a_run_that_stops_itself_has_its_own_exit_code(monkeypatch, capsys):
    def stops(config):
        raise health.Stopped("collapsed: because")

    monkeypatch.setattr(loop, "train", stops)
    assert cli.main(["train", "toy"]) == 3
    assert capsys.readouterr().err == "densegrpo train: collapsed: because\n"


def test_a_folder_that_goes_away_is_named_and_once_back_the_run_continues(tmp_path):
    workdir, aside, calls = tmp_path / "run", tmp_path / "aside", []

    def moves(images, prompts, metadata):
        calls.append(len(images))
        if len(calls) == 3:
            shutil.move(workdir, aside)
        return spread(images, prompts, metadata)

    settings = config(workdir)
    with pytest.raises(OSError, match=r"run\.workdir = .*run is gone: it was deleted or moved while the run went on"):
        train(settings, extra_rewards={"own": moves})
    assert not workdir.exists()
    shutil.move(aside, workdir)
    train(settings, extra_rewards={"own": moves})
    assert [r["step"] for r in metrics.read(workdir / "metrics.jsonl")] == [0, 1, 2, 3]


def test_an_evaluation_that_a_kill_left_out_is_made_up_for(tmp_path, monkeypatch):
    settings = config(tmp_path / "parts", evaluation={"every": 2})
    train(config(tmp_path / "whole", evaluation={"every": 2}), extra_rewards={"own": spread})
    monkeypatch.setattr(checkpoint, "save", lambda *args, save=checkpoint.save: (save(*args), args[1].step == 2 and exit("killed")))
    with pytest.raises(SystemExit):
        train(settings, extra_rewards={"own": spread})
    monkeypatch.undo()
    assert [r["done"] for r in metrics.read(tmp_path / "parts" / "evaluation.jsonl")] == [0]
    train(settings, extra_rewards={"own": spread})
    texts = [(tmp_path / name / "evaluation.jsonl").read_text() for name in ("whole", "parts")]
    assert texts[0] == texts[1] and texts[0].count("\n") == 3


def test_drift_between_rollout_and_update_shows_also_where_old_log_probs_are_recomputed(tmp_path, monkeypatch, capsys):
    original = phases.make_recompute

    def after_another_rollout(config, policy):
        recompute = original(config, policy)

        def of_it(params, trained, batch, order):
            t = batch.trajectory
            return recompute(params, trained, batch._replace(trajectory=t._replace(velocity=1.01 * t.velocity)), order)

        return of_it

    monkeypatch.setattr(phases, "make_recompute", after_another_rollout)
    train(config(tmp_path, run={"steps": 1}, objective={"recompute_old_log_prob": True}), extra_rewards={"own": spread})
    (record,) = metrics.read(tmp_path / "metrics.jsonl")
    before, drift = ([v for v in record[name]["delta_log_prob_max"] if v is not None] for name in ("log_ratio_before", "log_prob_drift"))
    assert record["recomputed"] and before == [0.0] * 3 and min(drift) > 1e-5
    assert "rollout and update differ by" in capsys.readouterr().out


# --- compiled programs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def no_cache():
    """As where the user has chosen no cache; the tests have one of their own."""
    before = jax.config.jax_compilation_cache_dir
    cache._set({"jax_compilation_cache_dir": None})
    yield
    cache._set({"jax_compilation_cache_dir": before})


def compiled(folder):
    return sorted(folder.glob("compilation_cache/*/*-cache"))


def double(x):
    return jax.jit(lambda x: jnp.cos(2 * x) @ x)(x)  # a new function each time, so that it is looked up


def test_programs_are_kept_in_the_work_folder_for_this_user_alone(tmp_path, no_cache, monkeypatch):
    monkeypatch.setattr(cache, "LEAST", 0.0)
    hits = []
    jax.monitoring.register_event_listener(lambda event, **kwargs: hits.append(event) if event.endswith("/cache_hits") else None)
    x = jnp.eye(7) * 0.1
    results, counts = [], []
    for _ in range(2):
        hits.clear()
        with cache.under(tmp_path):
            results.append(np.asarray(double(x)))
        counts.append(len(hits))
    assert compiled(tmp_path) and counts[1] > counts[0]
    np.testing.assert_array_equal(*results)
    assert (tmp_path / "compilation_cache").stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir is None  # as it was


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
def test_a_program_that_a_kill_left_half_written_is_compiled_anew(tmp_path, no_cache, monkeypatch):
    monkeypatch.setattr(cache, "LEAST", 0.0)
    x, results = jnp.eye(9) * 0.1, []
    for _ in range(2):
        with cache.under(tmp_path):
            results.append(np.asarray(double(x)))
        for path in compiled(tmp_path):
            os.truncate(path, path.stat().st_size // 2)
    np.testing.assert_array_equal(*results)


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, no_cache, monkeypatch, capsys):
    monkeypatch.setattr(cache, "LEAST", 0.0)
    (tmp_path / "compilation_cache").mkdir()
    (tmp_path / "compilation_cache").chmod(0o777)
    with cache.under(tmp_path):
        double(jnp.eye(5))
    assert not compiled(tmp_path) and "can be written to by others" in capsys.readouterr().out


def test_a_folder_of_the_users_choice_stays(tmp_path, no_cache):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    with cache.under(tmp_path):
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    with cache.under(None):
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert not (tmp_path / "compilation_cache").exists()

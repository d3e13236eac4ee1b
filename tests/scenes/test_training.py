"""The loop of the pretraining: a killed and continued run is the uninterrupted one, bit by bit."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from densegrpo_jax.scenes.training import Run, fit, load_leaves, pooled_batches, save_leaves


def make(number):
    return {"x": np.random.default_rng(number).normal(size=(40, 3)).astype(np.float32)}


def batches(start):
    return pooled_batches(make, start, size=40, batch=8, passes=2, seed=0)


def loss(params, key, batch):
    target = batch["x"] @ jnp.array([1.0, -2.0, 3.0]) + 0.1 * jax.random.normal(key, (8,))
    error = ((batch["x"] @ params["w"] - target) ** 2).mean()
    return error, {"error": error}


def train(folder, steps, measure=None):
    return fit("line", Run(folder, 0, 5), {"w": jnp.zeros(3)}, loss, batches, steps, peak=0.1, ema_decay=0.9, measure=measure)


def test_it_learns_and_logs(tmp_path):
    w = train(tmp_path, 800)["w"]
    np.testing.assert_allclose(w, [1, -2, 3], atol=0.1)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(5, 801, 5)) and rows[-1]["error"] < rows[0]["error"] / 10


def test_continued_is_uninterrupted(tmp_path):
    class Killed(Exception):
        pass

    def kill(params):
        if (calls := next(count)) == 2:  # at step 15, before its checkpoint is written
            raise Killed
        return {"score": float(calls)}

    def scored(params):
        return {"score": float(next(whole))}

    count, whole = itertools.count(), itertools.count()
    with pytest.raises(Killed):
        train(tmp_path / "a", 20, kill)
    continued = train(tmp_path / "a", 20, lambda params: {"score": 5.0 + next(count)})
    uninterrupted = train(tmp_path / "b", 20, scored)
    np.testing.assert_array_equal(continued["w"], uninterrupted["w"])
    assert (tmp_path / "a/line_best.safetensors").read_bytes() == (tmp_path / "b/line_best.safetensors").read_bytes()


def test_the_best_is_kept(tmp_path):
    scores = iter([1.0, 3.0, 2.0, 0.0])
    seen = []

    def measure(params):
        seen.append(np.asarray(params["w"]))
        return {"score": next(scores)}

    np.testing.assert_array_equal(train(tmp_path, 20, measure)["w"], seen[1])


def test_a_batch_depends_on_its_step_alone():
    whole = [batch["x"] for batch in itertools.islice(batches(0), 23)]
    for start in (1, 9, 10, 22):
        np.testing.assert_array_equal(next(batches(start))["x"], whole[start])
    first_pass = np.sort(np.concatenate(whole[:5]), axis=0)
    np.testing.assert_array_equal(first_pass, np.sort(make(0)["x"], axis=0))
    np.testing.assert_array_equal(first_pass, np.sort(np.concatenate(whole[5:10]), axis=0))


def test_another_models_state_is_refused(tmp_path):
    save_leaves(tmp_path / "state.safetensors", {"a": np.zeros(3), "b": np.ones((2, 2))})
    loaded = load_leaves(tmp_path / "state.safetensors", {"a": np.zeros(3), "b": np.zeros((2, 2))})
    np.testing.assert_array_equal(loaded["b"], np.ones((2, 2)))
    with pytest.raises(ValueError, match="another model"):
        load_leaves(tmp_path / "state.safetensors", {"a": np.zeros(4), "b": np.zeros((2, 2))})

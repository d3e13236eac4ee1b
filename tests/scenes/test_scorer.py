"""The preference scorer's training data and loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax.scenes import checker, scorer, tiny_model, world
from densegrpo_jax.scenes.training import Run


@given(st.integers(0, 5000), st.sampled_from(world.TAGS))
def test_spoiled_captions_differ_in_one_thing_and_no_longer_fit(seed, tag):
    scene = world.sample_scene(seed, tag=tag)
    request = world.metadata(scene, seed)
    wrong = scorer.spoil(request, (seed, 1))
    pairs = [(a.get(key), b.get(key)) for a, b in zip(request["include"], wrong["include"], strict=True) for key in {*a, *b}]
    assert sum(a != b for a, b in pairs) == 1
    image = world.draw(scene)[None]
    assert checker.judge(image, [wrong], "strict")[0] == 0
    assert wrong["prompt"] == world.phrase(tag, wrong["include"], (seed, 1, 1))
    assert request == world.metadata(scene, seed)  # untouched


def test_corruption_is_ordered():
    images = world.draw_batch([world.sample_scene(n) for n in range(64)]).astype(np.float32)
    weak, strong = np.asarray(scorer.corrupt(jax.random.key(0), jnp.asarray(images)))
    assert weak.min() >= 0 and strong.max() <= 255
    distance = [np.sqrt(((x - images) ** 2).mean((1, 2, 3))) for x in (weak, strong)]
    assert (distance[0] <= distance[1] * 1.2 + 0.5).mean() > 0.9 and distance[1].mean() > 1.3 * distance[0].mean()


def drawn(captions=6):
    """A stand-in for what the tiny model draws: the scene itself, spoiled ever more by noise."""
    scenes = [world.sample_scene((3, n)) for n in range(captions)]
    rng = np.random.default_rng(0)
    noise = 6.0 * np.arange(scorer.GROUP)[:, None, None, None] * rng.normal(size=(captions, scorer.GROUP, 32, 32, 3))
    images = world.draw_batch(scenes)[:, None] + noise
    score = np.repeat(np.linspace(1, 0, scorer.GROUP, dtype=np.float32)[None], captions, 0)
    ids = np.tile(np.arange(16, dtype=np.int32)[None], (captions, 1))
    return scorer.Drawn(np.clip(images, 0, 255).astype(np.uint8), ids, score, score)


def test_pairs_put_the_better_first():
    data = drawn()
    pairs = scorer.ordered_pairs(np.random.default_rng(0), data, 20)
    assert pairs["pairs"].shape == (20, 2, 32, 32, 3) and pairs["pair_ids"].shape == (20, 16)
    noise = np.abs(np.diff(pairs["pairs"].astype(float), axis=3)).mean((2, 3, 4))
    assert (noise[:, 0] < noise[:, 1]).all()


def test_agreement_is_one_for_a_scorer_that_knows(monkeypatch):
    data = drawn()
    direction = np.linspace(1, 0, scorer.GROUP)
    monkeypatch.setattr(scorer, "_embed_images", lambda _, images: np.tile(direction, len(images) // scorer.GROUP)[:, None])
    monkeypatch.setattr(scorer, "_embed_text", lambda _, ids: np.ones((len(ids), 1)))
    row = scorer.agreement(None, data)
    assert row["partial/clear"] == row["partial/all"] == row["soft/all"] == 1 and row["rank"] == pytest.approx(1)
    monkeypatch.setattr(scorer, "_embed_text", lambda _, ids: -np.ones((len(ids), 1)))
    assert scorer.agreement(None, data)["partial/all"] == 0


def test_a_step_down_the_gradient_lowers_every_loss(tmp_path, nan_checks):
    run = Run(tmp_path, 0, 1)
    pool = scorer.make_scenes(run, tiny_model.Tokens(tmp_path), (0, 4), 8)
    batch = {**pool, **scorer.ordered_pairs(np.random.default_rng(0), drawn(), 8)}
    params = scorer.init(0)
    value_and_grad = jax.jit(jax.value_and_grad(scorer.loss, has_aux=True))
    (before, _), gradient = value_and_grad(params, jax.random.key(1), batch)
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
    params = jax.tree.map(lambda p, g: p - 0.05 * g / norm, params, gradient)
    (after, logs), _ = value_and_grad(params, jax.random.key(1), batch)
    assert after < before - 0.01 and all(np.isfinite(value) for value in logs.values())


def test_truth_names_what_stands_in_each_slot():
    items = (world.Item("ring", "red", "small", 8, 24), world.Item("cross", "black", "large", 24, 8))
    expected = [[0, 0, 0, 0], [6, 8, 2, 0], [5, 1, 1, 0], [0, 0, 0, 0]]  # top left, top right, bottom left, bottom right
    np.testing.assert_array_equal(scorer.truth(world.Scene("two_object", (), items)), expected)
    letters = scorer.truth(world.Scene("word", (), word="TEA", word_color="red"))
    np.testing.assert_array_equal(letters, [[0, 1, 0, 20], [0, 1, 0, 5], [0, 1, 0, 1], [0, 0, 0, 0]])


def test_naming_reads_each_slot_from_its_own_patches():
    tokens, labels = np.zeros((1, 17, 128), np.float32), np.zeros((1, 4, 4), np.int32)
    tokens[0, 1 + 3, 0] = tokens[0, 1 + 7, 0] = 8.0  # rows 0 and 1 of the last column: a part of the top right quarter, and of column 3
    labels[0, 1, 0], labels[0, 3, 3] = 2, 5
    heads = {name: np.zeros(value.shape, np.float32) for name, value in scorer.init(0)["heads"].items()}
    nothing = float(scorer.naming(heads, jnp.asarray(tokens), jnp.asarray(labels)))
    heads["quarter"][0, 2] = heads["column"][0, 5] = 1.0  # two of four patches give 4, one of two gives 4
    gained = nothing - float(scorer.naming(heads, jnp.asarray(tokens), jnp.asarray(labels)))
    expected = (np.log(7 / (6 + np.e**4)) + 4 + np.log(27 / (26 + np.e**4)) + 4) / 4  # in one of four slots each
    assert gained == pytest.approx(expected, rel=1e-5)

"""The judge: right on fresh drawings, wrong on wrong ones, GenEval's partial credit by hand, and a soft score that is continuous."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from densegrpo_jax.scenes import checker, world

RED_CIRCLE = world.Item("circle", "red", "large", 9.0, 16.0)
BLUE_STAR = world.Item("star", "blue", "small", 23.0, 16.0)
BOTH = world.draw(world.Scene("", (), items=(RED_CIRCLE, BLUE_STAR)))


def fresh(tag, count=200, seed=11, split="train"):
    scenes = [world.sample_scene((seed, n), split, tag) for n in range(count)]
    return world.draw_batch(scenes), [world.metadata(scene, n) for n, scene in enumerate(scenes)]


def ask(tag, *include):
    return {"tag": tag, "include": list(include), "prompt": ""}


def score(image, request, mode="partial"):
    return float(checker.judge(image[None], [request], mode)[0])


@pytest.mark.parametrize("tag", world.TAGS)
def test_fresh_scenes_are_judged_right(tag):
    images, requests = fresh(tag)
    assert checker.judge(images, requests, "strict").mean() >= 0.99
    assert checker.judge(images, requests, "partial").mean() >= 0.99
    assert checker.judge(images, requests, "soft").mean() >= 0.9


@pytest.mark.parametrize("tag", world.TAGS)
def test_other_pictures_score_low(tag):
    images, requests = fresh(tag)
    right = {mode: checker.judge(images, requests, mode).mean() for mode in checker.MODES}
    wrong = {mode: checker.judge(np.roll(images, 1, 0), requests, mode).mean() for mode in checker.MODES}
    assert wrong["strict"] < 0.2 and wrong["partial"] < 0.45 and wrong["soft"] < right["soft"] - 0.35
    empty = np.broadcast_to(np.uint8(world.BACKGROUND), images.shape)
    assert all(checker.judge(empty, requests, mode).max() < 0.05 for mode in checker.MODES)


def test_segmentation_names_what_was_drawn():
    circle, star = sorted(checker.find_shapes(BOTH[None])[0], key=lambda thing: thing.x)
    for thing, item in ((circle, RED_CIRCLE), (star, BLUE_STAR)):
        assert (thing.shape, thing.color, thing.size) == (item.shape, item.color, item.size)
        assert abs(thing.x - item.x) < 0.3 and abs(thing.y - item.y) < 0.3 and thing.fit > 0.85


def test_partial_credit_by_hand():
    circle, star = {"class": "circle", "count": 1}, {"class": "star", "count": 1}
    cases = [
        (ask("two_object", circle, star), 1.0, 1.0),
        (ask("single_object", circle), 1.0, 0.0),  # something else is there too
        (ask("counting", {**circle, "count": 3}), 1 / 3, 0.0),
        (ask("color_attr", {**circle, "color": "red"}, {**star, "color": "green"}), 3 / 4, 0.0),
        (ask("colors", {**circle, "count": 2, "color": "red"}), 1 / 4, 0.0),  # the colour counts for nothing when the number is wrong
        (ask("position", circle, {**star, "position": ["right of", 0]}), 1.0, 1.0),
        (ask("position", circle, {**star, "position": ["left of", 0]}), 2 / 3, 0.0),
        (ask("position", circle, {"class": "ring", "count": 1, "position": ["left of", 0]}), 1 / 3, 0.0),
        (ask("single_object", {**circle, "size": "small"}), 1 / 2, 0.0),
    ]
    for request, partial, strict in cases:
        assert score(BOTH, request) == pytest.approx(partial), request
        assert score(BOTH, request, "strict") == strict, request


def test_words_are_read_and_scored_by_edit_distance():
    image = world.draw(world.Scene("word", (), word="TEA", word_color="blue"))
    assert checker.read_words(image[None]) == ["TEA"]
    clause = {"class": "word", "count": 1}
    assert score(image, ask("word", {**clause, "text": "TEA"}), "strict") == 1
    assert score(image, ask("word", {**clause, "text": "TOE"})) == pytest.approx(1 / 3)
    assert score(image, ask("word", {**clause, "text": "TEAM"})) == pytest.approx(3 / 4)
    assert score(image, ask("word", {**clause, "text": "TE"}), "strict") == 0
    assert score(image, ask("word", {**clause, "text": "TE"}), "soft") < 0.1
    assert score(image, ask("word", {**clause, "text": "TEA", "color": "red"})) == pytest.approx(1 / 2)
    assert checker.edit_distance("KITTEN", "SITTING") == 3


@given(st.integers(0, 1000), st.sampled_from(world.TAGS))
def test_soft_is_continuous(seed, tag):
    """Twice as fine a step between a picture and another halves the largest jump of the score, or nearly."""
    a, b = (world.draw(world.sample_scene((seed, k), tag=tag)) / 255 for k in (0, 1))
    request = world.metadata(world.sample_scene((seed, 0), tag=tag), 0)

    def jump(steps):
        path = np.stack([a + (b - a) * k / steps for k in range(steps + 1)])
        return np.abs(np.diff(checker.judge(path, [request] * len(path), "soft"))).max()

    assert jump(1024) < 0.02
    assert jump(1024) < 0.7 * jump(256) + 1e-4


def test_soft_has_a_finite_gradient_that_improves_the_picture(nan_checks):
    blurred = ndimage.gaussian_filter(BOTH.astype(np.float32), (1.2, 1.2, 0))[None]
    args = (jnp.array([[0, 3]]), jnp.array([[1, 1]]), jnp.array([[0, 4]]), jnp.array([[-1, -1]]), jnp.zeros((1, 2)))

    def total(pixels):
        return checker.soft_shapes(pixels, *args).sum()

    before, gradient = jax.value_and_grad(total)(jnp.asarray(blurred))
    assert jnp.isfinite(gradient).all() and jnp.abs(gradient).max() > 0
    step = 4.0 * gradient / jnp.abs(gradient).max()
    assert total(jnp.asarray(blurred) + step) > before


def test_soft_falls_as_noise_and_blur_grow():
    images, requests = (sum(parts, start) for parts, start in zip(zip(*(map(list, fresh(tag, 16)) for tag in world.TAGS)), ([], [])))
    images = np.stack(images)
    noise = np.random.default_rng(0).normal(size=images.shape)
    noisy = [np.clip(images + sigma * noise, 0, 255).astype(np.uint8) for sigma in (0, 8, 16, 32, 64)]
    blurred = [ndimage.gaussian_filter(images.astype(np.float32), (0, s, s, 0)).astype(np.uint8) for s in (0, 0.7, 1.2, 2.0)]
    for series in (noisy, blurred):
        means = [checker.judge(batch, requests, "soft").mean() for batch in series]
        assert all(a > b + 0.005 for a, b in itertools.pairwise(means)), means


def test_floats_and_bytes_agree_and_order_does_not_matter():
    images, requests = fresh("position", 40)
    for mode in checker.MODES:
        scores = checker.judge(images, requests, mode)
        np.testing.assert_allclose(checker.judge(images / np.float32(255), requests, mode), scores, atol=1e-5)
        np.testing.assert_allclose(checker.judge(images[::-1], requests[::-1], mode)[::-1], scores, atol=1e-5)
    assert checker.judge(images[:0], [], "soft").shape == (0,)


def test_bad_input_is_refused():
    circle = ask("single_object", {"class": "circle", "count": 1})
    cases = [
        ((BOTH, [circle], "strict"), "shape"),
        ((BOTH[None].astype(int), [circle], "strict"), "dtype"),
        ((BOTH[None].astype(np.float32), [circle], "strict"), r"expected \[0, 1\]"),
        ((np.full((1, 32, 32, 3), np.nan), [circle], "strict"), r"expected \[0, 1\]"),
        ((BOTH[None], [circle], "lenient"), "mode"),
        ((BOTH[None], [], "strict"), "one request an image"),
        ((BOTH[None], [ask("single_object", {"class": "blob", "count": 1})], "strict"), "blob"),
        ((BOTH[None], [ask("colors", {"class": "circle", "count": 1, "color": "mauve"})], "strict"), "mauve"),
        ((BOTH[None], [ask("single_object", {"class": "circle", "count": 0})], "strict"), "count"),
        ((BOTH[None], [ask("position", {"class": "circle", "count": 1, "position": ["near", 0]})], "strict"), "position"),
        ((BOTH[None], [ask("word", {"class": "word", "count": 1, "text": "tea"})], "strict"), "tea"),
        ((BOTH[None], [ask("anything", {"class": "circle", "count": 1})], "strict"), "tag"),
        ((BOTH[None], [ask("two_object", *circle["include"] * 3)], "soft"), "at most two"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            checker.judge(*arguments)

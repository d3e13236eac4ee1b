"""The protocol of rewards, their sums, and their names."""

import subprocess
import sys

import numpy as np
import pytest

from densegrpo_jax import rewards
from densegrpo_jax.rewards.base import Scores, score, weighted_sum

IMAGES = np.zeros((3, 4, 4, 3), np.uint8)
PROMPTS, METADATA = ["a", "b", "c"], [{}, {}, {}]


def call(result):
    return score("mine", lambda images, prompts, metadata: result, IMAGES, PROMPTS, METADATA)


def test_what_is_not_finite_or_not_valid_is_masked_and_never_a_number():
    scores = call([1.0, np.nan, -np.inf])
    np.testing.assert_array_equal(scores.value, [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(scores.valid, [True, False, False])
    scores = call((np.array([1.0, 2.0, np.nan], np.float32), [False, True, True]))
    np.testing.assert_array_equal(scores.value, [0.0, 2.0, 0.0])
    np.testing.assert_array_equal(scores.valid, [False, True, False])


@pytest.mark.parametrize("result", [[1.0], np.ones((3, 1)), 1.0, (np.ones(3), [True])], ids=["few", "column", "one", "few masks"])
def test_answers_of_the_wrong_number_are_refused_with_the_name(result):
    with pytest.raises(ValueError, match=r"'mine' returned .* for 3 images"):
        call(result)


@pytest.mark.parametrize(("images", "metadata"), [(IMAGES[:2], METADATA), (IMAGES, METADATA[:2])])
def test_questions_of_different_numbers_are_refused(images, metadata):
    with pytest.raises(ValueError, match="give one of each"):
        score("mine", lambda *_: np.ones(3), images, PROMPTS, metadata)


def test_a_sum_is_valid_where_all_its_parts_are():
    parts = {"a": Scores(np.array([1.0, 0.0, 3.0]), np.array([True, False, True])), "b": Scores(np.ones(3), np.array([True, True, False]))}
    total = weighted_sum(parts, {"a": 2.0, "b": -0.5})
    np.testing.assert_array_equal(total.value, [1.5, 0.0, 0.0])
    np.testing.assert_array_equal(total.valid, [True, False, False])
    for weights in ({"a": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}):
        with pytest.raises(ValueError, match="a weight each"):
            weighted_sum(parts, weights)


def test_names_load_and_unknown_ones_are_refused_with_the_known():
    image = np.zeros((1, 8, 8, 3), np.uint8)
    assert score("toy_spot", rewards.load("toy_spot"), image, ["a spot at the centre"], [{}]).valid.all()
    with pytest.raises(ValueError, match=r"unknown reward 'pikscore'.*scenes_compose_soft.*words"):
        rewards.load("pikscore")
    for name in ("words:folder", "pickscore:"):
        with pytest.raises(ValueError, match=r"for pickscore, .*imagereward only"):
            rewards.load(name)
    with pytest.raises(ValueError, match="neither a folder that exists nor a Hugging Face id"):
        rewards.load("clipscore:/nowhere/to/be/found")
    with pytest.raises(ValueError, match="could not be downloaded"):
        rewards.load("clipscore")
    with pytest.raises(ValueError, match=r"give its folder, hpsv2:FOLDER, which tools/convert_scorer\.py makes"):
        rewards.load("hpsv2")


def test_importing_the_names_imports_no_scorer():
    code = "import sys, densegrpo_jax.rewards; print([m for m in ('jax', 'rapidocr', 'transformers', 'scipy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"

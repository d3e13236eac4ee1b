"""Images that come in parts: host rewards score them meanwhile, with the same result, and rewards in groups lose their units."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax import credit
from densegrpo_jax.rewards.base import Faults, Scores, host, normalized_in_groups, score, score_parts, weighted_sum

PROMPTS, METADATA = [str(i) for i in range(4)], [{"i": i} for i in range(4)]
IMAGES = np.random.default_rng(0).integers(0, 256, (12, 2, 2, 3), dtype=np.uint8)


def reward(images, prompts, metadata):
    """Of image, prompt and metadata; NaN for the prompt "2"."""
    return np.array([np.nan if p == "2" else x.mean() + 1000 * int(p) + 0.5 * m["i"] for x, p, m in zip(images, prompts, metadata)])


def parts(order=range(12), size=3, finite=None):
    order, finite = np.array(order), np.ones(12, bool) if finite is None else finite
    for start in range(0, 12, size):
        rows = order[start : start + size]
        yield rows, IMAGES[rows], finite[rows]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("workers", [None, 1, 3])
def test_parts_in_any_order_give_what_one_call_gives(overlap, workers):
    whole = score("mine", reward, IMAGES, PROMPTS * 3, METADATA * 3)
    one = reward if workers is None else host(reward, workers)
    for order, size in ((range(12), 12), (range(12), 5), (np.random.default_rng(1).permutation(12), 1)):
        scored = score_parts({"mine": one, "other": reward}, parts(order, size), PROMPTS, METADATA, overlap)
        for found in scored.scores.values():
            np.testing.assert_array_equal(found.value, whole.value)
            np.testing.assert_array_equal(found.valid, whole.valid)
            assert found.faults == Faults(nan=3)


def test_images_that_are_not_finite_are_counted_once():
    finite = np.ones(12, bool)
    finite[[1, 2]] = False  # the second has no score anyway
    found = score_parts({"mine": host(reward)}, parts(finite=finite), PROMPTS, METADATA).scores["mine"]
    assert not found.valid[[1, 2]].any() and found.value[1] == 0.0 and found.faults == Faults(nan=3, image=1)


def test_rewards_that_are_not_marked_see_all_images_at_once():
    sizes = {"all": [], "parts": []}

    def counting(name):
        return lambda images, prompts, metadata: sizes[name].append(len(images)) or np.zeros(len(images))

    score_parts({"all": counting("all"), "parts": host(counting("parts"))}, parts(), PROMPTS, METADATA)
    assert sizes == {"all": [12], "parts": [3] * 4}


def test_a_part_is_scored_while_the_next_is_made_and_few_wait():
    began, ahead, made = threading.Event(), [], []
    done = []

    def slow(images, prompts, metadata):
        began.set()
        time.sleep(0.01)
        done.append(len(images))
        return np.zeros(len(images))

    def making():
        for number, part in enumerate(parts(size=1)):
            made.append(number)
            if number == 1:
                assert began.wait(5.0)  # the first part is being scored
            ahead.append(len(made) - len(done))
            yield part

    scored = score_parts({"slow": host(slow, 1)}, making(), PROMPTS, METADATA)
    assert max(ahead) <= 4  # two wait beside the one at work and the one just made
    assert scored.wait["slow"] > 0.0


def test_waiting_is_shorter_with_overlap():
    def slow(images, prompts, metadata):
        time.sleep(0.02)
        return np.zeros(len(images))

    def making():
        for part in parts():
            time.sleep(0.03)
            yield part

    wait = [score_parts({"slow": host(slow)}, making(), PROMPTS, METADATA, overlap).wait["slow"] for overlap in (False, True)]
    assert wait[0] >= 0.08 and wait[1] < 0.75 * wait[0]


def test_an_error_ends_it_and_rows_must_be_complete():
    def broken(images, prompts, metadata):
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        score_parts({"broken": host(broken)}, parts(size=1), PROMPTS, METADATA)
    for rows in ([0, 1], [0, 0, 1, 2], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match=r"each of 0 \.\. N - 1 once"):
            score_parts({"mine": reward}, [(np.array(rows), IMAGES[rows], np.ones(len(rows), bool))], PROMPTS, METADATA)
    with pytest.raises(ValueError, match="workers = 0"):
        host(reward, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Normalisation in groups

GROUPS = np.tile(np.repeat([5, 9], 4), 3)  # [L * B]: three levels of two groups of four
VALUES = np.random.default_rng(2).normal(size=(2, 24))


def total(first, second, valid=None, weights=(1.0, 0.5)):
    valid = np.ones(24, bool) if valid is None else valid
    parts = {"a": Scores(np.where(valid, first, 0.0), valid), "b": Scores(second, np.ones(24, bool))}
    return weighted_sum({name: normalized_in_groups(part, GROUPS) for name, part in parts.items()}, dict(zip("ab", weights)))


@given(st.floats(1e-6, 1e6), st.floats(-100, 100), st.lists(st.booleans(), min_size=24, max_size=24))
def test_the_scale_of_one_reward_does_not_matter(scale, shift, valid):
    valid = np.array(valid)
    plain, scaled = (total(first, VALUES[1], valid) for first in (VALUES[0], scale * VALUES[0]))
    np.testing.assert_allclose(scaled.value, plain.value, atol=1e-9)
    np.testing.assert_array_equal(scaled.valid, plain.valid)
    pair = [(t.value.reshape(3, 8), t.valid.reshape(3, 8)) for t in (plain, scaled)]
    pair = [credit.advantages("dense_grpo", value, GROUPS[:8], valid=valid).advantage for value, valid in pair]
    np.testing.assert_allclose(*pair, atol=1e-6)
    shifted = total(VALUES[0] + shift, VALUES[1], valid)
    np.testing.assert_allclose(shifted.value, plain.value, atol=1e-9)


def test_without_it_the_scale_matters():
    plain, scaled = (VALUES[0] * scale + VALUES[1] for scale in (1.0, 100.0))
    pair = [normalized_in_groups(Scores(value, np.ones(24, bool)), GROUPS).value for value in (plain, scaled)]
    assert np.abs(pair[0] - pair[1]).max() > 0.5


def test_each_group_has_mean_0_and_deviation_1_over_its_valid_images():
    valid = np.ones(24, bool)
    valid[[0, 5]] = False
    found = normalized_in_groups(Scores(np.where(valid, VALUES[0], 0.0), valid), GROUPS)
    for group in (5, 9):
        members = found.value[(GROUPS == group) & valid]
        assert members.mean() == pytest.approx(0.0, abs=1e-12) and members.std() == pytest.approx(1.0)
    assert not found.value[~valid].any()


def test_groups_that_are_equal_but_for_rounding_become_zero():
    value = np.where(GROUPS == 5, 20.0 + 1e-7 * VALUES[0], VALUES[0])
    found = normalized_in_groups(Scores(value, np.ones(24, bool)), GROUPS)
    assert not found.value[GROUPS == 5].any() and found.value[GROUPS == 9].std() == pytest.approx(1.0)
    assert not normalized_in_groups(Scores(np.zeros(24), np.zeros(24, bool)), GROUPS).value.any()
    with pytest.raises(ValueError, match="one an image"):
        normalized_in_groups(Scores(np.zeros(24), np.zeros(24, bool)), GROUPS[:8])

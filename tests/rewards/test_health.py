"""What is said about rewards of a step, and the alarm for witnesses that fall."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax.rewards import health
from densegrpo_jax.rewards.base import Scored, score


def step(value, valid=None, wait=0.0, seconds=10.0):
    count, valid = len(value), np.ones(len(value), bool) if valid is None else valid
    scores = score("mine", lambda *_: (value, valid), np.zeros((count, 1, 1, 3)), [""] * count, [{}] * count)
    return health.step_health(Scored({"mine": scores}, {"mine": wait}), seconds)


@pytest.mark.parametrize(
    ("arguments", "kinds", "sentence"),
    [
        (([0.0, 1.0, 0.5],), set(), None),
        (([0.0, np.nan, 0.5],), {"nan"}, "reward 'mine': 1 of 3 scores are NaN"),
        (([0.0, np.inf, -np.inf],), {"infinite"}, "2 of 3 scores are infinite"),
        (([0.0, 1.0, 2.0], [True, True, False]), {"masked"}, "1 of 3 images could not be scored"),
        (([0.5, 0.5, 0.5],), {"constant"}, "all 3 of 3 scores are equal"),
        (([0.5, 0.5, np.nan],), {"constant", "nan"}, None),  # the failed one is not another value
        (([0.5, np.nan, np.nan],), {"nan"}, None),  # a single score is not constant
        (([0.0, 1.0], None, 5.1), {"slow"}, "waited 5.1 s"),
        (([0.0, 1.0], None, 0.09, 0.1), set(), None),
        (([0.0, 1.0], None, 4.9), set(), None),
    ],
)
def test_what_is_wrong_is_named_and_counted(arguments, kinds, sentence):
    entry = step(*arguments)
    found = health.complaints(entry)
    assert set(found) == {("mine", kind) for kind in kinds}
    assert {kind for kind in health.LINES if entry["mine"][kind]} == kinds
    assert sentence is None or any(sentence in line for line in found.values())


PROMPT = np.repeat(np.arange(20), 2)
NOISE = np.random.default_rng(0).normal(size=(6, 2, 40))


def record(done, total, witness, spread=0.1):
    """An evaluation: the same prompts have the same scores but for a little noise."""
    of_prompt = np.sin(PROMPT)
    noise = spread * NOISE[done // 10]
    return {
        "done": done,
        "prompt": PROMPT.tolist(),
        "total": (of_prompt + total + noise[0]).tolist(),
        "rewards": {"ocr": (of_prompt + total).tolist(), "pickscore": (of_prompt + witness + noise[1]).tolist()},
    }


def falls(*levels, optimised=("ocr",)):
    return health.alarms([record(10 * i, *pair) for i, pair in enumerate(levels)], optimised)


def test_a_witness_that_falls_while_the_reward_rises_is_an_alarm():
    (alarm,) = falls((0.0, 0.0), (0.3, 0.0), (0.5, -0.4))
    assert (alarm.witness, alarm.since) == ("pickscore", 0)
    assert alarm.fall == pytest.approx(-0.4, abs=0.1) and alarm.rise == pytest.approx(0.5, abs=0.1)
    assert "pickscore fell by 0.4" in alarm.line() and "since step 0" in alarm.line()


def test_a_fall_from_the_peak_is_seen_though_it_is_still_above_the_base():
    (alarm,) = falls((0.0, 0.0), (0.3, 0.6), (0.5, 0.2))
    assert alarm.since == 10 and alarm.fall == pytest.approx(-0.4, abs=0.1)


def test_what_is_no_alarm():
    assert falls() == falls((0.0, 0.0)) == []
    assert falls((0.0, 0.0), (0.5, 0.4)) == []  # both rise
    assert falls((0.0, 0.0), (-0.5, -0.4)) == []  # both fall: that is bad, but no hacking
    assert falls((0.0, 0.0), (0.5, 0.0), (0.5, 0.0)) == []  # noise
    assert falls((0.0, 0.0), (0.5, -0.4), optimised=("ocr@http://host:1=0.5", "pickscore=2")) == []  # no witness


def test_missing_scores_are_left_out_and_other_prompts_not_compared():
    first, last = record(0, 0.0, 0.0), record(10, 0.5, -0.4)
    last["rewards"]["pickscore"][0], first["total"][3] = None, None
    assert len(health.alarms([first, last], ["ocr"])) == 1
    last["rewards"]["pickscore"] = [None] * 40
    assert health.alarms([first, last], ["ocr"]) == []
    assert health.alarms([first | {"prompt": [0] * 40}, record(10, 0.5, -0.4)], ["ocr"]) == []


@given(st.floats(-10, 10), st.floats(0.01, 10))
def test_changes_do_not_depend_on_where_scores_begin_and_scale_with_them(shift, scale):
    before, after = NOISE[0]
    mean, error = health.paired_change(before, after, PROMPT)
    assert health.paired_change(scale * before + shift, scale * after + shift, PROMPT) == pytest.approx((scale * mean, scale * error))
    assert health.paired_change(after, before, PROMPT) == pytest.approx((-mean, error))


def test_the_error_counts_prompts_not_images():
    before, after = np.zeros(40), np.repeat(np.random.default_rng(1).normal(size=20), 2)
    _, error = health.paired_change(before, after, PROMPT)
    assert error == pytest.approx(after[::2].std(ddof=1) / np.sqrt(20))

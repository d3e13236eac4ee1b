"""Numbers that tell when a run is sick, what is said about them, and when it stops."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from densegrpo_jax.config import Config
from densegrpo_jax.train import checkpoint, health, metrics
from densegrpo_jax.train import state as states

WELL = {
    "nonfinite": {"latents": 0, "updates": 0, "in_a_row": 0, "open": 0, "total": 0},
    "log_prob_drift": {"delta_log_prob_max": [None, 1e-6, 2e-6]},
    "recomputed": False,
    "equal_groups": 0.0,
    "clip": 0.1,
    "last_update": {"grad_rms": 1e-4},
    "images": {"latent_std": 1.0, "contrast": 0.2, "brightness": 0.5},
}


def step(**changes):
    return WELL | {name: WELL[name] | v if isinstance(v, dict) else v for name, v in changes.items()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"nonfinite": {"latents": 3}}, "3 trajectories end in latents that are not finite"),
        ({"nonfinite": {"updates": 2}}, "2 of 2 updates were left out"),
        ({"log_prob_drift": {"delta_log_prob_max": [6e-4, None]}}, "differ by 6.0e-04 in log-probability.*recompute_old_log_prob"),
        ({"log_prob_drift": {"delta_log_prob_max": [6e-4]}, "recomputed": True}, "differ by 6.0e-04 .* clip range of 0.001$"),
        ({"equal_groups": 0.75}, "in 75% of the groups all rewards are equal"),
        ({"clip": 0.6}, "60% of the pairs are clipped"),
        ({"last_update": {"grad_rms": 1e-9}}, "RMS 1.0e-09 is below optimizer.eps = 1e-08"),
        ({"last_update": {"grad_rms": 0.0}}, None),  # nothing was to be learned, which has its own line
        ({"last_update": {"grad_rms": None}}, None),  # not finite, which has its own line
        ({"images": {"contrast": 0.09}}, "contrast of the images is 0.09, 0.2 at the first step"),
        ({"images": {"latent_std": 2.5}}, "latent std of the images is 2.5, 1 at the first step"),
        ({"images": {"brightness": 0.8}}, "brightness of the images is 0.80, 0.50 at the first step"),
        ({"images": {"latent_std": None}}, None),  # not finite, which is said by the first two
    ],
)
def test_each_fault_is_said_with_its_number(changes, said):
    lines = list(health.complaints(step(**changes), step(), Config()).values())
    assert len(lines) == (said is not None)
    assert not said or re.search(said, lines[0])


def test_updates_that_are_not_finite_are_counted_over_steps():
    fine, latents = [1.0, 2.0], np.ones(4, bool)
    first = health.nonfinite(None, [1.0, np.nan], latents)
    assert first == {"latents": 0, "updates": 1, "in_a_row": 1, "open": 1, "total": 1}
    second = health.nonfinite(first, [np.inf, np.nan, 1.0, np.nan], latents > np.array([0, 0, 0, 1]))
    assert second == {"latents": 1, "updates": 3, "in_a_row": 3, "open": 1, "total": 4}
    third = health.nonfinite(second, fine, latents)
    assert third == {"latents": 0, "updates": 0, "in_a_row": 0, "open": 0, "total": 4}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(bad):
    config, trained = Config(), {"a": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    grads = {"a": jnp.full((3, 2), 0.1), "b": jnp.zeros(2)}
    before, _ = states.apply_gradients(config, states.init(config, trained), grads)
    after, numbers = states.apply_gradients(config, before, grads | {"b": jnp.array([0.0, bad])})
    assert not np.isfinite(numbers["grad_norm"])
    assert after.skipped == 1 and after.updates == 1
    for a, b in zip(jax.tree.leaves(after._replace(skipped=before.skipped)), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_rms_is_that_of_the_clipped_gradient():
    config, trained = Config(), {"a": jnp.zeros((5, 5))}
    for size, clipped in ((0.1, 0.1), (1e3, 0.2)):  # a norm of 1 over 25 entries is an RMS of .2
        _, numbers = states.apply_gradients(config, states.init(config, trained), {"a": jnp.full((5, 5), size)})
        np.testing.assert_allclose(numbers["grad_rms"], clipped, rtol=1e-6)
        np.testing.assert_allclose(numbers["grad_norm"], 5 * size, rtol=1e-6)


def config(tmp_path, **evaluation):
    base = Config()
    limits = dataclasses.replace(base.evaluation, **evaluation)
    return dataclasses.replace(base, evaluation=limits, run=dataclasses.replace(base.run, workdir=tmp_path, max_nonfinite=5))


def evaluation(done, total):
    return {"step": done - 1, "done": done, "prompt": list(range(len(total))), "total": list(total)}


BASE = np.random.default_rng(0).normal(20.0, 1.0, 64)


@pytest.mark.parametrize(
    ("fall", "noise", "limit", "stops"),
    [
        (1.5, 0.1, 1.0, True),
        (0.5, 0.1, 1.0, False),  # worse, and not collapsed
        (0.5, 0.1, 0.4, True),
        (1.5, 10.0, 1.0, False),  # within chance
        (1.5, 0.1, 0.0, False),  # off
        (-3.0, 0.1, 1.0, False),
    ],
)
def test_a_held_out_reward_far_below_the_base_stops(tmp_path, fall, noise, limit, stops):
    after = BASE - fall * BASE.std() + np.random.default_rng(1).permutation(np.linspace(-noise, noise, 64)) * 3
    for record in (evaluation(0, BASE), evaluation(10, BASE)):
        metrics.append(tmp_path / "evaluation.jsonl", record)
    checkpoint.folder_of(tmp_path).mkdir()
    (checkpoint.folder_of(tmp_path) / "10").mkdir()
    records = [*metrics.read(tmp_path / "evaluation.jsonl"), evaluation(20, after)]
    if stops:
        with pytest.raises(health.Stopped, match=r"collapsed: the held-out reward is .* below.*best checkpoint .* is that of step 10.*Try"):
            health.stop_if_sick(config(tmp_path, collapse_reward=limit), [], records)
    else:
        health.stop_if_sick(config(tmp_path, collapse_reward=limit), [], records)


def test_evaluations_of_other_prompts_do_not_count(tmp_path):
    other = evaluation(0, BASE + 50.0) | {"prompt": list(range(64, 128))}
    health.stop_if_sick(config(tmp_path), [], [other, evaluation(10, BASE), evaluation(20, BASE - 5.0)])


@pytest.mark.parametrize(
    ("last", "stops"), [([0.05] * 5, True), ([0.2, 0.05, 0.05, 0.2, 0.2], False), ([0.2, 0.05, 0.05, 0.05, 0.2], True)]
)
def test_images_that_lose_their_contrast_stop(tmp_path, last, stops):
    steps = [step(images={"contrast": c}) for c in (0.2, *last)]
    if stops:
        with pytest.raises(health.Stopped, match=r"the contrast of the images fell from 0.200 to 0.050.*no checkpoint was evaluated"):
            health.stop_if_sick(config(tmp_path), steps, [])
        health.stop_if_sick(config(tmp_path, collapse_contrast=0.0), steps, [])
        health.stop_if_sick(config(tmp_path), steps[:-1], [])  # not on so few
    else:
        health.stop_if_sick(config(tmp_path), steps, [])


def test_too_many_updates_in_a_row_stop(tmp_path):
    health.stop_if_sick(config(tmp_path), [step(nonfinite={"in_a_row": 4})], [])
    with pytest.raises(health.Stopped, match=r"5 optimiser updates in a row .*run\.max_nonfinite = 5.*Try"):
        health.stop_if_sick(config(tmp_path), [step(nonfinite={"in_a_row": 5})], [])

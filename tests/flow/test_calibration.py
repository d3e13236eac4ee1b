"""Algorithm 1's rule, the excess noise that it fights, and sampling with a kernel that changes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax import flow
from densegrpo_jax.flow import calibration
from densegrpo_jax.flow.calibration import Rule, Signs

SD3 = flow.sd3_sigmas(10)
PRINTED, SCALED = Rule(scaled=False, decided=0.0), Rule()
LOW, HIGH = np.full(1, 0.01), np.full(1, 1.2)


def counts(positive, negative, zero=0):
    return Signs(*(np.array([n]) for n in (positive, negative, zero)))


def search(rule, seen, iterations, value=0.7):
    value = np.array([value])
    for _ in range(iterations):
        value = calibration.advance(value, seen, rule, LOW, HIGH, np.ones(1, bool))
    return value[0]


# --- the rule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "n"), [(PRINTED, 5), (PRINTED, 64), (SCALED, 5), (SCALED, 64)])
@pytest.mark.parametrize("one_sided", [(0, 1), (1, 0)])
def test_a_one_sided_level_falls_by_eps2_an_iteration_down_to_its_bound(rule, n, one_sided):
    seen = counts(n * one_sided[0], n * one_sided[1])
    assert search(rule, seen, 1) == pytest.approx(0.69)
    assert search(rule, seen, 20) == pytest.approx(0.5)
    assert search(rule, seen, 100) == 0.01


@pytest.mark.parametrize(("rule", "seen"), [(PRINTED, counts(3, 2)), (PRINTED, counts(8, 8)), (SCALED, counts(28, 36))])
def test_a_balanced_level_rises_by_eps2_up_to_its_bound(rule, seen):
    assert search(rule, seen, 20) == pytest.approx(0.9)
    assert search(rule, seen, 100) == 1.2


def test_the_thresholds():
    difference = np.arange(9)
    seen = Signs(4 + difference, np.full(9, 4), np.zeros(9))
    assert calibration.direction(seen, PRINTED).tolist() == [1, 1] + [-1] * 7  # |difference| < 2, as printed
    n = 8 + difference
    assert calibration.direction(seen, SCALED).tolist() == np.where(difference < 2 + np.sqrt(n), 1, -1).tolist()


def test_ties_do_not_widen():
    assert search(SCALED, counts(0, 0, 64), 50) == 0.7
    assert search(SCALED, counts(15, 15, 34), 50) == 0.7  # fewer than half differ from 0
    assert search(SCALED, counts(16, 16, 32), 50) > 0.7
    assert search(SCALED, counts(1, 40, 23), 50) < 0.7  # and one-sided ones still narrow
    assert search(PRINTED, counts(0, 0, 7), 50) == 0.7  # nothing seen is not balance, whatever the share
    assert search(PRINTED, counts(1, 1, 5), 50) > 0.7  # the printed rule itself


def test_a_sign_that_too_few_gains_could_show_moves_nothing():
    for n in range(4):  # even all of one sign would pass: 3 < 2 + sqrt(3)
        assert calibration.direction(counts(n, 0), SCALED)[0] == 0
    assert calibration.direction(counts(4, 0), SCALED)[0] == -1


def test_only_the_levels_that_take_part_move():
    moved = calibration.advance(
        np.full(3, 0.7), Signs(*np.zeros((3, 3)))._replace(negative=np.full(3, 9)), SCALED, 0.0, 1.0, [True, False, True]
    )
    np.testing.assert_allclose(moved, [0.69, 0.7, 0.69])


def test_failed_gains_count_nowhere():
    gains = np.array([[1.0, -1.0, 0.0, np.nan], [np.nan] * 4, [2.0, 3.0, 0.0, 0.0]])
    assert [part.tolist() for part in calibration.signs(gains)] == [[1, 0, 2], [1, 0, 0], [1, 0, 2]]


def test_the_printed_rule_misjudges_symmetric_gains():
    assert [round(calibration.chance_balanced(PRINTED, n), 2) for n in (3, 5, 7, 9, 6, 8, 24, 48)] == [
        0.75,
        0.62,
        0.55,
        0.49,
        0.31,
        0.27,
        0.16,
        0.11,
    ]
    assert calibration.chance_balanced(SCALED, 64) == pytest.approx(0.74, abs=0.01)


def test_symmetric_gains_never_drift_down_by_default():
    """For every N from 5 to 256: the band holds more than half of the binomial, and simulated searches rise."""
    rng = np.random.default_rng(0)
    n = np.arange(5, 257)
    assert min(calibration.chance_balanced(SCALED, int(k)) for k in n) > 0.6
    value = np.full(n.size, 0.7)
    for _ in range(400):
        positive = rng.binomial(n, 0.5)
        value = calibration.advance(value, Signs(positive, n - positive, 0 * n), SCALED, 0.01, 5.0, np.ones(n.size, bool))
    assert value.min() > 0.7 + 400 * 0.01 * 0.1


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300), st.booleans())
def test_the_sign_of_the_imbalance_does_not_matter(a, b, zero, scaled):
    rule = Rule(scaled=scaled)
    assert calibration.direction(counts(a, b, zero), rule) == calibration.direction(counts(b, a, zero), rule)


def test_rest_is_told_from_drift():
    at = np.arange(40)[:, None]
    still, rising = 0.5 + 0.01 * (at % 2), 0.5 + 0.01 * at
    settled = partial(calibration.settled, average=20, eps2=0.01, share=0.25)
    assert settled(still) and not settled(rising) and not settled(np.hstack([still, rising]))
    assert settled(np.vstack([rising, 0.9 + still]))  # what was long ago does not matter
    assert settled(0.5 + 0.24 * 0.01 * at) and not settled(0.5 + 0.26 * 0.01 * at)
    assert not settled(still[:39]) and not calibration.settled(still, 20, 0.01, 0.0)


# --- excess noise ------------------------------------------------------------------------------------------------------


def test_start_value_without_a_reward():
    psi = calibration.psi_for_ratio(SD3, 1.05)
    np.testing.assert_allclose(calibration.noise_ratio(flow.psi_sde(SD3, psi), SD3)[:-1], 1.05)
    assert psi[-1] == 0.0  # any noise on the image is in excess
    multiplier = (psi / flow.flow_scale(SD3)).round(2).tolist()
    assert multiplier == [0.73, 0.65, 0.84, 0.91, 0.89, 0.80, 0.61, 0.34, 0.01, 0.0]
    with pytest.raises(ValueError, match="above 1"):
        calibration.psi_for_ratio(SD3, 1.0)


def test_the_noise_that_samplers_leave():
    table = flow.flow_sde(SD3, 0.7)
    np.testing.assert_allclose(calibration.noise_ratio(table, SD3)[:-1], flow.excess_noise(SD3, 0.7 * flow.flow_scale(SD3))[:-1])
    assert calibration.noise_ratio(table, SD3)[-1] == np.inf
    for table in (flow.cps(SD3, 0.7), flow.ddim_sde(SD3, 0.7), flow.ode(SD3)):
        np.testing.assert_allclose(calibration.noise_ratio(table, SD3), 1.0)


# --- sampling with a kernel that changes -------------------------------------------------------------------------------

W = 0.4 * jax.random.normal(jax.random.key(9), (6, 6))
GRID = flow.sd3_sigmas(5)
TWO = flow.branches(GRID, 2, "midpoint")
SCHEMES = {
    "euler": (flow.branches(GRID), "keep"),
    "respaced": (flow.substep_branches(GRID, 3, 3.0, "dpmpp2m", levels=np.arange(5) > 1), "keep"),
    "midpoint, paired": ((*TWO, *flow.paired(GRID, TWO)), "keep"),
    "skip_call": (flow.branches(GRID, "all", "ab2", tail="skip_call"), "skip_call"),
}


def velocity(x, sigma, cond=0.0):
    return jnp.tanh(x @ W) + (0.5 * sigma + cond)[:, None] * x


@pytest.mark.parametrize("name", SCHEMES)
def test_one_program_walks_with_any_kernel_and_completes_afterwards_too(name):
    scheme, tail = SCHEMES[name]
    key, ids, cond = jax.random.key(0), jnp.arange(4), jnp.linspace(-0.2, 0.2, 4)
    x, noise = flow.initial_noise(key, 0, ids, (6,)), flow.step_noise(key, 0, ids, 5, (6,))
    run = jax.jit(lambda kernel: flow.rollout_and_complete(velocity, x, kernel, GRID, noise, scheme, cond=cond, chunk=2, tail=tail))
    for a in (0.7, 0.3):
        kernel = calibration.table(GRID, a * flow.flow_scale(GRID), flow.all_but_last(5).stochastic)
        constant = jax.jit(lambda kernel=kernel: flow.rollout_and_complete(velocity, x, kernel, GRID, noise, scheme, cond=cond, tail=tail))
        trajectory, clean = run(jax.tree.map(jnp.float32, kernel))
        for ours, theirs in zip(jax.tree.leaves((trajectory, clean)), jax.tree.leaves(constant())):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
        later = calibration.complete_from(velocity, trajectory.latents, trajectory.velocity, scheme, cond=cond, chunk=2)
        np.testing.assert_allclose(later, clean, rtol=2e-5, atol=2e-5)
    assert run._cache_size() == 1  # another kernel is not another program


def test_a_completion_takes_no_evaluation_more_than_its_plan():
    calls = []

    def counted(x, sigma):
        jax.debug.callback(lambda: calls.append(1))
        return velocity(x, sigma)

    scheme = flow.branches(GRID)
    calibration.complete_from(counted, jnp.zeros((6, 2, 6)), jnp.zeros((5, 2, 6)), scheme)
    jax.effects_barrier()
    assert len(calls) == 10  # of 15, five are known

"""Credit methods: the papers' vectors, the identities between methods, and failed scores."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from densegrpo_jax import credit
from densegrpo_jax.credit import methods, normalize

TINY = 1e-12
DIFF_BASED = ["dense_grpo", "stepwise", "tp_grpo"]


def ones_group(batch):
    return np.zeros(batch, int)


def column(*rewards):
    """One trajectory, [T+1, 1]."""
    return np.array(rewards, float)[:, None]


@st.composite
def trajectories(draw, decimals=None):
    """(rewards [T+1, B], groups [B]) with several groups of different sizes in shuffled order."""
    sizes = draw(st.lists(st.integers(2, 6), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    groups = rng.permutation(np.repeat(rng.choice(1000, len(sizes), replace=False), sizes))
    rewards = rng.normal(22, 1, (draw(st.integers(1, 12)) + 1, len(groups)))
    return (rewards if decimals is None else rewards.round(decimals)), groups


def options_of(name, rewards):
    """CoCA needs similarities besides: a rising curve to 1."""
    if name != "coca":
        return {}
    return {"similarities": np.linspace(0.1, 1, len(rewards))[:, None] ** np.linspace(1, 2, rewards.shape[1])}


# --- the methods, one by one


def test_dense_and_stepwise_vector():
    rewards = np.array([[0, 0.4, 0.6], [0, 0.1, 0.7]]).T
    np.testing.assert_allclose(methods.dense_grpo(rewards, ones_group(2)).T, [[0.4, 0.2], [0.1, 0.6]], atol=1e-15)
    np.testing.assert_allclose(credit.advantages("dense_grpo", rewards, ones_group(2), eps=TINY).advantage.T, [[1, -1], [-1, 1]])
    joint = credit.advantages("stepwise", rewards, ones_group(2), eps=TINY).advantage.T
    np.testing.assert_allclose(joint, [[0.3906, -0.6509], [-1.1717, 1.4321]], atol=5e-5)


@given(trajectories())
def test_gains_sum_to_the_whole(batch):
    rewards, groups = batch
    for gains in (methods.dense_grpo(rewards, groups), methods.stepwise(rewards, groups)):
        np.testing.assert_allclose(gains.sum(axis=0), rewards[-1] - rewards[0], atol=1e-12)


@given(trajectories())
def test_discount_from_gains_to_the_return(batch):
    rewards, groups = batch
    gains = np.diff(rewards, axis=0)
    for gamma in (0.0, 0.5, 1.0):
        expected = [sum(gamma ** (j - i) * gains[j] for j in range(i, len(gains))) for i in range(len(gains))]
        np.testing.assert_allclose(methods.dense_grpo(rewards, groups, gamma=gamma), expected, atol=1e-11)
    np.testing.assert_allclose(methods.dense_grpo(rewards, groups, gamma=1.0), rewards[-1] - rewards[:-1], atol=1e-11)


def test_paired_baseline():
    rewards, baseline = np.array([[9.0, 9], [2, 3], [5, 5]]), np.array([[1.0, 1], [2, 4]])
    np.testing.assert_array_equal(methods.dense_grpo(rewards, ones_group(2), baseline=baseline), [[1, 2], [3, 1]])
    assert (methods.dense_grpo(rewards, ones_group(2), baseline=rewards[1:]) == 0).all()
    np.testing.assert_array_equal(methods.dense_grpo(rewards, ones_group(2), gamma=1.0, baseline=baseline), [[4, 3], [3, 1]])
    with pytest.raises(ValueError, match="baseline"):
        methods.dense_grpo(rewards, ones_group(2), baseline=rewards)


def test_sparse_and_dense_reward():
    rewards = np.array([[1.0, 2], [3, 5], [4, 9]])
    np.testing.assert_array_equal(methods.flow_grpo(rewards, ones_group(2)), [[4, 9], [4, 9]])
    np.testing.assert_array_equal(methods.dense_reward(rewards, ones_group(2)), [[3, 5], [4, 9]])


@given(trajectories())
def test_undiscounted_gains_from_a_common_start_are_flow_grpo(batch):
    """... at the first step."""
    rewards, groups = batch
    rewards[0] = 21.3
    dense = credit.advantages("dense_grpo", rewards, groups, gamma=1.0).advantage
    np.testing.assert_allclose(dense[0], credit.advantages("flow_grpo", rewards, groups).advantage[0], atol=1e-8)


@pytest.mark.parametrize("variant", ["constrained", "loose"])
@pytest.mark.parametrize(
    ("rewards", "constrained", "loose"),
    [
        ([20, 20.5, 20.3, 20.9, 21.4], [1.4, -0.2, 1.1, 0.5], [1.4, -0.2, 1.1, 0.5]),
        ([21, 20.6, 20.9, 20.2, 20.4], [-0.6, 0.3, -0.7, 0.2], [-0.6, 0.3, -0.5, 0.2]),
        ([1, 1, 1, 1], [0, 0, 0], [0, 0, 0]),
        ([0, 1, 0.5, 0.2, 0.9], [1, -0.5, -0.3, 0.7], [0.9, -0.5, -0.3, 0.7]),
    ],
)
def test_turning_point_vectors(variant, rewards, constrained, loose):
    got = methods.tp_grpo(column(*rewards), ones_group(1), variant=variant, balance=False)[:, 0]
    np.testing.assert_allclose(got, constrained if variant == "constrained" else loose, atol=1e-12)


@given(trajectories(decimals=0), st.sampled_from(["constrained", "loose"]))
def test_turning_points_step_by_step(batch, variant):
    """The definitions spelt out with signs and loops, on rewards with many ties."""
    rewards, groups = batch
    got = methods.tp_grpo(rewards, groups, variant=variant, balance=False)
    for b in range(rewards.shape[1]):
        r = rewards[:, b]
        trend, gains = np.sign(r[-1] - r[0]), np.diff(r)
        for i, gain in enumerate(gains):
            turns = np.sign(gain) * trend > 0 and (i == 0 or np.sign(gains[i - 1]) * trend < 0)
            if variant == "constrained":
                turns = turns and np.sign(gain) == np.sign(r[-1] - r[i + 1])
            assert got[i, b] == (r[-1] - r[i] if turns else gain)
            if turns and variant == "constrained":
                assert abs(got[i, b]) > abs(gain) and i < len(gains) - 1


@given(trajectories(), st.booleans())
def test_tp_grpo_without_flips_is_dense_grpo(batch, balance):
    rewards, groups = batch
    rising = np.sort(rewards, axis=0)
    rising[:, ::2] = -rising[:, ::2]  # some only fall
    got = methods.tp_grpo(rising, groups, variant="loose", balance=balance, first_step=False)
    np.testing.assert_array_equal(got, methods.dense_grpo(rising, groups))


@given(trajectories(), st.sampled_from(["constrained", "loose"]))
def test_balance_keeps_the_largest_of_each_sign(batch, variant):
    rewards, groups = batch
    gains, to_end = np.diff(rewards, axis=0), rewards[-1] - rewards[:-1]
    free = methods.tp_grpo(rewards, groups, variant=variant, balance=False)
    balanced = methods.tp_grpo(rewards, groups, variant=variant)
    free_at, kept = free != gains, balanced != gains
    assert (kept <= free_at).all()
    np.testing.assert_array_equal(balanced[kept], to_end[kept])
    if variant == "loose":  # a last step is replaced by itself, which cannot be seen here; the constrained rule has none
        return
    positive, negative = free_at & (to_end > 0), free_at & (to_end < 0)
    assert (kept & positive).sum() == (kept & negative).sum() == min(positive.sum(), negative.sum())
    for side in (positive, negative):
        if (side & kept).any() and (side & ~kept).any():
            assert np.abs(to_end[side & kept]).min() >= np.abs(to_end[side & ~kept]).max()


def test_coca_vector():
    similarities = column(0.1, 0.3, 0.5, 0.8, 1)
    share = methods.coca_weights(similarities, 2)[:, 0]
    np.testing.assert_allclose(share, [0.1875, 0.1875, 0.3125, 0.3125])
    two = np.repeat(similarities, 2, axis=1)
    rewards = np.array([[0.0, 0]] * 4 + [[-1, 1]])
    options = {"similarities": two, "window": 2, "eps": TINY}
    to_go = credit.advantages("coca", rewards, ones_group(2), **options).advantage
    np.testing.assert_allclose(to_go[:, 1], [1, 0.8125, 0.625, 0.3125])
    np.testing.assert_allclose(to_go[:, 0], -to_go[:, 1])
    mixed = credit.advantages("coca", rewards, ones_group(2), weights="share", alpha=0.25, **options).advantage
    np.testing.assert_allclose(mixed[:, 1], 0.25 + 0.75 * 4 * share)
    twice = credit.advantages("coca", rewards, ones_group(2), over="joint", **options).advantage
    np.testing.assert_allclose(twice[:, 1], to_go[:, 1] / np.sqrt((to_go**2).mean()))


@given(trajectories(), st.integers(1, 4))
def test_coca_weights_sum_to_one_and_uniform_ones_fall_linearly(batch, window):
    rewards, groups = batch
    steps, size = len(rewards) - 1, rewards.shape[1]
    assume(steps % window == 0)
    noisy = np.random.default_rng(3).uniform(-1, 1, rewards.shape)
    noisy[-1] = 1
    np.testing.assert_allclose(methods.coca_weights(noisy, window).sum(axis=0), 1, atol=1e-9)
    ramp = np.linspace(0.2, 1, steps + 1)[:, None].repeat(size, axis=1)
    expected = (1 - np.arange(steps) / steps)[:, None] * credit.advantages("flow_grpo", rewards, groups).advantage
    np.testing.assert_allclose(methods.coca(rewards, groups, similarities=ramp), expected, atol=1e-12)


def test_coca_shares_alike_when_the_similarity_does_not_rise():
    flat = np.array([[0.9, 0.9, 0.9], [0.5, 0.9, 0.95], [0.9, 0.9, 1.0]])
    flat[-1, 0] -= 0.3  # falls
    np.testing.assert_allclose(methods.coca_weights(flat), [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]])


# --- all of them


@given(trajectories(), st.sampled_from(DIFF_BASED), st.sampled_from([1.0, -22.0, 1e4]))
def test_a_constant_added_to_all_rewards_changes_nothing(batch, name, constant):
    rewards, groups = batch
    expected = credit.advantages(name, rewards, groups).advantage
    np.testing.assert_allclose(credit.advantages(name, rewards + constant, groups).advantage, expected, atol=1e-6)


@given(trajectories(), st.sampled_from(list(credit.METHODS)), st.sampled_from(["group", "global"]), st.randoms())
def test_shuffling_trajectories_shuffles_advantages(batch, name, std, random):
    rewards, groups = batch
    order = random.sample(range(len(groups)), len(groups))
    options = options_of(name, rewards)
    straight = credit.advantages(name, rewards, groups, std=std, **options).advantage
    options = {key: value[:, order] for key, value in options.items()}
    shuffled = credit.advantages(name, rewards[:, order], groups[order], std=std, **options).advantage
    np.testing.assert_allclose(shuffled, straight[:, order], atol=1e-8)


@given(trajectories())
def test_stepwise_is_dense_grpo_when_all_steps_have_the_same_moments(batch):
    rewards, groups = batch
    gains = np.diff(rewards, axis=0)
    for group in np.unique(groups):
        gains[:, groups == group] = normalize.advantages(gains[:, groups == group], ones_group((groups == group).sum()), eps=TINY)
    rewards = np.concatenate([rewards[:1], rewards[:1] + np.cumsum(3 * gains + 0.5, axis=0)])
    stepwise, dense = (credit.advantages(name, rewards, groups).advantage for name in ("stepwise", "dense_grpo"))
    np.testing.assert_allclose(stepwise, dense, atol=1e-6)


@pytest.mark.parametrize("name", credit.METHODS)
def test_equal_rewards_give_exactly_zero(name):
    rewards = np.repeat([[21.7], [0.1], [1 / 3], [22.04]], 24, axis=1)
    if name == "stepwise":  # its mean is over steps as well
        rewards[:] = 21.7
    assert (credit.advantages(name, rewards, ones_group(24), **options_of(name, rewards)).advantage == 0).all()


@given(trajectories(), st.sampled_from(list(credit.METHODS)), st.sampled_from(["group", "global"]), st.data())
def test_failed_trajectories_are_as_if_absent(batch, name, std, data):
    rewards, groups = batch
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=len(groups), max_size=len(groups))))
    assume(valid.any())
    options = options_of(name, rewards)
    got = credit.advantages(name, np.where(valid, rewards, np.inf), groups, std=std, valid=valid, **options)
    options = {key: value[:, valid] for key, value in options.items()}
    alone = credit.advantages(name, rewards[:, valid], groups[valid], std=std, **options)
    np.testing.assert_array_equal(got.advantage[:, valid], alone.advantage)  # to the bit
    assert (got.advantage[:, ~valid] == 0).all()
    np.testing.assert_array_equal(got.mask, np.broadcast_to(valid, got.mask.shape))


@pytest.mark.parametrize(
    ("name", "options", "masked"),
    [  # T = 5; a score of trajectory 1 failed at level 2: step 1 leads to it, step 2 from it
        ("flow_grpo", {}, []),
        ("dense_grpo", {}, [1, 2]),
        ("dense_grpo", {"gamma": 0.5}, [0, 1, 2]),
        ("dense_reward", {}, [1]),
        ("stepwise", {}, [1, 2]),
        ("tp_grpo", {}, [1, 2, 3]),  # step 3 needs to know which way step 2 went
        ("coca", {}, []),
    ],
)
def test_one_failed_score_masks_the_steps_that_read_it(name, options, masked):
    rewards = np.random.default_rng(0).normal(size=(6, 8))
    valid = np.ones(rewards.shape, bool)
    valid[2, 1] = False
    got = credit.advantages(name, rewards, ones_group(8), valid=valid, **options, **options_of(name, rewards))
    expected = np.ones((5, 8), bool)
    expected[masked, 1] = False
    np.testing.assert_array_equal(got.mask, expected)
    np.testing.assert_array_equal(np.isnan(got.credit), ~expected)
    assert (got.advantage[~expected] == 0).all() and np.isfinite(got.advantage).all()
    whole = credit.advantages(name, rewards, ones_group(8), **options, **options_of(name, rewards))
    untouched = [i for i in range(5) if i not in masked]
    if name not in ("stepwise", "tp_grpo"):  # joint statistics, and a batch balanced anew
        np.testing.assert_array_equal(got.advantage[untouched], whole.advantage[untouched])


def test_a_failed_end_leaves_nothing_to_coca_flow_and_tp():
    rewards, valid = np.random.default_rng(0).normal(size=(4, 5)), np.ones((4, 5), bool)
    valid[-1, 2] = False
    for name in ("coca", "flow_grpo", "tp_grpo"):
        mask = credit.advantages(name, rewards, ones_group(5), valid=valid, **options_of(name, rewards)).mask
        np.testing.assert_array_equal(mask, np.broadcast_to(np.arange(5) != 2, (3, 5)))


def test_a_failed_baseline_masks_its_gain():
    rewards, baseline = np.random.default_rng(0).normal(size=(4, 5)), np.zeros((3, 5))
    baseline[1, 2] = np.nan
    mask = credit.advantages("dense_grpo", rewards, ones_group(5), baseline=baseline).mask
    assert np.argwhere(~mask).tolist() == [[1, 2]]


def test_near_equal_rewards_keep_their_order():
    """PickScore near 22 with a spread of 1e-3, and 0.8 with a jitter of 1e-7, against long doubles."""
    rng = np.random.default_rng(0)
    for level, spread, dtype in [(22, 1e-3, np.float64), (22, 1e-3, np.float32), (0.8, 1e-7, np.float64)]:
        rewards = (level + spread * rng.normal(size=(4, 24))).astype(dtype)
        gains = np.diff(rewards.astype(np.longdouble), axis=0)
        offset = gains - gains.mean(axis=1, keepdims=True)
        expected = offset / (np.sqrt((offset**2).mean(axis=1, keepdims=True)) + 1e-4)
        got = credit.advantages("dense_grpo", rewards, ones_group(24)).advantage
        np.testing.assert_allclose(got, expected.astype(float), rtol=1e-6, atol=1e-9)


def test_a_function_of_ones_own():
    def late_gains(rewards, groups, power):
        weight = np.arange(1, len(rewards))[:, None] ** power
        return weight * np.diff(rewards, axis=0)

    rewards = np.random.default_rng(0).normal(size=(4, 6))
    groups = np.array([0, 0, 0, 1, 1, 1])
    got = credit.advantages(late_gains, rewards, groups, over="joint", power=2)
    np.testing.assert_array_equal(got.credit, [[1], [4], [9]] * np.diff(rewards, axis=0))
    np.testing.assert_array_equal(got.advantage, normalize.advantages(got.credit, groups, over="joint"))


def test_own_function_must_return_finite_credits_of_the_right_shape():
    rewards = np.ones((4, 3))
    with pytest.raises(ValueError, match=r"expected \[T, B\] = \(3, 3\)"):
        credit.advantages(lambda rewards, groups: rewards, rewards, ones_group(3))
    with pytest.raises(ValueError, match="returned NaN"):  # a mean over members that takes a failed one in
        spread = np.array([True, True, False])
        credit.advantages(lambda r, g: r[1:] - r[1:].mean(axis=1, keepdims=True), rewards, ones_group(3), valid=spread)


@pytest.mark.parametrize(
    ("method", "rewards", "options", "message"),
    [
        ("grpo", np.ones((3, 2)), {}, "unknown credit method 'grpo'; known: flow_grpo, dense_grpo"),
        ("dense_grpo", np.ones(3), {}, "time first"),
        ("dense_grpo", np.ones((1, 2)), {}, "T >= 1"),
        ("dense_grpo", np.ones((3, 3)), {}, "integer ids"),
        ("dense_grpo", np.array([[1, 1], [1, np.nan], [1, 1]]), {}, "level 1, trajectory 1 is nan"),
        ("dense_grpo", np.ones((3, 2)), {"gamma": 1.1}, "gamma"),
        ("dense_grpo", np.ones((3, 2)), {"valid": np.ones((2, 2), bool)}, "valid"),
        ("tp_grpo", np.ones((3, 2)), {"variant": "strict"}, "variant"),
        ("coca", np.ones((3, 2)), {"similarities": np.ones((2, 2))}, "similarities"),
        ("coca", np.ones((3, 2)), {"similarities": np.full((3, 2), np.nan)}, "finite"),
        ("coca", np.ones((5, 2)), {"similarities": np.ones((5, 2)), "window": 3}, r"valid: \[1, 2, 4\]"),
        ("coca", np.ones((3, 2)), {"similarities": np.ones((3, 2)), "weights": "gain"}, "weights"),
        ("coca", np.ones((3, 2)), {"similarities": np.ones((3, 2)), "alpha": -0.1}, "alpha"),
    ],
)
def test_refusals(method, rewards, options, message):
    with pytest.raises(ValueError, match=message):
        credit.advantages(method, rewards, ones_group(2), **options)


def test_writing_to_a_credit_leaves_the_rewards_alone():
    rewards = np.random.default_rng(0).normal(size=(4, 5))
    before = rewards.copy()
    for name, method in credit.METHODS.items():
        method.credit(rewards, ones_group(5), **options_of(name, rewards))[:] = 0
    np.testing.assert_array_equal(rewards, before)


def test_gain_balance():
    gains = np.array([[1.0, 3, -2, 0], [np.nan, 1, 1, 1], [np.nan] * 4])
    balance = credit.gain_balance(gains, np.array([0, 0, 1, 1]))
    np.testing.assert_array_equal(balance["positive"], [0.5, 1, 0])
    np.testing.assert_array_equal(balance["negative"], [0.25, 0, 0])
    np.testing.assert_array_equal(balance["zero"], [0.25, 0, 0])
    np.testing.assert_array_equal(balance["std"], [1, 0, 0])  # 1 within both groups
    np.testing.assert_array_equal(balance["count"], [4, 3, 0])
    with pytest.raises(ValueError, match=r"\[T, B\]"):
        credit.gain_balance(gains[0], np.zeros(4, int))


def test_a_fitted_slope_leaves_nothing_that_depends_on_the_reward_before():
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1, 2], 8)
    rewards = np.cumsum(rng.normal(size=(5, 24)), axis=0) + 10.0 * groups
    rewards[3, 5] = np.nan
    credit = methods.dense_grpo(rewards, groups, slope="fitted")
    assert (np.isnan(credit) == np.isnan(np.diff(rewards, axis=0))).all()
    for t in range(4):
        there = ~np.isnan(credit[t])
        left, before, gain = (_within(x[t][there], groups[there]) for x in (credit, rewards, np.diff(rewards, axis=0)))
        assert abs((left * before).sum()) < 1e-9
        assert left.var() <= gain.var() + 1e-12


def _within(values, groups):
    return values - np.array([values[groups == g].mean() for g in groups])


def test_a_fitted_slope_is_one_where_a_step_adds_a_constant_and_zero_where_nothing_varied():
    groups = np.array([0, 0, 1, 1])
    rewards = np.array([[1.0, 1.0, 1.0, 1.0], [2.0, 3.0, 5.0, 9.0], [2.5, 3.5, 5.5, 9.5]])
    np.testing.assert_allclose(methods.dense_grpo(rewards, groups, slope="fitted"), [rewards[1], [0.5] * 4])


@pytest.mark.parametrize(("options", "reason"), [({"slope": "two"}, "slope must be"), ({"slope": "fitted", "gamma": 0.5}, "for gamma = 0")])
def test_slopes_that_do_not_go(options, reason):
    with pytest.raises(ValueError, match=reason):
        methods.dense_grpo(np.zeros((3, 4)), np.zeros(4, int), **options)

"""Group statistics: moments, exactness, masks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax.credit.normalize import advantages, deviations

TINY = 1e-12  # an eps that leaves no trace


@st.composite
def batches(draw):
    """(credit [T, B], groups [B]) with groups of different sizes in shuffled order and arbitrary ids."""
    sizes = draw(st.lists(st.integers(2, 7), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = rng.choice(np.arange(-50, 50), len(sizes), replace=False)
    groups = rng.permutation(np.repeat(ids, sizes))
    steps = draw(st.integers(1, 12))
    return rng.normal(draw(st.sampled_from([0.0, 22.0])), draw(st.sampled_from([1e-3, 1.0])), (steps, len(groups))), groups


@given(batches())
def test_per_step_group_moments(batch):
    credit, groups = batch
    advantage = advantages(credit, groups, eps=TINY)
    for group in np.unique(groups):
        np.testing.assert_allclose(advantage[:, groups == group].mean(axis=1), 0, atol=1e-10)
        np.testing.assert_allclose(advantage[:, groups == group].std(axis=1), 1, rtol=1e-6)


@given(batches())
def test_joint_group_moments(batch):
    credit, groups = batch
    advantage = advantages(credit, groups, over="joint", eps=TINY, clip=np.inf)
    for group in np.unique(groups):
        np.testing.assert_allclose(advantage[:, groups == group].mean(), 0, atol=1e-10)
        np.testing.assert_allclose(advantage[:, groups == group].std(), 1, rtol=1e-6)


@given(batches(), st.sampled_from(["per_step", "joint"]), st.sampled_from(["group", "global"]))
def test_agrees_with_plain_formula(batch, over, std):
    credit, groups = batch
    axes = {"per_step": 1, "joint": None}[over]
    expected = np.empty_like(credit)
    for group in np.unique(groups):
        values = credit[:, groups == group]
        scale = np.std(values if std == "group" else credit, axis=axes, keepdims=True)
        expected[:, groups == group] = (values - values.mean(axis=axes, keepdims=True)) / (scale + 1e-4)
    np.testing.assert_allclose(advantages(credit, groups, over=over, std=std), expected.clip(-5, 5), rtol=1e-8, atol=1e-8)


@given(batches(), st.sampled_from(["per_step", "joint"]), st.sampled_from(["group", "global"]), st.randoms())
def test_shuffling_trajectories_shuffles_advantages(batch, over, std, random):
    credit, groups = batch
    order = random.sample(range(len(groups)), len(groups))
    shuffled = advantages(credit[:, order], groups[order], over=over, std=std)
    np.testing.assert_allclose(shuffled, advantages(credit, groups, over=over, std=std)[:, order], atol=1e-9)


@given(batches(), st.sampled_from(["per_step", "joint"]), st.sampled_from(["group", "global"]), st.data())
def test_failed_members_are_as_if_absent(batch, over, std, data):
    credit, groups = batch
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=len(groups), max_size=len(groups))))
    poisoned = np.where(valid, credit, np.nan)
    advantage = advantages(poisoned, groups, over=over, std=std, valid=valid)
    np.testing.assert_array_equal(advantage[:, valid], advantages(credit[:, valid], groups[valid], over=over, std=std))  # to the bit
    assert (advantage[:, ~valid] == 0).all()


@given(batches(), st.integers(0, 2**32 - 1))
def test_a_mask_per_step_acts_at_its_step_only(batch, seed):
    credit, groups = batch
    valid = np.random.default_rng(seed).random(credit.shape) < 0.7
    advantage = advantages(credit, groups, valid=valid)
    for t in range(len(credit)):
        kept = valid[t]
        np.testing.assert_array_equal(advantage[t, kept], advantages(credit[t : t + 1, kept], groups[kept])[0])
        assert (advantage[t, ~kept] == 0).all()


@pytest.mark.parametrize("value", [0.1, 21.7, 1 / 3, 0.0, -1e-9, 1e6 + 0.1])
@pytest.mark.parametrize("std", ["group", "global"])
@pytest.mark.parametrize("over", ["per_step", "joint"])
def test_an_all_equal_group_gets_exactly_zero(value, std, over):
    credit = np.concatenate([np.full((3, 24), value), np.random.default_rng(0).normal(size=(3, 24))], axis=1)
    groups = np.repeat([0, 1], 24)
    advantage = advantages(credit, groups, std=std, over=over)
    assert (advantage[:, :24] == 0).all()
    assert np.abs(advantage[:, 24:]).min() > 0


def test_a_single_valid_member_gets_zero():
    assert advantages(np.array([[0.3, 9.0]]), np.zeros(2, int), valid=np.array([True, False])).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(("level", "spread"), [(22.0, 1e-3), (0.8, 1e-7), (1e6, 1e-7)])
def test_no_cancellation(level, spread):
    """Near-equal rewards on a level: as good as without the level, up to the rounding of the rewards themselves."""
    rewards = level + spread * np.random.default_rng(1).normal(size=(1, 24))
    exact = [int(x * 2**60) for x in rewards[0]]  # integers: differences without rounding
    offset = np.array([24 * x - sum(exact) for x in exact], np.float64) / 24 / 2**60
    expected = offset / (np.sqrt(np.mean(offset**2)) + 1e-12)
    np.testing.assert_allclose(advantages(rewards, np.zeros(24, int), eps=1e-12)[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(deviations(rewards[0]), offset, rtol=1e-5, atol=1e-6 * spread)


def test_prompts_two_groups_by_hand():
    """Group and global statistics of a two-prompt batch, with eps too small to see."""
    credit, groups = np.array([[1.0, 10.0, 3.0, 14.0]]), np.array([7, -2, 7, -2])
    np.testing.assert_allclose(advantages(credit, groups, eps=TINY), [[-1, -1, 1, 1]])
    std = np.std([1, 10, 3, 14])
    np.testing.assert_allclose(advantages(credit, groups, std="global", eps=TINY), [[-1 / std, -2 / std, 1 / std, 2 / std]])


def test_eps_and_clip():
    credit = np.array([[0.0, 2e-4]])
    np.testing.assert_allclose(advantages(credit, np.zeros(2, int)), [[-0.5, 0.5]])
    outlier = np.zeros((1, 101))
    outlier[0, 3] = 1.0
    assert advantages(outlier, np.zeros(101, int)).max() == 5.0
    assert advantages(outlier, np.zeros(101, int), clip=2.0).max() == 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"credit": np.zeros(4)}, r"\[T, B\]"),
        ({"groups": np.zeros(3, int)}, r"shape \(4,\)"),
        ({"groups": np.zeros(4)}, "integer"),
        ({"valid": np.ones(3, bool)}, "valid must be bool"),
        ({"valid": np.ones(4)}, "valid must be bool"),
        ({"std": "batch"}, "std"),
        ({"over": "step"}, "over"),
        ({"eps": 0.0}, "positive"),
        ({"clip": -1.0}, "positive"),
        ({"credit": np.array([[0, 0, 0, 0], [0, 0, np.nan, 0]])}, "step 1, trajectory 2"),
        ({"credit": np.array([[0, np.inf, 0, 0], [0, 0, 0, 0]])}, "step 0, trajectory 1"),
    ],
)
def test_refusals(change, message):
    arguments = {"credit": np.zeros((2, 4)), "groups": np.zeros(4, int)} | change
    with pytest.raises(ValueError, match=message):
        advantages(**arguments)

"""Token-wise densities, ratios and credit maps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax.credit import spatial


pixel_credit = jax.jit(spatial.pixel_credit, static_argnames="sign")


def normal(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape)


def step(shape, seed=0):
    """(velocity, velocity_old, noise, mean_old, slope [B], std [B]) of a Gaussian step with mean x + slope v."""
    x, v_old, noise, delta = (normal(seed + i, shape) for i in range(4))
    slope, std = -jnp.linspace(0.05, 0.2, shape[0]), jnp.linspace(0.1, 0.7, shape[0])
    expand = (-1,) + (1,) * (len(shape) - 1)
    return v_old + 0.01 * delta, v_old, noise, x + slope.reshape(expand) * v_old, slope, std


@pytest.mark.parametrize("patch", [1, 2, 4])
def test_tokens_are_patches_row_by_row(patch):
    values = normal(0, (2, 4, 8, 3))
    got = spatial.sum_per_token(values, patch)
    expected = [[values[b, r : r + patch, c : c + patch].sum() for r in range(0, 4, patch) for c in range(0, 8, patch)] for b in range(2)]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_packed_and_unpacked_latents_agree():
    velocity, velocity_old, noise, _, slope, std = step((2, 4, 6, 3))

    def pack(x):
        return x.reshape(2, 2, 2, 3, 2, 3).swapaxes(2, 3).reshape(2, 6, 12)

    unpacked = spatial.token_log_ratio(velocity, velocity_old, noise, slope, std)
    packed = spatial.token_log_ratio(pack(velocity), pack(velocity_old), pack(noise), slope, std)
    np.testing.assert_allclose(packed, unpacked, rtol=1e-5, atol=1e-6)


def test_log_prob_sums_to_the_joint_density():
    _, _, noise, mean, _, std = step((3, 4, 4, 5))
    x_next = mean + std[:, None, None, None] * noise
    got = spatial.token_log_prob(x_next, mean, std)
    assert got.shape == (3, 4)
    joint = scipy.stats.norm.logpdf(np.float64(x_next), np.float64(mean), np.float64(std)[:, None, None, None]).sum(axis=(1, 2, 3))
    np.testing.assert_allclose(got.sum(axis=1), joint, rtol=1e-5)


@given(st.integers(0, 1000), st.sampled_from([(2, 4, 6, 3), (3, 5, 7)]))
def test_log_ratio_is_the_difference_of_densities(seed, shape):
    velocity, velocity_old, noise, mean_old, slope, std = step(shape, 10 * seed)
    got = spatial.token_log_ratio(velocity, velocity_old, noise, slope, std)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.float64(x)) for x in (velocity, velocity_old, noise, mean_old, slope, std)]
        velocity, velocity_old, noise, mean_old, slope, std = wide
        expand = (-1,) + (1,) * (len(shape) - 1)
        x_next = mean_old + std.reshape(expand) * noise
        mean = mean_old + slope.reshape(expand) * (velocity - velocity_old)
        expected = np.asarray(spatial.token_log_prob(x_next, mean, std) - spatial.token_log_prob(x_next, mean_old, std))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_log_ratio_is_exactly_zero_for_equal_velocities():
    _, velocity, noise, _, slope, std = step((2, 4, 4, 3))
    assert (spatial.token_log_ratio(velocity, velocity, noise, slope, std) == 0).all()


def test_a_step_without_noise_is_left_out(nan_checks):
    velocity, velocity_old, noise, mean, slope, std = step((2, 4, 4, 3))
    std = std.at[1].set(0.0)

    @jax.jit
    @jax.grad
    def gradient(velocity):
        return spatial.token_log_ratio(velocity, velocity_old, noise, slope, std).sum()

    assert (gradient(velocity)[1] == 0).all() and (gradient(velocity)[0] != 0).any()
    assert (spatial.token_log_prob(mean, mean, std)[1] == 0).all()


def test_surrogate_against_loops():
    log_ratio, advantage = 0.3 * normal(0, (2, 6)), normal(1, (2, 6))
    expected = [
        np.mean([-min(np.exp(l) * a, np.clip(np.exp(l), 0.8, 1.2) * a) for l, a in zip(*rows)]) for rows in zip(log_ratio, advantage)
    ]
    np.testing.assert_allclose(spatial.token_surrogate(log_ratio, advantage), expected, rtol=1e-5)


@pytest.mark.parametrize("normalise", ["max1", "mean1"])
def test_equal_credit_is_the_token_wise_baseline(normalise):
    credit = spatial.token_credit(spatial.pixel_credit(jnp.zeros((2, 32, 48))), normalise=normalise)
    assert credit.shape == (2, 6) and (credit == 1).all()


def test_map_vector():
    gradient = jnp.array([1.0, 2, 3, 4, 10]).reshape(1, 1, 5)
    released = spatial.pixel_credit(gradient)
    np.testing.assert_allclose(released[0, 0], [1, 0.99995, 0.5, 4.5e-5, 0], atol=5e-6)
    np.testing.assert_allclose(spatial.pixel_credit(gradient, sign=1), 1 - released, atol=1e-6)
    np.testing.assert_allclose(spatial.token_credit(released, 1)[0], released[0, 0], atol=1e-6)  # the largest is 1 already


@given(st.integers(0, 1000), st.sampled_from([-1, 1]), st.sampled_from([0.25, 1.0]))
def test_map_properties(seed, sign, confidence):
    gradient = jnp.abs(normal(seed, (2, 8, 12)))
    credit = pixel_credit(gradient, sign=sign)
    np.testing.assert_allclose(pixel_credit(1e-6 * gradient, sign=sign), credit, atol=1e-3)  # free of the reward's scale
    order = np.argsort(gradient.reshape(2, -1), axis=1)
    assert (sign * np.diff(np.take_along_axis(np.array(credit).reshape(2, -1), order, axis=1)) >= 0).all()

    pooled = np.array(credit).reshape(2, 2, 4, 3, 4).mean(axis=(2, 4)).reshape(2, 6)
    top = spatial.token_credit(credit, 4, confidence=confidence)
    np.testing.assert_allclose(top, confidence * (pooled + 1 - pooled.max(axis=1, keepdims=True)) + 1 - confidence, atol=1e-6)
    np.testing.assert_allclose(top.max(axis=1), 1, atol=1e-6)
    mean = spatial.token_credit(credit, 4, normalise="mean1", confidence=confidence)
    np.testing.assert_allclose(mean.mean(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(mean, confidence * pooled / pooled.mean(axis=1, keepdims=True) + 1 - confidence, atol=1e-5)


def test_refusals():
    latents, std = jnp.zeros((2, 4, 4, 3)), jnp.ones(2)
    with pytest.raises(ValueError, match="multiples of patch 3"):
        spatial.sum_per_token(latents, 3)
    with pytest.raises(ValueError, match="f32"):
        spatial.token_log_prob(latents.astype(jnp.bfloat16), latents, std)
    with pytest.raises(ValueError, match="share one shape"):
        spatial.token_log_ratio(latents, latents, latents[:, :2], std, std)
    with pytest.raises(ValueError, match="share one shape"):
        spatial.token_log_prob(latents, latents, jnp.ones(1))
    with pytest.raises(ValueError, match=r"\[B, N\]"):
        spatial.token_surrogate(jnp.zeros((2, 4)), jnp.zeros(2))
    with pytest.raises(ValueError, match="norm over RGB"):
        spatial.pixel_credit(latents)
    with pytest.raises(ValueError, match="sign"):
        spatial.pixel_credit(jnp.zeros((1, 4, 4)), sign=0)
    with pytest.raises(ValueError, match="temperature"):
        spatial.pixel_credit(jnp.zeros((1, 4, 4)), temperature=0.0)
    with pytest.raises(ValueError, match="token_pixels 16"):
        spatial.token_credit(jnp.zeros((1, 8, 16)))
    with pytest.raises(ValueError, match="normalise"):
        spatial.token_credit(jnp.zeros((1, 16, 16)), normalise="sum1")
    with pytest.raises(ValueError, match="confidence"):
        spatial.token_credit(jnp.zeros((1, 16, 16)), confidence=2.0)

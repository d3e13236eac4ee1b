"""Token-wise densities, ratios and credit maps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax.credit import spatial
from densegrpo_jax.flow import grid, kernels
from densegrpo_jax.objective import surrogate

pixel_credit = jax.jit(spatial.pixel_credit, static_argnames="sign")


def normal(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape)


def sampled(shape, seed=0):
    """(kernel, x, velocity, noise) of steps of different noise."""
    x, velocity, noise = (normal(10 * seed + i, shape) for i in range(3))
    kernel = kernels.flow_sde(grid.uniform_sigmas(8), 0.7).at(jnp.arange(shape[0]) + 1)
    return kernel, x, velocity, noise


@pytest.mark.parametrize("patch", [1, 2, 4])
def test_tokens_are_patches_row_by_row(patch):
    values = normal(0, (2, 4, 8, 3))
    got = spatial.sum_per_token(values, patch)
    expected = [[values[b, r : r + patch, c : c + patch].sum() for r in range(0, 4, patch) for c in range(0, 8, patch)] for b in range(2)]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_packed_and_unpacked_latents_agree():
    kernel, _, velocity, noise = sampled((2, 4, 6, 3))

    def pack(x):
        return x.reshape(2, 2, 2, 3, 2, 3).swapaxes(2, 3).reshape(2, 6, 12)

    unpacked = spatial.token_log_ratio(kernel, 1.01 * velocity, velocity, noise)
    packed = spatial.token_log_ratio(kernel, pack(1.01 * velocity), pack(velocity), pack(noise))
    np.testing.assert_allclose(packed, unpacked, rtol=1e-5, atol=1e-6)


def test_log_prob_sums_to_the_joint_density():
    kernel, x, velocity, noise = sampled((3, 4, 4, 5))
    mean, std = kernels.transition_mean(kernel, x, velocity), kernel.std[:, None, None, None]
    got = spatial.token_log_prob(kernel, x, velocity, mean + std * noise)
    assert got.shape == (3, 4)
    joint = scipy.stats.norm.logpdf(np.float64(mean + std * noise), np.float64(mean), np.float64(std)).sum(axis=(1, 2, 3))
    np.testing.assert_allclose(got.sum(axis=1), joint, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, 4, 6, 5), (3, 6, 8)])
@given(seed=st.integers(0, 1000))
def test_log_ratio_sums_to_that_of_the_image(shape, seed):
    kernel, _, velocity, noise = sampled(shape, seed)
    new = velocity + 0.01 * normal(seed, shape)
    size = np.prod(shape[1:])
    expected = size * kernels.log_ratio(kernel, new, velocity, noise)
    np.testing.assert_allclose(spatial.token_log_ratio(kernel, new, velocity, noise).sum(axis=1), expected, rtol=1e-4, atol=1e-6)


def test_log_ratio_is_the_difference_of_log_probs_in_float64():
    kernel, x, velocity, noise = sampled((3, 4, 4, 5))
    new = velocity + 0.01 * normal(7, velocity.shape)
    got = spatial.token_log_ratio(kernel, new, velocity, noise)
    with jax.enable_x64(True):
        kernel, x, velocity, noise, new = jax.tree.map(lambda leaf: jnp.asarray(np.float64(leaf)), (kernel, x, velocity, noise, new))
        x_next = kernels.step(kernel, x, velocity, noise)
        now, before = (np.asarray(spatial.token_log_prob(kernel, x, v, x_next)) for v in (new, velocity))
    np.testing.assert_allclose(got, now - before, rtol=1e-4, atol=1e-6)


def test_log_ratio_is_exactly_zero_for_equal_velocities():
    kernel, _, velocity, noise = sampled((2, 4, 4, 3))
    assert (spatial.token_log_ratio(kernel, velocity, velocity, noise) == 0).all()


def test_one_kernel_for_all_trajectories():
    kernel, x, velocity, noise = sampled((2, 4, 4, 3))
    one, same = kernel.at(0), kernel.at(jnp.zeros(2, int))
    for function in (spatial.token_log_ratio, spatial.token_log_prob):
        np.testing.assert_array_equal(function(one, x, velocity, noise), function(same, x, velocity, noise))


def test_a_step_without_noise_is_left_out(nan_checks):
    kernel, x, velocity, noise = sampled((2, 4, 4, 3))
    kernel = kernel._replace(std=kernel.std.at[1].set(0.0))

    @jax.jit
    @jax.grad
    def gradient(new):
        return spatial.token_log_ratio(kernel, new, velocity, noise).sum() + spatial.token_log_prob(kernel, x, new, x).sum()

    assert (gradient(2 * velocity)[1] == 0).all() and (gradient(2 * velocity)[0] != 0).any()
    assert (spatial.token_log_prob(kernel, x, velocity, x)[1] == 0).all()


def test_surrogate_per_token():
    """The composition of the module's docstring, against loops."""
    log_ratio, advantage, credit = 0.3 * normal(0, (2, 6)), normal(1, (2,)), jnp.abs(normal(2, (2, 6)))
    got = surrogate(log_ratio, advantage[:, None] * credit, 0.2)
    for b, n in np.ndindex(2, 6):
        ratio, weight = np.exp(log_ratio[b, n]), advantage[b] * credit[b, n]
        np.testing.assert_allclose(got[b, n], -min(ratio * weight, np.clip(ratio, 0.8, 1.2) * weight), rtol=1e-5)


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
    kernel, latents, *_ = sampled((2, 4, 4, 3))
    with pytest.raises(ValueError, match="multiples of patch 3"):
        spatial.sum_per_token(latents, 3)
    with pytest.raises(ValueError, match="f32"):
        spatial.token_log_prob(kernel, latents.astype(jnp.bfloat16), latents, latents)
    with pytest.raises(ValueError, match="share one shape"):
        spatial.token_log_ratio(kernel, latents, latents, latents[:, :2])
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

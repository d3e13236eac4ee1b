"""LeapAlign's two leaps: value, gradient, weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax.objective import leapalign

VECTOR = {"x_k": 1.0, "x_j": 0.78, "x_0": 0.6, "sigma_k": 0.8, "sigma_j": 0.4}


def linear(theta):
    return lambda x, sigma: theta * x


def run(theta, **options):
    x_0, weight = leapalign.leap(linear(theta), **{name: jnp.array([value]) for name, value in VECTOR.items()}, **options)
    return x_0[0], weight[0]


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.3, 1.0])
def test_vector(alpha):
    (value, weight), gradient = jax.value_and_grad(lambda theta: run(theta, alpha=alpha), has_aux=True)(0.5)
    assert value == jnp.float32(0.6)
    np.testing.assert_allclose(gradient, -0.712 + 0.08 * alpha, rtol=1e-6)
    np.testing.assert_allclose(weight, 1 / (0.1 + 0.1))


def test_weight_is_of_the_leaps_and_has_no_gradient():
    np.testing.assert_allclose(run(0.5, alpha=0.3, min_distance=0.0)[1], 1 / (0.02 + 0.024), rtol=1e-4)
    np.testing.assert_allclose(run(3.0, alpha=0.3)[1], 1 / (abs(0.78 - (1 - 1.2)) + abs(0.6 - 0.78 * (1 - 1.2))), rtol=1e-5)
    assert jax.grad(lambda theta: run(theta, alpha=0.3, min_distance=0.0)[1])(0.5) == 0


@given(st.integers(0, 1000), st.floats(0, 1))
def test_gradient_of_a_network(seed, alpha):
    """Against the chain rule by hand, on a velocity that is not linear, with sigmas that differ in the batch."""
    keys = jax.random.split(jax.random.key(seed), 5)
    x_k, x_j, x_0, g = (jax.random.normal(k, (3, 2, 4)) for k in keys[:4])
    theta = jax.random.normal(keys[4], (4, 4))
    k, j = jnp.array([0.9, 0.8, 0.7]), jnp.array([0.6, 0.2, 0.5])
    wide_k, wide_j = k[:, None, None], j[:, None, None]

    def velocity(theta, x, sigma):
        return jnp.tanh(x @ theta) * sigma[:, None, None]

    def project(theta):
        x, _ = leapalign.leap(lambda x, sigma: velocity(theta, x, sigma), x_k, x_j, x_0, k, j, alpha=alpha)
        np.testing.assert_array_equal(jax.lax.stop_gradient(x), x_0)
        return x

    _, vjp = jax.vjp(project, theta)
    _, pull_k = jax.vjp(lambda theta: velocity(theta, x_k, k), theta)
    _, pull_j = jax.vjp(lambda theta, x: velocity(theta, x, j), theta, x_j)
    by_theta, by_x = pull_j(-wide_j * g)
    expected = by_theta + pull_k(-(wide_k - wide_j) * (g + alpha * by_x))[0]
    np.testing.assert_allclose(vjp(g)[0], expected, rtol=1e-4, atol=1e-5)


def test_loss_stops_pushing_at_the_threshold():
    reward, weight = jnp.array([0.4, 0.6]), jnp.array([5.0, 2.0])
    np.testing.assert_allclose(leapalign.loss(reward, weight, threshold=0.55), [0.75, 0.0], rtol=1e-6)
    gradient = jax.grad(lambda reward: leapalign.loss(reward, weight, threshold=0.55).sum())(reward)
    np.testing.assert_array_equal(gradient, [-5.0, 0.0])


def test_refuses_shapes():
    x, sigma = jnp.zeros((2, 3)), jnp.array([0.5, 0.5])
    with pytest.raises(ValueError, match="must agree"):
        leapalign.leap(linear(1.0), x, x, x[:1], sigma, sigma, alpha=0.3)
    with pytest.raises(ValueError, match="must agree"):
        leapalign.leap(linear(1.0), x, x, x, sigma, sigma[0], alpha=0.3)

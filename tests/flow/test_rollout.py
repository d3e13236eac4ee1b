import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from densegrpo_jax import flow

SIGMAS = flow.sd3_sigmas(10)
W = 0.4 * jax.random.normal(jax.random.key(9), (6, 6))


def velocity(x, sigma):
    return jnp.tanh(x @ W) + 0.5 * sigma[:, None] * x


def start(batch, epoch=0):
    key, ids = jax.random.key(0), jnp.arange(batch)
    return flow.initial_noise(key, epoch, ids, (6,)), flow.step_noise(key, epoch, ids, 10, (6,))


def test_trajectory_obeys_its_own_kernel():
    kernel = flow.flow_sde(SIGMAS, 0.7)
    x, noise = start(4)
    t = flow.rollout(velocity, x, kernel, SIGMAS, noise)
    assert t.latents.shape == (11, 4, 6) and t.velocity.shape == t.noise.shape == (10, 4, 6) and t.log_prob.shape == (10, 4)
    for i in range(10):
        v = velocity(t.latents[i], jnp.full(4, SIGMAS[i]))
        np.testing.assert_allclose(t.velocity[i], v, atol=1e-6)
        np.testing.assert_allclose(t.latents[i + 1], flow.step(kernel.at(i), t.latents[i], v, noise[i]), atol=2e-6)
        direct = flow.log_prob(kernel.at(i), t.latents[i], v, t.latents[i + 1])
        np.testing.assert_allclose(t.log_prob[i], direct, atol=2e-2 if i == 9 else 2e-3)


@pytest.mark.parametrize("name", flow.SAMPLERS)
def test_no_noise_is_the_ode_sample(name):
    x, noise = start(4)
    t = flow.rollout(velocity, x, flow.SAMPLERS[name](SIGMAS, 0.0), SIGMAS, noise)
    np.testing.assert_allclose(t.latents[-1], flow.integrate(velocity, x, flow.plan(SIGMAS)), atol=1e-6)
    assert not np.any(t.noise) and not np.any(t.log_prob)


def test_windows_leave_no_trace_of_noise_outside():
    window = flow.fixed(10, 3, 2)
    kernel = flow.only_where(flow.flow_sde(SIGMAS, 0.7), SIGMAS, window.stochastic)
    x, noise = start(4)
    t = flow.rollout(velocity, x, kernel, SIGMAS, noise)
    assert np.flatnonzero(np.abs(t.noise).sum((1, 2))).tolist() == [3, 4]
    np.testing.assert_allclose(t.latents[3], flow.integrate(velocity, x, flow.plan(SIGMAS[:4])), atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 2, 6, 12])
def test_chunks_change_nothing(chunk):
    x, noise = start(12)
    kernel = flow.flow_sde(SIGMAS, 0.7)
    cond = jnp.arange(12.0)[:, None]

    def conditional(x, sigma, cond):
        return velocity(x, sigma) + 0.1 * cond

    whole = flow.rollout(conditional, x, kernel, SIGMAS, noise, cond=cond)
    parts = flow.rollout(conditional, x, kernel, SIGMAS, noise, cond=cond, chunk=chunk)
    for a, b in zip(whole, parts):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_order_and_split_of_the_batch_change_nothing():
    x, noise = start(8)
    kernel = flow.flow_sde(SIGMAS, 0.7)
    whole = np.asarray(flow.rollout(velocity, x, kernel, SIGMAS, noise).latents)
    order = np.array([5, 2, 7])
    part = flow.rollout(velocity, x[order], kernel, SIGMAS, noise[:, order]).latents
    np.testing.assert_allclose(part, whole[:, order], atol=2e-6)


def test_eight_devices_equal_one_with_and_without_chunks():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    kernel = flow.flow_sde(SIGMAS, 0.7)

    def run(ids, chunk):
        key = jax.random.key(0)
        x, noise = flow.initial_noise(key, 0, ids, (6,)), flow.step_noise(key, 0, ids, 10, (6,))
        return flow.rollout(velocity, x, kernel, SIGMAS, noise, chunk=chunk)

    one = jax.jit(run, static_argnums=1)(jnp.arange(16), None)
    ids = jax.device_put(jnp.arange(16), NamedSharding(mesh, P("data")))
    for chunk in (None, 8):
        compiled = jax.jit(run, static_argnums=1).lower(ids, chunk).compile()
        many = compiled(ids)
        np.testing.assert_array_equal(many.noise, one.noise)
        np.testing.assert_allclose(many.latents, one.latents, atol=2e-6)
        text = compiled.as_text()
        assert not any(op in text for op in ("all-gather(", "all-to-all(", "collective-permute(")), "chunks must not move trajectories"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, n: (x, n[:9]), "noise has shape"),
        (lambda x, n: (x.astype(jnp.bfloat16), n), "x_init is bfloat16"),
        (lambda x, n: (x[:3], n), "noise has shape"),
    ],
)
def test_what_does_not_fit_is_named(change, reason):
    x, noise = change(*start(4))
    with pytest.raises(ValueError, match=reason):
        flow.rollout(velocity, x, flow.flow_sde(SIGMAS, 0.7), SIGMAS, noise)


def test_a_chunk_that_does_not_divide_lists_the_valid_ones():
    x, noise = start(12)
    with pytest.raises(ValueError, match=r"choose one of \[1, 2, 3, 4, 6, 12\]"):
        flow.rollout(velocity, x, flow.flow_sde(SIGMAS, 0.7), SIGMAS, noise, chunk=5)


def test_a_kernel_of_another_grid_is_refused():
    x, noise = start(4)
    with pytest.raises(ValueError, match="same sigmas"):
        flow.rollout(velocity, x, flow.flow_sde(flow.sd3_sigmas(9), 0.7), SIGMAS, noise)

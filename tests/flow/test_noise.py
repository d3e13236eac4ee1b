import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from densegrpo_jax import flow

KEY = jax.random.key(7)
IDS = jnp.arange(24)


def test_noise_depends_on_its_address_alone():
    whole = np.asarray(flow.step_noise(KEY, 3, IDS, 4, (2, 5)))
    parts = [np.asarray(flow.step_noise(KEY, 3, IDS[i : i + 8], 4, (2, 5))) for i in (0, 8, 16)]
    np.testing.assert_array_equal(np.concatenate(parts, 1), whole)
    order = np.random.default_rng(0).permutation(24)
    np.testing.assert_array_equal(flow.step_noise(KEY, 3, jnp.asarray(order), 4, (2, 5)), whole[:, order])
    np.testing.assert_array_equal(jax.jit(lambda: flow.step_noise(KEY, 3, IDS, 4, (2, 5)))(), whole)


def test_noise_is_bitwise_the_same_on_eight_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.jit(lambda ids: flow.step_noise(KEY, 3, ids, 4, (5,)), out_shardings=NamedSharding(mesh, P(None, "data")))
    ids = jax.device_put(IDS, NamedSharding(mesh, P("data")))
    np.testing.assert_array_equal(sharded(ids), flow.step_noise(KEY, 3, IDS, 4, (5,)))


def test_every_address_has_its_own_noise():
    rows = [np.asarray(flow.initial_noise(KEY, e, IDS, (400,))) for e in (0, 1)]
    rows += list(np.asarray(flow.step_noise(KEY, 0, IDS, 3, (400,)))) + list(np.asarray(flow.step_noise(KEY, 1, IDS, 3, (400,))))
    rows += [np.asarray(flow.initial_noise(jax.random.key(8), 0, IDS, (400,)))]
    flat = np.concatenate(rows)
    assert len(np.unique(flat, axis=0)) == len(flat)
    assert np.abs(np.corrcoef(flat) - np.eye(len(flat))).max() < 0.35
    assert abs(flat.mean()) < 0.02 and abs(flat.std() - 1) < 0.02


def test_shared_start_is_common_within_a_group_while_trajectories_stay_distinct():
    groups = jnp.repeat(jnp.arange(4), 6)
    x = np.asarray(flow.initial_noise(KEY, 0, groups, (16,))).reshape(4, 6, 16)
    np.testing.assert_array_equal(x, np.repeat(x[:, :1], 6, axis=1))
    assert len(np.unique(x[:, 0, 0])) == 4
    sigmas = flow.uniform_sigmas(5)
    noise = flow.step_noise(KEY, 0, IDS, 5, (16,))
    out = flow.rollout(lambda x, s: x, jnp.asarray(x.reshape(24, 16)), flow.flow_sde(sigmas, 0.7), sigmas, noise).latents[-1]
    distance = np.linalg.norm(np.asarray(out)[:, None] - np.asarray(out)[None], axis=-1) + 9.0 * np.eye(24)
    assert distance.min() > 0.05


def test_noise_is_standard_normal():
    import scipy.stats

    sample = np.asarray(flow.initial_noise(KEY, 5, jnp.arange(64), (4096,)), np.float64).ravel()
    assert scipy.stats.kstest(sample, "norm").pvalue > 0.01
    np.testing.assert_allclose([sample.mean(), sample.std(), (sample**4).mean()], [0.0, 1.0, 3.0], atol=0.03)
    assert 4.0 < np.abs(sample).max() < 6.0 and np.unique(sample).size > 0.99 * sample.size

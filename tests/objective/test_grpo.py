import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax import flow
from densegrpo_jax.objective import Rows, grpo_loss, guard_weights, step_metrics, surrogate, tempflow_weights

SIGMAS = flow.sd3_sigmas(10)
KERNEL = flow.flow_sde(SIGMAS, 0.7)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def make_rows(m=18, seed=0, advantage=None, weight=None):
    steps = jnp.arange(m) % 9
    return Rows(
        KERNEL.at(steps),
        normal(seed, m, 4, 4),
        normal(seed + 1, m, 4, 4),
        normal(seed + 2, m) if advantage is None else advantage,
        jnp.ones(m) if weight is None else weight,
    )


@given(st.floats(-0.5, 0.5), st.floats(-5, 5), st.floats(1e-5, 0.3))
def test_surrogate_is_the_papers(log_r, advantage, clip):
    r = np.exp(log_r)
    expected = -min(r * advantage, np.clip(r, 1 - clip, 1 + clip) * advantage)
    np.testing.assert_allclose(surrogate(jnp.float32(log_r), jnp.float32(advantage), clip), expected, rtol=1e-4, atol=1e-5)


def test_before_any_update_the_ratio_is_exactly_one_and_nothing_is_clipped():
    rows = make_rows()
    loss, metrics = grpo_loss(rows.velocity, rows, 1e-5)
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
    assert metrics["clip_above"] == metrics["clip_below"] == metrics["approx_kl"] == 0.0
    np.testing.assert_allclose(loss, -jnp.mean(rows.advantage), rtol=1e-6)


def test_on_policy_gradient_is_minus_the_advantage_weighted_score():
    rows = make_rows()
    grad = jax.grad(lambda v: grpo_loss(v, rows, 1e-4)[0])(rows.velocity)
    scale = (rows.advantage * rows.kernel.v_coef / rows.kernel.std)[:, None, None]
    np.testing.assert_allclose(grad, -scale * rows.noise / 16 / 18, rtol=2e-5, atol=1e-7)


def test_gradient_step_raises_the_log_prob_of_good_steps():
    rows = make_rows()
    grad = jax.grad(lambda v: grpo_loss(v, rows, 1e-4)[0])(rows.velocity)
    moved = flow.log_ratio(rows.kernel, rows.velocity - 1e-3 * grad, rows.velocity, rows.noise)
    np.testing.assert_array_equal(np.sign(moved), np.sign(rows.advantage))


def test_clipping_stops_the_gradient_of_what_has_moved_far_enough():
    up, down = make_rows(advantage=jnp.ones(18)), make_rows(advantage=-jnp.ones(18))
    away = up.velocity + 0.05 * jnp.sign(up.noise) * jnp.sign(up.kernel.v_coef)[:, None, None]
    grad, metrics = jax.grad(lambda v: grpo_loss(v, up, 1e-4), has_aux=True)(away)
    assert not np.any(grad) and metrics["clip_above"] == 1.0 and metrics["clip_below"] == 0.0
    grad, metrics = jax.grad(lambda v: grpo_loss(v, down, 1e-4), has_aux=True)(away)
    assert np.all(np.abs(np.asarray(grad)).sum((1, 2)) > 0) and metrics["clip_below"] == 0.0  # the pessimistic side stays


def test_rows_of_weight_zero_give_no_policy_gradient_but_keep_the_step_size():
    weight = jnp.where(jnp.arange(18) < 9, 1.0, 0.0)
    rows = make_rows(weight=weight)
    grad = jax.grad(lambda v: grpo_loss(v, rows, 1e-4)[0])(rows.velocity)
    assert not np.any(grad[9:])
    full = jax.grad(lambda v: grpo_loss(v, make_rows(), 1e-4)[0])(rows.velocity)
    np.testing.assert_array_equal(grad[:9], full[:9])


def test_kl_alone_gives_its_analytic_gradient_and_none_at_the_reference():
    rows = make_rows(advantage=jnp.zeros(18))
    ref = rows.velocity - 0.3 * normal(7, 18, 4, 4)
    loss = lambda v, mode: grpo_loss(v, rows, 1e-4, velocity_ref=ref, beta=0.04, kl_mode=mode)[0]  # noqa: E731
    for mode, std in (("exact", rows.kernel.std), ("code", rows.kernel.scale)):
        expected = 0.04 * ((rows.kernel.v_coef / std) ** 2)[:, None, None] * (rows.velocity - ref) / 16 / 18
        np.testing.assert_allclose(jax.grad(loss)(rows.velocity, mode), expected, rtol=1e-5, atol=1e-9)
    assert not np.any(jax.grad(loss)(ref, "exact"))


def test_large_beta_step_is_finite(nan_checks):
    rows = make_rows()
    value, grad = jax.value_and_grad(lambda v: grpo_loss(v, rows, 1e-4, velocity_ref=-rows.velocity, beta=1.0)[0])(rows.velocity)
    assert np.isfinite(value) and np.all(np.isfinite(grad))


@given(st.sampled_from([1, 2, 3, 6, 9]))
def test_loss_of_minibatches_averages_to_the_loss_of_the_whole(parts):
    rows = make_rows()
    v = rows.velocity + 0.01 * normal(5, 18, 4, 4)
    whole = jax.grad(lambda v: grpo_loss(v, rows, 1e-3)[0])(v)
    size = 18 // parts
    pieces = []
    for i in range(parts):
        cut = slice(i * size, (i + 1) * size)
        part = jax.tree.map(lambda leaf, cut=cut: leaf[cut], rows)
        pieces.append(jax.grad(lambda v, part=part: grpo_loss(v, part, 1e-3)[0])(v[cut]) / parts)
    np.testing.assert_allclose(np.concatenate(pieces), whole, rtol=1e-5, atol=1e-8)


def test_guard_makes_every_step_pull_alike():
    """Gradient size per step: standard ratios differ by a factor of dozens, guarded and balanced ones are equal for Flow-SDE.

    All but the first, where t = 1 leaves h in place of h (1 + a^2 / 2).
    """
    trained = np.arange(10) < 9
    weights = guard_weights(SIGMAS, trained)
    v, noise = normal(0, 1, 64), normal(1, 1, 64)

    def pull(i, ratio, weight):
        rows = Rows(KERNEL.at(jnp.array([i])), v, noise, jnp.ones(1), jnp.full(1, weight))
        return float(jnp.linalg.norm(jax.grad(lambda u: grpo_loss(u, rows, 1.0, ratio=ratio)[0])(v)))

    standard = [pull(i, "standard", 1.0) for i in range(9)]
    guarded = [pull(i, "guard", weights[i]) for i in range(9)]
    assert max(standard) / min(standard) > 20
    np.testing.assert_allclose(guarded[1:], guarded[1], rtol=1e-4)
    np.testing.assert_allclose(guarded[0] * (1 + 0.7**2 / 2), guarded[1], rtol=1e-4)
    assert weights[9] == 0.0 and np.isclose(weights[:9].mean(), 1.0)


def test_tempflow_weights_of_the_paper():
    weights = tempflow_weights(KERNEL, np.arange(10) < 9)
    np.testing.assert_allclose(weights[:9], [1.58, 1.67, 1.21, 1.00, 0.88, 0.79, 0.72, 0.63, 0.51], atol=6e-3)
    np.testing.assert_allclose(weights[:9], 2.252 * KERNEL.std[:9], rtol=1e-3)
    assert weights[9] == 0.0


def test_metrics_per_step_are_blank_where_untrained():
    metrics = step_metrics(jnp.array([[1e-4, -3e-4], [5.0, 5.0]]), np.array([True, False]))
    np.testing.assert_allclose(metrics["delta_log_prob_mean"], [2e-4, np.nan], rtol=1e-6)
    np.testing.assert_allclose(metrics["delta_log_prob_max"], [3e-4, np.nan], rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda r: grpo_loss(r.velocity, r, 1e-4, ratio="soft"), "ratio = 'soft'"),
        (lambda r: grpo_loss(r.velocity, r, 1e-4, beta=0.1), "needs velocity_ref"),
        (lambda r: tempflow_weights(flow.ode(SIGMAS), np.ones(10)), "no trained step"),
        (lambda r: guard_weights(SIGMAS, np.zeros(10)), "no trained step"),
    ],
)
def test_bad_arguments_are_named(call, reason):
    with pytest.raises(ValueError, match=reason):
        call(make_rows())

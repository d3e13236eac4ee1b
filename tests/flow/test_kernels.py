import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax import flow

SD3 = flow.sd3_sigmas(10)
ALL = {
    "flow_sde": flow.flow_sde(SD3, 0.7),
    "psi_sde": flow.psi_sde(SD3, np.linspace(3.0, 0.2, 10)),
    "dance_sde": flow.dance_sde(SD3, 0.3),
    "cps": flow.cps(SD3, 0.9),
    "ddim_sde": flow.ddim_sde(SD3, 1.0),
    "ddim_sde_clamped": flow.ddim_sde(SD3, 1.0, first_step="clamp"),
}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "std"),
    [
        (ALL["flow_sde"], [0.700, 0.743, 0.536, 0.446, 0.392, 0.353, 0.319, 0.282, 0.225, 0.0063]),
        (ALL["dance_sde"], [0.060, 0.065, 0.071, 0.078, 0.087, 0.097, 0.111, 0.130, 0.156, 0.028]),
        (ALL["cps"], [0.948, 0.902, 0.847, 0.781, 0.699, 0.595, 0.459, 0.275, 0.0088, 0.0]),
        (ALL["ddim_sde"], [0.0, 0.182, 0.253, 0.298, 0.324, 0.326, 0.293, 0.203, 0.0076, 0.0]),
        (ALL["ddim_sde_clamped"], [0.192, 0.182, 0.253, 0.298, 0.324, 0.326, 0.293, 0.203, 0.0076, 0.0]),
    ],
)
def test_step_std_of_the_published_samplers(kernel, std):
    np.testing.assert_allclose(kernel.std, std, atol=6e-4)


def test_flow_sde_x_coefficients_of_flow_grpo():
    expected = [0.7550, 0.7125, 0.8426, 0.8841, 0.9029, 0.9120, 0.9155, 0.9145, 0.9087, 0.9978]
    np.testing.assert_allclose(ALL["flow_sde"].x_coef, expected, atol=6e-5)


def test_flux_step_std():
    std = flow.flow_sde(flow.flux_sigmas(6, 1024), 0.9).std
    np.testing.assert_allclose(std, [0.9000, 0.9312, 0.6460, 0.5059, 0.4008, 0.2882], atol=1e-4)


@given(st.integers(2, 100), st.floats(0.05, 1.2), st.floats(0.5, 6.0))
def test_first_flow_sde_step_injects_exactly_the_noise_level(num_steps, level, shift):
    for sigmas in (flow.sd3_sigmas(num_steps, shift), flow.uniform_sigmas(num_steps, shift)):
        np.testing.assert_allclose(flow.flow_sde(sigmas, level).std[0], level, rtol=1e-12)


def test_psi_as_literal_and_as_multiplier_agree():
    multiplier = np.linspace(0.4, 0.9, 10)
    literal = flow.psi_sde(SD3, multiplier * flow.flow_scale(SD3))
    for a, b in zip(literal, flow.flow_sde(SD3, multiplier)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", flow.SAMPLERS)
def test_no_noise_is_the_euler_ode(name):
    for a, b in zip(flow.SAMPLERS[name](SD3, 0.0), flow.ode(SD3)):
        np.testing.assert_allclose(a, b, atol=1e-15)


@pytest.mark.parametrize("name", ["cps", "ddim_sde", "ddim_sde_clamped"])
def test_coefficient_preserving_samplers_keep_signal_and_noise_of_the_flow(name):
    kernel = ALL[name]
    t, s = SD3[:-1], SD3[1:]
    signal = kernel.x_coef * (1 - t) - kernel.v_coef  # x = (1-t) x0 + t e, v = e - x0
    direct = kernel.x_coef * t + kernel.v_coef
    np.testing.assert_allclose(signal, 1 - s, atol=1e-12)
    np.testing.assert_allclose(direct**2 + kernel.std**2, s**2, atol=1e-12)


def test_excess_noise_of_the_paper_grid():
    ratio = flow.excess_noise(SD3, 0.7 * flow.flow_scale(SD3))
    np.testing.assert_allclose(ratio[:8], [1.04, 1.06, 1.03, 1.02, 1.03, 1.04, 1.07, 1.23], atol=6e-3)
    np.testing.assert_allclose(ratio[8], 26.9, atol=0.06)
    assert np.isinf(ratio[9])


@pytest.mark.parametrize(("level", "tot"), [(3, 0.3415), (2, 0.2400)])
def test_excess_noise_by_monte_carlo_with_an_oracle_velocity(level, tot):
    """With v = e - x0 known, a Flow-SDE step keeps the signal at 1 - s and its noise has the closed form's std."""
    i = 10 - level
    kernel, t, s = flow.flow_sde(SD3, 0.7).at(i), SD3[i], SD3[i + 1]
    x0, e, z = normal(0, 200, 4096), normal(1, 200, 4096), normal(2, 200, 4096)
    x_next = flow.step(kernel, (1 - t) * x0 + t * e, e - x0, z)
    signal = float(jnp.mean(x_next * x0) / jnp.mean(x0 * x0))
    np.testing.assert_allclose(signal, 1 - s, atol=2e-3)
    np.testing.assert_allclose(float(jnp.std(x_next - signal * x0)), tot, atol=1e-3)
    np.testing.assert_allclose(flow.excess_noise(SD3, 0.7 * flow.flow_scale(SD3))[i] * s, tot, atol=1e-4)


# --- golden numbers of Flow-GRPO -------------------------------------------------------------------------------------


def test_golden_step(golden):
    kernel = flow.flow_sde(golden["sigmas"], float(golden["noise_level"]))
    for i in range(10):
        row = kernel.at(i)
        x, v = jnp.asarray(golden["x"][i]), jnp.asarray(golden["v"][i])
        mean = flow.transition_mean(row, x, v)
        np.testing.assert_allclose(mean, golden["mean"][i], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.full(2, row.scale), golden["sigma_t"][i].reshape(2), rtol=1e-5)
        np.testing.assert_allclose(flow.log_prob(row, x, v, jnp.asarray(golden["prev"][i])), golden["log_prob"][i], rtol=1e-4)


def test_golden_on_policy_step(golden):
    kernel = flow.flow_sde(golden["sigmas"], float(golden["noise_level"]))
    for i in range(10):
        row = kernel.at(i)
        noise = jnp.asarray(golden["noise"][i])
        x_next = flow.step(row, jnp.asarray(golden["x"][i]), jnp.asarray(golden["v"][i]), noise)
        np.testing.assert_allclose(x_next, golden["prev_on_policy"][i], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(flow.log_prob_of_noise(row, noise), golden["log_prob_on_policy"][i], atol=1e-5)


def test_golden_log_ratio(golden):
    kernel = flow.flow_sde(golden["sigmas"], float(golden["noise_level"]))
    for i in range(10):
        v_new, v, noise = (jnp.asarray(golden[k][i]) for k in ("v_new", "v", "noise"))
        np.testing.assert_allclose(flow.log_ratio(kernel.at(i), v_new, v, noise), golden["log_ratio"][i], rtol=1e-5)


# --- log-probability, ratio, KL --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_log_prob_is_scipys_averaged_over_dimensions(name):
    x, v, x_next = normal(0, 3, 4, 4, 2), normal(1, 3, 4, 4, 2), normal(2, 3, 4, 4, 2)
    for i in np.flatnonzero(ALL[name].std > 0):
        row = ALL[name].at(i)
        mean = np.asarray(flow.transition_mean(row, x, v), np.float64)
        expected = scipy.stats.norm.logpdf(np.asarray(x_next, np.float64), mean, float(row.std)).reshape(3, -1).mean(1)
        np.testing.assert_allclose(flow.log_prob(row, x, v, x_next), expected, rtol=2e-5)


@pytest.mark.parametrize("name", ALL)
def test_log_ratio_is_the_difference_of_log_probs(name):
    x, v, noise = normal(0, 5, 8, 3), normal(1, 5, 8, 3), normal(2, 5, 8, 3)
    v_new = v + 0.01 * normal(3, 5, 8, 3)
    for i in np.flatnonzero(ALL[name].std > 0.05):
        row = ALL[name].at(i)
        x_next = flow.step(row, x, v, noise)
        difference = flow.log_prob(row, x, v_new, x_next) - flow.log_prob(row, x, v, x_next)
        np.testing.assert_allclose(flow.log_ratio(row, v_new, v, noise), difference, atol=2e-5)
        np.testing.assert_array_equal(flow.log_ratio(row, v, v, noise), np.zeros(5))


def test_log_ratio_from_means_is_far_exacter_than_the_difference_of_log_probs():
    """At low-noise levels, against float64: the difference of two f32 log-probs loses what a small update changes."""
    x, v, noise = normal(0, 64, 1024), normal(1, 64, 1024), normal(2, 64, 1024)
    v_new = v + 1e-5 * normal(3, 64, 1024)
    kernel = flow.flow_sde(SD3, 0.7)
    for i in (8, 9):
        row = kernel.at(i)
        x_next = flow.step(row, x, v, noise)
        d = kernel.v_coef[i] * (np.asarray(v, np.float64) - np.asarray(v_new, np.float64)) / kernel.std[i]
        exact = -np.mean(np.asarray(noise, np.float64) * d + d * d / 2, axis=1)
        error_means = np.abs(np.asarray(flow.log_ratio(row, v_new, v, noise), np.float64) - exact).max()
        difference = flow.log_prob(row, x, v_new, x_next) - flow.log_prob(row, x, v, x_next)
        error_difference = np.abs(np.asarray(difference, np.float64) - exact).max()
        assert error_means < 1e-11
        assert error_difference > 1000 * error_means


def test_exact_kl_is_the_gaussian_kl():
    rng = np.random.default_rng(0)
    v, v_ref, x = (rng.standard_normal((2, 6)).astype(np.float32) for _ in range(3))
    for i in range(9):
        row = ALL["flow_sde"].at(i)
        gap = np.asarray(flow.transition_mean(row, x, v), np.float64) - np.asarray(flow.transition_mean(row, x, v_ref), np.float64)
        per_dimension = (gap**2 / (2 * float(row.std) ** 2)).sum(1) / 6  # closed form for equal covariances
        np.testing.assert_allclose(flow.kl(row, jnp.asarray(v), jnp.asarray(v_ref)), per_dimension, rtol=1e-4)


def test_exact_kl_equals_torchs():
    torch = pytest.importorskip("torch")
    from torch.distributions import Independent, Normal, kl_divergence

    v, v_ref, x = normal(0, 4, 6), normal(1, 4, 6), normal(2, 4, 6)
    row = ALL["flow_sde"].at(5)
    p, q = (Independent(Normal(torch.tensor(np.asarray(flow.transition_mean(row, x, u))), float(row.std)), 1) for u in (v, v_ref))
    np.testing.assert_allclose(flow.kl(row, v, v_ref) * 6, kl_divergence(p, q).numpy(), rtol=1e-5)


def test_code_kl_times_dimensions_over_step_is_the_exact_kl():
    v, v_ref = normal(0, 3, 7), normal(1, 3, 7)
    h = -np.diff(SD3)
    for i in range(10):
        row = ALL["flow_sde"].at(i)
        summed = flow.kl(row, v, v_ref) * 7
        np.testing.assert_allclose(flow.kl(row, v, v_ref, "code") * 7 / h[i], summed, rtol=1e-5)
    for name in ("cps", "ddim_sde"):
        row = ALL[name].at(4)
        np.testing.assert_array_equal(flow.kl(row, v, v_ref, "code"), flow.kl(row, v, v_ref))


def test_kl_weight_of_the_closed_form():
    """(h/2) (1/sig + sig (1-t) / (2t))^2 |v - v_ref|^2 (densegrpo.md 2.4)."""
    v, v_ref = normal(0, 3, 7), normal(1, 3, 7)
    for i in range(10):
        t, h, sig = SD3[i], SD3[i] - SD3[i + 1], float(ALL["flow_sde"].scale[i])
        expected = h / 2 * (1 / sig + sig * (1 - t) / (2 * t)) ** 2 * np.mean((np.asarray(v) - np.asarray(v_ref)) ** 2, axis=1)
        np.testing.assert_allclose(flow.kl(ALL["flow_sde"].at(i), v, v_ref), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_image_layouts_give_the_same_numbers(name):
    x, v, u, z = (normal(i, 2, 4, 6, 16) for i in range(4))  # [B, H, W, C]
    layouts = [lambda a: a, lambda a: a.transpose(0, 3, 1, 2), lambda a: a.reshape(2, 24, 16)]
    for i in np.flatnonzero(ALL[name].std > 0):
        row = ALL[name].at(i)
        rows = [(flow.log_prob(row, f(x), f(v), f(z)), flow.kl(row, f(v), f(u)), flow.log_ratio(row, f(u), f(v), f(z))) for f in layouts]
        for other in rows[1:]:
            for a, b in zip(rows[0], other):
                np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7)


def test_guarded_ratio_is_std_times_the_unbiased_ratio():
    """log r^ = std (log r + mean |mean shift|^2 / (2 std^2)) (GRPO-Guard)."""
    v, noise = normal(0, 4, 50), normal(1, 4, 50)
    v_new = v + 0.1 * normal(2, 4, 50)
    for i in range(9):
        row = ALL["flow_sde"].at(i)
        shift = row.v_coef * (v_new - v)
        plain = flow.log_ratio(row, v_new, v, noise)
        expected = row.std * (plain + jnp.mean(shift**2, 1) / (2 * row.std**2))
        np.testing.assert_allclose(flow.guarded_log_ratio(row, v_new, v, noise), expected, rtol=1e-3, atol=1e-6)


# --- degenerate steps ------------------------------------------------------------------------------------------------

DEGENERATE = {
    "repeated levels": flow.flow_sde(flow.custom_sigmas([1.0, 1.0, 0.5, 0.5, 0.1, 0.0]), 0.7),
    "no noise": flow.flow_sde(SD3, 0.0),
    "one step": flow.flow_sde(flow.sd3_sigmas(1), 0.7),
    "tiny last level": flow.flow_sde(flow.custom_sigmas([1.0, 1e-6, 0.0]), 0.7),
    "cps to 0": flow.cps(SD3, 1.0),
    "ddim from 1": flow.ddim_sde(SD3, 1.0),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_steps_are_masked_in_values_and_gradients(name, nan_checks):
    kernel = DEGENERATE[name]
    for leaf in kernel:
        assert np.all(np.isfinite(leaf))
    x, v, noise = normal(0, 2, 5), normal(1, 2, 5), normal(2, 2, 5)

    def total(v_new, row):
        x_next = flow.step(row, x, v, noise)
        parts = (
            flow.log_prob(row, x, v_new, x_next),
            flow.log_ratio(row, v_new, v, noise),
            flow.guarded_log_ratio(row, v_new, v, noise),
            flow.kl(row, v_new, x),
            flow.kl(row, v_new, x, "code"),
        )
        return sum(jnp.sum(p) for p in parts)

    for i in range(len(kernel.std)):
        row = kernel.at(i)
        value, grad = jax.value_and_grad(total)(v, row)
        assert np.isfinite(value) and np.all(np.isfinite(grad))
        if kernel.std[i] == 0.0:
            assert value == 0.0 and not np.any(grad)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: flow.flow_sde(SD3, -0.1), "not negative"),
        (lambda: flow.flow_sde(SD3, float("nan")), "finite"),
        (lambda: flow.flow_sde(SD3, np.ones(9)), "one per step"),
        (lambda: flow.cps(SD3, 1.5), "CPS takes 0 to 1"),
        (lambda: flow.ddim_sde(SD3, 1.5), "takes 0 to 1"),
        (lambda: flow.ddim_sde(SD3, 0.5, first_step="no"), "first_step"),
        (lambda: flow.only_where(ALL["cps"], SD3, np.ones(9)), "stochastic"),
        (lambda: flow.kl(ALL["cps"].at(0), normal(0, 1, 2), normal(1, 1, 2), "sum"), "kl mode"),
    ],
)
def test_bad_arguments_are_named(call, reason):
    with pytest.raises(ValueError, match=reason):
        call()

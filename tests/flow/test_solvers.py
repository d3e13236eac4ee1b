import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax import flow

SOLVERS = ["euler", "midpoint", "heun", "ab2", "dpmpp2m"]
ORDER = {"euler": 1, "midpoint": 2, "heun": 2, "ab2": 2, "dpmpp2m": 2}


def gaussian_velocity(x, sigma):
    """Exact velocity of data N(1.5, 0.5^2): linear in x, with a closed-form flow."""
    s = sigma.reshape((-1,) + (1,) * (x.ndim - 1))
    var = (1 - s) ** 2 * 0.25 + s**2
    score = -(x - (1 - s) * 1.5) / var
    return -(x + s * score) / (1 - s)


def gaussian_flow(x, start, end):
    def spread(s):
        return np.sqrt((1 - s) ** 2 * 0.25 + s**2)

    return (1 - end) * 1.5 + spread(end) / spread(start) * (np.asarray(x, np.float64) - (1 - start) * 1.5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_order_of_convergence_on_a_gaussian(solver):
    x = jax.random.normal(jax.random.key(0), (64, 3))
    errors = []
    for n in (32, 64, 128):
        nodes = np.linspace(0.9, 0.1, n + 1)
        with jax.enable_x64(True):
            out = flow.integrate(gaussian_velocity, jnp.asarray(np.asarray(x), jnp.float64), flow.plan(nodes, solver))
        errors.append(np.abs(np.asarray(out) - gaussian_flow(x, 0.9, 0.1)).max())
    slopes = np.log2(np.array(errors[:-1]) / np.array(errors[1:]))
    assert np.all(slopes > ORDER[solver] - 0.35), (errors, slopes)
    assert np.all(slopes < ORDER[solver] + 0.9), (errors, slopes)


@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_are_exact_for_a_constant_velocity_and_reach_the_image(solver):
    x, v = jax.random.normal(jax.random.key(0), (4, 3)), jax.random.normal(jax.random.key(1), (4, 3))
    for nodes in (flow.sd3_sigmas(10), flow.uniform_sigmas(3), np.array([0.7, 0.0]), np.array([1.0, 0.0])):
        out = flow.integrate(lambda x, s: v, x, flow.plan(nodes, solver))
        np.testing.assert_allclose(out, x - nodes[0] * v, atol=2e-6)


@given(st.integers(1, 30), st.sampled_from(SOLVERS))
def test_plans_are_finite_on_grids_with_ends_at_one_and_zero(num_steps, solver):
    for sigmas in (flow.sd3_sigmas(num_steps), flow.uniform_sigmas(num_steps)):
        table = flow.plan(sigmas, solver)
        assert np.all(np.isfinite(table.coef)) and np.all(np.isfinite(table.sigmas))
        assert np.all(table.sigmas > 0.0)  # no network call at 0
        expected = {"midpoint": 2 * num_steps, "heun": 2 * num_steps - 1}.get(solver, num_steps)
        assert len(table) == expected


@pytest.mark.parametrize("solver", ["ab2", "dpmpp2m"])
def test_first_order_start_of_the_multistep_solvers_is_euler(solver):
    euler, table = flow.plan([0.8, 0.5], "euler"), flow.plan([0.8, 0.5, 0.2], solver)
    np.testing.assert_allclose(table.coef[0, 0], euler.coef[0, 0], atol=1e-12)


def test_dpmpp2m_equals_diffusers_flow_multistep():
    torch = pytest.importorskip("torch")
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=1.0,
        solver_order=2,
        final_sigmas_type="zero",
        lower_order_final=True,
    )
    scheduler.set_timesteps(8)
    sigmas = scheduler.sigmas.numpy().astype(np.float64)
    x = np.asarray(jax.random.normal(jax.random.key(0), (4, 3)))
    ours = flow.integrate(gaussian_velocity, jnp.asarray(x), flow.plan(sigmas, "dpmpp2m"))
    theirs = torch.tensor(x)
    for i, t in enumerate(scheduler.timesteps):
        v = np.asarray(gaussian_velocity(jnp.asarray(theirs.numpy()), jnp.full(4, sigmas[i], jnp.float32)))
        theirs = scheduler.step(torch.tensor(v), t, theirs).prev_sample
    np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-5)


@pytest.mark.parametrize("nodes", [[0.5], [0.5, 0.5], [0.2, 0.5], []])
def test_bad_nodes_are_named(nodes):
    with pytest.raises(ValueError, match="strictly falling"):
        flow.plan(nodes)


def test_unknown_solver_lists_the_known():
    with pytest.raises(ValueError, match="euler, midpoint, heun, ab2, dpmpp2m"):
        flow.plan([1.0, 0.0], "rk45")

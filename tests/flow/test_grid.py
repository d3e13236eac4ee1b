import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax import flow


def test_sd3_grid_of_the_paper():
    expected = [1.0, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0.0]
    np.testing.assert_allclose(flow.sd3_sigmas(10), expected, atol=1e-4)


def test_flux_grid_of_the_paper():
    np.testing.assert_allclose(flow.flux_sigmas(6, 1024), [1, 0.90374, 0.78970, 0.65249, 0.48422, 0.27300, 0], atol=2e-5)


def test_golden_grids(golden):
    np.testing.assert_allclose(flow.sd3_sigmas(10), golden["sigmas"], atol=1e-6)
    np.testing.assert_allclose(flow.flux_sigmas(6, 1024), golden["flux_sigmas_T6_512"], atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("shift", [1.0, 1.5, 3.0, 6.0])
def test_sd3_grid_equals_diffusers(shift):
    pytest.importorskip("torch")
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    for num_steps in [*range(1, 42), 50, 77, 100]:
        scheduler.set_timesteps(num_steps)
        np.testing.assert_allclose(flow.sd3_sigmas(num_steps, shift), scheduler.sigmas.numpy(), atol=1e-6, err_msg=f"T = {num_steps}")


@pytest.mark.parity
@pytest.mark.parametrize(("height", "width"), [(256, 256), (512, 512), (768, 512), (1024, 1024), (1328, 800)])
def test_flux_grid_equals_diffusers(height, width):
    pytest.importorskip("torch")
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
    )
    tokens = (height // 16) * (width // 16)
    for num_steps in [1, 2, 4, 6, 10, 28, 50, 100]:
        mu = calculate_shift(tokens)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=mu)
        np.testing.assert_allclose(flow.flux_sigmas(num_steps, tokens), scheduler.sigmas.numpy(), atol=1e-6)


@given(st.integers(1, 100), st.floats(0.2, 12.0))
def test_grids_fall_from_one_to_zero(num_steps, shift):
    for sigmas in (flow.sd3_sigmas(num_steps, shift), flow.uniform_sigmas(num_steps, shift), flow.flux_sigmas(num_steps, 64 * num_steps)):
        assert sigmas.shape == (num_steps + 1,)
        assert sigmas[0] == 1.0 and sigmas[-1] == 0.0
        assert np.all(np.diff(sigmas) < 0.0)


@given(st.floats(0.0, 1.0), st.floats(0.2, 12.0))
def test_unshift_inverts_shift(sigma, shift):
    np.testing.assert_allclose(flow.unshift_sigma(flow.shift_sigma(sigma, shift), shift), sigma, atol=1e-12)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1.0], "at least two"),
        ([1.0, 0.2, 0.5, 0.0], r"sigmas\[2\] = 0.5 > sigmas\[1\] = 0.2"),
        ([1.0, 0.5], "ends at exactly 0"),
        ([1.0, 0.0, 0.0], "above 0 before"),
        ([1.2, 0.0], "lie in"),
        ([1.0, float("nan"), 0.0], "lie in"),
    ],
)
def test_bad_custom_grids_are_named(values, reason):
    with pytest.raises(ValueError, match=reason):
        flow.custom_sigmas(values)


@pytest.mark.parametrize("num_steps", [0, -1, 1001])
def test_bad_step_counts(num_steps):
    with pytest.raises(ValueError, match="num_steps"):
        flow.sd3_sigmas(num_steps)

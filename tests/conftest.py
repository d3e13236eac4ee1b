"""Every test runs on eight CPU devices, with strict rank promotion, key-reuse checks, and warnings of ours as errors."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

settings.register_profile("repository", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("repository")


@pytest.fixture
def nan_checks():
    """Raises where a NaN is made, in values and in gradients."""
    jax.config.update("jax_debug_nans", True)
    yield
    jax.config.update("jax_debug_nans", False)

"""Every test runs on eight CPU devices, with strict rank promotion, key-reuse checks, and warnings of ours as errors."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # one cache per test session; workers inherit it
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

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


@pytest.fixture
def plain_dispatch(request):
    """Whole runs go without key-reuse checks, which dispatch every call through Python; tests named for them keep them."""
    jax.config.update("jax_debug_key_reuse", "key_reuse" in request.node.name)
    yield
    jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture(autouse=True)
def one_device(request):
    """Runs take one of the eight devices, except in tests of meshes."""
    from densegrpo_jax.parallel import mesh

    with pytest.MonkeyPatch.context() as patch:  # its own, as a test may undo its patches
        if not request.node.get_closest_marker("mesh"):
            patch.setattr(mesh, "available", lambda: jax.devices()[:1])
        yield

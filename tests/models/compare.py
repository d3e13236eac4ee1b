"""What the tests of the transformers share: random parameters, and closeness relative to the largest value."""

import jax
import jax.numpy as jnp
import numpy as np


def drawn(shapes, seed=0, std=0.3):
    """A tree of normal arrays in the shapes of `shapes`: random everywhere, also where training starts from zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(std * rng.standard_normal(leaf.shape), jnp.float32), shapes)


def close(ours, theirs, bound=5e-5):
    """Asserts that no element differs by more than `bound` times the largest; what is exactly zero has to be."""
    scale = np.abs(np.asarray(theirs)).max()
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=bound * scale, rtol=0)


def all_close(ours, theirs, bound=5e-5):
    """`close` for every leaf of two trees of one structure."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: close(a, b, bound), ours, theirs)

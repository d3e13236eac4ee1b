"""Velocity fields with a known answer: Gaussian mixtures, whose posterior mean is in closed form, and rewards on them.

Each prompt is a mixture of 64 Gaussians laid out like a tree (4 branches, of 4 twigs, of 4 leaves), so that coarse traits of a sample
are decided at high noise and fine ones at low noise, as in images. Coordinates have a falling spectrum, also as in images.

Shapes: B rows, P prompts, K = 64 components, D dimensions.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BRANCHING = 4
TIERS = (0.8, 0.5, 0.3)  # spread of branches, twigs, leaves, and below of a component, in units of the spectrum
COMPONENT = 0.2
SPECTRUM = (1.5, 0.6)  # std of coordinate j: 1.5 (1 + j)^-0.6
REWARDS = ("smooth", "detail", "discrete")


class Mixtures(NamedTuple):
    """means [P, K, D]; std [1, D], common to all components; what the rewards look for: probes [P, D, 8], signs [P, 8], target [P]."""

    means: jax.Array
    std: jax.Array
    probes: jax.Array
    signs: jax.Array
    target: jax.Array


def mixtures(seed: int, prompts: int, dimensions: int = 32) -> Mixtures:
    """Draws a mixture and the tastes of the rewards for each prompt."""
    rng = np.random.default_rng(seed)
    spectrum = SPECTRUM[0] * (1.0 + np.arange(dimensions)) ** -SPECTRUM[1]
    means = np.zeros((prompts, 1, dimensions))
    for spread in TIERS:
        offsets = spread * spectrum * rng.normal(size=(prompts, means.shape[1], BRANCHING, dimensions))
        means = (means[:, :, None] + offsets).reshape(prompts, -1, dimensions)
    probes = rng.normal(size=(prompts, dimensions, 8)) * 2.0 / np.sqrt(np.sum(spectrum**2))
    values = means, COMPONENT * spectrum[None], probes, rng.choice([-1.0, 1.0], size=(prompts, 8))
    target = rng.integers(means.shape[1], size=prompts)
    return Mixtures(*(jnp.asarray(value, jnp.float32) for value in values), jnp.asarray(target))


def velocity(field: Mixtures, guidance: float = 1.0) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """The exact velocity E[noise - data | x], as `velocity(x [B, D], sigma [B], prompt [B])`.

    Args:
      field: mixtures.
      guidance: w in v(no prompt) + w (v(prompt) - v(no prompt)); "no prompt" is one Gaussian of the prompt's own moments.
    """
    mean = field.means.mean(axis=1)  # [P, D]
    variance = field.means.var(axis=1) + field.std**2  # [P, D]

    def of(x, sigma, prompt):
        t = sigma[:, None]  # [B, 1]
        total = (1 - t) ** 2 * field.std**2 + t**2  # [B, D]
        offset = x[:, None] - (1 - t[..., None]) * field.means[prompt]  # [B, K, D]
        share = jax.nn.softmax(-0.5 * jnp.sum(offset**2 / total[:, None], axis=-1), axis=-1)  # [B, K]
        expected = jnp.sum(share[..., None] * field.means[prompt], axis=1)  # [B, D] expected component mean
        v = (t - (1 - t) * field.std**2) / total * (x - (1 - t) * expected) - expected
        if guidance == 1.0:
            return v
        wide = (1 - t) ** 2 * variance[prompt] + t**2
        plain = (t - (1 - t) * variance[prompt]) / wide * (x - (1 - t) * mean[prompt]) - mean[prompt]
        return plain + guidance * (v - plain)

    return of


def rewards(field: Mixtures, x: jax.Array, prompt: jax.Array) -> dict[str, jax.Array]:
    """Scores of samples x [B, D], [B] each.

    smooth: signed tanh probes of the sample, governed by its coarse traits and hardly by small noise.
    detail: log-likelihood per dimension under the prompt's mixture (widened by a std of 0.05): falls steeply with residual noise.
    discrete: share of the target's branch, twig and leaf that the nearest component matches: 0, 1/3, 2/3 or 1.
    """
    means = field.means[prompt]  # [B, K, D]
    smooth = jnp.mean(field.signs[prompt] * jnp.tanh(jnp.einsum("bd,bdh->bh", x, field.probes[prompt])), axis=-1)
    wide = field.std**2 + 0.05**2
    log_density = -0.5 * jnp.sum((x[:, None] - means) ** 2 / wide[None], axis=-1)  # [B, K]
    nearest, target = jnp.argmax(log_density, axis=-1), field.target[prompt]
    matches = [nearest // BRANCHING**i % BRANCHING == target // BRANCHING**i % BRANCHING for i in range(len(TIERS))]
    return {
        "smooth": smooth,
        "detail": jax.nn.logsumexp(log_density, axis=-1) / x.shape[-1],
        "discrete": jnp.mean(jnp.stack(matches).astype(jnp.float32), axis=0),
    }

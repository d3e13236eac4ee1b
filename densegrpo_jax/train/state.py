"""What a run carries from step to step, and the optimiser."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from densegrpo_jax.config import Config


class TrainState(NamedTuple):
    """step: training steps done; trained: adapter (or weights); opt_state; ema of trained; updates: optimiser updates done; skipped:
    updates left out because they were not finite. Randomness is addressed by (seed, step), so no key is carried."""

    step: jax.Array
    trained: dict
    opt_state: optax.OptState
    ema: dict
    updates: jax.Array
    skipped: jax.Array


def optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm."""
    c = config.optimizer
    return optax.chain(
        optax.clip_by_global_norm(c.max_grad_norm),
        optax.adamw(c.learning_rate, c.b1, c.b2, c.eps, weight_decay=c.weight_decay),
    )


def init(config: Config, trained: dict) -> TrainState:
    """The state before the first step."""
    step, updates, skipped = (jnp.zeros((), jnp.int32) for _ in range(3))  # apart, as the update donates each
    return TrainState(step, trained, optimizer(config).init(trained), jax.tree.map(jnp.copy, trained), updates, skipped)


def apply_gradients(config: Config, state: TrainState, grads: dict) -> tuple[TrainState, dict]:
    """One optimiser update, and the EMA with decay min((1 + n) / (10 + n), d). A gradient that is not finite changes nothing.

    Returns:
      The new state, and grad_norm before clipping, grad_rms of an entry after it (which Adam's eps should be well below), adapter_norm.
    """
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm)
    updates, opt_state = optimizer(config).update(grads, state.opt_state, state.trained)
    trained = optax.apply_updates(state.trained, updates)
    n = state.updates.astype(jnp.float32)
    decay = jnp.minimum((1.0 + n) / (10.0 + n), config.optimizer.ema_decay)
    ema = optax.incremental_update(trained, state.ema, 1.0 - decay)
    new = TrainState(state.step, trained, opt_state, ema, state.updates + 1, state.skipped)
    kept = state._replace(skipped=state.skipped + 1)
    chosen = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, kept)
    entries = sum(leaf.size for leaf in jax.tree.leaves(grads))
    rms = jnp.minimum(norm, config.optimizer.max_grad_norm) / entries**0.5
    return chosen, {"grad_norm": norm, "grad_rms": rms, "adapter_norm": optax.tree.norm(chosen.trained)}

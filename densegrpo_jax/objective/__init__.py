"""Floor 1: what is minimised. Surrogate, ratio forms, KL, step weights; LeapAlign's construction."""

from densegrpo_jax.objective.grpo import Rows, grpo_loss, guard_weights, step_metrics, surrogate, tempflow_weights

__all__ = ["Rows", "grpo_loss", "guard_weights", "step_metrics", "surrogate", "tempflow_weights"]

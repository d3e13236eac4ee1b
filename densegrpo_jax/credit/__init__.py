"""From rewards along a trajectory to one advantage per denoising step, and from an image gradient to one weight per token."""

from densegrpo_jax.credit.methods import METHODS, Advantages, Method, advantages, gain_balance

__all__ = ["METHODS", "Advantages", "Method", "advantages", "gain_balance"]

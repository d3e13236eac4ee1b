"""The head that LAION's aesthetic predictor and ImageReward have in common: five linear layers from an embedding to a number.

Both were trained with dropout between the layers and no activations, so what remains is an affine map in five factors; they are
kept apart because the files have them so.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.lax import Precision

from densegrpo_jax.models.layers import Dense
from densegrpo_jax.models.source import Source

WIDTHS = (1024, 128, 64, 16, 1)
LAYERS = (0, 2, 4, 6, 7)  # their places in torch's Sequential, between which the dropouts stand


class ScoreHead(nn.Module):
    """The five layers, in float32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps embeddings [B, D] to numbers [B]."""
        x = x.astype(jnp.float32)
        for layer, width in zip(LAYERS, WIDTHS):
            x = Dense(width, precision=Precision.HIGHEST, name=f"layers_{layer}")(x)
        return x[:, 0]


def name_table(prefix: str = "mlp") -> dict[str, Source]:
    """Where each parameter of `ScoreHead` is found, under "`prefix`.layers.N" as both programs call it."""
    table = {}
    for layer in LAYERS:
        table[f"layers_{layer}/kernel"] = Source((f"{prefix}.layers.{layer}.weight",), "transpose")
        table[f"layers_{layer}/bias"] = Source((f"{prefix}.layers.{layer}.bias",))
    return table

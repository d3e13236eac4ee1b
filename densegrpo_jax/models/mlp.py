"""The toy velocity network: a few linear layers on flat 8x8 pictures, with the adapters and the call of the real ones."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from densegrpo_jax.models.layers import Dense


class ToyNetwork(nn.Module):
    """velocity(latents [B, h, w, C], sigma [B], prompt ids [B]) -> [B, h, w, C].

    Attributes:
      num_prompts: size of the prompt table.
      width: of the hidden layers.
      lora_scale: alpha / rank.
    """

    num_prompts: int
    width: int = 192
    lora_scale: float = 1.0

    @nn.compact
    def __call__(self, latents: jax.Array, sigma: jax.Array, prompt: jax.Array) -> jax.Array:
        dense = lambda features, name: Dense(features, lora_scale=self.lora_scale, name=name)  # noqa: E731
        flat = latents.reshape(latents.shape[0], -1)
        waves = sigma[:, None] * (jnp.pi * 2.0 ** jnp.arange(6))[None]
        text = nn.Embed(self.num_prompts, 32, name="prompt")(prompt)
        h = dense(self.width, "in")(jnp.concatenate([flat, jnp.sin(waves), jnp.cos(waves), text], axis=-1))
        for i in range(3):
            h = h + dense(self.width, f"hidden_{i}")(nn.silu(h))
        return dense(flat.shape[-1], "out")(nn.silu(h)).reshape(latents.shape)

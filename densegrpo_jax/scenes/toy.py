"""The toy world: 8x8 pictures of a soft spot, nine prompts that say where it is, and a reward for being there and bright.

Small enough that a network is pretrained in seconds, so that the whole training program runs before any model is downloaded.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

from densegrpo_jax.models.mlp import ToyNetwork

SIDE = 8
SHAPE = (SIDE, SIDE, 1)
PLACES = {
    f"a spot at the {row} {column}".replace("middle middle", "centre"): (y, x)
    for row, y in (("top", 1.5), ("middle", 3.5), ("bottom", 5.5))
    for column, x in (("left", 1.5), ("middle", 3.5), ("right", 5.5))
}
PROMPTS = tuple(PLACES)


def spot(center: jax.Array, brightness: jax.Array) -> jax.Array:
    """Pictures [B, 8, 8, 1] in [-1, 1] of a Gaussian spot; center [B, 2] (y, x) in pixels, brightness [B] in [0, 1]."""
    axis = jnp.arange(SIDE, dtype=jnp.float32)
    squared = (axis[None, :, None] - center[:, 0, None, None]) ** 2 + (axis[None, None, :] - center[:, 1, None, None]) ** 2
    return (2.0 * brightness[:, None, None] * jnp.exp(-squared / (2 * 1.2**2)) - 1.0)[..., None]


def prompt_ids(prompts: list[str]) -> np.ndarray:
    """Indices into PROMPTS.

    Raises:
      ValueError: a prompt that the toy does not know, with those it does.
    """
    unknown = [prompt for prompt in prompts if prompt not in PLACES]
    if unknown:
        raise ValueError(f"the toy model does not know the prompt {unknown[0]!r}; it knows: {', '.join(map(repr, PROMPTS))}")
    return np.array([PROMPTS.index(prompt) for prompt in prompts], np.int32)


def spot_reward(images: jax.Array, prompts: list[str]) -> np.ndarray:
    """1 for a full bright spot at the place named, less by the squared error relative to it; continuous in the image. [N]"""
    target = spot(jnp.array([PLACES[prompt] for prompt in prompts]), jnp.ones(len(prompts)))
    gray = jnp.asarray(images, jnp.float32)[..., :1] / 127.5 - 1.0
    return np.asarray(1.0 - jnp.mean((gray - target) ** 2, (1, 2, 3)) / jnp.mean((target + 1.0) ** 2, (1, 2, 3)), np.float64)


@cache
def pretrained(seed: int = 0, steps: int = 1500, batch: int = 256) -> dict:
    """Flow matching on misplaced spots of any brightness: a model that is right on average and has much to learn.

    Returns:
      params of `ToyNetwork(len(PROMPTS))`.
    """
    model = ToyNetwork(len(PROMPTS))
    centers = jnp.array(list(PLACES.values()))
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-3, steps))

    def loss(params, key):
        keys = jax.random.split(key, 5)
        prompt = jax.random.randint(keys[0], (batch,), 0, len(PROMPTS))
        place = centers[prompt] + 0.8 * jax.random.normal(keys[1], (batch, 2))
        data = spot(place, jax.random.uniform(keys[2], (batch,), minval=0.3))
        sigma = jax.random.uniform(keys[3], (batch,))
        noise = jax.random.normal(keys[4], data.shape)
        s = sigma[:, None, None, None]
        velocity = model.apply({"params": params}, (1.0 - s) * data + s * noise, sigma, prompt)
        return jnp.mean((velocity - (noise - data)) ** 2)

    @jax.jit
    def train(key):
        params = model.init(jax.random.fold_in(key, steps), jnp.zeros((1, *SHAPE)), jnp.zeros(1), jnp.zeros(1, jnp.int32))["params"]

        def one(carry, i):
            params, opt_state = carry
            grads = jax.grad(loss)(params, jax.random.fold_in(key, i))
            updates, opt_state = optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), None

        (params, _), _ = jax.lax.scan(one, (params, optimizer.init(params)), jnp.arange(steps))
        return params

    return train(jax.random.key(seed))

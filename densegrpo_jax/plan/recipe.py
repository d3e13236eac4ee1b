"""What a training step of a config consists of, independent of where it runs: networks, tokens, evaluations, images."""

import math
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util

from densegrpo_jax import flow, pipeline, policy
from densegrpo_jax.config import Config, batch_size, reward_sources, reward_weights
from densegrpo_jax.families import Configs
from densegrpo_jax.models import lora
from densegrpo_jax.plan import flops, published
from densegrpo_jax.plan.flops import Pass
from densegrpo_jax.policy import Policy
from densegrpo_jax.rewards import clip
from densegrpo_jax.train import phases


class Recipe(NamedTuple):
    """A config with its model's shapes.

    Attributes:
      config: the run.
      configs: of the model folder.
      latent: shape of one latent.
      branches: passes of the network per velocity, 2 where guidance takes an unconditional branch.
      text_tokens: S.
      tables: of the first training step.
      price: of sampling and completing one trajectory.
      network: one pass of the transformer with its adapter.
      encoders: one pass of each text encoder.
      decoder: one pass of the autoencoder's decoder.
      vision: one pass of the vision towers of all scorers on the device; None if there are none.
      autoencoder: parameters of it, encoder included, as both are loaded.
      scorers: parameters of the scorers on the device.
      elsewhere: rewards that run on the host or a server, which a plan does not count.
      adapter: numbers that are trained.
    """

    config: Config
    configs: Configs
    latent: tuple[int, int, int]
    branches: int
    text_tokens: int
    tables: phases.Sampler
    price: flow.Cost
    network: Pass
    encoders: dict[str, Pass]
    decoder: Pass
    vision: Pass | None
    autoencoder: int
    scorers: int
    elsewhere: tuple[str, ...]
    adapter: int

    @property
    def trajectories(self) -> int:
        """B."""
        return batch_size(self.config)

    @property
    def trained_steps(self) -> int:
        return int(self.tables.trained.sum())

    @property
    def images(self) -> int:
        """Images that are decoded and scored in a training step."""
        return self.trajectories * (len(self.tables.scheme) + 1)

    @property
    def image_tokens(self) -> int:
        """N."""
        return self.latent[0] * self.latent[1] // self.configs.transformer.token_side**2

    @property
    def bytes_per_number(self) -> int:
        """Of the transformer's and the text encoders' weights and activations."""
        return jnp.dtype(self.config.model.dtype).itemsize

    @property
    def evaluated_images(self) -> float:
        """Images of all evaluations of the run, per training step."""
        e, run = self.config.evaluation, self.config.run
        regular = (run.steps // e.every + 1) * e.prompts * e.images_per_prompt if e.every else 0
        return (regular + 2 * e.final_prompts * e.final_images_per_prompt) / run.steps


shapes = cache(pipeline.abstract_params)
"""(configs, component) -> shapes of its parameters."""


def read(config: Config) -> Recipe:
    """The recipe of a config. Needs no weights: see `published.configs`.

    Raises:
      ValueError: a model whose shape is not known, or settings that do not fit it.
    """
    configs = published.configs(config.model.path)
    policy.check_heads(configs, config.parallel.tensor)
    height, width = config.model.resolution or (pipeline.default_side(configs),) * 2
    latent = pipeline.latent_shape(configs, height, width)
    trees = {name: shapes(configs, name) for name in pipeline.components(configs)}
    tokens = latent[0] * latent[1] // configs.transformer.token_side**2
    long = config.model.max_sequence_length
    is_sd3 = configs.family == "StableDiffusion3Pipeline"
    text_tokens = long + (configs.text_encoder.max_position_embeddings if is_sd3 else 0)
    rank, targets = config.adapter.rank, config.adapter.targets or lora.ATTENTION_TARGETS
    network = flops.transformer(configs.transformer, trees["transformer"], tokens, text_tokens, targets, rank)
    lengths = text_lengths(config, configs)
    encoders = {name: flops.text_encoder(getattr(configs, name), trees[name], length) for name, length in lengths.items()}

    tables, price = _schedule(config, configs, latent)
    vision, scorers, elsewhere = _scorers(config)
    adapter = network.weights
    if rank:
        adapter = size(jax.eval_shape(lambda: lora.init(jax.random.key(0), trees["transformer"], targets, rank)))
    return Recipe(
        config, configs, latent, 2 if pipeline.needs_uncond(configs, config.sampling.guidance_scale) else 1, text_tokens, tables, price,
        network, encoders, flops.decoder(configs, trees["vae"]["decoder"], latent), vision, size(trees["vae"]), scorers, elsewhere, adapter,
    )  # fmt: skip


def text_lengths(config: Config, configs: Configs) -> dict[str, int]:
    """Tokens that each text encoder sees, by component."""
    names = [name for name in pipeline.components(configs) if name.startswith("text")]
    return {name: getattr(getattr(configs, name), "max_position_embeddings", config.model.max_sequence_length) for name in names}


def with_config(recipe: Recipe, config: Config) -> Recipe:
    """The recipe of a config of the same model, LoRA and rewards, with other completions or credit."""
    tables, price = _schedule(config, recipe.configs, recipe.latent)
    return recipe._replace(config=config, tables=tables, price=price)


def _schedule(config: Config, configs: Configs, latent: tuple[int, int, int]) -> tuple[phases.Sampler, flow.Cost]:
    stub, c = abstract_policy(config, configs, latent), config.completion
    tables = phases.sampler(config, policy.sigmas(config, stub, config.sampling.num_steps), policy.shift(config, stub), step=0)
    return tables, flow.cost(config.sampling.num_steps, tables.scheme, tile=c.tile, tail=c.tail)


def abstract_policy(config: Config, configs: Configs, latent: tuple[int, int, int]) -> Policy:
    """The policy of `policy.from_folder` without weights, text and tokenizers: what the phases are compiled with."""
    dtype = jnp.dtype(config.model.dtype)
    kept = {"network": ("transformer", dtype), "decoder": ("vae", jnp.float32)}
    params = {name: of_type(shapes(configs, component), of) for name, (component, of) in kept.items()}
    targets = config.adapter.targets or lora.ATTENTION_TARGETS
    return Policy(
        params=params,
        velocity=policy.velocity_of(config, configs, dtype),
        decode=lambda params, latents: pipeline.decode(configs, params["decoder"], latents),
        encode=_nothing,
        truncated=_nothing,
        shape=latent,
        grid=lambda num_steps: pipeline.sigmas(configs, num_steps, latent),
        shift=pipeline.shift(configs, latent),
        start=lambda: jax.eval_shape(lambda: policy.fresh_adapter(config, params["network"], targets)),
        name=configs.family,
    )


def of_type(tree: Any, dtype: Any) -> Any:
    """Shapes as of arrays of that dtype."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)


def _nothing(prompts: Any) -> Any:
    raise ValueError("a plan has no text encoders to run")


def on_device(config: Config) -> list[str]:
    """The kinds of the optimised rewards that are scored on the device, of those whose shapes are known."""
    sources = reward_sources(config)
    kinds = [sources[name].partition(":")[0] for name in reward_weights(config) if "@http" not in sources[name]]
    return [kind for kind in kinds if kind in published.SCORERS]


def _scorers(config: Config) -> tuple[Pass | None, int, tuple[str, ...]]:
    """Vision towers of the rewards on the device, parameters of them and of witnesses there, and the names of the rewards elsewhere."""
    towers, weights, elsewhere = [], 0, []
    optimised = reward_weights(config)
    for name, source in reward_sources(config).items():
        kind = source.partition(":")[0]
        if kind not in published.SCORERS or "@http" in source:
            elsewhere += [name] * (name in optimised)
            continue
        tree = clip.shapes(published.SCORERS[kind])
        weights += size(tree)
        if name in optimised:
            towers.append(flops.vision_tower(published.SCORERS[kind].vision, tree["vision_model"]))
    if not towers:
        return None, weights, tuple(elsewhere)
    summed = {name: sum(getattr(tower, name) for tower in towers) for name in ("linear", "attention", "elements", "logits", "weights")}
    return max(towers, key=lambda tower: tower.largest_logits)._replace(**summed), weights, tuple(elsewhere)


def size(tree: Any) -> int:
    """Numbers in a tree of shapes."""
    return sum(math.prod(leaf.shape) for leaf in traverse_util.flatten_dict(tree).values())

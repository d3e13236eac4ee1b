"""What the trainer knows of a model: a handful of functions. It never asks which model it trains."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax import flow, parallel
from densegrpo_jax.config import Config
from densegrpo_jax.models import lora

TINY = Path(__file__).parent / "scenes" / "tiny_sd3"  # the Stable Diffusion 3 of the tiny world, which ships with the package
REPLACING_SAMPLERS = ("cps", "ddim_sde")  # replace predicted noise by fresh noise, which needs a clean prediction and no score
CACHED_PROMPTS = 512  # of SD3.5 a prompt takes some megabytes of host memory


class Policy(NamedTuple):
    """A text-to-image model as pure functions.

    Attributes:
      params: frozen weights, a tree whose "network" entry predicts the velocity.
      velocity: (params, trained, uncond) -> velocity(x [B, ...], sigma [B], cond [B, ...]), guided; `trained` is the adapter, the
        full weights where all are trained, or None for the base model.
      decode: (params, latents [N, ...]) -> images [N, H, W, 3] in [0, 1].
      encode: texts -> conditioning with leading axis P.
      truncated: texts -> one line for each that the text encoders do not see to its end.
      shape: of one latent.
      grid: number of steps -> the model's own noise levels.
      shift: of that grid.
      start: () -> what is trained, at its start: a fresh adapter, or a copy of the weights.
      name: for logs and reports.
    """

    params: dict
    velocity: Callable[[dict, Any, Any], flow.solvers.Velocity]
    decode: Callable[[dict, jax.Array], jax.Array]
    encode: Callable[[list[str]], Any]
    truncated: Callable[[list[str]], list[str]]
    shape: tuple[int, ...]
    grid: Callable[[int], np.ndarray]
    shift: float
    start: Callable[[], dict]
    name: str


def load(config: Config, mesh: jax.sharding.Mesh | None = None) -> Policy:
    """The policy that `config.model` names, its weights on the mesh of the run, or on one device."""
    return toy(config, mesh) if config.model.path == "toy" else from_folder(config, mesh)


def folder(path: str) -> str:
    """`model.path` as a folder or Hugging Face id, with "tiny" for the model that ships.

    Raises:
      ValueError: the shipped folder is missing from this installation.
    """
    if path == "tiny" and not TINY.is_dir():
        raise ValueError(f"{TINY} is missing; `python -m densegrpo_jax.scenes.pretrain --workdir DIR` trains and writes it")
    return str(TINY) if path == "tiny" else path


def fresh_adapter(config: Config, network: dict, default_targets: tuple[str, ...]) -> dict:
    """A fresh adapter from the run's seed, or for rank 0 a copy of all weights."""
    if config.adapter.rank == 0:
        return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), network)  # a copy: the update donates it
    targets = config.adapter.targets or default_targets
    return lora.init(jax.random.key(config.run.seed), network, targets, config.adapter.rank)


def variables(config: Config, network: dict, trained: dict | None) -> dict:
    """Collections for `module.apply`."""
    if trained is None:
        return {"params": network}
    return {"params": trained} if config.adapter.rank == 0 else {"params": network, "lora": trained}


def lora_scale(config: Config) -> float:
    return config.adapter.alpha / config.adapter.rank if config.adapter.rank else 1.0


def toy(config: Config, mesh: jax.sharding.Mesh | None = None) -> Policy:
    """The 8x8 toy, pretrained on the spot (a few seconds)."""
    from densegrpo_jax.models.mlp import ToyNetwork
    from densegrpo_jax.scenes import toy as world

    if config.sampling.guidance_scale != 1.0:
        raise ValueError(f"sampling.guidance_scale = {config.sampling.guidance_scale}: the toy has no unconditional branch; use 1.0")
    if config.adapter.start is not None:
        raise ValueError(f"adapter.start = {config.adapter.start}: the toy starts from its own weights; leave it unset")
    network = parallel.shared(mesh, world.pretrained())
    model = ToyNetwork(len(world.PROMPTS), lora_scale=lora_scale(config))

    def velocity(params, trained, uncond):
        bound = variables(config, params["network"], trained)
        return lambda x, sigma, cond: parallel.by_rows(model.apply(bound, *parallel.by_rows((x, sigma, cond))))

    def decode(params, latents):
        return jnp.repeat(jnp.clip(latents * 0.5 + 0.5, 0.0, 1.0), 3, axis=-1)

    return Policy(
        params={"network": network},
        velocity=velocity,
        decode=decode,
        encode=lambda prompts: jnp.asarray(world.prompt_ids(prompts)),
        truncated=lambda prompts: [],
        shape=world.SHAPE,
        grid=flow.uniform_sigmas,
        shift=1.0,
        start=lambda: fresh_adapter(config, network, ("in", "hidden_0", "hidden_1", "hidden_2", "out")),
        name="toy (8x8 spots)",
    )


def from_folder(config: Config, mesh: jax.sharding.Mesh | None = None) -> Policy:
    """A diffusers folder: networks, tokenizers and schedule from disk, prompts encoded once and cached."""
    from densegrpo_jax import pipeline
    from densegrpo_jax.models import adapter

    def place(component, shapes):
        if component.startswith("text_encoder") and config.parallel.encoders == "host":
            return "host"
        if mesh is None:
            return None
        return parallel.spread(mesh, shapes) if component != "vae" else jax.sharding.NamedSharding(mesh, jax.P())  # which is small

    path, dtype = folder(config.model.path), jnp.dtype(config.model.dtype)
    pipe = pipeline.load(path, dtype, variant=config.model.variant, sharding=place)
    configs = pipe.configs
    height, width = config.model.resolution or (pipeline.default_side(configs),) * 2
    shape = pipeline.latent_shape(configs, height, width)
    network, cache = pipe.params["transformer"], {}
    velocity = velocity_of(config, configs, pipe.dtype)
    check_heads(configs, config.parallel.tensor)
    if pipeline.few_steps(configs) and config.exploration.sampler not in REPLACING_SAMPLERS:
        raise ValueError(
            f"exploration.sampler = {config.exploration.sampler!r} reads a score from the velocity, which that of {config.model.path}, a "
            f"network distilled to few steps, does not have; choose one of {', '.join(REPLACING_SAMPLERS)}"
        )

    def encode(prompts):
        if len(cache) > CACHED_PROMPTS:
            cache.clear()
        return pipeline.encode_prompts(pipe, prompts, config.model.max_sequence_length, cache=cache)

    def start():
        if config.adapter.start is None:
            return fresh_adapter(config, network, lora.ATTENTION_TARGETS)
        table, shapes = pipeline.name_table(configs, "transformer"), pipeline.abstract_params(configs, "transformer")
        found = adapter.read_adapter(config.adapter.start, table, shapes, config.adapter.alpha).lora
        if adapter.rank(found) != config.adapter.rank:
            given, found_rank = config.adapter, adapter.rank(found)
            raise ValueError(f"adapter.rank = {given.rank}, but the adapter in {given.start} has rank {found_rank}: set adapter.rank to it")
        return found

    return Policy(
        params={"network": network, "decoder": pipe.params["vae"]},
        velocity=velocity,
        decode=lambda params, latents: pipeline.decode(configs, params["decoder"], latents),
        encode=encode,
        truncated=lambda prompts: pipeline.truncated(pipe, prompts, config.model.max_sequence_length),
        shape=shape,
        grid=lambda num_steps: pipeline.sigmas(configs, num_steps, shape),
        shift=pipeline.shift(configs, shape),
        start=start,
        name=f"{configs.family} from {config.model.path}",
    )


def check_heads(configs, tensor: int) -> None:
    """Refuses a number of devices that cannot share the heads of a model folder's network.

    Raises:
      ValueError: naming the valid ones.
    """
    heads = configs.transformer.num_attention_heads
    if heads % tensor:
        valid = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(f"parallel.tensor = {tensor} does not divide the {heads} heads of the network; choose one of {valid}")


def velocity_of(config: Config, configs, dtype: jnp.dtype) -> Callable[[dict, Any, Any], flow.solvers.Velocity]:
    """`Policy.velocity` of a model folder's network, from its configs alone.

    Args:
      config: the run: guidance, adapter, attention, rematerialisation.
      configs: of the folder (`families.Configs`).
      dtype: of the network's weights and activations.
    """
    from densegrpo_jax import pipeline

    model = pipeline.network(
        configs,
        dtype,
        attention_impl=config.model.attention,
        scan_unroll=config.model.scan_unroll,
        remat=config.optimizer.remat,
        lora_scale=lora_scale(config),
    )
    guided = pipeline.needs_uncond(configs, config.sampling.guidance_scale)

    def velocity(params, trained, uncond):
        bound = variables(config, params["network"], trained)
        guided_velocity = pipeline.velocity(
            model,
            bound["params"],
            bound.get("lora"),
            uncond if guided else None,
            config.sampling.guidance_scale,
            config.objective.detach_uncond,
        )
        return lambda x, sigma, cond: parallel.by_rows(guided_velocity(*parallel.by_rows((x, sigma, cond))))

    return velocity


def shift(config: Config, policy: Policy) -> float:
    """The shift of the grid that the config asks for.

    Raises:
      ValueError: a shift given for a grid that has its own.
    """
    grid, given = config.sampling.grid, config.sampling.shift
    if grid in ("model", "flux"):
        if given is not None:
            raise ValueError(f"sampling.shift = {given} has no effect on grid = {grid!r}; set grid to 'uniform' or 'sd3', or leave shift")
        return policy.shift if grid == "model" else flow.flux_shift(policy.shape[0] * policy.shape[1] // 4)
    default = 3.0 if grid == "sd3" else 1.0
    return default if given is None else given


def sigmas(config: Config, policy: Policy, num_steps: int) -> np.ndarray:
    """The noise levels that the config asks for, [num_steps + 1]."""
    if config.sampling.grid == "model":
        return policy.grid(num_steps)
    rule = flow.sd3_sigmas if config.sampling.grid == "sd3" else flow.uniform_sigmas
    return rule(num_steps, shift(config, policy))

"""The phases compiled for a TPU slice that is not there: what the compiler says of memory and collectives (extra `tpu`: libtpu).

The programs are those of training, `train.phases`, on shapes instead of arrays. One takes a minute or more of an idle core at full width;
the number of layers hardly matters, as layers are scanned. GPUs have no such compiler without a device.
"""

import dataclasses
import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from densegrpo_jax import flow, parallel
from densegrpo_jax.config import Config, batch_size
from densegrpo_jax.families import Conditioning, Configs
from densegrpo_jax.parallel.mesh import ROWS, arranged
from densegrpo_jax.plan import roofline
from densegrpo_jax.plan.chips import GIB, Topology
from densegrpo_jax.plan.collectives import received
from densegrpo_jax.plan.memory import memory
from densegrpo_jax.plan.recipe import Recipe, abstract_policy
from densegrpo_jax.plan.roofline import Settings
from densegrpo_jax.train import phases, state
from densegrpo_jax_configs.variants import change

PHASES = {"sample": ("rollout", "completion"), "decode": ("decode",), "recompute": ("recompute",), "update": ("update",)}
PROGRAMS = tuple(PHASES)


class Compiled(NamedTuple):
    """What the compiler says of a program, for each chip.

    Attributes:
      name: one of PROGRAMS.
      argument, temporary, output, peak: bytes; arguments and outputs lie in the memory too.
      collectives: kind -> how often they run, and bytes that the chip receives in them.
      seconds: that compiling took.
    """

    name: str
    argument: int
    temporary: int
    output: int
    peak: int
    collectives: dict[str, tuple[int, int]]
    seconds: float


def available() -> bool:
    """Whether libtpu is installed."""
    return importlib.util.find_spec("libtpu") is not None


def mesh(where: Topology, fsdp: int, tensor: int = 1) -> jax.sharding.Mesh:
    """Devices of a slice that is not there, as the mesh of a run.

    Raises:
      ValueError: GPUs, no libtpu, or a shape that libtpu does not know.
    """
    if where.chip.kind != "tpu":
        raise ValueError(f"{where.name}: programs can be compiled ahead for TPUs only")
    if not available():
        raise ValueError("libtpu is not installed; `pip install densegrpo_jax[tpu]` brings it, and needs no TPU")
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks Google Cloud which machine this is
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # else one process at a time, though none takes a chip here
    cores = {"chip_config_name": "megacore"} if where.chip.name == "v4" else {}  # both cores of a chip as one device, as JAX has them
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=where.name, **cores).devices
    except Exception as error:  # libtpu's own kind
        raise ValueError(f"{where.name}: libtpu makes no such slice ({str(error).splitlines()[0]})") from error
    return arranged(devices[: where.count], fsdp, tensor)


def with_layers(configs: Configs, layers: int) -> Configs:
    """The same model with fewer layers of each kind (tests)."""
    transformer = configs.transformer
    if hasattr(transformer, "num_single_layers"):
        return configs._replace(transformer=dataclasses.replace(transformer, num_layers=layers, num_single_layers=layers))
    dual = tuple(i for i in transformer.dual_attention_layers if i < layers - 1)
    return configs._replace(transformer=dataclasses.replace(transformer, num_layers=layers, dual_attention_layers=dual))


def compile_phase(name: str, recipe: Recipe, settings: Settings, where: Topology) -> Compiled:
    """Compiles one phase.

    Args:
      name: one of PROGRAMS.
      recipe: of the config.
      settings: chunks, attention and remat, which replace the config's; weights are shared over `fsdp` chips, products over `tensor`.
      where: TPU slice.

    Raises:
      ValueError: an unknown name, no libtpu, or a program that does not fit, with the compiler's words.
    """
    if name not in PROGRAMS:
        raise ValueError(f"program {name!r}: choose one of {', '.join(PROGRAMS)}")
    devices = mesh(where, settings.fsdp, settings.tensor)
    program, arguments = build(name, recipe, settings, devices)
    with jax.set_mesh(devices):  # only now: nothing can be computed on these devices
        began = time.perf_counter()
        try:
            compiled = program.lower(*arguments).compile()
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"{name} on {where.name}: {str(error).strip().splitlines()[0]}") from error
        seconds = time.perf_counter() - began
    found = compiled.memory_analysis()
    sizes = found.argument_size_in_bytes, found.temp_size_in_bytes, found.output_size_in_bytes, found.peak_memory_in_bytes
    return Compiled(name, *sizes, received(compiled.as_text()), seconds)


def programs(recipe: Recipe) -> list[str]:
    """The programs that a run of the recipe has."""
    return [name for name in PROGRAMS if name != "recompute" or phases.recomputes(recipe.config)]


def compared(name: str, recipe: Recipe, settings: Settings, where: Topology, layers: int | None = None) -> dict[str, Any]:
    """A phase compiled, beside what the plan says of it.

    Args:
      name, recipe, settings, where: see `compile_phase`.
      layers: compile fewer of them (tests).

    Returns:
      "compiler", the fields of `Compiled`; "calls_per_step" of the program; "collective_bytes" that a chip receives in them; "plan", see
      `estimates`.
    """
    found = compile_phase(name, recipe if layers is None else recipe._replace(configs=with_layers(recipe.configs, layers)), settings, where)
    pieces = recipe.trajectories // settings.chunk if recipe.elsewhere else 1
    calls = {"sample": pieces, "update": recipe.config.optimizer.updates}.get(name, 1)
    return {
        "compiler": found._asdict(),
        "calls_per_step": calls,
        "collective_bytes": calls * sum(size for _, size in found.collectives.values()),
        "plan": estimates(name, recipe, settings, where),
    }


def estimates(name: str, recipe: Recipe, settings: Settings, where: Topology) -> dict[str, float]:
    """What the plan says of a program, in bytes of each chip: "during" and "received" are its estimates of temporary and received ones,
    "beside" is what lies in the memory and is no argument of the program, and "usable" the memory."""
    needed, bounds = memory(recipe, settings, where), roofline.phases(recipe, settings, where)
    return {
        "during": max(needed.during[phase] for phase in PHASES[name] if phase in needed.during),
        "beside": needed.resident["text encoders"] + needed.resident["scorers"],
        "received": sum(phase.received for phase in bounds if phase.name in PHASES[name]),
        "usable": where.chip.hbm,
    }


COLUMNS = (
    "arguments GiB", "temporary GiB", "plan: temporary", "peak GiB", "with encoders, scorers", "usable GiB", "received GB",
    "plan: received", "compiled in s",
)  # fmt: skip


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """What `compared` found, under COLUMNS."""
    c, p = row["compiler"], row["plan"]
    gib = c["argument"], c["temporary"], p["during"], c["peak"], c["peak"] + p["beside"], p["usable"]
    return *(f"{n / GIB:.2f}" for n in gib), *(f"{n / 1e9:,.0f}" for n in (row["collective_bytes"], p["received"])), f"{c['seconds']:.0f}"


def build(name: str, recipe: Recipe, settings: Settings, devices: jax.sharding.Mesh) -> tuple[Callable, tuple]:
    """A phase's jitted function with the shapes and shardings of its arguments."""
    config, policy = _settled(recipe, settings)
    shard = jax.sharding.NamedSharding
    everywhere = shard(devices, jax.P())
    rows, P = ROWS, config.prompts.per_step
    B, T = batch_size(config), config.sampling.num_steps

    def array(shape, *spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=shard(devices, jax.P(*spec)))

    def placed(leaf, place):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    def replicated(tree):
        return jax.tree.map(lambda leaf: placed(leaf, everywhere), tree)

    network = policy.params["network"]
    params = {"network": jax.tree.map(placed, network, parallel.spread(devices, network)), "decoder": replicated(policy.params["decoder"])}
    transformer, dtype = recipe.configs.transformer, jnp.dtype(config.model.dtype)

    def text(count):
        context = array((count, recipe.text_tokens, transformer.joint_attention_dim), dtype=dtype)
        return Conditioning(context, array((count, transformer.pooled_projection_dim), dtype=dtype))

    uncond = text(1) if config.sampling.guidance_scale != 1.0 else None
    trained = replicated(policy.start())
    integer = array((), dtype=jnp.int32)
    if name == "sample":
        count = settings.chunk if recipe.elsewhere else B  # rewards on the host take a chunk at a time
        ids = array((count,), rows, dtype=jnp.int32)
        return phases.make_sample(config, policy, recipe.tables), (params, trained, text(P), uncond, integer, ids, ids)
    if name == "decode":
        return phases.make_decode(config, policy, devices.size // settings.tensor), (params, array((recipe.images, *recipe.latent), rows))

    def per_step(count):
        return array((count, B, *recipe.latent), None, rows)

    scalars = array((T, B), None, rows)
    trajectory = flow.Trajectory(per_step(T + 1), per_step(T), per_step(T), array((T + 1,)), scalars)
    kernel = jax.tree.map(lambda leaf: array(leaf.shape), recipe.tables.kernel)
    batch = phases.Batch(trajectory, kernel, scalars, scalars, text(P), uncond, array((B,), rows, dtype=jnp.int32))
    pairs = B * recipe.trained_steps
    if name == "recompute":
        order = array((pairs // settings.micro_batch, settings.micro_batch, 2), None, rows, dtype=jnp.int32)
        return phases.make_recompute(config, policy), (params, trained, batch, order)
    share = pairs // config.optimizer.updates
    order = array((share // settings.micro_batch, settings.micro_batch, 2), None, rows, dtype=jnp.int32)
    start = replicated(jax.eval_shape(lambda: state.init(config, jax.tree.map(jnp.zeros_like, policy.start()))))
    return phases.make_update(config, policy), (start, params, batch, order, array((), dtype=bool))


def _settled(recipe: Recipe, settings: Settings) -> tuple[Config, Any]:
    """The config with the settings in it, and its abstract policy."""
    config = change(
        recipe.config,
        model={"attention": settings.attention},
        sampling={"chunk": settings.chunk, "decode_chunk": settings.decode_chunk},
        optimizer={"micro_batch": settings.micro_batch, "remat": settings.remat},
    )
    return config, abstract_policy(config, recipe.configs, recipe.latent)

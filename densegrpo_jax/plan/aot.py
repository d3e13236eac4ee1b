"""The phases compiled for a TPU slice that is not there: what the compiler says of memory and collectives (extra `tpu`: libtpu).

The programs are those of training, `train.phases`, on shapes instead of arrays. One takes a minute or more of an idle core at full width;
the number of layers hardly matters, as layers are scanned. GPUs have no such compiler without a device.
"""

import dataclasses
import importlib.util
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from densegrpo_jax import flow, parallel, pipeline
from densegrpo_jax import policy as policies
from densegrpo_jax.config import Config, batch_size
from densegrpo_jax.families import Conditioning, Configs
from densegrpo_jax.parallel.mesh import COPIES, ROWS, arranged
from densegrpo_jax.plan import published, roofline
from densegrpo_jax.plan.chips import GIB, Topology, topology
from densegrpo_jax.plan.collectives import received
from densegrpo_jax.plan.memory import evaluated, memory
from densegrpo_jax.plan.recipe import Recipe, abstract_policy, of_type, on_device, shapes, text_lengths
from densegrpo_jax.plan.roofline import SCORED_AT_ONCE, Settings, encoded_at_once
from densegrpo_jax.policy import Policy
from densegrpo_jax.rewards import aesthetic, clip
from densegrpo_jax.train import phases, state
from densegrpo_jax_configs.variants import change

PHASES = {
    "encode": ("encode",), "sample": ("rollout", "completion"), "decode": ("decode",), "reward": ("reward",), "recompute": ("recompute",),
    "update": ("update",), "evaluate": ("evaluation",),
}  # fmt: skip
PROGRAMS = tuple(PHASES)
KEPT = ("sample", "update")  # their results are the trajectories, which the plan counts as there, and the state, in whose place they come


class Compiled(NamedTuple):
    """What the compiler says of a program, for each chip.

    Attributes:
      name: one of PROGRAMS.
      argument, temporary, output, peak: bytes, of several programs the most; arguments and outputs lie in the memory too. The peak may be
        less than arguments and temporary ones together, which are laid out apart.
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


def mesh(where: Topology, fsdp: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
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
      where: TPU slice. Rewards are scored by each process on its own chips, so that they are compiled for a slice of those alone.

    Raises:
      ValueError: an unknown name, no libtpu, or a program that does not fit, with the compiler's words.
    """
    if name not in PROGRAMS:
        raise ValueError(f"program {name!r}: choose one of {', '.join(PROGRAMS)}")
    devices = mesh(of_process(where)) if name == "reward" else mesh(where, settings.fsdp, settings.tensor)
    parts = [_compiled(f"{name} on {where.name}", *part, devices) for part in build(name, recipe, settings, devices, where.hosts)]
    sizes, collectives, seconds = zip(*parts)
    summed: dict[str, tuple[int, int]] = {}
    for kind, (number, size) in (item for found in collectives for item in found.items()):
        before = summed.get(kind, (0, 0))
        summed[kind] = before[0] + number, before[1] + size
    return Compiled(name, *map(max, zip(*sizes)), summed, sum(seconds))


def _compiled(said: str, program: Callable, arguments: tuple, devices: jax.sharding.Mesh) -> tuple[tuple[int, ...], dict, float]:
    """Sizes of arguments, temporary arrays and outputs, and the peak; what is received; seconds of compiling."""
    with jax.set_mesh(devices):  # only now: nothing can be computed on these devices
        began = time.perf_counter()
        try:
            compiled = program.lower(*arguments).compile()
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"{said}: {str(error).strip().splitlines()[0]}") from error
        seconds = time.perf_counter() - began
    found = compiled.memory_analysis()
    sizes = found.argument_size_in_bytes, found.temp_size_in_bytes, found.output_size_in_bytes, found.peak_memory_in_bytes
    return sizes, received(compiled.as_text()), seconds


def of_process(where: Topology) -> Topology:
    """The chips of one process, as a slice of their own: libtpu compiles for whole slices only."""
    return where if where.hosts == 1 else topology(f"{where.chip.name}:{'2x2' if where.chip.dims == 2 else '2x2x1'}")


def programs(recipe: Recipe) -> list[str]:
    """The programs that a run of the recipe has."""
    has = {
        "reward": recipe.vision is not None,
        "recompute": phases.recomputes(recipe.config),
        "evaluate": evaluated(recipe.config, 1) > 0,
    }
    return [name for name in PROGRAMS if has.get(name, True)]


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
    calls = {
        "encode": -(-recipe.config.prompts.per_step // encoded_at_once(where.count // settings.fsdp // settings.tensor)),
        "sample": pieces,
        "update": recipe.config.optimizer.updates,
        "evaluate": recipe.evaluated_images / (evaluated(recipe.config, settings.chunk) or 1),
    }.get(name, 1)
    return {
        "compiler": found._asdict(),
        "calls_per_step": calls,
        "collective_bytes": calls * sum(size for _, size in found.collectives.values()),
        "plan": estimates(name, recipe, settings, where),
    }


def estimates(name: str, recipe: Recipe, settings: Settings, where: Topology) -> dict[str, float]:
    """What the plan says of a program, in bytes of each chip: "during" and "received" are its estimates of temporary and received ones,
    "held" is what lies in the memory, whether the program reads it or not, and "usable" the memory."""
    planned, bounds = memory(recipe, settings, where), roofline.phases(recipe, settings, where)
    given = {phase: planned.given.get(phase, 0.0) for phase in PHASES[name]}
    return {
        "during": max(planned.during[phase] - given[phase] for phase in given if phase in planned.during),
        "held": sum(planned.resident.values()) + max(given.values()),
        "received": sum(phase.received for phase in bounds if phase.name in PHASES[name]),
        "usable": where.chip.hbm,
    }


def needed(row: dict[str, Any]) -> float:
    """Bytes of each chip while a program runs, of what `compared` found: everything that lies there, the temporary arrays, which are taken
    as one piece, and results, unless they are counted as there."""
    c = row["compiler"]
    return max(row["plan"]["held"], c["argument"]) + c["temporary"] + (0 if c["name"] in KEPT else c["output"])


COLUMNS = (
    "arguments GiB", "temporary GiB", "plan: temporary", "needed GiB", "usable GiB", "received GB", "of which", "plan: received",
    "compiled in s",
)  # fmt: skip


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """What `compared` found, under COLUMNS."""
    c, p = row["compiler"], row["plan"]
    gib = (f"{n / GIB:.2f}" for n in (c["argument"], c["temporary"], p["during"], needed(row), p["usable"]))
    return *gib, f"{row['collective_bytes'] / 1e9:,.0f}", kinds(row), f"{p['received'] / 1e9:,.0f}", f"{c['seconds']:.0f}"


def kinds(row: dict[str, Any]) -> str:
    """What is received by kind of collective, the largest first; what is below a percent is left out."""
    sizes = {kind: size for kind, (_, size) in row["compiler"]["collectives"].items()}
    parts = [(size / sum(sizes.values()), kind) for kind, size in sizes.items() if size]
    return ", ".join(f"{kind} {part:.0%}" for part, kind in sorted(parts, reverse=True) if part >= 0.01)


def build(name: str, recipe: Recipe, settings: Settings, devices: jax.sharding.Mesh, hosts: int = 1) -> list[tuple[Callable, tuple]]:
    """A phase's jitted functions, which run one after another, with the shapes and shardings of their arguments.

    Args:
      name, recipe, settings: see `compile_phase`.
      devices: of the run, or for "reward" those of one process.
      hosts: processes, which share the images that are scored.
    """
    config, policy = _settled(recipe, settings)
    if name == "encode":
        return [_encode(config, recipe.configs, devices)]
    if name == "reward":
        return _reward(recipe, devices, hosts)
    return [_phase(name, recipe, settings, devices, config, policy)]


def _phase(
    name: str, recipe: Recipe, settings: Settings, devices: jax.sharding.Mesh, config: Config, policy: Policy
) -> tuple[Callable, tuple]:
    """One of `train.phases`."""
    array, replicated = partial(_array, devices), partial(_replicated, devices)
    rows, P = ROWS, config.prompts.per_step
    B, T = batch_size(config), config.sampling.num_steps
    params = {"network": _spread(devices, policy.params["network"]), "decoder": replicated(policy.params["decoder"])}
    transformer, dtype = recipe.configs.transformer, jnp.dtype(config.model.dtype)

    def text(count, *spec):
        context = array((count, recipe.text_tokens, transformer.joint_attention_dim), *spec, dtype=dtype)
        return Conditioning(context, array((count, transformer.pooled_projection_dim), *spec, dtype=dtype))

    uncond = text(1) if config.sampling.guidance_scale != 1.0 else None
    trained = replicated(policy.start())
    integer = array((), dtype=jnp.int32)
    if name == "sample":
        count = settings.chunk if recipe.elsewhere else B  # rewards on the host take a chunk at a time
        ids = array((count,), rows, dtype=jnp.int32)
        return phases.make_sample(config, policy, recipe.tables), (params, trained, text(P), uncond, integer, ids, ids)
    if name == "evaluate":
        count = evaluated(config, settings.chunk)
        sigmas = policies.sigmas(config, policy, config.evaluation.num_steps)
        given = (params, trained, text(count, rows), uncond, array((count,), rows, dtype=jnp.int32), integer)
        return phases.make_generate(config, policy, sigmas), given
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


def _encode(config: Config, configs: Configs, devices: jax.sharding.Mesh) -> tuple[Callable, tuple]:
    """The text encoders on the prompts of one call."""
    dtype, lengths = jnp.dtype(config.model.dtype), text_lengths(config, configs)
    encoders = {name: _spread(devices, of_type(shapes(configs, name), dtype)) for name in lengths}
    count = encoded_at_once(devices.shape[COPIES])
    ids = {name: _array(devices, (count, length), dtype=jnp.int32) for name, length in lengths.items()}
    return pipeline._encode, (configs, dtype, config.model.max_sequence_length, encoders, ids)


def _reward(recipe: Recipe, devices: jax.sharding.Mesh, hosts: int) -> list[tuple[Callable, tuple]]:
    """The scorers on the device: of each its text tower, and its vision tower on a process's images of a step."""
    found, count = [], -(-recipe.images // hosts)
    size = clip.at_once(count, SCORED_AT_ONCE, devices.size)
    height, width = (side * recipe.configs.vae.downsampling for side in recipe.latent[:2])
    array = partial(_array, devices)
    images = array((-(-count // size) * size, height, width, 3), devices.axis_names, dtype=jnp.uint8)
    for kind in on_device(recipe.config):
        towers, texts = published.SCORERS[kind], ()
        if kind == "aesthetic":  # the prompt has no say
            score, spec = aesthetic.score, aesthetic.Spec(towers.vision, clip.ImageProcessing(), jnp.dtype(jnp.float32))
            params = _replicated(devices, aesthetic.shapes(towers.vision))
        else:
            score, spec = clip.score, clip.spec_of(kind, towers, clip.ImageProcessing())
            params = _replicated(devices, clip.shapes(towers))
            texts = array((images.shape[0], towers.vision.projection_dim), devices.axis_names)
            ids = array((clip.TEXT_BATCH, towers.text.max_position_embeddings), dtype=jnp.int32)
            found.append((clip._embed_texts, (params, spec, ids)))
        found.append((clip._score_chunks, (score, size, params, spec, images, texts)))
    return found


def _array(devices: jax.sharding.Mesh, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(devices, jax.P(*spec)))


def _replicated(devices: jax.sharding.Mesh, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: _array(devices, leaf.shape, dtype=leaf.dtype), tree)


def _spread(devices: jax.sharding.Mesh, tree: Any) -> Any:
    """Frozen weights where the run has them."""
    return jax.tree.map(
        lambda leaf, place: _array(devices, leaf.shape, *place.spec, dtype=leaf.dtype), tree, parallel.spread(devices, tree)
    )


def _settled(recipe: Recipe, settings: Settings) -> tuple[Config, Policy]:
    """The config with the settings in it, and its abstract policy."""
    config = change(
        recipe.config,
        model={"attention": settings.attention},
        sampling={"chunk": settings.chunk, "decode_chunk": settings.decode_chunk},
        optimizer={"micro_batch": settings.micro_batch, "remat": settings.remat},
    )
    return config, abstract_policy(config, recipe.configs, recipe.latent)

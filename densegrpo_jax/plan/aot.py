"""The phases compiled for a TPU slice that is not there: what the compiler says of memory and collectives (extra `tpu`: libtpu).

The programs are those of training, `train.phases`, on shapes instead of arrays. One takes a minute or more of an idle core at full width;
the number of layers hardly matters, as layers are scanned. GPUs have no such compiler without a device.
"""

import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from densegrpo_jax import flow, parallel
from densegrpo_jax.config import Config, batch_size
from densegrpo_jax.families import Conditioning, Configs
from densegrpo_jax.parallel.mesh import ROWS, arranged
from densegrpo_jax.plan.chips import Topology
from densegrpo_jax.plan.recipe import Recipe, abstract_policy
from densegrpo_jax.plan.roofline import Settings
from densegrpo_jax.train import phases, state
from densegrpo_jax_configs.variants import change

PROGRAMS = ("sample", "decode", "recompute", "update")
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
CALLS = ("calls", "to_apply", "condition", "body", "branch_computations", "called_computations")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


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
    if where.chip.name == "v4":
        raise ValueError(f"{where.name}: libtpu compiles for the two cores a chip has there, which run as one; compile for another chip")
    if not available():
        raise ValueError("libtpu is not installed; `pip install densegrpo_jax[tpu]` brings it, and needs no TPU")
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks Google Cloud which machine this is
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # else one process at a time, though none takes a chip here
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=where.name).devices
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
    return Compiled(name, *sizes, collectives(compiled.as_text()), seconds)


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


def collectives(program: str) -> dict[str, tuple[int, int]]:
    """Collectives in the text of a compiled program: kind -> how often they run, and bytes that a chip receives in them, by
    rings. Loops are counted through.

    Raises:
      ValueError: a loop whose number of rounds, or a collective whose groups the text does not say.
    """
    bodies = _computations(program)
    runs = _runs(bodies)
    seen: dict[str, tuple[str, int, float]] = {}  # by channel, as the start and the end of one may both be written with it
    for name, lines in bodies.items():
        for i, line in enumerate(lines):
            if found := re.search(rf"= (\(?[^=]*?) ({'|'.join(KINDS)})(-start)?\(", line):
                channel = re.search(r"channel_id=(\d+)", line)
                key = channel[1] if channel else f"{name} {i}"
                one = found[2], runs[name], _received(line, *found.groups())
                seen[key] = max(seen.get(key, ("", 0, 0.0)), one, key=lambda one: one[1])
    result: dict[str, tuple[int, int]] = {}
    for kind, times, size in seen.values():
        number, total = result.get(kind, (0, 0))
        result[kind] = number + times, total + round(times * size)
    return {kind: counts for kind, counts in result.items() if counts[0]}


def _received(line: str, result: str, kind: str, start: str | None) -> float:
    """Bytes that a chip receives in one collective, from its result's type and its groups."""
    arrays = [found for found in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result) if found != ("u32", "")]  # which are counters
    size = sum(BYTES.get(dtype, 4) * math.prod(int(n) for n in sides.split(",") if n) for dtype, sides in arrays)
    if kind == "collective-permute":
        return size / 2 if start else size  # what is started has its operand in its type too
    n = _members(line)
    if kind == "all-gather" and start:
        size = size * n / (n + 1)
    return size * {"all-gather": (n - 1) / n, "all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "all-to-all": (n - 1) / n}[kind]


def _members(line: str) -> int:
    """Chips in a group of a collective."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(iota[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    raise ValueError(f"a collective of a compiled program does not say its groups: {line.strip()[:300]}")


def _computations(program: str) -> dict[str, list[str]]:
    """The lines of each computation of a program's text, callees before callers."""
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in program.splitlines():
        if head := re.match(r"\s*(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = bodies.setdefault(head[1], [])
        else:
            lines.append(line)
    return bodies


def _runs(bodies: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs in one run of the last."""
    runs = dict.fromkeys(bodies, 0)
    runs[list(bodies)[-1]] = 1
    for name in reversed(bodies):
        for line in bodies[name]:
            rounds = _rounds(line, bodies) if " while(" in line else 1
            for called in re.findall(rf"(?:{'|'.join(CALLS)})=(\{{[^}}]*\}}|%?[\w.\-]+)", line):
                for callee in re.findall(r"[\w.\-]+", called):
                    if callee in runs:
                        runs[callee] += rounds * runs[name]
    return runs


def _rounds(loop: str, bodies: dict[str, list[str]]) -> int:
    """Rounds of a loop: as the compiler notes them, or the constant that its condition compares with."""
    if noted := re.search(r'known_trip_count":\{"n":"(\d+)"', loop):
        return int(noted[1])
    condition = bodies[re.search(r"condition=%?([\w.\-]+)", loop)[1]]
    constants = dict(re.findall(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)", "\n".join(condition)))
    compared = [re.search(r"ROOT .* compare\(([^)]*)\), direction=LT", line) for line in condition]
    ends = [constants[name] for found in compared if found for name in re.findall(r"[\w.\-]+", found[1]) if name in constants]
    if len(ends) != 1:
        raise ValueError(f"a loop of a compiled program does not say how many rounds it has: {loop.strip()[:200]}")
    return int(ends[0])

"""Settings of a config on a topology: as configured, or the fastest that fit."""

from itertools import product

import jax.numpy as jnp

from densegrpo_jax.config import Config, batch_size, check, micro_batch
from densegrpo_jax.models.attention import default_impl
from densegrpo_jax.plan.chips import Topology
from densegrpo_jax.plan.memory import SAFETY, Memory, gib, memory
from densegrpo_jax.plan.recipe import Recipe
from densegrpo_jax.plan.roofline import Settings, phases
from densegrpo_jax.train.phases import decode_size
from densegrpo_jax_configs.variants import change

ENOUGH_ROWS = 4  # a chip has fewer at a time only where more do not fit: the roofline does not see that small products are slow
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # per chip; beyond, arithmetic no longer gains from more


def attentions(recipe: Recipe, topology: Topology) -> list[str]:
    """The implementations that may be used on these chips, the one that the config means first."""
    chosen, head = recipe.config.model.attention, recipe.configs.transformer.attention_head_dim
    tokens, dtype, kind = recipe.image_tokens + recipe.text_tokens, jnp.dtype(recipe.config.model.dtype), topology.chip.kind
    if chosen != "auto":
        if chosen == {"tpu": "cudnn", "gpu": "splash"}[kind]:
            raise ValueError(f"model.attention = {chosen!r} does not run on {topology.name}; leave it at 'auto'")
        return [chosen]
    first = default_impl(kind, tokens, head, dtype)
    return [first, *({"xla", "splash"} - {first} if kind == "tpu" else ())]


def configured(recipe: Recipe, topology: Topology, fsdp: int) -> Settings:
    """The settings that the config has.

    Raises:
      ValueError: they cannot be spread evenly over the chips; says which, and what can.
    """
    config = recipe.config
    n = shares(recipe, topology)
    try:
        check(config, recipe.trained_steps, devices=n)
    except ValueError as error:
        raise ValueError(f"{error}, or have settings chosen with --search") from error
    if fsdp < 1 or n % fsdp:
        raise ValueError(
            f"fsdp = {fsdp} does not divide the {n} {'chips' if n == topology.count else 'groups of chips'} of {topology.name}; "
            f"choose one of {divisors(n)}"
        )
    chunk = config.sampling.chunk or batch_size(config)
    micro, decode = micro_batch(config, recipe.trained_steps, n), decode_size(config, recipe.images, n)
    kind, p = attentions(recipe, topology)[0], config.parallel
    return Settings(fsdp, chunk, micro, decode, config.optimizer.remat, kind, p.encoders, p.tensor)


def shares(recipe: Recipe, topology: Topology) -> int:
    """Over how many groups of chips the trajectories are spread; see `Settings.tensor`.

    Raises:
      ValueError: the config's parallel.tensor does not divide the chips.
    """
    tensor = recipe.config.parallel.tensor
    if topology.count % tensor:
        valid = divisors(topology.count)
        raise ValueError(f"parallel.tensor = {tensor} does not divide the {topology.count} chips of {topology.name}; choose one of {valid}")
    return topology.count // tensor


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def shared_evenly(whole: int, chips: int) -> list[int]:
    """Sizes of pieces of `whole` that every chip takes an equal number of rows of."""
    return [chips * rows for rows in ROWS if whole % (chips * rows) == 0]


def share(config: Config, trained_steps: int) -> int:
    """Pairs of one update."""
    return batch_size(config) * trained_steps // config.optimizer.updates


def fits(needed: Memory, topology: Topology) -> bool:
    return needed.peak <= SAFETY * topology.chip.hbm


def search(recipe: Recipe, topology: Topology) -> Settings:
    """The settings with the shortest bound of a training step among those that fit. More rows at a time than ENOUGH_ROWS must gain half a
    percent; sharding more, recomputing less, or another attention than "auto" stands for, two.

    Raises:
      ValueError: nothing fits; says how many bytes the leanest settings are over, and what would help.
    """
    config, n = recipe.config, shares(recipe, topology)
    check(change(config, sampling={"chunk": None}), recipe.trained_steps, devices=n)
    wholes = batch_size(config), share(config, recipe.trained_steps), recipe.images
    pieces = dict(zip(("chunk", "micro_batch", "decode_chunk"), (shared_evenly(whole, n) for whole in wholes)))
    for name, whole, sizes in zip(("trajectories", "pairs of an update", "images"), wholes, pieces.values()):
        if not sizes:
            raise ValueError(
                f"the {whole} {name} cannot be spread evenly over {n} shares of {topology.name}; change prompts.per_step, or raise "
                "parallel.tensor"
            )
    lean = {field: sizes[0] for field, sizes in pieces.items()}
    best: tuple[float, Settings] | None = None
    for encoders, kind, fsdp, remat in product(("device", "host"), attentions(recipe, topology), divisors(n), (True, False)):
        leanest = Settings(fsdp=fsdp, remat=remat, attention=kind, encoders=encoders, tensor=config.parallel.tensor, **lean)
        if fits(memory(recipe, leanest, topology), topology):
            seconds, chosen = _enlarged(recipe, leanest, pieces, topology)
            if best is None or seconds < 0.98 * best[0]:
                best = seconds, chosen
    if best is None:
        kind, tensor = attentions(recipe, topology)[-1], config.parallel.tensor
        leanest = Settings(fsdp=n, remat=True, attention=kind, encoders="host", tensor=tensor, **lean)
        raise ValueError(f"nothing fits {topology.name}: with the leanest settings {excess(recipe, leanest, topology, True)}")
    return best[1]


def _enlarged(recipe: Recipe, settings: Settings, pieces: dict[str, list[int]], topology: Topology) -> tuple[float, Settings]:
    """The bound and the settings with more rows at a time; each piece is about phases of its own."""

    def fitting(settings, field, sizes):
        larger = (settings._replace(**{field: size}) for size in sizes)
        return [candidate for candidate in larger if fits(memory(recipe, candidate, topology), topology)]

    for field, sizes in pieces.items():
        enough = fitting(settings, field, [size for size in sizes if size <= ENOUGH_ROWS * topology.count // settings.tensor])
        settings = enough[-1] if enough else settings
    seconds = _bound(recipe, settings, topology)
    for field, sizes in pieces.items():
        for larger in fitting(settings, field, sizes):
            if _bound(recipe, larger, topology) < 0.995 * seconds:
                settings, seconds = larger, _bound(recipe, larger, topology)
    return seconds, settings


def _bound(recipe: Recipe, settings: Settings, topology: Topology) -> float:
    return sum(phase.seconds for phase in phases(recipe, settings, topology))


def excess(recipe: Recipe, settings: Settings, topology: Topology, leanest: bool = False) -> str:
    """How many bytes are too many, in which phase, what they are, and what would help; `leanest` settings cannot be lowered."""
    needed, room = memory(recipe, settings, topology), SAFETY * topology.chip.hbm
    largest = sorted(needed.resident.items(), key=lambda item: -item[1])[:3]
    held = ", ".join(f"{name} {gib(number)}" for name, number in largest)
    phase, during, over = needed.fullest, needed.during[needed.fullest], needed.peak - room
    smaller = {"rollout": "sampling.chunk", "decode": "sampling.decode_chunk"}.get(phase, "optimizer.micro_batch")
    helps = ["lower prompts.per_step"] if leanest and phase in ("rollout", "decode", "reward", "recompute") else []
    if not leanest and during > 0.25 * room and phase in ("rollout", "decode", "recompute", "update"):
        helps.append(f"lower {smaller}")
    if phase == "update" and not settings.remat:
        helps.append("set optimizer.remat")
    if settings.encoders == "device":
        helps.append("let the text encoders wait on the host")
    if settings.fsdp * settings.tensor < topology.count:
        helps.append(f"raise fsdp above {settings.fsdp}")
    helps.append("take more chips, or chips with more memory")
    return (
        f"{over:,.0f} bytes too many on each chip ({gib(needed.peak)} GiB at the peak, in {phase}, of {gib(room)} GiB, {SAFETY:.0%} of "
        f"what is usable; always there: {held} GiB; {phase} takes {gib(during)} GiB besides): {', or '.join(helps)}"
    )

"""`densegrpo plan CONFIG --topology v5e:4x4`: whether a recipe fits a slice or a box of GPUs, and what it costs, without either."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import tyro

from densegrpo_jax.config import Config, reward_sources
from densegrpo_jax.plan import aot, search
from densegrpo_jax.plan import recipe as recipes
from densegrpo_jax.plan.chips import Topology, topology
from densegrpo_jax.plan.memory import Memory, gib, memory
from densegrpo_jax.plan.recipe import Recipe
from densegrpo_jax.plan.roofline import Phase, Settings, phases
from densegrpo_jax.rewards import check_name
from densegrpo_jax_configs.variants import change, flow_grpo

COLUMNS = ("1", "2", "3", "all")  # steps of a completion, as in the paper's table of GPU hours


@dataclasses.dataclass(frozen=True)
class Plan:
    """Say without any accelerator whether a config fits one and what it costs."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    topology: str = "v5e:4x4"
    """Chips and their arrangement: v5e:4x4, v6e:2x4, v4:2x2x2, v5p:2x2x1, h100:8, h200:1, a100-80:8."""
    fsdp: int | None = None
    """Chips that share the frozen weights, which they gather layer by layer; the config's `parallel.fsdp` by default."""
    search: bool = False
    """Choose fsdp and the chunk sizes: the fastest that fit."""
    compile: bool = False
    """Compile every phase for the slice, which need not be there (TPUs; extra `tpu`), and say what memory and collectives the compiler
    finds. Takes minutes a phase."""
    efficiency: float = 0.4
    """Part of the roofline's speed that costs are given for; what a run reaches has to be measured."""
    price: float | None = None
    """Of a chip and hour, in any currency: what the run costs is said too."""
    json: Path | None = None
    """Also write everything as JSON."""


def main(command: Plan, name: str = "") -> int:
    """Prints the plan; returns 0 if it fits.

    Raises:
      ValueError: settings that cannot be spread over the chips, or that do not fit; says by how many bytes and what to change.
    """
    if not 0.0 < command.efficiency <= 1.0:
        raise ValueError(f"efficiency = {command.efficiency}: a part of the roofline's speed, above 0 and at most 1")
    if command.price is not None and not 0.0 < command.price < float("inf"):
        raise ValueError(f"price = {command.price}: what a chip costs an hour, above 0")
    if command.search and command.fsdp is not None:
        raise ValueError(f"fsdp = {command.fsdp}: --search chooses it, with the chunk sizes; leave one of them out")
    if command.config.parallel.devices is not None:
        raise ValueError(f"parallel.devices = {command.config.parallel.devices}: a plan takes all chips of the topology; leave it out")
    for source in reward_sources(command.config).values():
        check_name(source)
    where, recipe = topology(command.topology), recipes.read(command.config)
    fsdp = command.config.parallel.fsdp if command.fsdp is None else command.fsdp
    settings = search.search(recipe, where) if command.search else search.configured(recipe, where, fsdp)
    steps, needed = phases(recipe, settings, where), memory(recipe, settings, where)
    print("\n".join([*_head(name, recipe, settings, where), "", *_phases(recipe, steps, needed, where), "", *_memory(needed, where)]))
    if not search.fits(needed, where):
        raise ValueError(f"{search.excess(recipe, settings, where)}. `--search` finds settings that fit, if there are any")
    price = costs(recipe, steps, where, command.efficiency)
    if command.price is not None:
        price["money"] = price["chip_hours"] * command.price
    columns = completions(recipe, where, settings, command.efficiency)
    print("\n".join(["", *_costs(price, recipe, command.efficiency), "", *_completions(columns)]))
    compiled = {}
    if command.compile:
        aot.mesh(where, settings.fsdp, settings.tensor)  # refused before anything takes minutes
        for program in aot.programs(recipe):
            print(f"compiling {program} for {where.name}", file=sys.stderr, flush=True)
            compiled[program] = aot.compared(program, recipe, settings, where)
        rows = [(program, *aot.cells(found)) for program, found in compiled.items()]
        print("\n".join(["", *table(("compiled for each chip", *aot.COLUMNS), rows)]))
        most = max(compiled, key=lambda program: aot.needed(compiled[program]))
        print(f"\nthe most is needed by {most}: {gib(aot.needed(compiled[most]))} of {gib(where.chip.hbm)} GiB usable")
    if command.json:
        everything = as_json(name, recipe, settings, where, steps, needed, price, columns, compiled)
        command.json.write_text(json.dumps(everything, indent=1) + "\n")
    for program, found in compiled.items():
        most = aot.needed(found)
        if most > where.chip.hbm:
            raise ValueError(
                f"{program} as compiled for {where.name} takes {most - where.chip.hbm:,.0f} bytes too many on each chip, with what else "
                f"lies there ({gib(most)} GiB of {gib(where.chip.hbm)} usable): lower its chunk, or raise fsdp"
            )
    return 0


def costs(recipe: Recipe, steps: list[Phase], where: Topology, efficiency: float) -> dict[str, float]:
    """Chip-seconds of a training step, images per chip and second, and chip-hours of the run."""
    seconds = sum(phase.seconds for phase in steps) / efficiency
    return {
        "seconds_per_step": seconds,
        "chip_seconds_per_step": seconds * where.count,
        "images_per_chip_second": recipe.images / seconds / where.count,
        "trajectories_per_chip_second": recipe.trajectories / seconds / where.count,
        "chip_hours": seconds * where.count * recipe.config.run.steps / 3600,
        "mfu": sum(phase.useful for phase in steps) / where.count / where.chip.peak / seconds,
    }


def completions(recipe: Recipe, where: Topology, settings: Settings, efficiency: float) -> list[dict[str, float | str]]:
    """The same recipe without completions and with Euler completions of n steps, at equal settings and without evaluation."""
    config, rows = recipe.config, []
    for steps in ("none", *COLUMNS):
        if steps == "none":
            changed = flow_grpo(config)
        else:
            changed = change(config, completion={"steps": steps, "solver": "euler", "tail": "keep"})
        other = recipes.with_config(recipe, changed)
        work = [phase for phase in phases(other, settings, where) if phase.name != "evaluation"]
        hours = sum(phase.seconds for phase in work) / efficiency * where.count / 3600
        rows.append(
            {
                "steps": "k" if steps == "all" else steps,
                "evaluations": other.price.evaluations,
                "images": len(other.tables.scheme) + 1,
                "chip_hours_per_20_steps": 20 * hours,
            }
        )
    return rows


def as_json(name: str, recipe: Recipe, settings: Settings, where: Topology, steps, needed: Memory, price, columns, compiled) -> dict:
    """Everything that is printed."""
    return {
        "config": name,
        "topology": where.name,
        "settings": settings._asdict(),
        "phases": [phase._asdict() for phase in steps],
        "memory": {"resident": needed.resident, "during": needed.during, "peak": needed.peak, "usable": where.chip.hbm},
        "costs": price,
        "completions": columns,
        "not_counted": list(recipe.elsewhere),
        "compiled": compiled,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Printing


def _head(name: str, recipe: Recipe, settings: Settings, where: Topology) -> list[str]:
    config, r = recipe.config, recipe
    height, width = (side * r.configs.vae.downsampling for side in r.latent[:2])
    lines = [
        f"{name or config.model.path} on {where.name}: {where.count} chip{'s' * (where.count > 1)} of {gib(where.chip.hbm)} GiB usable",
        f"model       {config.model.path}, {config.model.dtype}, {height} x {width} pixels",
        f"an image    {r.image_tokens} image and {r.text_tokens} text tokens, {r.network.flops / 1e12:.2f} TFLOP a pass, {r.branches} "
        f"pass{'es' * (r.branches > 1)} an evaluation",
        f"a step      {config.prompts.per_step} prompts x {config.prompts.group_size} = {r.trajectories} trajectories, "
        f"{r.price.evaluations} evaluations and {len(r.tables.scheme) + 1} images each, {r.trained_steps} steps trained",
        f"settings    fsdp {settings.fsdp}, tensor {settings.tensor}, attention {settings.attention}, "
        f"remat {'on' if settings.remat else 'off'}, text encoders on the {settings.encoders}",
        f"            {flags(recipe, settings, where)}",
    ]
    if where.hosts > 1:
        lines.append(f"            {where.hosts} hosts, each with a process of the run; they need one work folder that all of them see")
    if r.elsewhere:
        lines.append(f"not counted {', '.join(r.elsewhere)}: not scored on the chips, or of unknown size")
    return lines


def flags(recipe: Recipe, settings: Settings, where: Topology) -> str:
    """The settings as options of the trainer."""
    words = (
        f"--sampling.chunk {settings.chunk} --sampling.decode-chunk {settings.decode_chunk} --optimizer.micro-batch {settings.micro_batch}"
    )
    if settings.tensor > 1:
        words = f"--parallel.tensor {settings.tensor} {words}"
    if settings.fsdp > 1:
        words = f"--parallel.fsdp {settings.fsdp} {words}"
    if settings.encoders != "device":
        words = f"--parallel.encoders {settings.encoders} {words}"
    if settings.attention != search.attentions(recipe, where)[0]:
        words += f" --model.attention {settings.attention}"
    if settings.remat != recipe.config.optimizer.remat:
        words += " --optimizer.remat" if settings.remat else " --optimizer.no-remat"
    return words


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they must be, the first to the left and the rest to the right, in Markdown."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row):
        return "| " + " | ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))) + " |"

    rule = "| " + " | ".join("-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)) + " |"
    return [line(header), rule, *map(line, rows)]


def _phases(recipe: Recipe, steps: list[Phase], needed: Memory, where: Topology) -> list[str]:
    total, resident = sum(phase.seconds for phase in steps), sum(needed.resident.values())
    during = {**needed.during, "completion": needed.during["rollout"]}

    def row(name, evaluations, work, share, limit, mfu, peak):
        fields = "flops", "moved", "received", "seconds"
        flops, moved, received, seconds = (sum(getattr(phase, field) for phase in work) for field in fields)
        numbers = f"{flops / where.count / 1e12:,.0f}", f"{moved / 1e9:,.0f}", f"{received / 1e9:,.0f}", f"{seconds:.2f}"
        return name, evaluations, *numbers, share, limit, mfu, gib(peak)

    rows = [
        row(
            p.name,
            f"{p.evaluations:g}" * (p.evaluations > 0),
            [p],
            f"{p.seconds / total:.0%}",
            p.limit,
            f"{p.mfu:.0%}",
            resident + during[p.name],
        )
        for p in steps
    ]
    mfu = sum(phase.useful for phase in steps) / where.count / where.chip.peak / total
    rows.append(row("all", "", steps, "", "", f"{mfu:.0%}", needed.peak))
    header = "per chip and step", "evaluations", "TFLOP", "GB moved", "GB received", "seconds", "share", "limit", "MFU at most", "peak GiB"
    return table(header, rows)


def _memory(needed: Memory, where: Topology) -> list[str]:
    rows = [(name, gib(number)) for name, number in needed.resident.items()]
    rows += [(f"during {name}", gib(number)) for name, number in needed.during.items()]
    rows += [("peak", gib(needed.peak)), ("usable", gib(where.chip.hbm))]
    return table(("memory of each chip", "GiB"), rows)


def _costs(price: dict[str, float], recipe: Recipe, efficiency: float) -> list[str]:
    return [
        f"at {efficiency:.0%} of the roofline: {price['seconds_per_step']:.1f} s and "
        f"{price['chip_seconds_per_step']:,.0f} chip-seconds a step, "
        f"{price['images_per_chip_second']:.2f} images/s/chip, MFU {price['mfu']:.0%}",
        f"the recipe of {recipe.config.run.steps} steps: {price['chip_hours']:,.0f} chip-hours"
        + (f", {price['money']:,.0f} at the price given" if "money" in price else "")
        + f", {price['seconds_per_step'] * recipe.config.run.steps / 86400:,.1f} days",
    ]


def _completions(columns: list[dict]) -> list[str]:
    hours = [row["chip_hours_per_20_steps"] for row in columns]
    rows = [(r["steps"], str(r["evaluations"]), str(r["images"]), f"{h:.2f}", f"{h / hours[-1]:.2f}") for r, h in zip(columns, hours)]
    return table(("completions, n", "evaluations", "images", "chip-hours for 20 steps", "against n = k"), rows)

"""The phases of full-size recipes compiled for TPU slices that are not there: the compiler's memory and collectives beside the plan's.

Needs libtpu (extra `tpu`) and no TPU. Each program takes minutes of a core; results are kept as they come, and the same command continues.

    JAX_PLATFORMS=cpu python benchmarks/compiled.py --json docs/compiled.json [--only NAME ...] [--layers N]
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

from densegrpo_jax import cli
from densegrpo_jax.plan import aot, command, roofline, search
from densegrpo_jax.plan import recipe as recipes
from densegrpo_jax.plan.chips import GIB, topology
from densegrpo_jax.plan.memory import memory
from densegrpo_jax.plan.roofline import Settings
from densegrpo_jax_configs.variants import change

PLACES = (
    ("sd35_medium_pickscore", "v5e:4x4"),
    ("sd35_medium_pickscore", "v5p:2x2x1"),
    ("sd35_medium_pickscore", "v6e:2x4"),
    ("sd35_medium_pickscore_1024", "v6e:8x8"),
)
GROWTH = ("v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:16x16")  # prompts per step grow with the chips, settings per chip stay
GROWN = ("sample", "update")
PROMPTS = 3  # per step and chip
PHASES = {"sample": ("rollout", "completion"), "decode": ("decode",), "recompute": ("recompute",), "update": ("update",)}


def jobs() -> list[tuple[str, str, str, int | None]]:
    """(program, config, slice, prompts per step or None), what is most wanted first."""
    plans = [(program, name, where, None) for name, where in PLACES for program in aot.PROGRAMS]
    growth = [(program, PLACES[0][0], where, PROMPTS * topology(where).count) for where in GROWTH for program in GROWN]
    return plans + growth


def settings_of(recipe: recipes.Recipe, where, growing: bool) -> Settings:
    """What `--search` finds; for growth what it finds on 16 chips, scaled to the chips."""
    if not growing:
        return search.search(recipe, where)
    sixteen = topology("v5e:4x4")
    config = change(recipe.config, prompts={"per_step": PROMPTS * sixteen.count})
    found = search.search(recipes.read(config), sixteen)
    scaled = {name: getattr(found, name) * where.count // sixteen.count for name in ("chunk", "micro_batch", "decode_chunk")}
    return found._replace(**scaled)


def measure(program: str, name: str, place: str, prompts: int | None, layers: int | None) -> dict:
    """One program: what the compiler says, and what the plan does."""
    where, config = topology(place), cli.load_config(name)
    recipe = recipes.read(config if prompts is None else change(config, prompts={"per_step": prompts}))
    settings = settings_of(recipe, where, prompts is not None)
    needed, phases = memory(recipe, settings, where), roofline.phases(recipe, settings, where)
    small = recipe if layers is None else recipe._replace(configs=aot.with_layers(recipe.configs, layers))
    found = aot.compile_phase(program, small, settings, where)
    calls = recipe.trajectories // settings.chunk if program == "sample" and recipe.elsewhere else 1
    calls = config.optimizer.updates if program == "update" else calls
    return {
        "program": program, "config": name, "slice": place, "prompts": prompts, "chips": where.count, "layers": layers,
        "settings": settings._asdict(), "compiler": found._asdict(), "calls_per_step": calls,
        "collective_bytes": calls * sum(size for _, size in found.collectives.values()),
        "plan": {
            "during": max(needed.during[phase] for phase in PHASES[program] if phase in needed.during),
            "beside": needed.resident["text encoders"] + needed.resident["scorers"],
            "received": sum(phase.received for phase in phases if phase.name in PHASES[program]),
            "usable": where.chip.hbm,
        },
        "versions": {package: version(package) for package in ("jax", "jaxlib", "libtpu")},
    }  # fmt: skip


def tables(rows: list[dict]) -> list[str]:
    """The plans and the growth, in Markdown."""
    header = (
        "program", "slice", "fsdp", "arguments GiB", "temporary GiB", "plan: temporary", "peak GiB", "with encoders, scorers", "usable GiB",
        "collectives GB", "plan: received GB", "compiled in s",
    )  # fmt: skip
    lines = []
    for name in dict.fromkeys(row["config"] for row in rows if row["prompts"] is None):
        cells = []
        for row in (row for row in rows if row["config"] == name and row["prompts"] is None):
            c, p = row["compiler"], row["plan"]
            gib = [c["argument"], c["temporary"], p["during"], c["peak"], c["peak"] + p["beside"], p["usable"]]
            moved = f"{row['collective_bytes'] / 1e9:,.1f}", f"{p['received'] / 1e9:,.1f}", f"{c['seconds']:.0f}"
            cells.append((row["program"], row["slice"], str(row["settings"]["fsdp"]), *(f"{n / GIB:.2f}" for n in gib), *moved))
        lines += ["", f"`{name}`:", "", *command.table(header, cells)]
    cells = []
    for row in sorted((row for row in rows if row["prompts"] is not None), key=lambda row: (GROWN.index(row["program"]), row["chips"])):
        kinds = {kind: size * row["calls_per_step"] / 1e9 for kind, (_, size) in row["compiler"]["collectives"].items()}
        each = [f"{kinds.get(kind, 0.0):,.1f}" for kind in aot.KINDS]
        cells.append(
            (row["program"], str(row["chips"]), *each, f"{row['plan']['received'] / 1e9:,.1f}", f"{row['compiler']['peak'] / GIB:.2f}")
        )
    if cells:
        lines += ["", "Growth:", "", *command.table(("program", "chips", *aot.KINDS, "plan: received GB", "peak GiB"), cells)]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="kept there; what is in it already is not compiled again")
    parser.add_argument("--only", nargs="*", default=[], help="programs or slices; all by default")
    parser.add_argument("--layers", type=int, help="fewer layers, for a try")
    arguments = parser.parse_args()
    rows = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    for program, name, where, prompts in jobs():
        done = any((row["program"], row["config"], row["slice"], row["prompts"]) == (program, name, where, prompts) for row in rows)
        if done or (arguments.only and not {program, where} & set(arguments.only)):
            continue
        print(f"{program} of {name} on {where}" + (f", {prompts} prompts" if prompts else ""), flush=True)
        try:
            rows.append(measure(program, name, where, prompts, arguments.layers))
        except ValueError as error:
            print(f"  {error}", flush=True)
            continue
        print(f"  {rows[-1]['compiler']}", flush=True)
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(tables(rows)))


if __name__ == "__main__":
    main()

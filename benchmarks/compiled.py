"""The phases of full-size recipes compiled for TPU slices that are not there: the compiler's memory and collectives beside the plan's.

Needs libtpu (extra `tpu`) and no TPU. Each program takes minutes of a core; results are kept as they come, and the same command continues.

    JAX_PLATFORMS=cpu python benchmarks/compiled.py --json docs/compiled.json [--only NAME ...] [--layers N]
    LIBTPU_INIT_ARGS=--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000 ... the same      (for the growth's rows without rings)
"""

import argparse
import json
import os
from functools import cache
from importlib.metadata import version
from pathlib import Path

from densegrpo_jax import cli
from densegrpo_jax.plan import aot, collectives, command, search
from densegrpo_jax.plan import recipe as recipes
from densegrpo_jax.plan.chips import GIB, topology
from densegrpo_jax.plan.roofline import Settings
from densegrpo_jax_configs.variants import change

PLACES = (
    ("sd35_medium_pickscore", "v5e:4x4"),
    ("sd35_medium_pickscore", "v5p:2x2x1"),
    ("sd35_medium_pickscore", "v6e:2x4"),
    ("sd35_medium_pickscore_1024", "v6e:8x8"),
    ("sd35_medium_pickscore", "v4:2x2x2"),
    ("flux_dev_pickscore", "v6e:4x4"),
)
EVERYWHERE = ("sample", "decode", "recompute", "update")  # what is compiled at each place; at these two all programs are
ALL = (PLACES[0], PLACES[-1])
GROWTH = ("v5e:16x16", "v5e:4x4", "v5e:8x8", "v5e:2x4")  # prompts per step grow with the chips, settings per chip stay
GROWN = ("sample", "update")
GROWN_WITH = Settings(fsdp=8, chunk=32, micro_batch=64, decode_chunk=64, remat=True, attention="splash")  # on 16 chips, scaled to others
PROMPTS = 3  # per step and chip
NO_RINGS = "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"  # products wait for gathered weights


def jobs() -> list[tuple[str, str, str, int | None, str]]:
    """(program, config, slice, prompts per step or None, libtpu's flags), what is most wanted first."""
    plans = [(program, *place, None, "") for place in PLACES for program in (aot.PROGRAMS if place in ALL else EVERYWHERE)]
    grown = [(where, "") for where in GROWTH] + [("v5e:2x4", NO_RINGS)]
    return plans + [(program, PLACES[0][0], where, PROMPTS * topology(where).count, flags) for where, flags in grown for program in GROWN]


def settings_of(recipe: recipes.Recipe, where, growing: bool) -> Settings:
    """What `--search` finds; for growth always the same for each chip."""
    if not growing:
        return search.search(recipe, where)
    scaled = {name: getattr(GROWN_WITH, name) * where.count // 16 for name in ("chunk", "micro_batch", "decode_chunk")}
    return GROWN_WITH._replace(**scaled)


def job_of(row: dict) -> tuple:
    """The job whose result a row is."""
    return tuple(row[name] for name in ("program", "config", "slice", "prompts", "flags"))


@cache
def recipe_of(name: str, prompts: int | None) -> recipes.Recipe:
    config = cli.load_config(name)
    return recipes.read(config if prompts is None else change(config, prompts={"per_step": prompts}))


def planned(row: dict) -> dict:
    """A row with what the plan says today of the settings that it was compiled with; the compiler's numbers stay."""
    recipe, where = recipe_of(row["config"], row["prompts"]), topology(row["slice"])
    return row | {"plan": aot.estimates(row["program"], recipe, Settings(**row["settings"]), where)}


def measure(program: str, name: str, place: str, prompts: int | None, layers: int | None) -> dict:
    """One program: what the compiler says, and what the plan does."""
    recipe, where = recipe_of(name, prompts), topology(place)
    settings = settings_of(recipe, where, prompts is not None)
    return {
        "program": program, "config": name, "slice": place, "prompts": prompts, "chips": where.count, "layers": layers,
        "flags": os.environ.get("LIBTPU_INIT_ARGS", ""), "settings": settings._asdict(),
        **aot.compared(program, recipe, settings, where, layers),
        "versions": {package: version(package) for package in ("jax", "jaxlib", "libtpu")},
    }  # fmt: skip


def tables(rows: list[dict]) -> dict[str, list[str]]:
    """The plans of each config, and the growth, in Markdown."""
    found = {}
    for name in dict.fromkeys(row["config"] for row in rows if row["prompts"] is None):
        of_config = [row for row in rows if row["config"] == name and row["prompts"] is None]
        order = sorted(of_config, key=lambda row: ([where for _, where in PLACES].index(row["slice"]), aot.PROGRAMS.index(row["program"])))
        lines = [(row["program"], row["slice"], str(row["settings"]["fsdp"]), *aot.cells(row)) for row in order]
        found[name] = command.table(("program", "slice", "fsdp", *aot.COLUMNS), lines)
    grown = sorted(
        (row for row in rows if row["prompts"] is not None), key=lambda row: (GROWN.index(row["program"]), row["chips"], row["flags"])
    )
    if grown:
        kinds = [kind for kind in collectives.KINDS if any(kind in row["compiler"]["collectives"] for row in grown)]
        cells = []
        for row in grown:
            each = [row["compiler"]["collectives"].get(kind, (0, 0))[1] * row["calls_per_step"] / 1e9 for kind in kinds]
            numbers = *(f"{n:,.1f}" for n in each), f"{sum(each):,.0f}", f"{row['plan']['received'] / 1e9:,.0f}"
            cells.append((row["program"], str(row["chips"]) + ", no rings" * bool(row["flags"]), *numbers, f"{aot.needed(row) / GIB:.2f}"))
        found["growth"] = command.table(("received GB", "chips", *kinds, "all", "plan", "needed GiB"), cells)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="kept there; what is in it already is not compiled again")
    parser.add_argument("--only", nargs="*", default=[], help="programs or slices; all by default")
    parser.add_argument("--layers", type=int, help="fewer layers, for a try")
    arguments = parser.parse_args()
    rows = [planned(row) for row in json.loads(arguments.json.read_text())] if arguments.json.exists() else []
    refused = []
    done = [job_of(row) for row in rows]
    for job in jobs():
        program, name, where, prompts, flags = job
        if job in done or (arguments.only and not {program, where} & set(arguments.only)):
            continue
        if flags != os.environ.get("LIBTPU_INIT_ARGS", ""):  # libtpu reads them once
            print(f"left out, as it needs LIBTPU_INIT_ARGS={flags or '(none)'}: {program} of {name} on {where}")
            continue
        print(f"{program} of {name} on {where}" + (f", {prompts} prompts" if prompts else ""), flush=True)
        try:
            rows.append(measure(program, name, where, prompts, arguments.layers))
        except ValueError as error:
            print(f"  {error}", flush=True)
            refused.append(f"{program} of {name} on {where}")
            continue
        print(f"  {rows[-1]['compiler']}", flush=True)
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    for name, lines in tables(rows).items():
        print("\n".join(["", f"{name}:", "", *lines]))
    if refused:
        raise SystemExit(f"not compiled: {'; '.join(refused)}")


if __name__ == "__main__":
    main()

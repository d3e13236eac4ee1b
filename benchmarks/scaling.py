"""Plans of the full-size recipes for several slices and numbers of chips, as tables: what fits, what it costs, what limits when it grows.

Nothing is run and no accelerator is needed: the numbers are those of `densegrpo plan`, from shapes and the chips' data sheets.

    python benchmarks/scaling.py [--json PATH] [--quick]
"""

import argparse
import json
from pathlib import Path

from densegrpo_jax import cli
from densegrpo_jax.plan import command, roofline, search
from densegrpo_jax.plan import recipe as recipes
from densegrpo_jax.plan.chips import GIB, topology
from densegrpo_jax.plan.memory import memory
from densegrpo_jax_configs import places
from densegrpo_jax_configs.variants import change

EFFICIENCY = 0.4
GROWTH = {"v5e": ("2x4", "4x4", "8x8", "16x16"), "v6e": ("2x4", "4x4", "8x8", "16x16")}  # prompts per step grow with the chips
PROMPTS = 3  # per step and chip
OCR_SECONDS = 0.26  # of one core for an image; docs/ocr.json, "page"
SERVER_CORES = 64  # of one machine that reads for all hosts


def place(recipe: recipes.Recipe, name: str) -> dict:
    """A plan with the settings that `--search` finds."""
    where = topology(name)
    try:
        settings = search.search(recipe, where)
    except ValueError as error:
        return {"topology": name, "refused": str(error)}
    steps = roofline.phases(recipe, settings, where)
    return {
        "topology": name,
        "settings": settings._asdict(),
        "peak_gib": memory(recipe, settings, where).peak / GIB,
        "usable_gib": where.chip.hbm / GIB,
        "shares": {phase.name: phase.seconds / sum(p.seconds for p in steps) for phase in steps},
        "received": {phase.name: phase.received for phase in steps},
        "limits": {phase.name: phase.limit for phase in steps},
        **command.costs(recipe, steps, where, EFFICIENCY),
    }


def growth(name: str, kind: str, shapes: tuple[str, ...]) -> list[dict]:
    """Weak scaling: as many prompts per step and chip as the recipe has on 16 chips."""
    rows = []
    for shape in shapes:
        where = topology(f"{kind}:{shape}")
        config = cli.load_config(name)
        config = change(config, prompts={"per_step": PROMPTS * where.count})
        row = place(recipes.read(config), where.name) | {"chips": where.count}
        if "refused" not in row:
            row["host_images_per_second"] = 11 * 24 * PROMPTS * where.count / row["seconds_per_step"]
            row["ocr_cores_per_host"] = row["host_images_per_second"] / where.hosts * OCR_SECONDS
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--quick", action="store_true", help="two places only")
    arguments = parser.parse_args()
    result = {"efficiency": EFFICIENCY, "plans": {}, "growth": {}}

    for name in ("sd35_medium_pickscore",) if arguments.quick else places.PLACES:
        recipe = recipes.read(cli.load_config(name))
        known = [places.topology(f"{name}:{where}") for where in places.of(name)]
        rows = result["plans"][name] = [place(recipe, where) for where in known[: 1 if arguments.quick else None]]
        print(f"\n{name}: {recipe.price.evaluations} evaluations, {len(recipe.tables.scheme) + 1} images a trajectory\n")
        print("\n".join(plans(rows)))
    for kind, shapes in GROWTH.items() if not arguments.quick else [("v6e", ("2x4", "4x4"))]:
        rows = result["growth"][kind] = growth("sd35_medium_pickscore", kind, shapes)
        print(f"\nweak scaling on {kind}: sd35_medium_pickscore with {PROMPTS} prompts per step and chip\n")
        print("\n".join(scaling(rows)))
        print(f"\n{server(rows)}")
    print("\nfor docs/launching.md\n\n" + "\n".join(guide(result["plans"])))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def guide(plans: dict[str, list[dict]]) -> list[str]:
    """Places and what they cost, a row a config."""
    cells = [
        (f"`{name}`", ", ".join(f"`{row['topology'].replace(':', '-')}` {row['chip_hours']:,.0f}" for row in rows))
        for name, rows in plans.items()
    ]
    return ["| config | places, and chip-hours of the recipe |", "| --- | --- |", *(f"| {' | '.join(row)} |" for row in cells)]


def plans(rows: list[dict]) -> list[str]:
    header = (
        "slice",
        "fsdp",
        "chunk",
        "micro-batch",
        "decoded",
        "attention",
        "remat",
        "encoders",
        "peak / usable GiB",
        "s/step",
        "images/s/chip",
        "chip-hours",
    )
    cells = []
    for row in rows:
        if "refused" in row:
            cells.append((row["topology"], "does not fit", *[""] * (len(header) - 2)))
            continue
        s = row["settings"]
        numbers = (
            str(s["fsdp"]),
            str(s["chunk"]),
            str(s["micro_batch"]),
            str(s["decode_chunk"]),
            s["attention"],
            "on" if s["remat"] else "off",
            s["encoders"],
        )
        memory_cell = f"{row['peak_gib']:.1f} / {row['usable_gib']:.1f}"
        costs = f"{row['seconds_per_step']:.0f}", f"{row['images_per_chip_second']:.2f}", f"{row['chip_hours']:,.0f}"
        cells.append((row["topology"], *numbers, memory_cell, *costs))
    return command.table(header, cells)


def server(rows: list[dict]) -> str:
    """Up to how many chips one machine keeps pace with reading, whatever the number of hosts."""
    reads, each = SERVER_CORES / OCR_SECONDS, min(row["host_images_per_second"] / row["chips"] for row in rows if "refused" not in row)
    return f"one machine of {SERVER_CORES} cores reads {reads:.0f} images a second, those of {reads / each:.0f} chips"


def scaling(rows: list[dict]) -> list[str]:
    header = (
        "chips",
        "fsdp",
        "s/step",
        "efficiency",
        "GB received a chip: rollout",
        "completion",
        "update",
        "host images/s",
        "OCR cores a host",
    )
    fitting = [row for row in rows if "refused" not in row]
    first = fitting[0]["images_per_chip_second"]
    phases = "rollout", "completion", "update"
    cells = [
        (
            str(row["chips"]), str(row["settings"]["fsdp"]), f"{row['seconds_per_step']:.0f}",
            f"{row['images_per_chip_second'] / first:.3f}",
            *(f"{row['received'][phase] / 1e9:,.0f}" for phase in phases),
            f"{row['host_images_per_second']:,.0f}", f"{row['ocr_cores_per_host']:.1f}",
        )
        for row in fitting
    ]  # fmt: skip
    return command.table(header, cells)


if __name__ == "__main__":
    main()

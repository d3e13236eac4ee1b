"""Plans: what fits, what is refused and why, how costs move with what is planned."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from densegrpo_jax import cli
from densegrpo_jax.plan import aot, command, memory, roofline, search
from densegrpo_jax.plan import recipe as recipes
from densegrpo_jax.plan.chips import CHIPS, GIB, topology
from densegrpo_jax_configs import places
from densegrpo_jax_configs.variants import change


@pytest.fixture(scope="module")
def pickscore():
    return recipes.read(cli.load_config("sd35_medium_pickscore"))


def bound(recipe, settings, name):
    return {phase.name: phase for phase in roofline.phases(recipe, settings, topology(name))}


@pytest.mark.parametrize("name", places.PLACES)
def test_every_place_of_a_config_fits_and_is_what_is_found_for_it(name):
    recipe = recipes.read(cli.load_config(name))
    for place in places.of(name):
        config, where = cli.load_config(f"{name}:{place}"), topology(places.topology(f"{name}:{place}"))
        settings = search.configured(recipe._replace(config=config), where, config.parallel.fsdp)  # as the trainer takes them
        assert search.fits(memory.memory(recipe, settings, where), where)
        assert all(getattr(settings, field) % where.count == 0 for field in ("chunk", "micro_batch", "decode_chunk"))
        assert settings == search.search(recipe, where), f"{name}:{place}"
        assert config.run == recipe.config.run  # the same work folder, as a run may go on in another place


def test_a_config_at_a_place_is_planned_there(capsys):
    assert cli.main(["plan", "sd35_medium_pickscore:n2:v6e-2x4", "--price", "2"]) == 0
    out = capsys.readouterr().out
    assert "on v6e:2x4: 8 chips" in out
    hours, money = (int(n.replace(",", "")) for n in re.search(r"([\d,]+) chip-hours, ([\d,]+) at the price given", out).groups())
    assert abs(money - 2 * hours) <= 1
    assert places.topology("configs/flux_dev_pickscore.py:h100-8") == "h100:8"
    assert [places.topology(name) for name in ("toy", "toy:h100-8", "sd35_medium_pickscore:cps")] == [None] * 3
    assert cli.main(["plan", "sd35_medium_pickscore:v6e-3x3"]) == 2
    assert "and as places v5e-4x4" in capsys.readouterr().err


def test_the_paper_s_evaluations_and_images(pickscore):
    phases = bound(pickscore, search.search(pickscore, topology("h200:1"))._replace(remat=True), "h200:1")
    assert pickscore.trajectories == 1152 and pickscore.images == 11 * 1152 and pickscore.branches == 2
    assert (phases["rollout"].evaluations, phases["completion"].evaluations, phases["update"].evaluations) == (10, 45, 18)
    assert phases["rollout"].useful == pytest.approx(1152 * 10 * 2 * 2.244e12, rel=1e-3)
    assert phases["completion"].useful == pytest.approx(4.5 * phases["rollout"].useful)
    # forward, gradient of activations, reference: 3 times the linear layers (frozen weights have no gradient)
    assert 2.9 < phases["update"].useful / phases["rollout"].useful / 0.9 < 3.4
    assert phases["update"].flops > 1.3 * phases["update"].useful  # remat computes the forward pass again
    assert phases["recompute"].mfu == 0  # work, not use
    assert all(0 < phase.mfu <= 1 for name, phase in phases.items() if name != "recompute")


def test_costs_fall_with_chips_and_rise_with_completions(pickscore):
    settings = search.search(pickscore, topology("v6e:2x4"))
    double = settings._replace(chunk=2 * settings.chunk, micro_batch=2 * settings.micro_batch, decode_chunk=2 * settings.decode_chunk)
    first, second = (sum(p.seconds for p in bound(pickscore, *given).values()) for given in ((settings, "v6e:2x4"), (double, "v6e:4x4")))
    assert first == pytest.approx(2 * second, rel=0.01)
    rows = command.completions(pickscore, topology("v6e:2x4"), settings, 0.4)
    assert [row["evaluations"] for row in rows] == [10, 10, 19, 27, 55]
    hours = [row["chip_hours_per_20_steps"] for row in rows]
    assert hours == sorted(hours) and 1.5 < hours[-1] / hours[1] < 2.2  # the paper has 19 / 11


def test_sharing_weights_saves_their_memory_and_costs_links(pickscore):
    settings = search.search(pickscore, topology("h200:8"))
    alone, shared = settings._replace(fsdp=1), settings._replace(fsdp=8)
    held = [memory.memory(pickscore, s, topology("h200:8")).resident for s in (alone, shared)]
    assert held[0]["transformer"] == pytest.approx(2.47e9 * 2, rel=1e-3)
    assert held[1]["transformer"] * 8 == held[0]["transformer"] and held[1]["autoencoder"] == held[0]["autoencoder"]
    first, second = (bound(pickscore, s, "h200:8")["rollout"] for s in (alone, shared))
    calls = 1152 / settings.chunk * 10
    assert first.received == 0 and second.received == pytest.approx(calls * 2.47e9 * 2 * 7 / 8, rel=1e-3)


def test_a_config_s_own_devices_are_planned(pickscore):
    own = change(pickscore.config, parallel={"encoders": "host"}, sampling={"chunk": 24})
    settings = search.configured(pickscore._replace(config=own), topology("h100:8"), 2)
    assert (settings.fsdp, settings.encoders) == (2, "host")


def test_memory_is_the_largest_phase_not_the_sum(pickscore):
    needed = memory.memory(pickscore, search.search(pickscore, topology("v6e:2x4")), topology("v6e:2x4"))
    assert needed.peak == sum(needed.resident.values()) + needed.during[needed.fullest]
    assert needed.peak < sum(needed.resident.values()) + sum(needed.during.values())


def test_without_remat_and_without_fused_attention_more_is_needed(pickscore):
    lean = search.search(pickscore, topology("v6e:2x4"))._replace(attention="splash", remat=True)
    peaks = [
        memory.memory(pickscore, s, topology("v6e:2x4")).during["update"]
        for s in (lean, lean._replace(attention="xla"), lean._replace(remat=False))
    ]
    assert peaks[0] < peaks[1] and 5 * peaks[0] < peaks[2]


# --- the command -------------------------------------------------------------------------------------------------------


def test_a_plan_is_printed_and_written(tmp_path, capsys):
    assert cli.main(["plan", "sd35_medium_pickscore", "--topology", "h100:8", "--search", "--json", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    for name in ("encode", "rollout", "completion", "decode", "reward", "recompute", "update", "chip-hours", "--sampling.chunk"):
        assert name in out
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["settings"]["attention"] == "cudnn" and values["memory"]["peak"] < values["memory"]["usable"]


def test_what_does_not_fit_is_refused_with_the_bytes_and_a_remedy(capsys):
    flags = ["--sampling.chunk", "16", "--optimizer.micro-batch", "16", "--sampling.decode-chunk", "16"]
    assert cli.main(["plan", "sd35_medium_pickscore", "--topology", "v5e:4x4", *flags]) == 2
    error = capsys.readouterr().err
    assert "bytes too many on each chip" in error and "text encoders" in error and "raise fsdp above 1" in error
    assert cli.main(["plan", "sd35_medium_pickscore", "--topology", "v5e:4x4", "--fsdp", "8", *flags]) == 0
    assert cli.main(["plan", "flux_dev_pickscore", "--topology", "v5e:1x1", "--search"]) == 2
    error = capsys.readouterr().err
    assert "nothing fits v5e:1x1" in error and "95% of what is usable" in error and "lower sampling.chunk" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toy"], "nothing to plan"),
        (["sd35_medium_pickscore", "--topology", "v9:2"], "no chip 'v9'; there are v4, v5e"),
        (["sd35_medium_pickscore", "--topology", "v5e:16"], "2 sides, as in v5e:4x4"),
        (["sd35_medium_pickscore", "--topology", "h100:8x2"], "1 side, as in h100:8"),
        (["sd35_medium_pickscore", "--topology", "v6e:48x1"], "no such slice of v6e; there are 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"),
        (["sd35_medium_pickscore", "--topology", "v5p:2x3x1"], "2x4x4, or three multiples of 4 in rising order, as 4x4x8"),
        (
            ["sd35_medium_pickscore", "--topology", "v5e:4x4"],
            "sampling.chunk = 24 does not divide the 1152 trajectories of a step into parts that 16 devices share evenly",
        ),
        (["sd35_medium_pickscore", "--topology", "h100:8", "--fsdp", "3"], r"fsdp = 3 does not divide the 8 chips"),
        (["sd35_medium_pickscore", "--topology", "h100:7"], "choose per_step from"),
        (["sd35_medium_pickscore", "--model.path", "somebody/else"], "its shape is not known; known are stabilityai"),
        (["sd35_medium_pickscore", "--efficiency", "1.5"], "at most 1"),
        (["sd35_medium_pickscore", "--price", "-1"], "what a chip costs an hour, above 0"),
        (["sd35_medium_pickscore", "--search", "--fsdp", "8"], "fsdp = 8: --search chooses it"),
        (["sd35_medium_pickscore", "--parallel.devices", "4"], "a plan takes all chips of the topology"),
        (["sd35_medium_pickscore", "--search", "--model.attention", "cudnn"], "'cudnn' does not run on v5e:4x4"),
        (["sd35_medium_pickscore", "--topology", "h100:8", "--search", "--model.attention", "splash"], "'splash' does not run on h100:8"),
        (["sd35_medium_pickscore", "--rewards", "nosuch"], "unknown reward 'nosuch'"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message, capsys):
    assert cli.main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_on_disk_is_planned_from_its_configs():
    recipe = recipes.read(cli.load_config("scenes_preference"))
    assert recipe.image_tokens == 16 and recipe.elsewhere == ("scenes_preference",)
    assert memory.memory(recipe, search.search(recipe, topology("h200:1")), topology("h200:1")).peak < 8 * GIB


def test_full_fine_tuning_holds_four_copies_of_the_weights(pickscore):
    config = change(cli.load_config("sd35_medium_pickscore"), adapter={"rank": 0})
    full = recipes.read(config)
    settings = search.search(pickscore, topology("h200:8"))
    trained = memory.memory(full, settings, topology("h200:8")).resident["trained weights, optimiser, average"]
    assert trained == pytest.approx(4 * 4 * 2.47e9, rel=1e-3)
    assert bound(full, settings, "h200:8")["update"].useful > bound(pickscore, settings, "h200:8")["update"].useful


def test_topologies():
    assert topology("v5p:2x2x2").count == 8 and topology("v5e:4x4").name == "v5e:4x4"
    hosts = {"v6e:2x4": 1, "v6e:4x4": 4, "v5e:2x2": 1, "v5p:2x2x1": 1, "v5p:2x2x2": 2, "h100:8": 1, "h100:16": 2}
    assert {name: topology(name).hosts for name in hosts} == hosts
    assert topology("h100:16").link == CHIPS["h100"].network < topology("h100:8").link
    assert all(chip.peak >= chip.peak_float32 > 0 for chip in CHIPS.values())


def test_only_slices_that_can_be_had_are_planned():
    for name in ("v5e:1x1", "v6e:8x16", "v4:2x4x4", "v5p:4x4x4", "v5p:4x8x12", "h100:3", "a100-40:16"):
        assert topology(name).name == name
    for name in ("v5e:3x3", "v5e:4x2", "v6e:16x8", "v6e:32x32", "v4:4x4x2", "v4:1x1x1", "v5p:2x2x6", "v5p:8x4x4", "v5p:4x4x6"):
        with pytest.raises(ValueError, match=f"no such slice of {name[:3].rstrip(':')}"):
            topology(name)


def test_copies_of_the_weights_share_the_prompts_and_what_is_computed_again_is_of_no_use(pickscore):
    settings = search.search(pickscore, topology("v5e:4x4"))
    phases, once = bound(pickscore, settings, "v5e:4x4"), sum(p.flops for p in pickscore.encoders.values())
    alone = settings._replace(fsdp=1)
    for shared in (alone, settings):
        assert bound(pickscore, shared, "v5e:4x4")["encode"].flops == 48 * once
    assert bound(pickscore, alone, "v5e:8x8")["encode"].flops == 64 * once  # one for each copy, some of them the empty prompt
    more = recipes.read(change(pickscore.config, prompts={"per_step": 49}))
    filled = bound(more, settings, "v5e:4x4")["encode"]
    assert filled.flops == 56 * once and filled.useful == 49 * once  # the seventh call is filled up
    assert filled.received == pytest.approx(7 / 6 * phases["encode"].received)
    text = (77 + 128) * 4096 * 2  # of one prompt, which the copies tell each other
    assert bound(pickscore, alone, "v5e:4x4")["encode"].received == pytest.approx(48 * text * 15 / 16)
    assert phases["recompute"].useful == 0 < phases["recompute"].flops and phases["recompute"].mfu == 0


def test_the_guide_names_places_that_there_are_and_commands_that_work(capsys):
    guide = (Path(__file__).parents[2] / "docs/launching.md").read_text()
    scaling, docs = script("scaling")
    assert "\n".join(scaling.guide(json.loads((docs / "plans.json").read_text())["plans"])) in guide
    named = re.findall(r"\b(?:sd35|flux)\w+:[\w-]+", guide)
    assert len(named) >= 7 and all(places.topology(name) for name in named)
    commands = re.findall(r"^densegrpo (plan .*?)(?: --json .*)?$", guide, re.M)
    assert len(commands) >= 2
    for line in commands:
        assert cli.main(line.split()) == 0
        assert "chip-hours" in capsys.readouterr().out


def script(name):
    """A module of benchmarks/, and the page of its results."""
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location(name, root / f"benchmarks/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, root / "docs"


def test_the_page_shows_the_committed_plans():
    scaling, docs = script("scaling")
    values, page = json.loads((docs / "plans.json").read_text()), (docs / "performance.md").read_text()
    for name, rows in values["plans"].items():
        assert "\n".join(scaling.plans(rows)) in page
        assert [row["topology"] for row in rows] == [places.topology(f"{name}:{place}") for place in places.of(name)]
    for rows in values["growth"].values():
        assert "\n".join(scaling.scaling(rows)) in page


def test_the_page_shows_the_programs_that_were_compiled_and_they_fit():
    compiled, docs = script("compiled")
    rows, page = json.loads((docs / "compiled.json").read_text()), (docs / "performance.md").read_text()
    assert {compiled.job_of(row) for row in rows} == set(compiled.jobs())
    for lines in compiled.tables(rows).values():
        assert "\n".join(lines) in page
    for row in rows:
        row = compiled.planned(row)
        assert row["layers"] is None and aot.needed(row) < row["plan"]["usable"], row


def test_trajectories_take_the_bytes_that_compiled_programs_return():
    """On TPUs with their padding: 1.8 times the numbers at 512 pixels on 16 chips, and none at 1024."""
    compiled, docs = script("compiled")
    sampled = [row for row in json.loads((docs / "compiled.json").read_text()) if row["program"] == "sample"]
    assert len({row["slice"] for row in sampled}) > 4
    for row in sampled:
        recipe, where = compiled.recipe_of(row["config"], row["prompts"]), topology(row["slice"])
        held = memory.memory(recipe, roofline.Settings(**row["settings"]), where).resident["trajectories"]
        assert row["compiler"]["output"] == pytest.approx(held, rel=0.01), row["slice"]


def test_an_evaluation_is_planned_with_its_larger_number_of_images(pickscore):
    e = {"every": 30, "prompts": 250, "images_per_prompt": 2, "final_prompts": 0}
    numbers = [{}, {"final_prompts": 100, "final_images_per_prompt": 6}, {"every": 0}, {"prompts": 0}]
    found = [memory.evaluated(change(pickscore.config, evaluation=e | more), 64) for more in numbers]
    assert found == [512, 640, 0, 64]
    none = pickscore._replace(config=change(pickscore.config, evaluation=e | {"every": 0}))
    settings = search.search(pickscore, topology("v5e:4x4"))
    assert "evaluation" not in memory.memory(none, settings, topology("v5e:4x4")).during

"""Programs compiled for a TPU slice that is not there. Skipped where libtpu (extra `tpu`) is not installed."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from densegrpo_jax import cli, parallel, pipeline, policy, prompts
from densegrpo_jax.config import Parallel
from densegrpo_jax.models import clip
from densegrpo_jax.models.attention import attention
from densegrpo_jax.plan import aot, collectives, published, search
from densegrpo_jax.plan import recipe as recipes
from densegrpo_jax.plan.chips import GIB, topology
from densegrpo_jax.plan.memory import memory
from densegrpo_jax.rewards import clip as rewards
from densegrpo_jax.train import loop, phases
from densegrpo_jax_configs.variants import change

needs_libtpu = pytest.mark.skipif(not aot.available(), reason="libtpu is not installed (extra tpu)")


def small(name="scenes_preference"):
    config = change(cli.load_config(name), prompts={"per_step": 4, "group_size": 4}, sampling={"chunk": None}, model={"dtype": "bfloat16"})
    recipe = recipes.read(config)
    return recipe._replace(configs=aot.with_layers(recipe.configs, 2))


def test_fewer_layers_keep_the_kinds_of_layers():
    medium, flux = (
        aot.with_layers(published.MODELS[name], 2).transformer
        for name in ("stabilityai/stable-diffusion-3.5-medium", "black-forest-labs/FLUX.1-dev")
    )
    assert (medium.num_layers, medium.dual_attention_layers, medium.width) == (2, (0,), 1536)
    assert (flux.num_layers, flux.num_single_layers) == (2, 2)


def test_collectives_are_read_from_a_program():
    text = """
    ENTRY %main (a: f32[8,128]) -> f32[8,128] {
      %x = f32[8,128]{1,0:T(8,128)} all-reduce(f32[8,128]{1,0} %a), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
      %y = (bf16[4,2]{1,0}, bf16[16,2]{1,0}) all-gather-start(bf16[4,2] %b), replica_groups=[2,4]<=[8], dimensions={0}
      %z = f32[2]{0} add(f32[2] %c, f32[2] %d)
      %w = f32[8,4]{1,0} all-to-all(%e), replica_groups=mesh['axis_0'=8,'axis_1'=2], device_ids=([2,8]T(1,0)) {'axis_0'}, dimensions={0}
      %v = (bf16[6]{0}, bf16[6]{0}, u32[]{:S(2)}) collective-permute-start(%f), channel_id=2, source_target_pairs={{3,2},{4,7}}
      %u = f32[3]{0} reduce-scatter(%g), replica_groups={{0,1},{2,3}}, dimensions={0}
    }
    """
    assert collectives.received(text) == {
        "all-reduce": (1, 2 * 3 * 8 * 128),
        "all-gather": (1, 3 * 4 * 2 * 2),
        "all-to-all": (1, 7 * 4 * 4),
        "collective-permute": (1, 12),
        "reduce-scatter": (1, 12),
    }
    with pytest.raises(ValueError, match="does not say its groups"):
        collectives.received(text.replace("[2,4]<=[8]", "all"))


LOOPS = """
%gather.1 (p: f32[4]) -> f32[8] {
  ROOT %all-gather.7 = f32[8]{0} all-gather(%p), channel_id=3, replica_groups={{0,1}}, dimensions={0}
}

%inner_body (q: (s32[], f32[8])) -> (s32[], f32[8]) {
  %start = f32[8]{0} fusion(%q), kind=kCustom, calls=%gather.1
  %done = f32[8]{0} all-gather(%q), channel_id=3, replica_groups={{0,1}}, dimensions={0}
}

%inner_condition (q: (s32[], f32[8])) -> pred[] {
  %five = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[]{:T(512)} compare(%i, %five), direction=LT
}

%outer_body (r: (s32[], f32[8])) -> (s32[], f32[8]) {
  %while.1 = (s32[], f32[8]) while(%r), condition=%inner_condition, body=%inner_body
  %sum = f32[2]{0} all-reduce(%r), channel_id=4, replica_groups={{0,1}}, to_apply=%add
}

%outer_condition (r: (s32[], f32[8])) -> pred[] {
  ROOT %fused = pred[] fusion(%r), kind=kLoop, calls=%compared
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %while.2 = (s32[], f32[8]) while(%a), condition=%outer_condition, body=%outer_body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_what_is_in_a_loop_counts_as_often_as_it_runs():
    assert collectives.received(LOOPS) == {"all-gather": (3 * 5, 3 * 5 * 16), "all-reduce": (3, 3 * 8)}
    assert collectives.received(LOOPS.replace("%five = s32", "%five = u32")) == collectives.received(LOOPS)  # the compiler's own
    with pytest.raises(ValueError, match=r"does not say how many rounds it has: %while\.2"):
        collectives.received(LOOPS.replace("known_trip_count", "unknown"))


@pytest.mark.mesh
def test_a_program_of_this_machine_is_counted_too():
    mesh = parallel.make(Parallel(devices=4, fsdp=4))

    def program(x):
        return jax.lax.scan(lambda x, _: (jax.lax.with_sharding_constraint(x * 2 + x.sum(), jax.P("fsdp")), None), x, length=7)[0]

    with parallel.within(mesh):
        x = parallel.over_rows(mesh, np.ones(8, np.float32))
        found = collectives.received(jax.jit(program).lower(x).compile().as_text())
    assert found["all-reduce"] == (7, 7 * 2 * 3)  # of one number of four bytes, over four devices


def test_what_cannot_be_compiled_ahead_is_refused(monkeypatch):
    recipe = small()
    settings = search.search(recipe, topology("v5e:2x2"))
    with pytest.raises(ValueError, match="choose one of encode, sample, decode"):
        aot.compile_phase("dream", recipe, settings, topology("v5e:2x2"))
    with pytest.raises(ValueError, match="for TPUs only"):
        aot.compile_phase("update", recipe, settings, topology("h100:8"))
    monkeypatch.setattr(aot, "available", lambda: False)
    with pytest.raises(ValueError, match=r"pip install densegrpo_jax\[tpu\]"):
        aot.compile_phase("update", recipe, settings, topology("v5e:2x2"))


@needs_libtpu
def test_phases_compile_for_a_slice_and_gather_weights_only_where_they_are_shared():
    recipe, where = small(), topology("v5e:2x2")
    gathered = []
    for fsdp in (1, 4):
        settings = search.search(recipe, where)._replace(fsdp=fsdp, attention="xla")
        found = aot.compile_phase("recompute", recipe, settings, where)
        assert 0 < found.argument < found.peak < where.chip.hbm and found.seconds > 0
        gathered.append(found.collectives.get("all-gather", (0, 0))[1])
    kernels = [leaf.size for leaf in jax.tree.leaves(recipes.shapes(recipe.configs, "transformer")) if leaf.ndim > 1]
    calls = recipe.trajectories * recipe.trained_steps // settings.micro_batch
    assert gathered[0] < 0.1 * gathered[1]  # rows of trajectories are gathered in any case, which is little
    assert 0.4 < gathered[1] / (calls * 2 * sum(kernels) * 3 / 4) < 1.2  # modulation is computed in shares instead


@needs_libtpu
@pytest.mark.slow
def test_plan_compiles_every_phase_and_says_what_it_takes(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert cli.main(["plan", "scenes_preference", "--topology", "v5e:2x2", "--search", "--compile", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    compiled = json.loads(path.read_text())["compiled"]
    assert list(compiled) == ["encode", "sample", "decode", "update", "evaluate"]  # in float32 nothing is computed again
    for name, found in compiled.items():
        assert found["compiler"]["name"] == name
        assert all(cell in said for cell in aot.cells(found))
    assert cli.main(["plan", "scenes_preference", "--topology", "h100:8", "--search", "--compile"]) == 2
    assert "programs can be compiled ahead for TPUs only" in capsys.readouterr().err


# --- which programs there are ------------------------------------------------------------------------------------------


def test_a_recipe_has_the_programs_of_what_it_does():
    names = {name: aot.programs(recipes.read(cli.load_config(name))) for name in ("sd35_medium_pickscore", "sd35_medium_ocr")}
    assert tuple(names["sd35_medium_pickscore"]) == aot.PROGRAMS
    assert set(aot.PROGRAMS) - set(names["sd35_medium_ocr"]) == {"reward"}  # which is read on the host
    without = change(cli.load_config("scenes_preference"), evaluation={"every": 0, "final_prompts": 0})
    assert aot.programs(recipes.read(without)) == ["encode", "sample", "decode", "update"]


def test_a_process_s_chips_are_a_slice_of_their_own():
    of = {"v5e:4x4": "v5e:2x2", "v6e:2x4": "v6e:2x4", "v5p:2x2x2": "v5p:2x2x1", "v4:2x2x1": "v4:2x2x1"}
    assert {name: aot.of_process(topology(name)).name for name in of} == of


def like(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), tree)


def test_prompts_are_encoded_by_the_program_that_is_compiled(monkeypatch):
    seen, recipe = [], recipes.read(cli.load_config("scenes_preference"))
    monkeypatch.setattr(pipeline, "_encode", lambda *args: seen.append(args) or np.zeros((2, 8, 1), np.float32))
    policy.load(recipe.config).encode(["a red circle"])
    settings = search.configured(recipe, topology("h100:1"), 1)
    [(_, given)] = aot.build("encode", recipe, settings, mesh_of_one())
    assert seen[0][:3] == given[:3] and like(seen[0][3:]) == like(given[3:])


def test_an_evaluation_samples_by_the_program_that_is_compiled(monkeypatch, tmp_path):
    class Seen(Exception):
        pass

    def make(config, policy, sigmas):
        def generate(*args):
            raise Seen(sigmas, args)

        return generate

    monkeypatch.setattr(phases, "make_generate", make)
    config = change(cli.load_config("scenes_preference"), run={"workdir": tmp_path}, prompts={"per_step": 4}, sampling={"chunk": 24})
    config = change(config, evaluation={"num_steps": config.sampling.num_steps - 3})
    recipe, run = recipes.read(config), policy.load(config)
    evaluate = loop._make_evaluation(config, run, None, None, {}, prompts.load(config.prompts.evaluation))
    with pytest.raises(Seen) as seen:
        evaluate(run.start(), 0, final=True)
    sigmas, args = seen.value.args
    monkeypatch.setattr(phases, "make_generate", lambda config, policy, sigmas: sigmas)
    settings = search.configured(recipe, topology("h100:1"), 1)
    [(planned, given)] = aot.build("evaluate", recipe, settings, mesh_of_one())
    np.testing.assert_array_equal(planned, sigmas)
    assert like(args) == like(given)


def mesh_of_one():
    return parallel.mesh.arranged(jax.devices()[:1])


TOWERS = clip.CLIPConfig(
    clip.CLIPTextConfig(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_hidden_layers=2, projection_dim=32),
    clip.CLIPVisionConfig(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_hidden_layers=2, projection_dim=32),
)


def test_scorers_are_compiled_for_a_process_s_images_in_chunks(monkeypatch):
    monkeypatch.setitem(published.SCORERS, "pickscore", TOWERS)
    monkeypatch.setitem(published.SCORERS, "aesthetic", TOWERS)
    config = change(cli.load_config("scenes_preference"), prompts={"per_step": 5})
    config = dataclasses.replace(config, rewards=("pickscore", "aesthetic:somewhere"))
    recipe = recipes.read(config)
    assert recipes.on_device(config) == ["pickscore", "aesthetic"]
    settings = search.search(recipe._replace(config=change(config, sampling={"chunk": None})), topology("h100:1"))
    parts = aot.build("reward", recipe, settings, mesh_of_one(), hosts=2)
    assert [program for program, _ in parts] == [rewards._embed_texts, rewards._score_chunks, rewards._score_chunks]
    count = recipe.images // 2
    for score, size, params, spec, images, texts in (given for program, given in parts if program is rewards._score_chunks):
        assert size == 32 and images.shape == (-(-count // 32) * 32, 32, 32, 3) and images.dtype == np.uint8
        assert jax.eval_shape(lambda *args, score=score, spec=spec: score(args[0], spec, *args[1:]), params, images, texts).shape == (
            images.shape[0],
        )


# --- what a program needs ----------------------------------------------------------------------------------------------


def row_of(name, argument=1, temporary=1, output=1, held=1, usable=100, collectives=None):
    found = aot.Compiled(name, *(n * GIB for n in (argument, temporary, output, 1)), collectives or {}, 1.0)
    plan = {"held": held * GIB, "during": 0.0, "received": 0.0, "usable": usable * GIB}
    return {"compiler": found._asdict(), "plan": plan, "collective_bytes": 0, "calls_per_step": 1}


def test_what_lies_there_counts_whether_a_program_reads_it_or_not():
    assert aot.needed(row_of("decode", argument=1, temporary=4, output=2, held=20)) == 26 * GIB
    assert aot.needed(row_of("decode", argument=30, temporary=4, output=2, held=20)) == 36 * GIB
    for name in ("sample", "update"):  # whose results are counted as there
        assert aot.needed(row_of(name, argument=1, temporary=4, output=2, held=20)) == 24 * GIB


def test_all_that_lies_there_is_held(monkeypatch):
    recipe, where = recipes.read(cli.load_config("sd35_medium_pickscore")), topology("v5e:4x4")
    settings = search.search(recipe, where)
    on_host = settings._replace(encoders="host")
    there, apart = (sum(memory(recipe, s, where).resident.values()) for s in (settings, on_host))
    encoders = sum(p.weights for p in recipe.encoders.values()) * 2 / settings.fsdp
    assert there - apart == encoders
    for name in ("sample", "recompute", "update"):
        assert aot.estimates(name, recipe, settings, where)["held"] == there
        assert aot.estimates(name, recipe, on_host, where)["held"] == apart
    assert [aot.estimates("encode", recipe, s, where)["held"] for s in (settings, on_host)] == [there, apart + encoders]
    pixels, text = 1152 * 11 / 16 * 3 * 512 * 512, (77 + 128) * 4096 * 2
    assert aot.estimates("reward", recipe, settings, where)["held"] > there + 2 * pixels  # as decoded, and as scored
    assert aot.estimates("evaluate", recipe, settings, where)["held"] == there + 2048 / 16 * text


def test_a_program_that_leaves_no_room_for_what_lies_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(aot, "mesh", lambda *_: None)
    monkeypatch.setattr(aot, "compared", lambda name, *_: row_of(name, temporary=6, held=10, usable=15.5))
    monkeypatch.setattr(aot, "programs", lambda recipe: ["update"])
    where = ["plan", "sd35_medium_pickscore", "--topology", "v5e:4x4", "--search", "--compile"]
    assert cli.main(where) == 2  # XLA's peak of 1 GiB would fit
    said = capsys.readouterr()
    assert f"update as compiled for v5e:4x4 takes {int(0.25 * GIB):,} bytes too many" in said.err and "16.00" in said.out


def test_what_is_received_is_named_by_kind():
    found = row_of("update", collectives={"all-reduce": (1, 40), "all-gather": (3, 155), "all-to-all": (1, 5), "reduce-scatter": (1, 1)})
    assert aot.kinds(found) == "all-gather 77%, all-reduce 20%, all-to-all 2%" and aot.kinds(found) in aot.cells(found)
    assert aot.kinds(row_of("decode")) == ""
    assert len(aot.cells(found)) == len(aot.COLUMNS)


@pytest.mark.mesh
def test_copies_of_the_text_encoders_share_the_prompts_and_devices_of_a_copy_their_products():
    """As the plan counts them: always a share of the arithmetic."""
    recipe, flops = recipes.read(cli.load_config("sd35_medium_pickscore")), []
    shallow = {name: dataclasses.replace(getattr(recipe.configs, name), num_hidden_layers=2) for name in ("text_encoder", "text_encoder_2")}
    configs = recipe.configs._replace(text_encoder_3=dataclasses.replace(recipe.configs.text_encoder_3, num_layers=2, d_ff=2048), **shallow)
    settings = search.search(recipe, topology("v5e:4x4"))
    for mesh in (mesh_of_one(), *(parallel.make(Parallel(devices=8, fsdp=fsdp)) for fsdp in (1, 4, 8))):
        [(program, given)] = aot.build("encode", recipe._replace(configs=configs), settings, mesh)
        with parallel.within(mesh):
            flops.append(program.lower(*given).compile().cost_analysis()["flops"])
    assert flops[1:] == pytest.approx([flops[0] / 8] * 3, rel=0.15)


@needs_libtpu
def test_chips_receive_what_others_have_encoded_and_sums_where_they_share_the_encoders():
    recipe, where = small(), topology("v5e:2x2")
    settings = search.search(recipe, where)._replace(attention="xla")
    for fsdp in (1, 4):
        found = aot.compared("encode", recipe, settings._replace(fsdp=fsdp), where)
        assert found["calls_per_step"] == 1 and found["plan"]["received"] == pytest.approx(found["collective_bytes"], rel=0.7), fsdp


@needs_libtpu
def test_scorers_and_evaluation_compile(monkeypatch):
    monkeypatch.setitem(published.SCORERS, "pickscore", TOWERS)
    config = change(cli.load_config("scenes_preference"), prompts={"per_step": 8, "group_size": 8}, sampling={"chunk": None})
    recipe, where = recipes.read(dataclasses.replace(config, rewards=("pickscore",))), topology("v5e:4x4")
    settings = search.search(recipe, where)
    scored = aot.compared("reward", recipe, settings, where)
    assert scored["collective_bytes"] == 0 < scored["compiler"]["temporary"]  # each process apart
    images = -(-recipe.images // 4 // 32) * 32 * 32 * 32 * 3 / 4
    assert images < scored["compiler"]["argument"] < images + 1.3 * 4 * recipe.scorers
    found = aot.compared("evaluate", recipe, settings._replace(attention="xla"), where)
    assert found["calls_per_step"] * aot.evaluated(recipe.config, settings.chunk) == recipe.evaluated_images
    assert found["compiler"]["temporary"] > 0


@needs_libtpu
def test_all_programs_of_flux_are_made_for_a_slice():
    recipe, where = recipes.read(cli.load_config("flux_dev_pickscore")), topology("v6e:4x4")
    settings = search.search(recipe, where)
    shallow = recipe._replace(configs=aot.with_layers(recipe.configs, 1))
    assert tuple(aot.programs(recipe)) == aot.PROGRAMS
    for name in aot.PROGRAMS:
        devices = aot.mesh(aot.of_process(where)) if name == "reward" else aot.mesh(where, settings.fsdp)
        for program, given in aot.build(name, shallow, settings, devices, where.hosts):
            with jax.set_mesh(devices):
                assert "stablehlo" in program.lower(*given).as_text()[:100_000], name


@needs_libtpu
def test_the_two_cores_of_a_v4_are_one_device():
    assert aot.mesh(topology("v4:2x2x2"), fsdp=2).size == 8


@needs_libtpu
@pytest.mark.parametrize("place", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("side", [512, 1024])
def test_the_attention_kernel_and_its_derivative_compile_at_the_sizes_of_the_recipes(place, side):
    """Sharded over the batch and over the heads; with a sequence that is no multiple of a block, so that padding is masked."""
    mesh = aot.mesh(topology(place), fsdp=2, tensor=2)
    tokens, heads, width = (side // 16) ** 2 + 77 + 128, 24, 64  # image, CLIP and T5
    spec = jax.P(parallel.mesh.ROWS, None, "tensor", None)
    x = jax.ShapeDtypeStruct((2, tokens, heads, width), np.dtype("bfloat16"), sharding=jax.sharding.NamedSharding(mesh, spec))

    def loss(q, k, v):
        return attention(q, k, v, impl="splash").astype(np.float32).sum()

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
    assert "tpu_custom_call" in compiled.as_text() and not collectives.received(compiled.as_text())
    held = compiled.memory_analysis().temp_size_in_bytes
    assert held < heads // 2 * tokens**2 * 2  # no array of all logits

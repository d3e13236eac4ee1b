"""Programs compiled for a TPU slice that is not there. Skipped where libtpu (extra `tpu`) is not installed."""

import json

import jax
import numpy as np
import pytest

from densegrpo_jax import cli, parallel
from densegrpo_jax.config import Parallel
from densegrpo_jax.models.attention import attention
from densegrpo_jax.plan import aot, collectives, published, search
from densegrpo_jax.plan import recipe as recipes
from densegrpo_jax.plan.chips import topology
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
    with pytest.raises(ValueError, match="choose one of sample, decode"):
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
    assert list(compiled) == ["sample", "decode", "update"]  # in float32 nothing is computed again
    for name, found in compiled.items():
        assert found["compiler"]["name"] == name
        assert all(cell in said for cell in aot.cells(found))
    assert cli.main(["plan", "scenes_preference", "--topology", "h100:8", "--search", "--compile"]) == 2
    assert "programs can be compiled ahead for TPUs only" in capsys.readouterr().err


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

"""The MMDiT equals diffusers' in values and gradients, for every branch; scanned, rematerialised, sharded and adapted forms agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from densegrpo_jax.models import lora as adapters
from densegrpo_jax.models.sd3 import SD3Config, SD3Transformer, block_groups, name_table
from tests.models.compare import close, drawn

SMALL = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 10,
    "pos_embed_max_size": 12,
}
VARIANTS = {
    "sd3": {},
    "sd3.5-large": {"qk_norm": "rms_norm"},
    "sd3.5-medium": {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)},
    "scattered dual": {"dual_attention_layers": (1, 3), "qk_norm": "rms_norm"},
    "one block": {"num_layers": 1},
    "one dual block, patch 1": {"num_layers": 1, "dual_attention_layers": (0,), "patch_size": 1, "sample_size": 12, "out_channels": 6},
}
# transformer/config.json of the published checkpoints
PUBLISHED = {
    "SD3-Medium": dict(
        attention_head_dim=64, caption_projection_dim=1536, in_channels=16, joint_attention_dim=4096, num_attention_heads=24,
        num_layers=24, out_channels=16, patch_size=2, pooled_projection_dim=2048, pos_embed_max_size=192, sample_size=128,
    ),
    "SD3.5-Medium": dict(
        attention_head_dim=64, caption_projection_dim=1536, dual_attention_layers=list(range(13)), in_channels=16,
        joint_attention_dim=4096, num_attention_heads=24, num_layers=24, out_channels=16, patch_size=2, pooled_projection_dim=2048,
        pos_embed_max_size=384, qk_norm="rms_norm", sample_size=128,
    ),
    "SD3.5-Large": dict(
        attention_head_dim=64, caption_projection_dim=2432, in_channels=16, joint_attention_dim=4096, num_attention_heads=38,
        num_layers=38, out_channels=16, patch_size=2, pooled_projection_dim=2048, pos_embed_max_size=192, qk_norm="rms_norm",
        sample_size=128,
    ),
}  # fmt: skip


def make_inputs(config, batch=2, height=10, width=6, text=5):
    keys = jax.random.split(jax.random.key(7), 4)
    return (
        jax.random.normal(keys[0], (batch, height, width, config.in_channels)),
        jnp.linspace(0.03, 1.0, batch),
        jax.random.normal(keys[2], (batch, text, config.joint_attention_dim)),
        jax.random.normal(keys[3], (batch, config.pooled_projection_dim)),
    )


def random_params(config):
    shapes = jax.eval_shape(SD3Transformer(config).init, jax.random.key(0), *make_inputs(config))["params"]
    return drawn(shapes)


def random_lora(params, rank=3):
    lora = adapters.init(jax.random.key(1), params, rank=rank)
    return jax.tree.map(lambda leaf: 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), lora)


@pytest.fixture(scope="module")
def medium():
    config = SD3Config(**SMALL, **VARIANTS["sd3.5-medium"])
    params = random_params(config)
    return config, params, random_lora(params), make_inputs(config, batch=8)


# --- parity with diffusers ---


def torch_pair(config_values):
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    from tests.models.convert import params_from_torch

    torch.manual_seed(0)
    model = diffusers.SD3Transformer2DModel(**config_values).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    config = SD3Config.from_json(dict(model.config))
    return torch, model, config, params_from_torch(model.state_dict(), name_table(config))


@pytest.mark.parity
@pytest.mark.parametrize("variant", VARIANTS)
def test_transformer_equals_diffusers_in_value_and_latent_gradient(variant):
    torch, model, config, params = torch_pair({**SMALL, **VARIANTS[variant]})
    latents, sigma, context, pooled = make_inputs(config)
    weights = jax.random.normal(jax.random.key(3), (*latents.shape[:3], config.channels_out))

    def loss(x):
        out = SD3Transformer(config).apply({"params": params}, x, sigma, context, pooled)
        return (out * weights).sum(), out

    (_, ours), our_grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(latents)

    x, context, pooled = (torch.tensor(np.asarray(a)) for a in (latents.transpose(0, 3, 1, 2), context, pooled))
    x.requires_grad_(True)
    theirs = model(x, context, pooled, torch.tensor(np.asarray(sigma)) * 1000).sample
    (theirs * torch.tensor(np.asarray(weights)).permute(0, 3, 1, 2)).sum().backward()
    close(ours, theirs.detach().permute(0, 2, 3, 1))
    close(our_grad, x.grad.permute(0, 2, 3, 1))


@pytest.mark.parity
@pytest.mark.parametrize("model", PUBLISHED)
def test_name_table_matches_the_published_models_tensor_by_tensor(model):
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        theirs = {name: tuple(x.shape) for name, x in diffusers.SD3Transformer2DModel(**PUBLISHED[model]).state_dict().items()}
    config = SD3Config.from_json({"_class_name": "SD3Transformer2DModel", "_diffusers_version": "0.29.0", **PUBLISHED[model]})
    shapes = jax.eval_shape(SD3Transformer(config).init, jax.random.key(0), *abstract_inputs(config))["params"]
    ours = {path: leaf.shape for path, leaf in traverse_util.flatten_dict(shapes, sep="/").items()}
    table = name_table(config)
    assert set(table) == set(ours)
    found = {}
    for path, source in table.items():
        shape = ours[path]
        if source.stacked:
            assert shape[0] == len(source.names)
            shape = shape[1:]
        if source.transform == "transpose":
            shape = shape[::-1]
        elif source.transform == "conv":
            shape = (shape[3], shape[2], shape[0], shape[1])
        for name in source.names:
            assert name not in found
            found[name] = shape
    assert found == theirs
    lora = jax.eval_shape(lambda: adapters.init(jax.random.key(0), shapes))
    assert adapters.count_modules(lora) == 8 * config.num_layers - 1  # the last block has no to_add_out


def abstract_inputs(config, batch=1):
    shapes = (batch, 16, 16, config.in_channels), (batch,), (batch, 7, config.joint_attention_dim), (batch, config.pooled_projection_dim)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


# --- the same network in other forms ---


def value_and_grads(model, weights):
    """Jitted: output, and gradients with respect to params, lora and latents."""

    def loss(params, lora, latents, sigma, context, pooled):
        out = model.apply({"params": params, "lora": lora}, latents, sigma, context, pooled)
        return (out * weights).sum(), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


@pytest.fixture(scope="module")
def reference(medium):
    config, params, lora, inputs = medium
    weights = jax.random.normal(jax.random.key(3), inputs[0].shape)
    (_, out), grads = value_and_grads(SD3Transformer(config), weights)(params, lora, *inputs)
    return weights, out, grads


def assert_same(result, reference, bound=5e-5):
    (_, out), grads = result
    close(out, reference[1], bound)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(reference[2]), strict=True):
        close(ours, theirs, bound)  # exactly zero where the reference is


@pytest.mark.parametrize("settings", [{"scan_unroll": 2}, {"remat": True, "scan_unroll": 9}])
def test_remat_and_unroll_change_nothing(medium, reference, settings):
    config, params, lora, inputs = medium
    assert_same(value_and_grads(SD3Transformer(config, **settings), reference[0])(params, lora, *inputs), reference)


def test_sharded_over_eight_devices_equals_one(medium, reference):
    config, params, lora, inputs = medium
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def over_fsdp(leaf):
        spec = jax.P(*[None] * (leaf.ndim - 1), "fsdp") if leaf.shape[-1] % 2 == 0 else jax.P()
        return jax.device_put(leaf, jax.NamedSharding(mesh, spec))

    params, lora = jax.tree.map(over_fsdp, (params, lora))
    inputs = [jax.device_put(x, jax.NamedSharding(mesh, jax.P(("data", "fsdp")))) for x in inputs]
    with jax.set_mesh(mesh):
        result = value_and_grads(SD3Transformer(config, remat=True), reference[0])(params, lora, *inputs)
    assert_same(result, reference)


def test_bfloat16_is_close_and_returns_float32(medium, reference):
    config, params, lora, inputs = medium
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    out = jax.jit(SD3Transformer(config, dtype=jnp.bfloat16).apply)({"params": low, "lora": lora}, *inputs)
    assert out.dtype == jnp.float32
    error = jnp.linalg.norm(out - reference[1]) / jnp.linalg.norm(reference[1])
    assert 1e-4 < error < 5e-2  # rounded, and only rounded


def test_table_is_cropped_at_the_centre_and_not_trained(medium, reference):
    config, params, lora, inputs = medium
    assert not np.any(reference[2][0]["pos_embed"]["table"])
    side = config.pos_embed_max_size
    table = params["pos_embed"]["table"].reshape(side, side, -1)
    outside = jnp.full_like(table, jnp.nan).at[3:8, 4:7].set(table[3:8, 4:7])  # 10 x 6 latents: 5 x 3 patches, from (3, 4) on
    changed = {**params, "pos_embed": {**params["pos_embed"], "table": outside.reshape(1, side * side, -1)}}
    out = jax.jit(SD3Transformer(config).apply)({"params": changed, "lora": lora}, *inputs)
    close(out, reference[1], 1e-6)


# --- adapters ---


def test_a_fresh_adapter_is_bitwise_the_base_and_a_trained_one_is_not(medium):
    config, params, lora, inputs = medium
    apply = jax.jit(SD3Transformer(config).apply)
    base = apply({"params": params}, *inputs)
    np.testing.assert_array_equal(apply({"params": params, "lora": adapters.init(jax.random.key(0), params, rank=4)}, *inputs), base)
    assert np.abs(apply({"params": params, "lora": lora}, *inputs) - base).max() > 1e-2


def test_merged_equals_adapted_and_the_scale_counts(medium):
    config, params, lora, inputs = medium
    adapted = jax.jit(SD3Transformer(config, lora_scale=0.5).apply)({"params": params, "lora": lora}, *inputs)
    merged = jax.jit(SD3Transformer(config).apply)({"params": adapters.merge(params, lora, 0.5)}, *inputs)
    close(adapted, merged, 1e-5)


def test_gradients_of_a_fresh_adapter_are_in_b_alone(medium):
    config, params, _, inputs = medium
    lora = adapters.init(jax.random.key(0), params, rank=2)
    grads = jax.jit(jax.grad(lambda l: SD3Transformer(config).apply({"params": params, "lora": l}, *inputs).sum()))(lora)
    assert jax.tree.structure(grads) == jax.tree.structure(lora)
    for path, grad in traverse_util.flatten_dict(grads, sep="/").items():
        unused = path.startswith(f"blocks_{config.num_layers - 1}/attn/add_q_proj")  # its output is read by no one
        assert np.any(grad) == (path.endswith("/b") and not unused), path


# --- what is refused ---


def test_groups_cover_the_layers_in_order():
    config = SD3Config(**{**SMALL, "num_layers": 9}, dual_attention_layers=(0, 1, 4, 8))
    groups = [(g.first, g.length, "dual" * g.dual + "last" * g.last) for g in block_groups(config)]
    assert groups == [(0, 2, "dual"), (2, 2, ""), (4, 1, "dual"), (5, 3, ""), (8, 1, "duallast")]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"qk_norm": "layer_norm"}, "qk_norm 'layer_norm'"),
        ({"pos_embed_max_size": None}, "pos_embed_max_size None"),
        ({"caption_projection_dim": 20}, "caption_projection_dim"),
        ({"dual_attention_layers": [4]}, "dual_attention_layers"),
        ({"use_rope": True}, "use_rope"),
        ({"_class_name": "FluxTransformer2DModel"}, "FluxTransformer2DModel"),
    ],
)
def test_unsupported_configs_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        SD3Config.from_json({**SMALL, **values})


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (2, 10, 6, 3), "expected"),
        (0, (2, 9, 6, 4), "multiples of 2"),
        (0, (2, 10, 26, 4), "longest latent side is 24"),
        (1, (), "expected"),
        (2, (2, 5, 13), "expected"),
        (3, (1, 10), "expected"),
    ],
)
def test_wrong_shapes_are_refused(index, shape, message):
    config = SD3Config(**SMALL)
    inputs = list(make_inputs(config))
    inputs[index] = jnp.zeros(shape)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(SD3Transformer(config).init, jax.random.key(0), *inputs)

"""FLUX's transformer equals diffusers' in values and gradients; scanned, rematerialised, sharded and adapted forms agree."""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file

from densegrpo_jax.models import lora as adapters
from densegrpo_jax.models.adapter import Adapter, write_adapter
from densegrpo_jax.models.flux import FluxConfig, FluxTransformer, SingleBlock, name_table
from densegrpo_jax.models.layers import rotary_table, rotate
from densegrpo_jax.models.mmdit import JointBlock
from tests.models.compare import all_close, close, drawn

SMALL = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 2,
    "joint_attention_dim": 10,
    "pooled_projection_dim": 14,
    "axes_dims_rope": (2, 4, 6),
}
DEV = {**SMALL, "guidance_embeds": True}
# transformer/config.json of the published checkpoints
PUBLISHED = {
    "FLUX.1-dev": dict(
        attention_head_dim=128, guidance_embeds=True, in_channels=64, joint_attention_dim=4096, num_attention_heads=24, num_layers=19,
        num_single_layers=38, patch_size=1, pooled_projection_dim=768,
    ),
    "FLUX.1-schnell": dict(
        attention_head_dim=128, guidance_embeds=False, in_channels=64, joint_attention_dim=4096, num_attention_heads=24, num_layers=19,
        num_single_layers=38, patch_size=1, pooled_projection_dim=768,
    ),
}  # fmt: skip
RECIPE = (*adapters.ATTENTION_TARGETS, *adapters.FEED_FORWARD_TARGETS)
GOLDEN = Path(__file__).parents[1] / "golden/comfyui_lora_modules.json"


def make_inputs(config, batch=2, height=6, width=10, text=5):
    keys = jax.random.split(jax.random.key(7), 3)
    inputs = (
        jax.random.normal(keys[0], (batch, height, width, config.in_channels // 4)),
        jnp.linspace(0.03, 1.0, batch),
        jax.random.normal(keys[1], (batch, text, config.joint_attention_dim)),
        jax.random.normal(keys[2], (batch, config.pooled_projection_dim)),
    )
    return (*inputs, jnp.linspace(1.0, 3.5, batch)) if config.guidance_embeds else inputs


@functools.cache
def shapes_of(config):
    return jax.eval_shape(FluxTransformer(config).init, jax.random.key(0), *make_inputs(config))["params"]


@pytest.fixture(scope="module")
def dev():
    config = FluxConfig(**DEV)
    params = drawn(shapes_of(config))
    lora = drawn(jax.eval_shape(lambda: adapters.init(jax.random.key(0), params, RECIPE, 3)), seed=1, std=0.1)
    return config, params, lora, make_inputs(config, batch=8)


# --- parity with diffusers ---


def torch_model(values):
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(**values).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return torch, model, FluxConfig.from_json(json.loads(model.to_json_string()))


def packed(torch, latents):
    """[B, H, W, C] to diffusers' tokens, by its own function."""
    from diffusers import FluxPipeline

    B, H, W, C = latents.shape
    return FluxPipeline._pack_latents(torch.tensor(np.asarray(latents)).permute(0, 3, 1, 2), B, C, H, W)


def unpacked(tokens, height, width):
    """diffusers' tokens to [B, H, W, C], by its own function."""
    from diffusers import FluxPipeline

    return FluxPipeline._unpack_latents(tokens, 8 * height, 8 * width, 8).permute(0, 2, 3, 1)


def run_torch(torch, model, inputs, weights):
    """diffusers' velocity, and the gradient of its weighted sum with respect to the latents; parameters get theirs."""
    from diffusers import FluxPipeline

    latents, sigma, context, pooled, *guidance = inputs
    _, H, W, _ = latents.shape
    sigma, context, pooled, *guidance = (torch.tensor(np.asarray(a)) for a in (sigma, context, pooled, *guidance))
    x = packed(torch, latents).requires_grad_(True)
    ids = FluxPipeline._prepare_latent_image_ids(1, H // 2, W // 2, "cpu", torch.float32)
    given = {"guidance": guidance[0]} if guidance else {}
    out = model(
        hidden_states=x, encoder_hidden_states=context, pooled_projections=pooled, timestep=sigma, img_ids=ids,
        txt_ids=torch.zeros(context.shape[1], 3), **given,
    ).sample  # fmt: skip
    out = unpacked(out, H, W)
    (out * torch.tensor(np.asarray(weights))).sum().backward()
    return out.detach(), unpacked(x.grad, H, W)


@functools.cache
def gradients(config, **options):
    """Jitted: (params, lora, weights, inputs) -> velocity, and gradients for parameters, adapter and latents."""
    model = FluxTransformer(config, **options)

    def loss(params, lora, latents, weights, rest):
        out = model.apply({"params": params, "lora": lora}, latents, *rest)
        return (out * weights).sum(), out

    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))

    def call(params, lora, weights, inputs):
        (_, out), grads = grad(params, lora, inputs[0], weights, inputs[1:])
        return out, grads

    return call


@pytest.mark.parity
@pytest.mark.parametrize("values", [DEV, {**SMALL, "out_channels": 8}], ids=["dev", "schnell, other channels out"])
def test_transformer_equals_diffusers_in_value_and_all_gradients(values):
    from tests.models.convert import params_from_torch

    torch, model, config = torch_model(values)
    inputs = make_inputs(config)
    weights = jax.random.normal(jax.random.key(3), (*inputs[0].shape[:3], config.channels_out // 4))
    theirs, their_grad = run_torch(torch, model, inputs, weights)
    params = params_from_torch(model.state_dict(), name_table(config))
    ours, (param_grads, _, our_grad) = gradients(config)(params, {}, weights, inputs)
    close(ours, theirs)
    close(our_grad, their_grad)
    all_close(param_grads, params_from_torch({name: p.grad for name, p in model.named_parameters()}, name_table(config)))


@pytest.mark.parity
def test_adapter_gradients_equal_those_of_peft():
    from tests.models.convert import params_from_torch

    torch, model, config = torch_model(DEV)
    peft = pytest.importorskip("peft")
    params = params_from_torch(model.state_dict(), name_table(config))
    model.requires_grad_(False)
    model.add_adapter(peft.LoraConfig(r=3, lora_alpha=6, target_modules=list(RECIPE)))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in named.values():
        torch.nn.init.normal_(parameter, std=0.2)

    lora, expected = {}, {}
    inputs = make_inputs(config)
    weights = jax.random.normal(jax.random.key(3), inputs[0].shape)
    theirs, _ = run_torch(torch, model, inputs, weights)
    for path, source in name_table(config).items():
        for leaf, theirs_leaf in (("a", "lora_A"), ("b", "lora_B")):
            found = [named.get(f"{name.removesuffix('.weight')}.{theirs_leaf}.default.weight") for name in source.names]
            if found[0] is not None:
                lora[path.replace("kernel", leaf)] = np.stack([p.detach().numpy().T for p in found])
                expected[path.replace("kernel", leaf)] = np.stack([p.grad.numpy().T for p in found])
    count = len(adapters.target_paths(params, RECIPE))
    assert len(lora) == 2 * count and sum(len(leaf) for leaf in lora.values()) == len(named)  # both sides adapt the same layers

    lora, expected = (traverse_util.unflatten_dict(tree, sep="/") for tree in (lora, expected))
    ours, (_, grads, _) = gradients(config, lora_scale=2.0)(params, lora, weights, inputs)
    close(ours, theirs)
    all_close(grads, expected)


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["double", "single"])
def test_block_equals_diffusers(kind):
    from tests.models.convert import params_from_torch

    torch, model, config = torch_model({**SMALL, "num_layers": 1, "num_single_layers": 1})
    params = params_from_torch(model.state_dict(), name_table(config))
    D, rows, columns, S = config.width, 3, 5, 4
    x, context, c = drawn([jax.ShapeDtypeStruct((2, n, D), jnp.float32) for n in (rows * columns, S, 1)], std=1.0)
    ids = torch.tensor([[0, 0, 0]] * S + [[0, row, column] for row in range(rows) for column in range(columns)])
    args = {"temb": torch.tensor(np.asarray(c[:, 0])), "image_rotary_emb": model.pos_embed(ids)}
    block = (model.transformer_blocks if kind == "double" else model.single_transformer_blocks)[0]
    text_out, image_out = block(torch.tensor(np.asarray(x)), torch.tensor(np.asarray(context)), **args)

    first = {name: jax.tree.map(lambda leaf: leaf[0], params[name]) for name in ("blocks", "single_blocks")}
    rotary = rotary_table(config.axes_dims_rope, rows, columns)
    given = config.num_attention_heads, True, jnp.float32, "xla", 1.0
    if kind == "double":
        block = JointBlock(*given)
        ours, ours_text = jax.jit(block.apply)({"params": first["blocks"]}, (x, context), (jax.nn.silu(c[:, 0]), rotary))[0]
    else:
        rotary = [np.concatenate([table, np.full((S, table.shape[1]), fill, np.float32)]) for table, fill in zip(rotary, (1, 0))]
        block, tokens = SingleBlock(given[0], *given[2:]), jnp.concatenate([x, context], axis=1)
        out = jax.jit(block.apply)({"params": first["single_blocks"]}, tokens, (jax.nn.silu(c[:, 0]), rotary))[0]
        ours, ours_text = out[:, : rows * columns], out[:, rows * columns :]
    close(ours, image_out.detach())
    close(ours_text, text_out.detach())


@pytest.mark.parity
def test_rotary_table_equals_diffusers_at_its_real_size():
    torch = pytest.importorskip("torch")
    from diffusers.models.transformers.transformer_flux import FluxPosEmbed

    cos, sin = rotary_table((16, 56, 56), 64, 33)
    ids = torch.tensor([[0, row, column] for row in range(64) for column in range(33)])
    for ours, theirs in zip((cos, sin), FluxPosEmbed(10000, [16, 56, 56])(ids)):
        np.testing.assert_allclose(np.repeat(ours, 2, axis=1), theirs, atol=6e-8)


@pytest.mark.parity
@pytest.mark.parametrize("model", PUBLISHED)
def test_name_table_matches_the_published_models_tensor_by_tensor(model):
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        theirs = {name: tuple(x.shape) for name, x in diffusers.FluxTransformer2DModel(**PUBLISHED[model]).state_dict().items()}
    config = FluxConfig.from_json({"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.30.0", **PUBLISHED[model]})
    shapes = shapes_of(config)
    ours = {path: leaf.shape for path, leaf in traverse_util.flatten_dict(shapes, sep="/").items()}
    table = name_table(config)
    assert set(table) == set(ours)
    found = {}
    for path, source in table.items():
        assert source.transform in ("none", "transpose")
        shape = ours[path][1:] if source.stacked else ours[path]
        assert not source.stacked or ours[path][0] == len(source.names)
        for name in source.names:
            assert name not in found
            found[name] = shape[::-1] if source.transform == "transpose" else shape
    assert found == theirs
    count = lambda targets: adapters.count_modules(jax.eval_shape(lambda: adapters.init(jax.random.key(0), shapes, targets)))  # noqa: E731
    assert count(adapters.ATTENTION_TARGETS) == 8 * 19 + 3 * 38  # single blocks have only to_q, to_k, to_v under these names
    assert count(RECIPE) == 12 * 19 + 3 * 38


def test_comfyui_finds_every_layer_of_the_real_depth(tmp_path):
    """Layers of small width at the full depth; norms of q and k are no linear layers."""
    config = FluxConfig(**{**DEV, "num_layers": 19, "num_single_layers": 38})
    flat = traverse_util.flatten_dict(shapes_of(config), sep="/")
    every = tuple(path.removesuffix("/kernel") for path in flat if path.endswith("/kernel"))
    lora = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), adapters.init(jax.random.key(0), shapes_of(config), every, 1))
    keys = load_file(write_adapter(tmp_path, Adapter(lora, 2.0), name_table(config), "diffusers")).keys()
    modules = {re.fullmatch(r"transformer\.(.+)\.lora_[AB]\.weight", key).group(1) for key in keys}
    known = set(json.loads(GOLDEN.read_text())["FLUX.1-dev"])
    assert modules <= known and len(modules) == adapters.count_modules(lora)
    assert {name for name in known - modules if "norm_" not in name} == {"controlnet_x_embedder"}  # the rest are q/k norms


# --- properties ---


def test_logits_depend_on_relative_positions_alone():
    cos, sin = rotary_table((2, 4, 6), 7, 7)
    q, k = (jax.random.normal(key, (1, 1, 1, 12)) for key in jax.random.split(jax.random.key(0)))
    turned_q, turned_k = (rotate(jnp.broadcast_to(x, (1, 49, 1, 12)), cos, sin)[0, :, 0].reshape(7, 7, 12) for x in (q, k))
    moved = (turned_q[2, 1] @ turned_k[3, 4], turned_q[4, 3] @ turned_k[5, 6], turned_q[3, 0] @ turned_k[4, 3])
    np.testing.assert_allclose(moved, moved[0], rtol=1e-5)
    assert abs(turned_q[2, 1] @ turned_k[4, 3] - moved[0]) > 1e-3  # rows and columns are told apart
    np.testing.assert_allclose(jnp.linalg.norm(turned_q, axis=-1), jnp.linalg.norm(q), rtol=1e-6)
    np.testing.assert_array_equal(turned_q[0, 0], q[0, 0, 0])


@pytest.fixture(scope="module")
def reference(dev):
    config, params, lora, inputs = dev
    weights = jax.random.normal(jax.random.key(3), inputs[0].shape)
    return weights, gradients(config)(params, lora, weights, inputs)


def test_positions_matter_and_text_has_none(dev, reference):
    config, params, lora, (latents, sigma, context, pooled, guidance) = dev
    _, (out, _) = reference
    apply = jax.jit(FluxTransformer(config).apply)
    bound = {"params": params, "lora": lora}
    close(apply(bound, latents, sigma, context[:, ::-1], pooled, guidance), out)

    def mirrored(x):  # the columns of tokens, each token as it was
        return x.reshape(8, 6, 5, 2, 4)[:, :, ::-1].reshape(x.shape)

    other = mirrored(apply(bound, mirrored(latents), sigma, context, pooled, guidance))
    assert np.abs(other - out).max() > 1e-3 * np.abs(out).max()  # twenty times what counts as equal
    assert np.abs(apply(bound, latents, sigma, context, pooled, guidance + 0.5) - out).max() > 1e-3 * np.abs(out).max()


def test_remat_and_unroll_change_nothing(dev, reference):
    config, params, lora, inputs = dev
    weights, (_, grads) = reference
    _, ours = gradients(config, remat=True, scan_unroll=2)(params, lora, weights, inputs)
    all_close(ours, grads)


def test_sharded_over_eight_devices_equals_one(dev, reference):
    config, params, lora, inputs = dev
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def over_fsdp(leaf):
        spec = jax.P(*[None] * (leaf.ndim - 1), "fsdp") if leaf.shape[-1] % 2 == 0 else jax.P()
        return jax.device_put(leaf, jax.NamedSharding(mesh, spec))

    params, lora = jax.tree.map(over_fsdp, (params, lora))
    inputs = [jax.device_put(x, jax.NamedSharding(mesh, jax.P(("data", "fsdp")))) for x in inputs]
    with jax.set_mesh(mesh):
        out = jax.jit(FluxTransformer(config).apply)({"params": params, "lora": lora}, *inputs)
    close(out, reference[1][0])


def test_bfloat16_is_close_and_returns_float32(dev, reference):
    config, params, lora, inputs = dev
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    out = jax.jit(FluxTransformer(config, dtype=jnp.bfloat16).apply)({"params": low, "lora": lora}, *inputs)
    assert out.dtype == jnp.float32
    error = jnp.linalg.norm(out - reference[1][0]) / jnp.linalg.norm(reference[1][0])
    assert 1e-4 < error < 5e-2  # rounded, and only rounded


def test_adapters_start_as_the_base_merge_and_scale(dev):
    config, params, lora, inputs = dev
    apply = jax.jit(FluxTransformer(config, lora_scale=0.5).apply)
    base = apply({"params": params}, *inputs)
    fresh = adapters.init(jax.random.key(0), params, RECIPE, rank=3)
    np.testing.assert_array_equal(apply({"params": params, "lora": fresh}, *inputs), base)
    adapted = apply({"params": params, "lora": lora}, *inputs)
    assert np.abs(adapted - base).max() > 1e-2
    close(adapted, apply({"params": adapters.merge(params, lora, 0.5)}, *inputs), 1e-5)


def test_gradients_of_a_fresh_adapter_are_in_b_alone(dev, reference):
    config, params, _, inputs = dev
    fresh = adapters.init(jax.random.key(0), params, RECIPE, rank=3)
    _, (_, grads, _) = gradients(config)(params, fresh, reference[0], inputs)
    for path, grad in traverse_util.flatten_dict(grads, sep="/").items():
        assert np.any(grad) == path.endswith("/b"), path


# --- what is refused ---


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch_size": 2}, "patch_size = 2 is not supported"),
        ({"in_channels": 6}, "in_channels 6"),
        ({"axes_dims_rope": [2, 4, 4]}, "add to 12"),
        ({"axes_dims_rope": [3, 3, 6]}, "three even numbers"),
        ({"num_single_layers": 0}, "num_single_layers 0"),
        ({"novel": 1}, "novel"),
        ({"_class_name": "SD3Transformer2DModel"}, "SD3Transformer2DModel"),
    ],
)
def test_unsupported_configs_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        FluxConfig.from_json({**SMALL, **values})


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (2, 6, 10, 3), "expected"),
        (0, (2, 5, 10, 4), "multiples of 2"),
        (1, (), "expected"),
        (2, (2, 5, 13), "expected"),
        (3, (1, 14), "expected"),
        (4, (), "needs guidance of shape"),
        (4, None, "needs guidance of shape"),
    ],
)
def test_wrong_shapes_are_refused(index, shape, message):
    config = FluxConfig(**DEV)
    inputs = list(make_inputs(config))
    inputs[index] = None if shape is None else jnp.zeros(shape)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(FluxTransformer(config).init, jax.random.key(0), *inputs)


def test_guidance_is_refused_without_an_embedder():
    config = FluxConfig(**SMALL)
    with pytest.raises(ValueError, match="takes no guidance"):
        jax.eval_shape(FluxTransformer(config).init, jax.random.key(0), *make_inputs(config), jnp.ones(2))

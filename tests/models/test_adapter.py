"""Adapters on disk: the strength is right in every reader, and what others write is read or refused."""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from densegrpo_jax.models import adapter as adapters
from densegrpo_jax.models import lora as loras
from densegrpo_jax.models.adapter import Adapter, read_adapter, write_adapter
from densegrpo_jax.models.sd3 import SD3Config, SD3Transformer, name_table

GOLDEN = Path(__file__).parents[1] / "golden/comfyui_lora_modules.json"
SIZES = {
    "sample_size": 8,
    "num_layers": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 20,
    "pos_embed_max_size": 12,
    "dual_attention_layers": (0, 1),
    "qk_norm": "rms_norm",
}
CONFIG = SD3Config(**SIZES)
TABLE = name_table(CONFIG)
TARGETS = (*loras.ATTENTION_TARGETS, "proj_out", "ff.net.2")
RANK, ALPHA = 4, 6.0


@functools.cache
def abstract(config=CONFIG):
    arrays = [jnp.zeros(shape) for shape in ((1, 4, 4, 16), (1,), (1, 3, config.joint_attention_dim), (1, config.pooled_projection_dim))]
    return jax.eval_shape(SD3Transformer(config).init, jax.random.key(0), *arrays)["params"]


def random_adapter(alpha=ALPHA, rank=RANK, targets=TARGETS, seed=0):
    rng = np.random.default_rng(seed)
    fresh = jax.eval_shape(lambda key: loras.init(key, abstract(), targets, rank), jax.random.key(0))
    return Adapter(jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32), fresh), alpha)


def deltas(adapter):
    """What each torch module's weight changes by, [out, in]."""
    return {name: b @ a for name, (a, b) in adapters.torch_modules(adapter, TABLE).items()}


def assert_same_effect(first, second):
    first, second = deltas(first), deltas(second)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("format", ["diffusers", "peft"])
@pytest.mark.parametrize("alpha", [None, 4.0, 6.0, 0.5])
def test_round_trip_keeps_the_effect_for_any_alpha(tmp_path, format, alpha):
    adapter = random_adapter()
    write_adapter(tmp_path, adapter, TABLE, format)
    back = read_adapter(tmp_path, TABLE, abstract(), alpha)
    assert back.alpha == (alpha or RANK) and adapters.rank(back.lora) == RANK
    assert jax.tree.structure(back.lora) == jax.tree.structure(adapter.lora)
    assert_same_effect(back, adapter)


def test_file_matches_the_layers_own_arithmetic(tmp_path):
    """x W + alpha / R (x a) b of the layer of ours is x (W + B A)^T with the matrices of the file."""
    adapter = random_adapter()
    file = load_file(write_adapter(tmp_path, adapter, TABLE, "diffusers"))
    a, b = (np.asarray(adapter.lora["blocks_2"]["attn"]["to_q"][leaf][0]) for leaf in "ab")
    module = "transformer.transformer_blocks.2.attn.to_q"
    product = file[f"{module}.lora_B.weight"] @ file[f"{module}.lora_A.weight"]
    np.testing.assert_allclose(product, (ALPHA / RANK * a @ b).T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("format", ["diffusers", "peft"])
def test_comfyui_finds_every_tensor_at_strength_one(tmp_path, format):
    """All targets of SD3.5-Medium, at its real depth, under the names ComfyUI knows; no alpha that would scale a second time."""
    config = SD3Config(**{**SIZES, "num_layers": 24, "dual_attention_layers": tuple(range(13))})
    targets = tuple(end for end in ("attn.to_q", "attn2.to_k", "attn.to_add_out", "attn.to_out.0", "norm1.linear", "ff_context.net.0.proj"))
    lora = jax.tree.map(jnp.ones_like, loras.init(jax.random.key(0), abstract(config), (*targets, *loras.ATTENTION_TARGETS, "proj_out"), 2))
    keys = load_file(write_adapter(tmp_path, Adapter(lora, 8.0), name_table(config), format)).keys()
    known = set(json.loads(GOLDEN.read_text())["stable-diffusion-3.5-medium"])
    prefix = {"diffusers": "transformer.", "peft": "base_model.model."}[format]
    modules = {re.fullmatch(rf"{re.escape(prefix)}(.+)\.lora_[AB]\.weight", key).group(1) for key in keys}
    assert modules <= known and len(modules) == loras.count_modules(lora) == len(keys) // 2


@pytest.mark.parametrize("change", ["alpha_keys", "metadata", "patterns", "rslora", "plain", "unprefixed"])
def test_reads_adapters_trained_elsewhere(tmp_path, change):
    """The strength comes from alpha tensors, metadata (with patterns, rank-stabilised) or is 1."""
    tensors = {key: value for key, value in load_file(write_adapter(tmp_path, random_adapter(RANK), TABLE, "diffusers")).items()}
    base, metadata, factor = deltas(random_adapter(RANK)), None, dict.fromkeys(deltas(random_adapter()), 1.0)
    config = {"transformer.r": RANK, "transformer.lora_alpha": 10, "transformer.bias": "none"}
    if change == "alpha_keys":
        tensors |= {f"transformer.{module}.alpha": np.array(10.0, np.float32) for module in base if "to_q" in module}
        factor |= {module: 2.5 for module in base if "to_q" in module}
    elif change == "metadata":
        factor, metadata = dict.fromkeys(base, 2.5), config
    elif change == "patterns":
        metadata = config | {"transformer.alpha_pattern": {"attn.to_k": 2, "^transformer_blocks.0.attn.to_q": 1}}
        factor = {m: 0.5 if m.endswith("attn.to_k") else 0.25 if m == "transformer_blocks.0.attn.to_q" else 2.5 for m in base}
    elif change == "rslora":
        factor, metadata = dict.fromkeys(base, 5.0), config | {"transformer.use_rslora": True}
    elif change == "unprefixed":
        tensors = {key.removeprefix("transformer."): value for key, value in tensors.items()}
    save_file(tensors, tmp_path / "pytorch_lora_weights.safetensors", {"lora_adapter_metadata": json.dumps(metadata)} if metadata else None)
    back = deltas(read_adapter(tmp_path, TABLE, abstract(), alpha=3.0))
    for module, delta in base.items():
        np.testing.assert_allclose(back[module], factor[module] * delta, rtol=1e-5, atol=1e-6)


def test_missing_layers_and_lower_ranks_are_zeros(tmp_path):
    tensors = load_file(write_adapter(tmp_path, random_adapter(RANK), TABLE, "diffusers"))
    base = deltas(random_adapter(RANK))
    gone, low = "transformer_blocks.1.attn.to_q", "transformer_blocks.0.attn.to_v"
    tensors = {key: value for key, value in tensors.items() if gone not in key}
    tensors[f"transformer.{low}.lora_A.weight"] = tensors[f"transformer.{low}.lora_A.weight"][:1]
    tensors[f"transformer.{low}.lora_B.weight"] = np.ascontiguousarray(tensors[f"transformer.{low}.lora_B.weight"][:, :1])
    save_file(tensors, tmp_path / "pytorch_lora_weights.safetensors")
    back = deltas(read_adapter(tmp_path, TABLE, abstract()))
    assert not back[gone].any()
    expected = tensors[f"transformer.{low}.lora_B.weight"] @ tensors[f"transformer.{low}.lora_A.weight"]
    np.testing.assert_allclose(back[low], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(back["proj_out"], base["proj_out"], rtol=1e-5, atol=1e-6)


MODULE = "transformer.transformer_blocks.0.attn.to_q"
BAD_TENSORS = {
    "not a linear layer": ({"transformer.transformer_blocks.0.attn.norm_q.lora_A.weight": (4, 8)}, "norm_q"),
    "another model": ({"transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight": (4, 8)}, "single_transformer_blocks"),
    "a layer too many": ({"transformer.transformer_blocks.4.attn.to_q.lora_A.weight": (4, 16)}, r"transformer_blocks\.4"),
    "DoRA": ({f"{MODULE}.lora_magnitude_vector": (16,)}, "lora_magnitude_vector"),
    "bias": ({f"{MODULE}.lora_B.bias": (16,)}, r"lora_B\.bias"),
    "kohya": ({"lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight": (4, 16)}, "lora_down"),
    "alpha of nothing": ({"transformer.proj_in.alpha": ()}, r"proj_in\.alpha"),
    "text encoder": ({"text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight": (4, 8)}, "frozen here"),
    "wrong width": ({f"{MODULE}.lora_A.weight": (4, 15)}, r"this model needs \[r, 16\]"),
    "ranks differ": ({f"{MODULE}.lora_A.weight": (3, 16)}, r"this model needs \[r, 16\] and \[16, r\]"),
    "half": ({"transformer.context_embedder.lora_A.weight": (4, 12)}, "context_embedder has only lora_A"),
    "convolution": ({"transformer.pos_embed.proj.lora_A.weight": (4, 16, 2, 2)}, r"pos_embed\.proj"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_refuses_tensors_that_do_not_fit(tmp_path, case):
    extra, message = BAD_TENSORS[case]
    tensors = load_file(write_adapter(tmp_path, random_adapter(), TABLE, "diffusers"))
    save_file(tensors | {key: np.zeros(shape, np.float32) for key, shape in extra.items()}, tmp_path / "pytorch_lora_weights.safetensors")
    with pytest.raises(ValueError, match=message):
        read_adapter(tmp_path, TABLE, abstract())


BAD_CONFIGS = [
    ({"use_dora": True}, "use_dora"),
    ({"peft_type": "LOHA"}, "peft_type"),
    ({"bias": "all"}, "bias"),
    ({"modules_to_save": ["proj_out"]}, "modules_to_save"),
    ({"r": 5}, "has rank 4, but the config says 5"),
    ({"lora_alpha": None}, "no usable alpha"),
    ({"lora_alpha": float("nan")}, "no usable alpha"),
    ({"alpha_pattern": {"(a+)+$": 3}}, "not a plain module name"),
    ({"alpha_pattern": [1]}, "no usable alpha"),
]


@pytest.mark.parametrize("change, message", BAD_CONFIGS)
def test_refuses_configs(tmp_path, change, message):
    write_adapter(tmp_path, random_adapter(), TABLE, "peft")
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        read_adapter(tmp_path, TABLE, abstract())


def test_refuses_two_alphas_and_broken_files(tmp_path):
    path = write_adapter(tmp_path, random_adapter(), TABLE, "peft")
    tensors = load_file(path)
    save_file(tensors | {"base_model.model.proj_out.alpha": np.array(9.0, np.float32)}, path)
    with pytest.raises(ValueError, match="alpha of proj_out is 9 in the tensors and 4 in the config"):
        read_adapter(path, TABLE, abstract())
    save_file({key: np.full_like(value, np.nan) for key, value in tensors.items()}, path)
    with pytest.raises(ValueError, match="not finite"):
        read_adapter(path, TABLE, abstract())
    (tmp_path / "adapter_config.json").unlink()
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"adapter_config\.json: cannot be read"):
        read_adapter(tmp_path, TABLE, abstract())
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        read_adapter(path, TABLE, abstract())
    path.unlink()
    with pytest.raises(ValueError, match="found none"):
        read_adapter(tmp_path, TABLE, abstract())
    save_file({"x": np.zeros(1)}, tmp_path / "a.safetensors", {"lora_adapter_metadata": "[]"})
    with pytest.raises(ValueError, match="1 of its entries"):
        read_adapter(tmp_path, TABLE, abstract())


def test_write_refuses_what_the_model_has_not(tmp_path):
    adapter = random_adapter()
    with pytest.raises(ValueError, match="format 'comfy'"):
        write_adapter(tmp_path, adapter, TABLE, "comfy")
    with pytest.raises(ValueError, match="blocks_9/attn is not a linear layer"):
        write_adapter(tmp_path, Adapter({"blocks_9": {"attn": adapter.lora["proj_out"]}}, 1.0), TABLE, "peft")
    with pytest.raises(ValueError, match="one rank"):
        write_adapter(tmp_path, Adapter({}, 1.0), TABLE, "peft")
    deeper = name_table(SD3Config(**{**SIZES, "num_layers": 5}))
    with pytest.raises(ValueError, match="has 1 layers at blocks_2/attn/add_k_proj; this model has 2"):
        write_adapter(tmp_path, adapter, deeper, "peft")
    assert not list(tmp_path.iterdir())

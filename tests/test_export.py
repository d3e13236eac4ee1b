"""Exports make the same images in diffusers and PEFT as the adapter makes here, whatever its alpha."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from densegrpo_jax import flow, pipeline  # noqa: E402
from densegrpo_jax.export import export  # noqa: E402
from densegrpo_jax.models import lora as loras  # noqa: E402
from densegrpo_jax.models.adapter import Adapter, read_adapter  # noqa: E402
from densegrpo_jax.models.weights import open_weights  # noqa: E402
from tests import images  # noqa: E402
from tests.images import torch_pipeline  # noqa: E402
from tests.tiny_folder import make_flux_folder, make_sd3_folder  # noqa: E402

TARGETS = (*loras.ATTENTION_TARGETS, "ff.net.0.proj", "norm1.linear", "context_embedder", "proj_out")
MORE_TARGETS = {"sd3": ("attn2.to_q",), "flux": (*loras.FEED_FORWARD_TARGETS, "proj_mlp", "norm.linear", "guidance_embedder.linear_1")}
RANK, STEPS, GUIDANCE = 4, 2, 3.0
pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", params=["sd3", "flux"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return {"sd3": make_sd3_folder, "flux": make_flux_folder}[family](tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def pipe(folder):
    return pipeline.load(folder, jnp.float32)


@pytest.fixture(scope="module")
def adapter(pipe, family):
    """Random, of alpha 6 at rank 4."""
    lora = loras.init(jax.random.key(0), pipe.params["transformer"], (*TARGETS, *MORE_TARGETS[family]), RANK)
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(lora))))
    return Adapter(jax.tree.map(lambda leaf: 0.2 * jax.random.normal(next(keys), leaf.shape), lora), 6.0)


@pytest.fixture(scope="module")
def noise():
    return flow.initial_noise(jax.random.key(0), 0, jnp.arange(2), (4, 6, 16))


@pytest.fixture(scope="module")
def our_images(pipe, noise):
    """(adapter, parameters) -> images; with the layers' scale at 6 / 4."""

    def run(adapter, params=pipe.params):
        with_params = dataclasses.replace(pipe, params={**pipe.params, **params})
        return images.our_images(with_params, noise, GUIDANCE, STEPS, lora=adapter.lora, lora_scale=1.5)

    return run


def times(adapter, factor):
    """The adapter with its effect multiplied."""
    flat = traverse_util.flatten_dict(adapter.lora)
    return Adapter(traverse_util.unflatten_dict({path: leaf * (factor if path[-1] == "b" else 1) for path, leaf in flat.items()}), 6.0)


@pytest.fixture(scope="module")
def expected(our_images, adapter):
    base = our_images(adapter)
    for factor in (0, 1 / 1.5, 1.5):  # no adapter, alpha forgotten, alpha counted twice
        assert np.abs(our_images(times(adapter, factor)) - base).max() > 0.02
    return base


def torch_images(reference, noise):
    return images.torch_images(reference, noise, GUIDANCE, STEPS)


def assert_same(ours, expected):
    np.testing.assert_allclose(ours, expected, atol=2e-3, rtol=0)


def test_diffusers(folder, noise, adapter, expected, tmp_path):
    out = export(adapter, folder, "diffusers", tmp_path / "lora")
    reference = torch_pipeline(folder)
    reference.load_lora_weights(out)
    loaded = sum("lora_A" in name for name, _ in reference.transformer.named_parameters())
    assert loaded == loras.count_modules(adapter.lora)
    assert_same(torch_images(reference, noise), expected)


def test_peft(folder, noise, adapter, expected, tmp_path):
    from peft import PeftModel

    out = export(adapter, folder, "peft", tmp_path / "lora")
    reference = torch_pipeline(folder)
    PeftModel.from_pretrained(reference.transformer, out)  # puts its layers into the transformer
    loaded = sum("lora_A" in name for name, _ in reference.transformer.named_parameters())
    assert loaded == loras.count_modules(adapter.lora)
    assert_same(torch_images(reference, noise), expected)


def test_merged(folder, noise, adapter, expected, our_images, tmp_path):
    out = export(adapter, folder, "merged", tmp_path / "model")
    assert_same(torch_images(torch_pipeline(out), noise), expected)
    assert_same(our_images(times(adapter, 0), pipeline.load(out, jnp.float32).params), expected)
    assert sorted(p.relative_to(out) for p in out.rglob("*")) == sorted(p.relative_to(folder) for p in folder.rglob("*"))


@pytest.mark.parametrize("kind, rslora, alpha", [("peft", False, 6), ("peft", True, 3), ("diffusers", False, 3)])
def test_adapters_of_diffusers_and_peft_load_here(pipe, folder, noise, adapter, our_images, tmp_path, kind, rslora, alpha):
    """Trained elsewhere: PEFT's own layers, saved by PEFT or by diffusers, with alpha in their configs."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    reference = torch_pipeline(folder)
    targets = ["attn.to_q", "attn.add_k_proj", "to_out.0", "proj_out"]
    config = LoraConfig(r=RANK, lora_alpha=alpha, use_rslora=rslora, target_modules=targets)
    if kind == "peft":
        model = get_peft_model(reference.transformer, config)
    else:
        reference.transformer.add_adapter(config)
        model = reference.transformer
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    if kind == "peft":
        model.save_pretrained(tmp_path)
    else:
        metadata = model.peft_config["default"].to_dict() | {"target_modules": targets}
        reference.save_lora_weights(tmp_path, get_peft_model_state_dict(model), transformer_lora_adapter_metadata=metadata)
    theirs = torch_images(reference, noise)
    assert np.abs(theirs - our_images(times(adapter, 0))).max() > 0.02
    table, shapes = pipeline.name_table(pipe.configs, "transformer"), pipeline.abstract_params(pipe.configs, "transformer")
    assert_same(our_images(read_adapter(tmp_path, table, shapes, alpha=6.0)), theirs)


@pytest.mark.parametrize("family", ["sd3"], indirect=True)
def test_merge_keeps_shards_types_and_only_what_it_needs(folder, adapter, tmp_path):
    base = shutil.copytree(folder, tmp_path / "base")
    shutil.rmtree(base / "transformer")
    from diffusers import SD3Transformer2DModel

    whole = SD3Transformer2DModel.from_pretrained(folder / "transformer")
    whole.to(torch.bfloat16).save_pretrained(base / "transformer", max_shard_size="60KB")
    (base / "transformer" / "old.bin").touch()
    (base / "transformer" / "diffusion_pytorch_model.safetensors.index.fp16.json").write_text("{}")
    (base / "whole_model.safetensors").touch()
    (base / "vae" / "diffusion_pytorch_model.fp16.safetensors").touch()
    shards = sorted(path.name for path in (base / "transformer").glob("*.safetensors"))
    assert len(shards) > 2
    out = export(adapter, base, "merged", tmp_path / "model")
    assert sorted(path.name for path in (out / "transformer").glob("*")) == sorted(["config.json", *shards, *index_names(base)])
    assert not (out / "whole_model.safetensors").exists() and not (out / "vae" / "diffusion_pytorch_model.fp16.safetensors").exists()
    merged = SD3Transformer2DModel.from_pretrained(out / "transformer").state_dict()
    assert {stored.dtype for stored in open_weights(out / "transformer").values()} == {"BF16"}
    params = loras.merge(pipeline.load(base, jnp.bfloat16, ("transformer",)).params["transformer"], adapter.lora, adapter.alpha / RANK)
    kernel = params["blocks_2"]["attn"]["to_q"]["kernel"][0]
    np.testing.assert_array_equal(merged["transformer_blocks.2.attn.to_q.weight"].float().numpy().T, np.asarray(kernel, np.float32))
    wide = export(adapter, base, "merged", tmp_path / "wide", dtype="float32")
    assert {stored.dtype for stored in open_weights(wide / "transformer").values()} == {"F32"}


def index_names(base):
    return [path.name for path in (base / "transformer").glob("*.index.json")]


@pytest.mark.parametrize("family", ["sd3"], indirect=True)
def test_refusals(folder, adapter, tmp_path):
    with pytest.raises(ValueError, match="format 'comfyui' is not one of diffusers, peft, merged"):
        export(adapter, folder, "comfyui", tmp_path / "out")
    with pytest.raises(ValueError, match="dtype 'int8'"):
        export(adapter, folder, "merged", tmp_path / "out", dtype="int8")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ValueError, match="exists already"):
        export(adapter, folder, "peft", tmp_path / "taken")
    for format in ("diffusers", "merged"):
        with pytest.raises(ValueError, match="adapter at 'blocks_7/attn/to_q' has no kernel"):
            export(Adapter({"blocks_7": {"attn": {"to_q": adapter.lora["proj_out"]}}}, 1.0), folder, format, tmp_path / "out")
    other = shutil.copytree(folder, tmp_path / "other")
    config = other / "transformer/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pos_embed_max_size": 16}))
    with pytest.raises(ValueError, match=r"of the wrong shape: pos_embed\.pos_embed"):
        export(adapter, other, "merged", tmp_path / "out")
    assert not (tmp_path / "out").exists()

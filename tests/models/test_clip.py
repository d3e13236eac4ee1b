"""CLIP's towers against transformers in torch, name tables at full size, pooling, and the scan's settings."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from densegrpo_jax.models import clip
from tests.models.convert import params_from_torch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# The published config.json files, as far as they say something; the last two hold nested configs as written by older versions.
L_TEXT = {
    "architectures": ["CLIPTextModelWithProjection"],
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "dropout": 0.0,
    "eos_token_id": 2,
    "hidden_act": "quick_gelu",
    "hidden_size": 768,
    "initializer_factor": 1.0,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 77,
    "model_type": "clip_text_model",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "projection_dim": 768,
    "torch_dtype": "float16",
    "transformers_version": "4.41.2",
    "vocab_size": 49408,
}
G_TEXT = {
    **L_TEXT,
    "hidden_act": "gelu",
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_attention_heads": 20,
    "num_hidden_layers": 32,
    "projection_dim": 1280,
}
VIT_L = {
    "architectures": ["CLIPModel"],
    "initializer_factor": 1.0,
    "logit_scale_init_value": 2.6592,
    "model_type": "clip",
    "projection_dim": 768,
    "text_config": {**L_TEXT, "architectures": None, "projection_dim": 768, "pruned_heads": {}, "top_k": 50, "is_decoder": False},
    "text_config_dict": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12},
    "vision_config": {
        "hidden_act": "quick_gelu",
        "hidden_size": 1024,
        "image_size": 224,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
    },
    "vision_config_dict": None,
}
VIT_H = {
    "architectures": ["CLIPModel"],
    "model_type": "clip",
    "projection_dim": 1024,
    "text_config": {
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "model_type": "clip_text_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
    },
    "text_config_dict": None,
    "vision_config": {
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "patch_size": 14,
    },
    "vision_config_dict": None,
}

EOS = 37
TEXT = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "projection_dim": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 11,
    "hidden_act": "quick_gelu",
    "bos_token_id": 38,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "projection_dim": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 4,
    "hidden_act": "gelu",
}
# Right-padded texts of several lengths; the second is padded with the end token itself, as CLIP-L's tokenizer does.
IDS = np.array(
    [
        [38, 1, 2, 3, EOS, 0, 0, 0, 0],
        [38, 5, 6, EOS, EOS, EOS, EOS, EOS, EOS],
        [38, 7, 8, 9, 10, 11, 12, 13, EOS],
    ]
)


def randomized(model):
    """Every parameter away from its initial value: norms start at one and biases at zero, which would hide a mix-up."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def difference(ours, theirs):
    theirs = theirs.detach().numpy() if isinstance(theirs, torch.Tensor) else np.asarray(theirs)
    assert ours.shape == theirs.shape
    return np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max()


def scalar(params):
    """The temperature as the scalar that the file holds (numpy's contiguous arrays have at least one axis)."""
    return {**params, "logit_scale": params["logit_scale"].reshape(())}


def run(module, params, *inputs, **options):
    return jax.jit(lambda p, *x: module.apply({"params": p}, *x, **options))(params, *inputs)


@pytest.mark.parity
@pytest.mark.parametrize(
    "change",
    [{}, {"hidden_act": "gelu", "eos_token_id": 2}, {"hidden_size": 30, "intermediate_size": 16, "num_hidden_layers": 1}],
    ids=["quick_gelu", "gelu, legacy end token", "one layer"],
)
def test_text_tower_equals_transformers(change):
    values = {**TEXT, **change}
    theirs = randomized(transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**values)))
    config = clip.CLIPTextConfig.from_json(values)
    params = params_from_torch(theirs.state_dict(), clip.name_table(config))
    ids = IDS if config.eos_token_id == EOS else np.where(IDS == EOS, 39, IDS)  # legacy: the largest id is the end
    expected = theirs(torch.from_numpy(ids), output_hidden_states=True)
    ours = run(clip.CLIPText(config), params, ids)
    assert difference(ours.penultimate, expected.hidden_states[-2]) < 1e-5
    assert difference(ours.last, expected.last_hidden_state) < 1e-5
    assert difference(ours.pooled, expected.text_embeds) < 1e-5


@pytest.mark.parity
def test_text_tower_without_projection_equals_transformers():
    theirs = randomized(transformers.CLIPTextModel(transformers.CLIPTextConfig(**TEXT)))
    config = clip.CLIPTextConfig.from_json({**TEXT, "architectures": ["CLIPTextModel"]})
    published = {f"text_model.{name}": tensor for name, tensor in theirs.state_dict().items()}
    params = params_from_torch(published, clip.name_table(config))
    expected = theirs(torch.from_numpy(IDS))
    assert difference(run(clip.CLIPText(config), params, IDS).pooled, expected.pooler_output) < 1e-5


@pytest.mark.parity
def test_vision_tower_equals_transformers_with_gradient():
    theirs = randomized(transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**VISION)))
    config = clip.CLIPVisionConfig.from_json(VISION)
    params = params_from_torch(theirs.state_dict(), clip.name_table(config))
    pixels = np.random.default_rng(0).normal(size=(3, 12, 12, 3)).astype(np.float32)
    torch_pixels = torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))).requires_grad_()
    expected = theirs(torch_pixels).image_embeds
    expected.square().sum().backward()
    module = clip.CLIPVision(config)
    assert difference(run(module, params, pixels), expected) < 1e-5
    gradient = jax.jit(jax.grad(lambda x: jnp.square(module.apply({"params": params}, x)).sum()))(pixels)
    assert difference(gradient, torch_pixels.grad.permute(0, 2, 3, 1)) < 1e-5


@pytest.fixture(scope="module")
def both():
    values = {"model_type": "clip", "projection_dim": 20, "text_config": TEXT, "vision_config": VISION}
    theirs = randomized(transformers.CLIPModel(transformers.CLIPConfig(**values)))
    config = clip.CLIPConfig.from_json(values)
    return theirs, config, scalar(params_from_torch(theirs.state_dict(), clip.name_table(config)))


@pytest.mark.parity
def test_scores_equal_transformers_with_parameter_gradients(both):
    theirs, config, params = both
    pixels = np.random.default_rng(0).normal(size=(2, 12, 12, 3)).astype(np.float32)
    expected = theirs(torch.from_numpy(IDS), torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))))
    module = clip.CLIP(config)
    assert difference(run(module, params, IDS, pixels), expected.logits_per_image) < 1e-5
    assert difference(run(module, params, IDS, method="embed_text"), expected.text_embeds) < 1e-5
    assert difference(run(module, params, pixels, method="embed_images"), expected.image_embeds) < 1e-5

    theirs.zero_grad()
    expected.logits_per_image.square().sum().backward()
    table = clip.name_table(config)
    wanted = scalar(params_from_torch({name: p.grad for name, p in theirs.named_parameters()}, table))
    wanted = flatten_dict(wanted, sep="/")
    loss = jax.jit(jax.grad(lambda p: jnp.square(module.apply({"params": p}, IDS, pixels)).sum()))
    for path, gradient in flatten_dict(loss(params), sep="/").items():
        scale = np.abs(wanted[path]).max() if "k_proj/bias" not in path else 1.0  # softmax ignores it: rounding on both sides
        assert np.abs(gradient - wanted[path]).max() < 5e-5 * scale, path


def torch_shapes(params, table):
    """The torch names and shapes that our shapes and name table claim."""
    claimed = {}
    ours = flatten_dict(params, sep="/")
    assert table.keys() == ours.keys()
    axes = {"none": slice(None), "transpose": slice(None, None, -1), "conv": [3, 2, 0, 1]}
    for path, source in table.items():
        shape = np.array(ours[path].shape, int)
        if source.stacked:
            assert shape[0] == len(source.names)
            shape = shape[1:]
        for name in source.names:
            assert name not in claimed
            claimed[name] = tuple(shape[axes[source.transform]])
    return claimed


def meta_shapes(model, config):
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in model(config).state_dict().items()}


@pytest.mark.parity
@pytest.mark.parametrize("values", [L_TEXT, G_TEXT], ids=["CLIP-L", "OpenCLIP bigG"])
@pytest.mark.parametrize("projected", [True, False])
def test_name_table_covers_published_text_encoders(values, projected):
    kind = "CLIPTextModelWithProjection" if projected else "CLIPTextModel"
    config = clip.CLIPTextConfig.from_json({**values, "architectures": [kind]})
    theirs = meta_shapes(getattr(transformers, kind), transformers.CLIPTextConfig(**values))
    if not projected:
        theirs = {f"text_model.{name}": shape for name, shape in theirs.items()}
    params = jax.eval_shape(clip.CLIPText(config).init, jax.random.key(0), jnp.zeros((1, 77), int))["params"]
    assert torch_shapes(params, clip.name_table(config)) == theirs


@pytest.mark.parity
@pytest.mark.parametrize("values", [VIT_L, VIT_H], ids=["ViT-L/14", "ViT-H/14"])
def test_name_table_covers_published_models(values):
    config = clip.CLIPConfig.from_json(values)
    theirs = meta_shapes(transformers.CLIPModel, transformers.CLIPConfig(**values))
    inputs = jnp.zeros((1, 77), int), jnp.zeros((1, 224, 224, 3))
    params = jax.eval_shape(clip.CLIP(config).init, jax.random.key(0), *inputs)["params"]
    assert torch_shapes(params, clip.name_table(config)) == theirs
    assert not set(clip.IGNORED) & theirs.keys()


@pytest.mark.parity
@pytest.mark.parametrize("values", [VIT_L, VIT_H], ids=["ViT-L/14", "ViT-H/14"])
def test_nested_configs_are_read_as_transformers_reads_them(values):
    config, theirs = clip.CLIPConfig.from_json(values), transformers.CLIPConfig(**values)
    for ours, tower in ((config.text, theirs.text_config), (config.vision, theirs.vision_config)):
        for name, value in vars(ours).items():
            assert value == (theirs.projection_dim if name == "projection_dim" else getattr(tower, name)), name


@pytest.fixture(scope="module")
def text():
    config = clip.CLIPTextConfig(**{key: value for key, value in TEXT.items() if key not in ("bos_token_id", "pad_token_id")})
    return config, jax.jit(clip.CLIPText(config).init)(jax.random.key(0), IDS)["params"]


def test_text_after_the_end_token_does_not_reach_the_pooled_output(text):
    config, params = text
    pooled = run(clip.CLIPText(config), params, IDS).pooled
    other = IDS.copy()
    other[0, 5:] = 9
    np.testing.assert_array_equal(run(clip.CLIPText(config), params, other).pooled, pooled)
    other[0, 3] = 9
    assert np.abs(run(clip.CLIPText(config), params, other).pooled - pooled)[0].max() > 1e-4


def test_settings_of_the_scan_change_nothing(text):
    config, params = text

    def gradient(**settings):
        module = clip.CLIPText(config, **settings)
        return jax.jit(jax.grad(lambda p: jnp.square(module.apply({"params": p}, IDS).pooled).sum()))(params)

    expected = gradient()
    for settings in ({"remat": True, "scan_unroll": 99}, {"scan_unroll": 2}):
        for a, b in zip(jax.tree.leaves(gradient(**settings)), jax.tree.leaves(expected)):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_bfloat16_is_close(both):
    _, config, params = both
    pixels = jax.random.normal(jax.random.key(0), (2, 12, 12, 3))
    scores = run(clip.CLIP(config, jnp.bfloat16), params, IDS, pixels)
    assert scores.dtype == jnp.float32
    # scores are cosines times the scale, here 17: what a number format costs is seen in the cosines
    cosines = (scores - run(clip.CLIP(config), params, IDS, pixels)) / np.exp(params["logit_scale"])
    assert 0 < np.abs(cosines).max() < 2 * float(jnp.finfo(jnp.bfloat16).eps)


def test_adapters_are_scanned_with_their_layers(text):
    config, params = text
    a = 0.1 * jax.random.normal(jax.random.key(1), (3, 24, 2))
    b = jax.random.normal(jax.random.key(2), (3, 2, 24))
    adapted = clip.CLIPText(config, lora_scale=2.0)
    ours = adapted.apply({"params": params, "lora": {"layers": {"v_proj": {"a": a, "b": b}}}}, IDS).pooled
    flat = flatten_dict(params)
    kernel = flat["layers", "v_proj", "kernel"] + 2 * jnp.matmul(a, b)
    merged = unflatten_dict({**flat, ("layers", "v_proj", "kernel"): kernel})
    assert difference(ours, run(clip.CLIPText(config), merged, IDS).pooled) < 1e-5
    assert difference(ours, run(clip.CLIPText(config), params, IDS).pooled) > 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"num_attention_heads": 5}, "num_attention_heads 5"),
        ({"rope_theta": 1e4}, "unknown option rope_theta"),
        ({"is_decoder": True}, "is_decoder = True"),
        ({"model_type": "siglip_text_model"}, "siglip_text_model"),
    ],
)
def test_unsupported_configs_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        clip.CLIPTextConfig.from_json({**L_TEXT, **change})
    with pytest.raises(ValueError, match=message):
        clip.CLIPConfig.from_json({**VIT_H, "text_config": {**VIT_H["text_config"], **change}})


def test_wrong_inputs_are_refused(text, both):
    config, params = text
    with pytest.raises(ValueError, match="11 positions"):
        clip.CLIPText(config).apply({"params": params}, np.zeros((1, 12), int))
    with pytest.raises(ValueError, match="integers"):
        clip.CLIPText(config).apply({"params": params}, np.zeros((1, 8)))
    with pytest.raises(ValueError, match=r"\[B, 12, 12, 3\]"):
        clip.CLIP(both[1]).apply({"params": both[2]}, np.zeros((1, 3, 12, 12)), method="embed_images")
    with pytest.raises(ValueError, match="patch_size 5"):
        replace(both[1].vision, patch_size=5)
    out = run(clip.CLIPText(config), params, np.full((1, 4), 40))
    assert np.isnan(out.pooled).all()

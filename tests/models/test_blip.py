"""BLIP's vision tower, image-grounded text encoder and head against transformers in torch; names at full size; refusals."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from densegrpo_jax.models import blip, score_head
from tests.models.convert import params_from_torch
from tests.models.test_clip import difference, meta_shapes, randomized, run, torch_shapes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIDE, LENGTH = 24, 7
VALUES = {
    "architectures": ["BlipForImageTextRetrieval"],
    "model_type": "blip",
    "projection_dim": 9,
    "image_text_hidden_size": 5,
    "text_config": {
        "model_type": "blip_text_model",
        "vocab_size": 40,
        "hidden_size": 18,
        "encoder_hidden_size": 24,
        "intermediate_size": 30,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "max_position_embeddings": 11,
        "label_smoothing": 0.0,
        "hidden_dropout_prob": 0.0,
    },
    "vision_config": {
        "model_type": "blip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": 8,
        "layer_norm_eps": 1e-6,
    },
}
CONFIG = blip.BLIPConfig.from_json(VALUES)
LARGE = {  # ImageReward's
    "model_type": "blip",
    "text_config": {"num_attention_heads": 12, "encoder_hidden_size": 1024},
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 224,
    },
}


class Theirs(torch.nn.Module):
    """transformers' two parts and the head, under the names of our table."""

    def __init__(self, values=VALUES):
        super().__init__()
        config = transformers.BlipConfig(**values)
        self.vision_model = transformers.BlipVisionModel(config.vision_config)
        self.text_encoder = transformers.BlipTextModel(config.text_config, add_pooling_layer=False)
        widths = pairwise([config.text_config.hidden_size, *score_head.WIDTHS])
        dense = [torch.nn.Linear(*pair) for pair in widths]
        self.mlp = torch.nn.Module()
        self.mlp.layers = torch.nn.Sequential(
            dense[0], torch.nn.Dropout(), dense[1], torch.nn.Dropout(), dense[2], torch.nn.Dropout(), dense[3], dense[4]
        )

    def text(self, ids, mask, image):
        return self.text_encoder(ids, attention_mask=mask, encoder_hidden_states=image).last_hidden_state

    def forward(self, ids, mask, pixels):
        image = self.vision_model(pixels).last_hidden_state
        return self.mlp.layers(self.text(ids, mask, image)[:, 0])[:, 0]


@pytest.fixture(scope="module")
def both():
    theirs = randomized(Theirs())
    return theirs, params_from_torch(theirs.state_dict(), blip.name_table(CONFIG))


def inputs():
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, 40, (3, LENGTH)), np.ones((3, LENGTH), int)
    mask[1, 4:], mask[2, 2:] = 0, 0
    return ids, mask, rng.normal(size=(3, SIDE, SIDE, 3)).astype(np.float32)


def channels_first(pixels):
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))


@pytest.mark.parity
def test_parts_equal_transformers(both):
    theirs, params = both
    ids, mask, pixels = inputs()
    image = theirs.vision_model(channels_first(pixels)).last_hidden_state
    assert difference(run(blip.BLIPVision(CONFIG.vision), params["vision_model"], pixels), image) < 1e-5
    expected = theirs.text(torch.from_numpy(ids), torch.from_numpy(mask), image)
    ours = run(blip.BLIPText(CONFIG.text), params["text_encoder"], ids, mask, image.detach().numpy())
    assert difference(ours, expected) < 1e-5


@pytest.mark.parity
def test_scores_equal_torch_with_the_gradient_in_the_image(both):
    theirs, params = both
    ids, mask, pixels = inputs()
    leaf = channels_first(pixels).requires_grad_()
    expected = theirs(torch.from_numpy(ids), torch.from_numpy(mask), leaf)
    expected.square().sum().backward()
    module = blip.BLIPScorer(CONFIG)
    assert difference(run(module, params, ids, mask, pixels), expected) < 1e-5
    gradient = jax.jit(jax.grad(lambda x: jnp.square(module.apply({"params": params}, ids, mask, x)).sum()))(pixels)
    assert difference(gradient, leaf.grad.permute(0, 2, 3, 1)) < 2e-5


@pytest.mark.parity
def test_name_table_covers_the_published_size():
    config = blip.BLIPConfig.from_json(LARGE)
    shapes = (jnp.zeros((1, LENGTH), int), jnp.zeros((1, LENGTH), int), jnp.zeros((1, 224, 224, 3)))
    params = jax.eval_shape(blip.BLIPScorer(config).init, jax.random.key(0), *shapes)["params"]
    assert torch_shapes(params, blip.name_table(config)) == meta_shapes(Theirs, LARGE)


@pytest.mark.parity
def test_configs_are_read_as_transformers_reads_them():
    theirs = transformers.BlipConfig(**LARGE)
    config = blip.BLIPConfig.from_json(theirs.to_dict())
    assert config == blip.BLIPConfig.from_json(LARGE)
    for ours, part in ((config.text, theirs.text_config), (config.vision, theirs.vision_config)):
        for name, value in vars(ours).items():
            assert value == getattr(part, name), name


def test_padding_has_no_say_and_everything_else_has(both):
    _, params = both
    ids, mask, pixels = inputs()
    score = run(blip.BLIPScorer(CONFIG), params, ids, mask, pixels)
    other = np.where(mask == 0, (ids + 1) % 40, ids)
    np.testing.assert_array_equal(run(blip.BLIPScorer(CONFIG), params, other, mask, pixels), score)
    other[2, 1] = (ids[2, 1] + 1) % 40
    changed = run(blip.BLIPScorer(CONFIG), params, other, mask, pixels)
    np.testing.assert_array_equal(changed[:2], score[:2])
    assert np.abs(changed - score)[2] > 1e-4
    pixels[0, -1, -1] += 1.0
    assert (np.abs(run(blip.BLIPScorer(CONFIG), params, ids, mask, pixels) - score) > 1e-5).tolist() == [True, False, False]


def test_bfloat16_is_close(both):
    _, params = both
    scores = run(blip.BLIPScorer(CONFIG, jnp.bfloat16), params, *inputs())
    assert scores.dtype == jnp.float32
    assert 0 < difference(scores, run(blip.BLIPScorer(CONFIG), params, *inputs())) < 0.1


def test_the_head_is_an_affine_map():
    head = score_head.ScoreHead()
    a, b, c = x = jax.random.normal(jax.random.key(0), (3, 10))
    params = jax.jit(head.init)(jax.random.key(1), x)["params"]
    assert flatten_dict(params, sep="/").keys() == score_head.name_table().keys()
    values = run(head, params, jnp.stack([a + b - c, a, b, c]))
    np.testing.assert_allclose(values[0], values[1] + values[2] - values[3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("text_config", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ("text_config", {"is_decoder": False}, "is_decoder = False"),
        ("text_config", {"num_attention_heads": 5}, "num_attention_heads 5"),
        ("text_config", {"encoder_hidden_size": 18}, "encoder_hidden_size 18"),
        ("vision_config", {"patch_size": 7}, "patch_size 7"),
        ("vision_config", {"rope": 1}, "unknown option rope"),
    ],
)
def test_unsupported_configs_are_refused_by_name(part, change, message):
    with pytest.raises(ValueError, match=message):
        blip.BLIPConfig.from_json({**VALUES, part: {**VALUES[part], **change}})
    with pytest.raises(ValueError, match="model_type = 'blip-2'"):
        blip.BLIPConfig.from_json({**VALUES, "model_type": "blip-2"})


def test_wrong_inputs_are_refused(both):
    _, params = both
    ids, mask, pixels = inputs()
    module = blip.BLIPScorer(CONFIG)
    for wrong, message in (
        ((ids, mask, pixels[:, :-1]), r"\[B, 24, 24, 3\]"),
        ((ids, mask[:, :-1], pixels), "mask of their shape"),
        ((ids.astype(np.float32), mask, pixels), "integers"),
        ((np.zeros((3, 12), int), np.ones((3, 12)), pixels), "11 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            module.apply({"params": params}, *wrong)

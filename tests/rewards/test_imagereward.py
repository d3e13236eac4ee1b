"""ImageReward from a folder on disk: its scale, prompts, chunks, gradient, refusals. Parity stands in tests/tools and tests/models."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from densegrpo_jax import rewards
from densegrpo_jax.models import blip
from densegrpo_jax.models.weights import write_params
from densegrpo_jax.rewards import imagereward
from tests.rewards.test_aesthetic import PROCESSOR, random_values
from tests.rewards.test_clip import SIDE, random_images

WORDS = '[PAD] [UNK] [CLS] [SEP] [MASK] a red circle blue star with ring sign hi ##s "'.split()
PROMPTS = ["A red circle", "a blue star with rings", 'sign "HI"']
TEXT = {"vocab_size": len(WORDS) + 2, "hidden_size": 12, "encoder_hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 3, "max_position_embeddings": 40}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE, "patch_size": 5}
VALUES = {"model_type": "blip", "text_config": TEXT, "vision_config": VISION}
CONFIG = blip.BLIPConfig.from_json(VALUES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("imagereward"), np.random.default_rng(0)
    params = jax.tree.map(lambda x: random_values(rng, x.shape), imagereward.shapes(CONFIG))
    write_params(folder, params, blip.name_table(CONFIG), np.float32, "model")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    for name, content in (("config.json", VALUES), ("preprocessor_config.json", PROCESSOR)):
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def scorer(folder):
    return imagereward.load_scorer(folder)


def test_the_score_is_the_head_on_imagerewards_scale(folder, scorer):
    images = random_images(3, 30, 24)
    scores = rewards.score("imagereward", rewards.load(f"imagereward:{folder}"), images, PROMPTS, [{}] * 3)
    ids, mask = imagereward.tokenize(scorer, PROMPTS)
    pixels = imagereward.prepare(scorer.spec.processing, images)
    head = jax.jit(blip.BLIPScorer(CONFIG).apply)({"params": scorer.params}, ids, mask, pixels)
    assert scores.valid.all() and scores.value.std() > 0.01
    np.testing.assert_allclose(scores.value, (np.asarray(head) - 0.16717362830052426) / 1.0333394966054072, rtol=1e-4, atol=1e-4)


def test_prompts_become_berts_tokens_padded_or_cut_to_35(scorer):
    ids, mask = imagereward.tokenize(scorer, [PROMPTS[1], "zebra", "red " * 50])
    assert ids.shape == mask.shape == (3, 35) and ids.dtype == np.int32
    assert [WORDS[i] for i in ids[0, :9]] == ["[CLS]", "a", "blue", "star", "with", "ring", "##s", "[SEP]", "[PAD]"]
    assert [WORDS[i] for i in ids[1, :4]] == ["[CLS]", "[UNK]", "[SEP]", "[PAD]"]
    assert mask.sum(1).tolist() == [8, 3, 35] and WORDS[ids[2, -1]] == "[SEP]"


def test_chunks_devices_and_company_change_nothing(folder):
    images, prompts = random_images(5, 24, 24), [PROMPTS[i % 3] for i in range(5)]
    expected = imagereward.load(folder, chunk=5)(images, prompts, [])
    np.testing.assert_allclose(imagereward.load(folder, chunk=2)(images, prompts, []), expected, atol=1e-5)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    np.testing.assert_allclose(imagereward.load(folder, chunk=8, mesh=mesh)(images, prompts, []), expected, atol=1e-5)
    other = imagereward.load(folder, chunk=5)(images, prompts[1:] + prompts[:1], [])
    assert np.abs(other - expected).min() > 1e-4  # every image's prompt is another now


def test_the_score_can_be_differentiated_in_the_image(scorer):
    rng, texts = np.random.default_rng(0), imagereward.tokenize(scorer, PROMPTS[:1])
    images = rng.uniform(0.25, 0.75, (1, 24, 24, 3)).astype(np.float32)
    value = jax.jit(jax.value_and_grad(lambda images: imagereward.score(scorer.params, scorer.spec, images, texts)[0]))
    gradient, direction = np.asarray(value(images)[1]), rng.normal(size=images.shape).astype(np.float32)
    slope = (value(images + 1e-3 * direction)[0] - value(images - 1e-3 * direction)[0]) / 2e-3
    assert abs(slope) > 0.01
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=3e-2)


@pytest.mark.parametrize("words", [WORDS[:-1], None], ids=["another", "none"])
def test_a_tokenizer_of_another_vocabulary_is_refused(folder, tmp_path, words):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "vocab.txt").unlink()
    if words:
        (copy / "vocab.txt").write_text("\n".join(words) + "\n")
    with pytest.raises(ValueError, match=r"its tokenizer has \d+ tokens; the model embeds 18, 2 of its own"):
        imagereward.load(copy)


def test_wrong_folders_and_options_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="float16: choose"):
        imagereward.load(folder, dtype=jnp.float16)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "config.json").write_text(json.dumps({**VALUES, "text_config": {**TEXT, "num_hidden_layers": 3}}))
    with pytest.raises(ValueError, match=r"missing: text_encoder\.encoder\.layer\.2"):
        imagereward.load(copy)
    (copy / "vocab.txt").unlink()
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="not a readable tokenizer"):
        imagereward.load(copy)

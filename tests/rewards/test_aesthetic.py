"""LAION's aesthetic predictor from a folder on disk: what it computes, chunks, gradient, refusals. Parity stands in tests/tools."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from densegrpo_jax import rewards
from densegrpo_jax.models import clip, score_head
from densegrpo_jax.models.weights import write_params
from densegrpo_jax.rewards import aesthetic
from tests.rewards.test_clip import MEAN, SIDE, STD, random_images

CONFIG = clip.CLIPVisionConfig(16, 24, 12, 2, 2, image_size=SIDE, patch_size=5)
PROCESSOR = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}, "image_mean": MEAN, "image_std": STD}


def random_values(rng, shape):
    """At a scale that hands differences on: no part is near its initial value, and every image and prompt shows in the score."""
    return rng.normal(scale=1.2 * shape[-2] ** -0.5 if len(shape) > 1 else 0.5, size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("aesthetic"), np.random.default_rng(0)
    params = jax.tree.map(lambda x: random_values(rng, x.shape), aesthetic.shapes(CONFIG))
    write_params(folder, params, aesthetic.name_table(CONFIG), np.float32, "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "clip_vision_model", **asdict(CONFIG)}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


@pytest.fixture(scope="module")
def scorer(folder):
    return aesthetic.load_scorer(folder)


def test_the_score_is_the_head_of_the_unit_vector_whatever_the_prompt(folder, scorer):
    spec, params = scorer
    images = (random_images(3, 30, 24) * np.array([0.2, 0.6, 1.0])[:, None, None, None]).astype(np.uint8)
    scores = rewards.score("aesthetic", rewards.load(f"aesthetic:{folder}"), images, ["a", "b", "c"], [{}] * 3)
    prepared = aesthetic.prepare(spec.processing, images)
    vector = np.asarray(clip.CLIPVision(CONFIG).apply({"params": params["vision_model"]}, prepared))
    assert np.abs(np.linalg.norm(vector, axis=1) - 1.0).min() > 0.1
    vector = vector / np.linalg.norm(vector, axis=1, keepdims=True)
    for layer in score_head.LAYERS:
        dense = params["mlp"][f"layers_{layer}"]
        vector = vector @ np.asarray(dense["kernel"]) + np.asarray(dense["bias"])
    assert scores.valid.all() and scores.value.std() > 3e-3
    np.testing.assert_allclose(scores.value, vector[:, 0], atol=1e-5)


def test_chunks_and_devices_change_nothing(folder):
    images, prompts = random_images(5, 24, 24), [""] * 5
    expected = aesthetic.load(folder, chunk=5)(images, prompts, [])
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    np.testing.assert_allclose(aesthetic.load(folder, chunk=2)(images, prompts, []), expected, atol=1e-5)
    np.testing.assert_allclose(aesthetic.load(folder, chunk=8, mesh=mesh)(images, prompts, []), expected, atol=1e-5)


def test_the_score_can_be_differentiated_in_the_image(scorer):
    spec, params = scorer
    rng = np.random.default_rng(0)
    images = rng.uniform(0.25, 0.75, (1, 24, 24, 3)).astype(np.float32)
    value = jax.jit(jax.value_and_grad(lambda images: aesthetic.score(params, spec, images)[0]))
    gradient, direction = np.asarray(value(images)[1]), rng.normal(size=images.shape).astype(np.float32)
    slope = (value(images + 1e-3 * direction)[0] - value(images - 1e-3 * direction)[0]) / 2e-3
    assert abs(slope) > 0.01
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=3e-2)


def test_bfloat16_is_close_and_the_head_stays_float32(folder, scorer):
    spec, params = scorer
    images = random_images(3, 24, 24)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    expected, half = aesthetic.score(params, spec, images), aesthetic.score(low, spec._replace(dtype=jnp.dtype(jnp.bfloat16)), images)
    assert half.dtype == jnp.float32 and 0.0 < np.abs(half - expected).max() < 0.1
    with pytest.raises(ValueError, match="float16: choose"):
        aesthetic.load(folder, dtype=jnp.float16)


def test_a_folder_without_the_head_or_with_another_crop_is_refused(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    path = copy / "preprocessor_config.json"
    path.write_text(json.dumps(PROCESSOR | {"crop_size": SIDE + 1}))
    with pytest.raises(ValueError, match=r"cropped to \(21, 21\)"):
        aesthetic.load(copy)
    path.write_text(json.dumps(PROCESSOR))
    write_params(copy, aesthetic.load_scorer(folder)[1]["vision_model"], clip.name_table(CONFIG), np.float32, "model")
    with pytest.raises(ValueError, match=r"missing: mlp\.layers\.0\.bias"):
        aesthetic.load(copy)
    (copy / "config.json").write_text(json.dumps({**asdict(replace(CONFIG)), "model_type": "clip"}))
    with pytest.raises(ValueError, match="model_type = 'clip'"):
        aesthetic.load(copy)

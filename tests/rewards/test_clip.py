"""CLIP rewards against transformers in torch and its image processor, from a folder on disk; chunks, devices, refusals."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from densegrpo_jax import rewards
from densegrpo_jax.models import clip as towers
from densegrpo_jax.models.weights import write_params
from densegrpo_jax.rewards import clip
from densegrpo_jax.scenes import tokenizers

SIDE, LENGTH = 20, 8
PROMPTS = [
    "a red circle",
    "a blue star with a ring",
    "a red circle",
    'sign "HI"',
    "two small red stars above a large blue ring with a cross",
]
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]


def make_folder(folder: Path) -> Path:
    """A random CLIPModel with tokenizer and image processor, as transformers lays it out."""
    vocabulary = len(tokenizers.clip_vocabulary()[0])
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**tower, "model_type": "clip_text_model", "vocab_size": vocabulary, "max_position_embeddings": LENGTH}
    text |= {"bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1, "pad_token_id": vocabulary - 1}
    vision = {**tower, "model_type": "clip_vision_model", "image_size": SIDE, "patch_size": 5}
    values = {"architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 12, "text_config": text, "vision_config": vision}
    config, rng = towers.CLIPConfig.from_json(values), np.random.default_rng(0)
    params = towers.CLIP(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, SIDE, SIDE, 3)))["params"]
    params = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), params)  # every part shows in the score
    write_params(folder, params, towers.name_table(config), np.float32, "model")
    tokenizers.write_clip_tokenizer(folder)
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    processor = {"image_mean": MEAN, "image_std": STD, "resample": 3, "image_processor_type": "CLIPImageProcessor", **sizes}
    for name, content in (("config.json", values), ("preprocessor_config.json", processor)):
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def scorer(folder):
    return clip.load_scorer(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    """Scores of images with their prompts by transformers, in torch."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    tokenizer, processor = transformers.CLIPTokenizer.from_pretrained(folder), image_processor(folder)

    def score(images, prompts):
        text = tokenizer(prompts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
        pixels = torch.from_numpy(np.stack(processor(list(images)).pixel_values))
        with torch.no_grad():
            return model(**text, pixel_values=pixels).logits_per_image.diagonal().numpy()

    return score


def image_processor(folder):
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return CLIPImageProcessorPil.from_pretrained(folder)


prepare = jax.jit(clip.prepare, static_argnums=0)


def random_images(count, height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def gradient_images(count, height, width):
    """Smooth ramps and hard edges: where ties and overshoots of the filter are common."""
    ramp = np.add.outer(np.arange(height), np.arange(width))[None, :, :, None] * np.array([1, 2, 5])
    ramp = np.broadcast_to(ramp, (count, height, width, 3)).astype(np.uint8)
    return np.where(ramp > 128, ramp, np.uint8(0))


# ---------------------------------------------------------------------------------------------------------------------
# Preparation of images


@pytest.mark.parametrize(
    ("height", "width", "side"),
    [(64, 64, 28), (64, 48, 28), (37, 53, 24), (20, 20, 20), (24, 30, 24), (12, 12, 24), (9, 7, 32), (8, 300, 6), (80, 40, 20)],
)
def test_bytes_are_resized_as_by_pil_bit_by_bit(height, width, side):
    short = min(height, width)
    size = (int(side * width / short), int(side * height / short))
    for images in (random_images(1, height, width), gradient_images(1, height, width)):
        expected = np.asarray(Image.fromarray(images[0]).resize(size, Image.Resampling.BICUBIC))
        plain = clip.ImageProcessing(side, None, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        ours = 255.0 * np.asarray(prepare(plain, images))[0]
        np.testing.assert_array_equal(np.rint(ours), expected)
        floating = 255.0 * np.asarray(prepare(plain, images / np.float32(255.0)))[0]
        # Not rounded: half a level in each of the two passes, the first weighted by a kernel of norm at most 1.25.
        assert np.abs(floating - expected).max() < 0.5 + 1.25 * 0.5 + 1e-3


@pytest.mark.parametrize(("height", "width"), [(SIDE, SIDE), (48, 48), (33, 58), (61, 42), (16, 16), (12, 17)])
def test_images_are_prepared_as_by_the_folders_processor(folder, scorer, height, width):
    images = random_images(3, height, width)
    expected = np.stack(image_processor(folder)(list(images)).pixel_values).transpose(0, 2, 3, 1)
    ours = np.asarray(prepare(scorer.spec.processing, images))
    np.testing.assert_allclose(ours, expected, atol=2e-6)


@pytest.mark.parity
@pytest.mark.parametrize(("height", "width"), [(48, 48), (33, 58), (61, 42), (12, 17), (SIDE, 8), (41, 3)])
def test_framed_images_are_prepared_as_by_hpsv2s_program(height, width):
    torch = pytest.importorskip("torch")
    settings = clip.ImageProcessing(SIDE, None, framed=True)
    images = np.concatenate([random_images(1, height, width), gradient_images(1, height, width)])
    scale = SIDE / max(height, width)
    x = torch.from_numpy(images).movedim(-1, 1) / 255
    x = torch.nn.functional.interpolate(x, (round(height * scale), round(width * scale)), mode="bicubic", antialias=True)
    top, left = (SIDE - x.shape[2]) // 2, (SIDE - x.shape[3]) // 2
    expected = np.zeros((2, SIDE, SIDE, 3), np.float32)
    expected[:, top : top + x.shape[2], left : left + x.shape[3]] = x.movedim(1, -1).numpy()
    expected = (expected - np.float32(settings.image_mean)) / np.float32(settings.image_std)
    for given in (images, images / np.float32(255.0)):
        np.testing.assert_allclose(np.asarray(prepare(settings, given)), expected, atol=5e-6)


def test_old_and_nested_settings_are_read_alike(folder, scorer, tmp_path):
    old = {"size": SIDE, "crop_size": SIDE, "image_mean": MEAN, "image_std": STD, "feature_extractor_type": "CLIPFeatureExtractor"}
    assert clip.ImageProcessing.from_json(old) == scorer.spec.processing
    assert clip.ImageProcessing.from_json({}) == clip.ImageProcessing()
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "preprocessor_config.json").unlink()
    image_processor(folder).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (copy / "processor_config.json").write_text(json.dumps({"processor_class": "CLIPProcessor", "image_processor": saved}))
    assert clip.load_scorer(copy).spec == scorer.spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resample": 2}, "resample = 2"),
        ({"do_normalize": False}, "do_normalize = False"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor"),
        ({"size": {"longest_edge": 20}}, "longest_edge"),
        ({"crop_size": {"height": 24, "width": 20}}, r"cropped to \(24, 20\), but the vision tower takes \(20, 20\)"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(folder, tmp_path, change, message):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    path = copy / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        clip.load_scorer(copy)


def test_images_that_cannot_be_prepared_are_refused():
    settings = clip.ImageProcessing(None, (8, 8))
    with pytest.raises(ValueError, match=r"smaller than the crop \(8, 8\)"):
        clip.prepare(settings, jnp.zeros((1, 9, 7, 3)))
    for images in (jnp.zeros((1, 8, 8, 3), jnp.int32), jnp.zeros((8, 8, 3)), jnp.zeros((1, 8, 8, 4))):
        with pytest.raises(ValueError, match="uint8 or floating"):
            clip.prepare(settings, images)


# ---------------------------------------------------------------------------------------------------------------------
# Scores


@pytest.mark.parity
@pytest.mark.parametrize(("height", "width"), [(SIDE, SIDE), (33, 60), (12, 17)])
def test_scores_equal_transformers(scorer, theirs, height, width):
    images = random_images(len(PROMPTS), height, width)
    expected = theirs(images, PROMPTS)
    assert expected.std() > 0.1
    np.testing.assert_allclose(clip.as_reward(scorer)(images, PROMPTS, []), expected, rtol=2e-5, atol=2e-5)


def test_kinds_differ_in_scale(folder, scorer):
    images, metadata = random_images(2, SIDE, SIDE), [{}, {}]
    logits = clip.as_reward(scorer)(images, PROMPTS[:2], metadata)
    for kind, divisor in (("pickscore_26", 26.0), ("clipscore", 30.0)):
        scores = rewards.score(kind, rewards.load(f"{kind}:{folder}"), images, PROMPTS[:2], metadata)
        assert scores.valid.all()
        np.testing.assert_allclose(scores.value, logits / divisor, rtol=1e-5)
    # HPSv2.1 is the cosine; images of the tower's size are prepared alike.
    cosines = rewards.load(f"hpsv2:{folder}")(images, PROMPTS[:2], metadata)
    np.testing.assert_allclose(cosines, logits / np.exp(float(scorer.params["logit_scale"])), rtol=1e-5)
    assert clip.load_scorer(folder, "hpsv2").spec.processing == clip.ImageProcessing(SIDE, None, tuple(MEAN), tuple(STD), framed=True)


def test_chunks_devices_and_padding_change_nothing(folder, scorer):
    images = random_images(11, 24, 24)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(11)]
    expected = clip.as_reward(scorer, 11)(images, prompts, [])
    assert expected.shape == (11,)
    np.testing.assert_allclose(clip.as_reward(scorer, 3)(images, prompts, []), expected, atol=1e-5)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    reward = clip.load(folder, chunk=8, mesh=mesh)
    np.testing.assert_allclose(reward(images, prompts, []), expected, atol=1e-5)
    sharded = jax.device_put(images[:8], jax.sharding.NamedSharding(mesh, jax.P("data")))
    np.testing.assert_allclose(reward(sharded, prompts[:8], []), expected[:8], atol=1e-5)
    np.testing.assert_allclose(clip.as_reward(scorer)(sharded, prompts[:8], []), expected[:8], atol=1e-5)
    np.testing.assert_allclose(clip.load(folder, chunk=3, mesh=mesh)(images, prompts, []), expected, atol=1e-5)  # 8 at a time
    with pytest.raises(ValueError, match="chunk = 0: must be at least 1"):
        clip.load(folder, chunk=0, mesh=mesh)


def test_one_program_serves_all_calls_and_a_prompt_is_encoded_once(scorer, monkeypatch):
    texts, programs = [], clip._score_chunks._cache_size()
    encode = clip._embed_texts
    monkeypatch.setattr(clip, "_embed_texts", lambda params, spec, ids: texts.append(len(ids)) or encode(params, spec, ids))
    reward = clip.as_reward(scorer, 4)
    for seed, prompts in enumerate((PROMPTS, PROMPTS[::-1], PROMPTS)):
        reward(random_images(5, 26, 26, seed), prompts, [])
    assert texts == [clip.TEXT_BATCH]
    assert clip._score_chunks._cache_size() == programs + 1


def test_many_prompts_are_encoded_in_batches_and_long_ones_are_cut(scorer):
    prompts = [f"a star {n}" for n in range(clip.TEXT_BATCH + 3)]
    together = clip.embed_texts(scorer, prompts)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(together[-1:], clip.embed_texts(scorer, prompts[-1:]), atol=1e-6)
    long = PROMPTS[-1]
    np.testing.assert_array_equal(*clip.embed_texts(scorer, [long, long + " left"]))
    short, other = clip.embed_texts(scorer, ["a star", "a star left"])
    assert np.abs(short - other).max() > 1e-3


def test_the_score_can_be_differentiated_in_the_image(scorer):
    texts, rng = clip.embed_texts(scorer, PROMPTS[:1]), np.random.default_rng(0)
    images = rng.uniform(0.25, 0.75, (1, 30, 90, 3)).astype(np.float32)  # away from 0 and 1, where the resized image is cut off
    value = jax.jit(jax.value_and_grad(lambda images: clip.score(scorer.params, scorer.spec, images, texts)[0]))
    gradient = np.asarray(value(images)[1])
    direction = rng.normal(size=images.shape).astype(np.float32)
    slope = (value(images + 1e-3 * direction)[0] - value(images - 1e-3 * direction)[0]) / 2e-3
    assert abs(slope) > 0.1
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=2e-2)
    # The middle third is cropped: what the filter does not carry there has no say.
    assert (gradient[:, :, :25] == 0.0).all() and (gradient[:, :, 30:60] != 0.0).all()


def test_bfloat16_is_close(folder, scorer):
    images = random_images(5, 24, 24)
    expected = clip.as_reward(scorer)(images, PROMPTS, [])
    bf16 = clip.load_scorer(folder, dtype=jnp.bfloat16)
    half = clip.as_reward(bf16)(images, PROMPTS, [])
    assert bf16.params["text_model"]["token_embedding"]["embedding"].dtype == jnp.bfloat16
    assert bf16.params["logit_scale"] == scorer.params["logit_scale"]  # rounded it would change every score by up to one percent
    assert 0.0 < np.abs(half - expected).max() < 0.05 * np.exp(float(scorer.params["logit_scale"]))


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


def test_wrong_images_are_refused(scorer):
    reward = clip.as_reward(scorer)
    for images in (np.zeros((2, 20, 20, 3), np.float32), np.zeros((3, 20, 20, 3), np.uint8), np.zeros((20, 20, 3), np.uint8)):
        with pytest.raises(ValueError, match=r"expected uint8 images \[2, H, W, 3\]"):
            reward(images, PROMPTS[:2], [])


def test_wrong_options_are_refused(folder):
    with pytest.raises(ValueError, match="kind = 'hps': choose one of pickscore, pickscore_26, clipscore, hpsv2"):
        clip.load(folder, "hps")
    with pytest.raises(ValueError, match="float16: choose"):
        clip.load(folder, dtype=jnp.float16)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["config.json"], "config.json: cannot be read"),
        (["preprocessor_config.json"], "preprocessor_config.json: cannot be read"),
        (["model.safetensors"], "has no .*model.safetensors"),
        (["tokenizer.json", "vocab.json", "merges.txt"], "tokenizer"),
    ],
)
def test_a_folder_that_lacks_files_is_refused(folder, tmp_path, missing, message):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for name in missing:
        (copy / name).unlink()
    with pytest.raises(ValueError, match=message):
        clip.load(copy)


def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    path = copy / "config.json"
    values = json.loads(path.read_text())
    values["text_config"]["eos_token_id"] -= 1
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="ends texts with"):
        clip.load(copy)

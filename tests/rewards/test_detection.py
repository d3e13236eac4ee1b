"""The detectors and the color classifier behind GenEval: small random models of transformers in torch, read from folders."""

import json
import sys

import jax
import numpy as np
import pytest

from densegrpo_jax import rewards
from densegrpo_jax.models import clip as towers
from densegrpo_jax.prompts.geneval import CLASSES, COLORS
from densegrpo_jax.rewards import clip, detection, geneval
from densegrpo_jax.scenes import tokenizers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HEIGHT, WIDTH, SIDE = 50, 40, 20
CAT, DOG = CLASSES.index("cat"), CLASSES.index("dog")
# The labels of published checkpoints: other names for some classes, places without a class.
LABELS = {n: {"couch": "sofa", "tv": "tvmonitor", "computer mouse": "mouse"}.get(name, name) for n, name in enumerate(CLASSES)}
SIZE = {"shortest_edge": 64, "longest_edge": 96}


def images(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, HEIGHT, WIDTH, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def mask2former(tmp_path_factory):
    """A random Mask2Former that is sure of a cat in each of its six masks."""
    from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

    swin = transformers.SwinConfig(
        image_size=64, embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2], window_size=2, out_features=[f"stage{n}" for n in range(1, 5)]
    )
    widths = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 16, "dim_feedforward": 16}
    layers = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 6}
    torch.manual_seed(0)
    model = transformers.Mask2FormerForUniversalSegmentation(
        transformers.Mask2FormerConfig(backbone_config=swin, **widths, **layers, id2label=LABELS)
    )
    with torch.no_grad():
        model.class_predictor.bias[CAT] += 9.0
    folder = tmp_path_factory.mktemp("mask2former")
    model.save_pretrained(folder)
    Mask2FormerImageProcessorPil(size=SIZE, size_divisor=32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def detr(tmp_path_factory):
    """A random DETR that is sure of dogs."""
    from transformers.models.detr.image_processing_pil_detr import DetrImageProcessorPil

    resnet = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, out_features=["stage4"])
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    widths = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 5}
    torch.manual_seed(0)
    backbone = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "backbone_config": resnet}
    model = transformers.DetrForObjectDetection(transformers.DetrConfig(**backbone, **layers, **widths, id2label=LABELS))
    with torch.no_grad():
        model.class_labels_classifier.bias[DOG] += 9.0
    folder = tmp_path_factory.mktemp("detr")
    model.save_pretrained(folder)
    DetrImageProcessorPil(size=SIZE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    """A random CLIP."""
    folder, end = tmp_path_factory.mktemp("clip"), len(tokenizers.clip_vocabulary()[0]) - 1
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**tower, "vocab_size": end + 1, "max_position_embeddings": 24, "bos_token_id": end - 1, "eos_token_id": end}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config=text | {"pad_token_id": end}, vision_config={**tower, "image_size": SIDE, "patch_size": 5}, projection_dim=12
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    tokenizers.write_clip_tokenizer(folder)
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    processor = {"image_processor_type": "CLIPImageProcessor", "resample": 3, **sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def test_masks_and_boxes_lie_in_the_image(mask2former):
    batch = images(3)
    found = detection.load_detector(mask2former, "cpu")(batch)
    assert [len(seen) for seen in found] == [len(found[0])] * 3 and found[0]
    for seen in found:
        for cat in seen:
            assert cat.name == "cat" and geneval.THRESHOLD < cat.score < 1.0
            assert cat.mask.shape == (HEIGHT, WIDTH) and cat.mask.dtype == bool
            left, top, right, bottom = map(int, cat.box)
            inside = cat.mask[top:bottom, left:right]
            assert inside.sum() == cat.mask.sum()  # the box holds the mask
            assert inside[0].any() and inside[-1].any() and inside[:, 0].any() and inside[:, -1].any()  # and no more
    alone = detection.load_detector(mask2former, "cpu")(batch[1:2])[0]
    np.testing.assert_allclose([cat.score for cat in alone], [cat.score for cat in found[1]], rtol=1e-4)


def test_instances_are_those_of_transformers(monkeypatch):
    """At 384 pixels, the size for which transformers' own post-processing is written."""
    monkeypatch.setattr(detection, "QUERIES", 7)  # it takes as many pairs as there are queries, 100 in all published models
    from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

    torch.manual_seed(0)
    blobs = torch.nn.functional.interpolate(torch.randn(1, 7, 6, 6), size=(96, 96), mode="bicubic")[0]
    classes, masks = 3.0 * torch.randn(7, 81), 9.0 * blobs
    classes[2, CAT] = classes[2, DOG] = classes[5, CAT] = 15.0  # one mask of two classes, one sure cat
    classes[4, 80] = 20.0  # nothing
    outputs = transformers.models.mask2former.modeling_mask2former.Mask2FormerForUniversalSegmentationOutput(
        class_queries_logits=classes[None], masks_queries_logits=masks[None]
    )
    process = Mask2FormerImageProcessorPil().post_process_instance_segmentation
    theirs = process(outputs, threshold=geneval.THRESHOLD, return_binary_maps=True)[0]
    ours = detection._instances(torch, classes, masks, dict(enumerate(CLASSES)), (384, 384))
    rows = sorted((CLASSES[info["label_id"]], info["score"], info["id"]) for info in theirs["segments_info"])
    assert len(ours) == len(rows) >= 3
    for (name, score, index), seen in zip(rows, sorted(ours, key=lambda seen: (seen.name, seen.score))):
        assert seen.name == name and seen.score == pytest.approx(score, abs=1e-5)
        np.testing.assert_array_equal(seen.mask, theirs["segmentation"][index].numpy() == 1)


def test_detrs_family_gives_boxes(detr):
    found = detection.load_detector(detr, "cpu")(images(2))
    for seen in found:
        assert len(seen) == 5
        for dog in seen:
            assert dog.name == "dog" and dog.mask is None and dog.score > 0.9
            assert 0 <= dog.box[0] < dog.box[2] <= WIDTH and 0 <= dog.box[1] < dog.box[3] <= HEIGHT


def test_colors_are_those_of_our_own_clip(colors):
    scorer = clip.load_scorer(colors)

    @jax.jit
    def embed(image):
        pixels = clip.prepare(scorer.spec.processing, image[None])
        return towers.CLIP(scorer.spec.config).apply({"params": scorer.params}, pixels, method="embed_images")[0]

    rng = np.random.default_rng(1)
    crops = [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in [(33, 25), (3, 50), (1, 1)] for _ in range(20)]
    names = ["cat", "wine glass"] * (len(crops) // 2)
    expected = []
    for image, name in zip(crops, names):
        phrases = [t.format(color=color, name=name) for color in COLORS for t in detection.TEMPLATES]
        text = clip.embed_texts(scorer, phrases).reshape(len(COLORS), len(detection.TEMPLATES), -1).mean(1)
        text /= np.linalg.norm(text, axis=-1, keepdims=True)
        expected.append(COLORS[int(np.argmax(text @ np.asarray(embed(image))))])
    assert len(set(expected)) > 2
    assert detection.load_classifier(colors, "cpu")(crops, names) == expected


def test_the_whole_reward_runs_and_a_stranger_to_colors_is_refused(mask2former, colors):
    reward = geneval.load("dense_repaired", mask2former, colors, "cpu", batch=2, check_colors=False)
    requests = [{"tag": "colors", "include": [{"class": name, "count": 1, "color": "red"}]} for name in ("cat", "dog", "cat")]
    scores = rewards.score("geneval", reward, images(3), ["p"] * 3, requests)
    assert scores.valid.all() and scores.value[1] == 0.0
    assert reward.known.images.dtype == np.uint8
    with pytest.raises(ValueError, match="takes plain red, green, blue for"):
        geneval.load("dense_repaired", mask2former, colors, "cpu")


def test_labels_must_be_cocos():
    assert detection.class_names(LABELS) == dict(enumerate(CLASSES))
    official = {0: "person", 1: "N/A", **{n + 2: name for n, name in enumerate(CLASSES[1:])}}
    assert set(detection.class_names(official).values()) == set(CLASSES)
    with pytest.raises(ValueError, match=r"1 have no label \(couch\)"):
        detection.class_names({n: name for n, name in LABELS.items() if name != "sofa"})
    with pytest.raises(ValueError, match=r"1 have several \(couch\)"):
        detection.class_names({**LABELS, 80: "couch"})


def test_what_cannot_be_read_is_named(mask2former, colors, tmp_path, monkeypatch):
    for load in (detection.load_detector, detection.load_classifier):
        with pytest.raises(ValueError, match="AutoConfig cannot be read"):
            load(tmp_path)
    with pytest.raises(ValueError, match="is a 'mask2former', not a CLIP"):
        detection.load_classifier(mask2former)
    with pytest.raises(ValueError, match="80 have no label"):
        detection.load_detector(colors)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"pip install \"densegrpo_jax\[server\]\""):
        detection.load_detector(mask2former)

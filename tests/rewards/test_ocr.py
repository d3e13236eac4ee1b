"""The OCR rule by table, failures of the engine, and the real engine on drawn words and on a page."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from densegrpo_jax import rewards
from densegrpo_jax.rewards import ocr
from densegrpo_jax.scenes import world

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('a sign that reads "TEA"', "TEA"),
        ("a sign that reads “TEA TIME”", "TEA TIME"),
        ('a sign "ONE" above a sign "TWO"', "ONE"),  # the first counts
        ('a sign "ONE" above a sign “TWO”', "ONE"),
        ('a sign “ONE” above a sign "TWO"', "ONE"),
        ('a café with "CRÈME BRÛLÉE" in its window', "CRÈME BRÛLÉE"),
        ('“she said "no" twice”', 'she said "no" twice'),
        ("no quotes at all", None),
        ("the dog's bone and the cat's", None),  # apostrophes are not quotes
        ('an inch mark, 5" wide', None),
        ('an empty "" sign', None),
        ('a blank "  " sign, then "TEA"', None),
        ("", None),
        ('a page that says "TEA\nTIME"', "TEA\nTIME"),
        ('a sign in Japanese: "日本茶"', "日本茶"),
        ("a sign 'TEA'", None),  # single quotes are apostrophes
        ("ein Schild „TEE“, un panneau «THÉ»", None),  # other languages' quotes are not looked for
        ('"TEA” and then nothing', None),  # a straight quote is not closed by a curly one
    ],
)
def test_targets_of_prompts(prompt, target):
    assert ocr.target_text(prompt) == target


@pytest.mark.parametrize(
    ("recognised", "target", "reward"),
    [
        ("TEA", "TEA", 1.0),
        ("t e a", "TEA", 1.0),
        ("TEA TIME", "TEA", 1.0),  # a superset
        ("GREENTEAS", "TEA", 1.0),
        ("", "TEA", 0.0),
        ("TEN", "TEA", 2 / 3),
        ("TE", "TEA", 2 / 3),
        ("ETA", "TEA", 1 / 3),
        ("Z00", "ZOO", 1 / 3),  # digits are not letters
        ("something else altogether", "TEA", 0.0),  # the distance is at most the target's length
        ("Crème Brûlée", "CRÈME BRÛLÉE", 1.0),
        ("Creme Brulee", "CRÈME BRÛLÉE", 8 / 11),
        ("日本茶", "日本", 1.0),
        ("HELLO\nWORLD", "Hello World", 1.0),
        ("TEA", "TEA\nTIME", 3 / 7),
        ("WORLDHELLO", "Hello World", 0.2),  # lines in another order hardly count
        ("ＴＥＡ", "TEA", 0.0),  # nor wide letters
    ],
)
def test_rewards_of_texts(recognised, target, reward):
    assert ocr.ocr_reward(recognised, target) == pytest.approx(reward, abs=1e-12)


def test_a_blank_target_is_refused():
    with pytest.raises(ValueError, match="blank"):
        ocr.ocr_reward("anything", " ")


def test_failures_are_masked_and_counted_never_zeros(caplog):
    def read(image):
        if image[0, 0, 0] == 1:
            raise RuntimeError("the engine broke")
        return "TEA" if image[0, 0, 0] == 2 else ""

    images = np.zeros((4, 8, 8, 3), np.uint8)
    images[:, 0, 0, 0] = [1, 2, 3, 2]
    prompts = ['"TEA"', '"TEA"', '"TEA"', "no quotes"]
    with caplog.at_level(logging.WARNING):
        scores = rewards.score("words", ocr.as_reward(read, workers=2), images, prompts, [{}] * 4)
    np.testing.assert_array_equal(scores.value, [0.0, 1.0, 0.0, 0.0])
    np.testing.assert_array_equal(scores.valid, [False, True, True, False])
    assert "failed on 1 of 4 images" in caplog.text and "the engine broke" in caplog.text
    assert "1 of 4 prompts quote no text" in caplog.text


def test_wrong_images_are_refused():
    for images in (np.zeros((2, 8, 8, 3), np.float32), np.zeros((1, 8, 8, 3), np.uint8)):
        with pytest.raises(ValueError, match=r"expected uint8 images \[2, H, W, 3\]"):
            ocr.as_reward(lambda image: "")(images, ["a", "b"], [{}, {}])


@pytest.mark.parametrize("detect", [False, True])
def test_the_engine_is_called_with_every_switch_and_in_its_channel_order(monkeypatch, detect):
    calls = []

    class Engine:
        def __init__(self, params):
            self.params = params

        def __call__(self, image, **switches):
            calls.append((image, switches))
            return SimpleNamespace(txts=("GOOD", "noise", "DAY"), scores=(0.9, 0.0, 0.1))

    monkeypatch.setitem(sys.modules, "rapidocr", SimpleNamespace(RapidOCR=Engine))
    read = ocr.load_engine(detect)
    loaded = [switches["use_det"] for _, switches in calls]
    assert set(loaded) == {False, detect}  # every network has run once
    image = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    assert read(image) == "GOODDAY"  # lines of no confidence are dropped
    np.testing.assert_array_equal(calls[-1][0], image[:, :, [2, 1, 0]])
    assert calls[-1][1] == {"use_det": detect, "use_cls": False, "use_rec": True}


def test_a_missing_engine_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(ValueError, match=r"pip install \"densegrpo_jax\[ocr\]\""):
        rewards.load("words")


# ---------------------------------------------------------------------------------------------------------------------
# The real engine


@pytest.fixture(scope="module")
def words():
    pytest.importorskip("rapidocr", reason="the extra `ocr` is not installed")
    pytest.importorskip("onnxruntime", reason="the extra `ocr` is not installed")
    return rewards.load("words")


def test_drawn_words_are_read(words):
    scenes = [world.sample_scene((0, n), "train", "word") for n in range(24)]
    requests = [world.metadata(scene, (0, n)) for n, scene in enumerate(scenes)]
    images, prompts = world.draw_batch(scenes), [request["prompt"] for request in requests]
    right = rewards.score("words", words, images, prompts, requests)
    assert right.valid.all()
    assert (right.value == 1.0).mean() >= 0.85 and right.value.mean() >= 0.95
    wrong = rewards.score("words", words, np.roll(images, 1, axis=0), prompts, requests)
    assert wrong.value.mean() < 0.4
    assert rewards.score("words", words, np.full_like(images, 246), prompts, requests).value.max() == 0.0
    # Threads share the engine: the answers are those of one.
    alone = rewards.score("words", ocr.load(detect=False, workers=1), images, prompts, requests)
    np.testing.assert_array_equal(alone.value, right.value)


@pytest.mark.slow
def test_lines_of_a_page_are_found_and_read_also_slanted(words):
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size=48)
    page = Image.new("RGB", (512, 512), "white")
    for line, y in (("GOOD MORNING", 150), ("WORLD", 280)):
        ImageDraw.Draw(page).text((60, y), line, fill=(30, 60, 160), font=font)
    slanted = page.rotate(12, resample=Image.Resampling.BICUBIC, fillcolor="white")
    images = np.stack([np.asarray(image) for image in (page, slanted, Image.new("RGB", (512, 512), "white"))])
    scores = rewards.score("ocr", rewards.load("ocr"), images, ['a poster "Good morning world"'] * 3, [{}] * 3)
    np.testing.assert_array_equal(scores.value, [1.0, 1.0, 0.0])
    assert scores.valid.all()


@pytest.mark.slow
def test_rotated_words_are_found_up_to_half_a_right_angle():
    sys.path.insert(0, str(BENCHMARKS))
    import ocr as benchmark

    words, angles = ["LANTERN", "Meadow", "violin"], (5, 20, 45, 90, 180)
    images = np.stack([benchmark.draw(word, 256, angle=angle) for angle in angles for word in words])
    prompts = [f'a sign "{word}"' for _ in angles for word in words]
    scores = rewards.score("ocr", rewards.load("ocr"), images, prompts, [{}] * len(prompts))
    assert scores.valid.all()
    means = dict(zip(angles, scores.value.reshape(len(angles), -1).mean(1)))
    assert min(means[5], means[20], means[45]) == 1.0
    assert max(means[90], means[180]) < 1.0  # no classifier of orientation, as in Flow-GRPO


@pytest.mark.slow
def test_the_benchmark_of_both_ways_of_reading(tmp_path):
    pytest.importorskip("rapidocr", reason="the extra `ocr` is not installed")
    script = [sys.executable, str(BENCHMARKS / "ocr.py"), "--quick", "--json", str(tmp_path / "ocr.json")]
    subprocess.run(script, check=True, capture_output=True)
    quick, quoted = (json.loads(path.read_text()) for path in (tmp_path / "ocr.json", BENCHMARKS.parent / "docs" / "ocr.json"))
    assert quick["kinds"].keys() == quoted["kinds"].keys()
    for row in quick["kinds"].values():
        assert row["line"]["ms"] < row["page"]["ms"] / 5


def test_the_page_quotes_the_committed_measurement():
    page = (BENCHMARKS.parent / "docs" / "rewards.md").read_text()
    for kind, row in json.loads((BENCHMARKS.parent / "docs" / "ocr.json").read_text())["kinds"].items():
        cells = [f"{part['reward']:.2f} | {part['right']:.2f} | {part['ms']:.0f}" for part in row.values()]
        assert f"| {kind} | {' | '.join(cells)} |" in page

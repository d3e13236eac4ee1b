"""GenEval's arithmetic on hand-made boxes, masks and colors: a table of images for each kind of request, edges, and what always holds."""

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax import rewards
from densegrpo_jax.prompts import geneval as requests_of
from densegrpo_jax.rewards import geneval
from densegrpo_jax.rewards.base import Scores
from densegrpo_jax.rewards.geneval import Detection

LEFT, RIGHT, TOP, BOTTOM = (0, 40, 20, 60), (80, 40, 100, 60), (40, 0, 60, 20), (40, 80, 60, 100)
FAR = (200, 40, 220, 60)  # on the right of RIGHT


def things(name, *boxes, score=0.95):
    return [Detection(name, score - 0.001 * n, box) for n, box in enumerate(boxes)]


def clause(name, count=1, **more):
    return {"class": name, "count": count, **more}


def request(tag, *include, exclude=()):
    return {"tag": tag, "include": list(include), **({"exclude": list(exclude)} if exclude else {}), "prompt": "p"}


SINGLE = request("single_object", clause("cat"))
TWO = request("two_object", clause("cat"), clause("dog"))
THREE = request("counting", clause("cat", 3), exclude=[clause("cat", 4)])
RED = request("colors", clause("cat", color="red"))
PLACE = request("position", clause("dog"), clause("cat", position=["left of", 0]))
COLORS = request("color_attr", clause("cat", color="red"), clause("dog", color="blue"))
BOTH = request("position", clause("dog", color="red"), clause("cat", 2, color="blue", position=["left of", 0]))
ABSENT = request("single_object", clause("cat"), exclude=[clause("dog")])
DOGS = request("position", clause("dog", 2), clause("cat", 2, position=["above", 0]))

CATS = [LEFT, RIGHT, TOP, BOTTOM, (0, 0, 9, 9), (90, 90, 99, 99)]


def cats(n):
    return things("cat", *CATS[:n])


def pair(cat, dog):
    return things("cat", cat) + things("dog", dog)


# request, detections, colors of the classes in question -> official, strict, dense_published, dense_repaired
TABLE = {
    "single: there": (SINGLE, cats(1), {}, (1, 1, 1, 1)),
    "single: missing": (SINGLE, things("dog", LEFT), {}, (0, 0, 0, 0)),
    "single: one too many": (SINGLE, cats(2), {}, (1, 0, 0, 0)),
    "single: two too many": (SINGLE, cats(3), {}, (1, 0, -1, 0)),
    "single: other things do not matter": (SINGLE, cats(1) + things("dog", LEFT, RIGHT), {}, (1, 1, 1, 1)),
    "two: both": (TWO, pair(LEFT, RIGHT), {}, (1, 1, 1, 1)),
    "two: one of them": (TWO, cats(1), {}, (0, 0, 1 / 2, 1 / 2)),
    "two: three of one": (TWO, cats(3), {}, (0, 0, (-1 + 0) / 2, 0)),
    "counting: three": (THREE, cats(3), {}, (1, 1, 1, 1)),
    "counting: two": (THREE, cats(2), {}, (0, 0, 2 / 3, 2 / 3)),
    "counting: four, which is excluded": (THREE, cats(4), {}, (0, 0, 2 / 3, 2 / 3)),
    "counting: none": (THREE, [], {}, (0, 0, 0, 0)),
    "color: right": (RED, cats(1), {"cat": ["red"]}, (1, 1, 1, 1)),
    "color: wrong": (RED, cats(1), {"cat": ["blue"]}, (0, 0, 1 / 2, 1 / 2)),
    "color: two cats, the surer one is red": (RED, cats(2), {"cat": ["red"]}, (1, 0, 0, 0)),
    "color: two cats, the surer one is not": (RED, cats(2), {"cat": ["blue"]}, (0, 0, 0, 0)),
    "color: no cat": (RED, [], {}, (0, 0, 0, 0)),
    "place: right": (PLACE, pair(LEFT, RIGHT), {}, (1, 1, 1, 1)),
    "place: wrong, which costs half": (PLACE, pair(RIGHT, LEFT), {}, (0, 0, 3 / 4, 2 / 3)),
    "place: no target": (PLACE, cats(1), {}, (0, 0, (0 + 1 + 0) / 3, 1 / 3)),
    "place: two dogs, the surer one is right": (PLACE, cats(1) + things("dog", RIGHT, LEFT), {}, (1, 0, 1 / 3, 1 / 3)),
    "place: two dogs, the surer one is not": (PLACE, cats(1) + things("dog", LEFT, RIGHT), {}, (0, 0, 1 / 3, 1 / 3)),
    "place: two cats, the surer one is right": (PLACE, things("cat", LEFT, FAR) + things("dog", RIGHT), {}, (1, 0, 1 / 3, 1 / 3)),
    "colors: right": (COLORS, pair(LEFT, RIGHT), {"cat": ["red"], "dog": ["blue"]}, (1, 1, 1, 1)),
    "colors: swapped": (COLORS, pair(LEFT, RIGHT), {"cat": ["blue"], "dog": ["red"]}, (0, 0, 1 / 2, 1 / 2)),
    "colors: one wrong": (COLORS, pair(LEFT, RIGHT), {"cat": ["red"], "dog": ["red"]}, (0, 0, 3 / 4, 3 / 4)),
    "colors: one missing": (COLORS, cats(1), {"cat": ["red"]}, (0, 0, 1 / 2, 1 / 2)),
    # What GenEval's own prompts never ask for: there the two dense scores differ in their terms.
    "both: all right": (BOTH, things("cat", LEFT, TOP) + things("dog", RIGHT), {"dog": ["red"], "cat": ["blue"] * 2}, (1, 1, 1, 1)),
    "both: one cat red, the place is not judged": (
        BOTH,
        things("cat", LEFT, TOP) + things("dog", RIGHT),
        {"dog": ["red"], "cat": ["blue", "red"]},
        (0, 0, (1 + 1 + 1 + 1 / 2) / 4, (1 + 1 + 1 + 1 / 2 + 1) / 5),
    ),
    "both: the dog is blue, so there is no target": (
        BOTH,
        things("cat", LEFT, TOP) + things("dog", RIGHT),
        {"dog": ["blue"], "cat": ["blue"] * 2},
        (0, 0, (1 + 0 + 1 + 1 + 0) / 5, (1 + 0 + 1 + 1 + 1) / 5),
    ),
    "both: one cat too few": (BOTH, pair(LEFT, RIGHT), {"dog": ["red"]}, (0, 0, (1 + 1 + 1 / 2 + 0) / 4, (1 + 1 + 1 / 2) / 5)),
    "absent: alone": (ABSENT, cats(1), {}, (1, 1, 1, 1)),
    "absent: with a dog": (ABSENT, pair(LEFT, RIGHT), {}, (0, 0, 1, 1 / 2)),
    "pairs: three of four above": (
        DOGS,
        things("dog", BOTTOM, (40, -5, 60, 15)) + things("cat", TOP, (40, -40, 60, -20)),
        {},
        (0, 0, (1 + 1 + 0 + 1) / 4, (1 + 1 + 3 / 4) / 3),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_scores_of_hand_made_images(case):
    asked, detections, colors, expected = TABLE[case]
    requests_of.check_request(asked)
    found = geneval.keep(detections, asked["tag"])
    assert {name for name in colors} == {detection.name for detection in geneval.to_color(found, asked)}
    scores = [geneval.evaluate(found, colors, asked, mode) for mode in geneval.MODES]
    np.testing.assert_allclose(scores, expected, atol=1e-12)


def test_what_is_sure_enough_counts_and_the_surest_come_first():
    scores = [0.2, 0.3, 0.31, 0.9, 0.91, 0.5]
    detections = [Detection("cat", score, LEFT) for score in scores]
    assert [detection.score for detection in geneval.keep(detections, "colors")["cat"]] == [0.91, 0.9, 0.5, 0.31]
    assert [detection.score for detection in geneval.keep(detections, "counting")["cat"]] == [0.91]
    assert geneval.keep(detections[:2], "colors") == {}
    many = things("dog", *[LEFT] * 30) + things("cat", *[RIGHT] * 3)
    assert {name: len(objects) for name, objects in geneval.keep(many, "counting").items()} == {"dog": 16, "cat": 3}
    assert [detection.score for detection in geneval.keep(many, "counting")["dog"]] == sorted([d.score for d in many[:16]], reverse=True)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (LEFT, RIGHT, {"left of"}),
        (RIGHT, LEFT, {"right of"}),
        (TOP, BOTTOM, {"above"}),
        (BOTTOM, TOP, {"below"}),
        ((0, 0, 10, 10), (90, 90, 100, 100), {"left of", "above"}),  # both, at 45 degrees
        ((0, 0, 100, 100), (0, 0, 100, 100), set()),  # the same place
        ((0, 0, 100, 100), (20, 0, 120, 100), set()),  # 20 of offset is what the margin of two sizes takes
        ((0, 0, 100, 100), (21, 0, 121, 100), set()),  # 1 beyond is less than half of 21
        ((0, 0, 100, 100), (40, 0, 140, 100), set()),  # exactly half is not more than half
        ((0, 0, 100, 100), (41, 0, 141, 100), {"left of"}),
        ((0, 0, 10, 10), (100, 40, 110, 50), {"left of"}),  # far more aside than above
    ],
)
def test_relations_of_boxes(a, b, expected):
    assert geneval.relations(a, b) == expected


boxes = st.tuples(*[st.integers(0, 60)] * 2, *[st.integers(1, 40)] * 2).map(lambda b: (b[0], b[1], b[0] + b[2], b[1] + b[3]))
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


@given(boxes, boxes)
def test_relations_are_antisymmetric_and_turn_with_the_image(a, b):
    seen = geneval.relations(a, b)
    assert geneval.relations(b, a) == {OPPOSITE[relation] for relation in seen}
    assert not any(OPPOSITE[relation] in seen for relation in seen)
    transposed = geneval.relations(*((box[1], box[0], box[3], box[2]) for box in (a, b)))
    assert transposed == {{"left of": "above", "above": "left of", "right of": "below", "below": "right of"}[r] for r in seen}
    assert geneval.relations(*(tuple(7 * edge + 5 for edge in box) for box in (a, b))) == seen  # whatever size and place


@st.composite
def scenes(draw):
    names = draw(st.lists(st.sampled_from(["cat", "dog", "cup"]), min_size=1, max_size=3, unique=True))
    include = []
    for n, name in enumerate(names):
        more = {"color": draw(st.sampled_from(["red", "blue"]))} if draw(st.booleans()) else {}
        if n and draw(st.booleans()):
            more["position"] = [draw(st.sampled_from(requests_of.RELATIONS)), draw(st.integers(0, n - 1))]
        include.append(clause(name, draw(st.integers(1, 2)), **more))
    exclude = [clause(draw(st.sampled_from(["cat", "dog", "car"])), draw(st.integers(1, 3)))] if draw(st.booleans()) else []
    found = geneval.keep([d for name in ("cat", "dog", "cup", "car") for d in things(name, *draw(st.lists(boxes, max_size=3)))], "colors")
    asked = request("colors", *include, exclude=exclude)
    colors = {}
    for detection in geneval.to_color(found, asked):
        colors.setdefault(detection.name, []).append(draw(st.sampled_from(["red", "blue"])))
    return found, colors, asked


@given(scenes())
def test_the_four_scores_agree_on_what_is_right(scene):
    official, strict, published, repaired = (geneval.evaluate(*scene, mode) for mode in geneval.MODES)
    assert official in (0.0, 1.0) and strict in (0.0, 1.0) and official >= strict
    assert 0.0 <= repaired <= 1.0 and published <= 1.0
    assert (repaired == 1.0) == (strict == 1.0)
    if not scene[2].get("exclude"):  # the published arithmetic does not look at it
        assert (published == 1.0) == (strict == 1.0)
    found, colors, asked = scene
    assert geneval.evaluate({**found, "tie": things("tie", LEFT)}, colors, asked, "dense_repaired") == repaired


def test_an_object_is_cut_out_along_its_mask():
    image = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    np.testing.assert_array_equal(geneval.crop(image, Detection("cat", 1.0, (2.4, 1.6, 5.6, 4.4))), image[2:4, 2:6])
    mask = np.zeros((6, 8), bool)
    mask[2, 3] = True
    seen = geneval.crop(image, Detection("cat", 1.0, (2, 2, 5, 4), mask))
    np.testing.assert_array_equal(seen[0, 1], image[2, 3])
    assert seen.shape == (2, 3, 3) and (seen == 0x99).sum() >= 15
    for box in [(-5, -5, 3, 2), (7.8, 5.8, 30, 30), (3, 3, 3, 3), (20, 20, 30, 30)]:  # over the edge, empty, outside
        assert geneval.crop(image, Detection("cat", 1.0, box)).size > 0
    with pytest.raises(ValueError, match=r"the mask of 'cat' is \(8, 6\), the image \(6, 8\)"):
        geneval.crop(image, Detection("cat", 1.0, (0, 0, 2, 2), mask.T))


def test_means_of_tags_and_the_overall_mean_of_these():
    tags = ["colors", "colors", "colors", "counting", "position"]
    scores = Scores(np.array([1.0, 0.0, 0.0, 1.0, 0.0]), np.array([True, True, False, True, False]))
    means = geneval.by_tag(scores, [{"tag": tag} for tag in tags])
    assert list(means) == ["counting", "colors", "position", "overall"]
    assert means["colors"] == 0.5 and means["counting"] == 1.0 and np.isnan(means["position"]) and np.isnan(means["overall"])
    assert geneval.by_tag(scores, [{"tag": tag} for tag in [*tags[:4], "counting"]])["overall"] == 0.75


# ---------------------------------------------------------------------------------------------------------------------
# The reward


def detect(images):
    """A cat where there is red, a dog where there is blue; it cannot stand black."""
    found = []
    for image in images:
        if not image.any():
            raise RuntimeError("out of memory")
        found.append([])
        for name, channel in (("cat", 0), ("dog", 2)):
            if (image[..., channel] > 200).any():
                rows, columns = np.nonzero(image[..., channel] > 200)
                found[-1].append(Detection(name, 0.99, (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)))
    return found


class Classify:
    def __init__(self):
        self.calls = []

    def __call__(self, crops, names):
        self.calls.append(names)
        return ["red" if crop[..., 0].mean() > 200 else "blue" for crop in crops]


def draw_spot(image, column, color):
    image[6:10, column : column + 4] = color


def test_the_reward_scores_batches_and_masks_what_failed(caplog):
    images = np.full((5, 16, 16, 3), 90, np.uint8)
    draw_spot(images[0], 1, (255, 0, 0)), draw_spot(images[0], 11, (0, 0, 255))
    draw_spot(images[1], 11, (255, 0, 0)), draw_spot(images[1], 1, (0, 0, 255))
    draw_spot(images[2], 3, (255, 0, 0))
    images[3] = 0
    draw_spot(images[4], 3, (0, 0, 255))
    asked, classify = [COLORS, PLACE, COLORS, SINGLE, RED], Classify()
    with caplog.at_level(logging.WARNING):
        scores = rewards.score("geneval", geneval.as_reward(detect, classify, "dense_published", batch=1), images, ["p"] * 5, asked)
    np.testing.assert_allclose(scores.value, [1.0, 0.75, 0.5, 0.0, 0.0])
    np.testing.assert_array_equal(scores.valid, [True, True, True, False, True])
    assert "failed on 1 of 5 images" in caplog.text and "out of memory" in caplog.text
    assert classify.calls == [["cat", "dog"], ["cat"]]  # only what is there and asked for
    whole = rewards.score("geneval", geneval.as_reward(detect, Classify(), "dense_published", batch=3), images, ["p"] * 5, asked)
    np.testing.assert_array_equal(whole.valid, [True, True, True, False, False])  # a batch fails together
    np.testing.assert_array_equal(whole.value[:3], scores.value[:3])


def test_wrong_questions_are_refused():
    reward = geneval.as_reward(detect, Classify(), "strict")
    images = np.full((1, 8, 8, 3), 9, np.uint8)
    for metadata, reason in [({}, r"that of image 0 \('p'\) is wrong: \"include\""), ({**SINGLE, "tag": "word"}, "tag 'word'")]:
        with pytest.raises(ValueError, match=reason):
            reward(images, ["p"], [metadata])
    with pytest.raises(ValueError, match=r"expected uint8 images \[1, H, W, 3\]"):
        reward(images.astype(np.float32), ["p"], [SINGLE])
    for mode in ("dense", ""):
        with pytest.raises(ValueError, match="choose one of official, strict, dense_published, dense_repaired"):
            geneval.as_reward(detect, Classify(), mode)
        with pytest.raises(ValueError, match="choose one of"):
            geneval.evaluate({}, {}, SINGLE, mode)
    with pytest.raises(ValueError, match=r"1 objects of class 'cat' need a color, got \[\]"):
        geneval.evaluate(geneval.keep(cats(1), "colors"), {}, RED, "strict")
    with pytest.raises(ValueError, match="batch = 0"):
        geneval.as_reward(detect, Classify(), "strict", batch=0)


def test_the_servers_known_photograph_is_what_it_says():
    known = geneval.known_photograph()
    assert known.images.dtype == np.uint8 and known.images.shape == (2, 600, 512, 3)
    person = [*things("person", (0, 0, 500, 600)), *things("person", (0, 0, 50, 60), score=0.5), *things("tie", (200, 400, 250, 500))]
    for mode in geneval.MODES:
        scores = geneval.as_reward(lambda images: [person] * len(images), Classify(), mode)(known.images, known.prompts, known.metadata)[0]
        np.testing.assert_array_equal(scores, known.low)


def test_names_of_the_reward_lead_to_the_server_and_there_to_the_models(monkeypatch):
    with pytest.raises(ValueError, match=r"serve-rewards --reward geneval_strict:a`, and here geneval_strict@http"):
        rewards.load("geneval_strict:a")
    calls = []
    monkeypatch.setattr(geneval, "load", lambda *args, **models: calls.append((args, models)))
    for name in ("geneval", "geneval_repaired:someone/detr", "geneval_official::clip", "geneval_strict:d:c"):
        rewards.load_served(name)
    expected = [("dense_published", {}), ("dense_repaired", {"detector": "someone/detr"}), ("official", {"clip": "clip"})]
    assert calls == [((mode,), models) for mode, models in [*expected, ("strict", {"detector": "d", "clip": "c"})]]
    assert set(rewards.SERVED.values()) == set(geneval.MODES)
    with pytest.raises(ValueError, match="write geneval:DETECTOR:CLIP"):
        rewards.load_served("geneval:a:b:c")
    assert rewards.load_served("toy_spot")

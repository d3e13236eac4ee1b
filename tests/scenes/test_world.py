"""The world: equal seeds give equal pictures, captions say what is drawn, splits never meet."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax.scenes import glyphs, world


@given(st.integers(0, 10_000), st.sampled_from(world.TAGS), st.sampled_from(world.SPLITS))
def test_a_scene_is_its_seed(seed, tag, split):
    scene = world.sample_scene(seed, split, tag)
    assert scene == world.sample_scene(seed, split, tag)
    assert world.metadata(scene, 1) == world.metadata(scene, 1)
    np.testing.assert_array_equal(world.draw(scene), world.draw(scene))


@given(st.integers(0, 10_000), st.sampled_from(world.TAGS), st.sampled_from(world.SPLITS))
def test_what_is_asked_is_what_is_placed(seed, tag, split):
    scene = world.sample_scene(seed, split, tag)
    assert scene.tag == tag
    assert world.split_of(tag, [{k: v for k, v in c.items() if tag != "word" or k != "color"} for c in scene.include]) == split
    if tag == "word":
        assert scene.word == scene.include[0]["text"] and not scene.items
        assert scene.include[0].get("color", scene.word_color) == scene.word_color
        return
    assert len(scene.items) == sum(clause["count"] for clause in scene.include) <= 4
    for clause in scene.include:
        fitting = [item for item in scene.items if item.shape == clause["class"]]
        assert len(fitting) == clause["count"]
        assert all(clause.get("color", item.color) == item.color and clause.get("size", item.size) == item.size for item in fitting)
        if "position" in clause:
            other = next(item for item in scene.items if item.shape == scene.include[clause["position"][1]]["class"])
            dx, dy = world.RELATIONS[clause["position"][0]]
            assert (fitting[0].x - other.x) * dx + (fitting[0].y - other.y) * dy > 8


@given(st.integers(0, 10_000))
def test_items_do_not_touch_and_stay_inside(seed):
    scene = world.sample_scene(seed)
    ink = [np.abs(world.draw(world.Scene("", (), items=(item,))).astype(int) - world.BACKGROUND).max(-1) > 30 for item in scene.items]
    assert sum(ink, np.zeros((32, 32), int)).max() <= 1
    for item, drawn in zip(scene.items, ink, strict=True):
        whole = world.SIZES[item.size] * 1.25
        assert whole <= item.x <= 32 - whole and whole <= item.y <= 32 - whole and drawn.any()


def test_batches_equal_single_drawings():
    scenes = [world.sample_scene(n) for n in range(64)]
    np.testing.assert_array_equal(world.draw_batch(scenes), np.stack([world.draw(scene) for scene in scenes]))
    assert world.draw_batch(scenes).dtype == np.uint8


def test_each_tag_has_several_phrasings_and_two_splits():
    for tag in world.TAGS:
        scene = world.sample_scene(1, "train", tag)
        assert len({world.caption(scene, n) for n in range(50)}) >= (2 if tag == "word" else 3), tag
        assert world.sample_scene(2, "heldout", tag).tag == tag


def test_train_and_heldout_share_no_request():
    asked = {split: set() for split in world.SPLITS}
    prompts = {split: set() for split in world.SPLITS}
    for split in world.SPLITS:
        for n in range(500):
            scene = world.sample_scene(n, split, any_letters=split == "train")
            include = [{k: v for k, v in clause.items() if k != "color" or scene.tag != "word"} for clause in scene.include]
            asked[split].add(json.dumps([scene.tag, include], sort_keys=True))
            prompts[split].add(world.caption(scene, n))
    assert not asked["train"] & asked["heldout"]
    assert not prompts["train"] & prompts["heldout"]


def test_a_request_said_from_the_other_end_is_in_the_same_split():
    a, b = {"class": "circle", "count": 1}, {"class": "star", "count": 1}
    for one, other in (("left of", "right of"), ("above", "below")):
        said = [a, {**b, "position": [one, 0]}], [b, {**a, "position": [other, 0]}]
        assert world.split_of("position", said[0]) == world.split_of("position", said[1])
    assert world.split_of("two_object", [a, b]) == world.split_of("two_object", [b, a])
    share = np.mean([world.split_of("word", [{"class": "word", "count": 1, "text": word}]) == "heldout" for word in world.WORDS])
    assert 0.06 < share < 0.2


def test_prompts_are_distinct_json_ready_and_cover_the_tags():
    requests = world.prompts("heldout", 100, seed=3)
    assert len({request["prompt"] for request in requests}) == 100
    assert [request["tag"] for request in requests[:7]] == list(world.TAGS)
    assert {request["tag"] for request in requests} == set(world.TAGS)
    assert json.loads(json.dumps(requests)) == requests
    with pytest.raises(ValueError, match="different prompts"):
        world.prompts("heldout", 50, seed=0, tags=("single_object",))


def test_words_are_distinct_capitals():
    assert len(set(world.WORDS)) == len(world.WORDS) > 200
    assert all(2 <= len(word) <= 4 and set(word) <= set(glyphs.LETTERS) for word in world.WORDS)


def test_shipped_letters_are_those_of_the_font():
    drawn = glyphs.render_atlas().astype(np.float32) / 255
    assert glyphs.load_atlas().shape == (26, glyphs.HEIGHT, glyphs.WIDTH)
    assert np.abs(drawn - glyphs.load_atlas()).mean() < 0.02  # versions of FreeType differ a little


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="split is 'test'"):
        world.sample_scene(0, "test")
    with pytest.raises(ValueError, match="tag is 'colour'"):
        world.sample_scene(0, tag="colour")
    with pytest.raises(ValueError, match="word is 'TEAS!'"):
        world.word_coverage("TEAS!")
    with pytest.raises(ValueError, match="shape is 'hexagon'"):
        world.coverage("hexagon", 0.0, 0.0, 1.0)

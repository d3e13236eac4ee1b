"""The tiny world's rewards by name, on freshly drawn scenes."""

import jax.numpy as jnp
import numpy as np
import pytest

from densegrpo_jax import rewards
from densegrpo_jax.rewards import scenes
from densegrpo_jax.scenes import checker, world

TAGS = [tag for tag in world.TAGS if tag != "word"]


@pytest.fixture(scope="module")
def drawn():
    found = [world.sample_scene((1, n), "heldout", tag) for n, tag in enumerate(3 * TAGS)]
    requests = [world.metadata(scene, (1, n)) for n, scene in enumerate(found)]
    return world.draw_batch(found), [request["prompt"] for request in requests], requests


@pytest.mark.parametrize("mode", checker.MODES)
def test_scenes_are_judged_by_their_metadata(drawn, mode):
    images, prompts, requests = drawn
    name = f"scenes_compose_{mode}"
    reward = rewards.load(name)
    right = rewards.score(name, reward, jnp.asarray(images), prompts, requests)
    wrong = rewards.score(name, reward, images, prompts[1:] + prompts[:1], requests[1:] + requests[:1])
    assert right.valid.all() and (right.value >= 0.0).all() and (right.value <= 1.0).all()
    assert right.value.mean() > {"strict": 0.94, "partial": 0.97, "soft": 0.8}[mode]
    assert wrong.value.mean() < right.value.mean() - 0.3
    np.testing.assert_allclose(right.value, checker.judge(images, requests, mode), rtol=1e-6)


def test_prompts_without_a_request_are_refused(drawn):
    images, prompts, _ = drawn
    with pytest.raises(ValueError, match="needs a tag"):
        rewards.load("scenes_compose_soft")(images, prompts, [{}] * len(prompts))
    with pytest.raises(ValueError, match="mode = 'lenient': choose one of strict, partial, soft"):
        scenes.compose("lenient")


def test_a_missing_preference_scorer_is_named_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(ValueError, match=r"preference_clip is missing; `python -m densegrpo_jax\.scenes\.pretrain"):
        scenes.preference(tmp_path / "preference_clip")


def test_the_preference_scorer_prefers_what_was_asked(drawn):
    images, prompts, requests = drawn
    reward = rewards.load("scenes_preference")
    right = rewards.score("scenes_preference", reward, images, prompts, requests)
    wrong = rewards.score("scenes_preference", reward, np.roll(images, 1, axis=0), prompts, requests)
    assert right.valid.all()
    assert (right.value > wrong.value).mean() > 0.85

"""Images whose scores are known: a reward server scores them before it says that it is ready."""

from typing import Any, NamedTuple

import numpy as np

from densegrpo_jax.rewards.base import Reward, score

SIDE = 64
TOLERANCE = 1e-3  # of a score in the company of others, relative: batches of different sizes differ by rounding


class Known(NamedTuple):
    """images uint8 [N, H, W, 3] with prompts and metadata, and the bounds [N] of their scores. A reward may bring its own as `known`."""

    images: np.ndarray
    prompts: list[str]
    metadata: list[dict]
    low: np.ndarray
    high: np.ndarray


def self_test(name: str, reward: Reward) -> str:
    """Scores known images, in two orders.

    Args:
      name: of the reward.
      reward: loaded; its attribute `known`, if it has one, goes before what is known by name.

    Returns:
      One line for the log.

    Raises:
      ValueError: an image without a score, a score out of its bounds, or scores that change with the order of the images.
    """
    k = getattr(reward, "known", None) or _by_name(name)
    scores = score(name, reward, k.images, k.prompts, k.metadata)
    for i, (value, valid) in enumerate(zip(scores.value, scores.valid)):
        if not valid or not k.low[i] <= value <= k.high[i]:
            got = f"{value:.6g}" if valid else "no score"
            raise ValueError(
                f"self-test of reward {name!r}: image {i} ({k.prompts[i]!r}) must score {k.low[i]:g} to {k.high[i]:g}, got {got}"
            )
    back = score(name, reward, k.images[::-1], k.prompts[::-1], k.metadata[::-1])
    if not np.allclose(back.value[::-1], scores.value, rtol=TOLERANCE, atol=TOLERANCE):
        raise ValueError(f"self-test of reward {name!r}: {scores.value} in one order of the images, {back.value[::-1]} in the other")
    return f"self-test: {len(k.images)} images, scores {', '.join(f'{value:.4g}' for value in scores.value)}"


def _by_name(name: str) -> Known:
    kind = name.partition(":")[0]
    if kind.startswith("scenes_compose"):
        return _scenes()
    return {"toy_spot": _toy, "words": _words, "ocr": _words}.get(kind, _anything)()


def _known(images: Any, prompts: list[str], bounds: list[tuple[float, float]], metadata: list[dict] | None = None) -> Known:
    low, high = np.array(bounds, np.float64).T
    return Known(np.asarray(images), prompts, metadata or [{}] * len(prompts), low, high)


def _anything() -> Known:
    """No bounds but finite: a plain and a patterned image, two prompts."""
    axis = np.arange(SIDE)
    checks = np.where((axis[:, None] // 8 + axis[None] // 8) % 2, 230, 40)
    images = np.stack([np.full((SIDE, SIDE, 3), (200, 30, 30)), np.repeat(checks[..., None], 3, axis=-1)]).astype(np.uint8)
    return _known(images, ["a plain red picture", "a chessboard"], [(-np.inf, np.inf)] * 2)


def _toy() -> Known:
    from densegrpo_jax.scenes import toy

    spot = np.asarray(toy.spot(np.array([[3.5, 3.5]]), np.ones(1)))
    image = np.repeat(np.round((spot + 1.0) * 127.5), 3, axis=-1).astype(np.uint8)
    images = np.concatenate([image, np.zeros_like(image)])
    return _known(images, ["a spot at the centre"] * 2, [(0.99, 1.0), (-0.01, 0.01)])


def _words() -> Known:
    """A word on one line, in the size that both ways of reading take."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (192, SIDE), "white")
    ImageDraw.Draw(image).text((30, 8), "LEMON", fill="black", font=ImageFont.load_default(size=40))
    images = np.stack([np.asarray(image), np.full((SIDE, 192, 3), 255, np.uint8)])
    return _known(images, ['a sign that says "LEMON"'] * 2, [(0.8, 1.0), (0.0, 0.0)])


def _scenes() -> Known:
    from densegrpo_jax.scenes import world

    scene = world.sample_scene((0, 0), "train", "colors")
    images = np.stack([world.draw(scene), np.full((world.SIZE, world.SIZE, 3), world.BACKGROUND, np.uint8)])
    request = world.metadata(scene, (0, 0))
    return _known(images, [request["prompt"]] * 2, [(0.8, 1.0), (-np.inf, 0.5)], [request] * 2)

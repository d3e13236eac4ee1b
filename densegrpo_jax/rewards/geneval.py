"""GenEval (Ghosh et al. 2023, arXiv 2310.11513): are the objects, numbers, colours and places that a prompt asks for in the image?

Everything here is arithmetic on detections, which a detector finds, and colours, which a classifier names; `rewards.detection` has both
(they need torch, so they run in a reward server). A request is the prompt's metadata, see `prompts.geneval`. Four scores:

- official: GenEval's own verdict, 0 or 1. Each clause needs at least its count; the most confident `count` objects have to show its
  color, and to stand in its relation to every such object of the other clause. No exclude clause may be met.
- strict: the same with the exact count (Flow-GRPO reports this one).
- dense_published: the partial credit that Flow-GRPO optimises (arXiv 2505.05470), term by term as its program computes it. Three
  oddities are kept: a term of counts is negative from twice the count on; a wrong place appends 0 and then 1, so that it costs half;
  the number of terms depends on what went wrong.
- dense_repaired: the same without these. Each clause gives one term for its count, one for its color, one for its place, whatever
  happens: max(0, 1 - |n - count| / count); the share of objects of that color, and of pairs in that relation, 0 unless the counts are
  right. It is 1 exactly where strict is.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from densegrpo_jax.prompts.geneval import TAGS, check_request
from densegrpo_jax.rewards.base import Reward, Scores
from densegrpo_jax.rewards.known import Known

MODES = ("official", "strict", "dense_published", "dense_repaired")

# The models of GenEval's own program, as transformers has them: another training of the same detector, the same CLIP.
DETECTOR = "facebook/mask2former-swin-small-coco-instance"
CLIP = "openai/clip-vit-large-patch14"

# GenEval's constants. A detection counts above the threshold, in counting above the higher one.
THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9
MAX_OBJECTS = 16  # of a class
MARGIN = 0.1  # of the sizes of two objects that their distance along an axis has to exceed
DIRECTION = 0.5  # of the whole distance that has to lie along an axis
BACKGROUND = 153  # grey, #999, that hides what surrounds an object whose color is asked

log = logging.getLogger(__name__)


class Detection(NamedTuple):
    """One object.

    Attributes:
      name: class, as in `prompts.geneval.CLASSES`.
      score: confidence in [0, 1].
      box: left, top, right, bottom in pixels.
      mask: bool [H, W], or None where the detector gives boxes only.
    """

    name: str
    score: float
    box: tuple[float, float, float, float]
    mask: np.ndarray | None = None


Found = dict[str, list[Detection]]
Detector = Callable[[np.ndarray], Sequence[Sequence[Detection]]]
"""Images uint8 [N, H, W, 3] -> the detections of each."""
Classifier = Callable[[Sequence[np.ndarray], Sequence[str]], Sequence[str]]
"""Crops uint8 [h, w, 3] of any sizes, and the class of each -> the color of each, of `COLORS`."""


# ---------------------------------------------------------------------------------------------------------------------
# Detections, places, crops


def keep(detections: Sequence[Detection], tag: str) -> Found:
    """What counts: class -> objects above the threshold of the tag, the most confident first, at most `MAX_OBJECTS`."""
    threshold = COUNTING_THRESHOLD if tag == "counting" else THRESHOLD
    found: Found = {}
    for detection in sorted(detections, key=lambda detection: -detection.score):
        objects = found.setdefault(detection.name, []) if detection.score > threshold else []
        if len(objects) < MAX_OBJECTS:
            objects.append(detection)
    return {name: objects for name, objects in found.items() if objects}


def relations(a: Sequence[float], b: Sequence[float]) -> set[str]:
    """Where box a stands as seen from box b: none, one or two of `RELATIONS`.

    The offset of the centres along an axis is first shortened by `MARGIN` times both extents; what is left has to be more than half of
    the whole distance.
    """
    offset, extent = np.zeros(2), np.zeros(2)
    for axis in range(2):
        offset[axis] = (a[axis] + a[axis + 2] - b[axis] - b[axis + 2]) / 2
        extent[axis] = abs(a[axis + 2] - a[axis]) + abs(b[axis + 2] - b[axis])
    beyond = np.maximum(np.abs(offset) - MARGIN * extent, 0.0) * np.sign(offset)
    if not np.any(np.abs(beyond) >= 1e-3):
        return set()
    dx, dy = beyond / np.linalg.norm(offset)
    seen = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}
    return {relation for relation, share in seen.items() if share > DIRECTION}


def crop(image: np.ndarray, detection: Detection) -> np.ndarray:
    """The object alone, uint8 [h, w, 3]: its box cut out of the image, grey where its mask is not.

    Args:
      image: uint8 [H, W, 3].
      detection: in this image.

    Raises:
      ValueError: a mask of another size.
    """
    height, width = image.shape[:2]
    if detection.mask is not None:
        if detection.mask.shape != (height, width):
            raise ValueError(f"the mask of {detection.name!r} is {detection.mask.shape}, the image {(height, width)}")
        image = np.where(detection.mask[..., None], image, np.uint8(BACKGROUND))
    left, top, right, bottom = (round(float(edge)) for edge in detection.box)
    left, top = min(max(left, 0), width - 1), min(max(top, 0), height - 1)
    return image[top : min(max(bottom, top + 1), height), left : min(max(right, left + 1), width)]


def to_color(found: Found, request: Mapping) -> list[Detection]:
    """The objects whose colors decide: of each clause with a color, the most confident `count`, if there are so many."""
    chosen = []
    for clause in request["include"]:
        objects = found.get(clause["class"], [])
        if "color" in clause and len(objects) >= clause["count"]:
            chosen += objects[: clause["count"]]
    return chosen


# ---------------------------------------------------------------------------------------------------------------------
# Scores


def evaluate(found: Found, colors: Mapping[str, Sequence[str]], request: Mapping, mode: str) -> float:
    """The score of one image.

    Args:
      found: of `keep`.
      colors: class -> colors of its objects, in their order; of those of `to_color`.
      request: what is asked, checked by `prompts.geneval.check_request`.
      mode: one of `MODES`.

    Returns:
      0 or 1; of dense_repaired in [0, 1], of dense_published at most 1.

    Raises:
      ValueError: an unknown mode, or colors that are missing.
    """
    if mode not in MODES:
        raise ValueError(f"mode = {mode!r}: choose one of {', '.join(MODES)}")
    for detection in to_color(found, request):
        needed = next(clause["count"] for clause in request["include"] if clause["class"] == detection.name)
        if len(colors.get(detection.name, ())) < needed:
            raise ValueError(f"{needed} objects of class {detection.name!r} need a color, got {list(colors.get(detection.name, ()))}")
    if mode == "dense_published":
        return _published(found, colors, request)
    if mode == "dense_repaired":
        return _repaired(found, colors, request)
    return float(_holds(found, colors, request, exact=mode == "strict"))


def _holds(found: Found, colors: Mapping, request: Mapping, exact: bool) -> bool:
    groups: list[list[Detection] | None] = []  # the objects that fulfil a clause, None where it fails
    for clause in request["include"]:
        objects, count = found.get(clause["class"], []), clause["count"]
        holds = len(objects) == count if exact else len(objects) >= count
        objects = objects[:count]
        if holds and "color" in clause:
            holds = all(color == clause["color"] for color in colors[clause["class"]][:count])
        if holds and "position" in clause:
            relation, target = clause["position"]
            others = groups[target]
            holds = others is not None and all(relation in relations(a.box, b.box) for a in objects for b in others)
        groups.append(objects if holds else None)
    return None not in groups and not any(_met(found, clause) for clause in request.get("exclude", ()))


def _met(found: Found, clause: Mapping) -> bool:
    return len(found.get(clause["class"], [])) >= clause["count"]


def _published(found: Found, colors: Mapping, request: Mapping) -> float:
    terms: list[float] = []
    groups: list[list[Detection] | None] = []
    for clause in request["include"]:
        objects, count = found.get(clause["class"], []), clause["count"]
        terms.append(1.0 - abs(count - len(objects)) / count)  # not bounded below
        holds = len(objects) == count
        if not holds and ("color" in clause or "position" in clause):
            terms.append(0.0)  # one term, even where both are asked
        if holds and "color" in clause:
            right = list(colors[clause["class"]][:count]).count(clause["color"])
            terms.append(right / count)
            holds = right == count
        if holds and "position" in clause:  # no term where the color is wrong
            relation, target = clause["position"]
            others = groups[target]
            holds = others is not None and all(relation in relations(a.box, b.box) for a in objects for b in others)
            if not holds:
                terms.append(0.0)
            if others is not None:
                terms.append(1.0)  # also where it does not hold
        groups.append(objects if holds else None)
    return sum(terms) / len(terms)


def _repaired(found: Found, colors: Mapping, request: Mapping) -> float:
    terms: list[float] = []
    include = request["include"]
    numbers = [len(found.get(clause["class"], [])) for clause in include]
    for clause, n in zip(include, numbers):
        objects, count = found.get(clause["class"], []), clause["count"]
        terms.append(max(0.0, 1.0 - abs(count - n) / count))
        if "color" in clause:
            terms.append(list(colors[clause["class"]][:count]).count(clause["color"]) / count if n == count else 0.0)
        if "position" in clause:
            relation, target = clause["position"]
            counted = n == count and numbers[target] == include[target]["count"]
            others = found.get(include[target]["class"], [])
            terms.append(np.mean([relation in relations(a.box, b.box) for a in objects for b in others]) if counted else 0.0)
    # Of a class that is included too, the count says all; of others an exclude clause is a term of its own.
    included = {clause["class"]: clause["count"] for clause in include}
    for clause in request.get("exclude", ()):
        if included.get(clause["class"], clause["count"]) >= clause["count"]:
            terms.append(float(not _met(found, clause)))
    return float(sum(terms) / len(terms))


def by_tag(scores: Scores, metadata: Sequence[Mapping]) -> dict[str, float]:
    """The mean of each tag that occurs, and "overall": the mean of these means, which is the number GenEval reports.

    Scores that are not valid are left out; a tag that has no other is NaN.
    """
    tags = np.array([request["tag"] for request in metadata])
    means = {}
    for tag in TAGS:
        chosen = (tags == tag) & scores.valid
        if (tags == tag).any():
            means[tag] = float(scores.value[chosen].mean()) if chosen.any() else np.nan
    return {**means, "overall": float(np.mean(list(means.values())))}


# ---------------------------------------------------------------------------------------------------------------------
# The reward


def as_reward(detect: Detector, classify: Classifier, mode: str, batch: int = 8) -> Reward:
    """GenEval with a detector and a classifier. Images on which these fail are not valid, and counted in the log.

    Args:
      detect: finds objects.
      classify: names colors.
      mode: one of `MODES`.
      batch: images in one call of either.

    Raises:
      ValueError: an unknown mode, or no batch. The reward raises it for metadata that is no request, with its place.
    """
    if mode not in MODES:
        raise ValueError(f"mode = {mode!r}: choose one of {', '.join(MODES)}")
    if batch < 1:
        raise ValueError(f"batch = {batch}: must be at least 1")

    def score_batch(images: np.ndarray, requests: Sequence[Mapping]) -> list[float]:
        found = [keep(detections, request["tag"]) for detections, request in zip(detect(images), requests, strict=True)]
        chosen = [(n, detection) for n, request in enumerate(requests) for detection in to_color(found[n], request)]
        crops = [crop(images[n], detection) for n, detection in chosen]
        named = classify(crops, [detection.name for _, detection in chosen]) if chosen else []
        colors: list[dict[str, list[str]]] = [{} for _ in requests]
        for (n, detection), color in zip(chosen, named, strict=True):
            colors[n].setdefault(detection.name, []).append(color)
        return [evaluate(*row, mode) for row in zip(found, colors, requests)]

    def reward(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> tuple[np.ndarray, np.ndarray]:
        images = np.asarray(images)
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[::3] != (len(metadata), 3):
            raise ValueError(f"expected uint8 images [{len(metadata)}, H, W, 3], one a request, got {images.dtype} {images.shape}")
        for n, request in enumerate(metadata):
            try:
                check_request(request)
            except ValueError as error:
                raise ValueError(f"GenEval needs metadata for each prompt; that of image {n} ({prompts[n]!r}) is wrong: {error}") from error
        values, failed = np.full(len(images), np.nan), []
        for start in range(0, len(images), batch):
            rows = slice(start, start + batch)
            try:
                values[rows] = score_batch(images[rows], metadata[rows])
            except Exception as error:  # whatever a network may raise costs these images, not the run
                failed.append(error)
        if failed:
            log.warning("GenEval failed on %d of %d images; the first error: %r", np.isnan(values).sum(), len(images), failed[0])
        return values, np.isfinite(values)

    return reward


def load(
    mode: str,
    detector: str | Path = DETECTOR,
    clip: str | Path = CLIP,
    device: str | None = None,
    batch: int = 8,
    check_colors: bool = True,
) -> Reward:
    """GenEval with models of transformers in torch, for a reward server.

    Args:
      mode: one of `MODES`.
      detector: folder or Hugging Face id of a Mask2Former, or of a detector of DETR's family, trained on COCO.
      clip: folder or Hugging Face id of the CLIPModel that names colors.
      device: torch's name of it; the GPU by default where there is one.
      batch: images at a time.
      check_colors: refuse a classifier that does not know plain red, green and blue.

    Returns:
      The reward. Its attribute `known` is a photograph with one person in it, for the server's self-test.

    Raises:
      ValueError: an unknown mode; torch is missing; a model that cannot be read, or that is not what it should be.
    """
    if mode not in MODES:
        raise ValueError(f"mode = {mode!r}: choose one of {', '.join(MODES)}")
    from densegrpo_jax.rewards import detection

    classify = detection.load_classifier(clip, device)
    if check_colors:
        plain = {"red": (225, 20, 20), "green": (20, 160, 40), "blue": (20, 50, 220)}
        seen = classify([np.full((224, 224, 3), color, np.uint8) for color in plain.values()], ["book"] * len(plain))
        if list(seen) != list(plain):
            raise ValueError(f"{clip}: takes plain {', '.join(plain)} for {', '.join(seen)}; is this a CLIP with its own tokenizer?")
    reward = as_reward(detection.load_detector(detector, device), classify, mode, batch)
    reward.known = known_photograph()
    return reward


def known_photograph() -> Known:
    """A photograph that comes with matplotlib (a portrait, in the public domain): there is one person in it, and no giraffe."""
    from matplotlib.cbook import get_sample_data
    from PIL import Image

    with get_sample_data("grace_hopper.jpg") as file:
        image = np.asarray(Image.open(file).convert("RGB"))
    requests = [{"tag": "counting", "include": [{"class": name, "count": 1}]} for name in ("person", "giraffe")]
    bounds = np.array([1.0, 0.0])
    return Known(np.stack([image] * 2), ["a photo of one person", "a photo of one giraffe"], requests, bounds, bounds)

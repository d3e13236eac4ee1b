"""GenEval's prompts (Ghosh et al. 2023, arXiv 2310.11513): the form of a request, and a generator of new ones.

A request is the JSON object that GenEval's metadata files hold, one a line:

    {"tag": "counting", "include": [{"class": "cat", "count": 3}], "exclude": [{"class": "cat", "count": 4}],
     "prompt": "a photo of three cats"}

`include` clauses hold together: so many objects of a class, maybe of a "color", maybe at a "position": ["left of", index of an earlier
clause]. An `exclude` clause fails the image with `count` objects of its class or more. The six tags are those of `TAGS`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

CLASSES = (
    *("person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light", "fire hydrant"),
    *("stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe"),
    *("backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard", "sports ball", "kite", "baseball bat"),
    *("baseball glove", "skateboard", "surfboard", "tennis racket", "bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl"),
    *("banana", "apple", "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch"),
    *("potted plant", "bed", "dining table", "toilet", "tv", "laptop", "computer mouse", "tv remote", "computer keyboard"),
    *("cell phone", "microwave", "oven", "toaster", "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear"),
    *("hair drier", "toothbrush"),
)
"""The 80 classes of COCO in COCO's order, under GenEval's names."""

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")

# What Flow-GRPO's training file is made of, and single objects, which it leaves out.
WEIGHTS = {"single_object": 0.1, "two_object": 0.1, "counting": 0.5, "colors": 0.1, "position": 0.7, "color_attr": 0.3}

_NUMBERS = {2: "two", 3: "three", 4: "four"}
_PLURALS = {"person": "people", "sheep": "sheep", "knife": "knives", "computer mouse": "computer mice"}
_PAIRS = ("skis", "scissors")
_COLORABLE = tuple(name for name in CLASSES if name != "person")
_COUNTABLE = tuple(name for name in CLASSES if name not in (*_PAIRS, "broccoli"))
_SHAPES = {
    "single_object": (len(CLASSES),),
    "two_object": (len(CLASSES), len(CLASSES) - 1),
    "counting": (len(_COUNTABLE), len(_NUMBERS)),
    "colors": (len(_COLORABLE), len(COLORS)),
    "position": (len(CLASSES), len(CLASSES) - 1, len(RELATIONS)),
    "color_attr": (len(_COLORABLE), len(_COLORABLE) - 1, len(COLORS), len(COLORS) - 1),
}  # of each tag, the choices that make a prompt


# ---------------------------------------------------------------------------------------------------------------------
# The form of a request


def check_form(request: Mapping) -> None:
    """Checks the form of a request, not the names in it, so that other worlds may use it with classes of their own.

    Raises:
      ValueError: saying which clause is wrong, and what it should be.
    """
    include = request.get("include")
    if not isinstance(include, list) or not include:
        raise ValueError('"include" must be a list of at least one clause')
    for field in ("include", "exclude"):
        clauses = request.get(field, [])
        if not isinstance(clauses, list):
            raise ValueError(f'"{field}" must be a list of clauses')
        for place, clause in enumerate(clauses):
            where = f"{field}[{place}] {clause!r}"
            if not isinstance(clause, dict) or not isinstance(clause.get("class"), str):
                raise ValueError(f'{where} must be an object with a "class"')
            if type(clause.get("count")) is not int or clause["count"] < 1:
                raise ValueError(f'{where} must have a "count" of at least 1')
            if not isinstance(clause.get("color", ""), str):
                raise ValueError(f"{where}: the color must be a text")
            if "position" in clause:
                position = clause["position"]
                pair = isinstance(position, list | tuple) and len(position) == 2 and isinstance(position[0], str)
                if field == "exclude" or not pair or type(position[1]) is not int or not 0 <= position[1] < place:
                    raise ValueError(f"{where}: the position must be [relation, index of an earlier include clause]")


def check_request(request: Mapping) -> None:
    """Checks a request that GenEval's scorer is to judge: form, tag, names, and that no class is included twice.

    Raises:
      ValueError: saying what is wrong, and what may be there.
    """
    check_form(request)
    if request.get("tag") not in TAGS:
        raise ValueError(f"tag {request.get('tag')!r}: must be one of {', '.join(TAGS)}")
    for clause in (*request["include"], *request.get("exclude", ())):
        if clause["class"] not in CLASSES:
            raise ValueError(f"class {clause['class']!r} is none of COCO's 80 under GenEval's names")
        if "color" in clause and clause["color"] not in COLORS:
            raise ValueError(f"color {clause['color']!r}: must be one of {', '.join(COLORS)}")
        if "position" in clause and clause["position"][0] not in RELATIONS:
            raise ValueError(f"relation {clause['position'][0]!r}: must be one of {', '.join(RELATIONS)}")
    names = [clause["class"] for clause in request["include"]]
    if len(set(names)) < len(names):
        raise ValueError(f"include names a class twice ({', '.join(names)}); which object is meant is then undefined")


def meaning(request: Mapping) -> frozenset:
    """What a request asks for, however it is put: equal for "a cat and a dog" and "a dog and a cat", and for "a cat left of a dog"
    and "a dog right of a cat"."""
    parts = set()
    for clause in request["include"]:
        parts.add((clause["class"], clause["count"], clause.get("color")))
        if "position" in clause:
            relation, target = clause["position"]
            pair = clause["class"], request["include"][target]["class"]
            turned = {"right of": "left of", "below": "above"}.get(relation)
            parts.add((turned, *pair[::-1]) if turned else (relation, *pair))
    return frozenset(parts)


# ---------------------------------------------------------------------------------------------------------------------
# The generator


def generate(
    train: int = 50_000, test: int = 100, seed: int = 0, weights: Mapping[str, float] = WEIGHTS, exclude: Iterable[Mapping] = ()
) -> tuple[list[dict], list[dict]]:
    """Requests for training and for testing; what is asked in one is not asked in the other, in whatever order or words.

    Args:
      train: number for training. Where a kind has fewer different prompts than its share, they are repeated evenly.
      test: number of each tag for testing, at most a quarter of the different ones there are; none is asked twice.
      seed: of the choice and the order.
      weights: tag -> share of train, in any unit.
      exclude: requests that neither may ask for, as those of GenEval's own evaluation.

    Raises:
      ValueError: a negative number, an unknown tag, weights that are negative or all zero, or a kind that `exclude` leaves empty.
    """
    if train < 0 or test < 0:
        raise ValueError(f"train = {train}, test = {test}: must not be negative")
    if unknown := set(weights) - set(TAGS):
        raise ValueError(f"weights for unknown tags {sorted(unknown)}; the tags are {', '.join(TAGS)}")
    shares = np.array([weights.get(tag, 0.0) for tag in TAGS])
    if not (np.isfinite(shares).all() and shares.min() >= 0 and shares.sum() > 0):
        raise ValueError(f"weights {dict(weights)}: must be finite, not negative, and not all zero")
    ends = np.rint(np.cumsum(shares) / shares.sum() * train).astype(int)
    taken = {meaning(request) for request in exclude}
    held_out: list[dict] = []
    for n, tag in enumerate(TAGS):
        limit, found = min(test, math.prod(_SHAPES[tag]) // 4), {}
        for request in _stream(tag, np.random.default_rng([seed, 0, n])):
            if len(found) == limit:
                break
            if (asked := meaning(request)) not in taken:
                found.setdefault(asked, request)
        held_out += found.values()
    taken |= {meaning(request) for request in held_out}
    trained: list[dict] = []
    for n, (tag, count) in enumerate(zip(TAGS, np.diff(ends, prepend=0))):
        fresh = []
        for request in _stream(tag, np.random.default_rng([seed, 1, n])):
            if len(fresh) == count:
                break
            if meaning(request) not in taken:
                fresh.append(request)
        if count and not fresh:
            raise ValueError(f"no request of tag {tag!r} is left for training; exclude fewer, or give the tag no weight")
        trained += [fresh[i % len(fresh)] for i in range(count)]
    rng = np.random.default_rng([seed, 2])
    return [trained[i] for i in rng.permutation(len(trained))], [held_out[i] for i in rng.permutation(len(held_out))]


def _stream(tag: str, rng: np.random.Generator) -> Iterator[dict]:
    """All requests of a tag, each prompt once, shuffled."""
    for index in rng.permutation(math.prod(_SHAPES[tag])):
        yield _request(tag, [int(i) for i in np.unravel_index(index, _SHAPES[tag])])


def _request(tag: str, choice: Sequence[int]) -> dict:
    def two(names: Sequence[str], i: int, j: int) -> tuple[str, str]:
        return names[i], names[j + (j >= i)]  # the second is chosen among the others

    if tag == "single_object":
        name = CLASSES[choice[0]]
        return {"tag": tag, "include": [{"class": name, "count": 1}], "prompt": f"a photo of {_one(name)}"}
    if tag == "two_object":
        names = two(CLASSES, *choice)
        include = [{"class": name, "count": 1} for name in names]
        return {"tag": tag, "include": include, "prompt": f"a photo of {_one(names[0])} and {_one(names[1])}"}
    if tag == "counting":
        name, (count, number) = _COUNTABLE[choice[0]], list(_NUMBERS.items())[choice[1]]
        include, exclude = [{"class": name, "count": count}], [{"class": name, "count": count + 1}]
        return {"tag": tag, "include": include, "exclude": exclude, "prompt": f"a photo of {number} {plural(name)}"}
    if tag == "colors":
        name, color = _COLORABLE[choice[0]], COLORS[choice[1]]
        return {"tag": tag, "include": [{"class": name, "count": 1, "color": color}], "prompt": f"a photo of {_one(name, color)}"}
    if tag == "position":
        (name, target), relation = two(CLASSES, *choice[:2]), RELATIONS[choice[2]]
        include = [{"class": target, "count": 1}, {"class": name, "count": 1, "position": [relation, 0]}]
        return {"tag": tag, "include": include, "prompt": f"a photo of {_one(name)} {relation} {_one(target)}"}
    names, colors = two(_COLORABLE, *choice[:2]), two(COLORS, *choice[2:])
    include = [{"class": name, "count": 1, "color": color} for name, color in zip(names, colors)]
    return {"tag": tag, "include": include, "prompt": f"a photo of {' and '.join(map(_one, names, colors))}"}


def _one(name: str, color: str = "") -> str:
    """One of a class with its article: "an apple", "a red apple", "a pair of skis"."""
    words = f"{color} {name}".strip()
    if name in _PAIRS:
        return f"a pair of {words}"
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def plural(name: str) -> str:
    """English plural of a class, "benches", where GenEval's own prompts append an s to all."""
    return _PLURALS.get(name) or name + ("es" if name.endswith(("s", "ch", "sh")) else "s")

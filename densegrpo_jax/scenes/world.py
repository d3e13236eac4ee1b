"""The tiny world: 32x32 pictures of coloured shapes or of a short word, with captions, all from a seed.

A scene has one of seven tags. Six are GenEval's: single_object, two_object, counting, colors, position, color_attr. The seventh is
`word`: two to four capital letters on an eight-pixel pitch, flush left as on a letter board. What a caption asks for is kept as
metadata in GenEval's form (a JSON-ready dict that a judge or an RL prompt list can use without the scene):

    {"tag": "position", "include": [{"class": "circle", "count": 1}, {"class": "star", "count": 1, "position": ["left of", 0]}],
     "prompt": "a photo of a star to the left of a circle"}

A clause may also name a "color" and a "size". A word is {"class": "word", "count": 1, "text": "TEA"}, maybe with a colour.
Every request belongs to the train or to the held-out split by a hash of what is asked, not of how it is phrased.
"""

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from densegrpo_jax.scenes import glyphs

SIZE = 32  # pixels, height and width
BACKGROUND = (246, 243, 234)
COLORS = {
    "red": (205, 25, 45),
    "orange": (242, 120, 15),
    "yellow": (250, 210, 50),
    "green": (40, 150, 75),
    "blue": (35, 105, 225),
    "purple": (125, 55, 175),
    "pink": (245, 125, 180),
    "black": (35, 35, 42),
}
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
SIZES = {"small": 4.25, "large": 6.0}  # radius in pixels
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}  # unit vectors, x right, y down
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr", "word")
TAG_WEIGHTS = (0.08, 0.12, 0.18, 0.12, 0.16, 0.17, 0.17)
SPLITS = ("train", "heldout")
PLURALS = {shape: "crosses" if shape == "cross" else shape + "s" for shape in SHAPES}
NUMBERS = {2: "two", 3: "three", 4: "four"}
JITTER = 1.0  # largest distance, along x and y, of an item from the middle of its quarter, pixels
WORD_TOP, WORD_PITCH = 10, 8  # first pixel row of the letters; pixels from one letter to the next
WORDS = tuple(
    """
    AM AN AS AT BE BY DO GO HE HI IF IN IS IT ME MY NO OF OH OK ON OR OX SO TO UP US WE
    ACE ACT ADD AGE AIR ANT APE ARM ART ASH BAG BAR BAT BED BEE BIG BOX BOY BUS CAB CAN CAP CAR CAT COW CUP DAY DIG DOG DRY EAR EAT
    EGG ELF END EYE FAN FAR FIG FIN FIX FLY FOX FUN GAS GEM GUM HAT HEN HIP HOT HUT ICE INK IVY JAM JAR JET JOB JOY KEY KID KIT LAB
    LAW LEG LIP LOG MAP MIX MUD MUG NET NEW NUT OAK OIL OLD OWL PAN PEA PEN PIG PIN POT RAT RED RUG RUN SEA SKY SUN TAX TEA TEN TOP
    TOY VAN WAX WEB WIN YES ZIP ZOO
    ALOE AQUA ARCH BABY BALL BAND BARK BEAR BELL BIRD BLUE BOAT BOOK BUZZ CAFE CAKE CITY COAT COLD DARK DAWN DEEP DESK DOVE DUCK EAST
    EASY ECHO EXIT FACE FARM FERN FISH FIVE FLAG FOUR FROG GIFT GLOW GOAT GOLD HALF HAND HAWK HILL HOME IDEA IRIS IRON JAZZ JOIN JUMP
    JUNE KING KITE KIWI LAKE LAMP LEAF LION LOVE MAZE MILK MINT MOON NEST NINE NOON NOTE OPEN OVEN PARK PEAK PLUM QUIZ RAIN RING ROSE
    SALE SALT SHIP SHOP SNOW SOAP SOUP STAR STOP TAXI TEAM TIME TREE TUNA UNIT VASE VIEW VOTE WALK WAVE WEST WIND WOLF YARN YEAR ZERO
    """.split()
)


@dataclass(frozen=True)
class Item:
    """One drawn shape: its kind, colour and size by name, and its centre in pixels (x right, y down)."""

    shape: str
    color: str
    size: str
    x: float
    y: float


@dataclass(frozen=True)
class Scene:
    """One picture before it is drawn: either one to four items, or a word with its colour; and what its caption asks for.

    `include` is GenEval's list of clauses, the metadata without its prompt.
    """

    tag: str
    include: tuple[dict, ...]
    items: tuple[Item, ...] = ()
    word: str = ""
    word_color: str = "black"


# ---- splits


def split_of(tag: str, include) -> str:
    """Returns "train" or "heldout" (one in eight) for a request, by a hash of what is asked.

    The order of the clauses does not matter, and "A left of B" is the same request as "B right of A".
    """
    clauses = [{key: value for key, value in clause.items() if key != "position"} for clause in include]
    relation = next((clause["position"][0] for clause in include if "position" in clause), None)
    if relation in ("right of", "below"):  # said from the other end
        clauses, relation = clauses[::-1], {"right of": "left of", "below": "above"}[relation]
    elif relation is None:
        clauses = sorted(clauses, key=lambda clause: json.dumps(clause, sort_keys=True))
    digest = hashlib.sha256(json.dumps([tag, relation, clauses], sort_keys=True).encode()).digest()
    return "heldout" if digest[0] % 8 == 0 else "train"


# ---- sampling


def sample_scene(seed, split: str = "train", tag: str | None = None, any_letters: bool = False) -> Scene:
    """Draws one scene.

    Args:
      seed: an int or a sequence of ints; equal seeds give equal scenes.
      split: "train" or "heldout": which requests may come up.
      tag: one of TAGS, or None for a mixture.
      any_letters: words are random strings of letters half of the time (for teaching a model to spell).

    Returns:
      The scene.

    Raises:
      ValueError: the split or the tag is unknown.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; it must be one of {SPLITS}")
    if tag is not None and tag not in TAGS:
        raise ValueError(f"tag is {tag!r}; it must be one of {TAGS}")
    rng = np.random.default_rng(seed)
    tag = tag or str(rng.choice(TAGS, p=TAG_WEIGHTS))
    while True:
        include, extra = _sample_request(rng, tag, any_letters)
        if split_of(tag, include) == split:
            return _realise(rng, tag, include, extra)


def caption(scene: Scene, seed) -> str:
    """Returns one of several phrasings of what the scene asks for; equal seeds give equal captions."""
    return phrase(scene.tag, scene.include, seed)


def metadata(scene: Scene, seed) -> dict:
    """Returns the request of a scene in GenEval's form: {"tag", "include", "prompt"}, the prompt phrased by `seed`."""
    return {"tag": scene.tag, "include": list(scene.include), "prompt": caption(scene, seed)}


def prompts(split: str, count: int, seed: int, tags=TAGS) -> list[dict]:
    """Returns `count` requests in GenEval's form without repeated prompts, the tags in turn until one has no more to give.

    Args:
      split: "train" or "heldout".
      count: how many.
      seed: int.
      tags: which tags, in the order in which they come up.

    Raises:
      ValueError: a split or tag is unknown, or there are not that many prompts.
    """
    found: dict[str, dict] = {}
    open_tags, attempt, misses = list(tags), 0, 0
    while len(found) < count:
        if not open_tags:
            raise ValueError(f"{count} different prompts were asked for; split {split!r} with tags {tuple(tags)} has about {len(found)}")
        tag = open_tags[len(found) % len(open_tags)]
        request = metadata(sample_scene((seed, attempt), split, tag), (seed, attempt, 1))
        misses = misses + 1 if request["prompt"] in found else 0
        found.setdefault(request["prompt"], request)
        if misses == 100:
            open_tags.remove(tag)
            misses = 0
        attempt += 1
    return list(found.values())


def _sample_request(rng, tag, any_letters):
    """Returns (include, relation or None) for one tag."""
    maybe_size = {"size": str(rng.choice(list(SIZES)))} if rng.random() < 0.5 else {}
    first, second = (str(s) for s in rng.choice(SHAPES, 2, replace=False))
    colors = [str(c) for c in rng.choice(list(COLORS), 2, replace=False)]
    if tag == "single_object":
        return ({"class": first, "count": 1, **maybe_size},), None
    if tag == "two_object":
        return ({"class": first, "count": 1}, {"class": second, "count": 1}), None
    if tag == "counting":
        maybe_color = {"color": colors[0]} if rng.random() < 0.5 else {}
        return ({"class": first, "count": int(rng.integers(2, 5)), **maybe_color},), None
    if tag == "colors":
        return ({"class": first, "count": 1, "color": colors[0], **maybe_size},), None
    if tag == "position":
        relation = str(rng.choice(list(RELATIONS)))
        return ({"class": first, "count": 1}, {"class": second, "count": 1, "position": [relation, 0]}), relation
    if tag == "color_attr":
        return ({"class": first, "count": 1, "color": colors[0]}, {"class": second, "count": 1, "color": colors[1]}), None
    if any_letters and rng.random() < 0.5:
        text = "".join(rng.choice(list(glyphs.LETTERS), int(rng.integers(2, 5))))
    else:
        text = str(rng.choice(WORDS))
    # The colour is left out of the hash of a word: a held-out word is never seen in training, in any colour.
    return ({"class": "word", "count": 1, "text": text},), None


def _realise(rng, tag, include, relation) -> Scene:
    """Fills in what the request leaves open: colours, sizes and places."""
    if tag == "word":
        color = str(rng.choice(list(COLORS)))
        clause = {**include[0], "color": color} if rng.random() < 0.3 else include[0]
        return Scene(tag, (clause,), word=include[0]["text"], word_color=color)
    free_colors = [str(c) for c in rng.permutation(list(COLORS))]
    wanted = [(clause, n) for n, clause in enumerate(include) for _ in range(clause["count"])]
    sizes = [clause.get("size") or str(rng.choice(list(SIZES))) for clause, _ in wanted]
    places = _places(rng, [SIZES[size] for size in sizes], relation)
    items = tuple(
        Item(clause["class"], clause.get("color") or free_colors[n], size, x, y)
        for (clause, n), size, (x, y) in zip(wanted, sizes, places, strict=True)
    )
    return Scene(tag, include, items)


def _places(rng, radii, relation):
    """Returns centres [(x, y)]: each item has a quarter of the picture to itself and lies near its middle, so that none touch."""
    quarters = rng.permutation(4)[: len(radii)]  # 2 row + column
    if relation is not None:  # the second item lies beyond the first, in its row or column
        dx, dy = RELATIONS[relation]
        other = int(rng.integers(2))
        row, column = (other, int(dx < 0)) if dx else (int(dy < 0), other)
        quarters = [2 * row + column, 2 * (row + dy) + column + dx]
    room = [min(JITTER, SIZE / 4 - 1.25 * radius) for radius in radii]  # 1.25 radii is the reach of the corners
    return [
        (SIZE * (0.25 + 0.5 * (q % 2)) + float(rng.uniform(-r, r)), SIZE * (0.25 + 0.5 * (q // 2)) + float(rng.uniform(-r, r)))
        for q, r in zip(quarters, room, strict=True)
    ]


# ---- captions


def _article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def _noun(clause: dict) -> str:
    words = [clause.get("size"), clause.get("color"), PLURALS[clause["class"]] if clause["count"] > 1 else clause["class"]]
    return " ".join(word for word in words if word)


def phrase(tag: str, include, seed) -> str:
    """Returns one of several phrasings of a request; equal seeds give equal phrasings.

    Args:
      tag: one of TAGS.
      include: GenEval's clauses.
      seed: an int or a sequence of ints.
    """
    rng = np.random.default_rng(seed)
    opening = str(rng.choice(["a photo of ", "a picture of ", "a drawing of ", ""]))
    if tag == "word":
        text, color = f'"{include[0]["text"]}"', include[0].get("color")
        if color:
            sign = [f"{_article(color)} sign that reads {text}", f"the word {text} in {color}", f"{opening}the {color} word {text}"]
        else:
            sign = [f"a sign that reads {text}", f"{opening}the word {text}", f"a sign with the word {text}"]
        return str(rng.choice(sign))
    if tag == "counting":
        phrase = f"{NUMBERS[include[0]['count']]} {_noun(include[0])}"
        return str(rng.choice([opening + phrase, f"there are {phrase}", f"exactly {phrase}"]))
    nouns = [_article(_noun(clause)) for clause in include]
    if tag in ("single_object", "colors"):
        return str(rng.choice([opening + nouns[0], f"there is {nouns[0]}", f"one {_noun(include[0])}"]))
    if tag == "position":
        relation = include[1]["position"][0]
        if relation.endswith(" of"):
            relation = str(rng.choice([relation, f"to the {relation}"]))
        return f"{opening}{nouns[1]} {relation} {nouns[0]}"
    first, second = nouns if rng.random() < 0.5 else nouns[::-1]
    return opening + first + str(rng.choice([" and ", " with ", " beside "])) + second


# ---- drawing


def coverage(shape: str, x, y, radius):
    """Returns how much of a pixel lies inside a shape, in [0, 1], with an edge one pixel soft.

    Args:
      shape: one of SHAPES.
      x, y: offsets of pixel centres from the shape's centre, in pixels, any broadcastable shapes.
      radius: pixels, broadcastable.

    Raises:
      ValueError: the shape is unknown.
    """
    ax, ay = np.abs(x), np.abs(y)
    if shape == "circle":
        outside = np.hypot(x, y) - radius
    elif shape == "square":
        outside = np.maximum(ax, ay) - 0.88 * radius
    elif shape == "triangle":  # equilateral, point up, centred on its centroid
        outside = np.maximum(y, 0.8660254 * ax - 0.5 * y) - 0.62 * radius
    elif shape == "star":  # five points; fold into half a point, then one straight edge
        angle = np.abs((np.arctan2(x, -y) + np.pi / 5) % (2 * np.pi / 5) - np.pi / 5)
        distance = np.hypot(x, y)
        tip, notch = 1.2 * radius, 0.56 * radius
        ex, ey = notch * np.cos(np.pi / 5) - tip, notch * np.sin(np.pi / 5)  # from the tip to the notch
        px, py = distance * np.cos(angle) - tip, distance * np.sin(angle)
        outside = np.maximum((ex * py - ey * px) / -np.hypot(ex, ey), distance - tip)
    elif shape == "ring":
        outside = np.abs(np.hypot(x, y) - 0.78 * radius) - 0.25 * radius
    elif shape == "cross":
        outside = np.maximum(np.minimum(ax, ay) - 0.36 * radius, np.maximum(ax, ay) - 1.05 * radius)
    else:
        raise ValueError(f"shape is {shape!r}; it must be one of {SHAPES}")
    return np.clip(0.5 - outside, 0.0, 1.0)


def word_coverage(word: str) -> np.ndarray:
    """Returns the ink of a word of one to four capital letters, float32 [32, 32] in [0, 1].

    Raises:
      ValueError: the word is empty, longer than four letters, or has other characters.
    """
    if not 1 <= len(word) <= 4 or any(letter not in glyphs.LETTERS for letter in word):
        raise ValueError(f"word is {word!r}; it must be one to four capital letters A-Z")
    ink = np.zeros((SIZE, SIZE), np.float32)
    for n, letter in enumerate(word):
        ink[WORD_TOP : WORD_TOP + glyphs.HEIGHT, n * WORD_PITCH : n * WORD_PITCH + glyphs.WIDTH] = glyphs.load_atlas()[
            glyphs.LETTERS.index(letter)
        ]
    return ink


def draw(scene: Scene) -> np.ndarray:
    """Draws one scene, uint8 [32, 32, 3]."""
    return draw_batch([scene])[0]


def draw_batch(scenes) -> np.ndarray:
    """Draws scenes together: all items of one shape in one pass.

    Args:
      scenes: sequence of N scenes.

    Returns:
      uint8 [N, 32, 32, 3].
    """
    background = np.array(BACKGROUND, np.float32)
    images = np.tile(background, (len(scenes), SIZE, SIZE, 1))
    centre = np.arange(SIZE, dtype=np.float32) + 0.5  # of pixels
    for shape in SHAPES:
        found = [(n, item) for n, scene in enumerate(scenes) for item in scene.items if item.shape == shape]
        if not found:
            continue
        index = np.array([n for n, _ in found])
        x = np.array([item.x for _, item in found], np.float32)[:, None, None]
        y = np.array([item.y for _, item in found], np.float32)[:, None, None]
        radius = np.array([SIZES[item.size] for _, item in found], np.float32)[:, None, None]
        color = np.array([COLORS[item.color] for _, item in found], np.float32)[:, None, None, :]
        inside = coverage(shape, centre[None, None, :] - x, centre[None, :, None] - y, radius)  # [M, 32, 32]
        np.add.at(images, index, inside[..., None] * (color - background))  # items do not overlap, so they add up
    for n, scene in enumerate(scenes):
        if scene.word:
            images[n] += word_coverage(scene.word)[..., None] * (np.array(COLORS[scene.word_color], np.float32) - background)
    return np.rint(np.clip(images, 0, 255)).astype(np.uint8)

"""The rule-based judge of the tiny world: does a picture show what was asked?

Three scores in [0, 1], all against a request in GenEval's form (see `world`):

- strict: 1 if every clause holds exactly and nothing else is drawn, else 0.
- partial: the mean over the terms of GenEval's dense score (count, then colour, size and place once the count is right).
- soft: the same terms read from template overlaps and colour masses; continuous in the pixels, and differentiable almost everywhere.

Strict and partial segment the picture (connected components, then the best-fitting shape and the nearest colour) in NumPy and SciPy;
soft is one jitted JAX function. For words, strict and partial read the letters by template, and partial is 1 - distance / length.
"""

from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from scipy import ndimage

from densegrpo_jax.scenes import glyphs, world

MODES = ("strict", "partial", "soft")
INK = 45.0  # RGB distance from the background at which a pixel counts as drawn
SPECK = 8.0  # pixels of ink below which a component is ignored
FIT = 0.62  # overlap with the best shape below which a component is no shape at all
LETTER_FIT = 0.5  # overlap with the best letter below which a place is unreadable
SIDE = 4.0  # pixels by which "left of" has to be left
REACH = 9  # half the window around a component, pixels
CHUNK = 256  # pictures scored at once

_COLOR_NAMES = tuple(world.COLORS)
_PALETTE = np.array(list(world.COLORS.values()), np.float32)
_BACKGROUND = np.array(world.BACKGROUND, np.float32)
_MIDDLE_RADIUS = sum(world.SIZES.values()) / 2


@dataclass(frozen=True)
class Found:
    """One thing seen in a picture: what it is, or shape "unknown", with its centroid and the overlap with the best template."""

    shape: str
    color: str
    size: str
    x: float
    y: float
    fit: float


# ---- entry point


def judge(images, requests, mode: str = "strict") -> np.ndarray:
    """Scores pictures against requests.

    Args:
      images: [N, 32, 32, 3], uint8, or floating in [0, 1].
      requests: N dicts in GenEval's form, e.g. from `world.metadata` or `world.prompts`.
      mode: "strict", "partial" or "soft".

    Returns:
      float32 [N] in [0, 1].

    Raises:
      ValueError: a wrong shape, dtype, range, mode or number of requests, or a clause that names something unknown.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; it must be one of {MODES}")
    pixels = _as_pixels(images)
    if len(requests) != len(pixels):
        raise ValueError(f"{len(pixels)} images came with {len(requests)} requests; pass one request an image")
    for request in requests:
        _check_request(request)
    scores = np.zeros(len(pixels), np.float32)
    for start in range(0, len(pixels), CHUNK):
        stop = min(start + CHUNK, len(pixels))
        scores[start:stop] = _judge_chunk(pixels[start:stop], requests[start:stop], mode)
    return scores


def _judge_chunk(pixels, requests, mode):
    scores = np.zeros(len(pixels), np.float32)
    is_word = np.array([request["tag"] == "word" for request in requests])
    for rows, score in ((np.flatnonzero(~is_word), _score_shapes), (np.flatnonzero(is_word), _score_words)):
        if len(rows):
            scores[rows] = score(pixels[rows], [requests[n] for n in rows], mode)
    return scores


def _as_pixels(images) -> np.ndarray:
    """Returns pictures as float32 in [0, 255]."""
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[1:] != (world.SIZE, world.SIZE, 3):
        raise ValueError(f"images have shape {images.shape}; expected [N, {world.SIZE}, {world.SIZE}, 3]")
    if images.dtype == np.uint8:
        return images.astype(np.float32)
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"images have dtype {images.dtype}; expected uint8, or floating in [0, 1]")
    if images.size and not (images.min() >= 0.0 and images.max() <= 1.0):  # also refuses NaN
        raise ValueError(f"floating images lie in [{images.min()}, {images.max()}]; expected [0, 1]")
    return images.astype(np.float32) * 255.0


def _check_request(request):
    include = request.get("include")
    if request.get("tag") not in world.TAGS or not include:
        raise ValueError(f"request {request!r} needs a tag of {world.TAGS} and a non-empty include")
    for n, clause in enumerate(include):
        known = {
            "class": ("word",) if request["tag"] == "word" else world.SHAPES,
            "color": (*_COLOR_NAMES, None),
            "size": (*world.SIZES, None),
        }
        for field, names in known.items():
            if clause.get(field) not in names:
                raise ValueError(f"clause {clause!r} has {field} {clause.get(field)!r}; it must be one of {names}")
        if "position" in clause and not (clause["position"][0] in world.RELATIONS and 0 <= clause["position"][1] < n):
            raise ValueError(f"clause {clause!r}: position must be [one of {tuple(world.RELATIONS)}, index of an earlier clause]")
        if request["tag"] == "word":
            world.word_coverage(clause.get("text", ""))  # raises for anything but one to four capitals
        elif not (isinstance(clause.get("count"), int) and clause["count"] >= 1):
            raise ValueError(f"clause {clause!r} needs a count of at least 1")


# ---- seeing shapes


@cache
def _area_factor(shape: str) -> float:
    """Area of a shape of radius 1, from a fine drawing."""
    grid = (np.arange(1000) + 0.5) / 1000 * 40 - 20
    return float(world.coverage(shape, grid[None, :], grid[:, None], 14.0).sum() * (40 / 1000) ** 2 / 14.0**2)


def find_shapes(images) -> list[list[Found]]:
    """Segments pictures and names what is in them.

    Args:
      images: [N, 32, 32, 3], uint8, or floating in [0, 1].

    Returns:
      For each picture the components larger than a speck.
    """
    pixels = _as_pixels(images)
    away = np.linalg.norm(pixels - _BACKGROUND, axis=-1)  # [N, 32, 32]
    plane = np.zeros((3, 3, 3), bool)
    plane[1] = ndimage.generate_binary_structure(2, 2)  # connects within a picture, never between pictures
    labels, count = ndimage.label(away > INK, plane)
    found: list[list[Found]] = [[] for _ in pixels]
    if count == 0:
        return found
    index = np.arange(1, count + 1)
    # Colour from the pixels farthest from the background: the edge of red is pink, its middle is not.
    peak = ndimage.maximum(away, labels, index)
    core = (labels > 0) & (away >= 0.8 * np.concatenate([[np.inf], peak])[labels])
    weight = np.bincount(labels[core], minlength=count + 1)[1:]
    mean = np.stack([np.bincount(labels[core], pixels[..., c][core], count + 1)[1:] for c in range(3)], -1) / weight[:, None]
    color = np.linalg.norm(mean[:, None] - _PALETTE, axis=-1).argmin(-1)
    # Ink of each component in a window around it, on a canvas padded so that windows never leave it.
    slices = ndimage.find_objects(labels)
    image = np.array([s[0].start for s in slices])
    top = np.array([(s[1].start + s[1].stop) // 2 for s in slices])
    left = np.array([(s[2].start + s[2].stop) // 2 for s in slices])
    pad = ((0, 0), (REACH, REACH), (REACH, REACH))
    offsets = np.arange(2 * REACH + 1)
    window = (image[:, None, None], top[:, None, None] + offsets[None, :, None], left[:, None, None] + offsets[None, None, :])
    owner = np.pad(labels, pad)[window]
    view = np.pad(pixels, (*pad, (0, 0)))[window] - _BACKGROUND  # [M, 19, 19, 3]
    direction = mean - _BACKGROUND
    ink = np.clip(np.einsum("mhwc,mc->mhw", view, direction) / (direction**2).sum(-1)[:, None, None], 0.0, 1.0)
    ink *= (owner == index[:, None, None]) | (ndimage.binary_dilation(owner == index[:, None, None], plane) & (owner == 0))
    area = ink.sum((1, 2))
    offsets = (offsets - REACH).astype(np.float32)
    x = (ink * offsets[None, None, :]).sum((1, 2)) / area
    y = (ink * offsets[None, :, None]).sum((1, 2)) / area
    radius = np.stack([np.sqrt(area / _area_factor(shape)) for shape in world.SHAPES])  # [6, M]
    fit = np.zeros(radius.shape, np.float32)
    for s, shape in enumerate(world.SHAPES):
        template = world.coverage(
            shape, offsets[None, None, :] - x[:, None, None], offsets[None, :, None] - y[:, None, None], radius[s][:, None, None]
        )
        fit[s] = np.minimum(template, ink).sum((1, 2)) / np.maximum(template, ink).sum((1, 2))
    best = fit.argmax(0)
    for m in np.flatnonzero(area >= SPECK):
        size = "small" if radius[best[m], m] < _MIDDLE_RADIUS else "large"
        shape = world.SHAPES[best[m]] if fit[best[m], m] >= FIT else "unknown"
        found[image[m]].append(
            Found(shape, _COLOR_NAMES[color[m]], size, float(left[m] + x[m] + 0.5), float(top[m] + y[m] + 0.5), float(fit[best[m], m]))
        )
    return found


def _score_shapes(pixels, requests, mode):
    if mode == "soft":
        return _soft_shapes_host(pixels, requests)
    return [_shape_score(seen, request["include"], mode) for seen, request in zip(find_shapes(pixels / 255.0), requests, strict=True)]


def _shape_score(seen, include, mode):
    terms = []
    for clause in include:
        things = [thing for thing in seen if thing.shape == clause["class"]]
        count = clause["count"]
        terms.append(max(0.0, 1.0 - abs(len(things) - count) / count))
        counted = len(things) == count
        for field in ("color", "size"):
            if field in clause:
                right = sum(getattr(thing, field) == clause[field] for thing in things)
                terms.append(right / count if counted else 0.0)
        if "position" in clause:
            relation, target = clause["position"]
            others = [thing for thing in seen if thing.shape == include[target]["class"]]
            dx, dy = world.RELATIONS[relation]
            placed = any((a.x - b.x) * dx + (a.y - b.y) * dy >= SIDE for a in things for b in others)
            terms.append(float(counted and placed))
    if mode == "strict":
        return float(min(terms) == 1.0 and len(seen) == sum(clause["count"] for clause in include))
    return float(np.mean(terms))


# ---- seeing letters


def _ink(pixels):
    """Returns ink in [0, 1] relative to the darkest of a picture, [N, 32, 32]; nothing if that is hardly any."""
    away = np.linalg.norm(pixels - _BACKGROUND, axis=-1)
    return np.clip(away / np.maximum(np.quantile(away, 0.97, axis=(1, 2), keepdims=True), 2 * INK), 0.0, 1.0)


@cache
def _shifted_letters() -> np.ndarray:
    """All letters at nine shifts in their place and the neighbourhood of one pixel, float32 [26, 9, 14, 8]."""
    atlas = glyphs.load_atlas()
    out = np.zeros((26, 9, glyphs.HEIGHT + 2, glyphs.WIDTH + 1), np.float32)
    for n, (dy, dx) in enumerate((dy, dx) for dy in range(3) for dx in (-1, 0, 1)):
        source = atlas[:, :, max(0, -dx) :]
        out[:, n, dy : dy + glyphs.HEIGHT, max(0, dx) : max(0, dx) + source.shape[2]] = source
    return out


def _letter_places(ink):
    """Cuts the four places of a letter out of ink [N, 32, 32]: [N, 4, 14, 8]."""
    rows = ink[:, world.WORD_TOP - 1 : world.WORD_TOP + glyphs.HEIGHT + 1]
    return rows.reshape(len(ink), glyphs.HEIGHT + 2, 4, world.WORD_PITCH).transpose(0, 2, 1, 3)


def _letter_overlap(places, xp):
    """Returns the best overlap over shifts of each place with each letter (Tanimoto), [N, 4, 26]."""
    letters = xp.asarray(_shifted_letters())
    cross = xp.einsum("nphw,lshw->npls", places, letters)
    norm = (places**2).sum((2, 3))[:, :, None, None] + (letters**2).sum((2, 3))[None, None]
    return (cross / (norm - cross)).max(-1)


def read_words(images) -> list[str]:
    """Reads the letter board of pictures by template: a letter, "?" for an unreadable one, nothing for an empty place.

    Args:
      images: [N, 32, 32, 3], uint8, or floating in [0, 1].
    """
    places = _letter_places(_ink(_as_pixels(images)))
    overlap = _letter_overlap(places, np)
    best = overlap.argmax(-1)
    texts = []
    for mass, fit, letter in zip(places.sum((2, 3)), overlap.max(-1), best, strict=True):
        marks = [" " if m < SPECK else glyphs.LETTERS[k] if f >= LETTER_FIT else "?" for m, f, k in zip(mass, fit, letter, strict=True)]
        texts.append("".join(marks).rstrip())
    return texts


def edit_distance(a: str, b: str) -> int:
    """Returns the Levenshtein distance of two strings."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def _score_words(pixels, requests, mode):
    if mode == "soft":
        return _soft_words_host(pixels, requests)
    away = np.linalg.norm(pixels - _BACKGROUND, axis=-1)
    core = (away >= 0.8 * away.max((1, 2), keepdims=True)) & (away > INK)
    mean = (pixels * core[..., None]).sum((1, 2)) / np.maximum(core.sum((1, 2)), 1)[:, None]
    colors = np.linalg.norm(mean[:, None] - _PALETTE, axis=-1).argmin(-1)
    scores = []
    for text, color, request in zip(read_words(pixels / 255.0), colors, requests, strict=True):
        clause = request["include"][0]
        terms = [max(0.0, 1.0 - edit_distance(text, clause["text"]) / len(clause["text"]))]
        if "color" in clause:
            terms.append(float(text != "" and _COLOR_NAMES[color] == clause["color"]))
        scores.append(float(min(terms) == 1.0) if mode == "strict" else float(np.mean(terms)))
    return scores


# ---- the soft score

_TAU = 25.0  # RGB distance from the line background-colour at which a pixel is half of another colour
_SHARP = 40.0  # how decidedly the best-fitting template takes a place
_CANVAS = 48  # pixels; holds the picture and the reach of a template without wrapping around


@cache
def _templates():
    """Returns the spectra of the 12 templates (6 shapes, small and large), of their windows, and the templates' squared norms."""
    grid = (np.arange(_CANVAS) + _CANVAS // 2) % _CANVAS - _CANVAS // 2  # offsets, wrapped: correlation centred on the pixel
    x, y = grid[None, :].astype(np.float32), grid[:, None].astype(np.float32)
    shapes = np.stack([np.stack([world.coverage(s, x, y, r) for r in world.SIZES.values()]) for s in world.SHAPES])
    windows = np.stack([np.clip(1.25 * r + 1.5 - np.hypot(x, y), 0.0, 1.0) for r in world.SIZES.values()])
    return (
        np.fft.rfft2(shapes).conj().astype(np.complex64),
        np.fft.rfft2(windows).conj().astype(np.complex64),
        (shapes**2).sum((-1, -2)).astype(np.float32),
    )


def _masses(pixels):
    """Returns the soft mass of each palette colour in [0, 1], [N, 8, 32, 32]: how far from background to colour, off that line less."""
    offset = pixels - _BACKGROUND[None, None, None]
    axis = jnp.asarray(_PALETTE - _BACKGROUND)
    along = jnp.einsum("nhwc,kc->nkhw", offset, axis) / (axis**2).sum(-1)[None, :, None, None]
    along = jnp.clip(along, 0.0, 1.0)
    missed = ((offset[:, None] - along[..., None] * axis[None, :, None, None]) ** 2).sum(-1)
    return along * jnp.exp(-missed / (2 * _TAU**2))


def _correlate(spectrum, kernel):
    return jnp.fft.irfft2(spectrum * kernel, (_CANVAS, _CANVAS))[..., : world.SIZE, : world.SIZE]


@jax.jit
def soft_shapes(pixels, shape, count, color, size, relation):
    """The soft score of pictures of shapes.

    At each pixel the overlap (Tanimoto) of the mass around it with twelve templates says which shape of which size is centred there;
    a peak of overlap is an object. Soft counts of objects that fit a clause replace counts, soft centroids replace places.

    Args:
      pixels: f32 [N, 32, 32, 3] in [0, 255].
      shape, count: int [N, 2], the clauses' shape by index and number; count 0 for no clause.
      color, size: int [N, 2], by index, -1 where the clause does not say.
      relation: f32 [N, 2], the unit vector from the first clause's object to the second's, 0 for none.

    Returns:
      f32 [N] in [0, 1]: the mean over the terms: number of all objects; each clause's number, colour and size; the relation.
    """
    kernels, windows, squares = (jnp.asarray(a) for a in _templates())
    by_color = _masses(pixels)  # [N, 8, H, W]
    mass = by_color.max(1)
    fft = partial(jnp.fft.rfft2, s=(_CANVAS, _CANVAS))
    spectrum = fft(mass)[:, None, None]
    cross = _correlate(spectrum, kernels[None])  # [N, 6, 2, H, W]
    around = _correlate(fft(mass**2)[:, None], windows[None])[:, None]  # [N, 1, 2, H, W]
    overlap = jnp.clip(cross / (around + squares[None, :, :, None, None] - cross), 0.0, 1.0)
    best = overlap.max((1, 2))  # [N, H, W]
    share = jax.nn.softmax(_SHARP * overlap.reshape(len(pixels), 12, world.SIZE, world.SIZE), axis=1).reshape(overlap.shape)
    # A peak of overlap weighs about one in all, spread over the pixels next to it; flat low ground weighs nothing.
    power = best**16
    near = jax.lax.reduce_window(power, 0.0, jax.lax.add, (1, 9, 9), (1, 1, 1), "SAME")
    present = jnp.clip((best - 0.4) / 0.4, 0.0, 1.0)
    objects = present**2 * (3 - 2 * present) * power / (near + 1e-6)  # [N, H, W]

    rows = jnp.arange(len(pixels))[:, None]
    asked = count > 0
    fits = objects[:, None, None] * share[rows, shape]  # [N, 2, 2 sizes, H, W]
    number = fits.sum((2, 3, 4))  # [N, 2]
    sized = jnp.take_along_axis(fits.sum((3, 4)), jnp.maximum(size, 0)[..., None], 2)[..., 0]
    # How much of what fills a template has the asked colour.
    color_mass = fft(by_color[rows, jnp.maximum(color, 0)])[:, :, None]
    purity = jnp.clip(_correlate(color_mass, kernels[shape]) / (cross[rows, shape] + 1e-3), 0.0, 1.0)
    colored = (fits * purity).sum((2, 3, 4))

    def closeness(seen, wanted):
        return jnp.clip(1.0 - jnp.abs(seen - wanted) / jnp.maximum(wanted, 1), 0.0, 1.0)

    axis = jnp.arange(world.SIZE, dtype=jnp.float32)
    place = fits.sum(2)
    x = (place.sum(2) * axis[None, None]).sum(-1) / (number + 1e-3)  # [N, 2]
    y = (place.sum(3) * axis[None, None]).sum(-1) / (number + 1e-3)
    along = (x[:, 1] - x[:, 0]) * relation[:, 0] + (y[:, 1] - y[:, 0]) * relation[:, 1]
    related = jnp.clip(along / (2 * SIDE), 0.0, 1.0) * jnp.clip(number, 0.0, 1.0).prod(-1)
    has_relation = jnp.abs(relation).sum(-1) > 0

    terms = [closeness(objects.sum((1, 2)), count.sum(-1))[:, None], closeness(number, count), closeness(colored, count)]
    terms += [closeness(sized, count), related[:, None]]
    weights = [jnp.ones_like(asked[:, :1]), asked, asked & (color >= 0), asked & (size >= 0), has_relation[:, None]]
    terms, weights = jnp.concatenate(terms, 1), jnp.concatenate(weights, 1).astype(jnp.float32)
    return (terms * weights).sum(1) / weights.sum(1)


@jax.jit
def soft_words(pixels, letters, color):
    """The soft score of pictures of a word.

    Args:
      pixels: f32 [N, 32, 32, 3] in [0, 255].
      letters: int [N, 4], by index in the alphabet, -1 for an empty place.
      color: int [N], by index, -1 where the request does not say.

    Returns:
      f32 [N] in [0, 1]: the mean overlap with the right letters, sharpened against the other letters, times the emptiness of the
      places where nothing belongs; averaged with the share of ink of the right colour where one is asked.
    """
    by_color = _masses(pixels)
    ink = by_color.max(1)
    places = _letter_places(ink)
    overlap = _letter_overlap(places, jnp)  # [N, 4, 26]
    share = jax.nn.softmax(_SHARP / 2 * overlap, axis=-1)
    right = jnp.take_along_axis(overlap * share, jnp.maximum(letters, 0)[..., None], -1)[..., 0]
    empty = jnp.clip(1.0 - places.sum((2, 3)) / (3 * SPECK), 0.0, 1.0)
    written = letters >= 0
    # A place that should be empty scales the letters' score: an empty picture must not score on a short word.
    spelled = (right * written).sum(-1) / written.sum(-1) * jnp.where(written, 1.0, empty).prod(-1)
    rows = jnp.arange(len(pixels))
    hue = by_color[rows, jnp.maximum(color, 0)].sum((1, 2)) / (ink.sum((1, 2)) + 1.0)
    return jnp.where(color >= 0, (spelled + jnp.clip(hue, 0.0, 1.0)) / 2, spelled)


def _padded(rows: int) -> int:
    """The number of rows to pad to, so that few shapes are ever compiled."""
    return max(16, 1 << (rows - 1).bit_length())


def _soft_shapes_host(pixels, requests):
    spec = np.zeros((4, len(requests), 2), np.int32)
    spec[2:] = -1
    relation = np.zeros((len(requests), 2), np.float32)
    for n, request in enumerate(requests):
        if len(request["include"]) > 2:
            raise ValueError(f"request {request!r} has {len(request['include'])} clauses; the soft score takes at most two")
        for k, clause in enumerate(request["include"]):
            color, size = clause.get("color"), clause.get("size")
            spec[:, n, k] = (
                world.SHAPES.index(clause["class"]),
                clause["count"],
                -1 if color is None else _COLOR_NAMES.index(color),
                -1 if size is None else list(world.SIZES).index(size),
            )
            if "position" in clause:
                relation[n] = world.RELATIONS[clause["position"][0]]
    return _padded_call(soft_shapes, pixels, *spec, relation)


def _soft_words_host(pixels, requests):
    letters = np.full((len(requests), 4), -1, np.int32)
    color = np.full(len(requests), -1, np.int32)
    for n, request in enumerate(requests):
        clause = request["include"][0]
        letters[n, : len(clause["text"])] = [glyphs.LETTERS.index(letter) for letter in clause["text"]]
        if "color" in clause:
            color[n] = _COLOR_NAMES.index(clause["color"])
    return _padded_call(soft_words, pixels, letters, color)


def _padded_call(score, *arrays):
    rows = len(arrays[0])
    extra = _padded(rows) - rows
    arrays = [np.concatenate([a, np.repeat(a[:1], extra, 0)]) for a in arrays]
    return np.asarray(score(*arrays))[:rows]

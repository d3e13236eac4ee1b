"""Requests between trainer and reward server: what is written is read, and anything else is one kind of error."""

import io
import json
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from densegrpo_jax.rewards import wire

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 5, 4, 3), dtype=np.uint8)
PROMPTS, METADATA = ["a", "naïve “tea”\n", ""], [{}, {"tag": "colors", "include": [{"class": "cup", "count": 1}]}, {"x": None}]
SMALL = wire.Limits(bytes=4096, header=1024, images=3, side=16, characters=20)


@pytest.mark.parametrize("form", ["npz", "png"])
def test_what_is_written_is_read(form):
    request = wire.decode(wire.encode(IMAGES, PROMPTS, METADATA, 2.5, form), SMALL)
    np.testing.assert_array_equal(request.images, IMAGES)
    assert request[1:] == (PROMPTS, METADATA, 2.5)


def test_metadata_that_json_cannot_hold_is_refused():
    for value in (np.zeros(2), float("nan")):
        with pytest.raises(ValueError):
            wire.encode(IMAGES[:1], ["a"], [{"x": value}], 1.0)


def header(**changes):
    values = {"version": 1, "prompts": ["a"], "metadata": [{}], "images": "npz", "timeout": 1.0} | changes
    return json.dumps({k: v for k, v in values.items() if v is not None}).encode() + b"\n"


def npz(save=np.savez, **arrays):
    buffer = io.BytesIO()
    save(buffer, **arrays)
    return buffer.getvalue()


def png_that_claims(width, height):
    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(64))) + chunk(b"IEND", b"")


GOOD = npz(images=IMAGES[:1])
LIAR = GOOD.replace(b"(1, 5, 4, 3)", b"(1, 9, 9, 3)")
BOMB = png_that_claims(16, 16) * 3


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "no newline"),
        (b"x" * 5000, "5000 bytes, at most 4096"),
        (b" " * 2000 + header() + GOOD, "no newline in the first 1024"),
        (b"[]\n", "version"),
        (b"\xff\n", "not JSON"),
        (b"[" * 900 + b"\n", "not JSON"),
        (b'{"version": NaN}\n', "not JSON"),
        (header(version=2) + GOOD, "version"),
        (header(prompts="a") + GOOD, "list of texts"),
        (header(prompts=[1]) + GOOD, "list of texts"),
        (header(prompts=[], metadata=[]) + GOOD, "takes 1 to 3"),
        (header(prompts=["a"] * 4, metadata=[{}] * 4) + GOOD, "takes 1 to 3"),
        (header(prompts=["a" * 21]) + GOOD, "21 characters"),
        (header(metadata=[{}, {}]) + GOOD, "list of 1 objects"),
        (header(metadata=["x"]) + GOOD, "list of 1 objects"),
        (header(timeout=0) + GOOD, "timeout"),
        (header(timeout=True) + GOOD, "timeout"),
        (header(images="pickle") + GOOD, '"npz" or "png"'),
        (header() + b"PK", "not an npz"),
        (header() + npz(pictures=IMAGES[:1]), "not an npz"),
        (header() + npz(np.savez_compressed, images=IMAGES[:1]), "must not be compressed"),
        (header() + npz(images=np.array([{}, {}], object)), "not an npz|must be uint8"),  # a pickle inside is never opened
        (header() + npz(images=IMAGES[:1].astype(np.float32)), "must be uint8"),
        (header() + npz(images=IMAGES), "must be uint8"),
        (header() + npz(images=IMAGES[:1, ..., :2]), "must be uint8"),
        (header() + npz(images=np.zeros((1, 17, 1, 3), np.uint8)), "each side"),
        (header() + npz(images=np.zeros((1, 0, 1, 3), np.uint8)), "each side"),
        (header() + LIAR, "not an npz|archive holds"),
        (header(images="png") + b"x", "sizes"),
        (header(images="png", sizes=[2]) + b"x", "sizes"),
        (header(images="png", sizes=[1]) + b"x", "image 0 cannot be taken"),
        (header(images="png", sizes=[len(png_that_claims(60000, 1))]) + png_that_claims(60000, 1), "each side"),
    ],
)
def test_anything_else_is_refused_with_its_reason(body, reason):
    with pytest.raises(ValueError, match=reason):
        wire.decode(body, SMALL)


def test_what_unpacks_to_more_than_the_limit_is_refused_before_it_is_unpacked():
    one = png_that_claims(16, 16)
    body = header(prompts=["a"] * 3, metadata=[{}] * 3, images="png", sizes=[len(one)] * 3) + one * 3
    with pytest.raises(ValueError, match="unpack to more than 2000"):
        wire.decode(body, SMALL._replace(bytes=2000))


def test_images_of_different_sizes_are_refused():
    files = [wire.encode(image[None], ["a"], [{}], 1.0, "png").split(b"\n", 1)[1] for image in (IMAGES[0], IMAGES[0, :4])]
    body = header(prompts=["a"] * 2, metadata=[{}] * 2, images="png", sizes=[len(f) for f in files]) + b"".join(files)
    with pytest.raises(ValueError, match="its size is 4x4, that of the first 5x4"):
        wire.decode(body, SMALL)


@settings(max_examples=60)
@given(st.binary(max_size=200), st.sampled_from(["npz", "png"]), st.integers(0, 2**16), st.integers(0, 40))
def test_damaged_requests_raise_value_error_or_are_read_whole(noise, form, at, cut):
    body = wire.encode(IMAGES, PROMPTS, METADATA, 1.0, form)
    at %= len(body)
    for damaged in (noise, body[:at] + noise + body[at + cut :], body[:at]):
        try:
            request = wire.decode(damaged, SMALL)
        except ValueError:
            continue
        assert request.images.dtype == np.uint8 and request.images.shape[0] == len(request.prompts) == len(request.metadata) <= SMALL.images


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["version", "prompts", "sizes", "x"]), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(st.sampled_from(["version", "prompts", "metadata", "images", "sizes", "timeout"]), json_values)
def test_headers_of_any_json_raise_value_error_or_are_read(key, value):
    line, payload = wire.encode(IMAGES, PROMPTS, METADATA, 1.0, "png").split(b"\n", 1)
    try:
        wire.decode(json.dumps(json.loads(line) | {key: value}).encode() + b"\n" + payload, SMALL)
    except ValueError:
        pass

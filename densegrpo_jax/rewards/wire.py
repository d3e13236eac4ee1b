"""Images, prompts and metadata as bytes, between the trainer and a reward server.

A request is one line of JSON, a newline, and the images:

    {"version": 1, "prompts": ["a red cube"], "metadata": [{}], "images": "png", "sizes": [8213], "timeout": 30}\\n<bytes>

"images" is "npz", an uncompressed archive of numpy with one array `images`, uint8 [N, H, W, 3], or "png", N files one after the other of
`sizes` bytes. Both are read without running anything that they contain. "timeout" says for how many seconds the asker will wait.

An answer is JSON: {"reward": "geneval", "scores": [0.5, null], "seconds": 0.3}, with null for an image that could not be scored.
"""

import io
import json
import math
import os
import zipfile
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

VERSION = 1
CONTENT_TYPE = "application/vnd.densegrpo.score"  # not one that a web page may send to another site unasked
TOKEN, MIN_TOKEN = "DENSEGRPO_REWARD_TOKEN", 16  # environment variable of the shared secret; its least length
REPLY_LIMIT = 16 * 2**20  # bytes of an answer


class Limits(NamedTuple):
    """What a server accepts: bytes of a request and of its first line, images, pixels along a side of one, characters of a prompt."""

    bytes: int = 256 * 2**20
    header: int = 4 * 2**20
    images: int = 256
    side: int = 4096
    characters: int = 20_000


class Request(NamedTuple):
    """images uint8 [N, H, W, 3], N prompts, N dicts, and the seconds that the asker will wait."""

    images: np.ndarray
    prompts: list[str]
    metadata: list[dict]
    timeout: float


def token() -> str | None:
    """The secret that servers and clients share, from the environment; None where it is not set.

    Raises:
      ValueError: one that is too short or cannot stand in an HTTP header; it is not shown.
    """
    secret = os.environ.get(TOKEN, "").strip()
    if not secret:
        return None
    if len(secret) < MIN_TOKEN or not all("!" <= char <= "~" for char in secret):
        raise ValueError(f"{TOKEN} must have at least {MIN_TOKEN} characters, printable ASCII without blanks")
    return secret


def encode(
    images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict], timeout: float, form: Literal["npz", "png"] = "npz"
) -> bytes:
    """A request as bytes. npz is fast; png is smaller, and slow to write.

    Raises:
      ValueError: metadata that JSON cannot hold.
    """
    header = {"version": VERSION, "prompts": list(prompts), "metadata": list(metadata), "images": form, "timeout": timeout}
    buffer = io.BytesIO()
    if form == "npz":
        np.savez(buffer, images=images)
    else:
        sizes = []
        for image in images:
            Image.fromarray(image).save(buffer, "PNG", compress_level=1)
            sizes.append(buffer.tell() - sum(sizes))
        header["sizes"] = sizes
    try:
        line = json.dumps(header, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"metadata must be plain JSON values: {error}") from error
    return line.encode() + b"\n" + buffer.getvalue()


def decode(body: bytes | bytearray, limits: Limits = Limits()) -> Request:  # noqa: B008  (immutable)
    """Reads a request. Memory is bounded by the limits before anything is unpacked.

    Raises:
      ValueError: whatever is wrong with it, and nothing else.
    """
    if len(body) > limits.bytes:
        raise ValueError(f"the request has {len(body)} bytes, at most {limits.bytes} are taken")
    end = body.find(b"\n", 0, limits.header)
    if end < 0:
        raise ValueError(f"no newline in the first {min(limits.header, len(body))} bytes: a line of JSON comes before the images")
    try:
        header = json.loads(body[:end], parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the first line is not JSON: {error}") from error
    if not isinstance(header, dict) or header.get("version") != VERSION:
        raise ValueError(f'the first line must be an object with "version": {VERSION}')
    prompts, metadata, timeout = header.get("prompts"), header.get("metadata"), header.get("timeout", 60.0)
    if not isinstance(prompts, list) or not all(isinstance(text, str) for text in prompts):
        raise ValueError('"prompts" must be a list of texts')
    count = len(prompts)
    if not 1 <= count <= limits.images:
        raise ValueError(f"{count} prompts: a request takes 1 to {limits.images} images")
    if max(map(len, prompts)) > limits.characters:
        raise ValueError(f"a prompt has {max(map(len, prompts))} characters, at most {limits.characters} are taken")
    if not isinstance(metadata, list) or len(metadata) != count or not all(isinstance(entry, dict) for entry in metadata):
        raise ValueError(f'"metadata" must be a list of {count} objects, one a prompt')
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0.0 < timeout < 1e6:
        raise ValueError('"timeout" must be a number of seconds above 0')
    payload = memoryview(body)[end + 1 :]
    if header.get("images") == "npz":
        images = _read_npz(payload, count, limits)
    elif header.get("images") == "png":
        images = _read_pngs(payload, header.get("sizes"), count, limits)
    else:
        raise ValueError('"images" must be "npz" or "png"')
    return Request(images, prompts, metadata, float(timeout))


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _read_npz(payload: memoryview, count: int, limits: Limits) -> np.ndarray:
    try:
        with zipfile.ZipFile(io.BytesIO(payload)) as archive:
            entry = archive.getinfo("images.npy")
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(payload):
                raise ValueError("the npz must not be compressed (numpy.savez)")
            data = archive.read(entry)
        file = io.BytesIO(data)
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("images.npy must be of numpy's format 1.0")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except Exception as error:  # zipfile and numpy raise a dozen types for bytes that are no archive
        raise ValueError(f"not an npz with an array named images: {error}") from error
    if dtype != np.uint8 or fortran or len(shape) != 4 or shape[0] != count or shape[3] != 3:
        raise ValueError(f"images must be uint8 [{count}, H, W, 3] in C order, one a prompt, got {dtype} {shape}")
    _check_side(shape[1:3], limits)
    pixels = memoryview(data)[file.tell() :]
    if len(pixels) != math.prod(shape):
        raise ValueError(f"images of shape {shape} have {math.prod(shape)} bytes, the archive holds {len(pixels)}")
    return np.frombuffer(pixels, np.uint8).reshape(shape)


def _read_pngs(payload: memoryview, sizes: Any, count: int, limits: Limits) -> np.ndarray:
    whole = isinstance(sizes, list) and len(sizes) == count and all(type(size) is int and size > 0 for size in sizes)
    if not whole or sum(sizes) != len(payload):
        raise ValueError(f'"sizes" must be {count} numbers of bytes that add up to the {len(payload)} bytes after the first line')
    images, start = [], 0
    for number, size in enumerate(sizes):
        try:
            with Image.open(io.BytesIO(payload[start : start + size]), formats=["PNG"]) as image:
                width, height = image.size
                _check_side((height, width), limits)
                if images and images[0].shape[:2] != (height, width):
                    raise ValueError(f"its size is {height}x{width}, that of the first {'x'.join(map(str, images[0].shape[:2]))}")
                # 3 bytes a pixel when unpacked: all images together stay within the limit of the request
                if 3 * height * width * count > limits.bytes:
                    raise ValueError(f"{count} images of {height}x{width} unpack to more than {limits.bytes} bytes")
                images.append(np.asarray(image.convert("RGB")))
        except Exception as error:  # Pillow's decoders raise many types
            raise ValueError(f"image {number} cannot be taken: {error}") from error
        start += size
    return np.stack(images)


def _check_side(shape: Sequence[int], limits: Limits) -> None:
    if not all(1 <= side <= limits.side for side in shape):
        raise ValueError(f"images of {shape[0]}x{shape[1]}: each side must have 1 to {limits.side} pixels")

"""What makes an evaluation repeatable: hashes of what went into it, and what differs between two manifests."""

import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from densegrpo_jax import pipeline, rewards

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "pillow", "transformers", "tokenizers", "rapidocr", "onnxruntime")  # what scores depend on
NAMES = ("arguments", "model.path")  # of the manifest: where things were found, which may move; the hashes say what they were


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def differences(before: dict, after: dict) -> list[str]:
    """One line for each entry in which two manifests differ; paths and spellings of the command line do not count."""
    flat = [
        {key: value for key, value in flatten_dict(manifest, sep=".", keep_empty_nodes=True).items() if not key.startswith(NAMES)}
        for manifest in (before, after)
    ]
    keys = sorted({*flat[0], *flat[1]})
    absent = object()
    changed = [key for key in keys if flat[0].get(key, absent) != flat[1].get(key, absent)]
    return [f"{key}: {_short(flat[0].get(key))} -> {_short(flat[1].get(key))}" for key in changed]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def hash_tree(tree: dict) -> str:
    """SHA-256 of a tree of arrays: names, types, shapes and values."""
    digest = hashlib.sha256()
    for path, leaf in sorted(flatten_dict(tree, sep="/").items()):
        value = np.ascontiguousarray(leaf)
        digest.update(f"{path} {value.dtype.name} {value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def hash_files(folder: Path, variant: str | None = None) -> str:
    """SHA-256 of a folder: names and contents of its JSON, text and tokenizer files and of its safetensors of one variant."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not _hidden(path.relative_to(folder))):
        named = ".fp16." in path.name or ".bf16." in path.name
        weights = path.suffix == ".safetensors" and named == bool(variant) and (not variant or f".{variant}." in path.name)
        if weights or path.suffix in (".json", ".txt", ".model"):
            with path.open("rb") as file:
                digest.update(f"{path.relative_to(folder).as_posix()} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def hash_scorer(source: str) -> str | None:
    """Hash of the folder that a reward reads; None for one without a folder, or on a server."""
    kind, _, model = source.partition(":")
    if "@http" in source:
        return None
    if kind == "scenes_preference":
        from densegrpo_jax.rewards import scenes

        return hash_files(scenes.PREFERENCE)
    model = model or rewards.MODELS.get(kind)
    if kind not in rewards.MODELS or not model:
        return None
    from densegrpo_jax.rewards import clip

    return hash_files(pipeline.find_folder(model, files=clip.FILES))


def read(folder: Path) -> dict:
    path = folder.expanduser() / "manifest.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: not the folder of an evaluation ({error})") from error


def write_whole(path: Path, text: str) -> None:
    """The whole file or none."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)

"""Weights on disk: safetensors in diffusers layout, read straight into (possibly sharded) arrays, and written back.

A network's `name_table(config)` says which torch tensors make each of our arrays (see source.py). Reading goes array by
array: only the slice a device needs is taken from the file, transposed and cast on the host, and handed over, so that
each byte is read once and the host holds about one array at a time. Nothing is skipped: a tensor that the table does not
name, or that the file lacks, is an error.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open

from densegrpo_jax.models.source import Source

STEMS = ("diffusion_pytorch_model", "model")  # what diffusers and transformers call their weight files
COMPONENTS = ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
LISTED = 12  # how many names of a kind an error spells out

# safetensors' names of the types we read and write
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# ours = torch.transpose(axes), by the transform of a Source
AXES = {"none": None, "transpose": (1, 0), "conv": (2, 3, 1, 0)}


class Stored(NamedTuple):
    """A tensor in an open safetensors file; `view[index]` reads a part of it.

    Attributes:
      file: where it is.
      view: the sliceable view that safetensors gives.
      shape: its torch shape.
      dtype: safetensors' name of the type it is stored in.
    """

    file: Path
    view: Any
    shape: tuple[int, ...]
    dtype: str


# ---------------------------------------------------------------------------------------------------------------------
# Finding files


def find_folder(model: str | Path, variant: str | None = None, weights: bool = True, files: Sequence[str] = ()) -> Path:
    """A local folder in diffusers layout, downloaded from the Hugging Face hub when `model` is not one already.

    Args:
      model: a folder, or a hub id such as "stabilityai/stable-diffusion-3.5-medium".
      variant: which weights to download, "fp16" or "bf16"; None for the unnamed ones. Component configs, tokenizers and
        this one set of safetensors are fetched, no pickled weights and no single-file checkpoints.
      weights: False leaves the weights out.
      files: patterns of the files to download instead, for a folder of another layout.

    Returns:
      The folder.

    Raises:
      ValueError: neither a folder nor a hub id, or the download failed.
    """
    path = Path(model).expanduser()
    if path.is_dir() and str(model):
        return path
    if path.is_file():
        raise ValueError(f"{path} is a file; give the model's folder or a Hugging Face id")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)) or str(model).startswith("."):
        raise ValueError(f"{str(model)!r} is neither a folder that exists nor a Hugging Face id of the form owner/name")

    from huggingface_hub import errors, snapshot_download

    chosen = f"*.{variant}*" if variant else "*.safetensors*"
    pipeline = [
        "model_index.json",
        "scheduler/*.json",
        *(f"{t}/*" for t in TOKENIZERS),
        *(f"{c}/config.json" for c in COMPONENTS),
        *(f"{c}/{chosen}" for c in COMPONENTS if weights),
    ]
    ignored = ["*.bin*", "*.msgpack"] + ([] if variant else ["*.fp16*", "*.bf16*"])
    try:
        return Path(snapshot_download(str(model), allow_patterns=list(files) or pipeline, ignore_patterns=ignored))
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{str(model)!r} is not a folder here and could not be downloaded from the Hugging Face hub ({reason:.300}); "
            "name a folder that holds it, or look at the network and `hf auth login`"
        ) from error


def read_json(path: Path) -> dict:
    """The object in a JSON file.

    Raises:
      ValueError: the file is missing, unreadable, not JSON, or not an object; the message names it.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


def find_files(folder: Path, variant: str | None = None) -> dict[Path, set[str] | None]:
    """The safetensors files of one component.

    Args:
      folder: the component's folder, such as `<model>/transformer`.
      variant: "fp16" or "bf16" for files named so; None for the unnamed ones.

    Returns:
      Each file with the tensor names that an index promises in it, or None where there is no index.

    Raises:
      ValueError: no such weights, weights that are not safetensors, two sets of them, or an index that is broken or leads
        out of its folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    dotted = f".{variant}" if variant else ""
    singles = [path for stem in STEMS if (path := folder / f"{stem}{dotted}.safetensors").exists()]
    indices = [path for stem in STEMS if (path := folder / f"{stem}.safetensors.index{dotted}.json").exists()]
    if len(singles) + len(indices) > 1:
        found = ", ".join(path.name for path in singles + indices)
        raise ValueError(f"{folder}: holds two sets of weights ({found}); keep one")
    if singles:
        return {singles[0]: None}
    if not indices:
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        pickled = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(kind))
        if others:
            raise ValueError(f"{folder}: has no weights of variant {variant!r}; it has {', '.join(others[:LISTED])}: choose the variant")
        if pickled:
            raise ValueError(f"{folder}: {pickled[0]} is pickled, which is not read; convert the weights to safetensors")
        raise ValueError(f"{folder}: has no {STEMS[0]}{dotted}.safetensors or {STEMS[1]}{dotted}.safetensors")

    weight_map = read_json(indices[0]).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{indices[0]}: has no weight_map")
    files: dict[Path, set[str] | None] = {}
    for name, file in weight_map.items():
        # A plain file name cannot leave the folder. (Symbolic links are left alone: the hub's cache is made of them.)
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file) or file.startswith("."):
            raise ValueError(f"{indices[0]}: {file!r}, given for {name}, is not the name of a safetensors file in that folder")
        files.setdefault(folder / file, set()).add(name)
    return files


def open_file(path: Path) -> Any:
    """An open safetensors file, read with numpy.

    Raises:
      ValueError: the file is missing, empty, truncated or not safetensors; the message names it.
    """
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error


def open_weights(folder: Path, variant: str | None = None) -> dict[str, Stored]:
    """Every tensor of one component, by torch name. Reads headers only.

    Args:
      folder: the component's folder.
      variant: see `find_files`.

    Raises:
      ValueError: see `find_files` and `open_file`; also files that disagree with their index or with each other.
    """
    tensors: dict[str, Stored] = {}
    for path, promised in find_files(folder, variant).items():
        handle = open_file(path)
        names = set(handle.keys())
        if promised is not None and names != promised:
            raise ValueError(f"{path}: does not hold what the index says; {_listed(names ^ promised, 'differs in')}")
        if twice := names & tensors.keys():
            raise ValueError(f"{path}: repeats tensors of other files; {_listed(twice, 'among them')}")
        for name in names:
            view = handle.get_slice(name)
            tensors[name] = Stored(path, view, tuple(view.get_shape()), view.get_dtype())
    return tensors


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_params(
    tensors: Mapping[str, Stored],
    table: Mapping[str, Source],
    shapes: Any,
    dtype: Any,
    sharding: Any = None,
    tied: Mapping[str, str] = MappingProxyType({}),
    ignored: Collection[str] = (),
) -> dict:
    """A network's parameters, each array read slice by slice into its shards.

    Args:
      tensors: what `open_weights` found.
      table: the network's name table: "/"-joined path of a parameter -> the torch tensors it is made of.
      shapes: nested dict of anything with a `shape`, as `jax.eval_shape` of the network's init gives.
      dtype: the type to hold the parameters in, cast while reading.
      sharding: a `jax.sharding.Sharding` for all, a tree of them that is a prefix of `shapes`, None for the default device, uncommitted,
        or "host" for numpy arrays.
      tied: torch names that some writers store a second time, each with the name it repeats: they may be absent, and must hold
        the same values when they are there.
      ignored: torch names of constants that the network makes itself; they may be absent.

    Returns:
      Nested dict of arrays, the structure of `shapes`.

    Raises:
      ValueError: tensors missing, unexpected, or of the wrong shape or type (all of them in one message), values that are
        not finite, or tied tensors that differ.
    """
    flat = flatten_dict(shapes, sep="/")
    check_tensors(tensors, table, shapes, {*tied, *ignored})
    for copy, name in tied.items():
        if copy in tensors and not np.array_equal(tensors[copy].view[...], tensors[name].view[...]):
            raise ValueError(f"{tensors[copy].file}: {copy} and {name} should be one tensor, but their values differ")

    shardings = flatten_dict(jax.tree.broadcast(sharding, shapes), sep="/") if sharding is not None else dict.fromkeys(flat)
    dtype = np.dtype(dtype)
    return unflatten_dict({path: _read(tensors, table[path], flat[path].shape, dtype, shardings[path]) for path in flat}, sep="/")


def _read(tensors: Mapping[str, Stored], source: Source, shape: tuple[int, ...], dtype: np.dtype, sharding: Any) -> jax.Array:
    """One array; the callback gets the index of the stacked, transposed array and reads just that from the files."""
    axes = AXES[source.transform] or tuple(range(len(shape) - source.stacked))
    read: dict[tuple, np.ndarray] = {}  # devices that hold the same part share one read

    def part(name: str, index: tuple[slice, ...]) -> np.ndarray:
        stored = tensors[name]
        torch_index = tuple(index[axes.index(axis)] for axis in range(len(axes)))
        try:
            value = np.asarray(stored.view[torch_index or ...])
        except SafetensorError as error:
            raise ValueError(f"{stored.file}: {name} cannot be read ({error})") from error
        with np.errstate(over="ignore"):  # what overflows the type is reported below, as not finite
            value = value.astype(dtype).transpose(axes)
        if not np.isfinite(value).all():
            raise ValueError(f"{stored.file}: {name} holds values that are not finite as {dtype.name}")
        return value

    def callback(index: tuple[slice, ...]) -> np.ndarray:
        index = tuple(slice(*i.indices(n)) for i, n in zip(index, shape))
        key = tuple((i.start, i.stop) for i in index)
        if key not in read:
            if source.stacked:
                read[key] = np.empty([i.stop - i.start for i in index], dtype)
                for row, name in zip(read[key], source.names[index[0]]):
                    row[...] = part(name, index[1:])
            else:
                read[key] = np.array(part(source.names[0], index), order="C")  # keeps a scalar a scalar
        return read[key]

    if sharding in (None, "host"):
        value = callback((slice(None),) * len(shape))
        return value if sharding == "host" else jnp.asarray(value)
    return jax.make_array_from_callback(tuple(shape), sharding, callback)


def check_tensors(tensors: Mapping[str, Stored], table: Mapping[str, Source], shapes: Any, spare: Collection[str] = ()) -> None:
    """Raises ValueError unless file, name table and model match one to one; `spare` torch names may be in the file besides."""
    shapes = flatten_dict(shapes, sep="/")
    if table.keys() != shapes.keys():
        raise ValueError(f"the name table and the model disagree; {_listed(table.keys() ^ shapes.keys(), 'differ in')}")
    named: set[str] = set()
    wrong, types = [], []
    for path, source in table.items():
        expected = _torch_shape(source, tuple(shapes[path].shape), path)
        named.update(source.names)
        for name in source.names:
            if name in tensors and tensors[name].shape != expected:
                wrong.append(f"{name} {list(tensors[name].shape)} instead of {list(expected)}")
            if name in tensors and tensors[name].dtype not in DTYPES:
                types.append(f"{name} ({tensors[name].dtype})")
    missing = named - tensors.keys()
    unexpected = tensors.keys() - named - set(spare)
    if missing or unexpected or wrong or types:
        where = next((str(stored.file.parent) for stored in tensors.values()), "the weights")
        kinds = ((missing, "missing"), (unexpected, "unexpected"), (wrong, "of the wrong shape"), (types, "of a type that is not read"))
        found = "; ".join(f"{len(names)} {_listed(names, kind)}" for names, kind in kinds if names)
        raise ValueError(f"{where}: not the weights of this model: {found}")


def _torch_shape(source: Source, shape: tuple[int, ...], path: str) -> tuple[int, ...]:
    """The shape of each torch tensor of an array of ours."""
    if len(source.names) != (shape[0] if source.stacked and shape else 1):
        raise ValueError(f"the name table gives {len(source.names)} tensors for {path} of shape {list(shape)}")
    inner = shape[source.stacked :]
    axes = AXES[source.transform] or tuple(range(len(inner)))
    return tuple(inner[axes.index(axis)] for axis in range(len(axes)))


def _listed(names: Iterable[str], kind: str) -> str:
    names = sorted(names)
    return f"{kind}: {', '.join(names[:LISTED])}" + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write_params(folder: Path, params: Mapping, table: Mapping[str, Source], dtype: Any, stem: str = STEMS[0]) -> Path:
    """Writes parameters as one safetensors file with torch names: the inverse of `read_params`.

    Args:
      folder: where to; made if absent.
      params: nested dict of arrays.
      table: the network's name table.
      dtype: the type to store.
      stem: "diffusion_pytorch_model" for diffusers components, "model" for transformers ones.

    Returns:
      The file.

    Raises:
      ValueError: parameters and table do not match one to one.
    """
    flat = flatten_dict(params, sep="/")
    if table.keys() != flat.keys():
        raise ValueError(f"the name table and the parameters disagree; {_listed(table.keys() ^ flat.keys(), 'differ in')}")
    parts: dict[str, tuple[str, int | None]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path, source in table.items():
        shape = _torch_shape(source, flat[path].shape, path)
        for layer, name in enumerate(source.names):
            parts[name] = (path, layer if source.stacked else None)
            shapes[name] = shape

    def value(name: str) -> np.ndarray:
        path, layer = parts[name]
        array = np.asarray(flat[path] if layer is None else flat[path][layer])
        axes = AXES[table[path].transform]
        return array if axes is None else array.transpose(np.argsort(axes))

    file = Path(folder) / f"{stem}.safetensors"
    write_safetensors(file, {name: (shape, np.dtype(dtype)) for name, shape in shapes.items()}, value)
    return file


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    value: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file tensor by tensor, holding one at a time; the file appears when it is complete.

    Args:
      path: the file; its folder is made if absent.
      tensors: shape and type of each tensor.
      value: gives a tensor by name; it is cast to the stated type.
      metadata: strings to store in the header.

    Raises:
      ValueError: a type that is not written, or a value of another shape than stated.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, (shape, dtype) in tensors.items():
        if dtype not in names:
            raise ValueError(f"{path}: {name} is to be written as {dtype}; only {', '.join(d.name for d in names)} are")
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data starts aligned

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for name, (shape, dtype) in tensors.items():
                array = np.asarray(value(name))
                if array.shape != tuple(shape):
                    raise ValueError(f"{path}: {name} has shape {list(array.shape)}, not {list(shape)}")
                file.write(np.ascontiguousarray(array, dtype).tobytes())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)

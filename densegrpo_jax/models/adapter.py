"""LoRA adapters on disk: written for diffusers, PEFT and ComfyUI, read from what they and other trainers write.

The three readers find the strength alpha / rank in three places: diffusers in the file's `lora_adapter_metadata`, PEFT in
adapter_config.json, ComfyUI in `<module>.alpha` tensors (which diffusers refuses for SD3). All of them take 1 where nothing
is said, so we write B times alpha / rank and say nothing, or alpha = rank: right everywhere, and nobody counts it twice.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from densegrpo_jax.models.source import Source
from densegrpo_jax.models.weights import LISTED, open_file, read_json, write_safetensors

PREFIXES = ("base_model.model.", "transformer.", "")  # PEFT; diffusers pipelines; diffusers' save_lora_adapter
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
# Fields of a LoraConfig that change what the tensors mean, with the values under which they do not.
PLAIN = {
    "peft_type": ("LORA", None),
    "bias": ("none", None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
}


class Adapter(NamedTuple):
    """A LoRA adapter of a transformer.

    Attributes:
      lora: the collection `lora`: at the path of each adapted Dense, "a" [in, R] and "b" [R, out], with a leading layer axis where
        layers are stacked; float32.
      alpha: the layer computes x W + alpha / R (x a) b.
    """

    lora: dict
    alpha: float


def rank(lora: Mapping) -> int:
    """The rank R that all leaves of a `lora` collection share.

    Raises:
      ValueError: no leaves, or different ranks.
    """
    flat = flatten_dict(lora, sep="/")
    ranks = {leaf.shape[-1] if path.endswith("/a") else leaf.shape[-2] for path, leaf in flat.items()}
    if len(ranks) != 1:
        raise ValueError(f"an adapter has one rank; this one has {sorted(ranks) or 'no leaves'}")
    return ranks.pop()


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def torch_modules(adapter: Adapter, table: Mapping[str, Source]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The adapter by torch module name, its strength folded into B.

    Args:
      adapter: the adapter.
      table: the transformer's name table.

    Returns:
      Module name -> A [R, in] and B [out, R], float32, with the module computing x W^T + (x A^T) B^T.

    Raises:
      ValueError: a path of the adapter that is no linear layer of the model.
    """
    flat = flatten_dict(adapter.lora, sep="/")
    strength = np.float32(adapter.alpha / rank(adapter.lora))
    modules = {}
    for path in sorted({path.rpartition("/")[0] for path in flat}):
        source = table.get(f"{path}/kernel")
        if source is None or source.transform != "transpose" or {f"{path}/a", f"{path}/b"} - flat.keys():
            raise ValueError(f"the adapter's {path} is not a linear layer of this model with a and b")
        a, b = (np.asarray(flat[f"{path}/{leaf}"], np.float32) for leaf in "ab")
        if not source.stacked:
            a, b = a[None], b[None]
        if len(a) != len(source.names) or len(b) != len(source.names):
            raise ValueError(f"the adapter has {len(a)} layers at {path}; this model has {len(source.names)}")
        for layer, name in enumerate(source.names):
            modules[name.removesuffix(".weight")] = (a[layer].T, b[layer].T * strength)
    return modules


def write_adapter(folder: Path, adapter: Adapter, table: Mapping[str, Source], format: Literal["diffusers", "peft"]) -> Path:
    """Writes an adapter so that `load_lora_weights` of diffusers, or PEFT, and ComfyUI apply it at the right strength.

    Args:
      folder: where to; made if absent.
      adapter: the adapter.
      table: the transformer's name table.
      format: "diffusers" writes pytorch_lora_weights.safetensors; "peft" writes adapter_model.safetensors and adapter_config.json.

    Returns:
      The safetensors file.

    Raises:
      ValueError: another format, or an adapter that does not fit the model.
    """
    if format not in ("diffusers", "peft"):
        raise ValueError(f"format {format!r} is not one of diffusers, peft")
    modules = torch_modules(adapter, table)
    prefix, name = ("base_model.model.", PEFT_FILE) if format == "peft" else ("transformer.", DIFFUSERS_FILE)
    tensors = {f"{prefix}{module}.lora_{half}.weight": value for module, pair in modules.items() for half, value in zip("AB", pair)}
    path, R = Path(folder) / name, rank(adapter.lora)
    note = f"rank {R}, alpha {adapter.alpha:g} folded into lora_B: apply at strength 1"
    shapes = {key: (value.shape, value.dtype) for key, value in tensors.items()}
    write_safetensors(path, shapes, tensors.__getitem__, {"densegrpo_jax": note})
    if format == "peft":
        config = {"peft_type": "LORA", "r": R, "lora_alpha": R, "target_modules": sorted(modules), "lora_dropout": 0.0, "bias": "none"}
        (path.parent / PEFT_CONFIG).write_text(json.dumps({**config, "inference_mode": True}, indent=2) + "\n")
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_adapter(path: Path, table: Mapping[str, Source], shapes: Any, alpha: float | None = None) -> Adapter:
    """Reads an adapter written by us, diffusers or PEFT, whatever its alpha.

    Every tensor of the file has to be a LoRA matrix of a linear layer of this model. Layers of one stack that the file leaves out get
    zeros, and lower ranks are padded with zeros: both compute what the file says, but zeros in both A and B stay zero in training.

    Args:
      path: a safetensors file, or a folder with pytorch_lora_weights.safetensors, adapter_model.safetensors, or one safetensors file.
      table: the transformer's name table.
      shapes: its abstract parameters, nested dict of anything with a `shape`.
      alpha: the alpha to express the adapter in (b is scaled so that alpha / R times a b is what the file says); None for alpha = R.

    Returns:
      The adapter.

    Raises:
      ValueError: an unreadable file, tensors that are not such matrices or do not fit the model, an unsupported kind of LoRA (DoRA,
        biases, text encoder), or two statements of alpha that disagree.
    """
    path = _adapter_file(Path(path).expanduser())
    handle = open_file(path)
    tensors = {key: np.asarray(handle.get_tensor(key)).astype(np.float32) for key in handle.keys()}
    if not tensors:
        raise ValueError(f"{path}: holds no tensors")
    if encoders := sorted(key for key in tensors if key.startswith("text_encoder")):
        raise ValueError(f"{path}: adapts text encoders ({encoders[0]}, ...), which are frozen here")
    prefix = next(prefix for prefix in PREFIXES if all(key.startswith(prefix) for key in tensors))
    if bad := sorted(key for key, value in tensors.items() if not np.isfinite(value).all()):
        raise ValueError(f"{path}: {bad[0]} holds values that are not finite")

    halves: dict[str, dict[str, np.ndarray]] = {}
    alphas: dict[str, float] = {}
    unexpected = []
    for key, value in tensors.items():
        module, _, kind = key.removeprefix(prefix).rpartition(".lora_")
        if kind in ("A.weight", "B.weight") and value.ndim == 2:
            halves.setdefault(module, {})[kind[0]] = value
        elif key.endswith(".alpha") and value.size == 1:
            alphas[key.removeprefix(prefix).removesuffix(".alpha")] = float(value.reshape(()))
        else:
            unexpected.append(key)
    places = {
        name.removesuffix(".weight"): (path.removesuffix("/kernel"), layer)
        for path, source in table.items()
        if source.transform == "transpose" and path.endswith("/kernel")
        for layer, name in enumerate(source.names)
    }
    unexpected += [module for module in halves if module not in places] + [f"{module}.alpha" for module in alphas if module not in halves]
    if unexpected:
        raise ValueError(
            f"{path}: {len(unexpected)} of its entries are not LoRA matrices (lora_A.weight, lora_B.weight) of a linear layer of this "
            f"model: {', '.join(sorted(unexpected)[:LISTED])}"
        )
    if single := sorted(module for module, pair in halves.items() if len(pair) != 2):
        raise ValueError(f"{path}: {single[0]} has only lora_{next(iter(halves[single[0]]))}")

    config = _lora_config(path, handle.metadata() or {})
    R = max(pair["A"].shape[0] for pair in halves.values())
    alpha = float(R) if alpha is None else alpha
    kernels, flat = flatten_dict(shapes, sep="/"), {}
    for module, pair in halves.items():
        place, layer = places[module]
        *stack, width, features = kernels[f"{place}/kernel"].shape
        r = pair["A"].shape[0]
        if pair["A"].shape != (r, width) or pair["B"].shape != (features, r) or r == 0:
            raise ValueError(
                f"{path}: {module} has lora_A {list(pair['A'].shape)} and lora_B {list(pair['B'].shape)}; this model needs "
                f"[r, {width}] and [{features}, r]"
            )
        a = flat.setdefault(f"{place}/a", np.zeros((*stack, width, R), np.float32))
        b = flat.setdefault(f"{place}/b", np.zeros((*stack, R, features), np.float32))
        at = (layer,) if stack else ()
        a[at][:, :r] = pair["A"].T
        b[at][:r] = pair["B"].T * (_strength(path, module, r, alphas, config) * R / alpha)
    return Adapter(unflatten_dict({path: jnp.asarray(value) for path, value in flat.items()}, sep="/"), alpha)


def _adapter_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in (PEFT_FILE, DIFFUSERS_FILE):
        if (path / name).exists():
            return path / name
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found[:LISTED]) or "none"
        raise ValueError(f"{path}: expected {DIFFUSERS_FILE}, {PEFT_FILE} or one safetensors file; found {names}")
    return found[0]


def _lora_config(path: Path, metadata: Mapping[str, str]) -> dict:
    """What is said about rank and alpha outside the tensors: PEFT's adapter_config.json, or diffusers' header entry."""
    if path.name == PEFT_FILE:
        config = read_json(path.parent / PEFT_CONFIG)
    elif "lora_adapter_metadata" in metadata:
        try:
            entries = json.loads(metadata["lora_adapter_metadata"])
            config = {key.removeprefix("transformer."): value for key, value in entries.items()}
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: its lora_adapter_metadata is not a JSON object") from error
    else:
        return {}
    for field, plain in PLAIN.items():
        if config.get(field) not in plain:
            raise ValueError(f"{path}: has {field} = {config[field]!r}, a kind of LoRA that is not supported here")
    return config


def _strength(path: Path, module: str, r: int, alphas: Mapping[str, float], config: Mapping[str, Any]) -> float:
    """alpha / r of a module of rank r: PEFT's rule for a config, alpha tensors otherwise, 1 when nothing is said."""
    try:
        stated = float(_by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])) if "lora_alpha" in config else None
        stated_rank = int(_by_pattern(config.get("rank_pattern"), module, config.get("r", r)))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: its config gives no usable alpha and rank for {module} ({error})") from error
    if stated is not None and not np.isfinite(stated):
        raise ValueError(f"{path}: its config gives no usable alpha for {module} ({stated})")
    if stated_rank != r:
        raise ValueError(f"{path}: {module} has rank {r}, but the config says {stated_rank}")
    if stated is not None and alphas.get(module, stated) != stated:
        raise ValueError(f"{path}: the alpha of {module} is {alphas[module]:g} in the tensors and {stated:g} in the config")
    alpha = alphas.get(module, float(r) if stated is None else stated)
    return alpha / (r**0.5 if config.get("use_rslora") else r)


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's per-module override: the entry named like the module or the end of its name.

    PEFT takes the entries for regular expressions; those that writers make are names with an optional "^", and no others are read.
    """
    for pattern, value in (patterns or {}).items():
        name = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if not name.replace("_", "").replace(".", "").isalnum():
            raise ValueError(f"the pattern {pattern!r} is not a plain module name")
        if module == name or (not pattern.startswith("^") and module.endswith(f".{name}")):
            return value
    return default

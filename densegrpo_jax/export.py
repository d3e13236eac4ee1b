"""`densegrpo export`: a trained adapter for diffusers, PEFT and ComfyUI, or folded into a full model folder."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from densegrpo_jax import pipeline
from densegrpo_jax.models import lora as loras
from densegrpo_jax.models.adapter import Adapter, torch_modules, write_adapter
from densegrpo_jax.models.source import Source
from densegrpo_jax.models.weights import (
    COMPONENTS,
    DTYPES,
    TOKENIZERS,
    check_tensors,
    find_files,
    find_folder,
    open_file,
    open_weights,
    write_safetensors,
)

Format = Literal["diffusers", "peft", "merged"]
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack")


def export(adapter: Adapter, model: str | Path, format: Format, out: Path, variant: str | None = None, dtype: str | None = None) -> Path:
    """Writes an adapter in one of three forms.

    Args:
      adapter: what was trained.
      model: the folder or hub id of the model it was trained on.
      format: "diffusers" (`pipe.load_lora_weights(out)`, ComfyUI), "peft" (`PeftModel.from_pretrained(transformer, out)`), or
        "merged" (a model folder like `model` whose transformer has the adapter folded in).
      out: the folder to write; it must not exist yet or be empty.
      variant: which weights of `model` to merge into, "fp16" or "bf16"; None for the unnamed ones.
      dtype: type of the merged transformer, "float32", "bfloat16" or "float16"; None keeps that of each tensor. In 16 bits a small
        adapter is partly lost to rounding.

    Returns:
      `out`.

    Raises:
      ValueError: an unknown format or dtype, an adapter that does not fit the model, a model that cannot be read, or an `out` that
        holds something already.
    """
    if format not in get_args(Format):
        raise ValueError(f"format {format!r} is not one of {', '.join(get_args(Format))}")
    stored = {None: None} | {d.name: d for d in DTYPES.values()}
    if dtype not in stored:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(d.name for d in DTYPES.values())}")
    out = Path(out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; choose an empty or new folder")
    folder = find_folder(model, variant, weights=format == "merged")
    configs = pipeline.read_configs(folder)
    table, shapes = pipeline.name_table(configs, "transformer"), pipeline.abstract_params(configs, "transformer")
    loras.check(shapes, adapter.lora)
    if format == "merged":
        check_tensors(open_weights(folder / "transformer", variant), table, shapes)
        merge(adapter, folder, out, table, variant, stored[dtype])
    else:
        write_adapter(out, adapter, table, format)
    return out


def merge(adapter: Adapter, folder: Path, out: Path, table: Mapping[str, Source], variant: str | None, dtype: np.dtype | None) -> None:
    """Copies a model folder, adding the adapter to the transformer's weights: file by file, one tensor in memory at a time.

    The files keep their names, so a merged "fp16" variant is loaded with that variant. Args: see `export`; `table` is the
    transformer's name table.
    """
    modules = torch_modules(adapter, table)
    parts = [name for name in (*COMPONENTS, *TOKENIZERS, "scheduler") if (folder / name).is_dir()]
    chosen = {name: find_files(folder / name, variant) for name in parts if name in COMPONENTS}
    index = f".index.{variant}.json" if variant else ".index.json"

    def left_out(directory: str, names: list[str]) -> list[str]:
        keep = {file.name for file in chosen.get(Path(directory).name, ()) if Path(directory).name != "transformer"}
        return [n for n in names if (n.endswith(WEIGHT_SUFFIXES) and n not in keep) or (".index." in n and not n.endswith(index))]

    part = out.with_name(f".{out.name}.part")  # renamed when complete
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        shutil.copyfile(folder / "model_index.json", part / "model_index.json")
        for name in parts:
            shutil.copytree(folder / name, part / name, ignore=left_out)
        for file in chosen["transformer"]:
            _merge_file(file, part / "transformer" / file.name, modules, dtype)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _merge_file(source: Path, target: Path, modules: Mapping[str, tuple[np.ndarray, np.ndarray]], dtype: np.dtype | None) -> None:
    handle = open_file(source)
    views = {name: handle.get_slice(name) for name in handle.keys()}

    def value(name: str) -> np.ndarray:
        tensor = np.asarray(views[name][...])
        pair = modules.get(name.removesuffix(".weight"))
        return tensor if pair is None else tensor.astype(np.float32) + pair[1] @ pair[0]

    shapes: dict[str, Any] = {name: (tuple(view.get_shape()), dtype or DTYPES[view.get_dtype()]) for name, view in views.items()}
    write_safetensors(target, shapes, value)

"""Turns public scorers that torch has pickled into folders of safetensors that the rewards read. Needs no torch.

    python tools/convert_scorer.py hpsv2 HPS_v2.1_compressed.pt --out FOLDER
    python tools/convert_scorer.py aesthetic sac+logos+ava1-l14-linearMSE.pth --out FOLDER
    python tools/convert_scorer.py imagereward ImageReward.pt --out FOLDER

A pickle is a program, and reading it runs it. The one here is read by an unpickler that knows three things: ordered dicts, torch's
storages, and how a tensor is laid out in one. At anything else it stops with the name of what was asked for. Tensors are read one at a
time; each must be one that the scorer needs or that is known to be spare. docs/rewards.md says where the files come from.
"""

import argparse
import hashlib
import io
import json
import math
import pickle
import re
import shutil
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the package where it is not installed

import ml_dtypes
import numpy as np

from densegrpo_jax.models import blip, clip
from densegrpo_jax.models.weights import DTYPES, Stored, check_tensors, find_folder, open_weights, read_json, write_safetensors
from densegrpo_jax.rewards import aesthetic, imagereward
from densegrpo_jax.rewards import clip as clip_rewards

STORAGES = {
    "DoubleStorage": np.float64, "FloatStorage": np.float32, "HalfStorage": np.float16, "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64, "IntStorage": np.int32, "ShortStorage": np.int16, "CharStorage": np.int8, "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}  # fmt: skip
PICKLE_LIMIT = 64 << 20  # bytes of names and shapes; a checkpoint's tensors are stored beside them
LEGACY = bytes.fromhex("80028a0a6cfc9c46f9206aa850")  # what torch wrote first before version 1.6
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt", "special_tokens_map.json")


# ---------------------------------------------------------------------------------------------------------------------
# Reading what torch saved


class Storage(NamedTuple):
    """Numbers in an archive: the entry that holds them, their type and how many they are."""

    archive: zipfile.ZipFile
    entry: str
    dtype: np.dtype
    count: int


class Tensor(NamedTuple):
    """A view of a storage, as torch describes it; `read` makes it an array.

    Attributes:
      storage: what it views.
      offset: of the first number.
      shape, stride: in numbers.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def transposed(self) -> "Tensor":
        return self._replace(shape=self.shape[::-1], stride=self.stride[::-1])

    def third(self, part: int) -> "Tensor":
        """The given third of the rows."""
        rows = self.shape[0] // 3
        return self._replace(offset=self.offset + part * rows * self.stride[0], shape=(rows, *self.shape[1:]))

    def read(self) -> np.ndarray:
        """The numbers.

        Raises:
          ValueError: the archive holds fewer of them.
        """
        archive, entry, dtype, count = self.storage
        data = archive.read(entry)
        last, size = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride)), math.prod(self.shape)
        if len(data) != count * dtype.itemsize or size > count or (size and last >= count):
            raise ValueError(f"{archive.filename}: {entry} has {len(data)} bytes, which is not what a tensor of {list(self.shape)} needs")
        numbers = np.frombuffer(data, dtype)[self.offset :]
        return np.lib.stride_tricks.as_strided(numbers, self.shape, [step * dtype.itemsize for step in self.stride]).copy()


class Rebuild:
    """What a pickle calls to make a tensor; gradients and hooks are not wanted. An object without attributes: a pickle may set those."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, shape: Any, stride: Any, *unused: Any) -> Tensor:
        numbers = (offset, *shape, *stride)
        if not isinstance(storage, Storage) or len(shape) != len(stride) or not all(type(n) is int and n >= 0 for n in numbers):
            raise pickle.UnpicklingError("a tensor that is not described as torch describes one")
        return Tensor(storage, offset, tuple(shape), tuple(stride))


KNOWN = {("collections", "OrderedDict"): OrderedDict, ("torch._utils", "_rebuild_tensor_v2"): Rebuild()}


class TensorUnpickler(pickle.Unpickler):
    """Knows tensors, their storages and ordered dicts."""

    def __init__(self, archive: zipfile.ZipFile, root: str):
        self.archive, self.root = archive, root
        super().__init__(io.BytesIO(archive.read(f"{root}data.pkl")))

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return name  # a name can neither be called nor have attributes set
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only tensors in dicts are read")
        return KNOWN[module, name]

    def persistent_load(self, reference: Any) -> Storage:
        match reference:
            case ("storage", str(kind), str(key), _, int(count)) if kind in STORAGES and re.fullmatch(r"[0-9]+", key) and count >= 0:
                return Storage(self.archive, f"{self.root}data/{key}", np.dtype(STORAGES[kind]), count)
        raise pickle.UnpicklingError(f"it refers to {reference!r:.100}, which is not a storage")


def open_checkpoint(path: Path) -> Any:
    """What torch.save wrote: dicts, lists, numbers and strings, with `Tensor`s. Runs nothing of it.

    Raises:
      ValueError: not such a file, one of torch before 1.6, or one that asks for more than tensors; it says which.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(len(LEGACY))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    if start == LEGACY:
        raise ValueError(
            f"{path}: written by torch before 1.6, whose format is not read here. Where torch is installed, write it anew, without "
            f"running it: import torch; torch.save(torch.load({str(path)!r}, map_location='cpu', weights_only=True), 'new.pt')"
        )
    try:
        archive = zipfile.ZipFile(path)
        names = [info.filename for info in archive.infolist()]
        roots = [name.removesuffix("data.pkl") for name in names if re.fullmatch(r"[^/]*/data\.pkl", name)]
        if len(roots) != 1:
            raise ValueError("it has no data.pkl")
        if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
            raise ValueError("it is compressed, which torch does not do")
        if archive.getinfo(f"{roots[0]}data.pkl").file_size > PICKLE_LIMIT:
            raise ValueError("its data.pkl is larger than any checkpoint's")
        order = f"{roots[0]}byteorder"
        if order in names and archive.read(order) != b"little":
            raise ValueError("its numbers are not little-endian")
        return TensorUnpickler(archive, roots[0]).load()
    except Exception as error:  # a broken pickle raises whatever the broken part leads to
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: refused, {reason}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Names


class Names:
    """Takes tensors out of a checkpoint by name, so that in the end none is forgotten."""

    def __init__(self, path: Path, tensors: Any):
        if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
            raise ValueError(f"{path}: holds no dict of tensors where one was expected")
        self.path, self.left, self.taken = path, dict(tensors), {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.left:
            raise ValueError(f"{self.path}: has no tensor {name}; is it the checkpoint of another scorer?")
        return self.left[name]

    def layers(self, pattern: str) -> int:
        """How many different numbers stand at `N` in names that begin with the pattern."""
        return len({found[1] for name in self.left if (found := re.match(re.escape(pattern).replace("N", "([0-9]+)"), name))})

    def take(self, name: str, new: str, change: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        self.taken[new] = change(self[name])
        del self.left[name]

    def both(self, name: str, new: str) -> None:
        """Weight and bias."""
        for part in ("weight", "bias"):
            self.take(f"{name}.{part}", f"{new}.{part}")

    def end(self, spare: str) -> dict[str, Tensor]:
        """What was taken; raises ValueError if something is left that does not match `spare`."""
        known = sorted(name for name in self.left if re.fullmatch(spare, name))
        if unknown := sorted(self.left.keys() - known):
            raise ValueError(f"{self.path}: {len(unknown)} tensors have no place in this scorer, such as {', '.join(unknown[:5])}")
        if known:
            print(f"not needed: {', '.join(known)}")
        return self.taken


def hpsv2(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """CLIP ViT-H/14 under OpenCLIP's names -> config.json and tensors under transformers'."""
    checkpoint = open_checkpoint(path)
    names = Names(path, checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None)
    vocabulary, width = names["token_embedding.weight"].shape
    positions, (side, _) = names["visual.positional_embedding"].shape[0], names["visual.conv1.weight"].shape[2:]
    common = {"hidden_act": "gelu", "num_attention_heads": 16}
    config = {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": names["text_projection"].shape[1],
        "text_config": common
        | {
            "model_type": "clip_text_model",
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": names["transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
            "num_hidden_layers": names.layers("transformer.resblocks.N."),
            "max_position_embeddings": names["positional_embedding"].shape[0],
            "bos_token_id": vocabulary - 2,
            "eos_token_id": vocabulary - 1,
        },
        "vision_config": common
        | {
            "model_type": "clip_vision_model",
            "hidden_size": names["visual.conv1.weight"].shape[0],
            "intermediate_size": names["visual.transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
            "num_hidden_layers": names.layers("visual.transformer.resblocks.N."),
            "image_size": math.isqrt(positions - 1) * side,
            "patch_size": side,
        },
    }
    for prefix, tower in (("", "text_model"), ("visual.", "vision_model")):
        for i in range(config[tower.replace("model", "config")]["num_hidden_layers"]):
            block, new = f"{prefix}transformer.resblocks.{i}", f"{tower}.encoder.layers.{i}"
            for name, part in (("ln_1", "layer_norm1"), ("ln_2", "layer_norm2"), ("attn.out_proj", "self_attn.out_proj")):
                names.both(f"{block}.{name}", f"{new}.{part}")
            names.both(f"{block}.mlp.c_fc", f"{new}.mlp.fc1")
            names.both(f"{block}.mlp.c_proj", f"{new}.mlp.fc2")
            for kind in ("weight", "bias"):
                together = f"{block}.attn.in_proj_{kind}"
                for third, part in enumerate("qk"):
                    names.taken[f"{new}.self_attn.{part}_proj.{kind}"] = names[together].third(third)
                names.take(together, f"{new}.self_attn.v_proj.{kind}", lambda tensor: tensor.third(2))
    names.take("token_embedding.weight", "text_model.embeddings.token_embedding.weight")
    names.take("positional_embedding", "text_model.embeddings.position_embedding.weight")
    names.both("ln_final", "text_model.final_layer_norm")
    names.take("text_projection", "text_projection.weight", Tensor.transposed)
    names.take("visual.class_embedding", "vision_model.embeddings.class_embedding")
    names.take("visual.positional_embedding", "vision_model.embeddings.position_embedding.weight")
    names.take("visual.conv1.weight", "vision_model.embeddings.patch_embedding.weight")
    names.both("visual.ln_pre", "vision_model.pre_layrnorm")
    names.both("visual.ln_post", "vision_model.post_layernorm")
    names.take("visual.proj", "visual_projection.weight", Tensor.transposed)
    names.take("logit_scale", "logit_scale")
    return config, names.end(r"(visual\.)?attn_mask")


def aesthetic_head(path: Path) -> dict[str, Tensor]:
    """The five linear layers."""
    names = Names(path, open_checkpoint(path))
    for layer in aesthetic.score_head.LAYERS:
        names.both(f"layers.{layer}", f"mlp.layers.{layer}")
    return names.end("$^")


def image_reward(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """BLIP under its authors' names -> config.json and tensors under transformers'."""
    names = Names(path, open_checkpoint(path))
    seen, text = "blip.visual_encoder", "blip.text_encoder"
    width, _, side, _ = names[f"{seen}.patch_embed.proj.weight"].shape
    layer = f"{text}.encoder.layer.0"
    config = {
        "architectures": ["BlipForImageTextRetrieval"],
        "model_type": "blip",
        "text_config": {
            "model_type": "blip_text_model",
            "vocab_size": names[f"{text}.embeddings.word_embeddings.weight"].shape[0],
            "hidden_size": names[f"{text}.embeddings.word_embeddings.weight"].shape[1],
            "encoder_hidden_size": width,
            "intermediate_size": names[f"{layer}.intermediate.dense.weight"].shape[0],
            "num_hidden_layers": names.layers(f"{text}.encoder.layer.N."),
            "num_attention_heads": 12,
            "max_position_embeddings": names[f"{text}.embeddings.position_embeddings.weight"].shape[0],
            "layer_norm_eps": 1e-12,
        },
        "vision_config": {
            "model_type": "blip_vision_model",
            "hidden_size": width,
            "intermediate_size": names[f"{seen}.blocks.0.mlp.fc1.weight"].shape[0],
            "num_hidden_layers": names.layers(f"{seen}.blocks.N."),
            "num_attention_heads": 16,
            "image_size": math.isqrt(names[f"{seen}.pos_embed"].shape[1] - 1) * side,
            "patch_size": side,
            "layer_norm_eps": 1e-6,
        },
    }
    names.take(f"{seen}.cls_token", "vision_model.embeddings.class_embedding")
    names.take(f"{seen}.pos_embed", "vision_model.embeddings.position_embedding")
    names.both(f"{seen}.patch_embed.proj", "vision_model.embeddings.patch_embedding")
    names.both(f"{seen}.norm", "vision_model.post_layernorm")
    for i in range(config["vision_config"]["num_hidden_layers"]):
        block, new = f"{seen}.blocks.{i}", f"vision_model.encoder.layers.{i}"
        for name, part in (("norm1", "layer_norm1"), ("norm2", "layer_norm2"), ("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2")):
            names.both(f"{block}.{name}", f"{new}.{part}")
        names.both(f"{block}.attn.qkv", f"{new}.self_attn.qkv")
        names.both(f"{block}.attn.proj", f"{new}.self_attn.projection")
    ours = {name for source in blip.name_table(blip.BLIPConfig.from_json(config)).values() for name in source.names}
    for name in sorted(ours - names.taken.keys()):  # the text encoder and the head, which are called alike
        names.take(f"blip.{name}" if name.startswith("text_encoder.") else name, name)
    return config, names.end(r"blip\.(vision_proj|text_proj)\.(weight|bias)|blip\.text_encoder\.embeddings\.position_ids")


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write_folder(out: Path, source: Path, config: dict, tensors: Mapping[str, Tensor | Stored], side: int) -> None:
    """config.json, the image processor's settings and the weights, read one at a time."""
    digest = hashlib.sha256()
    with source.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    processing = clip_rewards.ImageProcessing()
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
        "resample": clip_rewards.BICUBIC,
        "image_mean": list(processing.image_mean),
        "image_std": list(processing.image_std),
    }
    shapes = {name: (t.shape, t.storage.dtype if isinstance(t, Tensor) else DTYPES[t.dtype]) for name, t in tensors.items()}
    written = {"source": source.name, "sha256": digest.hexdigest()}

    def value(name: str) -> np.ndarray:
        tensor = tensors[name]
        return tensor.read() if isinstance(tensor, Tensor) else tensor.view[...]

    write_safetensors(out / "model.safetensors", shapes, value, written)
    for name, content in (("config.json", config), ("preprocessor_config.json", processor)):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    numbers = sum(math.prod(shape) for shape, _ in shapes.values())
    print(f"{out}: {len(shapes)} tensors, {numbers / 1e6:.1f} million numbers, from {source.name} (sha256 {digest.hexdigest()})")


def copy_tokenizer(model: str, out: Path) -> None:
    folder = find_folder(model, files=TOKENIZER_FILES)
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    if not found:
        raise ValueError(f"{folder}: has none of {', '.join(TOKENIZER_FILES)}")
    for path in found:
        shutil.copyfile(path, out / path.name)


def convert(scorer: str, checkpoint: Path, out: Path, companion: str) -> None:
    """Writes the folder of a scorer and checks it against our network, tensor by tensor.

    Args:
      scorer: one of `COMPANIONS`.
      checkpoint: the public file.
      out: the folder; made if absent.
      companion: folder or Hugging Face id of what the file lacks, see `COMPANIONS`.

    Raises:
      ValueError: a checkpoint that is refused or of another scorer, or an `out` that has weights.
    """
    if (out / "model.safetensors").exists():
        raise ValueError(f"{out}: has a model.safetensors; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    if scorer == "aesthetic":
        tensors = dict(aesthetic_head(checkpoint))
        folder = find_folder(companion, files=clip_rewards.FILES)
        tower = clip.CLIPConfig.from_json(read_json(folder / "config.json")).vision
        ours = {name for source in clip.name_table(tower).values() for name in source.names}
        tensors |= {name: stored for name, stored in open_weights(folder).items() if name in ours}
        config = {"architectures": ["CLIPVisionModelWithProjection"], "model_type": "clip_vision_model", **asdict(tower)}
        write_folder(out, checkpoint, config, tensors, tower.image_size)
        table, shapes = aesthetic.name_table(tower), aesthetic.shapes(tower)
    else:
        config, tensors = {"hpsv2": hpsv2, "imagereward": image_reward}[scorer](checkpoint)
        copy_tokenizer(companion, out)
        write_folder(out, checkpoint, config, tensors, config["vision_config"]["image_size"])
        if scorer == "hpsv2":
            network = clip.CLIPConfig.from_json(config)
            table, shapes = clip.name_table(network), clip_rewards.shapes(network)
        else:
            network = blip.BLIPConfig.from_json(config)
            table, shapes = blip.name_table(network), imagereward.shapes(network)
    check_tensors(open_weights(out), table, shapes)


COMPANIONS = {
    "hpsv2": ("tokenizer", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"),
    "aesthetic": ("clip", "openai/clip-vit-large-patch14"),
    "imagereward": ("tokenizer", "google-bert/bert-base-uncased"),
}
"""What a checkpoint lacks, as the option is called, and where it is public: tokenizers, and the image tower under LAION's head."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scorers = parser.add_subparsers(dest="scorer", required=True)
    for scorer, (companion, default) in COMPANIONS.items():
        options = scorers.add_parser(scorer)
        options.add_argument("checkpoint", type=Path)
        options.add_argument("--out", type=Path, required=True, help="the folder to write")
        options.add_argument(f"--{companion}", dest="companion", default=default, help=f"folder or Hugging Face id (default {default})")
    args = parser.parse_args(arguments)
    try:
        convert(args.scorer, args.checkpoint, args.out, args.companion)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

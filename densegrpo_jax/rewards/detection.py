"""Objects and colors in images, for GenEval: networks of transformers in torch. Only the reward server loads this (the extra `server`).

Weights are read from safetensors only.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from densegrpo_jax.prompts.geneval import CLASSES, COLORS
from densegrpo_jax.rewards.geneval import THRESHOLD, Classifier, Detection, Detector

QUERIES = 100  # pairs of mask and class that Mask2Former proposes, as in its instance segmentation of COCO
TEMPLATES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
CROPS = 64  # crops classified at a time

# Names that COCO's own list, Pascal VOC's and others' give to GenEval's classes.
ALIASES = {
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
    "television": "tv",
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "cellphone": "cell phone",
    "hair dryer": "hair drier",
    "doughnut": "donut",
}


def class_names(labels: Mapping[int, str]) -> dict[int, str]:
    """GenEval's name of each label of a detector that has one.

    Args:
      labels: `id2label` of a config.

    Raises:
      ValueError: classes that no label stands for, or more than one; they are named.
    """
    named = {}
    for number, label in labels.items():
        plain = " ".join(label.replace("_", " ").split()).lower()
        name = ALIASES.get(plain, plain)
        if name in CLASSES:
            named[int(number)] = name
    missing = [name for name in CLASSES if name not in named.values()]
    twice = sorted({name for name in named.values() if list(named.values()).count(name) > 1})
    if missing or twice:
        raise ValueError(
            f"not a detector of COCO's 80 classes: {len(missing)} have no label ({', '.join(missing[:5])}), "
            f"{len(twice)} have several ({', '.join(twice[:5])})"
        )
    return named


def load_detector(model: str | Path, device: str | None = None) -> Detector:
    """A detector of transformers as a function from images, uint8 [N, H, W, 3], to detections above GenEval's lower threshold.

    A Mask2Former gives masks: proposals are the best `QUERIES` pairs of query and class; the score is the class's probability times the
    mean probability of the mask where it is over one half; masks are enlarged to the image, boxes are drawn around them. Models of
    DETR's family give boxes by their own processor.

    Args:
      model: folder, or Hugging Face id.
      device: torch's name; the GPU by default where there is one.

    Raises:
      ValueError: torch is missing, or the model cannot be read, is of another kind, or lacks classes of COCO.
    """
    torch, transformers = _packages()
    config = _read(transformers.AutoConfig, model)
    masks = config.model_type == "mask2former"
    kind = transformers.Mask2FormerForUniversalSegmentation if masks else transformers.AutoModelForObjectDetection
    try:
        names = class_names(config.id2label)
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from error
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    network = _read(kind, model, use_safetensors=True).to(place).eval()
    processor = _read(transformers.AutoImageProcessor, model, backend="pil")

    def detect(images: np.ndarray) -> list[list[Detection]]:
        inputs = processor(images=list(images), return_tensors="pt", input_data_format="channels_last")
        if "pixel_mask" in inputs and not inputs["pixel_mask"].all():
            raise ValueError(f"{model}: its processor pads images of {images.shape[1:3]}, and padding would shift the boxes")
        size = images.shape[1:3]
        with torch.inference_mode():
            outputs = network(**{name: value.to(place) for name, value in inputs.items()})
            if masks:
                rows = zip(outputs.class_queries_logits.float(), outputs.masks_queries_logits.float())
                return [_instances(torch, *row, names, size) for row in rows]
            found = processor.post_process_object_detection(outputs, threshold=THRESHOLD, target_sizes=[size] * len(images))
            return [_boxes(result, names) for result in found]

    return detect


def _boxes(result: Mapping, names: Mapping[int, str]) -> list[Detection]:
    rows = zip(result["scores"].tolist(), result["labels"].tolist(), result["boxes"].tolist())
    return [Detection(names[label], score, tuple(box)) for score, label, box in rows if label in names]


def _instances(torch: Any, classes: Any, masks: Any, names: Mapping[int, str], size: tuple[int, int]) -> list[Detection]:
    """Objects of one image from Mask2Former's classes [Q, C + 1] and masks [Q, h, w], both logits."""
    probability = classes.softmax(-1)[:, :-1]
    score, index = probability.flatten().topk(min(QUERIES, probability.numel()))
    likely = score > THRESHOLD  # the mask can only lower it
    score, index = score[likely], index[likely]
    found = []
    for class_score, place in zip(score.tolist(), index.tolist()):
        query, label = divmod(place, probability.shape[1])
        logits = torch.nn.functional.interpolate(masks[None, query, None], size=size, mode="bilinear", align_corners=False)[0, 0]
        mask = logits > 0
        if label not in names or not mask.any():
            continue
        total = class_score * logits.sigmoid()[mask].mean().item()
        if total > THRESHOLD:
            (rows,), (columns,) = (mask.any(axis).nonzero(as_tuple=True) for axis in (1, 0))
            box = (columns[0].item(), rows[0].item(), columns[-1].item() + 1, rows[-1].item() + 1)
            found.append(Detection(names[label], total, tuple(map(float, box)), mask.cpu().numpy()))
    return found


def load_classifier(model: str | Path, device: str | None = None) -> Classifier:
    """A CLIPModel as a function from crops and their classes to colors: the nearest of ten, each the mean of three phrases' embeddings.

    Args:
      model: folder, or Hugging Face id.
      device: torch's name; the GPU by default where there is one.

    Raises:
      ValueError: torch is missing, or the model cannot be read or is of another kind.
    """
    torch, transformers = _packages()
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if (kind := _read(transformers.AutoConfig, model).model_type) != "clip":
        raise ValueError(f"{model}: is a {kind!r}, not a CLIP")
    network = _read(transformers.CLIPModel, model, use_safetensors=True).to(place).eval()
    processor = _read(transformers.AutoImageProcessor, model, backend="pil")
    tokenizer = _read(transformers.CLIPTokenizer, model)
    length = min(tokenizer.model_max_length, network.config.text_config.max_position_embeddings)

    def unit(x: Any) -> Any:
        return x / x.norm(dim=-1, keepdim=True)

    def embed_text(texts: Sequence[str]) -> Any:
        tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt").to(place)
        return unit(network.text_projection(network.text_model(**tokens).pooler_output))

    def colors_of(name: str) -> Any:
        texts = [template.format(color=color, name=name) for color in COLORS for template in TEMPLATES]
        return unit(embed_text(texts).reshape(len(COLORS), len(TEMPLATES), -1).mean(1))

    known: dict[str, Any] = {}

    def classify(crops: Sequence[np.ndarray], names: Sequence[str]) -> list[str]:
        found = []
        with torch.inference_mode():
            for name in set(names) - set(known):
                known[name] = colors_of(name)
            for start in range(0, len(crops), CROPS):
                rows = slice(start, start + CROPS)
                pixels = processor(images=list(crops[rows]), return_tensors="pt", input_data_format="channels_last")["pixel_values"]
                seen = network.visual_projection(network.vision_model(pixel_values=pixels.to(place)).pooler_output)
                best = torch.einsum("nd,ncd->nc", seen, torch.stack([known[name] for name in names[rows]])).argmax(-1)
                found += [COLORS[index] for index in best.tolist()]
        return found

    return classify


def _packages() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ValueError(f'the GenEval server needs torch and transformers ({error}): pip install "densegrpo_jax[server]"') from error
    return torch, transformers


def _read(kind: Any, model: str | Path, **options: Any) -> Any:
    try:
        return kind.from_pretrained(model, **options)
    except Exception as error:  # each part of transformers has errors of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{model}: {kind.__name__} cannot be read: {reason}") from error

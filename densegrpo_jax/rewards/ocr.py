"""Does the image show the text that the prompt quotes? Flow-GRPO's rule (arXiv 2505.05470), read by rapidocr (the extra `ocr`).

The rule is pure and needs no engine: `target_text` and `ocr_reward`. rapidocr's models come with its wheel, nothing is downloaded.
"""

import logging
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from densegrpo_jax.rewards.base import Reward, host
from densegrpo_jax.scenes.checker import edit_distance

QUOTED = re.compile('"([^"]*)"|“([^”]*)”')
# Smallest canvas of the recogniser for single words (its height is fixed). Lines up to twice as wide as high fill it; wider ones widen
# it. The engine's own, 320, spends most of its time on empty canvas.
WORD_CANVAS = [3, 48, 96]

log = logging.getLogger(__name__)


def target_text(prompt: str) -> str | None:
    """The text between the first pair of double quotes, straight or curly; None where there is none or it is blank.

    Of several quoted texts only the first counts, as in Flow-GRPO.
    """
    found = QUOTED.search(prompt)
    text = (found.group(1) or found.group(2) or "") if found else ""
    return text if text.strip() else None


def ocr_reward(recognised: str, target: str) -> float:
    """1 - d / len(target) in [0, 1]: how much of the target was read.

    Both sides are lower-cased and lose their spaces. d is 0 where the target is a part of what was read, else the Levenshtein distance,
    at most the target's length. There is no forgiveness for look-alikes: "0" is not "o".

    Raises:
      ValueError: a blank target.
    """
    recognised, target = ("".join(text.lower().split()) for text in (recognised, target))
    if not target:
        raise ValueError("the target text is blank, so nothing can be read of it; score such a prompt as not valid")
    if target in recognised:
        return 1.0
    return 1.0 - min(edit_distance(recognised, target), len(target)) / len(target)


def load_engine(detect: bool = True) -> Callable[[np.ndarray], str]:
    """rapidocr as a function from an image, uint8 [H, W, 3], to the text in it, all lines joined; "" where there is none.

    Args:
      detect: find lines first, for photographs and the like. Otherwise the whole image is read as one line: right for small images of
        one word, at a twenty-fifth of the work. The recogniser enlarges it to 48 pixels height.

    Raises:
      ValueError: rapidocr or onnxruntime is not installed.
    """
    params = {
        "Global.log_level": "critical",
        "Global.text_score": 0.0,  # unsure lines are kept; below, those of confidence 0 are dropped
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,  # the images run in parallel instead
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
    }
    if not detect:
        params["Rec.rec_img_shape"] = WORD_CANVAS

    def read(image: np.ndarray, detect: bool = detect) -> str:
        # All three every time: what a call leaves out keeps its value of the call before. Channels in OpenCV's order.
        found = engine(np.ascontiguousarray(image[..., ::-1]), use_det=detect, use_cls=False, use_rec=True)
        return "".join(text for text, score in zip(found.txts or (), found.scores or ()) if score > 0.0)

    try:
        from rapidocr import RapidOCR

        engine = RapidOCR(params=params)
        for stage in {False, detect}:  # networks are loaded when first used: fail here, not at every image
            read(np.full((64, 64, 3), 255, np.uint8), stage)
    except ImportError as error:
        raise ValueError(f'OCR rewards need rapidocr and onnxruntime ({error}): pip install "densegrpo_jax[ocr]"') from error
    return read


def as_reward(read: Callable[[np.ndarray], str], workers: int | None = None) -> Reward:
    """`ocr_reward` of what is read in each image against what its prompt quotes.

    Not valid, and counted in the log: an image on which the engine fails, and a prompt that quotes nothing.

    Args:
      read: image, uint8 [H, W, 3] -> text.
      workers: images read at a time; the number of cores by default.
    """
    pool = ThreadPoolExecutor(workers or os.cpu_count(), thread_name_prefix="ocr")

    def one(image: np.ndarray, target: str | None) -> float | Exception:
        if target is None:
            return np.nan
        try:
            return ocr_reward(read(image), target)
        except Exception as error:  # whatever an engine may raise costs this image, not the run
            return error

    def reward(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> tuple[np.ndarray, np.ndarray]:
        images = np.asarray(images)
        if images.dtype != np.uint8 or images.shape[:1] != (len(prompts),) or images.ndim != 4:
            raise ValueError(f"expected uint8 images [{len(prompts)}, H, W, 3], one a prompt, got {images.dtype} {images.shape}")
        targets = [target_text(prompt) for prompt in prompts]
        results = list(pool.map(one, images, targets))
        if errors := [result for result in results if isinstance(result, Exception)]:
            log.warning("the OCR engine failed on %d of %d images; the first error: %r", len(errors), len(images), errors[0])
        if blank := targets.count(None):
            log.warning("%d of %d prompts quote no text; the first: %r", blank, len(prompts), prompts[targets.index(None)])
        values = np.array([np.nan if isinstance(result, Exception) else result for result in results], np.float64)
        return values, np.isfinite(values)

    return host(reward, workers=2)  # the second call fills the pool while the last images of the first are read


def load(detect: bool = True, workers: int | None = None) -> Reward:
    """The OCR reward; see `load_engine` and `as_reward`."""
    return as_reward(load_engine(detect), workers)

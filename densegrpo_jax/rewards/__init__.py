"""Rewards by name. `load` imports a scorer only when it is asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from densegrpo_jax.rewards.base import Reward, Scores, score, weighted_sum

__all__ = ["MODELS", "NAMES", "Reward", "Scores", "load", "score", "weighted_sum"]

MODELS = {
    "pickscore": "yuvalkirstain/PickScore_v1",
    "pickscore_26": "yuvalkirstain/PickScore_v1",
    "clipscore": "openai/clip-vit-large-patch14",
}
"""The CLIP rewards with their Hugging Face ids; another model is named after a colon: "pickscore:path/to/folder"."""


def _toy_spot() -> Reward:
    from densegrpo_jax.scenes import toy

    return lambda images, prompts, metadata: toy.spot_reward(images, prompts)


def _lazy(module: str, function: str, *args: Any) -> Callable[[], Reward]:
    return lambda: getattr(import_module(f"densegrpo_jax.rewards.{module}"), function)(*args)


NAMES: dict[str, Callable[[], Reward]] = {
    "toy_spot": _toy_spot,
    **{f"scenes_compose_{mode}": _lazy("scenes", "compose", mode) for mode in ("strict", "partial", "soft")},
    "scenes_preference": _lazy("scenes", "preference"),
    "words": _lazy("ocr", "load", False),
    "ocr": _lazy("ocr", "load", True),
    **{kind: _lazy("clip", "load", model, kind) for kind, model in MODELS.items()},
}
"""Name -> a function that loads the reward."""


def load(name: str) -> Reward:
    """The reward of that name; for those of `MODELS` also "name:folder" or "name:Hugging Face id".

    Raises:
      ValueError: an unknown name, with the known ones; a model for a reward that takes none; or what loading the reward raises.
    """
    kind, colon, model = name.partition(":")
    if kind not in NAMES:
        raise ValueError(f"unknown reward {kind!r}; known: {', '.join(sorted(NAMES))}")
    if not colon:
        return NAMES[kind]()
    if kind not in MODELS or not model:
        raise ValueError(f"reward {name!r}: a model is named after the colon, for {', '.join(MODELS)} only")
    return _lazy("clip", "load", model, kind)()

"""Rewards by name. `load` imports a scorer only when it is asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from densegrpo_jax.rewards.base import Reward, Scored, Scores, normalized_in_groups, score, score_parts, weighted_sum

__all__ = [
    "MODELS",
    "NAMES",
    "SERVED",
    "Reward",
    "Scored",
    "Scores",
    "load",
    "load_served",
    "normalized_in_groups",
    "score",
    "score_parts",
    "weighted_sum",
]

MODELS = {
    "pickscore": "yuvalkirstain/PickScore_v1",
    "pickscore_26": "yuvalkirstain/PickScore_v1",
    "clipscore": "openai/clip-vit-large-patch14",
    "hpsv2": None,
    "aesthetic": None,
    "imagereward": None,
}
"""The scorers with weights and their Hugging Face ids; another model is named after a colon: "pickscore:path/to/folder". None: the public
weights are not safetensors; `tools/convert_scorer.py` makes a folder of them, to be named so."""

JUDGES = ("unifiedreward", "deqa", "qwenvl")
"""Vision-language models behind an OpenAI-compatible endpoint: "qwenvl@http://host:8000/v1", "qwenvl:MODEL@..."; see `rewards.vlm`."""

SERVED = {
    "geneval": "dense_published",
    "geneval_repaired": "dense_repaired",
    "geneval_strict": "strict",
    "geneval_official": "official",
}
"""Rewards that need torch, so that only a reward server loads them, with their modes in `rewards.geneval`; "geneval:DETECTOR:CLIP" names
other models than the defaults."""


def _toy_spot(mesh: Any) -> Reward:
    from densegrpo_jax.scenes import toy

    return lambda images, prompts, metadata: toy.spot_reward(images, prompts)


def _lazy(module: str, function: str, *args: Any, on_mesh: bool = False) -> Callable[[Any], Reward]:
    """mesh -> the reward; `on_mesh` says whether it runs on the devices, which then share its images."""

    def load(mesh: Any) -> Reward:
        made = getattr(import_module(f"densegrpo_jax.rewards.{module}"), function)
        return made(*args, mesh=mesh) if on_mesh else made(*args)

    return load


def _scorer(kind: str, model: str | None) -> Callable[[Any], Reward]:
    def unnamed(mesh: Any) -> Reward:
        raise ValueError(f"reward {kind!r}: give its folder, {kind}:FOLDER, which tools/convert_scorer.py makes (docs/rewards.md, Scorers)")

    if not model:
        return unnamed
    if kind in ("aesthetic", "imagereward"):
        return _lazy(kind, "load", model, on_mesh=True)
    return _lazy("clip", "load", model, kind, on_mesh=True)


NAMES: dict[str, Callable[[Any], Reward]] = {
    "toy_spot": _toy_spot,
    **{f"scenes_compose_{mode}": _lazy("scenes", "compose", mode) for mode in ("strict", "partial", "soft")},
    "scenes_preference": _lazy("scenes", "preference", on_mesh=True),
    "words": _lazy("ocr", "load", False),
    "ocr": _lazy("ocr", "load", True),
    **{kind: _scorer(kind, model) for kind, model in MODELS.items()},
}
"""Name -> a function that loads the reward, on a mesh or on one device."""


def load(name: str, server: Any = None, mesh: Any = None) -> Reward:
    """The reward of that name; for those of `MODELS` also "name:folder" or "name:Hugging Face id"; on a server "name@http://host:port".

    Args:
      name: of the reward.
      server: a `config.RewardServer`, for rewards on servers; its defaults where it is None.
      mesh: whose devices share the images, for rewards that run on a device; None for one device.

    Raises:
      ValueError: an unknown name, with the known ones; a model for a reward that takes none; or what loading the reward raises.
    """
    check_name(name)
    if "@http" in name:
        judge = name.partition("@")[0].partition(":")[0] in JUDGES
        module = import_module(f"densegrpo_jax.rewards.{'vlm' if judge else 'http'}")
        return module.load(name, *([] if server is None else [server]))
    kind, colon, model = name.partition(":")
    return (_scorer(kind, model) if colon else NAMES[kind])(mesh)


def check_name(name: str) -> None:
    """Refuses what `load` cannot load, without loading anything or asking a server.

    Raises:
      ValueError: see `load`.
    """
    if "@http" in name:
        kind, _, places = name.partition("@")
        for place in places.split(","):
            import_module("densegrpo_jax.rewards.http").check_url(name, place)
        return
    kind, colon, model = name.partition(":")
    if kind in SERVED:
        raise ValueError(f"reward {kind!r} runs in a server: `densegrpo serve-rewards --reward {name}`, and here {kind}@http://HOST:PORT")
    if kind not in NAMES:
        raise ValueError(f"unknown reward {kind!r}; known: {', '.join(sorted({*NAMES, *SERVED}))}")
    if colon and (kind not in MODELS or not model):
        raise ValueError(f"reward {name!r}: a model is named after the colon, for {', '.join(MODELS)} only")


def load_served(name: str) -> Reward:
    """What a reward server loads: the rewards of `load`, and those of `SERVED`.

    Raises:
      ValueError: what `load` raises, and what loading the models raises.
    """
    kind, *models = name.split(":")
    if kind not in SERVED:
        return load(name)
    if len(models) > 2:
        raise ValueError(f"reward {name!r}: write {kind}:DETECTOR:CLIP, either may be empty")
    chosen = {part: model for part, model in zip(("detector", "clip"), models) if model}
    return import_module("densegrpo_jax.rewards.geneval").load(SERVED[kind], **chosen)

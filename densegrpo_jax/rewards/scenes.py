"""Rewards of the tiny world: its judge in three strengths, and its preference scorer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from densegrpo_jax import scenes
from densegrpo_jax.rewards import clip
from densegrpo_jax.rewards.base import Reward
from densegrpo_jax.scenes import checker

PREFERENCE = Path(scenes.__file__).parent / "preference_clip"


def compose(mode: str) -> Reward:
    """The judge's score of images against their metadata, requests in GenEval's form.

    Args:
      mode: "strict", "partial" or "soft"; see `scenes.checker`.

    Raises:
      ValueError: another mode.
    """
    if mode not in checker.MODES:
        raise ValueError(f"mode = {mode!r}: choose one of {', '.join(checker.MODES)}")

    def reward(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> np.ndarray:
        return checker.judge(np.asarray(images), metadata, mode)

    return reward


def preference(folder: Path = PREFERENCE, mesh: jax.sharding.Mesh | None = None) -> Reward:
    """The small CLIP that comes with the package, scored like PickScore, on one device or on those of a mesh.

    Raises:
      ValueError: the folder is missing, with the command that makes it; or it cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is missing; `python -m densegrpo_jax.scenes.pretrain --workdir DIR` trains and writes it")
    return clip.load(folder, "pickscore", mesh=mesh)

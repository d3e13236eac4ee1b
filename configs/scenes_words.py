"""The tiny Stable Diffusion 3 learns to spell, read by a real OCR engine (extra `ocr`), with a window of four noisy steps."""

import dataclasses
from pathlib import Path

from densegrpo_jax.config import Config
from densegrpo_jax_configs import scenes_compose


def get_config() -> Config:
    base = scenes_compose.get_config()
    return dataclasses.replace(
        base,
        rewards=("words",),
        prompts=dataclasses.replace(base.prompts, train="words/train", evaluation="words/heldout", per_step=2, group_size=12),
        sampling=dataclasses.replace(base.sampling, chunk=8),  # one part is read while the next is sampled
        exploration=dataclasses.replace(base.exploration, window="fixed", window_start=0, window_size=4),
        optimizer=dataclasses.replace(base.optimizer, updates=3, micro_batch=24),
        evaluation=dataclasses.replace(base.evaluation, prompts=24, witnesses=()),
        run=dataclasses.replace(base.run, workdir=Path("runs/scenes_words")),
    )

"""The tiny Stable Diffusion 3 learns what its preference scorer likes: the main job on a laptop.

Held-out pictures are compared with the base model's at the end. docs/results.md says what else was tried.
"""

import dataclasses
from pathlib import Path

from densegrpo_jax.config import Config
from densegrpo_jax_configs import scenes_compose
from densegrpo_jax_configs.variants import change


def get_config() -> Config:
    config = change(
        scenes_compose.get_config(),
        credit={"slope": "fitted"},
        evaluation={
            "witnesses": ("scenes_compose_strict", "scenes_compose_soft"),
            "final_prompts": 256,
            "final_images_per_prompt": 6,
        },
        run={"workdir": Path("runs/scenes_preference")},
    )
    return dataclasses.replace(config, rewards=("scenes_preference",))

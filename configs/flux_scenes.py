"""The tiny FLUX learns composition from the tiny world's judge: every phase of FLUX training on a laptop.

The model does not ship; train it first (15 to 30 minutes on one core), or name another folder with --model.path:

    python -m densegrpo_jax.scenes.pretrain --workdir runs/tiny_flux --stages flux
"""

from pathlib import Path

from densegrpo_jax.config import Config
from densegrpo_jax.models.lora import ATTENTION_TARGETS, FEED_FORWARD_TARGETS
from densegrpo_jax_configs import scenes_compose
from densegrpo_jax_configs.variants import change


def get_config() -> Config:
    return change(
        scenes_compose.get_config(),
        model={"path": "runs/tiny_flux/tiny_flux", "resolution": (32, 32), "scan_unroll": 4},
        sampling={"num_steps": 6, "grid": "model", "guidance_scale": 3.0},
        exploration={"noise_level": 0.9},
        adapter={"targets": (*ATTENTION_TARGETS, *FEED_FORWARD_TARGETS)},
        run={"workdir": Path("runs/flux_scenes")},
    )

"""The tiny FLUX learns composition from the tiny world's judge: every phase of FLUX training on a laptop.

The model does not ship; train it first (half an hour on two cores), or name another folder with --model.path:

    python -m densegrpo_jax.scenes.pretrain --workdir runs/tiny_flux --stages flux
"""

import dataclasses
from pathlib import Path

from densegrpo_jax.config import Adapter, Config, Model
from densegrpo_jax.models.lora import ATTENTION_TARGETS, FEED_FORWARD_TARGETS
from densegrpo_jax_configs import scenes_compose


def get_config() -> Config:
    base = scenes_compose.get_config()
    return dataclasses.replace(
        base,
        model=Model(path="runs/tiny_flux/tiny_flux", resolution=(32, 32), max_sequence_length=16, scan_unroll=4),
        sampling=dataclasses.replace(base.sampling, num_steps=6, grid="model", guidance_scale=3.0),
        exploration=dataclasses.replace(base.exploration, noise_level=0.9),
        adapter=Adapter(rank=16, alpha=32.0, targets=(*ATTENTION_TARGETS, *FEED_FORWARD_TARGETS)),
        run=dataclasses.replace(base.run, workdir=Path("runs/flux_scenes")),
    )

"""Stable Diffusion 3.5 Medium at 1024 pixels with PickScore, as in the paper's appendix; batch arithmetic as at 512."""

from pathlib import Path

from densegrpo_jax.config import Config
from densegrpo_jax_configs import sd35_medium_pickscore
from densegrpo_jax_configs.variants import change


def get_config() -> Config:
    return change(
        sd35_medium_pickscore.get_config(),
        model={"resolution": (1024, 1024)},
        sampling={"chunk": 8, "decode_chunk": 2},
        optimizer={"micro_batch": 2},
        run={"workdir": Path("runs/sd35_medium_pickscore_1024")},
    )

"""Stable Diffusion 3.5 Medium learns to write: the paper's text rendering task, read by rapidocr (extra `ocr`)."""

import dataclasses
from pathlib import Path

from densegrpo_jax.config import Config
from densegrpo_jax_configs import sd35_medium_pickscore
from densegrpo_jax_configs.variants import change


def get_config() -> Config:
    data = "flow_grpo/dataset/ocr"
    config = change(
        sd35_medium_pickscore.get_config(),
        prompts={"train": f"{data}/train", "evaluation": f"{data}/test"},
        objective={"beta": 0.04},
        evaluation={"final_prompts": 1018},
        run={"steps": 1500, "workdir": Path("runs/sd35_medium_ocr")},
    )
    return dataclasses.replace(config, rewards=("ocr",))

"""Stable Diffusion 3.5 Medium learns composition: the paper's GenEval task. The reward runs in a server, `densegrpo serve-rewards`."""

import dataclasses
from pathlib import Path

from densegrpo_jax.config import Config
from densegrpo_jax_configs import sd35_medium_pickscore
from densegrpo_jax_configs.variants import change


def get_config() -> Config:
    data = "flow_grpo/dataset/geneval"
    config = change(
        sd35_medium_pickscore.get_config(),
        prompts={"train": f"{data}/train", "evaluation": f"{data}/test"},
        objective={"beta": 0.04},
        run={"workdir": Path("runs/sd35_medium_geneval")},
    )
    return dataclasses.replace(config, rewards=("geneval@http://127.0.0.1:18085",))

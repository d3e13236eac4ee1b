"""FLUX.1-dev learns what PickScore likes: the paper's check on a second model, with the arithmetic of Flow-GRPO's recipe for it.

512 pixels, 6 steps for training and 28 for evaluation, guidance 3.5 as an input of the network (one pass), a = 0.9, no KL, bfloat16,
adapters of rank 64 on attention and feed-forward layers. The paper does not give its own settings for FLUX; the rest is
sd35_medium_pickscore's. The weights are gated: docs/data.md. For 1024 pixels, `--model.resolution 1024 1024` with smaller chunks.
"""

from pathlib import Path

from densegrpo_jax.config import Config
from densegrpo_jax.models.lora import ATTENTION_TARGETS, FEED_FORWARD_TARGETS
from densegrpo_jax_configs import sd35_medium_pickscore
from densegrpo_jax_configs.variants import change


def get_config() -> Config:
    return change(
        sd35_medium_pickscore.get_config(),
        model={"path": "black-forest-labs/FLUX.1-dev"},
        sampling={"num_steps": 6, "guidance_scale": 3.5},
        exploration={"noise_level": 0.9},
        objective={"beta": 0.0},
        adapter={"rank": 64, "alpha": 128.0, "targets": (*ATTENTION_TARGETS, *FEED_FORWARD_TARGETS)},
        optimizer={"micro_batch": 3},
        evaluation={"num_steps": 28},
        run={"workdir": Path("runs/flux_dev_pickscore")},
    )

"""FLUX.1-dev learns what PickScore likes, with the arithmetic of Flow-GRPO's recipe and dense credit: the paper's check on a second model.

512 pixels, 6 steps, guidance 3.5 (an input of the network: one pass), adapters of rank 64 on attention and feed-forward layers, bfloat16.
48 groups of 24 a step in two updates. The weights are gated on the Hugging Face hub; `prompts.train` and `prompts.evaluation` are text
files with one prompt a line, Pick-a-Pic's in the paper.

Where Flow-GRPO's page and the paper are silent, this is ours: completions with the paper's n = k Euler steps, noise at the last step too,
untrained, as Flow-GRPO's program has it.
"""

from pathlib import Path

from densegrpo_jax.config import (
    Adapter,
    Completion,
    Config,
    Credit,
    Evaluation,
    Exploration,
    Model,
    Objective,
    Optimizer,
    Prompts,
    Run,
    Sampling,
)
from densegrpo_jax.models.lora import ATTENTION_TARGETS, FEED_FORWARD_TARGETS


def get_config() -> Config:
    return Config(
        model=Model(path="black-forest-labs/FLUX.1-dev", dtype="bfloat16", resolution=(512, 512), max_sequence_length=128),
        prompts=Prompts(train="data/pickscore/train.txt", evaluation="data/pickscore/test.txt", per_step=48, group_size=24),
        rewards=("pickscore",),
        sampling=Sampling(num_steps=6, grid="model", guidance_scale=3.5, chunk=24, decode_chunk=8),
        exploration=Exploration(sampler="flow_sde", noise_level=0.9, window="all_but_last", last_noise=True),
        completion=Completion(steps="all", solver="euler"),
        credit=Credit(method="dense_grpo", std="global"),
        objective=Objective(clip_range=1e-4, beta=0.0),
        adapter=Adapter(rank=64, alpha=128.0, targets=(*ATTENTION_TARGETS, *FEED_FORWARD_TARGETS)),
        optimizer=Optimizer(learning_rate=3e-4, updates=2, minibatch="trajectories", micro_batch=24),
        evaluation=Evaluation(every=30, num_steps=28, images_per_prompt=1, prompts=2048),
        run=Run(steps=1000, workdir=Path("runs/flux_dev_pickscore"), save_every=30, report_every=10),
    )

"""Stable Diffusion 3.5 Medium learns what PickScore likes: the paper's preference task, with its settings.

512 pixels, 10 steps for training and 40 for evaluation, guidance 4.5, G = 24, LoRA of rank 32, AdamW 3e-4, beta .01, 4500 iterations.
48 groups a step in two updates, a clip range of 1e-4, noise at the untrained last step and the batch's standard deviation are
Flow-GRPO's program, which the paper builds on and does not repeat. `exploration.psi` takes what `densegrpo calibrate` finds; until
then a = 0.7, as Flow-GRPO. docs/data.md says where prompts and weights are; variants as for any config: `sd35_medium_pickscore:flow_grpo`.
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


def get_config() -> Config:
    data = "flow_grpo/dataset/pickscore_sfw"
    return Config(
        model=Model(path="stabilityai/stable-diffusion-3.5-medium", dtype="bfloat16", resolution=(512, 512), max_sequence_length=128),
        prompts=Prompts(train=f"{data}/train", evaluation=f"{data}/test", per_step=48, group_size=24),
        rewards=("pickscore_26",),
        sampling=Sampling(num_steps=10, grid="model", guidance_scale=4.5, chunk=24, decode_chunk=8),
        exploration=Exploration(sampler="flow_sde", noise_level=0.7, window="all_but_last", last_noise=True),
        completion=Completion(steps="all", solver="euler"),
        credit=Credit(method="dense_grpo", std="global"),
        objective=Objective(clip_range=1e-4, beta=0.01, kl_mode="code"),
        adapter=Adapter(rank=32, alpha=64.0),
        optimizer=Optimizer(learning_rate=3e-4, updates=2, minibatch="trajectories", micro_batch=8),
        evaluation=Evaluation(every=30, num_steps=40, images_per_prompt=1, prompts=256, final_prompts=2048, final_images_per_prompt=1),
        run=Run(steps=4500, workdir=Path("runs/sd35_medium_pickscore"), save_every=30, report_every=10),
    )

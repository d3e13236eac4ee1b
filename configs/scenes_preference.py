"""The tiny Stable Diffusion 3 learns what its preference scorer likes: the main job on a laptop.

Held-out pictures are compared with the base model's at the end. docs/results.md says what else was tried.
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
    return Config(
        model=Model(path="tiny", max_sequence_length=16, scan_unroll=8),
        prompts=Prompts(train="scenes/train", evaluation="scenes/heldout", per_step=4, group_size=24),
        rewards=("scenes_preference",),
        sampling=Sampling(num_steps=10, grid="uniform", chunk=32),
        exploration=Exploration(sampler="flow_sde", noise_level=0.7),
        completion=Completion(steps="respaced 3", solver="dpmpp2m"),
        credit=Credit(method="dense_grpo", slope="fitted"),
        objective=Objective(clip_range=1e-3),
        adapter=Adapter(rank=16, alpha=32.0),
        optimizer=Optimizer(learning_rate=1e-3, b2=0.99, updates=4, micro_batch=36, remat=False),
        evaluation=Evaluation(
            every=20,
            num_steps=10,
            images_per_prompt=2,
            prompts=64,
            witnesses=("scenes_compose_strict", "scenes_compose_soft"),
            final_prompts=256,
            final_images_per_prompt=6,
        ),
        run=Run(steps=100, workdir=Path("runs/scenes_preference"), save_every=20, report_every=20),
    )

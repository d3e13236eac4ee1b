"""An 8x8 toy, pretrained in seconds: the whole program in a minute on two CPU cores."""

from pathlib import Path

from densegrpo_jax.config import Adapter, Config, Evaluation, Optimizer, Prompts, Run


def get_config() -> Config:
    return Config(
        prompts=Prompts(train="toy", evaluation="toy", per_step=4, group_size=24),
        rewards=("toy_spot",),
        adapter=Adapter(rank=8, alpha=16.0),
        optimizer=Optimizer(learning_rate=2e-3, updates=4, micro_batch=216),
        evaluation=Evaluation(every=10, num_steps=20, images_per_prompt=8, prompts=0),
        run=Run(steps=60, workdir=Path("runs/toy"), save_every=20, report_every=20),
    )

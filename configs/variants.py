"""The methods of the papers as changes to any config: `densegrpo train scenes_preference:stepwise`, or several, `NAME:cps:guard`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from densegrpo_jax.config import Config


def change(config: Config, **sections: dict) -> Config:
    """The config with fields of some sections replaced: change(config, credit={"method": "coca"})."""
    return dataclasses.replace(config, **{name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()})


# --- credit ------------------------------------------------------------------------------------------------------------


def dense_grpo(config: Config) -> Config:
    """DenseGRPO as printed: gains between completions by Euler on all the levels that are left (arXiv 2601.20218)"""
    return change(config, credit={"method": "dense_grpo", "over": None, "slope": "one"}, completion={"steps": "all", "solver": "euler"})


def dense_reward(config: Config) -> Config:
    """its ablation: the reward of the next completion instead of the gain"""
    return change(config, credit={"method": "dense_reward", "over": None})


def flow_grpo(config: Config) -> Config:
    """Flow-GRPO: the final reward for every step, no completions (arXiv 2505.05470)"""
    return change(config, credit={"method": "flow_grpo", "over": None})


def coca(config: Config) -> Config:
    """CoCA on flows: the final reward, weighted by how the clean prediction approaches the image (arXiv 2505.19196)"""
    return change(config, credit={"method": "coca", "over": None})


def stepwise(config: Config) -> Config:
    """Stepwise-Flow-GRPO: DDIM-SDE, one start noise a group, five sub-steps, joint statistics (arXiv 2603.28718)"""
    return change(
        config,
        credit={"method": "stepwise", "over": "joint"},
        prompts={"shared_start": True},
        exploration={"sampler": "ddim_sde", "noise_level": 0.7, "psi": None},
        completion={"steps": "respaced 5", "solver": "euler", "tail": "keep"},
    )


def tp_grpo(config: Config) -> Config:
    """TP-GRPO: gains, with all that is still to come at turning points; one start noise a group (arXiv 2602.06422)"""
    return change(
        config,
        credit={"method": "tp_grpo", "over": None},
        prompts={"shared_start": True},
        completion={"steps": "all", "solver": "euler"},
    )


# --- completions -------------------------------------------------------------------------------------------------------


def n1(config: Config) -> Config:
    """completions of one step"""
    return change(config, completion={"steps": "1", "solver": "euler"})


def n2(config: Config) -> Config:
    """completions of two steps"""
    return change(config, completion={"steps": "2", "solver": "euler"})


def n3(config: Config) -> Config:
    """completions of three steps, second order (AB2)"""
    return change(config, completion={"steps": "3", "solver": "ab2"})


# --- exploration -------------------------------------------------------------------------------------------------------


def cps(config: Config) -> Config:
    """coefficients-preserving sampling, noise .8 (arXiv 2509.05952)"""
    return change(config, exploration={"sampler": "cps", "noise_level": 0.8, "psi": None})


def dance(config: Config) -> Config:
    """DanceGRPO's sampler, constant noise .3, one start noise a group (arXiv 2505.07818)"""
    return change(config, exploration={"sampler": "dance_sde", "noise_level": 0.3, "psi": None}, prompts={"shared_start": True})


def mix(config: Config) -> Config:
    """MixGRPO: a window of four noisy steps that moves on every 25 training steps (arXiv 2507.21802)"""
    return change(config, exploration={"window": "sliding", "window_size": 4, "window_every": 25})


def fast(config: Config) -> Config:
    """Flow-GRPO-Fast: two noisy steps at a random place, drawn anew for every training step"""
    return change(config, exploration={"window": "random", "window_size": 2, "window_start": 0})


# --- objective ---------------------------------------------------------------------------------------------------------


def guard(config: Config) -> Config:
    """GRPO-Guard: normalised ratios and balanced gradients (arXiv 2510.22319); the clip range shrinks with the noise"""
    return change(config, objective={"ratio": "guard", "clip_range": config.objective.clip_range / 4})


def tempflow(config: Config) -> Config:
    """TempFlow-GRPO's weights: steps count by the noise they inject (arXiv 2508.04324)"""
    return change(config, objective={"step_weights": "tempflow"})


def no_guidance(config: Config) -> Config:
    """no classifier-free guidance: one network branch instead of two"""
    return change(config, sampling={"guidance_scale": 1.0})


VARIANTS: dict[str, Callable[[Config], Config]] = {
    f.__name__: f
    for f in (
        dense_grpo, dense_reward, flow_grpo, coca, stepwise, tp_grpo, n1, n2, n3, cps, dance, mix, fast, guard, tempflow, no_guidance
    )
}  # fmt: skip
"""By name, as they follow the colon."""


def apply(config: Config, names: list[str], places: dict[str, Callable[[Config], Config]]) -> Config:
    """The config with variants and places applied in order; its work folder gets the variants' names, as a run may change its place.

    Raises:
      ValueError: an unknown name, with the known ones.
    """
    for name in names:
        if name not in VARIANTS | places:
            where = f", and as places {', '.join(places)}" if places else ""
            raise ValueError(f"no variant {name!r}; there are: {', '.join(VARIANTS)}{where}")
        config = (VARIANTS | places)[name](config)
    return change(config, run={"workdir": Path("-".join([str(config.run.workdir), *(name for name in names if name in VARIANTS)]))})

"""What int8 or fp8 base weights in rollouts would do to log-probabilities: their drift from rollout to update, against the clip range.

The tiny Stable Diffusion 3 that ships samples with weights rounded to fewer bits, one scale for each output of a layer; the update's pass
has the weights as they are. A ratio that has left the clip range before anything is learnt teaches nothing.

    JAX_PLATFORMS=cpu python benchmarks/quantized.py [--json PATH] [--prompts 8]
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax import cli, policy, rewards
from densegrpo_jax import prompts as prompt_lists
from densegrpo_jax.config import Config, batch_size
from densegrpo_jax.plan.command import table
from densegrpo_jax.policy import Policy
from densegrpo_jax.train import phases
from densegrpo_jax_configs.variants import change

CASES = (("float32", None), ("bfloat16", None), ("bfloat16", "fp8"), ("bfloat16", "int8"))  # of the network; of the rollout's weights
PAPER = 1e-4  # the clip range of sd35_medium_pickscore
LARGEST = {"int8": 127.0, "fp8": 448.0}


def rounded(weights: jax.Array, kind: str) -> jax.Array:
    """Weights [..., in, out] as int8 or fp8 (e4m3) holds them, with a scale for each output."""
    if weights.ndim < 2:
        return weights
    wide = weights.astype(jnp.float32)
    scale = jnp.abs(wide).max(-2, keepdims=True) / LARGEST[kind] + 1e-30
    held = jnp.round(wide / scale) if kind == "int8" else (wide / scale).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    return (held * scale).astype(weights.dtype)


def measure(config: Config, made: Policy, kind: str | None) -> dict:
    """Drift of the log-probabilities of a step's trajectories, before anything is learnt, and what their images are worth."""
    sigmas = policy.sigmas(config, made, config.sampling.num_steps)
    tables = phases.sampler(config, sigmas, policy.shift(config, made), step=0)
    prompts, _ = (prompt_lists.load(name) for name in (config.prompts.train, config.prompts.evaluation))
    chosen = prompt_lists.of_step(len(prompts.texts), config.prompts.per_step, config.run.seed, 0)
    cond, uncond = made.encode([prompts.texts[i] for i in chosen]), made.encode([""])
    network, trained = made.params["network"], made.start()
    sampled = made.params | ({"network": jax.tree.map(lambda leaf: rounded(leaf, kind), network)} if kind else {})
    ids, groups = jnp.arange(batch_size(config)), np.repeat(np.arange(len(chosen)), config.prompts.group_size)
    trajectory, clean = phases.make_sample(config, made, tables)(sampled, trained, cond, uncond, np.int32(0), ids, ids)
    kernel = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tables.kernel)
    ones = jnp.ones((len(tables.trained), len(groups)))
    batch = phases.Batch(trajectory, kernel, ones, ones, cond, uncond, jnp.asarray(groups))
    order = phases.update_order(config, tables.trained, 0, config.optimizer.micro_batch)
    _, drift = phases.make_recompute(config, made)(made.params, trained, batch, order.reshape(-1, *order.shape[2:]))
    size = np.abs(np.asarray(drift)[tables.trained])
    images, _ = phases.make_decode(config, made)(made.params, clean[-1])
    scores = rewards.load("scenes_preference")(np.asarray(images), [prompts.texts[chosen[g]] for g in groups], [{}] * len(groups))
    return {
        "median": float(np.median(size)), "largest": float(size.max()), "within_paper": float(np.mean(size < PAPER)),
        "within_own": float(np.mean(size < config.objective.clip_range)), "reward": float(np.mean(scores)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--prompts", type=int, default=8, help="groups of trajectories; 8 by default")
    arguments = parser.parse_args()
    rows = []
    for dtype, kind in CASES:
        config = change(
            cli.load_config("scenes_preference"),
            model={"dtype": dtype}, prompts={"per_step": arguments.prompts}, optimizer={"updates": 1}, completion={"steps": "1"},
            sampling={"chunk": 24},
        )  # fmt: skip
        rows.append({"network": dtype, "rollout": kind or dtype} | measure(config, policy.load(config), kind))
    own = config.objective.clip_range
    header = "network", "rollout's weights", "median drift", "largest", f"within {PAPER:g}", f"within {own:g}", "reward"
    cells = [
        (
            r["network"], r["rollout"], f"{r['median']:.1e}", f"{r['largest']:.1e}", f"{r['within_paper']:.0%}", f"{r['within_own']:.0%}",
            f"{r['reward']:.2f}",
        )
        for r in rows
    ]  # fmt: skip
    print("\n".join(table(header, cells)))
    if arguments.json:
        found = {"rows": rows, "own_clip_range": own, "prompts": arguments.prompts, "seed": config.run.seed, "jax": version("jax")}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

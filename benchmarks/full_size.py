"""Full-size training phases with random weights on whatever accelerator is here: images/s, TFLOP/s, peak memory; and the same rollout by
diffusers in torch, in the same run, if torch sees the accelerator too.

    python benchmarks/full_size.py [--config sd35_medium_pickscore] [--prompts 1] [--rounds 5] [--json PATH] [--quick]

Shapes come from the config; weights are drawn, so nothing is downloaded and pictures are noise. FLOPs are those of `densegrpo plan`.
--quick takes the tiny model, so that the script itself can be tried anywhere; its times say nothing.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax import cli
from densegrpo_jax.config import batch_size, check, micro_batch
from densegrpo_jax.families import Conditioning
from densegrpo_jax.models.attention import attention
from densegrpo_jax.plan import command, roofline, search
from densegrpo_jax.plan import recipe as recipes
from densegrpo_jax.plan.chips import CHIPS, Topology, of_device
from densegrpo_jax.train import phases, state
from densegrpo_jax_configs.variants import change


def drawn(tree, key, scale=0.02):
    """Random arrays of the shapes in a tree, made on the device one by one."""
    leaves, structure = jax.tree.flatten(tree)
    draw = jax.jit(lambda key, shape, dtype: scale * jax.random.normal(key, shape, dtype), static_argnums=(1, 2))
    return jax.tree.unflatten(structure, [draw(jax.random.fold_in(key, i), x.shape, jnp.dtype(x.dtype)) for i, x in enumerate(leaves)])


def seconds(run, rounds):
    """Median wall time of a call after one that compiles, and the seconds of that one."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]), times[0]


def peak():
    """Largest number of bytes that JAX's allocator has held since the process began; None where it does not say."""
    stats = jax.devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


def ours(config, rounds):
    """Sample with completions, rollout alone, decode, update: seconds of each."""
    recipe = recipes.read(config)
    policy = recipes.abstract_policy(config, recipe.configs, recipe.latent)
    key = jax.random.key(0)
    params = drawn(policy.params, key)
    adapter = drawn(policy.start(), jax.random.fold_in(key, 1), 0.01)
    transformer, dtype, P, B = recipe.configs.transformer, jnp.dtype(config.model.dtype), config.prompts.per_step, batch_size(config)

    def text(count, seed):
        shapes = (count, recipe.text_tokens, transformer.joint_attention_dim), (count, transformer.pooled_projection_dim)
        return Conditioning(*(jax.random.normal(jax.random.key(seed), shape, dtype) for shape in shapes))

    cond, uncond = text(P, 2), text(1, 3) if recipe.branches == 2 else None
    ids, step = jnp.arange(B), jnp.int32(0)
    sample = phases.make_sample(config, policy, recipe.tables)
    rollout = phases.make_sample(config, policy, recipe.tables._replace(scheme=()))
    decode = phases.make_decode(config, policy)
    update = phases.make_update(config, policy)
    trajectory, clean = sample(params, adapter, cond, uncond, step, ids, ids)
    T, micro = config.sampling.num_steps, micro_batch(config, recipe.trained_steps)
    ones, groups = jnp.ones((T, B)), jnp.repeat(jnp.arange(P, dtype=jnp.int32), config.prompts.group_size)
    kernel = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), recipe.tables.kernel)
    batch = phases.Batch(trajectory, kernel, ones, ones, cond, uncond, groups)
    order = jnp.asarray(phases.update_order(config, recipe.tables.trained, 0, micro))
    held = [state.init(config, adapter)]

    def updates():
        for u in range(config.optimizer.updates):
            held[0], *_ = update(held[0], params, batch, order[u], u == 0)
        return held[0].trained

    latents = clean.reshape(-1, *clean.shape[2:])
    runs = {
        "rollout": lambda: rollout(params, held[0].trained, cond, uncond, step, ids, ids),
        "rollout and completion": lambda: sample(params, held[0].trained, cond, uncond, step, ids, ids),
        "decode": lambda: decode(params, latents),
        "update": updates,
    }
    return recipe, {name: (*seconds(run, rounds), peak()) for name, run in runs.items()}


def diffusers_rollout(config, recipe, rounds):
    """Seconds of diffusers' transformer in torch for the same rollout, chunk by chunk; None with the reason where that is not possible."""
    try:
        import torch
        from diffusers import SD3Transformer2DModel
    except ImportError as error:
        return None, f"not compared: {error}"
    if recipe.configs.family != "StableDiffusion3Pipeline" or not torch.cuda.is_available():
        return None, "not compared: needs CUDA in torch, and a Stable Diffusion 3"
    values = {**vars(recipe.configs.transformer)}
    with torch.device("cuda"):
        net = SD3Transformer2DModel(**values).to(torch.bfloat16).eval().requires_grad_(False)
    h, w, channels = recipe.latent
    rows, batch = config.sampling.chunk or batch_size(config), batch_size(config)
    transformer = recipe.configs.transformer

    def random(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    context = random(recipe.branches * rows, recipe.text_tokens, transformer.joint_attention_dim)
    pooled = random(recipe.branches * rows, transformer.pooled_projection_dim)

    @torch.no_grad()
    def run():
        for _ in range(batch // rows):
            x = torch.randn(rows, channels, h, w, device="cuda")
            for i in range(config.sampling.num_steps):
                given = x.to(torch.bfloat16).repeat(recipe.branches, 1, 1, 1)
                t = torch.full((recipe.branches * rows,), 1000.0 * (1 - i / config.sampling.num_steps), device="cuda")
                v = net(hidden_states=given, timestep=t, encoder_hidden_states=context, pooled_projections=pooled, return_dict=False)[
                    0
                ].float()
                if recipe.branches == 2:
                    v, uncond = v.chunk(2)
                    v = uncond + config.sampling.guidance_scale * (v - uncond)
                x = x - v / config.sampling.num_steps + 0.01 * torch.randn_like(x)
        torch.cuda.synchronize()

    run()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times), "eager, bfloat16"


def attention_parity():
    """Largest difference of fused attention from XLA's in float32, relative to its largest value, and of the gradient; GPUs only."""
    if jax.default_backend() != "gpu":
        return None
    shape = 2, 1229, 24, 64
    q, k, v, g = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(4))
    results = []
    for impl, dtype in (("xla", jnp.float32), ("cudnn", jnp.bfloat16), ("xla", jnp.bfloat16)):
        out, back = jax.vjp(lambda *a, impl=impl: attention(*a, impl=impl), *(x.astype(dtype) for x in (q, k, v)))
        results.append([np.asarray(x, np.float32) for x in (out, *back(g.astype(dtype)))])
    exact, *others = results
    return {
        name: [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, exact)] for name, found in zip(("cudnn", "xla"), others)
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="sd35_medium_pickscore")
    parser.add_argument("--prompts", type=int, default=1, help="of 24 trajectories each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--quick", action="store_true", help="the tiny model, one round")
    arguments = parser.parse_args()

    name = "scenes_preference" if arguments.quick else arguments.config
    config, rounds = cli.load_config(name), 1 if arguments.quick else arguments.rounds
    config = change(config, prompts={"per_step": arguments.prompts, "group_size": 4 if arguments.quick else 24})
    config = change(config, sampling={"chunk": min(config.sampling.chunk or 24, batch_size(config))}, optimizer={"updates": 1})
    check(config, 1)
    recipe, measured = ours(config, rounds)
    kind = jax.devices()[0].device_kind
    chip = of_device(kind)  # for an unknown one FLOPs are counted as for any, and MFU is not given
    where = Topology(chip or CHIPS["h200"], 1, "1")
    settings = roofline.Settings(
        1, config.sampling.chunk, micro_batch(config, recipe.trained_steps), 1, config.optimizer.remat, search.attentions(recipe, where)[0]
    )
    work = {phase.name: phase.useful for phase in roofline.phases(recipe, settings, where)}
    work["rollout and completion"] = work["rollout"] + work.get("completion", 0.0)
    counts = {"rollout": batch_size(config), "rollout and completion": recipe.images, "decode": recipe.images, "update": batch_size(config)}
    rows, result = [], {"device": kind, "config": name, "jax": jax.__version__, "python": platform.python_version(), "phases": {}}
    for phase, (took, first, held) in measured.items():
        speed = work[phase] / took / 1e12
        gib = held / 2**30 if held else None
        rows.append(
            (
                phase,
                f"{took:.3f}",
                f"{first:.1f}",
                f"{counts[phase] / took:.2f}",
                f"{speed:.1f}",
                f"{speed * 1e12 / chip.peak:.1%}" if chip else "?",
                f"{gib:.1f}" if held else "?",
            )
        )
        result["phases"][phase] = {
            "seconds": took,
            "first_call": first,
            "per_second": counts[phase] / took,
            "tflops": speed,
            "peak_gib": gib,
        }
    print(f"{name} on {kind}, jax {jax.__version__}, seed 0, {batch_size(config)} trajectories\n")
    header = "phase", "seconds", "first call", "images/s", "TFLOP/s", "MFU", "peak GiB so far"
    print("\n".join(command.table(header, rows)))
    theirs, how = diffusers_rollout(config, recipe, rounds)
    print(
        f"\ndiffusers' rollout in torch: {how}" + (f", {theirs:.3f} s, {theirs / measured['rollout'][0]:.2f} times ours" if theirs else "")
    )
    result |= {"diffusers_rollout": theirs, "diffusers": how, "attention": attention_parity()}
    print(f"attention against float32 (output, and gradients of q, k, v): {result['attention'] or 'no GPU here'}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

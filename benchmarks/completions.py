"""How well cheap completions estimate the gains of DenseGRPO, on velocity fields whose fine ODE is known.

    python benchmarks/completions.py [--json PATH] [--quick]

A stochastic sampler (Flow-SDE, a = 0.7, T = 10, last step deterministic, groups of 24) leaves a trajectory of latents. A scheme completes
each latent to a sample by a short ODE and scores it, which gives R_i and the gains R_{i+1} - R_i. The reference completes the same
latents by 80 Heun steps. Four settings: uniform and SD3 grid (shift 3), plain and with classifier-free guidance 2. Three rewards
(benchmarks/fields.py): smooth; detail, which sees residual noise; discrete. Every seed has mixtures, rewards and noise of its own.

Names of schemes:
  n=3 ab2                 n steps on the sampler's own grid (flow.branches); "all" is the paper's n = k
  respaced 3 shift 1 ab2  at most 3 steps laid anew from the latent to 0 (flow.substep_branches); "full" takes 3 at every level but the last
  anchors 7,4,2 ab2       from each level to the next lower of these levels and on through the rest
  n=2, all below 5 ab2    n = k at the levels below 5, n = 2 above
  paired ...              the baseline is the noise-free step completed by the same map (flow.paired), not R_i
  skip_node, skip_call    without the last interior level of the grid
  ... + 6/24 exact        two fidelities: 6 of 24 members are completed by "n=all ab2" too; the rest is corrected by a line at each level

Columns:
  eval, calls  network evaluations a trajectory, sampling included, and sequential calls with a whole level in one (flow.cost)
  wall         seconds relative to the naive loop of n=all, on a small SD3 transformer with tiles of one latent; measured at 10, 27, 40, 55,
               100 and 110 evaluations, interpolated between
  cos          the deciding figure: cosine between the normalised advantages (group mean and std at each step) of the scheme and of the
               reference over all trained steps. The policy gradient is linear in the advantages, so this is how far the update points the
               right way; shifts and scales common to a level do not count, as the normalisation removes them. Mean over settings and
               rewards; +- is the standard error over seeds of its difference to n=all euler; then by reward; then the worst cell.
  true         the same against the true one-step advantage E[R | x_{i+1}] - E[R | x_i], the second by drawing the noise anew. It judges
               the baseline too, which `cos` takes as given: the reference gains themselves do not reach 1.
  slope        `true` with the baseline b R_i in place of R_i, b the least-squares slope of R_{i+1} on R_i within groups at each step
  rank         Spearman correlation of R_i within groups, mean over levels
  sign         share of gains with the sign of the reference's
  gain, R      RMSE of the gains and of R_i, in units of the std of the reference gains; median over settings and rewards

Below the table are wall times: the walk of flow.rollout_and_complete against the naive loop (24 trajectories of 16 tokens), and the effect
of `chunk` (n=1, 256 trajectories of 64 tokens); ratios are medians of interleaved runs. --json writes every cell (setting, reward,
scheme) and the figures of each level.
"""

import argparse
import json
import os
import platform
import statistics
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import fields
import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from densegrpo_jax import credit, flow
from densegrpo_jax.flow import Branch
from densegrpo_jax.models.sd3 import SD3Config, SD3Transformer

STEPS, TRAINED = 10, 9
GROUP, PROMPTS = 24, 4  # a seed is PROMPTS groups
NOISE_LEVEL = 0.7
GRIDS = {"uniform": (flow.uniform_sigmas(STEPS), 1.0), "sd3": (flow.sd3_sigmas(STEPS), 3.0)}  # grid, its shift
GUIDANCE = (1.0, 2.0)
SOLVERS = ("euler", "ab2", "dpmpp2m", "midpoint")
PAPER = "n=all euler"


# --- schemes ---------------------------------------------------------------------------------------------------------


class Scheme(NamedTuple):
    """Branches from every level; for paired schemes followed by those of the baselines."""

    branches: tuple[Branch, ...]
    paired: bool = False
    tail: str = "keep"


def through(sigmas: np.ndarray, levels: list[list[int]], solver: str) -> tuple[Branch, ...]:
    """Branches through given levels, one list for each start."""
    return tuple(Branch(i, flow.plan(sigmas[[STEPS - k for k in nodes]], solver)) for i, nodes in enumerate(levels))


def schemes(grid: str, quick: bool) -> dict[str, Scheme]:
    """All completion schemes on a grid, by name."""
    sigmas, shift = GRIDS[grid]
    result = {}
    for n in (1, 2, "all") if quick else (1, 2, 3, 4, 5, "k/3", "k/2", "all"):
        for solver in SOLVERS[:2] if quick else SOLVERS:
            result[f"n={n} {solver}"] = Scheme(flow.branches(sigmas, n, solver))
    if quick:
        return result
    for n in (2, 3, 5):
        for solver in SOLVERS:
            result[f"respaced {n} shift 1 {solver}"] = Scheme(flow.substep_branches(sigmas, n, 1.0, solver))
            result[f"respaced {n} grid's shift {solver}"] = Scheme(flow.substep_branches(sigmas, n, shift, solver))
    for n in (3, 4, 5, 6):
        for solver in ("ab2", "dpmpp2m"):
            ends = [np.linspace(sigmas[i], 0.0, (n if i < TRAINED else 1) + 1) for i in range(STEPS)]
            result[f"respaced full {n} {solver}"] = Scheme(tuple(Branch(i, flow.plan(nodes, solver)) for i, nodes in enumerate(ends)))
    for anchors in ((5, 2), (7, 4, 2), (8, 6, 4, 2)):
        for solver in ("euler", "ab2"):
            levels = [[k, *(a for a in anchors if a < k), 0] for k in range(STEPS, 0, -1)]
            result[f"anchors {','.join(map(str, anchors))} {solver}"] = Scheme(through(sigmas, levels, solver))
    for below in (4, 6):
        late = np.arange(STEPS) > STEPS - below
        mixed = flow.branches(sigmas, 2, "ab2", levels=~late) + flow.branches(sigmas, "all", "ab2", levels=late)
        result[f"n=2, all below {below} ab2"] = Scheme(mixed)
    for n in (1, 2, 3, "all"):
        for solver in ("euler", "ab2"):
            plain = flow.branches(sigmas, n, solver)
            result[f"paired n={n} {solver}"] = Scheme((*plain, *flow.paired(sigmas, plain)), paired=True)
    for tail in ("skip_node", "skip_call"):
        for n in (3, "all"):
            for solver in ("euler", "ab2"):
                result[f"{tail} n={n} {solver}"] = Scheme(flow.branches(sigmas, n, solver, tail=tail), tail=tail)
    return result


EXACT = "n=all ab2"
TWO_FIDELITY = (("n=1 euler", 6), ("n=1 euler", 8), ("respaced 2 shift 1 ab2", 4))  # cheap scheme, members that are completed by EXACT too


def two_fidelity(cheap: np.ndarray, exact: np.ndarray, members: int) -> np.ndarray:
    """Rewards [T+1, B]: exact for the first members of each group, the others moved along a line fitted to those at each level."""
    cheap, exact = (r.reshape(len(r), -1, GROUP) for r in (cheap, exact))  # [T+1, groups, G]
    mean_cheap, mean_exact = (r[..., :members].mean(-1, keepdims=True) for r in (cheap, exact))
    dc, de = (cheap - mean_cheap)[..., :members], (exact - mean_exact)[..., :members]
    slope = (dc * de).sum((1, 2)) / np.maximum((dc**2).sum((1, 2)), 1e-12)
    corrected = mean_exact + slope[:, None, None] * (cheap - mean_cheap)
    corrected[..., :members] = exact[..., :members]
    return corrected.reshape(len(cheap), -1)


# --- a setting: trajectories, and completions of their latents -------------------------------------------------------


class Setting(NamedTuple):
    """Sampled trajectories of `seeds` independent problems, in one batch."""

    sigmas: np.ndarray
    kernel: flow.Kernel
    guidance: float
    field: fields.Mixtures
    prompt: jax.Array  # [B]
    trajectory: flow.Trajectory


def setting(grid: str, guidance: float, seeds: int) -> Setting:
    sigmas = GRIDS[grid][0]
    parts = [fields.mixtures(seed, PROMPTS) for seed in range(seeds)]
    field = fields.Mixtures(*(jnp.concatenate(leaves) for leaves in zip(*parts)))._replace(std=parts[0].std)
    kernel = flow.only_where(flow.flow_sde(sigmas, NOISE_LEVEL), sigmas, flow.all_but_last(STEPS).stochastic)
    prompt = jnp.repeat(jnp.arange(seeds * PROMPTS), GROUP)
    key, ids, shape = jax.random.key(0), jnp.arange(prompt.size), field.means.shape[-1:]
    x, noise = flow.initial_noise(key, 0, ids, shape), flow.step_noise(key, 0, ids, STEPS, shape)
    trajectory = jax.jit(lambda x, noise: flow.rollout(fields.velocity(field, guidance), x, kernel, sigmas, noise, cond=prompt))(x, noise)
    return Setting(sigmas, kernel, guidance, field, prompt, trajectory)


def follow(s: Setting, x: jax.Array, plans: list[flow.Plan]) -> jax.Array:
    """Each plan from its own latents, x [N, B, D] -> [N, B, D]. Plans are padded, so that schemes of one size share a program."""
    longest = max(len(p) for p in plans)
    longest = next((size for size in (10, 20) if longest <= size), longest)
    sigmas, coef = np.zeros((len(plans), longest)), np.tile(np.eye(2, 3), (len(plans), longest, 1, 1))  # rows that change nothing
    for i, p in enumerate(plans):
        sigmas[i, : len(p)], coef[i, : len(p)] = p
    return _follow(s.field, s.prompt, x, jnp.asarray(sigmas, jnp.float32), jnp.asarray(coef, jnp.float32), guidance=s.guidance)


@partial(jax.jit, static_argnames="guidance")
def _follow(field, prompt, x, sigmas, coef, guidance):
    velocity = fields.velocity(field, guidance)
    return jax.lax.map(lambda a: flow.integrate(lambda x, t: velocity(x, t, prompt), a[0], flow.Plan(*a[1:])), (x, sigmas, coef))


@jax.jit
def _score(field, prompt, x):
    return jax.lax.map(lambda a: fields.rewards(field, a, prompt), x)


def score(s: Setting, x: jax.Array) -> dict[str, np.ndarray]:
    """Samples [N, B, D] -> rewards [N, B]."""
    return {name: np.asarray(value, np.float64) for name, value in _score(s.field, s.prompt, x).items()}


def fine(start: float, intervals: int, solver: str) -> flow.Plan:
    """From a level to 0, nodes closer together near 0, where the field is stiff."""
    return flow.plan(start * np.linspace(1.0, 0.0, intervals + 1) ** 2, solver)


def reference(s: Setting, intervals: int) -> dict[str, np.ndarray]:
    """Rewards [T+1, B] of fine completions; the last is the sample itself."""
    clean = follow(s, s.trajectory.latents[:-1], [fine(sigma, intervals, "heun") for sigma in s.sigmas[:-1]])
    return score(s, jnp.concatenate([clean, s.trajectory.latents[-1:]]))


def redrawn(s: Setting, draws: int) -> dict[str, np.ndarray]:
    """E[R | x_i] over new draws of the noise of step i, trained steps [T-1, B]; fine completions."""
    plans = [fine(sigma, 40, "ab2") for sigma in s.sigmas[1:-1]]
    kernel = jax.tree.map(lambda leaf: jnp.asarray(leaf[:TRAINED], jnp.float32), s.kernel)
    x, v = s.trajectory.latents[:TRAINED], s.trajectory.velocity[:TRAINED]
    total = dict.fromkeys(fields.REWARDS, 0.0)
    for key in jax.random.split(jax.random.key(1), draws):
        after = jax.vmap(flow.step)(kernel, x, v, jax.random.normal(key, x.shape))
        for name, value in score(s, follow(s, after, plans)).items():
            total[name] += value / draws
    return total


def estimate(s: Setting, scheme: Scheme) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    """By reward: R [T+1, B] as the scheme estimates it, and its paired baseline [T, B] or None."""
    latents, starts = s.trajectory.latents, np.array([branch.start for branch in scheme.branches])
    clean = follow(s, latents[starts], [branch.plan for branch in scheme.branches])
    last = latents[-1]
    if scheme.tail == "skip_call":  # as the sampler does then: the last step takes the velocity of the one before
        last = latents[-2] - float(s.sigmas[-2]) * s.trajectory.velocity[-2]
        clean = clean.at[TRAINED].set(last)
    order = [*np.argsort(starts[:STEPS]), -1]
    rewards = score(s, jnp.concatenate([clean, last[None]]))
    return {name: (r[order], r[STEPS:-1] if scheme.paired else None) for name, r in rewards.items()}


# --- judging ---------------------------------------------------------------------------------------------------------


def normalised(gains: np.ndarray) -> np.ndarray:
    """Advantages of trained steps [T-1, B], B in groups of GROUP."""
    return credit.normalize.advantages(gains[:TRAINED], np.arange(gains.shape[1]) // GROUP, eps=1e-6)


def within_groups(r: np.ndarray) -> np.ndarray:
    """[L, B] -> [L, groups, G], each group centred."""
    r = r.reshape(len(r), -1, GROUP)
    return r - r.mean(-1, keepdims=True)


def sloped(r: np.ndarray) -> np.ndarray:
    """R_{i+1} - b_i R_i with the least-squares slope b_i within groups."""
    d = within_groups(r)
    slope = (d[1:] * d[:-1]).sum((1, 2)) / np.maximum((d[:-1] ** 2).sum((1, 2)), 1e-12)
    return r[1:] - slope[:, None] * r[:-1]


def cosine(a: np.ndarray, b: np.ndarray, axis: int | None = None) -> np.ndarray:
    return (a * b).sum(axis) / np.sqrt(np.maximum((a * a).sum(axis) * (b * b).sum(axis), 1e-30))


def rank_correlation(r: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Spearman within groups, mean over the groups that the reference ranks; [L]. A scheme that ties all ranks nothing: 0."""
    a, b = (within_groups(stats.rankdata(x.reshape(-1, GROUP), axis=1).reshape(x.shape)) for x in (r, reference))
    ranked = (b != 0).any(-1)
    return (cosine(a, b, -1) * ranked).sum(1) / np.maximum(ranked.sum(1), 1)


def judge(r: np.ndarray, baseline: np.ndarray | None, reference: np.ndarray, before: np.ndarray) -> dict[str, np.ndarray]:
    """One seed: estimated and reference rewards [T+1, B], true state values [T-1, B] -> figures."""
    gains, true_gains = (r[1:] - (r[:-1] if baseline is None else baseline))[:TRAINED], np.diff(reference, axis=0)[:TRAINED]
    a, exact, true = normalised(gains), normalised(true_gains), normalised(reference[1 : TRAINED + 1] - before)
    unit = true_gains.std()
    return {
        "cos": cosine(a, exact),
        "true": cosine(a, true),
        "slope": cosine(normalised(sloped(r)), true),
        "sign": np.mean(np.sign(gains) == np.sign(true_gains)),
        "gain": np.sqrt(np.mean((gains - true_gains) ** 2)) / unit,
        "R": np.sqrt(np.mean((r[:STEPS] - reference[:STEPS]) ** 2)) / unit,
        "cos_level": cosine(a, exact, 1),
        "rank_level": rank_correlation(r[:STEPS], reference[:STEPS]),
    }


def study(seeds: int, draws: int, quick: bool) -> tuple[dict, dict]:
    """figures[scheme][setting, reward][figure] with a leading axis of seeds; costs[scheme] = (evaluations, calls)."""
    figures, costs = {}, {}
    for grid in GRIDS:
        for guidance in GUIDANCE[:1] if quick else GUIDANCE:
            s = setting(grid, guidance, seeds)
            exact, before = reference(s, 80), redrawn(s, draws)
            estimates = {"reference": {name: (r, None) for name, r in exact.items()}}
            costs["reference"] = (STEPS + 160 * STEPS, STEPS + 160 * STEPS)
            for name, scheme in schemes(grid, quick).items():
                estimates[name] = estimate(s, scheme)
                costs[name] = flow.cost(STEPS, scheme.branches, tile=None, tail=scheme.tail)[:2]
            by_seed = partial(np.split, indices_or_sections=seeds, axis=1)
            for cheap, members in () if quick else TWO_FIDELITY:
                name = f"{cheap} + {members}/{GROUP} exact"
                costs[name] = (costs[cheap][0] + members / GROUP * (costs[EXACT][0] - STEPS), STEPS)
                estimates[name] = {
                    q: (np.concatenate([two_fidelity(a, b, members) for a, b in zip(by_seed(r), by_seed(estimates[EXACT][q][0]))], 1), None)
                    for q, (r, _) in estimates[cheap].items()
                }
            for name, by_reward in estimates.items():
                for q, (r, baseline) in by_reward.items():
                    baselines = [None] * seeds if baseline is None else by_seed(baseline)
                    rows = [judge(*args) for args in zip(by_seed(r), baselines, by_seed(exact[q]), by_seed(before[q]))]
                    cell = {figure: np.array([row[figure] for row in rows]) for figure in rows[0]}
                    figures.setdefault(name, {})[f"{grid} {guidance:g}", q] = cell
            print(f"done: {grid} grid, guidance {guidance:g}", flush=True)
    return figures, costs


def summary(figures: dict, costs: dict, wall: dict) -> list[dict]:
    """A row a scheme, cheapest first, then best first. Wall times between measured ones are interpolated over the evaluations."""
    measured = sorted((costs[name][0], ratio) for name, ratio in wall.items() if name in costs)
    rows = []
    for name, cells in figures.items():
        mean = {f: float(np.mean([cell[f].mean() for cell in cells.values()])) for f in ("cos", "true", "slope", "sign")}
        median = {f: float(np.median([cell[f].mean() for cell in cells.values()])) for f in ("gain", "R")}
        difference = np.mean([cell["cos"] - figures[PAPER][key]["cos"] for key, cell in cells.items()], axis=0)  # [seeds]
        by_reward = {q: float(np.mean([c["cos"].mean() for key, c in cells.items() if key[1] == q])) for q in fields.REWARDS}
        rows.append(
            {
                "scheme": name,
                "eval": costs[name][0],
                "calls": costs[name][1],
                "wall": float(np.interp(costs[name][0], *zip(*measured), right=np.nan)),
                **mean,
                **median,
                "cos_se": float(difference.std(ddof=1) / np.sqrt(difference.size)) if difference.size > 1 else 0.0,
                **by_reward,
                "worst": float(min(cell["cos"].mean() for cell in cells.values())),
                "rank": float(np.mean([cell["rank_level"].mean() for cell in cells.values()])),
            }
        )
    return sorted(rows, key=lambda row: (row["eval"], -row["cos"]))


def print_table(rows: list[dict]) -> None:
    columns = ("cos", "cos_se", *fields.REWARDS, "worst", "true", "slope", "rank", "sign", "gain", "R")
    print(f"{'scheme':34} {'eval':>6} {'calls':>5} {'wall':>5} " + " ".join(f"{'+-' if c == 'cos_se' else c:>8}" for c in columns))
    for row in rows:
        print(f"{row['scheme']:34} {row['eval']:6g} {row['calls']:5d} {row['wall']:5.2f} " + " ".join(f"{row[c]:8.3f}" for c in columns))


# --- wall time -------------------------------------------------------------------------------------------------------


def timed(programs: dict, repeats: int) -> dict[str, float]:
    """Median over rounds of each program's seconds over those of the first, all run in turn."""
    for run in programs.values():
        jax.block_until_ready(run())
    ratios = {name: [] for name in programs}
    for _ in range(repeats):
        seconds = {}
        for name, run in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name] = time.perf_counter() - start
        first = next(iter(seconds.values()))
        for name, value in seconds.items():
            ratios[name].append(value / first)
    return {name: statistics.median(values) for name, values in ratios.items()}


def network(width: int, layers: int, side: int, batch: int):
    """A small SD3 transformer with random weights as velocity(x, sigma, cond), and x_init, noise, cond to run it on."""
    config = SD3Config(
        sample_size=side, num_layers=layers, attention_head_dim=width // 4, num_attention_heads=4, joint_attention_dim=32,
        caption_projection_dim=width, pooled_projection_dim=32, pos_embed_max_size=side,
    )  # fmt: skip
    model, keys = SD3Transformer(config), jax.random.split(jax.random.key(2), 5)
    x = jax.random.normal(keys[0], (batch, side, side, 16))
    noise = jax.random.normal(keys[1], (STEPS, *x.shape))
    cond = jax.random.normal(keys[2], (batch, 8, 32)), jax.random.normal(keys[3], (batch, 32))
    leaves, tree = jax.tree.flatten(jax.eval_shape(model.init, keys[4], x, jnp.ones(batch), *cond)["params"])
    leaf_keys = jax.random.split(keys[4], len(leaves))
    params = tree.unflatten([0.05 * jax.random.normal(k, leaf.shape) for k, leaf in zip(leaf_keys, leaves)])
    return (lambda x, sigma, cond: model.apply({"params": params}, x, sigma, *cond)), (x, noise, cond)


def wall_times(quick: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Relative seconds of programs against the naive loop, and of chunks against none."""
    sigmas = GRIDS["uniform"][0]
    kernel = flow.only_where(flow.flow_sde(sigmas, NOISE_LEVEL), sigmas, flow.all_but_last(STEPS).stochastic)
    table = schemes("uniform", quick)

    def walk(velocity, args, name, **options):
        scheme = table[name].branches

        @jax.jit
        def run(x, noise, cond):
            return flow.rollout_and_complete(velocity, x, kernel, sigmas, noise, scheme, cond=cond, **options)

        return lambda: run(*args)

    def naive(velocity, args, name):
        scheme = table[name].branches

        @jax.jit
        def run(x, noise, cond):
            trajectory = flow.rollout(velocity, x, kernel, sigmas, noise, cond=cond)
            return trajectory, flow.complete(velocity, trajectory.latents, scheme, cond=cond)

        return lambda: run(*args)

    velocity, args = network(32, 1, 4, 4) if quick else network(128, 2, 8, 24)
    programs = {"naive loop": naive(velocity, args, PAPER)} | {name: walk(velocity, args, name) for name in ("n=1 euler", PAPER)}
    if not quick:
        more = ("n=3 euler", "respaced 5 shift 1 euler", "paired n=all euler", "n=all midpoint")
        programs |= {name: walk(velocity, args, name) for name in more}
        programs |= {f"{PAPER}, tile {tile}": walk(velocity, args, PAPER, tile=tile) for tile in (5, None)}
    ratios = timed(programs, 1 if quick else 5)
    sizes = (4, 2) if quick else (256, 128, 64, 32, 16)
    velocity, args = network(32, 1, 4, 4) if quick else network(128, 2, 16, 256)
    return ratios, timed({f"chunk {c}": walk(velocity, args, "n=1 euler", chunk=c) for c in sizes}, 1 if quick else 5)


# --- main ------------------------------------------------------------------------------------------------------------


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def rounded(value, digits: int = 3):
    """Numbers in dicts and arrays for JSON; NaN becomes null."""
    if isinstance(value, dict):
        return {key: rounded(v, digits) for key, v in value.items()}
    if isinstance(value, np.ndarray):
        return [rounded(v, digits) for v in value]
    return value if isinstance(value, (str, int)) else None if np.isnan(value) else round(float(value), digits)


def write(path: Path, about: dict, rows: list[dict], figures: dict, wall: dict) -> None:
    """The table; every cell; and by scheme and setting the figures of each level, mean over rewards. One line an entry."""
    scalars = ("cos", "true", "slope", "sign", "gain", "R")
    cells = [
        {"scheme": name, "setting": key[0], "reward": key[1], "cos_seeds": rounded(cell["cos"])}
        | {figure: rounded(cell[figure].mean()) for figure in scalars}
        for name, by_key in figures.items()
        for key, cell in by_key.items()
    ]
    levels = [
        {"scheme": name, "setting": setting}
        | {f: rounded(np.mean([by_key[setting, q][f].mean(0) for q in fields.REWARDS], 0), 2) for f in ("rank_level", "cos_level")}
        for name, by_key in figures.items()
        for setting in dict.fromkeys(key[0] for key in by_key)
    ]
    parts = {"about": [about], "wall": [rounded(wall)], "schemes": [rounded(row) for row in rows], "cells": cells, "levels": levels}
    body = ",\n".join(
        f'"{key}": [\n' + ",\n".join(json.dumps(line, separators=(",", ":")) for line in lines) + "\n]" for key, lines in parts.items()
    )
    path.write_text("{\n" + body + "\n}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--quick", action="store_true", help="a few schemes, one seed, no guidance, toy transformer: under a minute")
    parser.add_argument("--seeds", type=int, default=4, help="independent problems of four prompts each (default 4)")
    args = parser.parse_args()
    seeds, draws = (1, 2) if args.quick else (args.seeds, 12)
    about = {
        "device": f"{jax.devices()[0].platform}: {cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("jax", "flax", "numpy", "scipy")},
        "seeds": list(range(seeds)),
        "problem": f"T {STEPS}, a {NOISE_LEVEL}, {PROMPTS} prompts x {GROUP} a seed, true advantages from {draws} draws",
    }
    print("\n".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    figures, costs = study(seeds, draws, args.quick)
    programs, chunks = wall_times(args.quick)
    rows = summary(figures, costs, programs)
    print_table(rows)
    print("wall time of the walk over the naive loop: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in programs.items()))
    print("wall time of sampling by chunk, over no chunks: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in chunks.items()))
    if args.json:
        write(args.json, about, rows, figures, {"programs": programs, "chunks": chunks})


if __name__ == "__main__":
    main()

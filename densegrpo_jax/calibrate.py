"""`densegrpo calibrate`: DenseGRPO's Algorithm 1 with the model, rewards and prompts of a run.

An iteration samples fresh trajectories with the noise levels so far, completes and scores them as training does, counts the signs of the
gains at every step, and moves each level once. Every iteration is a line of trace.jsonl, from which a killed search continues.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tqdm import tqdm

from densegrpo_jax import __version__, flow, parallel, rewards
from densegrpo_jax import config as configs
from densegrpo_jax import policy as policies
from densegrpo_jax import prompts as prompt_lists
from densegrpo_jax.config import Config, Credit, batch_size, reward_sources, reward_weights
from densegrpo_jax.flow import calibration
from densegrpo_jax.flow.calibration import Rule, Signs
from densegrpo_jax.policy import Policy
from densegrpo_jax.rewards import Reward, Scores
from densegrpo_jax.train import files, lock, loop, metrics, phases, psi

STREAM = 1_112_026  # folded into the run's seed: calibration shares no noise with training
DECIDING = ("model", "rewards", "sampling", "exploration", "completion")  # sections of the config that calibration depends on


@dataclass(frozen=True)
class Calibration:
    mode: Literal["scaled", "multiplier", "printed"] = "scaled"
    """"printed" moves psi itself as Algorithm 1 does; "multiplier" moves b in psi = b sqrt(t / (1 - t)); "scaled" does so too, and
    widens the band of balance with the number of trajectories, eps1 + sqrt(N)."""
    trajectories: int | None = None
    """N: fresh trajectories an iteration, each with a prompt of its own; the run's per_step * group_size by default. The unscaled modes
    want 3, 5 or 7: with other numbers they narrow balanced levels too."""
    iterations: int = 80
    """At most so many; 0 writes the start as it is. May be raised to continue."""
    rest: float = 0.25
    """Stop early once, at every level, the mean of the last `average` iterations differs from that before by at most this share of what
    always moving one way would do; 0 for never."""
    average: int = 20
    """Iterations at the end whose mean is the result."""
    start: Literal["noise_level", "excess_noise"] = "noise_level"
    """Where the search starts: at exploration.noise_level as Flow-GRPO's a, or where no step leaves more than `excess` times the noise of
    its level, which needs no reward."""
    excess: float = 1.05
    """Ratio of noise for start = excess_noise."""
    eps1: float = 2.0
    """Difference of the numbers of positive and negative gains from which on a level is unbalanced."""
    eps2: float = 0.01
    """What a level moves by in an iteration."""
    decided: float = 0.5
    """A level whose gains are 0 but for less than this share does not move; 0 is the printed rule."""
    consistent: bool = True
    """Gains against the completion of the noise-free step, as completion.paired takes them, unless completions are the paper's n = k by
    Euler: so that a step without noise has no gain. Otherwise the solver's own error has a sign, which stands out the more a level is
    narrowed and narrows it further. Costs about twice as much."""
    low: float = 0.01
    """Lower bound, as a multiplier."""
    high: float = 1.2
    """Upper bound, as a multiplier."""


@dataclass(frozen=True)
class Figure:
    levels: tuple[float, ...] = (0.5, 0.7, 0.8)
    """Fixed noise levels a to compare the calibrated ones with."""
    prompts: int = 96
    """Prompts of the figure. Signs at late steps belong to the prompt, so many are needed."""
    members: int = 4
    """Trajectories of each."""
    accuracy_prompts: int = 4
    """Prompts on which completions are compared with each other and with a reference of 40 steps; 0 leaves that out."""
    accuracy_members: int = 24
    """Trajectories of each."""


def check(config: Config, options: Calibration) -> None:
    """Refuses settings that cannot work.

    Raises:
      ValueError: naming the field, its value and what to do.
    """
    configs.check_fields(config)
    most, devices = config.sampling.chunk, parallel.shares(config.parallel)
    if most is not None and most % devices:
        raise ValueError(f"sampling.chunk = {most}: {devices} devices do not share it evenly; choose a multiple of {devices}")
    if config.exploration.sampler not in psi.SAMPLERS:
        raise ValueError(f"exploration.sampler = {config.exploration.sampler!r}: psi belongs to {' and '.join(psi.SAMPLERS)}")
    for name, low in (("iterations", 0), ("average", 1), ("excess", 1.0), ("eps1", 0.0), ("eps2", 0.0), ("rest", 0.0), ("low", 0.0)):
        if not low <= getattr(options, name) < math.inf:
            raise ValueError(f"calibration.{name} = {getattr(options, name)}: must be at least {low}")
    if not options.low < options.high < math.inf:
        raise ValueError(f"calibration.low = {options.low} and calibration.high = {options.high}: low must be smaller, both finite")
    if not 0.0 <= options.decided <= 1.0:
        raise ValueError(f"calibration.decided = {options.decided}: a share is between 0 and 1")
    count, least = number(config, options), 1
    while least < calibration.threshold(rule(options), least):
        least += 1
    if count < least:
        raise ValueError(f"calibration.trajectories = {count}: the rule cannot tell gains of one sign from balance below {least}")


def rule(options: Calibration) -> Rule:
    """The rule of a mode."""
    return Rule(options.eps1, options.mode == "scaled", options.eps2, options.decided)


def number(config: Config, options: Calibration) -> int:
    """N, trajectories an iteration."""
    return batch_size(config) if options.trajectories is None else options.trajectories


# --- trajectories and their gains ------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """What trajectories are drawn from: config (of `widest`), policy, its trained weights or None, tables, prompts, scorers, mesh."""

    config: Config
    policy: Policy
    trained: Any
    tables: phases.Sampler
    prompts: prompt_lists.PromptSet
    scorers: dict[str, Reward]
    mesh: jax.sharding.Mesh | None = None


class Draw(NamedTuple):
    """N trajectories: trajectory; clean latents [branches + 1, N, ...]; cond [N, ...]; by reward and for their weighted sum under
    "total": rewards [T+1, N] and gains [T, N], NaN where there is none."""

    trajectory: flow.Trajectory
    clean: jax.Array
    cond: Any
    rewards: dict[str, np.ndarray]
    gains: dict[str, np.ndarray]


def widest(config: Config, consistent: bool) -> Config:
    """The config with the widest window of the run, every level completed, no psi file, and `consistent` gains if asked for."""
    e, c = config.exploration, config.completion
    changed = dataclasses.replace(phases.widest(e, config.sampling.num_steps), psi=None)
    on_grid = (c.steps, c.solver, c.tail) == ("all", "euler", "keep")  # its gains are consistent as they are
    completion = dataclasses.replace(c, paired=c.paired or (consistent and not on_grid))
    return dataclasses.replace(config, exploration=changed, completion=completion, credit=Credit(method="dense_grpo"))


def setting(
    config: Config,
    *,
    consistent: bool = True,
    extra_rewards: dict[str, Reward] | None = None,
    also: tuple[str, ...] = (),
    mesh: jax.sharding.Mesh | None = None,
) -> Setting:
    """Loads model, prompts and rewards, as training does.

    Args:
      config: the run.
      mesh: the ambient mesh, see `parallel.within`; None for one device.
      consistent: see `Calibration`.
      extra_rewards: rewards by name beside the built-in ones.
      also: further rewards that are scored along and do not count for "total".
    """
    config = widest(config, consistent)
    policy = policies.load(config, mesh)
    sigmas = policies.sigmas(config, policy, config.sampling.num_steps)
    tables = phases.sampler(config, sigmas, policies.shift(config, policy), step=0)
    prompts = prompt_lists.load(config.prompts.train)
    names, sources = dict.fromkeys((*reward_weights(config), *also)), reward_sources(config)
    with parallel.alone(mesh):
        own, given = parallel.of_process(mesh), extra_rewards or {}
        scorers = {n: given.get(n) or rewards.load(sources.get(n, n), config.reward_server, own) for n in names}
    scorers = {n: parallel.apart(mesh, reward) for n, reward in scorers.items()}
    trained = None if config.adapter.start is None else parallel.everywhere(mesh, policy.start())
    return Setting(config, policy, trained, tables, prompts, scorers, mesh)


def chunk(config: Config, count: int) -> int | None:
    """How many of `count` trajectories are sampled at a time; None for all."""
    most = config.sampling.chunk
    return most if most and most < count else None


def missing(s: Setting, count: int) -> int:
    """How many trajectories make `count` a number that chunks and devices share evenly."""
    return -count % (chunk(s.config, count) or (parallel.shares(s.config.parallel) if s.mesh else 1))


def make_sample(config: Config, policy: Policy, tables: phases.Sampler) -> Callable:
    """As `phases.make_sample`, with the kernel an argument and a conditioning for each trajectory:
    (params, trained, cond [N, ...], uncond, kernel, epoch, ids [N]) -> Trajectory, clean latents [branches + 1, N, ...].
    """

    @jax.jit
    def sample(params, trained, cond, uncond, kernel, epoch, ids):
        key = jax.random.fold_in(jax.random.key(config.run.seed), STREAM)
        x = flow.initial_noise(key, epoch, ids, policy.shape)
        noise = flow.step_noise(key, epoch, ids, config.sampling.num_steps, policy.shape)
        trajectory, clean = flow.rollout_and_complete(
            policy.velocity(params, trained, uncond), x, kernel, tables.sigmas, noise, tables.scheme, cond=cond,
            chunk=chunk(config, len(ids)), tile=config.completion.tile, tail=config.completion.tail,
        )  # fmt: skip
        return parallel.by_rows((trajectory, jnp.concatenate([clean, trajectory.latents[-1:]])), axis=1)

    return sample


def make_draw(s: Setting) -> Callable[[flow.Kernel, int, list[int], np.ndarray], Draw]:
    """(kernel [T], epoch, members: indices of N prompts, ids [N]) -> Draw; (epoch, id) address the noise. N need not be a number that the
    devices share evenly, nor a multiple of `sampling.chunk`: what is missing is filled up and left out again."""
    devices = parallel.shares(s.config.parallel) if s.mesh else 1
    sample, decode = make_sample(s.config, s.policy, s.tables), phases.make_decode(s.config, s.policy, devices)
    uncond = parallel.everywhere(s.mesh, s.policy.encode([""])) if s.config.sampling.guidance_scale != 1.0 else None
    weights = reward_weights(s.config)

    def draw(kernel: flow.Kernel, epoch: int, members: list[int], ids: np.ndarray) -> Draw:
        count = len(members)
        extra = missing(s, count)
        members, ids = [*members, *members[-1:] * extra], np.append(ids, np.repeat(ids[-1:], extra))
        cond = parallel.over_rows(s.mesh, s.policy.encode([s.prompts.texts[i] for i in members]))
        table = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), kernel)
        over = parallel.over_rows(s.mesh, ids)
        trajectory, clean = sample(s.policy.params, s.trained, cond, uncond, table, np.int32(epoch), over)
        scored = loop._score(s.policy, decode, s.scorers, s.prompts, members, clean)
        scored["total"] = rewards.weighted_sum({name: scored[name] for name in weights}, weights)
        by_level = {name: rewards_and_gains(found, s.tables, len(members)) for name, found in scored.items()}
        found = [{name: pair[i][:, :count] for name, pair in by_level.items()} for i in (0, 1)]
        if extra:
            clean, cond = clean[:, :count], jax.tree.map(lambda leaf: leaf[:count], cond)
            parts = {name: getattr(trajectory, name)[:, :count] for name in trajectory._fields if name != "sigmas"}
            trajectory = trajectory._replace(**parts)
        return Draw(trajectory, clean, cond, *found)

    return draw


def rewards_and_gains(scores: Scores, tables: phases.Sampler, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Rewards [T+1, B] and gains [T, B] of flat scores, NaN where there is none; with paired completions against their baselines."""
    levels, baseline = loop._by_level(scores, tables, batch)
    value = np.where(levels.valid, levels.value, np.nan)
    return value, np.diff(value, axis=0) if baseline is None else value[1:] - baseline


# --- the search ------------------------------------------------------------------------------------------------------------


def calibrate(config: Config, options: Calibration, *, extra_rewards: dict[str, Reward] | None = None) -> Path:
    """Calibrates the noise levels of a run, or continues where a killed search stopped.

    Args:
      config: the run. Its window says which levels take part, its `exploration.psi` is not looked at.
      options: of the search.
      extra_rewards: rewards by name beside the built-in ones.

    Returns:
      psi.json in the folder `calibration` of the run's work folder.

    Raises:
      ValueError: settings that cannot work, or a folder that holds the search of another run.
    """
    check(config, options)
    with ExitStack() as opened:
        if not parallel.primary():
            opened.enter_context(redirect_stdout(None))  # of several processes the first one speaks
        mesh = parallel.make(config.parallel)
        opened.enter_context(parallel.within(mesh))
        s = setting(config, consistent=options.consistent, extra_rewards=extra_rewards, mesh=mesh)
        return _calibrate(config, options, s)


def _calibrate(config: Config, options: Calibration, s: Setting) -> Path:
    loop._report_truncation(s.policy, list(s.prompts.texts))
    count = number(config, options)
    chance = calibration.chance_balanced(rule(options), count)
    if chance < 0.5:
        print(
            f"warning: with {count} trajectories the rule calls a symmetric level balanced with probability {chance:.2f} only; levels "
            "then fall to their bound however balanced: use --calibration.trajectories 3, 5 or 7, or --calibration.mode scaled"
        )
    folder = config.run.workdir / "calibration"
    files.writable(folder, "run.workdir")
    with lock.held(folder) if parallel.primary() else nullcontext():
        return _search(config, options, s, folder, count)


def _search(config: Config, options: Calibration, s: Setting, folder: Path, count: int) -> Path:
    """The iterations, from where the folder's trace ends."""
    identity = _settle(folder, s, options)
    trace = folder / "trace.jsonl"
    records = metrics.rewind(trace, sys.maxsize)  # a torn last line is dropped
    parallel.together("read")  # before the first process goes on with it
    scale = flow.flow_scale(s.tables.sigmas)
    unit = scale if options.mode == "printed" else np.ones_like(scale)  # of what moves: psi, or the multiplier
    low, high = options.low * unit, options.high * unit
    moving, stochastic = s.tables.trained, s.tables.kernel.std > 0.0
    draw = make_draw(s)
    shown = metrics.is_terminal() and parallel.primary()
    bar = tqdm(total=options.iterations, initial=len(records), disable=not shown, unit="iteration", dynamic_ncols=True)
    while True:
        values = np.array([record["value"] for record in records]).reshape(len(records), len(scale))
        resting = calibration.settled(values, options.average, options.eps2, options.rest)
        if resting or len(records) >= options.iterations:
            break
        began, i = time.perf_counter(), len(records)
        value = _next(records[-1], options, low, high, moving) if records else _start(config, s, options, scale, low, high)
        kernel = calibration.table(s.tables.sigmas, value * scale / unit, stochastic)
        members = prompt_lists.of_step(len(s.prompts.texts), count, config.run.seed, i).tolist()
        drawn = draw(kernel, i, members, np.arange(count))
        counts = calibration.signs(drawn.gains["total"])
        record = {"step": i, "value": value} | counts._asdict()
        record |= {"failed": int(count * moving.sum() - sum(part[moving].sum() for part in counts)), "reward": _level_mean(drawn)}
        metrics.append(trace, record)
        records.append(json.loads(json.dumps(metrics.plain(record))))
        bar.set_postfix_str(_line(records[-1], options, time.perf_counter() - began, unit), refresh=False)
        bar.update()
        if bar.disable:
            print(_line(records[-1], options, time.perf_counter() - began, unit), flush=True)
    bar.close()

    start = _start(config, s, options, scale, low, high)
    psi.write(folder / "psi.json", identity | _result(records, options, s, scale, unit, start, resting))
    parallel.together("written")
    return folder / "psi.json"


def _start(config: Config, s: Setting, options: Calibration, scale: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The value that the search starts from; levels that do not move keep the run's noise level."""
    fixed = config.exploration.noise_level / (1.0 if config.exploration.sampler == "flow_sde" else scale)
    chosen = np.broadcast_to(fixed, scale.shape)
    if options.start == "excess_noise":
        chosen = np.where(s.tables.trained, calibration.psi_for_ratio(s.tables.sigmas, options.excess) / scale, chosen)
    value = chosen * (scale if options.mode == "printed" else 1.0)
    return np.where(s.tables.trained, np.clip(value, low, high), value)


def _next(record: dict, options: Calibration, low: np.ndarray, high: np.ndarray, moving: np.ndarray) -> np.ndarray:
    counts = Signs(*(np.array(record[name]) for name in Signs._fields))
    return calibration.advance(np.array(record["value"]), counts, rule(options), low, high, moving)


def _level_mean(drawn: Draw) -> np.ndarray:
    """Mean reward of each level, NaN where none is."""
    found = drawn.rewards["total"]
    there = np.isfinite(found)
    return np.where(there.any(1), np.where(there, found, 0.0).sum(1) / np.maximum(there.sum(1), 1), np.nan)


def _settle(folder: Path, s: Setting, options: Calibration) -> dict:
    """What identifies a search; written beside a new one, compared with that of an old one."""
    config = configs.to_json(s.config)
    fixed = {name: config[name] for name in DECIDING}
    fixed["sampling"] = {k: v for k, v in fixed["sampling"].items() if k not in ("chunk", "decode_chunk")}
    fixed["completion"] = {k: v for k, v in fixed["completion"].items() if k != "tile"}
    fixed["adapter"] = config["adapter"] if s.config.adapter.start else None
    fixed |= {"prompts": config["prompts"]["train"], "seed": config["run"]["seed"], "trajectories": number(s.config, options)}
    fixed["calibration"] = {k: v for k, v in dataclasses.asdict(options).items() if k not in ("trajectories", "iterations", "rest")}
    path = folder / "settings.json"
    if path.exists():
        before = json.loads(path.read_text())
        changed = [f"{k}: {before.get(k)!r} -> {fixed.get(k)!r}" for k in sorted(before | fixed) if before.get(k) != fixed.get(k)]
        if changed:
            raise ValueError(
                f"{folder} holds a calibration with other settings ({'; '.join(changed)}); "
                "give another run.workdir, or the old settings to continue it"
            )
    psi.write(path, fixed)
    return {"made_by": f"densegrpo_jax {__version__}", "name": s.policy.name, "settings": fixed}


def _result(
    records: list[dict], options: Calibration, s: Setting, scale: np.ndarray, unit: np.ndarray, start: np.ndarray, resting: bool
) -> dict:
    """What psi.json says beside the settings."""
    used = records[-options.average :]
    value = np.mean([record["value"] for record in used], axis=0) if used else start
    moving = s.tables.trained
    multiplier = np.round(np.where(moving, value, start) / unit, 10)
    ends = np.array([record["value"] for record in used] or [start]) / unit  # [iterations, T]
    shares = {name: np.sum([record[name] for record in used], axis=0) if used else np.zeros(len(scale)) for name in Signs._fields}
    total = np.maximum(sum(shares.values()), 1)
    return metrics.plain(
        {
            "sigmas": s.tables.sigmas,
            "psi": multiplier * scale,
            "multiplier": multiplier,
            "calibrated": moving,
            "not_calibrated": np.flatnonzero(~moving),
            "at_low": np.flatnonzero(moving & np.all(ends <= options.low + 1.5 * options.eps2 / unit, axis=0)),
            "at_high": np.flatnonzero(moving & np.all(ends >= options.high - 1.5 * options.eps2 / unit, axis=0)),
            "iterations": len(records),
            "averaged": len(used),
            "came_to_rest": resting,
            "chance_balanced": calibration.chance_balanced(rule(options), number(s.config, options)),
            "shares": {name: part / total for name, part in shares.items()},
            "trace": {name: [record[name] for record in records] for name in ("value", *Signs._fields)},
            "reward_by_level": [record["reward"] for record in records],
        }
    )


def _line(record: dict, options: Calibration, seconds: float, unit: np.ndarray) -> str:
    """One iteration for the terminal."""
    total = np.maximum(np.sum([record[name] for name in Signs._fields], axis=0), 1)
    parts = [
        f"iteration {record['step'] + 1:>{len(str(options.iterations))}}/{options.iterations}",
        f"noise {metrics.bars(np.array(record['value']) / unit, options.low, options.high)}",
        f"gains + {metrics.bars(np.array(record['positive']) / total)}",
        f"- {metrics.bars(np.array(record['negative']) / total)}",
        f"{seconds:.1f} s",
    ]
    if record["failed"]:
        parts.append(f"{record['failed']} gains failed")
    return "   ".join(parts)


# --- the command -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """Find the noise level of each denoising step before training, by DenseGRPO's Algorithm 1."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    calibration: Calibration = field(default_factory=Calibration)
    report: bool = False
    """Draw balance, spread and noise of the gains for fixed and calibrated noise levels, and how well completions tell the reward."""
    figure: Figure = field(default_factory=Figure)


def main(command: Command) -> None:
    """Calibrates, and reports if asked to."""
    if command.report and jax.process_count() > 1:
        raise ValueError("--report draws in one process; calibrate first, then run it again as one process with --report")
    path = calibrate(command.config, command.calibration)
    found = psi.read(path)
    for i, (b, value, moved) in enumerate(zip(found.multiplier, found.psi, found.calibrated)):
        print(f"step {i}   multiplier {b:.3f}   psi {value:.3f}" + ("" if moved else "   not calibrated"))
    print(f"psi: {path}; train with --exploration.psi {path}")
    if command.report:
        from densegrpo_jax.train import calibration_report

        mesh = parallel.make(command.config.parallel)
        with parallel.within(mesh):
            s = setting(command.config, consistent=command.calibration.consistent, mesh=mesh)
            print(f"report: {calibration_report.write(s, path.parent, command.figure)}")

"""The training loop, read from top to bottom like the paper's: sample, complete, score, credit, update."""

import dataclasses
import json
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from tqdm import tqdm

from densegrpo_jax import credit, rewards
from densegrpo_jax import policy as policies
from densegrpo_jax import prompts as prompt_lists
from densegrpo_jax.config import Config, batch_size, check, micro_batch, reward_weights
from densegrpo_jax.flow import Cost, cost
from densegrpo_jax.objective import guard_weights, step_metrics, tempflow_weights
from densegrpo_jax.policy import Policy
from densegrpo_jax.prompts import PromptSet
from densegrpo_jax.rewards import Reward, Scores
from densegrpo_jax.train import checkpoint, metrics, phases, psi, report
from densegrpo_jax.train import state as states

SHOWN = 12  # held-out prompts whose first image is kept at each evaluation, for the report


def train(config: Config, *, credit_method: Callable | None = None, extra_rewards: dict[str, Reward] | None = None) -> Path:
    """Trains, or continues what `config.run.workdir` holds.

    Args:
      config: the run.
      credit_method: a function (rewards [T+1, B], groups [B]) -> credit [T, B] in place of `config.credit.method`.
      extra_rewards: rewards by name beside the built-in ones; `config.rewards` says which count, and how much.

    Returns:
      The report's path.

    Raises:
      ValueError: settings that contradict each other, unknown prompts or rewards, a work folder of another run.
    """
    with _interruptible() as stop:
        return _run(config, credit_method, extra_rewards or {}, stop)


def _run(config: Config, credit_method: Callable | None, extra_rewards: dict[str, Reward], stop: dict[str, bool]) -> Path:
    # ------------------------------------------------------------------------------------------------ model, data, rewards
    policy = policies.load(config)
    sigmas = policies.sigmas(config, policy, config.sampling.num_steps)
    shift = policies.shift(config, policy)
    tables = phases.sampler(config, sigmas, shift, step=0)
    check(config, int(tables.trained.sum()), devices=1)
    train_prompts, held_out = prompt_lists.load(config.prompts.train), prompt_lists.load(config.prompts.evaluation)
    _report_truncation(policy, [*train_prompts.texts, *held_out.texts])
    weights = reward_weights(config)
    scorers = {name: extra_rewards.get(name) or rewards.load(name) for name in (*weights, *config.evaluation.witnesses)}

    # ---------------------------------------------------------------------------------------------------- state, or resume
    workdir = config.run.workdir
    workdir.mkdir(parents=True, exist_ok=True)
    checkpoint.settle_config(config)
    config = psi.adopt(config)
    saver = checkpoint.manager(config)
    state = checkpoint.restore(saver, states.init(config, policy.start()))
    start = int(state.step)
    log = workdir / "metrics.jsonl"
    kept = metrics.rewind(log, start)
    quiet = kept[-1].get("gains", {}).get("quiet") if kept else None
    boards = metrics.boards(workdir, config.run.wandb)
    _write_manifest(config, policy, tables)

    # ------------------------------------------------------------------------------------------------------ compiled phases
    samplers: dict[bytes, Callable] = {}
    decode = phases.make_decode(config, policy)
    update, recompute = phases.make_update(config, policy), phases.make_recompute(config, policy)
    evaluate = _make_evaluation(config, policy, decode, scorers, held_out)
    uncond = policy.encode([""]) if config.sampling.guidance_scale != 1.0 else None
    ids, groups = jnp.arange(batch_size(config)), np.repeat(np.arange(config.prompts.per_step), config.prompts.group_size)
    start_ids = jnp.asarray(groups) if config.prompts.shared_start else ids

    if start == 0 and config.evaluation.every:
        evaluate(None, 0)
    recent: list[float] = []  # seconds of the last steps
    bar = tqdm(total=config.run.steps, initial=start, disable=not metrics.is_terminal(), unit="step", dynamic_ncols=True)
    # ------------------------------------------------------------------------------------------------------------- the loop
    for step in range(start, config.run.steps):
        began = time.perf_counter()
        tables = phases.sampler(config, sigmas, shift, step)
        chosen = prompt_lists.of_step(len(train_prompts.texts), config.prompts.per_step, config.run.seed, step)
        cond = policy.encode([train_prompts.texts[i] for i in chosen])

        # trajectories, and a clean latent for every level of each
        if tables.trained.tobytes() not in samplers:
            samplers[tables.trained.tobytes()] = phases.make_sample(config, policy, tables)
        trajectory, clean = samplers[tables.trained.tobytes()](
            policy.params, state.trained, cond, uncond, jnp.int32(step), ids, start_ids
        )

        # images, and a reward for each
        members = [chosen[g] for g in groups]
        scored = _score(policy, decode, {n: scorers[n] for n in weights}, train_prompts, members, clean)
        total = rewards.weighted_sum(scored, weights)

        # gains and advantages
        levels, baseline = _by_level(total, tables, len(groups))
        options = {} if credit_method else _credit_options(config, trajectory, baseline)
        result = credit.advantages(
            credit_method or config.credit.method, levels.value, groups, valid=levels.valid, over=config.credit.over,
            std=config.credit.std, eps=config.credit.eps, clip=config.credit.clip, **options,
        )  # fmt: skip

        # U updates on shuffled (step, trajectory) pairs
        kernel = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tables.kernel)
        weight = result.mask * _step_weights(config, tables)[:, None]
        batch = phases.Batch(
            trajectory, kernel, jnp.float32(result.advantage), jnp.float32(weight), cond, uncond, jnp.asarray(groups, jnp.int32)
        )
        order = phases.update_order(config, tables.trained, step, micro_batch(config, int(tables.trained.sum())))
        if phases.recomputes(config):
            everything = jnp.asarray(order.reshape(-1, *order.shape[2:]))
            batch = recompute(policy.params, state.trained, batch, everything)
        updates = []
        for u in range(config.optimizer.updates):
            state, numbers, log_ratio = update(state, policy.params, batch, jnp.asarray(order[u]), u == 0)
            updates.append((numbers, log_ratio))
        state = state._replace(step=state.step + 1)

        # what happened
        record = _record(config, step, tables, total, scored, levels, result, groups, updates, order, time.perf_counter() - began)
        record["images"] = _image_statistics(clean[-1])
        if "gains" in record:
            quiet = record["gains"]["quiet"] = metrics.quiet(quiet, record["gains"], tables.trained)
        metrics.append(log, record)
        for write in boards:
            write(record)
        bar.set_postfix_str(metrics.line(record, config.run.steps), refresh=False)
        bar.update()
        if bar.disable:
            left = float(np.median(recent)) * (config.run.steps - step - 1) if recent else None
            print(metrics.line(record, config.run.steps, left), flush=True)
        recent = [record["seconds"], *recent][:10] if step > start else []  # the first step compiles

        # evaluation, checkpoint, report
        done = step + 1
        last = done == config.run.steps or stop["asked"]
        if config.evaluation.every and (done % config.evaluation.every == 0 or last):
            evaluate(_averaged(config, state), done)
        if done % config.run.save_every == 0 or last:
            checkpoint.save(saver, state)
        if last or (config.run.report_every and done % config.run.report_every == 0):
            report.write(workdir)
        if stop["asked"] and done < config.run.steps:
            print(f"stopped after step {done}; everything is saved, and the same command continues from here")
            break

    bar.close()
    saver.close()
    if config.evaluation.final_prompts and int(state.step) == config.run.steps:
        print("comparing with the base model on more prompts", flush=True)
        evaluate(None, 0, final=True)
        evaluate(_averaged(config, state), config.run.steps, final=True)
    if pair := report.compared(workdir):
        print(report.summary(*pair))
    return report.write(workdir)


def _averaged(config: Config, state: states.TrainState):
    """The weights that evaluation uses."""
    return state.ema if config.optimizer.ema_decay > 0.0 else state.trained


# ---------------------------------------------------------------------------------------------------------------- one step


def _score(policy: Policy, decode, scorers: dict[str, Reward], prompts: PromptSet, members: list[int], clean) -> dict[str, Scores]:
    """Scores of clean latents [L, B, ...], flattened to [L * B], of every reward. Images that are not finite are not valid."""
    rows, batch = clean.shape[:2]
    images, finite = decode(policy.params, clean.reshape(rows * batch, *clean.shape[2:]))
    finite = np.asarray(finite)
    texts, metadata = [prompts.texts[i] for i in members] * rows, [prompts.metadata[i] for i in members] * rows
    result = {}
    for name, reward in scorers.items():
        s = rewards.score(name, reward, images, texts, metadata)
        result[name] = Scores(np.where(finite, s.value, 0.0), s.valid & finite)
    return result


def _by_level(total: Scores, tables: phases.Sampler, batch: int) -> tuple[Scores, np.ndarray | None]:
    """Scores as [T+1, B] with what was not taken marked not valid, and the paired baselines [T, B] if there are any."""
    num_steps = len(tables.sigmas) - 1
    value, valid = np.zeros((num_steps + 1, batch)), np.zeros((num_steps + 1, batch), bool)
    rows = np.append(tables.levels, num_steps)
    scores, ok = total.value.reshape(-1, batch), total.valid.reshape(-1, batch)
    kept = [*range(len(tables.levels)), -1]
    value[rows], valid[rows] = scores[kept], ok[kept]
    extra = slice(len(tables.levels), -1)
    if len(scores) == len(kept):
        return Scores(value, valid), None
    baseline = np.full((num_steps, batch), np.nan)
    baseline[np.flatnonzero(tables.trained)] = np.where(ok[extra], scores[extra], np.nan)
    return Scores(value, valid), baseline


def _credit_options(config: Config, trajectory, baseline: np.ndarray | None) -> dict[str, Any]:
    """What the chosen method wants beside the rewards."""
    if config.credit.method == "dense_grpo":
        return {"gamma": config.credit.gamma} | ({} if baseline is None else {"baseline": baseline})
    if config.credit.method == "coca":
        return {"similarities": np.asarray(_similarities(trajectory), np.float64)}
    return {}


@jax.jit
def _similarities(trajectory) -> jax.Array:
    """Cosine of the clean predictions x_t - sigma v with the final latent, [T+1, B]; the last is 1."""
    batch = trajectory.latents.shape[1]
    sigma = trajectory.sigmas[:-1].reshape((-1,) + (1,) * (trajectory.velocity.ndim - 1))
    clean = jnp.concatenate([trajectory.latents[:-1] - sigma * trajectory.velocity, trajectory.latents[-1:]])
    flat = clean.reshape(clean.shape[0], batch, -1)
    unit = flat / jnp.maximum(jnp.linalg.norm(flat, axis=-1, keepdims=True), 1e-12)
    return jnp.sum(unit * unit[-1:], axis=-1)


def _step_weights(config: Config, tables: phases.Sampler) -> np.ndarray:
    weights = np.where(tables.trained, 1.0, 0.0)
    if config.objective.ratio == "guard":
        weights = weights * guard_weights(tables.sigmas, tables.trained)
    if config.objective.step_weights == "tempflow":
        weights = weights * tempflow_weights(tables.kernel, tables.trained)
    return weights


def _record(config, step, tables, total, scored, levels, result, groups, updates, order, seconds) -> dict:
    """The metrics of one training step, as written to metrics.jsonl."""
    trained = np.flatnonzero(tables.trained)
    batch = len(groups)
    numbers = jax.device_get([n for n, _ in updates])
    before = np.zeros((len(tables.trained), batch))
    before[tuple(order[0].reshape(-1, 2).T)] = np.asarray(updates[0][1]).reshape(-1)
    end = total.value.reshape(-1, batch)[-1][total.valid.reshape(-1, batch)[-1]]
    ends = [levels.value[-1][(groups == g) & levels.valid[-1]] for g in np.unique(groups)]
    spread = [group.std() if group.size else 0.0 for group in ends]
    record = {
        "step": step,
        "reward": end.mean() if end.size else float("nan"),
        "reward_std_in_group": float(np.mean(spread)),
        "equal_groups": float(np.mean(np.array(spread) == 0.0)),
        "rewards": {name: s.value.reshape(-1, batch)[-1].mean() for name, s in scored.items()},
        "masked": int((~total.valid).sum()),
        "level_reward": np.where(levels.valid.any(1), levels.value.sum(1) / np.maximum(levels.valid.sum(1), 1), np.nan),
        "trained": trained,
        "advantage_abs": np.abs(result.advantage[trained]).mean(1),
        "log_ratio_before": step_metrics(before, tables.trained),
        "first_update": numbers[0],
        "last_update": numbers[-1],
        "clip": float(np.mean([n["clip_above"] + n["clip_below"] for n in numbers])),
        "seconds": seconds,
        "images_per_second": total.value.size / seconds,
    }
    if len(tables.levels):
        gains = np.diff(np.where(levels.valid, levels.value, np.nan), axis=0)
        record["gains"] = credit.gain_balance(gains, groups)
    return record


@jax.jit
def _statistics(x: jax.Array) -> dict[str, jax.Array]:
    return {"latent_mean": jnp.mean(x), "latent_std": jnp.std(x)}


def _image_statistics(latents: jax.Array) -> dict[str, float]:
    """Mean and spread of the final latents: drift that a reward does not see."""
    return {k: float(v) for k, v in _statistics(latents).items()}


# -------------------------------------------------------------------------------------------------------------- evaluation


def _make_evaluation(config: Config, policy: Policy, decode, scorers: dict[str, Reward], prompts: PromptSet):
    """Returns evaluate(trained, done): ODE samples of fixed held-out prompts at fixed noise, scored, into the work folder.

    `trained` None is the base model. With `final` it is the larger comparison at the end, on noise of its own.
    """
    e, folder = config.evaluation, config.run.workdir / "samples"
    generate = phases.make_generate(config, policy, policies.sigmas(config, policy, e.num_steps))
    weights = reward_weights(config)

    def evaluate(trained, done: int, final: bool = False) -> None:
        wanted, each = (e.final_prompts, e.final_images_per_prompt) if final else (e.prompts, e.images_per_prompt)
        count = min(wanted or len(prompts.texts), len(prompts.texts))
        members = [i for i in range(count) for _ in range(each)]
        per_call = config.sampling.chunk or len(members)
        uncond = policy.encode([""]) if config.sampling.guidance_scale != 1.0 else None
        ids = np.arange(-(-len(members) // per_call) * per_call)
        rows = np.minimum(ids, len(members) - 1)  # the last call is filled up, and cut below
        cond = policy.encode([prompts.texts[members[i]] for i in rows])
        clean = generate(policy.params, trained, cond, uncond, jnp.asarray(ids), jnp.int32(final))[: len(members)]
        scored = _score(policy, decode, scorers, prompts, members, clean[None])
        total = rewards.weighted_sum({n: scored[n] for n in weights}, weights)
        record = {
            "step": done - 1,
            "done": done,
            "prompt": members,
            "kind": [prompts.metadata[i].get("tag") for i in members],
            "total": np.where(total.valid, total.value, np.nan),
            "rewards": {n: np.where(s.valid, s.value, np.nan) for n, s in scored.items()},
        }
        path = config.run.workdir / ("final.jsonl" if final else "evaluation.jsonl")
        metrics.rewind(path, record["step"])
        metrics.append(path, record)
        if not final:
            images, _ = decode(policy.params, clean)
            folder.mkdir(exist_ok=True)
            shown = np.arange(min(SHOWN, count)) * each
            Image.fromarray(np.concatenate(list(np.asarray(images)[shown]), axis=1)).save(folder / f"{done:06d}.png")
            (folder / "prompts.json").write_text(json.dumps([prompts.texts[members[i]] for i in shown]))

    return evaluate


# ------------------------------------------------------------------------------------------------------------------ around


@contextmanager
def _interruptible() -> Iterator[dict[str, bool]]:
    """Ctrl-C or SIGTERM sets "asked", so that the step finishes and is saved; a second one stops at once."""
    stop = {"asked": False}

    def ask(number, frame):
        if stop["asked"]:
            raise KeyboardInterrupt
        stop["asked"] = True
        print("\nfinishing this step, then saving (again to stop at once)", flush=True)

    main = threading.current_thread() is threading.main_thread()  # elsewhere Python allows no handlers, and the caller's stay
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report_truncation(policy: Policy, texts: list[str], shown: int = 5) -> None:
    lines = policy.truncated(texts)
    for line in lines[:shown]:
        print(f"warning: {line}")
    if len(lines) > shown:
        print(f"warning: ... and {len(lines) - shown} more; raise model.max_sequence_length, or shorten the prompts")


def _write_manifest(config: Config, policy: Policy, tables: phases.Sampler) -> None:
    packages = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")}
    c = config.completion
    price: Cost = cost(config.sampling.num_steps, tables.scheme, tile=c.tile, tail=c.tail)
    manifest = {
        "model": policy.name,
        "devices": [d.device_kind for d in jax.devices()],
        "platform": jax.default_backend(),
        "python": platform.python_version(),
        "packages": packages,
        "evaluations_per_trajectory": price.evaluations,
        "network_calls_per_sampling": price.calls,
        "images_per_step": batch_size(config) * (len(tables.scheme) + 1),
        "credit": dataclasses.asdict(config.credit),
    }
    (config.run.workdir / "manifest.json").write_text(json.dumps(manifest, indent=1))

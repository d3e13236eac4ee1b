"""The training loop, read from top to bottom like the paper's: sample, complete, score, credit, update."""

import dataclasses
import io
import json
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from tqdm import tqdm

from densegrpo_jax import credit, parallel, rewards
from densegrpo_jax import policy as policies
from densegrpo_jax import prompts as prompt_lists
from densegrpo_jax.config import Config, batch_size, check, micro_batch, reward_sources, reward_weights
from densegrpo_jax.flow import Cost, cost
from densegrpo_jax.objective import guard_weights, step_metrics, tempflow_weights
from densegrpo_jax.policy import Policy
from densegrpo_jax.prompts import PromptSet
from densegrpo_jax.rewards import Reward, Scores
from densegrpo_jax.rewards.health import alarms, complaints, step_health
from densegrpo_jax.train import cache, checkpoint, files, health, lock, metrics, phases, profile, psi, report, speed
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
      ValueError: settings that contradict each other, unknown prompts or rewards, a work folder of another run or one that another
        run is in.
      OSError: the work folder cannot be written to, or is gone, or none of its checkpoints is whole.
      health.Stopped: the run cannot recover.
    """
    with _interruptible() as stop, ExitStack() as opened:
        try:
            return _run(config, credit_method, extra_rewards or {}, stop, opened)
        except FileNotFoundError as error:
            if (folder := config.run.workdir).exists():
                raise
            raise OSError(
                f"run.workdir = {folder} is gone: it was deleted or moved while the run went on. Moved back, the same command continues "
                "from its last checkpoint; without it the run begins anew"
            ) from error


def _run(
    config: Config, credit_method: Callable | None, extra_rewards: dict[str, Reward], stop: dict[str, bool], opened: ExitStack
) -> Path:
    # ------------------------------------------------------------------------------------------------ model, data, rewards
    if not parallel.primary():
        opened.enter_context(redirect_stdout(None))  # of several processes the first one speaks
    elif (config.run.workdir / "lock").exists():  # a second run is refused before it loads a model
        with lock.held(config.run.workdir):
            pass
    mesh, devices = parallel.make(config.parallel), parallel.shares(config.parallel)
    opened.enter_context(parallel.within(mesh))
    policy = policies.load(config, mesh)
    sigmas = policies.sigmas(config, policy, config.sampling.num_steps)
    shift = policies.shift(config, policy)
    tables = phases.sampler(config, sigmas, shift, step=0)
    check(config, int(tables.trained.sum()), devices)
    train_prompts, held_out = prompt_lists.load(config.prompts.train), prompt_lists.load(config.prompts.evaluation)
    print("\n".join(prompt_lists.describe(train_prompts, held_out)), flush=True)
    _report_truncation(policy, [*train_prompts.texts, *held_out.texts])
    weights = reward_weights(config)
    sources = reward_sources(config)
    with parallel.alone(mesh):  # each process scores its own images
        own = parallel.of_process(mesh)
        scorers = {name: extra_rewards.get(name) or rewards.load(sources[name], config.reward_server, own) for name in sources}
    scorers = {name: parallel.apart(mesh, reward) for name, reward in scorers.items()}

    # ---------------------------------------------------------------------------------------------------- state, or resume
    workdir = config.run.workdir
    files.writable(workdir, "run.workdir")
    if parallel.primary():
        opened.enter_context(lock.held(workdir))
    _check_shared(workdir)
    checkpoint.settle_config(config)
    for line in psi.strange(config) + phases.outweighed(config, tables):
        print(f"warning: {line}")
    config = psi.adopt(config)
    parallel.together("settled")  # what the first process has written, all may read
    opened.enter_context(cache.under(workdir if config.run.compilation_cache else None))
    place = parallel.everywhere if config.adapter.rank else parallel.shared  # all weights, where they are trained, lie as the frozen ones
    state = checkpoint.restore(config, place(mesh, states.init(config, policy.start())))
    start = int(state.step)
    if start:
        print(f"continuing after step {start}", flush=True)
    log, evaluations = workdir / "metrics.jsonl", workdir / "evaluation.jsonl"
    history, measured = metrics.rewind(log, start), metrics.rewind(evaluations, start)
    quiet = history[-1].get("gains", {}).get("quiet") if history else None
    boards = opened.enter_context(metrics.boards(workdir, config.run.wandb, start)) if parallel.primary() else []
    _write_manifest(config, policy, tables, mesh)

    # ------------------------------------------------------------------------------------------------------ compiled phases
    trace = workdir / "profile" / (f"process{jax.process_index()}" if jax.process_count() > 1 else "")
    watch = opened.enter_context(profile.steps(trace, start + 1, config.run.profile))
    samplers: dict[bytes, Callable] = {}
    decode = watch.phase("decode", phases.make_decode(config, policy, devices))
    update = watch.phase("update", phases.make_update(config, policy, state if mesh else None))
    recompute, encode = watch.phase("recompute", phases.make_recompute(config, policy)), watch.phase("encode", policy.encode)
    scorers = {name: reward if hasattr(reward, "workers") else watch.phase("reward", reward) for name, reward in scorers.items()}
    evaluate = _make_evaluation(config, policy, mesh, decode, scorers, held_out)
    uncond = parallel.everywhere(mesh, policy.encode([""])) if config.sampling.guidance_scale != 1.0 else None
    e = config.evaluation
    ids, groups = np.arange(batch_size(config)), np.repeat(np.arange(config.prompts.per_step), config.prompts.group_size)
    start_ids = groups if config.prompts.shared_start else ids

    due = lambda done: bool(e.every) and (done % e.every == 0 or done == config.run.steps)  # noqa: E731
    owed = [done for done in {0, start} if due(done) and done not in (r["done"] for r in measured)]
    for done in sorted(owed):  # the base model, and what a kill has left undone
        measured = evaluate(_averaged(config, state) if done else None, done, measured)
    checkpoint.retain(config)  # a kill may have come between an evaluation and this
    _stop_if_sick(config, history, measured)  # as a kill may have come between the verdict and its report
    work = speed.meter(config, parallel.count(config.parallel))
    complained: set[tuple[str, str]] = set()  # what is wrong with which reward
    recent: list[float] = []  # seconds of the last steps
    shown = {"disable": not (metrics.is_terminal() and parallel.primary()), "unit": "step", "dynamic_ncols": True}
    bar = opened.enter_context(tqdm(total=config.run.steps, initial=start, **shown))
    # ------------------------------------------------------------------------------------------------------------- the loop
    for step in range(start, config.run.steps):
        watch.step(step)
        began, compiled = time.perf_counter(), speed.compiled()
        tables = phases.sampler(config, sigmas, shift, step)
        chosen = prompt_lists.of_step(len(train_prompts.texts), config.prompts.per_step, config.run.seed, step)
        cond = parallel.everywhere(mesh, encode([train_prompts.texts[i] for i in chosen]))

        # trajectories with a clean latent for every level of each, images of those, and a reward for each image
        if tables.trained.tobytes() not in samplers:
            samplers[tables.trained.tobytes()] = watch.phase("sample", phases.make_sample(config, policy, tables))
        sample = partial(samplers[tables.trained.tobytes()], policy.params, state.trained, cond, uncond, np.int32(step))
        members = [chosen[g] for g in groups]
        trajectory, clean, (scored, wait), pixels = _sample_and_score(
            config, policy, mesh, sample, decode, {n: scorers[n] for n in weights}, train_prompts, members, ids, start_ids
        )
        total, rewarded = rewards.weighted_sum(scored, weights), time.perf_counter()

        # gains and advantages
        levels, _ = _by_level(total, tables, len(groups))
        optimised = total
        if config.credit.reward_normalization == "group":
            of_image = np.tile(groups, len(clean))
            optimised = rewards.weighted_sum({n: rewards.normalized_in_groups(s, of_image) for n, s in scored.items()}, weights)
        at_levels, baseline = _by_level(optimised, tables, len(groups))
        options = {} if credit_method else _credit_options(config, trajectory, baseline)
        result = credit.advantages(
            credit_method or config.credit.method, at_levels.value, groups, valid=at_levels.valid, over=config.credit.over,
            std=config.credit.std, eps=config.credit.eps, clip=config.credit.clip, **options,
        )  # fmt: skip

        # U updates on shuffled (step, trajectory) pairs
        kernel = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tables.kernel)
        weight = result.mask * _step_weights(config, tables)[:, None]
        advantage, weight = parallel.over_rows(mesh, (np.float32(result.advantage), np.float32(weight)), axis=1)
        batch = phases.Batch(trajectory, kernel, advantage, weight, cond, uncond, parallel.over_rows(mesh, np.int32(groups)))
        del trajectory  # so that one copy is there, also when its velocities are recomputed
        order = phases.update_order(config, tables.trained, step, micro_batch(config, int(tables.trained.sum()), devices))
        drift = None
        if phases.recomputes(config):
            everything = parallel.over_rows(mesh, order.reshape(-1, *order.shape[2:]), axis=1)
            batch, drift = recompute(policy.params, state.trained, batch, everything)
        updates = []
        for u in range(config.optimizer.updates):
            state, numbers, log_ratio = update(state, policy.params, batch, parallel.over_rows(mesh, order[u], axis=1), u == 0)
            updates.append((numbers, log_ratio))
        state = state._replace(step=state.step + 1)

        # what happened
        record = _record(config, step, tables, total, scored, levels, result, groups, updates, order, began)
        sampling = rewarded - began
        record["phase_seconds"] = {"sampling_and_scoring": sampling, "updates": record["seconds"] - sampling}
        record["speed"] = speed.speed(work(tables), record["seconds"], speed.compiled() - compiled)
        if watch.seconds:
            record["speed"]["phases"] = watch.seconds
        watch.done(step, step + 1 == config.run.steps)
        record["recomputed"] = drift is not None
        record["log_prob_drift"] = record["log_ratio_before"] if drift is None else step_metrics(drift, tables.trained)
        record["images"], finite = _image_statistics(clean[-1], pixels)
        before = history[-1].get("nonfinite") if history else None
        del batch, clean  # before the next step samples
        record["nonfinite"] = health.nonfinite(before, [float(numbers["grad_norm"]) for numbers, _ in updates], finite)
        record["reward_health"] = step_health(rewards.Scored(scored, wait), record["seconds"])
        record["reward_wait"] = sum(wait.values()) / record["seconds"]
        history = [*history[:1], *history[1:][-health.RECENT :], metrics.plain(record)]
        wrong = complaints(record["reward_health"]) | health.complaints(history[-1], history[0], config)
        for line in (line for kind, line in wrong.items() if kind not in complained):  # once, not at every step
            bar.write(f"warning: step {step + 1}: {line}")
        complained = set(wrong)
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

        # checkpoint first, as a machine that is being taken away leaves little time; then evaluation, report
        done = step + 1
        last, asked = done == config.run.steps, parallel.anyone(stop["asked"])
        saved = done % config.run.save_every == 0 or last or (due(done) and config.run.keep_best)
        if saved or asked:
            checkpoint.save(config, state)
        if due(done) and not asked:
            measured = evaluate(_averaged(config, state), done, measured)
            checkpoint.retain(config)
            for alarm in alarms(measured, list(weights)):
                bar.write(f"warning: {alarm.line()}")
            asked = parallel.anyone(stop["asked"])  # while that went on
            if asked and not saved:
                checkpoint.save(config, state)
        if asked:
            print(f"stopped after step {done}; everything is saved, and the same command continues from here")
            return report.write(workdir)
        if last or (config.run.report_every and done % config.run.report_every == 0):
            report.write(workdir)
        _stop_if_sick(config, history, measured)

    bar.close()
    if config.evaluation.final_prompts and int(state.step) == config.run.steps:
        print("comparing with the base model on more prompts", flush=True)
        evaluate(None, 0, final=True)
        if parallel.anyone(stop["asked"]):
            print("stopped during the comparison at the end; everything is saved, and the same command compares again")
            return report.write(workdir)
        evaluate(_averaged(config, state), config.run.steps, final=True)
    if parallel.primary() and (pair := report.compared(workdir)):
        print(report.summary(*pair))
    return report.write(workdir)


def _check_shared(workdir: Path) -> None:
    """Of several processes: that all see the one folder, and not each its own, which would only show when they save."""
    parallel.together("locked")
    holder = (workdir / "lock").read_bytes() if (workdir / "lock").exists() else b""
    if not parallel.same_everywhere(holder):
        raise ValueError(f"run.workdir = {workdir} is not the same folder for all processes: several hosts need one that all of them see")


def _averaged(config: Config, state: states.TrainState):
    """The weights that evaluation uses."""
    return state.ema if config.optimizer.ema_decay > 0.0 else state.trained


# ---------------------------------------------------------------------------------------------------------------- one step


def _sample_and_score(
    config: Config, policy: Policy, mesh, sample, decode, scorers, prompts: PromptSet, members: list[int], ids: np.ndarray, start_ids
):
    """Trajectories, clean latents [L, B, ...], their scores, and statistics of the final images.

    Where a reward runs on the host this goes in pieces of `sampling.chunk` trajectories: it scores one while the next is sampled.
    """
    batch, chunk = len(members), config.sampling.chunk
    on_host = any(hasattr(reward, "workers") for reward in scorers.values())
    chunk = chunk if on_host and chunk and batch % chunk == 0 else batch
    pieces, seen = [], []

    def sampled():
        for start in range(0, batch, chunk):
            pieces.append(sample(*parallel.over_rows(mesh, (ids[start : start + chunk], start_ids[start : start + chunk]))))
            yield np.arange(start, start + chunk), pieces[-1][1]

    size_of = partial(phases.decode_size, config, devices=parallel.shares(config.parallel)) if on_host else int
    scored = _score_pieces(policy, decode, scorers, prompts, members, sampled(), size_of, seen)
    trajectory, clean = pieces[0] if len(pieces) == 1 else phases.join(pieces)
    return trajectory, clean, scored, _pixel_statistics(seen, len(clean), batch)


def _score(policy: Policy, decode, scorers: dict[str, Reward], prompts: PromptSet, members: list[int], clean) -> dict[str, Scores]:
    """Scores of clean latents [L, B, ...], flattened to [L * B], of every reward. Images that are not finite are not valid."""
    return _score_pieces(policy, decode, scorers, prompts, members, [(np.arange(len(members)), clean)], int, []).scores


def _score_pieces(policy: Policy, decode, scorers, prompts: PromptSet, members: list[int], pieces, size_of, seen: list) -> rewards.Scored:
    """Scores of clean latents that come as pieces (places in the batch [b], latents [L, b, ...]), in the order [L * B].

    `size_of` says, of so many images of a piece, how many are decoded and scored together; `seen` receives statistics of each image.
    """
    texts, metadata, batch = [prompts.texts[i] for i in members], [prompts.metadata[i] for i in members], len(members)

    def images():
        for places, clean in pieces:
            rows = (places[:, None] + np.arange(len(clean)) * batch).ravel()  # by trajectory, then level
            latents, size = phases.by_trajectory(clean), size_of(len(rows))
            for i, of_part in enumerate(rows.reshape(size, -1).T):
                pixels, finite = decode(policy.params, latents if size == len(rows) else phases.every_nth(latents, size, i))
                seen.append((of_part, _pixels(pixels)))
                yield parallel.mine(of_part, pixels, finite)

    return rewards.score_parts(scorers, images(), texts, metadata, gather=parallel.gather)


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
        return {"gamma": config.credit.gamma, "slope": config.credit.slope} | ({} if baseline is None else {"baseline": baseline})
    if config.credit.method == "coca":
        return {"similarities": np.float64(parallel.to_host(_similarities(trajectory)))}
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


def _mean_valid(scores: Scores, batch: int) -> float:
    """Mean of the final images' scores, of those that there are."""
    value, valid = scores.value[-batch:], scores.valid[-batch:]
    return value[valid].mean() if valid.any() else float("nan")


def _record(config, step, tables, total, scored, levels, result, groups, updates, order, began) -> dict:
    """The metrics of one training step, which began at `began`, as written to metrics.jsonl."""
    trained = np.flatnonzero(tables.trained)
    batch = len(groups)
    numbers = jax.device_get([n for n, _ in updates])
    before = np.zeros((len(tables.trained), batch))
    before[tuple(order[0].reshape(-1, 2).T)] = parallel.to_host(updates[0][1]).reshape(-1)
    seconds = time.perf_counter() - began  # only now the updates are done, which the host has not waited for
    end = total.value.reshape(-1, batch)[-1][total.valid.reshape(-1, batch)[-1]]
    ends = [levels.value[-1][(groups == g) & levels.valid[-1]] for g in np.unique(groups)]
    spread = [group.std() if group.size else 0.0 for group in ends]
    record = {
        "step": step,
        "reward": end.mean() if end.size else float("nan"),
        "reward_std_in_group": float(np.mean(spread)),
        "equal_groups": float(np.mean(np.array(spread) == 0.0)),
        "rewards": {name: _mean_valid(s, batch) for name, s in scored.items()},
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
def _pixels(images: jax.Array) -> jax.Array:
    """Mean and standard deviation of each image [N, 2], of values in [0, 1]."""
    x = images.astype(jnp.float32) / 255.0
    return jnp.stack([jnp.mean(x, (1, 2, 3)), jnp.std(x, (1, 2, 3))], axis=1)


def _pixel_statistics(seen: list, rows: int, batch: int) -> dict[str, float]:
    """Means over the final images: drift of brightness and contrast that a reward does not see."""
    final = np.concatenate([parallel.to_host(pixels)[places >= (rows - 1) * batch] for places, pixels in seen])
    return dict(zip(("brightness", "contrast"), final.mean(0).tolist()))


@jax.jit
def _statistics(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.mean(x), jnp.std(x), jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))


def _image_statistics(latents: jax.Array, pixels: dict[str, float]) -> tuple[dict[str, float], np.ndarray]:
    """Mean and spread of the final latents beside those of the pixels, drift that a reward does not see; and which are finite [B]."""
    mean, std, finite = _statistics(latents)
    return {"latent_mean": float(mean), "latent_std": float(std)} | pixels, parallel.to_host(finite)


# -------------------------------------------------------------------------------------------------------------- evaluation


def _make_evaluation(config: Config, policy: Policy, mesh, decode, scorers: dict[str, Reward], prompts: PromptSet):
    """Returns evaluate(trained, done, before) -> the records `before` and this one's: ODE samples of fixed held-out prompts at fixed noise,
    scored, into the work folder.

    `trained` None is the base model. With `final` it is the larger comparison at the end, on noise of its own.
    """
    e, folder = config.evaluation, config.run.workdir / "samples"
    generate = phases.make_generate(config, policy, policies.sigmas(config, policy, e.num_steps))
    weights, devices = reward_weights(config), parallel.shares(config.parallel)

    def evaluate(trained, done: int, before: Sequence[dict] = (), final: bool = False) -> list[dict]:
        wanted, each = (e.final_prompts, e.final_images_per_prompt) if final else (e.prompts, e.images_per_prompt)
        count = min(wanted or len(prompts.texts), len(prompts.texts))
        members = [i for i in range(count) for _ in range(each)]
        per_call = config.sampling.chunk or -(-len(members) // devices) * devices
        uncond = parallel.everywhere(mesh, policy.encode([""])) if config.sampling.guidance_scale != 1.0 else None
        ids = np.arange(-(-len(members) // per_call) * per_call)
        rows = np.minimum(ids, len(members) - 1)  # the last call is filled up, and cut below
        cond = parallel.over_rows(mesh, policy.encode([prompts.texts[members[i]] for i in rows]))
        clean = generate(policy.params, trained, cond, uncond, parallel.over_rows(mesh, ids), np.int32(final))[: len(members)]
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
        if not final:
            shown = np.arange(min(SHOWN, count)) * each
            images = parallel.to_host(decode(policy.params, clean)[0][shown])
            folder.mkdir(exist_ok=True)
            buffer = io.BytesIO()
            Image.fromarray(np.concatenate(list(images), axis=1)).save(buffer, "PNG")
            files.write(folder / f"{done:06d}.png", buffer.getvalue())
            files.write(folder / "prompts.json", json.dumps([prompts.texts[members[i]] for i in shown]))
        path = config.run.workdir / ("final.jsonl" if final else "evaluation.jsonl")
        metrics.rewind(path, record["step"])
        metrics.append(path, record)  # last, as with it the evaluation counts as done
        return [r for r in before if r["step"] < record["step"]] + [metrics.plain(record)]

    return evaluate


# ------------------------------------------------------------------------------------------------------------------ around


def _stop_if_sick(config: Config, history: list[dict], evaluations: list[dict]) -> None:
    try:
        health.stop_if_sick(config, history, evaluations)
    except health.Stopped:
        report.write(config.run.workdir)
        raise


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


def _write_manifest(config: Config, policy: Policy, tables: phases.Sampler, mesh: jax.sharding.Mesh | None) -> None:
    packages = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")}
    c = config.completion
    price: Cost = cost(config.sampling.num_steps, tables.scheme, tile=c.tile, tail=c.tail)
    manifest = {
        "model": policy.name,
        "devices": [d.device_kind for d in (mesh.devices.flat if mesh else jax.devices()[:1])],
        "mesh": dict(mesh.shape) if mesh else None,
        "platform": jax.default_backend(),
        "python": platform.python_version(),
        "packages": packages,
        "evaluations_per_trajectory": price.evaluations,
        "network_calls_per_sampling": price.calls,
        "images_per_step": batch_size(config) * (len(tables.scheme) + 1),
        "credit": dataclasses.asdict(config.credit),
    }
    files.write(config.run.workdir / "manifest.json", json.dumps(manifest, indent=1))

"""A small training loop that survives a kill: the state is saved whole, and a batch depends on nothing but its step."""

import itertools
import json
import operator
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file


class Run(NamedTuple):
    """Where a run keeps checkpoints and logs, its seed, and the optimiser steps between checkpoints."""

    workdir: Path
    seed: int
    save_every: int


def save_leaves(path: Path, tree: Any) -> None:
    """Writes the arrays of a pytree, in order, to one safetensors file that appears when it is complete."""
    leaves = {f"{n:05d}": np.asarray(leaf) for n, leaf in enumerate(jax.tree.leaves(tree))}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_suffix(".partial")
    save_file(leaves, partial_path)
    os.replace(partial_path, path)


def load_leaves(path: Path, like: Any) -> Any:
    """Reads what `save_leaves` wrote into the structure of `like`.

    Raises:
      ValueError: the file holds another number or shape of arrays.
    """
    saved = load_file(path)
    leaves, structure = jax.tree.flatten(like)
    arrays = [saved[name] for name in sorted(saved)]
    if [a.shape for a in arrays] != [np.shape(leaf) for leaf in leaves]:
        raise ValueError(f"{path} holds the state of another model; delete it or choose another --workdir")
    return jax.tree.unflatten(structure, [jnp.asarray(a) for a in arrays])


def fit(
    name: str,
    run: Run,
    params: Any,
    loss: Callable,
    batches: Callable[[int], Iterator],
    steps: int,
    peak: float,
    ema_decay: float,
    measure: Callable | None = None,
) -> Any:
    """Minimises `loss` by Adam: warm-up, constant rate, linear decay over the last quarter.

    Args:
      name: of the stage; names its files in the workdir.
      run: where, from which seed, and how often to save.
      params: initial parameters, a pytree.
      loss: (params, key, batch) -> (scalar, dict of scalars to log).
      batches: start step -> iterator over batches from there on.
      steps: optimiser steps.
      peak: learning rate.
      ema_decay: of the averaged parameters.
      measure: averaged parameters -> dict with "score", logged at every save; the best score's parameters are kept. None: the last are.

    Returns:
      The averaged parameters with the best score.
    """
    # The rate of a step does not depend on `steps` until the decay, so that a longer run can continue a shorter one.
    schedule = optax.join_schedules(
        [optax.linear_schedule(0.0, peak, 300), optax.constant_schedule(peak), optax.linear_schedule(peak, 0.02 * peak, steps // 4)],
        [300, steps - steps // 4],
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99))
    state = {"params": params, "ema": params, "opt": optimizer.init(params), "step": jnp.zeros((), jnp.int32), "best": jnp.full((), -1e9)}
    state = jax.tree.map(jnp.copy, state)  # donated below, so no array may be in it twice
    folder = run.workdir
    checkpoint, best = folder / f"{name}.safetensors", folder / f"{name}_best.safetensors"
    if checkpoint.exists():
        state = load_leaves(checkpoint, state)

    @partial(jax.jit, donate_argnums=0)
    def update(state, batch):
        key = jax.random.fold_in(jax.random.key(run.seed), state["step"])
        (value, logs), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], key, batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        decay = jnp.minimum(ema_decay, (state["step"] + 1.0) / (state["step"] + 10.0))
        ema = optax.incremental_update(params, state["ema"], 1 - decay)
        return {**state, "params": params, "ema": ema, "opt": opt, "step": state["step"] + 1}, {"loss": value, **logs}

    stream = batches(int(state["step"]))
    began, seen = time.time(), []
    while int(state["step"]) < steps:
        state, logs = update(state, next(stream))
        seen.append(logs)
        step = int(state["step"])
        if step % run.save_every == 0 or step == steps:
            row = {"stage": name, "step": step, "seconds": round(time.time() - began, 1)}
            row |= {key: float(np.mean([np.asarray(logs[key]) for logs in seen])) for key in seen[0]}
            if measure is not None:
                row |= measure(state["ema"])
            if row.get("score", step) > float(state["best"]):
                state["best"] = jnp.asarray(row.get("score", step), jnp.float32)
                save_leaves(best, state["ema"])
            save_leaves(checkpoint, state)
            with (folder / "log.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(" ".join(f"{key} {value:.4g}" if type(value) is float else f"{key} {value}" for key, value in row.items()), flush=True)
            began, seen = time.time(), []
    return load_leaves(best, params)


def pooled_batches(make: Callable[[int], dict], start: int, size: int, batch: int, passes: int, seed: int) -> Iterator:
    """Yields batches from step `start` on, out of pools of `size` rows that `make(number)` provides, each passed through `passes` times.

    The batch of a step depends on nothing but the step, so a resumed run sees what it would have seen.
    """
    per_pass, current, pool = size // batch, None, None
    for step in itertools.count(start):
        number, within = divmod(step, per_pass * passes)
        if number != current:
            pool, current = make(number), number
        turn, position = divmod(within, per_pass)
        rows = np.random.default_rng((seed, number, turn)).permutation(size)[position * batch : (position + 1) * batch]
        yield jax.tree.map(operator.itemgetter(rows), pool)

"""`densegrpo doctor CONFIG`: what a run would stumble over, found before money is spent on it.

Every check is a function of the config that yields lines `ok|warn|FAIL name: what, what to do`; what it raises is a FAIL. `refuse` is the
part that costs nothing, which training and calibration go through before they load a model.
"""

import collections
import contextlib
import dataclasses
import io
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from densegrpo_jax import parallel, pipeline, rewards
from densegrpo_jax import policy as policies
from densegrpo_jax import prompts as prompt_lists
from densegrpo_jax.config import Config, batch_size, check, check_fields, micro_batch, reward_sources, reward_weights
from densegrpo_jax.families import FAMILIES, Configs
from densegrpo_jax.flow import cost, uniform_sigmas
from densegrpo_jax.models import adapter as adapters
from densegrpo_jax.models.weights import check_tensors, find_folder, open_weights
from densegrpo_jax.plan import published, recipe
from densegrpo_jax.policy import Policy
from densegrpo_jax.rewards import known
from densegrpo_jax.rewards.ocr import target_text
from densegrpo_jax.train import metrics, phases
from densegrpo_jax.train.psi import SAMPLERS, strange
from densegrpo_jax_configs.variants import change

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "safetensors", "transformers")
GIB, FLOAT32 = 2**30, 4
QUIET, LOUD = 0.1, 1.0  # shares of the clip range that rounding may take: above the first a warning, above the second a failure


class Line(NamedTuple):
    """status: "ok", "warn" or "FAIL"; name of the check; text: what was found, and what to do."""

    status: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.status:<4} {self.name}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Check a config, its model, prompts and rewards before a run: one line a check, then a verdict."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    dry_run: bool = True
    """Train two steps on one prompt in a temporary folder, which compiles every program and measures the noise of log-probs."""


def main(command: Doctor) -> int:
    """Prints the lines and the verdict.

    Returns:
      0, or 1 where a check failed.

    Raises:
      ValueError: a field out of its range.
    """
    check_fields(command.config)
    counts = dict.fromkeys(("ok", "warn", "FAIL"), 0)
    for line in examine(command.config, command.dry_run):
        counts[line.status] += 1
        print(line, flush=True)
    verdict = "not ready: mend what says FAIL" if counts["FAIL"] else "ready" if not counts["warn"] else "ready, if the warnings are meant"
    print(f"{verdict} ({counts['ok']} ok, {counts['warn']} warnings, {counts['FAIL']} failed)")
    return 1 if counts["FAIL"] else 0


def examine(config: Config, dry_run: bool = True) -> Iterator[Line]:
    """The lines of all checks. One that fails does not keep the others from running."""
    seen: dict[str, str] = {}  # what has failed, and where it was said
    for name, function in CHECKS.items():
        if name == "dry run" and not dry_run:
            yield Line("warn", name, "left out, and with it the noise of log-probs against objective.clip_range")
            continue
        try:
            yield from (Line(status, name, text) for status, text in function(config))
        except Exception as error:  # whatever a check stumbles over, a run would too
            reason = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
            first = seen.setdefault(reason, name)
            yield Line("FAIL", name, _short(reason) if first == name else f"the same as of {first}")


def refuse(config: Config, training: bool = True) -> None:
    """Refuses what can be told from the config, the prompts and the headers of files: before a model is loaded or a folder made.

    Args:
      config: the run.
      training: False leaves out what calibration does not use: the psi file, the arithmetic of updates, the adapter.

    Raises:
      ValueError: naming the field, its value and what is valid.
      OSError: the work folder cannot be made.
    """
    check_fields(config)
    for source in reward_sources(config).values():
        rewards.check_name(source)
    _place(config.run.workdir)
    if training:
        outline, tables = _grid(config)
        check(config, int(tables.trained.sum()), parallel.shares(config.parallel))
    if config.model.path != "toy":
        collections.deque(_complete(config), maxlen=0)
    if training:
        _adapter(config, outline)
    for line in _prompt_lines(config):
        if line[0] == "FAIL":
            raise ValueError(line[1])


# ------------------------------------------------------------------------------------------------------------------- checks

Found = Iterator[tuple[str, str]]  # status, text


def environment(config: Config) -> Found:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    yield "ok", f"Python {platform.python_version()}, {', '.join(f'{name} {number}' for name, number in found.items())}"
    missing = [name for name in PACKAGES if name not in found]
    if missing:
        yield "FAIL", f"without {', '.join(missing)}; pip install densegrpo_jax installs them"


def devices(config: Config) -> Found:
    here = jax.devices()
    taken, p = parallel.count(config.parallel), config.parallel
    yield "ok", f"{len(here)} x {here[0].device_kind} ({here[0].platform}), {taken} of them taken, fsdp {p.fsdp}, tensor {p.tensor}"
    if here[0].platform == "cpu" and config.model.path not in ("toy", "tiny"):
        yield "warn", "no accelerator is seen; install jax[cuda13] or jax[tpu], or look at JAX_PLATFORMS"
    if here[0].platform == "cpu" and config.model.dtype == "bfloat16":
        yield "warn", "model.dtype = bfloat16 is emulated on CPUs; float32 is faster there"


def weights(config: Config) -> Found:
    if config.model.path == "toy":
        policies.load(config)
        yield "ok", "the toy was pretrained on the spot"
        return
    for name, tensors in _complete(config):
        size = sum(np.prod(t.shape, dtype=np.int64) for t in tensors.values()) / 1e6
        stored = ", ".join(sorted({t.dtype for t in tensors.values()}))
        yield "ok", f"{name}: all {len(tensors)} tensors are there, {size:,.1f} million numbers in {stored}"
    folder = _folder(config)
    yield "ok", f"{pipeline.load(folder, only=()).configs.family} in {folder}, tokenizers readable"


def prompts(config: Config) -> Found:
    yield from _prompt_lines(config)


def reward(config: Config) -> Found:
    reward_weights(config)
    for name, source in reward_sources(config).items():
        try:
            yield "ok", f"{name}: {known.self_test(name, rewards.load(source, config.reward_server))}"
        except (ValueError, OSError) as error:
            yield "FAIL", _short(f"{name}: {error}")


def grid(config: Config) -> Found:
    _, tables = _grid(config)
    noisy = f"steps {np.flatnonzero(tables.trained).tolist()} of {config.sampling.num_steps} are trained"
    levels = f"levels {tables.sigmas[0]:.3f} to {tables.sigmas[-2]:.3f}, then 0"
    psi = f"psi of {config.exploration.psi} fits" if config.exploration.psi else f"noise level {config.exploration.noise_level:g}"
    yield "ok", f"{levels}; {noisy}; {config.exploration.sampler}, {psi}"
    yield from (("warn", line) for line in strange(config) + phases.outweighed(config, tables))
    if config.exploration.psi is None and config.exploration.sampler in SAMPLERS and config.model.path not in ("toy", "tiny"):
        yield "warn", "exploration.psi is not set: `densegrpo calibrate` finds the noise level of each step, which DenseGRPO takes"


def batch(config: Config) -> Found:
    _, tables = _grid(config)
    devices = parallel.shares(config.parallel)
    check(config, steps := int(tables.trained.sum()), devices)
    price = cost(config.sampling.num_steps, tables.scheme, tile=config.completion.tile, tail=config.completion.tail)
    trajectories, size, updates = batch_size(config), micro_batch(config, steps, devices), config.optimizer.updates
    images = trajectories * (len(tables.scheme) + 1)
    share = trajectories * steps // updates
    work = f"{images} images scored, {trajectories * price.evaluations} evaluations of the network"
    parts = f"{updates} updates of {share // size} micro-batches of {size}"
    yield "ok", f"a step: {config.prompts.per_step} prompts x {config.prompts.group_size} = {trajectories} trajectories, {work}, {parts}"
    if size < min(config.optimizer.micro_batch, share) / 2:
        asked = config.optimizer.micro_batch
        yield "warn", f"optimizer.micro_batch = {asked} does not divide the {share} pairs of an update: {size} is taken"
    if config.prompts.group_size < 8:
        yield "warn", f"prompts.group_size = {config.prompts.group_size}: the mean and spread of a small group are noisy; 16 to 24 is usual"


def memory(config: Config) -> Found:
    parts = _on_a_device(config, _bytes(config))
    total = sum(parts.values())
    listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    available, where = _available()
    text = f"{total / GIB:.2f} GiB: {listed}; without activations, programs and scorers, which `densegrpo plan` estimates"
    if available is None:
        yield "warn", f"{text}; the device does not say how much it has"
    else:
        advice = "" if total < 0.8 * available else "; take more or larger devices, model.dtype bfloat16 or smaller prompts.per_step"
        status = "FAIL" if total > available else "warn" if total > 0.8 * available else "ok"
        yield status, f"{text}; {where} has {available / GIB:.1f} GiB{advice}"


def disk(config: Config) -> Found:
    folder = _place(config.run.workdir)
    free, one = shutil.disk_usage(folder).free, _bytes(config)["trained weights, optimiser, average"]
    count = config.run.keep + 1 + config.run.keep_best
    text = f"{count} checkpoints of {one / GIB:.3f} GiB, {free / GIB:.1f} GiB free for run.workdir = {config.run.workdir}"
    if free < count * one:
        yield "FAIL", f"{text}; name another run.workdir, or lower run.keep"
    elif free < 2 * count * one + 2**28:
        yield "warn", f"{text}; images and compiled programs want some more"
    else:
        yield "ok", text


def dry_run(config: Config) -> Found:
    from densegrpo_jax.train import loop

    with tempfile.TemporaryDirectory(prefix="densegrpo-doctor-") as folder, contextlib.redirect_stdout(io.StringIO()):
        loop.train(_small(config, Path(folder) / "run"))
        steps = metrics.read(Path(folder) / "run" / "metrics.jsonl")
    yield "ok", f"two steps on one prompt: {steps[0]['seconds']:.1f} s with compilation, then {steps[1]['seconds']:.1f} s"
    noise = np.array(steps[0]["log_ratio_before"]["delta_log_prob_max"], np.float64)
    worst, clip = float(np.nanmax(noise)), config.objective.clip_range
    text = f"before any update the log-ratio is up to {worst:.1e} by rounding alone, objective.clip_range is {clip:g}"
    if worst > LOUD * clip:
        yield "FAIL", f"{text}: noise is clipped as if it were learning; set objective.recompute_old_log_prob, or model.dtype float32"
    elif worst > QUIET * clip:
        yield "warn", f"{text}: set objective.recompute_old_log_prob, model.dtype float32 or a wider range"
    else:
        yield "ok", text
    if any(any(step["nonfinite"].values()) for step in steps):
        yield "FAIL", f"values that are not finite: {steps[-1]['nonfinite']}; try model.dtype float32 or less guidance"


CHECKS: dict[str, Callable[[Config], Found]] = {
    "environment": environment,
    "devices": devices,
    "weights": weights,
    "prompts": prompts,
    "reward": reward,
    "grid": grid,
    "batch": batch,
    "memory": memory,
    "disk": disk,
    "dry run": dry_run,
}


# ---------------------------------------------------------------------------------------------------------- what they share


def _folder(config: Config, need_weights: bool = True) -> Path:
    """The model's folder, downloaded where `model.path` is a Hugging Face id."""
    with _named("model.path"):
        return find_folder(policies.folder(config.model.path), config.model.variant, need_weights)


def _configs(config: Config) -> Configs:
    """The shapes of the model: those that are published, or its folder's."""
    path = config.model.path
    return published.MODELS[path] if path in published.MODELS and not Path(path).is_dir() else pipeline.read_configs(_folder(config, False))


def _complete(config: Config) -> Iterator[tuple[str, dict]]:
    """Component by component the tensors that are there, which are all that the networks need."""
    folder = _folder(config)
    configs = pipeline.read_configs(folder)
    for name in pipeline.components(configs):
        yield name, _headers(folder, configs, name, config.model.variant)


def _headers(folder: Path, configs: Configs, name: str, variant: str | None) -> dict:
    """The tensors of a component as their files' headers say, every one of which the network needs."""
    network, tensors = FAMILIES[configs.family].networks[name], open_weights(folder / name, variant)
    if network.prefix and not any(tensor.startswith(network.prefix) for tensor in tensors):
        tensors = {network.prefix + tensor: stored for tensor, stored in tensors.items()}
    spare = {*network.tied, *network.ignored}
    check_tensors(tensors, pipeline.name_table(configs, name), recipe.shapes(configs, name), spare)
    return tensors


def _outline(config: Config) -> Policy:
    """The policy without weights: its shapes and its grid; `start` gives shapes too."""
    if config.model.path == "toy":
        return _toy_outline(config)
    configs = _configs(config)
    policies.check_heads(configs, config.parallel.tensor)
    height, width = config.model.resolution or (pipeline.default_side(configs),) * 2
    return recipe.abstract_policy(config, configs, pipeline.latent_shape(configs, height, width))


def _toy_outline(config: Config) -> Policy:
    from densegrpo_jax.models.mlp import ToyNetwork
    from densegrpo_jax.scenes import toy

    def start():
        one = jnp.zeros((1, *toy.SHAPE)), jnp.zeros(1), jnp.zeros(1, jnp.int32)
        network = jax.eval_shape(lambda: ToyNetwork(len(toy.PROMPTS)).init(jax.random.key(0), *one))["params"]
        targets = ("in", "hidden_0", "hidden_1", "hidden_2", "out")
        return jax.eval_shape(lambda: policies.fresh_adapter(config, network, targets))

    return Policy({}, None, None, None, None, toy.SHAPE, uniform_sigmas, 1.0, start, "toy")


def _grid(config: Config) -> tuple[Policy, phases.Sampler]:
    outline = _outline(config)
    sigmas = policies.sigmas(config, outline, config.sampling.num_steps)
    return outline, phases.sampler(config, sigmas, policies.shift(config, outline), step=0)


def _adapter(config: Config, outline: Policy) -> dict:
    """Shapes of what is trained, after a look at the adapter that it starts from."""
    with _named("adapter.targets"):
        shapes = outline.start()
    if config.adapter.start is not None and config.model.path != "toy":
        configs = _configs(config)
        table, needed = pipeline.name_table(configs, "transformer"), pipeline.abstract_params(configs, "transformer")
        with _named("adapter.start"):
            rank = adapters.rank(adapters.read_adapter(config.adapter.start, table, needed, config.adapter.alpha).lora)
        if rank != config.adapter.rank:
            raise ValueError(f"adapter.rank = {config.adapter.rank}, but the adapter in {config.adapter.start} has rank {rank}")
    return shapes


def _prompt_lines(config: Config) -> Found:
    with _named("prompts.train"):
        train = prompt_lists.load(config.prompts.train)
    with _named("prompts.evaluation"):
        test = prompt_lists.load(config.prompts.evaluation)
    yield "ok", "; ".join(prompt_lists.describe(train, test))
    for field, found in (("train", train), ("evaluation", test)):
        source = getattr(config.prompts, field)
        if config.model.path == "toy":
            from densegrpo_jax.scenes import toy

            with _named(f"prompts.{field} = {source!r}"):
                toy.prompt_ids(list(found.texts))
        for name in reward_sources(config):
            kind = name.partition(":")[0]
            if kind in ("ocr", "words"):
                without = [text for text in found.texts if target_text(text) is None]
                what = 'quoted text to be shown, as in: a sign that says "OPEN"'
            elif kind in rewards.SERVED or kind.startswith("scenes_compose"):
                without = [text for text, entry in zip(*found) if "include" not in entry]
                what = "GenEval metadata; take a .jsonl of `densegrpo prompts geneval`"
            else:
                continue
            if without:
                status = "FAIL" if len(without) == len(found.texts) else "warn"
                share = f"{len(without)} of {len(found.texts)} prompts"
                yield status, f"prompts.{field} = {source!r}: {share} lack what reward {name!r} needs: {what}"
    if len(set(train.texts)) < len(train.texts):
        yield "warn", f"prompts.train repeats {len(train.texts) - len(set(train.texts))} prompts, which are then drawn more often"
    if (longest := max(map(len, train.texts + test.texts))) > 2000:
        yield "warn", f"a prompt has {longest} characters; text encoders read a few hundred words at most"


def _bytes(config: Config) -> dict[str, float]:
    """Bytes of what stays in memory, from shapes alone."""
    outline, tables = _grid(config)
    parts = {}
    if config.model.path != "toy":
        configs = _configs(config)
        for name in pipeline.components(configs):
            width = FLOAT32 if name == "vae" else jnp.dtype(config.model.dtype).itemsize
            parts[name] = recipe.size(recipe.shapes(configs, name)) * width
    latents = batch_size(config) * np.prod(outline.shape) * (3 * config.sampling.num_steps + 1 + len(tables.scheme) + 1)
    parts["trained weights, optimiser, average"] = 4 * FLOAT32 * recipe.size(_adapter(config, outline))
    parts["latents of a step"] = float(latents) * FLOAT32
    return parts


def _on_a_device(config: Config, parts: dict[str, float]) -> dict[str, float]:
    """Of those bytes, what each device of the run holds; on CPU all, as its devices share one memory."""
    p, devices = config.parallel, parallel.shares(config.parallel)
    if jax.devices()[0].platform == "cpu":
        return parts
    together = p.fsdp * p.tensor
    whole = 1 if config.adapter.rank else together  # all weights, where they are trained, are shared as the frozen ones
    shares = {"vae": 1, "latents of a step": devices, "trained weights, optimiser, average": whole}
    waits = p.encoders == "host"
    return {name: 0.0 if waits and name.startswith("text_encoder") else size / shares.get(name, together) for name, size in parts.items()}


def _available() -> tuple[float | None, str]:
    """Bytes of memory of a device, or of this machine where that is what computes."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit"), "a device"


def _place(workdir: Path) -> Path:
    """The nearest folder above `workdir` that exists, or itself.

    Raises:
      OSError: there is a file where a folder is needed, or one that cannot be written to.
    """
    place = workdir.expanduser().absolute()
    while not place.exists() and place.parent != place:
        place = place.parent
    if not place.is_dir():
        raise OSError(f"run.workdir = {workdir}: {place} is a file; name a folder with --run.workdir")
    if not os.access(place, os.W_OK | os.X_OK):
        raise OSError(f"run.workdir = {workdir}: {place} cannot be written to; name a folder that can be, with --run.workdir")
    return place


def _small(config: Config, workdir: Path) -> Config:
    """Two steps of the run on one prompt, with the same programs otherwise."""
    devices = parallel.shares(config.parallel)
    group = -(-min(config.prompts.group_size, 4) // devices) * devices
    return change(
        config,
        prompts={"per_step": 1, "group_size": group},
        sampling={"chunk": None},
        optimizer={"updates": 1, "micro_batch": max(min(config.optimizer.micro_batch, group), devices)},
        evaluation={"every": 0, "prompts": 1, "images_per_prompt": 1, "final_prompts": 0, "collapse_contrast": 0.0},
        run={"steps": 2, "workdir": workdir, "save_every": 2, "report_every": 0, "wandb": False, "compilation_cache": False},
    )


@contextlib.contextmanager
def _named(field: str) -> Iterator[None]:
    """Begins what is refused within by the field that it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def _short(reason: str) -> str:
    return " ".join(reason.split())[:600]

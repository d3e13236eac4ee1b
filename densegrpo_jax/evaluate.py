"""`densegrpo eval`: images of fixed prompts at fixed noise, scored by several rewards, in a folder that says how to make them again.

The initial noise of an image is addressed by (seed, index of the prompt, number of the image): a subset of the prompts, more images of
each, another adapter or another batch size start from the same noise. On one machine with the same versions and batch size the images
are the same to the bit, also when the evaluation was killed and continued; `manifest.json` holds what that takes.
"""

import base64
import dataclasses
import hashlib
import html
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax.traverse_util import flatten_dict
from PIL import Image
from tqdm import tqdm

from densegrpo_jax import __version__, flow, pipeline, rewards
from densegrpo_jax import config as configs
from densegrpo_jax import policy as policies
from densegrpo_jax import prompts as prompt_lists
from densegrpo_jax.config import Config
from densegrpo_jax.models import adapter as adapters
from densegrpo_jax.policy import Policy
from densegrpo_jax.prompts import PromptSet
from densegrpo_jax.rewards import Reward
from densegrpo_jax.train import checkpoint, metrics, phases, report

RESAMPLES, LEVEL = 2000, 0.95  # of the bootstrap, whose seed is fixed
SHIPPED = {
    "toy": Config(),
    "tiny": Config(model=configs.Model(path="tiny", max_sequence_length=16), sampling=configs.Sampling(grid="uniform")),
}
"""Settings of the models that ship, the same as in their configs."""
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "pillow", "transformers", "tokenizers", "rapidocr", "onnxruntime")  # what scores depend on
NAMES = ("arguments", "model.path")  # of the manifest: where things were found, which may move; the hashes say what they were


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Score a run, an adapter or a model on fixed prompts and noise; or compare two such evaluations."""

    model: tyro.conf.Positional[str | None] = None
    """Work folder of a run; model folder, Hugging Face id, "tiny" or "toy"; or adapter, a file or folder, together with --base."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Folder to write; the same command again continues. For --compare: the HTML file, by default in B."""
    compare: tuple[Path, Path] | None = None
    """A B: two finished evaluations; writes the paired difference B - A and the images side by side."""
    repeat: Path | None = None
    """A finished evaluation to make again in --out, with all its settings; refused where weights, prompts or versions have changed."""
    base: str | None = None
    """The model of an adapter: folder, Hugging Face id or "tiny"."""
    weights: Literal["ema", "last", "base"] | None = None
    """Of a run: the running average (the default), the last weights, or the base model without what was trained."""
    checkpoint: int | None = None
    """Of a run: training steps of the checkpoint; the latest by default."""
    adapter_steps: int | None = None
    """Apply the adapter on the first so many denoising steps only, and the base model on the rest; on all by default."""
    task: str | None = None
    """A training config, NAME or file: what is not given is taken from it; of a run only prompts and rewards."""
    prompts: str | None = None
    """Prompt file or built-in set; by default the held-out prompts of the run or task."""
    count: int | None = None
    """The first so many prompts; all by default."""
    images: int = 1
    """Images per prompt."""
    rewards: tuple[str, ...] = ()
    """Rewards by name, with :FOLDER or @http://HOST:PORT; by default those of the run or task, witnesses included."""
    seed: int = 0
    """Of the noise."""
    steps: int = 40
    """Euler steps of the ODE."""
    grid: Literal["model", "uniform", "sd3", "flux"] | None = None
    """Noise levels: the model's own schedule, uniform, or SD3's or FLUX's rule; by default the run's, else the model's own."""
    guidance: float | None = None
    """Guidance scale, at least 1; by default the run's, else the model's own."""
    height: int | None = None
    """Pixels; by default the run's, else the model's own size."""
    width: int | None = None
    """Pixels; by default the run's, else the model's own size."""
    max_sequence_length: int | None = None
    """Tokens of T5; by default those of the run, 16 for "tiny", else 256."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Of the networks; by default the run's, else float32."""
    variant: str | None = None
    """Weights to read, "fp16" or "bf16"; by default the run's, else the unnamed ones."""
    batch_size: int = 8
    """Images sampled at once; a part of what makes images the same to the bit."""
    shown: int = 48
    """Pairs of images in the page of --compare, evenly spread over the evaluation."""

    def __post_init__(self):
        ranges = {
            "checkpoint": (0, 2**31 - 1),
            "adapter_steps": (0, self.steps),
            "count": (1, 10**9),
            "images": (1, 10_000),
            "seed": (0, 2**63 - 1),
            "steps": (1, flow.grid.TRAIN_STEPS),
            "guidance": (1.0, 1000.0),
            "max_sequence_length": (1, pipeline.MAX_T5_LENGTH),
            "batch_size": (1, 10_000),
            "shown": (0, 10_000),
        }
        for field, (low, high) in ranges.items():
            if getattr(self, field) is not None and not low <= getattr(self, field) <= high:
                raise ValueError(f"{field} = {getattr(self, field)}: must be from {low} to {high}")
        if sum(given is not None for given in (self.model, self.compare, self.repeat)) != 1:
            raise ValueError("give one of: what to evaluate, --compare A B, or --repeat EVALUATION")
        if self.out is None and self.compare is None:
            raise ValueError("out: name the folder to write")


class Subject(NamedTuple):
    """What is evaluated.

    Attributes:
      config: model, adapter and sampling sections are meant; "model.path" is the base model.
      trained: adapter or, where adapter.rank = 0, the full weights; None for the base model.
      step: of a run, the training steps done.
    """

    config: Config
    trained: dict | None
    step: int | None = None


def main(
    args: Evaluate,
    task: Config | None = None,
    extra_rewards: dict[str, Reward] | None = None,
    expected: dict | None = None,
) -> Path:
    """Evaluates, or continues what `args.out` holds, or compares.

    Args:
      args: the settings.
      task: the config that `args.task` names.
      extra_rewards: rewards by name beside the built-in ones.
      expected: a manifest that the evaluation has to match, see `repeated`.

    Returns:
      The folder of the evaluation; for a comparison the HTML file.

    Raises:
      ValueError: settings that do not work, said before anything is sampled; or a folder that holds another evaluation, with what differs.
    """
    if args.compare:
        path, numbers = compare(*args.compare, out=args.out, shown=args.shown)
        print("\n".join([*_lines(numbers["difference"]), f"images: {path}"]))
        return path
    return evaluate(args, task, extra_rewards or {}, expected)


def repeated(args: Evaluate) -> tuple[Evaluate, dict]:
    """The settings of the evaluation that `args.repeat` names, for `args.out`, and the manifest to match."""
    manifest = _read_manifest(args.repeat)
    try:
        given = manifest["arguments"]
        return Evaluate(**{**given, "rewards": tuple(given["rewards"]), "out": args.out}), manifest
    except (TypeError, KeyError) as error:
        raise ValueError(f"{args.repeat}: its manifest is of another version of this package ({error})") from error


def evaluate(args: Evaluate, task: Config | None, extra_rewards: dict[str, Reward], expected: dict | None) -> Path:
    """Samples, scores and summarises; see `main`."""
    # ------------------------------------------------------------------------------------------------ what, on what, by what
    subject = find(args, task)
    config = subject.config
    policy = policies.load(config)
    sigmas = policies.sigmas(config, policy, args.steps)
    if args.adapter_steps is not None and subject.trained is None:
        raise ValueError("adapter_steps: the base model has no adapter; leave it out")
    prompts = prompt_lists.load(config.prompts.evaluation)
    count = len(prompts.texts) if args.count is None else args.count
    if count > len(prompts.texts):
        raise ValueError(f"count = {count}: {config.prompts.evaluation} has {len(prompts.texts)} prompts; none is drawn twice")
    prompts = PromptSet(prompts.texts[:count], prompts.metadata[:count])
    for line in policy.truncated([*prompts.texts]):
        print(f"warning: {line}")
    sources = _by_name(config.rewards)
    scorers = {name: extra_rewards.get(name) or rewards.load(source, config.reward_server) for name, source in sources.items()}

    # ------------------------------------------------------------------------------------------------- new, or to be continued
    manifest = _manifest(args, subject, policy, prompts, sources, sigmas)
    if expected is not None and (changed := differences(expected, manifest)):
        raise ValueError(f"this would not be the same evaluation: {'; '.join(changed)}")
    out = args.out.expanduser()
    _settle(out, manifest)
    items = [(prompt, image) for prompt in range(count) for image in range(args.images)]
    batches = [items[start : start + args.batch_size] for start in range(0, len(items), args.batch_size)]
    done = _keep(out, batches)

    # --------------------------------------------------------------------------------------------------------- sample and score
    bar = tqdm(total=len(items), initial=sum(map(len, batches[:done])), disable=not metrics.is_terminal(), unit="image")
    for batch, images, finite in _drawn(args, config, policy, subject.trained, sigmas, prompts, batches[done:]):
        files = [f"images/{prompt:06d}_{image:03d}.png" for prompt, image in batch]
        for file, pixels in zip(files, images):
            Image.fromarray(pixels).save(out / file)
        texts, metadata = ([part[prompt] for prompt, _ in batch] for part in prompts)
        scored = rewards.score_parts(scorers, [(np.arange(len(batch)), images, finite)], texts, metadata).scores
        lines = []
        for i, (prompt, image) in enumerate(batch):
            record = {
                "prompt": prompt,
                "image": image,
                "seed": args.seed,
                "text": texts[i],
                "tag": metadata[i].get("tag"),
                "file": files[i],
            }
            record["scores"] = {name: float(s.value[i]) if s.valid[i] else None for name, s in scored.items()}
            record["valid"] = {name: bool(s.valid[i]) for name, s in scored.items()}
            lines.append(json.dumps(record) + "\n")
        with (out / "items.jsonl").open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        bar.update(len(batch))
    bar.close()

    # ------------------------------------------------------------------------------------------------------------------- numbers
    numbers = summarize(metrics.read(out / "items.jsonl"))
    _write(out / "summary.json", json.dumps(metrics.plain(numbers), indent=1))
    print("\n".join([*_lines(numbers), f"{len(items)} images of {count} prompts in {out}"]))
    return out


# -------------------------------------------------------------------------------------------------------------------- finding


def find(args: Evaluate, task: Config | None = None) -> Subject:
    """The base model, what was trained, and the settings: those given, else those of the run, else of the task, else of the model.

    Raises:
      ValueError: nothing there that could be evaluated, an option that has no meaning for it, or no prompts or rewards.
    """
    path = Path(args.model).expanduser()
    is_run = (path / "checkpoints").is_dir()
    is_adapter = not is_run and path.exists() and not (path / "model_index.json").exists()
    for name in ("weights", "checkpoint"):
        if getattr(args, name) is not None and not is_run:
            raise ValueError(f"{name}: {args.model} is not the work folder of a run; leave it out")
    if is_adapter and args.base is None:
        raise ValueError(f"{args.model}: neither a run (no checkpoints/) nor a model (no model_index.json); of an adapter, name the --base")
    if args.base is not None and not is_adapter:
        raise ValueError(f"base = {args.base}: only an adapter takes one, and {args.model} is {'a run' if is_run else 'a model'}")

    trained, step, lora_file = None, None, None
    if is_run:
        saved = checkpoint.trained(path, "last" if args.weights == "last" else "ema", args.checkpoint)
        known = _config_of(path, saved.settings)
        if args.weights != "base":
            trained, step = saved.tree, saved.step
    else:
        model = args.base if is_adapter else args.model
        known = task or SHIPPED.get(model)
        config = known or Config()
        known = dataclasses.replace(config, model=dataclasses.replace(config.model, path=model))
        if is_adapter:
            lora_file = path
        if task is None and model not in SHIPPED:
            scale = pipeline.default_guidance(_read_configs(known.model))
            known = dataclasses.replace(known, sampling=dataclasses.replace(known.sampling, guidance_scale=scale))

    asking = task or (known if is_run else None)
    evaluation = args.prompts or (asking and asking.prompts.evaluation)
    scorers = args.rewards or (asking and tuple(dict.fromkeys(configs.reward_sources(asking).values())))
    if not evaluation or not scorers:
        raise ValueError(f"{args.model}: say which --prompts and --rewards, or a --task that has them")
    config = _with_settings(args, known, evaluation, scorers)
    if lora_file is not None:
        if config.model.path == "toy":
            raise ValueError("the toy takes no adapter files; give the work folder of its run")
        folder = _read_configs(config.model)
        table, shapes = pipeline.name_table(folder, "transformer"), pipeline.abstract_params(folder, "transformer")
        trained, alpha = adapters.read_adapter(lora_file, table, shapes)
        config = dataclasses.replace(config, adapter=configs.Adapter(rank=adapters.rank(trained), alpha=alpha))
    return Subject(config, trained, step)


def _read_configs(model: configs.Model) -> pipeline.Configs:
    return pipeline.read_configs(pipeline.find_folder(policies.folder(model.path), model.variant))


def _config_of(workdir: Path, settings: dict) -> Config:
    """The sections of a run's config.json that say how its images are made and judged."""
    kinds = {
        "model": configs.Model,
        "prompts": configs.Prompts,
        "sampling": configs.Sampling,
        "adapter": configs.Adapter,
        "evaluation": configs.Evaluation,
        "reward_server": configs.RewardServer,
    }
    plain = lambda values: {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}  # noqa: E731
    try:
        sections = {name: kind(**plain(settings[name])) for name, kind in kinds.items()}
        return Config(**sections, rewards=tuple(settings["rewards"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{workdir / 'config.json'}: not a config of this version of the package ({error})") from error


def _with_settings(args: Evaluate, known: Config, evaluation: str, scorers: tuple[str, ...]) -> Config:
    """`known` with what the command line gives."""
    model = {name: value for name in ("max_sequence_length", "dtype", "variant") if (value := getattr(args, name)) is not None}
    if (args.height is None) != (args.width is None):
        raise ValueError("height and width: give both or neither")
    if args.height is not None:
        model["resolution"] = (args.height, args.width)
    sampling = {"decode_chunk": min(known.sampling.decode_chunk, args.batch_size)}
    if args.grid is not None:
        sampling |= {"grid": args.grid, "shift": known.sampling.shift if args.grid == known.sampling.grid else None}
    if args.guidance is not None:
        sampling["guidance_scale"] = args.guidance
    return Config(
        model=dataclasses.replace(known.model, **model),
        prompts=configs.Prompts(evaluation=evaluation),
        rewards=scorers,
        reward_server=known.reward_server,
        sampling=dataclasses.replace(known.sampling, **sampling),
        exploration=configs.Exploration(sampler="cps"),  # no noise is added; of the samplers this one fits every model
        adapter=dataclasses.replace(known.adapter, start=None),
        optimizer=configs.Optimizer(remat=False),
    )


def _by_name(sources: Sequence[str]) -> dict[str, str]:
    """Name -> source, "geneval" -> "geneval@http://..."; a server may move, so it is not a part of the name."""
    found = {source.partition("@http")[0]: source for source in sources}
    if len(found) < len(sources):
        raise ValueError(f"rewards = {', '.join(sources)}: name each once")
    return found


# ------------------------------------------------------------------------------------------------------------------- sampling


def make_draw(config: Config, policy: Policy, sigmas: np.ndarray, adapter_steps: int | None = None) -> Callable:
    """(params, trained, cond [B, ...], uncond, noise [B, ...]) -> uint8 images [B, H, W, 3] and which are finite [B], by Euler's ODE.

    `trained` takes part in the first `adapter_steps` steps, the base model does the rest: 0 is the base model bitwise, all steps (or
    None) what was trained.
    """
    split = len(sigmas) - 1 if adapter_steps is None else adapter_steps
    decode = phases.make_decode(config, policy)

    @jax.jit
    def sample(params, trained, cond, uncond, x):
        for weights, nodes in ((trained, sigmas[: split + 1]), (None, sigmas[split:])):
            if len(nodes) > 1:
                velocity = policy.velocity(params, weights, uncond)
                x = flow.integrate(lambda x, sigma, velocity=velocity: velocity(x, sigma, cond), x, flow.plan(nodes))
        return x

    return lambda params, *args: decode(params, sample(params, *args))


@partial(jax.jit, static_argnums=3)
def noise_of(key: jax.Array, prompt: jax.Array, image: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The initial noise [B, *shape] of images, addressed by key, index of the prompt [B] and number of the image [B]."""
    return jax.vmap(lambda p, n: flow.initial_noise(key, n, p[None], shape)[0])(prompt, image)


def _drawn(args: Evaluate, config: Config, policy: Policy, trained, sigmas, prompts: PromptSet, batches) -> Iterator[tuple]:
    """(batch, images [b, H, W, 3], finite [b]) of each; a batch is sampled while the caller scores the one before."""
    draw = make_draw(config, policy, sigmas, args.adapter_steps)
    # Prompts are encoded one by one: next to others, which depend on what is cached, the last digits may differ.
    uncond = policy.encode([""]) if config.sampling.guidance_scale != 1.0 else None
    ahead = None
    for batch in batches:
        rows = [batch[min(i, len(batch) - 1)] for i in range(args.batch_size)]  # the last batch is filled up, and cut below
        parts = [policy.encode([prompts.texts[prompt]]) for prompt, _ in rows]
        cond = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        noise = noise_of(jax.random.key(args.seed), *(jnp.asarray(column) for column in zip(*rows)), policy.shape)
        drawn = draw(policy.params, trained, cond, uncond, noise)
        if ahead:
            yield _fetch(*ahead)
        ahead = batch, drawn
    if ahead:
        yield _fetch(*ahead)


def _fetch(batch, drawn) -> tuple:
    images, finite = (np.asarray(part)[: len(batch)] for part in drawn)
    return batch, images, finite


# --------------------------------------------------------------------------------------------------- what makes it repeatable


def _manifest(args: Evaluate, subject: Subject, policy: Policy, prompts: PromptSet, sources: dict[str, str], sigmas: np.ndarray) -> dict:
    config = subject.config
    model = dataclasses.asdict(config.model)
    adapter = None
    if subject.trained is not None:
        adapter = dataclasses.asdict(config.adapter) | {"training_steps": subject.step, "sha256": hash_tree(subject.trained)}
        adapter["denoising_steps"] = args.steps if args.adapter_steps is None else args.adapter_steps
    if model["path"] == "toy":
        model["sha256"] = hash_tree(policy.params)
    else:
        model["sha256"] = hash_files(pipeline.find_folder(policies.folder(model["path"]), model["variant"]), model["variant"])
    given = dataclasses.asdict(args) | {"rewards": list(config.rewards), "prompts": config.prompts.evaluation}
    manifest = {
        "arguments": {name: value for name, value in given.items() if name not in ("out", "compare", "repeat", "shown")},
        "model": model,
        "adapter": adapter,
        "prompts": {"count": len(prompts.texts), "sha256": _hash(json.dumps([prompts.texts, prompts.metadata]).encode())},
        "images_per_prompt": args.images,
        "rewards": {name: {"sha256": _hash_scorer(source)} for name, source in sources.items()},
        "sampling": {
            "seed": args.seed,
            "steps": args.steps,
            "sigmas": sigmas.tolist(),
            "guidance_scale": config.sampling.guidance_scale,
            "latent": list(policy.shape),
            "batch_size": args.batch_size,
            "decode_chunk": config.sampling.decode_chunk,
        },
        "versions": {"densegrpo_jax": __version__, "python": platform.python_version(), **_versions()},
        "devices": [device.device_kind for device in jax.devices()[:1]],
        "machine": platform.machine(),
    }
    return json.loads(json.dumps(manifest))  # as it will be read


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def differences(before: dict, after: dict) -> list[str]:
    """One line for each entry in which two manifests differ; paths and spellings of the command line do not count."""
    flat = [
        {key: value for key, value in flatten_dict(manifest, sep=".", keep_empty_nodes=True).items() if not key.startswith(NAMES)}
        for manifest in (before, after)
    ]
    keys = sorted({*flat[0], *flat[1]})
    absent = object()
    changed = [key for key in keys if flat[0].get(key, absent) != flat[1].get(key, absent)]
    return [f"{key}: {_short(flat[0].get(key))} -> {_short(flat[1].get(key))}" for key in changed]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def hash_tree(tree: dict) -> str:
    """SHA-256 of a tree of arrays: names, types, shapes and values."""
    digest = hashlib.sha256()
    for path, leaf in sorted(flatten_dict(tree, sep="/").items()):
        value = np.ascontiguousarray(leaf)
        digest.update(f"{path} {value.dtype.name} {value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def hash_files(folder: Path, variant: str | None = None) -> str:
    """SHA-256 of a folder: names and contents of its JSON, text and tokenizer files and of its safetensors of one variant."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not _hidden(path.relative_to(folder))):
        named = ".fp16." in path.name or ".bf16." in path.name
        weights = path.suffix == ".safetensors" and named == bool(variant) and (not variant or f".{variant}." in path.name)
        if weights or path.suffix in (".json", ".txt", ".model"):
            with path.open("rb") as file:
                digest.update(f"{path.relative_to(folder).as_posix()} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _hash_scorer(source: str) -> str | None:
    """Hash of the folder that a reward reads; None for one without a folder, or on a server."""
    kind, _, model = source.partition(":")
    if "@http" in source:
        return None
    if kind == "scenes_preference":
        from densegrpo_jax.rewards import scenes

        return hash_files(scenes.PREFERENCE)
    model = model or rewards.MODELS.get(kind)
    if kind not in rewards.MODELS or not model:
        return None
    from densegrpo_jax.rewards import clip

    return hash_files(pipeline.find_folder(model, files=clip.FILES))


def _read_manifest(folder: Path) -> dict:
    path = folder.expanduser() / "manifest.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: not the folder of an evaluation ({error})") from error


def _settle(out: Path, manifest: dict) -> None:
    """Makes the folder of a new evaluation, or finds that it holds this one."""
    if (out / "manifest.json").exists():
        if changed := differences(_read_manifest(out), manifest):
            raise ValueError(f"{out} holds another evaluation ({'; '.join(changed)}); give another out, or the old settings to continue")
        return
    if out.exists() and (not out.is_dir() or any(path.name not in ("images", "manifest.tmp") for path in out.iterdir())):
        raise ValueError(f"{out} is not empty, and not the folder of an evaluation; choose another --out")
    (out / "images").mkdir(parents=True, exist_ok=True)
    _write(out / "manifest.json", json.dumps(manifest, indent=1))


def _keep(out: Path, batches: list[list[tuple[int, int]]]) -> int:
    """How many batches are drawn and scored already. Lines of one that is not whole are dropped: it is made again, as it was."""
    path, done, kept = out / "items.jsonl", 0, []
    records = metrics.read(path)
    while done < len(batches):
        part = records[len(kept) : len(kept) + len(batches[done])]
        if [(r["prompt"], r["image"]) for r in part] != batches[done] or not all((out / r["file"]).is_file() for r in part):
            break
        kept, done = kept + part, done + 1
    if path.exists():
        _write(path, "".join(json.dumps(record) + "\n" for record in kept))
    return done


def _write(path: Path, text: str) -> None:
    """The whole file or none."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


# -------------------------------------------------------------------------------------------------------------------- numbers


def bootstrap(value: np.ndarray, cluster: np.ndarray, seed: int | Sequence[int] = 0) -> np.ndarray:
    """Means of resampled data: whole clusters are drawn with replacement, since images of one prompt are not independent.

    Args:
      value: [N] finite numbers.
      cluster: [N] what each belongs to, such as the index of its prompt.
      seed: of numpy's generator.

    Returns:
      [RESAMPLES] means over all values of the drawn clusters.
    """
    _, place = np.unique(cluster, return_inverse=True)
    sums, sizes = np.bincount(place, value), np.bincount(place)
    drawn = np.random.default_rng(seed).multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), size=RESAMPLES)
    return (drawn @ sums) / (drawn @ sizes)


def estimate(value: np.ndarray, prompt: np.ndarray, tag: Sequence[str | None]) -> dict:
    """Mean with its bootstrap interval, over all images and over those of each tag.

    Args:
      value: [N], NaN where a score is missing; those are left out and counted.
      prompt: [N] index of the prompt.
      tag: [N] kind of the prompt, None for none.

    Returns:
      "mean", "low", "high" (NaN where there is nothing; the interval also for a single prompt), "images", "prompts", "missing"; where
      there are tags, the same of each in "tags", and of the mean of the tags' means, GenEval's overall number, in "overall".
    """
    tags = np.array([t or "" for t in tag])
    result, _ = _interval(value, prompt, 0)
    if names := [name for name in sorted(set(tags)) if name]:
        parts = [_interval(value[tags == name], prompt[tags == name], [0, i + 1]) for i, name in enumerate(names)]
        result["tags"] = {name: part for name, (part, _) in zip(names, parts)}
        means, draws = [part["mean"] for part, _ in parts], [draws for _, draws in parts]
        result["overall"] = _with_interval(float(np.mean(means)), np.mean(draws, axis=0))
    return result


def _interval(value: np.ndarray, prompt: np.ndarray, seed: Any) -> tuple[dict, np.ndarray]:
    good = np.isfinite(value)
    clusters = len(np.unique(prompt[good]))
    draws = bootstrap(value[good], prompt[good], seed) if clusters > 1 else np.full(RESAMPLES, np.nan)
    mean = float(value[good].mean()) if clusters else float("nan")
    counts = {"images": int(good.sum()), "prompts": clusters, "missing": int((~good).sum())}
    return _with_interval(mean, draws) | counts, draws


def _with_interval(mean: float, draws: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"mean": mean, "low": float(low), "high": float(high)}


def summarize(items: list[dict]) -> dict:
    """`estimate` of every reward over the records of items.jsonl."""
    prompt, tag = np.array([r["prompt"] for r in items]), [r["tag"] for r in items]
    found = {name: estimate(_scores(items, name), prompt, tag) for name in items[0]["scores"]}
    return {"rewards": found, "bootstrap": {"level": LEVEL, "resamples": RESAMPLES, "clusters": "prompts"}}


def _scores(items: list[dict], name: str) -> np.ndarray:
    return np.array([np.nan if r["scores"][name] is None else r["scores"][name] for r in items], np.float64)


def _lines(numbers: dict) -> list[str]:
    """The numbers of each reward for the terminal."""
    lines = []
    for name, whole in numbers["rewards"].items():
        kinds = {"": whole} | {f"  {tag}": part for tag, part in whole.get("tags", {}).items()}
        kinds |= {"  mean of tags": whole["overall"]} if "overall" in whole else {}
        for kind, part in kinds.items():
            interval = f"   [{part['low']:.4f}, {part['high']:.4f}]" if np.isfinite(part["low"]) else ""  # none of a single prompt
            lines.append(f"{kind or name:<26} {part['mean']:.4f}{interval}")
        if whole["missing"]:
            total = whole["missing"] + whole["images"]
            lines.append(f"warning: {name} gave no score for {whole['missing']} of {total} images; they are left out")
    return lines


# ----------------------------------------------------------------------------------------------------------------- comparison


def compare(before: Path, after: Path, out: Path | None = None, shown: int = 48) -> tuple[Path, dict]:
    """The paired difference of two evaluations over the images that both have, and a page of those images side by side.

    Args:
      before: folder of a finished evaluation, A.
      after: another, B.
      out: HTML file to write; by default in B, named after A.
      shown: pairs of images on the page.

    Returns:
      The file, and the numbers, which are also written beside it as JSON: "A", "B" and "difference" (B - A), each as of `summarize`
      over the pairs in which both have a score; and "settings", what else differs.

    Raises:
      ValueError: not two finished evaluations of the same seed with a common prompt and reward, or a scorer of other weights.
    """
    folders = [Path(folder).expanduser() for folder in (before, after)]
    manifests = [_read_manifest(folder) for folder in folders]
    for folder in folders:
        if not (folder / "summary.json").exists():
            raise ValueError(f"{folder}: this evaluation is not finished; its command continues it")
    if (seeds := [m["sampling"]["seed"] for m in manifests])[0] != seeds[1]:
        raise ValueError(f"seeds {seeds[0]} and {seeds[1]} are other noise: nothing is paired; evaluate both with one seed")
    names = [name for name in manifests[0]["rewards"] if name in manifests[1]["rewards"]]
    if not names:
        raise ValueError(f"no reward is in both: {', '.join(manifests[0]['rewards'])}; {', '.join(manifests[1]['rewards'])}")
    for name in names:
        if manifests[0]["rewards"][name] != manifests[1]["rewards"][name]:
            raise ValueError(f"reward {name!r} had other weights in {before} than in {after}: its scores do not compare")
    found = [{(r["prompt"], r["image"]): r for r in metrics.read(folder / "items.jsonl")} for folder in folders]
    places = [place for place in found[0] if place in found[1]]
    for place in places:
        texts = [records[place]["text"] for records in found]
        if texts[0] != texts[1]:
            raise ValueError(f"prompt {place[0]} is {texts[0]!r} in {before} and {texts[1]!r} in {after}: not the same prompts")
    if not places:
        raise ValueError(f"{before} and {after} have no image of the same prompt and number")

    pairs = [[records[place] for place in places] for records in found]
    prompt, tag = np.array([place[0] for place in places]), [r["tag"] for r in pairs[0]]
    numbers: dict[str, Any] = {part: {"rewards": {}} for part in ("A", "B", "difference")}
    for name in names:
        a, b = (_scores(records, name) for records in pairs)
        both = np.isfinite(a) & np.isfinite(b)
        for part, value in (("A", a), ("B", b), ("difference", b - a)):
            numbers[part]["rewards"][name] = estimate(np.where(both, value, np.nan), prompt, tag)
    numbers |= {"pairs": len(places), "unpaired": [len(records) - len(places) for records in found]}
    numbers["settings"] = differences(*manifests)
    path = folders[1] / f"against_{folders[0].absolute().name}.html" if out is None else Path(out).expanduser()
    if path.suffix != ".html":
        raise ValueError(f"out = {path}: must be a .html file")
    _write(path, _page(folders, numbers, pairs, shown))
    _write(path.with_suffix(".json"), json.dumps(metrics.plain(numbers), indent=1))
    return path, numbers


def _page(folders: list[Path], numbers: dict, pairs: list[list[dict]], shown: int) -> str:
    a, b = (html.escape(folder.absolute().name) for folder in folders)
    note = f"A: {a}. B: {b}. {numbers['pairs']} pairs of images with the same prompt and initial noise."
    settings = "\n".join(numbers["settings"]) or "none"
    parts = [
        f"<h1>{b} against {a}</h1><p class=note>{note}</p>",
        report._section("Difference B - A", _table(numbers)),
        report._section("Images", _pictures(folders, pairs, shown)),
        report._section("What else differs between the manifests", f"<pre>{html.escape(settings)}</pre>"),
    ]
    style = report.STYLE + ".two{display:flex;gap:4px}.two img{width:50%;min-width:0}"
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>{b} against {a}</title><style>{style}</style>"
    return page + "<main>" + "".join(parts) + "</main></html>"


def _table(numbers: dict) -> str:
    rows = ["<tr><th>reward</th><th>images</th><th>A</th><th>B</th><th>difference</th><th>95 % interval</th></tr>"]
    for name, whole in numbers["difference"]["rewards"].items():
        three = [whole, *(numbers[side]["rewards"][name] for side in "AB")]
        kinds = [(name, *three), *((f"– {tag}", *(part["tags"][tag] for part in three)) for tag in whole.get("tags", ()))]
        if "overall" in whole:
            kinds.append(("– mean of tags", *(part["overall"] for part in three)))
        for label, difference, a, b in kinds:
            cells = [html.escape(label), str(difference.get("images", "")), f"{a['mean']:.4f}", f"{b['mean']:.4f}"]
            cells.append(f"{difference['mean']:+.4f}")
            cells.append(f"{difference['low']:+.4f} to {difference['high']:+.4f}" if np.isfinite(difference["low"]) else "")
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    missing = {name: whole["missing"] for name, whole in numbers["difference"]["rewards"].items() if whole["missing"]}
    left_out = "".join(f" {html.escape(name)}: {count} pairs without a score are left out." for name, count in missing.items())
    return f"<table>{''.join(rows)}</table><p class=note>Intervals: bootstrap over prompts, {RESAMPLES} resamples.{left_out}</p>"


def _pictures(folders: list[Path], pairs: list[list[dict]], shown: int) -> str:
    chosen = np.unique(np.linspace(0, len(pairs[0]) - 1, min(shown, len(pairs[0]))).round().astype(int))
    cells = []
    for i in chosen:
        a, b = pairs[0][i], pairs[1][i]
        files = [folder / "images" / Path(record["file"]).name for folder, record in zip(folders, (a, b))]
        with Image.open(files[0]) as image:
            kind = "class=pixels " if image.width <= 128 else ""  # small ones are magnified
        data = [base64.b64encode(file.read_bytes()).decode() for file in files]
        images = [f'<img {kind}src="data:image/png;base64,{text}">' for text in data]
        scores = "; ".join(f"{name} {_score(a, name)} → {_score(b, name)}" for name in a["scores"] if name in b["scores"])
        caption = f"{html.escape(a['text'])}<br>{html.escape(scores)}"
        cells.append(f"<figure><div class=two>{''.join(images)}</div><figcaption>{caption}</figcaption></figure>")
    note = f"Left: A. Right: B. {len(chosen)} of {len(pairs[0])} pairs, evenly spread, not chosen."
    return f"<div class=pairs>{''.join(cells)}</div><p class=note>{note}</p>"


def _score(record: dict, name: str) -> str:
    value = record["scores"][name]
    return "none" if value is None else f"{value:.3f}"

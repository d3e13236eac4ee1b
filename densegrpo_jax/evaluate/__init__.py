"""`densegrpo eval`: images of fixed prompts at fixed noise, scored by several rewards, in a folder that says how to make them again.

The initial noise of an image is addressed by (seed, index of the prompt, number of the image): a subset of the prompts, more images of
each, another adapter or another batch size start from the same noise. On one machine with the same versions and batch size the images
are the same to the bit, also when the evaluation was killed and continued; `manifest.json` holds what that takes.
"""

import dataclasses
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from PIL import Image
from tqdm import tqdm

from densegrpo_jax import __version__, flow, parallel, pipeline, rewards
from densegrpo_jax import config as configs
from densegrpo_jax import policy as policies
from densegrpo_jax import prompts as prompt_lists
from densegrpo_jax.config import Config
from densegrpo_jax.evaluate.comparison import compare
from densegrpo_jax.evaluate.intervals import summarize, text_lines
from densegrpo_jax.evaluate.manifest import differences, hash_bytes, hash_files, hash_scorer, hash_tree, read, versions, write_whole
from densegrpo_jax.models import adapter as adapters
from densegrpo_jax.policy import Policy
from densegrpo_jax.prompts import PromptSet
from densegrpo_jax.rewards import Reward
from densegrpo_jax.train import checkpoint, metrics, phases

SHIPPED = {
    "toy": Config(),
    "tiny": Config(model=configs.Model(path="tiny", max_sequence_length=16), sampling=configs.Sampling(grid="uniform")),
}
"""Settings of the models that ship, the same as in their configs."""


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
    devices: int = 1
    """Devices that share the images of a batch evenly; a part of what makes images the same to the bit, too."""
    fsdp: int = 1
    """Devices that share the weights, for what does not fit one."""
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
            "devices": (1, 10**6),
            "fsdp": (1, 10**6),
            "shown": (0, 10_000),
        }
        for field, (low, high) in ranges.items():
            if getattr(self, field) is not None and not low <= getattr(self, field) <= high:
                raise ValueError(f"{field} = {getattr(self, field)}: must be from {low} to {high}")
        if sum(given is not None for given in (self.model, self.compare, self.repeat)) != 1:
            raise ValueError("give one of: what to evaluate, --compare A B, or --repeat EVALUATION")
        if self.batch_size % self.devices:
            raise ValueError(f"batch_size = {self.batch_size}: {self.devices} devices do not share it evenly; choose a multiple of that")
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
        print("\n".join([*text_lines(numbers["difference"]), f"images: {path}"]))
        return path
    with parallel.within(parallel.make(configs.Parallel(devices=args.devices, fsdp=args.fsdp))):
        return evaluate(args, task, extra_rewards or {}, expected)


def repeated(args: Evaluate) -> tuple[Evaluate, dict]:
    """The settings of the evaluation that `args.repeat` names, for `args.out`, and the manifest to match."""
    manifest = read(args.repeat)
    try:
        given = manifest["arguments"]
        return Evaluate(**{**given, "rewards": tuple(given["rewards"]), "out": args.out}), manifest
    except (TypeError, KeyError) as error:
        raise ValueError(f"{args.repeat}: its manifest is of another version of this package ({error})") from error


def evaluate(args: Evaluate, task: Config | None, extra_rewards: dict[str, Reward], expected: dict | None) -> Path:
    """Samples, scores and summarises; see `main`."""
    # ------------------------------------------------------------------------------------------------ what, on what, by what
    above = [path for path in (args.out.expanduser(), *args.out.expanduser().absolute().parents) if path.is_file()]
    if above:
        raise ValueError(f"out = {args.out}: {above[0]} is a file; name a folder")
    subject = find(args, task)
    config = subject.config
    if args.adapter_steps is not None and subject.trained is None:
        raise ValueError("adapter_steps: the base model has no adapter; leave it out")
    prompts = prompt_lists.load(config.prompts.evaluation)
    count = len(prompts.texts) if args.count is None else args.count
    if count > len(prompts.texts):
        raise ValueError(f"count = {count}: {config.prompts.evaluation} has {len(prompts.texts)} prompts; none is drawn twice")
    prompts = PromptSet(prompts.texts[:count], prompts.metadata[:count])
    sources = _by_name(config.rewards)
    for source in (source for name, source in sources.items() if name not in extra_rewards):
        rewards.check_name(source)
    mesh = parallel.make(config.parallel)
    policy = policies.load(config, mesh)
    sigmas = policies.sigmas(config, policy, args.steps)
    for line in policy.truncated([*prompts.texts]):
        print(f"warning: {line}")
    scorers = {name: extra_rewards.get(name) or rewards.load(source, config.reward_server, mesh) for name, source in sources.items()}

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
    trained = (parallel.everywhere if config.adapter.rank else parallel.shared)(mesh, subject.trained)
    for batch, images, finite in _drawn(args, config, policy, mesh, trained, sigmas, prompts, batches[done:]):
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
    write_whole(out / "summary.json", json.dumps(metrics.plain(numbers), indent=1))
    print("\n".join([*text_lines(numbers), f"{len(items)} images of {count} prompts in {out}"]))
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
            raise ValueError(f"{name} = {getattr(args, name)}: {args.model} is not the work folder of a run; leave it out")
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
        raise ValueError(f"height = {args.height} and width = {args.width}: give both or neither")
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
        parallel=configs.Parallel(devices=args.devices, fsdp=args.fsdp),
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
    decode = phases.make_decode(config, policy, config.parallel.devices)

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


def _drawn(args: Evaluate, config: Config, policy: Policy, mesh, trained, sigmas, prompts: PromptSet, batches) -> Iterator[tuple]:
    """(batch, images [b, H, W, 3], finite [b]) of each; a batch is sampled while the caller scores the one before."""
    draw = make_draw(config, policy, sigmas, args.adapter_steps)
    # Prompts are encoded one by one: next to others, which depend on what is cached, the last digits may differ.
    uncond = parallel.everywhere(mesh, policy.encode([""])) if config.sampling.guidance_scale != 1.0 else None
    ahead = None
    for batch in batches:
        rows = [batch[min(i, len(batch) - 1)] for i in range(args.batch_size)]  # the last batch is filled up, and cut below
        parts = [policy.encode([prompts.texts[prompt]]) for prompt, _ in rows]
        cond = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        noise = noise_of(jax.random.key(args.seed), *(jnp.asarray(column) for column in zip(*rows)), policy.shape)
        drawn = draw(policy.params, trained, parallel.over_rows(mesh, cond), uncond, parallel.over_rows(mesh, noise))
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
    several = {"devices": args.devices, "fsdp": args.fsdp} if args.devices > 1 else {}
    manifest = {
        "arguments": {name: value for name, value in given.items() if name not in ("out", "compare", "repeat", "shown")},
        "model": model,
        "adapter": adapter,
        "prompts": {"count": len(prompts.texts), "sha256": hash_bytes(json.dumps([prompts.texts, prompts.metadata]).encode())},
        "images_per_prompt": args.images,
        "rewards": {name: {"sha256": hash_scorer(source)} for name, source in sources.items()},
        "sampling": {
            "seed": args.seed,
            "steps": args.steps,
            "sigmas": sigmas.tolist(),
            "guidance_scale": config.sampling.guidance_scale,
            "latent": list(policy.shape),
            "batch_size": args.batch_size,
            "decode_chunk": config.sampling.decode_chunk,
            **several,
        },
        "versions": {"densegrpo_jax": __version__, "python": platform.python_version(), **versions()},
        "devices": [device.device_kind for device in jax.devices()[:1]],
        "machine": platform.machine(),
    }
    return json.loads(json.dumps(manifest))  # as it will be read


def _settle(out: Path, manifest: dict) -> None:
    """Makes the folder of a new evaluation, or finds that it holds this one."""
    if (out / "manifest.json").exists():
        if changed := differences(read(out), manifest):
            raise ValueError(f"{out} holds another evaluation ({'; '.join(changed)}); give another out, or the old settings to continue")
        return
    if out.exists() and (not out.is_dir() or any(path.name not in ("images", "manifest.tmp") for path in out.iterdir())):
        raise ValueError(f"{out} is not empty, and not the folder of an evaluation; choose another --out")
    (out / "images").mkdir(parents=True, exist_ok=True)
    write_whole(out / "manifest.json", json.dumps(manifest, indent=1))


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
        write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
    return done

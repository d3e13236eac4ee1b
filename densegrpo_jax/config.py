"""Every setting of a run, as frozen dataclasses. A file in configs/ returns one `Config`; the command line overrides any field.

`check` refuses settings that contradict each other, naming the field, its value and the valid choices.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from densegrpo_jax.flow.kernels import SAMPLERS


@dataclass(frozen=True)
class Model:
    path: str = "toy"
    """Model folder in diffusers layout or Hugging Face id; "tiny" is the Stable Diffusion 3 of the tiny world, which ships with the
    package; "toy" a network of 8x8 pictures that is pretrained in seconds."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute and weight dtype of the network; latents, velocities and log-probabilities are float32 in any case."""
    resolution: tuple[int, int] | None = None
    """Height and width of the images in pixels; the model's own by default."""
    max_sequence_length: int = 256
    """T5 tokens per prompt, the same in sampling, training and evaluation."""
    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    """Implementation of attention; by default cudnn on GPUs in bfloat16, splash for long sequences on TPUs, else xla."""
    scan_unroll: int = 1
    """Transformer blocks unrolled in the compiled program; more runs some percent faster on CPU and compiles longer."""
    variant: str | None = None
    """Which weight files of the folder: "fp16", "bf16", or the unnamed ones."""


@dataclass(frozen=True)
class Prompts:
    train: str = "toy"
    """Text file with one prompt a line, or a built-in set: toy, scenes/train, scenes/heldout, words/train, words/heldout."""
    evaluation: str = "toy"
    """Held-out prompts; the same forms."""
    per_step: int = 4
    """P: prompts a training step."""
    group_size: int = 24
    """G: trajectories per prompt."""
    shared_start: bool = False
    """All members of a group start from one initial noise (Stepwise-Flow-GRPO, TP-GRPO, DanceGRPO)."""


@dataclass(frozen=True)
class Sampling:
    num_steps: int = 10
    """T: steps of the training sampler."""
    grid: Literal["model", "uniform", "sd3", "flux"] = "model"
    """Noise levels: the model's own schedule, uniform, or SD3's or FLUX's rule."""
    shift: float | None = None
    """Schedule shift for grid = "uniform" or "sd3"; their defaults are 1 and 3."""
    guidance_scale: float = 1.0
    """Guidance in rollout, completion, training and evaluation. Stable Diffusion 3: classifier-free, 1 is none (one network branch).
    FLUX.1-dev: an input of the network."""
    chunk: int | None = None
    """Trajectories sampled at a time; all by default. 16 to 32 is faster on CPU; on accelerators it bounds memory."""
    decode_chunk: int = 32
    """Images decoded at a time."""


@dataclass(frozen=True)
class Exploration:
    sampler: Literal["flow_sde", "psi_sde", "dance_sde", "cps", "ddim_sde"] = "flow_sde"
    """Kernel of a noisy step."""
    noise_level: float = 0.7
    """a of flow_sde and cps, eta of dance_sde and ddim_sde, constant psi of psi_sde."""
    psi: Path | None = None
    """Noise levels of each step in place of noise_level, for flow_sde and psi_sde: a psi.json of `densegrpo calibrate`, or the name
    of one that ships."""
    window: Literal["all", "all_but_last", "fixed", "random", "sliding"] = "all_but_last"
    """Which steps are noisy and trained; the rest are ODE steps."""
    window_size: int = 4
    """Steps in a fixed, random or sliding window."""
    window_start: int = 0
    """First step of a fixed window; earliest start of a random one."""
    window_every: int = 25
    """Training steps between the moves of a sliding window."""
    last_noise: bool = False
    """With "all_but_last": inject noise at the untrained last step too, as Flow-GRPO's program does."""


@dataclass(frozen=True)
class Completion:
    steps: str = "respaced 5"
    """Steps of a completion: "all" (the paper's n = k), a number or "k/2", "k/3", ... on the sampler's levels; or "respaced 5": at
    most so many steps laid anew between the level and the image. docs/methods.md compares them."""
    solver: Literal["euler", "midpoint", "heun", "ab2", "dpmpp2m"] = "dpmpp2m"
    """ODE solver of the completions; the paper takes Euler."""
    paired: bool = False
    """Grid-consistent gains: subtract the completion of the noise-free step instead of the completion before the step."""
    tail: Literal["keep", "skip_node", "skip_call"] = "keep"
    """What becomes of the last interior level, which is all but clean on SD3's grid."""
    tile: int | None = 1
    """Latents per trajectory in one network call; None puts a whole level into one call."""


@dataclass(frozen=True)
class Credit:
    method: Literal["dense_grpo", "flow_grpo", "dense_reward", "coca", "stepwise", "tp_grpo"] = "dense_grpo"
    """How rewards become per-step credit."""
    over: Literal["per_step", "joint"] | None = None
    """Statistics per step or over all steps of a group; the method's own by default."""
    std: Literal["group", "global"] = "group"
    """Standard deviation of the group, or of the whole batch as in Flow-GRPO's configs."""
    eps: float = 1e-4
    """Added to the standard deviation, in units of the reward."""
    clip: float = 5.0
    """Bound on the advantage."""
    gamma: float = 0.0
    """dense_grpo: discount of the gains still to come; 0 is the paper, 1 the sparse return with a state baseline."""
    slope: Literal["one", "fitted"] = "one"
    """dense_grpo: subtract the reward before the step as it is (the paper), or times its regression slope (less variance)."""
    reward_normalization: Literal["none", "group"] = "none"
    """"group": each reward is centred and scaled within the group before it is weighted, so that its units do not matter."""


@dataclass(frozen=True)
class RewardServer:
    timeout: float = 120.0
    """Seconds for one try of a batch; in all a batch takes at most attempts x timeout, with waits and further tries."""
    attempts: int = 3
    """Tries of a batch before it has failed."""
    batch: int = 32
    """Images in one request."""
    on_failure: Literal["fail", "mask"] = "fail"
    """What still fails stops the run, or is masked and counted. No answer at all for ten minutes stops the run in any case."""


@dataclass(frozen=True)
class Objective:
    clip_range: float = 1e-3
    """e of the clipped ratio; log-probs are means over dimensions, so it is small."""
    beta: float = 0.0
    """Weight of the KL to the base model."""
    kl_mode: Literal["exact", "code"] = "exact"
    """KL of the Gaussians, or Flow-GRPO's term without the step length."""
    ratio: Literal["standard", "guard"] = "standard"
    """"guard": GRPO-Guard's normalised ratio with its gradient balance."""
    step_weights: Literal["none", "tempflow"] = "none"
    """"tempflow": weight steps by their injected noise."""
    detach_uncond: bool = False
    """No gradient through the unconditional branch of guidance."""
    recompute_old_log_prob: bool | None = None
    """Take the old velocities from the update's own graph; by default where the dtype is bfloat16."""


@dataclass(frozen=True)
class Adapter:
    rank: int = 32
    """LoRA rank; 0 trains all weights of the network instead."""
    alpha: float = 64.0
    """LoRA alpha; the adapter enters with alpha / rank."""
    targets: tuple[str, ...] = ()
    """Module names that get adapters; the model's default list if empty."""
    start: Path | None = None
    """Adapter on disk to start from."""


@dataclass(frozen=True)
class Optimizer:
    learning_rate: float = 3e-4
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    updates: int = 2
    """U: optimiser updates per sampling; each takes its share of the (step, trajectory) pairs."""
    minibatch: Literal["pairs", "trajectories"] = "pairs"
    """Split over shuffled (step, trajectory) pairs, or over trajectories with all their steps (Flow-GRPO)."""
    micro_batch: int = 32
    """Pairs in one network pass of training; gradients accumulate over micro-batches."""
    ema_decay: float = 0.9
    """EMA of the trained weights, warmed up as (1 + n) / (10 + n); evaluation and export use it. 0 for none."""
    remat: bool = True
    """Recompute activations per block in the backward pass."""


@dataclass(frozen=True)
class Parallel:
    devices: int | None = None
    """Devices that take part; all by default, and of several processes always all. They share the trajectories evenly."""
    fsdp: int = 1
    """Devices that share the frozen weights, gathering them layer by layer, instead of a copy each; for what does not fit one."""
    tensor: int = 1
    """Devices that compute each trajectory together, a share of every layer's heads and hidden units each; for more devices than
    trajectories, or where one trajectory does not fit. A divisor of the number of heads."""
    encoders: Literal["device", "host"] = "device"
    """Where the text encoders wait: "host" brings them to the device for new prompts only."""
    coordinator: str | None = None
    """HOST:PORT of the first of several processes, which all run this command with the same work folder and their own `process`;
    "cluster" where JAX can ask (Cloud TPU). Several tasks of SLURM and hosts of GKE find each other by themselves."""
    processes: int | None = None
    """Number of processes, with a coordinator."""
    process: int | None = None
    """Which of them this is, from 0."""


@dataclass(frozen=True)
class Evaluation:
    every: int = 10
    """Training steps between evaluations; 0 for none."""
    num_steps: int = 20
    """ODE steps."""
    images_per_prompt: int = 2
    prompts: int = 32
    """Number of held-out prompts used; 0 for all."""
    witnesses: tuple[str, ...] = ()
    """Further rewards that are measured and not optimised."""
    final_prompts: int = 0
    """Held-out prompts of a larger comparison with the base model when training is done; 0 for none."""
    final_images_per_prompt: int = 6
    collapse_reward: float = 1.0
    """The run stops when the held-out reward is so many standard deviations of the base model's images below the base; 0 for never."""
    collapse_contrast: float = 0.3
    """The run stops when the contrast of the sampled images is below this share of the first step's; 0 for never."""


@dataclass(frozen=True)
class Run:
    steps: int = 50
    """Training steps."""
    seed: int = 0
    workdir: Path = Path("runs/default")
    """Everything the run writes; the same command with the same folder continues it."""
    save_every: int = 10
    """Training steps between checkpoints."""
    keep: int = 3
    """Last checkpoints kept."""
    keep_best: bool = True
    """Save at every evaluation, and keep the checkpoint of the highest held-out reward beyond the last ones."""
    compilation_cache: bool = True
    """Keep compiled programs in the work folder, so that a continued run starts sooner; JAX_COMPILATION_CACHE_DIR takes precedence."""
    max_nonfinite: int = 20
    """The run stops after so many updates in a row that were left out because their gradient is not finite; 0 for never."""
    report_every: int = 10
    """Training steps between rewrites of report.html; 0 for only at the end."""
    profile: int = 0
    """Trace so many steps after the first into workdir/profile, for xprof or TensorBoard."""
    wandb: bool = False
    """Log to Weights & Biases as well (extra `wandb`)."""


@dataclass(frozen=True)
class Config:
    model: Model = field(default_factory=Model)
    prompts: Prompts = field(default_factory=Prompts)
    rewards: tuple[str, ...] = ("toy_spot",)
    """Rewards that are summed: NAME, or NAME=WEIGHT. On a server: NAME@http://HOST:PORT, several after a comma."""
    reward_server: RewardServer = field(default_factory=RewardServer)
    sampling: Sampling = field(default_factory=Sampling)
    exploration: Exploration = field(default_factory=Exploration)
    completion: Completion = field(default_factory=Completion)
    credit: Credit = field(default_factory=Credit)
    objective: Objective = field(default_factory=Objective)
    adapter: Adapter = field(default_factory=Adapter)
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallel: Parallel = field(default_factory=Parallel)
    evaluation: Evaluation = field(default_factory=Evaluation)
    run: Run = field(default_factory=Run)


def batch_size(config: Config) -> int:
    """B = P x G, trajectories per training step."""
    return config.prompts.per_step * config.prompts.group_size


def reward_name(entry: str) -> str:
    """The name in an entry of `rewards` or `evaluation.witnesses`: without weight and server."""
    return entry.partition("=")[0].partition("@http")[0]


def reward_sources(config: Config) -> dict[str, str]:
    """Rewards and witnesses: name -> what `rewards.load` takes, with the server if there is one."""
    return {reward_name(entry): entry.partition("=")[0] for entry in (*config.evaluation.witnesses, *config.rewards)}


def reward_weights(config: Config) -> dict[str, float]:
    """The rewards by name with their weights.

    Raises:
      ValueError: none at all, one named twice, or a weight that is not a finite number.
    """
    weights = {}
    for entry in config.rewards:
        name, weight = reward_name(entry), entry.partition("=")[2]
        try:
            weights[name] = float(weight) if weight else 1.0
        except ValueError:
            weights[name] = math.nan
        if not math.isfinite(weights[name]):
            raise ValueError(f"rewards: {entry!r} has no finite weight; write NAME or NAME=WEIGHT, such as ocr=0.8")
    if not weights or len(weights) < len(config.rewards):
        raise ValueError(f"rewards = {config.rewards}: name at least one reward, and each once")
    return weights


INF = math.inf
RANGES = {
    "model.max_sequence_length": (1, 512),
    "model.scan_unroll": (1, 1024),
    "prompts.per_step": (1, 10**6),
    "prompts.group_size": (2, 10**6),
    "reward_server.attempts": (1, 1000),
    "reward_server.batch": (1, 10**6),
    "sampling.num_steps": (1, 1000),
    "sampling.guidance_scale": (1, 1000),
    "sampling.chunk": (1, 10**9),
    "sampling.decode_chunk": (1, 10**9),
    "exploration.noise_level": (0, 100),
    "exploration.window_size": (1, 1000),
    "exploration.window_start": (0, 1000),
    "exploration.window_every": (1, 10**9),
    "completion.tile": (1, 1000),
    "credit.eps": (0, INF),
    "credit.gamma": (0, 1),
    "objective.beta": (0, INF),
    "adapter.rank": (0, 10**5),
    "optimizer.b1": (0, 0.999999),
    "optimizer.b2": (0, 0.99999999),
    "optimizer.eps": (0, INF),
    "optimizer.weight_decay": (0, INF),
    "optimizer.updates": (1, 10**6),
    "optimizer.micro_batch": (1, 10**9),
    "optimizer.ema_decay": (0, 0.99999999),
    "parallel.devices": (1, 10**6),
    "parallel.fsdp": (1, 10**6),
    "parallel.tensor": (1, 10**6),
    "evaluation.every": (0, 10**9),
    "evaluation.num_steps": (1, 1000),
    "evaluation.images_per_prompt": (1, 10**6),
    "evaluation.prompts": (0, 10**9),
    "evaluation.final_prompts": (0, 10**9),
    "evaluation.final_images_per_prompt": (1, 10**6),
    "evaluation.collapse_reward": (0, INF),
    "evaluation.collapse_contrast": (0, INF),
    "run.steps": (1, 10**9),
    "run.seed": (0, 2**32 - 1),
    "run.save_every": (1, 10**9),
    "run.keep": (1, 10**6),
    "run.max_nonfinite": (0, 10**9),
    "run.report_every": (0, 10**9),
    "run.profile": (0, 1000),
}
"""Lowest and highest value of the fields that are numbers, both allowed."""

POSITIVE = (
    "sampling.shift", "credit.clip", "reward_server.timeout", "objective.clip_range", "adapter.alpha", "optimizer.learning_rate",
    "optimizer.max_grad_norm",
)  # fmt: skip
"""Fields that must be above 0."""


def check_fields(config: Config) -> None:
    """Refuses what is wrong with a field by itself, whatever the model.

    Raises:
      ValueError: naming the field, its value and the valid range.
    """
    for section in dataclasses.fields(config):
        for name in (f.name for f in dataclasses.fields(getattr(config, section.name))) if section.name != "rewards" else ():
            value, name = getattr(getattr(config, section.name), name), f"{section.name}.{name}"
            low, high = RANGES.get(name, (0.0 if name in POSITIVE else -INF, INF))
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not (low <= value <= high and math.isfinite(value)) or (name in POSITIVE and value == 0):
                said = "a finite number above 0" if name in POSITIVE else f"at least {low}" if high == INF else f"from {low} to {high}"
                hint = "; advantages compare the members of a group" if name == "prompts.group_size" else ""
                raise ValueError(f"{name} = {value}: must be {said}{hint}")
    reward_weights(config)
    if "" in reward_sources(config):
        raise ValueError(f"rewards = {config.rewards}: an entry has no name; write NAME or NAME=WEIGHT")
    side = config.model.resolution
    if side is not None and min(side) < 1:
        raise ValueError(f"model.resolution = {side}: height and width must be at least 1 pixel")
    for name, value in (("model.path", config.model.path), ("prompts.train", config.prompts.train),
                        ("prompts.evaluation", config.prompts.evaluation)):  # fmt: skip
        if not value.strip() or "\0" in value:
            raise ValueError(f"{name} = {value!r}: must be a name or path, not empty and without NUL")
    kind, _, count = config.completion.steps.partition(" ")
    number = count if kind == "respaced" else kind.removeprefix("k/")
    if config.completion.steps != "all" and not (number.isascii() and number.isdigit() and 1 <= int(number[:9]) <= 1000):
        raise ValueError(f"completion.steps = {config.completion.steps!r:.60}: choose 'all', 'respaced N', N or 'k/N', N from 1 to 1000")
    steps, e = config.sampling.num_steps, config.exploration
    size = e.window_size if e.window in ("fixed", "random", "sliding") else 1
    first = e.window_start if e.window in ("fixed", "random") else 0
    if first + size > steps:
        raise ValueError(
            f"exploration.window_start = {first} and window_size = {size}: the window does not fit into sampling.num_steps = {steps}"
        )
    if steps == 1 and e.window == "all_but_last":
        raise ValueError("sampling.num_steps = 1 and exploration.window = 'all_but_last' leave no step to train; set the window to 'all'")
    if e.sampler in ("cps", "ddim_sde") and e.noise_level > 1:
        raise ValueError(f"exploration.noise_level = {e.noise_level}: with exploration.sampler = {e.sampler!r} it must be from 0 to 1")
    if e.sampler not in SAMPLERS:
        raise ValueError(f"exploration.sampler = {e.sampler!r}: choose one of {', '.join(SAMPLERS)}")


def check(config: Config, trained_steps: int, devices: int = 1) -> None:
    """Refuses arithmetic that does not work out.

    Args:
      config: the run.
      trained_steps: number of trained denoising steps.
      devices: over which the trajectories are sharded, those that compute one together counted once.

    Raises:
      ValueError: naming the field, its value and valid choices.
    """
    check_fields(config)
    batch = batch_size(config)
    if batch % devices:
        p, g = config.prompts.per_step, config.prompts.group_size
        valid = [n for n in range(1, 129) if n * g % devices == 0][:6]
        raise ValueError(
            f"prompts.per_step = {p} with groups of {g} gives {batch} trajectories, which {devices} devices do not share evenly; "
            f"choose per_step from {valid}, ..., or another number for parallel.devices"
        )
    chunk = config.sampling.chunk
    if chunk is not None and (batch % chunk or chunk % devices):
        valid = [n for n in range(devices, batch + 1, devices) if batch % n == 0]
        shared = f" into parts that {devices} devices share evenly" if devices > 1 else ""
        raise ValueError(f"sampling.chunk = {chunk} does not divide the {batch} trajectories of a step{shared}; choose one of {valid}")
    by_trajectory = config.optimizer.minibatch == "trajectories"
    units = batch if by_trajectory else batch * trained_steps
    if units % config.optimizer.updates:
        what = "trajectories" if by_trajectory else f"(step, trajectory) pairs of {trained_steps} trained steps"
        valid = [u for u in range(1, 65) if units % u == 0]
        raise ValueError(f"optimizer.updates = {config.optimizer.updates} does not divide the {units} {what}; choose one of {valid}")
    pairs = batch * trained_steps
    if pairs // config.optimizer.updates % devices:
        valid = [u for u in range(1, 65) if units % u == 0 and pairs // u % devices == 0]
        raise ValueError(
            f"optimizer.updates = {config.optimizer.updates} leaves {pairs // config.optimizer.updates} pairs an update, which {devices} "
            f"devices do not share evenly; choose one of {valid}"
        )


def micro_batch(config: Config, trained_steps: int, devices: int = 1) -> int:
    """The largest number of pairs, at most `optimizer.micro_batch`, that divides an update's share and that the devices share evenly; one
    pair a device where they are more."""
    share = batch_size(config) * trained_steps // config.optimizer.updates
    most = max(min(config.optimizer.micro_batch, share), devices)
    return max(m for m in range(devices, most + 1, devices) if share % m == 0)


def to_json(config: Config) -> dict:
    """Plain values, as written beside checkpoints."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(v) for key, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, Path) else value

    return plain(dataclasses.asdict(config))

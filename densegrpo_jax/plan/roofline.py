"""How long each phase takes at least: the slowest of its arithmetic, its memory traffic and its collectives, each at the chip's peak.

The frozen weights may be sharded over `fsdp` chips, which gather them layer by layer in every network call. Trajectories are spread over
all chips, or over groups of `tensor` chips that compute each together and sum what attention and the feed-forward layers give; adapters
are replicated, and their gradients summed over all chips in every update. The pairs of a micro-batch are wherever the shuffle found
them, so that their latents and noise are brought together by a sum over all chips.
"""

import math
from typing import NamedTuple

from densegrpo_jax.plan.chips import CHIPS, Topology
from densegrpo_jax.plan.flops import Pass
from densegrpo_jax.plan.recipe import Recipe, text_lengths
from densegrpo_jax.train.phases import recomputes

SPLASH_BLOCK = 512  # tokens; sequences are padded to whole blocks, see models/attention.py
LOGIT_BYTES = 12  # unfused attention: logits written and read in float32, weights in bfloat16
LOGIT_BYTES_BACKWARD = 20  # and their derivatives
ENCODED_AT_ONCE = 8  # prompts, at least
SCORED_AT_ONCE = 32  # images of a process; see rewards.clip
FLOAT32 = 4


class Settings(NamedTuple):
    """What may be chosen without changing what is learnt.

    Attributes:
      fsdp: chips that share the frozen weights.
      chunk: trajectories sampled at a time, over all chips.
      micro_batch: pairs in one pass of training, over all chips.
      decode_chunk: images decoded at a time, over all chips.
      remat: recompute activations per block in the backward pass.
      attention: "xla", "splash" or "cudnn".
      encoders: where the text encoders wait until they are needed, "device" or "host".
      tensor: chips that compute each trajectory together.
    """

    fsdp: int
    chunk: int
    micro_batch: int
    decode_chunk: int
    remat: bool
    attention: str
    encoders: str = "device"
    tensor: int = 1

    @property
    def fused(self) -> bool:
        return self.attention != "xla"


class Phase(NamedTuple):
    """A phase of a training step.

    Attributes:
      name: of it.
      evaluations: network evaluations per trajectory, guided ones counted once.
      flops: that the chips carry out, all together; `useful` leaves out what is computed again, by another chip too, and padding.
      moved: bytes to and from the memory of one chip.
      received: bytes that one chip receives from others.
      seconds: the bound.
      limit: which of "arithmetic", "memory", "links" sets it.
      mfu: useful FLOPs per chip and second over the chip's bfloat16 peak, at that bound.
    """

    name: str
    evaluations: float
    flops: float
    useful: float
    moved: float
    received: float
    seconds: float
    limit: str
    mfu: float


def encoded_at_once(copies: int) -> int:
    """Prompts in one call of the text encoders, of which there are so many copies; see `pipeline.encode_prompts`."""
    return -(-ENCODED_AT_ONCE // copies) * copies


def useful(recipe: Recipe) -> float:
    """FLOPs of a training step that are of use, of all chips together and without evaluation; whatever the chips and settings."""
    settings, anywhere = Settings(1, recipe.trajectories, 1, recipe.images, False, "xla"), Topology(CHIPS["h100"], 1, "1")
    return sum(phase.useful for phase in phases(recipe, settings, anywhere) if phase.name != "evaluation")


def phases(recipe: Recipe, settings: Settings, topology: Topology) -> list[Phase]:
    """The phases of a training step; "evaluation" is the run's, divided by its training steps."""
    r, s, chip, n = recipe, settings, topology.chip, topology.count
    config, network, B, T = r.config, r.network, r.trajectories, r.config.sampling.num_steps
    width = r.bytes_per_number
    peak = chip.peak if width == 2 else chip.peak_float32
    weights, shared = network.weights * width / s.tensor, (s.fsdp - 1) / s.fsdp
    summed = 2 * (s.tensor - 1) / n  # arrays that a chip receives for each of all rows where a group of chips sums one

    tokens = r.image_tokens + r.text_tokens
    padded = (-(-tokens // SPLASH_BLOCK) * SPLASH_BLOCK / tokens) ** 2 if s.attention == "splash" else 1.0
    per_pass = network.flops + (padded - 1.0) * network.attention

    def phase(name: str, evaluations: float, flops: float, useful: float, moved: float, received=0.0, speed=peak) -> Phase:
        times = {"arithmetic": flops / n / speed, "memory": moved / chip.bandwidth, "links": received / topology.link}
        limit = max(times, key=times.get)
        seconds = times[limit]
        mfu = useful / n / chip.peak / seconds if seconds else 0.0
        return Phase(name, evaluations, flops, useful, moved, received, seconds, limit, mfu)

    def touched(p: Pass, rows: float, number: int, backward: bool = False) -> float:
        """Bytes of activations on one chip; backward: twice more, and again what is recomputed."""
        logits = 0 if s.fused and p is network else LOGIT_BYTES * p.logits
        forward = p.elements * number + logits
        extra = (2 * p.elements * number + (LOGIT_BYTES_BACKWARD / LOGIT_BYTES) * logits + s.remat * forward) if backward else 0.0
        return rows / n * (forward + extra)

    def read(calls: float, times: float = 1.0) -> float:
        """Bytes of weights that one chip reads, and writes where it has gathered them."""
        return calls * times * weights * (1.0 + shared)

    def reduced(passes: float) -> float:
        """Bytes that one chip receives where a group sums what attention and feed-forward layers give, forward or backward."""
        return passes * summed * 2 * network.depth * tokens * network.widest * width

    def forward(name: str, evaluations: float, useful: float, calls: float, rows: float, brought: float = 0.0) -> Phase:
        moved = touched(network, rows * evaluations * r.branches, width) + read(calls)
        return phase(
            name, evaluations, rows * evaluations * r.branches * per_pass, rows * useful * r.branches * network.flops, moved,
            calls * weights * shared + reduced(rows * evaluations * r.branches) + brought,
        )  # fmt: skip

    # --- encode: copies of the encoders share the prompts; chips that share a copy leave it where it is, compute each product in shares and
    # sum, as with so few tokens that is less to receive
    texts, together = config.prompts.per_step, s.fsdp * s.tensor
    encode, copies = sum(p.flops for p in r.encoders.values()), n // together
    calls = -(-texts // encoded_at_once(copies))
    rows = calls * encoded_at_once(copies)  # the last call is filled up
    moved = sum(touched(p, rows, width) + calls * p.weights * width / together for p in r.encoders.values())
    lengths = text_lengths(config, r.configs)
    sums = sum(2 * p.depth * lengths[name] * p.widest * width for name, p in r.encoders.items())
    spread = rows * (copies - 1) / copies * r.text_tokens * r.configs.transformer.joint_attention_dim * width  # what others have encoded
    received = spread + rows / copies * 2 * (together - 1) / together * sums
    result = [phase("encode", 0.0, rows * encode, texts * encode, moved, received)]
    # --- sample, complete
    chunks, more = B / s.chunk, r.price.evaluations - T
    result.append(forward("rollout", T, T, chunks * T, B))
    if r.tables.scheme:
        result.append(forward("completion", more, more - r.price.padding, chunks * (r.price.calls - T), B))

    # --- decode, score
    images, side = r.images, r.decoder
    decode_calls = images / s.decode_chunk
    moved = touched(side, images, FLOAT32) + decode_calls * side.weights * FLOAT32
    result.append(phase("decode", 0.0, images * side.flops * s.tensor, images * side.flops, moved, speed=chip.peak_float32))
    if r.vision:
        work = images * r.vision.flops
        moved = touched(r.vision, images, FLOAT32) + images / topology.hosts / SCORED_AT_ONCE * r.vision.weights * FLOAT32
        result.append(phase("reward", 0.0, work, work, moved, speed=chip.peak_float32))

    # --- update
    pairs, steps = B * r.trained_steps, r.trained_steps
    micro = pairs / s.micro_batch
    numbers, others = math.prod(r.latent), (n // s.tensor - 1) / (n // s.tensor)  # of a latent; of those who hold trajectories, the others
    if recomputes(config):
        back = pairs * numbers * others * 2 * FLOAT32  # velocity and noise, to where their trajectory is
        fetched = pairs * numbers * others * 2 * 4 * FLOAT32  # two latents, velocity and noise; a sum goes around twice
        result.append(forward("recompute", steps, 0.0, micro, B, fetched + back))
    reference = config.objective.beta > 0.0
    full = config.adapter.rank == 0
    once = network.linear * (3 if full else 2) + network.attention * 3 + network.adapter * 3
    base = network.linear + network.attention if reference else 0.0
    again = s.remat * network.flops + (0.5 * s.fused * padded + (3 + reference + s.remat) * (padded - 1.0)) * network.attention
    trained = network.weights if full else r.adapter
    moved = touched(network, pairs * r.branches, width, backward=True) + read(micro, 2 + s.remat + reference)
    if reference:
        moved += touched(network, pairs * r.branches, width)
    moved += micro * 2 * FLOAT32 * trained + config.optimizer.updates * 10 * FLOAT32 * trained
    received = micro * (2 + reference) * weights * shared + config.optimizer.updates * 2 * FLOAT32 * trained * (n - 1) / n
    received += pairs * numbers * others * 2 * (width + 2 * FLOAT32)  # a latent as the network reads it, velocity and noise
    passes = pairs * r.branches
    received += reduced((2 + s.remat + reference) * passes)
    result.append(phase("update", steps * (1 + reference), passes * (once + base + again), passes * (once + base), moved, received))

    # --- evaluation, spread over the training steps
    if r.evaluated_images:
        each, count = config.evaluation.num_steps, r.evaluated_images
        part = forward("evaluation", 0.0, 0.0, count / s.chunk * each, 0.0)
        work = count * each * r.branches
        moved = part.moved + touched(network, count * each * r.branches, width)
        received = part.received + reduced(work)
        result.append(phase("evaluation", 0.0, work * per_pass, work * network.flops, moved, received))
    return result

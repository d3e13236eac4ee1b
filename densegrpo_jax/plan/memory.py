"""How much memory a chip needs in each phase, from the shapes alone.

What stays (weights, adapter and optimiser, trajectories) is counted exactly. What a program needs while it runs is estimated: so many
arrays [tokens, D] at the widest point of a block. Their numbers were fitted to programs compiled for TPU (docs/performance.md).
"""

from typing import NamedTuple

from densegrpo_jax.config import Config, batch_size
from densegrpo_jax.plan.chips import GIB, Topology
from densegrpo_jax.plan.recipe import Recipe
from densegrpo_jax.plan.roofline import FLOAT32, SCORED_AT_ONCE, Settings, encoded_at_once
from densegrpo_jax.train.phases import recomputes

TPU_LANES = 128  # a TPU's loops hold arrays with the last side padded to this; latents have few channels
FORWARD = 36  # arrays [tokens, D] alive at the peak of a block's forward pass
BACKWARD = 80  # and of its backward pass, with its recomputed activations
LOGITS = 8  # bytes per attention logit, unfused
LOGITS_BACKWARD = 12
SAVED = 3  # without remat: of every activation that goes in or out of a layer, kept for the backward pass
SAVED_LOGITS = 6  # bytes per logit, unfused
RECOMPUTED = 9  # arrays like all velocities: what is replaced, and the whole trajectory once more
EVALUATED = 3  # arrays like all conditioning: it is given, and cut into chunks with its unconditional branch
DECODED = 5  # full-size feature maps alive in the decoder
SAFETY = 0.95  # of the memory; the rest is for programs and fragmentation


class Memory(NamedTuple):
    """Bytes on the fullest chip.

    Attributes:
      resident: what is there all the time, by what it is.
      during: what each phase takes besides.
      given: of that, what the phase's program is given as arguments.
    """

    resident: dict[str, float]
    during: dict[str, float]
    given: dict[str, float]

    @property
    def peak(self) -> float:
        return sum(self.resident.values()) + max(self.during.values())

    @property
    def fullest(self) -> str:
        """The phase with the peak."""
        return max(self.during, key=self.during.get)


def memory(recipe: Recipe, settings: Settings, where: Topology) -> Memory:
    """The memory of each chip; see the module."""
    r, s, config, shares = recipe, settings, recipe.config, where.count // settings.tensor
    width, network, T = r.bytes_per_number, recipe.network, recipe.config.sampling.num_steps
    B, latent = batch_size(config) / shares, FLOAT32 * r.latent[0] * r.latent[1] * r.latent[2]
    tokens, branches, S = r.image_tokens + r.text_tokens, r.branches, r.text_tokens
    together = s.fsdp * s.tensor
    encoders = sum(p.weights for p in r.encoders.values()) * width / together
    waiting = s.encoders == "host"
    text = S * r.configs.transformer.joint_attention_dim * width  # of one prompt
    numbers = B * latent * (3 * T + 1 + len(r.tables.scheme) + 1)
    trajectory = _padding(B, r.latent, where) * numbers
    resident = {
        "transformer": network.weights * width / together,
        "text encoders": 0.0 if waiting else encoders,
        "autoencoder": r.autoencoder * FLOAT32,
        "scorers": r.scorers * FLOAT32,
        "trained weights, optimiser, average": 4 * FLOAT32 * r.adapter,
        "trajectories": trajectory,
        "prompts": (config.prompts.per_step + 1) * text,
    }

    gathered = 2 * network.block * width / s.tensor if together > 1 else 0.0
    chunk, micro, decoded = s.chunk / shares, s.micro_batch / shares, s.decode_chunk / shares
    height, breadth = (side * r.configs.vae.downsampling for side in r.latent[:2])

    def network_rows(rows: float, copies: int, logits: int) -> float:
        return rows * branches * (copies * tokens * network.widest * width + (0 if s.fused else logits * network.largest_logits / s.tensor))

    tile = config.completion.tile or (len(r.tables.scheme) + 1)
    sampled = chunk if r.elsewhere else B  # trajectories in one call of the program: rewards on the host are scored chunk by chunk
    padded = max(TPU_LANES / r.latent[2], 1.0) if where.chip.kind == "tpu" else 1.0
    walk = padded * latent * chunk * (2 * (len(r.tables.scheme) + 2) + 3 * T)
    outputs = padded * numbers * sampled / B + (trajectory if r.elsewhere else 0.0)  # pieces are joined at the end
    conditioning = (sampled + 2 * chunk * tile * branches) * text
    count = B * (len(r.tables.scheme) + 1)
    images = count * 3 * height * breadth  # of a step, as bytes
    decoded_latents = count * latent * _padding(count, r.latent, where)  # by trajectory, a copy
    given = {"encode": waiting * encoders, "decode": decoded_latents}
    copies = where.count // together
    prompts = encoded_at_once(copies) // copies  # of a call on each chip
    during = {
        "encode": max(prompts * FORWARD * config.model.max_sequence_length * p.widest * width for p in r.encoders.values())
        + gathered
        + given["encode"],
        "rollout": network_rows(chunk * tile, FORWARD, LOGITS) + walk + outputs + conditioning + gathered,
        "decode": decoded * _decoder(r, height, breadth) + images + given["decode"],
    }
    if r.vision:
        patches = FORWARD * 257 * r.vision.widest * FLOAT32 + LOGITS * r.vision.largest_logits
        pixels = 4 * 3 * height * breadth * FLOAT32
        given["reward"] = decoded_latents + 2 * images  # as decoded, and this process's part of them
        during["reward"] = SCORED_AT_ONCE / where.per_host * (patches + pixels) + images + given["reward"]  # and cut into chunks
    trained = FLOAT32 * r.adapter
    rows = micro * branches
    if recomputes(config):
        during["recompute"] = network_rows(micro, FORWARD, LOGITS) + RECOMPUTED * B * T * latent + rows * text + gathered
    saved = network.depth * tokens * network.widest * width
    if not s.remat:
        saved = SAVED * network.elements * width + (0 if s.fused else SAVED_LOGITS * network.logits)
    during["update"] = rows * (saved + text) + network_rows(micro, BACKWARD, LOGITS_BACKWARD) + 3 * trained + gathered
    if number := evaluated(config, s.chunk):
        given["evaluation"] = number / shares * text
        during["evaluation"] = network_rows(chunk, FORWARD, LOGITS) + EVALUATED * given["evaluation"] + gathered
    return Memory(resident, during, given)


def evaluated(config: Config, chunk: int) -> int:
    """Images in one call of the evaluation's sampler, of the larger of the two evaluations, filled up to whole chunks; 0 for none."""
    e = config.evaluation
    counts = [e.prompts * e.images_per_prompt] * (e.every > 0) + [e.final_prompts * e.final_images_per_prompt] * (e.final_prompts > 0)
    return -(-max(*counts, 1) // chunk) * chunk if counts else 0  # prompts = 0 takes all of a list that a plan does not read: one chunk


def _decoder(recipe: Recipe, height: int, breadth: int) -> float:
    """Bytes for decoding one image: feature maps of the second widest level at full size, and the attention in the middle."""
    widths, positions = recipe.configs.vae.block_out_channels, recipe.latent[0] * recipe.latent[1]
    return DECODED * FLOAT32 * height * breadth * widths[min(1, len(widths) - 1)] + LOGITS * positions**2


def _padding(rows: float, latent: tuple[int, int, int], where: Topology) -> float:
    """How many times their size so many latents take on a chip: a TPU pads one side to whole lanes, that which costs least."""
    sides = (rows, *latent) if where.chip.kind == "tpu" else ()
    return min((-(-side // TPU_LANES) * TPU_LANES / side for side in sides), default=1.0)


def gib(number: float) -> str:
    return f"{number / GIB:.2f}"

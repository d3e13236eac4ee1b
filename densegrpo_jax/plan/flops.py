"""FLOPs and memory traffic of one forward pass of each network, for one sample, counted from the shapes of its parameters.

A linear layer costs 2 FLOPs per weight and token, so what has to be known is which layer sees how many tokens: a list of (pattern, tokens)
per network, in which every layer must be found. Attention costs 4 Q K D. XLA's own count sees the body of a scan once, whatever its
length; tests compare with it where the layers are unrolled.

Legend: N image tokens, S text tokens, D width, H heads, Q queries, K keys.
"""

import re
from typing import NamedTuple

from flax import traverse_util

from densegrpo_jax.families import Configs
from densegrpo_jax.models.clip import CLIPTextConfig, CLIPVisionConfig
from densegrpo_jax.models.flux import FluxConfig
from densegrpo_jax.models.lora import target_paths
from densegrpo_jax.models.sd3 import SD3Config
from densegrpo_jax.models.t5 import T5Config

ONCE = 1  # layers that see one vector per sample: modulation, embeddings of time and pooled text, projections of pooled features
UPSAMPLED = 4 / 9  # products left of a 3x3 convolution after nearest upsampling; see models/vae.py


class Attention(NamedTuple):
    """Equal attentions: how many, queries, keys, width over all heads, heads."""

    count: int
    queries: int
    keys: int
    width: int
    heads: int


class Pass(NamedTuple):
    """One forward pass for one sample.

    Attributes:
      linear: FLOPs of products with weights.
      attention: FLOPs of products between activations.
      adapter: FLOPs of low-rank adapters.
      elements: activations that go in and out of layers, each written or read once.
      logits: attention logits of all layers; they touch memory unless attention is fused.
      weights: parameters.
      block: parameters of the largest layer, what one iteration of the layer scan needs at once.
      depth: layers.
      widest: D, width of the residual stream.
      largest_logits: of one attention.
    """

    linear: float
    attention: float
    adapter: float
    elements: float
    logits: float
    weights: int
    block: int
    depth: int
    widest: int
    largest_logits: int

    @property
    def flops(self) -> float:
        return self.linear + self.attention + self.adapter


def count(params: dict, tokens: list[tuple[str, float]], attentions: list[Attention], width: int, targets=(), rank: int = 0) -> Pass:
    """Counts a network.

    Args:
      params: its parameters or their shapes; layers are leaves "kernel" (linear, stacked linear, or convolution) and patch embeddings.
      tokens: regular expressions of layers' paths, the first that is found anywhere in a path decides, with the tokens they see.
      attentions: its attentions.
      width: D.
      targets, rank: of adapters.

    Raises:
      ValueError: a layer that no pattern fits.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    adapted = set(target_paths(params, tuple(targets))) if rank else set()
    linear = low_rank = elements = 0
    depth: dict[str, int] = {}  # of each stack of scanned layers
    block: dict[str, int] = {}  # parameters of one of its layers
    for path, leaf in flat.items():
        if not path.endswith(("/kernel", "patch_embedding")):
            continue
        seen = next((n for pattern, n in tokens if re.search(pattern, path)), None)
        if seen is None:
            raise ValueError(f"no rule says how many tokens {path} sees")
        layers, ends = (leaf.shape[0] if leaf.ndim == 3 else 1), sum(leaf.shape[-2:])
        linear += 2 * seen * leaf.size
        elements += seen * layers * ends
        if path.removesuffix("/kernel") in adapted:
            low_rank += 2 * seen * layers * rank * ends
        if leaf.ndim == 3:
            stack = path.split("/")[0]
            depth[stack], block[stack] = layers, block.get(stack, 0) + leaf.size // layers
    return Pass(
        linear=linear,
        attention=sum(4 * a.count * a.queries * a.keys * a.width for a in attentions),
        adapter=low_rank,
        elements=elements + sum(2 * a.count * (a.queries + a.keys) * a.width for a in attentions),
        logits=sum(a.count * a.heads * a.queries * a.keys for a in attentions),
        weights=sum(leaf.size for leaf in flat.values()),
        block=max(block.values(), default=0),
        depth=sum(depth.values()),
        widest=width,
        largest_logits=max((a.heads * a.queries * a.keys for a in attentions), default=0),
    )


# ---------------------------------------------------------------------------------------------------------------------
# The networks


def transformer(config: SD3Config | FluxConfig, params: dict, image: int, text: int, targets=(), rank: int = 0) -> Pass:
    """The velocity network on `image` and `text` tokens; guidance with an unconditional branch takes two passes."""
    rules = _sd3(config, image, text) if isinstance(config, SD3Config) else _flux(config, image, text)
    return count(params, *rules, width=config.width, targets=targets, rank=rank)


EMBEDDERS = [(r"norm|(timestep|guidance)_embedder|^text_embedder", ONCE)]


def _sd3(config: SD3Config, N: int, S: int) -> tuple[list, list[Attention]]:
    last, dual = config.num_layers - 1, len(config.dual_attention_layers)
    shape = config.width, config.num_attention_heads
    tokens = [
        (rf"^blocks_{last}/attn/add_q_proj", 0),  # loaded, but nobody asks with it
        *EMBEDDERS,
        (r"context|/add_|to_add_out", S),
        (r"", N),
    ]
    attentions = [Attention(last, N + S, N + S, *shape), Attention(1, N, N + S, *shape)]
    return tokens, attentions + [Attention(dual, N, N, *shape)] * (dual > 0)


def _flux(config: FluxConfig, N: int, S: int) -> tuple[list, list[Attention]]:
    tokens = [*EMBEDDERS, (r"^single_blocks", N + S), (r"context|/add_|to_add_out", S), (r"", N)]
    layers = config.num_layers + config.num_single_layers
    return tokens, [Attention(layers, N + S, N + S, config.width, config.num_attention_heads)]


def text_encoder(config: CLIPTextConfig | T5Config, params: dict, tokens: int) -> Pass:
    """A text encoder on `tokens` tokens."""
    if isinstance(config, T5Config):
        shape = config.num_heads * config.d_kv, config.num_heads
        return count(params, [(r"^layers", tokens)], [Attention(config.num_layers, tokens, tokens, *shape)], config.d_model)
    shape = config.hidden_size, config.num_attention_heads
    rules = [(r"text_projection", ONCE), (r"^layers", tokens)]
    return count(params, rules, [Attention(config.num_hidden_layers, tokens, tokens, *shape)], config.hidden_size)


def vision_tower(config: CLIPVisionConfig, params: dict) -> Pass:
    """CLIP's vision tower on one image."""
    patches = (config.image_size // config.patch_size) ** 2
    shape = config.hidden_size, config.num_attention_heads
    rules = [(r"visual_projection", ONCE), (r"patch_embedding", patches), (r"^layers", patches + 1)]
    attention = Attention(config.num_hidden_layers, patches + 1, patches + 1, *shape)
    return count(params, rules, [attention], config.hidden_size)


def decoder(configs: Configs, params: dict, latent_shape: tuple[int, int, int]) -> Pass:
    """The autoencoder's decoder on one latent; its "tokens" are positions."""
    config, positions = configs.vae, latent_shape[0] * latent_shape[1]
    top = len(config.block_out_channels) - 1
    rules = [(r"^(conv_in|post_quant_conv|mid_)", positions), (r"^conv_out", positions * 4**top)]
    for level in range(top + 1):
        rules.append((rf"^up_{level}_upsample", UPSAMPLED * positions * 4 ** (level + 1)))
        rules.append((rf"^up_{level}_", positions * 4**level))
    width = config.block_out_channels[-1]
    attentions = [Attention(1, positions, positions, width, 1)] if config.mid_block_add_attention else []
    return count(params, rules, attentions, width)

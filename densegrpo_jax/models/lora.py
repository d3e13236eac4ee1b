"""Low-rank adapters as a second parameter collection: make, check, count and merge them.

An adapter tree has the same paths as the parameters it adapts: where `params` has ".../to_q/kernel" [in, out] or, in scanned
layers, [L, in, out], `lora` has ".../to_q/a" [(L,) in, R] and ".../to_q/b" [(L,) R, out]; the layer adds
lora_scale (x a) b, lora_scale = alpha / rank (Hu et al. 2021, arXiv 2106.09685, section 4.1).
"""

import re
import zlib

import jax
import jax.numpy as jnp
from flax import traverse_util

ATTENTION_TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)  # the eight projections that Flow-GRPO adapts in every block of SD3 and SD3.5, and every double block of FLUX
FEED_FORWARD_TARGETS = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")  # and these besides in FLUX


def _endings(path: str) -> list[str]:
    parts = path.split("/")
    return ["_".join(parts[i:]) for i in range(len(parts))]


def target_paths(params: dict, targets: tuple[str, ...]) -> list[str]:
    """The linear layers that a list of targets names, as sorted slash-joined paths.

    Args:
      params: parameter tree of a network (arrays or shapes).
      targets: ends of module names, in the spelling of torch ("attn.to_out.0") or of our paths ("attn/to_out_0"); a name
        matches whole components, so "attn.to_q" is not "attn2.to_q", while "to_q" is both.

    Raises:
      ValueError: a target that matches no linear layer.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    layers = sorted(path.removesuffix("/kernel") for path, leaf in flat.items() if path.endswith("/kernel") and len(leaf.shape) in (2, 3))
    chosen = set()
    for target in targets:
        wanted = re.sub(r"[./]", "_", target)
        matches = [path for path in layers if wanted in _endings(path)]
        if not matches:
            raise ValueError(f"LoRA target {target!r} matches no linear layer; the layers are: {', '.join(layers)}")
        chosen.update(matches)
    return sorted(chosen)


def init(key: jax.Array, params: dict, targets: tuple[str, ...] = ATTENTION_TARGETS, rank: int = 32) -> dict:
    """A fresh adapter that changes nothing: a ~ N(0, 1 / rank^2), b = 0, in float32.

    Args:
      key: random key; each layer draws from the key folded with its path, so the values do not depend on the other targets.
      params: parameter tree of the network (arrays or shapes).
      targets: see `target_paths`.
      rank: R.

    Returns:
      The tree for the collection `lora`.

    Raises:
      ValueError: a target that matches nothing, no targets, or a rank below 1.

    Reference: PEFT's `init_lora_weights="gaussian"`.
    """
    if rank < 1 or not targets:
        raise ValueError(f"an adapter needs a rank of at least 1 and at least one target, got rank {rank} and targets {targets}")
    flat = traverse_util.flatten_dict(params, sep="/")
    lora = {}
    for path in target_paths(params, targets):
        *layers, width, features = flat[f"{path}/kernel"].shape
        path_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        lora[f"{path}/a"] = jax.random.normal(path_key, (*layers, width, rank), jnp.float32) / rank
        lora[f"{path}/b"] = jnp.zeros((*layers, rank, features), jnp.float32)
    return traverse_util.unflatten_dict(lora, sep="/")


def check(params: dict, lora: dict) -> None:
    """Raises ValueError unless every adapter has a linear layer to adapt and both its halves fit it."""
    flat, adapters = traverse_util.flatten_dict(params, sep="/"), traverse_util.flatten_dict(lora, sep="/")
    for path in sorted({path.rpartition("/")[0] for path in adapters}):
        kernel, a, b = flat.get(f"{path}/kernel"), adapters.get(f"{path}/a"), adapters.get(f"{path}/b")
        if kernel is None or a is None or b is None:
            raise ValueError(f"adapter at {path!r} has no kernel to adapt or lacks one of its leaves a and b")
        *layers, width, features = kernel.shape
        rank = a.shape[-1]
        if a.shape != (*layers, width, rank) or b.shape != (*layers, rank, features):
            raise ValueError(f"adapter at {path!r}: a {a.shape} and b {b.shape} do not fit the kernel {kernel.shape}")


def count_modules(lora: dict) -> int:
    """Number of adapted linear layers; a stack of L scanned layers counts L."""
    flat = traverse_util.flatten_dict(lora, sep="/")
    return sum(leaf.shape[0] if len(leaf.shape) == 3 else 1 for path, leaf in flat.items() if path.endswith("/a"))


def merge(params: dict, lora: dict, scale: float) -> dict:
    """The parameters with the adapter folded in: kernel + scale a b, in float32, cast back to the kernel's dtype.

    Args:
      params: parameter tree.
      lora: adapter tree.
      scale: alpha / rank.

    Raises:
      ValueError: an adapter that does not fit `params`.
    """
    check(params, lora)
    flat, adapters = traverse_util.flatten_dict(params, sep="/"), traverse_util.flatten_dict(lora, sep="/")
    for path in adapters:
        if path.endswith("/a"):
            name = f"{path.removesuffix('/a')}/kernel"
            a, b = adapters[path], adapters[f"{path.removesuffix('/a')}/b"]
            delta = scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
            flat[name] = (flat[name].astype(jnp.float32) + delta).astype(flat[name].dtype)
    return traverse_util.unflatten_dict(flat, sep="/")

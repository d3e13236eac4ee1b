"""Images a second of the scorers that run on the device, with random weights.

    python benchmarks/rewards.py [--json PATH] [--quick] [--sizes base published] [--images 4] [--side 512] [--dtype bfloat16]

Timed are whole images, from bytes on the device to scores: preparation (antialiased resize to the tower's size), network, head. `forward`
is what a reward costs, `gradient` the derivative of the score in the image. Prompts of the CLIP scorers are encoded once each and do not
count; ImageReward reads its prompt with every image. `numbers` are the weights that an image passes. At the base size one CLIP serves all
but ImageReward; the published sizes are those that the scorers come with. A time is the median of the rounds after one that compiles.
Runs on JAX's default device; on a CPU the seconds are of processor time, of one core, which other programs disturb less.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the package where it is not installed

import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax.models import blip, clip
from densegrpo_jax.rewards import aesthetic, imagereward
from densegrpo_jax.rewards import clip as clip_rewards

SEED = 0


def vit(width: int, layers: int, patch: int, shared: int, heads: int, side: int = 224) -> clip.CLIPVisionConfig:
    return clip.CLIPVisionConfig(width, 4 * width, shared, layers, heads, image_size=side, patch_size=patch)


def blip_of(width: int, layers: int, heads: int, text: blip.BLIPTextConfig, side: int = 224) -> blip.BLIPConfig:
    vision = blip.BLIPVisionConfig(width, 4 * width, layers, heads, image_size=side, layer_norm_eps=1e-6)
    return blip.BLIPConfig(text, vision)


BERT = {"num_attention_heads": 12}
VIT_B, VIT_L, VIT_H = vit(768, 12, 32, 512, 12), vit(1024, 24, 14, 768, 16), vit(1280, 32, 14, 1024, 16)
SIZES = {  # name -> scorer -> network
    "tiny": {
        **dict.fromkeys(("clipscore", "pickscore", "hpsv2", "aesthetic"), ("2 layers of 64", vit(64, 2, 16, 32, 4, 64))),
        "imagereward": ("2 layers of 64", blip_of(64, 2, 4, blip.BLIPTextConfig(99, 48, 64, 96, 2, 4), 64)),
    },
    "base": {
        **dict.fromkeys(("clipscore", "pickscore", "hpsv2", "aesthetic"), ("ViT-B/32", VIT_B)),
        "imagereward": ("BLIP base", blip_of(768, 12, 12, blip.BLIPTextConfig(encoder_hidden_size=768, **BERT))),
    },
    "published": {
        "clipscore": ("ViT-L/14", VIT_L),
        "aesthetic": ("ViT-L/14", VIT_L),
        "pickscore": ("ViT-H/14", VIT_H),
        "hpsv2": ("ViT-H/14", VIT_H),
        "imagereward": ("BLIP large", blip_of(1024, 24, 16, blip.BLIPTextConfig(encoder_hidden_size=1024, **BERT))),
    },
}


class Row(NamedTuple):
    """A line of the table; rates are images a second."""

    size: str
    scorer: str
    network: str
    numbers: int
    forward: float
    gradient: float


def case(scorer: str, network: Any, dtype: Any, count: int) -> tuple[Callable, dict, Any]:
    """(score of parameters, images and texts; shapes of the parameters that it uses; texts)."""
    rng = np.random.default_rng(SEED)
    if scorer == "imagereward":
        spec = imagereward.Spec(network, processing(network.vision.image_size), dtype)
        ids = rng.integers(0, network.text.vocab_size, (count, imagereward.MAX_LENGTH))
        return partial(score, imagereward.score, spec), imagereward.shapes(network), (ids, np.ones_like(ids))
    if scorer == "aesthetic":
        return (
            partial(score, aesthetic.score, aesthetic.Spec(network, processing(network.image_size), dtype)),
            aesthetic.shapes(network),
            (),
        )
    both = clip.CLIPConfig(clip.CLIPTextConfig(projection_dim=network.projection_dim, num_hidden_layers=1), network)
    shapes = {name: part for name, part in clip_rewards.shapes(both).items() if name != "text_model"}
    kind = clip_rewards.KINDS[scorer]
    spec = clip_rewards.Spec(both, processing(network.image_size, framed=scorer == "hpsv2"), kind, dtype)
    return partial(score, clip_rewards.score, spec), shapes, rng.normal(size=(count, network.projection_dim)).astype(np.float32)


def processing(side: int, framed: bool = False) -> clip_rewards.ImageProcessing:
    return clip_rewards.ImageProcessing(side, None if framed else (side, side), framed=framed)


def score(function, spec, params, images, texts):
    return function(params, spec, images, texts)


def rate(function: Callable, arguments: tuple, count: int, rounds: int) -> float:
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(rounds):
        began = clock()
        jax.block_until_ready(function(*arguments))
        seconds.append(clock() - began)
    return count / statistics.median(seconds)


def measure(args: argparse.Namespace, dtype: Any) -> Iterator[Row]:
    images = jnp.asarray(np.random.default_rng(SEED).integers(0, 256, (args.images, args.side, args.side, 3), dtype=np.uint8))
    floating = images.astype(jnp.float32) / 255.0
    for size in args.sizes:
        for scorer, (name, network) in SIZES[size].items():
            function, shapes, texts = case(scorer, network, dtype, args.images)
            params = random_params(shapes, dtype)
            forward = rate(jax.jit(function), (params, images, texts), args.images, args.rounds)
            slope = jax.jit(jax.grad(partial(total, function)))
            gradient = rate(slope, (floating, params, texts), args.images, args.rounds)
            numbers = sum(leaf.size for path, leaf in jax.tree.leaves_with_path(params) if "embeddings" not in str(path))
            yield Row(size, scorer, name, numbers, forward, gradient)


def random_params(shapes: dict, dtype: Any) -> dict:
    rng = np.random.default_rng(SEED)
    return jax.tree.map(lambda x: jnp.asarray(0.02 * rng.standard_normal(x.shape, np.float32), dtype), shapes)


def total(function, images, params, texts):
    return function(params, images, texts).sum()


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


HEAD = "| size | scorer | network | numbers | forward | gradient |\n| --- | --- | --- | --: | --: | --: |"


def line(row: Row) -> str:
    return f"| {row.size} | {row.scorer} | {row.network} | {row.numbers / 1e6:.1f} M | {row.forward:.3g} | {row.gradient:.3g} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="the tiny size only")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["base", "published"])
    parser.add_argument("--images", type=int, default=4, help="scored at once")
    parser.add_argument("--side", type=int, default=512, help="pixels of an image's edge")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    if args.quick:
        args.sizes = ["tiny"]
    cpu = jax.default_backend() == "cpu"
    about = {
        "device": cpu_name() if cpu else jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "dtype": args.dtype,
        "images": args.images,
        "side": args.side,
        "rounds": args.rounds,
        "seed": SEED,
        "python": platform.python_version(),
        **{package: version(package) for package in ("jax", "flax", "numpy")},
    }
    print("\n".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    print(HEAD)
    rows = []
    for row in measure(args, jnp.dtype(args.dtype)):
        rows.append(row)
        print(line(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"about": about, "rows": [row._asdict() for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""LAION's aesthetic predictor: five linear layers on the unit image vector of CLIP ViT-L/14; about 1 to 10, unscaled.

The prompt has no say. The folder is what `tools/convert_scorer.py aesthetic` writes: config.json of a CLIPVisionModelWithProjection,
its weights with the head as "mlp.layers.N", and preprocessor_config.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from densegrpo_jax.models import clip, score_head
from densegrpo_jax.models.source import Source
from densegrpo_jax.models.weights import open_weights, read_params
from densegrpo_jax.rewards.base import Reward
from densegrpo_jax.rewards.clip import ImageProcessing, chunked_reward, open_folder, prepare, replicated

PARTS = {"vision_model": clip.name_table, "mlp": lambda config: score_head.name_table("mlp")}


class Spec(NamedTuple):
    """What the scorer computes, hashable: shape of the tower, preparation of images, dtype of the tower's computation."""

    config: clip.CLIPVisionConfig
    processing: ImageProcessing
    dtype: Any


def load(model: str | Path, dtype: Any = jnp.float32, chunk: int = 32, mesh: jax.sharding.Mesh | None = None) -> Reward:
    """The reward of a folder; see `load_scorer` and `rewards.clip.as_reward`."""
    spec, params = load_scorer(model, dtype, mesh)
    return chunked_reward(chunk, mesh, score, params, spec, lambda prompts: ())


def load_scorer(model: str | Path, dtype: Any = jnp.float32, mesh: jax.sharding.Mesh | None = None) -> tuple[Spec, dict]:
    """Reads the vision tower and the head.

    Args:
      model: folder, or Hugging Face id of one.
      dtype: of the weights and of the tower's computation, float32 or bfloat16; the head is float32 in any case.
      mesh: of devices of this process over which the weights are replicated; None for one device.

    Raises:
      ValueError: an unknown dtype, or a folder that cannot be read; the file or option is named.
    """
    folder, config, processing = open_folder(model, clip.CLIPVisionConfig, lambda config: config.image_size, dtype)
    params = read_params(open_weights(folder), name_table(config), shapes(config), dtype, replicated(mesh), ignored=clip.IGNORED)
    return Spec(config, processing, jnp.dtype(dtype)), params


def name_table(config: clip.CLIPVisionConfig) -> dict[str, Source]:
    """Where each parameter is found in the folder."""
    return {f"{part}/{path}": source for part, table in PARTS.items() for path, source in table(config).items()}


def shapes(config: clip.CLIPVisionConfig) -> dict:
    """The parameters, without values."""
    pixels = jnp.zeros((1, config.image_size, config.image_size, config.num_channels))
    tower = jax.eval_shape(clip.CLIPVision(config).init, jax.random.key(0), pixels)["params"]
    head = jax.eval_shape(score_head.ScoreHead().init, jax.random.key(0), jnp.zeros((1, config.projection_dim)))["params"]
    return {"vision_model": tower, "mlp": head}


def score(params: Mapping, spec: Spec, images: jax.Array, texts: Any = ()) -> jax.Array:
    """Scores of images; differentiable in them where they are floating.

    Args:
      params: the scorer's.
      spec: the scorer's.
      images: [N, H, W, 3], uint8, or floating in [0, 1].
      texts: not used.

    Returns:
      [N] float32.
    """
    vector = clip.CLIPVision(spec.config, spec.dtype).apply({"params": params["vision_model"]}, prepare(spec.processing, images))
    vector = vector.astype(jnp.float32)
    vector = vector / jnp.linalg.norm(vector, axis=-1, keepdims=True)
    return score_head.ScoreHead().apply({"params": params["mlp"]}, vector)

"""ImageReward (Xu et al. 2023, arXiv 2304.05977): BLIP looks at image and prompt, a head scores; about -2 to 2.

score = (head - MEAN) / STD, the constants that its authors subtract and divide by. Network, names and prompts follow their published
program; their weights have not been loaded here. The folder is what `tools/convert_scorer.py imagereward` writes: config.json of a
BlipForImageTextRetrieval, its weights with the head as "mlp.layers.N", BERT's tokenizer, and preprocessor_config.json.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax.models import blip
from densegrpo_jax.models.weights import open_weights, read_params
from densegrpo_jax.rewards.base import Reward
from densegrpo_jax.rewards.clip import ImageProcessing, chunked_reward, open_folder, open_tokenizer, prepare, replicated

MEAN, STD = 0.16717362830052426, 1.0333394966054072
MAX_LENGTH = 35  # tokens of a prompt, first and last included; what is longer is cut
EXTRA_TOKENS = 2  # BLIP's own, at the end of the vocabulary: other tasks begin with them, scores do not


class Spec(NamedTuple):
    """What the scorer computes, hashable: shape of the network, preparation of images, dtype of its computation."""

    config: blip.BLIPConfig
    processing: ImageProcessing
    dtype: Any


class Scorer(NamedTuple):
    """A loaded scorer: what it computes, its parameters, and the tokenizer of its prompts."""

    spec: Spec
    params: dict
    tokenizer: Any


def load(model: str | Path, dtype: Any = jnp.float32, chunk: int = 32, mesh: jax.sharding.Mesh | None = None) -> Reward:
    """The reward of a folder; see `load_scorer` and `rewards.clip.as_reward`."""
    scorer = load_scorer(model, dtype, mesh)
    return chunked_reward(chunk, mesh, score, scorer.params, scorer.spec, lambda prompts: tokenize(scorer, prompts))


def load_scorer(model: str | Path, dtype: Any = jnp.float32, mesh: jax.sharding.Mesh | None = None) -> Scorer:
    """Reads the network with its tokenizer.

    Args:
      model: folder, or Hugging Face id of one.
      dtype: of the weights and the computation, float32 or bfloat16; the head is float32 in any case.
      mesh: of devices of this process over which the weights are replicated; None for one device.

    Raises:
      ValueError: an unknown dtype, or a folder that cannot be read; the file or option is named.
    """
    folder, config, processing = open_folder(model, blip.BLIPConfig, lambda config: config.vision.image_size, dtype)
    tokenizer, known = open_tokenizer(folder, "BertTokenizer"), config.text.vocab_size
    if len(tokenizer) not in (known, known - EXTRA_TOKENS):  # without its files a tokenizer loads all the same, empty
        raise ValueError(f"{folder}: its tokenizer has {len(tokenizer)} tokens; the model embeds {known}, {EXTRA_TOKENS} of its own")
    params = read_params(open_weights(folder), blip.name_table(config), shapes(config), dtype, replicated(mesh))
    return Scorer(Spec(config, processing, jnp.dtype(dtype)), params, tokenizer)


def shapes(config: blip.BLIPConfig) -> dict:
    """The parameters, without values."""
    ids, side = jnp.zeros((1, 1), jnp.int32), config.vision.image_size
    pixels = jnp.zeros((1, side, side, blip.CHANNELS))
    return jax.eval_shape(blip.BLIPScorer(config).init, jax.random.key(0), ids, ids, pixels)["params"]


def score(params: Mapping, spec: Spec, images: jax.Array, texts: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Scores of images with their own texts; differentiable in the images where they are floating.

    Args:
      params: the scorer's.
      spec: the scorer's.
      images: [N, H, W, 3], uint8, or floating in [0, 1].
      texts: of `tokenize`.

    Returns:
      [N] float32.
    """
    ids, mask = texts
    return (blip.BLIPScorer(spec.config, spec.dtype).apply({"params": params}, ids, mask, prepare(spec.processing, images)) - MEAN) / STD


def tokenize(scorer: Scorer, prompts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [N, MAX_LENGTH] of prompts, and 1 for tokens and 0 for padding in the same shape."""
    length = min(MAX_LENGTH, scorer.spec.config.text.max_position_embeddings)
    batch = scorer.tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True)
    return np.asarray(batch.input_ids, np.int32), np.asarray(batch.attention_mask, np.int32)

"""Writes the tiny models as ordinary folders: diffusers' StableDiffusion3Pipeline and transformers' CLIPModel, float16 safetensors."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from densegrpo_jax.models import clip, sd3, t5, vae
from densegrpo_jax.models.weights import write_params
from densegrpo_jax.scenes import scorer, tiny_model, tokenizers, world

MODEL_INDEX = {
    "_class_name": "StableDiffusion3Pipeline",
    "_diffusers_version": "0.42.1",
    "feature_extractor": [None, None],
    "image_encoder": [None, None],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_3": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "tokenizer_3": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "SD3Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
CLIP_IDS = {"bos_token_id": tiny_model.VOCAB_CLIP - 2, "eos_token_id": tiny_model.VOCAB_CLIP - 1, "pad_token_id": tiny_model.VOCAB_CLIP - 1}


def write_json(path: Path, value: dict) -> None:
    """Writes a JSON file; its folder is made if absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_sd3(folder: Path, flow_params: Any, vae_params: Any, vae_config: vae.VAEConfig) -> None:
    """Writes the tiny SD3 in diffusers layout.

    Args:
      folder: where to.
      flow_params: as `tiny_model.init_flow` gives them.
      vae_params: as `vae.init` gives them.
      vae_config: with the scaling and shift of its latents.
    """
    levels = len(vae_config.block_out_channels)
    vae_json = {
        "_class_name": "AutoencoderKL",
        "act_fn": "silu",
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "sample_size": world.SIZE,
        **dataclasses.asdict(vae_config),
    }
    text_json = {"architectures": ["CLIPTextModelWithProjection"], "model_type": "clip_text_model", "dtype": "float16"}
    text_json |= dataclasses.asdict(tiny_model.TEXT) | CLIP_IDS
    t5_json = {
        "architectures": ["T5EncoderModel"],
        "model_type": "t5",
        "dtype": "float16",
        "is_encoder_decoder": False,
        "use_cache": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        **dataclasses.asdict(tiny_model.T5),
    }
    transformer_json = {"_class_name": "SD3Transformer2DModel", **dataclasses.asdict(tiny_model.MMDIT)}
    scheduler_json = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}

    write_json(folder / "model_index.json", MODEL_INDEX)
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler_json)
    parts = {
        "transformer": (transformer_json, flow_params["transformer"], sd3.name_table(tiny_model.MMDIT), "diffusion_pytorch_model"),
        "vae": (vae_json, vae_params, vae.name_table(vae_config), "diffusion_pytorch_model"),
        "text_encoder": (text_json, flow_params["text_encoder"], clip.name_table(tiny_model.TEXT), "model"),
        "text_encoder_2": (text_json, flow_params["text_encoder_2"], clip.name_table(tiny_model.TEXT), "model"),
        "text_encoder_3": (t5_json, flow_params["text_encoder_3"], t5.name_table(tiny_model.T5), "model"),
    }
    for name, (config, params, table, stem) in parts.items():
        write_json(folder / name / "config.json", config)
        write_params(folder / name, params, table, np.float16, stem)
    for name, write in (
        ("tokenizer", tokenizers.write_clip_tokenizer),
        ("tokenizer_2", tokenizers.write_clip_tokenizer),
        ("tokenizer_3", tokenizers.write_t5_tokenizer),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        write(folder / name)


def write_scorer(folder: Path, params: Any) -> None:
    """Writes the preference scorer as transformers' CLIPModel, with its tokenizer and the settings of its image processor."""
    config = scorer.CONFIG
    config_json = {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "dtype": "float16",
        "projection_dim": scorer.PROJECTION,
        "logit_scale_init_value": config.logit_scale_init_value,
        "text_config": {"model_type": "clip_text_model", **dataclasses.asdict(config.text), **CLIP_IDS},
        "vision_config": {"model_type": "clip_vision_model", **dataclasses.asdict(config.vision)},
    }
    side = {"height": world.SIZE, "width": world.SIZE}
    processor_json = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": world.SIZE},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": side,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [scorer.MEAN] * 3,
        "image_std": [scorer.STD] * 3,
        "do_convert_rgb": True,
    }
    write_json(folder / "config.json", config_json)
    write_json(folder / "preprocessor_config.json", processor_json)
    params = {**params, "logit_scale": jnp.minimum(params["logit_scale"], scorer.MAX_LOG_SCALE)}  # as in the loss
    write_params(folder, params, clip.name_table(config), np.float16, "model")
    tokenizers.write_clip_tokenizer(folder)

"""Writes the tiny models as ordinary folders: diffusers' StableDiffusion3Pipeline and FluxPipeline, transformers' CLIPModel; float16
safetensors."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from densegrpo_jax.families import FAMILIES, Configs, DynamicShift
from densegrpo_jax.models import clip, flux, sd3, t5, vae
from densegrpo_jax.models.weights import write_params
from densegrpo_jax.scenes import scorer, tiny_model, tokenizers, world

CLASSES = {  # of each component, by the config of ours or its name
    sd3.SD3Config: ["diffusers", "SD3Transformer2DModel"],
    flux.FluxConfig: ["diffusers", "FluxTransformer2DModel"],
    vae.VAEConfig: ["diffusers", "AutoencoderKL"],
    t5.T5Config: ["transformers", "T5EncoderModel"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
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
    configs = Configs(
        "StableDiffusion3Pipeline", 1.0, tiny_model.MMDIT, vae_config, tiny_model.TEXT, tiny_model.TEXT, text_encoder_3=tiny_model.T5
    )
    write_folder(folder, configs, {**flow_params, "vae": vae_params})


def write_folder(folder: Path, configs: Configs, params: Mapping[str, Any]) -> None:
    """Writes a tiny model in diffusers layout.

    Args:
      folder: where to.
      configs: of a pipeline whose text encoders read the tiny world's tokens.
      params: of all its components.
    """
    index = {
        "_class_name": configs.family,
        "_diffusers_version": "0.42.1",
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
    }
    index["scheduler"] = CLASSES["scheduler"]
    for name, network in FAMILIES[configs.family].networks.items():
        config = getattr(configs, name)
        index[name], values, stem = _describe(config)
        write_json(folder / name / "config.json", values)
        write_params(folder / name, params[name], network.name_table(config), np.float16, stem)
        if name.startswith("text_encoder"):
            long, tokenizer = isinstance(config, t5.T5Config), name.replace("text_encoder", "tokenizer")
            index[tokenizer] = ["transformers", "T5TokenizerFast" if long else "CLIPTokenizer"]
            (folder / tokenizer).mkdir(parents=True, exist_ok=True)
            (tokenizers.write_t5_tokenizer if long else tokenizers.write_clip_tokenizer)(folder / tokenizer)
    write_json(folder / "model_index.json", {name: index[name] for name in sorted(index)})
    scheduler = {"_class_name": CLASSES["scheduler"][1], "num_train_timesteps": 1000}
    if isinstance(configs.shift, DynamicShift):
        (base, base_shift), (top, top_shift) = configs.shift
        scheduler |= {"use_dynamic_shifting": True, "base_image_seq_len": base, "base_shift": base_shift}
        scheduler |= {"max_image_seq_len": top, "max_shift": top_shift}
    else:
        scheduler["shift"] = configs.shift
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)


def _describe(config: Any) -> tuple[list[str], dict, str]:
    """A component's entry in model_index.json, its config.json, and the name of its weight file."""
    values = dataclasses.asdict(config)
    if isinstance(config, clip.CLIPTextConfig):
        entry = ["transformers", "CLIPTextModel" if config.projection_dim is None else "CLIPTextModelWithProjection"]
        values |= {"projection_dim": config.projection_dim or config.hidden_size, **CLIP_IDS}
        return entry, {"architectures": entry[1:], "model_type": "clip_text_model", "dtype": "float16", **values}, "model"
    entry = CLASSES[type(config)]
    if isinstance(config, t5.T5Config):
        extra = {"is_encoder_decoder": False, "use_cache": False, "pad_token_id": 0, "eos_token_id": 1}
        return entry, {"architectures": entry[1:], "model_type": "t5", "dtype": "float16", **extra, **values}, "model"
    extra = {}
    if isinstance(config, vae.VAEConfig):
        levels = len(config.block_out_channels)
        extra = {"act_fn": "silu", "down_block_types": ["DownEncoderBlock2D"] * levels, "up_block_types": ["UpDecoderBlock2D"] * levels}
        extra["sample_size"] = world.SIZE
    return entry, {"_class_name": entry[1], **extra, **values}, "diffusion_pytorch_model"


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

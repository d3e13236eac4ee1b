"""The shapes of published models, so that a plan needs no weights: what their config.json files say.

A folder on disk is read instead of this table.
"""

from dataclasses import replace
from pathlib import Path

from densegrpo_jax import policy
from densegrpo_jax.families import Configs, DynamicShift
from densegrpo_jax.models.clip import CLIPConfig, CLIPTextConfig, CLIPVisionConfig
from densegrpo_jax.models.flux import FluxConfig
from densegrpo_jax.models.sd3 import SD3Config
from densegrpo_jax.models.t5 import T5Config
from densegrpo_jax.models.vae import VAEConfig
from densegrpo_jax.pipeline import read_configs

CLIP_L = CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12, projection_dim=768)
CLIP_G = CLIPTextConfig(
    hidden_size=1280, intermediate_size=5120, num_attention_heads=20, num_hidden_layers=32, projection_dim=1280, hidden_act="gelu"
)
T5_XXL = T5Config(d_model=4096, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu")
VAE = VAEConfig(
    latent_channels=16, block_out_channels=(128, 256, 512, 512), layers_per_block=2, scaling_factor=1.5305, shift_factor=0.0609,
    use_quant_conv=False, use_post_quant_conv=False,
)  # fmt: skip
FLUX_VAE = VAEConfig(
    latent_channels=16, block_out_channels=(128, 256, 512, 512), layers_per_block=2, scaling_factor=0.3611, shift_factor=0.1159,
    use_quant_conv=False, use_post_quant_conv=False,
)  # fmt: skip


def _sd3(heads: int, layers: int, dual: int, positions: int) -> Configs:
    transformer = SD3Config(
        attention_head_dim=64, caption_projection_dim=64 * heads, num_attention_heads=heads, num_layers=layers,
        dual_attention_layers=tuple(range(dual)), pos_embed_max_size=positions, qk_norm="rms_norm",
    )  # fmt: skip
    return Configs("StableDiffusion3Pipeline", 3.0, transformer, VAE, CLIP_L, CLIP_G, T5_XXL)


MODELS = {
    "stabilityai/stable-diffusion-3.5-medium": _sd3(heads=24, layers=24, dual=13, positions=384),
    "stabilityai/stable-diffusion-3.5-large": _sd3(heads=38, layers=38, dual=0, positions=192),
    "black-forest-labs/FLUX.1-dev": Configs(
        "FluxPipeline", DynamicShift((256, 0.5), (4096, 1.15)), FluxConfig(guidance_embeds=True), FLUX_VAE,
        replace(CLIP_L, projection_dim=None), T5_XXL,
    ),
}  # fmt: skip

VIT = CLIPVisionConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, patch_size=14)
VIT_L = CLIPConfig(CLIP_L, replace(VIT, projection_dim=768))
TEXT_H = replace(CLIP_L, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, projection_dim=1024)
VIT_H = CLIPConfig(TEXT_H, replace(VIT, hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, projection_dim=1024))
SCORERS = {"pickscore": VIT_H, "pickscore_26": VIT_H, "hpsv2": VIT_H, "clipscore": VIT_L, "aesthetic": VIT_L}
"""Rewards that are a CLIP on the device. Other rewards run on the host or a server, and a plan does not count them."""


def configs(path: str) -> Configs:
    """The configs of a folder on disk, of the model that ships ("tiny"), or of a published one by its Hugging Face id.

    Raises:
      ValueError: the toy, which has no such configs, or a model that is neither on disk nor in the table.
    """
    if path == "toy":
        raise ValueError("model.path = 'toy': the toy trains on one CPU core in a minute; there is nothing to plan")
    folder = Path(policy.folder(path))
    if folder.is_dir():
        return read_configs(folder)
    if path not in MODELS:
        raise ValueError(f"model.path = {path!r} is no folder here, and its shape is not known; known are {', '.join(MODELS)}")
    return MODELS[path]

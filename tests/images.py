"""Images of one folder by diffusers' pipeline and by ours, from the same noise (needs torch)."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import torch

from densegrpo_jax import flow, pipeline

PROMPTS, NEGATIVE, LENGTH = ("a red cat", "the sign says hello"), "blue dog", 16  # LENGTH: of T5


def torch_pipeline(folder: Path):
    """diffusers' pipeline of the folder's kind."""
    import diffusers

    cls = getattr(diffusers, json.loads((Path(folder) / "model_index.json").read_text())["_class_name"])
    absent = {} if (Path(folder) / "text_encoder_3").exists() else {"text_encoder_3": None, "tokenizer_3": None}
    reference = cls.from_pretrained(folder, **(absent if cls is diffusers.StableDiffusion3Pipeline else {}))
    reference.set_progress_bar_config(disable=True)
    return reference


def torch_images(reference, noise, guidance: float, steps: int, prompts=PROMPTS, negative=NEGATIVE) -> np.ndarray:
    """Images [B, H, W, 3] in [0, 1] of diffusers from noise [B, h, w, C]."""
    height, width = (side * reference.vae_scale_factor for side in noise.shape[1:3])
    latents = torch.from_numpy(np.array(noise)).permute(0, 3, 1, 2)
    if type(reference).__name__ == "FluxPipeline":
        given = {"latents": reference._pack_latents(latents, *latents.shape)}
    else:
        given = {"latents": latents, "negative_prompt": [negative] * len(prompts)}
    return reference(
        list(prompts), height=height, width=width, num_inference_steps=steps, guidance_scale=guidance, max_sequence_length=LENGTH,
        output_type="np", **given,
    ).images  # fmt: skip


def our_images(
    pipe, noise, guidance: float, steps: int, prompts=PROMPTS, negative=NEGATIVE, lora=None, lora_scale: float = 1.0
) -> np.ndarray:
    """The same by us; `lora` is an adapter that enters with `lora_scale`."""
    cond = pipeline.encode_prompts(pipe, [*prompts, negative], LENGTH)
    uncond = jax.tree.map(lambda x: x[-1:], cond) if pipeline.needs_uncond(pipe.configs, guidance) else None
    cond = jax.tree.map(lambda x: x[:-1], cond)
    params = {name: pipe.params[name] for name in ("transformer", "vae")}
    return np.asarray(_sampler(pipe.configs, steps, noise.shape[1:], lora_scale)(params, lora, noise, cond, uncond, guidance))


@functools.cache
def _sampler(configs, steps, shape, lora_scale):
    """One program per size and kind of guidance."""
    model, plan = pipeline.network(configs, lora_scale=lora_scale), flow.plan(pipeline.sigmas(configs, steps, shape))

    def run(params, lora, noise, cond, uncond, guidance):
        velocity = pipeline.velocity(model, params["transformer"], lora, uncond, guidance)
        latents = flow.integrate(lambda x, sigma: velocity(x, sigma, cond), noise, plan)
        return pipeline.decode(configs, params["vae"], latents)

    return jax.jit(run)

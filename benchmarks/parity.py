"""Our networks against diffusers and transformers in torch: the measured differences behind docs/parity.md.

    python benchmarks/parity.py [--json PATH] [--markdown docs/parity.md] [--quick]

Small random models are built in torch, one for each kind of configuration; their weights go through the same name tables as a
checkpoint's, and both sides compute from the same inputs:

  value     forward pass, float32
  gradient  of a random weighting of the outputs, with respect to the latents, images or tokens; for text encoders, whose input
            is discrete, with respect to the token embeddings; float32
  bfloat16  our forward pass with weights and computation in bfloat16 against our own in float32: the price of the lower precision,
            not a difference from torch, and without a bound

A difference is the largest absolute one over the largest absolute value on the torch side; of several outputs the worst counts.
The noise levels and the images, in [0, 1], are compared absolutely. Every row has a bound; the script ends with status 1 if a row
is over it. It needs a checkout and the test extras (torch, diffusers, peft), and runs on the CPU unless JAX_PLATFORMS says otherwise.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests/, and the package where it is not installed

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from diffusers.models.attention import JointTransformerBlock
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from peft import PeftModel
from torch.func import functional_call
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from densegrpo_jax import flow, pipeline
from densegrpo_jax.export import export
from densegrpo_jax.models import blip, clip, flux, mmdit, score_head, sd3, t5, vae
from densegrpo_jax.models import lora as loras
from densegrpo_jax.models.adapter import Adapter
from densegrpo_jax.models.layers import rotary_table
from densegrpo_jax.rewards import aesthetic, imagereward
from densegrpo_jax.rewards import clip as clip_rewards
from densegrpo_jax.rewards.clip import ImageProcessing, prepare
from tests.images import our_images, torch_images, torch_pipeline
from tests.models.convert import params_from_torch
from tests.tiny_folder import make_flux_folder, make_sd3_folder

SEED = 0
RELATIVE, ABSOLUTE, PIXEL = 1e-4, 1e-6, 2e-3  # bounds: network values, noise levels, images
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
RANK, ALPHA = 4, 6.0  # of the adapter; different, so that a wrong strength shows


class Row(NamedTuple):
    """One comparison; None where a column does not apply."""

    component: str
    configuration: str
    value: float
    gradient: float | None
    bfloat16: float | None
    bound: float

    @property
    def holds(self) -> bool:
        return all(difference <= self.bound for difference in (self.value, self.gradient) if difference is not None)  # NaN does not


# --- comparing -------------------------------------------------------------------------------------------------------


def distance(ours, theirs) -> float:
    """Largest absolute difference; NaN if there is one."""
    ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
    if ours.shape != theirs.shape:
        raise ValueError(f"shapes differ: ours {ours.shape}, theirs {theirs.shape}")
    return float(np.abs(ours - theirs).max())


def relative(ours, theirs) -> float:
    """Largest absolute difference over the largest absolute value of `theirs`, the worst of several arrays; NaN if there is one."""
    return float(np.max([distance(a, b) / np.abs(np.asarray(b, np.float32)).max() for a, b in zip(ours, theirs, strict=True)]))


def compare(component: str, configuration: str, ours: Callable, theirs: Callable, params: dict, x: np.ndarray) -> Row:
    """Runs both sides on `x` and measures values, gradients and the price of bfloat16.

    Args:
      component, configuration: of the row.
      ours: (params, x, dtype) -> tuple of arrays; images and latents have their channels last.
      theirs: x -> tuple of tensors; images and latents, four-dimensional, have their channels first.
      params: our parameters, float32.
      x: the input that is differentiated, channels last.
    """
    leaf = torch.from_numpy(x).requires_grad_()
    wanted = theirs(leaf.movedim(-1, 1) if leaf.ndim == 4 else leaf)
    wanted = [y.movedim(1, -1) if y.ndim == 4 else y for y in wanted]
    rng = np.random.default_rng(SEED)
    weights = [rng.normal(size=y.shape).astype(np.float32) for y in wanted]
    sum((y * torch.from_numpy(w)).sum() for y, w in zip(wanted, weights, strict=True)).backward()

    def loss(x, params):
        outputs = ours(params, x, jnp.float32)
        return sum((y * w).sum() for y, w in zip(outputs, weights, strict=True)), outputs

    (_, outputs), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(x, params)
    low = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), params)
    half = jax.jit(lambda params, x: ours(params, x, jnp.bfloat16))(low, x)
    return Row(
        component,
        configuration,
        relative(outputs, [y.detach() for y in wanted]),
        relative([gradient], [leaf.grad]),
        relative(half, outputs),
        RELATIVE,
    )


def randomized(module):
    """Every parameter random, at the scale that keeps activations near one; initial zeros and ones would hide a mix-up."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise if "embedding" in name or "shared" in name else noise * parameter[0].numel() ** -0.5)
            elif parameter.ndim == 1:
                parameter.copy_(0.1 * noise + (1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0))
    return module.eval()


def normal(*shape) -> np.ndarray:
    return np.random.default_rng([SEED, *shape]).normal(size=shape).astype(np.float32)


# --- components ------------------------------------------------------------------------------------------------------

TRANSFORMER = dict(
    sample_size=16, patch_size=2, in_channels=16, out_channels=16, num_layers=8, attention_head_dim=16, num_attention_heads=4,
    joint_attention_dim=48, caption_projection_dim=64, pooled_projection_dim=40, pos_embed_max_size=24,
)  # fmt: skip
VARIANTS = {
    "SD3-Medium": {},
    "SD3.5-Large": {"qk_norm": "rms_norm"},
    "SD3.5-Medium": {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1, 2, 3)},
}


def transformer(name: str):
    """(torch module, our config, our parameters)."""
    theirs = randomized(diffusers.SD3Transformer2DModel(**TRANSFORMER, **VARIANTS[name]))
    config = sd3.SD3Config.from_json(json.loads(theirs.to_json_string()))
    return theirs, config, params_from_torch(theirs.state_dict(), sd3.name_table(config))


def transformer_row(name: str) -> Row:
    theirs, config, params = transformer(name)
    sigma, context, pooled = np.array([0.03, 0.9], np.float32), normal(2, 20, 48), normal(2, 40)

    def ours(params, x, dtype):
        return (sd3.SD3Transformer(config, dtype).apply({"params": params}, x, sigma, context, pooled),)

    def run(x):
        return (theirs(x, torch.from_numpy(context), torch.from_numpy(pooled), 1000 * torch.from_numpy(sigma)).sample,)

    what = f"{name} kind: {config.num_layers} layers, {len(config.dual_attention_layers)} dual, q/k norm {config.qk_norm or 'none'}"
    return compare("transformer", what, ours, run, params, normal(2, 20, 12, 16))


def block_row(name: str) -> Row:
    theirs, config, params = transformer(name)
    block = theirs.transformer_blocks[0]
    assert isinstance(block, JointTransformerBlock)
    context, c, dual = normal(2, 20, 64), normal(2, 64), bool(config.dual_attention_layers)

    def ours(params, x, dtype):
        module = mmdit.JointBlock(config.num_attention_heads, bool(config.qk_norm), dtype, "auto", 1.0, dual)
        return module.apply({"params": params}, (x.astype(dtype), jnp.asarray(context, dtype)), (jax.nn.silu(c), None))[0]

    def run(x):
        context_out, out = block(x, torch.from_numpy(context), torch.from_numpy(c))
        return out, context_out

    params = jax.tree.map(lambda leaf: leaf[0], params["blocks_0"])
    return compare("transformer block", f"{name} kind, both streams", ours, run, params, normal(2, 60, 64))


FLUX = dict(
    in_channels=64, num_layers=3, num_single_layers=5, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=48,
    pooled_projection_dim=40, axes_dims_rope=(4, 6, 6),
)  # fmt: skip


def flux_rows(name: str, guidance_embeds: bool) -> Iterator[Row]:
    """The transformer, and one block of each kind."""
    theirs = randomized(diffusers.FluxTransformer2DModel(**FLUX, guidance_embeds=guidance_embeds))
    config = flux.FluxConfig.from_json(json.loads(theirs.to_json_string()))
    params = params_from_torch(theirs.state_dict(), flux.name_table(config))
    sigma, context, pooled = np.array([0.03, 0.9], np.float32), normal(2, 20, 48), normal(2, 40)
    guidance = [np.array([1.0, 3.5], np.float32)] if guidance_embeds else []
    rows, columns = 10, 6
    ids = torch.tensor([[0, row, column] for row in range(rows) for column in range(columns)])
    text_ids = torch.zeros(20, 3)
    pack, unpack = diffusers.FluxPipeline._pack_latents, diffusers.FluxPipeline._unpack_latents

    def ours(params, x, dtype):
        return (flux.FluxTransformer(config, dtype).apply({"params": params}, x, sigma, context, pooled, *guidance),)

    def run(x):
        given = {"guidance": torch.from_numpy(guidance[0])} if guidance else {}
        out = theirs(
            hidden_states=pack(x.contiguous(), *x.shape), encoder_hidden_states=torch.from_numpy(context), img_ids=ids, txt_ids=text_ids,
            pooled_projections=torch.from_numpy(pooled), timestep=torch.from_numpy(sigma), **given,
        ).sample  # fmt: skip
        return (unpack(out, 16 * rows, 16 * columns, 8),)

    what = f"{name} kind: {config.num_layers} double, {config.num_single_layers} single blocks"
    yield compare("transformer", what, ours, run, params, normal(2, 2 * rows, 2 * columns, 16))
    if not guidance_embeds:
        return
    text, c, table = normal(2, 20, config.width), normal(2, config.width), rotary_table(config.axes_dims_rope, rows, columns)
    with_text = [np.concatenate([part, np.full((20, part.shape[1]), fill, np.float32)]) for part, fill in zip(table, (1, 0), strict=True)]
    first = {path: jax.tree.map(lambda leaf: leaf[0], params[path]) for path in ("blocks", "single_blocks")}
    args = {"temb": torch.from_numpy(c), "image_rotary_emb": theirs.pos_embed(torch.cat([text_ids.long(), ids]))}

    def double(params, x, dtype):
        block = mmdit.JointBlock(config.num_attention_heads, True, dtype, "auto", 1.0)
        return block.apply({"params": params}, (x.astype(dtype), jnp.asarray(text, dtype)), (jax.nn.silu(c), table))[0]

    def single(params, x, dtype):
        block = flux.SingleBlock(config.num_attention_heads, dtype, "auto", 1.0)
        tokens = jnp.concatenate([x.astype(dtype), jnp.asarray(text, dtype)], axis=1)
        out = block.apply({"params": params}, tokens, (jax.nn.silu(c), with_text))[0]
        return out[:, : rows * columns], out[:, rows * columns :]

    for path, block, their_block in (
        ("blocks", double, theirs.transformer_blocks[0]),
        ("single_blocks", single, theirs.single_transformer_blocks[0]),
    ):
        what = f"{name} kind, {'double' if block is double else 'single'}, both streams"
        run_block = lambda x, block=their_block: block(x, torch.from_numpy(text), **args)[::-1]  # noqa: E731
        yield compare("transformer block", what, block, run_block, first[path], normal(2, rows * columns, config.width))


def vae_rows(name: str, widths: tuple[int, ...], **values) -> list[Row]:
    theirs = diffusers.AutoencoderKL(
        block_out_channels=widths, layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * len(widths), up_block_types=("UpDecoderBlock2D",) * len(widths), **values,
    )  # fmt: skip
    theirs = randomized(theirs)
    config = vae.VAEConfig.from_json(json.loads(theirs.to_json_string()))
    params = params_from_torch(theirs.state_dict(), vae.name_table(config))

    def ours_decode(params, x, dtype):
        return (vae.decode(params, config, x, dtype),)

    def ours_encode(params, x, dtype):
        return vae.encode(params, config, x, dtype)

    def decode(x):
        return (theirs.decode(x).sample,)

    def encode(x):
        posterior = theirs.encode(x).latent_dist
        return posterior.mean, posterior.logvar

    latents, images = normal(2, 4, 3, config.latent_channels), np.tanh(normal(2, 24, 32, 3))
    return [
        compare("VAE decode", name, ours_decode, decode, params, latents),
        compare("VAE encode", name, ours_encode, encode, params, images),
    ]


def clip_text_row(name: str, **values) -> Row:
    values = dict(vocab_size=60, max_position_embeddings=77, eos_token_id=2, **values)
    theirs = randomized(transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**values)))
    config = clip.CLIPTextConfig.from_json(values)
    params = params_from_torch(theirs.state_dict(), clip.name_table(config))
    ids = np.random.default_rng(SEED).integers(0, 58, (2, 77))
    ids[0, 9:], ids[1, -1] = 59, 59  # eos_token_id 2, as published: the largest id is the end
    embedding = next(name for name in theirs.state_dict() if name.endswith("token_embedding.weight"))

    def ours(params, table, dtype):
        output = clip.CLIPText(config, dtype).apply({"params": params | {"token_embedding": {"embedding": table}}}, ids)
        return output.penultimate, output.pooled

    def run(table):
        output = functional_call(theirs, {embedding: table}, (torch.from_numpy(ids),), {"output_hidden_states": True})
        return output.hidden_states[-2], output.text_embeds

    return compare("CLIP text", name, ours, run, params, theirs.state_dict()[embedding].numpy().copy())


def t5_row() -> Row:
    values = dict(vocab_size=60, d_model=64, d_kv=12, d_ff=96, num_layers=4, num_heads=4, feed_forward_proj="gated-gelu")
    theirs = randomized(transformers.T5EncoderModel(transformers.T5Config(**values)))
    config = t5.T5Config.from_json(values)
    state = {name: tensor for name, tensor in theirs.state_dict().items() if name not in t5.TIED}
    params = params_from_torch(state, t5.name_table(config))
    ids = np.random.default_rng(SEED).integers(0, 60, (2, 160))  # longer than the relative bias reaches

    def ours(params, table, dtype):
        return (t5.T5Encoder(config, dtype).apply({"params": params | {"token_embedding": {"embedding": table}}}, ids),)

    def run(table):
        return (functional_call(theirs, {"shared.weight": table}, (torch.from_numpy(ids),)).last_hidden_state,)

    return compare("T5 encoder", "v1.1: gated gelu, 160 tokens", ours, run, params, state["shared.weight"].numpy().copy())


def clip_rows() -> list[Row]:
    tower = dict(num_hidden_layers=4, num_attention_heads=4, hidden_act="gelu")
    text = dict(tower, vocab_size=60, hidden_size=48, intermediate_size=96, max_position_embeddings=20, eos_token_id=59)
    vision = dict(tower, hidden_size=64, intermediate_size=128, image_size=56, patch_size=14)
    values = dict(model_type="clip", projection_dim=40, text_config=text, vision_config=vision)
    theirs = randomized(transformers.CLIPModel(transformers.CLIPConfig(**values)))
    config = clip.CLIPConfig.from_json(values)
    params = params_from_torch(theirs.state_dict(), clip.name_table(config))
    params["logit_scale"] = params["logit_scale"].reshape(())
    ids = np.random.default_rng(SEED).integers(0, 58, (3, 20))
    ids[:, -1] = 59

    def embed(params, x, dtype):
        return (clip.CLIPVision(config.vision, dtype).apply({"params": params["vision_model"]}, x),)

    def score(params, x, dtype):
        return (clip.CLIP(config, dtype).apply({"params": params}, ids, x),)

    def their_score(x):
        return (theirs(torch.from_numpy(ids), x).logits_per_image,)

    images = np.random.default_rng(SEED).integers(0, 256, (3, 90, 70, 3), dtype=np.uint8)
    prepared = jax.jit(prepare, static_argnums=0)(ImageProcessing(56, (56, 56)), images)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    expected = np.stack(processor(list(images)).pixel_values).transpose(0, 2, 3, 1)
    pixels = normal(2, 56, 56, 3)

    def hps(params, x, dtype):
        spec = clip_rewards.Spec(config, ImageProcessing(56, None, framed=True), None, dtype)
        texts = clip.CLIP(config, dtype).apply({"params": params}, ids[:2], method="embed_text")
        return (clip_rewards.score(params, spec, x, texts),)

    def their_hps(x):
        output = theirs(torch.from_numpy(ids[:2]), framed(x, 56))
        return (torch.nn.functional.cosine_similarity(output.image_embeds, output.text_embeds),)

    head = torch_head(40)
    aesthetic_params = {
        "vision_model": params["vision_model"],
        "mlp": params_from_torch(head.state_dict(prefix="mlp.layers."), score_head.name_table()),
    }

    def predict(params, x, dtype):
        return (aesthetic.score(params, aesthetic.Spec(config.vision, ImageProcessing(None, None), dtype), x),)

    def their_prediction(x):
        vector = theirs.get_image_features(normalized(x)).pooler_output
        return (head(vector / vector.norm(dim=-1, keepdim=True)),)

    inside = np.random.default_rng(SEED).uniform(size=(2, 56, 56, 3)).astype(np.float32)
    tall = np.random.default_rng(SEED).uniform(size=(2, 90, 70, 3)).astype(np.float32)
    in_frame = jax.jit(prepare, static_argnums=0)(ImageProcessing(56, None, framed=True), images)
    expected_frame = framed(torch.from_numpy(images).movedim(-1, 1) / 255, 56).movedim(1, -1)
    return [
        Row("CLIP image preparation", "90 x 70 bytes to 56 x 56", relative([prepared], [expected]), None, None, RELATIVE),
        compare("CLIP vision", "ViT, projected", embed, lambda x: (theirs.get_image_features(x).pooler_output,), params, pixels),
        compare("CLIP score", "2 images with 3 texts", score, their_score, params, pixels),
        Row("HPSv2.1 image preparation", "90 x 70 bytes framed by 56 x 56", relative([in_frame], [expected_frame]), None, None, RELATIVE),
        compare("HPSv2.1 score", "2 images of 90 x 70, prepared", hps, their_hps, params, tall),
        compare("aesthetic score", "ViT, unit vector, five layers", predict, their_prediction, aesthetic_params, inside),
    ]


def normalized(x):
    mean, std = (torch.tensor(values)[:, None, None] for values in (ImageProcessing.image_mean, ImageProcessing.image_std))
    return (x - mean) / std


def framed(x, side: int):
    """HPSv2's preparation of images [N, 3, H, W] in [0, 1]: the longer edge resized to `side`, black bars."""
    height, width = (round(n * side / max(x.shape[2:])) for n in x.shape[2:])
    x = torch.nn.functional.interpolate(x, (height, width), mode="bicubic", antialias=True)
    h, w = side - height, side - width
    return normalized(torch.nn.functional.pad(x, (w // 2, w - w // 2, h // 2, h - h // 2)))


def torch_head(width: int):
    """The five linear layers with their dropouts, [N, width] -> [N]."""
    layers = [torch.nn.Linear(*pair) for pair in pairwise([width, *score_head.WIDTHS])]
    for place in (1, 3, 5):
        layers.insert(place, torch.nn.Dropout(0.2))
    return randomized(torch.nn.Sequential(*layers, torch.nn.Flatten(0)))


def blip_rows() -> list[Row]:
    text = dict(vocab_size=60, hidden_size=48, encoder_hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4)
    vision = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, image_size=56, patch_size=14)
    values = dict(model_type="blip", text_config=text, vision_config=vision)
    theirs = transformers.BlipConfig(**values)
    sees = randomized(transformers.BlipVisionModel(theirs.vision_config))
    reads, head = randomized(transformers.BlipTextModel(theirs.text_config, add_pooling_layer=False)), torch_head(48)
    parts = (("vision_model.", sees), ("text_encoder.", reads), ("mlp.layers.", head))
    state = {name: tensor for prefix, part in parts for name, tensor in part.state_dict(prefix=prefix).items()}
    config = blip.BLIPConfig.from_json(values)
    params = params_from_torch(state, blip.name_table(config))
    ids, mask = np.random.default_rng(SEED).integers(0, 60, (2, 20)), np.ones((2, 20), int)
    mask[1, 9:] = 0

    def see(params, x, dtype):
        return (blip.BLIPVision(config.vision, dtype).apply({"params": params["vision_model"]}, x),)

    def read(params, x, dtype):
        return (blip.BLIPText(config.text, dtype).apply({"params": params["text_encoder"]}, ids, mask, x),)

    def their_read(x):
        return (reads(torch.from_numpy(ids), torch.from_numpy(mask), encoder_hidden_states=x).last_hidden_state,)

    def score(params, x, dtype):
        return (imagereward.score(params, imagereward.Spec(config, ImageProcessing(None, None), dtype), x, (ids, mask)),)

    def their_score(x):
        hidden = their_read(sees(normalized(x)).last_hidden_state)[0]
        return ((head(hidden[:, 0]) - imagereward.MEAN) / imagereward.STD,)

    inside = np.random.default_rng(SEED).uniform(size=(2, 56, 56, 3)).astype(np.float32)
    return [
        compare("BLIP vision", "ViT, all tokens", see, lambda x: (sees(x).last_hidden_state,), params, normal(2, 56, 56, 3)),
        compare("BLIP text", "with cross-attention to 17 image tokens, padded", read, their_read, params, normal(2, 17, 64)),
        compare("ImageReward score", "2 images with their texts", score, their_score, params, inside),
    ]


def schedule_rows() -> Iterator[Row]:
    differences = []
    for shift in (1.0, 3.0):
        for steps in (1, 2, 10, 28, 40):
            scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
            scheduler.set_timesteps(steps)
            differences.append(distance(flow.sd3_sigmas(steps, shift), scheduler.sigmas))
    yield Row("noise schedule", "shift 1 and 3; 1 to 40 steps", float(np.max(differences)), None, None, ABSOLUTE)
    differences = []
    for tokens in (16, 1024, 4096):
        for steps in (1, 6, 28):
            scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=calculate_shift(tokens))
            differences.append(distance(flow.flux_sigmas(steps, tokens), scheduler.sigmas))
    yield Row("noise schedule", "FLUX.1-dev: 16 to 4096 tokens; 1 to 28 steps", float(np.max(differences)), None, None, ABSOLUTE)


# --- end to end ------------------------------------------------------------------------------------------------------


def image_rows(name: str, folder: Path, pipe: pipeline.Pipeline, cases: list[tuple[int, int, float]], steps: int) -> Iterator[Row]:
    reference = torch_pipeline(folder)
    for height, width, guidance in cases:
        noise = normal(2, *pipeline.latent_shape(pipe.configs, height, width))
        worst = distance(our_images(pipe, noise, guidance, steps), torch_images(reference, noise, guidance, steps))
        what = f"{height} x {width}, guidance {guidance:g}, {steps} steps"
        yield Row(f"image, {name} kind", what, worst, None, None, PIXEL)


def adapter_rows(name: str, folder: Path, pipe: pipeline.Pipeline, formats: tuple[str, ...], steps: int) -> Iterator[Row]:
    """A random adapter here, and exported to the libraries."""
    lora = loras.init(jax.random.key(SEED), pipe.params["transformer"], rank=RANK)
    rng = np.random.default_rng(SEED)
    lora = jax.tree.map(lambda leaf: rng.normal(scale=0.2, size=leaf.shape).astype(np.float32), lora)
    noise, guidance = normal(2, *pipeline.latent_shape(pipe.configs, 24, 32)), 4.5
    ours = our_images(pipe, noise, guidance, steps, lora=lora, lora_scale=ALPHA / RANK)
    if distance(ours, torch_images(torch_pipeline(folder), noise, guidance, steps)) < 10 * PIXEL:
        raise RuntimeError("the adapter does not show in the image: nothing to compare")
    for format in formats:
        out, reference = export(Adapter(lora, ALPHA), folder, format, folder.parent / f"{folder.name}-{format}"), torch_pipeline(folder)
        if format == "diffusers":
            reference.load_lora_weights(out)
        elif format == "peft":
            PeftModel.from_pretrained(reference.transformer, out)  # puts its layers into the transformer
        else:
            reference = torch_pipeline(out)
        worst = distance(ours, torch_images(reference, noise, guidance, steps))
        what = {"diffusers": "load_lora_weights of diffusers", "peft": "PEFT", "merged": "merged folder in diffusers"}[format]
        yield Row("image, exported adapter", f"{name} kind, {what}; 24 x 32, {steps} steps", worst, None, None, PIXEL)


def folder_rows(quick: bool) -> Iterator[Row]:
    """Images of whole folders, and of adapters."""
    steps, formats = (2, ("peft",)) if quick else (10, ("diffusers", "peft", "merged"))
    with tempfile.TemporaryDirectory() as scratch:
        for name, make, strong in (("SD3.5-Medium", make_sd3_folder, 4.5), ("FLUX.1-dev", make_flux_folder, 3.5)):
            folder = make(Path(scratch) / name, SEED)
            pipe = pipeline.load(folder, jnp.float32)
            cases = [(32, 32, 1.0), (32, 32, strong), (24, 48, 1.0), (24, 48, strong)]
            yield from image_rows(name, folder, pipe, cases[-1:] if quick else cases, steps)
            yield from adapter_rows(name, folder, pipe, formats, steps)


def measure(quick: bool) -> Iterator[Row]:
    names = ["SD3.5-Medium"] if quick else list(VARIANTS)
    yield from map(transformer_row, names)
    yield from map(block_row, names if quick else ("SD3-Medium", "SD3.5-Medium"))
    yield from flux_rows("FLUX.1-dev", guidance_embeds=True)
    if not quick:
        yield from flux_rows("FLUX.1-schnell", guidance_embeds=False)
    widths = (16, 32) if quick else (16, 16, 32, 32)
    yield from vae_rows("SD3, FLUX kind: 16 channels", widths, latent_channels=16, use_quant_conv=False, use_post_quant_conv=False)
    if not quick:
        yield from vae_rows("SD1 kind: 4 channels, quant convolutions", widths, latent_channels=4)
        sizes = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4)
        yield clip_text_row("CLIP-L kind: quick gelu", **sizes, projection_dim=48, hidden_act="quick_gelu")
    sizes = dict(hidden_size=80, intermediate_size=160, num_hidden_layers=6, num_attention_heads=5)
    yield clip_text_row("OpenCLIP-bigG kind: gelu", **sizes, projection_dim=80, hidden_act="gelu")
    yield t5_row()
    yield from clip_rows()
    yield from blip_rows()
    yield from schedule_rows()
    yield from folder_rows(quick)


# --- main ------------------------------------------------------------------------------------------------------------


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


HEAD = "| component | configuration | value | gradient | bound | bfloat16 |\n| --- | --- | --: | --: | --: | --: |"


def line(row: Row) -> str:
    """The row in markdown."""
    value, gradient, bfloat16 = ("" if x is None else f"{x:.1e}" for x in (row.value, row.gradient, row.bfloat16))
    bound = f"{row.bound:.0e}" if row.holds else f"{row.bound:.0e} **over**"
    return f"| {row.component} | {row.configuration} | {value} | {gradient} | {bound} | {bfloat16} |"


def write_markdown(path: Path, about: dict, rows: list[Row]) -> None:
    """Replaces what stands between the markers of `path`."""
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{path}: needs one line {BEGIN} and one line {END} to write the table between")
    facts = "; ".join(f"{key} {value}" for key, value in about.items())
    table = "\n".join([HEAD, *map(line, rows)])
    path.write_text(f"{text.split(BEGIN)[0]}{BEGIN}\n{table}\n\nMeasured with: {facts}.\n{END}{text.split(END)[1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--markdown", type=Path, help="replace the table between the markers of this file, such as docs/parity.md")
    parser.add_argument("--quick", action="store_true", help="one configuration of each component, two sampling steps: half the time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    jax.config.update("jax_default_matmul_precision", "highest")  # float32 products in float32 on GPU and TPU too
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    about = {
        "device": cpu_name() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind,
        "threads": f"torch {torch.get_num_threads()}, XLA up to {os.cpu_count()}",
        "seed": SEED,
        "python": platform.python_version(),
        **{package: version(package) for package in ("jax", "flax", "numpy", "torch", "diffusers", "transformers", "peft")},
    }
    print("\n".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    print(HEAD)
    rows = []
    for row in measure(args.quick):
        rows.append(row)
        print(line(row), flush=True)
    if args.json:
        lines = ",\n".join(json.dumps(row._asdict()) for row in rows)
        args.json.write_text(f'{{"about": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n')
    if args.markdown:
        write_markdown(args.markdown, about, rows)
    if over := [f"{row.component}, {row.configuration}" for row in rows if not row.holds]:
        sys.exit(f"over the bound: {'; '.join(over)}")


if __name__ == "__main__":
    main()

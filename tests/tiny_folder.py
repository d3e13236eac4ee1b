"""Folders of random weights in diffusers layout, Stable Diffusion 3.5's and FLUX.1's, made by the real libraries (needs torch)."""

import json
from pathlib import Path

WORDS = ("a", "red", "blue", "cat", "dog", "on", "the", "sign", "says", "hello")
TRANSFORMER = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 28,
    "pos_embed_max_size": 12,
    "dual_attention_layers": (0, 1),
    "qk_norm": "rms_norm",
}

FLUX_TRANSFORMER = {
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
    "guidance_embeds": True,
    "axes_dims_rope": (2, 2, 4),
}


def _clip_tokenizer(pad_token: str):
    """Byte-level BPE with one merge per word prefix, 12 tokens long, the end token last, as in CLIP."""
    from transformers import CLIPTokenizer

    letters = [chr(c) for c in range(33, 127)]
    merges, symbols = [], [*letters, *(f"{c}</w>" for c in letters)]
    for word in WORDS:
        head = word[:1]
        for i, letter in enumerate(word[1:], 2):
            tail = letter + ("</w>" if i == len(word) else "")
            if (head, tail) not in merges:
                merges.append((head, tail))
                symbols.append(head + tail)
            head += tail
    vocab = {token: i for i, token in enumerate([*symbols, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=merges, pad_token=pad_token, model_max_length=12)


def _t5_tokenizer():
    from transformers import T5TokenizerFast

    pieces = [*(f"▁{word}" for word in WORDS), "▁", *(chr(c) for c in range(33, 127))]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((piece, -1.0 - len(pieces) / 100 * (len(piece) < 3)) for piece in pieces)]
    return T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=512)


def make_sd3_folder(folder: Path, seed: int = 0, t5: bool = True, **transformer) -> Path:
    """Writes the folder: MMDiT with dual attention and q/k norm, 16-channel VAE, two CLIP encoders, T5, three tokenizers.

    Args:
      folder: where to.
      seed: of the weights.
      t5: False leaves the third text encoder out, as diffusers allows.
      **transformer: changes to the transformer's config.

    Returns:
      `folder`.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    _seed(seed)
    tokenizers = [_clip_tokenizer("<|endoftext|>"), _clip_tokenizer("!"), _t5_tokenizer()]
    modules = {
        "transformer": SD3Transformer2DModel(**{**TRANSFORMER, **transformer}),
        "vae": _vae(),
        "text_encoder": _clip(tokenizers[0], 16, 12, "quick_gelu"),
        "text_encoder_2": _clip(tokenizers[1], 12, 16, "gelu"),
        "text_encoder_3": _t5(tokenizers[2]) if t5 else None,
    }
    pipeline = StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        tokenizer=tokenizers[0],
        tokenizer_2=tokenizers[1],
        tokenizer_3=tokenizers[2] if t5 else None,
        **_bold(modules),
    )
    return _save(pipeline, folder)


def make_flux_folder(folder: Path, seed: int = 0, schnell: bool = False, **transformer) -> Path:
    """Writes the folder: FLUX's transformer, 16-channel VAE, CLIP without projection, T5, two tokenizers.

    Args:
      folder: where to.
      seed: of the weights.
      schnell: without guidance input and with a fixed schedule, as FLUX.1-schnell; otherwise as FLUX.1-dev.
      **transformer: changes to the transformer's config.

    Returns:
      `folder`.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    _seed(seed)
    tokenizers = [_clip_tokenizer("<|endoftext|>"), _t5_tokenizer()]
    modules = {
        "transformer": FluxTransformer2DModel(**{**FLUX_TRANSFORMER, "guidance_embeds": not schnell, **transformer}),
        "vae": _vae(),
        "text_encoder": _clip(tokenizers[0], 16, None, "quick_gelu"),
        "text_encoder_2": _t5(tokenizers[1]),
    }
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0 if schnell else 3.0, use_dynamic_shifting=not schnell),
        tokenizer=tokenizers[0],
        tokenizer_2=tokenizers[1],
        **_bold(modules),
    )
    return _save(pipeline, folder)


def _seed(seed: int) -> None:
    import torch

    torch.manual_seed(seed)


def _clip(tokenizer, width: int, projection: int | None, act: str):
    """A text encoder with a projection, or without."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=projection or width,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=12,
        hidden_act=act,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)


def _t5(tokenizer):
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    return T5EncoderModel(config)


def _vae():
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=16,
        norm_num_groups=4,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
        sample_size=32,
    )


def _bold(modules: dict) -> dict:
    """The modules with larger than the usual initial values, so that every branch shows in the image."""
    import torch

    with torch.no_grad():
        for module in filter(None, modules.values()):
            for name, parameter in module.named_parameters():
                noise = torch.randn_like(parameter)
                if parameter.ndim > 1:
                    fan_in = parameter[0].numel()
                    parameter.copy_(noise if "embedding" in name or "shared" in name else noise * fan_in**-0.5)
                else:
                    parameter.copy_(noise * 0.1 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    return modules


def _save(pipeline, folder: Path) -> Path:
    pipeline.save_pretrained(folder)
    assert json.loads((Path(folder) / "model_index.json").read_text())["_class_name"] == type(pipeline).__name__
    return Path(folder)

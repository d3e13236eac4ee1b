"""A Stable Diffusion 3.5 folder of random weights in diffusers layout, made by the real libraries (needs torch)."""

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
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    torch.manual_seed(seed)
    tokenizers = [_clip_tokenizer("<|endoftext|>"), _clip_tokenizer("!"), _t5_tokenizer()]

    def clip(tokenizer, width, projection, act):
        config = CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=projection,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=12,
            hidden_act=act,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        return CLIPTextModelWithProjection(config)

    t5_config = T5Config(
        vocab_size=len(tokenizers[2]),
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    vae = AutoencoderKL(
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
    modules = {
        "transformer": SD3Transformer2DModel(**{**TRANSFORMER, **transformer}),
        "vae": vae,
        "text_encoder": clip(tokenizers[0], 16, 12, "quick_gelu"),
        "text_encoder_2": clip(tokenizers[1], 12, 16, "gelu"),
        "text_encoder_3": T5EncoderModel(t5_config) if t5 else None,
    }
    with torch.no_grad():  # larger than the usual initial values, so that every branch shows in the image
        for module in filter(None, modules.values()):
            for name, parameter in module.named_parameters():
                noise = torch.randn_like(parameter)
                if parameter.ndim > 1:
                    fan_in = parameter[0].numel()
                    parameter.copy_(noise if "embedding" in name or "shared" in name else noise * fan_in**-0.5)
                else:
                    parameter.copy_(noise * 0.1 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    pipeline = StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        tokenizer=tokenizers[0],
        tokenizer_2=tokenizers[1],
        tokenizer_3=tokenizers[2] if t5 else None,
        **modules,
    )
    pipeline.save_pretrained(folder)
    index = json.loads((Path(folder) / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusion3Pipeline"
    return Path(folder)

"""FLOPs and memory counted from shapes: against XLA's count of unrolled networks, and against sums done by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from densegrpo_jax import pipeline
from densegrpo_jax.models import clip, flux, lora, sd3, t5, vae
from densegrpo_jax.plan import flops, published
from densegrpo_jax.plan.recipe import shapes
from densegrpo_jax.rewards.clip import shapes as scorer_shapes

SD35 = published.MODELS["stabilityai/stable-diffusion-3.5-medium"]
FLUX = published.MODELS["black-forest-labs/FLUX.1-dev"]


def xla(fn, *shapes):
    """FLOPs by XLA's count of the optimised program."""
    return jax.jit(fn).lower(*shapes).compile().cost_analysis()["flops"]


def arrays(*sizes, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct(size, dtype) for size in sizes]


@pytest.mark.parametrize("adapted", [False, True])
def test_sd3_pass_is_xlas_count_of_unrolled_blocks(adapted):
    config = sd3.SD3Config(
        sample_size=16, num_layers=3, attention_head_dim=64, num_attention_heads=4, joint_attention_dim=128, caption_projection_dim=256,
        pooled_projection_dim=64, pos_embed_max_size=16, qk_norm="rms_norm", dual_attention_layers=(0,),
    )  # fmt: skip
    given = arrays((1, 16, 16, 16), (1,), (1, 40, 128), (1, 64))
    net = sd3.SD3Transformer(config, dtype=jnp.bfloat16, scan_unroll=3)  # in float32 adapters are merged into the kernels
    params = jax.eval_shape(net.init, jax.random.key(0), *given)["params"]
    variables = {"params": params} | ({"lora": jax.eval_shape(lambda: lora.init(jax.random.key(0), params, rank=16))} if adapted else {})
    mine = flops.transformer(config, params, 64, 40, lora.ATTENTION_TARGETS, 16 if adapted else 0)
    assert (mine.adapter > 0.02 * mine.flops) == adapted
    assert 1.0 <= xla(net.apply, variables, *given) / mine.flops < 1.06  # what is over is element by element


def test_flux_pass_is_xlas_count_of_unrolled_blocks():
    config = flux.FluxConfig(
        in_channels=64, num_layers=2, num_single_layers=2, attention_head_dim=64, num_attention_heads=4, joint_attention_dim=128,
        pooled_projection_dim=64, guidance_embeds=True, axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    given = arrays((1, 16, 16, 16), (1,), (1, 40, 128), (1, 64), (1,))
    net = flux.FluxTransformer(config, scan_unroll=2)
    params = jax.eval_shape(net.init, jax.random.key(0), *given)["params"]
    theirs = xla(lambda p, *x: net.apply({"params": p}, *x), params, *given)
    assert 1.0 <= theirs / flops.transformer(config, params, 64, 40).flops < 1.06


def test_text_and_vision_towers_are_xlas_count():
    config = t5.T5Config(d_model=128, d_ff=512, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu")
    net, ids = t5.T5Encoder(config, scan_unroll=2), jax.ShapeDtypeStruct((1, 48), jnp.int32)
    params = jax.eval_shape(net.init, jax.random.key(0), ids)["params"]
    theirs = xla(lambda p, x: net.apply({"params": p}, x), params, ids)
    assert 1.0 <= theirs / flops.text_encoder(config, params, 48).flops < 1.06

    vision = clip.CLIPVisionConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, image_size=56, patch_size=14
    )
    net, pixels = clip.CLIPVision(vision, scan_unroll=2), arrays((1, 56, 56, 3))[0]
    params = jax.eval_shape(net.init, jax.random.key(0), pixels)["params"]
    theirs = xla(lambda p, x: net.apply({"params": p}, x), params, pixels)
    assert 1.0 <= theirs / flops.vision_tower(vision, params).flops < 1.06


def test_decoder_is_xlas_count_with_folded_upsampling():
    config = replace(SD35.vae, block_out_channels=(32, 64, 64), norm_num_groups=8)
    params = jax.eval_shape(lambda: vae.init(jax.random.key(0), config))["decoder"]
    theirs = xla(lambda p, x: vae.Decoder(config).apply({"params": p}, x), params, arrays((1, 16, 16, 16))[0])
    mine = flops.decoder(SD35._replace(vae=config), params, (16, 16, 16)).flops
    assert 0.97 < theirs / mine < 1.08  # XLA leaves out products with the padding


@pytest.mark.parametrize(
    ("configs", "tokens", "text", "expected"),
    [(SD35, 1024, 205, 2.23), (SD35, 4096, 333, 11.3), (FLUX, 1024, 128, 15.8), (FLUX, 4096, 512, 74.4)],
    ids=["SD3.5-M 512", "SD3.5-M 1024", "FLUX 512", "FLUX 1024"],
)
def test_full_size_passes_in_teraflops(configs, tokens, text, expected):
    """By hand: 12 D^2 weights a token and block, 4 D^2 for a second attention; 4 S^2 D for attention (to 1%)."""
    found = flops.transformer(configs.transformer, shapes(configs, "transformer"), tokens, text)
    assert found.flops / 1e12 == pytest.approx(expected, rel=0.01)


def test_published_shapes_have_the_published_numbers_of_parameters():
    sizes = {"transformer": 2.47e9, "vae": 83.8e6, "text_encoder": 123.7e6, "text_encoder_2": 694.7e6, "text_encoder_3": 4.762e9}
    for name, number in sizes.items():
        assert sum(leaf.size for leaf in jax.tree.leaves(shapes(SD35, name))) == pytest.approx(number, rel=0.001), name
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes(FLUX, "transformer"))) == pytest.approx(11.9e9, rel=0.001)
    assert sum(leaf.size for leaf in jax.tree.leaves(scorer_shapes(published.VIT_H))) == pytest.approx(986e6, rel=0.001)
    assert pipeline.default_side(SD35) == pipeline.default_side(FLUX) == 1024


def test_a_layer_that_no_rule_fits_is_named():
    params = {"surprise": {"kernel": jax.ShapeDtypeStruct((4, 4), jnp.float32)}}
    with pytest.raises(ValueError, match="surprise/kernel"):
        flops.count(params, [("^layers", 1)], [], 4)

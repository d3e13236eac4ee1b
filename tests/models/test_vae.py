"""The autoencoder against diffusers in torch, its name table at full size, and the forms that differ from the torch module."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from densegrpo_jax.models import vae
from tests.models.convert import params_from_torch

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

# The published config.json files.
FULL = {
    "sd3": dict(latent_channels=16, scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False),
    "flux": dict(latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False),
    "sd1.5": dict(latent_channels=4, scaling_factor=0.18215),
}
for values in FULL.values():
    values.update(
        _class_name="AutoencoderKL",
        _diffusers_version="0.29.0.dev0",
        act_fn="silu",
        block_out_channels=[128, 256, 512, 512],
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        force_upcast=True,
        in_channels=3,
        out_channels=3,
        layers_per_block=2,
        latents_mean=None,
        latents_std=None,
        norm_num_groups=32,
        sample_size=512,
    )

SMALL = {
    "sd3-like": dict(block_out_channels=[8, 16, 16], latent_channels=16, use_quant_conv=False, use_post_quant_conv=False),
    "quant convs": dict(block_out_channels=[16, 8], layers_per_block=2),
    "post only, no attention": dict(block_out_channels=[8, 8, 16, 24], use_quant_conv=False, mid_block_add_attention=False),
    "one level, two to five channels": dict(block_out_channels=[8], in_channels=2, out_channels=5),
}

decode = jax.jit(vae.decode, static_argnums=(1, 3))
encode = jax.jit(vae.encode, static_argnums=(1, 3))


def torch_model(values, **extra):
    levels = len(values["block_out_channels"])
    values = {
        **values,
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        **extra,
    }
    return diffusers.AutoencoderKL(**{k: v for k, v in values.items() if not k.startswith("_")}), values


def randomized(model, seed):
    """Every parameter away from its initial value: norms start at one and zero, which would hide a mix-up."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def difference(ours, theirs):
    theirs = np.asarray(theirs)
    assert ours.shape == theirs.shape
    return np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max()


def nchw(x):
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


def nhwc(x):
    return np.moveaxis(x.detach().numpy(), 1, -1)


@pytest.mark.parity
@pytest.mark.parametrize("name", SMALL)
def test_equals_diffusers_both_ways_with_gradients(name):
    theirs, values = torch_model(SMALL[name], norm_num_groups=4)
    theirs = randomized(theirs, seed=1)
    config = vae.VAEConfig.from_json(values)
    params = params_from_torch(theirs.state_dict(), vae.name_table(config))
    f = config.downsampling
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (2, 2 * f, 3 * f, config.in_channels)).astype(np.float32)
    latents = rng.normal(size=(2, 4, 3, config.latent_channels)).astype(np.float32)

    torch_images = nchw(images).requires_grad_()
    posterior = theirs.encode(torch_images).latent_dist
    weight = rng.normal(size=posterior.mean.shape).astype(np.float32)
    (posterior.mean * torch.from_numpy(weight)).sum().backward()
    weight = np.moveaxis(weight, 1, -1)
    (_, (mean, logvar)), gradient = jax.jit(
        jax.value_and_grad(
            lambda x: (lambda out: ((out[0] * weight).sum(), out))(vae.encode(params, config, x)),
            has_aux=True,
        )
    )(images)
    assert difference(mean, nhwc(posterior.mean)) < 1e-5
    assert difference(logvar, nhwc(posterior.logvar)) < 1e-5
    assert difference(gradient, nhwc(torch_images.grad)) < 2e-5

    torch_latents = nchw(latents).requires_grad_()
    expected = theirs.decode(torch_latents).sample
    weight = rng.normal(size=expected.shape).astype(np.float32)
    (expected * torch.from_numpy(weight)).sum().backward()
    weight = np.moveaxis(weight, 1, -1)
    (_, decoded), gradient = jax.jit(
        jax.value_and_grad(lambda x: (lambda y: ((y * weight).sum(), y))(vae.decode(params, config, x)), has_aux=True)
    )(latents)
    assert difference(decoded, nhwc(expected)) < 1e-5
    assert difference(gradient, nhwc(torch_latents.grad)) < 2e-5


@pytest.mark.parity
def test_parameter_gradients_equal_diffusers():
    theirs, values = torch_model(SMALL["sd3-like"], norm_num_groups=4)
    theirs = randomized(theirs, seed=2)
    config = vae.VAEConfig.from_json(values)
    table = vae.name_table(config)
    params = params_from_torch(theirs.state_dict(), table)
    latents = np.random.default_rng(0).normal(size=(2, 2, 3, 16)).astype(np.float32)
    theirs.decode(nchw(latents)).sample.square().sum().backward()
    expected = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in theirs.named_parameters()}
    expected = flatten_dict(params_from_torch(expected, table)["decoder"])
    gradients = flatten_dict(jax.jit(jax.grad(lambda p: jnp.square(vae.decode(p, config, latents)).sum()))(params)["decoder"])
    # One scale for all: a key's bias has no influence (softmax), so its gradient is rounding on both sides.
    scale = max(np.abs(g).max() for g in expected.values())
    for path, gradient in gradients.items():
        assert np.abs(gradient - expected[path]).max() < 1e-5 * scale, path


@pytest.mark.parity
@pytest.mark.parametrize("name", FULL)
def test_name_table_covers_the_published_model(name):
    config = vae.VAEConfig.from_json(FULL[name])
    with torch.device("meta"):
        theirs, _ = torch_model(FULL[name])
    shapes = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
    ours = flatten_dict(jax.eval_shape(lambda: vae.init(jax.random.key(0), config)), sep="/")
    table = vae.name_table(config)
    assert table.keys() == ours.keys()
    axes = {"none": slice(None), "transpose": slice(None, None, -1), "conv": [2, 3, 1, 0]}
    expected = {}
    for path, source in table.items():
        (torch_name,) = source.names
        expected[path] = tuple(np.array(shapes.pop(torch_name))[axes[source.transform]])
    assert not shapes
    assert {path: leaf.shape for path, leaf in ours.items()} == expected


def test_upsample_conv_is_repeat_then_convolve():
    keys = jax.random.split(jax.random.key(0), 2)
    x, kernel = jax.random.normal(keys[0], (2, 3, 5, 4)), jax.random.normal(keys[1], (3, 3, 4, 6))
    large = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
    expected = jax.lax.conv_general_dilated(large, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert difference(vae.upsample_conv(x, kernel), expected) < 1e-6


def test_group_norm_gives_each_group_mean_zero_and_unit_variance():
    x = 50 + 3 * jax.random.normal(jax.random.key(0), (2, 6, 7, 12)) * jnp.arange(1.0, 13)[None, None, None]
    norm = vae.GroupNorm(3)
    y = norm.apply(norm.init(jax.random.key(1), x), x).reshape(2, 42, 3, 4)
    np.testing.assert_allclose(y.mean((1, 3)), 0, atol=2e-6)
    np.testing.assert_allclose(jnp.square(y).mean((1, 3)), 1, rtol=1e-5)


@pytest.fixture(scope="module")
def small():
    _, values = torch_model(SMALL["sd3-like"], norm_num_groups=4)
    config = vae.VAEConfig.from_json(values)
    return config, jax.jit(vae.init, static_argnums=1)(jax.random.key(0), config)


def test_images_do_not_depend_on_their_batch(small):
    config, params = small
    latents = jax.random.normal(jax.random.key(1), (3, 4, 4, 16))
    whole = decode(params, config, latents)
    one_by_one = jax.lax.map(lambda z: decode(params, config, z[None])[0], latents)
    assert difference(one_by_one, whole) < 1e-5


def test_remat_changes_nothing(small):
    config, params = small
    latents = jax.random.normal(jax.random.key(1), (1, 2, 3, 16))

    def gradient(remat):
        decoder = vae.Decoder(config, remat=remat)
        return jax.jit(jax.grad(lambda z: jnp.square(decoder.apply({"params": params["decoder"]}, z)).sum()))(latents)

    assert difference(gradient(True), gradient(False)) < 1e-5


def test_bfloat16_is_close_and_returns_float32(small):
    config, params = small
    latents = jax.random.normal(jax.random.key(1), (2, 4, 4, 16))
    images = decode(params, config, latents, jnp.bfloat16)
    assert images.dtype == jnp.float32
    exact = decode(params, config, latents)
    assert 1e-5 < jnp.linalg.norm(images - exact) / jnp.linalg.norm(exact) < 0.05
    mean, logvar = encode(params, config, images, jnp.bfloat16)
    assert mean.dtype == logvar.dtype == jnp.float32


def test_large_activations_stay_finite(small):
    config, params = small
    latents = 1e4 * jax.random.normal(jax.random.key(1), (1, 4, 4, 16))
    for dtype in (jnp.float32, jnp.bfloat16):
        assert np.isfinite(decode(params, config, latents, dtype)).all()
    with pytest.raises(ValueError, match="float16"):
        decode(params, config, latents, jnp.float16)


def test_scaling_is_what_diffusers_pipelines_do():
    config = vae.VAEConfig.from_json(FULL["sd3"])
    latents = jnp.asarray([0.5, -2.0])
    np.testing.assert_allclose(vae.normalize_latents(config, latents), (np.array([0.5, -2.0]) - 0.0609) * 1.5305, rtol=1e-6)
    np.testing.assert_allclose(vae.denormalize_latents(config, vae.normalize_latents(config, latents)), latents, rtol=1e-6)
    plain = vae.VAEConfig.from_json(FULL["sd1.5"])
    np.testing.assert_allclose(vae.normalize_latents(plain, latents), latents * 0.18215, rtol=1e-6)


def test_fresh_parameters_give_images_of_moderate_size(small):
    config, params = small
    images = decode(params, config, jax.random.normal(jax.random.key(1), (4, 4, 4, 16)))
    assert 0.05 < float(jnp.std(images)) < 3
    kernel = params["decoder"]["up_0_resnet_0"]["conv1"]["kernel"]
    assert math.isclose(float(jnp.std(kernel)), (3 * 9 * 16) ** -0.5, rel_tol=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act_fn": "relu"}, "act_fn = 'relu'"),
        ({"up_block_types": ["UpDecoderBlock2D"] * 3 + ["AttnUpDecoderBlock2D"]}, "up_block_types"),
        ({"latents_mean": [0.0] * 16}, "latents_mean"),
        ({"_class_name": "AutoencoderTiny"}, "AutoencoderTiny"),
        ({"tiling_magic": 3}, "unknown option tiling_magic"),
        ({"norm_num_groups": 48}, "norm_num_groups 48"),
    ],
)
def test_unsupported_configs_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        vae.VAEConfig.from_json({**FULL["sd3"], **change})


def test_wrong_shapes_are_refused(small):
    config, params = small
    with pytest.raises(ValueError, match="latents must be"):
        decode(params, config, jnp.zeros((1, 16, 4, 4)))
    with pytest.raises(ValueError, match="multiples of 4"):
        encode(params, config, jnp.zeros((1, 10, 8, 3)))

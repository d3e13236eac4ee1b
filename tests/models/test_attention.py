"""Every implementation equals the formula in values and gradients, as far as it runs on CPU (splash by its interpreter)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from densegrpo_jax.models.attention import attention, default_impl, splash_attention


def plain(q, k, v, bias=0.0, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weights = jax.nn.softmax(scale * jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias, axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def inputs(queries, keys, batch=2, heads=3, width=8):
    keys_ = jax.random.split(jax.random.key(0), 4)
    shapes = (batch, queries, heads, width), (batch, keys, heads, width), (batch, keys, heads, width), (batch, queries, heads, width)
    return [jax.random.normal(key, shape) for key, shape in zip(keys_, shapes)]


def value_and_grads(f, weights):
    return jax.jit(jax.value_and_grad(lambda *args: (weights * f(*args) ** 2).sum(), argnums=(0, 1, 2)))


def assert_close(ours, theirs, bound=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=bound * np.abs(b).max()), ours, theirs)


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (4, 9)])
def test_xla_equals_the_formula(queries, keys):
    *qkv, weights = inputs(queries, keys)
    assert_close(value_and_grads(partial(attention, impl="xla"), weights)(*qkv), value_and_grads(plain, weights)(*qkv))


@pytest.mark.parametrize("shape", [(1, 1, 5, 6), (1, 3, 5, 6), (2, 1, 5, 6), (2, 3, 5, 6)])
def test_bias_and_scale_enter_value_and_gradient(shape):
    q, k, v, weights = inputs(5, 6)
    bias = jax.random.normal(jax.random.key(9), shape)

    def grads(f):
        return jax.jit(jax.value_and_grad(lambda bias, q: (weights * f(q, k, v, bias=bias, scale=1.0)).sum(), argnums=(0, 1)))(bias, q)

    assert_close(grads(attention), grads(plain))


def test_masked_keys_are_not_seen():
    q, k, v, _ = inputs(5, 5)
    mask = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), 0.0, jnp.finfo(jnp.float32).min)[None, None]
    before = attention(q, k, v, bias=mask)
    after = attention(q, k.at[:, 3:].add(100.0), v.at[:, 3:].set(1e9), bias=mask)
    np.testing.assert_array_equal(before[:, :3], after[:, :3])


def test_large_logits_do_not_overflow(nan_checks):
    q, k, v, weights = inputs(4, 4)
    out, grads = value_and_grads(attention, weights)(100 * q, 100 * k, v)
    assert np.isfinite(out) and all(np.isfinite(grad).all() for grad in grads)


def test_vmap_equals_a_loop():
    q, k, v, weights = inputs(4, 5, batch=3)
    grad = jax.grad(lambda q, k, v, w: (w * attention(q[None], k[None], v[None])[0] ** 2).sum(), argnums=(0, 1, 2))
    assert_close(jax.vmap(grad)(q, k, v, weights), value_and_grads(plain, weights)(q, k, v)[1])


def test_bfloat16_has_a_float32_softmax():
    q, k, v, _ = inputs(64, 64)
    out = attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)))
    assert out.dtype == jnp.bfloat16
    exact = plain(*(x.astype(jnp.bfloat16).astype(jnp.float32) for x in (q, k, v)))
    assert np.abs(out.astype(jnp.float32) - exact).max() < 1e-2 * np.abs(exact).max()


@pytest.mark.parametrize(("queries", "keys"), [(130, 130), (5, 200)])
def test_splash_equals_xla(queries, keys):
    *qkv, weights = inputs(queries, keys, batch=1, heads=2, width=64)
    ours = value_and_grads(partial(splash_attention, scale=0.125, interpret=True), weights)(*qkv)
    assert_close(ours, value_and_grads(partial(attention, impl="xla"), weights)(*qkv), 2e-5)


@pytest.mark.parametrize(("axes", "shape"), [(("data", "fsdp"), (4, 2)), (("data", "fsdp", "tensor"), (2, 2, 2))])
def test_splash_is_sharded_over_the_ambient_mesh(axes, shape):
    q, k, v, _ = inputs(9, 9, batch=8, heads=2, width=64)
    expected = attention(q, k, v, impl="xla")
    mesh = jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    q, k, v = (jax.device_put(x, jax.NamedSharding(mesh, jax.P(("data", "fsdp")))) for x in (q, k, v))
    with jax.set_mesh(mesh):
        out = jax.jit(partial(splash_attention, scale=0.125, interpret=True))(q, k, v)
    assert_close(out, expected)
    assert out.addressable_shards[0].data.shape == (8 // (shape[0] * shape[1]), 9, 2 // (shape[2] if "tensor" in axes else 1), 64)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cudnn's attention needs a GPU")
@pytest.mark.parametrize(("tokens", "width"), [(1229, 64), (1536, 128)])  # Stable Diffusion 3.5 Medium and FLUX.1 at 512 pixels
def test_cudnn_is_as_near_to_float32_as_xla_in_bfloat16(tokens, width):
    *qkv, weights = inputs(tokens, tokens, batch=2, heads=8, width=width)
    exact = value_and_grads(partial(attention, impl="xla"), weights)(*qkv)
    half = [x.astype(jnp.bfloat16) for x in (*qkv, weights)]
    errors = []
    for impl in ("cudnn", "xla"):
        found = value_and_grads(partial(attention, impl=impl), half[-1])(*half[:-1])
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact))
        errors.append([np.abs(a.astype(jnp.float32) - b).max() / np.abs(b).max() for a, b in pairs])
    assert np.all(np.array(errors[0]) < 2 * np.array(errors[1]) + 1e-2), errors


def test_auto_goes_by_backend_and_size():
    assert default_impl("cpu", 10**5, 64, jnp.bfloat16) == "xla"
    assert default_impl("tpu", 1357, 64, jnp.bfloat16) == "xla"
    assert default_impl("tpu", 4429, 64, jnp.float32) == "splash"
    assert default_impl("gpu", 333, 128, jnp.bfloat16) == "cudnn"
    assert default_impl("gpu", 333, 128, jnp.float32) == default_impl("gpu", 333, 256, jnp.bfloat16) == "xla"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"impl": "flash"}, "auto, xla, cudnn, splash"),
        ({"impl": "splash", "bias": (1, 1, 4, 5)}, "takes no bias"),
        ({"bias": (4, 5)}, "must be"),
        ({"bias": (1, 2, 4, 5)}, "must be"),
        ({"k": (2, 5, 1, 8)}, "do not fit"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    q, k, v, _ = inputs(4, 5)
    arguments = {"q": q, "k": k, "v": v} | {name: jnp.zeros(x) if isinstance(x, tuple) else x for name, x in change.items()}
    with pytest.raises(ValueError, match=message):
        attention(**arguments)

"""Hand-written derivatives equal autodiff of plain references, under jit, vmap, scan, remat and sharding; embeddings and patches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from densegrpo_jax.models.layers import (
    Dense,
    LayerNorm,
    RMSNorm,
    normalize,
    patchify,
    position_table,
    rotary_table,
    timestep_embedding,
    unpatchify,
)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def plain_dense(variables, x, scale=0.7):
    p, l = variables["params"], variables["lora"]
    return x @ p["kernel"] + p["bias"][None, None] + scale * ((x @ l["a"]) @ l["b"])


def plain_layer_norm(x, eps=1e-6):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + eps)


VARIABLES = {
    "params": {"kernel": normal(0, 6, 10), "bias": normal(1, 10)},
    "lora": {"a": normal(2, 6, 3), "b": normal(3, 3, 10)},
}
DENSE = Dense(10, lora_scale=0.7)
X, WEIGHTS = normal(4, 8, 5, 6), normal(5, 8, 5, 10)


def gradients(layer):
    """With respect to every parameter and the input; the square makes the gradient depend on the output."""
    return jax.jit(jax.value_and_grad(lambda variables, x: (WEIGHTS * layer(variables, x) ** 2).sum(), argnums=(0, 1)))


def assert_close(ours, theirs, rtol=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max()), ours, theirs)


@pytest.fixture(scope="module")
def plain():
    return gradients(plain_dense)(VARIABLES, X)


def test_dense_with_adapter_equals_its_formula(plain):
    assert_close(gradients(DENSE.apply)(VARIABLES, X), plain)


def test_dense_without_adapter_equals_its_formula():
    base = {"params": VARIABLES["params"]}
    plain = gradients(lambda v, x: x @ v["params"]["kernel"] + v["params"]["bias"][None, None])(base, X)
    assert_close(gradients(DENSE.apply)(base, X), plain)


def test_dense_under_vmap_and_remat(plain):
    assert_close(gradients(lambda v, x: jax.vmap(lambda one: DENSE.apply(v, one))(x))(VARIABLES, X), plain)
    assert_close(gradients(jax.checkpoint(DENSE.apply))(VARIABLES, X), plain)


def test_dense_under_vmap_over_weights():
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), VARIABLES)
    out = jax.vmap(lambda v: DENSE.apply(v, X))(stacked)
    assert_close(out[1], DENSE.apply(jax.tree.map(lambda leaf: 2 * leaf, VARIABLES), X))


@pytest.mark.parametrize("spec", [jax.P("data"), jax.P("data", None, "fsdp")])
def test_dense_sharded_over_eight_devices(plain, spec):
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.device_put(X, jax.NamedSharding(mesh, spec))
    kernel = jax.device_put(VARIABLES["params"]["kernel"], jax.NamedSharding(mesh, jax.P("fsdp")))
    variables = {**VARIABLES, "params": {**VARIABLES["params"], "kernel": kernel}}
    with jax.set_mesh(mesh):
        assert_close(gradients(DENSE.apply)(variables, x), plain)


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + Dense(6, name="dense")(jnp.tanh(x)), None


@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_see_their_own_adapters(remat):
    params = {"dense": {"kernel": normal(6, 3, 6, 6), "bias": normal(7, 3, 6)}}
    lora = {"dense": {"a": normal(8, 3, 6, 2), "b": normal(9, 3, 2, 6)}}
    step = nn.remat(Step, prevent_cse=False) if remat else Step
    scanned = nn.scan(step, variable_axes={"params": 0, "lora": 0}, split_rngs={"params": True}, length=3)()

    def plain(lora, x):
        for i in range(3):
            p, l = (jax.tree.map(lambda leaf: leaf[i], tree["dense"]) for tree in (params, lora))  # noqa: B023
            x = x + plain_dense({"params": p, "lora": l}, jnp.tanh(x), scale=1.0)
        return x.sum()

    ours = jax.jit(jax.value_and_grad(lambda lora, x: scanned.apply({"params": params, "lora": lora}, x, None)[0].sum(), argnums=(0, 1)))
    assert_close(ours(lora, X), jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(lora, X), 1e-4)


def test_a_small_adapter_survives_bfloat16():
    """W + A B in bfloat16 would be W: here x W is zero, and what is left is the adapter."""
    variables = {"params": {"kernel": jnp.array([[1.0], [-1.0]])}, "lora": {"a": jnp.full((2, 1), 1e-3), "b": jnp.ones((1, 1))}}
    layer = Dense(1, use_bias=False, dtype=jnp.bfloat16)
    apply = lambda lora: layer.apply({**variables, "lora": lora}, jnp.ones((1, 2))).astype(jnp.float32).sum()  # noqa: E731
    out, grads = jax.value_and_grad(apply)(variables["lora"])
    np.testing.assert_allclose(out, 2e-3, rtol=1e-2)
    assert layer.apply(variables, jnp.ones((1, 2))).dtype == jnp.bfloat16
    assert grads["a"].dtype == grads["b"].dtype == jnp.float32
    np.testing.assert_allclose(grads["b"], [[2e-3]], rtol=1e-2)


def test_weight_gradients_keep_the_precision_of_the_weights():
    """The sum of 4097 ones is no bfloat16 number."""
    layer = Dense(1, use_bias=False, dtype=jnp.bfloat16)
    grad = jax.grad(lambda k: layer.apply({"params": {"kernel": k}}, jnp.ones((4097, 1))).astype(jnp.float32).sum())(jnp.ones((1, 1)))
    assert grad.dtype == jnp.float32 and grad[0, 0] == 4097


@pytest.mark.parametrize(("a", "b"), [((5, 3), (3, 10)), ((6, 3), (2, 10)), ((6, 3), (3, 9)), ((2, 6, 3), (2, 3, 10)), ((6, 3), None)])
def test_an_adapter_that_does_not_fit_is_refused(a, b):
    lora = {"a": jnp.zeros(a)} | ({} if b is None else {"b": jnp.zeros(b)})
    with pytest.raises(ValueError, match="do not fit"):
        DENSE.apply({**VARIABLES, "lora": lora}, X)


# --- norms ---


def test_layer_norm_equals_autodiff_of_its_formula():
    x, weights = normal(10, 4, 3, 16), normal(11, 4, 3, 16)
    params = {"scale": normal(12, 16), "bias": normal(13, 16)}

    def plain(params, x):
        y = plain_layer_norm(x) * params["scale"][None, None] + params["bias"][None, None]
        return (weights * y**2).sum()

    def ours(params, x):
        return (weights * LayerNorm().apply({"params": params}, x) ** 2).sum()

    expected = jax.value_and_grad(plain, argnums=(0, 1))(params, x)
    assert_close(jax.value_and_grad(ours, argnums=(0, 1))(params, x), expected)
    each = jax.vmap(jax.grad(lambda x, w: (w * normalize(x, 1e-6) ** 2).sum()))(x, weights)
    assert_close(each, jax.grad(lambda x: (weights * plain_layer_norm(x) ** 2).sum())(x))


def test_norm_statistics_are_float32_and_survive_a_large_mean():
    x = normal(14, 4, 64)
    np.testing.assert_allclose(normalize(x + 1000.0, 1e-6), plain_layer_norm(x), atol=2e-3)  # 1000 leaves x three digits
    low = x.astype(jnp.bfloat16)
    assert normalize(low, 1e-6).dtype == jnp.float32
    assert jax.grad(lambda x: normalize(x, 1e-6)[0, 0])(low).dtype == jnp.bfloat16
    np.testing.assert_allclose(normalize(low, 1e-6), plain_layer_norm(low.astype(jnp.float32)), atol=1e-5)
    assert LayerNorm(affine=False, dtype=jnp.bfloat16).apply({}, low).dtype == jnp.bfloat16


def test_rms_norm_equals_its_formula():
    x, scale = normal(15, 4, 3, 8), normal(16, 8)
    expected = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-6) * scale[None, None]
    np.testing.assert_allclose(RMSNorm().apply({"params": {"scale": scale}}, x), expected, rtol=1e-5)


# --- embeddings and patches ---


def test_timestep_embedding_equals_its_formula():
    t = np.array([0.0, 0.25, 31.0, 1000.0])
    angles = t[:, None] * 10000.0 ** (-np.arange(128) / 128)
    ours = timestep_embedding(jnp.asarray(t), 256)
    np.testing.assert_allclose(ours, np.concatenate([np.cos(angles), np.sin(angles)], 1), atol=2e-4)  # float32 angles up to 1000


@pytest.mark.parity
def test_embeddings_equal_diffusers():
    torch = pytest.importorskip("torch")
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    t = np.linspace(0, 1000, 101, dtype=np.float32)
    theirs = embeddings.get_timestep_embedding(torch.tensor(t), 256, flip_sin_to_cos=True, downscale_freq_shift=0)
    np.testing.assert_allclose(timestep_embedding(t, 256), theirs, atol=np.spacing(np.float32(1000)))  # of the largest angle
    theirs = embeddings.get_2d_sincos_pos_embed(24, 12, base_size=4, output_type="pt").float()
    np.testing.assert_allclose(position_table(24, 12, 4), theirs, atol=1e-7)


def test_patches_are_rows_of_row_column_channel_and_come_back():
    x = jnp.arange(2 * 4 * 6 * 3.0).reshape(2, 4, 6, 3)
    patches = patchify(x, 2)
    assert patches.shape == (2, 6, 12)
    np.testing.assert_array_equal(patches[1, 4].reshape(2, 2, 3), x[1, 2:4, 2:4])
    np.testing.assert_array_equal(unpatchify(patches, 2, 4, 6), x)
    packed = patchify(x, 2, channels_first=True)
    np.testing.assert_array_equal(packed.reshape(*patches.shape[:2], -1, 4).swapaxes(2, 3).reshape(patches.shape), patches)
    np.testing.assert_array_equal(unpatchify(packed, 2, 4, 6, channels_first=True), x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: patchify(jnp.zeros((1, 5, 4, 1)), 2), "multiples of 2"),
        (lambda: unpatchify(jnp.zeros((1, 5, 4)), 2, 4, 4), "5 patches"),
        (lambda: rotary_table((2, 3, 4), 2, 2), "three even widths"),
        (lambda: rotary_table((4, 4), 2, 2), "three even widths"),
        (lambda: timestep_embedding(jnp.zeros(()), 8), "shape"),
        (lambda: timestep_embedding(jnp.zeros(2), 7), "even"),
        (lambda: position_table(6, 2, 2), "multiple of 4"),
    ],
)
def test_wrong_sizes_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

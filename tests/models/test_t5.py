"""T5's encoder against transformers in torch, its name table at full size, position buckets, masks, and the scan's settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from densegrpo_jax.models import t5
from tests.models.convert import params_from_torch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

XXL = {
    "_name_or_path": "google/t5-v1_1-xxl",
    "architectures": ["T5EncoderModel"],
    "classifier_dropout": 0.0,
    "d_ff": 10240,
    "d_kv": 64,
    "d_model": 4096,
    "decoder_start_token_id": 0,
    "dense_act_fn": "gelu_new",
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "is_gated_act": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "num_decoder_layers": 24,
    "num_heads": 64,
    "num_layers": 24,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "vocab_size": 32128,
}
SMALL = {
    "vocab_size": 50,
    "d_model": 24,
    "d_kv": 5,  # heads times this is not the width
    "d_ff": 40,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "feed_forward_proj": "gated-gelu",
}
IDS = np.random.default_rng(0).integers(0, 50, (3, 30))
MASK = np.arange(30)[None] < np.array([30, 17, 4])[:, None]


def torch_model(values):
    """With every parameter away from its initial value; queries larger, so that the missing logit scale shows."""
    theirs = transformers.T5EncoderModel(transformers.T5Config(**values))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.add_((0.5 if "bias" in name else 0.2) * torch.randn(parameter.shape, generator=generator))
    return theirs.eval()


def published(theirs):
    """The state dict as the published files hold it."""
    state = dict(theirs.state_dict())
    for copy, name in t5.TIED.items():
        assert torch.equal(state.pop(copy), state[name])
    return state


def difference(ours, theirs):
    theirs = theirs.detach().numpy() if isinstance(theirs, torch.Tensor) else np.asarray(theirs)
    assert ours.shape == theirs.shape
    return np.abs(np.asarray(ours, np.float32) - theirs).max() / np.abs(theirs).max()


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["gated-gelu", "relu"])
def test_equals_transformers_with_parameter_gradients(kind):
    values = {**SMALL, "feed_forward_proj": kind}
    theirs = torch_model(values)
    config = t5.T5Config.from_json(values)
    table = t5.name_table(config)
    params = params_from_torch(published(theirs), table)
    encoder = t5.T5Encoder(config)
    weight = np.random.default_rng(1).normal(size=(3, 30, 24)).astype(np.float32)
    expected = theirs(torch.from_numpy(IDS)).last_hidden_state
    (expected * torch.from_numpy(weight)).sum().backward()

    def loss(params):
        hidden = encoder.apply({"params": params}, IDS)
        return (hidden * weight).sum(), hidden

    (_, hidden), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert difference(hidden, expected) < 1e-5
    wanted = flatten_dict(params_from_torch({name: p.grad for name, p in theirs.named_parameters()}, table), sep="/")
    for path, gradient in flatten_dict(gradients, sep="/").items():
        assert difference(gradient, wanted[path]) < 5e-5, path


@pytest.mark.parity
def test_masked_equals_transformers():
    theirs = torch_model(SMALL)
    config = t5.T5Config.from_json(SMALL)
    params = params_from_torch(published(theirs), t5.name_table(config))
    expected = theirs(torch.from_numpy(IDS), attention_mask=torch.from_numpy(MASK.astype(int))).last_hidden_state
    hidden = jax.jit(lambda ids, mask: t5.T5Encoder(config).apply({"params": params}, ids, mask))(IDS, MASK)
    assert difference(hidden, expected) < 1e-5


@pytest.mark.parity
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (32, 256), (16, 64)])
def test_buckets_equal_transformers(buckets, distance):
    offset = torch.arange(600)[None] - torch.arange(600)[:, None]
    expected = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket(offset, True, buckets, distance)
    np.testing.assert_array_equal(t5.relative_buckets(600, buckets, distance), expected.numpy())


def test_buckets_are_symmetric_and_widen():
    table = t5.relative_buckets(300, 32, 128)
    np.testing.assert_array_equal(table[0, :8], [0, *range(17, 24)])
    np.testing.assert_array_equal(table[1:, 0], table[0, 1:] - 16)
    assert (np.diff(table[1:, 0]) >= 0).all()
    assert set(table[128:, 0]) == {15}


@pytest.mark.parity
def test_name_table_covers_the_published_model():
    config = t5.T5Config.from_json(XXL)
    with torch.device("meta"):
        theirs = {name: tuple(t.shape) for name, t in transformers.T5EncoderModel(transformers.T5Config(**XXL)).state_dict().items()}
    for copy in t5.TIED:
        del theirs[copy]
    ours = flatten_dict(jax.eval_shape(t5.T5Encoder(config).init, jax.random.key(0), jnp.zeros((1, 4), int))["params"], sep="/")
    table = t5.name_table(config)
    assert table.keys() == ours.keys()
    claimed = {}
    for path, source in table.items():
        shape = ours[path].shape[source.stacked :]
        assert not source.stacked or ours[path].shape[0] == len(source.names) == 24
        claimed |= {name: shape[::-1] if source.transform == "transpose" else shape for name in source.names}
    assert claimed == theirs
    assert sum(len(source.names) for source in table.values()) == len(theirs)


@pytest.fixture(scope="module")
def small():
    config = t5.T5Config(**SMALL)
    return config, jax.jit(t5.T5Encoder(config).init)(jax.random.key(0), IDS)["params"]


def encode(config, params, *inputs, **settings):
    return jax.jit(lambda *x: t5.T5Encoder(config, **settings).apply({"params": params}, *x))(*inputs)


def test_what_the_mask_hides_does_not_matter(small):
    config, params = small
    other = np.where(MASK, IDS, 7)
    seen = encode(config, params, IDS, MASK)[MASK]
    np.testing.assert_array_equal(encode(config, params, other, MASK)[MASK], seen)
    assert difference(encode(config, params, other)[MASK], seen) > 1e-3
    np.testing.assert_allclose(encode(config, params, IDS, np.ones_like(MASK)), encode(config, params, IDS), atol=1e-5)


def test_settings_of_the_scan_change_nothing(small):
    config, params = small

    def gradient(**settings):
        module = t5.T5Encoder(config, **settings)
        return jax.jit(jax.grad(lambda p: (module.apply({"params": p}, IDS) ** 3).sum()))(params)

    expected = gradient()
    for settings in ({"remat": True}, {"scan_unroll": 2}):
        for ours, wanted in zip(jax.tree.leaves(gradient(**settings)), jax.tree.leaves(expected)):
            assert difference(ours, wanted) < 1e-5


def test_bfloat16_is_close_and_large_activations_stay_finite(small):
    config, params = small
    half = encode(config, params, IDS, dtype=jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    assert 0 < difference(half, encode(config, params, IDS)) < 0.1
    large = jax.tree.map(lambda x: x, params)
    large["token_embedding"] = {"embedding": 1e5 * params["token_embedding"]["embedding"]}  # beyond float16
    assert np.isfinite(encode(config, large, IDS, dtype=jnp.bfloat16)).all()


def test_fresh_parameters_have_the_original_scales(small):
    _, params = small
    for name, std in {"q": (24 * 5) ** -0.5, "k": 24**-0.5, "o": 20**-0.5, "wo": 40**-0.5}.items():
        assert np.std(params["layers"][name]["kernel"]) == pytest.approx(std, rel=0.1), name
    assert np.std(params["token_embedding"]["embedding"]) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj 'gated-silu'"),
        ({"dense_act_fn": "relu"}, "dense_act_fn = 'relu'"),
        ({"is_decoder": True}, "is_decoder"),
        ({"model_type": "umt5"}, "umt5"),
        ({"rope": 1}, "unknown option rope"),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets 3"),
        ({"relative_attention_max_distance": 8}, "relative_attention_max_distance 8"),
    ],
)
def test_unsupported_configs_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        t5.T5Config.from_json({**XXL, **change})


def test_wrong_inputs_are_refused(small):
    config, params = small
    for message, arguments, settings in [
        ("integers", (IDS.astype(np.float32),), {}),
        ("mask must have", (IDS, MASK[:, :5]), {}),
        ("float16", (IDS,), {"dtype": jnp.float16}),
    ]:
        with pytest.raises(ValueError, match=message):
            t5.T5Encoder(config, **settings).apply({"params": params}, *arguments)

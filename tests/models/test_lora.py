"""Adapters: which layers a target names, how they start, how they are counted, checked and merged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from densegrpo_jax.models import lora as adapters

SHAPES = {
    "blocks_0/attn/to_q/kernel": (3, 8, 8),
    "blocks_0/attn/to_q/bias": (3, 8),
    "blocks_0/attn/to_out_0/kernel": (3, 8, 8),
    "blocks_0/attn2/to_q/kernel": (3, 8, 8),
    "blocks_0/ff/net_0_proj/kernel": (3, 8, 32),
    "blocks_0/attn/norm_q/scale": (3, 4),
    "pos_embed/proj/kernel": (2, 2, 4, 8),
    "proj_out/kernel": (8, 16),
}
PARAMS = traverse_util.unflatten_dict({path: jnp.ones(shape) for path, shape in SHAPES.items()}, sep="/")


@pytest.mark.parametrize(
    ("targets", "paths"),
    [
        (("attn.to_q",), ["blocks_0/attn/to_q"]),
        (("to_q",), ["blocks_0/attn/to_q", "blocks_0/attn2/to_q"]),
        (("attn.to_out.0", "proj_out"), ["blocks_0/attn/to_out_0", "proj_out"]),
        (("attn/to_out_0",), ["blocks_0/attn/to_out_0"]),
        (("ff.net.0.proj",), ["blocks_0/ff/net_0_proj"]),
    ],
)
def test_targets_name_whole_components_in_either_spelling(targets, paths):
    assert adapters.target_paths(PARAMS, targets) == paths


@pytest.mark.parametrize("target", ["attn.add_q_proj", "q", "0", "out", "attn.norm_q", "pos_embed.proj", "roj_out"])
def test_a_target_that_matches_no_linear_layer_is_an_error_that_lists_them(target):
    with pytest.raises(ValueError, match=r"blocks_0/attn/to_q, blocks_0/attn2/to_q"):
        adapters.init(jax.random.key(0), PARAMS, ("attn.to_q", target), rank=2)


def test_a_fresh_adapter_is_gaussian_over_zero():
    params = {"wide": {"kernel": jax.ShapeDtypeStruct((2, 4000, 4), jnp.bfloat16)}}
    lora = adapters.init(jax.random.key(0), params, ("wide",), rank=8)["wide"]
    assert lora["a"].shape == (2, 4000, 8) and lora["b"].shape == (2, 8, 4)
    assert lora["a"].dtype == lora["b"].dtype == jnp.float32
    assert not lora["b"].any()
    assert abs(lora["a"].std() * 8 - 1) < 0.02 and abs(lora["a"].mean()) < 0.002


def test_a_layer_starts_alike_whatever_else_is_adapted():
    one = adapters.init(jax.random.key(0), PARAMS, ("attn.to_q",), rank=2)["blocks_0"]["attn"]["to_q"]["a"]
    all_ = adapters.init(jax.random.key(0), PARAMS, ("to_q", "proj_out"), rank=2)["blocks_0"]
    np.testing.assert_array_equal(one, all_["attn"]["to_q"]["a"])
    assert (one != all_["attn2"]["to_q"]["a"]).all()


def test_count_counts_layers_of_a_stack():
    assert adapters.count_modules(adapters.init(jax.random.key(0), PARAMS, ("to_q", "proj_out"), rank=2)) == 3 + 3 + 1


def test_merge_adds_the_scaled_product_to_the_adapted_kernels_alone():
    lora = adapters.init(jax.random.key(0), PARAMS, ("attn.to_q",), rank=2)
    lora["blocks_0"]["attn"]["to_q"]["b"] = jax.random.normal(jax.random.key(1), (3, 2, 8))
    merged = adapters.merge(PARAMS, lora, scale=0.5)
    pair = lora["blocks_0"]["attn"]["to_q"]
    delta = np.einsum("lir,lro->lio", pair["a"], pair["b"])
    np.testing.assert_allclose(merged["blocks_0"]["attn"]["to_q"]["kernel"], 1 + 0.5 * delta, rtol=1e-6)
    merged["blocks_0"]["attn"]["to_q"]["kernel"] = PARAMS["blocks_0"]["attn"]["to_q"]["kernel"]
    jax.tree.map(np.testing.assert_array_equal, merged, PARAMS)
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    assert adapters.merge(low, lora, 0.5)["blocks_0"]["attn"]["to_q"]["kernel"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "lora",
    [
        {"elsewhere/a": (8, 2), "elsewhere/b": (2, 8)},
        {"proj_out/a": (8, 2)},
        {"proj_out/a": (8, 2), "proj_out/b": (3, 16)},
        {"proj_out/a": (7, 2), "proj_out/b": (2, 16)},
        {"blocks_0/attn/to_q/a": (2, 8, 2), "blocks_0/attn/to_q/b": (2, 2, 8)},
    ],
)
def test_adapters_that_do_not_fit_are_refused_by_path(lora):
    tree = traverse_util.unflatten_dict({path: jnp.zeros(shape) for path, shape in lora.items()}, sep="/")
    with pytest.raises(ValueError, match=f"adapter at '{next(iter(lora)).rpartition('/')[0]}'"):
        adapters.merge(PARAMS, tree, 1.0)


@pytest.mark.parametrize("arguments", [{"rank": 0}, {"targets": ()}])
def test_empty_adapters_are_refused(arguments):
    with pytest.raises(ValueError, match="at least"):
        adapters.init(jax.random.key(0), PARAMS, **arguments)

"""The mesh of a run, and where arrays lie on it."""

import re
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest

from densegrpo_jax import cli, parallel, pipeline
from densegrpo_jax.config import Parallel
from densegrpo_jax.models.mmdit import INPUTS_SHARED, OUTPUTS_SHARED
from densegrpo_jax.plan import recipe

pytestmark = pytest.mark.mesh


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        (Parallel(), (8, 1, 1)),
        (Parallel(fsdp=4), (2, 4, 1)),
        (Parallel(4, 2), (2, 2, 1)),
        (Parallel(fsdp=2, tensor=2), (2, 2, 2)),
        (Parallel(tensor=8), (1, 1, 8)),
        (Parallel(1), None),
    ],
)
def test_a_run_takes_all_devices_or_as_many_as_it_is_told(settings, shape):
    mesh = parallel.make(settings)
    assert (mesh and tuple(mesh.shape.values())) == shape
    assert parallel.count(settings) == np.prod(shape or 1)
    assert parallel.shares(settings) == np.prod(shape or 1) // settings.tensor


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (Parallel(9), "parallel.devices = 9: there are 8"),
        (Parallel(fsdp=3), r"parallel.fsdp = 3 does not divide the 8 devices; choose one of \[1, 2, 4, 8\]"),
        (Parallel(6, 4), r"parallel.fsdp = 4 does not divide the 6 devices; choose one of \[1, 2, 3, 6\]"),
        (Parallel(tensor=3), r"parallel.tensor = 3 does not divide the 8 devices; choose one of \[1, 2, 4, 8\]"),
        (Parallel(fsdp=4, tensor=4), r"parallel.fsdp = 4 does not divide the 2 groups of devices; choose one of \[1, 2\]"),
    ],
)
def test_what_cannot_be_made_is_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        parallel.make(settings)


def test_weights_are_shared_by_their_longest_side_and_vectors_are_whole():
    mesh = parallel.make(Parallel(fsdp=4))
    shapes = {"stack": (4, 6, 8), "kernel": (12, 8), "vector": (8,), "odd": (3, 5)}
    tree = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    found = {name: tuple(place.spec) for name, place in parallel.spread(mesh, tree).items()}
    assert found == {"stack": (None, None, "fsdp"), "kernel": ("fsdp", None), "vector": (None,), "odd": (None, None)}
    placed = parallel.shared(mesh, tree)
    assert {name: leaf.addressable_shards[0].data.shape for name, leaf in placed.items()} == shapes | {"stack": (4, 6, 2), "kernel": (3, 8)}


def test_tensor_takes_the_side_of_heads_and_hidden_units_and_fsdp_another():
    mesh = parallel.make(Parallel(fsdp=2, tensor=2))
    shapes = {
        "blocks/attn/to_q/kernel": (4, 8, 16),
        "blocks/attn/to_out_0/kernel": (4, 16, 8),
        "blocks/ff/net_2/kernel": (4, 32, 8),
        "blocks/attn/to_q/bias": (4, 16),
        "blocks/norm1/linear/kernel": (4, 8, 48),
        "x_embedder/kernel": (8, 6),
    }
    tree = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    found = {name.split("/", 1)[1]: tuple(place.spec) for name, place in parallel.spread(mesh, tree).items()}
    assert found == {
        "attn/to_q/kernel": (None, "fsdp", "tensor"),
        "attn/to_out_0/kernel": (None, "tensor", "fsdp"),
        "ff/net_2/kernel": (None, "tensor", "fsdp"),
        "attn/to_q/bias": (None, ("fsdp", "tensor")),
        "norm1/linear/kernel": (None, None, ("fsdp", "tensor")),
        "kernel": (("fsdp", "tensor"), None),
    }


@pytest.mark.parametrize("name", ["sd35_medium_pickscore", "flux_dev_pickscore"])
def test_every_weight_of_the_full_size_networks_is_shared_and_every_rule_is_used(name):
    configs = recipe.read(cli.load_config(name)).configs
    for component in (part for part in pipeline.components(configs) if part != "vae"):
        shapes = recipe.shapes(configs, component)
        for settings in (Parallel(fsdp=8), Parallel(fsdp=4, tensor=2), Parallel(tensor=8)):
            mesh = parallel.make(settings)
            places = jax.tree.leaves_with_path(parallel.spread(mesh, shapes))
            held = sum(np.prod(place.shard_shape(leaf.shape)) for leaf, (_, place) in zip(jax.tree.leaves(shapes), places))
            assert held < 1.02 * recipe.size(shapes) / 8, (component, settings)  # vectors are whole
            if component == "transformer" and settings.tensor > 1:
                names = {jax.tree_util.keystr(path, simple=True, separator="/"): place.spec for path, place in places}
                for rule, side in ((OUTPUTS_SHARED, -1), (INPUTS_SHARED, -2)):
                    found = {spec[len(spec) + side] for path, spec in names.items() if re.search(rule, path) and len(spec) > 1}
                    assert found == {"tensor"}, rule


def test_rows_lie_over_all_devices():
    mesh = parallel.make(Parallel(fsdp=2))
    x = parallel.over_rows(mesh, np.arange(32).reshape(2, 16), axis=1)
    assert {shard.data.shape for shard in x.addressable_shards} == {(2, 2)} and len(x.sharding.device_set) == 8
    assert parallel.everywhere(mesh, np.ones(3)).is_fully_replicated
    together = parallel.over_rows(parallel.make(Parallel(tensor=4)), np.arange(32).reshape(2, 16), axis=1)
    assert {shard.data.shape for shard in together.addressable_shards} == {(2, 8)}  # groups of four hold the same
    with pytest.raises(ValueError, match="evenly divide"):
        parallel.over_rows(mesh, np.arange(12))
    for place in (parallel.over_rows, parallel.everywhere):  # one device: as ever
        assert place(None, np.ones(3)).sharding == jax.numpy.ones(3).sharding


class Device(NamedTuple):
    process_index: int


def test_rows_that_several_processes_hold_are_the_first_ones(monkeypatch):
    """Four processes of a device each; 0 and 1 hold the first half of the rows, 2 and 3 the second."""
    rows, array = np.arange(6), np.arange(12.0).reshape(6, 2)
    devices = [Device(process) for process in range(4)]
    halves = [(slice(0, 3), slice(None)), (slice(3, 6), slice(None))]

    class Spread:
        shape, dtype, is_fully_replicated = array.shape, array.dtype, False
        sharding = SimpleNamespace(devices_indices_map=lambda shape: {device: halves[device.process_index // 2] for device in devices})

        def __init__(self, process):
            index = halves[process // 2]
            self.addressable_shards = [SimpleNamespace(index=index, data=array[index[0]])]

        def __len__(self):
            return len(array)

    monkeypatch.setattr(parallel.processes.jax, "process_count", lambda: 4)
    taken = []
    for process in range(4):
        monkeypatch.setattr(parallel.processes.jax, "process_index", lambda process=process: process)
        found, part = parallel.mine(rows, Spread(process))
        assert found.dtype == rows.dtype and part.dtype == array.dtype and part.shape[1:] == (2,)
        np.testing.assert_array_equal(part, array[found])
        taken.append(found.tolist())
    assert taken == [[0, 1, 2], [], [3, 4, 5], []]

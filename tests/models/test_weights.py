"""Weights: what is read is what torch stored; anything else is refused in one line that names the file."""

import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import save_file

from densegrpo_jax.models import weights
from densegrpo_jax.models.source import Source

LAYERS = 3
TABLE = {
    "embed/kernel": Source(("embed.weight",), "transpose"),
    "embed/bias": Source(("embed.bias",)),
    "conv/kernel": Source(("conv.weight",), "conv"),
    "blocks/dense/kernel": Source(tuple(f"blocks.{i}.dense.weight" for i in range(LAYERS)), "transpose", stacked=True),
    "blocks/norm/scale": Source(tuple(f"blocks.{i}.norm.weight" for i in range(LAYERS)), stacked=True),
}
SHAPES = {
    "embed": {"kernel": (4, 16), "bias": (16,)},
    "conv": {"kernel": (3, 3, 4, 8)},
    "blocks": {"dense": {"kernel": (LAYERS, 16, 8)}, "norm": {"scale": (LAYERS, 16)}},
}
ABSTRACT = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def torch_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"embed.weight": (16, 4), "embed.bias": (16,), "conv.weight": (8, 4, 3, 3)}
    for i in range(LAYERS):
        shapes |= {f"blocks.{i}.dense.weight": (8, 16), f"blocks.{i}.norm.weight": (16,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def expected(tensors: dict[str, np.ndarray]) -> dict:
    def stack(part):
        return np.stack([tensors[f"blocks.{i}.{part}"] for i in range(LAYERS)])

    return {
        "embed": {"kernel": tensors["embed.weight"].T, "bias": tensors["embed.bias"]},
        "conv": {"kernel": tensors["conv.weight"].transpose(2, 3, 1, 0)},
        "blocks": {"dense": {"kernel": stack("dense.weight").swapaxes(1, 2)}, "norm": {"scale": stack("norm.weight")}},
    }


def save(folder, tensors, name="model.safetensors"):
    save_file(tensors, folder / name)
    return folder


def save_sharded(folder, tensors, shards=2, dotted=""):
    names = sorted(tensors)
    files = {name: f"model{dotted}-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / f"model.safetensors.index{dotted}.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def read(folder, variant=None, dtype=jnp.float32, **kwargs):
    return weights.read_params(weights.open_weights(folder, variant), TABLE, ABSTRACT, dtype, **kwargs)


def assert_equal(tree, other):
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, tree), other)


def test_reads_one_file(tmp_path):
    assert_equal(read(save(tmp_path, torch_tensors())), expected(torch_tensors()))


def test_reads_shards_and_variants(tmp_path):
    assert_equal(read(save_sharded(tmp_path, torch_tensors(), dotted=".fp16"), "fp16"), expected(torch_tensors()))


def test_casts_while_reading(tmp_path):
    halves = {name: value.astype(ml_dtypes.bfloat16) for name, value in torch_tensors().items()}
    save(tmp_path, halves)
    params = read(tmp_path, dtype=jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    assert_equal(params, expected({name: value.astype(np.float32) for name, value in halves.items()}))
    assert {leaf.dtype for leaf in jax.tree.leaves(read(tmp_path, dtype=jnp.bfloat16))} == {jnp.dtype(jnp.bfloat16)}


def shardings(mesh, dense):
    def sharding(*spec):
        return NamedSharding(mesh, PartitionSpec(*spec))

    return {
        "embed": sharding(),
        "conv": {"kernel": sharding(None, None, "fsdp", None)},
        "blocks": {"dense": {"kernel": NamedSharding(mesh, dense)}, "norm": sharding(None, "fsdp")},
    }


def test_reads_into_shards(tmp_path):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params = read(save_sharded(tmp_path, torch_tensors()), sharding=shardings(mesh, PartitionSpec(None, "fsdp", "data")))
    assert_equal(params, expected(torch_tensors()))
    assert params["blocks"]["dense"]["kernel"].sharding.spec == PartitionSpec(None, "fsdp", "data")
    assert params["blocks"]["dense"]["kernel"].addressable_shards[0].data.shape == (LAYERS, 4, 4)


def test_reads_to_the_host(tmp_path):
    params = read(save_sharded(tmp_path, torch_tensors()), sharding="host")
    assert_equal(params, expected(torch_tensors()))
    assert {type(leaf) for leaf in jax.tree.leaves(params)} == {np.ndarray}


class Counting:
    """A tensor view that counts the elements taken from it."""

    def __init__(self, view):
        self.view, self.taken = view, 0

    def __getitem__(self, index):
        value = self.view[index]
        self.taken += value.size
        return value


@pytest.mark.parametrize("dense", [PartitionSpec(), PartitionSpec(None, "fsdp"), PartitionSpec(None, None, "data")])
def test_each_byte_is_read_once(tmp_path, dense):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    opened = weights.open_weights(save(tmp_path, torch_tensors()))
    opened = {name: stored._replace(view=Counting(stored.view)) for name, stored in opened.items()}
    weights.read_params(opened, TABLE, ABSTRACT, jnp.float32, shardings(mesh, dense))
    assert {name: stored.view.taken for name, stored in opened.items()} == {name: v.size for name, v in torch_tensors().items()}


def test_host_memory_is_about_one_array(tmp_path):
    count, width = 24, 256  # 24 arrays of 256 KiB
    table = {f"d{i}/kernel": Source((f"d{i}.weight",), "transpose") for i in range(count)}
    save(tmp_path, {f"d{i}.weight": np.zeros((width, width), np.float32) for i in range(count)})
    shapes = {f"d{i}": {"kernel": jax.ShapeDtypeStruct((width, width), jnp.float32)} for i in range(count)}
    opened = weights.open_weights(tmp_path)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])  # another device than the host's own copies may share memory with
    tracemalloc.start()
    for name in table:  # hold no result, so that only the reading's own buffers count
        sub = {name.split("/")[0]: shapes[name.split("/")[0]]}
        torch_name = table[name].names[0]
        weights.read_params({torch_name: opened[torch_name]}, {name: table[name]}, sub, jnp.bfloat16, sharding)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * width * width * 4


def test_round_trip(tmp_path):
    params = expected(torch_tensors())
    file = weights.write_params(tmp_path, params, TABLE, np.float32, stem="model")
    assert_equal(read(tmp_path), params)
    with safe_open(file, "np") as handle:
        assert handle.metadata() == {"format": "pt"}
        for name, value in torch_tensors().items():
            np.testing.assert_array_equal(handle.get_tensor(name), value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_write_casts_and_refuses_other_trees(tmp_path):
    params = expected(torch_tensors())
    file = weights.write_params(tmp_path, params, TABLE, ml_dtypes.bfloat16)
    with safe_open(file, "np") as handle:
        assert handle.get_tensor("embed.bias").dtype == ml_dtypes.bfloat16
    with pytest.raises(ValueError, match=r"disagree.*conv/kernel"):
        weights.write_params(tmp_path, {k: v for k, v in params.items() if k != "conv"}, TABLE, np.float32)
    with pytest.raises(ValueError, match="int32"):
        weights.write_params(tmp_path, params, TABLE, np.int32)


def test_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="x has shape"):
        weights.write_safetensors(tmp_path / "f.safetensors", {"x": ((2,), np.dtype(np.float32))}, lambda name: np.zeros(3))
    assert not list(tmp_path.iterdir())


def test_every_tensor_is_accounted_for(tmp_path):
    tensors = torch_tensors()
    del tensors["embed.bias"], tensors["blocks.1.norm.weight"]
    tensors["embed.weight"] = tensors["embed.weight"].T.copy()
    tensors |= {f"surplus.{i:02d}": np.zeros(1, np.float32) for i in range(20)}
    with pytest.raises(ValueError) as error:
        read(save(tmp_path, tensors))
    message = str(error.value)
    assert "2 missing: blocks.1.norm.weight, embed.bias" in message
    assert "20 unexpected: surplus.00," in message and "and 8 more" in message
    assert "1 of the wrong shape: embed.weight [4, 16] instead of [16, 4]" in message
    assert "\n" not in message


def test_table_must_match_the_model(tmp_path):
    save(tmp_path, torch_tensors())
    table = {path: source for path, source in TABLE.items() if path != "embed/bias"}
    with pytest.raises(ValueError, match=r"name table and the model disagree.*embed/bias"):
        weights.read_params(weights.open_weights(tmp_path), table, ABSTRACT, jnp.float32)


def test_tied_tensors(tmp_path):
    tensors = torch_tensors()
    tied = {"copy.bias": "embed.bias"}
    assert_equal(read(save(tmp_path, tensors | {"copy.bias": tensors["embed.bias"]}), tied=tied), expected(tensors))
    assert_equal(read(save(tmp_path, tensors), tied=tied), expected(tensors))
    save(tmp_path, tensors | {"copy.bias": tensors["embed.bias"] + 1})
    with pytest.raises(ValueError, match=r"copy\.bias and embed\.bias should be one tensor"):
        read(tmp_path, tied=tied)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_values_must_be_finite(tmp_path, value):
    tensors = torch_tensors()
    tensors["blocks.2.dense.weight"][1, 2] = value
    with pytest.raises(ValueError, match=r"blocks\.2\.dense\.weight holds values that are not finite as float16"):
        read(save(tmp_path, tensors), dtype=jnp.float16)


def test_only_floating_point_parameters(tmp_path):
    save(tmp_path, torch_tensors() | {"embed.bias": np.arange(16)})
    with pytest.raises(ValueError, match=r"1 of a type that is not read: embed\.bias \(I64\)"):
        read(tmp_path)


def test_ignored_constants(tmp_path):
    save(tmp_path, torch_tensors() | {"position_ids": np.arange(3)})
    assert_equal(read(tmp_path, ignored=("position_ids",)), expected(torch_tensors()))
    with pytest.raises(ValueError, match="1 unexpected: position_ids"):
        read(tmp_path)


def test_folders_without_usable_weights(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        weights.open_weights(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"has no diffusion_pytorch_model\.safetensors"):
        weights.open_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is pickled"):
        weights.open_weights(tmp_path)
    save(tmp_path, torch_tensors(), "model.fp16.safetensors")
    with pytest.raises(ValueError, match=r"no weights of variant None; it has model\.fp16\.safetensors"):
        weights.open_weights(tmp_path)
    save(tmp_path, torch_tensors())
    save_sharded(tmp_path, torch_tensors())
    with pytest.raises(ValueError, match="two sets of weights"):
        weights.open_weights(tmp_path)


OUTSIDE = ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".safetensors", "x.bin", 3, "a\0.safetensors"]


@pytest.mark.parametrize("file", OUTSIDE)
def test_index_cannot_leave_its_folder(tmp_path, file):
    folder = tmp_path / "model"
    folder.mkdir()
    save(tmp_path, torch_tensors(), "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"embed.bias": file}}))
    with pytest.raises(ValueError, match="is not the name of a safetensors file in that folder"):
        weights.open_weights(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", "\xff", "[" * 100_000])
def test_broken_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        weights.open_weights(tmp_path)


def test_index_must_agree_with_its_files(tmp_path):
    save_sharded(tmp_path, torch_tensors())
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    dropped = weight_map.pop("embed.bias")
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"does not hold what the index says; differs in: embed\.bias"):
        weights.open_weights(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {"embed.bias": "absent.safetensors"}}))
    with pytest.raises(ValueError):
        weights.open_weights(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {"embed.bias": dropped}}))
    (tmp_path / dropped).unlink()
    with pytest.raises(ValueError, match=dropped):
        weights.open_weights(tmp_path)


@given(cut=st.integers(0, 2000), flips=st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 255)), max_size=4))
def test_damaged_files_give_a_clear_error_or_their_values(tmp_path_factory, cut, flips):
    folder = tmp_path_factory.mktemp("damaged")
    file = save(folder, torch_tensors()) / "model.safetensors"
    data = bytearray(file.read_bytes())
    for position, byte in flips:
        data[position] = byte
    file.write_bytes(data[: len(data) - cut])
    try:
        params = read(folder)
    except ValueError as error:
        assert str(folder) in str(error) and "\n" not in str(error)
    else:
        assert cut == 0 and jax.tree.structure(params) == jax.tree.structure(ABSTRACT)


def test_find_folder(tmp_path):
    assert weights.find_folder(tmp_path) == tmp_path
    (tmp_path / "single.safetensors").touch()
    with pytest.raises(ValueError, match="is a file"):
        weights.find_folder(tmp_path / "single.safetensors")
    for name in ("", "no", str(tmp_path / "absent"), "../absent", "a/b/c", "a b/c"):
        with pytest.raises(ValueError, match="neither a folder that exists nor a Hugging Face id"):
            weights.find_folder(name)


def test_download_asks_for_one_set_of_safetensors(tmp_path, monkeypatch):
    from fnmatch import fnmatch

    import huggingface_hub

    calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **kwargs: calls.append(kwargs) or str(tmp_path))
    assert weights.find_folder("owner/name") == tmp_path
    weights.find_folder("owner/name", "fp16")

    def asked(call, file):
        return any(fnmatch(file, p) for p in call["allow_patterns"]) and not any(fnmatch(file, p) for p in call["ignore_patterns"])

    weights.find_folder("owner/name", weights=False)
    plain, half, bare = calls
    assert not asked(bare, "vae/diffusion_pytorch_model.safetensors") and not asked(bare, "vae/model.fp16.safetensors")
    for call in calls:
        assert all(asked(call, f) for f in ("model_index.json", "transformer/config.json", "tokenizer_3/tokenizer.json"))
        assert not any(asked(call, f) for f in ("sd3.5_medium.safetensors", "text_encoders/t5xxl.safetensors", "vae/model.bin"))
    for file in ("vae/diffusion_pytorch_model.safetensors", "transformer/diffusion_pytorch_model.safetensors.index.json"):
        assert asked(plain, file) and not asked(half, file)
    for file in ("vae/diffusion_pytorch_model.fp16.safetensors", "text_encoder_3/model.safetensors.index.fp16.json"):
        assert asked(half, file) and not asked(plain, file)


def test_failed_download_is_one_line():
    with pytest.raises(ValueError, match="could not be downloaded from the Hugging Face hub") as error:
        weights.find_folder("owner/that-does-not-exist")  # HF_HUB_OFFLINE is set for tests
    assert "\n" not in str(error.value)

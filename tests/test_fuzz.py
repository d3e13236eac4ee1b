"""Random and mutated bytes at the readers: nothing but ValueError, OSError or exit code 2 comes out, soon and in little memory."""

import contextlib
import io
import json
import resource
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tyro
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from densegrpo_jax import prompts
from densegrpo_jax.cli import load_config
from densegrpo_jax.config import Config, check, check_fields
from densegrpo_jax.models.weights import open_file, open_weights
from densegrpo_jax.rewards import wire

GROWTH = 200 * 2**10  # KiB that a fuzzer may add to the peak of this process
EXAMPLES, MORE = 300, 5_000  # of each fuzzer: in CI, always the same; in the full run, every time others
DEADLINE = 2000  # milliseconds for one
REFUSED = (ValueError, OSError)

SAFETENSORS = save({"a.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.float16)})
IMAGES = np.zeros((2, 4, 6, 3), np.uint8)
REQUESTS = tuple(wire.encode(IMAGES, ["a cat", "a dog"], [{}, {"tag": "x"}], 5.0, form) for form in ("npz", "png"))


@pytest.fixture(scope="module", autouse=True)
def characters():
    """Hypothesis makes its table of characters at the first use, in 200 MB."""
    given(st.text(max_size=3))(lambda text: None)()


@pytest.fixture(autouse=True)
def little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH


@st.composite
def mutated(draw, *valid: bytes):
    """A valid file with bytes changed, cut out, put in, or its end cut off."""
    content = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        kind = draw(st.sampled_from(("set", "cut", "insert", "end")))
        if kind == "set" and content:
            content[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del content[at : at + draw(st.integers(1, 40))]
        elif kind == "insert":
            content[at:at] = draw(st.binary(max_size=40))
        else:
            del content[at:]
    return bytes(content)


def headers():
    """safetensors with a header of any length that says anything."""
    number = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3))
    one = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(("F32", "F16", "BF16", "F8", "", 3)),
            "shape": st.lists(number, max_size=4),
            "data_offsets": st.lists(number, max_size=3),
        }
    )
    text = st.dictionaries(st.text(max_size=5), one, max_size=3).map(lambda value: json.dumps(value).encode())
    length = st.one_of(st.none(), st.integers(0, 2**64 - 1))
    return st.builds(lambda t, n, tail: struct.pack("<Q", len(t) if n is None else n) + t + tail, text, length, st.binary(max_size=64))


def safetensors(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content)
        with contextlib.suppress(*REFUSED):
            handle = open_file(path)
            for name, stored in open_weights(Path(folder)).items():
                assert name in handle.keys() and int(np.prod(stored.shape)) <= 8 * len(content)


PROMPTS = st.one_of(
    mutated(b'{"prompt": "a cat", "tag": "counting", "include": [{"class": "cat", "count": 2}], "exclude": []}\n', b"a cat\na dog\n"),
    st.binary(max_size=300),
    st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=4), lambda x: st.lists(x, max_size=3), max_leaves=6).map(
        lambda x: json.dumps({"prompt": "a", "include": x, "exclude": x}).encode()
    ),
)


def prompt_files(suffix, content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"prompts{suffix}"
        path.write_bytes(content)
        with contextlib.suppress(*REFUSED):
            found = prompts.load(str(path))
            assert all(text.strip() and "\0" not in text for text in found.texts) and prompts.describe(found, found)


def requests_to_a_reward_server(body):
    with contextlib.suppress(ValueError):
        found = wire.decode(body, wire.Limits(bytes=2**20))
        assert found.images.dtype == np.uint8 and len(found.images) == len(found.prompts) == len(found.metadata)


TOY = load_config("toy")
FIELDS = [
    f"--{section}.{name.replace('_', '-')}"
    for section in ("model", "prompts", "sampling", "exploration", "completion", "objective", "adapter", "optimizer", "run")
    for name in type(getattr(TOY, section)).__dataclass_fields__
]
VALUES = st.one_of(
    st.integers(-(2**66), 2**66).map(str),
    st.floats().map(str),
    st.text(max_size=6),
    st.sampled_from(("None", "", "nan", "-1", "True")),
)

STEPS = st.builds(
    "{}{}".format, st.sampled_from(("", "k/", "respaced ", "all")), st.sampled_from(("0", "00", "²", "-1", "9" * 99)) | VALUES
)


def overrides_of_a_config(given_values):
    arguments = [part for pair in given_values for part in pair]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            config = tyro.cli(Config, default=TOY, args=arguments, prog="fuzz")
            check_fields(config)
            check(config, 9)
        except SystemExit as stop:
            assert stop.code in (0, 2)
        except REFUSED:
            pass


FUZZERS = {
    safetensors: (st.one_of(mutated(SAFETENSORS), st.binary(max_size=200), headers()),),
    prompt_files: (st.sampled_from((".txt", ".jsonl")), PROMPTS),
    requests_to_a_reward_server: (
        st.one_of(mutated(*REQUESTS), st.binary(max_size=300), st.binary(max_size=200).map(lambda tail: REQUESTS[0][:120] + tail)),
    ),
    overrides_of_a_config: (
        st.lists(st.tuples(st.sampled_from(FIELDS), VALUES) | st.tuples(st.just("--completion.steps"), STEPS), min_size=1, max_size=3),
    ),
}


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(MORE, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("fuzzer", FUZZERS, ids=lambda fuzzer: fuzzer.__name__)
def test_only_refusals_come_out(fuzzer, examples):
    slow = [HealthCheck.too_slow]
    chosen = settings(max_examples=examples, deadline=DEADLINE, derandomize=examples == EXAMPLES, suppress_health_check=slow, database=None)
    chosen(given(*FUZZERS[fuzzer])(fuzzer))()

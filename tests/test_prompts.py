import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax import prompts


def test_lines_become_prompts_and_blank_ones_do_not(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffa cat\n\n  a dog  \r\na cat\n".encode())
    assert prompts.load(str(path)).texts == ("a cat", "a dog", "a cat")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "holds no prompts"), (b"\n \n", "holds no prompts"), (b"ok\n\xff\n", "line 2"), (b"a\0b\n", "NUL byte")],
)
def test_bad_files_are_named(tmp_path, content, reason):
    path = tmp_path / "p.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        prompts.load(str(path))
    with pytest.raises(ValueError, match="no such file"):
        prompts.load(str(tmp_path / "other.txt"))


@given(st.integers(1, 50), st.integers(1, 12), st.integers(0, 5))
def test_every_prompt_comes_once_per_pass(count, per_step, seed):
    steps = -(-count // per_step) * 3
    seen = np.concatenate([prompts.of_step(count, per_step, seed, step) for step in range(steps)])
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count]) == list(range(count))


def test_steps_are_addressed():
    a = prompts.of_step(100, 4, seed=1, step=7)
    np.testing.assert_array_equal(a, prompts.of_step(100, 4, seed=1, step=7))
    assert not np.array_equal(a, prompts.of_step(100, 4, seed=2, step=7))


@pytest.mark.parametrize("name", [name for name in prompts.BUILT_IN if name != "toy"])
def test_the_tiny_worlds_sets_carry_their_metadata(name):
    found = prompts.load(name)
    assert len(found.texts) >= 24 and len(set(found.texts)) == len(found.texts)
    for text, request in zip(found.texts, found.metadata):
        assert request["prompt"] == text and request["include"]
        assert (request["tag"] == "word") == name.startswith("words")


def test_held_out_prompts_are_not_trained_on():
    for kind in ("scenes", "words"):
        train, heldout = (set(prompts.load(f"{kind}/{split}").texts) for split in ("train", "heldout"))
        assert not train & heldout

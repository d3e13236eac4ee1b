"""Prompt sets read from files, folders and the hub; what is said of them; which a step takes."""

import json
import sys

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


REQUESTS = [
    {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}], "prompt": "a photo of a red cat"},
    {"tag": "single_object", "include": [{"class": "dog", "count": 1}], "prompt": "a photo of a dog"},
    {"prompt": "a prompt on its own"},
]


def write_lines(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_json_lines_become_prompts_with_their_metadata(tmp_path):
    found = prompts.load(write_lines(tmp_path / "p.jsonl", [REQUESTS[0], "", *REQUESTS[1:]]))
    assert found.texts == tuple(request["prompt"] for request in REQUESTS)
    assert found.metadata == (*REQUESTS[:2], {})


def test_all_bad_lines_are_reported_with_their_numbers(tmp_path):
    clause = {"class": "cat", "count": 1}
    bad = {
        2: ("{", "not JSON"),
        3: ("[1]", 'not an object with a "prompt"'),
        4: ('{"prompt": " "}', 'not an object with a "prompt"'),
        5: ({"prompt": "p", "include": []}, "at least one clause"),
        6: ({"prompt": "p", "include": [{"count": 1}]}, '"class"'),
        7: ({"prompt": "p", "include": [{**clause, "count": 0}]}, "at least 1"),
        8: ({"prompt": "p", "include": [{**clause, "count": True}]}, "at least 1"),
        9: ({"prompt": "p", "include": [{**clause, "position": ["above", 0]}]}, "earlier include clause"),
        10: ({"prompt": "p", "include": [clause], "exclude": {}}, "list of clauses"),
        11: ({"prompt": "p", "exclude": [clause]}, '"include"'),
        12: ({"prompt": "p", "include": [{**clause, "color": 3}]}, "color"),
    }
    path = write_lines(tmp_path / "p.jsonl", [REQUESTS[0], *(line for line, _ in bad.values()), REQUESTS[1]])
    with pytest.raises(ValueError, match="11 bad line") as error:
        prompts.load(path)
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == len(bad)
    for line, (number, (_, reason)) in zip(lines, bad.items()):
        assert f"line {number}:" in line and reason in line
    with pytest.raises(ValueError, match="and 80 more") as error:
        prompts.load(write_lines(tmp_path / "q.jsonl", ["{"] * 100))
    assert len(str(error.value).splitlines()) == 22


def test_a_folder_in_flow_grpos_layout_is_read_by_its_parts(tmp_path):
    (tmp_path / "train.txt").write_text("one\n")
    (tmp_path / "test.txt").write_text("two\n")
    assert prompts.load(f"{tmp_path}/train").texts == ("one",) and prompts.load(f"{tmp_path}/test").texts == ("two",)
    write_lines(tmp_path / "train_metadata.jsonl", REQUESTS[:1])
    assert prompts.load(f"{tmp_path}/train").metadata == (REQUESTS[0],)  # the richer file
    with pytest.raises(ValueError, match="say which part"):
        prompts.load(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"neither test_metadata.jsonl nor test.txt"):
        prompts.load(f"{tmp_path}/empty/test")


class Table(dict):
    column_names = property(list)


class Hub:
    """A stand-in for the package `datasets`."""

    def __init__(self, **columns):
        self.columns, self.asked = columns, None

    def load_dataset(self, name, split):
        self.asked = name, split
        return Table(self.columns)


def test_hub_data_sets_are_read_by_split_and_column(monkeypatch):
    hub = Hub(caption=["a cat", " ", "a dog"], id=[1, 2, 3])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert prompts.load("hf:someone/some-set:train").texts == ("a cat", "a dog") and hub.asked == ("someone/some-set", "train")
    assert prompts.load("hf:someone/some-set:train:caption").texts == ("a cat", "a dog")
    with pytest.raises(ValueError, match=r"3 bad row.*\n.*row 1: int instead of a text in column 'id'"):
        prompts.load("hf:someone/some-set:train:id")
    for source, reason in [("hf:a/b:train:text", "it has caption, id"), ("hf:a/b", "write hf:OWNER/NAME:SPLIT")]:
        with pytest.raises(ValueError, match=reason):
            prompts.load(source)
    hub.columns["text"] = hub.columns["caption"]
    with pytest.raises(ValueError, match="name one of its columns"):
        prompts.load("hf:a/b:train")
    hub.load_dataset = lambda *args, **kwargs: {}["nothing"]
    with pytest.raises(ValueError, match="could not be loaded: KeyError"):
        prompts.load("hf:a/b:train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install \"densegrpo_jax\[datasets\]\""):
        prompts.load("hf:a/b:train")


def test_repetitions_tags_and_overlap_are_told():
    train = prompts.PromptSet(("a cat", "A  cat", "a dog"), ({"tag": "x"}, {"tag": "y"}, {"tag": "x"}))
    test = prompts.PromptSet(("a bird", "a DOG"), ({}, {}))
    assert prompts.overlap(train, test) == [1]
    assert prompts.describe(train, test) == [
        "train: 3 prompts, 2 different (x 2, y 1)",
        "test: 2 prompts",
        "overlap: 1 of 2 test prompts are in train too, the first is number 1: 'a DOG'",
    ]
    assert prompts.describe(test) == ["train: 2 prompts"]


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

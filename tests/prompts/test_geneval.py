"""GenEval's requests: form and names; the generator's six kinds, disjoint parts, counts; the command."""

import json
from collections import Counter

import numpy as np
import pytest

from densegrpo_jax import cli, prompts
from densegrpo_jax.prompts import geneval


@pytest.fixture(scope="module")
def parts():
    return geneval.generate(train=3600, test=40, seed=3)


def test_every_request_is_one_that_the_scorer_takes_and_says_what_it_asks(parts):
    for request in parts[0] + parts[1]:
        geneval.check_request(request)
        assert request["prompt"].startswith("a photo of ")
        for clause in request["include"]:
            name = clause["class"] if clause["count"] == 1 else geneval.plural(clause["class"])
            assert name in request["prompt"] and clause.get("color", "") in request["prompt"]
        assert json.loads(json.dumps(request)) == request


def test_kinds_come_in_their_shares(parts):
    train, test = ({tag: sum(request["tag"] == tag for request in part) for tag in geneval.TAGS} for part in parts)
    assert train == {tag: round(2000 * geneval.WEIGHTS[tag]) for tag in geneval.TAGS}
    assert test == {**dict.fromkeys(geneval.TAGS, 40), "single_object": 20}


def test_nothing_that_is_tested_is_trained_on_in_whatever_words(parts):
    train, test = ([geneval.meaning(request) for request in part] for part in parts)
    assert not set(train) & set(test) and len(set(test)) == len(test)
    sets = [prompts.PromptSet(tuple(request["prompt"] for request in part), tuple(part)) for part in parts]
    assert prompts.overlap(*sets) == []


def test_short_kinds_repeat_evenly_and_long_ones_do_not(parts):
    repeats = Counter(request["prompt"] for request in parts[0] if request["tag"] == "counting")
    assert max(repeats.values()) - min(repeats.values()) == 1 and min(repeats.values()) >= 4
    assert max(Counter(request["prompt"] for request in parts[0] if request["tag"] == "position").values()) == 1


def test_the_seed_decides(parts):
    assert geneval.generate(200, 5, seed=3) == geneval.generate(200, 5, seed=3)
    assert geneval.generate(200, 5, seed=3) != geneval.generate(200, 5, seed=4)


def test_meaning_is_blind_to_order_and_side():
    def position(name, relation, target):
        return {"include": [{"class": target, "count": 1}, {"class": name, "count": 1, "position": [relation, 0]}]}

    meaning = geneval.meaning
    assert meaning(position("cat", "left of", "dog")) == meaning(position("dog", "right of", "cat"))
    assert meaning(position("cat", "above", "dog")) == meaning(position("dog", "below", "cat"))
    assert len({meaning(position(*words)) for words in [("cat", "above", "dog"), ("dog", "above", "cat"), ("cat", "left of", "dog")]}) == 3
    red, blue = {"class": "cat", "count": 1, "color": "red"}, {"class": "dog", "count": 1, "color": "blue"}
    assert meaning({"include": [red, blue]}) == meaning({"include": [blue, red]})
    assert meaning({"include": [red, blue]}) != meaning({"include": [{**red, "color": "blue"}, {**blue, "color": "red"}]})


def test_words_are_english():
    choices = [("single_object", (30,)), ("colors", (48, 1)), ("colors", (29, 0))]
    found = [geneval._request(*choice)["prompt"] for choice in choices]
    assert found == ["a photo of a pair of skis", "a photo of an orange orange", "a photo of a pair of red skis"]
    plurals = {geneval.plural(name) for name in geneval.CLASSES}
    assert {"people", "benches", "buses", "sheep", "knives", "wine glasses", "couches", "toothbrushes", "computer mice", "tvs"} <= plurals


def test_names_are_checked_and_said():
    cat = {"class": "cat", "count": 1}
    for changes, reason in [
        ({"tag": "word"}, "tag 'word'"),
        ({"include": [{**cat, "class": "unicorn"}]}, "class 'unicorn'"),
        ({"exclude": [{**cat, "class": "mouse"}]}, "class 'mouse'"),
        ({"include": [{**cat, "color": "teal"}]}, "color 'teal'"),
        ({"include": [cat, {"class": "dog", "count": 1, "position": ["near", 0]}]}, "relation 'near'"),
        ({"include": [{**cat, "color": "red"}, {**cat, "color": "blue"}]}, "names a class twice"),
    ]:
        with pytest.raises(ValueError, match=reason):
            geneval.check_request({"tag": "colors", "include": [cat], **changes})


def test_what_is_excluded_is_asked_nowhere():
    official = geneval.generate(0, 100, seed=9)[1]
    asked = {geneval.meaning(request) for request in official}
    train, test = geneval.generate(2000, 20, seed=1, exclude=official)
    assert not asked & {geneval.meaning(request) for request in train + test}
    every = list(geneval._stream("single_object", np.random.default_rng(0)))
    with pytest.raises(ValueError, match="no request of tag 'single_object' is left"):
        geneval.generate(100, 0, exclude=every)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"train": -1}, "must not be negative"),
        ({"weights": {"cats": 1.0}}, "unknown tags"),
        ({"weights": {"colors": 0.0}}, "not all zero"),
        ({"weights": {"colors": float("nan")}}, "finite"),
    ],
)
def test_impossible_orders_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        geneval.generate(**options)


def test_the_command_writes_a_folder_that_can_be_trained_on(tmp_path, capsys):
    out = str(tmp_path / "g")
    assert cli.main(["prompts", "geneval", "--out", out, "--train", "360", "--test", "5"]) == 0
    printed = capsys.readouterr().out
    assert "train: 360 prompts" in printed and "counting 100" in printed and "overlap" not in printed
    train, test = prompts.load(f"{out}/train"), prompts.load(f"{out}/test")
    assert len(train.texts) == 360 and len(test.texts) == 30
    assert cli.main(["prompts", "geneval", "--out", out]) == 2 and "there already" in capsys.readouterr().err
    other = str(tmp_path / "h")
    options = ["--train", "360", "--test", "5", "--exclude", f"{out}/train", f"{out}/test"]
    assert cli.main(["prompts", "geneval", "--out", other, *options]) == 0
    seen = {geneval.meaning(request) for request in train.metadata + test.metadata}
    assert not seen & {geneval.meaning(request) for request in prompts.load(f"{other}/train").metadata}
    capsys.readouterr()
    assert cli.main(["prompts", "check", f"{out}/train", f"{out}/train"]) == 0
    assert "overlap: 360 of 360" in capsys.readouterr().out
    assert cli.main(["prompts", "check", "scenes/heldout"]) == 0
    assert "would refuse 256 requests" in capsys.readouterr().out
    assert cli.main(["prompts", "geneval", "--out", str(tmp_path / "i"), "--exclude", "toy"]) == 2
    assert "without GenEval's metadata" in capsys.readouterr().err

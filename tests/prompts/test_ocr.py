"""Generated OCR prompts: each quotes one to four words, the parts share no text, the command writes what training reads."""

import pytest

from densegrpo_jax import cli, prompts
from densegrpo_jax.prompts import ocr
from densegrpo_jax.rewards.ocr import target_text


@pytest.fixture(scope="module")
def parts():
    return ocr.generate(train=1200, test=300, seed=1)


def test_every_prompt_quotes_one_to_four_words(parts):
    counts = [len(target_text(prompt).split()) for part in parts for prompt in part]
    assert set(counts) == {1, 2, 3, 4}
    for words, share in ocr._SHARES.items():
        assert counts.count(words) / len(counts) == pytest.approx(share, abs=0.06)
    for prompt in parts[0]:
        assert prompt.count('"') == 2 and prompt.isascii()


def test_no_text_is_in_both_parts_and_no_prompt_comes_twice(parts):
    texts = [{target_text(prompt).casefold() for prompt in part} for part in parts]
    assert not texts[0] & texts[1]
    for part in parts:
        assert len({prompt.casefold() for prompt in part}) == len(part)
    # Whatever the seed, and the case: the split is a property of the words.
    for testing, part in enumerate(parts):
        assert {ocr.is_for_testing(target_text(prompt)) for prompt in part} == {bool(testing)}
    assert not texts[0] & {target_text(prompt).casefold() for prompt in ocr.generate(0, 300, seed=2)[1]}


def test_a_longer_list_begins_with_a_shorter_one(parts):
    assert ocr.generate(100, 20, seed=1) == (parts[0][:100], parts[1][:20])
    assert ocr.generate(100, 20, seed=2) != ocr.generate(100, 20, seed=1)


def test_more_than_there_is_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="must not be negative"):
        ocr.generate(-1)
    monkeypatch.setattr(ocr, "_TEMPLATES", ('"{}"',))
    monkeypatch.setattr(ocr, "_PATTERNS", dict.fromkeys(ocr._SHARES, ((["one", "two", "three", "four", "five"],),)))
    with pytest.raises(ValueError, match="there are about"):
        ocr.generate(6, 0)


def test_the_command_writes_a_folder_that_can_be_trained_on(tmp_path, capsys):
    assert cli.main(["prompts", "ocr", "--out", str(tmp_path), "--train", "40", "--test", "10"]) == 0
    assert "train: 40 prompts\ntest: 10 prompts\nwrote" in capsys.readouterr().out
    assert list(prompts.load(f"{tmp_path}/train").texts) == ocr.generate(40, 10)[0]

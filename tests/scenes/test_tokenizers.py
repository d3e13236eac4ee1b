"""The tokenizers: whole words, letters of signs spelt, and files that transformers loads without torch."""

import subprocess
import sys

import pytest

from densegrpo_jax.scenes import tokenizers, world


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    from transformers import AutoTokenizer, CLIPTokenizer

    folders = [tmp_path_factory.mktemp(name) for name in ("clip", "t5")]
    tokenizers.write_clip_tokenizer(folders[0])
    tokenizers.write_t5_tokenizer(folders[1])
    return CLIPTokenizer.from_pretrained(folders[0]), AutoTokenizer.from_pretrained(folders[1])


def test_every_word_of_the_captions_is_one_token(loaded):
    clip, t5 = loaded
    for word in tokenizers.vocabulary():
        assert len(clip(word).input_ids) == 3, word  # with start and end
        assert len(t5(word).input_ids) == 2, word  # with end


def test_captions_fit_and_have_no_unknown_token(loaded):
    clip, t5 = loaded
    for n in range(600):
        prompt = world.caption(world.sample_scene((4, n), any_letters=True), n)
        clip_ids, t5_ids = clip(prompt).input_ids, t5(prompt).input_ids
        assert max(len(clip_ids), len(t5_ids)) <= tokenizers.MAX_LENGTH, prompt
        assert t5.unk_token_id not in t5_ids, prompt
        assert clip_ids.count(clip.eos_token_id) == 1, prompt  # the unknown token of CLIP is its end
        for word in prompt.replace('"', "").split():
            assert word.isupper() or word in tokenizers.vocabulary(), prompt


def test_words_on_signs_are_spelt_for_t5(loaded):
    t5 = loaded[1]
    for word in world.WORDS:
        tokens = t5.convert_ids_to_tokens(t5(f'the word "{word}"').input_ids)
        assert tokens == ["▁the", "▁word", '▁"', *word, '"', "</s>"]


def test_ends_and_padding(loaded):
    clip, t5 = loaded
    ids = clip("a red star", padding="max_length").input_ids
    assert len(ids) == clip.model_max_length == t5.model_max_length == tokenizers.MAX_LENGTH
    assert ids[0] == clip.bos_token_id and ids[4:] == [clip.eos_token_id] * 12
    assert clip.eos_token_id == max(clip.get_vocab().values()) == len(clip) - 1
    assert t5("a red star", padding="max_length").input_ids[3:] == [1] + [0] * 12


def test_loading_needs_no_torch(tmp_path):
    code = f"""
import sys
sys.modules["torch"] = None
from pathlib import Path
from densegrpo_jax.scenes import tokenizers
from transformers import CLIPTokenizer, T5TokenizerFast
folder = Path({str(tmp_path)!r})
tokenizers.write_clip_tokenizer(folder / "a"), tokenizers.write_t5_tokenizer(folder / "b")
assert CLIPTokenizer.from_pretrained(folder / "a")("two red stars", return_tensors="np").input_ids.shape == (1, 5)
assert T5TokenizerFast.from_pretrained(folder / "b")("two red stars", return_tensors="np").input_ids.shape == (1, 4)
"""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

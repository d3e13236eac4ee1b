"""The tiny model's own tokenizers, written as folders that transformers' CLIPTokenizer and T5Tokenizer load.

Both know every word that captions of the world use, whole, and spell the rest letter by letter. CLIP's lower-cases; T5's does not, so
a capital is always a token of its own and a word on a sign is spelt out.
"""

import json
from pathlib import Path

from densegrpo_jax.scenes import world

MAX_LENGTH = 16  # tokens of both; the longest caption needs 14
START, END = "<|startoftext|>", "<|endoftext|>"
OTHER_WORDS = (
    "a an the photo picture drawing of there is are one exactly to left right above below and with beside sign that reads word in".split()
)
LOWER = "abcdefghijklmnopqrstuvwxyz"
MARKS = "0123456789\"'.,!?-:;()"


def vocabulary() -> list[str]:
    """Returns every word of the captions, sorted, each once."""
    words = {*OTHER_WORDS, *world.SHAPES, *world.PLURALS.values(), *world.NUMBERS.values(), *world.COLORS, *world.SIZES}
    return sorted(words)


def clip_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns CLIP's vocabulary and merges.

    A word is merged from its end: "d</w>", "ed</w>", "red</w>". A merge thus fits only at the end of a word, so that no word of the
    vocabulary can get in the way of another.
    """
    pieces = [mark for letter in LOWER + MARKS for mark in (letter, f"{letter}</w>")]
    merges = []
    for word in vocabulary():
        for start in range(len(word) - 2, -1, -1):
            piece = f"{word[start:]}</w>"
            if piece not in pieces:
                merges.append((word[start], f"{word[start + 1 :]}</w>"))
                pieces.append(piece)
    pieces += [START, END]  # END has the largest id, which is how CLIP finds it
    return {piece: n for n, piece in enumerate(pieces)}, merges


def t5_vocabulary() -> list[tuple[str, float]]:
    """Returns T5's pieces with their log-probabilities: whole words are likelier than the letters that spell them."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [(f"▁{word}", -2.0) for word in vocabulary() if len(word) > 1]
    singles = [(mark, -6.0) for mark in ("▁", *LOWER.upper(), *LOWER, *MARKS, *(f"▁{mark}" for mark in (*LOWER.upper(), *LOWER, '"')))]
    return special + words + singles


def write_clip_tokenizer(folder: Path) -> None:
    """Writes vocab.json, merges.txt, tokenizer.json and its configuration into `folder`."""
    from transformers import CLIPTokenizer

    vocab, merges = clip_vocabulary()
    tokenizer = CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=MAX_LENGTH)
    tokenizer.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in merges)]) + "\n")


def write_t5_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and its configuration into `folder`."""
    from transformers import T5Tokenizer

    T5Tokenizer(vocab=t5_vocabulary(), extra_ids=0, model_max_length=MAX_LENGTH).save_pretrained(folder)

"""Words of a text as tokenizers cut it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from stepjepa.forests.tokenisation import describe
from stepjepa.forests.words import word_finder

ASCII = [chr(code) for code in range(128)]
# Blanks that are no ASCII, what only some call a blank, marks that join what stands before, letters and numbers of all
# kinds, a letter that is an s where case does not matter.
OTHERS = [
    "\x85",
    "\xa0",
    "\u180e",
    "\u2003",
    "\u3000",
    "\u200b",
    "\u0301",
    "é",
    "½",
    "²",
    "٣",
    "中",
    "ß",
    "’",
    "🙂",
    "ſ",
]
NEWER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(expression: str, behavior: Any = "isolated", *, invert: bool = False) -> Any:
    first = pre_tokenizers.Split(Regex(expression), behavior, invert)
    return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def bytes_after_digits() -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


KINDS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits": bytes_after_digits,
    "qwen": lambda: split(NEWER % ""),
    "llama-3": lambda: split(NEWER % "{1,3}"),
    "olmo-2": lambda: split(NEWER % "{1,3}", "removed", invert=True),
    "numbers": lambda: split(NEWER % "+"),
}


class Described:
    """As much of a tokenizer as is described."""

    def __init__(self, pre_tokenizer: Any, normalizer: Any = None) -> None:
        self.backend_tokenizer = Tokenizer(models.BPE())
        self.backend_tokenizer.pre_tokenizer = pre_tokenizer
        if normalizer is not None:
            self.backend_tokenizer.normalizer = normalizer
        self.added_tokens_decoder: dict[int, Any] = {}


def finder(*parts: Any) -> Any:
    return word_finder(describe(Described(*parts)))  # type: ignore[arg-type]


def cuts(pre_tokenizer: Any, text: str, words: list[str]) -> tuple[list[int], list[int]]:
    """Where the tokenizer cuts a text, and where it cuts words of it that stand alone."""
    alone, position = [], 0
    for word in words:
        alone += [position + start for _, (start, _) in pre_tokenizer.pre_tokenize_str(word)]
        position += len(word)
    return [start for _, (start, _) in pre_tokenizer.pre_tokenize_str(text)], alone


@pytest.mark.parametrize("kind", KINDS)
def test_ascii_words_are_the_tokenizers_own(kind: str) -> None:
    pre_tokenizer = KINDS[kind]()
    find = finder(pre_tokenizer)
    samples = ["a", "s", "L", "3", "4", " ", "\n", "\r", "\t", "'", ".", "\x1c", "_"]
    texts = ["".join(pair) for pair in itertools.product(ASCII, repeat=2)]
    texts += ["".join(some) for some in itertools.product(samples, repeat=4)]
    for text in texts:
        words = find(text)
        assert "".join(words) == text
        starts = [start for _, (start, _) in pre_tokenizer.pre_tokenize_str(text)]
        assert starts == list(itertools.accumulate(map(len, words[:-1]), initial=0)), repr(text)
        assert cuts(pre_tokenizer, text, words)[1] == starts, repr(text)


@pytest.mark.parametrize("kind", KINDS)
def test_other_characters_change_nothing_of_the_words_around_them(kind: str) -> None:
    pre_tokenizer = KINDS[kind]()
    find = finder(pre_tokenizer)
    draw = random.Random(7)
    alphabet = [*OTHERS, *"ab s3  '.\n\t,"]
    for _ in range(3001):
        text = "".join(draw.choices(alphabet, k=draw.randrange(1, 23)))
        words = find(text)
        assert "".join(words) == text
        whole, alone = cuts(pre_tokenizer, text, words)
        assert whole == alone, repr(text)


def test_by_hand() -> None:
    assert finder(KINDS["llama-3"]())("It's 1234  naïve x\n\ny, is it?") == (
        ["It", "'s", " ", "123", "4", "  naïve", " x", "\n\n", "y", ",", " is", " it", "?"]
    )
    assert finder(KINDS["digits"]())("It's 12  ok") == ["It", "'s", " ", "1", "2", " ", " ok"]


def test_text_without_spaces_stays_whole_where_it_is_not_ascii() -> None:
    assert finder(KINDS["qwen"]())("ab中文ab ab") == ["ab中文ab", " ab"]


@pytest.mark.parametrize(
    ("pre_tokenizer", "normalizer"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), None),
        (pre_tokenizers.Whitespace(), None),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Lowercase()),
        (split(r"\p{L}+|\s+"), None),
        (split(NEWER % "", "merged_with_next"), None),
        (split(NEWER % "", "removed"), None),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]), None),
        (
            pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
            None,
        ),
    ],
)
def test_what_is_not_known_is_left_to_the_tokenizer(pre_tokenizer: Any, normalizer: Any) -> None:
    assert finder(pre_tokenizer, normalizer) is None


def test_normal_forms_leave_ascii_alone() -> None:
    assert finder(KINDS["qwen"](), normalizers.NFC()) is not None
    assert finder(KINDS["qwen"](), normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])) is None

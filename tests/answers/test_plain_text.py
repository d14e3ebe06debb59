"""What a reader does not see is not there, and what looks the same is the same."""

import time

import pytest

from stepjepa.answers.plain_text import answer_start, before_special_token, plain_characters, strip_code_fence


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("18 eggs", "18 eggs"),
        ("１８ Ａｂ！", "18 Ab!"),
        ("٣ ۳ ३", "3 3 3"),
        ("½ 1¾", " 1/2 1 3/4"),
        ("\ufeff1\u200b8\u2060\u00ad", "18"),
        ("a\u3000b", "a b"),
        # These group digits, and powers are no digits.
        ("1\u202f000\u00a0m²", "1\u202f000\u00a0m²"),
        ("é 日 π", "é 日 π"),
    ],
)
def test_what_looks_the_same_is_the_same(text, seen):
    assert plain_characters(text) == seen


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        (" Good\n", "Good"),
        ("```\nGood\n```", "Good\n```"),
        (r"$\boxed{A}$", "A"),
        (r"\text{Good} film", "Good film"),
        ("A</s>B", "A"),
        ("<|im_end|>A", ""),
        ("", ""),
    ],
)
def test_how_an_answer_begins(text, begins):
    assert answer_start(text) == begins


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (" .*a.*\n", ".*a.*"),
        ("```regex\n.*a.*\n```", ".*a.*"),
        ("`.*a.*`", ".*a.*"),
        ("`.*a.*`<|im_end|>", ".*a.*"),
        # Not all of it is shown as code, or nothing is, or the code goes on.
        ("It is `.*a.*`", "It is `.*a.*`"),
        ("```a``` ```b```", "```a``` ```b```"),
        ("", ""),
    ],
)
def test_code_without_the_fence_that_it_is_shown_in(text, code):
    assert strip_code_fence(text) == code


def test_nothing_behind_a_special_token_was_said():
    assert before_special_token("18<|im_end|>19") == "18"
    assert before_special_token("a < b | c") == "a < b | c"


@pytest.mark.parametrize("unit", ["`", "```", "<|", "</s>", "\u200b", "８", "a", "```\n", "\\boxed{", " ", "\n"])
@pytest.mark.parametrize("function", [plain_characters, before_special_token, answer_start, strip_code_fence])
def test_long_text_takes_no_longer_than_reading_it(function, unit):
    begun = time.process_time()
    function(unit * (10**6 // len(unit)))
    function("```" + unit * (10**6 // len(unit)))
    assert time.process_time() - begun < 4

"""What counts as the right answer, mostly by cases that come near it; a bar stands between cases of one outcome."""

import json
import time
from fractions import Fraction

import pytest

from stepjepa.chat.content import content_part
from stepjepa.tasks.answers import (
    answer_start,
    before_special_token,
    canonical,
    first_number,
    marked_answers,
    parse_number,
    plain_characters,
    same_answer,
    stated_number,
    strip_code_fence,
    text_scores,
)


@pytest.mark.parametrize(
    ("function", "text", "expected"),
    [
        (plain_characters, "１８ Ａｂ！ ٣", "18 Ab! 3"),
        (plain_characters, "1¾ \ufeff1\u200b8\u2060\u00ad\u3000b", "1 3/4 18 b"),
        # Narrow spaces group digits, and powers are no digits.
        (plain_characters, "1\u202f000\u00a0m²", "1\u202f000\u00a0m²"),
        (answer_start, "```\nGood\n```", "Good"),
        (answer_start, "Good film</s>B\nBad", "Good film"),
        (strip_code_fence, "```regex\n.*a.*\n```", ".*a.*"),
        (strip_code_fence, "`.*a.*`<|im_end|>", ".*a.*"),
        # Not all of it is code, or the code goes on.
        (strip_code_fence, "It is `.*a.*`", "It is `.*a.*`"),
        (strip_code_fence, "```a``` ```b```", "```a``` ```b```"),
        (before_special_token, "18<|im_end|>19", "18"),
        (before_special_token, "a < b | c", "a < b | c"),
    ],
)
def test_what_a_reader_does_not_see_is_no_part_of_an_answer(function, text, expected):
    assert function(text) == expected


@pytest.mark.parametrize(
    ("generated", "reached"),
    [
        (" [0-9]+\n", ["exact", "prefix", "contains"]),
        ("[0-9]+assistant\n[0-9]+", ["prefix", "contains"]),
        ("It is [0-9]+", ["contains"]),
        ("[0-9]", []),
    ],
)
def test_text_is_compared_whole_from_the_start_or_anywhere(generated, reached):
    assert [name for name, score in text_scores(generated, "[0-9]+ ").items() if score] == reached


@pytest.mark.parametrize(
    ("generated", "truth"),
    [
        # One character or two, as most tokenizers read them.
        ("cafe\u0301", "caf\u00e9"),
        ("caf\u00e9", "cafe\u0301"),
        # The content, whatever was thought.
        ("<think>\nis it tea?\n</think>\n\ncoffee", "coffee"),
        ("coffee", "<think>\nis it tea?\n</think>\n\ncoffee"),
        ("<think>\nno\n</think>coffee", "<think>\nyes\n</think>\n\ncoffee"),
        ("It is <think>", "It is <think>"),
    ],
)
def test_text_is_compared_by_what_it_means(generated, truth):
    assert text_scores(content_part(generated), truth)["exact"]
    assert not text_scores(content_part(generated), truth + "s")["exact"]


def test_a_million_marks_are_no_work():
    text = "e" + "\u0301\u0323" * 500_000
    started = time.monotonic()
    assert text_scores(text, text)["exact"] and not text_scores(text, "e")["exact"]
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("18 " + tail, "18") for tail in ("(dollars)", "clips, altogether.", "or 19", "= 6 * 3")),
        *((f"{head}18{tail}", "18") for head, tail in (("USD ", ""), ("(", ")"), ("", ";"), ("", ","), ("x=", "!"))),
        ("-18 (degrees)", "-18"),
        ("USD -18", "-18"),
        ("6-18", "6"),
        ("1,200 (clips)", "1,200"),
        ("1,200.50 (clips)", "1,200.50"),
        # Digits that commas join are one number, however they are grouped.
        ("1,00,000 (clips)", "100000"),
        ("-12,5", "-125"),
        ("18, 5", "18"),
        ("١٨ (clips)", "18"),
        ("eighteen", None),
        # What says a number as a whole stays as it is.
        ("6 * 3 = 18", "6 * 3 = 18"),
        ("$18 a day", "$18 a day"),
    ],
)
def test_the_first_number_of_a_text(text, number):
    assert first_number(text) == number


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (r"\boxed{\frac{1}{2}}", [r"\frac{1}{2}"]),
        (r"\boxed{\{1, 2\}} and \boxed{x_{i_{2}}}", [r"\{1, 2\}", "x_{i_{2}}"]),
        (r"\boxed{\boxed{5}}", ["5"]),
        (r"\boxed{\boxed{}}", []),
        (r"#### So it is \boxed{5} or \boxed{6}.", ["5", "6"]),
        (r"\boxed{4 \boxed{5}", ["5"]),
        (r"\boxed{a \\}", [r"a \\"]),
        (r"\boxed{a #### 5}", ["a #### 5"]),
        ("\\boxed{17}\n#### 18", ["17", "18"]),
        ("They eat **#### 18** eggs.", ["18"]),
        ("####\u00a018", ["18"]),
        ("#### １８<|im_end|>\n", ["18"]),
        ("####$18", ["$18"]),
        ("####Answer", []),
        ("### 18", []),
        ("####\n18", []),
    ],
)
def test_answers_are_read_where_they_are_marked_and_nowhere_else(text, answers):
    assert marked_answers(text) == answers


NUMBERS = {
    "18": r"$\$18$ | $\$18.00$ | **\$18** | "
    r"18.00 | $18 | \$18 | 18€ | **18** | \text{18} | 18\text{ dollars} | 18 dollars per day | $18/hour | １８"
    r" | 18\text{ cm}^2 | 18\text{ cm}^{2} | 18 m^2 | **18** dollars | $**18** | **$18** per day | \(18\) apples"
    " | 18 a day | 18 p.m.",
    "-18": "−18 | -$18 | -18.",
    "1000": r"1,000 | 1{,}000 | 1\,000 | 1e3 | 1.0E+3 meters | 1\times 10^3",
    "100000": "100 thousand",
    "50": r"50% | 50\% | 50^\circ | 50 cm^2 | 50m | about 50",
    "1/2": r".5 | 0.5 | 1/2 | ½ | \frac{1}{2} | \dfrac12 | 5e-1",
    "-3/4": r"-\frac{3}{4} | -0.75 | \frac{-3}{4}",
    "3/2": r"1 1/2 | 1\frac{1}{2}",
}
REFUSED = (
    "two | 1e999 | 8! | 1, 2 | 1,00,000 | 1.2.3 | 1/0 | 5:30 | 18 or 20 | 18 or more | 2 hours 30 minutes | "
    "6*3 | 5x | 2n | 18x^2 | 3x² | 5 x y | 7 pi | 2**3**4 | x = 5 | --5 | 5² | 2π | (1, 2) | [1,234] | \\frac{1}{2}3 | "
    + "9"
    * 1001
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, Fraction(value)) for value, texts in NUMBERS.items() for text in texts.split(" | ")),
        *((text, None) for text in REFUSED.split(" | ")),
    ],
)
def test_numbers_are_understood_or_refused_but_never_guessed(text, value):
    number = parse_number(text)
    assert (None if number is None else number.value) == value


SAID = (
    r"The final answer is 8. | The answer is: 8 | **Answer:** $8$ | Total = 8 | x = 8 | \(x = 8\) | 6 + 2 = 8 | "
    r"(6 - 2) * 2 = 4 * 2 = 8 eggs | 2 \times 4 = 8 | The total is 2 * 4 = 8 | Total: 1,000 / 125 = 8 | "
    "The difference between their ages is 8 years. | If we add the eggs, the answer is 8"
)
NOT_SAID = (
    "8 or 9 | 8-9 | The answer is 8 or 9 | x = 5, y = 8 | 2x = 8 | x != 8 | x \\not= 8 | at least 8 | "
    "The answer is not 8 | "
    "The answer can't be 8 | It may be 8 | The answer is 8? | Step 2: 3 + 5 = 8 | 5:08 | The answer is eight"
)


@pytest.mark.parametrize("text", SAID.split(" | "))
def test_a_sentence_or_an_equation_says_its_number(text):
    assert stated_number(text).value == 8
    assert same_answer(text, "8.0")
    assert not same_answer(text, "9")


@pytest.mark.parametrize("text", [*NOT_SAID.split(" | "), "a " * 500 + "is 8"])
def test_what_says_no_number_or_several_is_refused(text):
    assert stated_number(text) is None
    assert not same_answer(text, "8")
    assert not same_answer("8", text)


def test_one_writing_for_what_is_the_same_answer():
    assert {canonical(text) for text in ("18", "$18.00", "18 eggs", "The answer is 18.", "36/2")} == {"18"}
    assert canonical(r"\text{Friday}") == canonical("Friday ") == "Friday"
    assert canonical("18 or 20") != canonical("18")


HOSTILE = {
    "unclosed boxes": r"\boxed{",
    "unclosed marks": r"#### \boxed{ 8",
    "commands": r"#### \text{",
    "words": "is ",
    "equations": "1=",
    "marks": "#### 1\n",
    "bold": "**####",
    "fences": "```\n",
    "tokens": "</s><|",
    "invisible": "\u200b８",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
def test_work_is_bounded(unit):
    text = "#### " + unit * 10**5
    begun = time.process_time()
    for part in (text, r"\boxed{" * 10**5 + unit + "}" * 10**5):
        for answer in marked_answers(part)[-1:]:
            same_answer(answer, "8")
            canonical(answer)
        for function in (plain_characters, before_special_token, answer_start, strip_code_fence):
            function(part)
    # Linear work takes tenths of a second; the margin is for a busy machine.
    assert time.process_time() - begun < 4


SAME = (
    "1/2 = 0.5 | $18 = 18 dollars per day | 18 eggs = 18 | 50% = 50 | $18 = 18 USD | 0 = -0 | (1, 2) = (1,2) | "
    r"\left( 1, 2 \right) = (1,2) | x^2 + 1 = x^2+1 | \text{北京} = 北京"
)
DIFFERENT = (
    "18 = -18 | 18 = 180 | 18 = 1.8 | 1/3 = 0.333 | 50% = 0.5 | 3 million = 3 | 5 cm = 5 m | 5x = 5 | 18 or 20 = 18 | "
    "x^2+1 = x^2-1 | friday = Friday | 9007199254740993 = 9007199254740992 | 1 1/2 = 11/2 | (1,2) = [1,2] |  = 0 | "
    r"\frac{x+1}{2} = x+1/2"
)


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        *((*pair.split(" = "), True) for pair in SAME.split(" | ")),
        *((*pair.split(" = "), False) for pair in DIFFERENT.split(" | ")),
        ("The answer is 5", "x = 5.0", True),
    ],
)
def test_near_misses_are_told_from_the_same_answer_written_otherwise(answer, truth, same):
    assert same_answer(answer, truth) is same
    assert same_answer(truth, answer) is same


def test_every_gsm8k_answer_is_a_number(shared_data):
    with open(shared_data / "llm_jepa" / "gsm8k_test.jsonl", encoding="utf-8") as lines:
        answers = [marked_answers(json.loads(line)["messages"][-1]["content"]) for line in lines]
    assert len(answers) == 1319
    assert all(len(answer) == 1 and parse_number(answer[0]) is not None for answer in answers)

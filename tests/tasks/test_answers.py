"""What counts as the right answer, mostly by cases that come near it."""

import json
import time
from fractions import Fraction

import pytest

from stepjepa.tasks.answers import (
    answer_start,
    before_special_token,
    canonical,
    last_number,
    marked_answers,
    parse_number,
    plain_characters,
    same_answer,
    stated_number,
    strip_code_fence,
    text_scores,
)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("１８ Ａｂ！", "18 Ab!"),
        ("٣ ۳ ३", "3 3 3"),
        ("½ 1¾", " 1/2 1 3/4"),
        ("\ufeff1\u200b8\u2060\u00ad", "18"),
        ("a\u3000b", "a b"),
        # These group digits, and powers are no digits.
        ("1\u202f000\u00a0m²", "1\u202f000\u00a0m²"),
    ],
)
def test_characters_that_look_the_same_become_equal(text, seen):
    assert plain_characters(text) == seen


@pytest.mark.parametrize(
    ("function", "text", "expected"),
    [
        (answer_start, "```\nGood\n```", "Good\n```"),
        (answer_start, r"$\boxed{A}$", "A"),
        (answer_start, r"\text{Good} film", "Good film"),
        (answer_start, "A</s>B", "A"),
        (strip_code_fence, "```regex\n.*a.*\n```", ".*a.*"),
        (strip_code_fence, "`.*a.*`<|im_end|>", ".*a.*"),
        # Not all of it is code, or the code goes on.
        (strip_code_fence, "It is `.*a.*`", "It is `.*a.*`"),
        (strip_code_fence, "```a``` ```b```", "```a``` ```b```"),
        (before_special_token, "18<|im_end|>19", "18"),
        (before_special_token, "a < b | c", "a < b | c"),
    ],
)
def test_fences_boxes_and_special_tokens_are_no_part_of_an_answer(function, text, expected):
    assert function(text) == expected


@pytest.mark.parametrize("unit", ["`", "```", "<|", "</s>", "\u200b", "８", "```\n", "\\boxed{", " "])
def test_long_text_takes_linear_time(unit):
    begun = time.process_time()
    for function in (plain_characters, before_special_token, answer_start, strip_code_fence):
        function("```" + unit * (10**6 // len(unit)))
    assert time.process_time() - begun < 4


@pytest.mark.parametrize(
    ("generated", "truth", "exact", "prefix", "inside"),
    [
        ("[0-9]+", "[0-9]+", True, True, True),
        ("[0-9]+assistant\n[0-9]+", "[0-9]+", False, True, True),
        ("It is [0-9]+", "[0-9]+", False, False, True),
        ("", "[0-9]+", False, False, False),
        ("Goods", "Good", False, True, True),
    ],
)
def test_text_is_compared_whole_from_the_start_or_anywhere(generated, truth, exact, prefix, inside):
    assert text_scores(generated, truth) == {"exact": exact, "prefix": prefix, "contains": inside}


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (r"so \boxed{18}.", ["18"]),
        (r"\boxed{\frac{1}{2}}", [r"\frac{1}{2}"]),
        (r"\boxed{\{1, 2\}} and \boxed{x_{i_{2}}}", [r"\{1, 2\}", "x_{i_{2}}"]),
        (r"first \boxed{4}, then \boxed{5", ["4"]),
        (r"\boxed{\boxed{5}}", ["5"]),
        (r"#### \boxed{5}", ["5"]),
        (r"#### So it is \boxed{5} or \boxed{6}.", ["5", "6"]),
        (r"\boxed{\boxed{}}", []),
        (r"\boxed{4 \boxed{5}", ["5"]),
        (r"\boxed{a \\}", [r"a \\"]),
        (r"\\boxed{5}", ["5"]),
        (r"\boxed{}", []),
        ("steps\n#### 18", ["18"]),
        ("\\boxed{17}\n#### 18", ["17", "18"]),
        ("They eat **#### 18** eggs.", ["18"]),
        ("**#### 18**", ["18"]),
        ("**#### 18", []),
        ("####\u00a018", ["18"]),
        ("#### １８", ["18"]),
        ("#### 18<|im_end|>\n", ["18"]),
        ("####$18", ["$18"]),
        ("####Answer", []),
        ("### 18", []),
        ("####\n18", []),
        ("", []),
    ],
)
def test_answers_are_read_where_they_are_marked_and_nowhere_else(text, answers):
    assert marked_answers(text) == answers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("−3", -3),
        (".5", Fraction(1, 2)),
        ("0.1", Fraction(1, 10)),
        ("1,234,567.50", Fraction(2469135, 2)),
        ("1{,}000", 1000),
        ("$18", 18),
        ("-$18", -18),
        (r"\$18.50", Fraction(37, 2)),
        ("18€", 18),
        ("**18**", 18),
        (r"\text{18}", 18),
        (r"18\text{ dollars}", 18),
        ("18 dollars per day", 18),
        ("$5/hour", 5),
        ("9 cm^2", 9),
        ("50%", 50),
        (r"50\%", 50),
        (r"90^\circ", 90),
        ("3/4", Fraction(3, 4)),
        (r"\dfrac34", Fraction(3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        ("3 million", 3_000_000),
        ("1.5E+3 meters", 1500),
        # As people of other countries, and their computers, write it.
        ("１，０００．５", Fraction(2001, 2)),
        ("1,00,000", 100_000),
        ("½", Fraction(1, 2)),
        ("18元", 18),
        ("USD 18", 18),
        ("Rs. 18", 18),
        (r"1.5\times 10^3", 1500),
        # Set apart, explained, rounded.
        ("about 18", 18),
        (r"\approx 3.14", Fraction(157, 50)),
        ("two", None),
        ("1e999", None),
        ("8!", None),
        ("1,00", None),
        ("1.2.3", None),
        ("5:30", None),
        ("18 or more", None),
        ("2 hours 30 minutes", None),
        ("5x", None),
        ("x = 5", None),
        ("--5", None),
        ("(1, 2)", None),
        ("[1,234]", None),
        ("9" * 200, None),
    ],
)
def test_numbers_are_understood_or_refused_but_never_guessed(text, value):
    number = parse_number(text)
    assert (None if number is None else number.value) == value


SAID = [
    "The final answer is 8.",
    "The answer is: 8",
    "**Answer:** $8$",
    "Total = 8",
    "x = 8",
    r"\(x = 8\)",
    "6 + 2 = 8",
    "(6 - 2) * 2 = 4 * 2 = 8 eggs",
    r"2 \times 4 = 8",
    "The total is 2 * 4 = 8",
    "Total: 1,000 / 125 = 8",
    "The difference between their ages is 8 years.",
    "If we add the eggs, the answer is 8",
]

NOT_SAID = [
    "8 or 9",
    "8-9",
    "The answer is 8 or 9",
    "x = 5, y = 8",
    "2x = 8",
    "x != 8",
    "at least 8",
    "The answer is not 8",
    "The answer can't be 8",
    "It may be 8",
    "The answer is 8?",
    "Step 2: 3 + 5 = 8",
    "5:08",
    "The answer is eight",
    "a " * 300 + "is 8",
]


@pytest.mark.parametrize("text", SAID)
def test_a_sentence_or_an_equation_says_its_number(text):
    assert stated_number(text).value == 8
    assert same_answer(text, "8.0")
    assert not same_answer(text, "9")


@pytest.mark.parametrize("text", NOT_SAID)
def test_what_says_no_number_or_several_is_refused(text):
    assert stated_number(text) is None
    assert not same_answer(text, "8")
    assert not same_answer("8", text)


def test_one_writing_for_what_is_the_same_answer():
    assert {canonical(text) for text in ("18", "$18.00", "18 eggs", "The answer is 18.", "36/2")} == {"18"}
    assert canonical("0.5") == canonical("1/2") == "1/2"
    assert canonical(r"\text{Friday}") == canonical("Friday ") == "Friday"
    assert canonical("18 or 20") != canonical("18")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7, so 7.", "7"),
        ("She pays $18.50 for it.", "18.50"),
        ("The answer is -3", "-3"),
        ("It costs -$3.", "-3"),
        ("1,234 people", "1,234"),
        ("1{,}234 people", "1,234"),
        ("a half, 3/4.", "3/4"),
        ("version 1.2.3", None),
        ("", None),
        ("7 " + "1" * 200, None),
        ("x" * 500 + " 18", "18"),
    ],
)
def test_the_last_number_is_a_guess_that_is_bounded(text, number):
    assert last_number(text) == number


MANY = 200_000

HOSTILE = {
    "exponent": "#### 1e999999999",
    "unclosed boxes": r"\boxed{" * MANY,
    "nested boxes": r"\boxed{" * MANY + "}" * MANY,
    "nested braces": r"\boxed{" + "{" * MANY + "}" * MANY + "}",
    "nested commands": "#### " + r"\text{" * MANY + "8" + "}" * MANY,
    "words": "#### " + "is " * MANY,
    "equations": "#### " + "1=" * 199,
    "spaces": "#### " + " " * MANY + r"\boxed" + " " * MANY,
    "marks": "#### " * MANY,
    "bold spaces": "**####" + " " * MANY,
    "invisible": "#### " + "\u200b" * MANY + "8",
    "dots": "#### 8" + "." * 1900,
    "backslashes": "\\" * MANY,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_work_is_bounded(text):
    begun = time.process_time()
    for answer in marked_answers(text)[-1:]:
        same_answer(answer, "8")
        canonical(answer)
    last_number(text)
    # Linear work takes hundredths of a second; the margin is for a busy machine.
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("18", "18.0", True),
        ("1/2", "0.5", True),
        ("$18", "18 dollars per day", True),
        ("18 eggs", "18", True),
        ("50%", "50", True),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        ("0", "-0", True),
        ("18", "-18", False),
        ("18", "1.8", False),
        ("1/3", "0.333", False),
        ("50%", "0.5", False),
        ("3 million", "3", False),
        ("5 cm", "5 m", False),
        ("5x", "5", False),
        ("friday", "Friday", False),
        ("9007199254740993", "9007199254740992", False),
        ("", "0", False),
        ("$18", "18 USD", True),
        ("about 18", "18.5", False),
        ("(1,2)", "[1,2]", False),
        (r"\text{北京}", "北京", True),
        # Symbols must agree if both answers have one.
        ("x = 5", "x = 5.0", True),
        ("The answer is 5", "x = 5", True),
        ("x = 5", "y = 5", False),
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

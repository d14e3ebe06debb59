"""What counts as the right answer, mostly by cases that come near it."""

import json
from fractions import Fraction

import pytest

from stepjepa.scoring import contains, exact_match, marked_answers, parse_number, prefix_match, same_answer


@pytest.mark.parametrize(
    ("generated", "truth", "exact", "prefix", "inside"),
    [
        ("[0-9]+", "[0-9]+", True, True, True),
        ("  [0-9]+\n", "[0-9]+ ", True, True, True),
        ("[0-9]+assistant\n[0-9]+", "[0-9]+", False, True, True),
        ("It is [0-9]+", "[0-9]+", False, False, True),
        ("[0-9]", "[0-9]+", False, False, False),
        ("", "[0-9]+", False, False, False),
        ("GOOD", "Good", False, False, False),
        ("Goods", "Good", False, True, True),
        ("a  b", "a b", False, False, False),
        ("(dog.*)+", "(dog.+)*", False, False, False),
    ],
)
def test_text_is_compared_whole_from_the_start_or_anywhere(generated, truth, exact, prefix, inside):
    assert exact_match(generated, truth) is exact
    assert prefix_match(generated, truth) is prefix
    assert contains(generated, truth) is inside


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (r"so \boxed{18}.", ["18"]),
        (r"\boxed {18}", ["18"]),
        (r"\boxed{\frac{1}{2}}", [r"\frac{1}{2}"]),
        (r"\boxed{\{1, 2\}} and \boxed{x_{i_{2}}}", [r"\{1, 2\}", "x_{i_{2}}"]),
        (r"first \boxed{4}, then \boxed{5", ["4"]),
        (r"\boxed{\boxed{5}}", [r"\boxed{5}", "5"]),
        (r"\boxed{}", []),
        ("steps\n#### 18", ["18"]),
        ("#### 18 \r\n", ["18"]),
        ("#### 17\nno wait\n#### 18", ["17", "18"]),
        ("#### 17\n\\boxed{18}", ["17", "18"]),
        ("\\boxed{17}\n#### 18", ["17", "18"]),
        ("The answer is #### 18", []),
        ("####18", []),
        ("### 18", []),
        ("##### 18", []),
        ("####\n18", []),
        ("The final answer is 18.", []),
        ("boxed{18}", []),
        ("", []),
    ],
)
def test_answers_are_read_where_they_are_marked_and_nowhere_else(text, answers):
    assert marked_answers(text) == answers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("+18", 18),
        ("-3", -3),
        ("- 3", -3),
        ("−3", -3),
        ("18.00", 18),
        ("18.", 18),
        ("007", 7),
        (".5", Fraction(1, 2)),
        ("0.1", Fraction(1, 10)),
        ("1,234,567.50", Fraction(2469135, 2)),
        ("1{,}000", 1000),
        (r"1\,000", 1000),
        ("$18", 18),
        ("-$18", -18),
        ("$-18", -18),
        (r"\$18.50", Fraction(37, 2)),
        ("18€", 18),
        ("$18$", 18),
        ("$$18$$", 18),
        (r"\(18\)", 18),
        ("**18**", 18),
        ("{18}", 18),
        (r"\text{18}", 18),
        (r"18\text{ dollars}", 18),
        ("18 dollars per day", 18),
        ("$5/hour", 5),
        ("60 km/h", 60),
        ("9 cm^2", 9),
        ("9 m²", 9),
        ("5m", 5),
        ("50%", 50),
        (r"50\%", 50),
        ("50 percent", 50),
        (r"90^\circ", 90),
        ("90°", 90),
        ("3/4", Fraction(3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"\dfrac34", Fraction(3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        ("3 million", 3_000_000),
        ("two", None),
        ("", None),
        ("1,2", None),
        ("1, 2", None),
        ("1,00", None),
        ("1.000,50", None),
        ("1.2.3", None),
        ("1/2/3", None),
        ("1/0", None),
        ("5:30", None),
        ("18 or 20", None),
        ("18 or more", None),
        ("2 hours 30 minutes", None),
        ("6*3", None),
        ("6 x 3", None),
        ("5x", None),
        ("2n", None),
        ("3k", None),
        ("x = 5", None),
        ("$5 and a half", None),
        ("--5", None),
        ("-$-5", None),
        ("1e3", None),
        ("٣", None),
        ("9" * 200, None),
    ],
)
def test_numbers_are_understood_or_refused_but_never_guessed(text, value):
    number = parse_number(text)
    assert (None if number is None else number.value) == value


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("18", "18.0", True),
        ("1,000", "1000", True),
        ("1/2", "0.5", True),
        ("0.50", "1/2", True),
        ("$18", "18 dollars per day", True),
        ("18 eggs", "18", True),
        ("50%", "50", True),
        ("50 percent", "50%", True),
        (r"\text{Friday}", "Friday", True),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        ("x^2 + 1", "x^2+1", True),
        ("0", "-0", True),
        ("18", "-18", False),
        ("18", "180", False),
        ("18", "1.8", False),
        ("1000", "1,000,000", False),
        ("1/3", "0.333", False),
        ("0.333", "0.3333", False),
        ("50%", "0.5", False),
        ("3 million", "3", False),
        ("5 cm", "5 m", False),
        ("$5", "5 cents", False),
        ("5x", "5", False),
        ("18 or 20", "18", False),
        ("18", "18 or 20", False),
        ("x^2+1", "x^2-1", False),
        ("friday", "Friday", False),
        ("(1,2)", "(2,1)", False),
        ("9007199254740993", "9007199254740992", False),
        ("0.1", "0.10000000000000001", False),
        ("1,2", "12", False),
        ("", "0", False),
        (r"\frac{1}{2}", r"\frac{2}{1}", False),
        ("1 1/2", "11/2", False),
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


def test_agrees_with_the_verdicts_on_solutions_that_a_model_wrote(shared_data):
    with open(shared_data / "traces" / "star_repo_star.detailed_results.json", encoding="utf-8") as file:
        rows = json.load(file)
    judged = 0
    for row in rows:
        marked = marked_answers(row["full_response"])
        # The verdicts read the first number of the last #### line; where that line is no plain number they guess.
        if not marked or marked[-1].replace(",", "") != row["predicted_answer"]:
            continue
        judged += 1
        assert same_answer(marked[-1], row["correct_answer"]) is row["is_correct"], row["index"]
    assert judged > 1000

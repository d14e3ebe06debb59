"""Generated word problems: right, dependent step on step, not to be copied, reproducible, train and test apart."""

import re
from collections import Counter
from itertools import pairwise

import pytest

from stepjepa.data.records import parse_record
from stepjepa.data.steps import find_steps
from stepjepa.tasks.stepmath import MAX_STEPS, OPERATIONS, Difficulty, generate, generate_split
from stepjepa.tasks.stepmath_stories import BOXES, NAMES, OPENINGS, QUESTIONS, THINGS, TURNS, Noun, counted

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
HARD = Difficulty(min_steps=3, max_steps=MAX_STEPS, max_quantity=13, max_amount=170)
APPLY = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


@pytest.fixture(scope="module", params=[Difficulty(), HARD], ids=["default", "hard"])
def records(request):
    return generate(1500, seed=7, difficulty=request.param)


def told(record):
    return {int(number) for number in re.findall(r"\d+", record["question"])}


def equations(record):
    return [(int(a), sign, int(b), int(c)) for a, sign, b, c in EQUATION.findall(record["answer"])]


def chain(record):
    return tuple((a, sign, b) for a, sign, b, _ in equations(record))


def test_every_step_holds_one_true_equation_on_the_result_before_it(records):
    for record in records:
        steps = record["answer"].split("\n\n")
        found = equations(record)
        assert len(steps) == len(found) == record["total_steps"]
        assert all(len(EQUATION.findall(step)) == 1 for step in steps)
        for a, sign, b, result in found:
            assert APPLY[sign](a, b) == result
        for before, after in pairwise(found):
            assert after[0] == before[3]


def test_the_answer_is_the_last_result_and_boxed_in_the_last_step_only(records):
    for record in records:
        steps = record["answer"].split("\n\n")
        assert record["ground_truth"] == str(equations(record)[-1][3])
        assert steps[-1].endswith(f"The answer is \\boxed{{{record['ground_truth']}}}.")
        assert "boxed" not in "".join(steps[:-1])


def test_no_result_can_be_copied_from_the_question(records):
    for record in records:
        results = [result for *_, result in equations(record)]
        assert not told(record).intersection(results)
        assert len(set(results)) == len(results)
        # "Twice" and "half" tell a two.
        if re.search(r"twice|half|again", record["question"]):
            assert 2 not in results


def test_the_question_tells_all_other_operands(records):
    for record in records:
        first, *later = equations(record)
        words_for_two = len(re.findall(r"twice|half|as many again", record["question"]))
        operands = [first[0], first[2], *(b for _, _, b, _ in later)]
        untold = [operand for operand in operands if operand not in told(record)]
        assert untold == [2] * len(untold)
        assert len(untold) <= words_for_two


@pytest.mark.parametrize("guess", [min, max, lambda numbers: sorted(numbers)[len(numbers) // 2]])
def test_guesses_without_calculation_fail(records, guess):
    assert not any(guess(told(record)) == int(record["ground_truth"]) for record in records)


def test_no_answer_is_frequent(records):
    (_, most), *_ = Counter(record["ground_truth"] for record in records).most_common(1)
    assert most < 0.1 * len(records)


def test_the_last_operation_on_told_numbers_never_gives_the_answer(records):
    lucky = 0
    for record in records:
        *_, (_, sign, last, answer) = equations(record)
        lucky += any(APPLY[sign](number, last) == answer for number in told(record))
    assert lucky == 0


def test_amounts_stay_within_the_difficulty():
    difficulty = Difficulty(min_steps=2, max_steps=5, max_quantity=7, max_amount=30)
    records = generate(1000, seed=3, difficulty=difficulty)
    assert {record["total_steps"] for record in records} == {2, 3, 4, 5}
    for record in records:
        assert all(1 <= number <= 30 for a, _, _, result in equations(record) for number in (a, result))
        assert all(1 <= b <= 7 for _, _, b, _ in equations(record))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_operation_alone_makes_problems(operation):
    signs = {"add": "+", "subtract": "-", "multiply": "*", "share": "/", "double": "*", "halve": "/"}
    difficulty = Difficulty(max_steps=2, max_amount=200, operations=(operation,))
    for record in generate(20, seed=1, difficulty=difficulty):
        assert {sign for _, sign, _, _ in equations(record)} == {signs[operation]}


def test_every_phrase_is_used():
    text = " ".join(record["question"] + record["answer"] for record in generate(3000, seed=5))
    phrases = [phrase for family in (OPENINGS, TURNS) for choices in family.values() for phrase in choices]
    for template in [part for phrase in phrases for part in (phrase.story, phrase.solution)] + list(QUESTIONS):
        pattern = re.sub(r"\\\{\w+\\\}", r"[\\w*/+= -]+", re.escape(template))
        assert re.search(pattern, text), template


def test_the_english_is_right_in_number(records):
    nouns = (*THINGS, *BOXES)
    singular = "|".join(noun.singular for noun in nouns)
    plural = "|".join(noun.plural for noun in nouns)
    for record in records:
        text = record["question"] + " " + record["answer"]
        assert not re.search(rf"\b1 ({plural})\b", text), text
        assert not re.search(rf"\b(?!1 )\d+ ({singular})\b", text), text
        assert not re.search(r"[{}]", record["question"])
        assert "  " not in text


def test_counted():
    assert counted(1, Noun("peach", "peaches")) == "1 peach"
    assert counted(2, Noun("peach", "peaches")) == "2 peaches"


def test_nobody_new_has_a_name_that_is_taken(records):
    for record in records:
        # A turn that brings somebody in names them once in the story, so a second meaning would show up as a
        # sentence that names one person twice.
        for sentence in record["question"].split(". "):
            names = [name for name in re.findall(r"[A-Z]\w+", sentence) if name in NAMES]
            assert len(names) == len(set(names)), sentence


def test_rows_are_short():
    records = generate(2000, seed=11)
    questions = [len(record["question"].split()) for record in records]
    solutions = [len(record["answer"].split()) for record in records]
    assert max(questions) <= 55
    assert 20 <= sum(questions) / len(questions) <= 45
    assert max(solutions) <= 45
    assert 15 <= sum(solutions) / len(solutions) <= 40


def test_records_are_training_records(records):
    for record in records:
        parsed = parse_record(record)
        assert [message["role"] for message in parsed.messages] == ["system", "user", "assistant"]
        assert parsed.messages[1]["content"] == record["question"]
        assert parsed.answer == record["answer"]
        assert len(find_steps(parsed.answer, "blank")) == record["total_steps"]


def test_a_seed_fixes_the_records_and_global_chance_does_not_matter():
    import random

    random.seed(1)
    first = generate(300, seed=4)
    random.seed(2)
    assert generate(300, seed=4) == first
    assert generate(100, seed=4) == first[:100]
    assert generate(300, seed=5) != first


def test_no_question_occurs_twice():
    records = generate(5000, seed=2)
    assert len({record["question"] for record in records}) == 5000


def test_train_and_test_share_no_problem():
    train, test = generate_split(6000, 500, seed=0)
    assert len(train) == 6000
    assert len(test) == 500
    assert not {record["question"] for record in train} & {record["question"] for record in test}
    assert not set(map(chain, train)) & set(map(chain, test))
    assert len(set(map(chain, test))) == 500


def test_the_test_set_does_not_depend_on_the_training_size():
    small_train, small_test = generate_split(50, 40, seed=9)
    large_train, large_test = generate_split(200, 40, seed=9)
    assert small_test == large_test
    assert small_train == large_train[:50]
    assert generate_split(50, 40, seed=10)[1] != small_test


def test_too_few_problems_is_an_error_with_the_number_found():
    tiny = Difficulty(max_steps=2, operations=("double",))
    with pytest.raises(ValueError, match=r"test_size: .* got 500 and found \d+; ask for fewer"):
        generate_split(10, 500, seed=0, difficulty=tiny)
    with pytest.raises(ValueError, match=r"^size: .* got 9 and found 0"):
        generate(9, seed=0, difficulty=Difficulty(min_steps=8, max_steps=8, max_amount=10, operations=("share",)))


def test_sizes():
    assert generate(0, seed=0) == []
    with pytest.raises(ValueError, match="size: expected 0 or more, got -1"):
        generate(-1, seed=0)
    with pytest.raises(ValueError, match="train_size: expected 0 or more, got -2"):
        generate_split(-2, 1, seed=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_steps": 1}, "min_steps: expected 2 or more, got 1"),
        ({"max_steps": 1}, r"max_steps: expected 2 \(min_steps\) to 8, got 1"),
        ({"min_steps": 5, "max_steps": 4}, r"max_steps: expected 5 \(min_steps\) to 8, got 4"),
        ({"max_steps": 9}, "max_steps: .* got 9"),
        ({"max_quantity": 3}, "max_quantity: expected 4 or more, got 3"),
        ({"max_amount": 9}, r"max_amount: expected 10 \(max_quantity\) or more, got 9"),
        ({"operations": ()}, "operations: .* got none"),
        ({"operations": ("add", "divide")}, "operations: .* got add, divide"),
        ({"operations": ("add", "add")}, "operations: expected different ones"),
    ],
)
def test_a_wrong_difficulty_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Difficulty(**fields)

"""Generated word problems: right, dependent step on step, not to be copied, reproducible, train and test apart."""

import hashlib
import json
import operator
import re
from itertools import pairwise

import pytest

from stepjepa.tasks.stepmath import MAX_STEPS, Difficulty, generate, generate_split

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
HARD = Difficulty(min_steps=3, max_steps=MAX_STEPS, max_quantity=13, max_amount=170)
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@pytest.fixture(scope="module", params=[Difficulty(), HARD], ids=["default", "hard"])
def records(request):
    return generate(700, seed=7, difficulty=request.param)


def equations(record):
    return [(int(a), sign, int(b), int(c)) for a, sign, b, c in EQUATION.findall(record["answer"])]


def chain(record):
    return tuple((a, sign, b) for a, sign, b, _ in equations(record))


def test_every_step_holds_one_true_equation_on_a_result_that_the_question_does_not_tell(records):
    for record in records:
        steps, actual = record["answer"].split("\n\n"), equations(record)
        assert len(steps) == len(actual) == record["total_steps"]
        assert all(len(EQUATION.findall(step)) == 1 for step in steps)
        assert all(APPLY[sign](a, b) == result for a, sign, b, result in actual)
        assert all(after[0] == before[3] for before, after in pairwise(actual))
        assert record["ground_truth"] == str(actual[-1][3])
        assert steps[-1].endswith(f"The answer is \\boxed{{{record['ground_truth']}}}.")
        # "Twice" and "half" tell a two.
        message = {int(number) for number in re.findall(r"\d+", record["question"])}
        message |= {2} if re.search(r"twice|half|again", record["question"]) else set()
        results = {result for *_, result in actual}
        assert len(results) == len(actual)
        assert not message & results


def test_train_and_test_share_no_problem_and_the_test_set_does_not_depend_on_the_training_size():
    small_train, small_test = generate_split(50, 200, seed=0)
    train, test = generate_split(2000, 200, seed=0)
    assert (len(train), len(test)) == (2000, 200)
    assert (small_train, small_test) == (train[:50], test)
    assert not set(map(chain, train)) & set(map(chain, test))
    assert len(set(map(chain, test))) == 200
    assert generate_split(50, 200, seed=1)[1] != test


def test_the_records_of_a_seed_stay_what_they_were():
    made = generate_split(400, 60, 3), generate_split(120, 30, 1, Difficulty(2, 8, 30, 900))
    digests = [hashlib.sha256(json.dumps(each, ensure_ascii=False).encode()).hexdigest()[:16] for each in made]
    assert digests == ["2f5257bd9159696b", "587e927b6b9e1bcb"]

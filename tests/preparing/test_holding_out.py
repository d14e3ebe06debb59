"""Test records that are held out: how many, which, and that no question is on both sides."""

from typing import Any

import pytest

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.preparing.holding_out import hold_out
from stepjepa.tasks.raw_values import chat_record


def records_of(*questions: str) -> list[JsonObject]:
    """A record for each question; its answer is the number of the record."""
    return [chat_record(None, question, str(number)) for number, question in enumerate(questions)]


def numbers_of(records: list[JsonObject]) -> list[int]:
    return [int(record["messages"][-1]["content"]) for record in records]


def test_every_record_is_on_one_side_in_the_order_of_the_file() -> None:
    train, test = map(numbers_of, hold_out(records_of(*map(str, range(29))), 7, 3))
    assert (len(train), len(test)) == (22, 7)
    assert sorted(train + test) == list(range(29))
    assert train == sorted(train) and test == sorted(test)


def test_the_seed_decides_which_records_are_drawn() -> None:
    records = records_of(*map(str, range(29)))
    assert hold_out(records, 7, 3) == hold_out(records, 7, 3)
    draws = {tuple(numbers_of(hold_out(records, 7, seed)[1])) for seed in range(5)}
    assert len(draws) == 5 and (0, 1, 2, 3, 4, 5, 6) not in draws


@pytest.mark.parametrize("seed", range(11))
def test_no_question_is_on_both_sides_whatever_its_case_and_blanks(seed: int) -> None:
    questions = ["Where is it?", "a", "where  is it?", "b", "c", "WHERE IS IT?", "a ", "d", "e", "f", "g"]
    parts = hold_out(records_of(*questions), 3, seed)
    sides = [{" ".join(questions[number].lower().split()) for number in numbers_of(part)} for part in parts]
    assert not sides[0] & sides[1]
    assert len(parts[1]) == 3


GROUPS: list[tuple[Any, ...]] = [(1, 2, 3, 4), ("x", "y", "z", ""), ([1], [2], [], [[1]]), ({"a": 1}, {"a": 2}, {}, [])]


@pytest.mark.parametrize("groups", GROUPS)
def test_groups_stay_together_also_through_a_question_that_they_share(groups: tuple[Any, ...]) -> None:
    """Groups of any kind that JSON has: lists and objects ended in a traceback."""
    records = [
        record | {"group": groups[group - 1]}
        for record, group in zip(records_of("a", "b", "b", "c", "d", "e"), (1, 1, 2, 2, 3, 4), strict=True)
    ]
    for seed in range(7):
        assert numbers_of(hold_out(records, 3, seed)[1]) == [4, 5]  # the four others are too many


def test_a_split_that_leaves_one_side_empty_is_refused() -> None:
    with pytest.raises(UserError, match="expected fewer than the 2 records that could be kept, got 2"):
        hold_out(records_of("a", "b"), 2, 0)
    with pytest.raises(UserError, match="at least 3 have the same question; hold out 3 or more"):
        hold_out(records_of("a", "a", "A", "b", "b", "B"), 2, 0)
    # Holding out all three would leave nothing to train on.
    with pytest.raises(UserError, match="all have the same question, or share its group; add records with another"):
        hold_out(records_of("a", "a", "A"), 2, 0)

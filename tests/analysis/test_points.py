"""Which points are drawn, what colours them, and which answers were right."""

from typing import Any

import numpy as np
import pytest

import tiny
from stepjepa.analysis.points import Points, choose_classes, choose_points, view_names
from stepjepa.analysis.representations import ViewEmbeddings
from stepjepa.errors import UserError

# Three pairs of record 1, one of record 0 and one of record 2; the numbers in the vectors say which is which.
RECORD = np.asarray([0, 1, 1, 1, 2])
PAIR = np.asarray([1, 1, 2, 3, 1])
EMBEDDINGS = ViewEmbeddings(
    (10 * RECORD + PAIR)[:, None].astype(np.float32), -(10 * RECORD + PAIR)[:, None].astype(np.float32), RECORD, PAIR
)
RECORDS = [
    tiny.make_record("", "q", answer, group=group)
    for answer, group in (("Good", 3), (" Bad\nfilm ", "b"), ("x" * 50, 3))
]


def points(colouring: str, views: tuple[str, str] = ("text", "code"), **options: Any) -> Points:
    return choose_points(EMBEDDINGS, colouring, RECORDS, views=views, **options)


def drawn(found: Points) -> list[tuple[float, str]]:
    return [(float(vector[0]), label) for vector, label in zip(found.vectors, found.labels, strict=True)]


def test_views_are_both_drawn() -> None:
    found = points("in_n_out")
    sources = [(value, "text") for value in (1, 11, 12, 13, 21)]
    assert drawn(found) == sources + [(-value, "code") for value, _ in sources]
    assert found.is_target.tolist() == [False] * 5 + [True] * 5
    assert drawn(points("in_n_out", ("code", "text")))[0] == (1, "code")


def test_labels_of_the_record_colour_the_text_alone() -> None:
    bad = [(value, "Bad film") for value in (11, 12, 13)]
    answers = [(1, "Good"), *bad, (21, "x" * 50)]
    assert drawn(points("rotten_tomatoes")) == answers
    assert [label for _, label in drawn(points("paraphrase"))] == ["group 3", *["group b"] * 3, "group 3"]
    # Where the code predicts the text, the text is the target.
    reverse = points("rotten_tomatoes", view_names("llm-jepa", True))
    assert drawn(reverse) == [(-value, label) for value, label in answers]
    assert reverse.is_target.all()


def test_a_target_is_the_step_after_its_source() -> None:
    steps = dict(drawn(points("steps", view_names("step-jepa", False))))
    assert [steps[place] for place in (11, 12, -11, -12, -13)] == [f"step {n}" for n in (1, 2, 2, 3, 4)]
    steps = dict(drawn(points("steps", view_names("step-jepa", True))))
    assert [steps[place] for place in (11, 12, -11, -12)] == [f"step {n}" for n in (2, 3, 1, 2)]


def test_a_sample_of_pairs_keeps_them_together() -> None:
    found = points("in_n_out", most=2, seed=1)
    assert len(found.labels) == 4
    assert (found.vectors[:2] == -found.vectors[2:]).all()
    assert drawn(points("in_n_out", most=2, seed=1)) == drawn(found)
    assert any(drawn(points("in_n_out", most=2, seed=seed)) != drawn(found) for seed in range(9))


@pytest.mark.parametrize("group", [{}, {"group": True}, {"group": [1]}])
def test_a_record_without_a_group_is_named(group: Any) -> None:
    records = [*RECORDS[:2], tiny.make_record("", "q", "a", line=7, **group)]
    with pytest.raises(UserError, match=r"memory.jsonl:7: no field 'group'.*prepare paraphrase"):
        choose_points(EMBEDDINGS, "paraphrase", records, views=("text", "code"))


def test_the_largest_classes_have_a_colour() -> None:
    labels = [f"group {letter}" for number, letter in enumerate("ihgfedcba") for _ in range(9 - number)]
    assert choose_classes(labels, "paraphrase") == [f"group {letter}" for letter in "cdefghi"]
    numbered = [f"group {number}" for number in (10, 2, 1, 11)]
    assert choose_classes(numbered, "paraphrase") == [f"group {number}" for number in (1, 2, 10, 11)]
    assert choose_classes(["Good", "Bad", "Good"], "rotten_tomatoes") == ["Bad", "Good"]
    assert choose_classes(["text", "code"], "in_n_out") == ["text", "code"]
    steps = [f"step {number}" for number in (10, 9, 2, 1, 3, 4, 5, 6, 7) for _ in range(number)]
    assert choose_classes(steps, "steps") == [f"step {number}" for number in range(1, 8)]

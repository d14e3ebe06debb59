"""NQ-Open: which short answers count, judged as a person would."""

import pytest

from stepjepa.tasks.base import NO_ANSWER, WRONG, Response
from stepjepa.tasks.nq_open import NqOpenTask
from task_records import record

TASK = NqOpenTask()


@pytest.mark.parametrize(
    ("truth", "said", "expected"),
    [
        # The answer, in the ways in which people write it.
        ("Amma", "Amma", "epc"),
        ("Tempest", '"The Tempest"', "epc"),
        ("Máire Brennan", "Maire Brennan", "epc"),
        ("Simon & Garfunkel", "Simon and Garfunkel", "epc"),
        ("-1.5", "−1.5", "epc"),
        ("B. F. Skinner", "BF Skinner", "epc"),
        ("AT&T", "ATT", "epc"),
        ("T-Bone", "T Bone steak", "-pc"),
        ("T Bone", "t-bone", "epc"),
        ("T-Bone", "TBone", "epc"),
        ("$2,500", "2500", "epc"),
        # Lists, the form in which the training targets stand.
        ("Nine; 9", "9; nine", "epc"),
        # The answer in more words, or with more behind it.
        ("Amma", "The answer is Amma.", "--c"),
        # Near misses.
        ("Amma", "Ammar", "---"),
        ("10-20%", "1020", "---"),
        ("1.5", "15", "---"),
        ("-5", "5", "---"),
        # Nothing said.
        ("Amma", ";;;", "---"),
        # Truths that normalising leaves nothing of make nothing else right.
        ('"; Frederick Douglass', "Frederick Douglass", "epc"),
        ('"; Frederick Douglass', "Booker Washington", "---"),
        ("A", "A", "epc"),
        # Signs that make another thing of a letter.
        ("C++", "C", "---"),
        ("Ｐａｒｉｓ", "Pa\u200bris", "epc"),
        # What only one who knows the subject can tell is not told.
        ("Nine", "9", "---"),
    ],
)
def test_verdicts(truth, said, expected):
    scores = TASK.score(record(truth), Response(said)).scores.values()
    assert "".join(mark if score else "-" for mark, score in zip("epc", scores, strict=True)) == expected


def test_scores_extracted_and_errors():
    scored = TASK.score(record("The Nine; 9"), Response("The 9; eight"))
    assert list(scored.scores) == ["exact", "prefix", "contains"]
    assert scored.extracted == {"truth": "nine; 9", "answer": "9; eight"}
    assert scored.error == WRONG
    assert TASK.score(record("A"), Response("a")).extracted["answer"] == "a"
    for nothing in ("", "...", "; ;", "-"):
        scored = TASK.score(record("Nine"), Response(nothing))
        assert (scored.error, scored.extracted["answer"]) == (NO_ANSWER, None)
        assert TASK.vote(scored, Response(nothing)) is None

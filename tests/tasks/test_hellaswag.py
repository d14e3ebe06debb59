"""HellaSwag: choices read from the prompt, letters read from answers, likelihoods compared."""

import math

import pytest

from stepjepa.tasks.base import NO_ANSWER, WRONG, Likelihood, Response
from stepjepa.tasks.hellaswag import LETTERS, HellaswagTask, read_choices, read_letter
from task_records import record

TASK = HellaswagTask()
CONTEXT = "A man is sitting on a roof. he"
ENDINGS = ("wraps a pair of skis.", "rips level tiles off.", "is holding a rubik's cube.", "pulls up the roof.")


def asked(context, endings):
    return context + "".join(f"\n{letter}) {ending}" for letter, ending in zip(LETTERS, endings, strict=True))


def question(answer):
    return record(answer, asked(CONTEXT, ENDINGS))


def likelihoods(letters, endings):
    result = {letter: Likelihood(value, 1) for letter, value in zip(LETTERS, letters, strict=True)}
    return result | {f"ending_{letter}": Likelihood(value, 9) for letter, value in zip(LETTERS, endings, strict=True)}


SAID = {
    "B": ["B", "(b)", "`B`", "B<|im_end|>", "The answer is B. Yes, option B.", "Answer:\n(B)", "B because of tiles"],
    None: ["B?", "A or B", "The answer is A. No, the answer is B.", "The answer is a man on it", "rips level tiles"],
}


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        *((said, letter) for letter, texts in SAID.items() for said in texts),
        # Ran on.
        ("B\nuser\nnext\nassistant\nC", "B"),
    ],
)
def test_letters_are_read_as_a_person_would(said, letter):
    assert read_letter(said) == letter
    scored = TASK.score(question(letter or "B"), Response(said))
    assert scored.scores == {"correct": letter is not None, "said_correct": letter is not None}
    assert scored.error == (None if letter else NO_ANSWER)
    assert not TASK.score(question("B" if letter != "B" else "C"), Response(said)).scores["correct"]


def test_likelihoods_decide_where_there_are_any():
    # The second ending is likely as a whole because it is short; per character the third is.
    response = Response("D", likelihoods([-2.0, -1.0, -3.0, -9.0], [-50.0, -20.0, -21.0, -40.0]))
    scored = TASK.score(question("B"), response)
    assert scored.scores == {"correct": True, "ending_correct": False, "said_correct": False}
    assert scored.extracted == {"truth": "B", "answer": "B", "ending": "C", "said": "D"}
    assert scored.error is None
    scored = TASK.score(question("C"), response)
    assert scored.scores == {"correct": False, "ending_correct": True, "said_correct": False}
    assert scored.error == WRONG
    assert TASK.vote(scored, response) == "B"
    # A model may find none possible.
    scored = TASK.score(question("A"), Response("A", likelihoods([-math.inf] * 4, [-math.inf] * 4)))
    assert (scored.extracted["answer"], scored.scores["correct"], scored.error) == (None, False, NO_ANSWER)


@pytest.mark.parametrize(
    ("context", "endings"),
    [
        ("A list:\nA) apples\nB) pears", ("one", "two", "three", "four")),
        ("A list:\nA) apples\nB) pears\nC) plums\nD) figs", ("one", "two", "three", "four")),
        ("Letters inside", ("see B) there", "see A) there", "D) or C)", "see D) there")),
    ],
)
def test_choices_are_read_whatever_they_hold(context, endings):
    user, expected = asked(context, endings), (context, tuple(ending.strip() for ending in endings))
    assert read_choices(record("B", user)) == expected
    assert read_choices(record("B", user, text=context, code=endings[1].strip())) == expected

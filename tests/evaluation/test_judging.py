"""Lines out of answers: errors, several samples, votes, likelihoods."""

import pytest

from stepjepa.errors import UserError
from stepjepa.evaluation.judging import Answer, Question, judge
from stepjepa.tasks.base import Likelihood
from stepjepa.tasks.generic import GenericTask
from tiny import make_record
from user_task import LastWord, Weighing


def question(answer="it is four", index=0, **fields):
    return Question(index, make_record(None, "2+2?", answer), **fields)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer("four", True, 2), None),
        (Answer("four", None, None), None),
        (Answer("four", False, 9), None),  # right by its last word, though cut off there
        (Answer("five", True, 2), "wrong answer"),
        (Answer("five", None, None), "wrong answer"),
        (Answer("five and", False, 9), "ran on"),
    ],
)
def test_an_answer_that_is_not_right_says_why(answer, error):
    (line,) = judge(LastWord(), [question()], [[answer]])
    assert line["error"] == error
    assert (line["generated"], line["stopped"], line["new_tokens"]) == answer
    assert (line["index"], line["truth"], line["prompt"]) == (0, "four", None)
    assert line["extracted"] == {"answer": answer.text.split()[-1]}
    assert "samples" not in line


def test_what_likelihoods_decide_did_not_run_on():
    weighed = {"a": Likelihood(-1.5, 2), "b": Likelihood(-2.0, 1)}
    for likelihoods, error in ((None, "ran on"), (weighed, "wrong answer")):
        task = LastWord() if likelihoods is None else Weighing()
        (line,) = judge(task, [question(likelihoods=likelihoods)], [[Answer("five and", False, 9)]])
        assert (line["error"], line["stopped"]) == (error, False)


def test_the_headline_decides_what_is_an_error():
    answers = [[Answer("it is four, I think", True, 5)]]
    assert judge(GenericTask(), [question()], answers)[0]["error"] == "wrong answer"
    assert judge(GenericTask(), [question()], answers, "prefix")[0]["error"] is None
    assert judge(GenericTask(), [question()], [[Answer(" ", True, 5)]])[0]["error"] == "no answer found"


def test_a_score_that_is_not_there_is_refused_with_the_flag_that_asks_for_it():
    words = r"task 'last-word' has no score 'prefix', only last, anywhere; leave --startswith out$"
    with pytest.raises(UserError, match=words):
        judge(LastWord(), [question()], [[Answer("four")]], LastWord.beginning)
    with pytest.raises(UserError, match=r"no score 'other', only last, anywhere$"):
        judge(LastWord(), [question()], [[Answer("four")]], "other")


def test_samples_are_averaged_and_put_to_the_vote():
    said = ["is four", "was five", "four", "six", "five", "four"]
    answers = [[Answer(text, index != 3, 2 + index) for index, text in enumerate(said)]]
    (line,) = judge(LastWord(), [question()], answers)
    assert line["scores"] == {"last": 0.5, "anywhere": 0.5, "pass@1": 0.5, "pass@6": True, "majority": True}
    # The representative is the first that says what most say.
    assert (line["generated"], line["extracted"], line["error"]) == ("is four", {"answer": "four"}, None)
    assert (line["stopped"], line["new_tokens"]) == (pytest.approx(5 / 6), 2 + 3 + 4 + 5 + 6 + 7)
    assert [sample["generated"] for sample in line["samples"]] == said
    assert [sample["error"] for sample in line["samples"]].count("ran on") == 1


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        (["five", "four", "four", "five", "six"], "five"),  # a tie goes to what was said first
        (["", "", "four"], "four"),  # nothing is no vote
        (["", ""], ""),
        (["six", "four", "five"], "six"),
    ],
)
def test_the_vote_is_decided_without_chance(said, chosen):
    (line,) = judge(LastWord(), [question()], [[Answer(text) for text in said]])
    assert line["generated"] == chosen
    assert line["scores"]["majority"] == (chosen == "four")
    assert (line["stopped"], line["new_tokens"]) == (None, None)


def test_questions_keep_their_own_answers_and_likelihoods():
    seen = {"a": Likelihood(-1.5, 2), "b": Likelihood(-2.0, 1)}
    other = {"a": Likelihood(-3.0, 2), "b": Likelihood(-2.0, 1)}
    questions = [question("one", 7, prompt="p", likelihoods=seen), question("two", 3, likelihoods=other)]
    lines = judge(Weighing(), questions, [[Answer("one"), Answer("two")], [Answer("one"), Answer("two")]])
    assert [line["index"] for line in lines] == [7, 3]
    assert [[sample["scores"]["last"] for sample in line["samples"]] for line in lines] == [
        [True, False],
        [False, True],
    ]
    assert [line["scores"]["a_likelier"] for line in lines] == [1.0, 0.0]
    assert lines[0]["likelihoods"] == {"a": [-1.5, 2], "b": [-2.0, 1]}

"""NL-RX: what counts as right, what is undecided, and that no text of a model does harm."""

import pytest

from stepjepa.tasks.base import NO_ANSWER, TIMED_OUT, WRONG, Response, TaskOptions
from stepjepa.tasks.nl_rx import NlRxTask
from task_records import record


@pytest.fixture(scope="module")
def task():
    task = NlRxTask.from_options(TaskOptions(workers=1))
    yield task
    task.close()


# The answer, the truth, and what a person says to it.
@pytest.mark.parametrize(
    ("said", "truth", "verdict", "reason"),
    [
        # Shown as code, and with what other programs leave behind it.
        ("```\n.*(dog).*\n```", ".*(dog).*", "same text", None),
        (".*dog.*<|im_end|>", ".*(dog).*", "equivalent", None),
        ("`dog", "dog", "different", "dog"),
        # Other texts for the same lines.
        (".*dog.*", ".*(dog).*", "equivalent", None),
        # No line is both, so whatever else is said of it, it stays none.
        ("(dog)&(ring)", "(dog)&(truck)", "equivalent", "no line"),
        # Near misses.
        ("[A-Za-z]", "[A-Z]", "different", "a"),
        ("dog", "~(dog)", "different", ""),
        ("a dog", "dog", "different", "dog"),
        # No expression at all.
        ("", "dog", "empty", None),
        ("(dog", "dog", "malformed", "no ')' at character 5"),
        (".*dog.*\nlines with a letter", ".*dog.*", "malformed", "expected one line, got several"),
    ],
)
def test_what_a_person_would_say(task, said, truth, verdict, reason):
    scored = task.score(record(truth), Response(said))
    right = verdict in ("same text", "equivalent")
    assert scored.scores["equivalent"] is right
    assert scored.scores["exact"] is (said.strip() == truth)
    assert scored.scores["undecided"] is False
    assert scored.extracted["verdict"] == verdict
    error = {"different": WRONG, "malformed": WRONG, "empty": NO_ANSWER}.get(verdict)
    assert scored.error == error
    if verdict == "different" and reason:
        # Which of the shortest lines is shown is not laid down.
        assert len(scored.extracted["reason"]) == len(reason)
    else:
        assert scored.extracted["reason"] == reason


# Deciding about these takes 2^30 states; a person with paper sees at once that they differ, or not.
HARD = "(.*)a.{30}", "(.*)a(.{15}.{15}|b.{29})"


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"time_limit": 0.5}, "longer than 0.5 s"), ({"time_limit": 60.0, "memory_limit": 60}, "more than 60 MiB")],
)
def test_what_is_not_decided_is_counted_and_not_guessed(options, reason):
    task = NlRxTask.from_options(TaskOptions(workers=1, **options))
    truths, said = [HARD[0], "dog", HARD[0], "dog"], [HARD[1], "(dog)", HARD[0], "truck"]
    scored = task.score_all([record(truth) for truth in truths], [Response(text) for text in said])
    task.close()
    assert [one.scores["equivalent"] for one in scored] == [False, True, True, False]
    assert [one.scores["undecided"] for one in scored] == [True, False, False, False]
    assert [one.error for one in scored] == [TIMED_OUT, None, None, WRONG]
    assert scored[0].extracted["verdict"] == "undecided"
    assert reason in scored[0].extracted["reason"]


def test_what_is_right_because_it_says_nothing_is_told_apart(task):
    truths, said = ["(dog)&(truck)", "(dog)&(truck)", "dog", ".*"], ["(a)&(b)", "(dog)&(truck)", "(dog)", "(.*)"]
    scored = task.score_all([record(truth) for truth in truths], [Response(text) for text in said])
    assert all(one.scores["equivalent"] for one in scored)
    assert task.details([{"extracted": one.extracted} for one in scored]) == {
        "verdicts": {"equivalent": 3, "same text": 1},
        "trivially_equivalent": 2,
    }

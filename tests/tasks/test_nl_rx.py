"""NL-RX: what counts as right, what is undecided; generated data of the published grammar, as frequent as there."""

import hashlib
import json

import pytest

from nl_rx_trees import find_trees
from stepjepa.tasks import nl_rx_grammar
from stepjepa.tasks.base import NO_ANSWER, TIMED_OUT, WRONG, Response, TaskOptions
from stepjepa.tasks.nl_rx import NlRxTask, judge
from stepjepa.tasks.nl_rx_grammar import STRINGS, Tree, describe, generate_split, is_sound
from stepjepa.tasks.regex_syntax import parse
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [({"time_limit": 0.5}, "longer than 0.5 s"), ({"time_limit": 60.0, "memory_limit": 60}, "more than 60 MiB")],
)
def test_what_is_not_decided_is_counted_and_not_guessed(options, reason):
    task = NlRxTask.from_options(TaskOptions(workers=1, **options))
    truths, output = [HARD[0], "dog", HARD[0], "dog"], [HARD[1], "(dog)", HARD[0], "truck"]
    scored = task.score_all([record(truth) for truth in truths], [Response(text) for text in output])
    task.close()
    assert [one.scores["equivalent"] for one in scored] == [False, True, True, False]
    assert [one.scores["undecided"] for one in scored] == [True, False, False, False]
    assert [one.error for one in scored] == [TIMED_OUT, None, None, WRONG]
    assert scored[0].extracted["verdict"] == "undecided"
    assert reason in scored[0].extracted["reason"]


def test_what_is_right_because_it_says_nothing_is_told_apart(task):
    truths, output = ["(dog)&(truck)", "(dog)&(truck)", "dog", ".*"], ["(a)&(b)", "(dog)&(truck)", "(dog)", "(.*)"]
    scored = task.score_all([record(truth) for truth in truths], [Response(text) for text in output])
    assert all(one.scores["equivalent"] for one in scored)
    assert task.details([{"extracted": one.extracted} for one in scored]) == {
        "verdicts": {"equivalent": 3, "same text": 1},
        "trivially_equivalent": 2,
    }


def test_a_statistic_does_not_time_a_verdict_out():
    """The complement of what ends in 'a' and 20 more characters has a million states."""
    assert judge("(.*a.{20})", ".*a.{20}") == ("equivalent", None)


PUBLISHED_SIZE = 9863
# Together no more than the draws for the published set bring: what comes after them is larger.
TEST_SIZE = 100


@pytest.fixture(scope="module")
def generated():
    """As many training pairs as there are different published ones, and test pairs."""
    return generate_split(PUBLISHED_SIZE, TEST_SIZE, seed=0)


@pytest.fixture(scope="module")
def published(shared_data):
    """The different pairs of NL-RX-Synth."""
    lines = [(shared_data / "nl_rx" / f"NL-RX-Synth.{part}.txt").read_text().splitlines() for part in ("src", "targ")]
    pairs = list(dict.fromkeys(zip(*lines, strict=True)))
    assert len(pairs) == PUBLISHED_SIZE
    return pairs


@pytest.mark.parametrize(
    ("drawn", "description", "regex"),
    [
        (
            Tree("words with", (Tree("not", (Tree("starting with", (Tree("number"),)),)),)),
            "lines with words that don't starting with a number",
            r"\b~(([0-9])(.*))\b",
        ),
        (
            Tree("ending with", (Tree("either, or", (Tree("string"),) * 3),)),
            "lines ending with either the string 'dog', the string 'truck', or the string 'ring'",
            "(.*)((dog)|(truck)|(ring))",
        ),
    ],
)
def test_wording_and_expression_of_a_tree(drawn, description, regex):
    assert describe(drawn) == (description, regex)


@pytest.mark.slow  # all published sizes take five seconds
def test_all_pairs_are_sentences_about_lines_and_expressions_and_none_comes_twice(generated):
    train, test = generated
    assert (len(train), len(test)) == (PUBLISHED_SIZE, TEST_SIZE)
    assert len(dict([*train, *test])) == PUBLISHED_SIZE + TEST_SIZE
    assert not {regex for _, regex in train} & {regex for _, regex in test}
    for description, regex in [*train, *test]:
        assert description.startswith("lines ")
        assert not set(description) & set("<>{}")
        assert "WORD" not in description + regex
        assert "  " not in description
        parse(regex)
        # The strings come in their order.
        named = [word for word in STRINGS if f"'{word}'" in description]
        assert named == list(STRINGS[: len(named)])
        assert all(word in regex for word in named)


@pytest.mark.slow
def test_a_smaller_size_gives_the_first_of_the_pairs(monkeypatch):
    # Fewer draws: this is about order, not about what comes up.
    monkeypatch.setattr(nl_rx_grammar, "_DRAWS", dict.fromkeys(nl_rx_grammar._DRAWS, 3000))
    train, test = generate_split(300, 40, seed=4)
    assert generate_split(100, 40, seed=4) == (train[:100], test)
    assert generate_split(100, 0, seed=4)[1] == []
    assert generate_split(300, 40, seed=5)[0] != train
    # More than the first draws bring: drawn on.
    more, _ = generate_split(3000, 40, seed=4)
    assert more[:300] == train
    assert len({description for description, _ in more}) == 3000


@pytest.mark.slow
def test_published_pairs_are_of_the_grammar(published):
    for pair in published[::6]:
        trees = find_trees(*pair)
        assert len(trees) == 1, pair
        assert is_sound(trees[0]), pair


@pytest.mark.slow
def test_the_pairs_of_a_seed_stay_what_they_were(generated):
    text = json.dumps(generated, ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest().startswith("7c2ceab2d37c62bc")

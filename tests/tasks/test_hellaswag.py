"""HellaSwag: choices read from the prompt, letters read from answers, likelihoods compared."""

import json
import time

import pytest

from stepjepa.data.records import parse_record, read_records
from stepjepa.errors import UserError
from stepjepa.tasks.base import NO_ANSWER, WRONG, Likelihood, Response, Unusable
from stepjepa.tasks.hellaswag import (
    LETTERS,
    HellaswagTask,
    read_choices,
    read_letter,
)

TASK = HellaswagTask()
CONTEXT = "A man is sitting on a roof. he"
ENDINGS = ("wraps a pair of skis.", "rips level tiles off.", "is holding a rubik's cube.", "pulls up the roof.")
ASKED = CONTEXT + "".join(f"\n{letter}) {ending}" for letter, ending in zip(LETTERS, ENDINGS, strict=True))


def record(answer="B", user=ASKED, system=HellaswagTask.system_prompt, path="test.jsonl", **extra):
    messages = [("system", system), ("user", user), ("assistant", answer)]
    return parse_record(
        {"messages": [{"role": role, "content": content} for role, content in messages], **extra}, path, 1
    )


def likelihoods(letters, endings):
    found = {letter: Likelihood(value, 1) for letter, value in zip(LETTERS, letters, strict=True)}
    return found | {f"ending_{letter}": Likelihood(value, 9) for letter, value in zip(LETTERS, endings, strict=True)}


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        # One letter, however it is set.
        ("B", "B"),
        ("B)", "B"),
        ("(b)", "B"),
        ("B: rips level tiles off.", "B"),
        ("a", "A"),
        # Announced.
        ("Answer: B", "B"),
        ("the best ending is C", "C"),
        ("Option B", "B"),
        ("The answer is B. Yes, option B.", "B"),
        # Set apart as code, in a box, in wide letters, with what other programs leave behind it; said again.
        ("`B`", "B"),
        ("```\nB\n```", "B"),
        ("B<|im_end|>", "B"),
        ("B?", None),
        # With a reason.
        ("B because he has tiles", "B"),
        # Ran on.
        ("B\nuser\nnext\nassistant\nC", "B"),
        # An ending copied.
        ("rips level tiles off.", "B"),
        # Two letters are none.
        ("A or B", None),
        ("(A) or (B)", None),
        ("a or b", None),
        ("A B C D", None),
        ("The answer is A. No, the answer is B.", None),
        # No letter.
        ("", None),
        ("none of them", None),
        ("The answer is a man on a roof", None),
        ("can't say", None),
        # An ending that is not one of them, one that is not the letter's, and one that goes on.
        ("rips level tiles", None),
    ],
)
def test_letters_are_read_as_a_person_would(said, letter):
    assert read_letter(said, ENDINGS) == letter
    scored = TASK.score(record(letter or "B"), Response(said))
    assert scored.scores == {"correct": letter is not None, "said_correct": letter is not None}
    assert scored.error == (None if letter else NO_ANSWER)
    assert not TASK.score(record("B" if letter != "B" else "C"), Response(said)).scores["correct"]


def test_likelihoods_decide_where_there_are_any():
    # The second ending is likely as a whole because it is short; per character the third is.
    response = Response("D", likelihoods([-2.0, -1.0, -3.0, -9.0], [-50.0, -20.0, -21.0, -40.0]))
    scored = TASK.score(record("B"), response)
    assert scored.scores == {"correct": True, "ending_correct": False, "said_correct": False}
    assert scored.extracted == {"truth": "B", "answer": "B", "ending": "C", "said": "D"}
    assert scored.error is None
    assert len(ENDINGS[1]) == 21
    assert -21 / len(ENDINGS[2]) > -20 / 21
    scored = TASK.score(record("C"), response)
    assert scored.scores == {"correct": False, "ending_correct": True, "said_correct": False}
    assert scored.error == WRONG
    assert TASK.vote(scored, response) == "B"


@pytest.mark.parametrize(
    ("context", "endings"),
    [
        ("Plan A) was off.", ("one", "two", "three", "four")),
        ("A list:\nA) apples\nB) pears", ("one", "two", "three", "four")),
        ("A list:\nA) apples\nB) pears\nC) plums\nD) figs", ("one", "two", "three", "four")),
        ("Two lines\nof context", ("one\nand more", "two\n\nagain", "three", "four\nlines\n")),
        ("Letters inside", ("see B) there", "see A) there", "D) or C)", "see D) there")),
        ("Degrees 300 f (149 c)", ("A) a", "B) b", "C) c", "D) d")),
    ],
)
def test_choices_are_read_whatever_they_hold(context, endings):
    user = context + "".join(f"\n{letter}) {ending}" for letter, ending in zip(LETTERS, endings, strict=True))
    expected = (context, tuple(ending.strip() for ending in endings))
    assert read_choices(record(user=user)) == expected
    views = {"text": context, "code": endings[1].strip()}
    assert read_choices(record(user=user, **views)) == expected


@pytest.mark.parametrize(
    ("answer", "user", "words"),
    [
        ("B", "no endings", r"no ending 'D\) \.\.\.'"),
        ("B", "c\nA) one\nC) three\nB) two\nD) four", r"no ending 'B\) \.\.\.'"),
        ("E", ASKED, "'E', expected A, B, C or D"),
        ("AB", ASKED, "'AB', expected A, B, C or D"),
    ],
)
def test_a_record_that_is_no_choice_of_four_is_refused_with_its_place(answer, user, words):
    with pytest.raises(UserError, match=rf"^test\.jsonl:1: .*({words})"):
        TASK.truth(record(answer, user))


def test_real_file_gold_is_right_and_the_others_are_not(shared_data):
    for each in read_records(shared_data / "llm_jepa" / "hellaswag_test.jsonl"):
        truth, endings = TASK.truth(each), read_choices(each)[1]
        for letter, ending in zip(LETTERS, endings, strict=True):
            likely = [-1.0 if other == letter else -2.0 for other in LETTERS]
            per_character = [value * len(text) for value, text in zip(likely, endings, strict=True)]
            scored = TASK.score(each, Response(letter, likelihoods(likely, per_character)))
            assert list(scored.scores.values()) == [letter == truth] * 3
            for said in (letter, ending, f"{letter}) {ending}", f"The answer is {letter}."):
                assert TASK.score(each, Response(said)).scores == dict.fromkeys(
                    ("correct", "said_correct"), letter == truth
                )


@pytest.mark.parametrize(
    "text",
    ["A" * 10**6, "answer is " * 100_000, "*" * 10**6, "answer A" + "*" * 10**6, "A\n" * 500_000, ":\n" * 500_000],
)
def test_long_answers_take_no_longer_than_reading_them(text):
    begin = time.process_time()
    TASK.score(record(), Response(text))
    assert time.process_time() - begin < 5


def test_convert_makes_the_published_form(shared_data):
    records = read_records(shared_data / "llm_jepa" / "hellaswag_test.jsonl")
    for each in records[:50]:
        context, endings = read_choices(each)
        label = LETTERS.index(TASK.truth(each))
        for row in (
            {"ctx": context, "endings": list(endings), "label": str(label), "ind": 3},
            {"ctx": context, "endings": repr(list(endings)), "label": label},
            {"ctx": context, "endings": json.dumps(endings), "label": label},
            {"ctx_a": context, "ctx_b": "", "endings": endings, "label": label},
        ):
            made = parse_record(HellaswagTask.convert(row))
            assert (made.messages, made.text, made.code) == (each.messages, each.text, each.code)
    assert (
        parse_record(
            HellaswagTask.convert({"ctx_a": "He sits.", "ctx_b": "he", "endings": list("abcd"), "label": 0})
        ).text
        == "He sits. he"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"label": ""}, "no label"),
        ({"label": -1}, "no label"),
        ({"ctx": " "}, "no context"),
        ({"endings": "abcd"}, "not four endings"),
        ({"label": "2.5"}, "the label is none of 0 to 3"),
        ({"ctx": ["c"]}, "no context"),
    ],
)
def test_convert_says_why_not(change, reason):
    with pytest.raises(Unusable, match=f"^{reason}$"):
        HellaswagTask.convert({"ctx": "c", "endings": list("abcd"), "label": "1"} | change)

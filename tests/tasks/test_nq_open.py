"""NQ-Open: which short answers count, judged as a person would."""

import re
import string
import time

import pytest

from stepjepa.data.records import parse_record, read_records
from stepjepa.errors import UserError
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response, Unusable
from stepjepa.tasks.nq_open import NqOpenTask

TASK = NqOpenTask()


def record(answer, system=NqOpenTask.system_prompt, path="test.jsonl"):
    messages = [("system", system), ("user", "who was it"), ("assistant", answer)]
    return parse_record({"messages": [{"role": role, "content": content} for role, content in messages]}, path, 1)


def verdict(truth, said):
    return "".join(
        "epc"[place] if score else "-"
        for place, score in enumerate(TASK.score(record(truth), Response(said)).scores.values())
    )


@pytest.mark.parametrize(
    ("truth", "said", "expected"),
    [
        # The answer, in the ways in which people write it.
        ("Amma", "Amma", "epc"),
        ("Beatles", "the Beatles", "epc"),
        ("Tempest", '"The Tempest"', "epc"),
        ("Sandra Day O'Connor", "Sandra Day O’Connor", "epc"),
        ("MÃ¡ire Brennan", "Máire Brennan", "epc"),
        ("B. F. Skinner", "BF Skinner", "epc"),
        ("the U.S.", "US", "epc"),
        ("AT&T", "ATT", "epc"),
        ("$2,500", "2500", "epc"),
        ("Nine; 9", "9", "epc"),
        # Lists, the form in which the training targets stand.
        ("Nine; 9", "9; nine", "epc"),
        ("Nine; 9", "7; 8", "---"),
        # The answer in more words, or with more behind it.
        ("Amma", "The answer is Amma.", "--c"),
        # Near misses.
        ("Amma", "Ammar", "---"),
        ("1.8 billion", "1.8 million", "---"),
        ("10-20%", "1020", "---"),
        ("-17.0", "17.0", "---"),
        ("John F. Kennedy", "Kennedy", "---"),
        ("new york", "new; york", "---"),
        # Nothing said.
        ("Amma", "", "---"),
        ("Amma", ";;;", "---"),
        # Truths that normalising leaves nothing of make nothing else right.
        ("/", "/", "epc"),
        ('"; Frederick Douglass', "Frederick Douglass", "epc"),
        ('"; Frederick Douglass', "Booker Washington", "---"),
        ("A", "A", "epc"),
        # Signs that make another thing of a letter.
        ("C++", "C", "---"),
        ("#1", "1", "epc"),
        ("Ｐａｒｉｓ", "Pa\u200bris", "epc"),
        # What only one who knows the subject can tell is not told.
        ("Nine", "9", "---"),
    ],
)
def test_verdicts(truth, said, expected):
    assert verdict(truth, said) == expected


def test_scores_extracted_and_errors():
    scored = TASK.score(record("The Nine; 9"), Response("The 9; eight"))
    assert list(scored.scores) == ["exact", "prefix", "contains"]
    assert scored.extracted == {"truth": "nine; 9", "answer": "9; eight"}
    assert scored.error == WRONG
    assert TASK.score(record("Nine"), Response("nine")).error is None
    assert TASK.score(record("A"), Response("a")).extracted["answer"] == "a"
    for nothing in ("", "the", "...", "; ;", "-"):
        scored = TASK.score(record("Nine"), Response(nothing))
        assert (scored.error, scored.extracted["answer"]) == (NO_ANSWER, None)
        assert TASK.vote(scored, Response(nothing)) is None


def test_a_truth_of_separators_is_refused_with_its_place():
    with pytest.raises(UserError, match=r"^test\.jsonl:1: .*no answer in it"):
        TASK.truth(record("; ;"))


def squad(text):
    """The normalisation of SQuAD's script, written down again."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def test_real_files_gold_is_right_and_another_records_answer_is_not(shared_data):
    for file, size in (("nq_open_test", 1769), ("nq_open_train", 8000)):
        records = read_records(shared_data / "llm_jepa" / f"{file}.jsonl")
        assert len(records) == size
        assert all(TASK.recognises(each) for each in records)
        for each in records:
            assert all(TASK.score(each, Response(each.answer)).scores.values()), each.answer
            for alias in each.answer.split(";"):
                assert TASK.score(each, Response(alias)).scores["exact"], alias
        others = records[1:] + records[:1]
        wrong = [
            (each.answer, other.answer)
            for each, other in zip(records, others, strict=True)
            if TASK.score(each, Response(other.answer)).scores["exact"]
        ]
        # The few there are have the same answer indeed: years and small numbers.
        assert len(wrong) <= size // 500
        assert all(set(map(squad, one.split(";"))) & set(map(squad, other.split(";"))) for one, other in wrong)


@pytest.mark.parametrize(
    "text",
    ["a " * 500_000, ";" * 10**6, "A." * 500_000, "1,000" * 200_000, "-." * 500_000, "1" + "%" * 10**6, " " * 10**6],
)
def test_long_answers_take_no_longer_than_reading_them(text):
    begin = time.process_time()
    assert not TASK.score(record("Amma; 1,000 years"), Response(text)).scores["exact"]
    assert time.process_time() - begin < 10


def test_convert_makes_the_published_form(shared_data):
    published = read_records(shared_data / "llm_jepa" / "nq_open_test.jsonl")[0]
    row = {"question": published.messages[1]["content"], "answer": ["6 geese a-laying", "maids a-milking"]}
    assert tuple(NqOpenTask.convert(row)["messages"]) == published.messages
    assert tuple(NqOpenTask.convert(row | {"answer": str(row["answer"])})["messages"]) == published.messages
    assert NqOpenTask.convert({"question": "q", "answer": "one"})["messages"][2]["content"] == "one"
    assert (
        NqOpenTask.convert({"question": "q", "answer": [" one ", "", "one", "two"]})["messages"][2]["content"]
        == "one; two"
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": ["a"]}, "no question"),
        ({"question": "q"}, "no answer"),
        ({"question": "q", "answer": [None, " "]}, "no answer"),
        ({"question": "q", "answer": [1969]}, "an answer that is no text"),
    ],
)
def test_convert_says_why_not(row, reason):
    with pytest.raises(Unusable, match=f"^{reason}$"):
        NqOpenTask.convert(row)

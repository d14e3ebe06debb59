"""Raw responses become training records: fields, truths, filters, a user's splitter, real traces."""

import json
import re

import pytest

from stepjepa.data.records import find_steps, parse_record
from stepjepa.errors import UserError
from stepjepa.preparing.step_preparation import SYSTEM_PROMPT, StepOptions, load_splitter, prepare_records

RESPONSE = "<think>Hm.\n\nWell.</think>\n\nShe has 3 + 4 = 7.\n\nShe eats 2, so \\boxed{5}."


def raw(**changes):
    value = {"question": "How many?", "answer": "3+4=7\n#### 5", "ground_truth": "5", "deepseek_response": RESPONSE}
    value.update(changes)
    return {name: field for name, field in value.items() if field is not None}


def prepare(*values, **options):
    return prepare_records(enumerate(values, start=1), StepOptions(**options), "raw.jsonl")


def test_a_record():
    (record,), counts = prepare(raw())
    assert record == {
        "question": "How many?",
        "answer": "3+4=7\n#### 5",
        "ground_truth": "5",
        "total_steps": 2,
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": "How many?"},
            {"role": "assistant", "content": "She has 3 + 4 = 7.\n\nShe eats 2, so \\boxed{5}."},
        ],
    }
    assert (counts.read, counts.dropped.total()) == (1, 0)
    parse_record(record)


@pytest.mark.parametrize(
    ("thinking", "steps", "removed"),
    [
        ("remove", ["She has 3 + 4 = 7.", "She eats 2, so \\boxed{5}."], 1),
        ("keep", ["<think>Hm.\nWell.</think>\nShe has 3 + 4 = 7.", "She eats 2, so \\boxed{5}."], 0),
        ("steps", ["Hm.", "Well.", "She has 3 + 4 = 7.", "She eats 2, so \\boxed{5}."], 0),
    ],
)
def test_thinking_is_removed_and_counted_or_kept(thinking, steps, removed):
    (record,), counts = prepare(raw(), thinking=thinking)
    assert record["messages"][-1]["content"].split("\n\n") == steps
    assert counts.changed.total() == removed
    # Without thinking there is nothing to count, whatever is asked for.
    (record,), counts = prepare(raw(deepseek_response="1 + 1 = 2.\n\n2 + 1 = 3."), thinking=thinking)
    assert (record["total_steps"], counts.changed.total()) == (2, 0)


@pytest.mark.parametrize(
    ("answer", "ground_truth", "expected"),
    [
        ("3+4=7\n#### 1,005", None, "1,005"),
        ("#### 7", "5", "5"),
        ("#### 7", " ", "7"),
        (None, "3 + 2\n#### 5", "5"),
    ],
)
def test_ground_truth(answer, ground_truth, expected):
    (record,), _ = prepare(raw(answer=answer, ground_truth=ground_truth))
    assert record["ground_truth"] == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"question": None}, "no field 'question'"),
        ({"deepseek_response": None}, "no field 'deepseek_response'"),
        ({"deepseek_response": "<think>never ends"}, "'deepseek_response' holds only thinking"),
        ({"deepseek_response": "It is \\boxed{5}."}, "fewer than two steps"),
    ],
)
def test_what_is_skipped_and_why(changes, reason):
    records, counts = prepare(raw(), raw(**changes), raw())
    assert len(records) == 2
    assert counts.dropped == {reason: 1}
    assert counts.read == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"deepseek_response": "It was 7.\n\nNow it is\n#### $5.00"}, None),
        ({"ground_truth": None}, None),
        ({"deepseek_response": "It may be \\boxed{5}.\n\nNo, it is \\boxed{6}."}, "wrong final answer"),
        ({"deepseek_response": "It was 7.\n\nNow it is 5."}, "no \\boxed{...} or '#### ...' answer"),
        ({"ground_truth": None, "answer": None}, "no ground truth to compare with"),
    ],
)
def test_require_correct(changes, reason):
    _, counts = prepare(raw(**changes), require_correct=True)
    assert counts.dropped == ({} if reason is None else {reason: 1})
    assert len(prepare(raw(**changes))[0]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": 5}, "raw.jsonl:2: 'question' is int, expected a string"),
        ({"answer": True}, "raw.jsonl:2: 'answer' is bool, expected a string or a number"),
    ],
)
def test_a_field_of_the_wrong_type_is_an_error(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        prepare(raw(), raw(**changes))


def test_a_splitter_of_ones_own():
    seen = []

    def split(response):
        seen.append(response)
        return ["She has\n\n7.", " ", "She keeps 5.\n"]

    (record,), _ = prepare(raw(), splitter=split)
    assert seen == ["She has 3 + 4 = 7.\n\nShe eats 2, so \\boxed{5}."]
    assert record["messages"][2]["content"] == "She has\n7.\n\nShe keeps 5."
    assert record["total_steps"] == 2


@pytest.mark.parametrize(
    ("result", "got"), [("a", "str"), (None, "NoneType"), (["a", 1], "a list with other things than strings")]
)
def test_what_a_splitter_gives_is_checked(result, got):
    with pytest.raises(UserError, match=rf"raw.jsonl:1: --custom: the splitter gave {got}, expected a list"):
        prepare(raw(), splitter=lambda response: result)


def test_load_splitter(tmp_path, monkeypatch):
    (tmp_path / "lines_splitter.py").write_text("NUMBER = 3\n\n\ndef split(text):\n    return text.splitlines()\n")
    (tmp_path / "broken_splitter.py").write_text("def split(:\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert load_splitter("lines_splitter:split")("a\nb") == ["a", "b"]
    for name, message in (
        ("lines_splitter", "module:function"),
        ("no_such_splitter:split", "can't load 'no_such_splitter:split'"),
        ("broken_splitter:split", "can't load 'broken_splitter:split'"),
        ("lines_splitter:NUMBER", "'lines_splitter:NUMBER' is int; expected module:function"),
    ):
        with pytest.raises(UserError, match=message):
            load_splitter(name)


@pytest.fixture(scope="module")
def traces(shared_data):
    values = json.loads((shared_data / "traces" / "star_repo_star.detailed_results.json").read_text(encoding="utf-8"))
    return [{**value, "ground_truth": value["correct_answer"]} for value in values]


def test_real_traces_round_trip(traces):
    records, counts = prepare(*traces, response_field="full_response")
    assert counts.read == len(traces)
    assert len(records) > 0.95 * len(traces)
    for record in records:
        parsed = parse_record(json.loads(json.dumps(record)))
        steps = find_steps(parsed.answer, "blank")
        assert len(steps) == record["total_steps"] >= 2
        # A step of a character or two is none.
        assert all(len(parsed.answer[step.start : step.end].strip()) > 1 for step in steps)

"""Raw responses become training records: fields, truths, filters, a user's splitter, real traces."""

import json
import re

import pytest

from stepjepa.answers.scoring import marked_answers, parse_number
from stepjepa.data.records import parse_record
from stepjepa.data.steps import find_steps
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
    assert (counts.read, counts.kept, counts.steps, counts.skipped.total()) == (1, 1, 2, 0)
    parse_record(record)


def test_another_prompt_and_field():
    (record,), _ = prepare(
        raw(deepseek_response=None, text="One is 1.\n\nTwo is 2."), response_field="text", system_prompt=""
    )
    assert record["messages"][0] == {"role": "system", "content": ""}
    assert record["messages"][2]["content"] == "One is 1.\n\nTwo is 2."


@pytest.mark.parametrize(
    ("answer", "ground_truth", "expected"),
    [
        ("3+4=7\n#### 1,005", None, "1,005"),
        ("so \\boxed{\\frac{1}{2}}.", None, "\\frac{1}{2}"),
        ("18", None, "18"),
        (18, None, "18"),
        ("#### 7", "5", "5"),
        ("#### 7", " ", "7"),
        ("#### 7", 5, "5"),
        (None, "3 + 2\n#### 5", "5"),
    ],
)
def test_ground_truth(answer, ground_truth, expected):
    (record,), _ = prepare(raw(answer=answer, ground_truth=ground_truth))
    assert record["ground_truth"] == expected


@pytest.mark.parametrize("answer", [None, "blue", ""])
def test_what_is_not_known_is_left_out(answer):
    (record,), _ = prepare(raw(answer=answer, ground_truth=None))
    assert "ground_truth" not in record
    assert record.get("answer") == answer
    assert ("answer" in record) == (answer is not None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"question": None}, "no field 'question'"),
        ({"question": " "}, "'question' is empty"),
        ({"deepseek_response": None}, "no field 'deepseek_response'"),
        ({"deepseek_response": "\n"}, "'deepseek_response' is empty"),
        ({"deepseek_response": "<think>never ends"}, "'deepseek_response' holds only thinking"),
        ({"deepseek_response": "It is \\boxed{5}."}, "fewer than two steps"),
    ],
)
def test_what_is_skipped_and_why(changes, reason):
    records, counts = prepare(raw(), raw(**changes), raw())
    assert len(records) == counts.kept == 2
    assert counts.skipped == {reason: 1}
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
    assert counts.skipped == ({} if reason is None else {reason: 1})
    assert prepare(raw(**changes))[1].kept == 1


def test_the_answer_in_the_thinking_does_not_count():
    response = "<think>\\boxed{5}</think>It was 7.\n\nIt is \\boxed{6}."
    assert prepare(raw(deepseek_response=response), require_correct=True)[1].kept == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": 5}, "raw.jsonl:2: 'question' is int, expected a string"),
        ({"deepseek_response": ["a"]}, "raw.jsonl:2: 'deepseek_response' is list, expected a string"),
        ({"ground_truth": ["5"]}, "raw.jsonl:2: 'ground_truth' is list, expected a string or a number"),
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


def test_a_splitter_that_fails_is_named_with_the_record():
    with pytest.raises(UserError, match=r":1: --custom: the splitter failed \(ZeroDivisionError: "):
        prepare(raw(), splitter=lambda response: [response] * (1 // 0))


def test_load_splitter(tmp_path, monkeypatch):
    (tmp_path / "lines_splitter.py").write_text("NUMBER = 3\n\n\ndef split(text):\n    return text.splitlines()\n")
    (tmp_path / "broken_splitter.py").write_text("def split(:\n")
    (tmp_path / "failing_splitter.py").write_text("1 / 0\n")
    (tmp_path / "ending_splitter.py").write_text("raise SystemExit('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert load_splitter("lines_splitter:split")("a\nb") == ["a", "b"]
    for name, message in (
        ("lines_splitter", "expected module:function"),
        (":split", "expected module:function"),
        (".lines_splitter:split", "expected module:function"),
        ("no_such_splitter:split", "cannot import 'no_such_splitter'"),
        ("broken_splitter:split", "cannot import 'broken_splitter'"),
        ("failing_splitter:split", r"cannot import 'failing_splitter' \(ZeroDivisionError: division by zero\)"),
        ("ending_splitter:split", r"cannot import 'ending_splitter' \(SystemExit: no licence\)"),
        ("lines_splitter:cut", "'lines_splitter' has no 'cut'"),
        ("lines_splitter:NUMBER", "'NUMBER' is int, expected a function"),
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
    assert counts.kept == len(records) > 0.95 * len(traces)
    assert counts.steps == sum(record["total_steps"] for record in records)
    for record in records:
        parsed = parse_record(json.loads(json.dumps(record)))
        steps = find_steps(parsed.answer, "blank")
        assert len(steps) == record["total_steps"] >= 2
        # A step of a character or two is none.
        assert all(len(parsed.answer[step.start : step.content_end]) > 1 for step in steps)


def test_real_traces_are_kept_where_their_label_says_correct(traces):
    checked = agree = 0
    for trace in traces:
        marked = marked_answers(trace["full_response"])
        # A sentence behind the #### is no number, and counts as wrong though the label may take the number out of it.
        if not marked or parse_number(marked[-1]) is None:
            continue
        _, counts = prepare(trace, response_field="full_response", require_correct=True)
        if "fewer than two steps" not in counts.skipped:
            checked += 1
            agree += bool(counts.kept) == trace["is_correct"]
    assert checked > 1000
    # One label is contradicted by its own response.
    assert agree >= checked - 1

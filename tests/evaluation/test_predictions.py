"""Scoring what another program generated."""

import json

import pytest

from stepjepa.base.files import locked, write_jsonl
from stepjepa.cli.main import main

TRUTHS = ["Good", "Bad", "Good"]


@pytest.fixture
def files(tmp_path):
    chats = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": truth}] for truth in TRUTHS]
    write_jsonl(tmp_path / "test.jsonl", [{"messages": chat} for chat in chats])
    return tmp_path


def score(files, predictions, *flags, task="generic"):
    path = files / "predictions.jsonl"
    if isinstance(predictions, str):
        path.write_text(predictions, encoding="utf-8")
    else:
        write_jsonl(path, predictions)
    given = ["--test_file", str(files / "test.jsonl"), "--predictions", str(path), "--task", task]
    return main(["score", *given, "--output_file", str(files / "out.jsonl"), *flags])


def read(files):
    lines = [json.loads(line) for line in (files / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    return lines, json.loads((files / "out.summary.json").read_text(encoding="utf-8"))


def test_lines_and_summary_are_those_of_evaluate(files, capsys):
    output = [{"index": 2, "generated": "Good!"}, {"index": 0, "generated": "Good"}, {"index": 1, "generated": "Good"}]
    assert score(files, output) == 0
    lines, summary = read(files)
    result = [(line["index"], line["generated"], line["truth"]) for line in lines]
    assert result == [(0, "Good", "Good"), (1, "Good", "Bad"), (2, "Good!", "Good")]
    assert [line["scores"]["exact"] for line in lines] == [True, False, False]
    assert [line["scores"]["prefix"] for line in lines] == [True, False, True]
    assert summary["scores"]["exact"]["mean"] == pytest.approx(1 / 3)
    assert summary["errors"] == {"wrong answer": 2}
    assert "33.3% of 3 examples" in capsys.readouterr().out


def test_stopping_and_samples_are_taken_where_they_are_given(files):
    output = [{"index": i, "generated": text, "stopped": i != 1} for i, text in enumerate(["Good", "Bad or so", "Bad"])]
    assert score(files, output, "--startswith") == 0
    lines, summary = read(files)
    assert [line["error"] for line in lines] == [None, None, "wrong answer"]
    assert (summary["headline"], summary["scores"]["stopped"]["mean"]) == ("prefix", pytest.approx(2 / 3))
    many = [{"index": i, "generated": ["Good", "Bad", "Bad"]} for i in range(3)]
    assert score(files, many, "--overwrite") == 0
    lines, summary = read(files)
    assert summary["scores"]["pass@1"]["mean"] == pytest.approx((1 / 3 + 2 / 3 + 1 / 3) / 3)
    assert summary["scores"]["pass@3"]["mean"] == 1.0
    assert summary["scores"]["majority"]["mean"] == pytest.approx(1 / 3)
    # What was written can be scored again.
    assert score(files, lines, "--overwrite") == 0
    again, same = read(files)
    assert again == lines
    assert same == summary


def test_an_answer_that_was_cut_off_in_its_thought_is_none(files):
    """The line of an evaluation has its prompt, which may open the thought; the same text is the same answer again."""
    cut, whole = "Good", "Let me see.</think>Good"
    prompt = "<|user|>?<|assistant|><think>\n"
    output = [{"index": index, "prompt": prompt, "generated": text} for index, text in enumerate([cut, whole, cut])]
    del output[2]["prompt"]
    assert score(files, output) == 0
    lines, _ = read(files)
    assert [line["scores"]["prefix"] for line in lines] == [False, False, True]
    assert [line["error"] for line in lines] == ["no answer found", "wrong answer", None]
    assert [line["prompt"] for line in lines] == [prompt, prompt, None]


def test_a_missing_prediction_is_an_error(files, capsys):
    assert score(files, [{"index": 1, "generated": "no"}]) == 2
    assert "no prediction for 2 of 3 records (the first is index 0)" in capsys.readouterr().err
    assert not (files / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"index": 3, "generated": "a"}', "predictions.jsonl:1: 'index' is 3, expected a whole number from 0 to 2"),
        ('{"index": true, "generated": "a"}', "'index' is True"),
        ('{"index": 0, "generated": 4}', "'generated' has 4, expected a text or a list of at least one"),
        ('{"index": 0, "answer": "a"}', "predictions.jsonl:1: no 'generated'"),
        ('{"index": 0, "answer": "a"}', "the line has index, answer"),
        ('{"index": 0, "generated": []}', "'generated' is an empty list"),
        ('{"index": 0, "generated": "a", "stopped": "yes"}', "'stopped' is 'yes', expected true or false"),
        ('{"index": 0, "generated": "a"}\n{"index": 0, "generated": "b"}', ":2: 'index' is 0, expected"),
        (
            '{"index": 0, "generated": "a"}\n{"index": 1, "generated": ["a", "b"]}',
            "1 sample at index 0, 2 samples at index 1; give",
        ),
        ("nonsense", "predictions.jsonl:1: not valid JSON"),
    ],
)
def test_wrong_predictions_are_one_line_and_exit_code_two(text, words, files, capsys):
    assert score(files, text) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (files / "out.jsonl").exists()


def test_nothing_is_overwritten_unasked(files, capsys):
    output = [{"index": i, "generated": "Good"} for i in range(3)]
    assert score(files, output) == 0
    assert score(files, output) == 2
    assert "already exists" in capsys.readouterr().err
    with locked(files / "out.jsonl"):
        assert score(files, output, "--overwrite") == 2
    assert "out.jsonl: is in use by process" in capsys.readouterr().err
    # The lines may have been removed, being large, and the summary kept.
    (files / "out.jsonl").unlink()
    summary = (files / "out.summary.json").read_bytes()
    assert score(files, output) == 2
    assert "out.summary.json: already exists, without the lines of out.jsonl; name another" in capsys.readouterr().err
    assert (files / "out.summary.json").read_bytes() == summary
    assert score(files, output, "--overwrite") == 0
    for name, words in (("test.jsonl", "is the test file"), ("predictions.jsonl", "is the file of predictions")):
        assert score(files, output, "--output_file", str(files / name)) == 2
        assert words in capsys.readouterr().err


def test_scored_answers_are_not_taken_for_those_of_the_evaluation_that_they_replace(files, capsys):
    """What says that the old lines belong to a model must go with them."""
    (files / "out.jsonl").write_text("{}\n", encoding="utf-8")
    (files / "out.jsonl.meta.json").write_text("{}", encoding="utf-8")
    output = [{"index": i, "generated": "Good"} for i in range(3)]
    assert score(files, output, "--overwrite") == 0
    given = ["--model_path", "some/model", "--test_file", str(files / "test.jsonl"), "--task", "generic"]
    assert main(["evaluate", *given, "--output_file", str(files / "out.jsonl")]) == 2
    assert "is no output of an evaluation: out.jsonl.meta.json is missing" in capsys.readouterr().err


def test_what_a_task_leaves_out_needs_no_prediction(files):
    chats = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in ("a", "b 2", "c 3")]
    write_jsonl(files / "test.jsonl", [{"messages": chat} for chat in chats])
    assert score(files, [{"index": 2, "generated": "3"}, {"index": 1, "generated": "x"}], task="user_task:Choosy") == 0
    lines, summary = read(files)
    assert [(line["index"], line["scores"]["last"]) for line in lines] == [(1, False), (2, True)]
    assert (summary["n"], summary["left_out"]) == (2, {"no number": 1})

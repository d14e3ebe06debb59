"""``stepjepa prepare``: flags, files, counts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from stepjepa.cli.main import main
from stepjepa.data.sources import read_records
from stepjepa.preparing import files
from stepjepa.tasks import nl_rx_grammar
from stepjepa.tasks.nl_rx import NlRxTask
from stepjepa.tasks.registry import choose_task


def prepare(*arguments: object) -> int:
    return main(["prepare", *map(str, arguments)])


def write_lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def table_of(out: str) -> dict[str, str]:
    """The printed counts."""
    rows = [line.rpartition(": ") for line in out.splitlines() if not line.startswith("written: ")]
    return {name: value for name, _, value in rows}


def response(answer: int = 5, **changes: Any) -> dict[str, Any]:
    text = f"She has 3 + 4 = 7.\n\nShe eats 2, so \\boxed{{{answer}}}."
    return {"question": "How many?", "ground_truth": "5", "deepseek_response": text, **changes}


def test_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "raw.jsonl", response(), response(deepseek_response="\\boxed{5}"), response(6))
    target = tmp_path / "new" / "steps.jsonl"
    assert prepare("steps", "--input_file", source, "--output_file", target) == 0
    assert [remaining.extra["total_steps"] for remaining in read_records(target)] == [2, 2]
    message = table_of(capsys.readouterr().out)
    assert (message["read"], message["kept"], message["fewer than two steps"]) == ("3", "2", "1")
    assert prepare("steps", "--input_file", source, "--output_file", target, "--max_examples", 1, "--overwrite") == 0
    assert len(read_records(target)) == 1


def test_steps_with_every_option(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "half_splitter.py").write_text("def split(text):\n    return text.split('; ')\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{**response(), "solution": f"It was 7; now \\boxed{{{number}}}."} for number in (5, 6)]
    source, target = write_lines(tmp_path / "raw.jsonl", *rows), write_lines(tmp_path / "steps.jsonl", {"old": True})
    options = ("--response_field", "solution", "--system_prompt", "Go.", "--custom", "half_splitter:split")
    files = ("--input_file", source, "--output_file", target, "--overwrite")
    assert prepare("steps", *files, *options, "--require_correct") == 0
    (remaining,) = read_records(target)
    assert (remaining.messages[0]["content"], remaining.answer) == ("Go.", "It was 7\n\nnow \\boxed{5}.")
    assert "wrong or no final answer" in capsys.readouterr().out


QUESTION = {"question": "How many?", "answer": "1 + 1 = <<1+1=2>>2.\n2 + 1 = <<2+1=3>>3.\n#### 3"}


def test_gsm8k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "raw.jsonl", QUESTION, {"question": "How?", "answer": "No idea."}, {"text": "x"})
    target = tmp_path / "gsm8k.jsonl"
    flags = ("--format", "steps", "--calculator", "strip")
    assert prepare("gsm8k", "--input_file", source, "--output_file", target, *flags) == 0
    (remaining,) = read_records(target)
    assert remaining.answer == "1 + 1 = 2.\n\n2 + 1 = 3.\n#### 3"
    out, err = capsys.readouterr()
    assert "note: dropped, no text in 'question': line 3\n" in err
    assert table_of(out) == {
        "read": "3",
        "kept": "1",
        "dropped": "2",
        "'answer' does not end in a line '#### number'": "1",
        "no text in 'question'": "1",
    }


CHAT = "question,answer,how\nlines with a digit,.*7.*,Short.\n"
REFUSED = [
    ("steps", '{"question": "a"\n', (), "raw.jsonl:1: not valid JSON"),
    ("steps", "", (), "raw.jsonl: no record could be kept (it is empty)"),
    ("steps", '{"question": "a", "text": "b"}\n', (), "no text in 'deepseek_response': 1); expected --question_field"),
    ("steps", '{"question": "a", "deepseek_response": "b"}\n', (), "could be kept (fewer than two steps: 1)\n"),
    ("hellaswag", '{"x": 1}\n', (), "no record could be kept (no text in 'ctx': 1); expected ctx"),
    ("yelp", "", ("--dataset", "x"), "name the source with either --input_file or --dataset"),
    ("chat", '{"question": "a", "answer": ""}\n', (), "raw.jsonl:1: column 'answer' is ''"),
    ("chat", "", ("--system", "s", "--system_prompt", "t"), "--system and --system_prompt exclude each other"),
]


@pytest.mark.parametrize(("kind", "text", "flags", "words"), REFUSED)
def test_wrong_input_is_named_and_nothing_is_written(
    kind: str, text: str, flags: tuple[Any, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "raw.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    assert prepare(kind, "--input_file", source, "--output_file", target, *flags) == 2
    assert words in capsys.readouterr().err
    assert not target.exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "raw.jsonl", QUESTION)
    old, link = write_lines(tmp_path / "old.jsonl", {"old": True}), tmp_path / "link.jsonl"
    assert prepare("gsm8k", "--input_file", source, "--output_file", old) == 2
    assert "old.jsonl: already exists; " in capsys.readouterr().err
    link.symlink_to(source)
    for target, flags in ((source, []), (source, ["--overwrite"]), (link, ["--overwrite"])):
        assert prepare("gsm8k", "--input_file", source, "--output_file", target, *flags) == 2
        assert "is both input and output" in capsys.readouterr().err
    assert json.loads(source.read_text()) == QUESTION


def test_a_split_of_a_saved_data_set_is_named_as_in_training(tmp_path: Path, capsys: Any) -> None:
    rows = {name: [{"question": f"{name} 3 + 4?", "answer": "7"}] for name in ("train", "test")}
    DatasetDict({name: Dataset.from_list(each) for name, each in rows.items()}).save_to_disk(tmp_path / "saved")
    target = tmp_path / "out.jsonl"
    for named in ((f"{tmp_path}/saved::test",), (tmp_path / "saved", "--split", "test")):
        assert prepare("chat", "--dataset", *named, "--output_file", target, "--overwrite") == 0
        (record,) = read_records(target)
        assert record.messages[0]["content"] == "test 3 + 4?"
    for named, fault in (
        ((f"{tmp_path}/saved::test", "--split", "train"), "--dataset names a split already, 'test'; leave --split out"),
        ((f"{tmp_path}/saved::dev",), "has no split 'dev'; there are train, test"),
        ((f"{tmp_path}/saved::test:x",), "expected NAME:SUBSET:SPLIT, got 4 parts"),
    ):
        assert prepare("chat", "--dataset", *named, "--output_file", target, "--overwrite") == 2
        assert fault in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "system"), [((), None), (("--system_prompt", "Go."), "Go."), (("--system", "how"), "Short.")]
)
@pytest.mark.parametrize("names", [("question", "answer"), ("Frage", "Antwort")])
def test_a_table_of_questions_and_answers(
    names: tuple[str, str], flags: tuple[str, ...], system: str | None, tmp_path: Path
) -> None:
    source, target = tmp_path / "raw.csv", tmp_path / "train.jsonl"
    source.write_text(CHAT.replace("question,answer", ",".join(names)))
    named = () if names[0] == "question" else ("--columns", *names)
    assert prepare("chat", "--input_file", source, "--output_file", target, *flags, *named) == 0
    (record,) = read_records(target)
    texts = [message["content"] for message in record.messages]
    assert texts == [*([system] if system else []), "lines with a digit", ".*7.*"]


def test_stepmath_writes_train_and_test(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, whole = tmp_path / "problems", files.atomic_write

    def full_disk(path: Path, mode: str = "w") -> Any:
        if path.name == "test.jsonl":
            raise OSError(28, "No space left on device")
        return whole(path, mode)

    sizes = ("--output_dir", folder, "--train_size", 60, "--test_size", 20, "--overwrite")
    with monkeypatch.context() as patch:
        patch.setattr(files, "atomic_write", full_disk)
        assert prepare("stepmath", *sizes) == 2
    assert not folder.exists() or not list(folder.iterdir()), "both files are written, or none"
    assert prepare("stepmath", *sizes) == 0
    assert [len(read_records(folder / f"{part}.jsonl")) for part in ("train", "test")] == [60, 20]
    before = (folder / "train.jsonl").read_bytes()
    assert prepare("stepmath", *sizes) == 0
    assert (folder / "train.jsonl").read_bytes() == before
    assert prepare("stepmath", *sizes, "--seed", 1) == 0
    assert (folder / "train.jsonl").read_bytes() != before


@pytest.mark.usefixtures("quick_nl_rx")
def test_nl_rx_writes_records_of_its_task(tmp_path: Path) -> None:
    train, test = tmp_path / "new" / "train.jsonl", tmp_path / "test.jsonl"
    flags = ("--size", 200, "--seed", 3, "--test_size", 50, "--test_file", test)
    assert prepare("nl-rx", *flags, "--output_file", train) == 0
    records, others = read_records(train), read_records(test)
    assert (len(records), len(others)) == (200, 50)
    assert isinstance(choose_task("auto", records), NlRxTask)
    assert not {record.answer for record in records} & {record.answer for record in others}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("stepmath --output_dir OUT --max_steps 1", "--max_steps: expected 2 (min_steps) to 8, got 1"),
        ("nl-rx --output_file OUT --size 90000", "--size: the grammar gives only"),
        ("nl-rx --output_file OUT --test_file x", "give both --test_size and --test_file, or neither"),
        ("nl-rx --output_file OUT --test_file OUT --test_size 5", "is both --output_file and --test_file"),
    ],
)
@pytest.mark.usefixtures("quick_nl_rx")
def test_what_can_not_be_generated(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    monkeypatch.setattr(nl_rx_grammar, "_PATIENCE", 2)
    out = tmp_path / "out"
    assert prepare(*arguments.replace("OUT", str(out)).split()) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_rows_of_a_table_are_divided_into_training_and_test_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, train, test = (tmp_path / name for name in ("rows.csv", "train.jsonl", "test.jsonl"))
    rows = [f'"Wo ist Büro {number}, ""Ost""?",Etage {number % 5}' for number in range(17)]
    source.write_text("\n".join(["Frage,Antwort", *rows, rows[3], "leer,"]) + "\n", encoding="utf-8")
    flags = ("chat", "--input_file", source, "--columns", "Frage", "Antwort", "--bad_records", "skip")
    assert prepare(*flags, "--output_file", train, "--test_file", test, "--test_size", 5) == 0
    assert f"written: {train} (13 records)\nwritten: {test} (5 records)\n" in capsys.readouterr().out
    asked = [{record.messages[0]["content"] for record in read_records(path)} for path in (train, test)]
    assert not asked[0] & asked[1]
    assert len(asked[0] | asked[1]) == 17


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--test_size", 2), "give both --test_size and --test_file, or neither"),
        (("--test_file", "train.jsonl", "--test_size", 2), "is both --output_file and --test_file; name another"),
        (("--test_file", "rows.csv", "--test_size", 2), "is both input and output; name another --test_file"),
        (("--test_file", "test.jsonl", "--test_size", 3), "--test_size: expected fewer than the 3 records"),
        (("--seed", 5), "--seed does nothing without --test_file"),
    ],
)
def test_a_division_that_can_not_be_made_writes_nothing(
    flags: tuple[object, ...], message: str, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("question,answer\na,1\nb,2\nc,3\n")
    assert prepare("chat", "--input_file", "rows.csv", "--output_file", "train.jsonl", *flags) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


def test_a_test_file_with_fewer_records_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(
        tmp_path / "rows.jsonl", *({"question": str(number // 2), "answer": str(number)} for number in range(12))
    )
    files = ("--output_file", tmp_path / "train.jsonl", "--test_file", tmp_path / "test.jsonl")
    assert prepare("chat", "--input_file", source, *files, "--test_size", 5) == 0
    message = "4 test records, not 5: records with the same question stay together"
    assert message in capsys.readouterr().err
    assert len(read_records(tmp_path / "test.jsonl")) == 4

"""``stepjepa prepare``: flags, files, counts, and what is refused."""

import argparse
import json
import subprocess
import sys

import pytest

from stepjepa.cli import main
from stepjepa.commands import preparation, prepare
from stepjepa.data.sources import read_records
from stepjepa.errors import UserError
from stepjepa.preparing.conversion import CONVERSIONS


def call(*arguments):
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    return prepare.run(parser.parse_args([str(argument) for argument in arguments]))


def write_lines(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def record(**changes):
    response = "She has 3 + 4 = 7.\n\nShe eats 2, so \\boxed{5}."
    return {"question": "How many?", "ground_truth": "5", "deepseek_response": response, **changes}


@pytest.fixture
def raw_file(tmp_path):
    wrong = record(deepseek_response="It was 7.\n\nNow \\boxed{6}.")
    return write_lines(tmp_path / "raw.jsonl", record(), record(deepseek_response="\\boxed{5}"), wrong)


def test_steps_writes_training_records_and_counts(raw_file, tmp_path, capsys):
    target = tmp_path / "new" / "steps.jsonl"
    assert call("steps", "--input_file", raw_file, "--output_file", target) == 0
    records = read_records(target)
    assert [kept.extra["total_steps"] for kept in records] == [2, 2]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["read", "3"] in lines
    assert ["kept", "2"] in lines
    assert ["fewer", "than", "two", "steps", "1"] in lines
    assert lines[-1] == ["written", "to", str(target)]


def test_steps_with_every_option(tmp_path, monkeypatch, capsys):
    (tmp_path / "half_splitter.py").write_text("def split(text):\n    return text.split(';')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    right, wrong = (record(solution=f"It was 7; now \\boxed{{{number}}}.") for number in (5, 6))
    source = write_lines(tmp_path / "raw.jsonl", right, wrong)
    target = write_lines(tmp_path / "steps.jsonl", {"old": True})
    options = ("--response_field", "solution", "--system_prompt", "Go.", "--custom", "half_splitter:split")
    flags = ("--require_correct", "--overwrite")
    assert call("steps", "--input_file", source, "--output_file", target, *options, *flags) == 0
    (kept,) = read_records(target)
    assert kept.messages[0]["content"] == "Go."
    assert kept.answer == "It was 7\n\nnow \\boxed{5}."
    assert "wrong final answer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "a"\n', r"raw\.jsonl:1: not valid JSON"),
        ("[]\n", r"raw\.jsonl:1: a JSON list where an object is needed"),
        ("", r"raw\.jsonl: no record could be kept \(it is empty\)"),
        (
            '{"question": "a", "text": "b"}\n',
            r"no field 'deepseek_response': 1\); name the fields .* \(there is 'question', 'text'\)$",
        ),
        (
            '{"conversations": [{"from": "human", "value": "a"}]}\n',
            r"--response_field \(there is 'conversations'\), or read whole chats with 'stepjepa prepare chat'$",
        ),
    ],
)
def test_wrong_input_is_named_and_nothing_is_written(tmp_path, text, message):
    source, target = tmp_path / "raw.jsonl", tmp_path / "steps.jsonl"
    source.write_text(text)
    with pytest.raises(UserError, match=message):
        call("steps", "--input_file", source, "--output_file", target)
    assert not target.exists()


def test_stepmath_writes_train_and_test(tmp_path, capsys):
    folder = tmp_path / "problems"
    sizes = ("--train_size", 60, "--test_size", 20)
    assert call("stepmath", "--output_dir", folder, *sizes) == 0
    train, test = (read_records(folder / f"{part}.jsonl") for part in ("train", "test"))
    assert (len(train), len(test)) == (60, 20)
    assert sorted(path.name for path in folder.iterdir()) == ["test.jsonl", "train.jsonl"]
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[:2]] == ["60", "20"]

    before = (folder / "train.jsonl").read_bytes()
    call("stepmath", "--output_dir", folder, *sizes, "--overwrite")
    assert (folder / "train.jsonl").read_bytes() == before
    call("stepmath", "--output_dir", folder, *sizes, "--overwrite", "--seed", 1)
    assert (folder / "train.jsonl").read_bytes() != before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max_steps", 1), r"^--max_steps: expected 2 \(min_steps\) to 8, got 1"),
        (("--operations", "power"), "^--operations: .* got power"),
        (("--train_size", 0), "^--train_size: expected 1 or more, got 0"),
        (("--operations", "double", "--max_steps", 2), "^--test_size: .* got 500 and found"),
    ],
)
def test_stepmath_refuses_wrong_settings_and_writes_nothing(tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        call("stepmath", "--output_dir", tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_two_files_are_written_together_or_not_at_all(tmp_path, monkeypatch):
    whole = preparation.atomic_write

    def full_disk(path, mode="w"):
        if path.name == "test.jsonl":
            raise OSError(28, "No space left on device")
        return whole(path, mode)

    monkeypatch.setattr(preparation, "atomic_write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        call("stepmath", "--output_dir", tmp_path, "--train_size", 3, "--test_size", 2)
    assert not list(tmp_path.iterdir())


QUESTION = {"question": "How many?", "answer": "1 + 1 = <<1+1=2>>2.\n2 + 1 = <<2+1=3>>3.\n#### 3"}


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        ((), QUESTION["answer"]),
        (("--format", "steps"), "1 + 1 = <<1+1=2>>2.\n\n2 + 1 = <<2+1=3>>3.\n#### 3"),
        (("--calculator", "strip"), "1 + 1 = 2.\n2 + 1 = 3.\n#### 3"),
        (("--format", "steps", "--calculator", "strip"), "1 + 1 = 2.\n\n2 + 1 = 3.\n#### 3"),
        (("--socratic", "strip"), QUESTION["answer"]),
    ],
)
def test_gsm8k(tmp_path, capsys, flags, answer):
    source = write_lines(tmp_path / "raw.jsonl", QUESTION, {"question": "How?", "answer": "No idea."}, {"text": "x"})
    target = tmp_path / "gsm8k.jsonl"
    assert call("gsm8k", "--input_file", source, "--output_file", target, *flags) == 0
    (kept,) = read_records(target)
    assert kept.answer == answer
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(maxsplit=1) for line in lines[:-1]] == [
        ["read", "3"],
        ["kept", "1"],
        ["dropped", "2"],
        ["  'answer' does not end in a line '#### number'", "1"],
        ["  no field 'question'", "1"],
    ]


REVIEWS = [{"text": f"number {number}", "label": number % 2} for number in range(12)]


def test_max_examples(raw_file, tmp_path, capsys):
    source = write_lines(tmp_path / "reviews.jsonl", {"text": "", "label": 1}, *REVIEWS)
    target = tmp_path / "out.jsonl"
    call("yelp_polarity", "--input_file", source, "--output_file", target, "--max_examples", 2)
    assert [kept.answer for kept in read_records(target)] == ["Bad", "Good"]
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[:3]] == ["3", "2", "1"]
    call("steps", "--input_file", raw_file, "--output_file", target, "--max_examples", 1, "--overwrite")
    assert len(read_records(target)) == 1
    with pytest.raises(UserError, match=r"^--max_examples: expected 1 or more, got 0$"):
        call("yelp", "--input_file", source, "--output_file", tmp_path / "new.jsonl", "--max_examples", 0)


def test_a_data_set_of_the_hub(tmp_path, monkeypatch, capsys):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(*arguments):
        asked.append(arguments)
        return {"train": [QUESTION] * 3, "test": [QUESTION]}

    monkeypatch.setattr(datasets, "load_dataset", load)
    target = tmp_path / "out.jsonl"
    flags = ("--dataset", "openai/gsm8k", "--subset", "main", "--output_file", target)
    with pytest.raises(UserError, match=r"^openai/gsm8k: has several splits; pass --split with one of train, test$"):
        call("gsm8k", *flags)
    assert call("gsm8k", *flags, "--split", "test") == 0
    assert len(read_records(target)) == 1
    assert asked == [("openai/gsm8k", "main")] * 2
    with pytest.raises(UserError, match=r"^openai/gsm8k: no record could be kept \(no context: 3\); expected ctx, "):
        call("hellaswag", *flags, "--split", "train", "--overwrite")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "^name the source with either --input_file or --dataset$"),
        (("--input_file", "no/such.csv"), "no/such.csv: no such raw file"),
        (("--input_file", "."), "is a folder where a raw file is needed"),
        (("--dataset", "no/such.csv"), "no/such.csv: no such raw file"),
        (("--input_file", __file__.replace(".py", ".csv")), "no such raw file"),
    ],
)
def test_a_wrong_source(tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        call("steps", *flags, "--output_file", tmp_path / "out.jsonl")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["steps", *CONVERSIONS])
def test_no_kind_overwrites(tmp_path, kind):
    source = write_lines(tmp_path / "raw.jsonl", QUESTION)
    flags = ("--input_file", source, "--output_file", write_lines(tmp_path / "old.jsonl", {"old": True}))
    with pytest.raises(UserError, match=r"old\.jsonl: is there already; .*--overwrite"):
        call(kind, *flags)
    with pytest.raises(UserError, match="is both input and output"):
        call(kind, "--input_file", source, "--output_file", source, "--overwrite")
    link = tmp_path / "link.jsonl"
    link.symlink_to(source)
    with pytest.raises(UserError, match="is both input and output"):
        call(kind, "--input_file", source, "--output_file", link, "--overwrite")
    assert json.loads(source.read_text()) == QUESTION


def test_when_nothing_is_kept_the_reasons_and_the_fields_are_told(tmp_path):
    source = write_lines(tmp_path / "raw.jsonl", *[{"premise": "x", "y" * 99: 1}] * 3)
    message = (
        rf"no record could be kept \(no field 'question': 3\); expected question and answer, got premise, {'y' * 30}$"
    )
    with pytest.raises(UserError, match=message):
        call("gsm8k", "--input_file", source, "--output_file", tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["raw.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gsm8k --output_file x --calculater=keep", "prepare gsm8k: error: .*'--calculater=keep'; did you mean --calc"),
        ("steps --input_file x", "prepare steps: error: the following arguments are required: --output_file"),
        ("nq_open --output_file x --splt y", "prepare nq-open: error: .*'--splt'; did you mean --split?"),
        ("gsm8k --output_file x --format lines", "prepare gsm8k: error: argument --format: invalid choice"),
    ],
)
def test_a_mistyped_flag_is_answered_with_one_of_that_kind(capsys, arguments, message):
    assert main(["prepare", *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    head, _, tail = message.partition(".*")
    assert line.startswith(f"stepjepa {head}")
    assert tail in line


def test_torch_is_not_imported():
    script = "import sys, stepjepa.commands.prepare; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

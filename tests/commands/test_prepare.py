"""``stepjepa prepare``: flags, files, counts, and what is refused."""

import argparse
import json
import subprocess
import sys

import pytest

from stepjepa.commands import prepare
from stepjepa.errors import UserError
from stepjepa.records import read_records


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


def test_existing_output_is_left_alone(raw_file, tmp_path):
    target = write_lines(tmp_path / "steps.jsonl", {"old": True})
    with pytest.raises(UserError, match=r"steps\.jsonl: is there already; .* --overwrite"):
        call("steps", "--input_file", raw_file, "--output_file", target)
    assert json.loads(target.read_text()) == {"old": True}


def test_input_is_never_replaced(raw_file):
    before = raw_file.read_text()
    with pytest.raises(UserError, match="both input and output"):
        call("steps", "--input_file", raw_file, "--output_file", raw_file, "--overwrite")
    assert raw_file.read_text() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "a"\n', r"raw\.jsonl:1: not valid JSON"),
        ("[]\n", r"raw\.jsonl:1: a JSON list where an object is needed"),
        ("", r"raw\.jsonl: no record could be kept \(the file is empty\)"),
        ('{"question": "a", "text": "b"}\n', r"no field 'deepseek_response': 1\); check --response_field"),
    ],
)
def test_wrong_input_is_named_and_nothing_is_written(tmp_path, text, message):
    source, target = tmp_path / "raw.jsonl", tmp_path / "steps.jsonl"
    source.write_text(text)
    with pytest.raises(UserError, match=message):
        call("steps", "--input_file", source, "--output_file", target)
    assert not target.exists()


def test_missing_input(tmp_path):
    with pytest.raises(UserError, match="no such raw file"):
        call("steps", "--input_file", tmp_path / "no.jsonl", "--output_file", tmp_path / "steps.jsonl")


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


def test_stepmath_takes_the_difficulty(tmp_path):
    numbers = ("--min_steps", 4, "--max_steps", 5, "--max_quantity", 5, "--max_amount", 20)
    sizes = ("--train_size", 40, "--test_size", 10)
    call("stepmath", "--output_dir", tmp_path, *sizes, *numbers, "--operations", "add", "subtract")
    records = read_records(tmp_path / "train.jsonl")
    assert {kept.extra["total_steps"] for kept in records} == {4, 5}
    assert not any(sign in kept.answer for kept in records for sign in "*/")
    assert max(int(kept.extra["ground_truth"]) for kept in records) <= 20


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


def test_stepmath_leaves_existing_files_alone(tmp_path):
    write_lines(tmp_path / "test.jsonl", {"old": True})
    with pytest.raises(UserError, match=r"test\.jsonl: is there already"):
        call("stepmath", "--output_dir", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test.jsonl"]
    with pytest.raises(UserError, match="is a file where a folder is needed"):
        call("stepmath", "--output_dir", tmp_path / "test.jsonl")


def test_a_kind_is_needed(capsys):
    with pytest.raises(SystemExit):
        call()
    assert "KIND" in capsys.readouterr().err


def test_torch_is_not_imported():
    script = "import sys, stepjepa.commands.prepare; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_real_traces(shared_data, tmp_path, capsys):
    traces = json.loads((shared_data / "traces" / "star_repo_star.detailed_results.json").read_text(encoding="utf-8"))
    source = write_lines(tmp_path / "raw.jsonl", *({**t, "ground_truth": t["correct_answer"]} for t in traces[:200]))
    target = tmp_path / "steps.jsonl"
    call("steps", "--input_file", source, "--output_file", target, "--response_field", "full_response")
    counts = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()[:-1])
    assert int(counts["read"]) == 200 == int(counts["kept"]) + int(counts["skipped"])
    assert len(read_records(target)) == int(counts["kept"])
    assert int(counts["skipped"]) == sum(int(count) for name, count in counts.items() if name.startswith("  "))

"""``stepjepa evaluate`` from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main
from stepjepa.models.presets import train_tokenizer
from tiny import make_model


@pytest.fixture
def files(tmp_path):
    chats = [[("user", f"{a}+{a}?"), ("assistant", f"So\n#### {2 * a}")] for a in range(3)]
    write_jsonl(
        tmp_path / "sums.jsonl",
        [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats],
    )
    tokenizer = train_tokenizer([text for chat in chats for _, text in chat], 277)
    tokenizer.save_pretrained(tmp_path / "model")
    make_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    return tmp_path


def evaluate(files, *flags):
    given = ["--model-path", str(files / "model"), "--test-file", str(files / "sums.jsonl")]
    return main(["evaluate", *given, "--output-file", str(files / "out" / "a.jsonl"), "--max-new-tokens", "5", *flags])


def test_evaluates_prints_and_goes_on(files, capsys):
    assert evaluate(files) == 0
    printed = capsys.readouterr()
    assert ", task gsm8k, model " in printed.out
    assert "more figures: the same command with --details\n" in printed.out and "LM loss" not in printed.out
    # Our progress bar shows on a terminal only.
    assert "evaluate:" not in printed.err
    assert "arning" not in printed.err
    output = files / "out" / "a.jsonl"
    assert [json.loads(line)["truth"] for line in output.read_text(encoding="utf-8").splitlines()] == ["0", "2", "4"]
    assert {file.name for file in output.parent.iterdir()} == {"a.jsonl", "a.summary.json", "a.jsonl.meta.json"}

    before = output.stat().st_mtime_ns
    assert evaluate(files) == 0
    assert "3 of 3 examples are in" in capsys.readouterr().out
    assert evaluate(files, "--details") == 0
    assert "LM loss on right answers: " in capsys.readouterr().out
    assert output.stat().st_mtime_ns == before


def test_a_note_is_no_result(files, monkeypatch, capsys):
    monkeypatch.setattr("stepjepa.cli.evaluate.trained_objective", lambda _: {"plain": True})
    assert evaluate(files) == 2  # the tokenizer lacks the tokens of that format
    printed = capsys.readouterr()
    assert printed.err.startswith("note: trained without a chat template, so prompts have none (--plain)\n")
    assert not printed.out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--task", "maths"], "--task: no task 'maths'; expected auto, hellaswag"),
        (["--test_file", "nowhere.jsonl"], "nowhere.jsonl: no such data file"),
        (["--model_path", "nowhere/at/all"], "nowhere/at/all: no such model folder"),
        (["--model_path", str(Path(__file__).parent)], "holds no model"),
        (["--plain", "--use_test_prompts"], "--use_test_prompts does nothing with --plain"),
        (["--plain"], "leave --plain out"),
        (["--output_file", "out/a.json"], "end its name in .jsonl"),
        (["--startswith", "--task", "user_task:LastWord"], "no score 'prefix', only last, anywhere"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_two(flags, words, files, monkeypatch, capsys):
    assert evaluate(files, *flags) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert evaluate(files) == 2
    assert "start one process, without torchrun" in capsys.readouterr().err
    assert not (files / "out").exists()


def test_another_setting_is_refused_until_told_to_overwrite(files, capsys):
    assert evaluate(files) == 0
    assert evaluate(files, "--task", "generic") == 2
    assert "was begun with another task (gsm8k, now generic), headline (correct, now exact);" in capsys.readouterr().err
    assert evaluate(files, "--task", "generic", "--overwrite") == 0
    assert ", task generic, model" in capsys.readouterr().out


def test_a_summary_whose_lines_were_removed_is_kept(files, capsys):
    assert evaluate(files) == 0
    (lines,) = (files / "out").glob("*.jsonl")
    lines.unlink()
    (summary,) = (files / "out").glob("*.summary.json")
    before = summary.read_bytes()
    assert evaluate(files, "--task", "generic") == 2
    assert f"{summary}: already exists, without the lines of {lines.name}; name another" in capsys.readouterr().err
    assert summary.read_bytes() == before
    assert evaluate(files, "--task", "generic", "--overwrite") == 0


def test_help_and_a_finished_file_need_no_torch(files):
    assert evaluate(files) == 0
    code = (
        "import sys; from stepjepa.cli.main import main; main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    flags = ["--model_path", str(files / "model"), "--test_file", str(files / "sums.jsonl")]
    flags += ["--output_file", str(files / "out" / "a.jsonl"), "--max_new_tokens", "5"]
    for arguments in (["evaluate", "--help"], ["evaluate", *flags]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout

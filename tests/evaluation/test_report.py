"""Evaluations in one table must have the same settings."""

import pytest

import tiny
from stepjepa.cli import main
from stepjepa.files import write_json, write_jsonl
from stepjepa.models.presets import train_tokenizer


@pytest.fixture
def folder(tmp_path):
    """Two run folders, ``a`` and ``b``, without the training, and a test file."""
    rows = [[("user", f"Say {word}"), ("assistant", word)] for word in ("one", "two", "three")]
    chats = [[{"role": role, "content": text} for role, text in row] for row in rows]
    write_jsonl(tmp_path / "test.jsonl", [{"messages": chat} for chat in chats])
    tokenizer = train_tokenizer([message["content"] for chat in chats for message in chat], 277)
    results = {"steps": 2, "tokens": 5.0, "train_seconds": 1.0}
    for seed, name in enumerate("ab"):
        tokenizer.save_pretrained(tmp_path / name)
        tiny.make_model("llama", seed=seed, vocab_size=len(tokenizer)).save_pretrained(tmp_path / name)
        told = {"status": "finished", "jepa": {"mode": "regular", "predictors": 0}, "results": results}
        told |= {"model": "preset:tiny", "training": {"seed": seed}, "data": {}}
        write_json(tmp_path / name / "run.json", told)
    return tmp_path


def evaluate(folder, name, *flags):
    given = ["--model_path", folder / name, "--test_file", folder / "test.jsonl", "--task", "generic"]
    given += ["--output_file", folder / name / "e.jsonl", "--max_new_tokens", "3"]
    assert main(["evaluate", *map(str, given), *flags]) == 0


def test_answers_made_in_different_ways_do_not_stand_in_one_table(folder, capsys):
    evaluate(folder, "a")
    evaluate(folder, "b", "--max_new_tokens", "2")
    capsys.readouterr()
    assert main(["report", "--json", str(folder / "a"), str(folder / "b")]) == 2
    error = capsys.readouterr().err
    assert f"with --max_new_tokens 2 ({folder / 'b'}) and 3 ({folder / 'a'}), so" in error
    assert error.count("\n") == 1

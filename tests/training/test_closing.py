"""The end of a run: where everything is, and a command that works."""

from pathlib import Path
from typing import Any

import pytest

from stepjepa.commands import evaluate, train
from stepjepa.parser import Parser
from stepjepa.training.closing import closing_json, closing_rows, next_command

GIVEN = ["--model_name", "m", "--output_dir", "runs/a b"]


def arguments(*flags: str) -> Any:
    parser = Parser(prog="stepjepa train", allow_abbrev=False)
    train.add_arguments(parser)
    return train.parse(parser, [*GIVEN, *flags])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--train_file", "t"], {"test_file": "TEST.jsonl", "task": "auto", "max_new_tokens": 256}),
        (["--train_file", "t", "--eval_file", "e.jsonl"], {"test_file": "e.jsonl"}),
        (
            [
                *("--train_file", "t", "--eval_file", "e", "--eval_generate", "7", "--eval_task", "spider"),
                *("--spider_path", "d", "--missing_databases", "skip", "--eval_max_new_tokens", "11"),
            ],
            {"task": "spider", "spider_path": "d", "missing_databases": "skip", "max_new_tokens": 11},
        ),
        (
            ["--train_file", "t", "--trust_remote_code", "--lora", "--load_in_4bit"],
            {"trust_remote_code": True, "load_in_4bit": True},
        ),
    ],
)
def test_the_next_command_is_one_that_evaluate_takes(flags: list[str], expected: dict[str, Any]) -> None:
    words = next_command(arguments(*flags))
    assert words[:2] == ["stepjepa", "evaluate"]
    parser = Parser(prog="stepjepa evaluate", allow_abbrev=False)
    evaluate.add_arguments(parser)
    parsed = vars(parser.parse_args(words[2:]))
    assert (parsed["model_path"], parsed["output_file"]) == ("runs/a b", str(Path("runs/a b/test.jsonl")))
    assert {name: parsed[name] for name in expected} == expected


RECORD = {
    "status": "finished",
    "results": {"steps": 1, "tokens": 4321.0, "train_seconds": 187.0, "last_log": {"lm_loss": 1.25}, "eval_lm_loss": 2},
}


def test_rows_say_where_everything_is(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    assert closing_rows(tmp_path, RECORD) == [
        ("done", "1 step, 4,321 tokens in 3 min 07 s; LM loss 1.2500, held out 2.0000"),
        ("run folder", f"{tmp_path} (the model, run.json, metrics.jsonl, 1 checkpoint)"),
    ]


def test_json_has_the_command_in_words() -> None:
    found = closing_json(arguments("--train_file", "t"), RECORD)
    assert (found["run_folder"], found["results"]) == ("runs/a b", RECORD["results"])
    assert found["next"][:4] == ["stepjepa", "evaluate", "--model_path", "runs/a b"]

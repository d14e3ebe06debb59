"""``--json``: one document on standard output, everything else on standard error."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_jsonl(
        tmp_path / "sums.jsonl",
        [
            {"messages": [{"role": "user", "content": f"{a}+{a}?"}, {"role": "assistant", "content": f"So\n\n{2 * a}"}]}
            for a in range(7)
        ],
    )
    return tmp_path / "sums.jsonl"


def document(capsys: pytest.CaptureFixture[str], *given: object, code: int = 0) -> tuple[Any, str]:
    """What a command prints with --json, and what goes to standard error."""
    assert main([*map(str, given), "--json"]) == code
    output = capsys.readouterr()
    return json.loads(output.out), output.err


def test_training_evaluation_and_score(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    given = ["train", "--train_file", data, "--eval_file", data, "--model_name", "preset:tiny", "--output_dir", run]
    given += ["--step_jepa", "--max_steps", "1", "--use_cpu", "--no_cache", "--save_strategy", "no"]
    result, message = document(capsys, *given, "--dry_run")
    assert result["steps"] == 1
    assert "dry run: " in message

    result, message = document(capsys, *given)
    assert (result["status"], result["run_folder"], result["results"]["steps"]) == ("finished", str(run), 1)
    assert (result["counts"]["pairs"], result["results"]["eval_lm_loss"] > 0) == (7, True)
    assert "each step: " in message and "step 1/1  eval  LM loss: " in message
    # The last step was evaluated; once is enough.
    assert message.count("eval  LM loss") == 1
    assert "next: " not in message
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert "\njson:" not in (run / "run.yaml").read_text(encoding="utf-8")
    assert 0 < record["launches"][0]["seconds"] < 600
    assert not (tmp_path / "cache" / "stepjepa").exists()

    words = result["next"]
    assert words[0] == "stepjepa"
    result, message = document(capsys, *words[1:], "--max_new_tokens", "3")
    assert (result["n"], result["output_file"]) == (7, str(run / "held-out.jsonl"))
    assert result["scores"].keys() >= {"exact", "prefix", "contains"}
    assert f"next: stepjepa report {run} --output_file {run}/report.html" in message

    output = tmp_path / "said.jsonl"
    write_jsonl(output, [{"index": index, "generated": f"So\n\n{2 * index}"} for index in range(7)])
    given = ["score", "--test_file", data, "--predictions", output, "--output_file", tmp_path / "scored.jsonl"]
    result, message = document(capsys, *given, "--task", "generic")
    assert (result["scores"]["exact"]["mean"], result["summary_file"]) == (1.0, str(tmp_path / "scored.summary.json"))


def test_people_are_told_what_to_type(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "a run"
    given = ["train", "--train_file", data, "--model_name", "preset:tiny", "--output_dir", run, "--regular"]
    given += ["--max_steps", "1", "--use_cpu", "--save_strategy", "no", "--cache_dir", tmp_path / "cache"]
    assert main([*map(str, given)]) == 0
    assert [path.suffix for path in sorted((tmp_path / "cache").iterdir())] == [".arrow", ".json"]
    output = capsys.readouterr()
    assert output.err == ""
    assert "\x1b" not in output.out and "\r" not in output.out
    *_, done, folder, following = output.out.splitlines()
    assert done.startswith("done: 1 step, ")
    assert folder.startswith(f"run folder: {run} (the model, run.json, metrics.jsonl")
    assert following == (
        "next, with your test records in TEST.jsonl: "
        f"stepjepa evaluate --model_path '{run}' --test_file TEST.jsonl --output_file '{run}/test.jsonl'"
    )


def test_verification(data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from stepjepa.inspection import verification

    result, message = document(capsys, "verify", "--step_jepa", "--max_records", "3", "--train_file", data)
    assert result["passed"] and all(check["passed"] for check in result["checks"])
    assert message.count("PASS") == len(result["checks"]) > 3
    total = len(data.read_text(encoding="utf-8").splitlines())
    assert f"3 of {total:,} records looked at, spread over all" in message
    monkeypatch.setattr(verification, "TOLERANCE", -1.0)
    result, message = document(capsys, "verify", "--step_jepa", "--max_records", "3", "--train_file", data, code=1)
    assert [check["name"] for check in result["checks"] if not check["passed"]] == [
        "batch against separate passes",
        "LM loss against transformers",
    ]

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
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def test_training_evaluation_and_score(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    given = ["train", "--train_file", data, "--eval_file", data, "--model_name", "preset:tiny", "--output_dir", run]
    given += ["--step_jepa", "--max_steps", "1", "--use_cpu", "--no_cache", "--save_strategy", "no"]
    found, told = document(capsys, *given, "--dry_run")
    assert found["steps"] == 1
    assert "dry run: " in told

    found, told = document(capsys, *given)
    assert (found["status"], found["run_folder"], found["results"]["steps"]) == ("finished", str(run), 1)
    assert (found["counts"]["pairs"], found["results"]["eval_lm_loss"] > 0) == (7, True)
    assert "each step: " in told and "step 1/1  eval  LM loss: " in told
    # The last step was evaluated; once is enough.
    assert told.count("eval  LM loss") == 1
    assert "next: " not in told
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert "\njson:" not in (run / "run.yaml").read_text(encoding="utf-8")
    assert 0 < record["launches"][0]["seconds"] < 600
    assert not (tmp_path / "cache" / "stepjepa").exists()

    words = found["next"]
    assert words[0] == "stepjepa"
    found, told = document(capsys, *words[1:], "--max_new_tokens", "3")
    assert (found["n"], found["output_file"]) == (7, str(run / "test.jsonl"))
    assert found["scores"].keys() >= {"exact", "prefix", "contains"}
    assert f"next: stepjepa report {run} --output_file {run}/report.html" in told

    said = tmp_path / "said.jsonl"
    write_jsonl(said, [{"index": index, "generated": f"So\n\n{2 * index}"} for index in range(7)])
    given = ["score", "--test_file", data, "--predictions", said, "--output_file", tmp_path / "scored.jsonl"]
    found, told = document(capsys, *given, "--task", "generic")
    assert (found["scores"]["exact"]["mean"], found["summary_file"]) == (1.0, str(tmp_path / "scored.summary.json"))


def test_people_are_told_what_to_type(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "a run"
    given = ["train", "--train_file", data, "--model_name", "preset:tiny", "--output_dir", run, "--regular"]
    given += ["--max_steps", "1", "--use_cpu", "--save_strategy", "no", "--cache_dir", tmp_path / "cache"]
    assert main([*map(str, given)]) == 0
    assert [path.suffix for path in sorted((tmp_path / "cache").iterdir())] == [".arrow", ".json"]
    said = capsys.readouterr()
    assert said.err == ""
    assert "\x1b" not in said.out and "\r" not in said.out
    *_, done, folder, following = said.out.splitlines()
    assert done.startswith("done: 1 step, ")
    assert folder.startswith(f"run folder: {run} (the model, run.json, metrics.jsonl")
    assert following == (
        "next, with your test records in TEST.jsonl: "
        f"stepjepa evaluate --model_path '{run}' --test_file TEST.jsonl --output_file '{run}/test.jsonl'"
    )


def test_verification(data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from stepjepa.inspection import verification

    found, told = document(capsys, "verify", "--step_jepa", "--max_records", "3", "--train_file", data)
    assert found["passed"] and all(check["passed"] for check in found["checks"])
    assert told.count("PASS") == len(found["checks"]) > 3
    total = len(data.read_text(encoding="utf-8").splitlines())
    assert f"3 of {total:,} records looked at, spread over all" in told
    monkeypatch.setattr(verification, "TOLERANCE", -1.0)
    found, told = document(capsys, "verify", "--step_jepa", "--max_records", "3", "--train_file", data, code=1)
    assert [check["name"] for check in found["checks"] if not check["passed"]] == [
        "batch against separate passes",
        "LM loss against transformers",
    ]

"""What must not change a result does not, on the real data: exit code 0 and other numbers would show here.

One optimizer step on the same records, whatever their order, split into micro-batches and processes, length of rows and
sharing of prefixes. Left out by name are the terms that compare the pairs of a micro-batch with each other (InfoNCE,
SIGReg, variance and covariance), and STP's random spans, which are drawn by a record's place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepjepa.cli import main
from stepjepa.files import write_jsonl

pytestmark = pytest.mark.slow

RECORDS = 16
OBJECTIVES = {
    "regular": ["--regular"],
    "separate": ["--layout", "separate", "--jepa_loss_type", "cosine"],
    "branched": ["--layout", "branched", "--jepa_loss_type", "mse", "--predictors", "2"],
    "steps": ["--step_jepa", "--step_separator", "line", "--pairs", "all", "--jepa_loss_type", "l2"],
    "inplace": ["--step_jepa", "--step_separator", "line", "--layout", "inplace", "--jepa_loss_type", "cosine"],
}
FILES = {"steps": "gsm8k_train.jsonl", "inplace": "gsm8k_train.jsonl"}
WAYS: dict[str, list[str]] = {
    "one micro-batch": ["--batch_size", "16", "--grad_accum", "1"],
    "sixteen micro-batches": ["--batch_size", "1", "--grad_accum", "16"],
    "short rows": ["--row_length", "128"],
    "long rows": ["--row_length", "2048"],
    "nothing shared": ["--share_prefixes", "false"],
    "by rows": ["--encoding", "rows"],
}


def stepjepa(*command: Any) -> None:
    assert main([str(each) for each in command]) == 0


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def model(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preset that was trained a little on both files, so that its answers are not all alike."""
    folder = tmp_path_factory.mktemp("model")
    rows = [row for name in ("synth", "gsm8k") for row in read(shared_data / "llm_jepa" / f"{name}_train.jsonl")[:300]]
    write_jsonl(folder / "both.jsonl", rows)
    flags = "--model_name preset:tiny --use_cpu --regular --max_steps 40 --learning_rate 2e-3 --over_length skip"
    stepjepa("train", "--train_file", folder / "both.jsonl", "--output_dir", folder / "run", *flags.split())
    return folder / "run"


@pytest.fixture(scope="module")
def base(model: Path, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``base(objective)``: the records of an objective, and what one step on them gives in two micro-batches."""
    folder, found = tmp_path_factory.mktemp("base"), {}

    def make(objective: str) -> tuple[Path, list[str], dict[str, float]]:
        if objective not in found:
            rows = read(shared_data / "llm_jepa" / FILES.get(objective, "synth_train.jsonl"))
            write_jsonl(folder / f"{objective}.jsonl", [row for row in rows if len(str(row)) < 1200][:RECORDS])
            flags = ["--model_name", str(model), *OBJECTIVES[objective], "--max_steps", "1", "--use_cpu", "--no_cache"]
            flags += ["--max_length", "1024", "--logging_steps", "1", "--save_strategy", "no", "--dtype", "float32"]
            data = folder / f"{objective}.jsonl"
            found[objective] = (data, flags, step(data, folder / objective, *flags, "--batch_size", "8"))
        return found[objective]

    return make


def step(data: Path, output: Path, *flags: str) -> dict[str, float]:
    """The loss, its parts and the norm of the gradient in the first step."""
    accumulate = [] if "--grad_accum" in flags else ["--grad_accum", "2"]
    stepjepa("train", "--train_file", data, "--output_dir", output, *flags, *accumulate)
    return figures(output)


def figures(output: Path) -> dict[str, float]:
    first = read(output / "metrics.jsonl")[0]
    return {key: value for key, value in first.items() if key in ("loss", "grad_norm") or key.endswith("_loss")}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_the_same(objective: str, way: str, base: Any, tmp_path: Path) -> None:
    data, flags, expected = base(objective)
    if way == "by rows" and objective == "inplace":
        pytest.skip("isolated steps within a row need a tree")
    more = WAYS[way] if "--batch_size" in WAYS[way] else [*WAYS[way], "--batch_size", "8"]
    assert step(data, tmp_path / "run", *flags, *more) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_order_of_records_does_not_matter(objective: str, base: Any, tmp_path: Path) -> None:
    data, flags, expected = base(objective)
    write_jsonl(tmp_path / "other.jsonl", read(data)[::-1])
    found = step(tmp_path / "other.jsonl", tmp_path / "run", *flags, "--batch_size", "8")
    assert found == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_processes_take_the_same_step(objective: str, base: Any, tmp_path: Path) -> None:
    data, flags, expected = base(objective)
    # On a machine without an accelerator, --use_cpu is not needed.
    flags = [each for each in flags if each != "--use_cpu"]
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29713", "-m", "stepjepa"]
    train = ["train", "--train_file", str(data), "--output_dir", str(tmp_path / "run"), *flags, "--batch_size", "4"]
    subprocess.run(
        [sys.executable, *torchrun, *train, "--grad_accum", "2"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
    )
    assert figures(tmp_path / "run") == pytest.approx(expected, rel=2e-5)


def verdicts(model: Path, data: Path, output: Path, *flags: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    stepjepa(
        *("evaluate", "--model_path", model, "--test_file", data, "--output_file", output / "a.jsonl"),
        *("--max_new_tokens", 40, "--dtype", "float32", *flags),
    )
    summary = json.loads((output / "a.summary.json").read_text(encoding="utf-8"))
    return read(output / "a.jsonl"), summary


def without_place(rows: list[dict[str, Any]]) -> list[str]:
    """What was answered and judged, as text, since numbers may differ in their last digits."""
    return [json.dumps({key: row[key] for key in row if isinstance(row[key], str | bool)}) for row in rows]


def test_an_evaluation_judges_each_record_by_itself(model: Path, shared_data: Path, tmp_path: Path) -> None:
    rows = read(shared_data / "llm_jepa" / "synth_test.jsonl")[:13]
    for name, some in (("as", rows), ("reversed", rows[::-1]), ("twice", [row for row in rows for _ in range(2)])):
        write_jsonl(tmp_path / f"{name}.jsonl", some)
    expected, summary = verdicts(model, tmp_path / "as.jsonl", tmp_path / "1", "--batch_size", "5")
    answers = without_place(expected)
    assert len(set(answers)) > 3
    assert without_place(verdicts(model, tmp_path / "as.jsonl", tmp_path / "2", "--batch_size", "1")[0]) == answers
    other, _ = verdicts(model, tmp_path / "reversed.jsonl", tmp_path / "3", "--batch_size", "5")
    assert without_place(other) == answers[::-1]
    double, counted = verdicts(model, tmp_path / "twice.jsonl", tmp_path / "4", "--batch_size", "5")
    assert without_place(double[::2]) == without_place(double[1::2]) == answers
    assert counted["n"] == 2 * summary["n"]
    scores = {name: score for name, score in summary["scores"].items() if isinstance(score, float)}
    assert {name: counted["scores"][name] for name in scores} == pytest.approx(scores)

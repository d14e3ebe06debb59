"""What trackers receive: TensorBoard by default, others where they are installed and asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from stepjepa.cli import main
from stepjepa.files import write_jsonl

CURVES = ("loss", "lm_loss", "jepa_loss", "matched_similarity", "shuffled_similarity", "source_rank", "target_rank")


def train(tmp_path: Path, run: Path, *flags: str) -> int:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    data = ["--train_file", str(tmp_path / "data.jsonl"), "--eval_file", str(tmp_path / "data.jsonl")]
    fixed = ["--model_name", "preset:tiny", "--use_cpu", "--step_jepa", "--logging_steps", "1", "--eval_steps", "2"]
    return main(["train", *data, *fixed, "--output_dir", str(run), *flags])


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag to step to value, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    shown: dict[str, dict[int, float]] = {}
    for tag in found.Tags()["scalars"]:
        events = found.Scalars(tag)
        once = len({event.step for event in events}) == len(events)
        assert once or tag.partition("/")[2] not in CURVES, f"{tag} has a step twice"
        shown[tag] = {event.step: event.value for event in events}
    return shown


def test_the_curves_are_those_of_the_metrics(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(tmp_path, run, "--max_steps", "4", "--save_steps", "2") == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    whole = scalars(run / "tensorboard")
    for name in CURVES:
        for tag, column in ((f"train/{name}", name), (f"eval/{name}", f"eval_{name}")):
            logged = {line["step"]: line[column] for line in lines if column in line}
            assert whole[tag] == pytest.approx(logged, rel=1e-6), tag


def test_a_tracker_that_can_not_be_used_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, tmp_path / "run", "--max_steps", "1", "--report_to", "paper") == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("stepjepa train: error: ")
    assert "paper is not supported" in told
    assert not (tmp_path / "run").exists()

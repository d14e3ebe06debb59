"""TensorBoard, the tracker by default, receives what ``metrics.jsonl`` holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main

CURVES = ("loss", "lm_loss", "jepa_loss", "matched_similarity", "shuffled_similarity", "source_rank", "target_rank")


def test_the_curves_are_those_of_the_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    flags = f"--train_file {tmp_path}/data.jsonl --eval_file {tmp_path}/data.jsonl --output_dir {tmp_path}/run"
    flags += " --model_name preset:tiny --use_cpu --step_jepa --logging_steps 1 --eval_steps 2 --max_steps 4"
    assert main(["train", *flags.split()]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    result = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    result.Reload()
    for name in CURVES:
        for tag, column in ((f"train/{name}", name), (f"eval/{name}", f"eval_{name}")):
            logged = {line["step"]: line[column] for line in lines if column in line}
            assert {each.step: each.value for each in result.Scalars(tag)} == pytest.approx(logged, rel=1e-6), tag

"""Invariant 5: accumulation and processes change nothing. Invariant 2 over whole runs: ``lbd=0`` is regular."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import tiny
from stepjepa.config.jepa import JepaConfig
from stepjepa.training.trainer import JepaTrainer

MODES = {
    "llm-jepa": {"mode": "llm-jepa", "lbd": 0.7},
    "step-jepa all": {"mode": "step-jepa", "pairs": "all", "lbd": 0.7},
    "step-jepa l2, half of the steps": {"mode": "step-jepa", "jepa_loss_type": "l2", "lbd": 0.7, "jepa_ratio": 0.5},
    "step-jepa in place": {"mode": "step-jepa", "layout": "inplace", "lbd": 0.7},
}


def trained(
    tokenizer: Any, folder: Path, config: dict[str, Any], batch: int, accumulate: int, **changes: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights and log lines of a short run over 19 records, the last step of which is not full."""
    records = (tiny.records() * 19)[:19]
    arguments = TrainingArguments(
        tempfile.mkdtemp(dir=folder),  # each run has a folder of its own
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        num_train_epochs=2,
        learning_rate=0.05,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **changes,
    )
    trainer = JepaTrainer(
        tiny.make_model("llama", seed=3),
        arguments,
        JepaConfig(**config),
        train_dataset=records,
        processing_class=copy.deepcopy(tokenizer),
    )
    trainer.train()
    return trainer.model.state_dict(), [line for line in trainer.state.log_history if "lm_loss" in line]


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float = 2e-6) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert (value - second[name]).abs().max() <= tolerance, name


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
def test_accumulation_changes_nothing(mode: str, trained_tokenizer: Any, tmp_path: Path) -> None:
    whole, logs = trained(trained_tokenizer, tmp_path, MODES[mode], batch=8, accumulate=1)
    for batch, accumulate in ((1, 8), (2, 4)):
        parts, same_logs = trained(trained_tokenizer, tmp_path, MODES[mode], batch=batch, accumulate=accumulate)
        assert_close(whole, parts)
        for line, same in zip(logs, same_logs, strict=True):
            for name in ("loss", "lm_loss"):
                assert line[name] == pytest.approx(same[name], rel=1e-5), name
            # Absent where the step ran without views.
            assert ("jepa_loss" in line) == ("jepa_loss" in same)
            assert line.get("jepa_loss", 0.0) == pytest.approx(same.get("jepa_loss", 0.0), rel=1e-5)


def test_the_runs_compared_above_do_train(trained_tokenizer: Any, tmp_path: Path) -> None:
    config = {"mode": "step-jepa", "lbd": 0.7, "gamma": 1.3}
    weights, logs = trained(trained_tokenizer, tmp_path, config, batch=8, accumulate=1)
    untrained = tiny.make_model("llama", seed=3).state_dict()
    assert max(float((weights[name] - untrained[name]).abs().max()) for name in weights) > 1e-2
    # Three steps make an epoch; the second sees the same records again.
    assert len(logs) == 6
    assert sum(line["loss"] for line in logs[3:]) < sum(line["loss"] for line in logs[:3])
    for line in logs:
        assert line["loss"] == pytest.approx(1.3 * line["lm_loss"] + 0.7 * line["jepa_loss"], rel=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"layout": "separate", "lbd": 0.0}, 2e-6),
        ({"layout": "branched", "lbd": 0.0}, 2e-6),
        ({"jepa_ratio": 0.0}, 0.0),
    ],
)
def test_without_weight_or_views_it_is_regular_step_for_step(
    options: dict[str, Any], tolerance: float, trained_tokenizer: Any, tmp_path: Path
) -> None:
    regular, regular_logs = trained(trained_tokenizer, tmp_path, {"mode": "regular"}, 4, 2)
    other, other_logs = trained(trained_tokenizer, tmp_path, {"mode": "llm-jepa", **options}, 4, 2)
    assert_close(regular, other, tolerance)
    for line, same in zip(regular_logs, other_logs, strict=True):
        assert line["loss"] == pytest.approx(same["loss"], rel=1e-5)
        # Steps without views cost what regular ones cost.
        assert tolerance or line["num_tokens"] == same["num_tokens"]

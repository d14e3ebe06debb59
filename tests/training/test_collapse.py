"""A collapse is warned of once in a run, with what helps, however often the run is resumed."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import tiny
from stepjepa.config.jepa import JepaConfig
from stepjepa.objectives.monitors import (
    COLLAPSE_PAIRS,
    COLLAPSE_RANK,
    COLLAPSE_REMEDIES,
    COLLAPSE_SIMILARITY,
    COMPARED_REMEDIES,
    collapse_remedies,
    describe_collapse,
)
from stepjepa.training.trainer import JepaTrainer


def ranks(source: float, target: float, pairs: int = COLLAPSE_PAIRS) -> dict[str, float]:
    return {"source_rank": source, "target_rank": target, "rank_pairs": pairs}


@pytest.mark.parametrize(
    ("logs", "said"),
    [
        ({"shuffled_similarity": COLLAPSE_SIMILARITY}, "cosine 0.990"),
        ({"shuffled_similarity": COLLAPSE_SIMILARITY - 0.01}, None),
        ({"shuffled_similarity": math.nan, **ranks(math.nan, 7.0)}, None),
        (ranks(COLLAPSE_RANK, 7.0), "16 source embeddings"),
        (ranks(2.0, 7.0), None),
        (ranks(7.0, 1.2, 31), "31 target embeddings have effective rank 1.20"),
        (ranks(1.0, 1.0, COLLAPSE_PAIRS - 1), None),
        ({"loss": 0.5}, None),
    ],
)
def test_what_counts_as_a_collapse(logs: dict[str, float], said: str | None) -> None:
    result = describe_collapse(logs)
    assert (result is None) == (said is None) and (said or "") in (result or "")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "stepjepa.training.callbacks"]


class _Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= 2


def test_once_in_a_run_that_is_resumed(tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(folder: Path, checkpoint: str | None = None, *callbacks: TrainerCallback, loss: Any = "cosine") -> None:
        model = tiny.make_model("llama")
        # Whatever is read, it is read as one and the same.
        model.get_decoder().norm.register_forward_hook(lambda _module, _args, output: output * 0 + 1)
        trainer = JepaTrainer(
            model,
            tiny.arguments(folder, max_steps=4, save_strategy="steps", save_steps=2, per_device_train_batch_size=3),
            JepaConfig(jepa_loss_type=loss),
            train_dataset=tiny.records() * 3,
            processing_class=tiny_tokenizer,
            callbacks=callbacks,
        )
        trainer.train(resume_from_checkpoint=checkpoint)

    with caplog.at_level(logging.WARNING):
        run(tmp_path / "a", None, _Stop())
        (printed,) = warnings(caplog)
        assert printed.startswith("step 1: unrelated pairs have cosine 1.000: ")
        assert printed.endswith(COLLAPSE_REMEDIES)
        assert "`jepa_loss_type infonce`" in printed
        run(tmp_path / "a", str(tmp_path / "a" / "checkpoint-2"))
        assert len(warnings(caplog)) == 1
        # Another run is warned of again.
        run(tmp_path / "b")
        assert len(warnings(caplog)) == 2
        # An objective that compares pairs is not told to do so.
        run(tmp_path / "c", loss="infonce")
        assert warnings(caplog)[-1].endswith(COMPARED_REMEDIES)


def test_no_remedy_is_in_use_already() -> None:
    assert "infonce" in collapse_remedies(False) and "sigreg" in collapse_remedies(False)
    assert not {"infonce", "sigreg", "variance"} & {*collapse_remedies(True).replace("`", "").split()}

"""Losses and gradients that are not finite: named, kept, and never stepped upon."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from harmful import BAD, made, same, trainer_of, weights
from stepjepa.batch.collate import Batch, Members
from stepjepa.batch.stream import RecordStream
from stepjepa.errors import UserError
from stepjepa.training import nonfinite
from stepjepa.training.nonfinite import MOST_IN_A_ROW, MicroBatch, describe, in_losses, keep
from stepjepa.training.trainer import JepaTrainer


@pytest.mark.parametrize(("kind", "said"), [("loss", "LM loss is nan"), ("gradient", "the gradient of LM loss")])
def test_stop_names_step_records_and_part_and_changes_no_weight(
    kind: str, said: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    # Steps of two micro-batches of two records, in the order of the file but sorted within the step.
    trainer = trainer_of(
        tiny_tokenizer,
        tmp_path,
        made(12, [7]),
        kind,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=1,
    )
    with pytest.raises(UserError) as caught:
        trainer.train()
    message = str(caught.value)
    assert message.startswith(f"step 2: {said}")
    assert "alignment loss" in message
    assert "memory.jsonl:7" in message
    assert message.count("memory.jsonl:") == 2
    assert "--on_nonfinite skip" in message
    assert "checkpoint-1 is as it was" in message
    assert "\n" not in message
    assert trainer.state.global_step == 1
    assert same(load_file(tmp_path / "checkpoint-1" / "model.safetensors"), weights(trainer))
    (kept,) = (tmp_path / "nonfinite").glob("*.json")
    found = json.loads(kept.read_text())
    assert (found["step"], found["by_gradient"], found["file"]) == (2, kind == "gradient", "memory.jsonl")
    assert 7 in [record["line"] for record in found["records"]]
    assert "lm_loss" in found["not_finite"]
    tensors = load_file(kept.with_suffix(".safetensors"))
    # Of the text, the source and the target of each record; beginnings of others have no row.
    assert tensors["input_ids"].shape[0] >= 2
    assert {"label_ids", "label_row", "head_index", "source_index", "target_index"} <= tensors.keys()
    (token,) = tiny_tokenizer.encode(BAD, add_special_tokens=False)
    assert (tensors["input_ids"] == token).any()


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd", "adafactor"])
def test_skip_is_a_run_without_the_step(kind: str, optim: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Weights are those of a run on the other records alone, at a rate that depends on no number of steps."""
    fixed = {"optim": optim, "lr_scheduler_type": "constant", "weight_decay": 0.1, "gradient_accumulation_steps": 2}
    jepa = {"target_grad": "ema", "ema_decay": 0.5} if optim == "sgd" else {}
    skipping = trainer_of(
        tiny_tokenizer, tmp_path / "a", made(12, [6]), kind, jepa=jepa, on_nonfinite="skip", logging_steps=3, **fixed
    )
    skipping.train()
    rest = [record for record in made(12, []) if not 5 <= record.line <= 8]
    without = trainer_of(
        tiny_tokenizer,
        tmp_path / "b",
        rest,
        kind,
        jepa=jepa,
        max_steps=2,
        logging_steps=2,
        **fixed,
    )
    without.train()
    assert skipping.guard.skipped == 1
    assert same(weights(skipping), weights(without))
    if jepa:
        assert skipping.ema is not None
        assert without.ema is not None
        assert same(skipping.ema._average, without.ema._average)
    (line,), (other,) = ([x for x in t.state.log_history if "learning_rate" in x] for t in (skipping, without))
    assert line["nonfinite_steps"] == 1
    assert "grad_norm" in line
    for name in ("loss", "lm_loss", "jepa_loss", "num_tokens", "matched_similarity", "source_rank"):
        assert line[name] == pytest.approx(other[name], rel=1e-6), name
    assert "nonfinite_steps" not in other


def test_a_window_of_nothing_but_skipped_steps_has_no_loss(tiny_tokenizer: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_tokenizer, tmp_path, made(6, [3]), "loss", on_nonfinite="skip")
    trainer.train()
    lines = [line for line in trainer.state.log_history if "learning_rate" in line]
    assert ["loss" in line for line in lines] == [True, False, True]
    assert [line.get("nonfinite_steps") for line in lines] == [None, 1, 1]
    assert all(math.isfinite(value) for line in trainer.state.log_history for value in line.values())


def test_skipping_is_bounded_and_said(tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    count = 2 * (MOST_IN_A_ROW + 2)
    trainer = trainer_of(
        tiny_tokenizer, tmp_path, made(count, range(3, count + 1)), "loss", on_nonfinite="skip", max_steps=count
    )
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match=f"after {MOST_IN_A_ROW} steps in a row"):
        trainer.train()
    assert trainer.guard.skipped == MOST_IN_A_ROW
    assert trainer.state.global_step == 1 + MOST_IN_A_ROW
    said = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert len(said) == MOST_IN_A_ROW
    assert "memory.jsonl:3" in said[0]


def test_good_steps_between_start_the_count_anew(tiny_tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("stepjepa.training.guard.MOST_IN_A_ROW", 1)
    trainer = trainer_of(tiny_tokenizer, tmp_path, made(12, [1, 5, 9]), "loss", on_nonfinite="skip", max_steps=6)
    trainer.train()
    assert trainer.guard.skipped == 3


@pytest.mark.parametrize("streamed", [False, True])
def test_resumed_it_goes_on_counting(streamed: bool, tiny_tokenizer: Any, tmp_path: Path) -> None:
    records = made(12, [3, 4, 5, 9])

    def run(folder: Path, steps: int, checkpoint: str | None = None) -> JepaTrainer:
        trainer = trainer_of(
            tiny_tokenizer,
            folder,
            RecordStream(records) if streamed else records,
            "loss",
            on_nonfinite="skip",
            max_steps=6,
            save_strategy="steps",
            save_steps=3,
        )
        if steps < 6:
            trainer.add_callback(_StopAt(steps))
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "part", 3)
    again = run(tmp_path / "part", 6, str(tmp_path / "part" / "checkpoint-3"))
    assert whole.guard.skipped == again.guard.skipped == 3
    assert same(weights(whole), weights(again))


def _StopAt(steps: int) -> Any:  # noqa: N802
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= steps

    return Stop()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    batch = Batch(input_ids=torch.arange(7)[None], members=Members((5,), (7,)))
    micro = MicroBatch(batch, parts={"lm_loss": torch.tensor(math.inf), "jepa_loss": torch.tensor(0.5)})
    (finding,) = in_losses(2, [micro])
    assert finding.values == {"lm_loss": math.inf}
    paths = [keep(tmp_path, 3, finding, micro, source="a.jsonl", about={}) for _ in range(3)]
    names = [path.name for path in paths if path]
    assert names == [f"step-3-process-2-batch-0{end}.safetensors" for end in ("", "-2", "-3")]
    assert len(list((tmp_path / "nonfinite").iterdir())) == 6
    for _ in range(nonfinite.MOST_KEPT):
        last = keep(tmp_path, 3, finding, micro, source="a.jsonl", about={})
    assert last is None
    assert len(list((tmp_path / "nonfinite").glob("*.json"))) == nonfinite.MOST_KEPT
    assert describe([finding], "a.jsonl") == "LM loss is inf, with a.jsonl:5"


def test_a_batch_that_can_not_be_kept_is_no_other_error(tiny_tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "nonfinite").write_text("in the way")
    trainer = trainer_of(tiny_tokenizer, tmp_path, made(4, [1]), "loss")
    with pytest.raises(UserError, match=r"step 1: LM loss is nan.*could not be kept"):
        trainer.train()


def test_weights_that_are_not_finite_are_no_fault_of_records(tiny_tokenizer: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_tokenizer, tmp_path, made(4, []), "loss", on_nonfinite="skip")
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight[5:200] = math.nan
    with pytest.raises(
        UserError, match=r"the weights are not, either \(model.embed_tokens.weight\), so it is no fault"
    ):
        trainer.train()


def test_only_the_scaler_of_fp16_knows_its_overflows(tiny_tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A gradient beside finite losses is the scaler's business until it persists; a loss is not."""
    monkeypatch.setattr("stepjepa.training.guard.MOST_OVERFLOWS", 3)
    trainer = trainer_of(tiny_tokenizer, tmp_path, made(4, []), "loss")
    trainer.accelerator.scaler = SimpleNamespace(get_scale=lambda: 1.0)
    trainer.create_optimizer_and_scheduler(3)
    for _ in range(2):
        trainer.guard._decide(math.inf)
    assert trainer.guard._overflows == 2
    assert trainer.guard.skipped == 0
    batch = trainer.data_collator([trainer.prepared.dataset[0]])  # type: ignore[union-attr]
    parts = {"lm_loss": torch.tensor(1.0), "jepa_loss": torch.tensor(0.5)}
    trainer.guard.micros = [MicroBatch(batch, trainer.objective.counts([batch]), parts)]
    with pytest.raises(UserError, match=r"memory.jsonl:1, 3 times in a row at ever smaller scales of fp16"):
        trainer.guard._decide(math.inf)
    trainer.guard._overflows = 0
    trainer.guard.micros[0].parts["jepa_loss"] = torch.tensor(math.nan)
    with pytest.raises(UserError, match=r"step 1: alignment loss is nan, with memory\.jsonl:1;"):
        trainer.guard._decide(math.nan)


def test_a_scaler_finds_its_scale_without_a_word(
    tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's own, on the CPU: steps that it leaves out are no errors, and those that have one stay ours."""

    def run(bad: Sequence[int], scale: float, folder: Path) -> JepaTrainer:
        trainer = trainer_of(tiny_tokenizer, folder, made(16, bad), "loss", on_nonfinite="skip", max_steps=8)
        accelerator, scaler = trainer.accelerator, torch.amp.GradScaler("cpu", init_scale=scale)
        accelerator.scaler = scaler

        def unscale(*_: Any) -> None:
            for optimizer in accelerator._optimizers:
                scaler.unscale_(optimizer.optimizer)

        accelerator.unscale_gradients = unscale
        trainer.train()
        return trainer

    with caplog.at_level(logging.WARNING):
        first = run([], 2.0**127, tmp_path / "a")
        assert first.guard.skipped == 0
        assert 1 <= round(127 - math.log2(first.accelerator.scaler.get_scale())) < 8
        assert not [record for record in caplog.records if record.name.startswith("stepjepa")]
        second = run([3], 2.0**7, tmp_path / "b")
    assert second.guard.skipped == 1
    assert second.accelerator.scaler.get_scale() == 2.0**6
    for trainer in (first, second):
        assert all(bool(torch.isfinite(value).all()) for value in weights(trainer).values())


def test_a_finite_gradient_of_an_infinite_loss_is_found(tiny_tokenizer: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_tokenizer, tmp_path, made(4, []), "loss")
    value = torch.tensor(2.0, requires_grad=True)
    for added, wanted in ((0.0, 3.0), (math.inf, math.nan)):
        value.grad = None
        loss = trainer.guard.spoil(3 * value + added, {})
        loss.backward()
        assert value.grad is not None
        assert value.grad.item() == pytest.approx(wanted, nan_ok=True)
    assert trainer.guard.spoil(torch.tensor(0.1), {}).item() == torch.tensor(0.1).item()


@pytest.mark.parametrize("wrong", ["stop it", "error"])
def test_settings(wrong: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_nonfinite: expected one of stop, skip, got"):
        trainer_of(tiny_tokenizer, tmp_path, made(4, []), "loss", on_nonfinite=wrong)


def test_the_device_is_asked_once_a_step(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Trainer's own filter waits for it in every micro-batch."""
    trainer = trainer_of(tiny_tokenizer, tmp_path, made(8, []), "loss", gradient_accumulation_steps=4, max_steps=1)
    assert not trainer.args.logging_nan_inf_filter
    asked: list[str] = []
    inside = False

    def watch(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def wrapped(self: Tensor, *args: Any) -> Any:
            if inside and not self.requires_grad and self.is_floating_point():
                asked.append(name)
            return original(self, *args)

        return wrapped

    compute, decide = trainer.compute_loss, trainer.guard.on_pre_optimizer_step
    with pytest.MonkeyPatch.context() as patch:
        for name in ("__bool__", "__float__", "item", "tolist"):
            patch.setattr(Tensor, name, watch(name))

        def computing(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            inside = True
            return compute(*args, **kwargs)

        def deciding(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            found = decide(*args, **kwargs)
            inside = False
            return found

        patch.setattr(trainer, "compute_loss", computing)
        patch.setattr(trainer.guard, "on_pre_optimizer_step", deciding)
        trainer.train()
    assert asked == ["__float__"]

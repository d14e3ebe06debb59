"""Held-out records that a ``JepaTrainer`` is passed: the same for ``evaluate`` and for loaders of micro-batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa import JepaConfig, JepaTrainer
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.store.record import record_of

ROWS = [{"messages": list(record.messages)} for record in tiny.records() * 2]
HELD_OUT = ROWS[:5]


def make_trainer(folder: Path, tokenizer: Any, held_out: Any = HELD_OUT) -> JepaTrainer:
    return JepaTrainer(
        tiny.make_model("llama", seed=3),
        tiny.arguments(folder, per_device_eval_batch_size=3),
        JepaConfig(mode="step-jepa"),
        train_dataset=ROWS,
        eval_dataset=held_out,
        processing_class=copy.deepcopy(tokenizer),
    )


def loss_of(trainer: JepaTrainer, loader: Any) -> float:
    """The LM loss over all micro-batches of a loader."""
    total, count = 0.0, 0
    for batch in loader:
        assert batch.input_ids.device == trainer.args.device
        losses = trainer.compute_loss(trainer.model, batch, return_outputs=True)[1]
        total, count = total + float(losses.sums["lm_loss"].detach()), count + len(batch.label_ids)
    return total / count


def test_loaders_take_what_evaluate_takes(trained_tokenizer: Any, tmp_path: Path) -> None:
    """A list of rows ended in an AttributeError, records as tokens in a TypeError."""
    trainer = make_trainer(tmp_path / "run", trained_tokenizer)
    write_jsonl(tmp_path / "rows.jsonl", HELD_OUT)
    wanted = trainer.evaluate()["eval_lm_loss"]
    forms: list[Any] = [None, HELD_OUT, tmp_path / "rows.jsonl", {"some": HELD_OUT}]
    forms += [trainer.eval_dataset, trainer.held_out, *trainer.held_out.values()]
    for form in forms:
        found = trainer.evaluate(form)
        assert found.get("eval_lm_loss", found.get("eval_some_lm_loss")) == pytest.approx(wanted)
        loader = trainer.get_eval_dataloader(form)
        assert (len(loader), trainer.num_examples(loader)) == (2, 5)
        assert loss_of(trainer, loader) == pytest.approx(wanted)
        if form is not None:
            assert loss_of(trainer, trainer.get_test_dataloader(form)) == pytest.approx(wanted)
    # Data that the trainer has as tokens were refused as wrong records.
    assert trainer.evaluate(trainer.train_dataset)["eval_lm_loss"] == pytest.approx(
        loss_of(trainer, trainer.get_eval_dataloader(ROWS))
    )


def test_one_of_several_sets_is_named(trained_tokenizer: Any, tmp_path: Path) -> None:
    """``evaluate`` asked the hub for a data set of that name; a loader of all sets was a KeyError."""
    trainer = make_trainer(tmp_path, trained_tokenizer, {"easy": ROWS[:2], "hard": ROWS[2:5]})
    wanted = trainer.evaluate()["eval_hard_lm_loss"]
    assert trainer.evaluate("hard")["eval_lm_loss"] == pytest.approx(wanted)
    assert trainer.evaluate(trainer.eval_dataset["hard"])["eval_lm_loss"] == pytest.approx(wanted)
    assert loss_of(trainer, trainer.get_eval_dataloader("hard")) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="expected one set of records, got the sets easy, hard; pass one"):
        trainer.get_eval_dataloader()


def test_records_can_be_assigned(trained_tokenizer: Any, tmp_path: Path) -> None:
    """``evaluate`` measured the constructor's records whatever was assigned, and training failed behind its record."""
    trainer = make_trainer(tmp_path, trained_tokenizer)
    other = trainer.evaluate(ROWS[2:4])["eval_lm_loss"]
    assert other != pytest.approx(trainer.evaluate()["eval_lm_loss"])
    trainer.eval_dataset = ROWS[2:4]
    assert trainer.evaluate()["eval_lm_loss"] == pytest.approx(other) == trainer.evaluated[0]["eval_lm_loss"]
    assert loss_of(trainer, trainer.get_eval_dataloader()) == pytest.approx(other)
    trainer.eval_dataset = {"two": trainer.eval_dataset, "five": HELD_OUT}
    assert trainer.evaluate()["eval_two_lm_loss"] == pytest.approx(other)
    file = tmp_path / "rows.jsonl"
    write_jsonl(file, ROWS[2:4])
    trainer.eval_dataset = str(file)
    assert trainer.evaluate()["eval_lm_loss"] == pytest.approx(other)
    trainer.args.max_steps = 1
    trainer.train()
    record = record_of(tmp_path)
    source = record.data["eval"] if record else None
    assert source is not None and source.file == file.name
    # The losses above were computed outside of training, and were added to the first line of its logs.
    assert trainer.state.log_history[-2]["lm_loss"] == pytest.approx(trainer.evaluate(ROWS)["eval_lm_loss"], rel=0.2)
    trainer.eval_dataset = None
    with pytest.raises(ValueError, match="expected an eval_dataset, got none"):
        trainer.evaluate()
    with pytest.raises(UserError, match="messages"):
        trainer.eval_dataset = [{"text": 3}]
    trainer.train_dataset = trainer.train_dataset
    with pytest.raises(ValueError, match="train_dataset: a run trains the records that its JepaTrainer was made with"):
        trainer.train_dataset = ROWS


def test_loaders_have_the_workers_of_the_training(trained_tokenizer: Any, tmp_path: Path) -> None:
    """Worker processes that are to be spawned, since forked ones hang, were forked all the same."""
    trainer = make_trainer(tmp_path, trained_tokenizer)
    assert trainer.get_eval_dataloader().multiprocessing_context is None
    args = trainer.args
    args.dataloader_num_workers, args.dataloader_prefetch_factor = 1, 3
    args.dataloader_multiprocessing_context = "spawn"
    loader = trainer.get_eval_dataloader()
    context = loader.multiprocessing_context.get_start_method()
    assert (loader.num_workers, loader.prefetch_factor, context) == (1, 3, "spawn")


@pytest.mark.slow
def test_workers_that_are_spawned_measure_the_same(trained_tokenizer: Any, tmp_path: Path) -> None:
    args = (trainer := make_trainer(tmp_path, trained_tokenizer)).args
    args.dataloader_num_workers, args.dataloader_prefetch_factor = 1, 3
    args.dataloader_multiprocessing_context = "spawn"
    in_workers, args.dataloader_num_workers = trainer.evaluate()["eval_lm_loss"], 0
    args.dataloader_prefetch_factor = args.dataloader_multiprocessing_context = None
    assert in_workers == trainer.evaluate()["eval_lm_loss"]


def test_loaders_without_records_say_what_to_pass(trained_tokenizer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, trained_tokenizer, None)
    with pytest.raises(ValueError, match="get_eval_dataloader: expected one set of records, got none; pass a list"):
        trainer.get_eval_dataloader()
    with pytest.raises(ValueError, match="get_test_dataloader: expected one set of records, got none; pass a list"):
        trainer.get_test_dataloader(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("held_out", "words"),
    [
        (
            0.1,
            r"evaluation data: expected records, got 0\.1; a share is data_file and eval_split of RunConfig, or a part",
        ),
        ({"easy": ROWS, "hard": None}, r"evaluation data hard: expected records, got None; pass a list of dicts"),
        (7, r"evaluation data: expected records, got 7; pass a list of dicts"),
        (print, r"evaluation data: expected records, got an object \(builtin_function_or_method\); pass a list"),
        ([], r"evaluation data: holds no records; add at least one"),
    ],
)
def test_what_is_no_collection_of_records_is_named(
    held_out: Any, words: str, trained_tokenizer: Any, tmp_path: Path
) -> None:
    """They were TypeErrors of Python, such as ``'float' object is not iterable``."""
    with pytest.raises(UserError, match=f"^{words}"):
        make_trainer(tmp_path, trained_tokenizer, held_out)

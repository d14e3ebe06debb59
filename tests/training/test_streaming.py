"""Training on a stream: what training on prepared records gives, from no more than is needed at a time."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from stepjepa.batch.stream import RecordStream
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.files import write_jsonl
from stepjepa.training.run import data_summary
from stepjepa.training.stream_counts import STREAM_FILE
from stepjepa.training.trainer import JepaTrainer

RECORDS = 19


class Stream:
    """Records that can be read again and again, and have no length."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def __iter__(self) -> Iterator[Any]:
        return iter(self.records)


def some(amount: int = RECORDS) -> list[Record]:
    return (tiny.records() * amount)[:amount]


def rows(amount: int = RECORDS) -> list[dict[str, Any]]:
    return [{"messages": list(record.messages)} for record in some(amount)]


def trainer(folder: Path, tokenizer: Any, data: Any, config: JepaConfig | None = None, **changes: Any) -> JepaTrainer:
    fixed = {"optim": "sgd", "learning_rate": 0.05, "per_device_train_batch_size": 2}
    eval_dataset = changes.pop("eval_dataset", None)
    return JepaTrainer(
        tiny.make_model("llama", seed=3),
        tiny.arguments(folder, **{**fixed, **changes}),
        config or JepaConfig(mode="step-jepa", lbd=0.7),
        train_dataset=data,
        eval_dataset=eval_dataset,
        processing_class=copy.deepcopy(tokenizer),
    )


def losses(made: JepaTrainer) -> list[dict[str, float]]:
    lines = [{k: v for k, v in line.items() if k.endswith("loss")} for line in made.state.log_history]
    return [line for line in lines if "loss" in line]


def assert_same_runs(one: JepaTrainer, other: JepaTrainer, tolerance: float) -> None:
    assert len(losses(one)) == len(losses(other)) > 2
    for line, same in zip(losses(one), losses(other), strict=True):
        assert line == pytest.approx(same, rel=tolerance, abs=tolerance)
    for (name, value), same in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert (value - same).abs().max() <= tolerance, name


OBJECTIVES: dict[str, dict[str, Any]] = {
    "regular with stp": {"mode": "regular", "stp": 0.7},
    "half of the steps": {"mode": "llm-jepa", "jepa_ratio": 0.5, "lbd": 0.7},
    "all pairs in place": {"mode": "step-jepa", "layout": "inplace", "pairs": "all", "stp": 0.3},
    "infonce": {"mode": "llm-jepa", "jepa_loss_type": "infonce", "lbd": 0.7},
}


@pytest.mark.parametrize(("name", "accumulation"), list(zip(OBJECTIVES, (1, 3, 3, 1), strict=True)))
def test_a_stream_in_order_trains_what_prepared_records_train(
    name: str, accumulation: int, trained_tokenizer: Any, tmp_path: Path
) -> None:
    """Over more than one epoch, whose last step is short."""
    config = JepaConfig(**OBJECTIVES[name])
    options = {"max_steps": 13, "gradient_accumulation_steps": accumulation}
    prepared = trainer(
        tmp_path / "a", trained_tokenizer, some(), config, train_sampling_strategy="sequential", **options
    )
    streamed = trainer(tmp_path / "b", trained_tokenizer, Stream(some()), config, **options)
    assert streamed.prepared is None
    for each in (prepared, streamed):
        each.train()
    assert_same_runs(prepared, streamed, 1e-6)


def test_resumed_equals_uninterrupted(trained_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps an epoch: the checkpoint lies in the second."""

    def make(folder: str) -> JepaTrainer:
        return trainer(
            tmp_path / folder,
            trained_tokenizer,
            RecordStream(Stream(rows()), 7),
            JepaConfig(mode="step-jepa", lbd=0.7, jepa_ratio=0.5, stp=0.1),
            max_steps=10,
            optim="adamw_torch",
            gradient_accumulation_steps=3,
            save_strategy="steps",
            save_steps=2,
        )

    whole = make("whole")
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-6"
    resumed = make("resumed")
    tokenised: list[Record] = []
    tokenize = RecordTokenizer.tokenize_each

    def watched(tokenizer: RecordTokenizer, records: Sequence[Record]) -> Any:
        tokenised.extend(records)
        return tokenize(tokenizer, records)

    monkeypatch.setattr(RecordTokenizer, "tokenize_each", watched)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for (name, value), same in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(value, same), name
    assert losses(resumed) == losses(whole)
    assert data_summary(resumed) == data_summary(whole)
    assert resumed.stream_counts.epochs == whole.stream_counts.epochs == 2
    # Steps of six records, but for the last of an epoch, which has one.
    before = 19 + 12
    assert len(tokenised) == data_summary(whole)["counts"]["records"] - before

    prepared = trainer(tmp_path / "prepared", trained_tokenizer, some(), max_steps=10, optim="adamw_torch")
    with pytest.raises(ValueError, match=r"expected a checkpoint of prepared records, got .* made on a stream"):
        prepared.train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / STREAM_FILE).unlink()
    with pytest.raises(ValueError, match=rf"expected {STREAM_FILE} in .*, got none"):
        make("other").train(resume_from_checkpoint=str(checkpoint))


def test_what_belongs_to_the_end_of_an_epoch_is_done_at_its_end(trained_tokenizer: Any, tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        trained_tokenizer,
        Stream(some(7)),
        per_device_train_batch_size=3,
        max_steps=8,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        eval_dataset=some(2),
    )
    made.train()
    history = made.state.log_history
    assert [line["step"] for line in history if "eval_loss" in line] == [3, 6, 8]
    logged = [line for line in history if "loss" in line]
    assert [(line["step"], line["data_epoch"], line["data_records"]) for line in logged] == [
        (3, 1.0, 7.0),
        (6, 2.0, 14.0),
        (8, 2.0, 20.0),
    ]
    assert [line["data_without_a_pair"] for line in logged] == [2.0, 4.0, 6.0]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-3",
        "checkpoint-6",
        "checkpoint-8",
    ]
    state = json.loads((tmp_path / "checkpoint-6" / STREAM_FILE).read_text())
    assert state["totals"]["records"] == 14
    tokens = data_summary(made)["tokens"]
    assert tokens["ratio"] == tokens["all"] / tokens["main"] > 1.1


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_halfway_names_file_and_line(workers: int, trained_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    long = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "no end " * 99}]
    # The first is found wrong when it is read, the second when it is tokenised.
    for messages, words in (("none", "'messages' must be a list"), (long, "the record has .* tokens, more than")):
        write_jsonl(path, [*rows(7), {"messages": messages}, *rows(3)])
        made = trainer(
            tmp_path / "run",
            trained_tokenizer,
            RecordStream(path),
            JepaConfig(max_length=200),
            max_steps=20,
            dataloader_num_workers=workers,
        )
        with pytest.raises(UserError, match=f"data.jsonl:8: {words}") as raised:
            made.train()
        assert "\n" not in str(raised.value)
        # What is read ahead for workers may be found wrong ahead; what they tokenise waits for its turn.
        if messages == long or not workers:
            assert made.state.global_step == 3


def test_records_that_are_skipped_leave_their_places_empty(trained_tokenizer: Any, tmp_path: Path) -> None:
    long = tiny.make_record("", "q", "no end " * 99, line=9)
    made = trainer(
        tmp_path,
        trained_tokenizer,
        Stream([*some(3), long, *some(2), long, long]),
        JepaConfig(max_length=200, over_length="skip"),
        max_steps=4,
    )
    made.train()
    assert data_summary(made)["counts"] | {"pairs": 5} == data_summary(made)["counts"]
    assert data_summary(made)["counts"]["records"] == 5
    assert data_summary(made)["counts"]["skipped"] == 3
    # A step of nothing but skipped records teaches nothing and harms nothing.
    assert losses(made)[-1]["lm_loss"] == 0.0
    assert all(torch.isfinite(value).all() for value in made.model.parameters())


def test_views_without_any_pair_are_an_error_when_the_epoch_is_over(trained_tokenizer: Any, tmp_path: Path) -> None:
    alone = [tiny.make_record("", "q", "one step", line=line) for line in range(1, 8)]
    made = trainer(tmp_path, trained_tokenizer, Stream(alone), max_steps=9)
    with pytest.raises(UserError, match="none of the 7 records has a pair; check --step"):
        made.train()
    assert made.state.global_step == 4

"""The first screen of a run: what it says of cost and length is what the run will be."""

import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa.commands import train
from stepjepa.config import JepaConfig
from stepjepa.parser import Parser
from stepjepa.terminal import print_rows
from stepjepa.training import start_up
from stepjepa.training.start_up import run_length, start_up_rows, step_cost
from stepjepa.training.trainer import JepaTrainer


def trainer(tokenizer: Any, folder: Path, jepa: JepaConfig, **arguments: Any) -> JepaTrainer:
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, **arguments}
    return JepaTrainer(
        tiny.make_model("llama"),
        tiny.arguments(folder, **given),
        jepa,
        train_dataset=tiny.records() * 7,
        eval_dataset=tiny.records() if "eval_strategy" in arguments else None,
        processing_class=tokenizer,
    )


def arguments(folder: Path, *flags: str) -> Any:
    parser = Parser(prog="stepjepa train", allow_abbrev=False)
    train.add_arguments(parser)
    return train.parse(parser, ["--train_file", "t.jsonl", "--model_name", "m", "--output_dir", str(folder), *flags])


def test_cost_of_a_step_is_that_of_the_plan(tiny_tokenizer: Any, tmp_path: Path) -> None:
    made = trainer(tiny_tokenizer, tmp_path, JepaConfig(mode="step-jepa"))
    cost, plan = step_cost(made), made.plan
    batches = [plan.collate(batch) for step in plan.keys(0) for batch in plan.micro_batches(step)]
    # 21 records, 6 a step.
    assert cost.tokens == pytest.approx(sum(batch.members.tokens for batch in batches) * 6 / 21)
    assert cost.flops == pytest.approx(sum(map(plan.cost, plan.keys(0))) * 6 / 21)
    assert cost.regular_flops == pytest.approx(plan.regular.budgets(1)[0] * 6 / 21)
    assert cost.flops > cost.regular_flops
    regular = step_cost(trainer(tiny_tokenizer, tmp_path, JepaConfig(mode="regular")))
    assert cost.regular_tokens == regular.tokens == regular.regular_tokens < cost.tokens


def test_loss_dropout_costs_its_share(tiny_tokenizer: Any, tmp_path: Path) -> None:
    whole, none, part = (
        step_cost(trainer(tiny_tokenizer, tmp_path, JepaConfig(mode="step-jepa", jepa_ratio=ratio)))
        for ratio in (1.0, 0.0, 0.3)
    )
    assert none.tokens == none.regular_tokens
    for name in ("tokens", "flops"):
        expected = 0.3 * getattr(whole, name) + 0.7 * getattr(none, name)
        assert getattr(part, name) == pytest.approx(expected)


def test_a_sample_of_the_records_says_nearly_the_same(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(tiny_tokenizer, tmp_path, JepaConfig(mode="regular"), gradient_accumulation_steps=1)
    whole = step_cost(made)
    # Every second of 11 steps of 2 records.
    monkeypatch.setattr(start_up, "SAMPLED", 11)
    sampled = step_cost(made)
    assert sampled.tokens != whole.tokens
    assert sampled.tokens == pytest.approx(whole.tokens, rel=0.3)
    assert sampled.flops == pytest.approx(whole.flops, rel=0.3)


@pytest.mark.parametrize("given", [{"max_steps": 5}, {"num_train_epochs": 2.5}, {"num_train_epochs": 0.1}])
def test_length_is_that_of_the_run(given: dict[str, float], tiny_tokenizer: Any, tmp_path: Path) -> None:
    made = trainer(tiny_tokenizer, tmp_path, JepaConfig(mode="regular"), learning_rate=0.0, **given)
    told, epoch = run_length(made)
    made.train()
    assert (told, epoch) == (made.state.max_steps, 4)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_everything_fits_one_screen(
    columns: int, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = JepaConfig(mode="step-jepa", pairs="all", lbd_schedule="cosine", jepa_ratio=0.5, stp=0.02, sigreg=0.1)
    config = replace(config, target_grad="stop", variance=0.3)
    made = trainer(tiny_tokenizer, tmp_path, config, eval_strategy="epoch")
    told = start_up_rows(
        arguments(tmp_path / ("a_long_name_" * 7)), made, answers="to 1,000 records at every evaluation, task gsm8k"
    )
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    for colours in (True, False):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        if not colours:
            monkeypatch.setenv("NO_COLOR", "1")
        print_rows(told)
        text = terminal.getvalue()
        assert ("\x1b[" in text) == colours
        lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
        assert max(map(len, lines)) <= columns
        # The time of the run is told on a line to come.
        assert columns < 80 or len(lines) <= 23


def test_rows_say_what_was_chosen_and_why(tiny_tokenizer: Any, tmp_path: Path) -> None:
    made = trainer(tiny_tokenizer, tmp_path, JepaConfig(mode="step-jepa", predictors=3), eval_strategy="epoch")
    about = {"checkpoint": str(tmp_path / "checkpoint-6"), "prompts": "different ones"}
    rows = dict(start_up_rows(arguments(tmp_path / "run"), made, **about))
    assert rows["prompts"] == "different ones"
    assert rows["model"].startswith("m (LlamaForCausalLM), ") and "all trained; float32 on cpu" in rows["model"]
    assert rows["mode"] == "step-jepa, layout branched, K = 3, the first pair of a record"
    assert rows["loss"] == "1 LM + 0.1 cosine"
    assert rows["encoding"] == f"tree ({made.encoding_reason})"
    assert rows["data"].endswith("21 records, 14 pairs, 7 without a pair, 0 over length")
    assert rows["held out"] == "3 records, 2 pairs, 1 without a pair, 0 over length"
    assert rows["each step"].startswith("6 records (2 a batch x 3 accumulated), ")
    assert re.fullmatch(r"1\.\d\d of the tokens and [1-9]\.\d\d of the FLOPs of regular training.*", rows["cost"])
    assert "epochs of 4; evaluated every epoch; saved at the end; learning rate" in rows["steps"]
    assert rows["output"] == f"{tmp_path / 'run'}, going on from checkpoint-6"
    regular = dict(start_up_rows(arguments(tmp_path), trainer(tiny_tokenizer, tmp_path, JepaConfig(mode="regular"))))
    assert not {"encoding", "cost", "held out", "prompts"} & set(regular)

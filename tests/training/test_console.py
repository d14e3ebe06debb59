"""What a run prints: the first screen, losses and time while it trains, and a last command that works."""

import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from stepjepa.commands import evaluate, train
from stepjepa.config import JepaConfig
from stepjepa.parser import Parser
from stepjepa.terminal import print_rows
from stepjepa.training import console
from stepjepa.training.console import (
    ConsoleCallback,
    console_line,
    finished_json,
    first_screen,
    last_lines,
    next_command,
    step_cost,
)
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


def arguments(folder: Path | str, *flags: str) -> Any:
    parser = Parser(prog="stepjepa train", allow_abbrev=False)
    train.add_arguments(parser)
    return train.parse(parser, ["--train_file", "t.jsonl", "--model_name", "m", "--output_dir", str(folder), *flags])


# -- the first screen --------------------------------------------------------------------------------------------------


def test_cost_of_a_step_is_that_of_the_plan(tiny_tokenizer: Any, tmp_path: Path) -> None:
    made = trainer(tiny_tokenizer, tmp_path, JepaConfig(mode="step-jepa"))
    cost, plan = step_cost(made), made.plan
    batches = [batch for step in plan.keys(0) for batch in plan.micro_batches(step)]
    # 21 records, 6 a step.
    assert cost.tokens == pytest.approx(sum(batch["members"].tokens for batch in batches) * 6 / 21)
    assert cost.flops == pytest.approx(sum(map(plan.cost, plan.keys(0))) * 6 / 21)
    assert cost.regular_flops == pytest.approx(plan.regular.budgets(1)[0] * 6 / 21)
    regular = step_cost(trainer(tiny_tokenizer, tmp_path, JepaConfig(mode="regular")))
    assert cost.regular_tokens == regular.tokens == regular.regular_tokens < cost.tokens
    # Loss dropout costs its share.
    part = step_cost(trainer(tiny_tokenizer, tmp_path, JepaConfig(mode="step-jepa", jepa_ratio=0.3)))
    assert part.tokens == pytest.approx(0.3 * cost.tokens + 0.7 * regular.tokens)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 80])
def test_everything_fits_one_screen(
    columns: int, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = JepaConfig(mode="step-jepa", pairs="all", lbd_schedule="cosine", jepa_ratio=0.5, stp=0.02, sigreg=0.1)
    config = replace(config, target_grad="stop", variance=0.3)
    made = trainer(tiny_tokenizer, tmp_path, config, eval_strategy="epoch")
    told = {"answers": "to 1,000 records at every evaluation, task gsm8k"}
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    print_rows(first_screen(arguments(tmp_path / ("a_long_name_" * 7)), made, told))
    lines = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    assert columns < 80 or len(lines) <= 24


def test_rows_say_what_was_chosen_and_why(tiny_tokenizer: Any, tmp_path: Path) -> None:
    made = trainer(
        tiny_tokenizer, tmp_path, JepaConfig(mode="step-jepa", predictors=3, stp=0.02), eval_strategy="epoch"
    )
    checkpoint = str(tmp_path / "checkpoint-6")
    rows = dict(first_screen(arguments(tmp_path / "run"), made, {"prompts": "different ones"}, checkpoint=checkpoint))
    assert rows["prompts"] == "different ones"
    assert rows["model"].startswith("m (LlamaForCausalLM), ") and "all trained; float32 on cpu" in rows["model"]
    told = "step-jepa, layout branched, predictors 3, pairs first, stp 0.02, jepa_loss_type cosine, lbd 0.1"
    assert sorted(rows["objective"].split(", ")) == sorted(told.split(", "))
    assert rows["encoding"] == f"tree ({made.encoding_reason})"
    assert rows["data"].endswith("21 records, 14 pairs, 7 without a pair, 0 over length")
    assert rows["held out"] == "3 records, 2 pairs, 1 without a pair, 0 over length"
    assert rows["each step"].startswith("6 records (2 a batch x 3 accumulated), ")
    assert re.fullmatch(r"1\.\d\d of the tokens and [1-9]\.\d\d of the FLOPs of regular training.*", rows["cost"])
    assert "epochs of 4; evaluated every epoch; saved at the end; learning rate" in rows["steps"]
    assert rows["output"] == f"{tmp_path / 'run'}, resumed from checkpoint-6"
    regular = dict(first_screen(arguments(tmp_path), trainer(tiny_tokenizer, tmp_path, JepaConfig(mode="regular")), {}))
    assert not {"encoding", "cost", "held out", "prompts"} & set(regular)


# -- while it trains ---------------------------------------------------------------------------------------------------


class Run:
    """A run of which every step takes so many seconds, as its callback sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, bars: bool, first: int = 0, last: int = 9) -> None:
        self.now = 100.0
        monkeypatch.setattr(console, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.state = SimpleNamespace(global_step=first, max_steps=last, is_world_process_zero=True)
        self.callback = ConsoleCallback(bars)
        self.callback.on_train_begin(None, self.state, None)

    def step(self, seconds: float) -> None:
        self.now += seconds
        self.state.global_step += 1
        self.callback.on_step_end(None, self.state, None)
        self.callback.on_log(None, self.state, None, logs={"lm_loss": 3.0, "loss": 3.5})


def test_the_first_step_is_no_measure_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(monkeypatch, bars=False, first=2, last=9)
    for seconds in (60, 2):
        run.step(seconds)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "step 3/9  LM loss: 3.0000, Total: 3.5000"
    assert second == "step 4/9  LM loss: 3.0000, Total: 3.5000, 10 s left"


def test_a_bar_goes_to_standard_error_and_lines_stay_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(monkeypatch, bars=True, last=2)
    run.step(1)
    run.step(1)
    run.callback.on_train_end(None, run.state, None)
    said = capsys.readouterr()
    assert said.out == "".join(f"step {step}/2  LM loss: 3.0000, Total: 3.5000\n" for step in (1, 2))
    assert "2/2" in said.err
    # Other processes are silent.
    run.state.is_world_process_zero = False
    run.callback.on_train_begin(None, run.state, None)
    run.step(1)
    assert capsys.readouterr().out == ""


def test_logs_that_are_no_losses_have_no_line() -> None:
    assert console_line({"train_runtime": 3.0}) is None
    assert console_line({"eval_lm_loss": 2.0, "eval_loss": 2.5}) == "eval  LM loss: 2.0000, Total: 2.5000"


# -- what came of it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"test_file": "TEST.jsonl", "task": "auto", "max_new_tokens": 256}),
        (
            [
                *("--eval_file", "e", "--eval_generate", "7", "--eval_task", "spider", "--spider_path", "d"),
                *("--missing_databases", "skip", "--eval_max_new_tokens", "11", "--lora", "--load_in_4bit"),
            ],
            {"test_file": "e", "task": "spider", "spider_path": "d", "max_new_tokens": 11, "load_in_4bit": True},
        ),
    ],
)
def test_the_next_command_is_one_that_evaluate_takes(flags: list[str], expected: dict[str, Any]) -> None:
    command = next_command(arguments("runs/a b", *flags))
    assert command[:2] == ["stepjepa", "evaluate"]
    parser = Parser(prog="stepjepa evaluate", allow_abbrev=False)
    evaluate.add_arguments(parser)
    parsed = vars(parser.parse_args(command[2:]))
    assert (parsed["model_path"], parsed["output_file"]) == ("runs/a b", str(Path("runs/a b/test.jsonl")))
    assert {name: parsed[name] for name in expected} == expected


def test_the_last_lines_say_where_everything_is(tmp_path: Path) -> None:
    results = {"steps": 1, "tokens": 4321.0, "train_seconds": 187.0, "last_log": {"lm_loss": 1.25}, "eval_lm_loss": 2}
    record = {"status": "finished", "results": results}
    (tmp_path / "checkpoint-3").mkdir()
    assert last_lines(tmp_path, record) == [
        ("done", "1 step, 4,321 tokens in 3 min 07 s; LM loss 1.2500, held out 2.0000"),
        ("run folder", f"{tmp_path} (the model, run.json, metrics.jsonl, 1 checkpoint)"),
    ]
    found = finished_json(arguments("runs/a b"), record)
    assert (found["run_folder"], found["results"]) == ("runs/a b", results)
    assert found["next"][:4] == ["stepjepa", "evaluate", "--model_path", "runs/a b"]

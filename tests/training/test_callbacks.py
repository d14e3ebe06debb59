"""What the console shows while a run goes: lines, time left, a bar on a terminal alone."""

from types import SimpleNamespace
from typing import Any

import pytest

from stepjepa.training.callbacks import MEASURED, ConsoleCallback, console_line


class Run:
    """A run of made-up seconds."""

    def __init__(self, bars: bool = False, *, first: int = 0, last: int = 23, eval_strategy: str = "no") -> None:
        self.now = 0.0
        self.state: Any = SimpleNamespace(global_step=first, max_steps=last, is_world_process_zero=True)
        self.args: Any = SimpleNamespace(eval_strategy=eval_strategy)
        self.callback = ConsoleCallback(bars, lambda: self.now)
        self.callback.on_train_begin(self.args, self.state, None)

    def step(self, seconds: float) -> None:
        self.now += seconds
        self.state.global_step += 1
        self.callback.on_step_end(self.args, self.state, None)

    def evaluate(self, seconds: float) -> None:
        self.now += seconds
        self.callback.on_evaluate(self.args, self.state, None)

    def log(self) -> None:
        self.callback.on_log(self.args, self.state, None, {"loss": 3.5, "lm_loss": 3.0})


def test_the_time_of_a_run_is_told_once_by_the_steps_behind_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    run.step(100)
    for _ in range(MEASURED):
        run.step(7)
    assert capsys.readouterr().out == "time: about 2 min 06 s for the 18 steps left, 7.0 s each\n"
    run.step(7)
    assert capsys.readouterr().out == ""


def test_evaluations_are_no_time_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(eval_strategy="steps", first=6)
    run.step(100)
    for _ in range(MEASURED):
        run.evaluate(1000)
        run.step(11)
    assert capsys.readouterr().out == "time: about 2 min 12 s for the 12 steps left, 11 s each, and evaluations\n"


def test_a_line_for_each_log_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(last=3)
    run.log()
    run.step(5)
    run.step(70)
    run.log()
    run.step(70)
    run.log()
    run.callback.on_log(run.args, run.state, None, {"train_runtime": 1.0})
    assert capsys.readouterr().out.splitlines() == [
        "step 0/3  LM loss: 3.0000, Total: 3.5000",
        "step 2/3  LM loss: 3.0000, Total: 3.5000, 1 min 10 s left",
        "step 3/3  LM loss: 3.0000, Total: 3.5000",
    ]


def test_a_bar_goes_to_standard_error_and_lines_stay_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(bars=True, first=2, last=5)
    run.step(1)
    run.step(1)
    run.log()
    run.step(1)
    run.callback.on_train_end(run.args, run.state, None)
    said = capsys.readouterr()
    assert said.out == "step 4/5  LM loss: 3.0000, Total: 3.5000\n"
    assert "train:" in said.err
    assert "5/5" in said.err
    assert "step/s" in said.err or "s/step" in said.err


def test_other_processes_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(bars=True)
    run.state.is_world_process_zero = False
    for _ in range(7):
        run.step(2)
        run.log()
    assert capsys.readouterr().out == ""


def test_logs_that_are_no_losses_have_no_line() -> None:
    assert console_line({"train_runtime": 3.0}) is None
    assert console_line({"eval_lm_loss": 2.0, "eval_loss": 2.5}) == "eval  LM loss: 2.0000, Total: 2.5000"

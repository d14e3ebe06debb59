"""On a CUDA device a run trains in bfloat16 and collates in workers, unless it names others; simulated on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import tiny
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.config.run import RunConfig
from stepjepa.running import precision
from stepjepa.running import training_arguments as arguments
from stepjepa.running.run import run
from stepjepa.training.trainer import JepaTrainer


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device that computes in bfloat16 is seen; what is trained is trained on the CPU."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(arguments, "_cuda_device", lambda values: True)
    monkeypatch.setattr(arguments, "cuda_has_bf16", lambda: True)
    monkeypatch.setattr(arguments, "GPU_WORKERS", 1)


def described(folder: Path, **changes: Any) -> RunConfig:
    flat = {"model_name": "preset:tiny", "train_file": str(folder / "train.jsonl"), "output_dir": str(folder / "run")}
    return RunConfig.from_flat({**flat, "use_cpu": True, **changes})


def made(folder: Path, **changes: Any) -> TrainingArguments:
    return arguments.training_arguments(described(folder, **changes), has_eval=False)


@pytest.mark.parametrize("named", [{}, {"dtype": "bfloat16"}, {"dtype": "float32"}])
def test_bfloat16_is_the_default(named: dict[str, Any], cuda: None, tmp_path: Path) -> None:
    given = made(tmp_path, **named)
    assert given.bf16
    assert given.mixed_precision == "bf16"
    assert given.dataloader_num_workers == 1


@pytest.mark.parametrize(
    "named", [{"bf16": False}, {"bf16": "false"}, {"fp16": False}, {"tf32": False}, {"dtype": "float16"}]
)
def test_a_precision_that_is_named_stays(named: dict[str, Any], cuda: None, tmp_path: Path) -> None:
    assert not made(tmp_path, **named).bf16


def test_the_precision_of_accelerate_launch_stays(cuda: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert made(tmp_path).mixed_precision == "fp16"


@pytest.mark.parametrize(
    ("launched", "named", "trained"),
    [
        ("bf16", {}, "bf16"),
        ("fp16", {}, "fp16"),
        ("bf16", {"bf16": False}, "no"),
        ("bf16", {"fp16": True}, "fp16"),
        ("fp8", {}, "fp8"),
        ("no", {}, "no"),
    ],
)
def test_the_precision_of_accelerate_launch_is_a_setting_unless_the_run_names_one(
    launched: str, named: dict[str, Any], trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    config = precision.with_launched_precision(described(tmp_path, **named))
    made = arguments.training_arguments(config, has_eval=False)
    assert (made.mixed_precision, made.bf16, made.fp16) == (trained, trained == "bf16", trained == "fp16")


@pytest.mark.slow
def test_a_run_under_accelerate_launch_is_recorded_with_its_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    write_jsonl(tmp_path / "train.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    record = run(described(tmp_path, max_steps=1)).record
    assert record.launches[0].settings["bf16"] is True
    assert RunConfig.read(tmp_path / "run" / "run.yaml").trainer["bf16"] is True
    args = TrainingArguments(str(tmp_path / "other"), use_cpu=True, report_to="none")
    trainer = JepaTrainer(tiny.make_model("llama"), args, train_dataset=tiny.records(), processing_class=tiny_tokenizer)
    assert trainer.args.bf16 and trainer.bound._autocast == torch.bfloat16


def test_no_model_is_compiled_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with pytest.raises(UserError, match="ACCELERATE_DYNAMO_BACKEND: this trainer can't be compiled; unset it"):
        made(tmp_path)
    # As `accelerate launch` sets it by default.
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    made(tmp_path)
    # transformers sets it, too; a second try without this setting is not refused for the first one.
    with pytest.raises(UserError, match="torch_compile: this trainer can't be compiled; leave it out"):
        made(tmp_path, torch_compile=True)
    made(tmp_path)


def test_workers_that_are_named_stay(cuda: None, tmp_path: Path) -> None:
    assert made(tmp_path, dataloader_num_workers=0).dataloader_num_workers == 0


def test_a_device_without_bfloat16_trains_in_float32(
    cuda: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "cuda_has_bf16", lambda: False)
    assert not made(tmp_path).bf16


def test_elsewhere_a_run_trains_in_float32(tmp_path: Path) -> None:
    given = made(tmp_path)
    assert not given.bf16
    assert given.dataloader_num_workers == 0


def test_a_trainer_keeps_its_callers_arguments(cuda: None, tmp_path: Path, tiny_tokenizer: Any) -> None:
    given = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = JepaTrainer(
        tiny.make_model("llama"), given, train_dataset=tiny.records(), processing_class=tiny_tokenizer
    )
    assert not trainer.args.bf16
    assert trainer.args.dataloader_num_workers == 0


def test_it_is_said_and_recorded(cuda: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"messages": record.messages} for record in tiny.records()])
    config = described(tmp_path, max_steps=2, batch_size=3, save_strategy="no")
    trained = run(config)
    output = capsys.readouterr().out
    assert "bfloat16 (autocast), the default on this device; `bf16 false` trains in float32" in output
    (launch,) = trained.record.launches
    assert launch.settings["bf16"] is True
    # It is no setting of the run: elsewhere it trains in float32.
    assert "bf16" not in trained.config.trainer


@pytest.mark.slow
def test_workers_change_nothing(tmp_path: Path, tiny_tokenizer: Any) -> None:
    weights = []
    for workers in (0, 1):
        given = TrainingArguments(
            str(tmp_path), use_cpu=True, report_to="none", max_steps=3, per_device_train_batch_size=2,
            save_strategy="no", dataloader_num_workers=workers, gradient_accumulation_steps=2,
        )  # fmt: skip
        model = tiny.make_model("llama", seed=5)
        JepaTrainer(model, given, train_dataset=tiny.records(), processing_class=tiny_tokenizer).train_steps(None)
        weights.append([each.detach().clone() for each in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize(
    ("capabilities", "width", "device", "changes", "wanted"),
    [
        ({"avx512_bf16": True}, 256, "cpu", {}, True),
        ({"amx_bf16": True}, 576, "cpu", {"dtype": "float32"}, True),
        ({"avx512_bf16": False, "amx_bf16": False}, 576, "cpu", {}, False),
        ({"avx512_bf16": True}, 128, "cpu", {}, False),
        ({"avx512_bf16": True}, 576, "cuda", {}, False),
        ({"avx512_bf16": True}, 576, "cpu", {"bf16": False}, False),
        (None, 576, "cpu", {}, False),
    ],
)
def test_a_wide_model_is_told_of_bfloat16_where_the_cpu_has_it(
    *,
    capabilities: dict[str, bool] | None,
    width: int,
    device: str,
    changes: dict[str, Any],
    wanted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if capabilities is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    output = precision.bf16_advice(described(tmp_path, **changes), width, device)
    assert (output is not None) == wanted
    assert output is None or "`bf16 true` is faster here" in output

"""What ``JepaTrainer`` refuses of what other trainers do."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import DataParallel, Parameter
from torch.optim import SGD
from transformers import Trainer, TrainerCallback, TrainingArguments

from fake_hub import FakeHub
from stepjepa import Jepa, JepaTrainer, RunConfig, run
from stepjepa.base.errors import UserError
from stepjepa.training.argument_checks import REMEDIES, check_arguments
from stepjepa.training.refused_methods import ARGUMENT_REMEDIES
from tiny import make_model

ROWS = [{"prompt": f"{number}?", "completion": f"{number}!"} for number in range(7)]

# TRL sets a field that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")


def sft_config(folder: Path, **fields: Any) -> TrainingArguments:
    trl = pytest.importorskip("trl")
    return trl.SFTConfig(str(folder), use_cpu=True, bf16=False, report_to="none", **fields)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("packing", True, "rows are packed without contamination anyway"),
        ("max_length", 77, r"set it in JepaConfig\(max_length=...\)"),
        ("assistant_only_loss", True, "the assistant's tokens alone are trained anyway"),
        ("dataset_text_field", "body", "leave it out, or pass transformers.TrainingArguments"),
    ],
)
def test_fields_of_trl_that_nothing_reads_are_refused(field: str, value: object, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"SFTConfig\.{field}: this trainer does not read it, got .*; .*{remedy}"):
        check_arguments(sft_config(tmp_path, **{field: value}))


def test_every_remedy_is_for_a_field_of_trl(tmp_path: Path) -> None:
    check_arguments(args := sft_config(tmp_path))
    assert [name for name in REMEDIES if not hasattr(args, name)] == []


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("columns", r"rename the two columns of train_dataset to prompt and completion"),
        ("peft_config", r"pass the model of peft.get_peft_model\(model, peft_config\)"),
        ("tokenizer", "pass processing_class="),
        ("jepa_loss_type", r"pass JepaConfig\(jepa_loss_type=...\)"),
        ("max_steps", r"pass TrainingArguments\(max_steps=...\)"),
        ("train_datset", r"did you mean train_dataset\?"),
        ("colour", r"help\(JepaTrainer\) lists all"),
    ],
)
def test_unknown_arguments_are_answered_by_what_to_pass(argument: str, remedy: str, tmp_path: Path) -> None:
    """The error was Python's alone, which names no remedy."""
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(TypeError, match=rf"JepaTrainer has no argument '{argument}'; {remedy}$"):
        JepaTrainer(make_model("llama"), arguments, **{argument: 1})  # type: ignore[arg-type]


def test_none_is_the_default_of_every_argument_of_other_trainers(tmp_path: Path) -> None:
    """TRL's scripts pass ``peft_config=get_peft_config(...)``, which is None for full training; it was refused."""
    nothing: Any = {**dict.fromkeys(ARGUMENT_REMEDIES), "optimizers": None, "callbacks": None, "eval_dataset": None}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=1, save_strategy="no")
    trainer = JepaTrainer("preset:tiny", arguments, train_dataset=ROWS, **nothing)
    trainer.train()
    assert type(trainer.optimizer.optimizer).__name__ == "AdamW"


@pytest.mark.parametrize(
    ("optimizers", "got"), [((None,), "1 values"), (SGD([Parameter(torch.zeros(2))]), "SGD"), ("adamw", "str")]
)
def test_what_is_no_pair_of_optimizer_and_schedule_is_named(optimizers: Any, got: str, tmp_path: Path) -> None:
    """An optimizer by itself was a TypeError of Python, one of one value an error of unpacking."""
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(TypeError, match=rf"^optimizers: expected \(optimizer, schedule\), .*, got {got}$"):
        JepaTrainer("preset:tiny", arguments, train_dataset=ROWS, optimizers=optimizers)


def test_every_argument_of_other_trainers_is_known_or_has_a_remedy() -> None:
    trl = pytest.importorskip("trl")
    known = {*inspect.signature(JepaTrainer.__init__).parameters, *ARGUMENT_REMEDIES, "kwargs"}
    for other in (Trainer, trl.SFTTrainer):
        assert {*inspect.signature(other.__init__).parameters} <= known


def test_a_run_with_the_arguments_of_trl_is_described_in_its_file(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """No run.yaml was written, for a token that is no setting; TRL's own defaults would not have been in it."""
    config = sft_config(tmp_path / "run", max_steps=1, save_strategy="no")
    model = make_model("llama", vocab_size=len(tiny_tokenizer))
    JepaTrainer(model, config, train_dataset=ROWS, processing_class=tiny_tokenizer).train()
    written = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert config.gradient_checkpointing and written["gradient_checkpointing"]
    assert {"eos_token", "pad_token", "dataset_text_field"}.isdisjoint(written)


def test_predict_says_what_to_call_instead(tmp_path: Path, tiny_tokenizer: Any) -> None:
    model = make_model("llama", vocab_size=len(tiny_tokenizer))
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = JepaTrainer(model, arguments, processing_class=tiny_tokenizer)
    with pytest.raises(ValueError, match=r"predict: expected evaluate\(\) for losses"):
        trainer.predict([])


@pytest.mark.parametrize("asked", ["when it is made", "later"])
def test_uploads_without_a_network_fail_on_one_line(asked: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    model = make_model("llama", vocab_size=len(tiny_tokenizer))
    hub = {"push_to_hub": asked == "when it is made", "hub_model_id": "me/mine"}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **hub)
    with pytest.raises(UserError) as refused:
        JepaTrainer(model, arguments, processing_class=tiny_tokenizer).push_to_hub()
    assert str(refused.value).startswith("`push_to_hub` needs a connection, which `offline` (or HF_HUB_OFFLINE)")
    assert not any(tmp_path.iterdir())


def test_a_hub_that_refuses_is_named_on_one_line(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama", vocab_size=len(tiny_tokenizer))
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", hub_model_id="me/mine")
    trainer = JepaTrainer(model, arguments, processing_class=tiny_tokenizer)
    with FakeHub() as hub:
        hub.serve(monkeypatch)
        hub.refuse = "create"
        with pytest.raises(UserError, match=r"can't make the repository 'me/mine' on the hub: 403 .*set HF_TOKEN"):
            trainer.push_to_hub()


@pytest.mark.parametrize(
    "name", ["gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size"]
)
def test_a_step_without_records_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Accumulation over no micro-batch ended in a ZeroDivisionError."""
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **{name: 0})
    with pytest.raises(ValueError, match=f"^{name}: expected 1 or more, got 0$"):
        JepaTrainer("preset:tiny", arguments, train_dataset=ROWS)


def test_attributes_that_nothing_reads_are_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """``trainer.compute_metrics = f`` was taken, and ``f`` never called."""
    model = make_model("llama", vocab_size=len(tiny_tokenizer))
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = JepaTrainer(model, arguments, processing_class=tiny_tokenizer)
    for name in ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func", "model_init"):
        setattr(trainer, name, None)
        assert getattr(trainer, name) is None
        with pytest.raises(ValueError, match=f"^{name}: has no effect with this trainer; ") as refused:
            setattr(trainer, name, print)
        assert str(refused.value).endswith(ARGUMENT_REMEDIES[name])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"objective": []}, r"objective: expected Objective\(\[LMLoss\(\), ...\]\) or None, got list"),
        ({"callbacks": TrainerCallback()}, "callbacks: expected a list of callbacks, got TrainerCallback; put it into"),
    ],
)
def test_objects_of_another_kind_are_named(arguments: Any, message: str, tmp_path: Path) -> None:
    """``JepaTrainer`` and ``run`` said what a list or an object lacks, deep inside."""
    with pytest.raises(TypeError, match=f"^{message}"):
        JepaTrainer("preset:tiny", TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=ROWS, **arguments)
    with pytest.raises(TypeError, match=f"^{message}"):
        run(RunConfig(model_name="preset:tiny", output_dir=str(tmp_path / "run")), train_dataset=ROWS, **arguments)


def test_a_model_inside_a_wrapper_is_named(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """``'DataParallel' object has no attribute 'config'``, which other trainers take off by themselves."""
    wrapped: Any = DataParallel(make_model("llama"))
    message = r"^model: expected it without a wrapper, got it in a DataParallel; pass its .module, "
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    for tokenizer in (tiny_tokenizer, None):
        with pytest.raises(ValueError, match=message):
            JepaTrainer(wrapped, arguments, train_dataset=ROWS, processing_class=tokenizer)
    with pytest.raises(ValueError, match=message):
        Jepa(wrapped, tiny_tokenizer)
    with pytest.raises(ValueError, match=message):
        run(RunConfig(output_dir=str(tmp_path / "run")), model=wrapped, tokenizer=tiny_tokenizer, train_dataset=ROWS)

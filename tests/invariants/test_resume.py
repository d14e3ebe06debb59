"""Invariant 6: a run that is killed and resumed ends with the very weights of one that was left alone."""

import copy
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

import tiny
from forked import Commands
from own_term import NextLatent, objective_with
from stepjepa.base.files import write_jsonl
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.lora import LoraSettings
from stepjepa.models.loading import add_lora
from stepjepa.training.trainer import JepaTrainer

STEPS = 14


def command(folder: Path, model: Path, data: Path, *extra: str) -> list[str]:
    # 19 records make 5 steps an epoch, so that the checkpoint at step 8 lies inside the second one. AdamW has state to
    # lose, dropout draws from the global generator, and loss dropout from the step.
    flags = f"--batch_size 2 --grad_accum 2 --max_steps {STEPS} --learning_rate 0.01 --jepa_ratio 0.6 --lbd 0.7"
    return [
        *("train", "--model_name", str(model), "--train_file", str(data)),
        *("--output_dir", str(folder), *flags.split(), "--save_steps", "8", "--logging_steps", "3", "--use_cpu"),
        *("--step_jepa", *extra),
    ]


def measured(folder: Path) -> list[dict[str, float]]:
    """All lines of logs, without what the clock says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clock = ("per_second", "runtime")
    return [{name: value for name, value in line.items() if not name.endswith(clock)} for line in lines]


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(commands: Commands, trained_tokenizer: Any, tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    tiny.make_model("llama", seed=3, attention_dropout=0.1).save_pretrained(model)
    trained_tokenizer.save_pretrained(model)
    write_jsonl(data, [{"messages": list(record.messages)} for record in (tiny.records() * 19)[:19]])
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    assert commands.run(command(whole, model, data), log, folder=whole) == 0, log.read_text()

    given = command(killed, model, data)
    assert commands.run(given, log, folder=killed, when=killed / "checkpoint-8") == -signal.SIGKILL, log.read_text()
    assert not (killed / "model.safetensors").exists()
    resumed = command(killed, model, data, "--resume_from_checkpoint", "last")
    assert commands.run(resumed, log, folder=killed) == 0, log.read_text()

    expected, again = load_file(whole / "model.safetensors"), load_file(killed / "model.safetensors")
    assert all(torch.equal(expected[name], again[name]) for name in expected)
    # The line of step 9 has what came since that of step 6, before and after the resume; the last one has all steps.
    lines = [measured(folder) for folder in (whole, killed)]
    assert lines[0] == lines[1]
    assert [line["step"] for line in lines[1]] == [3, 6, 9, 12, STEPS]
    assert "train_loss" in lines[1][-1]
    for flags, words in (
        (["--predictors", "3"], "begun with other settings (--predictors: 2 -> 3)"),
        (["--finetune_seed", "3"], "begun with other settings (--finetune_seed: 42 -> 3)"),
        (["--batch_size", "4"], "begun with other settings (--batch_size x processes: 2 -> 4)"),
        ([], "the run is finished; there is nothing to resume"),
    ):
        log.unlink()
        assert commands.run([*resumed, *flags], log, folder=killed) == 2, log.read_text()
        assert words in log.read_text()
    # A job that is put back into the queue after its end.
    assert commands.run([*given, "--resume_from_checkpoint", "auto"], log, folder=killed) == 0
    tokens = [json.loads((folder / "run.json").read_text())["results"]["tokens"] for folder in (whole, killed)]
    assert tokens[0] == tokens[1]


EXTRAS: dict[str, dict[str, Any]] = {
    "averaged target": {"target_grad": "ema", "ema_decay": 0.9},
    "head and tube": {"predictor_head": "mlp", "stp": 0.3},
    "regularizers on falling lbd": {"sigreg": 0.2, "variance": 0.3, "lbd_schedule": "cosine"},
    "a term of one's own": {"prompt_loss_weight": 0.4},
}
FILES = {
    "averaged target": "ema.safetensors",
    "head and tube": "predictor_head.safetensors",
    "a term of one's own": "latent_loss.safetensors",
}


def make_trainer(
    tokenizer: Any, folder: Path, *, model: Any = None, objective: Any = None, **options: Any
) -> JepaTrainer:
    """A trainer of nine records; ``options`` are those of ``TrainingArguments``, and ``config``."""
    config = options.pop("config", JepaConfig(mode="step-jepa"))
    return JepaTrainer(
        tiny.make_model("llama", seed=3) if model is None else model,
        tiny.arguments(folder, save_strategy="steps", **options),
        config,
        train_dataset=(tiny.records() * 9)[:9],
        processing_class=copy.deepcopy(tokenizer),
        objective=objective,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("lora", [False, True], ids=["whole model", "adapter"])
@pytest.mark.parametrize("name", EXTRAS)
def test_what_belongs_to_a_run_is_resumed_too(name: str, lora: bool, trained_tokenizer: Any, tmp_path: Path) -> None:
    def trainer(folder: Path) -> JepaTrainer:
        model: Any = tiny.make_model("llama", seed=3)
        if lora:
            torch.manual_seed(5)
            model = add_lora(model, LoraSettings(3), all_predictor_ids(trained_tokenizer))
        config = JepaConfig(mode="step-jepa", lbd=0.7, **EXTRAS[name])
        objective = objective_with(config, *([NextLatent(0.6)] if name.startswith("a term") else []))
        options: dict[str, Any] = {"max_steps": 6, "save_steps": 3, "per_device_train_batch_size": 4}
        return make_trainer(trained_tokenizer, folder, model=model, objective=objective, config=config, **options)

    whole = trainer(tmp_path / "whole")
    begun = {key: value.clone() for key, value in whole.model.named_parameters() if value.requires_grad}
    whole.train()
    for key, value in whole.model.named_parameters():
        assert key not in begun or not torch.equal(value, begun[key]), f"{key} is not trained"
    resumed = trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for (key, value), same in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(value, same), key
    if whole.ema is not None and resumed.ema is not None:
        for key, value in whole.ema._average.items():
            assert torch.equal(value, resumed.ema._average[key]), key
    last = tmp_path / "whole" / "checkpoint-6"
    files = {file.name for file in last.iterdir()}
    for of, file in FILES.items():
        assert (file in files) == (of == name), file
    model_file = "adapter_model.safetensors" if lora else "model.safetensors"
    assert not any("heads" in key or "latent" in key for key in load_file(last / model_file))
    if not lora:
        _, message = AutoModelForCausalLM.from_pretrained(last, output_loading_info=True)
        assert not any(message[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_a_finished_checkpoint_trains_no_further(trained_tokenizer: Any, tmp_path: Path) -> None:
    def weights(steps: int, resume: str | None) -> list[torch.Tensor]:
        trainer = make_trainer(trained_tokenizer, tmp_path, max_steps=steps, save_steps=2, lr_scheduler_type="constant")
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == steps
        return [value.detach().clone() for value in trainer.model.parameters()]

    finished, last = weights(4, None), str(tmp_path / "checkpoint-4")
    assert all(map(torch.equal, finished, weights(4, last)))
    assert not all(map(torch.equal, finished, weights(5, last)))


def test_a_changed_rate_and_decay_take_effect_when_resumed(trained_tokenizer: Any, tmp_path: Path) -> None:
    """The checkpoint's own values stand in the states of optimizer and schedule."""

    class Seen(TrainerCallback):
        groups: list[tuple[float, float]]

        def on_step_begin(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
            self.groups.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]))

    def train(resume: str | None, **changed: Any) -> list[tuple[float, float]]:
        options: dict[str, Any] = {"max_steps": 5, "save_steps": 2, "lr_scheduler_type": "linear"}
        trainer, observed = (
            make_trainer(trained_tokenizer, tmp_path, per_device_train_batch_size=3, **options, **changed),
            Seen(),
        )
        observed.groups = []
        trainer.add_callback(observed)
        trainer.train(resume_from_checkpoint=resume)
        return observed.groups

    # A linear schedule over 5 steps: 1, 4/5, 3/5 ... of the rate.
    assert train(None, learning_rate=1e-3, weight_decay=0.1)[:2] == [(1e-3, 0.1), (8e-4, 0.1)]
    resumed = train(str(tmp_path / "checkpoint-2"), learning_rate=2e-3, weight_decay=0.2)
    assert resumed == [(pytest.approx(rate), 0.2) for rate in (1.2e-3, 8e-4, 4e-4)]

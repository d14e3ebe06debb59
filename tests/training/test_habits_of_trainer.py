"""What users of transformers' Trainer do by habit has its effect here, or is refused with what to do instead."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate import ParallelismConfig
from torch import nn
from torch.nn.functional import embedding
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

import tiny
from stepjepa import JepaConfig, JepaTrainer
from stepjepa.base.errors import UserError
from stepjepa.training.argument_checks import check_arguments

REGULAR = JepaConfig(mode="regular")


def make_trainer(folder: Path, tokenizer: Any, *, jepa: JepaConfig = REGULAR, model: Any = None, **more: Any) -> Any:
    passed = {name: more.pop(name) for name in ("callbacks", "optimizers", "eval_dataset") if name in more}
    return JepaTrainer(
        model or tiny.make_model("llama"),
        tiny.arguments(folder, **{"max_steps": 2, "per_device_train_batch_size": 2, **more}),
        jepa,
        train_dataset=tiny.records(),
        processing_class=copy.deepcopy(tokenizer),
        **passed,
    )


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: not with this trainer, got 0.1; leave it at 0: "),
        ({"auto_find_batch_size": True}, "auto_find_batch_size: .* lower per_device_train_batch_size"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last: .* leave it out: "),
        (
            {"enable_jit_checkpoint": True},
            "enable_jit_checkpoint: .* leave it out: .* on SIGTERM anyway",
        ),
        (
            {"parallelism_config": ParallelismConfig(tp_size=3)},
            "parallelism_config: not with tensor .* tp_size 3: ",
        ),
        ({"parallelism_config": ParallelismConfig(cp_size=5)}, "parallelism_config: not with context .* cp_size 5: "),
        ({"parallelism_config": ParallelismConfig(sp_size=7)}, "parallelism_config: not with sequence .* sp_size 7: "),
        (
            {"parallelism_config": {"tp_size": 1}},
            "parallelism_config: expected accelerate.ParallelismConfig, got {",
        ),
        ({"debug": "underflow_overflow"}, "debug: underflow_overflow can't look into .*; leave it out"),
        ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config: expected dispatch_batches false"),
        ({"train_sampling_strategy": "group_by_length"}, "got 'group_by_length'; .* are sorted by length anyway"),
    ],
)
def test_options_that_would_be_wrong_are_refused_with_a_remedy(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """``debug`` and ``dispatch_batches`` ended in errors of torch in the first step; others named no remedy."""
    with pytest.raises(ValueError, match=words):
        check_arguments(TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **options))


def test_parallelism_of_the_launcher_is_refused_unless_it_is_of_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``accelerate launch --use_parallelism_config`` passes it on in the environment."""
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    arguments = tiny.arguments(tmp_path)
    for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP"):
        with monkeypatch.context() as patch:
            patch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", "3")
            if name.startswith("DP"):
                check_arguments(arguments)
                continue
            with pytest.raises(ValueError, match=f"got {name.lower()}_size 3: every process"):
                check_arguments(arguments)
    check_arguments(tiny.arguments(tmp_path, parallelism_config=ParallelismConfig(dp_shard_size=2)))


def test_an_argument_of_another_kind_is_named(tmp_path: Path) -> None:
    """They were AttributeErrors of the code behind."""
    arguments: Any = tiny.arguments(tmp_path)
    model: Any = tiny.make_model("llama")
    with pytest.raises(TypeError, match=r"^args: expected transformers.TrainingArguments\(.*\), got JepaConfig$"):
        JepaTrainer(model, REGULAR, arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^jepa: expected JepaConfig\(...\) or None, got dict$"):
        JepaTrainer(model, arguments, {"mode": "regular"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^model: expected a model, or the name of one, got None$"):
        JepaTrainer(None, arguments)  # type: ignore[arg-type]


def test_callbacks_may_be_none_and_a_model_a_path(tmp_path: Path, tiny_tokenizer: Any) -> None:
    trainer = make_trainer(tmp_path / "run", tiny_tokenizer, callbacks=None, max_steps=1)
    trainer.train()
    trainer.save_model()
    again = JepaTrainer(tmp_path / "run", tiny.arguments(tmp_path / "next"), REGULAR, train_dataset=tiny.records())
    assert again.model.config.hidden_size == trainer.model.config.hidden_size


# -- methods -----------------------------------------------------------------------------------------------------------


def test_methods_without_a_right_result_say_what_to_call(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """They returned no loss, logits of rows, or the advice to install optuna, which would then ask for model_init."""
    trainer = make_trainer(tmp_path, tiny_tokenizer)
    with pytest.raises(ValueError, match="hyperparameter_search: expected a trainer for each trial"):
        trainer.hyperparameter_search(backend="optuna")
    with pytest.raises(ValueError, match=r"evaluation_loop: expected evaluate\(records\)"):
        trainer.evaluation_loop(trainer.get_train_dataloader(), "mine")
    with pytest.raises(ValueError, match="prediction_step: expected compute_loss"):
        trainer.prediction_step(trainer.model, {}, True)


@pytest.mark.parametrize("name", ["predict", "prediction_step", "evaluation_loop"])
def test_a_subclass_can_not_override_what_is_never_called(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^Mine\.{name} would never be called by a JepaTrainer; override evaluate"):
        type("Mine", (JepaTrainer,), {name: lambda self: None})


def test_a_subclass_may_override_what_is_called(tmp_path: Path, tiny_tokenizer: Any) -> None:
    class Mine(JepaTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    arguments, tokenizer = tiny.arguments(tmp_path, max_steps=1), copy.deepcopy(tiny_tokenizer)
    data = {"train_dataset": tiny.records(), "processing_class": tokenizer}
    Mine(tiny.make_model("llama"), arguments, REGULAR, **data).train()


def trainer_of(kind: Any, folder: Path, tokenizer: Any, **more: Any) -> Any:
    data = {name: more.pop(name) for name in ("eval_dataset",) if name in more}
    data |= {"train_dataset": tiny.records(), "processing_class": copy.deepcopy(tokenizer)}
    return kind(tiny.make_model("llama"), tiny.arguments(folder, max_steps=1, **more), REGULAR, **data)


def test_a_loss_of_ones_own_need_not_pass_on_the_counts_of_the_step(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Loss and gradient were multiplied by ``gradient_accumulation_steps``."""

    class Mine(JepaTrainer):
        def compute_loss(  # type: ignore[override]
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            return super().compute_loss(model, inputs, return_outputs)

    lines = []
    for kind in (JepaTrainer, Mine):
        cut = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 1}
        trainer = trainer_of(kind, tmp_path / kind.__name__, tiny_tokenizer, **cut)
        trainer.train()
        lines.append(trainer.state.log_history[0])
    for name in ("loss", "lm_loss", "grad_norm"):
        assert lines[1][name] == pytest.approx(lines[0][name], rel=1e-5)


def test_a_data_loader_of_ones_own_is_named(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """The training ended in ``AttributeError: 'Mine' object has no attribute 'sampler'``."""

    class Mine(JepaTrainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=2, collate_fn=self.data_collator)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"Mine: a run plans .* what super\(\).get_train_dataloader\(\) makes; choose"):
        trainer_of(Mine, tmp_path, tiny_tokenizer).train()


def test_an_evaluation_of_ones_own_may_choose_the_best_model(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """It was refused as a metric that nothing measures."""

    class Mine(JepaTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {**super().evaluate(*args, **kwargs), "eval_mine": 7.0}

    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "mine", "eval_dataset": tiny.records()}
    trainer = trainer_of(Mine, tmp_path, tiny_tokenizer, **steps, **best)
    trainer.train()
    assert trainer.state.best_metric == 7.0


def test_a_training_step_of_ones_own_is_logged(tmp_path: Path, tiny_tokenizer: Any) -> None:
    class Mine(JepaTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    arguments, tokenizer = tiny.arguments(tmp_path, max_steps=1, logging_steps=1), copy.deepcopy(tiny_tokenizer)
    data = {"train_dataset": tiny.records(), "processing_class": tokenizer}
    trainer = Mine(tiny.make_model("llama"), arguments, REGULAR, **data)
    trainer.train()
    line = trainer.state.log_history[0]
    assert line["lm_loss"] == pytest.approx(line["loss"], rel=1e-4)


# -- effects -----------------------------------------------------------------------------------------------------------


class Rates(TrainerCallback):
    """Keeps the learning rate of every step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])


def test_a_run_made_longer_has_the_rates_of_the_longer_schedule(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """The first step after the resume had the rate of the checkpoint: 0, where the shorter schedule had ended."""
    rates = Rates()
    options = {"learning_rate": 8e-3, "callbacks": [rates], "save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path, tiny_tokenizer, **options).train()
    make_trainer(tmp_path, tiny_tokenizer, **options, max_steps=4).train(resume_from_checkpoint=True)
    assert rates.rates == pytest.approx([8e-3, 4e-3, 4e-3, 2e-3])


def test_schedule_free_optimizers_are_evaluated_with_their_own_weights(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """``optimizer.eval()`` was never called, so that ``optim="schedule_free_adamw"`` was measured at other weights."""
    calls: list[str] = []

    class ScheduleFree(torch.optim.SGD):
        def train(self) -> None:
            calls.append("train")

        def eval(self) -> None:
            calls.append("eval")

    model: Any = tiny.make_model("llama")
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    more = {"eval_dataset": tiny.records(), "eval_strategy": "steps", "eval_steps": 1}
    make_trainer(tmp_path, tiny_tokenizer, model=model, optimizers=(optimizer, None), **more).train()
    # A second switch to the same weights changes nothing.
    assert [name for name, _ in itertools.groupby(calls)] == ["train", "eval"] * 2


@pytest.mark.parametrize("encoding", ["tree", "rows"])
def test_noise_on_embeddings_is_that_of_sequences_not_of_rows(
    encoding: Any, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """``neftune_noise_alpha`` gave less noise the more records a row of trees held."""
    model: Any = tiny.make_model("llama")
    alpha, largest, longest, ids = 7.0, [], [], []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, inputs: ids.append(inputs[0]))

    @torch.no_grad()
    def look(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if model.training:
            clean = embedding(ids[-1], model.model.embed_tokens.weight)
            largest.append(float((inputs[0] - clean).abs().max()))

    model.model.layers[0].register_forward_pre_hook(look)
    jepa = JepaConfig(mode="regular", encoding=encoding)
    trainer = make_trainer(
        tmp_path, tiny_tokenizer, model=model, jepa=jepa, neftune_noise_alpha=alpha, max_steps=1, learning_rate=0.0
    )
    largest.clear()
    compute = trainer.compute_loss

    def watched(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        longest.append(max(len(path) for path in inputs.records.paths))
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = watched
    trainer.train()
    bound = alpha / (longest[0] * model.config.hidden_size) ** 0.5
    assert 0.9 * bound < largest[0] <= bound * 1.01
    assert "neftune_noise_alpha" not in vars(model.model.embed_tokens)


def test_memory_of_an_evaluation_is_measured_where_it_is_asked_for(tmp_path: Path, tiny_tokenizer: Any) -> None:
    trainer = make_trainer(tmp_path, tiny_tokenizer, skip_memory_metrics=False, eval_dataset=tiny.records())
    assert "eval_mem_cpu_alloc_delta" in trainer.evaluate()


def test_a_notebook_has_one_progress_bar(tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There were two: transformers' own of notebooks, and a bar of characters."""
    pytest.importorskip("IPython")
    from transformers.utils.notebook import NotebookProgressCallback

    monkeypatch.setattr("transformers.trainer.DEFAULT_PROGRESS_CALLBACK", NotebookProgressCallback)
    trainer = make_trainer(tmp_path, tiny_tokenizer, disable_tqdm=False)
    names = [type(each).__name__ for each in trainer.callback_handler.callbacks]
    assert [name for name in names if "Progress" in name or "Bar" in name] == ["NotebookProgressCallback"]


def test_a_run_that_was_interrupted_before_its_first_checkpoint_can_begin_again(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """The remedy was to resume it, which then found no checkpoint."""

    class Interrupt(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, tiny_tokenizer, callbacks=[Interrupt()]).train()
    again = make_trainer(tmp_path, tiny_tokenizer)
    with pytest.raises(UserError, match=r"without checkpoints; train\(resume_from_checkpoint='auto'\) begins it again"):
        again.train()
    assert again.train(resume_from_checkpoint="auto").global_step == 2
    with pytest.raises(UserError, match=r"holds the record of a finished run without checkpoints; name another"):
        make_trainer(tmp_path, tiny_tokenizer).train()


def test_early_stopping_by_the_validation_loss_stops(tmp_path: Path, tiny_tokenizer: Any) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 5}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = make_trainer(
        tmp_path,
        tiny_tokenizer,
        eval_dataset=tiny.records(),
        callbacks=[EarlyStoppingCallback(1)],
        learning_rate=1e-2,
        **options,
        **best,
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)


def test_columns_that_nothing_reads_are_named(trained_tokenizer: Any, tmp_path: Path, capsys: Any) -> None:
    """As ``train`` does: of a question, a solution and an answer as a number the solution is not trained."""
    rows = [{"question": "why is it so?", "solution": "It is.\n\nSo.", "answer": 1.0, "id": None}] * 3
    config = JepaConfig(mode="regular")

    def note_of(**data: Any) -> str:
        options = {"processing_class": copy.deepcopy(trained_tokenizer), **data}
        JepaTrainer(tiny.make_model("llama", seed=3), tiny.arguments(tmp_path), config, **options)
        return str(capsys.readouterr().err)

    assert "note: not used: solution\n" in note_of(train_dataset=rows)
    of_datasets = note_of(train_dataset=datasets.Dataset.from_list(rows), eval_dataset=rows)
    assert "note: not used: solution\n" in of_datasets
    assert "not used" not in note_of(train_dataset=tiny.records())

"""``JepaTrainer``: transformers' Trainer with an objective of several terms over trees of token sequences."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import HubStrategy, speed_metrics

from stepjepa.batch.collate import Batch
from stepjepa.batch.dataset import Prepared, StepSampler, prepare
from stepjepa.compute.equal_compute import FlopTracker, Plan
from stepjepa.compute.flops import FlopModel
from stepjepa.config import JepaConfig
from stepjepa.data.records import Data, Views
from stepjepa.evaluation.answering import answer_means
from stepjepa.models.architecture import attach_heads, base_model, without_heads
from stepjepa.models.attention import refuse_flex_training
from stepjepa.models.encode import EmaCallback, EmaEncoder
from stepjepa.models.lm_head import LMHead
from stepjepa.models.loading import load_named, refuse_pickled
from stepjepa.models.setup import set_up
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.term import Context, alone, gather_rows
from stepjepa.training import failures, preparation
from stepjepa.training.callbacks import BarCallback, CollapseCallback, ConsoleCallback, EpochCallback, MetricsCallback
from stepjepa.training.checkpoint_space import SpaceCallback
from stepjepa.training.hub import UploadCallback, create_repository
from stepjepa.training.meter import Meter, measure
from stepjepa.training.nonfinite import NonfiniteGuard, OnNonfinite
from stepjepa.training.processes import refuse_separate_runs, total
from stepjepa.training.saving import (
    apply_settings,
    atomic_checkpoint,
    load_beside,
    loading_heads,
    save_model,
    settings_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback


class JepaTrainer(Trainer):
    """Trains a causal language model with ``gamma * LM loss + lbd * alignment loss``, and any other terms.

    Everything else is transformers' Trainer: schedules, accumulation, checkpoints, resume, reporting, DDP, FSDP.

    Args:
        model: a causal language model, or a PEFT wrapper of one; or a folder, hub id or preset to load it from.
        args: ``TrainingArguments``. ``remove_unused_columns`` is switched off: batches are made here.
        jepa: mode, layout and objective; the defaults are those of LLM-JEPA.
        train_dataset: records, or where they are read from, see ``batch.dataset.prepare``.
        eval_dataset: records for ``evaluate``.
        processing_class: the tokenizer, None for the model's own; predictor tokens are added to it and to the model
            where they are missing.
        views: gives the pairs of views of a record, ``[(source, target), ...]``, instead of those of the mode.
        callbacks: further callbacks.
        optimizers: as in Trainer.
        objective: terms instead of those that ``jepa`` describes; mode, layout and readouts are still its.
        answer_scores: scores generated answers in ``evaluate``, see ``evaluation.answering``; the means are logged as
            ``eval_answer_<score>``.
        track_flop: measure the FLOPs of the first steps and print them beside the derived ones.
        on_nonfinite: ``stop`` the run before a step whose loss or gradient is not finite, or ``skip`` such steps, see
            ``nonfinite``.

    Raises:
        ValueError: the model can run no encoding, or an argument of Trainer contradicts this objective.

    Example:
        >>> args = TrainingArguments("runs/a", max_steps=100)
        >>> trainer = JepaTrainer("preset:tiny", args, JepaConfig(mode="step-jepa"), train_dataset="train.jsonl")
        >>> trainer.train()
    """

    # Losses are divided by the counts of the whole accumulated step, so the Trainer must not divide again.
    loss_is_scaled_for_ga = True
    # Where a checkpoint is being written, before it has its name.
    _part: Path | None = None

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | str,
        args: TrainingArguments,
        jepa: JepaConfig | None = None,
        *,
        train_dataset: Data | Prepared | None = None,
        eval_dataset: Data | Prepared | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        views: Views | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        optimizers: tuple[Any, Any] = (None, None),
        objective: Objective | None = None,
        answer_scores: Callable[[Any, int, int], dict[str, float]] | None = None,
        track_flop: bool = False,
        on_nonfinite: OnNonfinite = "stop",
    ) -> None:
        self.jepa = jepa or JepaConfig()
        self.objective = objective or Objective.from_config(self.jepa)
        preparation.refuse_contradictions(args)
        preparation.refuse_unsized(train_dataset, eval_dataset)
        preparation.refuse_lonely_pairs(self.objective, self.jepa, args)
        wanted = (self.jepa.predictors or 0) if self.jepa.uses_views else 0
        model, processing_class, train_dataset = load_named(
            model, processing_class, train_dataset, predictors=wanted, seed=args.seed
        )
        self._views = views
        preparation.adjust(args, model)
        self.encoding, self.encoding_reason = set_up(model, processing_class, self.jepa, args.seed)
        attach_heads(model, self.objective.heads(base_model(model).config.get_text_config(), args.seed))
        if train_dataset is not None:
            refuse_flex_training(base_model(model), args.device)
        self.prepared = self._prepare(train_dataset, processing_class, "training data")
        self.prepared_eval = self._prepare(eval_dataset, processing_class, "evaluation data")
        how: dict[str, Any] = {"encoding": self.encoding, "device": args.device.type, "processes": args.world_size}
        collator = preparation.make_collator(model, processing_class, self.jepa, self.objective, **how)
        preparation.check_positions(collator, [self.prepared, self.prepared_eval])
        super().__init__(
            model=model,
            args=args,
            data_collator=collator,
            train_dataset=self.prepared.dataset if self.prepared else None,
            eval_dataset=self.prepared_eval.dataset if self.prepared_eval else None,
            processing_class=processing_class,
            callbacks=[EpochCallback(), MetricsCallback(), CollapseCallback(), *callbacks],
            optimizers=optimizers,
        )
        # Versions that do not know loss_is_scaled_for_ga take the same from this.
        self.model_accepts_loss_kwargs = True
        preparation.refuse_data_parallel(args)
        refuse_separate_runs(self.accelerator.num_processes)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            preparation.refuse_sharding(self.jepa, answer_scores)
        self.answer_scores = answer_scores
        self.meter = Meter(self.objective, self.total, self.accelerator.num_processes)
        self.guard = NonfiniteGuard(self, on_nonfinite)
        self.ema: EmaEncoder | None = None
        if self.jepa.target_grad == "ema":
            with without_heads(self.model):
                self.ema = EmaEncoder(self.model, self.jepa.ema_decay)
        # Derived and tried out here, where the model is whole.
        _ = self.flops, LMHead(self.model)
        say = print if self.is_world_process_zero() else None
        self.tracker = FlopTracker(self.plan, self.total, say=say) if track_flop else None
        self._add_callbacks()

    def _add_callbacks(self) -> None:
        """Those that need the trainer itself."""
        args = self.args
        self.remove_callback(PrinterCallback if args.disable_tqdm else ProgressCallback)
        if not args.disable_tqdm:
            self.add_callback(BarCallback())
        self.add_callback(ConsoleCallback())
        self.add_callback(SpaceCallback())
        self.add_callback(self.guard)
        if self.ema is not None:
            self.add_callback(EmaCallback(self.ema, self.model, lambda: self.guard.step_taken))
        if args.push_to_hub and args.hub_strategy != HubStrategy.END:
            about = {"model": base_model(self.model).config._name_or_path, "jepa": self.jepa.to_dict()}
            self.add_callback(UploadCallback(self.hub_model_id, about))

    def _prepare(self, data: Data | Prepared | None, tokenizer: Any, what: str) -> Prepared | None:
        if data is None or isinstance(data, Prepared):
            return data
        return prepare(data, tokenizer, self.jepa, what=what, views=self._views, cache_dir=False)

    def _get_train_sampler(self, train_dataset: Any = None) -> StepSampler:
        """The one order in which records are trained on, for any accumulation and number of processes."""
        assert self.prepared is not None
        return preparation.make_sampler(self.prepared, self.jepa, self.objective, self.args, self.args.world_size)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """As in Trainer: the micro-batches of a step, with what its terms count over accumulation and processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = self._counts(batches)
        self.guard.begin_step()
        self.meter.begin_step(counts)
        return batches, counts

    def _counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        counts = self.objective.counts(batches)
        return dict(zip(counts, self.total(list(counts.values())), strict=True))

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As in Trainer; a loss that is not finite is kept out of the sum that the Trainer logs."""
        self.guard.batches.append(inputs)
        with nullcontext() if self.tracker is None else self.tracker.step(self.state.global_step, inputs):
            loss = super().training_step(model, inputs, num_items_in_batch)
        return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of one micro-batch, scaled so that the gradients of a step add up to the step's mean."""
        counts = self._counts([inputs]) if num_items_in_batch is None else num_items_in_batch
        losses = jepa_loss(model, inputs, self.objective, counts, self.context(counts))
        self.meter.add(inputs, losses, counts)
        # DDP and FSDP average the gradients of the processes, and the counts are already those of all of them.
        loss = self.guard.watch(losses) * self.accelerator.num_processes
        return (loss, losses) if return_outputs else loss

    def context(self, counts: dict[str, float] | None = None, *, training: bool = True) -> Context:
        """What terms may depend on beside a micro-batch; ``counts`` are of the step, None for one with pairs."""
        # A step without views has nothing to bring together, on no process.
        pairs = counts is None or any(counts[name] > 0 for name in self.objective.of_pairs)
        return Context(
            self.state.global_step if training else 0,
            self.args.seed,
            self.progress if training else None,
            gather_rows if self.objective.compares_pairs and pairs else alone,
            None if self.ema is None else self.ema.states,
        )

    @property
    def progress(self) -> float:
        """Share of the run that is over."""
        return self.state.global_step / max(self.state.max_steps, 1)

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums of some numbers over all processes."""
        return total(self.accelerator, values)

    @cached_property
    def flops(self) -> FlopModel:
        """What a pass of the model costs, derived from its modules before it is wrapped or sharded."""
        return FlopModel.of(
            self.model,
            gradient_checkpointing=bool(self.args.gradient_checkpointing),
            reentrant=bool((self.args.gradient_checkpointing_kwargs or {}).get("use_reentrant", False)),
            ema=self.jepa.target_grad == "ema",
        )

    @property
    def plan(self) -> Plan:
        """What every step will cost."""
        if self.prepared is None:
            raise ValueError("plan: expected training records, got none")
        sampler = self._get_train_sampler()
        return preparation.make_plan(self.flops, self.prepared, self.jepa, sampler, self.data_collator, args=self.args)

    def floating_point_ops(self, inputs: Batch) -> int:
        """FLOPs of a micro-batch, forward and backward, padding and attention included."""
        return self.flops.of_batch(inputs)

    # -- the whole ----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer.

        Raises:
            UserError: memory has run out, or a loss or a gradient is not finite; no checkpoint has been touched.
        """
        self.guard.skipped = 0
        with failures.naming_the_batch(lambda: failures.describe_step(self)):
            result = super().train(resume_from_checkpoint, *args, **kwargs)
        self.guard.begin_step()
        self.guard.refuse_weights(self.state.global_step)
        if self.tracker is not None:
            self.tracker.close()
        # What came after the last line of logs.
        self.meter.line({"loss": 0.0}, self.progress, {})
        return result

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As in Trainer, which would train one more step where a run is resumed that has had its last one."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    @property
    def source(self) -> str:
        """What errors call the file of the training records."""
        return self.prepared.source if self.prepared else "<memory>"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the terms, the monitors and the speed to a line of training logs."""
        if "loss" in logs:
            self.store_flos()
            if not math.isfinite(logs.get("grad_norm", 0.0)):
                # Of a step that was skipped.
                del logs["grad_norm"]
            more = {"nonfinite_steps": float(self.guard.skipped)} if self.guard.skipped else {}
            # The weights with a schedule are those of the last step.
            progress = max(self.state.global_step - 1, 0) / max(self.state.max_steps, 1)
            logs = self.meter.line(logs, progress, {**more, "total_flos": self.state.total_flos})
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: Data | Prepared | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """As in Trainer: losses and monitors on held-out records, see ``held_out``; scores of answers, if asked for."""
        chosen = self.prepared_eval
        if eval_dataset is not None and eval_dataset is not self.eval_dataset:
            chosen = self._prepare(eval_dataset, self.processing_class, "evaluation data")
        if chosen is None:
            raise ValueError("evaluate: expected an eval_dataset, got none; pass one here or to JepaTrainer")
        start, model = time.time(), self.model_wrapped if self.is_fsdp_enabled else self.model
        model.eval()
        metrics, records = measure(self, model, chosen)
        if self.answer_scores is not None and chosen is self.prepared_eval:
            metrics |= answer_means(self.answer_scores, self)
        model.train()
        self.meter.pause(time.time() - start)
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        named.update(speed_metrics(metric_key_prefix, start, num_samples=records))
        self.log(named)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    # -- saving and loading -------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        """Private, since no other hook tells the Trainer to write a checkpoint elsewhere."""
        return super()._get_output_dir(trial) if self._part is None else str(self._part)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As in Trainer, but atomically. Private, since ``on_save`` comes after rotation, which must wait for it."""
        self.state.num_input_tokens_seen = int(self.meter.pending_tokens())
        with atomic_checkpoint(self):
            super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Private, since ``save_model`` collects the state of sharded weights, heads among them, and hands it over."""
        save_model(self, super()._save, output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Private, since the heads are no part of the model that the Trainer loads."""
        refuse_pickled(resume_from_checkpoint)
        failures.refuse_other_adapter(self.model, Path(resume_from_checkpoint))
        with loading_heads(self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """The same at the end of training."""
        best = str(self.state.best_model_checkpoint)
        with loading_heads(self.model, best):
            super()._load_best_model()
        if self.ema is not None:
            self.ema.load(best)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Private, since only here it is known which weights a checkpoint lacks."""
        failures.refuse_other_weights(self.model, load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Private, since averaged weights must be loaded before the first step and after the model."""
        wanted = [] if checkpoint is None else settings_of(self.optimizer)
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            failures.refuse_other_optimizer(self.optimizer)
            apply_settings(wanted, self.optimizer, self.lr_scheduler)
            load_beside(self, Path(checkpoint))

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """As in Trainer, with errors that name the remedy."""
        if self.is_world_process_zero():
            name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            private = self.args.hub_private_repo if private is None else private
            self.hub_model_id = create_repository(name, private=private, token=token or self.args.hub_token)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing: ``UploadCallback`` does it when the checkpoint has its name, and with nothing else of the folder."""

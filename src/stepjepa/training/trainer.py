"""``JepaTrainer``: transformers' Trainer with an objective of several terms over trees of token sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import SaveStrategy, TrainOutput

from stepjepa.base.files import locked
from stepjepa.base.processes import check_launch, is_main_process
from stepjepa.batch.dataset import Prepared, StepSampler
from stepjepa.batch.micro_batch import Batch
from stepjepa.config.jepa import JepaConfig, check_objective_effects
from stepjepa.config.run import GroupBy
from stepjepa.data.record import Data, Views
from stepjepa.models.architecture import without_heads
from stepjepa.models.ema import EmaEncoder
from stepjepa.models.weights import autocast_dtype
from stepjepa.objectives.jepa import Jepa
from stepjepa.objectives.objective import Losses, Objective, jepa_loss
from stepjepa.objectives.term import Context
from stepjepa.store.folder import check_is_folder
from stepjepa.training import argument_checks, checks
from stepjepa.training.callbacks import BarCallback, EmaCallback, LogCallback, NonfiniteGuard, place_tensorboard
from stepjepa.training.checkpoints import CheckpointingTrainer
from stepjepa.training.description import describe
from stepjepa.training.exhausted_memory import naming_longest_record
from stepjepa.training.flops import FlopModel
from stepjepa.training.held_out import EvaluatingTrainer
from stepjepa.training.held_out_sets import EvalData
from stepjepa.training.kernels import without_cudnn_attention
from stepjepa.training.meter import Meter, sums_over_processes
from stepjepa.training.metric_checks import check_best_metric
from stepjepa.training.named import load_named
from stepjepa.training.noise import noise_of_sequences
from stepjepa.training.optimizers import check_optimizer, optimizer_and_schedule
from stepjepa.training.passed_names import PassedNames
from stepjepa.training.plan import FlopTracker, Plan
from stepjepa.training.private import check_transformers
from stepjepa.training.recording import Recorder
from stepjepa.training.refused_methods import RefusedMethods
from stepjepa.training.resuming import ResumeCallback
from stepjepa.training.step_pairs import StepPairs
from stepjepa.training.trackers import ObjectiveInTracker
from stepjepa.training.trainer_data import DataTrainer

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

Sums = dict[str, float]  # by the names of terms


class JepaTrainer(RefusedMethods, DataTrainer, EvaluatingTrainer, CheckpointingTrainer):
    """transformers' Trainer with the loss ``gamma * LM loss + lbd * alignment loss``, and any other terms.

    Args:
        model: a causal language model, or a PEFT wrapper of one; or a folder, hub id or preset to load it from.
        args: ``TrainingArguments``. ``push_to_hub`` uploads no checkpoints; call the method of that name.
        jepa: mode, layout and objective; the defaults are those of LLM-JEPA.
        train_dataset: records, as a list, a ``datasets.Dataset`` or a file name.
        eval_dataset: records for ``evaluate``; or several sets by name, whose metrics are called ``eval_NAME_loss``.
        processing_class: the tokenizer, None for the model's own; it and the model get predictor tokens.
        views: gives the pairs of views of a record, ``[(source, target), ...]``, instead of those of the mode.
        callbacks: further callbacks.
        optimizers: an optimizer and its schedule; None for those that ``args`` describes.
        optimizer_cls_and_kwargs: as in Trainer: a class of optimizers and its arguments, made of all that is trained.
        objective: terms instead of those that ``jepa`` describes; mode, layout and readouts still come from ``jepa``.
        answer_scores: lets the model answer in ``evaluate``, see ``AnswerScores``: the sums of its scores over the
            records of a process, and ``answers``, how many they are; an attribute ``names`` has those of the scores.
        retrieval_scores: ranks the targets of held-out records in ``evaluate``, see ``RetrievalScores``: takes the
            ``Jepa`` and a batch size, and gives metrics by name, the same in every process.
        track_flop: measure the FLOPs of the first steps and print them beside the derived ones.
        group_by: ``prompt`` draws records of one prompt, or a long beginning of it, together; None draws each alone.

    Attributes:
        jepa: the configuration, as it was passed.
        bound: the ``Jepa``, which is the configuration with model and tokenizer; it embeds, answers and saves.
        objective: the terms of the loss.
        prepared, held_out: training records as tokens, None without; held-out ones, by the names of their sets.

    Raises:
        TypeError: there is no such argument; for those of other trainers the message says what to do instead.
        ValueError: the model can run no encoding, or an argument of Trainer contradicts this objective.
        UserError: the installed transformers lacks a private part that this class relies on, see ``training.private``.

    Example:
        >>> args = TrainingArguments("runs/a", max_steps=100)
        >>> trainer = JepaTrainer("preset:tiny", args, JepaConfig(mode="step-jepa"), train_dataset="train.jsonl")
        >>> trainer.train()
    """

    # Losses are divided by the counts of the whole accumulated step, so the Trainer must not divide again.
    loss_is_scaled_for_ga = True

    meter: Meter
    guard: NonfiniteGuard
    resume: ResumeCallback
    ema: EmaEncoder | None

    _in_step = False  # whether ``compute_loss`` is called for a step of training
    _step_counts: Sums

    @argument_checks.naming_remedies
    def __init__(
        self,
        model: PreTrainedModel | nn.Module | str | PathLike[str],
        args: TrainingArguments,
        jepa: JepaConfig | None = None,
        *,
        train_dataset: Data | Prepared | None = None,
        eval_dataset: EvalData | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        views: Views | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] | None = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        objective: Objective | None = None,
        answer_scores: Callable[[PreTrainedModel, int, int], dict[str, float]] | None = None,
        retrieval_scores: Callable[[Jepa, int], dict[str, float]] | None = None,
        track_flop: bool = False,
        group_by: GroupBy | None = None,
    ) -> None:
        check_transformers()
        argument_checks.check_objects(model=model, args=args, jepa=jepa, objective=objective)
        check_is_folder(Path(str(args.output_dir)))
        self.jepa = jepa or JepaConfig()
        callbacks, optimizers = argument_checks.as_callbacks(callbacks), optimizer_and_schedule(optimizers)
        # Recorded before names are replaced by what is loaded.
        self.passed = PassedNames.of(
            model,
            train_dataset,
            eval_dataset,
            tokenizer=processing_class,
            objective=objective,
            optimizer=optimizers[0],
            views=views,
        )
        self.recorder: Recorder = Recorder(self)
        sets = {"trains": train_dataset is not None, "held_out": eval_dataset is not None}
        self._check_settings(args, objective, group_by, **sets)
        model, tokenizer, train_dataset = load_named(
            model, processing_class, train_dataset, predictors=self.jepa.used_predictors, seed=args.seed
        )
        checks.check_adapters(model, trains=train_dataset is not None)
        argument_checks.adjust(args, model)
        before = {*model.parameters()}
        self._bind(model, tokenizer, args, objective)
        check_optimizer(optimizers[0], model, before)
        if train_dataset is not None:
            checks.check_attention(args, model)
        self._views = views
        self._prepare_data(train_dataset, eval_dataset, tokenizer)
        checks.check_batch_size(self.jepa, args, self.objective.compares_pairs, self.prepared)
        for held_out in self.held_out.values():
            checks.check_held_out_batch(self.jepa, args, self.objective.compares_pairs, held_out)
        super().__init__(
            model=model,
            args=args,
            data_collator=self.bound.collator,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            processing_class=tokenizer,
            callbacks=[
                self.recorder,
                LogCallback(self.recorder, self.objective.compares_pairs),
                ObjectiveInTracker(self.jepa),
                *callbacks,
            ],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        argument_checks.check_processes(args, self.accelerator.num_processes)
        adds_metrics = type(self).evaluate is not JepaTrainer.evaluate or any(
            not type(callback).__module__.startswith("transformers.") for callback in callbacks
        )
        if not adds_metrics:
            scores = {"answer": answer_scores, "retrieval": retrieval_scores}
            check_best_metric(args, self.objective.metrics, scores, self.held_out)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            checks.check_sharding(self.jepa, answer_scores, retrieval_scores)
        self.answer_scores = answer_scores
        self.retrieval_scores = None if retrieval_scores is None else partial(retrieval_scores, self.bound)
        self.evaluated: dict[int, dict[str, float]] = {}  # step -> metrics, of the evaluations since training began
        self._add_parts(args, track_flop=track_flop)

    def _check_settings(
        self,
        args: TrainingArguments,
        objective: Objective | None,
        group_by: GroupBy | None,
        *,
        trains: bool,
        held_out: bool,
    ) -> None:
        """Check all that can be checked before a model is loaded, which may take long."""
        argument_checks.check_arguments(args)
        check_objective_effects(self.jepa, own_terms=objective is not None)
        self.group_by = checks.check_grouping(group_by, self.jepa)
        objective = objective or Objective.from_config(self.jepa)
        checks.check_objective(self.jepa, args, objective, trains=trains, held_out=held_out)

    def _check_records(self, *prepared: Prepared) -> None:
        checks.check_positions(self.bound.collator, *prepared)
        checks.check_layout(self.bound.collator, self.objective, self.jepa, *prepared)

    def _bind(
        self,
        model: PreTrainedModel | nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        args: TrainingArguments,
        objective: Objective | None,
    ) -> None:
        """Bind the configuration to model and tokenizer, which are set up for training, in place."""
        self.bound = Jepa(
            model,
            tokenizer,
            self.jepa,
            objective=objective,
            seed=args.seed,
            device=args.device,
            processes=args.world_size,
            autocast=autocast_dtype(bf16=args.bf16, fp16=args.fp16),
        )
        self.objective = self.bound.objective
        self.encoding, self.encoding_reason = self.bound.encoding, self.bound.encoding_reason

    def _add_parts(self, args: TrainingArguments, *, track_flop: bool) -> None:
        """Add what runs beside Trainer: meter, FLOPs, averaged weights, and callbacks that Trainer does not have."""
        self.meter = Meter(self.objective, self.total, self.accelerator.num_processes)
        self.step_pairs = StepPairs(self)
        self.resume = ResumeCallback(self)
        self.add_callback(self.resume)
        self.ema = None
        if self.jepa.target_grad == "ema":
            with without_heads(self.model):
                self.ema = EmaEncoder(self.model, self.jepa.ema_decay)
            self.add_callback(EmaCallback(self.ema, self.model))
        # Must run before sharding: needs the complete model.
        self.flops = FlopModel.of_training(self.model, self.jepa, args)
        say = print if self.is_world_process_zero() else lambda line: None
        self.tracker = FlopTracker(self.flops, self.total, say) if track_flop else None
        # A notebook has another bar, with a table, which stays.
        if self.pop_callback(PrinterCallback if args.disable_tqdm else ProgressCallback) and not args.disable_tqdm:
            self.add_callback(BarCallback())
        self.guard = NonfiniteGuard(self)
        self.add_callback(self.guard)

    def _get_train_sampler(self, train_dataset: object = None) -> StepSampler:
        """Return the sampler of the plan; private, since no public hook takes a sampler."""
        self.sampler = self.plan.sampler
        return self.sampler

    # -- a step -------------------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Sums]:
        """Return the micro-batches of a step, and the denominators of the means of its terms.

        Args:
            epoch_iterator: of the data loader.
            num_batches: micro-batches of the step on this process.
            device: of the micro-batches.

        Returns:
            The micro-batches, and term name -> count over all of them and all processes.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = self._step_counts = self._counts(batches)
        self.guard.begin_step()
        self.step_pairs.begin_step(batches, counts)
        self.meter.begin_step(counts)
        return batches, counts

    def _counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        counts = self.objective.counts(batches)
        return dict(zip(counts, self.total(list(counts.values())), strict=True))

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Sums | None = None) -> Tensor:
        self.guard.batches.append(inputs)
        self._in_step = True
        try:
            with nullcontext() if self.tracker is None else self.tracker.micro_batch(self.state.global_step, inputs):
                loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
                return loss
        finally:
            self._in_step = False

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Sums | None = None
    ) -> Tensor | tuple[Tensor, Losses]:
        """Return the loss of one micro-batch, scaled so that the gradients of a step add up to the step's mean.

        Args:
            model: wrapped or not.
            inputs: a micro-batch on the model's device.
            return_outputs: also return the parts of the loss.
            num_items_in_batch: the counts of the whole step, from :meth:`get_batch_samples`; None for those of the
                step that is being trained, and outside of training for those of the micro-batch.
        """
        counts = num_items_in_batch
        if counts is None:
            # A subclass need not pass them on.
            counts = self._step_counts if self._in_step else self._counts([inputs])
        # Not a call by a callback or for held-out records, which is no part of the line of logs. A subclass may have a
        # ``training_step`` of its own.
        in_step, context = self._in_step or num_items_in_batch is not None, self.context()
        if in_step:
            context = self.step_pairs.add_to(context, model, inputs)
        with noise_of_sequences(self.model, inputs, self.neftune_noise_alpha):
            losses = jepa_loss(model, inputs, self.objective, counts, context)
        loss = losses.loss
        if in_step:
            self.meter.add(inputs, losses, counts)
            loss = self.guard.watch(losses)
        # DDP and FSDP average the gradients of the processes, and the counts are already those of all of them.
        loss = loss * self.accelerator.num_processes
        return (loss, losses) if return_outputs else loss

    def context(self, *, training: bool = True) -> Context:
        """Return what terms may depend on beside a micro-batch: step, seed, progress, gathering, averaged weights."""
        return Context(
            step=self.state.global_step if training else 0,
            seed=self.args.seed,
            progress=self.state.global_step / max(self.state.max_steps, 1) if training else None,
            gather=self.objective.gather,
            ema_states=None if self.ema is None else self.ema.states,
        )

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each number over all processes."""
        return sums_over_processes(self.accelerator, values)

    @property
    def plan(self) -> Plan:
        """The records and the FLOPs of every step, known before training; ValueError without training records."""
        if self.prepared is None:
            raise ValueError("plan: expected training records, got none")
        return Plan.of(
            self.flops,
            self.prepared.dataset,
            self.data_collator,
            self.jepa,
            self.args,
            compares_pairs=self.objective.compares_pairs,
            processes=self.args.world_size,
            group_by=self.group_by,
        )

    def floating_point_ops(self, inputs: Batch) -> int:
        """Return the FLOPs of a micro-batch, forward and backward, padding and attention included."""
        return self.flops.of_batch(inputs)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Tensor | float | None:
        """Store the norm for the guard. Private: no hook gets it, and a second norm would read all gradients again."""
        self.guard.norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        return self.guard.norm

    # -- a run -------------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        *args: Any,
        allow_changes: bool = False,
        **kwargs: Any,
    ) -> TrainOutput:
        """Train as Trainer does, and record the run in its folder as ``stepjepa train`` does.

        At the end the folder holds the trained model, unless ``save_strategy`` is ``no``: then ``save_model()`` saves
        it. A further call trains on, as a further launch of the same run; earlier checkpoints get names of their call.

        Args:
            resume_from_checkpoint: a checkpoint folder; True or ``last`` for the last complete one in the run folder,
                ``auto`` for the same if there is any.
            args: as in Trainer.
            allow_changes: resume although data, their order or the objective have changed.
            kwargs: as in Trainer.

        Raises:
            UserError: the run folder holds the record of another run or of other settings, or a file of the user's own
                that would be written over; another process trains in it; memory has run out, or a loss or a gradient is
                not finite.
        """
        check_launch()
        self.recorder.describe(*describe(self))
        with locked(self.recorder.folder) if is_main_process() else nullcontext():
            checkpoint, resumes = self.recorder.open(resume_from_checkpoint), bool(resume_from_checkpoint)
            with self.recorder.launch(checkpoint, resumes=resumes, allow_changes=allow_changes):
                result = self.train_steps(checkpoint, *args, **kwargs)
                self.recorder.finish(save=self.args.save_strategy != SaveStrategy.NO)
        return result

    def train_steps(self, checkpoint: str | None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train without a record of it; arguments and errors as for :meth:`train`."""
        self.evaluated.clear()
        place_tensorboard(self.callback_handler.callbacks, self.recorder.folder)
        with without_cudnn_attention(), naming_longest_record(self, self.guard.batches):
            result: TrainOutput = super().train(checkpoint, *args, **kwargs)
        self.guard.begin_step()
        self.guard.check_weights(self.state.global_step)
        if self.tracker is not None:
            self.tracker.close()
        # Count the tokens of the steps after the last line of logs.
        self.meter.line({}, 1.0)
        return result._replace(training_loss=result.metrics["train_loss"])

    def _run_epoch(self, *args: object, **kwargs: object) -> None:
        """Run an epoch as Trainer does, but no further step of a resumed run that has taken its last one."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if not hasattr(self, "sampler"):
            raise ValueError(
                f"{type(self).__name__}: a run plans the records of every step, so get_train_dataloader must return "
                "what super().get_train_dataloader() makes; choose and order the records of train_dataset, and pass "
                "train_sampling_strategy='sequential'"
            )
        # Within a resumed epoch, too, where accelerate does not reach the sampler of several processes.
        self.sampler.set_epoch(int(self.state.epoch))
        super()._run_epoch(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the terms, the monitors and the speed to a line of training logs."""
        if "loss" in logs:
            self.store_flos()
            if not math.isfinite(logs.get("grad_norm", 0.0)):
                # The scaler of fp16 has skipped the step.
                del logs["grad_norm"]
            # The weights with a schedule are those of the last step.
            progress = max(self.state.global_step - 1, 0) / max(self.state.max_steps, 1)
            logs = self.meter.line({**logs, "total_flos": self.state.total_flos}, progress)
        if "train_loss" in logs:
            # Changed in place, since ``train`` returns this dictionary.
            logs["train_loss"] = self.resume.mean_loss()
        # An evaluation may come before any training.
        place_tensorboard(self.callback_handler.callbacks, self.recorder.folder)
        super().log(logs, start_time)

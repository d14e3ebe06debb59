"""``JepaTrainer``: transformers' Trainer with the JEPA objective."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.trainer_utils import speed_metrics

from stepjepa.compute.flop_callback import FlopTracker
from stepjepa.config import JepaConfig
from stepjepa.data.records import as_records
from stepjepa.evaluation.in_training import COUNT
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.grouping import CPU_PASS_COST, GroupCollator
from stepjepa.forests.preparation import Prepared, prepare
from stepjepa.models.architecture import has_experts
from stepjepa.models.ema import EmaCallback, EmaEncoder
from stepjepa.models.embeddings import Outputs, forward_groups
from stepjepa.models.flex import refuse_flex_training
from stepjepa.models.lm_loss import plain_head
from stepjepa.models.predictor_head import without_head
from stepjepa.models.setup import base_model, set_up
from stepjepa.objectives.gathering import gather_rows
from stepjepa.objectives.monitors import Window
from stepjepa.objectives.objective import Gather, Objective, Parts, Sums, alone
from stepjepa.training.callbacks import CollapseCallback, ConsoleCallback, EpochCallback, MetricsCallback
from stepjepa.training.checks import (
    check_positions,
    refuse_contradictions,
    refuse_lonely_pairs,
    refuse_sharding,
)
from stepjepa.training.guarded import GuardedTrainer
from stepjepa.training.held_out import measure
from stepjepa.training.logged import LoggedTrainer
from stepjepa.training.nonfinite import OnNonfinite
from stepjepa.training.out_of_memory import naming_the_batch
from stepjepa.training.resuming import ResumingTrainer
from stepjepa.training.saving import SavingTrainer
from stepjepa.training.streaming import Data, StreamingTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback


class JepaTrainer(ResumingTrainer, LoggedTrainer, SavingTrainer, GuardedTrainer, StreamingTrainer):
    """Trains a causal language model with ``gamma * LM loss + lbd * alignment loss``.

    Everything else is transformers' Trainer: schedules, accumulation, checkpoints, resume, reporting, DDP, FSDP.

    Args:
        model: a causal language model, or a PEFT wrapper of one.
        args: ``TrainingArguments``. ``remove_unused_columns`` is switched off: batches are made here.
        jepa: mode, layout and objective; the defaults are those of LLM-JEPA.
        train_dataset: records (dicts with ``messages``, ``records.Record``, or ``preparation.prepare``'s result), or a
            stream of them: a ``RecordStream``, an ``IterableDataset``, or what else can be iterated again and again and
            has no length; ``args.max_steps`` is needed then.
        eval_dataset: the same, for ``evaluate``; always prepared whole.
        processing_class: the tokenizer; predictor tokens are added to it and to the model where they are missing.
        callbacks: further callbacks.
        optimizers: as in Trainer.
        answer_scores: called by ``evaluate`` with model, rank and number of processes, it lets the model answer and
            returns sums of scores, see ``evaluation.in_training``; their means are logged as ``eval_answer_<score>``,
            so that ``metric_for_best_model="answer_exact"`` keeps the checkpoint that answers best.
        track_flop: measure the FLOPs of the first steps and print them beside the derived ones.
        on_nonfinite: ``stop`` ends the run with a ``UserError`` before a step whose loss or gradient is not finite;
            ``skip`` leaves such steps out, up to ``nonfinite.MOST_IN_A_ROW`` in a row, counted in the logs as
            ``nonfinite_steps``. Both name the records and keep the batch in the run folder.

    Attributes:
        prepared: the training records as forests, with counts; None for a stream, see ``StreamingTrainer``.
        encoding: ``forest`` or ``rows``, and ``encoding_reason``, why.
        num_tokens: tokens trained on so far, over all processes, padding not counted.

    Raises:
        ValueError: the model can run neither encoding, or an argument of Trainer contradicts this objective.

    Example:
        >>> model, tokenizer = load_model("preset:tiny", texts=[...])
        >>> trainer = JepaTrainer(model, TrainingArguments("runs/a"), JepaConfig(mode="step-jepa"),
        ...                       train_dataset=read_records("train.jsonl"), processing_class=tokenizer)
        >>> trainer.train()
    """

    # Losses are divided by the counts of the whole accumulated step, so the Trainer must not divide again.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        args: TrainingArguments,
        jepa: JepaConfig | None = None,
        *,
        train_dataset: Data | None = None,
        eval_dataset: Data | None = None,
        processing_class: PreTrainedTokenizerBase,
        callbacks: Sequence[TrainerCallback] = (),
        optimizers: tuple[Any, Any] = (None, None),
        answer_scores: Callable[[Any, int, int], dict[str, float]] | None = None,
        track_flop: bool = False,
        on_nonfinite: OnNonfinite = "stop",
    ) -> None:
        self.jepa = jepa or JepaConfig()
        self.objective = Objective.from_config(self.jepa, args.seed)
        self.seed = args.seed
        self._lbd = self.objective.lbd_at(0.0)
        refuse_contradictions(args)
        refuse_lonely_pairs(self.jepa, args)
        args.remove_unused_columns = False
        # A process that only the CPU serves has nothing to pin.
        args.dataloader_pin_memory = args.dataloader_pin_memory and torch.accelerator.is_available()
        if args.ddp_find_unused_parameters is None and not has_experts(model):
            # All weights take part in every step; looking for others costs a walk through the graph.
            args.ddp_find_unused_parameters = False
        self.encoding, self.encoding_reason = set_up(model, processing_class, self.jepa, args.seed)
        to_prepare = self._keep_stream(train_dataset, args, track_flop)
        self.prepared = self._prepare(to_prepare, processing_class, "training data")
        self.prepared_eval = self._prepare(eval_dataset, processing_class, "evaluation data")
        check_positions(base_model(model), [self.prepared, self.prepared_eval])
        pad = processing_class.pad_token_id
        if train_dataset is not None:
            refuse_flex_training(base_model(model), args.device)
        collator = GroupCollator(ForestCollator(0 if pad is None else int(pad), self.encoding))
        if args.device.type == "cpu" and args.world_size == 1:
            collator = replace(collator, pass_cost=CPU_PASS_COST)
        super().__init__(
            model=model,
            args=args,
            data_collator=collator,
            train_dataset=self._train_dataset(model, processing_class),
            eval_dataset=self.prepared_eval.dataset if self.prepared_eval else None,
            processing_class=processing_class,
            callbacks=[EpochCallback(), MetricsCallback(), CollapseCallback(), *callbacks],
            optimizers=optimizers,
        )
        # Versions that do not know loss_is_scaled_for_ga take the same from this.
        self.model_accepts_loss_kwargs = True
        ConsoleCallback.install(self)
        if self.args.n_gpu > 1:
            raise ValueError(
                f"expected one device per process, got {self.args.n_gpu} under DataParallel, which can't carry "
                "this objective; start with torchrun, or set CUDA_VISIBLE_DEVICES to one device"
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            refuse_sharding(self.jepa, answer_scores)
        if self.jepa.target_grad == "ema":
            with without_head(self.model):
                self.ema = EmaEncoder(self.model, self.jepa.ema_decay)
            self.add_callback(EmaCallback(self.ema, self.model, lambda: self.step_taken))
        # Derived and tried out here, where the model is whole.
        flops = self.flops
        plain_head(self.model)
        if track_flop:
            say = print if self.is_world_process_zero() else None
            self.tracker = FlopTracker(flops, self.plan, say=say, total=self._total)
        self.answer_scores = answer_scores
        self._guard(on_nonfinite)
        self._window = Window()
        self._start_window()

    def _prepare(self, data: Data | None, tokenizer: PreTrainedTokenizerBase, what: str) -> Prepared | None:
        if data is None:
            return None
        prepared = (
            data if isinstance(data, Prepared) else prepare(list(as_records(data)), tokenizer, self.jepa, what=what)
        )
        if not self.jepa.stp:
            return prepared
        # A data set of this trainer's own: another one may draw from the same forests by another seed.
        return replace(prepared, dataset=prepared.dataset.with_triples(self.seed))

    # -- the step -----------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """The loss of one micro-batch, scaled so that the gradients of a step add up to the step's mean."""
        groups: list[dict[str, Tensor]] = inputs["groups"]
        if num_items_in_batch is None:
            num_items_in_batch = self._counts([inputs], self.args.device)
        outputs, parts = self._run(model, inputs, num_items_in_batch)
        self._lbd = self.objective.lbd_at(self._progress())
        # DDP and FSDP average the gradients of the processes, and the counts are already those of all of them.
        world = self.accelerator.num_processes
        records, without_pair = torch.stack([group["num_records"] for group in groups]).sum(0)
        self._window.add(
            **parts,
            tokens=torch.cat([group["num_tokens"] for group in groups]).sum(),
            records=records,
        )
        # A step that loss dropout leaves without views says nothing about pairs.
        with_views = num_items_in_batch[1] > 0
        self._window.add(records_with_views=records * with_views, records_without_pair=without_pair * with_views)
        if len(outputs.source):
            self._window.add_pairs(outputs.source, outputs.target)
        loss = self.spoil(parts["loss"], parts) * world
        return (loss, outputs) if return_outputs else loss

    def _run(self, model: nn.Module, inputs: dict[str, Any], counts: Tensor) -> tuple[Outputs, Parts]:
        outputs = self._encode(model, inputs["groups"])
        # A step without views has nothing to bring together, on no process.
        gather: Gather = gather_rows if self.jepa.compares_pairs and counts[1] > 0 else alone
        sums = self.objective.sums(outputs, step=self.state.global_step, gather=gather)
        return outputs, self.objective.parts(sums, counts, self._progress())

    def parts_of(self, model: nn.Module, inputs: dict[str, Any], counts: Tensor | None) -> dict[str, Tensor]:
        """See ``GuardedTrainer``."""
        return self._run(model, inputs, self._counts([inputs], self.args.device) if counts is None else counts)[1]

    @property
    def source(self) -> str:
        """See ``GuardedTrainer``."""
        return self.stream.name if self.stream is not None else self.prepared.source if self.prepared else "<memory>"

    def _encode(self, model: nn.Module, groups: list[dict[str, Tensor]]) -> Outputs:
        """What the objective needs of a batch."""
        outputs = forward_groups(model, groups, self.jepa.jepa_layer)
        if self.ema is not None:
            # Without gradient also where there is none: no process may wait for another in the backward pass.
            target = self.ema.targets(groups, self.jepa.jepa_layer) if len(outputs.source) else outputs.target.detach()
            outputs = outputs._replace(target=target)
        return outputs

    def _progress(self) -> float:
        """Share of the run that is over."""
        return self.state.global_step / max(self.state.max_steps, 1)

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Tensor:
        """Labelled tokens, pairs and triples of the whole step, over accumulation and processes: ``[3]``."""
        counts = self._counts(batch_samples, device)
        self._window.add(steps=1, jepa_steps=(counts[1] > 0).float())
        return counts

    def _counts(self, batches: list[dict[str, Any]], device: torch.device) -> Tensor:
        groups = [group for batch in batches for group in batch["groups"]]
        labels = sum(group["label_index"].numel() for group in groups)
        pairs = sum(group["source_index"].numel() for group in groups)
        triples = sum(len(group["triple_index"]) for group in groups)
        counts = torch.tensor(
            [labels, pairs, triples], dtype=torch.float64, device=device if device.type != "mps" else "cpu"
        )
        if self.accelerator.num_processes > 1:
            counts = self.accelerator.reduce(counts, "sum")
        return counts

    # -- the whole ----------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer."""
        self._start_window()
        result = super().train(*args, **kwargs)
        if self.tracker is not None:
            self.tracker.close()
        # What came after the last line of logs.
        self._window_metrics()
        return result

    def evaluate(
        self,
        eval_dataset: Data | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Losses and monitors on held-out records, see ``held_out``; scores of answers, if asked for.

        Args:
            eval_dataset: records instead of those given at the start.
            ignore_keys: nothing here has keys to ignore; taken because Trainer's method takes it.
            metric_key_prefix: before every name.

        Raises:
            ValueError: there are no records to evaluate on.
        """
        del ignore_keys
        chosen = self.prepared_eval
        if eval_dataset is not None and eval_dataset is not self.eval_dataset:
            chosen = self._prepare(eval_dataset, self.processing_class, "evaluation data")
        if chosen is None:
            raise ValueError("evaluate: expected an eval_dataset, got none; pass one here or to JepaTrainer")
        start = time.time()
        model = self.model_wrapped if self.is_fsdp_enabled else self.model
        model.eval()
        metrics, records = measure(
            chosen,
            self.objective,
            lambda batch: self._measure_batch(model, batch, chosen.source),
            collator=self.data_collator,
            batch_size=self.args.per_device_eval_batch_size,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
            total=self._total,
        )
        model.train()
        if self.answer_scores is not None and chosen is self.prepared_eval:
            metrics |= self._answer_metrics(self.answer_scores)
        # The speed of training is that of training.
        self._window_start += time.time() - start
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        named.update(speed_metrics(metric_key_prefix, start, num_samples=records))
        self.log(named)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    @torch.no_grad()
    def _measure_batch(self, model: nn.Module, batch: dict[str, Any], source: str) -> tuple[Outputs, Sums]:
        named = naming_the_batch(lambda: self.describe_memory_of_evaluation(batch, source))
        with named, self.compute_loss_context_manager():
            inputs = self._prepare_inputs(batch)
            outputs = self._encode(model, inputs["groups"])
            gather = gather_rows if self.jepa.compares_pairs else alone
            return outputs, self.objective.sums(outputs, gather=gather)

    def _answer_metrics(self, scores: Callable[[Any, int, int], dict[str, float]]) -> dict[str, float]:
        """Means of the scores of generated answers, over all processes."""
        self.model.eval()
        sums = scores(self.model, self.accelerator.process_index, self.accelerator.num_processes)
        self.model.train()
        means = dict(zip(sums, self._total(list(sums.values())), strict=True))
        count = means.pop(COUNT)
        return {f"answer_{name}": total / count for name, total in means.items()}

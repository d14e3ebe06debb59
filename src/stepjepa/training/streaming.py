"""A trainer that is given its records prepared, or that reads, prepares and shares them out while it trains."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from torch.utils.data import DataLoader, IterableDataset
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from stepjepa.data.records import Record
from stepjepa.data.streams import RecordStream
from stepjepa.errors import UserError
from stepjepa.forests.preparation import COUNTS, Prepared, describe, refuse_useless
from stepjepa.forests.sampler import StepSampler
from stepjepa.forests.shares import Met, StreamCollator, StreamedForests, StreamSampler
from stepjepa.training.flop_trainer import FlopTrainer
from stepjepa.training.tally import STREAM_FILE, Tally

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stepjepa.compute.equal_compute import Plan

logger = logging.getLogger(__name__)

Data = Prepared | Iterable[Record | dict[str, Any]]


def as_stream(data: Data | None) -> RecordStream | None:
    """What is read while it is trained on; None for data that is prepared before.

    That is a ``RecordStream``, a torch or ``datasets`` ``IterableDataset``, and whatever can be iterated again and
    again and has no length. What can be iterated once is taken whole, as a list is.
    """
    if data is None or isinstance(data, Prepared | RecordStream):
        return data if isinstance(data, RecordStream) else None
    # A torch IterableDataset may have a length, by which nothing can be looked up.
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") or isinstance(data, Iterator)):
        return RecordStream(data)
    return None


def refuse_for_stream(args: TrainingArguments, stream: RecordStream, track_flop: bool) -> None:
    """Settings that need the number of records, their lengths, or another order of reading.

    Raises:
        ValueError: one of them is there.
    """
    if args.max_steps < 1:
        raise ValueError(
            f"max_steps: expected 1 or more with a stream, whose length is not known, got {args.max_steps}"
        )
    strategy = str(args.train_sampling_strategy)
    if strategy == "group_by_length":
        raise ValueError(
            "train_sampling_strategy: group_by_length needs the lengths of all records, which a stream does not tell; "
            "leave it out (the records of a step are sorted anyway)"
        )
    if strategy == "sequential" and stream.shuffle_buffer_size:
        raise ValueError(
            f"train_sampling_strategy: sequential keeps the order that shuffle_buffer_size "
            f"{stream.shuffle_buffer_size} changes; leave one out"
        )
    if track_flop:
        raise ValueError(
            "track_flop: compares with regular training on the same records, whose lengths a stream does not tell; "
            "leave it out"
        )
    if not getattr(args, "dataloader_in_order", True):
        raise ValueError("dataloader_in_order: expected True with a stream, whose steps are made in their order")
    if getattr(args.accelerator_config, "dispatch_batches", None):
        raise ValueError(
            "accelerator_config: dispatch_batches does nothing with a stream, which every process reads; leave it out"
        )


class StreamingTrainer(FlopTrainer):
    """The part of ``JepaTrainer`` that gives it its records, in their order.

    For the Trainer a run on a stream is one epoch of ``max_steps`` steps, so that its ``epoch`` is the share of the run
    that is over; ``data_epoch`` in the logs counts the epochs of the stream. What is done at the end of an epoch
    (``eval_strategy``, ``save_strategy``, ``logging_strategy``) is done at the end of one of the stream.

    Attributes:
        stream: the training records, where they are streamed.
        tally: what was met of it.
    """

    stream: RecordStream | None = None
    tally: Tally
    seed: int
    _total: Callable[[Sequence[float]], list[float]]
    # The digest of what a checkpoint had seen, until it is compared; what is wrong with a record of this process.
    _expected: int | None = None
    _wrong: str | None = None

    def _keep_stream(self, data: Data | None, args: TrainingArguments, track_flop: bool) -> Data | None:
        """The training records that are to be prepared: those of a stream are not, and kept aside."""
        self.stream = as_stream(data)
        if self.stream is None:
            return data
        refuse_for_stream(args, self.stream, track_flop)
        self.tally = Tally()
        return None

    def _train_dataset(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
        if self.stream is None:
            return self.prepared.dataset if self.prepared else None
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        return StreamedForests(
            tokenizer, self.jepa, positions=positions, triple_seed=self.seed if self.jepa.stp else None
        )

    # -- the order of records -----------------------------------------------------------------------------------------

    @property
    def _order(self) -> dict[str, Any]:
        """What both samplers are told."""
        return {
            "seed": self.args.seed if self.args.data_seed is None else self.args.data_seed,
            "jepa_ratio": self.jepa.jepa_ratio if self.jepa.uses_views else 1.0,
            # What pairs are compared with must be drawn from all records, not from those of like length.
            "tight": not self.jepa.compares_pairs,
        }

    def _get_train_sampler(self, train_dataset: Any = None) -> StepSampler:
        del train_dataset  # the Trainer passes its own, which is ours
        assert self.prepared is not None
        per_micro_step = self._train_batch_size * self.args.world_size
        return StepSampler(
            self.prepared.dataset.lengths,
            per_micro_step * self.args.gradient_accumulation_steps,
            text_lengths=self.prepared.dataset.text_lengths,
            strategy=str(self.args.train_sampling_strategy),
            multiple=per_micro_step,
            **self._order,
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """As in Trainer. That of a stream is not handed to accelerate: it gives each process its own share already."""
        if self.stream is None:
            return super().get_train_dataloader()
        assert isinstance(self.train_dataset, StreamedForests)
        sampler = StreamSampler(
            self.stream,
            self._train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            steps=self.args.max_steps,
            rank=self.args.process_index,
            world=self.args.world_size,
            **self._order,
        )
        return DataLoader(
            self.train_dataset,
            batch_sampler=sampler,
            collate_fn=StreamCollator(self.data_collator),  # type: ignore[arg-type]  # of what the data set makes
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            multiprocessing_context=getattr(self.args, "dataloader_multiprocessing_context", None),
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    # -- what is met of a stream --------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; what a stream's batches bring beside their tensors is taken out of them."""
        if self.stream is None:
            return super().get_batch_samples(epoch_iterator, *args, **kwargs)
        found = super().get_batch_samples(map(self._meet, epoch_iterator), *args, **kwargs)
        self._raise_what_is_wrong()
        return found

    def _meet(self, batch: dict[str, Any]) -> dict[str, Any]:
        met: Met = batch.pop("met")
        self._wrong = self._wrong or met.error
        if self._expected is not None and met.share.digest_before != self._expected:
            self._wrong = (
                "the stream gives other records than those that were trained on before the checkpoint, or gives them "
                "in another order; resume on the same data"
            )
        self._expected = None
        self.tally.add(met)
        return batch

    def _raise_what_is_wrong(self) -> None:
        """One process has found it, and all end by it: none is left waiting for the others."""
        wrong = self._wrong
        if self.accelerator.num_processes > 1 and self._total([float(wrong is not None)]) != [0.0]:
            wrong = next(each for each in gather_object([wrong]) if each is not None)
        if wrong is not None:
            raise UserError(wrong)

    def _settle(self) -> None:
        self.tally.settle(self._total, self.accelerator.num_processes)

    def found(self) -> dict[str, Any]:
        """What ``run.json`` says of the training records; of a stream, those trained on so far, in every epoch again.

        Returns:
            ``counts`` and ``tokens`` as in ``Prepared``, with the ratio of the tokens, and ``template``; where lines of
            a stream were left out, ``bad_records``.
        """
        if self.stream is None:
            assert self.prepared is not None
            counts, tokens, template = self.prepared.counts, self.prepared.tokens, self.prepared.template
        else:
            assert isinstance(self.train_dataset, StreamedForests)
            counts = {name: self.tally.totals[name] for name in COUNTS}
            tokens = {name: self.tally.totals[name] for name in ("all", "main")}
            template = self.train_dataset.template()
        ratio = tokens["all"] / tokens["main"] if tokens["main"] else None
        bad = None if self.stream is None else self.stream.bad
        left_out = {} if bad is None or not bad.count else {"bad_records": bad.to_dict()}
        return {"counts": counts, "tokens": {**tokens, "ratio": ratio}, "template": template, **left_out}

    def say_found(self, what: str) -> None:
        """One line for people on what was met of the stream so far."""
        if self.is_world_process_zero():
            found = self.found()
            # Above the bar, where there is one.
            tqdm.write(f"data, {what}: {describe(found['counts'], found['tokens'])}", file=sys.stdout)
            bad = None if self.stream is None else self.stream.bad
            if bad is not None and bad.count:
                tqdm.write(f"data, so far: {bad.describe()}", file=sys.stdout)
            sys.stdout.flush()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to a line of training logs what was met of the stream."""
        if self.stream is not None and "loss" in logs:
            self._settle()
            totals = self.tally.totals
            met = {f"data_{name.replace(' ', '_')}": float(totals[name]) for name in COUNTS if totals[name]}
            logs = {**logs, "data_epoch": float(self.tally.epochs), **met}
        super().log(logs, start_time)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; says at the end what a stream held."""
        if self.stream is None:
            return super().train(*args, **kwargs)
        self.tally, self._expected, self._wrong = Tally(), None, None
        self.remove_callback(StreamCallback)
        self.add_callback(StreamCallback(self))
        result = super().train(*args, **kwargs)
        self._settle()
        self.say_found("all that was trained on")
        return result

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.stream is not None:
            self._settle()
            if self.args.should_save:
                self.tally.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self.stream is not None:
            self.tally = Tally.load(checkpoint)
            self._expected = None if self.args.ignore_data_skip else self.tally.share.digest
        elif (Path(checkpoint) / STREAM_FILE).is_file():
            raise ValueError(f"expected a checkpoint of prepared records, got {checkpoint}, which was made on a stream")

    @property
    def plan(self) -> Plan:
        """As in ``FlopTrainer``.

        Raises:
            ValueError: there are no training records, or they are streamed.
        """
        if self.stream is not None:
            raise ValueError("plan: expected records of known lengths, got a stream; train without one")
        return super().plan


class StreamCallback(TrainerCallback):
    """Does at the end of an epoch of the stream what the Trainer does at the end of its own.

    Args:
        trainer: on a stream.
    """

    def __init__(self, trainer: StreamingTrainer) -> None:
        self._trainer = trainer
        self._warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what a resumed run waits for."""
        if state.global_step and not args.ignore_data_skip:
            self._trainer.say_found("trained on before the checkpoint and now read past")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Warn once where there is nothing yet for views to be trained on."""
        met = logs or {}
        if not met.get("data_records") or met.get("data_pairs") or self._warned or not self._trainer.jepa.uses_views:
            return
        self._warned = True
        if state.is_world_process_zero:
            logger.warning(
                "none of the first %d records has a pair; check --step_separator and --max_length", met["data_records"]
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the epoch, and ask for what is to be done at its end."""
        trainer = self._trainer
        if not trainer.tally.share.ends_epoch:
            return
        trainer._settle()
        assert trainer.stream is not None
        refuse_useless(trainer.tally.totals, trainer.jepa, trainer.stream.name)
        trainer.say_found(f"epoch {trainer.tally.epochs} is over")
        # The end of the run is the Trainer's own.
        if state.global_step < state.max_steps:
            control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
            control.should_save |= args.save_strategy == SaveStrategy.EPOCH
            due = args.eval_delay <= trainer.tally.epochs
            control.should_evaluate |= due and args.eval_strategy == IntervalStrategy.EPOCH

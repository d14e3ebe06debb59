"""What a run has met of its stream: counted over processes, logged, kept in checkpoints, compared at resume."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate.utils import gather_object
from tqdm.auto import tqdm
from transformers import DefaultFlowCallback, TrainerCallback

from stepjepa.batch.dataset import describe, refuse_useless
from stepjepa.batch.stream import RecordStream, StreamedBatch
from stepjepa.batch.tokenize import COUNTS
from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.fields import read_fields
from stepjepa.files import write_json

STREAM_FILE = "stream.json"
"""In a checkpoint: what was met of the stream so far."""


class StreamCounts:
    """What a run has met of its stream, on all processes.

    Attributes:
        totals: counts by the names of ``COUNTS``, and ``all`` and ``main``: tokens.
        last: the last micro-batch that was met, without its records.
    """

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.last = StreamedBatch()
        self._unsummed: Counter[str] = Counter()
        self._error: str | None = None
        self._expected: int | None = None  # the digest in the checkpoint that the run is resumed from

    @property
    def epochs(self) -> int:
        """Epochs of the stream that are over."""
        return self.last.epoch + self.last.ends_epoch

    def meet(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Take what was met out of a batch of this process."""
        self.last = batch.pop("streamed")
        self._error = self._error or self.last.error
        if self._expected not in (None, self.last.digests[0]):
            self._error = (
                "the stream gives other records than those that were trained on before the checkpoint, or gives them "
                "in another order; resume on the same data"
            )
        self._expected = None
        self._unsummed.update(self.last.counts)
        return batch

    def sum_over_processes(self) -> None:
        """Add up what all processes have met; each calls it once a step.

        Raises:
            UserError: a record of any process is wrong, or the processes have read different records; every process
                raises it, so that none is left waiting.
        """
        found = gather_object([(self._unsummed, self.last.digests, self._error)])
        counts, digests, errors = zip(*found, strict=True)
        for error in filter(None, errors):
            raise UserError(error)
        if len(set(digests)) > 1:
            raise UserError(
                "the processes read different records, or the same ones in different orders; give each of them the "
                "whole stream, with a fixed seed for what is shuffled"
            )
        self.totals = sum(counts, self.totals)
        self._unsummed = Counter()

    def columns(self) -> dict[str, float]:
        """What a line of training logs says of the stream."""
        met = {f"data_{name.replace(' ', '_')}": float(self.totals[name]) for name in COUNTS if self.totals[name]}
        return {"data_epoch": float(self.epochs), **met}

    def found(self, stream: RecordStream) -> dict[str, Any]:
        """``counts`` and ``tokens`` as in ``Prepared``, of what was trained on so far; ``bad_records`` if there are."""
        skipped = {"bad_records": stream.bad.to_dict()} if stream.bad is not None and stream.bad.count else {}
        tokens = {name: self.totals[name] for name in ("all", "main")}
        return {"counts": {name: self.totals[name] for name in COUNTS}, "tokens": tokens, **skipped}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write it into a checkpoint."""
        state = {"totals": dict(self.totals), "epoch": self.last.epoch, "ends_epoch": self.last.ends_epoch}
        write_json(Path(folder) / STREAM_FILE, {**state, "digest": self.last.digests[1]})

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, check: bool = True) -> StreamCounts:
        """Read it back.

        Args:
            folder: the checkpoint.
            check: compare the records that come next with those that came after the checkpoint.

        Raises:
            UserError: it is damaged.
            ValueError: the checkpoint has none.
        """
        path = Path(folder) / STREAM_FILE
        if not path.is_file():
            raise ValueError(f"expected {STREAM_FILE} in {folder}, got none; the checkpoint was made without a stream")
        state = read_fields(path, "count of a stream", "resume from another checkpoint")
        totals, ends, digest = state.inner("totals"), state.values.get("ends_epoch"), state.whole("digest", 0)
        if not isinstance(ends, bool):
            raise state.wrong("ends_epoch", "true or false")
        found = cls()
        found.totals.update({name: totals.whole(name, 0) for name in totals})
        found.last = StreamedBatch(epoch=state.whole("epoch", 0), ends_epoch=ends, digests=(digest, digest))
        found._expected = digest if check else None
        return found


class StreamCallback(TrainerCallback):
    """Does at the end of an epoch of the stream what the Trainer does at the end of its own, and says what it held."""

    def __init__(self, counts: Callable[[], StreamCounts], config: JepaConfig, stream: RecordStream) -> None:
        self._counts, self._config, self._stream = counts, config, stream

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse an epoch without a pair, and ask for what is to be done at its end."""
        counts = self._counts()
        if not counts.last.ends_epoch:
            return
        refuse_useless(counts.totals, self._config, self._stream.name)
        if state.is_world_process_zero:
            met = describe({name: counts.totals[name] for name in COUNTS}, counts.totals)
            bad = "" if self._stream.bad is None or not self._stream.bad.count else f"; {self._stream.bad.describe()}"
            tqdm.write(f"data, epoch {counts.epochs} is over: {met}{bad}", file=sys.stdout)
        # The end of the run is the Trainer's own.
        if state.global_step < state.max_steps:
            DefaultFlowCallback().on_epoch_end(args, SimpleNamespace(epoch=counts.epochs), control)

"""What a run has met of its stream: counted by each process, brought together, kept with checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from stepjepa.errors import UserError
from stepjepa.fields import read_fields
from stepjepa.files import write_json
from stepjepa.forests.preparation import COUNTS
from stepjepa.forests.shares import Met, Share

STREAM_FILE = "stream.json"
"""In a checkpoint: what had been met of the stream."""


class Tally:
    """What a run has met of its stream, on all processes.

    Attributes:
        totals: counts by the names of ``preparation.COUNTS``, and ``all`` and ``main``: tokens.
        share: the last that was met, without its records.
    """

    names = (*COUNTS, "all", "main")

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.share = Share([])
        self._pending: Counter[str] = Counter()

    def add(self, met: Met) -> None:
        """Count a micro-batch of this process."""
        self._pending.update(met.counts)
        self.share = met.share

    @property
    def epochs(self) -> int:
        """Epochs of the stream that are over."""
        return self.share.epoch + self.share.ends_epoch

    def settle(self, total: Callable[[Sequence[float]], list[float]], world: int) -> None:
        """Bring the processes' counts together; each calls it after the same step.

        Args:
            total: numbers of this process to their sums over all.
            world: number of processes.

        Raises:
            UserError: the processes have read different records; every one of them finds it out.
        """
        # Few enough bits for sums to be exact. The sum of squares is least, and this its value, where all are alike.
        digest = float(self.share.digest & 0xFFFFF)
        *sums, once, squared = total([*(self._pending[name] for name in self.names), digest, digest**2])
        if int(squared) * world != int(once) ** 2:
            raise UserError(
                "the processes read different records, or the same ones in different orders; give each of them the "
                "whole stream, with a fixed seed for what is shuffled"
            )
        self.totals.update({name: round(value) for name, value in zip(self.names, sums, strict=True)})
        self._pending.clear()

    def save(self, folder: str) -> None:
        """Write it into a checkpoint."""
        share = self.share
        state = {"totals": dict(self.totals), "epoch": share.epoch, "ends_epoch": share.ends_epoch}
        write_json(Path(folder) / STREAM_FILE, {**state, "digest": share.digest})

    @classmethod
    def load(cls, folder: str) -> Tally:
        """Read it back.

        Raises:
            UserError: it is damaged.
            ValueError: the checkpoint has none.
        """
        path = Path(folder) / STREAM_FILE
        if not path.is_file():
            raise ValueError(f"expected {STREAM_FILE} in {folder}, got none; the checkpoint was made without a stream")
        state = read_fields(path, "count of a stream", "resume from another checkpoint")
        totals, over = state.inner("totals"), state.values.get("ends_epoch")
        if not isinstance(over, bool):
            raise state.wrong("ends_epoch", "true or false")
        tally = cls()
        # Where nothing has been met of a kind there is no such count.
        tally.totals.update({name: totals.whole(name, 0) for name in totals})
        tally.share = Share([], epoch=state.whole("epoch", 0), ends_epoch=over, digest=state.whole("digest", 0))
        return tally

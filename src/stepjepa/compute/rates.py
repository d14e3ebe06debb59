"""How fast a device is, measured or given, and how long work takes on it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from stepjepa.compute.work import Work
from stepjepa.errors import UserError
from stepjepa.files import existing_file, write_json


@dataclass(frozen=True)
class Rates:
    """What was measured on one device, with one dtype and number of threads.

    Attributes:
        device: name of it.
        dtype: of weights and products.
        threads: of the CPU.
        products: FLOP/s of a matrix product.
        attention: FLOP/s of attention in one kernel with a mask.
        moved: bytes/s read and written by an elementwise operation on more than caches hold.
        call: seconds that an operation costs beside its work.
        overlaps: operations are queued, so that starting one hides behind the work of those before.
        factor: measured time of real training steps over what the figures above say of their passes.
        step: seconds of a step beside its passes and its optimizer.
        held: bytes that the allocator holds for each byte of tensors at the peak of real training; 1 if the machine
            does not tell.
        held_beside: bytes beside that.
        clock: ``cpu`` (seconds of this process alone, whatever else runs) or ``wall``.
    """

    device: str
    dtype: str
    threads: int
    products: float
    attention: float
    moved: float
    call: float
    overlaps: bool
    factor: float = 1.0
    step: float = 0.0
    held: float = 1.0
    held_beside: float = 0.0
    clock: str = "wall"

    def __post_init__(self) -> None:
        for name in ("products", "attention", "moved", "call", "factor", "held"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")

    def ideal_seconds(self, work: Work) -> float:
        """Seconds of work by the single figures, as if they all held in a real pass."""
        busy = work.products / self.products + work.attention / self.attention + work.moved / self.moved
        started = work.calls * self.call
        return max(busy, started) if self.overlaps else busy + started

    def seconds(self, work: Work) -> float:
        """Seconds of the passes that do this work."""
        return self.factor * self.ideal_seconds(work)

    def optimizer_seconds(self, trained: int, state: int) -> float:
        """Seconds of clipping gradients and of the optimizer's step.

        Args:
            trained: bytes of the weights that it changes.
            state: bytes of its states.
        """
        # Gradients are read for their norm, read and written to be clipped, and read again; weights and states are
        # read and written.
        return self.factor * (4 * trained + 2 * trained + 2 * state) / self.moved

    def held_bytes(self, peak: float) -> float:
        """What a process holds where its tensors need so much at their peak."""
        return self.held * peak + self.held_beside

    def save(self, path: str | Path) -> None:
        """Write them as JSON."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> Rates:
        """What :meth:`save` wrote.

        Raises:
            UserError: no such file, or it holds something else.
        """
        found = existing_file(path, "rates file")
        try:
            values = json.loads(found.read_text(encoding="utf-8"))
            if not isinstance(values, dict) or set(values) != {field.name for field in fields(cls)}:
                raise ValueError("other fields")
            return cls(**values)
        except (ValueError, TypeError) as error:
            remedy = "write one with 'stepjepa estimate --measure FILE'"
            raise UserError(f"holds no measured rates ({error}); {remedy}", path=found) from None

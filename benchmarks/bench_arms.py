"""What is measured: the data sets, and for each of them the arms that are compared on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REAL_DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "llm_jepa"
GENERATED = "generated"
REGULAR = "regular"


@dataclass(frozen=True)
class Arm:
    """One way to train on the records of a suite.

    Attributes:
        name: in tables and results.
        jepa: fields of ``JepaConfig``; None for an arm of TRL.
        sampling: ``train_sampling_strategy`` of the Trainer.
        micro_batch: rows of one forward pass, accumulated to steps of ``batch_size`` records; None is one pass.
        packing: several records in a row of ``max_length`` tokens (TRL only).
    """

    name: str
    jepa: dict[str, Any] | None = None
    sampling: str = "random"
    micro_batch: int | None = None
    packing: bool = False

    @property
    def is_trl(self) -> bool:
        """Whether the arm is run by TRL's SFTTrainer."""
        return self.jepa is None

    @property
    def has_views(self) -> bool:
        """Whether there is an alignment loss."""
        return self.jepa is not None and self.jepa["mode"] != "regular"

    def to_dict(self) -> dict[str, Any]:
        """All fields, for the child process and for the results."""
        return asdict(self)


@dataclass(frozen=True)
class Suite:
    """Records, and the arms that are measured on them.

    Attributes:
        name: ``llm-jepa`` or ``step-jepa``.
        train_file: where its records come from; ``generated`` for those of ``stepjepa.tasks.stepmath``.
        max_length: most tokens of a record; longer ones are left out of every arm.
        step_separator: as in ``JepaConfig``.
        views: the arms with an alignment loss, by name.
    """

    name: str
    train_file: str
    max_length: int
    step_separator: str
    views: dict[str, dict[str, Any]] = field(default_factory=dict)

    def arms(self, batch_size: int) -> list[Arm]:
        """All arms: TRL's settings, plain fine-tuning, and every objective in both encodings.

        Args:
            batch_size: records of an optimizer step.
        """
        shared = {"max_length": self.max_length, "step_separator": self.step_separator}
        plain = {"mode": "regular", **shared}
        small = small_batch(batch_size)
        arms = [*trl_arms(batch_size), Arm(REGULAR, plain)]
        if small < batch_size:
            arms.append(Arm(f"{REGULAR} {small}x{batch_size // small}", plain, micro_batch=small))
        for name, settings in self.views.items():
            for encoding in ("forest", "rows"):
                arms.append(Arm(f"{name}, {encoding}", {**settings, **shared, "encoding": encoding}))
        return arms


def trl_arms(batch_size: int) -> list[Arm]:
    """TRL's settings: padded, grouped by length, both of these in small micro-batches, and packed."""
    small = small_batch(batch_size)
    arms = [Arm(f"trl padded {batch_size}"), Arm(f"trl grouped {batch_size}", sampling="group_by_length")]
    if small < batch_size:
        times = f"{small}x{batch_size // small}"
        arms.append(Arm(f"trl padded {times}", micro_batch=small))
        arms.append(Arm(f"trl grouped {times}", micro_batch=small, sampling="group_by_length"))
    return [*arms, Arm("trl packed", micro_batch=1, packing=True)]


def small_batch(batch_size: int) -> int:
    """A micro-batch of a quarter of the batch or, where that does not divide it, the next smaller one that does."""
    return max((d for d in range(1, batch_size // 4 + 1) if batch_size % d == 0), default=1)


VIEWS: dict[str, dict[str, dict[str, Any]]] = {
    "llm-jepa": {
        "llm-jepa separate": {"mode": "llm-jepa", "layout": "separate"},
        "llm-jepa branched": {"mode": "llm-jepa", "layout": "branched"},
    },
    "step-jepa": {"step-jepa branched": {"mode": "step-jepa", "layout": "branched", "pairs": "first"}},
}

# File, most tokens, separator of steps.
REAL = {"llm-jepa": ("synth_train.jsonl", 512, "blank"), "step-jepa": ("gsm8k_train.jsonl", 1024, "line")}


def make_suite(
    name: str, train_file: str | None = None, max_length: int | None = None, step_separator: str | None = None
) -> Suite:
    """A suite with its defaults filled in.

    Args:
        name: ``llm-jepa`` or ``step-jepa``.
        train_file: None takes the suite's real data if it lies beside the checkout, generated records otherwise.
        max_length: None takes the suite's own.
        step_separator: None takes that of the suite's real data, ``blank`` for any other.
    """
    file_name, length, separator = REAL[name]
    if train_file is None:
        real = REAL_DATA / file_name
        train_file = str(real) if real.is_file() else GENERATED
    if Path(train_file).name != file_name:
        separator = "blank"
    return Suite(name, train_file, max_length or length, step_separator or separator, VIEWS[name])

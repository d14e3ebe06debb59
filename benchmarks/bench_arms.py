"""What is measured: the data sets, and for each of them the arms that are compared on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REAL_DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "llm_jepa"
GENERATED = "generated"
REGULAR = "regular"
REGULAR_LORA = "regular, lora"
GROUPED = "group_by_length"
MAX_LENGTH = 512
DROPOUT = {"jepa_ratio": 0.25}


@dataclass(frozen=True)
class Arm:
    """One way to train on the records of a suite.

    Attributes:
        name: in tables and results.
        jepa: fields of ``JepaConfig``; None for an arm that is not ours.
        sampling: ``train_sampling_strategy`` of the Trainer.
        batch: records of an optimizer step; None is the benchmark's batch size.
        micro_batch: rows of one forward pass, accumulated to steps of ``batch`` records; None is one pass.
        packing: tokens of a row that holds several records; 0 for one record a row (TRL only).
        published: ``three rows`` or ``two rows`` of the published way; None for the others.
        pad_to: tokens to which the published way pads every row; 0 trims to the longest of the batch.
        lora: train an adapter of rank 16 instead of all weights.
        patience: multiplies the seconds of measurement; for arms whose steps are not alike.
    """

    name: str
    jepa: dict[str, Any] | None = None
    sampling: str = "random"
    batch: int | None = None
    micro_batch: int | None = None
    packing: int = 0
    published: str | None = None
    pad_to: int = 0
    lora: bool = False
    patience: float = 1.0

    @property
    def is_trl(self) -> bool:
        """Whether the arm is run by TRL's SFTTrainer."""
        return self.jepa is None and self.published is None

    @property
    def has_views(self) -> bool:
        """Whether there is an alignment loss whose price in tokens is known."""
        return self.jepa is not None and self.jepa["mode"] != "regular"

    @property
    def view_share(self) -> float:
        """Share of steps that run views."""
        return float((self.jepa or {}).get("jepa_ratio", 1.0)) if self.has_views else 0.0

    @property
    def reference(self) -> str:
        """The arm of plain fine-tuning that this one is compared with."""
        if self.lora:
            return REGULAR_LORA
        return f"{REGULAR} grouped" if self.sampling == GROUPED else REGULAR

    def to_dict(self) -> dict[str, Any]:
        """All fields, for the child process and for the results."""
        return asdict(self)


@dataclass(frozen=True)
class Suite:
    """Records, a model, and the arms that are measured on them.

    Attributes:
        name: key of ``SUITES``.
        train_file: where its records come from; ``generated`` for made-up ones of the same lengths.
        max_length: most tokens of a record; longer ones are left out of every arm.
        step_separator: as in ``JepaConfig``.
        views: the objectives with views, by name.
        model: preset, folder or hub id.
        vocabulary: tokens that the tokenizer is filled up to; 0 leaves it as it is.
        only_trl: TRL's settings to run; empty for all.
        thorough: also rows, loss dropout, LoRA and Semantic Tube Prediction.
        published: also the published way.
    """

    name: str
    train_file: str
    max_length: int
    step_separator: str
    views: dict[str, dict[str, Any]]
    model: str
    vocabulary: int = 0
    only_trl: tuple[str, ...] = ()
    thorough: bool = True
    published: bool = True

    def arms(self, batch_size: int) -> list[Arm]:
        """All arms of the suite.

        Args:
            batch_size: records of an optimizer step.
        """
        shared = {"max_length": self.max_length, "step_separator": self.step_separator}
        plain = {"mode": "regular", **shared}
        trl = [arm for arm in trl_arms(batch_size) if not self.only_trl or arm.name in self.only_trl]
        arms = [*(published_arms() if self.published else []), *trl, Arm(REGULAR, plain)]
        small = small_batch(batch_size)
        if small < batch_size:
            arms.append(Arm(f"{REGULAR} {small}x{batch_size // small}", plain, micro_batch=small))
        arms.append(Arm(f"{REGULAR} grouped", plain, sampling=GROUPED))
        if self.thorough:
            arms.append(Arm("stp", {**plain, "stp": 0.02}))
        for name, settings in self.views.items():
            both = ("forest", "rows") if self.thorough else ("forest",)
            for encoding in both:
                arms.append(Arm(f"{name}, {encoding}", {**settings, **shared, "encoding": encoding}))
            arms.append(Arm(f"{name}, grouped", {**settings, **shared, "encoding": "forest"}, sampling=GROUPED))
            if self.thorough:
                dropped = {**settings, **shared, **DROPOUT, "encoding": "forest"}
                arms.append(Arm(f"{name}, LD 0.75", dropped, patience=2.0))
        if self.thorough:
            arms.append(Arm(REGULAR_LORA, plain, lora=True))
            first = next(iter(self.views))
            for name in {first: None, next(reversed(self.views)): None}:
                arms.append(Arm(f"{name}, lora", {**self.views[name], **shared, "encoding": "forest"}, lora=True))
        return arms


def published_arms() -> list[Arm]:
    """The published way, as shipped and trimmed."""
    arms = []
    for rows in ("three rows", "two rows"):
        arms.append(Arm(f"published {rows}, padded to {MAX_LENGTH}", published=rows, pad_to=MAX_LENGTH))
        arms.append(Arm(f"published {rows}, trimmed", published=rows))
    return arms


def trl_arms(batch_size: int) -> list[Arm]:
    """TRL's settings: padded in three batch sizes, grouped by length, and packed."""
    small = small_batch(batch_size)
    arms = [Arm(trl_padded(batch_size)), Arm(f"trl grouped {batch_size}", sampling=GROUPED)]
    if small < batch_size:
        times = f"{small}x{batch_size // small}"
        arms.append(Arm(f"trl padded {times}", micro_batch=small))
        arms.append(Arm(f"trl grouped {times}", micro_batch=small, sampling=GROUPED))
    arms.append(Arm(trl_padded(2 * batch_size), batch=2 * batch_size))
    return [*arms, *(Arm(f"trl packed {length}", micro_batch=1, packing=length) for length in (512, 1024))]


def trl_padded(batch_size: int) -> str:
    """Name of TRL's plain setting."""
    return f"trl padded {batch_size}"


def small_batch(batch_size: int) -> int:
    """A micro-batch of a quarter of the batch or, where that does not divide it, the next smaller one that does."""
    return max((d for d in range(1, batch_size // 4 + 1) if batch_size % d == 0), default=1)


SEPARATE = {"llm-jepa separate": {"mode": "llm-jepa", "layout": "separate"}}
BRANCHED = {"llm-jepa branched": {"mode": "llm-jepa", "layout": "branched"}}
STEPS: dict[str, dict[str, Any]] = {
    f"step-jepa {pairs}": {"mode": "step-jepa", "layout": "branched", "pairs": pairs} for pairs in ("first", "all")
}
TINY = "preset:tiny"

# Real file, separator of steps, and the fields of Suite that differ.
SUITES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "synth": ("synth_train.jsonl", "blank", {"views": SEPARATE | BRANCHED, "model": TINY}),
    "spider": (
        "spider_train.jsonl",
        "blank",
        {"views": SEPARATE | BRANCHED, "model": TINY, "thorough": False},
    ),
    "gsm8k": ("gsm8k_train.jsonl", "line", {"views": STEPS | BRANCHED, "model": TINY}),
    "vocabulary": (
        "synth_train.jsonl",
        "blank",
        {
            "views": BRANCHED,
            "model": "preset:small",
            "vocabulary": 128_000,
            "only_trl": ("trl padded 16", "trl grouped 16", "trl padded 4x4", "trl grouped 4x4"),
            "thorough": False,
            "published": False,
        },
    ),
}


def make_suite(
    name: str, train_file: str | None = None, max_length: int | None = None, step_separator: str | None = None
) -> Suite:
    """A suite with its defaults filled in.

    Args:
        name: key of ``SUITES``.
        train_file: None takes the suite's real data if it lies beside the checkout, made-up records otherwise, as does
            ``generated``.
        max_length: None takes ``MAX_LENGTH``.
        step_separator: None takes that of the suite's own data, ``blank`` for any other.
    """
    file_name, separator, rest = SUITES[name]
    if train_file is None:
        real = REAL_DATA / file_name
        train_file = str(real) if real.is_file() else GENERATED
    elif train_file != GENERATED and Path(train_file).name != file_name:
        separator = "blank"
    return Suite(name, train_file, max_length or MAX_LENGTH, step_separator or separator, **rest)

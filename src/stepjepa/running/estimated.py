"""What an estimate of a run holds; its keys are those of the JSON that ``stepjepa estimate`` prints."""

from typing import NotRequired, TypedDict


class StepEstimate(TypedDict):
    """An optimizer step, over all processes."""

    records: str  # their number, and how it is made up
    tokens: float  # on average, padding included
    plain_tokens: float  # of plain training of the same records, on average, padding included
    most_tokens: int
    text_share: float  # share of the tokens that are text


class PairsEstimate(TypedDict):
    """The pairs of an optimizer step."""

    mean: float
    least: int
    most: int
    missing: str | None  # how many records have none, and why


class MemoryEstimate(TypedDict):
    """The memory of a process, in bytes."""

    parts: dict[str, int]
    largest_batch: dict[str, int]  # its rows, their length, and the counts of its ``flops.Shape``
    peak: int


class FlopsEstimate(TypedDict):
    """FLOPs of an optimizer step, and of one of plain training; None if they are unknown."""

    step: float | None
    regular_step: float | None


class CheckpointEstimate(TypedDict):
    """The checkpoints of a run."""

    bytes: float  # of one
    kept: int
    free: int  # bytes of the disk


class TimeEstimate(TypedDict):
    """The time on a device."""

    step_seconds: float
    run_seconds: float
    mfu: float
    peak: float  # FLOP/s


class DeviceEstimate(TypedDict):
    """Whether a process fits on a device."""

    bytes: float
    fits: bool


class Estimate(TypedDict):
    """The estimated cost of a run."""

    model: str
    encoding: str
    precision: str | None
    processes: int
    data: dict[str, int]  # counts of records, and of their tokens
    step: StepEstimate
    pairs: PairsEstimate | None  # None without views
    steps: int
    steps_per_epoch: int
    memory: MemoryEstimate
    flops: FlopsEstimate
    checkpoint: CheckpointEstimate
    time: NotRequired[TimeEstimate | None]  # with ``device``, after ``estimate_text.on_device``
    device: NotRequired[DeviceEstimate | None]

"""Attributes of a ``JepaTrainer`` that its callbacks use; a protocol, since its module imports theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import torch
from torch import Tensor, nn

from stepjepa.batch.dataset import Prepared
from stepjepa.config.jepa import JepaConfig
from stepjepa.objectives.monitors import WindowState
from stepjepa.training.passed_names import PassedNames

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler


class MeterState(TypedDict):
    """The measurements of a meter since the last line of logs."""

    window: WindowState
    num_tokens: float
    seconds: float


class MeterInterface(Protocol):
    """The part of ``meter.Meter`` that checkpoints and evaluations use: tokens, time, state of the open log line."""

    num_tokens: float

    def pending_tokens(self) -> float: ...

    def pause(self, seconds: float) -> None: ...

    def state(self) -> MeterState: ...

    def restore(self, state: MeterState, device: torch.device) -> None: ...


class SavedWithCheckpoint(Protocol):
    """A part of training with its own file in every checkpoint."""

    def save(self, folder: Path) -> None: ...


class OpenLogLine(SavedWithCheckpoint, Protocol):
    """The part of ``resuming.ResumeCallback`` that checkpoints and the run record use."""

    def begin(self, checkpoint: Path) -> None: ...

    def apply_settings(self) -> None: ...

    def steps_before(self, checkpoint: Path) -> int | None: ...


class AveragedWeights(SavedWithCheckpoint, Protocol):
    """The part of ``models.ema.EmaEncoder`` that checkpoints use."""

    def load(self, folder: str | Path) -> None: ...


class WeightGuard(Protocol):
    """The part of ``callbacks.NonfiniteGuard`` that checkpoints use."""

    def check_weights(self, step: int) -> None: ...


class CallsOfTrain(Protocol):
    """The part of ``recording.Recorder`` that checkpoints use: what came before this call of ``train``."""

    steps_before: int

    def set_checkpoints_aside(self) -> None: ...


class SavingTrainer(Protocol):
    """Attributes of a trainer that the functions of ``saving`` use."""

    args: TrainingArguments
    state: TrainerState
    accelerator: Accelerator
    model: PreTrainedModel

    @property
    def ema(self) -> SavedWithCheckpoint | None: ...

    @property
    def recorder(self) -> CallsOfTrain: ...

    @property
    def resume(self) -> SavedWithCheckpoint: ...


class CardTrainer(SavingTrainer, Protocol):
    """Attributes of a trainer that a model card is written from."""

    jepa: JepaConfig
    hub_model_id: str | None


class TrainerInterface(SavingTrainer, Protocol):
    """Attributes and methods of a ``JepaTrainer``, some of them those of transformers' ``Trainer``."""

    model_wrapped: nn.Module
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None
    processing_class: PreTrainedTokenizerBase
    callback_handler: CallbackHandler
    is_fsdp_enabled: bool
    _tr_loss: Tensor
    _total_loss_scalar: float
    _globalstep_last_logged: int

    passed: PassedNames
    prepared: Prepared | None
    held_out: Mapping[str, Prepared]
    source: str
    evaluated: dict[int, dict[str, float]]

    @property
    def meter(self) -> MeterInterface: ...

    @property
    def resume(self) -> OpenLogLine: ...

    def create_optimizer(self) -> Optimizer: ...

    def is_world_process_zero(self) -> bool: ...

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None: ...

    def total(self, values: Sequence[float]) -> list[float]: ...

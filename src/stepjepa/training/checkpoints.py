"""transformers' Trainer with checkpoints that are atomic, hold the state of every part, and resume exactly."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import Trainer

from stepjepa.base.arguments import expanded
from stepjepa.store.folder import remove_old_checkpoints, save_atomically
from stepjepa.store.hub import creating_repository
from stepjepa.store.record import write_record
from stepjepa.training import saving
from stepjepa.training.draft_card import draft_card
from stepjepa.training.optimizers import use_evaluation_weights
from stepjepa.training.recorded_objective import record_elsewhere

if TYPE_CHECKING:
    from transformers.trainer_utils import TrainOutput

    from stepjepa.training.interface import (
        AveragedWeights,
        CallsOfTrain,
        MeterInterface,
        OpenLogLine,
        WeightGuard,
    )


class CheckpointingTrainer(Trainer):
    """Saves the heads of terms, averaged weights and the open line of logs beside the model, and loads them.

    A subclass sets the attributes before it trains. Methods are private where Trainer has no other hook.

    Attributes:
        meter: the measurements of training; a checkpoint holds the number of tokens.
        guard: checks the weights before they are saved.
        recorder: knows of earlier calls of ``train``, whose checkpoints are not overwritten.
        resume: saves and restores the open line of logs.
        ema: the averaged weights; None without.
    """

    meter: MeterInterface
    guard: WeightGuard
    recorder: CallsOfTrain
    resume: OpenLogLine
    ema: AveragedWeights | None

    # Temporary folder that a checkpoint is being written into; None otherwise.
    _part: Path | None = None

    # -- saving --------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as Trainer does, but atomically and with checksums.

        A folder that is not the run folder also gets a record of the objective, by which embeddings are read. With a
        schedule-free optimizer the weights are those of evaluation.

        Raises:
            UserError: another run was trained in the folder, with other settings.
        """
        folder = Path(expanded(output_dir or str(self.args.output_dir)))
        use_evaluation_weights(self.optimizer)
        if self._part is not None:
            super().save_model(str(folder), _internal_call=True)
            return
        trainer: Any = self
        record = record_elsewhere(trainer, folder)
        save_atomically(folder, lambda part: super(CheckpointingTrainer, self).save_model(part, _internal_call=True))
        if record is not None:
            write_record(folder, record)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Upload as Trainer does; raise ``UserError`` where the hub can't be reached."""
        # The oldest transformers that is allowed has no ``private``.
        visibility = {} if private is None else {"private": private}
        with creating_repository(self.args.hub_model_id or Path(str(self.args.output_dir)).name):
            super().init_hf_repo(token=token, **visibility)

    def create_model_card(self, *args: Any, dataset_name: str | None = None, **kwargs: Any) -> None:
        """Write Trainer's draft of a model card into the run folder, joined with what a run's own card says.

        It replaces the card of a run and an earlier draft, and keeps their metadata. A card that somebody wrote keeps
        its text, and gets the metadata that are named here.

        Args:
            args: as in Trainer.
            dataset_name: as in TRL, the data set's id on the hub.
            kwargs: as in Trainer, such as ``license`` and ``tags``.

        Raises:
            UserError: the metadata of the card in the folder can't be read.
        """
        if not self.is_world_process_zero():
            return
        given = inspect.signature(Trainer.create_model_card).bind(self, *args, **kwargs).arguments
        del given["self"]
        if dataset_name is not None:
            given = {"dataset_tags": dataset_name, "dataset": dataset_name, **given}
        draft_card(self, {name: value for name, value in given.items() if value is not None})

    def _get_output_dir(self, trial: object) -> str:
        """Return the folder that a checkpoint is written to, before it gets its final name."""
        return super()._get_output_dir(trial) if self._part is None else str(self._part)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Save a checkpoint as Trainer does, but atomically, with the weights of evaluation."""
        self.state.num_input_tokens_seen = int(self.meter.pending_tokens())
        # Now, so that those are checked.
        use_evaluation_weights(self.optimizer)
        self.guard.check_weights(self.state.global_step)
        with saving.atomic_checkpoint(self) as part:
            self._part = part
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._part = None

    def _finalize_training(self, trial: object, num_train_samples: int, start_time: float) -> TrainOutput:
        """End the training as Trainer does, with the weights of evaluation; of folders remove only the run's own."""
        # Now, since a switch would change the weights of the best checkpoint, which are loaded next.
        use_evaluation_weights(self.optimizer)
        # With limit 1 Trainer would also remove folders of the user's.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            result: TrainOutput = super()._finalize_training(trial, num_train_samples, start_time)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save and limit == 1:
            best = self.state.best_model_checkpoint
            remove_old_checkpoints(Path(str(self.args.output_dir)), limit, best, finished=True)
        return result

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the model and, in separate files, the heads; ``save_model`` calls this.

        ``state_dict`` is the gathered state of a sharded model.
        """
        saving.save_model(self, super()._save, output_dir, state_dict)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: the folder is renamed after this call, and holds files that must not be uploaded."""

    # -- loading -------------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Detach the term heads while Trainer loads the model; then load them from their own files."""
        saving.check_adapter_weights(self.model, Path(resume_from_checkpoint))
        with saving.loading_heads(self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the best checkpoint at the end of training, with the heads of terms and the averaged weights."""
        best = str(self.state.best_model_checkpoint)
        with saving.loading_heads(self.model, best):
            super()._load_best_model()
        if self.ema is not None:
            self.ema.load(best)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise an error for missing or unexpected weights, of which Trainer only warns."""
        saving.check_loaded_weights(self.model, load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load them as Trainer does, with what this launch changes; then the averaged weights, after the model."""
        if checkpoint is not None:
            self.resume.begin(Path(checkpoint))
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.resume.apply_settings()
            if self.ema is not None:
                self.ema.load(checkpoint)
            self.meter.num_tokens = float(self.state.num_input_tokens_seen)

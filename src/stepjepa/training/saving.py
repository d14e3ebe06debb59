"""A trainer whose checkpoints are whole or absent, and hold what belongs to a run beside the model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer_utils import rotate_checkpoints

from stepjepa.config import JepaConfig
from stepjepa.disk import naming_disk_errors
from stepjepa.models.ema import EmaEncoder
from stepjepa.models.loading import refuse_pickled
from stepjepa.models.predictor_head import load_head, save_head, split_state, without_head
from stepjepa.models.setup import base_model
from stepjepa.run_folder import PART, RUN_FILE, read_run, versions
from stepjepa.text.predictors import all_predictor_ids
from stepjepa.training.card import CARD_FILE, is_somebodys_own, model_card, results_at, write_card
from stepjepa.training.tensorboard import RunTensorBoard
from stepjepa.training.uploading import UploadingTrainer


class SavingTrainer(UploadingTrainer):
    """transformers' Trainer, whose model may have a predictor head that is no part of what is saved as the model.

    Attributes:
        jepa: the objective.
        ema: the averaged weights, saved with checkpoints alone, since only training needs them; None for none.
    """

    jepa: JepaConfig
    ema: EmaEncoder | None = None

    # Where a checkpoint is being written, before it has its name.
    _part: Path | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        RunTensorBoard.install(self, self.jepa.to_dict())

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._part is None else str(self._part)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As in Trainer, into a folder that takes its name when all of it is there.

        Raises:
            OSError: the disk is full or can't be written to; nothing is left of the checkpoint then.
        """
        run = Path(self._get_output_dir(trial))
        final = run / f"checkpoint-{self.state.global_step}"
        part = run / PART / final.name
        if self.args.should_save:
            shutil.rmtree(run / PART, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._part = part.parent
        try:
            with naming_disk_errors(final):
                super()._save_checkpoint(model, trial)
                if self.state.best_model_checkpoint == str(part):
                    self.state.best_model_checkpoint = str(final)
                    if self.args.should_save:
                        self.state.save_to_json(str(part / "trainer_state.json"))
        except BaseException:
            shutil.rmtree(part.parent, ignore_errors=True)
            raise
        finally:
            self._part = None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            _give_name(part, final)
            self._upload_checkpoint(final)
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()
        if self.args.local_process_index == 0 and part.is_dir():
            # Of a machine that shares no disk with the first: what its own processes go on from.
            _give_name(part, final)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As in Trainer, which would train one more step where a run is resumed that has had its last one."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As in Trainer, with the predictor head in a file of its own, and a model card."""
        rest, own = (None, {}) if state_dict is None else split_state(state_dict)
        card = Path(output_dir or str(self.args.output_dir)) / CARD_FILE
        theirs = is_somebodys_own(card)
        # Trainer pickles its arguments beside the model, and a token is nothing to be kept there.
        token, self.args.hub_token = self.args.hub_token, None
        try:
            with without_head(self.model) as head:
                super()._save(output_dir, rest)
        finally:
            self.args.hub_token = token
        # Trainer calls this on every process, and saves on one.
        if head is not None and self.args.should_save:
            save_head(own or head.state_dict(), output_dir or str(self.args.output_dir))
        if self.args.should_save and not theirs:
            # A draft that PEFT leaves beside an adapter.
            card.unlink(missing_ok=True)
            write_card(card.parent, self._card())

    def _card(self) -> Any:
        """The model card, from ``run.json`` where there is one."""
        folder, model = Path(self.args.output_dir), self.accelerator.unwrap_model(self.model)
        if (folder / RUN_FILE).is_file():
            run = read_run(folder)
        else:
            run = {"model": base_model(model).config._name_or_path, "jepa": self.jepa.to_dict(), "versions": versions()}
        return model_card(
            run,
            str(self.hub_model_id or folder.absolute().name),
            results=results_at(self.state.log_history, self.state.global_step),
            adapter=hasattr(model, "peft_config"),
            predictors=bool(all_predictor_ids(self.processing_class)),
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        refuse_pickled(resume_from_checkpoint)
        with without_head(self.model) as head:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if head is not None:
            load_head(head, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        with without_head(self.model) as head:
            super()._load_best_model()
        best = str(self.state.best_model_checkpoint)
        if head is not None:
            load_head(head, best)
        if self.ema is not None:
            self.ema.load(best)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.ema is not None and self.args.should_save:
            self.ema.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.ema is not None and checkpoint is not None:
            self.ema.load(checkpoint)


def _give_name(part: Path, final: Path) -> None:
    """Put a finished checkpoint where it belongs, in the place of a damaged or an older one if there is one."""
    replaced = part.with_name(f"{part.name}.replaced")
    if final.exists():
        final.replace(replaced)
    part.replace(final)
    shutil.rmtree(part.parent)

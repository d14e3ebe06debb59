"""Uploads to a hub while a run trains: whole folders only, in the background, and never at the cost of training."""

from __future__ import annotations

import fnmatch
import logging
import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import HubStrategy

from stepjepa.errors import UserError
from stepjepa.models.setup import base_model
from stepjepa.training.hub import UPLOADED, create_repository, refuse_local_base, upload, upload_later

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)

UPLOADING = ".uploading"
"""Folder in a run folder for the checkpoint that is being uploaded."""


class Uploads:
    """What a trainer uploads.

    The Trainer uploads the run folder as it is, with paths of this machine and test data in it, and while it is being
    written. Here a checkpoint is uploaded when it is whole, from links of its own, so that it may be deleted meanwhile;
    an upload that fails is told, and training goes on.

    Args:
        trainer: whose folders are uploaded.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._pushing: Future[Any] | None = None

    def create(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository, before anything is trained.

        Raises:
            ValueError: ``hub_strategy`` would upload optimizer states.
            UserError: the hub refuses, or can't be reached; or an adapter's base is a local folder.
        """
        trainer = self._trainer
        args = trainer.args
        if args.hub_strategy not in (HubStrategy.END, HubStrategy.EVERY_SAVE):
            raise ValueError(
                f"hub_strategy: expected end or every_save, got {args.hub_strategy.value}: only models are "
                "uploaded, not what a run needs to go on"
            )
        if not trainer.is_world_process_zero():
            return
        # Of a process that was stopped.
        shutil.rmtree(self._held(), ignore_errors=True)
        if hasattr(trainer.model, "peft_config"):
            refuse_local_base(base_model(trainer.model).config._name_or_path)
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        private = args.hub_private_repo if private is None else private
        trainer.hub_model_id = create_repository(name, private=private, token=token or args.hub_token)

    def push(self, folder: Path, message: str, *, blocking: bool, token: str | None, revision: str | None) -> Any:
        """Upload a folder; returns the address of the repository, or a future of it."""
        trainer = self._trainer
        self.finish()
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        put = upload if blocking else upload_later
        revision, token = revision or trainer.args.hub_revision, token or trainer.args.hub_token
        return put(folder, str(trainer.hub_model_id), message=message, revision=revision, token=token)

    def upload_run(self, folder: Path) -> str | None:
        """Upload what a finished run has left in its folder.

        Args:
            folder: with everything in it.

        Returns:
            The address of the repository; None where nothing is to be uploaded, or another process does it.

        Raises:
            UserError: the hub refuses, or can't be reached; the message says how to try again.
        """
        trainer = self._trainer
        args = trainer.args
        if not args.push_to_hub or not trainer.is_world_process_zero():
            return None
        message = f"End of training, step {trainer.state.global_step}"
        try:
            return upload(
                folder, str(trainer.hub_model_id), message=message, revision=args.hub_revision, token=args.hub_token
            )
        except UserError as error:
            branch = f" --hub_revision {args.hub_revision}" if args.hub_revision else ""
            again = f"stepjepa export --model_path {folder} --push_to_hub {trainer.hub_model_id}{branch}"
            raise UserError(f"the run is finished and saved, but: {error}; to try again: {again}") from None

    def upload_checkpoint(self, folder: Path) -> None:
        """Begin to upload a whole checkpoint, unless an earlier one is still on its way."""
        trainer = self._trainer
        if not trainer.args.push_to_hub or not trainer.is_world_process_zero():
            return
        if trainer.args.hub_strategy == HubStrategy.END:
            return
        if self._pushing is not None and not self._pushing.done() and not trainer.args.hub_always_push:
            return
        message = f"Training in progress, step {trainer.state.global_step}"
        # It removes the links of the upload before.
        self.finish()
        links = _linked(folder, self._held() / folder.name)
        self._pushing = self.push(links, message, blocking=False, token=None, revision=None)

    def finish(self) -> None:
        """Wait for an upload, and tell of one that failed."""
        if self._pushing is None:
            return
        failed, self._pushing = self._pushing.exception(), None
        if failed is not None:
            logger.warning("%s; training goes on", failed)
        shutil.rmtree(self._held(), ignore_errors=True)

    def _held(self) -> Path:
        return Path(self._trainer.args.output_dir) / UPLOADING


def _linked(folder: Path, target: Path) -> Path:
    """What is to be uploaded of a folder, linked into another one."""
    shutil.rmtree(target.parent, ignore_errors=True)
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if file.is_file() and any(fnmatch.fnmatch(str(name), pattern) for pattern in UPLOADED):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, target / name)
            except OSError:  # a file system that has no links
                shutil.copy2(file, target / name)
    return target

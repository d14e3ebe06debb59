"""A trainer that uploads to a hub: whole folders only, in the background while it trains, and never at their cost."""

from __future__ import annotations

import fnmatch
import logging
import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import HubStrategy

from stepjepa.errors import UserError
from stepjepa.models.setup import base_model
from stepjepa.training.hub import UPLOADED, create_repository, refuse_local_base, upload, upload_later

logger = logging.getLogger(__name__)

UPLOADING = ".uploading"
"""Folder in a run folder for the checkpoint that is being uploaded."""


class UploadingTrainer(Trainer):
    """transformers' Trainer with uploads of its own.

    The Trainer uploads the run folder as it is, with paths of this machine and test data in it, and while it is being
    written. Here a checkpoint is uploaded when it is whole, from links of its own, so that it may be deleted meanwhile;
    an upload that fails is told, and training goes on.
    """

    _pushing: Future[Any] | None = None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository, before anything is trained.

        Raises:
            ValueError: ``hub_strategy`` would upload optimizer states.
            UserError: the hub refuses, or can't be reached; or an adapter's base is a local folder.
        """
        if self.args.hub_strategy not in (HubStrategy.END, HubStrategy.EVERY_SAVE):
            raise ValueError(
                f"hub_strategy: expected end or every_save, got {self.args.hub_strategy.value}: only models are "
                "uploaded, not what a run needs to go on"
            )
        if not self.is_world_process_zero():
            return
        # Of a process that was stopped.
        shutil.rmtree(self._held(), ignore_errors=True)
        if hasattr(self.model, "peft_config"):
            refuse_local_base(base_model(self.model).config._name_or_path)
        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        private = self.args.hub_private_repo if private is None else private
        self.hub_model_id = create_repository(name, private=private, token=token or self.args.hub_token)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
    ) -> Any:
        """Save model, tokenizer and card into ``output_dir`` and upload them.

        Args:
            commit_message: of the commit.
            blocking: wait until it is done.
            token: instead of HF_TOKEN or the saved login.
            revision: branch; ``args.hub_revision`` if None.
            private: of a repository that is made now.

        Returns:
            The address of the repository, or a future of it; None on all processes but the first.

        Raises:
            UserError: the hub refuses, or can't be reached; what was saved stays.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        put = upload if blocking else upload_later
        return put(
            self.args.output_dir,
            self.hub_model_id,
            message=commit_message,
            revision=revision or self.args.hub_revision,
            token=token or self.args.hub_token,
        )

    def upload_run(self, folder: Path) -> str | None:
        """Upload what a finished run has left in its folder.

        Args:
            folder: with everything in it.

        Returns:
            The address of the repository; None where nothing is to be uploaded, or another process does it.

        Raises:
            UserError: the hub refuses, or can't be reached; the message says how to try again.
        """
        if not self.args.push_to_hub or not self.is_world_process_zero():
            return None
        try:
            return upload(
                folder,
                self.hub_model_id,
                message=f"End of training, step {self.state.global_step}",
                revision=self.args.hub_revision,
                token=self.args.hub_token,
            )
        except UserError as error:
            branch = f" --hub_revision {self.args.hub_revision}" if self.args.hub_revision else ""
            again = f"stepjepa export --model_path {folder} --push_to_hub {self.hub_model_id}{branch}"
            raise UserError(f"the run is finished and saved, but: {error}; to try again: {again}") from None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing: the checkpoint has not its name yet, see ``_upload_checkpoint``."""

    def _upload_checkpoint(self, folder: Path) -> None:
        """Begin to upload a whole checkpoint, unless an earlier one is still on its way."""
        if not self.args.push_to_hub or not self.is_world_process_zero():
            return
        if self.args.hub_strategy == HubStrategy.END:
            return
        if self._pushing is not None and not self._pushing.done() and not self.args.hub_always_push:
            return
        self._finish_current_push()
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self._pushing = upload_later(
            _linked(folder, self._held() / folder.name),
            str(self.hub_model_id),
            message=f"Training in progress, step {self.state.global_step}",
            revision=self.args.hub_revision,
            token=self.args.hub_token,
        )

    def _finish_current_push(self) -> None:
        """Wait for an upload, and tell of one that failed."""
        if self._pushing is None:
            return
        failed, self._pushing = self._pushing.exception(), None
        if failed is not None:
            logger.warning("%s; training goes on", failed)
        shutil.rmtree(self._held(), ignore_errors=True)

    def _held(self) -> Path:
        return Path(self.args.output_dir) / UPLOADING


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

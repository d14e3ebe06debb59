"""Upload a model folder to a hub: what a model needs, and nothing of the machine that made it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.utils import disable_progress_bars
from transformers import TrainerCallback

from stepjepa.errors import UserError, one_line
from stepjepa.files import read_json_object
from stepjepa.offline import STAYS_OFFLINE
from stepjepa.run_folder import run_of
from stepjepa.training.card import write_card

logger = logging.getLogger(__name__)

UPLOADED = (
    *("README.md", "config.json", "generation_config.json", "adapter_config.json", "*.py"),
    *("model*.safetensors", "model*.safetensors.index.json", "adapter_model*.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("vocab.json", "vocab.txt", "*.model", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
"""What is uploaded of a folder. The rest of a run folder names files of this machine (``run.json``,
``training_args.bin``), holds test data (evaluations), or serves to resume the run (optimizer states)."""


def refuse_offline() -> None:
    """Refuse an upload where ``--offline`` or the environment allows no connection."""
    if os.environ.get(STAYS_OFFLINE) == "1" or constants.is_offline_mode():
        raise UserError(
            "--push_to_hub needs a connection, and --offline (or HF_HUB_OFFLINE) allows none; leave one out"
        )


@contextmanager
def naming_hub_errors(what: str) -> Iterator[None]:
    """Turn whatever the hub's library raises into a ``UserError`` of one line that says what could not be done."""
    try:
        yield
    except Exception as raised:  # a broken connection, a strange answer, a wrong name: each has an error of its own
        error = raised.__cause__ if isinstance(raised, RuntimeError) and raised.__cause__ else raised
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = one_line(getattr(error, "server_message", None) or str(error).strip().partition("\n")[0])
        remedy = "; set HF_TOKEN in the environment to a token that may write there" if status in (401, 403) else ""
        number = "" if status is None or str(status) in reason else f"{status} "
        raise UserError(f"{what}: {number}{reason.rstrip(' .')}{remedy}") from None


def create_repository(name: str, *, private: bool | None = None, token: str | None = None) -> str:
    """Make a model repository where there is none, and return its name as ``owner/name``."""
    refuse_offline()
    with naming_hub_errors(f"can't make the repository '{name}' on the hub"):
        made: str = HfApi().create_repo(name, token=token, private=private, exist_ok=True).repo_id
    return made


def refuse_lone_adapter(folder: str | os.PathLike[str]) -> None:
    """Refuse to upload an adapter whose base model is a folder of this machine, so that nobody else could load it."""
    described = Path(folder) / "adapter_config.json"
    if not described.is_file():
        return
    base = read_json_object(described, "file of an adapter", "restore it").get("base_model_name_or_path")
    if not base or Path(str(base)).is_dir():
        raise UserError(
            "the adapter's base model is a folder of this machine, so that nobody could load the adapter from a hub; "
            "upload it merged: stepjepa export --model_path RUN --output_dir DIR --push_to_hub ID"
        )


def upload(
    folder: str | os.PathLike[str], name: str, *, message: str, revision: str | None = None, token: str | None = None
) -> str:
    """Upload a model folder and wait for it.

    Args:
        folder: of a whole model or an adapter; see :data:`UPLOADED`.
        name: of a repository that is there.
        message: of the commit.
        revision: branch; main if None.
        token: instead of HF_TOKEN or the saved login.

    Returns:
        The address of the repository.

    Raises:
        UserError: the hub refuses, or can't be reached. Nothing local is changed.
    """
    refuse_offline()
    refuse_lone_adapter(folder)
    api = HfApi()
    if not sys.stderr.isatty():
        disable_progress_bars()
    with naming_hub_errors(f"can't upload to '{name}'"):
        api.upload_folder(
            repo_id=name,
            folder_path=Path(folder),
            commit_message=message,
            token=token,
            allow_patterns=list(UPLOADED),
            revision=revision,
        )
    return f"{api.endpoint}/{name}"


class UploadCallback(TrainerCallback):
    """Uploads every checkpoint in the background; an upload that fails is told, and training goes on.

    Args:
        name: of the repository; None on processes that upload nothing.
        run: what the model card says where there is no ``run.json``.
    """

    def __init__(self, name: str | None, run: dict[str, Any]) -> None:
        self._name, self._run = name, run
        self._upload: Future[str] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for an upload before the next checkpoint is saved: what it reads may be deleted then."""
        if control.should_save:
            self.on_train_end(args, state, control)

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to upload the checkpoint that has just been saved."""
        if self._name is None or not state.is_world_process_zero:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        write_card(folder, name=self._name, run=run_of(args.output_dir) or self._run)
        about = {"message": f"Training in progress, step {state.global_step}", "revision": args.hub_revision}
        self._upload = HfApi().run_as_future(partial(upload, folder, self._name, token=args.hub_token, **about))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for an upload."""
        pending, self._upload = self._upload, None
        if pending is not None and (error := pending.exception()) is not None:
            logger.warning("%s; training goes on", error)

"""What becomes of a run that fails: its record says so or stays as it was, and its user is told on one line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from stepjepa.disk import DISK_ERRORS
from stepjepa.errors import UserError
from stepjepa.run_folder import last_checkpoint, put_back, write_run
from stepjepa.training.group import is_lost

logger = logging.getLogger(__name__)

# Raised on purpose, with words for whoever started the run; of others the kind says more than the words.
_WITH_WORDS = (ValueError, RuntimeError, ImportError)


class _LaunchCallback(TrainerCallback):
    """Notes where a launch begins.

    Attributes:
        first: the step that it goes on from; None until training begins.
    """

    def __init__(self) -> None:
        self.first: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it."""
        self.first = state.global_step


@contextmanager
def noting_failures(trainer: Trainer, folder: Path, record: dict[str, Any], before: str | None) -> Iterator[None]:
    """Note in ``run.json`` that a run failed; put back what it held where this launch took no step.

    Args:
        trainer: trains inside.
        folder: of the run.
        record: what ``run.json`` says of the run; it may change inside.
        before: of ``run_folder.text_of_run``, from before this launch.

    Raises:
        UserError: in the place of whatever is raised inside, but for requests to stop, errors of the system that are no
            full disk, and what says that another process is gone.
    """
    launch = _LaunchCallback()
    trainer.add_callback(launch)

    def trained() -> bool:
        return launch.first is not None and trainer.state.global_step > launch.first

    def note(error: Exception) -> None:
        if before is not None and not trained():
            # What came of the run so far is still what came of it.
            put_back(folder, before)
        else:
            write_run(folder, {**record, "status": "failed", "error": str(error)})

    try:
        yield
    except OSError as error:
        with suppress(OSError):
            note(error)
        raise _disk_error(error, folder) from None
    except Exception as error:  # of whatever kind: the record must not say for ever that the run goes on
        if is_lost(error):
            note(error)
            raise
        if not trained():
            # A stream's first record that is wrong; an optimizer or a schedule that can't be made; a checkpoint of
            # another model.
            put_back(folder, before)
            raise error if isinstance(error, UserError) else cannot_start(error, "training can't start: ") from None
        note(error)
        raise error if isinstance(error, UserError) else _failed(error, folder, trainer.state.global_step) from None


def cannot_start(error: Exception, beginning: str = "") -> UserError:
    """What to tell of an error before the first step."""
    logger.debug("training can't start", exc_info=error)
    if isinstance(error, _WITH_WORDS) and str(error):
        return UserError(f"{beginning}{error}")
    return UserError(f"{beginning}{_named(error)}; change the flag that it is about, or --debug 2 shows where it was")


def _failed(error: Exception, folder: Path, step: int) -> UserError:
    """What to tell of an error after some steps."""
    logger.debug("training failed", exc_info=error)
    last = last_checkpoint(folder)
    way = "no checkpoint was saved before"
    if last is not None:
        way = f"{last.name} is whole: go on with --resume_from_checkpoint last"
    return UserError(f"the run failed after step {step} ({_named(error)}); {way}; --debug 2 shows where it was")


def _named(error: Exception) -> str:
    # That of a KeyError is in quotes.
    words = error.args[0] if isinstance(error, KeyError) and error.args else error
    return f"{type(error).__name__}: {words}" if str(error) else type(error).__name__


def _disk_error(error: OSError, folder: Path) -> OSError | UserError:
    """What to tell of a disk that can't be written to while training."""
    if error.errno not in DISK_ERRORS:
        return error
    last = last_checkpoint(folder)
    way = (
        "no checkpoint was saved before"
        if last is None
        else f"{last.name} is whole: once it can be written to, go on with --resume_from_checkpoint last"
    )
    return UserError(f"{error.strerror}; {way}", path=error.filename or folder)

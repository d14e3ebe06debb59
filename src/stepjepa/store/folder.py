"""The run folder and its checkpoints: never overwritten unasked, verified by checksums.

run.json         the run record, see ``record.RunRecord``
metrics.jsonl    one line per log line, drawn in metrics.png
tensorboard/     the same for TensorBoard, where it is a tracker of the run
checkpoint-N/    transformers' checkpoints
checkpoint-N-of-call-K/    those of an earlier call of ``JepaTrainer.train``
model.safetensors or adapter_model.safetensors, tokenizer ... the trained model
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from stepjepa.base.errors import UserError
from stepjepa.base.files import (
    apply_umask,
    check_makeable,
    check_writable,
    fingerprint,
    is_remnant,
    json_or_empty,
    naming_disk_errors,
    write_json,
)
from stepjepa.base.processes import is_main_process

RUN_FILE = "run.json"
CONFIG_FILE = "run.yaml"
"""The ``RunConfig``, as ``stepjepa train --config`` reads it."""

METRICS_FILE = "metrics.jsonl"
PLOT_FILE = "metrics.png"
CARD_FILE = "README.md"
SUMMARY = ".summary.json"
"""End of the name of the summary of an evaluation, which lies beside its answers."""

PROMPTS_FILE = "trained_prompts.json"
"""File of the sorted hashes of the training prompts; see ``store.prompts``."""

BOARD_FOLDER = "tensorboard"
"""Folder of TensorBoard's files."""

CHECKSUMS_FILE = "checksums.json"
"""File in a checkpoint or run folder: SHA-256 of each file that was saved with it."""

WITHOUT_OPTIMIZER = "optimizer.pt is missing"
"""The fault of a checkpoint that holds the model alone."""

_WEIGHTS = (
    *("config.json", "model*.safetensors", "model*.safetensors.index.json"),
    *("adapter_config.json", "adapter_model*.safetensors"),
)
"""Patterns of the files of a model or an adapter, by which it is loaded."""

MODEL_FILES = (
    *(*_WEIGHTS, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "merges.txt", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model"),
    *("sentencepiece*.model", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
"""Patterns of the files of a saved model and its tokenizer."""

_WRITTEN = (RUN_FILE, CONFIG_FILE, METRICS_FILE, PLOT_FILE, PROMPTS_FILE)
"""Names of the files that every run writes into its folder."""

_SAVED = (
    *(*MODEL_FILES, "additional_chat_templates", "predictor_head.safetensors", "training_args.bin"),
    CHECKSUMS_FILE,
)
"""Patterns of the files that a run writes when it saves its model, without the model card: ``hub.write_card`` leaves
one of the user's own as it is."""

_EARLIER = re.compile("checkpoint-([0-9]+)-of-call-([0-9]+)")
"""Names of the checkpoints of earlier calls of ``JepaTrainer.train``, with the numbers of step and call.

They begin like those of other checkpoints, which no upload of transformers takes.
"""

PART = ".saving"
"""Folder inside a run folder for files that are still being written."""


def open_run_folder(
    path: str,
    resume: str | None,
    say: Callable[[str], None] = lambda line: None,
    *,
    resumable: bool = True,
    saves: bool = True,
    own: Collection[str] = (),
) -> tuple[Path, str | None]:
    """Check a run folder before a run starts, and return it with the checkpoint to resume from, or None.

    Args:
        path: the run folder.
        resume: a checkpoint folder; ``last`` (or ``true``) for the newest complete checkpoint in the folder; ``auto``
            for the same, or a start from scratch if there is none; None for a new run, whose folder must be empty or
            missing.
        say: is called with one line for each checkpoint that is skipped, with the reason.
        resumable: whether the command can resume; if not, the error for a folder that is not empty does not name that.
        saves: whether the run saves checkpoints and the model.
        own: names of files that the caller has written into the folder.

    Raises:
        UserError: the folder is not empty or can't be written to, or there is no complete checkpoint to resume from.
    """
    folder, choice = Path(path), None if resume is None else resume.lower()
    check_is_folder(folder)
    is_run = (folder / RUN_FILE).is_file()
    checkpoint: Path | None = None
    if resume is not None and (is_run or choice != "auto"):
        _restore_checkpoints(folder)
    if choice in ("last", "true") or (choice == "auto" and is_run):
        checkpoint = last_checkpoint(folder, say, read_all=True)
        if checkpoint is None and choice != "auto":
            raise UserError("holds no complete checkpoint to resume from; name another `output_dir`", path=folder)
    else:
        if resume is not None and choice != "auto":
            checkpoint = Path(resume)
            check_is_of_last_call(checkpoint, folder)
            _check_named(checkpoint, checkpoints(folder))
            is_run = is_run or checkpoint.resolve().parent == folder.resolve()
        if is_main_process() and folder.exists() and not (checkpoint and is_run) and _contents(folder, own):
            remedy = "pass `resume_from_checkpoint last`" if resumable and checkpoints(folder) else "empty it"
            raise UserError(f"is not empty; name another `output_dir`, or {remedy}", path=folder)
    if is_main_process():
        resumed = None if checkpoint is None else str(checkpoint)
        if (foreign := foreign_file(folder, saves=saves, checkpoint=resumed, own=own)) is not None:
            raise foreign_error(foreign)
        check_writable(folder)
    if is_main_process() and resume is not None and folder.exists():
        for remains in set(folder.iterdir()) - set(_contents(folder)):
            shutil.rmtree(remains) if remains.is_dir() else remains.unlink()
    return folder, None if checkpoint is None else str(checkpoint)


def check_is_folder(folder: Path) -> None:
    """Raise ``UserError`` for an ``output_dir`` that is a file, a link to nothing, or below a file."""
    if folder.exists() and not folder.is_dir():
        raise UserError("is a file; name a folder as `output_dir`", path=folder)
    check_makeable(folder)


def foreign_file(
    folder: Path, *, saves: bool = True, checkpoint: str | None = None, own: Collection[str] = ()
) -> Path | None:
    """Return a file of the user's own that a run would write over, in a folder without a run record; None for none.

    Args:
        folder: the run folder.
        saves: the run saves checkpoints and the model.
        checkpoint: the one that is resumed; others beside it are those of the same run.
        own: names of files that the caller has written.
    """
    if (folder / RUN_FILE).is_file():
        return None
    names = [name for name in _WRITTEN if name not in own]
    files = [file for pattern in (*names, *(_SAVED if saves else ())) for file in sorted(folder.glob(pattern))]
    if saves and not (checkpoint and Path(checkpoint).resolve().parent == folder.resolve()):
        files += checkpoints(folder)
    return next(iter(files), None)


def foreign_error(file: Path) -> UserError:
    """Return the error for a file that :func:`foreign_file` has found."""
    beside = f"and the folder holds no {RUN_FILE} beside it"
    return UserError(f"would be written over, {beside}; move it, or name another `output_dir`", path=file)


def _check_named(checkpoint: Path, in_run: Sequence[Path]) -> None:
    """Raise ``UserError`` for an incomplete checkpoint, or for one that is older than the newest of its run.

    Args:
        checkpoint: the one to resume; it may be a copy in another folder.
        in_run: the checkpoints in the run folder, newest first.
    """
    if fault := checkpoint_fault(checkpoint, read_all=True):
        raise UserError(f"is not a complete checkpoint ({fault}); name another one, or 'last'", path=checkpoint)
    # A newer checkpoint left in the folder would be the one that 'last' resumes.
    steps = json_or_empty(checkpoint / "trainer_state.json").get("global_step")
    if is_main_process() and in_run and isinstance(steps, int) and steps < _number(in_run[0]):
        raise UserError(f"is older than {in_run[0].name}; move that elsewhere, or pass 'last'", path=checkpoint)


def check_is_of_last_call(checkpoint: Path, folder: Path) -> None:
    """Raise ``UserError`` for a checkpoint of an earlier call of ``train`` that is to be resumed in its run folder."""
    if _EARLIER.fullmatch(checkpoint.name) and checkpoint.resolve().parent == folder.resolve():
        raise UserError(
            "is of an earlier call of train; name another `output_dir` to train on from it, or pass 'last'",
            path=checkpoint,
        )


def _contents(folder: Path, but: Collection[str] = ()) -> list[Path]:
    """List the contents of a folder, without the remains of interrupted writes, and ``but`` those of some names."""
    contents = (path for path in folder.iterdir() if path.name not in but)
    return [path for path in contents if path.name != PART and not is_remnant(path.name, RUN_FILE)]


def checkpoints(folder: Path) -> list[Path]:
    """List the folders ``checkpoint-N`` of a run, complete or not, newest first, without those of earlier calls."""
    numbered = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(numbered, key=_number, reverse=True)


def _earlier_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of earlier calls of ``train``, newest first."""
    numbered = {path: match for path in folder.glob("checkpoint-*") if (match := _EARLIER.fullmatch(path.name))}
    return sorted(numbered, key=lambda path: (int(numbered[path][2]), int(numbered[path][1])), reverse=True)


def set_checkpoints_aside(folder: Path, call: int) -> list[Path]:
    """Rename the checkpoints of a run to those of an earlier call of ``train``; return the new ones, oldest first.

    Args:
        folder: the run folder.
        call: the number of that call, from 1; a higher one is taken if the folder has checkpoints of this one.
    """
    calls = (int(path.name.rpartition("-")[2]) for path in _earlier_checkpoints(folder))
    number = max(call, 1 + max(calls, default=0))
    # The newest last: a launch after a kill in between resumes it.
    return [path.rename(folder / f"{path.name}-of-call-{number}") for path in reversed(checkpoints(folder))]


def of_same_call(checkpoint: Path, name: str) -> Path:
    """Return the checkpoint beside another one that the same call of ``train`` saved under a name."""
    match = _EARLIER.fullmatch(checkpoint.name)
    return checkpoint.with_name(f"{name}-of-call-{match[2]}" if match else name)


def remove_old_checkpoints(folder: Path, limit: int | None, best: str | None, *, finished: bool = False) -> None:
    """Remove the oldest checkpoints of a run above ``limit``, never the newest, nor the ``best``; all stay without it.

    By call and step: a clock that was ahead would make every new checkpoint the oldest. Folders of other names, such
    as a copy ``checkpoint-100-good``, are the user's: transformers' own function removes them, too.

    Args:
        folder: the run folder.
        limit: how many stay; None or 0 for all.
        best: the best checkpoint; None for none.
        finished: no launch will resume the newest, so that the best one is enough.
    """
    numbered = [*checkpoints(folder), *_earlier_checkpoints(folder)]
    kept = {path for path in numbered if best is not None and path == Path(best)}
    if not (finished and kept):
        kept |= {*numbered[:1]}
    surplus = len(numbered) - max(limit or len(numbered), len(kept))
    for path in [path for path in reversed(numbered) if path not in kept][: max(surplus, 0)]:
        shutil.rmtree(path, ignore_errors=True)


def _number(checkpoint: Path) -> int:
    """Return N of a folder ``checkpoint-N``: the steps after which it was saved."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def run_folder_of(model_path: str | os.PathLike[str]) -> Path:
    """Return the run folder that a checkpoint folder is in; any other path unchanged."""
    folder = Path(model_path)
    return folder.parent if folder.name.startswith("checkpoint-") else folder


def last_checkpoint(
    folder: Path, say: Callable[[str], None] = lambda line: None, *, read_all: bool = False
) -> Path | None:
    """Find the newest complete checkpoint of a run, or None.

    Args:
        folder: the run folder.
        say: is called with one line for each checkpoint that is skipped.
        read_all: compare the checksums of all files, not their sizes alone.
    """
    for path in checkpoints(folder):
        fault = checkpoint_fault(path, read_all=read_all)
        if fault is None:
            return path
        say(f"skipped checkpoint {path} ({fault})")
    return None


def checkpoint_fault(folder: Path, *, read_all: bool = False) -> str | None:
    """Return the reason why a checkpoint can't be resumed; None if it can. See :func:`checksum_fault`."""
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        return "you may not read it"
    if not (folder / "trainer_state.json").is_file():
        return "trainer_state.json is missing"
    # Transformers would resume without the optimizer's states, as ``save_only_model`` leaves it, and say nothing.
    if not any(any(folder.glob(pattern)) for pattern in ("*optimizer*", "global_step*")):
        return WITHOUT_OPTIMIZER
    return checksum_fault(folder, read_all=read_all, complete=True)


def checksum_fault(folder: Path, *, read_all: bool = True, complete: bool = False) -> str | None:
    """Name a file of a folder that was changed since it was saved; None if there is none, or without checksums.

    ``read_all`` compares the checksum of every file; where the folder must be ``complete``, a missing file is a fault.
    """
    try:
        saved = json.loads((folder / CHECKSUMS_FILE).read_text(encoding="utf-8"))
        for name, digest in saved.items():
            if not (folder / name).is_file():
                if complete:
                    return f"{name} is missing"
            elif read_all and fingerprint(folder / name) != digest:
                return f"{name} is not what was saved (its SHA-256 differs)"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        return f"can't be read ({error})"
    return None


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in a folder, before the folder or its files get their final names.

    The files get the permissions of the umask, so that a group that may read the folder may read the weights.
    """
    apply_umask(folder)
    # The model card has no checksum: an upload rewrites it.
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != CARD_FILE)
    write_json(folder / CHECKSUMS_FILE, {file.relative_to(folder).as_posix(): fingerprint(file) for file in files})


def move_into_place(part: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name, replacing a folder of that name, and remove its parent folder.

    If the process is killed in between, the next launch renames it (:func:`_restore_checkpoints`).
    """
    if final.exists():
        final.replace(part.with_name(f"{part.name}.replaced"))
    part.replace(final)
    shutil.rmtree(part.parent)


def _restore_checkpoints(folder: Path) -> None:
    """Rename complete checkpoints that a killed process left under the temporary names of :func:`move_into_place`."""
    for part in folder.glob(f"{PART}/checkpoint-*"):
        final = folder / part.name
        # Checksums are written last. Every process of a run may try this; the first one succeeds.
        if not final.exists() and (part / CHECKSUMS_FILE).is_file():
            with suppress(OSError):
                part.replace(final)


def save_atomically(folder: Path, save: Callable[[str], None]) -> None:
    """Save into a run folder through a temporary folder, so that no file is ever incomplete under its final name.

    ``save`` is called with the temporary folder to write into; on every process, as FSDP needs. Weights of an earlier
    save that this one does not have are removed: an adapter's would be loaded in place of those of the merged model.
    """
    part = folder / PART
    if is_main_process():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    try:
        with naming_disk_errors(folder):
            save(str(part))
            if is_main_process():
                write_checksums(part)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if is_main_process():
        earlier = json_or_empty(folder / CHECKSUMS_FILE)
        for file in sorted(part.iterdir()):
            target = folder / file.name
            if target.is_dir():
                # A folder of an earlier save, such as a tokenizer's templates: a rename needs an empty target.
                shutil.rmtree(target)
            file.replace(target)
        gone = earlier.keys() - json_or_empty(folder / CHECKSUMS_FILE).keys()
        for file in list(folder.iterdir()):
            if file.name in gone and any(map(file.match, _WEIGHTS)):
                file.unlink()
        part.rmdir()

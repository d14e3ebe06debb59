"""Checkpoints on disk: list them, find missing or damaged files, write and verify checksums."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from stepjepa.files import fingerprint, write_json

CHECKSUMS_FILE = "checksums.json"
"""File in a checkpoint or run folder: SHA-256 of each file that was saved with it."""

_PREFIX = "checkpoint-"
_STATE_FILE = "trainer_state.json"

# Required parts of a checkpoint: the name for messages, and patterns of which one must match a file or folder.
_WEIGHTS = {"model.safetensors": ("model*.safetensors", "adapter_model.*", "pytorch_model*", "global_step*")}
_TO_RESUME = {
    "optimizer.pt": ("optimizer*", "rank*-optimizer.pt", "global_step*"),
    # DeepSpeed may save its own scheduler in global_step*.
    "scheduler.pt": ("scheduler.pt", "global_step*"),
    "rng_state.pth": ("rng_state*.pth",),
}


def checkpoints(folder: Path) -> list[Path]:
    """The folders ``checkpoint-N`` of a run, complete or not, newest first."""
    numbered = [path for path in folder.glob(f"{_PREFIX}*") if path.name[len(_PREFIX) :].isdecimal()]
    return sorted(numbered, key=lambda path: -int(path.name[len(_PREFIX) :]))


def move_into_place(part: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name, replacing an existing folder of that name.

    Args:
        part: the temporary folder that holds the checkpoint; its parent folder is removed.
        final: the final folder.
    """
    if final.exists():
        final.replace(part.with_name(f"{part.name}.replaced"))
    part.replace(final)
    shutil.rmtree(part.parent)


def checkpoint_fault(path: Path, needed: Collection[str] = (), *, weights_only: bool = False) -> str | None:
    """Why a checkpoint can't be resumed; None if no fault is found.

    A quick check of file names, sizes, headers and small files; it does not find a flipped bit inside the weights.

    Args:
        path: the checkpoint folder.
        needed: files that this checkpoint must hold besides those of every checkpoint.
        weights_only: the checkpoint was saved without optimizer, scheduler and RNG state, which is then no fault.
    """
    wanted = {name: (name,) for name in (_STATE_FILE, *needed)} | _WEIGHTS | ({} if weights_only else _TO_RESUME)
    try:
        for name, patterns in wanted.items():
            if not any(any(path.glob(pattern)) for pattern in patterns):
                return f"{name} is missing"
        for file in sorted(path.iterdir()):
            if fault := _file_fault(file):
                return f"{file.name} {fault}"
    except OSError as error:
        # Reported as a fault, so that the run can resume from the checkpoint before this one.
        return f"can't be read ({error.strerror or error})"
    return None


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in a folder, before the folder or its files get their final names."""
    # Leave out the model card, which every evaluation rewrites.
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != "README.md")
    write_json(folder / CHECKSUMS_FILE, {file.relative_to(folder).as_posix(): fingerprint(file) for file in files})


def checksum_fault(folder: Path) -> str | None:
    """Why the files of a folder do not match their checksums; None if they do or none were saved. Reads every byte."""
    try:
        written = json.loads((folder / CHECKSUMS_FILE).read_text(encoding="utf-8"))
        for name, digest in written.items():
            if (folder / name).is_file() and fingerprint(folder / name) != digest:
                return f"{name} is not what was saved (its SHA-256 differs)"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        return f"{CHECKSUMS_FILE} can't be read ({error})"
    return None


def _file_fault(file: Path) -> str | None:
    """Why a file is damaged, by its format: JSON, safetensors, or the zip archives that PyTorch saves; or None."""
    from safetensors import SafetensorError, safe_open

    try:
        if file.suffix == ".json":
            value = json.loads(file.read_text(encoding="utf-8"))
            if file.name.endswith(".index.json"):
                absent = sorted(name for name in value["weight_map"].values() if not (file.parent / name).is_file())
                return f"names {absent[0]}, which is missing" if absent else None
            return _state_fault(value, file.parent.name) if file.name == _STATE_FILE else None
        if file.suffix == ".safetensors":
            # Opening it compares the header with the file's size.
            safe_open(file, "np")
        elif file.suffix in (".pt", ".pth"):
            # A zip archive has its directory at the end, so a truncated file can't be opened.
            zipfile.ZipFile(file).close()
    except IsADirectoryError:
        return "is no file"
    except (SafetensorError, zipfile.BadZipFile, ValueError, LookupError, TypeError, RecursionError) as error:
        return f"is damaged ({file.stat().st_size:,} bytes; {str(error).partition(chr(10))[0]})"
    return None


def _state_fault(state: Any, folder: str) -> str | None:
    """Why ``trainer_state.json`` is wrong: it has no step, or not the step in the name of the folder; or None."""
    step = state.get("global_step") if isinstance(state, dict) else None
    if not isinstance(step, int) or isinstance(step, bool):
        return "has no global_step"
    number = folder.removeprefix(_PREFIX)
    return f"belongs to step {step}" if number.isdecimal() and int(number) != step else None

"""Checkpoints on the disk: whether one is whole, told without reading its weights, and which is the newest such."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from stepjepa.files import fingerprint, write_json

CHECKSUMS_FILE = "checksums.json"
"""In a checkpoint and in a run folder: SHA-256 of each file that was saved with it."""

_PREFIX = "checkpoint-"
_STATE_FILE = "trainer_state.json"

# What belongs to every checkpoint, by what it is called in messages; one file or folder of each is enough.
_WEIGHTS = {"model.safetensors": ("model*.safetensors", "adapter_model.*", "pytorch_model*", "global_step*")}
_TO_RESUME = {
    "optimizer.pt": ("optimizer*", "rank*-optimizer.pt", "global_step*"),
    # DeepSpeed may have one of its own.
    "scheduler.pt": ("scheduler.pt", "global_step*"),
    "rng_state.pth": ("rng_state*.pth",),
}


def checkpoints(folder: Path) -> list[Path]:
    """The folders ``checkpoint-N`` of a run, whole or not, the newest first."""
    numbered = [path for path in folder.glob(f"{_PREFIX}*") if path.name[len(_PREFIX) :].isdecimal()]
    return sorted(numbered, key=lambda path: -int(path.name[len(_PREFIX) :]))


def move_into_place(part: Path, final: Path) -> None:
    """Rename a finished checkpoint, in the place of a damaged or an older one if there is one.

    Args:
        part: where it was written.
        final: where it belongs.
    """
    if final.exists():
        final.replace(part.with_name(f"{part.name}.replaced"))
    part.replace(final)
    shutil.rmtree(part.parent)


def checkpoint_fault(path: Path, needed: Collection[str] = (), *, weights_only: bool = False) -> str | None:
    """Why a checkpoint can't be resumed; None if nothing is wrong with it.

    Sizes, headers and small files are looked at, in no time; a flipped bit within the weights is not seen.

    Args:
        path: of the folder.
        needed: files that it must hold beside those that all hold.
        weights_only: it was saved without what the optimizer remembers, and is not at fault for that.
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
        # A disk that fails under the newest one is no reason not to resume the one before it.
        return f"can't be read ({error.strerror or error})"
    return None


def write_checksums(folder: Path) -> None:
    """Write down what each file of a folder holds, before the folder gets its name."""
    # The model card is written anew with every evaluation.
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != "README.md")
    write_json(folder / CHECKSUMS_FILE, {file.relative_to(folder).as_posix(): fingerprint(file) for file in files})


def checksum_fault(folder: Path) -> str | None:
    """Which file is no longer what was saved; None if all are, or nothing was written down. Reads every byte."""
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
    """What is wrong with a file by its format: JSON, safetensors, or the zip archives that PyTorch saves."""
    from safetensors import SafetensorError, safe_open

    try:
        if file.suffix == ".json":
            value = json.loads(file.read_text(encoding="utf-8"))
            if file.name.endswith(".index.json"):
                absent = sorted(name for name in value["weight_map"].values() if not (file.parent / name).is_file())
                return f"names {absent[0]}, which is missing" if absent else None
            return _state_fault(value, file.parent.name) if file.name == _STATE_FILE else None
        if file.suffix == ".safetensors":
            # Compares the header with the file's size.
            safe_open(file, "np")
        elif file.suffix in (".pt", ".pth"):
            # Has its list of contents at the end.
            zipfile.ZipFile(file).close()
    except IsADirectoryError:
        return "is no file"
    except (SafetensorError, zipfile.BadZipFile, ValueError, LookupError, TypeError, RecursionError) as error:
        return f"is damaged ({file.stat().st_size:,} bytes; {str(error).partition(chr(10))[0]})"
    return None


def _state_fault(state: Any, folder: str) -> str | None:
    """What is wrong with the state of the Trainer; one of another checkpoint says another step than the folder."""
    step = state.get("global_step") if isinstance(state, dict) else None
    if not isinstance(step, int) or isinstance(step, bool):
        return "names no step"
    number = folder.removeprefix(_PREFIX)
    return f"is of step {step}" if number.isdecimal() and int(number) != step else None

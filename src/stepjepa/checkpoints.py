"""Checkpoints on the disk: whether one is whole, told without reading its weights, and which is the newest such."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

_PREFIX = "checkpoint-"
_STATE_FILE = "trainer_state.json"

# What belongs to every checkpoint, by what it is called in messages; one file or folder of each is enough.
_WEIGHTS = ("model*.safetensors", "adapter_model.*", "pytorch_model*", "global_step*")
_TO_GO_ON = {
    "optimizer.pt": ("optimizer*", "rank*-optimizer.pt", "global_step*"),
    # DeepSpeed may have one of its own.
    "scheduler.pt": ("scheduler.pt", "global_step*"),
    "rng_state.pth": ("rng_state*.pth",),
}
# JSON files that hold an object.
_OBJECTS = ("config.json", "adapter_config.json", "generation_config.json", "stream.json")
# The longest header that the format allows.
_LONGEST_HEADER = 100_000_000


def checkpoints(folder: Path) -> list[Path]:
    """The folders ``checkpoint-N`` of a run, whole or not, the newest first."""
    numbered = [path for path in folder.glob(f"{_PREFIX}*") if path.name[len(_PREFIX) :].isdigit()]
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
    """Why a checkpoint can't be gone on from; None if nothing is wrong with it.

    Sizes, headers and small files are looked at, in no time; a flipped bit within the weights is not seen.

    Args:
        path: of the folder.
        needed: files that it must hold beside those that all hold.
        weights_only: it was saved without what the optimizer remembers, and is not at fault for that.
    """
    try:
        return _fault(path, needed, weights_only)
    except OSError as error:
        # A disk that fails under the newest one is no reason not to go on from one before it.
        return f"can't be read ({error.strerror or error})"


def _fault(path: Path, needed: Collection[str], weights_only: bool) -> str | None:
    # The Trainer writes this file last.
    if not (path / _STATE_FILE).is_file():
        return f"{_STATE_FILE} is missing"
    for file in sorted(path.iterdir()):
        check = _CHECKS.get(file.suffix)
        fault = None if check is None else check(file) if file.is_file() else "is no file"
        if fault is not None:
            return f"{file.name} {fault}"
    if not any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        return "model.safetensors is missing"
    for name in needed:
        if not (path / name).is_file():
            return f"{name} is missing"
    for name, patterns in {} if weights_only else _TO_GO_ON.items():
        if not any(any(path.glob(pattern)) for pattern in patterns):
            return f"{name} is missing"
    return None


def _json_fault(file: Path) -> str | None:
    try:
        value: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return "is empty" if not file.stat().st_size else "is cut short or damaged"
    if file.name == _STATE_FILE:
        return _state_fault(value, file.parent.name)
    if file.name in _OBJECTS and not isinstance(value, dict):
        return "holds no object"
    if file.name.endswith(".index.json"):
        weight_map = value.get("weight_map") if isinstance(value, dict) else None
        if not isinstance(weight_map, dict):
            return "names no files"
        absent = sorted({str(name) for name in weight_map.values() if not (file.parent / str(name)).is_file()})
        if absent:
            return f"names {absent[0]}, which is missing"
    return None


def _state_fault(state: Any, folder: str) -> str | None:
    """What is wrong with the state of the Trainer; one of another checkpoint says another step than the folder."""
    step = state.get("global_step") if isinstance(state, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        return "names no step"
    number = folder.removeprefix(_PREFIX)
    if folder != number and number.isdigit() and int(number) != step:
        return f"is of step {step}"
    logs = state.get("log_history") or []
    if not isinstance(logs, list) or not all(isinstance(line, dict) for line in logs):
        return "has a damaged log_history"
    return None


def _safetensors_fault(file: Path) -> str | None:
    """Eight bytes with the length of the header, the header as JSON, the tensors; nothing else."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(size - 8, _LONGEST_HEADER):
            return f"is cut short ({size:,} bytes)"
        try:
            header = json.loads(stream.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
            expected = 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return "has a damaged header"
    return None if size == expected else f"has {size:,} bytes instead of {expected:,}"


def _archive_fault(file: Path) -> str | None:
    """What PyTorch saves is a zip archive; its list of contents, each with the file's name, stands at the end."""
    if not file.stat().st_size:
        return "is empty"
    try:
        with zipfile.ZipFile(file) as archive:
            names = {name.partition("/")[0] for name in archive.namelist()}
    # A list of contents that is damaged may tell impossible places, or a version of the format that is not known.
    except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError):
        return f"is cut short ({file.stat().st_size:,} bytes)"
    others = names - {file.stem, "archive"}
    return f"is another file, {sorted(others)[0]}{file.suffix} by its contents" if others else None


_CHECKS = {
    ".json": _json_fault,
    ".safetensors": _safetensors_fault,
    ".pt": _archive_fault,
    ".pth": _archive_fault,
}

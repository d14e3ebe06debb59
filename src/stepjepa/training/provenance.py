"""What ``run.json`` says of where a run comes from: ``stepjepa rerun`` repeats it and notices what has changed."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from stepjepa.data.records import BadRecords, Record
from stepjepa.evaluation.output import model_fingerprint
from stepjepa.files import fingerprint
from stepjepa.flag_files import without_flags

OF_ONE_START = {"config": True, "resume_from_checkpoint": True, "output_dir": True, "json": True, "offline": False}
"""Flags that say where and how a run was started, not what it is; and whether they have a value."""


def provenance(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Parts of ``run.json``.

    Args:
        args: of ``commands.train``.
        model: as it was loaded.

    Returns:
        ``command`` as it was typed; ``arguments``, the same with the configuration file written out and without what
        belongs to one start (:data:`OF_ONE_START`); the ``directory`` that relative paths in it are meant from;
        ``model_fingerprint`` of the weights or configuration that training began from (a hash for a folder, the commit
        for a hub id, None for a preset); and the ``machine``.
    """
    name = args.model_name
    folder = Path(name).is_dir()
    return {
        "command": ["train", *args.given],
        "arguments": without_flags(args.resolved, OF_ONE_START),
        "directory": str(Path.cwd()),
        "model_fingerprint": model_fingerprint(name) if folder else getattr(model.config, "_commit_hash", None),
        "machine": machine(use_cpu=bool(args.training.get("use_cpu"))),
    }


def identify_file(path: str, records: list[Record], bad: BadRecords | None) -> dict[str, Any]:
    """What tells a file of records apart, and what was skipped in it."""
    skipped = {"bad_records": bad.to_dict()} if bad is not None and bad.count else {}
    return {"file": Path(path).name, "records": len(records), "sha256": fingerprint(path), **skipped}


def identify_stream(path: str) -> dict[str, Any]:
    """What tells a streamed file apart: its name, its size in bytes and a hash of its first MiB.

    A file that is too large to be held is too large to be read once more.
    """
    with open(path, "rb") as stream:
        digest = hashlib.sha256(stream.read(2**20)).hexdigest()
    return {"file": Path(path).name, "bytes": Path(path).stat().st_size, "sha256_of_first_mib": digest}


def machine(*, use_cpu: bool = False) -> dict[str, Any]:
    """What of a machine the last digits of its sums depend on.

    Args:
        use_cpu: whatever accelerator there may be.
    """
    accelerator = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    return {
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": torch.get_num_threads(),
        "device": "cpu" if accelerator is None else device_name(accelerator),
    }


def device_name(device: torch.device) -> str:
    """The name of an accelerator; its kind where the backend knows none, as that of Apple's."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))

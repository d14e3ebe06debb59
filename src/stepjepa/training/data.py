"""The records of a run, and what ``run.json`` says of them and of the machine."""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from stepjepa.data.records import BadRecords, Record, bad_records, tell_bad_records
from stepjepa.data.sources import mix, read_any, read_records
from stepjepa.errors import UserError
from stepjepa.evaluation.output import model_fingerprint
from stepjepa.files import fingerprint
from stepjepa.options import without_flags
from stepjepa.run_folder import is_main_process


def read_data(args: argparse.Namespace) -> tuple[list[Record], list[Record], dict[str, Any]]:
    """Training records, held-out records and what identifies their files.

    Raises:
        UserError: a file is missing or wrong, or ``--eval_split`` would leave a part empty.
    """
    if args.data_file is not None:
        records, bad = _read(args, args.data_file)
        order = random.Random(args.split_seed).sample(range(len(records)), len(records))
        count = round(len(records) * args.eval_split)
        if not 0 < count < len(records):
            raise UserError(
                f"{len(records)} records can't be split with --eval_split {args.eval_split}; one part would be empty",
                path=args.data_file,
            )
        held = set(order[:count])
        parts = [records[i] for i in range(len(records)) if i not in held], [records[i] for i in sorted(held)]
        _tell_overlap(*parts)
        split = {"eval_split": args.eval_split, "split_seed": args.split_seed}
        return *parts, {"data": {**identify_file(args.data_file, records, bad), **split}}
    if args.dataset is not None:
        train_records, about = read_mixture(args)
        files = {"train": about}
    else:
        train_records, bad = _read(args, args.train_file)
        files = {"train": identify_file(args.train_file, train_records, bad)}
    if args.eval_file is None:
        return train_records, [], files
    eval_records, bad = _read(args, args.eval_file)
    _tell_overlap(train_records, eval_records)
    return train_records, eval_records, {**files, "eval": identify_file(args.eval_file, eval_records, bad)}


def read_mixture(args: argparse.Namespace) -> tuple[list[Record], dict[str, Any]]:
    """The records of ``--dataset``, and what identifies them.

    Raises:
        UserError: a data set is missing or wrong, or ``--dataset_weights`` do not fit.
    """
    names = [Path(name).name if Path(name).exists() else name for name in args.dataset]
    parts, bad = [], [bad_records(args.bad_records) for _ in names]
    for source, left_out in zip(args.dataset, bad, strict=True):
        parts.append(read_any(source, bad=left_out, columns=args.columns))
        if is_main_process():
            tell_bad_records(left_out)
    taken = mix(parts, args.dataset_weights, args.split_seed)
    records = [record for part in taken for record in part]
    digest = hashlib.sha256(repr([(record.messages, record.views) for record in records]).encode())
    shares = [
        {"file": name, "records": len(part), "taken": len(some), **_left_out(skipped)}
        for name, part, some, skipped in zip(names, parts, taken, bad, strict=True)
    ]
    about = {"file": " + ".join(names), "records": len(records), "sha256": digest.hexdigest(), "datasets": shares}
    return records, about


def _left_out(bad: BadRecords | None) -> dict[str, Any]:
    return {"bad_records": bad.to_dict()} if bad is not None and bad.count else {}


def _read(args: argparse.Namespace, path: str) -> tuple[list[Record], BadRecords | None]:
    """The records of a file, and what was skipped in it."""
    bad = bad_records(args.bad_records)
    records = read_records(path, bad=bad, columns=args.columns)
    if is_main_process():
        tell_bad_records(bad)
    return records, bad


def _tell_overlap(train_records: list[Record], eval_records: list[Record]) -> None:
    """Say on standard error how many held-out records are trained on, too."""
    trained = {str(record.messages) for record in train_records}
    both = sum(str(record.messages) in trained for record in eval_records)
    if both and is_main_process():
        print(
            f"note: {both:,} of {len(eval_records):,} held-out records are among the training records, too, so what is "
            "measured on them is no measure of new ones; take them out of one",
            file=sys.stderr,
        )


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
    return {"file": Path(path).name, "records": len(records), "sha256": fingerprint(path), **_left_out(bad)}


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

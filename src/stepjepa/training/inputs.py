"""What a training run from the command line is given: its records, and the arguments of transformers' Trainer."""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib.util
import random
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from stepjepa.batch.stream import RecordStream
from stepjepa.data.records import BadRecords, Record, bad_records, read_records, tell_bad_records
from stepjepa.errors import UserError
from stepjepa.files import fingerprint
from stepjepa.run_folder import is_main_process
from stepjepa.text.system_prompts import MOST_PROMPTS, count_system_prompts
from stepjepa.training.group import open_group
from stepjepa.training.hub import refuse_offline
from stepjepa.training.tensorboard import has_tensorboard

SHUFFLE_BUFFER = 1000
"""Records of a stream to draw the next one from, where nothing is said (as in ``datasets``)."""

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Values of ``--report_to`` that are packages of the same name."""

FIRST = 1000
"""Records of a stream that are looked at before it is trained on, or as many as its buffer holds."""

# A file that is too large to be held is too large to be read once more, so only its beginning tells it apart.
_BEGINNING = 2**20


def open_stream(args: argparse.Namespace) -> RecordStream:
    """The training records of ``--streaming``.

    Raises:
        UserError: the file is missing, or no plain file.
    """
    size = args.shuffle_buffer_size
    if size is None:
        size = 0 if args.training.get("train_sampling_strategy") == "sequential" else SHUFFLE_BUFFER
    return RecordStream(args.train_file, size, bad_records(args.bad_records))


def read_data(args: argparse.Namespace) -> tuple[list[Record], list[Record], dict[str, Any]]:
    """Training records (of a stream the first ones, see ``FIRST``), held-out records and what identifies their files.

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
        return *parts, {"data": {**_identify(args.data_file, records, bad), **split}}
    if args.streaming:
        stream = open_stream(args)
        train_records = list(islice(stream, max(FIRST, stream.shuffle_buffer_size)))
        files = {"train": identify_stream(args.train_file)}
    else:
        train_records, bad = _read(args, args.train_file)
        files = {"train": _identify(args.train_file, train_records, bad)}
    if args.eval_file is None:
        return train_records, [], files
    eval_records, bad = _read(args, args.eval_file)
    if not args.streaming:
        _tell_overlap(train_records, eval_records)
    return train_records, eval_records, {**files, "eval": _identify(args.eval_file, eval_records, bad)}


def _read(args: argparse.Namespace, path: str) -> tuple[list[Record], BadRecords | None]:
    """The records of a file, and what was left out of it."""
    bad = bad_records(args.bad_records)
    records = read_records(path, bad=bad)
    if is_main_process():
        tell_bad_records(bad)
    return records, bad


def _tell_overlap(train_records: list[Record], eval_records: list[Record]) -> None:
    """Say on standard error how many held-out records are trained on, too."""

    def chats(records: list[Record]) -> list[tuple[tuple[str, str], ...]]:
        return [tuple((message["role"], message["content"]) for message in record.messages) for record in records]

    trained = set(chats(train_records))
    both = sum(chat in trained for chat in chats(eval_records))
    if both and is_main_process():
        print(
            f"note: {both:,} of {len(eval_records):,} held-out records are among the training records, too, so what is "
            "measured on them is no measure of new ones; take them out of one",
            file=sys.stderr,
        )


def _identify(path: str, records: list[Record], bad: BadRecords | None) -> dict[str, Any]:
    left_out = {"bad_records": bad.to_dict()} if bad is not None and bad.count else {}
    return {"file": Path(path).name, "records": len(records), "sha256": fingerprint(path), **left_out}


def identify_stream(path: str) -> dict[str, Any]:
    """What tells a streamed file apart: its name, its size in bytes and a hash of its beginning."""
    with open(path, "rb") as stream:
        digest = hashlib.sha256(stream.read(_BEGINNING)).hexdigest()
    return {"file": Path(path).name, "bytes": Path(path).stat().st_size, "sha256_of_first_mib": digest}


def system_prompts(records: list[Record]) -> list[str | None]:
    """The different system prompts of some records, the most frequent first; None stands for having none."""
    return [prompt for prompt, _ in count_system_prompts(records).most_common(MOST_PROMPTS)]


def training_arguments(args: argparse.Namespace, has_eval: bool) -> TrainingArguments:
    """Our flags and those of transformers as one.

    Args:
        args: of ``commands.train``.
        has_eval: there are held-out records.

    Raises:
        UserError: transformers refuses them, or ``--eval_steps`` has nothing to act on.
    """
    values: dict[str, Any] = {
        "output_dir": args.output_dir,
        "per_device_train_batch_size": args.batch_size,
        "gradient_accumulation_steps": args.grad_accum,
        "learning_rate": args.learning_rate,
        "num_train_epochs": args.num_epochs,
        "seed": args.finetune_seed,
        "logging_steps": 10,
        "report_to": ["tensorboard"] if has_tensorboard() else "none",
        # All processes say as much as the first.
        "log_level_replica": "passive",
        "disable_tqdm": not sys.stderr.isatty(),
    }
    if has_eval:
        values["eval_strategy"] = "epoch" if args.eval_steps is None else "steps"
        values["eval_steps"] = args.eval_steps
    elif args.eval_steps is not None:
        raise UserError("--eval_steps does nothing without --eval_file or --data_file; add one or leave it out")
    values.update(args.training)
    _check_hub(args.training)
    if str(values.get("fsdp")).lower() == "true":
        # A configuration file says 'fsdp: true'; as a word it would be taken for one of the old options.
        values["fsdp"] = True
    if values.get("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        raise UserError("--deepspeed requires deepspeed, which is not installed: pip install deepspeed")
    open_group(cpu=bool(values.get("use_cpu")), seconds=values.get("ddp_timeout", TrainingArguments.ddp_timeout))
    try:
        made = TrainingArguments(**values)
        # An unknown name would end the run only after data and model are prepared.
        get_reporting_integration_callbacks(made.report_to)
    except (ValueError, ImportError, TypeError, RuntimeError) as error:
        raise UserError(_with_remedy(" ".join(str(error).split()))) from None
    _check_reports(args, made)
    return made


def _with_remedy(message: str) -> str:
    """A message of transformers; that of an unknown tracker with the nearest known one."""
    if match := re.fullmatch(r"(\S+) is not supported, only (.+) are supported\.?", message):
        near = difflib.get_close_matches(match[1], match[2].split(", "), n=1)
        return f"--report_to {match[1]} is unknown; " + (f"did you mean {near[0]}?" if near else f"known: {match[2]}")
    return message


def _check_reports(args: argparse.Namespace, made: TrainingArguments) -> None:
    """Refuse a tracker whose package is missing; say it where the default one is."""
    missing = [name for name in made.report_to if name in TRACKERS and importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"--report_to {missing[0]} requires {missing[0]}, which is not installed: pip install {missing[0]}"
        )
    if "report_to" not in args.training and not has_tensorboard() and is_main_process():
        print(
            "note: no TensorBoard files, since it is not installed (pip install tensorboard); metrics.jsonl has all "
            "curves; --report_to none leaves this line out",
            file=sys.stderr,
        )


def _check_hub(named: dict[str, Any]) -> None:
    """Refuse flags of uploads that have nothing to act on, and an upload that can't be."""
    if named.get("push_to_hub"):
        refuse_offline()
        if str(named.get("hub_strategy", "every_save")) not in ("end", "every_save"):
            raise UserError(
                f"--hub_strategy {named['hub_strategy']}: only models are uploaded, not what a run needs to go on; "
                "choose end or every_save"
            )
        return
    unused = sorted(name for name in named if name.startswith("hub_"))
    if unused:
        raise UserError(f"--{unused[0]} does nothing without --push_to_hub; add it or leave it out")

"""``stepjepa rerun``: repeat the training run of a folder and check whether the weights are the same."""

# ruff: noqa: RUF009  # option() makes the field

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import chdir, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepjepa.commands import Command, load, parse
from stepjepa.errors import UserError, shown, visible
from stepjepa.files import fingerprint
from stepjepa.models.presets import is_hub_id
from stepjepa.options import as_arguments, option
from stepjepa.run_folder import RUN_FILE, is_main_process, open_run_folder, read_run

EPILOG = """\
Repeats the run from its beginning with the settings of run.json. Changed
versions and another machine are printed; a changed data file, chat template or
model folder is an error unless --allow_changes is given. Exit code 1 if nothing
has changed and the weights still differ."""

MOVED = ("train_file", "eval_file", "data_file", "model_name")

NAMED_AGAIN = ("trust_remote_code", "eval_task", "push_to_hub", "report_to", "model_name", "attn_implementation")
"""Settings that run code or contact other machines: the user must name them again, since a run folder may come from
somebody who is not trusted."""

RESOLVED = ("jepa", "lora", "loaded", "order", "model_fingerprint")
"""Fields of run.json that the first run resolved. A note is printed if they are resolved to other values now."""


@dataclass
class RerunFlags:
    """The run, and what may differ."""

    folder: str = option(help="run folder", positional=True, metavar="FOLDER")
    output_dir: str | None = option(None, "folder of the new run; empty or new (FOLDER-rerun)", metavar="DIR")
    allow_changes: bool = option(False, "go on where data or model have changed")
    train_file: str | None = option(None, "where it is now, if it was moved", group="moved files", metavar="FILE")
    eval_file: str | None = option(None, "likewise", group="moved files", metavar="FILE")
    data_file: str | None = option(None, "likewise", group="moved files", metavar="FILE")
    model_name: str | None = option(None, "likewise; also to name a model of the hub again", metavar="NAME")
    trust_remote_code: bool = option(False, "run code that comes with the model")
    eval_task: str | None = option(None, "a task of one's own", metavar="MODULE:CLASS")
    push_to_hub: bool = option(False, "upload the model")
    report_to: list[str] | None = option(None, "wandb, tensorboard ...; none for nobody", metavar="NAME")
    attn_implementation: str | None = option(None, "a kernel of the hub", metavar="NAME")


def run(args: argparse.Namespace) -> int:
    """Check what has changed, train again and compare the weights.

    Raises:
        UserError: the run can't be repeated, or something has changed.
    """
    folder = Path(args.folder).absolute()
    old = _checked(folder)
    new = Path(args.output_dir or f"{folder}-rerun").absolute()
    open_run_folder(str(new), None)
    more = {name: _here(getattr(args, name)) for name in MOVED}
    more |= {name: getattr(args, name) for name in NAMED_AGAIN if name not in MOVED and getattr(args, name)}
    command = [*old["arguments"], *as_arguments({**more, "output_dir": str(new)})]
    _tell(f"stepjepa train {shlex.join(command)}")
    directory = str(old.get("directory", ""))
    there = os.path.isdir(directory)  # noqa: PTH112  # Path("") would be the current folder
    if not there:
        _tell(f"note: it was started in {directory}, which is gone; relative paths are meant from here")
    with chdir(directory) if there else nullcontext():
        repeated = parse("train", command)
        _check_named_again(args, repeated)
        changes = _changes(old, repeated)
        if changes and not args.allow_changes:
            raise UserError(f"{'; '.join(changes)}; restore what it was, or pass --allow_changes", path=folder)
        for line in (*changes, *_differences(old, repeated)):
            _tell(f"note: {line}")
        load("train").run(repeated)
    return _compare(folder, new, old, bool(changes)) if is_main_process() else 0


def _checked(folder: Path) -> dict[str, Any]:
    """Read ``run.json`` and check the types of what the new run is compared with."""
    old = read_run(folder)
    arguments, data, loaded, machine = (old.get(name) for name in ("arguments", "data", "loaded", "machine"))
    sound = isinstance(arguments, list) and all(isinstance(each, str) for each in arguments)
    if not sound:
        raise UserError("run.json holds no 'arguments', so the run can't be repeated; train again", path=folder)
    sound = isinstance(data, dict) and all(
        name in ("train", "eval", "data") and isinstance(part, dict) and isinstance(part.get("file"), str)
        for name, part in data.items()
    )
    sound &= isinstance(loaded, dict) and isinstance(loaded.get("chat_template"), str | None)
    sound &= isinstance(machine, dict) and isinstance(machine.get("processes"), int)
    if not sound or not isinstance(old.get("versions"), dict):
        told = "is damaged: expected 'data', 'loaded', 'versions' and 'machine' of a run; restore it, or train again"
        raise UserError(told, path=folder / RUN_FILE)
    return old


def _tell(line: str) -> None:
    if is_main_process():
        print(visible(line), flush=True)


def _here(name: str | None) -> str | None:
    """Make an existing path absolute, since training runs in another directory; leave hub ids and presets alone."""
    return str(Path(name).absolute()) if name is not None and Path(name).exists() else name


def _check_named_again(args: argparse.Namespace, repeated: argparse.Namespace) -> None:
    """Refuse settings of :data:`NAMED_AGAIN` that the run had and the user has not named again."""
    has = {
        "trust_remote_code": repeated.trust_remote_code,
        "eval_task": ":" in repeated.eval_task,
        "push_to_hub": bool(repeated.training.get("push_to_hub")),
        "report_to": repeated.training.get("report_to", "none") not in ("none", ["none"], []),
        "model_name": is_hub_id(repeated.model_name),
        "attn_implementation": "/" in (repeated.attn_implementation or ""),
    }
    for name in NAMED_AGAIN:
        if has[name] and not getattr(args, name):
            value = {**repeated.training, **vars(repeated)}[name]
            instead = ", or --report_to none" if name == "report_to" else ""
            raise UserError(
                f"the run had --{name} {shown(value)}, which runs code or speaks to others; pass it again if you trust "
                f"the folder{instead}",
                path=args.folder,
            )


def _changes(old: Mapping[str, Any], repeated: argparse.Namespace) -> list[str]:
    """Changes of data, chat template, model or number of processes, after which equal weights are not expected.

    Raises:
        UserError: a data file is missing.
    """
    from stepjepa.evaluation.output import model_fingerprint
    from stepjepa.training.record import machine, read_mixture

    found = []
    for part, before in old["data"].items():
        if part == "train" and repeated.dataset is not None:
            if read_mixture(repeated)[1]["sha256"] != before.get("sha256"):
                found.append("the records of --dataset have changed since")
            continue
        name = f"{part}_file"
        path = getattr(repeated, name)
        if path is None or not Path(path).is_file():
            raise UserError(f"no such file; pass --{name} with where it is now", path=path or before["file"])
        if fingerprint(path) != before.get("sha256"):
            found.append(f"{path} has changed since")
    template = old["loaded"]["chat_template"]
    if template is not None and fingerprint(repeated.chat_template) != template:
        found.append(f"{repeated.chat_template} has changed since")
    model = repeated.model_name
    if Path(model).is_dir() and model_fingerprint(model) != old.get("model_fingerprint"):
        found.append(f"the model in {model} has changed since")
    processes, now = old["machine"]["processes"], machine()["processes"]
    if now != processes:
        found.append(f"the run had {processes} processes (torchrun --nproc_per_node), not {now}")
    return found


def _differences(old: Mapping[str, Any], repeated: argparse.Namespace) -> list[str]:
    """Differences that may change the last digits of the weights: versions, threads, device."""
    from stepjepa.run_folder import versions
    from stepjepa.training.record import machine

    now = {**versions(), **machine(use_cpu=bool(repeated.training.get("use_cpu")))}
    before = {**old["versions"], **old["machine"]}
    return [
        f"{name} was {was} and is {now.get(name, 'missing')}" for name, was in before.items() if now.get(name) != was
    ]


def _compare(folder: Path, new: Path, old: Mapping[str, Any], changed: bool) -> int:
    """Print whether the weights are equal; return exit code 1 if they differ although nothing had changed."""
    again = read_run(new)
    for name in RESOLVED:
        if again.get(name) != old.get(name):
            print(f"note: {name} was resolved to {visible(repr(old.get(name)))}, now to {again.get(name)!r}")
    first, second = ({file.name: fingerprint(file) for file in sorted(f.glob("*.safetensors"))} for f in (folder, new))
    if old.get("status") != "finished" or "exported_from" in old or not first:
        print(f"weights: nothing to compare with, since {folder} holds no weights of a finished run")
        return 0
    if first == second:
        print(f"weights: equal to those of {folder}, bit for bit")
        return 0
    print(f"weights: differ from those of {folder}", file=sys.stderr)
    return 0 if changed else 1


RERUN = Command(run, flags=((RerunFlags, "changes, and what must be named again since it runs code"),), epilog=EPILOG)

"""``stepjepa rerun``: repeat the training run of a folder and check whether the weights are the same."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any

from stepjepa.arguments import SHORT_LOSSES
from stepjepa.commands import train
from stepjepa.errors import UserError, shown, visible
from stepjepa.fields import checked_fields
from stepjepa.files import fingerprint
from stepjepa.flag_files import as_arguments
from stepjepa.models.presets import is_hub_id
from stepjepa.options import add_switch
from stepjepa.parser import Parser
from stepjepa.run_folder import RUN_FILE, is_main_process, open_run_folder, read_run

SUMMARY = "repeat the run of a folder, if its data are still the same, and compare the weights"

EPILOG = """\
Repeats the run from its beginning with the settings of run.json. Changed
versions and another machine are printed; a changed data file, chat template or
model folder is an error unless --allow_changes is given. Exit code 1 if nothing
has changed and the weights still differ."""

MOVED = ("train_file", "eval_file", "data_file", "model_name")

# Settings that run code or contact other machines: the user must name them again, since a run folder may come from
# somebody who is not trusted.
NAMED_AGAIN = ("trust_remote_code", "eval_task", "push_to_hub", "report_to", "model_name", "attn_implementation")

# Fields of run.json that the first run resolved. A note is printed if they are resolved to other values now.
RESOLVED = ("jepa", "lora", "loaded", "order", "model_fingerprint")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", metavar="FOLDER", help="run folder")
    parser.add_argument("--output_dir", metavar="DIR", help="folder of the new run; empty or new (FOLDER-rerun)")
    add_switch(parser.add_argument_group("changes"), "--allow_changes", help="go on where data or model have changed")
    moved = parser.add_argument_group("where files are now, if they were moved")
    for name in MOVED:
        moved.add_argument(f"--{name}", metavar="FILE" if name.endswith("file") else "NAME")
    again = parser.add_argument_group("to be named again, where the run had them: they run code or speak to others")
    add_switch(again, "--trust_remote_code", help="run code that comes with the model")
    again.add_argument("--eval_task", metavar="MODULE:CLASS", help="a task of one's own")
    add_switch(again, "--push_to_hub", help="upload the model")
    again.add_argument("--report_to", nargs="+", metavar="NAME", help="wandb, tensorboard ...; none for nobody")
    again.add_argument("--attn_implementation", metavar="NAME", help="a kernel of the hub (--model_name likewise)")


def run(args: argparse.Namespace) -> int:
    """Check what has changed, train again and compare the weights.

    Raises:
        UserError: the run can't be repeated, or something has changed.
    """
    folder = Path(args.folder).absolute()
    old = _checked(folder)
    arguments = old.get("arguments")
    if not isinstance(arguments, list) or not all(isinstance(each, str) for each in arguments):
        raise UserError("run.json holds no 'arguments', so the run can't be repeated; train again", path=folder)
    new = Path(args.output_dir or f"{folder}-rerun").absolute()
    open_run_folder(str(new), None)
    more = {name: _here(getattr(args, name)) for name in MOVED}
    more |= {name: getattr(args, name) for name in NAMED_AGAIN if name not in MOVED and getattr(args, name)}
    command = [*arguments, *as_arguments({**more, "output_dir": str(new)})]
    command += _default_loss(command, old)
    _tell(f"stepjepa train {shlex.join(command)}")
    directory = str(old.get("directory", ""))
    there = os.path.isdir(directory)  # noqa: PTH112  # Path("") would be the current folder
    if not there:
        _tell(f"note: it was started in {directory}, which is gone; relative paths are meant from here")
    with chdir(directory) if there else nullcontext():
        repeated = train.parse(_parser(), command)
        _check_named_again(args, repeated)
        changes = _changes(old, repeated)
        if changes and not args.allow_changes:
            raise UserError(f"{'; '.join(changes)}; restore what it was, or pass --allow_changes", path=folder)
        for line in (*changes, *_differences(old, repeated)):
            _tell(f"note: {line}")
        train.run(repeated)
    return _compare(folder, new, old, bool(changes)) if is_main_process() else 0


def _checked(folder: Path) -> dict[str, Any]:
    """Read ``run.json`` and check the fields that the new run is compared with.

    Raises:
        UserError: a field is missing or wrong.
    """
    old = read_run(folder)
    fields = checked_fields(old, folder / RUN_FILE, "restore it, or train again")
    data = fields.inner("data")
    for part in data:
        if part not in ("train", "eval", "data"):
            raise fields.fault(f"'data' names an unknown part {shown(part)}")
        file = data.inner(part)
        file.text("file")
        if "sha256" in file:
            file.text("sha256")
    fields.inner("loaded").text_or_none("chat_template")
    fields.inner("versions")
    fields.inner("machine").whole("processes", 1)
    return old


def _tell(line: str) -> None:
    if is_main_process():
        print(visible(line), flush=True)


def _parser() -> Parser:
    parser = Parser(prog="stepjepa train", allow_abbrev=False)
    train.add_arguments(parser)
    return parser


def _here(name: str | None) -> str | None:
    """Make an existing path absolute, since training runs in another directory; leave hub ids and presets alone."""
    return str(Path(name).absolute()) if name is not None and Path(name).exists() else name


def _default_loss(command: list[str], old: Mapping[str, Any]) -> list[str]:
    """The run's alignment loss as a flag, if no flag named it: before version 0.2.0 the default was the cosine."""
    args = train.parse(_parser(), command)
    named = args.regular or args.jepa_loss_type or any(getattr(args, name) for name in SHORT_LOSSES)
    loss = old.get("jepa", {}).get("jepa_loss_type")
    return [] if named or loss is None else ["--jepa_loss_type", str(loss)]


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
            shown = "" if value is True else f" {' '.join(value) if isinstance(value, list) else value}"
            instead = ", or --report_to none" if name == "report_to" else ""
            raise UserError(
                f"the run had --{name}{shown}, which runs code or speaks to others; pass it again if you trust the "
                f"folder{instead}",
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
        f"{name} was {value} and is {now.get(name, 'missing')}"
        for name, value in before.items()
        if now.get(name) != value
    ]


def _compare(folder: Path, new: Path, old: Mapping[str, Any], changed: bool) -> int:
    """Print whether the weights are equal; return exit code 1 if they differ although nothing had changed."""
    again = read_run(new)
    for name in RESOLVED:
        if again.get(name) != old.get(name):
            print(f"note: {name} was resolved to {visible(repr(old.get(name)))}, now to {again.get(name)!r}")
    if old.get("status") != "finished" or "exported_from" in old:
        print(f"weights: nothing to compare with, since {folder} is no finished run")
        return 0
    first, second = ({file.name: fingerprint(file) for file in sorted(f.glob("*.safetensors"))} for f in (folder, new))
    if not first:
        print(f"weights: nothing to compare with, since they are no longer in {folder}")
        return 0
    if first == second:
        print(f"weights: equal to those of {folder}, bit for bit")
        return 0
    print(f"weights: differ from those of {folder}", file=sys.stderr)
    return 0 if changed else 1

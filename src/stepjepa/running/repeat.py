"""Repeat a run from its folder: recorded settings, trust in the code that they name, changes since. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import fingerprint
from stepjepa.base.json_object import JsonObject
from stepjepa.config.flat_file import read_flat
from stepjepa.config.option import typed_text
from stepjepa.config.run import PATHS
from stepjepa.models.names import is_hub_id
from stepjepa.store.folder import CONFIG_FILE, RUN_FILE
from stepjepa.store.record import read_run

if TYPE_CHECKING:
    from stepjepa.config.run import RunConfig

SILENT = {"report_to": "none", "push_to_hub": False}
"""Settings of a repeated run that replace recorded ones: it reports and uploads nothing unless asked to."""


def is_record(file: str | Path) -> bool:
    """Return whether a file is the configuration in a run folder."""
    path = Path(file)
    return path.name == CONFIG_FILE and path.is_file() and (path.parent / RUN_FILE).is_file()


def recorded_settings(file: str | Path, *, trusted: bool) -> JsonObject:
    """Return the settings in a run folder's configuration, fit to repeat the run from any directory.

    Relative paths are resolved against the directory of the run, if it still exists; ``output_dir`` is left out.

    Raises:
        UserError: they name code to run, and the folder is not ``trusted``; it may come from a stranger.
    """
    settings = {name: value for name, value in read_flat(file).items() if name != "output_dir"} | SILENT
    check_trusted(settings, trusted=trusted)
    if "data_file" in settings:
        # A file without this setting is of a version that split by record.
        settings.setdefault("split_by", "record")
    start = Path(str(read_run(Path(file).parent).get("directory", "")))

    def resolved(value: object) -> object:
        # Hub ids and presets are no paths and stay as they are.
        path = start / typed_text(value)
        return str(path) if path.exists() else value

    for name in {*PATHS, "model_name", "dataset"} & settings.keys():
        value = settings[name]
        settings[name] = [resolved(item) for item in value] if isinstance(value, list) else resolved(value)
    return settings


def check_trusted(settings: JsonObject, *, trusted: bool) -> None:
    """Raise ``UserError`` for settings that run code of a folder that is not trusted: it may come from a stranger."""
    names = {name: str(value) for name, value in settings.items() if value is not None}
    runs = {
        "trust_remote_code": names.get("trust_remote_code", "false").lower() != "false",
        "model_name": "model_name" in names and is_hub_id(names["model_name"]),
        "eval_task": ":" in names.get("eval_task", ""),
        "layout": ":" in names.get("layout", ""),
        "attn_implementation": "/" in names.get("attn_implementation", ""),
        "term": bool(settings.get("term")),
    }
    if (code := [f"`{name}` {shown(settings[name])}" for name, is_code in runs.items() if is_code]) and not trusted:
        raise UserError(
            f"the run had {', '.join(code)}, which runs code of others; pass `trust_folder` if you trust it"
        )


def changes_since(old: JsonObject, config: RunConfig) -> tuple[list[str], list[str]]:
    """Return the changes since a run: those that change the weights, then those that may change their last digits.

    Args:
        old: the ``run.json`` of the run.
        config: the run that repeats it.

    Raises:
        UserError: a file is missing, or ``run.json`` is damaged.
    """
    from stepjepa.running.data import read_mixture
    from stepjepa.store.environment import machine, versions
    from stepjepa.store.fingerprint import model_fingerprint

    changes = []
    for part, before in old["data"].items():
        name, path = f"{part}_file", getattr(config, f"{part}_file")
        digest: str | None
        if part == "train" and config.dataset is not None:
            path, digest = "`dataset`", read_mixture(config)[1].sha256
        elif path is None or not Path(path).is_file():
            raise UserError(f"no such file; pass `{name}` with where it is now", path=path or before["file"])
        else:
            digest = fingerprint(path)
        changes += [f"{path} has changed since"] if digest != before.get("sha256") else []
    template, model = old["loaded"]["chat_template"], str(config.model_name)
    if template is not None and fingerprint(str(config.chat_template)) != template:
        changes.append(f"{config.chat_template} has changed since")
    if Path(model).is_dir() and model_fingerprint(model) != old.get("model_fingerprint"):
        changes.append(f"the model in {model} has changed since")
    was = {**old["versions"], **old["machine"]}
    now = {**versions(), **machine(use_cpu=bool(config.trainer.get("use_cpu")))}
    if now["processes"] != was["processes"]:
        changes.append(f"the run had {was['processes']} processes (torchrun --nproc_per_node), not {now['processes']}")
    return changes, [f"{name} was {was[name]} and is {now.get(name)}" for name in was if now.get(name) != was[name]]

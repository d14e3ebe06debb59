"""Names of models, folders and hub ids: checked before records are read, which may take minutes. Free of torch."""

import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import read_json_object
from stepjepa.models.base_path import base_as_trained
from stepjepa.models.presets import PREFIX, check_preset

_ADAPTER, _CONFIG, _TOKENIZER = "adapter_config.json", "config.json", "tokenizer_config.json"


def is_hub_id(name: str) -> bool:
    """Return whether a name may be a hub id: not a preset, not a file or folder, and not a name of a path alone.

    A name such as ``runs/one`` is a path if there is a folder ``runs``.
    """
    if ":" in name or Path(name).exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        return False
    return "/" not in name or not Path(name).parent.is_dir()


def check_model_name(name: str, *, untrained: bool = False) -> None:
    """Raise UserError for a missing folder, a misspelt preset, or a hub id where no hub is in reach.

    Args:
        name: a folder, hub id or preset.
        untrained: the model may be an untrained one, so the error mentions presets.
    """
    if Path(name).is_dir():
        return
    if is_hub_id(name):
        _check_reachable(name)
        return
    if name.startswith(PREFIX):
        raise UserError("a preset has random weights; name a trained model: a folder, or a hub id", path=name)
    if Path(name).is_file():
        raise UserError("is a file; name the folder of a model", path=name)
    hint = f" (presets are such as {PREFIX}tiny)" if untrained else ""
    raise UserError(f"no such model folder; check the path{hint}", path=name)


def _check_reachable(name: str) -> None:
    """Raise UserError for a hub id that is not in the cache, where the hub's name can't be looked up.

    The hub's library would try again for a minute. Behind a proxy the name need not be known here.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.is_offline_mode() or getproxies():
        return  # offline, the library itself answers at once
    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in (_CONFIG, _ADAPTER, _TOKENIZER)):
            return
    except ValueError:
        return  # no name of the hub, which says what is wrong with it
    host = urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        fault = f"neither a folder here nor in the hub's cache, and there is no way to {host}"
        raise UserError(f"{fault}; check the name, or the network", path=name) from None


def check_base(name: str) -> None:
    """Raise UserError if no training can start from a model: no such preset or folder, an adapter, an empty folder."""
    if name.startswith(PREFIX):
        check_preset(name)
        return
    check_model_name(name, untrained=True)
    if adapter_file(name).is_file():
        raise UserError("is an adapter; training starts from a whole model: run 'stepjepa export' on it", path=name)
    if Path(name).is_dir() and not any(Path(name).glob("tokenizer*")):  # a tokenizer alone is enough for `inspect`
        _check_holds_model(Path(name))


def check_trained(name: str) -> None:
    """Raise UserError if a name can't be that of a trained model: a folder without a model, a preset."""
    check_model_name(name)
    if Path(name).is_dir() and base_of_adapter(name) is None:
        _check_holds_model(Path(name))


def adapter_file(name: str) -> Path:
    """Return the file that describes the adapter of a folder; it exists if the folder holds one."""
    return Path(name) / _ADAPTER


def base_of_adapter(name: str) -> str | None:
    """Return the name of the base model of an adapter's folder; None if it holds no adapter.

    Raises:
        UserError: the folder's file is damaged, or names no base model, or a folder that is not there.
    """
    file = adapter_file(name)
    if not file.is_file():
        return None
    settings = read_json_object(file, "file of an adapter", "restore it, or train again")
    base = str(settings.get("base_model_name_or_path") or "")
    if not base:
        raise UserError("names no base model (base_model_name_or_path); add it", path=file)
    base = base_as_trained(name, base)
    if not (is_hub_id(base) or base.startswith(PREFIX) or Path(base).is_dir()):
        # It is the path that the training was passed.
        start = "" if Path(base).is_absolute() else "start in the folder in which the training was started, or "
        fault = f"names the base model {shown(base)}, and there is no such folder"
        raise UserError(f"{fault}; {start}write its path there (base_model_name_or_path)", path=file)
    return base


def _check_holds_model(folder: Path) -> None:
    if (folder / _CONFIG).is_file():
        return
    numbers = [path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*") if path.is_dir()]
    last = max((int(number) for number in numbers if number.isdecimal()), default=None)
    remedy = "name the folder of a finished run, or of a checkpoint"
    if last is not None:
        remedy = f"its run was stopped, or still trains: name the last checkpoint, {folder / f'checkpoint-{last}'}"
    raise UserError(f"holds no model; {remedy}", path=folder)

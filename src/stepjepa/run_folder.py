"""The folder of a run: nothing in it is overwritten unasked, and what was run can be read from it.

run.json         configuration, versions, fingerprints of the data, counts, results
metrics.jsonl    one line per log line
checkpoint-N/    transformers' checkpoints
model.safetensors or adapter_model.safetensors, tokenizer ... the trained model
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepjepa.errors import UserError
from stepjepa.files import write_json

RUN_FILE = "run.json"
PACKAGES = ("stepjepa", "torch", "transformers", "accelerate", "peft", "tokenizers", "numpy")


def is_main_process() -> bool:
    """Whether this process writes: the first of those that torchrun starts."""
    return int(os.environ.get("RANK", "0")) == 0


def open_run_folder(path: str, resume: str | None) -> tuple[Path, str | None]:
    """Check a run folder before anything is done.

    Args:
        path: the folder; it need not exist.
        resume: a checkpoint folder, ``last`` (or ``true``) for the newest one in the folder, or None.

    Returns:
        The folder and the checkpoint to resume from, if any.

    Raises:
        UserError: the folder holds something and nothing is resumed, or there is no such checkpoint.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise UserError("is a file; --output_dir needs a folder", path=folder)
    whole = [p for p in folder.glob("checkpoint-*") if p.name[len("checkpoint-") :].isdigit() and is_checkpoint(p)]
    if resume is None:
        if is_main_process() and folder.exists() and any(folder.iterdir()):
            way = "pass --resume_from_checkpoint last to go on with it" if whole else "empty it"
            raise UserError(f"is not empty; name another --output_dir, or {way}", path=folder)
        return folder, None
    if resume.lower() in ("last", "true"):
        if not whole:
            raise UserError(
                "holds no whole checkpoint to resume from; name another --output_dir, or empty this one and leave "
                "--resume_from_checkpoint out",
                path=folder,
            )
        return folder, str(max(whole, key=lambda p: int(p.name[len("checkpoint-") :])))
    checkpoint = Path(resume)
    if not is_checkpoint(checkpoint):
        raise UserError(
            "is no whole checkpoint folder (its trainer_state.json is missing or cut short); check the path",
            path=checkpoint,
        )
    ours = (folder / RUN_FILE).is_file() or checkpoint.resolve().parent == folder.resolve()
    if is_main_process() and folder.exists() and any(folder.iterdir()) and not ours:
        raise UserError("is not empty and holds no run to go on with; name another --output_dir", path=folder)
    return folder, resume


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint that was written to its end."""
    # The Trainer writes this file last, so a checkpoint cut short by a kill has none or half of one.
    try:
        json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "platform": platform.platform(), **found}


def write_run(folder: Path, values: dict[str, Any]) -> None:
    """Write ``run.json``, from the main process only."""
    if is_main_process():
        write_json(folder / RUN_FILE, json.loads(json.dumps(values, default=str)))


def read_run(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """``run.json`` of a run folder.

    Raises:
        UserError: the folder has none.
    """
    path = Path(folder) / RUN_FILE
    if not path.is_file():
        raise UserError(f"is no run folder (no {RUN_FILE} in it)", path=Path(folder))
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError("is damaged; restore it, or train again into another folder", path=path) from None
    return value


def run_of(model_path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """``run.json`` of the run that made a model.

    Args:
        model_path: run folder, checkpoint folder in one, or anything else.

    Returns:
        None where nothing says how the model was made, as for a hub id.
    """
    folder = Path(model_path)
    for place in (folder, folder.parent) if folder.name.startswith("checkpoint-") else (folder,):
        if (place / RUN_FILE).is_file():
            return read_run(place)
    return None


def trained_objective(model_path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The ``JepaConfig`` that a model was trained with, as a dict; None where nothing tells."""
    run = run_of(model_path)
    return None if run is None or "jepa" not in run else dict(run["jepa"])


def earlier_launches(folder: Path, now: dict[str, Any], training: dict[str, Any]) -> list[dict[str, Any]]:
    """What a resumed run has behind it; refuses to go on with it as another run.

    Args:
        folder: the run folder.
        now: parts of ``run.json`` that must not change, as this call would write them.
        training: the training arguments of this call.

    Returns:
        The ``launches`` of ``run.json``: seconds, and the step reached. One that was killed left none.

    Raises:
        UserError: the run was begun with other settings, or is finished.
    """
    if not (folder / RUN_FILE).is_file():
        return []
    before = read_run(folder)
    for part, value in json.loads(json.dumps(now, default=str)).items():
        if before.get(part) == value:
            continue
        both = isinstance(value, dict) and isinstance(before.get(part), dict)
        inner = [key for key in value if before[part].get(key) != value[key]] if both else []
        words = ", ".join([part, *inner[:1]])
        raise UserError(
            f"the run was begun with other settings ({words}); pass the flags of run.json, or another --output_dir",
            path=folder,
        )
    length = ("num_train_epochs", "max_steps")
    if before["status"] == "finished" and all(before["training"][name] == training[name] for name in length):
        raise UserError("the run is finished; there is nothing to resume", path=folder)
    launches: list[dict[str, Any]] = before.get("launches", [])
    return launches


def save_whole(folder: Path, save: Callable[[str], None]) -> None:
    """Save into a run folder so that no file ever stands half-written under its final name.

    Args:
        folder: the run folder.
        save: writes into the folder that it is given; called on every process, as FSDP needs.
    """
    part = folder / ".saving"
    if is_main_process():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True, exist_ok=True)
    save(str(part))
    if is_main_process():
        for file in sorted(part.iterdir()):
            file.replace(folder / file.name)
        part.rmdir()

"""Damage to a checkpoint folder, as kills, full disks and mixed-up copies leave it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path], object]
"""Does something to the folder of a checkpoint."""

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "config.json")


def cut(name: str, size: int) -> Damage:
    """Leaves the first bytes of a file."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def drop(name: str) -> Damage:
    """Removes a file."""
    return lambda folder: (folder / name).unlink()


def put(name: str, text: str) -> Damage:
    """Writes something else into a file."""
    return lambda folder: (folder / name).write_text(text)


def folder_for(name: str) -> Damage:
    """Puts a folder in the place of a file."""

    def apply(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return apply


def drawn_damage(chance: random.Random) -> Damage:
    """Some damage that sizes, headers, names or small files tell."""
    name = chance.choice(FILES)

    def older(folder: Path) -> None:
        other = next(path for path in sorted(folder.parent.glob("checkpoint-*")) if path != folder)
        shutil.copy(other / "trainer_state.json", folder)

    kinds: dict[str, Damage] = {
        # As a kill or a full disk leaves it; any number of bytes is too few.
        "cut": lambda folder: cut(name, chance.randrange((folder / name).stat().st_size))(folder),
        "missing": drop(chance.choice(FILES[:5])),
        "folder": folder_for(name),
        "noise": lambda folder: (folder / name).write_bytes(chance.randbytes(300)),
        "zeros": lambda folder: (folder / name).write_bytes(bytes((folder / name).stat().st_size)),
        "older": older,
    }
    return kinds[chance.choice(list(kinds))]

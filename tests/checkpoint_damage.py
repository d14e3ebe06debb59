"""Damage to a checkpoint folder, as kills, full disks and mixed-up copies leave it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path], object]
"""Does something to the folder of a checkpoint."""


def cut(name: str, size: int) -> Damage:
    """Leaves the first bytes of a file."""

    def apply(folder: Path) -> None:
        content = (folder / name).read_bytes()
        assert len(content) > size
        (folder / name).write_bytes(content[:size])

    return apply


def drop(name: str) -> Damage:
    """Removes a file."""
    return lambda folder: (folder / name).unlink()


def grow(folder: Path) -> None:
    """Bytes that belong to no tensor."""
    with (folder / "model.safetensors").open("ab") as stream:
        stream.write(b"more")


def shards(folder: Path) -> None:
    """An index that names a file which is not there."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def long_header(folder: Path) -> None:
    """A file that says its header were longer than the file."""
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def broken_header(folder: Path) -> None:
    """A header that is no JSON."""
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:8] + b"[" + content[9:])


def put(name: str, text: str) -> Damage:
    """Writes something else into a file."""
    return lambda folder: (folder / name).write_text(text)


def swap(one: str, other: str) -> Damage:
    """Gives two files the names of each other."""

    def apply(folder: Path) -> None:
        contents = [(folder / name).read_bytes() for name in (one, other)]
        for name, content in zip((other, one), contents, strict=True):
            (folder / name).write_bytes(content)

    return apply


def folder_for(name: str) -> Damage:
    """Puts a folder in the place of a file."""

    def apply(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return apply


FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "config.json")


def _other(folder: Path) -> Path:
    """Another checkpoint of the run."""
    return next(path for path in sorted(folder.parent.glob("checkpoint-*")) if path != folder)


def drawn_damage(chance: random.Random) -> Damage:
    """Some damage that sizes, headers, names or small files tell."""
    name = chance.choice(FILES)
    kinds: dict[str, Callable[[], Damage]] = {
        # As a kill or a full disk leaves it; any number of bytes is too few.
        "cut": lambda: lambda folder: cut(name, chance.randrange((folder / name).stat().st_size))(folder),
        "missing": lambda: drop(chance.choice(FILES[:5])),
        "folder": lambda: folder_for(name),
        "noise": lambda: lambda folder: (folder / name).write_bytes(chance.randbytes(300)),
        "zeros": lambda: lambda folder: (folder / name).write_bytes(bytes((folder / name).stat().st_size)),
        "swapped": lambda: swap(*chance.sample([name for name in FILES if name != "config.json"], 2)),
        "older": lambda: lambda folder: shutil.copy(_other(folder) / FILES[4], folder),
    }
    return kinds[chance.choice(list(kinds))]()

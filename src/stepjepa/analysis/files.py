"""The folder of an analysis: all that its pictures are drawn from, so that they can be drawn again without a model.

analysis.json         settings, numbers, captions
embeddings.npz        embeddings of all pairs, and the points of the pictures
projection.png/.svg, singular_values.png/.svg
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepjepa.errors import UserError
from stepjepa.files import atomic_write, existing_file, fingerprint, write_json

JSON_FILE, DATA_FILE = "analysis.json", "embeddings.npz"
FIGURES = ("projection", "singular_values")
FORMATS = ("png", "svg")
VERSION = 1

REST = -1
"""The class of points whose label has no colour of its own."""

# Arrays of a model, as they are named in the data file.
_ARRAYS = ("source", "target", "record", "pair", "is_target", "classes")


@dataclass(frozen=True)
class ModelAnalysis:
    """What is kept of one model.

    Attributes:
        name: for tables and pictures.
        model_path: where it was loaded from.
        views: names of source and target.
        config: how the views were read, a ``JepaConfig`` as a dict.
        numbers: from ``analysis.numbers.analyse``; for paraphrases also ``groups``.
        captions: for each projection what ``analysis.points.project`` says of it.
        arrays: ``source`` and ``target`` ``[P, D]``, ``record`` and ``pair`` ``[P]`` of all pairs (records counted in
            the test file, from 0); ``is_target`` and ``classes`` ``[M]`` of the points that are drawn, a class being an
            index of ``Analysis.classes`` or ``REST``.
        planes: ``[M, 2]`` for each projection.
    """

    name: str
    model_path: str
    views: tuple[str, str]
    config: dict[str, Any]
    numbers: dict[str, Any]
    captions: dict[str, dict[str, Any]]
    arrays: Mapping[str, NDArray[Any]]
    planes: Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Analysis:
    """An analysis of some models on one test file.

    Attributes:
        test_file: what was read.
        test_fingerprint: SHA-256 of it.
        settings: layer, pooling, colouring, seed and whatever else the numbers depend on.
        classes: labels with a colour of their own.
        models: in the order of columns.
    """

    test_file: str
    test_fingerprint: str
    settings: dict[str, Any]
    classes: tuple[str, ...]
    models: tuple[ModelAnalysis, ...]


def output_files(folder: str | os.PathLike[str]) -> list[Path]:
    """All files that an analysis writes."""
    return [Path(folder) / JSON_FILE, Path(folder) / DATA_FILE, *_pictures(folder)]


def _pictures(folder: str | os.PathLike[str]) -> list[Path]:
    return [Path(folder) / f"{figure}.{kind}" for figure in FIGURES for kind in FORMATS]


def check_folder(folder: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuse a folder that holds an analysis already, before anything is computed.

    Raises:
        UserError: one of the files is there and ``overwrite`` is off, or the folder is a file, or can't be written.
    """
    nearest = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise UserError("is a file where a folder is needed; name another --output_dir", path=nearest)
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError("can't be written to; name another --output_dir", path=nearest)
    there = [file for file in output_files(folder) if file.exists()]
    if there and not overwrite:
        raise UserError("is there already; name another --output_dir or pass --overwrite", path=there[0])


def save(analysis: Analysis, folder: str | os.PathLike[str]) -> None:
    """Write the data of an analysis; what is there is replaced, and pictures of it removed."""
    for picture in _pictures(folder):
        picture.unlink(missing_ok=True)
    arrays: dict[str, NDArray[Any]] = {}
    for number, model in enumerate(analysis.models):
        arrays |= {f"{number}/{name}": model.arrays[name] for name in _ARRAYS}
        arrays |= {f"{number}/plane/{name}": plane for name, plane in model.planes.items()}
    with atomic_write(Path(folder) / DATA_FILE, "wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]  # its own flags are keywords too
    described = _fields(analysis, without=("models",))
    described["models"] = [_fields(model, without=("arrays", "planes")) for model in analysis.models]
    # Written last, and it names the data: a folder that a kill left half replaced is told by that.
    write_json(
        Path(folder) / JSON_FILE,
        {"version": VERSION, "data_fingerprint": fingerprint(Path(folder) / DATA_FILE), **described},
    )


def _fields(value: Any, without: tuple[str, ...]) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value) if each.name not in without}


def load(folder: str | os.PathLike[str]) -> Analysis:
    """Read an analysis from its folder.

    Raises:
        UserError: there is none, or its files don't belong together.
    """
    described_in, data_in = Path(folder) / JSON_FILE, Path(folder) / DATA_FILE
    if not described_in.is_file():
        raise UserError(f"holds no analysis (no {JSON_FILE} in it); name the --output_dir of one", path=folder)
    existing_file(data_in, "data file")
    try:
        described = json.loads(described_in.read_text(encoding="utf-8"))
        if described["version"] != VERSION:
            raise UserError(
                f"written in version {described['version']} of this format, and this program reads {VERSION}; run the "
                "analysis again",
                path=described_in,
            )
        if described["data_fingerprint"] != fingerprint(data_in):
            raise UserError(f"is not the data that {JSON_FILE} was written with; run the analysis again", path=data_in)
        with np.load(data_in, allow_pickle=False) as kept:
            arrays = dict(kept)
        models = tuple(_model(number, values, arrays) for number, values in enumerate(described["models"]))
        return Analysis(
            described["test_file"],
            described["test_fingerprint"],
            described["settings"],
            tuple(described["classes"]),
            models,
        )
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"can't be read as an analysis ({error}); run it again", path=described_in) from None


def _model(number: int, values: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> ModelAnalysis:
    return ModelAnalysis(
        values["name"],
        values["model_path"],
        (values["views"][0], values["views"][1]),
        values["config"],
        values["numbers"],
        values["captions"],
        {name: arrays[f"{number}/{name}"] for name in _ARRAYS},
        {name: arrays[f"{number}/plane/{name}"] for name in values["captions"]},
    )

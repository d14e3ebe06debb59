"""The folder of an analysis, which keeps all that its pictures are drawn from.

analysis.json         settings, numbers, captions
embeddings.npz        embeddings of all pairs, and the points of the pictures
projection.png/.svg, singular_values.png/.svg
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepjepa.errors import UserError
from stepjepa.files import atomic_write, existing_file, fingerprint, read_json_object, write_json

JSON_FILE, DATA_FILE = "analysis.json", "embeddings.npz"
FORMATS = ("png", "svg")
VERSION = 1

REST = -1
"""The class of points whose label has no colour of its own."""

_ARRAYS = ("source", "target", "record", "pair", "is_target", "classes")


@dataclass(frozen=True)
class ModelAnalysis:
    """What is kept of one model, with P pairs and M points."""

    name: str
    model_path: str
    views: tuple[str, str]  # names of source and target
    config: dict[str, Any]  # how the views were read, a JepaConfig
    numbers: dict[str, Any]  # see numbers.analyse; also 'groups' for paraphrases
    captions: dict[str, dict[str, Any]]  # of each projection, see points.project
    # source and target [P, D]; record (counted from 0 in the test file) and pair [P]; is_target and classes [M], the
    # latter indices of Analysis.classes, or REST
    arrays: dict[str, NDArray[Any]]
    planes: Mapping[str, NDArray[np.float64]]  # [M, 2] for each projection


@dataclass(frozen=True)
class Analysis:
    """An analysis of some models on one test file."""

    test_file: str
    test_fingerprint: str
    settings: dict[str, Any]
    classes: tuple[str, ...]  # labels with a colour of their own
    models: tuple[ModelAnalysis, ...]


def output_files(folder: str | os.PathLike[str]) -> list[Path]:
    """All files that an analysis writes."""
    pictures = [f"{figure}.{kind}" for figure in ("projection", "singular_values") for kind in FORMATS]
    return [Path(folder) / name for name in (JSON_FILE, DATA_FILE, *pictures)]


def check_folder(folder: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuse an output folder that can't be used, before anything is computed.

    Raises:
        UserError: it holds an analysis and ``overwrite`` is off, or is a file.
    """
    if Path(folder).is_file():
        raise UserError("is a file where a folder is needed; name another --output_dir", path=folder)
    there = [file for file in output_files(folder) if file.exists()]
    if there and not overwrite:
        raise UserError("is there already; name another --output_dir or pass --overwrite", path=there[0])


def save(analysis: Analysis, folder: str | os.PathLike[str]) -> None:
    """Write the data of an analysis; an earlier one is replaced, and its pictures removed."""
    json_file, data_file, *pictures = output_files(folder)
    for picture in pictures:
        picture.unlink(missing_ok=True)
    arrays: dict[str, Any] = {}
    for number, model in enumerate(analysis.models):
        arrays |= {f"{number}/{name}": model.arrays[name] for name in _ARRAYS}
        arrays |= {f"{number}/plane/{name}": plane for name, plane in model.planes.items()}
    with atomic_write(data_file, "wb") as stream:
        np.savez_compressed(stream, **arrays)
    described = _fields(analysis, without=("models",))
    described["models"] = [_fields(model, without=("arrays", "planes")) for model in analysis.models]
    # Written last, and it names the data: so loading notices a folder that a kill left half replaced.
    write_json(json_file, {"version": VERSION, "data_fingerprint": fingerprint(data_file), **described})


def _fields(value: Any, without: tuple[str, ...]) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value) if each.name not in without}


def load(folder: str | os.PathLike[str]) -> Analysis:
    """Read an analysis from its folder.

    Raises:
        UserError: there is none, or its files don't belong together.
    """
    json_file, data_file = Path(folder) / JSON_FILE, Path(folder) / DATA_FILE
    existing_file(data_file, "data file of an analysis")
    described = read_json_object(json_file, "analysis", "run it again")
    if described.pop("data_fingerprint", None) != fingerprint(data_file):
        raise UserError(f"is not the data that {JSON_FILE} was written with; run it again", path=data_file)
    try:
        if (version := described.pop("version")) != VERSION:
            raise ValueError(f"it is of version {version}, and this program reads {VERSION}")
        with np.load(data_file, allow_pickle=False) as arrays:
            models = tuple(_model(number, values, arrays) for number, values in enumerate(described.pop("models")))
        return Analysis(**described | {"classes": tuple(described["classes"]), "models": models})
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"can't be read as an analysis ({error}); run it again", path=json_file) from None


def _model(number: int, values: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> ModelAnalysis:
    return ModelAnalysis(
        **values | {"views": tuple(values["views"])},
        arrays={name: arrays[f"{number}/{name}"] for name in _ARRAYS},
        planes={name: arrays[f"{number}/plane/{name}"] for name in values["captions"]},
    )

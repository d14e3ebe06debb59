"""The linear map that is fitted on the records of a file; it is stored beside the file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from stepjepa.base.errors import raising_user_errors
from stepjepa.base.files import fingerprint
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.sources import read_records
from stepjepa.evaluation.corpus import loaded_model
from stepjepa.evaluation.linear_map import fit_linear_map
from stepjepa.evaluation.model_reading import ReadingSettings
from stepjepa.evaluation.stored_arrays import ArrayFile, Arrays
from stepjepa.objectives.inputs import EmbedOptions
from stepjepa.objectives.jepa import Jepa
from stepjepa.objectives.linear_map import FITS, Fit, FittedMap, LinearMap
from stepjepa.objectives.view_embeddings import ReadoutPlace

SUFFIX = ".linear_map.safetensors"
FORMAT = "stepjepa linear map, 1"


def reading_options(
    reading: ReadingSettings, jepa: Jepa, model_path: str, *, bad: BadRecords, cache: bool = True
) -> EmbedOptions:
    """Return the options of ``Jepa.embedder``; with the setting ``linear_map`` the map, fitted or read.

    Args:
        reading: the settings.
        jepa: the model.
        model_path: the folder that it was loaded from.
        bad: how invalid lines of the map's file are handled.
        cache: read and write the file of the map, which is beside its records and has :data:`SUFFIX`.

    Raises:
        UserError: there are too few records, or a setting can't be used.
    """
    options = reading.options
    if reading.linear_map is None:
        return options
    fitted = _fitted_map(reading, jepa, model_path, bad, cache=cache)
    note(fitted.describe(reading.linear_map))
    return {**options, "layer": None, "pooling": None, "linear_map": fitted}


def _fitted_map(reading: ReadingSettings, jepa: Jepa, model_path: str, bad: BadRecords, *, cache: bool) -> FittedMap:
    """Return the map of a file of records, from the file beside it if that has the map of this model."""
    path = str(reading.linear_map)
    file = ArrayFile(
        Path(f"{path}{SUFFIX}"), FORMAT, "a linear map", "model, or other records", "the map is fitted again"
    )
    digest = ""
    if cache:
        readout: JsonObject = {"layer": reading.layer, "pooling": reading.pooling, "fits": FITS}
        if reading.max_length is not None:
            readout["max_length"] = reading.max_length
        records = {"records": fingerprint(path), "skips": bad.skips}
        digest = hashlib.sha256(json.dumps(loaded_model(jepa, model_path) | readout | records).encode()).hexdigest()
        if (stored := file.read(digest)) is not None:
            return _from_arrays(stored)
    known = read_records(path, bad=bad)
    bad.tell()
    with raising_user_errors():
        fitted = fit_linear_map(
            jepa,
            known,
            layer=reading.layer,
            pooling=reading.pooling,
            max_length=reading.max_length,
            batch_size=reading.batch_size,
        )
    if cache:
        file.write(digest, _to_arrays(fitted))
    return fitted


def _to_arrays(fitted: FittedMap) -> Arrays:
    arrays = {name: values for name, values in vars(fitted.linear_map).items() if values is not None}
    facts = {
        "place": [*fitted.place],
        "fit": [*fitted.fit],
        "records": fitted.records,
        "system_prompts": [*fitted.system_prompts],
    }
    return Arrays(arrays, facts)


def _from_arrays(stored: Arrays) -> FittedMap:
    facts = stored.facts
    return FittedMap(
        LinearMap(**stored.arrays),
        ReadoutPlace(*facts["place"]),
        Fit(*facts["fit"]),
        facts["records"],
        tuple(facts["system_prompts"]),
    )

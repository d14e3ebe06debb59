"""The linear map or the projection heads that are fitted on the records of a file; they are stored beside the file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepjepa.base.errors import raising_user_errors
from stepjepa.base.files import fingerprint
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.sources import read_records
from stepjepa.evaluation.corpus import loaded_model
from stepjepa.evaluation.map_fitting import FINALISTS
from stepjepa.evaluation.model_maps import fit_linear_map, fit_projection_heads
from stepjepa.evaluation.model_reading import ReadingSettings
from stepjepa.evaluation.stored_arrays import ArrayFile, Arrays
from stepjepa.objectives.fitted import Fitted, FittedHeads, FittedMap
from stepjepa.objectives.head_training import TRAINING
from stepjepa.objectives.inputs import EmbedOptions, options_behind
from stepjepa.objectives.jepa import Jepa
from stepjepa.objectives.linear_map import FITS
from stepjepa.objectives.view_embeddings import ReadoutPlace


@dataclass(frozen=True)
class StoredKind:
    """One kind of map, and the file that keeps it.

    Attributes:
        fitted: the type of a fitted map.
        fit: fits one on records.
        settings: settings of the fit, which a stored map must have been fitted by.
        otherwise: what happens each time if the file can't be written, for messages.
    """

    fitted: type[Fitted]
    fit: Callable[..., Fitted]
    settings: JsonObject
    otherwise: str

    @property
    def suffix(self) -> str:
        """Of the file's name, behind that of the records."""
        return f".{self.fitted.name}.safetensors"

    def file(self, records: str) -> ArrayFile:
        """Return the file beside that of the records."""
        format_name = f"stepjepa {self.fitted.name.replace('_', ' ')}, 1"
        owners = "model, other records or another readout"
        return ArrayFile(Path(f"{records}{self.suffix}"), format_name, self.fitted.kind, owners, self.otherwise)


# Maps of earlier versions were tried in one place, and have no such entry; heads not at all layers at once.
_TRIED: JsonObject = {"tried": "every layer"}
_TRIED_BY_HEADS: JsonObject = {"tried": "every layer, all at once"}
LINEAR_MAP = StoredKind(FittedMap, fit_linear_map, {"fits": FITS, **_TRIED}, "the map is fitted again")
PROJECTION_HEADS = StoredKind(
    FittedHeads,
    fit_projection_heads,
    {"training": TRAINING, "finalists": FINALISTS, **_TRIED_BY_HEADS},
    "the heads are trained again",
)


def reading_options(
    reading: ReadingSettings, jepa: Jepa, model_path: str, *, bad: BadRecords, cache: bool = True
) -> EmbedOptions:
    """Return the options of ``Jepa.embedder``; with the setting ``linear_map`` the map or the heads, fitted or read.

    Args:
        reading: the settings.
        jepa: the model.
        model_path: the folder that it was loaded from.
        bad: how invalid lines of the map's file are handled.
        cache: read and write the file of the map, which is beside its records and has the suffix of its kind.

    Raises:
        UserError: there are too few records, or a setting can't be used.
    """
    options = reading.options
    if reading.linear_map is None:
        return options
    kind = PROJECTION_HEADS if reading.projection_heads else LINEAR_MAP
    fitted = _fitted(kind, reading, jepa, model_path, bad, cache=cache)
    note(fitted.describe(reading.linear_map))
    # The map says where embeddings are read.
    return {**options, "layer": None, "pooling": None, **options_behind(fitted)}


def _fitted(
    kind: StoredKind, reading: ReadingSettings, jepa: Jepa, model_path: str, bad: BadRecords, *, cache: bool
) -> Fitted:
    """Return the map of a file of records, from the file beside it if that has the map of this model."""
    path = str(reading.linear_map)
    file, digest = kind.file(path), ""
    if cache:
        readout: JsonObject = {"layer": reading.layer, "pooling": reading.pooling, **kind.settings}
        if reading.max_length is not None:
            readout["max_length"] = reading.max_length
        records = {"records": fingerprint(path), "skips": bad.skips}
        digest = hashlib.sha256(json.dumps(loaded_model(jepa, model_path) | readout | records).encode()).hexdigest()
        if (stored := file.read(digest)) is not None:
            return _of_stored(kind, stored)
    known = read_records(path, bad=bad)
    bad.tell()
    with raising_user_errors():
        fitted = kind.fit(
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


def _to_arrays(fitted: Fitted) -> Arrays:
    facts: JsonObject = {
        "place": [*fitted.place],
        "records": fitted.records,
        "system_prompts": [*fitted.system_prompts],
        "fit": fitted.facts(),
    }
    return Arrays(fitted.vector_map.arrays(), facts)


def _of_stored(kind: StoredKind, stored: Arrays) -> Fitted:
    facts = stored.facts
    return kind.fitted.of_arrays(
        stored.arrays, facts["fit"], ReadoutPlace(*facts["place"]), facts["records"], tuple(facts["system_prompts"])
    )

"""Arrays that are kept beside a user's file, so that they are not computed again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.errors import UserError
from stepjepa.base.files import atomic_write
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note


class Arrays(NamedTuple):
    """The contents of a file of arrays."""

    arrays: Mapping[str, NDArray[Any]]
    facts: JsonObject


@dataclass(frozen=True)
class ArrayFile:
    """A safetensors file beside a user's file, with the fingerprint of everything that its arrays depend on.

    Attributes:
        path: the file.
        format: name of the contents and their version, in the file.
        contents: what the file holds, for messages.
        owners: what the contents belong to, for messages.
        otherwise: what happens each time if the file can't be written, for messages.
    """

    path: Path
    format: str
    contents: str
    owners: str
    otherwise: str

    def read(self, fingerprint: str) -> Arrays | None:
        """Return the contents; None if there is no file and, with a note, if it has another fingerprint.

        Raises:
            UserError: the file is damaged, or not written by stepjepa.
        """
        from safetensors import SafetensorError, safe_open

        if not self.path.exists():
            return None
        fault = f"has the name of {self.contents}, but stepjepa did not write it; move it away, or pass `no_cache`"
        try:
            with safe_open(self.path, "numpy") as stored:
                metadata = stored.metadata() or {}
                if metadata.get("format") != self.format:
                    raise UserError(fault, path=self.path)
                if metadata.get("fingerprint") == fingerprint:
                    arrays = {name: np.asarray(stored.get_tensor(name)) for name in stored.keys()}  # noqa: SIM118  # no mapping
                    return Arrays(arrays, json.loads(metadata.get("facts", "{}")))
        except (SafetensorError, OSError):
            raise UserError(fault, path=self.path) from None
        note(f"{self.path} belongs to another {self.owners}; it is written again")
        return None

    def write(self, fingerprint: str, contents: Arrays) -> None:
        """Write the contents; print a note if that is not possible."""
        from safetensors.numpy import save

        metadata = {"format": self.format, "fingerprint": fingerprint, "facts": json.dumps(contents.facts)}
        try:
            with atomic_write(self.path, "wb") as stream:
                stream.write(save(dict(contents.arrays), metadata))
        except OSError as error:  # a folder that may not be written to, a disk that is full or mounted read-only
            note(f"{self.path} can't be written ({error.strerror or error}), so that {self.otherwise} each time")

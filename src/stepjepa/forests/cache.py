"""Prepared forests on disk, so that a second start need not prepare them again.

A file is named by what its forests were made of: the records, the tokenizer, the configuration, the code. It is in the
safetensors format: numbers and a header in JSON, nothing that could run. Whatever is wrong with a file, its forests are
prepared anew.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.files import atomic_write
from stepjepa.forests.flat import LAYOUT, FlatForests, Ints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUFFIX = ".safetensors"
PREFIX = "forests-"

LIMIT = 10 * 2**30
"""Bytes that the files of a folder may take together; those that were not used for longest go first."""

# Fields that say what is done with forests. Any other field, a new one too, makes other forests.
WITHOUT_EFFECT = frozenset(
    [
        "jepa_layer",
        "predictor_head",
        "target_grad",
        "ema_decay",
        "jepa_loss_type",
        "infonce_temperature",
        "lbd",
        "lbd_schedule",
        "lbd_warmup",
        "sigreg",
        "variance",
        "covariance",
        "stp",
        "gamma",
        "jepa_ratio",
        "encoding",
    ]
)

_DTYPES: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
_NAMES = {np.dtype(np.int32): "I32", np.dtype(np.int64): "I64"}

# The header's own length stands before it, as eight bytes.
_LENGTH_BYTES = 8
_MOST_HEADER = 100 * 2**20


class Found(NamedTuple):
    """What was prepared before.

    Attributes:
        forests: in file order.
        counts: see ``Prepared``.
        tokens: see there.
        template: see there.
    """

    forests: FlatForests
    counts: dict[str, int]
    tokens: dict[str, int]
    template: dict[str, str]


def default_folder() -> Path:
    """``stepjepa`` in the user's folder for caches: ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    # The standard that names the variable says that a relative path in it counts for nothing.
    return (Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache") / "stepjepa"


def _code() -> bytes:
    """What the modules say that make forests: a changed line makes other forests, whatever the version."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    folders = [sorted((package / name).glob("*.py")) for name in ("data", "forests", "text")]
    for source in [package / "config.py", *chain.from_iterable(folders)]:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.digest()


def cache_key(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, config: JepaConfig) -> str:
    """What forests depend on, as SHA-256 in hexadecimal.

    Args:
        records: all that is read of them; where their file lies does not count.
        tokenizer: its description, special tokens and chat template.
        config: the fields that decide about forests.
    """
    digest = hashlib.sha256(_code())
    for package in ("tokenizers", "transformers", "jinja2", "numpy"):
        digest.update(version(package).encode() + b"\0")
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("expected a fast tokenizer, got one without a description")
    fields = {name: value for name, value in config.to_dict().items() if name not in WITHOUT_EFFECT}
    parts = [
        backend.to_str(),
        type(tokenizer).__name__,
        repr(sorted((name, repr(value)) for name, value in tokenizer.special_tokens_map.items())),
        repr(tokenizer.chat_template),
        repr(backend.encode_special_tokens),
        repr(sorted(fields.items())),
    ]
    for part in parts:
        digest.update(f"{len(part)}\n{part}".encode())
    for record in records:
        digest.update(repr((record.messages, record.text, record.code, record.line)).encode())
    return digest.hexdigest()


class ForestCache:
    """A folder of prepared forests.

    Args:
        folder: made when something is written to it.
        writes: this process writes; under several, one does.
        limit: most bytes of all its files.
        say: takes a line for people.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        writes: bool = True,
        limit: int = LIMIT,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self._writes = writes
        self._limit = limit
        self._say = say

    def path(self, key: str) -> Path:
        """The file of a key."""
        return self.folder / f"{PREFIX}{key[:32]}{SUFFIX}"

    def load(self, key: str, what: str) -> Found | None:
        """What was stored under a key; None where there is nothing, or nothing sound.

        Args:
            key: from :func:`cache_key`.
            what: names the data.
        """
        path = self.path(key)
        try:
            found = _read(path, key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._say(f"cache: {path} can't be used ({error}); {what} is prepared anew")
            return None
        # A folder that others own is read all the same.
        with suppress(OSError):
            os.utime(path)
        self._say(f"cache: {what} as prepared before, from {path} (--no_cache prepares anew)")
        return found

    def store(self, key: str, found: Found) -> None:
        """Write down what was prepared; a folder that can't be written to costs a note, not the run."""
        if not self._writes:
            return
        try:
            _write(self.path(key), key, found)
            self._make_room(self.path(key))
        except OSError as error:
            self._say(f"cache: nothing stored ({error}); --cache_dir names another folder, --no_cache does without")

    def _make_room(self, kept: Path) -> None:
        """Remove what was not used for longest until the rest is within the limit; never the newest."""
        files = []
        for path in self.folder.glob(f"{PREFIX}*{SUFFIX}"):
            try:
                files.append((path.stat().st_mtime, path.stat().st_size, path))
            except FileNotFoundError:
                # Another process makes room too.
                continue
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._limit:
                break
            if path != kept:
                path.unlink(missing_ok=True)
                total -= size


def _write(path: Path, key: str, found: Found) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in found.forests.arrays.items()}
    header: dict[str, Any] = {}
    digest = hashlib.sha256()
    position = 0
    # The wider numbers first, so that every array begins where its numbers may.
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    for name in order:
        array = arrays[name]
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        digest.update(array.data)
        position += array.nbytes
    described = {"counts": found.counts, "tokens": found.tokens, "template": found.template}
    header["__metadata__"] = {"key": key, "sha256": digest.hexdigest(), "prepared": json.dumps(described)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    with atomic_write(path, "wb") as stream:
        stream.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for name in order:
            stream.write(arrays[name].data)


def _read(path: Path, key: str) -> Found:
    """Read a file back, its numbers left where they are until they are needed.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: it is missing, damaged, or of something else.
    """
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        begin = _LENGTH_BYTES + length
        if begin > min(size, _MOST_HEADER):
            raise ValueError("it ends too early")
        header = json.loads(stream.read(length))
        whole = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    metadata = header["__metadata__"]
    if metadata["key"] != key:
        raise ValueError("it is of other data")
    view = memoryview(whole)
    if hashlib.sha256(view[begin:]).hexdigest() != metadata["sha256"]:
        raise ValueError("it is damaged")
    forests = FlatForests({name: _array(view[begin:], header[name]) for name in LAYOUT})
    described = json.loads(metadata["prepared"])
    return Found(
        forests, _named(described["counts"], int), _named(described["tokens"], int), _named(described["template"], str)
    )


def _array(data: memoryview, entry: Mapping[str, Any]) -> Ints:
    start, end = entry["data_offsets"]
    array: Ints = np.frombuffer(data[start:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return array


def _named(values: Mapping[str, Any], kind: type) -> dict[str, Any]:
    if not all(isinstance(value, kind) for value in values.values()):
        raise ValueError("its counts are none")
    return dict(values)

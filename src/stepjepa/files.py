"""Read files with errors that name the line (JSON Lines, JSON, YAML), and write files atomically."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from stepjepa.disk import naming_disk_errors
from stepjepa.errors import UserError, shown


def existing_file(path: str | os.PathLike[str], what: str = "file") -> Path:
    """The path of a file, after a check that it exists.

    Raises:
        UserError: the file is missing, or is a folder.
    """
    found = Path(path)
    if found.is_dir():
        raise UserError(f"is a folder where a {what} is needed; name the file in it", path=found)
    if not found.exists():
        raise UserError(f"no such {what}; check the path", path=found)
    return found


_TOO_LONG = "can't be read as JSON: a number or a nesting in it is too long; remove the line"


def _raise(error: UserError) -> None:
    raise error


def read_jsonl(
    path: str | os.PathLike[str],
    what: str = "file",
    *,
    finite: bool = False,
    wrong: Callable[[UserError], None] = _raise,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a JSON Lines file, yielding (line number from 1, object) pairs; blank lines are skipped.

    Args:
        path: the file.
        what: kind of file, for errors.
        finite: refuse ``NaN`` and ``Infinity``, which Python reads and writes though they are not JSON.
        wrong: called with the error of a bad line, which is then skipped; by default the error is raised.

    Raises:
        UserError: the file is missing or binary; by default also: a line is not UTF-8, not JSON, not an object,
            repeats a key, or holds a lone surrogate.
    """
    found = existing_file(path, what)
    decode = (_FINITE if finite else _ANY_NUMBER).decode
    # Decode line by line: a text decoder reads ahead and could not name the line with the error.
    with found.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                if binary := _binary_kind(line):
                    raise UserError(f"is {binary}", path=found)
                line = line.removeprefix(codecs.BOM_UTF8)  # noqa: PLW2901  # the rest of the same line
            try:
                # Strip first: the "\r" of a "\r\n" line end would count as a column in error messages.
                text = line.decode().strip()
                value = decode(text) if text else None
            except ValueError as error:
                wrong(_not_json(error, found, number))
                continue
            except RecursionError:
                wrong(UserError(_TOO_LONG, path=found, line=number))
                continue
            if not text:
                continue
            if not isinstance(value, dict):
                told = f"a JSON {type(value).__name__} where an object is needed; every line must be one JSON object"
                wrong(UserError(told, path=found, line=number))
            # Cheap test first: in valid UTF-8, JSON can hold a lone surrogate only as an escape.
            elif "\\u" in text and holds_half(value):
                told = "holds half of a character (a lone surrogate); remove it"
                wrong(UserError(told, path=found, line=number))
            else:
                yield number, value


class _NotJsonError(ValueError):
    """Input that Python's JSON parser accepts but this reader refuses: repeated keys, ``NaN`` and ``Infinity``."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise _NotJsonError(f"the key {shown(counts.most_common(1)[0][0])} stands twice in an object; leave one")
    return value


def _refuse_constant(name: str) -> Any:
    raise _NotJsonError(f"{name} is no JSON value; write a number or null, or leave the field out")


_ANY_NUMBER = json.JSONDecoder(object_pairs_hook=_object)
_FINITE = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)


def _not_json(error: ValueError, path: Path, line: int) -> UserError:
    """The error for a line that can't be decoded or parsed."""
    if isinstance(error, UnicodeDecodeError):
        told = f"not UTF-8 text; convert the file to UTF-8 (byte {error.start + 1} of the line is invalid)"
    elif isinstance(error, _NotJsonError):
        told = str(error)
    elif isinstance(error, json.JSONDecodeError):
        problem = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        told = f"not valid JSON ({problem}); every line must be one JSON object"
    else:
        told = _TOO_LONG
    return UserError(told, path=path, line=line)


def holds_half(value: dict[str, Any]) -> bool:
    """Whether a string in a value holds a lone surrogate, which can't be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False, skipkeys=True, default=str).encode()
    except UnicodeEncodeError:
        return True
    except RecursionError:
        return False
    return False


# First bytes of files that are not UTF-8 text: the kind of file and the remedy.
_BINARY = {
    b"\x1f\x8b": "compressed (gzip); unpack it first",
    b"PK\x03\x04": "compressed (zip); unpack it first",
    b"BZh": "compressed (bzip2); unpack it first",
    b"\xfd7zXZ\x00": "compressed (xz); unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed (zstandard); unpack it first",
    b"PAR1": "a Parquet file; convert it to JSON lines",
    codecs.BOM_UTF16_LE: "UTF-16 and not UTF-8 text; convert it",
    codecs.BOM_UTF16_BE: "UTF-16 and not UTF-8 text; convert it",
}


def _binary_kind(line: bytes) -> str | None:
    """The kind of a file that is not UTF-8 text, recognised by its first bytes; None if they match no known kind."""
    return next((kind for magic, kind in _BINARY.items() if line.startswith(magic)), None)


def read_text(path: Path) -> str:
    """Read a UTF-8 file, without its byte order mark.

    Raises:
        UserError: the file is binary, or is not UTF-8 (with the line of the first wrong byte).
    """
    found = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if kind := _binary_kind(found):
        raise UserError(f"is {kind}", path=path)
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        line = found.count(b"\n", 0, error.start) + 1
        raise UserError("not UTF-8 text; convert the file to UTF-8", path=path, line=line) from None


def read_json_object(path: str | os.PathLike[str], what: str, remedy: str) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Args:
        path: the file.
        what: kind of file, for errors.
        remedy: what to do if the file is damaged, for errors.

    Raises:
        UserError: the file is missing, is not valid JSON, or holds no object.
    """
    found = existing_file(path, what)
    try:
        value = json.loads(read_text(found))
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from None
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else None
        told = error.msg if isinstance(error, json.JSONDecodeError) else "a number or a nesting in it is too long"
        raise UserError(f"is damaged: not valid JSON ({told}); {remedy}", path=found, line=line) from None
    if not isinstance(value, dict):
        raise UserError(f"is damaged: a JSON {type(value).__name__} instead of an object; {remedy}", path=found)
    return value


# Raised by PyYAML's constructors for values that do not fit their type, besides yaml.YAMLError.
_YAML_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


def read_yaml(path: Path) -> Any:
    """Read a YAML document; ``on``, ``off``, ``yes`` and ``no`` stay strings, as in flags (and in YAML 1.2).

    Raises:
        UserError: the file is not UTF-8, not YAML, repeats a key, or would run code; with the line where it is known.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """A safe loader that reads only true and false as booleans, and refuses repeated keys."""

        # Check before aliases are resolved and mappings merged (<<): both would hide a repeated key.
        def compose_mapping_node(self, anchor: Any) -> Any:
            node, seen = super().compose_mapping_node(anchor), dict[str, int]()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    told = f"the key {shown(key.value)} stands twice, first in line {seen[key.value]}; leave one"
                    raise UserError(told, path=path, line=key.start_mark.line + 1)
                if isinstance(key, yaml.ScalarNode):
                    seen[key.value] = key.start_mark.line + 1
            return node

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:bool"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    truth = re.compile("^(?:true|True|TRUE|false|False|FALSE)$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", truth, list("tTfF"))
    text = read_text(path)
    try:
        return yaml.load(text, Loader=Loader)  # a SafeLoader
    except UserError:
        raise
    except (yaml.YAMLError, *_YAML_ERRORS) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "a value does not fit its type"
        raise UserError(
            f"not valid YAML ({problem}); check indentation and quotes",
            path=path,
            line=mark.line + 1 if mark else None,
        ) from None


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file that is renamed to its final name when the block ends without an error.

    Args:
        path: the final name; its folder is created if missing.
        mode: ``"w"`` for UTF-8 text or ``"wb"`` for bytes.

    Raises:
        OSError: the file can't be written; the error names ``path``.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        # Name the final file, not the temporary one.
        raise OSError(error.errno, error.strerror, str(target)) from None
    try:
        with naming_disk_errors(target), open(handle, mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
        # mkstemp creates a private file (0600); give it the permissions of an ordinary new file.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write one JSON document atomically."""
    with atomic_write(path) as stream:
        json.dump(value, stream, indent=2, ensure_ascii=False)
        stream.write("\n")


def write_jsonl(path: str | os.PathLike[str], values: Iterable[dict[str, Any]]) -> int:
    """Write a JSON Lines file atomically.

    Returns:
        The number of lines.
    """
    count = 0
    with atomic_write(path) as stream:
        for value in values:
            stream.write(json.dumps(value, ensure_ascii=False) + "\n")
            count += 1
    return count


def refuse_existing(path: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """The path of an output file, after a check that it may be written.

    Raises:
        UserError: the path is a folder, or the file exists and ``overwrite`` is off.
    """
    target = Path(path)
    if target.is_dir():
        raise UserError("is a folder; name a file in it", path=target)
    if target.exists() and not overwrite:
        raise UserError("is there already; name another file or pass --overwrite", path=target)
    return target


def fingerprint(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; shows, for example, whether two runs read the same data."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

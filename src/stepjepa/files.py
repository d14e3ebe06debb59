"""Reading and writing files so that nothing is lost: JSON lines with line numbers, writes that are whole or absent."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from stepjepa.errors import UserError

_HALF = re.compile("[\ud800-\udfff]")


def existing_file(path: str | os.PathLike[str], what: str = "file") -> Path:
    """The path of a file that must be there.

    Raises:
        UserError: it is missing, or it is a folder.
    """
    found = Path(path)
    if found.is_dir():
        raise UserError(f"is a folder where a {what} is needed; name the file in it", path=found)
    if not found.exists():
        raise UserError(f"no such {what}; check the path", path=found)
    return found


def read_jsonl(path: str | os.PathLike[str], what: str = "file") -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON lines file with their line numbers, counted from 1; blank lines are passed over.

    Raises:
        UserError: the file is missing, is not UTF-8, a line is not JSON, or is not an object.
    """
    found = existing_file(path, what)
    number = 0
    try:
        with found.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(
                        f"not valid JSON ({error.msg} at column {error.colno}); every line must be one JSON object",
                        path=found,
                        line=number,
                    ) from None
                except (ValueError, RecursionError):
                    raise UserError(
                        "can't be read as JSON: a number or a nesting in it is too long; remove the line",
                        path=found,
                        line=number,
                    ) from None
                if not isinstance(value, dict):
                    raise UserError(
                        f"a JSON {type(value).__name__} where an object is needed; every line must be one JSON object",
                        path=found,
                        line=number,
                    )
                # The quick look first: JSON can write half of a character only as an escape.
                if "\\ud" in line.lower() and _HALF.search(json.dumps(value, ensure_ascii=False)):
                    raise UserError("holds half of a character (a lone surrogate); remove it", path=found, line=number)
                yield number, value
    except UnicodeDecodeError:
        raise UserError("not UTF-8 text; convert the file to UTF-8", path=found, line=number + 1) from None


def read_yaml(text: str) -> Any:
    """A YAML document in which ``on``, ``off``, ``yes`` and ``no`` are words, as they are in flags (and in YAML 1.2).

    Raises:
        yaml.YAMLError: it is none, or would run code.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Knows true and false alone as truth values."""

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:bool"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    truth = re.compile("^(?:true|True|TRUE|false|False|FALSE)$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", truth, list("tTfF"))
    return yaml.load(text, Loader=Loader)  # a SafeLoader


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that takes its final name only when the block ends without an error.

    Args:
        path: the final name; its folder is made when missing.
        mode: ``"w"`` for UTF-8 text or ``"wb"`` for bytes.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(handle, mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
        # mkstemp makes the file private; give it the permissions that an ordinary new file has.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write one JSON document, whole or not at all."""
    with atomic_write(path) as stream:
        json.dump(value, stream, indent=2, ensure_ascii=False)
        stream.write("\n")


def write_jsonl(path: str | os.PathLike[str], values: Iterable[dict[str, Any]]) -> int:
    """Write JSON lines, all or none.

    Returns:
        How many lines were written.
    """
    count = 0
    with atomic_write(path) as stream:
        for value in values:
            stream.write(json.dumps(value, ensure_ascii=False) + "\n")
            count += 1
    return count


def refuse_existing(path: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """The path of a file about to be written.

    Raises:
        UserError: something is there already and ``overwrite`` is off.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise UserError("is there already; name another file or pass --overwrite", path=target)
    return target


def fingerprint(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, in hexadecimal: says whether two runs read the same data."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

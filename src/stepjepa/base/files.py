"""Read files with errors that name the line (JSON Lines, JSON, YAML), write files atomically, lock folders."""

import codecs
import difflib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from stepjepa.base.errors import UserError, shown, visible
from stepjepa.base.json_object import JsonObject, WrittenFloat, WrittenInt, json_fault, parse_data
from stepjepa.base.similar_names import question

_OTHER_DISK = "free some space or name a place on another disk, then run it again"
DISK_REMEDIES = {
    errno.ENOSPC: _OTHER_DISK,
    errno.EDQUOT: _OTHER_DISK,
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), then run it again",
    errno.EIO: "check the disk, or name a place on another one",
    errno.EROFS: "name a place that can be written to",
}
"""Number of an error of a full or failing disk -> what the user can do about it."""

TEMPORARY = "{} (TMPDIR)"
"""The folder for temporary files in messages, with the variable that moves it."""

# Bytes left on a disk from which on it counts as full where a library does not say why it could not write.
_FULL = 2**20


def existing_file(path: str | os.PathLike[str], what: str = "file") -> Path:
    """Return the path of a file; raise ``UserError`` ("no such ``what``") if it is missing or a folder."""
    file = Path(path)
    if file.is_dir() or not file.exists():
        names = [neighbour.name for neighbour in file.parent.iterdir()] if file.parent.is_dir() else []
        near = [] if file.is_dir() else difflib.get_close_matches(file.name, names, n=1, cutoff=0.8)
        remedy = question([visible(str(file.with_name(neighbour))) for neighbour in near]) or "check the path"
        raise UserError(f"no such {what}; {remedy}", path=file)
    return file


def _raise(error: UserError) -> None:
    raise error


def read_jsonl(
    path: str | os.PathLike[str], what: str = "file", *, on_error: Callable[[UserError], None] = _raise
) -> Iterator[tuple[int, JsonObject]]:
    """Yield the objects of a JSON Lines file with their line numbers, from 1; blank lines are skipped.

    Args:
        path: the file.
        what: the kind of file, for the error if it is missing.
        on_error: is called with the error of a line that is not UTF-8, is no JSON object, has a key twice or holds a
            lone surrogate; the line is then skipped. By default the error is raised.

    Raises:
        UserError: the file is missing, or a line is wrong.
    """
    file = existing_file(path, what)
    # Decode line by line: a text decoder reads ahead and could not name the line with the error.
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                value = _read_line(line)
            except (ValueError, RecursionError) as error:
                on_error(UserError(_fault(error), path=file, line=number))
                continue
            if value is not None:
                yield number, value


def _read_line(line: bytes) -> JsonObject | None:
    """Return the object of a line, None if it is blank; ValueError or RecursionError if it is wrong."""
    # Strip first: the "\r" of a "\r\n" line end would count as a column in error messages.
    # Files that were put together have the mark of each at its beginning.
    text = line.removeprefix(codecs.BOM_UTF8).decode().strip()
    if not text:
        return None
    value = parse_data(text)
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ValueError(f"a JSON {kind} where an object is needed; every line must be one JSON object")
    # In valid UTF-8, JSON can hold a lone surrogate only as an escape.
    if "\\u" in text and (fault := json_fault(value)) is not None:
        raise ValueError(fault)
    return value


def _fault(error: Exception) -> str:
    """Describe the fault of a line that can't be decoded or parsed."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text (byte {error.start + 1} of the line); unpack or convert the file"
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON ({error.msg} at column {error.colno}); every line must be one JSON object"
    if str(error).startswith("Exceeds the limit"):
        return "holds a number of thousands of digits; write it as a text"
    if isinstance(error, RecursionError):
        return "nested too deeply; write it with fewer levels"
    return str(error)


def read_text(path: Path) -> str:
    """Read a UTF-8 file, without its byte order mark; ``UserError`` with the line of the first wrong byte."""
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError("not UTF-8 text; unpack or convert the file", path=path, line=line) from None


def read_json_object(path: str | os.PathLike[str], what: str, remedy: str) -> JsonObject:
    """Read a JSON file that holds one object.

    Args:
        path: the file.
        what: the kind of file, for the error if it is missing.
        remedy: what the user can do about a damaged file, for its error.

    Raises:
        UserError: the file is missing, or does not hold one JSON object.
    """
    file = existing_file(path, what)
    try:
        value = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        fault, line = getattr(error, "msg", "not UTF-8, or nested too deeply"), getattr(error, "lineno", None)
        raise UserError(f"is damaged: not valid JSON ({fault}); {remedy}", path=file, line=line) from None
    if not isinstance(value, dict):
        raise UserError(f"is damaged: a JSON {type(value).__name__} instead of an object; {remedy}", path=file)
    return value


def json_or_empty(path: Path) -> JsonObject:
    """Return the object in a JSON file; an empty one if the file is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_yaml(path: Path) -> Any:
    """Read a YAML document by the rules of YAML 1.2, which are those of flags, too.

    ``on``, ``off``, ``yes`` and ``no`` are texts, as are dates and ``12:30``; ``010`` is ten. Numbers are
    :class:`WrittenInt` and :class:`WrittenFloat`: ``007`` or ``1.10`` may be meant as a text, such as the name of a
    folder. ``UserError``, with the line where it is known, if the file is not UTF-8 or not YAML, or repeats a key.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """A safe loader that refuses repeated keys; only true and false are booleans, and no plain text is a date."""

        yaml_implicit_resolvers = {  # noqa: RUF012  # as in its base
            first: [
                rule for rule in rules if first in "tTfF" or rule[0].rpartition(":")[2] not in ("bool", "timestamp")
            ]
            for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_mapping_node(self, anchor: Any) -> Any:
            # Before mappings are merged (<<), which would hide a repeated key.
            node = super().compose_mapping_node(anchor)
            for number, (key, _) in enumerate(node.value):
                if any(key.value == other.value for other, _ in node.value[:number]):
                    problem = f"the key {shown(str(key.value))} occurs twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            return node

        def construct_number(self, node: Any) -> object:
            kind = WrittenInt if node.tag.endswith(":int") else WrittenFloat
            with suppress(ValueError):  # 12:30 or 1__0, numbers of YAML 1.1 alone
                return kind(node.value)
            return node.value

    for tag in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{tag}", Loader.construct_number)
    text = read_text(path)
    try:
        return yaml.load(text, Loader=Loader)  # a SafeLoader
    except Exception as error:  # PyYAML's constructors raise errors of every kind for values that do not fit
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "a value does not fit its type"
        fault = f"not valid YAML ({problem}); check keys, indentation and quotes"
        raise UserError(fault, path=path, line=mark.line + 1 if mark else None) from None


@contextmanager
def naming_disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Re-raise errors of a full or failing disk as ``OSError`` with the path being written, which they lack."""
    try:
        yield
    except Exception as error:  # safetensors and PyTorch have other errors for a full disk; all errors are re-raised
        number = error.errno if isinstance(error, OSError) and error.filename is None else None
        # safetensors gives the system's error number in its message, PyTorch gives none.
        if match := re.search(r"\(os error (\d+)\)", str(error)):
            number = int(match[1])
        elif isinstance(error, RuntimeError) and re.search("PytorchStreamWriter|inline_container|iostream", str(error)):
            number = errno.ENOSPC if _free(path) < _FULL else errno.EIO
        if number not in DISK_REMEDIES:
            raise
        raise OSError(number, os.strerror(number), str(path)) from None


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder for temporary files, which is removed behind the block; errors of its disk name it."""
    with naming_disk_errors(TEMPORARY.format(tempfile.gettempdir())), tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _free(path: str | os.PathLike[str]) -> int:
    """Return the bytes that are free on the disk of a path, which may not exist yet."""
    return shutil.disk_usage(_existing(Path(path))).free


def _existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    absolute = path.absolute()
    return next(place for place in (absolute, *absolute.parents) if os.access(place, os.F_OK))


def check_makeable(path: str | os.PathLike[str]) -> Path:
    """Return the nearest folder of a path that exists; ``UserError`` if that is a file, or a link to nothing."""
    target = Path(path)
    for link in (each for each in (target, *target.parents) if each.is_symlink() and not each.exists()):
        fault = f"is a link to {visible(str(link.readlink()))}, where nothing is"
        raise UserError(f"{fault}; make a folder there, remove the link, or name another place", path=link)
    place = _existing(target if target.is_dir() else target.parent)
    if not place.is_dir():
        raise UserError(f"can't be made, since {visible(str(place))} is a file; name another place", path=target)
    return place


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise ``UserError`` if a folder, or a file that is replaced as a whole, can't be written, before work is lost."""
    target, place = Path(path), check_makeable(path)
    if not os.access(place, os.W_OK | os.X_OK):
        where = "" if place == target.absolute() else f", since {visible(str(place))} is read-only for you"
        raise UserError(f"can't be written to{where}; name another place", path=target)


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file that is renamed to ``path`` when the block ends without an error.

    The folder is created if missing; the mode is ``"w"`` for UTF-8 text or ``"wb"`` for bytes. If ``path`` is a link,
    the file that it names is replaced, and the link stays.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with naming_disk_errors(path), temporary.open(mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
        temporary.replace(target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):
            # Users don't know the temporary file.
            error.filename = str(path)
        raise


def is_remnant(name: str, of: str) -> bool:
    """Return whether a file name is that of the temporary file of an interrupted :func:`atomic_write` of another."""
    return re.fullmatch(rf"\.{re.escape(of)}\.[0-9a-f]{{16}}", name) is not None


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Write one JSON document atomically."""
    with atomic_write(path) as stream:
        stream.write(json_text(value))


def json_text(value: object) -> str:
    """Return a JSON document as files have it."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_jsonl(path: str | os.PathLike[str], values: Iterable[JsonObject]) -> None:
    """Write a JSON Lines file atomically."""
    with atomic_write(path) as stream:
        stream.writelines(json.dumps(value, ensure_ascii=False) + "\n" for value in values)


def append_jsonl(path: str | os.PathLike[str], values: Iterable[JsonObject]) -> None:
    """Append lines to a JSON Lines file; on a full disk none of them, since half a line is no JSON."""
    content = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values).encode()
    # Unbuffered: a buffer is written again when the file is closed.
    with naming_disk_errors(path), open(path, "ab", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        try:
            while content:
                content = content[stream.write(content) :]
        except BaseException:
            stream.truncate(size)
            raise


def apply_umask(folder: Path) -> None:
    """Give all files in a folder the permissions of the umask; safetensors writes files that only their owner can read.

    The folder was made under the umask, so that its own permissions say what that is; reading the umask would set it.
    """
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(folder.stat().st_mode & 0o666)


def check_output_file(path: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """Return the path of an output file.

    Raises:
        UserError: it is a folder or a device, can't be written, or exists and ``overwrite`` is off.
    """
    target = Path(path)
    if target.is_dir():
        raise UserError("is a folder; name a file in it", path=target)
    # Renaming a file to /dev/null would replace it for all programs; /dev/stdout is a link, perhaps to a file.
    if target.exists() and (not target.is_file() or os.path.realpath(target.parent) == "/dev"):
        raise UserError("is a device or a pipe, in whose place a file would come; name a file", path=target)
    if target.exists() and not overwrite:
        raise UserError("already exists; name another file or pass `overwrite`", path=target)
    check_writable(target)
    return target


def fingerprint(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal, for example to see whether two runs read the same data."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def claimed_output(path: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Yield the path of an output file, which no other process can claim while the block makes it.

    Raises:
        UserError: as :func:`check_output_file`, or another process has claimed it.
    """
    target = check_output_file(path, overwrite)
    with locked(target):
        # That process may just have ended, and have written it.
        yield check_output_file(target, overwrite)


@contextmanager
def locked(folder: Path, patience: float = 0.5) -> Iterator[None]:
    """Hold the lock of a folder or file, a hidden file beside it, in the block; the kernel frees it after a kill.

    ``UserError``, which names process and host, if another process does not free it within ``patience`` seconds.
    """
    # Of what a link names: under both names it is one folder.
    place = Path(os.path.realpath(folder))
    path = place.parent / f".{place.name}.lock"
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    # One that another user's killed process has left can be taken, too, where a group shares the folder.
    lock = FileLock(path, mode=0o666)
    try:
        _acquire(lock, path, folder, patience)
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # another user's, which only that one may remove
                path.unlink(missing_ok=True)
            lock.release()
        # Folders that were made for the lock alone; others hold something.
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()


def _acquire(lock: FileLock, path: Path, folder: Path, patience: float) -> None:
    """Acquire the lock of a folder or file, and write its holder into its file, if the file system lets it."""
    try:
        lock.acquire(timeout=patience)
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    except Timeout:
        # Without the file nobody holds the lock: it can't be made here, as in /proc, or its holder has just ended.
        if path.exists():
            raise UserError(f"is in use by {visible(path.read_text())}; wait for it or stop it", path=folder) from None
    except OSError:  # a file system without locks, or a parent folder that is read-only
        pass

"""The output file of an evaluation, which grows batch by batch and can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from stepjepa.errors import UserError
from stepjepa.files import naming_disk_errors, read_json_object, read_jsonl, write_json, write_jsonl

Line = dict[str, Any]

_FIELDS = {"index", "truth", "generated", "extracted", "scores", "error", "stopped", "new_tokens"}
_FIELDS |= {"gold_loss", "gold_tokens"}
_ANEW = "name another --output_file, or pass --overwrite to start anew"


class OutputFile:
    """One JSON line per example; a complete file is in the order of the test file.

    ``<name>.meta.json`` beside it holds the identity of the evaluation, ``<stem>.summary.json`` its summary.

    Args:
        path: the file of lines.
        indices: the indices of the examples, in the order of the test file.
        identity: settings that must be equal for lines to belong to one evaluation.
        overwrite: replace an existing file.

    Attributes:
        done: the finished lines by index.

    Raises:
        UserError: an existing file or summary belongs to another evaluation, or is damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        indices: Collection[int],
        identity: Mapping[str, Any],
        *,
        overwrite: bool = False,
    ) -> None:
        self.path = Path(path)
        self.summary_file, self._meta_file = summary_file(self.path), meta_file(self.path)
        self._indices, self._identity = indices, dict(identity)
        self.done: dict[int, Line] = {}
        if not overwrite:
            if self.path.exists():
                self.done = self._read()
            # A damaged summary beside its own lines is written again; any other may belong to a file with this stem.
            found = _json_at(self.summary_file)
            if self.summary_file.exists() and found.get("settings") != self._identity and (found or not self.done):
                raise other_summary(self.path)

    def _read(self) -> dict[int, Line]:
        if not self._meta_file.is_file():
            raise UserError(
                f"is no output of an evaluation: {self._meta_file.name} is missing; {_ANEW}", path=self.path
            )
        begun = read_json_object(self._meta_file, "file", _ANEW).get("identity") or {}
        changed = [
            name if isinstance(value, dict) or len(str(value)) > 40 else f"{name} {begun.get(name)} instead of {value}"
            for name, value in self._identity.items()
            if begun.get(name) != value
        ]
        if changed:
            raise UserError(f"was begun with another {', '.join(changed)}; {_ANEW}", path=self.path)
        # An evaluation that was killed may have left half a line.
        content = self.path.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(self.path, content.rfind(b"\n") + 1)
        done: dict[int, Line] = {}
        for number, line in read_jsonl(self.path):
            index = line.get("index")
            if not isinstance(index, int) or index not in self._indices or index in done or not line.keys() >= _FIELDS:
                raise UserError(f"is no line of this evaluation; remove it, or {_ANEW}", path=self.path, line=number)
            done[index] = line
        return done

    @property
    def complete(self) -> bool:
        """Whether every example has its line."""
        return len(self.done) == len(self._indices)

    def summary(self) -> dict[str, Any] | None:
        """The summary of a complete file; None if there is none yet."""
        found = _json_at(self.summary_file) if self.complete else {}
        return found if found.get("settings") == self._identity else None

    @contextmanager
    def begin(self, **description: Any) -> Iterator[IO[str]]:
        """Open the file for :meth:`add`; a file that is overwritten is removed only now.

        Args:
            description: values for readers, written beside the identity.
        """
        with naming_disk_errors(self.path):
            # The summary of an incomplete file would be wrong.
            self.summary_file.unlink(missing_ok=True)
            if not self.done:
                self.path.unlink(missing_ok=True)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._meta_file, {**description, "identity": self._identity})
            with self.path.open("a", encoding="utf-8") as stream:
                yield stream

    def add(self, stream: IO[str], lines: Sequence[Line]) -> None:
        """Append lines to the stream of :meth:`begin`."""
        for line in lines:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
            self.done[line["index"]] = line
        stream.flush()

    def finish(self) -> list[Line]:
        """Write the lines in the order of the test file, and return them."""
        lines = [self.done[index] for index in self._indices]
        write_jsonl(self.path, lines)
        return lines


def summary_file(output: str | os.PathLike[str]) -> Path:
    """The path of the summary of a file of lines."""
    return Path(output).with_suffix(".summary.json")


def meta_file(output: str | os.PathLike[str]) -> Path:
    """The path of the identity of a file of lines."""
    return Path(output).with_name(f"{Path(output).name}.meta.json")


def other_summary(output: str | os.PathLike[str]) -> UserError:
    """The error if the summary at this path belongs to another file of lines."""
    return UserError(
        f"exists already and is not the summary of {Path(output).name}; move it, {_ANEW}", path=summary_file(output)
    )


def _json_at(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# The files of a model folder that affect its answers; "*.py" is model code.
_MODEL_FILES = (
    *("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "config.json", "generation_config.json", "*.py"),
    *("adapter_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template.jinja", "*.gguf"),
)
_CHUNK, _CHUNKS = 2**16, 256


def model_fingerprint(path: str | os.PathLike[str]) -> str:
    """A hash of the files of a model folder and of an adapter's base model; a hub id is returned as it is.

    Of files above 16 MiB only 256 evenly spaced chunks are hashed, which is enough since training changes all weights.
    """
    folder = Path(path)
    if not folder.is_dir():
        return str(path)
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _MODEL_FILES for file in folder.glob(pattern)}):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            if size <= _CHUNK * _CHUNKS:
                digest.update(stream.read())
            else:
                for part in range(_CHUNKS):
                    stream.seek(part * (size - _CHUNK) // (_CHUNKS - 1))
                    digest.update(stream.read(_CHUNK))
    # A damaged configuration is reported when the model is loaded; an adapter that names itself has no other base.
    base = _json_at(folder / "adapter_config.json").get("base_model_name_or_path")
    if isinstance(base, str) and Path(base).is_dir() and Path(base).resolve() != folder.resolve():
        digest.update(model_fingerprint(base).encode())
    return digest.hexdigest()

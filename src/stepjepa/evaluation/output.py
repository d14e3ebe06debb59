"""The file that an evaluation writes: it grows line by line, survives a kill, and is never mixed with another's."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from stepjepa.disk import naming_disk_errors
from stepjepa.errors import UserError
from stepjepa.fields import checked_fields
from stepjepa.files import read_jsonl, write_json, write_jsonl

Line = dict[str, Any]


class OutputFile:
    """One line per example, in any order until it is finished, then in the order of the test file.

    ``<name>.meta.json`` beside it says what the lines belong to, ``<stem>.summary.json`` what they come to.

    Args:
        path: of the lines.
        indices: of the examples, in the order of the test file.
        identity: what must be equal for lines to belong together.
        overwrite: throw away what is there.

    Attributes:
        done: the lines that are there, by index.
        line_numbers: where those stood that were there from the start, by index.

    Raises:
        UserError: what is there belongs to something else, or can't be told to belong, or is damaged.
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
        self._indices, self._identity, self._overwrite = indices, dict(identity), overwrite
        self.line_numbers: dict[int, int] = {}
        self.done: dict[int, Line] = {} if overwrite or not self.path.exists() else self._read()
        self._keep_others_summary()

    def _read(self) -> dict[int, Line]:
        if not self._meta_file.is_file():
            raise UserError(
                f"is there already, without the {self._meta_file.name} of an evaluation to go on with; name another "
                "--output_file or pass --overwrite",
                path=self.path,
            )
        self._compare(self._read_meta())
        _drop_half_line(self.path)
        done: dict[int, Line] = {}
        for number, line in read_jsonl(self.path):
            index = line.get("index")
            if isinstance(index, bool) or not isinstance(index, int) or index not in self._indices or index in done:
                raise UserError(
                    f"index {index} does not belong here; name another --output_file or pass --overwrite",
                    path=self.path,
                    line=number,
                )
            # The names by which the lines are summarised are those of one of them.
            _check_line(line, self.path, number, next(iter(done.values()), line))
            done[index], self.line_numbers[index] = line, number
        return done

    def _read_meta(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._meta_file.read_text(encoding="utf-8"))["identity"])
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError):
            raise UserError(
                "can't be read, so there is no telling what the output file holds; pass --overwrite to start anew",
                path=self._meta_file,
            ) from None

    def _compare(self, begun: dict[str, Any]) -> None:
        different = [name for name, value in self._identity.items() if begun.get(name) != value]
        if not different:
            return
        words = [
            f"another {name.replace('_', ' ')}"
            if name in ("model", "test_file", "prompt")
            else "another version of the task"
            if name == "task_source"
            else "other settings of the task"
            if name == "task_options"
            else f"{name} {begun.get(name)} instead of {self._identity[name]}"
            for name in different
        ]
        raise UserError(
            f"was begun with {', '.join(words)}; name another --output_file, or pass --overwrite to start anew",
            path=self.path,
        )

    @property
    def complete(self) -> bool:
        """Every example has its line."""
        return len(self.done) == len(self._indices)

    def summary(self) -> dict[str, Any] | None:
        """The summary of all lines, if it has been written; not that of another file with the same stem."""
        found = self._read_summary() if self.complete else None
        return found if found is not None and found.get("settings") == self._identity else None

    def _read_summary(self) -> dict[str, Any] | None:
        """What stands where the summary belongs; None for nothing, or nothing that can be read."""
        if not self.summary_file.is_file():
            return None
        try:
            found = json.loads(self.summary_file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def _keep_others_summary(self) -> None:
        """Refuse to remove or replace the summary of another output file with the same stem.

        Raises:
            UserError: there is one, and nothing may be overwritten.
        """
        if self._overwrite or not self.summary_file.exists():
            return
        found = self._read_summary()
        # Of one that can't be read nothing is lost, but it must be known whose it was.
        own = self.path.exists() if found is None else found.get("settings") == self._identity
        if not own:
            raise others_summary(self.path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write what the lines come to.

        Args:
            summary: with the identity as its ``settings``.

        Raises:
            UserError: another file's has been written there in the meantime.
        """
        self._keep_others_summary()
        with naming_disk_errors(self.summary_file):
            write_json(self.summary_file, summary)

    @contextmanager
    def begin(self, **description: Any) -> Iterator[IO[str]]:
        """Open the file for more lines; what an overwritten one held is removed only now.

        Args:
            description: for people, beside the identity.

        Raises:
            UserError: another file's summary has been written in the place of this one's.
        """
        self._keep_others_summary()
        with naming_disk_errors(self.path):
            # First of all: while lines are missing no summary may say otherwise.
            self.summary_file.unlink(missing_ok=True)
            if not self.done:
                self.path.unlink(missing_ok=True)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Before the first line, so that no line is ever without it.
            write_json(self._meta_file, {**description, "identity": self._identity})
            with self.path.open("a", encoding="utf-8") as stream:
                yield stream

    def add(self, stream: IO[str], lines: Sequence[Line]) -> None:
        """Write lines to what :meth:`begin` opened."""
        for line in lines:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
            self.done[line["index"]] = line
        stream.flush()

    def finish(self) -> list[Line]:
        """Put all lines into the order of the test file; returns them."""
        lines = [self.done[index] for index in self._indices]
        with naming_disk_errors(self.path):
            write_jsonl(self.path, lines)
        return lines


def summary_file(output: str | os.PathLike[str]) -> Path:
    """Where the summary of a file of lines stands."""
    return Path(output).with_suffix(".summary.json")


def others_summary(output: str | os.PathLike[str]) -> UserError:
    """The error for a summary that stands where that of a file of lines belongs, and is not known to be its own."""
    return UserError(
        f"is there already, of other lines than those of {Path(output).name}; move it elsewhere, name another "
        "--output_file, best one that ends in .jsonl, or pass --overwrite",
        path=summary_file(output),
    )


def meta_file(output: str | os.PathLike[str]) -> Path:
    """Where it is written what a file of lines belongs to."""
    return Path(output).with_name(f"{Path(output).name}.meta.json")


def _check_line(line: Line, path: Path, number: int, model: Line) -> None:
    """Refuse a line without what ``judging.judge`` and ``Batcher.lines`` give it and summaries are made of.

    Args:
        line: of an evaluation.
        path: of the file.
        number: of the line.
        model: a line whose scores have the right names.

    Raises:
        UserError: a field is missing or wrong.
    """
    fields = checked_fields(line, path, "take the line out to have it made again, or pass --overwrite", line=number)
    fields.text("generated")
    scores = fields.inner("scores")
    for name in scores:
        scores.number(name)
    names = model["scores"]
    if not names or line["scores"].keys() != names.keys():
        raise fields.fault(f"the scores are {', '.join(scores) or 'none'}, expected {', '.join(names) or 'some'}")
    fields.inner("extracted")
    for name in ("truth", "error", "stopped", "new_tokens"):
        if name not in fields:
            raise fields.wrong(name, "a value")
    fields.text_or_none("error")
    if line["stopped"] is not None:
        fields.number("stopped")
    fields.whole_or_none("new_tokens", least=0)
    fields.number("gold_loss")
    fields.whole("gold_tokens", least=1)


def _drop_half_line(path: Path) -> None:
    """Cut off what follows the last line end: a line that was being written when the run was stopped."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


# What decides a model's answers. A run folder holds much else, evaluations of this very model among it.
_MODEL_FILES = (
    "*.safetensors",
    "pytorch_model*.bin",
    "adapter_model.bin",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    # Of models that bring code of their own.
    "*.py",
)
_CHUNK, _CHUNKS = 2**16, 256


def model_fingerprint(path: str | os.PathLike[str]) -> str:
    """Says whether two runs used the same model: a hash for a folder, the name itself for a hub id.

    Of large weight files a few hundred pieces all over the file are hashed: training again changes all of them, and
    reading a large model whole would take as long as loading it. With an adapter goes its base.
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
                for piece in range(_CHUNKS):
                    stream.seek(piece * (size - _CHUNK) // (_CHUNKS - 1))
                    digest.update(stream.read(_CHUNK))
    base = _base_folder(folder)
    if base is not None:
        digest.update(model_fingerprint(base).encode())
    return digest.hexdigest()


def _base_folder(adapter: Path) -> Path | None:
    """Where the model lies that an adapter was trained on; None for what is no adapter, or has its base on a hub."""
    config = adapter / "adapter_config.json"
    if not config.is_file():
        return None
    try:
        base = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        # It can't be loaded either, as the loading will tell.
        return None
    # An adapter that names itself would be followed for ever.
    return Path(base) if base and Path(base).is_dir() and Path(base).resolve() != adapter.resolve() else None

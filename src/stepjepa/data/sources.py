"""Read records from files, folders and data sets of the hub, and mix several of them."""

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from stepjepa.base.arguments import check_number, expanded, kind_of
from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import existing_file
from stepjepa.base.json_object import JsonObject
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.columns import Columns
from stepjepa.data.formats import FORMATS, OnError, Rows, first_line, read_unnamed
from stepjepa.data.nested_values import with_own_objects
from stepjepa.data.record import Data, Record
from stepjepa.data.records import as_records, parse_record


def read_rows(
    source: str | os.PathLike[str],
    *,
    split: str | None = None,
    subset: str | None = None,
    bad: BadRecords | None = None,
) -> Rows:
    """Read the rows of a file, of a folder that ``datasets`` can load, or of a data set on the hub.

    Args:
        source: a file, whose suffix decides its format (:data:`FORMATS`); a folder; or a name on the hub, where a path
            is never looked up.
        split: of a folder or a data set on the hub that has several.
        subset: of a data set on the hub that has several.
        bad: counts invalid rows, or raises the error of the first with the remedies of its settings; None raises it.

    Raises:
        UserError: there is no such source, or its format is not known.
    """
    path, name = Path(expanded(source)), os.fspath(source)
    if path.is_dir() or not (path.exists() or _looks_like_a_path(name)):
        return _read_dataset(str(path) if path.is_dir() else name, split, subset, (bad or BadRecords()).handle)
    if split is not None or subset is not None:
        raise UserError(f"`{'subset' if split is None else 'split'}` does nothing with a file; leave it out", path=path)
    file = _regular_file(path, "raw file")
    if file.suffix.lower() not in FORMATS:
        table = f"make a table of its lines with: (echo text; cat {file.name}) > {file.stem}.tsv"
        remedy = table if file.suffix.lower() == ".txt" else "convert the file"
        raise UserError(f"expected a name that ends in {', '.join(FORMATS)}; {remedy}", path=file)
    return FORMATS[file.suffix.lower()](file, (bad or BadRecords()).handle)


def read_records(
    path: str | os.PathLike[str],
    *,
    bad: BadRecords | None = None,
    columns: Columns = None,
    limit: int | None = None,
) -> list[Record]:
    """Read the records of a file, at least one: a table of :data:`FORMATS`, otherwise JSON lines.

    Args:
        path: the file.
        bad: counts invalid lines, or raises the error of the first with the remedies of its settings; None raises it.
        columns: names of the columns of the user's and the assistant's message; None recognises them.
        limit: read only so many records from the start; None for all.

    Raises:
        UserError: there is no such file, or no record in it; or a line is wrong, unless ``bad`` skips it.
        TypeError: ``path`` is no path; a table or a list in memory needs no reading. Or ``limit`` is no whole number.
        ValueError: ``limit`` is below 1.
    """
    given: object = path  # a caller without types may pass a table
    if not isinstance(given, str | os.PathLike):
        remedy = "pass what is in memory as it is, such as JepaTrainer(train_dataset=...)"
        raise TypeError(f"path: expected the path of a file, got {type(given).__name__}; {remedy}")
    if limit is not None:
        check_number("limit", limit)
    if not isinstance(bad, BadRecords | None):
        raise TypeError(f"bad: expected BadRecords({shown(bad)}) of stepjepa.data.bad_records, got {kind_of(bad)}")
    return list(islice(each_record(path, bad=bad, columns=columns), limit))


def each_record(
    path: str | os.PathLike[str], *, bad: BadRecords | None = None, columns: Columns = None
) -> Iterator[Record]:
    """Yield the records of a file one by one; arguments and errors as for :func:`read_records`."""
    path = expanded(path)
    if Path(path).is_dir():
        remedy = (
            "name a file in it, train on the folder as `dataset`, or make a file by stepjepa prepare chat --dataset"
        )
        raise UserError(f"is a folder; {remedy}", path=path)
    file, bad = _regular_file(path, "data file"), bad or BadRecords(settings=("columns",))
    reader = FORMATS.get(file.suffix.lower(), read_unnamed)
    number = 0
    for number, record in enumerate(_parse_each(reader(file, bad.handle), path, bad, columns), start=1):  # noqa: B007  # counts them
        yield record
    if not number:
        remedy = bad.describe() if bad.count else "add at least one"
        raise UserError(f"holds no records; {remedy}", path=path)


def check_source(source: str | os.PathLike[str]) -> None:
    """Raise ``UserError`` if a source of records is a path and nothing is there, before others are read."""
    path = Path(expanded(source))
    if _looks_like_a_path(os.fspath(source)) and not (path.is_dir() or _is_in_folder(os.fspath(source))):
        _regular_file(path, "data file")


def _regular_file(path: str | os.PathLike[str], what: str) -> Path:
    """Return the path of a file that can be read twice; its first line says its format, its SHA-256 is recorded."""
    file = existing_file(path, what)
    if not file.is_file():
        raise UserError("is a pipe or a device, which can't be read twice; write it into a file first", path=file)
    return file


def each_record_of_source(
    source: str | os.PathLike[str], *, bad: BadRecords | None = None, columns: Columns = None
) -> Iterator[Record]:
    """Yield the records of a file, of a folder that ``datasets`` can load, or of a data set on the hub.

    Subset and split may follow the name of a data set: ``openai/gsm8k:main:train``. See :func:`read_records`.

    Args:
        source: file, folder, or NAME:SUBSET:SPLIT of a folder or on the hub.
        bad: collects invalid rows; None raises an error for the first of them.
        columns: names of the columns of the user's and the assistant's message; None recognises them.
    """
    path, name = Path(expanded(source)), os.fspath(source)
    if path.is_file() or (_looks_like_a_path(name) and not (path.is_dir() or _is_in_folder(name))):
        yield from each_record(path, bad=bad, columns=columns)
        return
    dataset, subset, split = parts_of_name(name)
    part, number = _choose_split(dataset, split, subset, in_name=True), 0
    if isinstance(part, _Files):
        for file in part.files:
            yield from each_record(file, bad=bad, columns=columns)
        return
    rows, bad = enumerate(_rows_of_dataset(part), start=1), bad or BadRecords(settings=("columns",))
    for number, record in enumerate(_parse_each(rows, name, bad, columns), start=1):  # noqa: B007  # counts them
        yield record
    if not number:
        raise UserError("holds no records; name another subset or split", path=name)


def each_record_of_data(data: Data) -> Iterator[Record]:
    """Yield the records of ``data`` that were passed in Python: as the name of a source, or as objects.

    Raises:
        UserError: a record is wrong; the remedy names no setting, since the caller has none for the reader.
    """
    if isinstance(data, str | os.PathLike):
        return each_record_of_source(data, bad=BadRecords())
    return as_records(data)


def mix(sizes: Sequence[int], weights: Sequence[float] | None, seed: int) -> list[list[int]]:
    """Draw the largest mixture of several data sets with these relative sizes and no repetition.

    Args:
        sizes: number of records of each.
        weights: relative; None takes all records.
        seed: of the draw.

    Returns:
        For each data set the indices of the records that are taken, in order.

    Raises:
        UserError: the weights are not positive numbers, one for each data set; or a data set gives no record.
    """
    if weights is None:
        return [list(range(size)) for size in sizes]
    if len(weights) != len(sizes) or not all(0 < weight < float("inf") for weight in weights):
        raise UserError(f"dataset_weights: expected {len(sizes)} positive numbers, one for each `dataset`")
    scale = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    draw, indices = random.Random(seed), list[list[int]]()
    for size, weight in zip(sizes, weights, strict=True):
        indices.append(sorted(draw.sample(range(size), min(round(scale * weight), size))))
    if not all(indices):
        raise UserError(f"dataset_weights: no record of data set {indices.index([]) + 1} is taken; raise its weight")
    return indices


def _parse_each(rows: Rows, path: str | os.PathLike[str], bad: BadRecords, columns: Columns) -> Iterator[Record]:
    for line, value in rows:
        try:
            record = parse_record(value, path, line, columns)
        except UserError as error:
            bad.handle(error, line)
        else:
            yield record


def parts_of_name(name: str) -> tuple[str, str | None, str | None]:
    """Return data set, subset and split of NAME:SUBSET:SPLIT; None for what is not named, and a folder as it is."""
    if Path(expanded(name)).is_dir():
        return name, None, None
    dataset, subset, split, *rest = (*name.split(":"), "", "")
    if any(rest):
        raise UserError(f"'{name}': expected NAME:SUBSET:SPLIT, got {counted(name.count(':') + 1, 'part')}")
    return expanded(dataset) if _is_in_folder(name) else dataset, subset or None, split or None


def _looks_like_a_path(name: str) -> bool:
    # The hub's names have one slash at most and no such endings.
    is_file = Path(name).suffix.lower() in FORMATS
    return is_file or name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1


def _is_in_folder(name: str) -> bool:
    """Return whether a name has the form FOLDER:SUBSET:SPLIT, and there is such a folder."""
    folder, colon, _ = name.partition(":")
    return bool(colon) and Path(expanded(folder)).is_dir()


def _read_dataset(name: str, split: str | None, subset: str | None, on_error: OnError) -> Rows:
    part = _choose_split(name, split, subset)
    rows: Iterable[JsonObject]
    if isinstance(part, _Files):
        rows = (row for file in part.files for _, row in FORMATS[file.suffix.lower()](file, on_error))
    else:
        rows = _rows_of_dataset(part)
    yield from enumerate(rows, start=1)


def _rows_of_dataset(part: Any) -> Iterator[JsonObject]:
    """Yield the rows of a ``datasets.Dataset``."""
    return with_own_objects(part, part)


def _choose_split(name: str, split: str | None, subset: str | None, *, in_name: bool = False) -> Any:
    """Return the rows of a split of a data set; or its files, where a folder has nothing else.

    ``in_name`` says that the user names split and subset behind the name, as NAME:SUBSET:SPLIT.
    """
    import datasets

    splits: Any
    saved = subset is None and any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))
    try:
        # All splits are fetched in any case; loading them together lets the error list them.
        if saved:
            splits = datasets.load_from_disk(name)
        else:
            splits = _plain_files(name, subset) or datasets.load_dataset(name, subset)
    except Exception as error:  # a data set, its files or the hub's library may raise anything
        fault = first_line(error) + (f" ({first_line(error.__cause__)})" if error.__cause__ else "")
        raise UserError(
            f"can't be loaded: {fault}; check name, subset and network, or pass a file", path=name
        ) from None
    if isinstance(splits, datasets.Dataset):  # saved alone, by its `save_to_disk`
        splits = {str(splits.split or "train"): splits}
    if split is None and len(splits) == 1:
        split = next(iter(splits))
    if split not in splits:
        fault = "name a split" if split is None else f"has no split '{split}'"
        remedy = f", so write {name}:{subset or ''}:{next(iter(splits))} or another" if in_name else ""
        raise UserError(f"{fault}; there are {', '.join(splits)}{remedy}", path=name)
    return splits[split]


class _Files(NamedTuple):
    """The files of a split."""

    files: list[Path]


def _plain_files(name: str, subset: str | None) -> dict[str, _Files]:
    """Return the files of each split of a folder if all can be read here; empty for other data sets.

    ``datasets`` would guess the types of a table's columns: the text 007 of a CSV file becomes 7, or 7.0 beside a gap.
    A card may say how the files are to be read, so a folder with one is left to it.
    """
    import datasets

    if not Path(name).is_dir() or (Path(name) / "README.md").is_file():
        return {}
    parts = datasets.load_dataset_builder(name, subset).config.data_files or {}
    splits = {str(split): _Files([Path(str(file)) for file in files]) for split, files in parts.items()}
    files = [file for split_files in splits.values() for file in split_files.files]
    return splits if all(file.suffix.lower() in FORMATS and file.is_file() for file in files) else {}

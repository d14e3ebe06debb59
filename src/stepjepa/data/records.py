"""Records: one row or JSON line each, checked; every error names file, line and field."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from stepjepa.base.errors import UserError, shown
from stepjepa.base.json_object import JsonObject, json_fault
from stepjepa.data.columns import Columns, read_chat
from stepjepa.data.messages import (
    MEDIA,
    as_python,
    check_text_only,
    check_turns,
    is_absent,
    read_tools,
    read_variables,
    tools_column,
)
from stepjepa.data.nested_values import filled_columns, kinds_of_columns, own_objects
from stepjepa.data.record import READ_LATER, Record

_VIEW_ROLES = {"text": "user", "code": "assistant"}

_BESIDE_CHAT = ("id", "views", *sorted(READ_LATER))
"""Fields beside the chat that ``prepare chat`` writes as they are: a record is trained and judged as before."""


def as_records(values: Any, *, change: Callable[[Any], Any] | None = None) -> Iterator[Record]:
    """Yield records from memory: from dicts in the form of a file's lines, records, a data frame, or a Dataset.

    Args:
        values: the records; also a map-style data set of torch.
        change: changes each value that is no ``Record`` before it is read.

    Raises:
        UserError: a value is no record; its position, from 1, is the line in the message.
    """
    check_is_collection(values)
    _check_columns(values)
    kinds, filled = kinds_of_columns(values), None
    is_frame = hasattr(values, "notna") and hasattr(values, "columns")  # of pandas
    # A table has a field of one row's objects in those of all rows; in a list of dicts a null is the user's own.
    is_table = is_frame or any(hasattr(values, name) for name in ("to_pylist", "to_dicts", "features"))
    if is_frame:
        filled = filled_columns(values)
        values = values.astype(object).where(values.notna(), None).to_dict("records")
    for method in ("to_pylist", "to_dicts"):  # pyarrow, polars
        values = getattr(values, method)() if hasattr(values, method) else values
    if isinstance(values, Mapping):
        raise UserError(_describe_mapping(values))
    for position, value in enumerate(_in_order(values), start=1):
        if isinstance(value, Record):
            yield value
            continue
        row = as_python(value)
        row = own_objects(row, kinds, filled) if is_table and isinstance(row, dict) else row
        record = parse_record(row if change is None else change(row), line=position)
        # Files are checked where they are read.
        if (fault := json_fault((*record.chat, record.views))) is not None:
            raise UserError(fault, path=record.path, line=position)
        yield record


def _in_order(values: Any) -> Iterable[Any]:
    """Return values to iterate over; those of a map-style data set are as many as its length says.

    Torch's ``Dataset`` has no iterator, and that of Python would ask on until an ``IndexError``, which one that makes
    its items never raises.
    """
    if hasattr(values, "__iter__") or not hasattr(values, "__len__"):
        return cast(Iterable[Any], values)
    return (values[index] for index in range(len(values)))


def _describe_mapping(values: Mapping[object, object]) -> str:
    """Return what is wrong with an object where records are expected: a record, columns, or several sets."""
    fault = f"expected records, got an object with the keys {', '.join(map(str, values))}"
    if "messages" in values or all(isinstance(value, str) for value in values.values()):
        return f"{fault}; put a record by itself into a list"
    if all(isinstance(value, list) and not _has_rows(value) for value in values.values()):
        return f"{fault}; make rows of columns with datasets.Dataset.from_dict or pandas.DataFrame"
    return f"{fault}; pass one of them"


def _has_rows(value: list[object]) -> bool:
    """Return whether a list is one of rows, as far as its first value says; an empty one may be."""
    return all(isinstance(row, Mapping | Record) for row in value[:1])


def check_is_collection(values: object, what: str | None = None) -> None:
    """Raise UserError for what can't hold records, such as a number or a function.

    Args:
        values: what was passed as records.
        what: their name in the message.
    """
    try:
        if not isinstance(values, str | bytes):
            iter(values)  # type: ignore[call-overload]  # whether it works is the question
            return
    except TypeError:
        pass
    got = str(values) if values is None or isinstance(values, int | float) else f"an object ({type(values).__name__})"
    remedy = "pass a list of dicts or a datasets.Dataset"
    if isinstance(values, str | os.PathLike):
        remedy = "stepjepa.read_records(path) reads those of a file"
    elif isinstance(values, Record):
        remedy = "put a record by itself into a list"
    if isinstance(values, float) and 0 < values < 1:
        remedy = f"a share is data_file and eval_split of RunConfig, or a part of dataset.train_test_split({got})"
    raise UserError(f"expected records, got {got}; {remedy}", path=what)


def _check_columns(table: Any) -> None:
    """Raise UserError for a table of pandas or pyarrow that has a column twice: a row would hold the last alone."""
    columns = getattr(table, "column_names", getattr(table, "columns", None))
    names = [] if columns is None else [str(name) for name in columns]
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise UserError(f"the table has the column {shown(twice[0])} twice; rename or drop one of the two")


def parse_record(
    value: Mapping[str, object], path: str | os.PathLike[str] = "<memory>", line: int = 0, columns: Columns = None
) -> Record:
    """Check one object and make a record of it.

    It has ``messages``: optionally one system or developer message first, then user and assistant in turn, with tool
    messages behind an assistant's; or the chat in another form, see :func:`stepjepa.data.columns.read_chat`. Messages
    behind the last trained answer are dropped. Optionally ``tools`` and ``chat_template_kwargs``, and
    explicit views: ``views``, a list of pairs of texts; or both ``text`` and ``code``, each a text or a list of one
    message.

    Args:
        value: the object: column or field name -> value.
        path: the file that it is from, for errors.
        line: its line there, counted from 1, for errors.
        columns: names of the columns of the user's and the assistant's message; None recognises them.

    Raises:
        RowError: the object is no record, and the remedies depend on the settings of its reader.
        UserError: the object is no record.
    """
    try:
        if not isinstance(value, Mapping):
            raise UserError(f"expected an object with the fields of a record, got {shown(value)}")
        check_text_only(value)
        chat = read_chat(value, columns)
        trained = check_turns(chat.messages)
        views = _read_views(value, chat.used)
        tools_name = tools_column(value)
        tools, variables = read_tools(value.get(tools_name)), read_variables(value.get("chat_template_kwargs"))
    except UserError as error:
        raise error.at(path, line) from None
    read = {*chat.used, *views.columns, *MEDIA, tools_name, "chat_template_kwargs"}
    return Record(
        messages=tuple(chat.messages[:trained]),
        views=views.pairs,
        path=str(path),
        line=line,
        extra={key: value[key] for key in value if key not in read},
        columns=tuple(name for name in value if name in chat.used or name in {*views.columns} - {"views"}),
        tools=tools,
        chat_template_kwargs=variables,
        unused=tuple(chat.unused),
        dropped=len(chat.messages) - trained,
    )


def fields_beside(row: Mapping[str, object], used: set[str]) -> JsonObject:
    """Return the fields of a row beside its chat that a converted row needs: its id, its views, what tasks read.

    A date or a decimal of a table, which JSON has no form for, becomes a text.

    Args:
        row: column name -> value.
        used: the columns of the chat.
    """
    names = [name for name in _BESIDE_CHAT if name not in used]
    names += [] if used & _VIEW_ROLES.keys() or any(is_absent(row.get(key)) for key in _VIEW_ROLES) else [*_VIEW_ROLES]
    beside = {name: row[name] for name in names if not is_absent(row.get(name))}
    return dict(json.loads(json.dumps(beside, default=str)))


class _ExplicitViews(NamedTuple):
    """The views that a row names."""

    pairs: tuple[tuple[str, str], ...] | None = None  # of source and target; None for a row without explicit views
    columns: tuple[str, ...] = ()  # the columns that they were read from


def _read_views(value: Mapping[str, Any], used: set[str]) -> _ExplicitViews:
    """Read the explicit views of a row whose chat was read from the columns ``used``; UserError if they are wrong."""
    pairs = value.get("views")
    if pairs is not None:
        is_list_of_lists = isinstance(pairs, list | tuple) and all(isinstance(pair, list | tuple) for pair in pairs)
        if not is_list_of_lists or not all(
            len(pair) == 2 and all(isinstance(view, str) for view in pair) for pair in pairs
        ):
            raise UserError("'views' must be a list of pairs of texts: [[source, target], ...]")
        return _ExplicitViews(tuple((source, target) for source, target in pairs), ("views",))
    # A table's columns of these names may be the chat itself; one of them alone is another program's rendered chat.
    if used & {*_VIEW_ROLES} or any(value.get(key) is None for key in _VIEW_ROLES):
        return _ExplicitViews()
    text, code = (_view(value[key], key, role) for key, role in _VIEW_ROLES.items())
    return _ExplicitViews(((text, code),), tuple(_VIEW_ROLES))


def _view(value: object, key: str, role: str) -> str:
    """Return a view: a text, or the content of a list of one message, as in the published files."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) and value[0].get("role") == role:
        value = value[0].get("content", 0)
    if isinstance(value, str):
        return value
    raise UserError(f"'{key}' must be a string, or a list of exactly one {role} message")

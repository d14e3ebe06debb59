"""JSON objects: their type, and parsers that notice repeated keys, where ``json.loads`` silently keeps the last."""

import json
from dataclasses import dataclass
from typing import Any, Self

JsonObject = dict[str, Any]
"""A JSON object, as ``json.loads`` returns it: records, rows of files, ``run.json``, summaries."""

_Pairs = list[tuple[str, Any]]


class RepeatedKeyError(ValueError):
    """An object of a JSON text has a key twice."""

    def __init__(self, key: str) -> None:
        name = json.dumps(key, ensure_ascii=False)[1:61].removesuffix('"')
        super().__init__(f"has the key '{name}' twice in one object; keep one of the two")


def read_int(text: str) -> int:
    """Convert the text of a flag or of YAML 1.2: ``7``, ``007``, ``1_000``, ``0x10``; ``ValueError`` for any other."""
    try:
        return int(text)
    except ValueError:
        return int(text, 0)


def read_float(text: str) -> float:
    """Convert the text of a flag or of YAML 1.2: ``7``, ``1e-5``, ``0x10``, ``.inf``; ``ValueError`` for any other."""
    try:
        return float(text)
    except ValueError:
        if text.lower().lstrip("+-") in (".inf", ".nan"):
            return float(text.replace(".", ""))
        return float(str(int(text, 0)))  # as a text, since a large one is infinite


class WrittenInt(int):
    """A whole number of a YAML text with its spelling there: 007 and 7 are equal numbers, but different texts."""

    text: str

    def __new__(cls, text: str) -> Self:
        """Convert the text of a number."""
        value = super().__new__(cls, read_int(text))
        value.text = text
        return value

    def __reduce__(self) -> tuple[type["WrittenInt"], tuple[str]]:
        return WrittenInt, (self.text,)


class WrittenFloat(float):
    """A float of a JSON or YAML text with its spelling there: 1.10 and 1.1 are equal numbers, but different texts."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Self:
        """Convert the text of a number."""
        value = super().__new__(cls, read_float(text))
        value.text = text
        return value

    def __reduce__(self) -> tuple[type["WrittenFloat"], tuple[str]]:
        return WrittenFloat, (self.text,)


@dataclass(frozen=True)
class RepeatedKey:
    """Placeholder for an object that has a key twice, in values that :func:`parse_marked` returns."""

    key: str


def parse_json(text: str) -> Any:
    """Parse JSON as ``json.loads`` does; raise :class:`RepeatedKeyError` if an object in it has a key twice."""
    return _STRICT.decode(text)


def parse_data(text: str) -> Any:
    """Parse JSON as :func:`parse_json`; numbers with a fraction or an exponent are :class:`WrittenFloat`."""
    # ``decode`` also looks for white space around the value, which takes as long as the search for repeated keys.
    try:
        value, end = _OF_DATA.raw_decode(text)
    except json.JSONDecodeError:
        return _OF_DATA.decode(text)
    return value if end == len(text) else _OF_DATA.decode(text)


def parse_marked(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value that begins at ``start`` as :func:`parse_data`; return it and its end.

    An object in it that has a key twice is a :class:`RepeatedKey`, which :func:`json_fault` finds.
    """
    return _MARKING.raw_decode(text, start)


def json_fault(value: object) -> str | None:
    """Describe why a JSON value can't be used as it is; None if it can.

    It holds a :class:`RepeatedKey`, or a lone surrogate, which can't be written as UTF-8.
    """
    try:
        json.dumps(value, ensure_ascii=False, default=_refuse_repeated).encode()
    except RepeatedKeyError as error:
        return str(error)
    except UnicodeEncodeError:
        return "holds half of a character (a lone surrogate); remove it"
    return None


def _refuse_repeated(value: object) -> str:
    if isinstance(value, RepeatedKey):
        raise RepeatedKeyError(value.key)
    return str(value)  # of an object in Python


def _repeated(pairs: _Pairs) -> str:
    """Return the first key of an object that occurs a second time."""
    keys = [key for key, _ in pairs]
    return next(key for number, key in enumerate(keys) if key in keys[:number])


def _strict_object(pairs: _Pairs) -> JsonObject:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise RepeatedKeyError(_repeated(pairs))
    return value


def _marked_object(pairs: _Pairs) -> JsonObject | RepeatedKey:
    value = dict(pairs)
    return value if len(value) == len(pairs) else RepeatedKey(_repeated(pairs))


_STRICT = json.JSONDecoder(object_pairs_hook=_strict_object)
_OF_DATA = json.JSONDecoder(object_pairs_hook=_strict_object, parse_float=WrittenFloat)
_MARKING = json.JSONDecoder(object_pairs_hook=_marked_object, parse_float=WrittenFloat)

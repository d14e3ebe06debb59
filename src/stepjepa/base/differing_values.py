"""Describe two values that should be equal and are not, in a line."""

import json

from stepjepa.base.common_beginning import common_length
from stepjepa.base.errors import visible

_LONGEST = 60  # characters of a value
_BEFORE = 20  # of them, those in front of the first difference


def describe_difference(name: str, own: object, other: object, form: str, missing: str = "unknown") -> str:
    """Describe two values that differ, of objects the first field that does.

    Args:
        name: of the value.
        own: the first value.
        other: the second one.
        form: the description, with ``{name}``, ``{own}`` and ``{other}``.
        missing: the word for None.
    """
    if isinstance(own, dict) and isinstance(other, dict):
        field = next((key for key in own | other if own.get(key) != other.get(key)), None)
        if field is not None:
            return describe_difference(f"{name}: {field}", own.get(field), other.get(field), form, missing)
    texts = [
        missing if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in (own, other)
    ]
    # Of long texts that begin alike the end of that beginning is shown, and what follows.
    start = max(0, common_length(*texts) - _BEFORE) if max(map(len, texts)) > _LONGEST else 0
    return form.format(name=name, own=_short(texts[0], start), other=_short(texts[1], start))


def _short(text: str, start: int) -> str:
    """Return the part of a text from ``start`` on, with ``...`` where something is cut off."""
    rest = f"...{text[start:]}" if start else text
    return visible(rest if len(rest) <= _LONGEST else f"{rest[: _LONGEST - 3]}...")

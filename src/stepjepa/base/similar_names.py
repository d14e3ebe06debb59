"""Known names that a mistyped one may mean, and the question in messages: ``did you mean NAME?``."""

import difflib
from collections.abc import Iterable, Sequence

_MOST = 3  # names in a question


def similar_names(name: str, names: Iterable[str]) -> list[str]:
    """Return the known names that a mistyped one may mean, at most three; empty if there are none.

    Case, dashes and underscores are ignored. In this order: the name itself; the names that begin with its words; one
    or two that begin with it or have it among their words; the one with the most similar spelling; those that have it
    among their words.
    """
    typed, known = _plain(name), {_plain(candidate): candidate for candidate in names}
    if not typed:
        return []
    if typed in known:
        return [known[typed]]
    words = [candidate for plain, candidate in known.items() if typed in plain.split("-")]
    begin = [candidate for plain, candidate in known.items() if plain.startswith(typed)]
    few = list(dict.fromkeys([*begin, *words]))
    near = [candidate for plain, candidate in known.items() if plain.startswith(f"{typed}-")]
    near = near or (few if len(few) <= 2 else [])
    near = near or [known[plain] for plain in difflib.get_close_matches(typed, known, n=1)]
    return (near or words)[:_MOST]


def question(near: Sequence[str]) -> str:
    """Return ``did you mean A or B?`` for the names that a mistyped one may mean; an empty text for none."""
    return f"did you mean {' or '.join(near)}?" if near else ""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean A or B?`` for the names in :func:`similar_names`; an empty text if there are none."""
    near = similar_names(name, names)
    return f"; {question(near)}" if near else ""


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")

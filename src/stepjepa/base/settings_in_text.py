"""Settings in messages, `name` or `name value` in backticks, which each caller writes in its own spelling."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from stepjepa.base.errors import UserError

Spell = Callable[[str], str | None]
"""Function from the name of a setting to the one that replaces it; None leaves it as it is."""

_IN_BACKTICKS = re.compile(r"`([a-z]\w*)((?: [^`]*)?)`")
_BEFORE_COLON = re.compile(r"(?:^|(?<=: ))([a-z]\w*)(?=: )")


def respelled(text: str, spell: Spell, mark: str = "`") -> str:
    """Return a text with other names for its settings.

    Args:
        text: a help text, a note or a message.
        spell: gives the other names.
        mark: put around a replaced setting.
    """

    def write(quoted: re.Match[str]) -> str:
        name = spell(quoted[1])
        return quoted[0] if name is None else f"{mark}{name}{quoted[2]}{mark}"

    return _IN_BACKTICKS.sub(write, text)


def respelled_error(text: str, spell: Spell, mark: str = "`") -> str:
    """Return an error as :func:`respelled`; a setting may also be the word before its first colon."""
    return _BEFORE_COLON.sub(lambda word: spell(word[1]) or word[0], respelled(text, spell, mark), count=1)


@contextmanager
def renaming_settings(names: Mapping[str, str]) -> Iterator[None]:
    """Raise a ``UserError`` of the block with other names for its settings; ``names`` maps name -> other name.

    Two callers may share code whose errors name the settings of one of them: ``task`` of an evaluation is ``eval_task``
    of a run.
    """
    try:
        yield
    except UserError as error:
        raise UserError(respelled_error(str(error), names.get)) from None

"""Which expressions describe the same lines: a tree of questions tells thousands apart without comparing every pair."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepjepa.tasks.regex import find_difference


@dataclass
class _Question:
    """Whether a language holds a line, and what follows from no and yes: another question, or the one language left."""

    line: str
    answers: list[_Question | str]


class Languages:
    """Expressions grouped by the lines that they describe.

    A new expression answers about twenty questions, "do you describe this line?", and is then compared with the only
    language that answers like it. Where the two differ, the line that shows it becomes a new question.
    """

    def __init__(self) -> None:
        self._root: list[_Question | str] = []
        self._known: dict[str, str] = {}

    def of(self, expression: str) -> str:
        """The first expression seen that describes the same lines: the name of the language.

        Raises:
            RegexSyntaxError: it is no expression.
        """
        if expression in self._known:
            return self._known[expression]
        place, branch = self._root, 0
        while place and isinstance(place[branch], _Question):
            question = place[branch]
            assert isinstance(question, _Question)
            place, branch = question.answers, int(describes(expression, question.line))
        name = expression
        if not place:
            place.append(expression)
        else:
            known = str(place[branch])
            line = find_difference(known, expression)
            if line is None:
                name = known
            else:
                both = [expression, known] if describes(known, line) else [known, expression]
                place[branch] = _Question(line, list(both))
        self._known[expression] = name
        return name


def describes(expression: str, line: str) -> bool:
    """Whether an expression describes a line."""
    text = re.sub(r"([|&~*+?{}()\[\].^$\\])", r"\\\1", line)
    return find_difference(f"({expression})&({text})", text or "()") is None

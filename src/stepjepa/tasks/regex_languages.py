"""Group regular expressions by the lines that they match, without comparing every pair of them."""

from __future__ import annotations

from dataclasses import dataclass

from stepjepa.tasks.regex import Matcher, TooManyStatesError, find_difference


@dataclass
class _Question:
    """A line to be matched; its answers, for no and yes, are the next question or the one language that remains."""

    line: str
    answers: list[_Question | str]


class Languages:
    """Expressions grouped by the lines that they match.

    A decision tree tests a new expression on about twenty lines, and it is compared with the one language that gives
    the same results. If the two differ, a line that only one of them matches becomes a new question of the tree.

    Args:
        most_states: limit of a comparison, see :func:`find_difference`; None for no limit. An expression that can't be
            compared within it counts as a language of its own.
    """

    def __init__(self, most_states: int | None = None) -> None:
        self._most_states = most_states
        self._root: list[_Question | str] = []
        self._known: dict[str, str] = {}

    def of(self, expression: str) -> str:
        """Return the first expression with the same lines: the name of the language.

        Raises:
            RegexSyntaxError: it is no expression.
        """
        if expression in self._known:
            return self._known[expression]
        matches = Matcher(expression)
        place, branch = self._root, 0
        while place and isinstance(question := place[branch], _Question):
            place, branch = question.answers, int(matches(question.line))
        name = expression
        if not place:
            place.append(expression)
        else:
            branch_name = str(place[branch])
            try:
                line = find_difference(branch_name, expression, self._most_states)
            except TooManyStatesError:
                pass  # not in the tree, so that no other expression is compared with it
            else:
                if line is None:
                    name = branch_name
                else:
                    both: list[_Question | str] = (
                        [expression, branch_name] if Matcher(branch_name)(line) else [branch_name, expression]
                    )
                    place[branch] = _Question(line, both)
        self._known[expression] = name
        return name

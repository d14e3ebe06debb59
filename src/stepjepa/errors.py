"""The one exception that reaches a user of the command line, and how it shows what others wrote."""

_LONGEST = 60
"""Characters of a value from a file that a message shows."""

_LONGEST_MESSAGE = 2000
"""Characters of a message: a library may put a whole file into its own."""


class UserError(ValueError):
    """Wrong input that the user can put right.

    The command line prints the message on one line and exits with code 2. The message names the place
    (file, line, field), what is wrong there and the remedy.

    Args:
        message: what is wrong and what to do about it.
        path: the file at fault, if any.
        line: the line in that file, counted from 1, if any.
    """

    def __init__(self, message: str, *, path: object = None, line: int | None = None) -> None:
        where = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(f"{where}{message}")
        self.line = line


def shown(value: object) -> str:
    """A value from a file as a message shows it: in quotes, shortened, control characters written out."""
    text = value if isinstance(value, str) else repr(value)
    short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"'{visible(short)}'"


def visible(text: str) -> str:
    """A text in which characters that a terminal would obey, or could not print, are written out as escapes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def one_line(error: BaseException | str) -> str:
    """What the command line prints of an error: one line, not without end, nothing that a terminal obeys."""
    text = " ".join(str(error).split())
    if len(text) > _LONGEST_MESSAGE:
        # Where it is stands at the beginning, what to do about it at the end.
        half = _LONGEST_MESSAGE // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return visible(text)

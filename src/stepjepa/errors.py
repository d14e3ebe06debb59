"""The exception for errors that the user can correct, and helpers to print untrusted text in messages."""

_LONGEST = 60
"""Most characters of a value from a file in a message."""

_LONGEST_MESSAGE = 2000
"""Most characters of a message: a library may put a whole file into its own."""


class UserError(ValueError):
    """Wrong input that the user can correct.

    The command line prints the message on one line and exits with code 2. The message names the place
    (file, line, field), the fault and the remedy.

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
    """Format a value from a file for a message: in quotes, shortened, control characters escaped."""
    text = value if isinstance(value, str) else repr(value)
    short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"'{visible(short)}'"


def visible(text: str) -> str:
    """Escape the control characters and other unprintable characters of a text."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def one_line(error: BaseException | str) -> str:
    """Format an error for the command line: one line, of limited length, control characters escaped."""
    text = " ".join(str(error).split())
    if len(text) > _LONGEST_MESSAGE:
        # Cut the middle: the place stands at the beginning, the remedy at the end.
        half = _LONGEST_MESSAGE // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return visible(text)

"""The one exception that reaches a user of the command line."""


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

"""Lines of a file that are no records: an error, or skipped and counted."""

from collections.abc import Collection

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError, one_line
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note
from stepjepa.data.row_error import RowError


class BadRecords:
    """Handling of invalid lines of a file (setting ``bad_records``): an error, or skipped and counted.

    Args:
        choice: ``error`` or ``skip``.
        settings: the settings of the reader that remedies may name, of ``bad_records`` and ``columns``.
    """

    def __init__(self, choice: str = "error", *, settings: Collection[str] = ()) -> None:
        self.skips, self.settings = choice == "skip", settings
        self.count = 0
        self.first: list[tuple[int, str]] = []  # line numbers and messages of the first few errors

    def handle(self, error: UserError, line: int) -> None:
        """Raise the error, or count the skipped line."""
        if not self.skips:
            raise (error.for_reader(self.settings) if isinstance(error, RowError) else error) from None
        self.count += 1
        if self.count <= 3:
            # The user has chosen a remedy already.
            reason = error.without_remedies if isinstance(error, RowError) else error
            self.first.append((line, one_line(reason)))

    def describe(self) -> str:
        """Return one line: the number of skipped lines, and the first errors."""
        others = [f"and {self.count - 3:,} more"] if self.count > 3 else []
        reasons = "; ".join([reason for _, reason in self.first] + others)
        return f"{counted(self.count, 'bad line')} skipped (`bad_records skip`): {reasons}"

    def tell(self) -> None:
        """Print :meth:`describe` to standard error if lines were skipped."""
        if self.count:
            note(self.describe())

    def to_dict(self) -> JsonObject:
        """Return the entry of ``run.json``, which does not depend on the path of the file."""
        return {"left_out": self.count, "first_lines": [line for line, _ in self.first]}

"""The error of a row that no record can be made of, with the remedies that the reader of the row offers."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from stepjepa.base.errors import UserError


@dataclass(frozen=True)
class Remedy:
    """A way to correct a row that depends on the settings of its reader.

    Attributes:
        setting: name of the setting, such as ``bad_records``.
        with_setting: the remedy where the reader has the setting; it names the setting in backticks.
        without: the remedy where the reader does not have it; None if there is none then.
    """

    setting: str
    with_setting: str
    without: str | None = None


SKIP = Remedy("bad_records", "leave such rows out with `bad_records skip`", "leave such rows out")


class RowError(UserError):
    """A row that no record can be made of.

    Its message has the remedies of a reader without settings. Whoever reads rows for a user with settings raises
    :meth:`for_reader` instead.

    Args:
        problem: what is wrong with the row.
        remedies: what the user can do, each of them enough: texts, and remedies that depend on the reader.
        settings: names of the settings of the reader.
        path: the file at fault, if any.
        line: the line in that file, counted from 1, if any.
    """

    def __init__(
        self,
        problem: str,
        *remedies: str | Remedy,
        settings: Collection[str] = (),
        path: object = None,
        line: int | None = None,
    ) -> None:
        texts = (
            (remedy.with_setting if remedy.setting in settings else remedy.without)
            if isinstance(remedy, Remedy)
            else remedy
            for remedy in remedies
        )
        super().__init__(f"{problem}; {', or '.join(filter(None, texts))}", path=path, line=line)
        self.problem, self.remedies, self.settings, self.path = problem, remedies, settings, path

    @property
    def without_remedies(self) -> str:
        """The message up to the remedies."""
        return str(UserError(self.problem, path=self.path, line=self.line))

    def at(self, path: object, line: int | None = None) -> Self:
        """Return this error with its place in front of the message; arguments as for the class."""
        return type(self)(self.problem, *self.remedies, settings=self.settings, path=path, line=line)

    def for_reader(self, settings: Collection[str]) -> Self:
        """Return this error with the remedies of a reader that has these settings."""
        return type(self)(self.problem, *self.remedies, settings=settings, path=self.path, line=self.line)

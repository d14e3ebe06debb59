"""Tables of docs/design.md that are made by a program, each between two marks."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "design.md"


def _parts(mark: str) -> tuple[str, str, str]:
    """The page before a table, the table, and the page after it; the marks belong to the outer parts."""
    begin, end = f"<!-- {mark}: begin -->\n", f"<!-- {mark}: end -->"
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    text, after = rest.split(end)
    return before + begin, text, end + after


def read(mark: str) -> str:
    """The table with this mark."""
    return _parts(mark)[1].removesuffix("\n")


def write(mark: str, text: str) -> None:
    """Replace the table with this mark."""
    before, _, after = _parts(mark)
    PAGE.write_text(f"{before}{text}\n{after}", encoding="utf-8")

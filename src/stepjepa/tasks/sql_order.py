"""Find the ``ORDER BY`` of a query, and change the order of rows that tie in it."""

import re

QUOTES_AND_COMMENTS = r"""'[^']*'|"[^"]*"|--[^\n]*|/\*(?s:.*?)\*/"""
"""Quoted text and comments: keywords, semicolons and brackets inside of them do not count."""

_NAMES = r"`[^`]*`|\[[^\]]*\]"  # of tables and columns, quoted in the other ways that SQLite reads
_BLANK = r"(?>\s|--[^\n]*|/\*(?s:.*?)\*/)+"
_PART = re.compile(rf"{QUOTES_AND_COMMENTS}|{_NAMES}|[()]|\border{_BLANK}by\b|\blimit\b", re.IGNORECASE)


def orders_rows(sql: str) -> bool:
    """Return whether a query has an ``ORDER BY`` at its outermost level, not only inside brackets."""
    return _order_clause(sql) is not None


def with_last_term(sql: str, term: str) -> list[str]:
    """Append a term to the ``ORDER BY`` of a query; return an empty list for a query without one.

    Returns two forms. The second is for queries joined by ``UNION`` and the like, which can be ordered only by the
    columns of their result.
    """
    sql = sql.rstrip("; \t\r\n")
    clause = _order_clause(sql)
    if clause is None:
        return []
    start, end = clause
    # On a new line: the line before may end in a comment.
    ordered = f"{sql[start:end]}\n, {term} {sql[end:]}"
    return [sql[:start] + ordered, f"SELECT * FROM ({sql[:start]}\n) {ordered}"]


def _order_clause(sql: str) -> tuple[int, int] | None:
    """Return start and end of the outermost ``ORDER BY`` of a query; None if there is none."""
    depth, start, end = 0, None, len(sql)
    for match in _PART.finditer(sql):
        part = match[0]
        depth += (part == "(") - (part == ")")
        if depth == 0 and part[0] in "oO":
            start, end = match.start(), len(sql)
        elif depth == 0 and part[0] in "lL" and start is not None and end == len(sql):
            end = match.start()
    return None if start is None else (start, end)

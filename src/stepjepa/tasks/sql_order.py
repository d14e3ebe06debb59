"""Whether the rows of a query have an order, and the same query with rows of equal rank in another order."""

import re

QUOTES_AND_COMMENTS = r"""'[^']*'|"[^"]*"|--[^\n]*|/\*(?s:.*?)\*/"""
"""What looks like a keyword, an end or a bracket inside of these is none."""

_PART = re.compile(rf"{QUOTES_AND_COMMENTS}|[()]|\border\s+by\b|\blimit\b", re.IGNORECASE)


def orders_rows(sql: str) -> bool:
    """Whether the rows of a query have an order: an ``ORDER BY`` of its own, not of a part in brackets."""
    return _order_clause(sql) is not None


def with_last_term(sql: str, term: str) -> list[str]:
    """An ordered query with one more term behind those of its ``ORDER BY``; none for a query without order.

    In two forms, the second for a query of several joined by ``UNION`` and the like, which can be ordered by the
    columns of their result alone.
    """
    sql = sql.rstrip("; \t\r\n")
    clause = _order_clause(sql)
    if clause is None:
        return []
    start, end = clause
    # On a line of its own: in front of it there may be a comment.
    ordered = f"{sql[start:end]}\n, {term} {sql[end:]}"
    return [sql[:start] + ordered, f"SELECT * FROM ({sql[:start]}\n) {ordered}"]


def _order_clause(sql: str) -> tuple[int, int] | None:
    """Where the ``ORDER BY`` of a query itself begins and ends."""
    depth, start, end = 0, None, len(sql)
    for match in _PART.finditer(sql):
        part = match[0]
        depth += (part == "(") - (part == ")")
        if depth == 0 and part[0] in "oO":
            start, end = match.start(), len(sql)
        elif depth == 0 and part[0] in "lL" and start is not None and end == len(sql):
            end = match.start()
    return None if start is None else (start, end)

"""What the text of an SQLite query says: is it the same query, does it order its rows, how hard is it?

Text that can't be parsed, or is longer or deeper than any person's query, has no normal form and no hardness, so
nothing here takes long for any text. Imported where it is used, since the parser loads slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlglot import Dialect, ErrorLevel, exp
from sqlglot.errors import SqlglotError

LEVELS = ("easy", "medium", "hard", "extra")
"""How hard queries are, see :func:`hardness`."""

_LONGEST_QUERY = 10_000
# The parser tries both meanings of a JOIN without its condition, and of some words before a parenthesis, so that each
# of them doubles the time. The queries of Spider go 3 deep, and each JOIN has its condition.
_MOST_OPEN, _MOST_OPEN_JOINS = 10, 8

_QUERY = exp.Select | exp.SetOperation
_LIKE = exp.Like | exp.Escape
_Value = TypeVar("_Value")


def normal_form(sql: str) -> str | None:
    """One text for queries that differ only in writing; None for what is no query.

    Ignored are white space, comments and a semicolon at the end; the case of keywords and names; quotes around names;
    double quotes around a value; table aliases, and the table in front of a column where there is only one; ``INNER``,
    ``OUTER``, ``ASC``, ``AS``, ``<>`` for ``!=``, a comma for a JOIN without condition. Values are kept as they are.
    """
    return _of_query(sql, _write)


def same_text(first: str, second: str) -> bool:
    """Whether two queries are the same but for writing, see :func:`normal_form`; what is no query only as it stands."""
    if first.strip() == second.strip():
        return True
    form = normal_form(first)
    return form is not None and form == normal_form(second)


def orders_rows(sql: str) -> bool | None:
    """Whether the rows of a query have an order: an ``ORDER BY`` of its own, not of a part. None for no query."""
    return _of_query(sql, lambda query: query.args.get("order") is not None)


def hardness(sql: str) -> str | None:
    """How hard a query is by the criteria of the Spider benchmark, one of :data:`LEVELS`; None for what is no query.

    Of the outermost query (the first of several that are combined) three things are counted. Components: WHERE, GROUP
    BY, ORDER BY, LIMIT, each JOIN, each OR, each LIKE. Nestings: each query inside a condition, and UNION, INTERSECT
    or EXCEPT. Others: more than one aggregation, selected column, condition in WHERE, column in GROUP BY. As in the
    published script, a negated condition (``NOT IN``, ``NOT LIKE``) and each AND or OR of HAVING count as an
    aggregation, while the aggregations inside HAVING don't.
    """
    return _of_query(sql, _hardness)


def _of_query(sql: str, function: Callable[[exp.Query], _Value]) -> _Value | None:
    """What a function says about a parsed query; None for text that is none."""
    if len(sql) > _LONGEST_QUERY:
        return None
    dialect = Dialect.get_or_raise("sqlite")
    try:
        tokens = dialect.tokenize(sql)
        # Other statements are parsed into commands, with a warning.
        if not tokens or tokens[0].text.upper() not in ("SELECT", "WITH"):
            return None
        opened = joins = 0
        for token in tokens:
            kind = token.token_type.name
            opened += (kind == "L_PAREN") - (kind == "R_PAREN")
            joins = max(0, joins + (kind == "JOIN") - (kind in ("ON", "USING")))
            if opened > _MOST_OPEN or joins > _MOST_OPEN_JOINS:
                return None
        parsed = dialect.parser().parse(tokens, sql)
        query, *rest = [part for part in parsed if part is not None and not isinstance(part, exp.Semicolon)]
        if rest or not isinstance(query, exp.Query):
            return None
        for column in list(query.find_all(exp.Column)):
            if _is_quoted_value(column, sql):
                column.replace(exp.Literal.string(column.name))
        return function(query)
    # Neither the parser nor what walks its trees knows a bound of depth but that of Python.
    except (SqlglotError, RecursionError):
        return None


def _is_quoted_value(column: exp.Column, sql: str) -> bool:
    """Whether a column is a value: SQLite reads ``"Paris"`` as text where no column has that name.

    The schema is not known here, but nobody quotes names of columns on the right of a comparison.
    """
    start = column.this.meta.get("start")
    return (
        start is not None
        and sql[start] == '"'
        and not column.table
        and isinstance(column.parent, exp.Predicate)
        and column.arg_key in ("expression", "expressions", "low", "high")
    )


def _write(query: exp.Query) -> str:
    _rename_tables(query)
    for node in query.walk():
        if isinstance(node, exp.Identifier):
            node.set("this", node.this.lower())
            node.set("quoted", True)
        elif isinstance(node, exp.Ordered) and not node.args.get("desc"):
            node.set("desc", None)
        elif isinstance(node, exp.Join):
            # Some versions give a JOIN without condition one that is always true.
            if node.args.get("on") == exp.true():
                node.set("on", None)
            bare = not any(node.args.get(name) for name in ("side", "method", "on", "using"))
            node.set("kind", "CROSS" if bare else None)
    return query.sql("sqlite", comments=False, unsupported_level=ErrorLevel.IGNORE)


def _rename_tables(query: exp.Query) -> None:
    """Call the tables t1, t2, ... in the order in which they are named, and leave the name out where there is one."""
    names: dict[int, dict[str, str]] = {}
    count = 0
    for select in query.find_all(exp.Select, bfs=False):
        names[id(select)] = {}
        for source in _sources(select):
            count += 1
            names[id(select)][source.alias_or_name.lower()] = f"t{count}"
            source.set("alias", exp.TableAlias(this=exp.to_identifier(f"t{count}")))
    for column in query.find_all(exp.Column):
        # A name that is none of the innermost query's is that of a query around it.
        inner = scope = column.parent_select
        name = column.table.lower()
        while scope is not None and name not in names[id(scope)]:
            scope = scope.parent_select
        if name and scope is not None:
            alone = scope is inner and len(_sources(scope)) == 1
            column.set("table", None if alone else exp.to_identifier(names[id(scope)][name]))


def _sources(select: exp.Select) -> list[exp.Expression]:
    """The tables and queries that a query reads."""
    # Found by its class: the name of the argument changed between versions.
    first = [clause.this for clause in select.args.values() if isinstance(clause, exp.From)]
    return first + [join.this for join in select.args.get("joins") or ()]


def _hardness(query: exp.Query) -> str | None:
    select: Any = query
    while isinstance(select, exp.SetOperation | exp.Subquery):
        select = select.this
    if not isinstance(select, exp.Select):
        return None
    clauses = {name: select.args.get(name) for name in ("where", "group", "order", "limit")}
    group, order = clauses["group"], clauses["order"]
    joins = select.args.get("joins") or []
    where, having = _conditions(clauses["where"]), _conditions(select.args.get("having"))
    all_conditions = [*where, *having, *(each for join in joins for each in _conditions(join.args.get("on")))]
    components = (
        sum(clause is not None for clause in clauses.values())
        + len(joins)
        + sum(isinstance(each, exp.Or) for each in all_conditions)
        + sum(isinstance(each.this if isinstance(each, exp.Not) else each, _LIKE) for each in all_conditions)
    )
    nestings = isinstance(query, exp.SetOperation) + sum(
        _count(each, _QUERY) for each in all_conditions if not isinstance(each, exp.Connector)
    )
    aggregations = (
        sum(_count(each, exp.AggFunc) for each in [*select.expressions, *(order.expressions if order else ())])
        + sum(isinstance(each, exp.Not) for each in where + having)
        + len(having) // 2
    )
    columns = len(select.expressions), len(group.expressions) if group else 0
    others = sum(count > 1 for count in (aggregations, *columns, (len(where) + 1) // 2))
    # The published table, in which two components with two others are extra, with three only hard.
    if nestings:
        return "hard" if nestings == 1 and components <= 1 and others == 0 else "extra"
    if components <= 1 and others == 0:
        return "easy"
    if (components <= 1 and others <= 2) or (components <= 2 and others <= 1):
        return "medium"
    return "hard" if (components <= 2 and others > 2) or (components == 3 and others <= 2) else "extra"


def _conditions(clause: exp.Expression | None) -> list[exp.Expression]:
    """Conditions, and the AND and OR that join them, of which there is one less."""
    if clause is None:
        return []
    joining = exp.Where | exp.Having | exp.Paren | exp.Connector
    nodes = clause.walk(prune=lambda node: not isinstance(node, joining))
    return [node for node in nodes if not isinstance(node, exp.Where | exp.Having | exp.Paren)]


def _count(expression: exp.Expression, kind: Any) -> int:
    """How many nodes of a kind there are, those inside a query not counted."""
    nodes = expression.walk(prune=lambda node: isinstance(node, _QUERY))
    return sum(isinstance(node, kind) for node in nodes)

"""An inspection for people: tokens, tables and attention on a terminal of any width and number of colours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepjepa.inspection.attention import print_attention
from stepjepa.inspection.palette import EDGE, MEANING, READ, Look, name_of, visible_text
from stepjepa.inspection.record import Inspection, PartInfo, SegmentInfo

NARROW = 72
"""Columns below which tables say less."""
NOTHING = "–"


def show(inspection: Inspection, console: Console, *, max_tokens: int = 96) -> None:
    """Print everything: tokens, segments, the table of tokens, attention, counts.

    Args:
        inspection: from ``inspection.inspect_record``.
        console: where to.
        max_tokens: longest row whose attention matrix is drawn.
    """
    look = Look(console, inspection.segments)
    narrow = console.width < NARROW
    _print_tokens(inspection, console, look)
    # Wide tables end with a line of nothing.
    gap = [Text()] if narrow else []
    console.print(_segments_table(inspection, look, narrow), *gap, sep="\n")
    console.print(_tokens_table(inspection, look, narrow), *gap, sep="\n")
    print_attention(inspection, console, look, max_tokens=max_tokens)
    console.print(_record_table(inspection, narrow), *gap, sep="\n")
    console.print(_file_table(inspection, narrow))
    for note in inspection.file.notes:
        console.print(Text(f"  note: {note}", "bold"))


def title(inspection: Inspection) -> str:
    """File, record and objective on one line."""
    config = inspection.config
    views = "" if not config.uses_views else f" · {config.layout} · K = {config.predictors}"
    return f"{Path(inspection.path).name} · index {inspection.index} (line {inspection.line}) · {config.mode}{views}"


def _rows(start: int, end: int) -> str:
    return f"{start}" if end == start + 1 else f"{start}–{end - 1}"


def _at(start: int, end: int) -> str:
    return f"row{'' if end == start + 1 else 's'} {_rows(start, end)}"


def _table(heading: str, *columns: str, right: Sequence[str] = (), narrow: bool = False) -> Table:
    table = Table(title=heading, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    if narrow:
        table.box, table.padding = None, (0, 1, 0, 0)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _print_tokens(inspection: Inspection, console: Console, look: Look) -> None:
    """The row as running text, a line break after every line end in the text and a new line for every segment."""
    console.print(Text(title(inspection), "bold"))
    told = "every shade a token" if look.shaded else f"{EDGE} between tokens"
    colours = "every colour is a segment, " if look.coloured else ""
    console.print(Text(f"tokens (· blank, ⏎ line end; {colours}{told}; {READ} read here)\n"))
    gutter = max(len(name_of(segment)) for segment in inspection.segments) + 2
    for segment in inspection.segments:
        line, used = Text(f"{name_of(segment):<{gutter}}"), gutter
        for offset, token in enumerate(inspection.tokens[segment.start : segment.end]):
            mark = READ if token.readouts else ""
            edge = "" if look.shaded or offset + 1 == segment.tokens else EDGE
            shown = f"{visible_text(token.text)}{mark}{edge}"
            if used > gutter and used + cell_len(shown) > console.width:
                console.print(line, no_wrap=True, crop=False)
                line, used = Text(" " * gutter), gutter
            line.append(visible_text(token.text), look.token(segment, offset, read=bool(token.readouts)))
            line.append(f"{mark}{edge}", look.token(segment, offset))
            used += cell_len(shown)
            if token.text.endswith("\n"):
                console.print(line, no_wrap=True, crop=False)
                line, used = Text(" " * gutter), gutter
        if used > gutter:
            console.print(line, no_wrap=True, crop=False)
    console.print()


def _sees(segment: SegmentInfo) -> str:
    if segment.parent is None:
        return "only itself"
    if segment.isolated:
        return f"only itself, though it stands in {segment.parent}"
    return f"{segment.attachment} tokens of {segment.parent}, and itself"


def _segments_table(inspection: Inspection, look: Look, narrow: bool) -> Table:
    columns = ("#", "kind", "rows", "sees") if narrow else _OF_SEGMENTS
    table = _table("segments", *columns, right=("#", "tokens", "first position"), narrow=narrow)
    for segment in inspection.segments:
        row: dict[str, str | Text] = {
            "#": Text(f" {segment.index} ", look.token(segment)),
            "kind": MEANING[segment.kind],
            "hangs on": "nothing (root)"
            if segment.parent is None
            else f"{segment.parent}, after {segment.attachment} tokens",
            "sees": "the text so far" if segment.parent is None and segment.kind == "main" else _sees(segment),
            "rows": _rows(segment.start, segment.end),
            "tokens": str(segment.tokens),
            "first position": str(segment.first_position),
        }
        table.add_row(*(row[column] for column in columns))
    return table


_OF_SEGMENTS = ("#", "kind", "hangs on", "sees", "rows", "tokens", "first position")
_OF_TOKENS = ("row", "token", "id", "segment", "position", "must predict", "readout")


def _tokens_table(inspection: Inspection, look: Look, narrow: bool) -> Table:
    columns = ("row", "#", "token", "at", "predicts") if narrow else _OF_TOKENS
    table = _table("tokens", *columns, right=("row", "id", "position", "at"), narrow=narrow)
    for token in inspection.tokens:
        segment = inspection.segments[token.segment]
        shown = Text(visible_text(token.text), look.token(segment, read=bool(token.readouts)))
        label = Text(NOTHING if token.label_text is None else visible_text(token.label_text))
        read = ", ".join(token.readouts)
        if narrow:
            marked = Text.assemble(shown, f" {READ} {read}" if read else "")
            table.add_row(str(token.row), str(token.segment), marked, str(token.position), label)
        else:
            mark = f"{READ} {read}" if read else ""
            place = (str(token.id), name_of(segment), str(token.position))
            table.add_row(str(token.row), shown, *place, label, mark)
    return table


def _part(part: PartInfo) -> str:
    if part.start is None or part.end is None:
        return "cut off by truncation" if part.cut else "left out by the template"
    count = part.end - part.start
    return f"{_at(part.start, part.end)}, {count} token{'' if count == 1 else 's'}" + (
        ", end cut off" if part.cut else ""
    )


def _record_table(inspection: Inspection, narrow: bool) -> Table:
    record, config = inspection.record, inspection.config
    table = _table("this record", "what", "found", narrow=narrow)
    for part in (*record.messages, *record.steps):
        table.add_row(part.name, _part(part))
    if not record.steps:
        table.add_row("steps", "none")
    pairs = [f"{pair.pair}: row {pair.source} predicts row {pair.target}" for pair in inspection.pairs]
    table.add_row("pairs", "; ".join(pairs) or ("none" if config.uses_views else "none (regular has no views)"))
    if record.pairs_cut:
        table.add_row("pairs cut by truncation", str(record.pairs_cut))
    over = f"yes: {record.full_tokens} tokens, max_length {config.max_length}; shown truncated"
    table.add_row(
        "over length", over if record.over_length else f"no: {record.full_tokens} of {config.max_length} tokens"
    )
    kinds = Counter({"main": record.main_tokens})
    for segment in inspection.segments:
        if segment.kind == "source" or (segment.kind == "target" and segment.parent is None):
            kinds[segment.kind] += segment.tokens
    sums = " + ".join(f"{count} {kind}" for kind, count in kinds.items())
    table.add_row("row", f"{record.tokens} tokens = {sums}; {record.tokens / record.main_tokens:.2f} of regular")
    return table


def _file_table(inspection: Inspection, narrow: bool) -> Table:
    file = inspection.file
    table = _table("whole file and chat template", "what", "found", narrow=narrow)
    table.add_row("records in the file", f"{file.lines:,}")
    for name, count in file.counts.items():
        table.add_row("records trained on" if name == "records" else name, f"{count:,}")
    table.add_row("tokens", f"{file.tokens:,}")
    table.add_row("tokens over regular", f"{file.over_regular:.2f} ({file.main_tokens:,} tokens in regular)")
    for name, value in inspection.template.items():
        table.add_row(name, Text(value))
    return table

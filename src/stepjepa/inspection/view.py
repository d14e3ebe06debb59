"""An inspection on a terminal of any width: sequences, the tree of their tokens, and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepjepa.inspection.record import BranchInfo, Inspection, PartInfo
from stepjepa.terminal import PALETTE


class Colours(NamedTuple):
    """The colours of a kind of tokens."""

    meaning: str  # the kind in words
    strong: str  # for pictures
    shades: tuple[str, str]  # terminal backgrounds of neighbouring tokens; distinct also with sixteen colours


COLOURS = {
    "shared": Colours("shared by several sequences", PALETTE[3], ("magenta", "bright_magenta")),
    "main": Colours("main text", PALETTE[0], ("cyan", "bright_cyan")),
    "source": Colours("source view", PALETTE[4], ("yellow", "bright_yellow")),
    "target": Colours("target view", PALETTE[2], ("green", "bright_green")),
}
READ = "◂"
"""Behind a token whose state is read."""
EDGE = "│"
"""Between tokens where there are no colours."""

_VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})

NAMED = 3
"""Most sequences of a branch that are named one by one."""


def visible_text(text: str) -> str:
    """A text with white space made visible and unprintable characters escaped."""
    shown = text.translate(_VISIBLE)
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" for c in shown)


def token_style(kind: str, number: int = 0, *, read: bool = False) -> str:
    """The terminal style of a token of a kind, the ``number``-th of its neighbours."""
    style = f"black on {COLOURS[kind].shades[number % 2]}"
    return f"{style} bold underline" if read else style


def show(inspection: Inspection, console: Console) -> None:
    """Print the sequences, the tree, the table of tokens and the counts."""
    console.print(Text(title(inspection), "bold"))
    console.print(_sequences_table(inspection))
    _print_tree(inspection, console)
    console.print(_tokens_table(inspection))
    console.print(_records_table(inspection))
    console.print(_file_table(inspection))
    for note in inspection.file.notes:
        console.print(Text(f"  note: {note}", "bold"))


def title(inspection: Inspection) -> str:
    """File, records and objective on one line."""
    config, first, count = inspection.config, inspection.index, len(inspection.records)
    views = "" if not config.uses_views else f" · {config.layout} · K = {config.predictors}"
    lines = ", ".join(str(record.line) for record in inspection.records)
    where = f"index {ranged(first, first + count)} (line{'s' if count > 1 else ''} {lines})"
    return f"{Path(inspection.path).name} · {where} · {config.mode}{views}"


def ranged(start: int, end: int) -> str:
    """``start`` up to, not including, ``end``."""
    return f"{start}" if end == start + 1 else f"{start}–{end - 1}"


def passing(inspection: Inspection, branch: BranchInfo) -> str:
    """The sequences that pass through a branch."""
    names = [inspection.sequences[number].name for number in branch.sequences]
    return ", ".join(names) if len(names) <= NAMED else f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"


def _table(heading: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(title=heading, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _sequences_table(inspection: Inspection) -> Table:
    table = _table("sequences", "sequence", "tokens", "shared", "stand at", right=("tokens", "shared"))
    for each in inspection.sequences:
        places = ", ".join(ranged(*place) for place in each.places)
        table.add_row(Text(f" {each.name} ", token_style(each.kind)), str(each.tokens), str(each.shared), places)
    return table


def _print_tree(inspection: Inspection, console: Console) -> None:
    """The tokens as running text, a new line after every line end and for every branch, which is indented by depth."""
    coloured = console.color_system is not None and not console.no_color
    told = "every shade a token" if coloured else f"{EDGE} between tokens"
    console.print(Text("tree: what several sequences begin with stands once", "bold"))
    console.print(Text(f"(· blank, ⏎ line end; {told}; {READ} read here)\n"))
    rows = max(branch.row for branch in inspection.branches)
    depths: list[int] = []
    for branch in inspection.branches:
        depths.append(0 if branch.parent is None else depths[branch.parent] + 1)
        # Deep trees must leave room for text.
        indent = min(2 * depths[-1], console.width // 4)
        row = f"row {branch.row}, " if rows else ""
        heading = f"{row}{ranged(branch.start, branch.end)} {branch.kind}: {passing(inspection, branch)}"
        lines = [Text(f"{heading}{' (sees only itself)' if branch.isolated else ''}", "italic"), Text()]
        for number, token in enumerate(inspection.tokens[branch.start : branch.end]):
            mark = READ if token.readouts else ""
            edge = "" if coloured or token.place + 1 == branch.end else EDGE
            lines[-1].append(visible_text(token.text), token_style(branch.kind, number, read=bool(mark)))
            lines[-1].append(f"{mark}{edge}", token_style(branch.kind, number))
            if token.text.endswith("\n"):
                lines.append(Text())
        for line in filter(None, lines):
            console.print(Padding.indent(line, indent), overflow="fold")
    console.print()


def _tokens_table(inspection: Inspection) -> Table:
    columns = ("place", "token", "id", "position", "must predict", "sees from", "seen before", "read here")
    table = _table("tokens", *columns, right=("place", "id", "position", "sees from", "seen before"))
    for token in inspection.tokens:
        kind = inspection.branches[token.branch].kind
        labels = Counter(map(visible_text, token.label_texts))
        table.add_row(
            str(token.place),
            Text(visible_text(token.text), token_style(kind, read=bool(token.readouts))),
            str(token.id),
            str(token.position),
            Text(", ".join(each if n == 1 else f"{each} ×{n}" for each, n in labels.items()) or "–"),
            str(token.start),
            str(token.end),
            f"{READ} {', '.join(token.readouts)}" if token.readouts else "",
        )
    return table


def _part(part: PartInfo) -> str:
    if part.start is None or part.end is None:
        return "cut off by truncation" if part.cut else "left out by the template"
    count = part.end - part.start
    many = "s" if count > 1 else ""
    cut = ", end cut off" if part.cut else ""
    return f"position{many} {ranged(part.start, part.end)}, {count} token{many}{cut}"


def _records_table(inspection: Inspection) -> Table:
    config = inspection.config
    table = _table("these records" if len(inspection.records) > 1 else "this record", "what", "found")
    for record in inspection.records:
        if len(inspection.records) > 1:
            table.add_row(Text(f"line {record.line}", "bold"), "")
        for part in (*record.messages, *record.steps):
            table.add_row(part.name, _part(part))
        if not record.steps:
            table.add_row("steps", "none")
        table.add_row("pairs of views", str(record.pairs))
        if record.pairs_cut:
            table.add_row("pairs cut by truncation", str(record.pairs_cut))
        over = f"yes: {record.full_tokens} tokens, max_length {config.max_length}; shown truncated"
        fits = f"no: {record.full_tokens} of {config.max_length} tokens"
        table.add_row("over length", over if record.full_tokens > config.max_length else fits)
    main, packed = sum(record.main_tokens for record in inspection.records), len(inspection.tokens)
    apart = sum(each.tokens for each in inspection.sequences)
    table.add_row("tokens", f"{packed}, {apart} if nothing were shared; {packed / main:.2f} of regular without sharing")
    return table


def _file_table(inspection: Inspection) -> Table:
    file = inspection.file
    table = _table("whole file and chat template", "what", "found")
    table.add_row("records in the file", f"{file.lines:,}")
    for name, count in file.counts.items():
        table.add_row("records trained on" if name == "records" else name, f"{count:,}")
    ratio = file.tokens["all"] / max(file.tokens["main"], 1)
    table.add_row("tokens", f"{file.tokens['all']:,}, nothing shared between records")
    table.add_row("tokens over regular", f"{ratio:.2f} ({file.tokens['main']:,} tokens in regular)")
    for name, value in inspection.template.items():
        table.add_row(name, Text(value))
    return table

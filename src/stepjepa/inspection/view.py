"""An inspection for people: tables and pictures on the terminal, the attention matrix as a PNG."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepjepa.drawing import drawable
from stepjepa.files import atomic_write
from stepjepa.inspection.record import Inspection, PartInfo, SegmentInfo, visible_matrix

# For each kind two hues, taken in turn, so that neighbours of one kind can be told apart.
FONT = "DejaVu Sans Mono"
STRONG = {"main": ("#4c78a8", "#7b6fb8"), "source": ("#f58518", "#d64f5f"), "target": ("#54a24b", "#2f9e9e")}
# Two shades of each hue, taken in turn by the tokens of a segment.
SHADES = {
    "main": (("#9ecae1", "#c9dff0"), ("#c2bbe6", "#dedaf3")),
    "source": (("#fdae6b", "#fdd3a8"), ("#f4a3ab", "#f9ccd1")),
    "target": (("#a1d99b", "#cbebc6"), ("#93d5d5", "#c4e9e9")),
}
MEANING = {"main": "main text", "source": "source view", "target": "target view"}
NOTHING = "–"
LABELLED = 80
"""Longest row whose tokens are written out beside the axes of the PNG."""
LISTED = 12
"""Most segments that the PNG's legend names one by one."""

_VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})
_HALVES = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}


def visible_text(text: str) -> str:
    """A text with white space made visible and everything else that can't be printed escaped."""
    shown = text.translate(_VISIBLE)
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" for c in shown)


def show(inspection: Inspection, console: Console, *, max_tokens: int = 96) -> None:
    """Print everything: tokens, segments, the table of tokens, attention, counts.

    Args:
        inspection: from ``inspection.inspect_record``.
        console: where to.
        max_tokens: longest row whose attention matrix is drawn.
    """
    hues = _hues(inspection.segments)
    _print_tokens(inspection, console, hues)
    console.print(_segments_table(inspection, hues))
    console.print(_tokens_table(inspection, hues))
    _print_attention(inspection, console, hues, max_tokens)
    console.print(_record_table(inspection))
    console.print(_file_table(inspection))
    for note in inspection.file.notes:
        console.print(Text(f"  note: {note}", "bold"))


def title(inspection: Inspection) -> str:
    """File, record and objective on one line."""
    config = inspection.config
    views = "" if not config.uses_views else f" · {config.layout} · K = {config.predictors}"
    return f"{Path(inspection.path).name} · index {inspection.index} (line {inspection.line}) · {config.mode}{views}"


def _hues(segments: Iterable[SegmentInfo]) -> list[int]:
    """Which of its kind's two hues each segment has."""
    met: Counter[str] = Counter()
    result = []
    for segment in segments:
        result.append(met[segment.kind] % 2)
        met[segment.kind] += 1
    return result


def _name(segment: SegmentInfo) -> str:
    return f"{segment.index} {segment.kind}"


def _rows(start: int, end: int) -> str:
    return f"{start}" if end == start + 1 else f"{start}–{end - 1}"


def _at(start: int, end: int) -> str:
    return f"row{'' if end == start + 1 else 's'} {_rows(start, end)}"


def _table(heading: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(title=heading, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _print_tokens(inspection: Inspection, console: Console, hues: list[int]) -> None:
    """The row as running text, a line break after every line end in the text and a new line for every segment."""
    console.print(Text(title(inspection), "bold"))
    plain = console.color_system is None
    legend = "every colour is a segment, every shade a token; readouts underlined"
    console.print(Text(f"tokens (· blank, ⏎ line end; {'│ between tokens' if plain else legend})\n"))
    gutter = max(len(_name(segment)) for segment in inspection.segments) + 2
    for segment in inspection.segments:
        line, used = Text(f"{_name(segment):<{gutter}}"), gutter
        for offset, token in enumerate(inspection.tokens[segment.start : segment.end]):
            shown = visible_text(token.text) + ("│" if plain and offset + 1 < segment.tokens else "")
            if used > gutter and used + cell_len(shown) > console.width:
                console.print(line, no_wrap=True, crop=False)
                line, used = Text(" " * gutter), gutter
            style = f"#000000 on {SHADES[segment.kind][hues[segment.index]][offset % 2]}"
            line.append(shown, f"{style} bold underline" if token.readouts else style)
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


def _segments_table(inspection: Inspection, hues: list[int]) -> Table:
    table = _table(
        "segments",
        *("#", "kind", "hangs on", "sees", "rows", "tokens", "first position"),
        right=("#", "tokens", "first position"),
    )
    for segment in inspection.segments:
        table.add_row(
            Text(f" {segment.index} ", f"#000000 on {SHADES[segment.kind][hues[segment.index]][0]}"),
            MEANING[segment.kind],
            "nothing (root)" if segment.parent is None else f"{segment.parent}, after {segment.attachment} tokens",
            "the text so far" if segment.parent is None and segment.kind == "main" else _sees(segment),
            _rows(segment.start, segment.end),
            str(segment.tokens),
            str(segment.first_position),
        )
    return table


def _tokens_table(inspection: Inspection, hues: list[int]) -> Table:
    table = _table(
        "tokens",
        *("row", "token", "id", "segment", "position", "must predict", "readout"),
        right=("row", "id", "position"),
    )
    for token in inspection.tokens:
        segment = inspection.segments[token.segment]
        table.add_row(
            str(token.row),
            Text(visible_text(token.text), f"#000000 on {SHADES[segment.kind][hues[segment.index]][0]}"),
            str(token.id),
            _name(segment),
            str(token.position),
            Text(NOTHING if token.label_text is None else visible_text(token.label_text)),
            ", ".join(token.readouts),
        )
    return table


def _print_attention(inspection: Inspection, console: Console, hues: list[int], max_tokens: int) -> None:
    """Two rows of the matrix in each line, by half blocks; a column's colour is the key's segment."""
    size = len(inspection.tokens)
    console.print(Text("attention (down: who looks, across: what it sees, coloured by the segment seen)", "bold"))
    gutter = max(len(_name(segment)) for segment in inspection.segments) + 6
    marks = {token.row: f"{token.row} {', '.join(token.readouts)}" for token in inspection.tokens if token.readouts}
    needed = gutter + size + max((len(mark) + 3 for mark in marks.values()), default=0)
    reason = ""
    if size > max_tokens:
        reason = f"{size} tokens are more than --max_tokens {max_tokens}; raise it"
    elif needed > console.width:
        reason = f"it needs {needed} columns and there are {console.width}; widen the terminal"
    if reason:
        console.print(Text(f"  not drawn: {reason}, or draw a picture with --png FILE\n"))
        return
    colours = [STRONG[s.kind][hues[s.index]] for s in inspection.segments for _ in range(s.tokens)]
    ticks = "".join(f"{row:<10}" for row in range(0, size, 10))[: max(size, len(str(size)))]
    console.print(Text(" " * gutter + ticks.rstrip()))
    strip = Text(" " * gutter)
    for segment in inspection.segments:
        name = _name(segment) if len(_name(segment)) < segment.tokens else str(segment.index)[: segment.tokens]
        strip.append(name.ljust(segment.tokens, "─"), STRONG[segment.kind][hues[segment.index]])
    console.print(strip)
    visible = np.pad(visible_matrix(inspection), ((0, size % 2), (0, 0)))
    for top in range(0, size, 2):
        both = [row for row in (top, top + 1) if row < size]
        begun = [_name(segment) for segment in inspection.segments if segment.start in both]
        line = Text(f"{top:>4} {begun[-1] if begun else '':<{gutter - 5}}")
        for key in range(size):
            line.append(_HALVES[bool(visible[top, key]), bool(visible[top + 1, key])], colours[key])
        read = [marks[row] for row in both if row in marks]
        if read:
            line.append(f" ◂ {', '.join(read)}")
        console.print(line, no_wrap=True)
    console.print()


def _part(part: PartInfo) -> str:
    if part.start is None or part.end is None:
        return "cut off by truncation" if part.cut else "left out by the template"
    count = part.end - part.start
    return f"{_at(part.start, part.end)}, {count} token{'' if count == 1 else 's'}" + (
        ", end cut off" if part.cut else ""
    )


def _record_table(inspection: Inspection) -> Table:
    record, config = inspection.record, inspection.config
    table = _table("this record", "what", "found")
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


def _file_table(inspection: Inspection) -> Table:
    file = inspection.file
    table = _table("whole file and chat template", "what", "found")
    table.add_row("records in the file", f"{file.lines:,}")
    for name, count in file.counts.items():
        table.add_row("records trained on" if name == "records" else name, f"{count:,}")
    table.add_row("tokens", f"{file.tokens:,}")
    table.add_row("tokens over regular", f"{file.over_regular:.2f} ({file.main_tokens:,} tokens in regular)")
    for name, value in inspection.template.items():
        table.add_row(name, Text(value))
    return table


def write_png(inspection: Inspection, path: str | os.PathLike[str]) -> None:
    """Draw the attention matrix: a key's column has the colour of its segment's kind, readouts are marked.

    Args:
        inspection: from ``inspection.inspect_record``.
        path: the file to write, replaced if it is there.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    size = len(inspection.tokens)
    kinds = [segment.kind for segment in inspection.segments for _ in range(segment.tokens)]
    keys = np.array([to_rgb(STRONG[kind][0]) for kind in kinds])
    picture = np.where(visible_matrix(inspection)[:, :, None], keys[None], 1.0)  # [T, T, 3]
    side = max(5.0, size * 0.165) if size <= LABELLED else 8.5
    figure = Figure(figsize=(side + 3.6, side + 1.6), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(picture, interpolation="nearest")
    for segment in inspection.segments[1:]:
        axes.axhline(segment.start - 0.5, color="#555555", linewidth=0.7)
        axes.axvline(segment.start - 0.5, color="#555555", linewidth=0.7)
    for name, marker in (("source", "o"), ("target", "D")):
        rows = [getattr(pair, name) for pair in inspection.pairs]
        axes.scatter(
            rows, rows, s=26, marker=marker, facecolor="none", edgecolor="black", linewidth=1.2, zorder=3, clip_on=False
        )
        for pair, row in zip(inspection.pairs, rows, strict=True):
            note = axes.annotate(f"{name} {pair.pair}", (row, row), (8, 5), textcoords="offset points", fontsize=8)
            note.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8})
    _write_axes(axes, inspection)
    _write_legend(figure, inspection)
    figure.suptitle(title(inspection), fontsize=11, parse_math=False)
    with atomic_write(path, "wb") as stream:
        figure.savefig(stream, format="png", bbox_inches="tight", pad_inches=0.15)


def _write_axes(axes: Any, inspection: Inspection) -> None:
    size = len(inspection.tokens)
    axes.set_xlabel("key: the token that is seen")
    axes.set_ylabel("query: the token that looks")
    if size > LABELLED:
        return
    labels = [f"{drawable(visible_text(token.text)[:18], FONT)} {token.row}" for token in inspection.tokens]
    font = {"family": FONT, "fontsize": 6.5, "parse_math": False}
    axes.set_yticks(range(size), labels, **font)
    axes.set_xticks(range(size), labels, rotation=90, **font)
    axes.tick_params(length=2, pad=1)


def _write_legend(figure: Any, inspection: Inspection) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if len(inspection.segments) <= LISTED:
        names = {f"{_name(s)}, {_at(s.start, s.end)}": s.kind for s in inspection.segments}
    else:
        names = {MEANING[segment.kind]: segment.kind for segment in inspection.segments}
    entries: list[Any] = [Patch(facecolor=STRONG[kind][0], label=name) for name, kind in names.items()]
    entries.append(Patch(facecolor="white", edgecolor="#999999", label="not seen"))
    if len(inspection.segments) > 1:
        entries.append(Line2D([], [], color="#555555", linewidth=0.7, label="start of a segment"))
    if inspection.pairs:
        for marker, name in (("o", "source"), ("D", "target")):
            mark = Line2D([], [], marker=marker, markerfacecolor="none", markeredgecolor="black", linestyle="none")
            mark.set_label(f"{name} is read here")
            entries.append(mark)
    figure.legend(handles=entries, loc="outside right upper", fontsize=9, frameon=False)

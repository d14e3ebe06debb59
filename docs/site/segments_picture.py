"""Draws ``docs/assets/segments.svg``: the pairs of attention that a row under a mask computes, and those by segments.

The row and the calls are those of ``batch/pack.py`` and ``batch/segments.py`` for a few made-up sequences. ``make
pictures`` runs it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from stepjepa.base.terminal import PALETTE
from stepjepa.batch.costs import Costs
from stepjepa.batch.mask import Calls, Trees, dense
from stepjepa.batch.pack import Rows, pack_passes
from stepjepa.batch.segments import calls
from stepjepa.views.sequences import TokenSequence

FILE = Path(__file__).resolve().parents[1] / "assets" / "segments.svg"

# Two records behind one system prompt, the second with two answers, and an answer alone: tokens of a tree.
PROMPT, QUESTION = range(9), range(20, 25)
SEQUENCES = [
    [*PROMPT, *range(10, 18)],
    [*PROMPT, *QUESTION, *range(30, 36)],
    [*PROMPT, *QUESTION, *range(40, 45)],
    [*range(50, 57)],
]
COSTS = Costs(token=1.0, pair=1.0, call=40.0)
UNSEEN = "#DDDDDD"


def row_and_calls() -> tuple[Rows, Calls]:
    """The sequences as one row, and the calls of its attention."""
    sequences = [TokenSequence(np.array(ids, np.int32)) for ids in SEQUENCES]
    (rows,) = pack_passes(sequences, row_length=100, costs=COSTS, kernel="calls")
    assert rows.segments is not None
    return rows, calls(rows.segments, COSTS)


def trees_of(rows: Rows) -> Trees:
    """The prefix trees of packed rows."""
    start, end, positions = map(torch.from_numpy, (rows.start, rows.end, rows.positions))
    return Trees(start, end, positions)


def titles() -> tuple[str, str]:
    """Return the titles of the two panels."""
    rows, calls = row_and_calls()
    tokens = rows.ids.size
    visible = int(dense(trees_of(rows)).sum())
    return (
        f"under a mask: {tokens} x {tokens} = {tokens**2:,} pairs, of which {visible} are seen",
        f"by segments: {len(calls.shapes)} calls, {calls.scores} pairs",
    )


def draw(file: Path = FILE) -> None:
    """Draw both panels; a square is a query (down) against a key (across), in the colour of the query's segment."""
    from matplotlib import rc_context
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    rows, made = row_and_calls()
    assert rows.segments is not None
    tokens, number = rows.ids.size, len(rows.segments.first)
    segment = np.repeat(np.arange(number), rows.segments.queries)  # of each column
    trees = trees_of(rows)
    visible = dense(trees)[0, 0].numpy()
    colours = ListedColormap(["#FFFFFF", UNSEEN, *PALETTE[:number]])
    with rc_context({"svg.hashsalt": "segments", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 5), layout="constrained")
        left, right = figure.subplots(1, 2)
        panels = (left, np.where(visible, segment[:, None] + 2, 1)), (right, drawn_calls(made, segment, tokens))
        for (axes, cells), title in zip(panels, titles(), strict=True):
            axes.imshow(cells, cmap=colours, vmin=0, vmax=number + 1, interpolation="nearest")
            axes.set(title=title, xlabel="keys", ylabel="queries", xticks=[], yticks=[])
            axes.title.set_fontsize(10)
            axes.spines[:].set_visible(False)
        figure.savefig(file, format="svg", metadata={"Date": None})


def drawn_calls(made: Calls, segment: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """The calls below each other, each segment of a call as a block of queries against keys."""
    blocks = []
    for call in made.split():
        for row in range(call.shape.segments):
            queries, keys = int(call.query_count[row]), int(call.key_count[row])
            block = np.zeros((call.shape.queries + 1, tokens), np.int64)
            block[:-1, : call.shape.keys] = 1
            for index in range(queries):
                # In a whole path the queries before the segment's own are computed, too, and read by nobody.
                in_segment = segment[call.query[row, index]] == segment[call.query[row, queries - 1]]
                block[index, : keys - queries + index + 1] = segment[call.query[row, index]] + 2 if in_segment else 1
            blocks.append(block)
    return np.concatenate(blocks)[:-1]


if __name__ == "__main__":
    draw()

"""What records become, token by token, and what a whole file holds: as plain data, and as text for a terminal.

Sequences and rows are those that training itself would build; nothing is worked out a second time here.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from stepjepa.batch.collate import Collator, Item
from stepjepa.batch.dataset import BLOCK, count_tokens
from stepjepa.batch.pack import pack
from stepjepa.batch.sequences import Sequence
from stepjepa.batch.tokenize import COUNTS, RecordTokenizer, step_views
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.terminal import PALETTE


@dataclass(slots=True)
class TokenInfo:
    """One token of the rows, which stand behind each other without padding.

    Token q sees token k if and only if ``start[q] <= k <= q < end[k]``.
    """

    place: int  # its index
    id: int
    text: str
    position: int  # its position id, the depth in the tree
    start: int  # first token that it sees
    end: int  # one past the last token that sees it
    branch: int = 0  # index of its branch
    labels: list[int] = field(default_factory=list)  # ids of the tokens that this position must predict
    label_texts: list[str] = field(default_factory=list)
    readouts: list[str] = field(default_factory=list)  # what is read here, such as 'source 1' for the source of pair 1


@dataclass(frozen=True, slots=True)
class BranchInfo:
    """Neighbouring tokens that the same sequences pass through."""

    index: int
    row: int
    kind: str  # 'shared' if several sequences pass through it, else 'main', 'source' or 'target'
    sequences: tuple[int, ...]  # indices of those
    parent: int | None  # index of the branch before it in its sequences; None where they begin
    isolated: bool  # it sees only itself (layout 'inplace')
    start: int  # its first token
    end: int  # one past its last token


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """Token ids that the model reads as if by themselves."""

    name: str  # such as 'main' or 'source 1', with the record's line if several records are shown
    kind: str  # 'main', 'source' or 'target'
    tokens: int  # how many it has
    shared: int  # how many of them other sequences pass through as well
    places: tuple[tuple[int, int], ...]  # ranges [start, end) of the tokens on its path through the tree


@dataclass(frozen=True, slots=True)
class Inspection:
    """Some records as a micro-batch, and what surrounds them."""

    path: str
    index: int  # of the first record, counted from 0
    config: JepaConfig
    tokens: list[TokenInfo]  # of all rows
    branches: list[BranchInfo]  # in the order of their tokens
    sequences: list[SequenceInfo]  # in the order of their records
    # Of each record: 'line'; 'messages' and 'steps', each with 'name', 'text', positions 'start' to 'end' in the main
    # sequence (None where nothing is left there) and whether truncation 'cut' some; usable 'pairs', and 'pairs_cut' by
    # truncation; 'main_tokens' of the main text as trained on, and 'full_tokens' before truncation.
    records: list[dict[str, Any]]
    # Of the whole file: 'lines'; 'counts', see tokenize.COUNTS; 'tokens', see dataset.Prepared; 'notes', where this
    # differs from what training would do.
    file: dict[str, Any]
    template: dict[str, str]  # what was derived from the chat template

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists and scalars, for JSON."""
        return asdict(self)


def inspect_records(
    records: Many[Record], index: int, tokenizer: Any, config: JepaConfig, count: int = 1
) -> Inspection:
    """Pack ``count`` records of a file from ``index`` on as one micro-batch and describe it, and the whole file.

    A record that would stop training (too long, or without a pair where one is required) does not stop the
    inspection: it is shown truncated, and counted. Without ``row_length`` there is one row.

    Raises:
        UserError: there is no such record, training skips it, or a record can't be rendered.
    """
    if not 0 <= index < len(records):
        path = records[0].path if records else None
        told = f"--index {index}: the file has {len(records)} records; choose 0 to {len(records) - 1}"
        raise UserError(told, path=path)
    over = config.over_length
    lenient = replace(config, over_length="truncate" if over == "error" else over, require_pairs=False)
    made = RecordTokenizer(tokenizer, lenient)
    collator = Collator.of(config, made.predictors.tolist())
    parts, infos = [], []
    for record in records[index : index + count]:
        lost = made.counts["pairs cut by truncation"]
        found = made.tokenize([record])
        if not found:
            remedy = "training leaves it out; raise --max_length, or pass --over_length truncate"
            told = f"the record has more tokens than max_length {config.max_length} and no answer in them: {remedy}"
            raise UserError(told, path=record.path, line=record.line)
        parts.append(collator.sequences(Item(found[0])))
        info = _describe_record(record, made, parts[-1][0].text.tolist())
        info |= {"pairs": len(found[0].pairs), "pairs_cut": made.counts["pairs cut by truncation"] - lost}
        infos.append(info | {"main_tokens": len(found[0].ids)})
    tokens, branches, sequences = _describe_tree(parts, [info["line"] for info in infos], config, tokenizer)
    file = _count_file(records, tokenizer, config, lenient)
    template = made.template.describe()
    return Inspection(records[index].path, index, config, tokens, branches, sequences, infos, file, template)


def visible_matrix(inspection: Inspection) -> NDArray[np.bool_]:
    """``[T, T]``: the query (dim 0) sees the key (dim 1)."""
    start, end = np.array([(token.start, token.end) for token in inspection.tokens]).T
    place = np.arange(len(start))
    found: NDArray[np.bool_] = (start[:, None] <= place) & (place <= place[:, None]) & (place[:, None] < end)
    return found


def token_text(tokenizer: Any, index: int) -> str:
    """The text of one token, its leading blank included; a part of a character stays a replacement mark."""
    text = str(tokenizer.decode([index], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    piece = str(tokenizer.convert_ids_to_tokens(index))
    # Vocabularies that mark a word's start with U+2581 lose the blank when a token is decoded by itself.
    return f" {text}" if piece.startswith("\u2581") and not text.startswith(" ") else text or piece


def _describe_record(record: Record, made: RecordTokenizer, text: list[int]) -> dict[str, Any]:
    """Messages and steps of a record at their positions in the main ``text``, and its tokens before truncation."""
    whole = made.template.render(record.messages)
    tokens = made.tokens(whole)

    def part(name: str, content: str, first: int, last: int) -> dict[str, Any]:
        kept = text[first:last]
        start, end = (kept[0], kept[-1] + 1) if kept else (None, None)
        return {"name": name, "text": content, "start": start, "end": end, "cut": last > len(text)}

    messages = [
        part(message["role"], message["content"], tokens.first_overlapping(start), tokens.first_from(end))
        for message, (start, end) in zip(record.messages, whole.spans, strict=True)
    ]
    steps = [
        part(f"step {number}", whole.text[step.start : step.end], *step.place(tokens))
        for number, step in enumerate(step_views(record, whole, made.config.step_separator), start=1)
    ]
    # Behind the last turn a template may write what teaches nothing.
    full = tokens.first_from(whole.turn_ends[-1]) if made.config.labels == "assistant" else len(tokens.ids)
    return {"line": record.line, "messages": messages, "steps": steps, "full_tokens": full}


def _describe_tree(
    parts: Many[Many[Sequence]], lines: Many[int], config: JepaConfig, tokenizer: Any
) -> tuple[list[TokenInfo], list[BranchInfo], list[SequenceInfo]]:
    """The sequences of some records (``parts``) in rows that stand behind each other without padding."""
    owners = [number for number, part in enumerate(parts) for _ in part]
    everything = [sequence for part in parts for sequence in part]
    rows = pack(
        everything,
        row_length=config.row_length or sum(map(len, everything)),
        groups=None if config.share_prefixes else owners,
        one_each=config.encoding == "rows",
    )
    tokens: list[TokenInfo] = []
    row_of: list[int] = []
    place_of: dict[int, int] = {}  # flat place in the padded rows -> place
    for row, length in enumerate(rows.lengths.tolist()):
        first = len(tokens)
        columns = (each[row, :length].tolist() for each in (rows.ids, rows.positions, rows.start, rows.end))
        for column, (index, position, start, end) in enumerate(zip(*columns, strict=True)):
            place_of[row * rows.ids.shape[1] + column] = len(tokens)
            row_of.append(row)
            about = (index, token_text(tokenizer, index), position)
            tokens.append(TokenInfo(len(tokens), *about, first + start, first + end))
    paths = [[place_of[flat] for flat in path.tolist()] for path in rows.paths]
    passing: list[list[int]] = [[] for _ in tokens]
    before: list[int | None] = [None] * len(tokens)
    inside: list[str | None] = [None] * len(tokens)  # the view that layout 'inplace' made a part of the main text
    names: list[str] = []
    kinds: list[str] = []
    for number, (sequence, path, owner) in enumerate(zip(everything, paths, owners, strict=True)):
        suffix = "" if len(lines) == 1 else f" of line {lines[owner]}"
        text = set(sequence.text.tolist())
        own: str = "main" if text else sequence.readouts[0].kind
        kinds.append(own)
        names.append(f"{own if text else f'{own} {sequence.readouts[0].pair + 1}'}{suffix}")
        for step, place in enumerate(path):
            passing[place].append(number)
            before[place] = path[step - 1] if step else None
            if text and step not in text:
                inside[place] = "source"
            elif sequence.start is not None and sequence.start[step]:
                inside[place] = "target"
        for step, label in sequence.labels.tolist():
            tokens[path[step]].labels.append(label)
            tokens[path[step]].label_texts.append(token_text(tokenizer, label))
        for pair, kind, start, end in sequence.readouts:
            mean = f" (mean of {end - start} tokens)" if end - start > 1 else ""
            tokens[path[end - 1]].readouts.append(f"{kind} {pair + 1}{suffix}{mean}")
    branches: list[BranchInfo] = []
    for (through, view, _), group in groupby(
        tokens, lambda token: (passing[token.place], inside[token.place], token.start)
    ):
        inner = list(group)
        for token in inner:
            token.branch = len(branches)
        first = inner[0].place
        behind = before[first]
        own = view or ("shared" if len(through) > 1 else kinds[through[0]])
        parent = None if behind is None else tokens[behind].branch
        isolated, end = view == "target", inner[-1].place + 1
        branches.append(BranchInfo(len(branches), row_of[first], own, tuple(through), parent, isolated, first, end))
    sequences = []
    for name, own, path in zip(names, kinds, paths, strict=True):
        runs = np.split(path, np.flatnonzero(np.diff(path) != 1) + 1)
        ranges = tuple((int(run[0]), int(run[-1]) + 1) for run in runs)
        sequences.append(SequenceInfo(name, own, len(path), sum(len(passing[place]) > 1 for place in path), ranges))
    return tokens, branches, sequences


def _count_file(records: Many[Record], tokenizer: Any, config: JepaConfig, lenient: JepaConfig) -> dict[str, Any]:
    """The counts of all records, with nothing in ``lenient`` that stops at one."""
    from tqdm.auto import tqdm

    made = RecordTokenizer(tokenizer, lenient)
    tokens = Counter({"main": 0, "all": 0})
    starts = range(0, len(records), BLOCK)
    for start in tqdm(starts, desc=f"count, {BLOCK} at a time", leave=False, disable=not sys.stderr.isatty()):
        tokens.update(count_tokens(made.tokenize(records[start : start + BLOCK]), lenient))
    counts = {name: made.counts[name] for name in COUNTS}
    notes = []
    if config.over_length != lenient.over_length and counts["over length"]:
        notes.append("over_length is 'error': training stops at the first record over length; here it is truncated")
    if config.require_pairs and counts["without a pair"]:
        notes.append("require_pairs is on: training stops at the first record without a pair")
    if config.uses_views and not counts["pairs"]:
        notes.append("no record has a pair of views: training refuses this file")
    return {"lines": len(records), "counts": counts, "tokens": dict(tokens), "notes": notes}


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
TRAINED = "→"
"""Behind a token that is trained to predict the next one, or what stands after the arrow."""
EDGE = "│"
"""Between other tokens where there are no colours."""

_VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def visible_text(text: str) -> str:
    """A text with white space made visible and unprintable characters escaped."""
    shown = text.translate(_VISIBLE)
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" for c in shown)


def title(inspection: Inspection) -> str:
    """File, records and objective on one line."""
    config, first, count = inspection.config, inspection.index, len(inspection.records)
    views = "" if not config.uses_views else f" · {config.layout} · K = {config.predictors}"
    lines = ", ".join(str(record["line"]) for record in inspection.records)
    where = f"index {_ranged(first, first + count)} (line{'s' if count > 1 else ''} {lines})"
    return f"{Path(inspection.path).name} · {where} · {config.mode}{views}"


def _ranged(start: int, end: int) -> str:
    """``start`` up to, not including, ``end``."""
    return f"{start}" if end == start + 1 else f"{start}–{end - 1}"


def passing(inspection: Inspection, branch: BranchInfo) -> str:
    """The sequences that pass through a branch, the first three by name."""
    names = [inspection.sequences[number].name for number in branch.sequences]
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def show(inspection: Inspection, console: Console) -> None:
    """Print the tree as running text and what was found in records and file, at any width.

    Every branch stands on a new line, indented by its depth, and so does what follows a line end.
    """
    coloured = console.color_system is not None and not console.no_color
    edge = "" if coloured else EDGE
    console.print(Text(title(inspection), "bold"))
    told = "every shade a token" if coloured else f"{EDGE} between tokens"
    console.print(Text(f"(· blank, ⏎ line end; {told}; {TRAINED} trained to predict; {READ} read here)\n"))
    depths: list[int] = []
    for branch in inspection.branches:
        depths.append(0 if branch.parent is None else depths[branch.parent] + 1)
        row = f"row {branch.row}, " if inspection.branches[-1].row else ""
        heading = f"{row}{_ranged(branch.start, branch.end)} {branch.kind}: {passing(inspection, branch)}"
        lines = [Text(f"{heading}{' (sees only itself)' if branch.isolated else ''}", "italic"), Text()]
        for number, token in enumerate(inspection.tokens[branch.start : branch.end]):
            style = f"black on {COLOURS[branch.kind].shades[number % 2]}"
            lines[-1].append(visible_text(token.text), f"{style} bold underline" if token.readouts else style)
            behind = inspection.tokens[token.place + 1] if token.place + 1 < branch.end else None
            mark = _predicted(token, behind) or (edge if behind else "")
            lines[-1].append(f"{READ if token.readouts else ''}{mark}", style)
            if token.text.endswith("\n"):
                lines.append(Text())
        for line in filter(None, lines):
            # Deep trees must leave room for text.
            console.print(Padding.indent(line, min(2 * depths[-1], console.width // 4)), overflow="fold")
    console.print()
    for name, found in _findings(inspection):
        console.print(Text(f"{name}: {found}"), overflow="fold")
    for note in inspection.file["notes"]:
        console.print(Text(f"note: {note}", "bold"))


def _predicted(token: TokenInfo, behind: TokenInfo | None) -> str:
    """An arrow where a token is trained, with what it must predict unless that is the token behind it."""
    if not token.labels or (behind is not None and token.labels == [behind.id]):
        return TRAINED if token.labels else ""
    labels = Counter(map(visible_text, token.label_texts))
    return f"{TRAINED}[{', '.join(each if n == 1 else f'{each} ×{n}' for each, n in labels.items())}]"


def _findings(inspection: Inspection) -> list[tuple[str, str]]:
    """What was found in the records, in the whole file and in the chat template, by name."""
    found, file, limit = [], inspection.file, inspection.config.max_length
    for record in inspection.records:
        told = []
        for part in (*record["messages"], *record["steps"]):
            where = "none" if part["start"] is None else _ranged(part["start"], part["end"])
            told.append(f"{part['name']} {where}{' (cut)' if part['cut'] else ''}")
        pairs = f"pairs of views {record['pairs']}, {record['pairs_cut']} cut by truncation"
        over = ", shown truncated" if record["full_tokens"] > limit else ""
        length = f"{record['full_tokens']} tokens, max_length {limit}{over}"
        found.append((f"line {record['line']}", f"positions of {', '.join(told)}; {pairs}; {length}"))
    main, packed = sum(record["main_tokens"] for record in inspection.records), len(inspection.tokens)
    apart = sum(each.tokens for each in inspection.sequences)
    found.append(
        ("tokens", f"{packed}, {apart} if nothing were shared; {packed / main:.2f} of regular without sharing")
    )
    counts = {"lines": file["lines"], **file["counts"]}
    found.append(("whole file", ", ".join(f"{name} {number:,}" for name, number in counts.items())))
    ratio = file["tokens"]["all"] / max(file["tokens"]["main"], 1)
    found.append(("tokens over regular", f"{ratio:.2f} ({file['tokens']['all']:,}, nothing shared between records)"))
    return found + list(inspection.template.items())

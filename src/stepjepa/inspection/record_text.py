"""An inspection as text: the marked tokens of its sequences, and the facts about its records."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from stepjepa.base.counting import counted, listed
from stepjepa.base.errors import visible
from stepjepa.base.terminal import PALETTE
from stepjepa.chat.unused import NOT_USED
from stepjepa.inspection.record import Inspection
from stepjepa.inspection.tree import BranchInfo, TokenInfo

COLOURS = {"shared": PALETTE[3], "main": PALETTE[0], "source": PALETTE[4], "target": PALETTE[2]}
COLOURS["other"] = PALETTE[5]
MEANING = {"shared": "shared by several sequences", "main": "main text"}
MEANING |= {"source": "source view", "target": "target view", "other": "other sequence of the layout"}
READ = "◂"  # behind a token whose state is read
TRAINED = "→"  # behind a token that is trained to predict the next one, or the tokens named after the arrow
EDGE = "│"  # between other tokens

NO_TEXT = "(no text; its tool calls, and its thought if it has one, are trained as shown above)"
UNTRAINED = "not trained: with its prompt it has too many tokens for max_length"

_VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def visible_text(text: str) -> str:
    """Make white space visible and escape unprintable characters."""
    return visible(text.translate(_VISIBLE))


def title(inspection: Inspection) -> str:
    """Return file, records and objective in one line."""
    config = inspection.config
    views = f" · {config.layout} · K = {config.predictors}" if config.uses_views else ""
    lines = ", ".join(str(record["line"]) for record in inspection.records)
    return f"{Path(inspection.path).name} · line {lines} · {config.mode}{views}"


def passing(inspection: Inspection, branch: BranchInfo) -> str:
    """Name the sequences that a branch belongs to; at most three of them."""
    return listed([inspection.sequences[number].name for number in branch.sequences], 3)


def as_text(inspection: Inspection) -> str:
    """Format the tree as text, one paragraph a branch, and the facts about records, file and chat template."""
    lines = [
        title(inspection),
        f"(· blank, ⏎ line end; {EDGE} between tokens; {TRAINED} trained to predict; {READ} read)",
    ]
    depths: list[int] = []
    for branch in inspection.branches:
        depths.append(0 if branch.parent is None else depths[branch.parent] + 1)
        row = f"row {branch.row}, " if inspection.branches[-1].row else ""
        isolated = " (sees only itself)" if branch.isolated else ""
        heading = f"{row}{branch.start}–{branch.end - 1} {branch.kind}: {passing(inspection, branch)}{isolated}"
        parts = []
        for place in range(branch.start, branch.end):
            token = inspection.tokens[place]
            following = inspection.tokens[place + 1].id if place + 1 < branch.end else None
            mark = _predicted(token, following) or (EDGE if following is not None else "")
            line_end = "\n" if token.text.endswith("\n") else ""
            parts.append(f"{visible_text(token.text)}{_read(token)}{mark}{line_end}")
        indent = "  " * depths[-1]
        lines += ["", f"{indent}{heading}", *(f"{indent}{line}" for line in "".join(parts).splitlines())]
    facts = (visible(f"{name}: {text}") for name, text in _facts(inspection))
    return "\n".join([*lines, "", *facts])


def _read(token: TokenInfo) -> str:
    """Return the mark of a token that is read, with the number of tokens that are averaged if it is not one alone."""
    means = [str(number) for number in sorted({*token.averaged}) if number > 1]
    return (READ if token.readouts else "") + (f"[mean of {' and '.join(means)} tokens]" if means else "")


def _predicted(token: TokenInfo, following: int | None) -> str:
    """Return an arrow if a token is trained, with its labels unless they are the token behind it."""
    if not token.labels or token.labels == [following]:
        return TRAINED if token.labels else ""
    labels = Counter(map(visible_text, token.label_texts))
    return f"{TRAINED}[{', '.join(kind if n == 1 else f'{kind} ×{n}' for kind, n in labels.items())}]"


def _facts(inspection: Inspection) -> list[tuple[str, str]]:
    """Return names and values of the facts about the records, the whole file and the chat template."""
    facts, file = [], inspection.file
    for record in inspection.records:
        line, limit = f"line {record['line']}", inspection.config.max_length
        texts = [*record["steps"], *record["answers"]]
        facts += [(f"{line}, {text['name']}", visible_text(text["text"]) or NO_TEXT) for text in texts]
        facts += [(f"{line}, {name}", UNTRAINED) for name in record["untrained"]]
        for number, pair in enumerate(record["views"], start=1):
            source, target = (visible_text(pair[name]) for name in ("source", "target"))
            facts.append((f"{line}, pair {number}", f"source {source} {EDGE} target {target}"))
        pairs = f"{counted(record['pairs'], 'pair')} of views"
        lengths = record["main_texts"]
        length = f"{counted(record['main_tokens'], 'token')} of {limit} at most"
        if len(lengths) > 1:
            length = f"{record['main_tokens']} tokens in {len(lengths)} texts, {max(lengths)} of {limit} at most in one"
        facts.append((line, f"{pairs}; {length}"))
    unshared = sum(sequence.tokens for sequence in inspection.sequences)
    facts.append(("tokens", f"{len(inspection.tokens)}, {unshared} if nothing were shared"))
    counts = {"lines": file["lines"], **file["counts"]}
    # A file without faults has many counts of zero, which would hide the others.
    facts.append(("whole file", ", ".join(f"{name} {number:,}" for name, number in counts.items() if number)))
    ratio = file["tokens"]["all"] / max(file["tokens"]["main"], 1)
    facts.append(("tokens over regular", f"{ratio:.2f} ({file['tokens']['all']:,}, nothing shared between records)"))
    return facts + [fact for fact in inspection.template.items() if fact[0] != NOT_USED]

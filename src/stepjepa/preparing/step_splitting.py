"""Find the reasoning steps in the free text of a model's response, in time that is linear in its length."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_STEP_MARKER = re.compile(
    # A decorated marker may have text after it ("### Step 2 Add them"); a plain one needs punctuation or the end of the
    # line after the number, because "Step 1 gives 12" is a sentence.
    r"(?P<indent>[ \t]*)(?:(?:#{1,6}[ \t]*\**|\*\*)[ \t]*step[ \t]*(?P<decorated>\d{1,9})\b"
    r"|step[ \t]*(?P<plain>\d{1,9})[ \t]*(?:[:.)–—-]|$))",
    re.I,
)
_NUMBER_MARKER = re.compile(r"(?P<indent>[ \t]*)(?:#{1,6}[ \t]+)?\**(?P<plain>\d{1,2})[.)]\**[ \t]+(?=\S)")
_ITEM_NUMBER = re.compile(r"^\s*\d{1,2}[.)]\s+")
_RULE = re.compile(r"[ \t]*(?:-{3,}|\*{3,}|_{3,})[ \t]*")
# The next two match pieces stripped of white space. A line with an equation has content, so it is no heading.
_HEADING = re.compile(r"#{1,6}\s+[^\s=][^=]*|\*\*[^*=]+\*\*:?")
_BARE_ANSWER = re.compile(r"####\s*[-$\d].*|[$*\s]*\\boxed\{.*\}[$*.\s]*|\**\$?-?\d[\d,.]*\**")
_CLOSING = re.compile(
    r"[\s#*>$]*(?:so,?\s+)?(?:therefore|thus|hence|in conclusion|in summary|(?:the\s+)?(?:final\s+)?answer\b"
    r"|####|\\boxed)",
    re.I,
)

_OPENING = re.compile(r"\s*(```|~~~|\$\$|\\\[|\\begin\{[a-z]+\*?\})")
_CLOSING_MARK = re.compile(r"^\s*(?:```|~~~)\s*$|\$\$|\\\]|\\end\{[a-z]+\*?\}")


def _block_lines(lines: Sequence[str]) -> set[int]:
    """The numbers of the lines in code fences, displays and LaTeX environments, which blank lines do not split.

    A block ends at the first closing mark; it is none if anything but blanks, commas and full stops follows there.
    """
    closed: dict[str, list[int]] = defaultdict(list)
    for number, line in enumerate(lines):
        for mark in {found.strip() for found in _CLOSING_MARK.findall(line)}:
            closed[mark].append(number)
    inside: set[int] = set()
    end = -1
    for number, line in enumerate(lines):
        if number <= end or not (opening := _OPENING.match(line)):
            continue
        mark = opening[1].replace("\\[", "\\]").replace("\\begin", "\\end")
        stop, rest = number, line[opening.end() :]
        if mark not in rest:
            place = bisect_right(closed[mark], number)
            if place == len(closed[mark]):
                continue
            stop = closed[mark][place]
            rest = lines[stop]
        if not rest.partition(mark)[2].strip(" \t.,"):
            end = stop
            inside.update(range(number, end + 1))
    return inside


def drop_thinking(text: str) -> str:
    """Remove ``<think>...</think>`` from a response.

    A closing tag alone ends thinking that began in the prompt. An opening tag alone begins thinking that never ended:
    all text after it is removed.
    """
    kept, position = [], 0
    while (start := text.find("<think>", position)) >= 0 and (end := text.find("</think>", start)) >= 0:
        kept.append(text[position:start])
        position = end + len("</think>")
    text = "".join([*kept, text[position:]]).rpartition("</think>")[2]
    return _trim(text.partition("<think>")[0])


def _trim(text: str) -> str:
    """Strip blank lines around a text, but not the indent of the first line, which shows how deep a list is nested."""
    return re.sub(r"^\s*\n", "", text).rstrip()


def _unix_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def tidy_step(step: str) -> str:
    """Remove blank lines inside a step and white space around it, so that blank lines only separate steps."""
    return _BLANK_LINES.sub("\n", _unix_lines(step)).strip()


def _leads_in(piece: str) -> bool:
    """Whether a piece only introduces the next one: a heading, "Therefore:", under four words without a digit."""
    piece = _ITEM_NUMBER.sub("", piece).strip()
    heading = "\n" not in piece and _HEADING.fullmatch(piece) and not _BARE_ANSWER.fullmatch(piece)
    if heading or piece.rstrip("*_ \t").endswith(":"):
        return True
    return len(piece.split()) < 4 and not re.search(r"[\d=]", piece)


def _continues(piece: str) -> bool:
    """Whether a piece only completes the piece before it: a block, the next line of an equation, "#### 18"."""
    stripped = piece.strip()
    lines = stripped.split("\n")
    return (
        stripped.startswith(("=", "where "))
        or bool(_BARE_ANSWER.fullmatch(stripped))
        or len(_block_lines(lines)) == len(lines)
    )


def _join_trivial(pieces: Iterable[str], marked: bool) -> list[str]:
    """Join pieces without content of their own to a neighbour, and drop horizontal rules."""
    # Lists of parts, joined once at the end: appending to strings would take quadratic time.
    steps: list[list[str]] = []
    waiting: list[str] = []
    for piece in pieces:
        # In Markdown, a rule left under a line of text would turn that line into a heading.
        text = "\n".join(line for line in piece.split("\n") if not _RULE.fullmatch(line)).rstrip()
        if not text.strip():
            continue
        if not waiting and _continues(text):
            (steps[-1] if steps else waiting).append(text)
        # A marked step of several lines has content, even if its last line introduces the next one.
        elif _leads_in(text) and not (marked and "\n" in text):
            waiting.append(text)
        else:
            steps.append([*waiting, text])
            waiting = []
    if waiting and steps:
        steps[-1] += waiting
    elif waiting:
        steps.append(waiting)
    return ["\n".join(parts) for parts in steps]


def _find_markers(lines: Sequence[str], inside: Collection[int], pattern: re.Pattern[str]) -> set[int]:
    """Lines outside blocks with markers numbered n, n + 1, ... or again from 1; empty if none is above n."""
    numbers: list[int] = []
    found: set[int] = set()
    indent = ""
    for place, line in enumerate(lines):
        if place in inside or not (match := pattern.match(line)):
            continue
        groups = match.groupdict()
        number = int(groups["plain"] or groups["decorated"])
        # A later number 1 means that the model begins again; another indent is a nested list.
        if not numbers or (number in (numbers[-1] + 1, 1) and groups["indent"] == indent):
            indent = groups["indent"]
            numbers.append(number)
            found.add(place)
    return found if numbers and max(numbers) > numbers[0] else set()


def _paragraphs(
    lines: Sequence[str], inside: Collection[int], markers: Collection[int] = ()
) -> tuple[list[str], list[int]]:
    """The text between blank lines outside blocks, divided at markers too, and which paragraphs begin with one."""
    found: list[list[str]] = []
    marked = []
    begins = True
    for place, line in enumerate(lines):
        if not line.strip():
            begins = begins or place not in inside
            continue
        if begins or place in markers:
            if place in markers:
                marked.append(len(found))
            found.append([])
        found[-1].append(line)
        begins = False
    return ["\n".join(part).rstrip() for part in found], marked


def _marked_steps(paragraphs: list[str], marked: Sequence[int], in_list: bool) -> list[str]:
    """Steps that begin at the ``marked`` paragraphs, and those behind them; empty if the markers number no steps.

    Paragraphs before marker 1 introduce the first step. A list, "1.", ends before an unindented paragraph with content.
    """
    last = paragraphs[marked[-1] :]
    # The last step ends before the conclusion of the response.
    end = len(last)
    while end > 1 and _CLOSING.match(last[end - 1]):
        end -= 1
    if in_list:
        outside = (at for at in range(1, end) if not (_leads_in(last[at - 1]) or last[at][0] in " \t-*"))
        end = next((at for at in outside if not _continues(last[at])), end)
        if marked[0] + sum(not _CLOSING.match(text) for text in last[end:]) > len(marked):
            # With more paragraphs around it than items, the list gives facts or a summary, not the solution.
            return []
    first = re.search(r"\d+", paragraphs[marked[0]])
    # Before a higher number than 1 stand unmarked steps.
    before = [0] if first and int(first[0]) == 1 else range(marked[0] + 1)
    starts = [*before, *marked[1:], marked[-1] + end]
    return ["\n".join(paragraphs[start:stop]) for start, stop in pairwise(starts)] + last[end:]


def split_response(text: str) -> list[str]:
    """Split a response into its steps.

    Steps begin at markers if the response numbers them consecutively ("**Step 2:**", "Step 2:", "### Step 2", "2.");
    otherwise blank lines separate them. Pieces without content of their own (headings, lead-ins, a lone formula, a bare
    answer) are joined to the step they belong to, and horizontal rules are dropped. Steps have no blank lines in them.
    """
    lines = _trim(_unix_lines(text)).split("\n")
    inside = _block_lines(lines)
    steps: list[str] = []
    for pattern in (_STEP_MARKER, _NUMBER_MARKER):
        if not steps and (markers := _find_markers(lines, inside, pattern)):
            steps = _marked_steps(*_paragraphs(lines, inside, markers), in_list=pattern is _NUMBER_MARKER)
    pieces = steps or _paragraphs(lines, inside)[0]
    return [tidy_step(step) for step in _join_trivial(pieces, marked=bool(steps))]

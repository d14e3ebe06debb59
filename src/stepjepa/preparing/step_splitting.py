"""Find the reasoning steps in the free text of a model's response, in time that is linear in its length."""

from __future__ import annotations

import re
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
_BLOCK = re.compile(r"(?:```.*```|~~~.*~~~|\$\$.*\$\$|\\\[.*\\\]|\\begin\{.*\\end\{[a-z]+\*?\})[ \t.,]*", re.DOTALL)


def _block_lines(lines: Sequence[str]) -> set[int]:
    """The numbers of the lines in code fences, displays and LaTeX environments, which blank lines do not split."""
    inside: set[int] = set()
    end = ""  # the mark that closes the block
    for number, line in enumerate(lines):
        rest, opening = line, None if end else _OPENING.match(line)
        if opening:
            end = opening[1].replace("\\[", "\\]").replace("\\begin", "\\end")
            rest = line[opening.end() :]
        if end:
            inside.add(number)
            end = "" if end in rest else end
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
    text = piece.strip()
    return text.startswith(("=", "where ")) or bool(_BARE_ANSWER.fullmatch(text) or _BLOCK.fullmatch(text))


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
    """Steps that begin at the ``marked`` paragraphs, what introduces marker 1 with it, and those behind them.

    A list, "1.", ends before an unindented paragraph with content.
    """
    last = paragraphs[marked[-1] :]
    # The last step ends before the conclusion of the response.
    end = len(last)
    while end > 1 and _CLOSING.match(last[end - 1]):
        end -= 1
    if in_list:
        outside = (at for at in range(1, end) if not (_leads_in(last[at - 1]) or last[at][0] in " \t-*"))
        end = next((at for at in outside if not _continues(last[at])), end)
    # Text before a higher number than 1 is not an introduction but steps of a response that is cut off in front.
    before = [0] if re.match(r"\D*1\b", paragraphs[marked[0]]) else range(marked[0] + 1)
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
    pieces, marked = _paragraphs(lines, inside)
    for pattern in (_STEP_MARKER, _NUMBER_MARKER):
        if not marked and (markers := _find_markers(lines, inside, pattern)):
            pieces, marked = _paragraphs(lines, inside, markers)
            pieces = _marked_steps(pieces, marked, in_list=pattern is _NUMBER_MARKER)
    return [tidy_step(step) for step in _join_trivial(pieces, marked=bool(marked))]

"""Split the free text of a model's response into reasoning steps, in time linear in its length."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from stepjepa.data.blocks import lines_in_blocks

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

_BLOCK = re.compile(r"(?:```.*```|~~~.*~~~|\$\$.*\$\$|\\\[.*\\\]|\\begin\{.*\\end\{[a-z]+\*?\})[ \t.,]*", re.DOTALL)


def drop_thinking(text: str) -> str:
    """Remove ``<think>...</think>`` from a response.

    A closing tag alone ends thinking that began in the prompt. An opening tag alone begins thinking that never ended:
    all text after it is removed.
    """
    text = re.sub(r"<think>(?:(?!</?think>).)*</think>", "", text, flags=re.DOTALL)
    return _trim(text.rpartition("</think>")[2].partition("<think>")[0])


def _trim(text: str) -> str:
    """Strip blank lines around a text, but not the indent of the first line, which shows how deep a list is nested."""
    return re.sub(r"^\s*\n", "", text).rstrip()


def _unix_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def tidy_step(step: str) -> str:
    """Remove blank lines inside a step and white space around it, so that blank lines only separate steps.

    Those in code fences, displays and LaTeX environments separate no steps, and stay.
    """
    lines = _unix_lines(step).strip().split("\n")
    inside = lines_in_blocks(lines)
    return "\n".join(line for number, line in enumerate(lines) if number in inside or line.strip())


def blank_lines(text: str) -> int:
    """Return how often one blank line outside a block, or several, part a text."""
    lines = _unix_lines(text).strip().split("\n")
    inside = lines_in_blocks(lines)
    parting = [number not in inside and not line.strip() for number, line in enumerate(lines)]
    return sum(this and not before for before, this in pairwise(parting))


def _leads_in(piece: str, *, if_short: bool) -> bool:
    """Return whether a piece only introduces the next: a heading, "Therefore:", at most three words without a digit."""
    piece = _ITEM_NUMBER.sub("", piece).strip()
    heading = "\n" not in piece and _HEADING.fullmatch(piece) and not _BARE_ANSWER.fullmatch(piece)
    if heading or piece.rstrip("*_ \t").endswith(":"):
        return True
    return if_short and len(piece.split()) < 4 and not re.search(r"[\d=]", piece)


def _continues(piece: str, *, if_block: bool) -> bool:
    """Return whether a piece only completes the piece before it: a block, the next line of an equation, "#### 18"."""
    text = piece.strip()
    return text.startswith(("=", "where ")) or bool(
        _BARE_ANSWER.fullmatch(text) or (if_block and _BLOCK.fullmatch(text))
    )


def _join_trivial(pieces: Iterable[str], marked: bool, *, with_content: bool = True) -> list[str]:
    """Join pieces without content of their own to a neighbour, and drop horizontal rules.

    Args:
        pieces: of a response, in order.
        marked: the response numbers its steps. A numbered piece is a step, however short it is.
        with_content: short pieces and lone blocks have no content of their own.
    """
    # Lists of parts, joined once at the end: appending to strings would take quadratic time.
    steps: list[list[str]] = []
    waiting: list[str] = []
    for piece in pieces:
        # In Markdown, a rule left under a line of text would turn that line into a heading.
        lines = piece.split("\n")
        inside = lines_in_blocks(lines)
        text = "\n".join(
            line for number, line in enumerate(lines) if number in inside or not _RULE.fullmatch(line)
        ).rstrip()
        if not text.strip():
            continue
        is_numbered = marked and (_STEP_MARKER.match(text) or _NUMBER_MARKER.match(text)) is not None
        if not waiting and _continues(text, if_block=with_content):
            (steps[-1] if steps else waiting).append(text)
        # A marked step of several lines has content, even if its last line introduces the next one.
        elif _leads_in(text, if_short=with_content and not is_numbered) and not (marked and "\n" in text):
            waiting.append(text)
        else:
            steps.append([*waiting, text])
            waiting = []
    if waiting and steps:
        steps[-1] += waiting
    elif waiting:
        steps.append(waiting)
    return ["\n".join(parts) for parts in steps]


def _find_markers(lines: Sequence[str], inside: Collection[int], pattern: re.Pattern[str]) -> dict[int, int]:
    """Return line -> number of the markers outside blocks, counted n, n + 1, ... or again from 1; else nothing."""
    markers: dict[int, int] = {}
    before, indent = 0, ""
    for place, line in enumerate(lines):
        if place in inside or not (match := pattern.match(line)):
            continue
        groups = match.groupdict()
        number = int(groups["plain"] or groups["decorated"])
        # A later number 1: the model begins again. Another indent: a nested list.
        if not markers or (number in (before + 1, 1) and groups["indent"] == indent):
            before, indent = number, groups["indent"]
            markers[place] = number
    counts = any(number == previous + 1 for previous, number in pairwise(markers.values()))
    return markers if counts else {}


def _pieces(lines: Sequence[str], inside: Collection[int], markers: Mapping[int, int], *, in_list: bool) -> list[str]:
    """Split at blank lines outside blocks; with markers (see ``_find_markers``) split at each marker.

    Text that introduces marker 1 belongs to it. The last marked step ends before a conclusion, a list, "1.", also
    before an unindented paragraph.
    """
    first, last = min(markers, default=len(lines)), max(markers, default=-1)
    # Text in front of a first marker above 1 is not an introduction: the response lacks its beginning.
    introduced = markers.get(first) == 1
    pieces: list[list[str]] = []
    begins = True
    for place, line in enumerate(lines):
        if place not in inside and not line.strip():
            begins = True
            continue
        ended = not markers or (in_list and line[0] not in " \t-*") or _CLOSING.match(line)
        parted = begins and ((place < first and not introduced) or (place > last and ended))
        if not pieces or parted or (place in markers and not (introduced and place == first)):
            pieces.append([])
        pieces[-1].append(line)
        begins = False
    return ["\n".join(part).rstrip() for part in pieces]


def split_response(text: str) -> list[str]:
    """Split a response into its steps.

    Steps begin at markers if the response numbers them consecutively ("**Step 2:**", "Step 2:", "### Step 2", "2.");
    otherwise blank lines separate them. Pieces without content of their own (headings, lead-ins, a lone formula, a bare
    answer) are joined to the step they belong to, and horizontal rules are dropped. Steps have no blank lines in them
    but those of code and formulas. Where that leaves one step, short pieces and lone blocks are steps, too.
    """
    lines = _trim(_unix_lines(text)).split("\n")
    inside = lines_in_blocks(lines)
    markers = _find_markers(lines, inside, _STEP_MARKER)
    items = {} if markers else _find_markers(lines, inside, _NUMBER_MARKER)
    pieces = _pieces(lines, inside, markers or items, in_list=bool(items))
    marked = bool(markers or items)
    steps = _join_trivial(pieces, marked)
    if len(steps) < 2:
        steps = _join_trivial(pieces, marked, with_content=False)
    return [tidy_step(step) for step in steps]

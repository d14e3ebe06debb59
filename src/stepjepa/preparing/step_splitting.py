"""Find the reasoning steps in the free text of a model's response.

The time is linear in the length of the text, even for many openings of blocks without an end.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable

_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_STEP_MARKER = re.compile(
    # A decorated marker may have text after it ("### Step 2 Add them"); a plain one needs punctuation or the end of the
    # line after the number, because "Step 1 gives 12" is a sentence.
    r"^(?P<indent>[ \t]*)(?:(?:#{1,6}[ \t]*\**|\*\*)[ \t]*step[ \t]*(?P<decorated>\d{1,9})\b"
    r"|step[ \t]*(?P<plain>\d{1,9})[ \t]*(?:[:.)–—-]|$))",
    re.M | re.I,
)
_NUMBER_MARKER = re.compile(r"^(?P<indent>[ \t]*)(?:#{1,6}[ \t]+)?\**(?P<plain>\d{1,2})[.)]\**[ \t]+(?=\S)", re.M)
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

# Blank lines do not split code fences, display mathematics and LaTeX environments. A display ends at the first closing
# mark; it is no block if anything but blanks, commas and full stops follows on that line.
_BLOCK_START = re.compile(
    r"^[ \t]*(?P<mark>(?P<fence>```|~~~)|\$\$|(?P<bracket>\\\[)|\\begin\{(?P<name>[a-z]+\*?)\})", re.M
)


def find_blocks(text: str) -> list[tuple[int, int]]:
    """The (start, end) offsets of code fences, displays and LaTeX environments, including the first line's indent.

    Args:
        text: with Unix line ends.
    """
    blocks: list[tuple[int, int]] = []
    position = 0
    ends: dict[str, re.Match[str] | None] = {}
    for start in _BLOCK_START.finditer(text):
        if start.start() < position:
            continue
        mark = start["mark"]
        # Reuse an end that was found for an earlier opening: searching for each opening would take quadratic time.
        found = ends.get(mark)
        if mark not in ends or (found is not None and found.start() < start.end()):
            found = ends[mark] = _block_end(start).search(text, start.end())
        if found is not None and found["tail"] is not None:
            position = found.end("tail")
            blocks.append((start.start(), position))
    return blocks


def _block_end(start: re.Match[str]) -> re.Pattern[str]:
    """The pattern of the end of a block; its group ``tail`` does not match if other text follows on the line."""
    if start["fence"]:
        return re.compile(rf"^[ \t]*{start['fence']}(?P<tail>[ \t]*)$", re.M)
    if start["name"]:
        return re.compile(rf"\\end\{{{re.escape(start['name'])}\}}(?P<tail>[ \t.,]*)$", re.M)
    return re.compile(rf"{re.escape(chr(92) + ']' if start['bracket'] else '$$')}(?P<tail>[ \t.,]*$)?", re.M)


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


def thinking_steps(text: str) -> list[str]:
    """Split the thinking of a response at blank lines, and append the steps of its answer.

    Returns:
        Steps without tags and blank lines; those of :func:`split_response` if there is no closing tag.
    """
    before, closed, answer = _unix_lines(text).rpartition("</think>")
    if not closed:
        return split_response(answer)
    blocks = _BLANK_LINES.split(re.sub("</?think>", "\n\n", before))
    return [*filter(None, map(tidy_step, blocks)), *split_response(answer)]


def _trim(text: str) -> str:
    """Strip blank lines around a text, but not the indent of the first line, which shows how deep a list is nested."""
    return re.sub(r"^\s*\n", "", text).rstrip()


def _unix_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def tidy_step(step: str) -> str:
    """Remove blank lines inside a step and white space around it, so that blank lines only separate steps."""
    return _BLANK_LINES.sub("\n", _unix_lines(step)).strip()


def _paragraphs(text: str) -> list[str]:
    # Keep the indent of a paragraph: an indented paragraph belongs to the list item above it.
    return [part.rstrip() for part in _BLANK_LINES.split(text) if part.strip()]


def _is_heading(piece: str) -> bool:
    piece = piece.strip()
    return "\n" not in piece and bool(_HEADING.fullmatch(piece)) and not _BARE_ANSWER.fullmatch(piece)


def _leads_in(piece: str) -> bool:
    """Whether a piece only introduces the next one: a heading, "Therefore:", under four words without a digit."""
    piece = _ITEM_NUMBER.sub("", piece)
    if _is_heading(piece) or piece.rstrip(" \t*_").endswith(":"):
        return True
    return len(piece.split()) < 4 and not re.search(r"[\d=]", piece)


def _continues(piece: str) -> bool:
    """Whether a piece only completes the piece before it: a block, the next line of an equation, "#### 18"."""
    stripped = piece.strip()
    return (
        stripped.startswith(("=", "where "))
        or bool(_BARE_ANSWER.fullmatch(stripped))
        or find_blocks(stripped) == [(0, len(stripped))]
    )


def _join_trivial(pieces: Iterable[str], marked: bool) -> list[str]:
    """Join pieces without content of their own to a neighbour, and drop horizontal rules."""
    # Lists of parts, joined once at the end: appending to strings would take quadratic time.
    steps: list[list[str]] = []
    waiting = ""
    for piece in pieces:
        # In Markdown, a rule left under a line of text would turn that line into a heading.
        text = "\n".join(line for line in piece.split("\n") if not _RULE.fullmatch(line)).rstrip()
        if not text.strip():
            continue
        if _continues(text) and not waiting:
            if steps:
                steps[-1].append(text)
            else:
                waiting = text + "\n"
        # A marked step of several lines has content, even if its last line introduces the next one.
        elif _leads_in(text) and not (marked and "\n" in text):
            waiting += text + "\n"
        else:
            steps.append([waiting + text])
            waiting = ""
    if waiting and steps:
        steps[-1].append(waiting)
    elif waiting:
        steps.append([waiting])
    return ["\n".join(parts) for parts in steps]


def _markers(text: str, pattern: re.Pattern[str]) -> list[tuple[int, int]]:
    """(number, position) of markers numbered n, n + 1, ... or again from 1; empty if none is above n."""
    blocks = find_blocks(text)
    starts = [start for start, _ in blocks]
    markers: list[tuple[int, int]] = []
    indent = ""
    for match in pattern.finditer(text):
        before = bisect_right(starts, match.start()) - 1
        if before >= 0 and match.start() < blocks[before][1]:
            continue
        groups = match.groupdict()
        number = int(groups["plain"] or groups["decorated"])
        # A later number 1 means that the model begins again; another indent is a nested list.
        if markers and (number not in (markers[-1][0] + 1, 1) or groups["indent"] != indent):
            continue
        indent = groups["indent"]
        markers.append((number, match.start()))
    if len(markers) > 1 and markers[0][0] > 1 and markers[1][0] == 1:
        # A single number before the list, which begins at 1.
        del markers[0]
    return markers if any(number > markers[0][0] for number, _ in markers) else []


def _end_of_list(paragraphs: list[str]) -> int:
    """Number of paragraphs in the last item of a list: it ends before an unindented paragraph with content."""
    for position in range(1, len(paragraphs)):
        part = paragraphs[position]
        if not (_leads_in(paragraphs[position - 1]) or part[0] in " \t-*" or _continues(part)):
            return position
    return len(paragraphs)


def _end_of_step(paragraphs: list[str]) -> int:
    """Number of paragraphs in the last step: it ends before the conclusion of the response."""
    end = len(paragraphs)
    while end > 1:
        under_closing = end > 2 and _is_heading(paragraphs[end - 2]) and _CLOSING.match(paragraphs[end - 2])
        if not (under_closing or _CLOSING.match(paragraphs[end - 1])):
            break
        end -= 1
    return end


def _marked_pieces(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Pieces between markers, and the paragraphs before and after them; empty if no markers number the steps."""
    markers = _markers(text, pattern)
    if not markers:
        return []
    starts = [start for _, start in markers]
    before = _paragraphs(text[: starts[0]])
    sections = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    last = _paragraphs(sections[-1])
    end = _end_of_step(last)
    if pattern is _NUMBER_MARKER:
        end = min(end, _end_of_list(last))
        outside = before + [paragraph for paragraph in last[end:] if not _CLOSING.match(paragraph)]
        if len(outside) > len(sections):
            # With more paragraphs around it than items, the list gives facts or a summary, not the solution.
            return []
    items = [*map(tidy_step, sections[:-1]), tidy_step("\n".join(last[:end]))]
    if markers[0][0] == 1:
        # Text before marker 1 introduces the first step; text before a higher marker is made of unmarked steps.
        items[0] = "\n".join([*before, items[0]])
        before = []
    return [*before, *items, *last[end:]]


def split_response(text: str) -> list[str]:
    """Split a response into its steps.

    Steps begin at markers if the response numbers them consecutively ("**Step 2:**", "Step 2:", "### Step 2", "2.");
    otherwise blank lines separate them. Pieces without content of their own (headings, lead-ins, a lone formula, a bare
    answer) are joined to the step they belong to, and horizontal rules are dropped.

    Args:
        text: the response without its thinking.

    Returns:
        Steps without blank lines in them; an empty list for an empty text.
    """
    text = _trim(_unix_lines(text))
    parts, position = [], 0
    for start, end in find_blocks(text):
        parts += [text[position:start], _BLANK_LINES.sub("\n", text[start:end])]
        position = end
    text = "".join([*parts, text[position:]])
    marked = _marked_pieces(text, _STEP_MARKER) or _marked_pieces(text, _NUMBER_MARKER)
    return [tidy_step(step) for step in _join_trivial(marked or _paragraphs(text), bool(marked))]

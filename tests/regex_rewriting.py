"""Other texts for regular expressions of NL-RX that mean the same."""

from stepjepa.tasks.regex.syntax import (
    ANY,
    Boundary,
    Characters,
    Complement,
    Concatenation,
    Intersection,
    Repetition,
    Union,
)

ANYTHING = Repetition(ANY, 0, None)
EMPTY = Concatenation(())


def write(node):
    """The text of a tree, every part in brackets."""
    match node:
        case Characters():
            text = "[" + "".join(f"{_escape(first)}-{_escape(last)}" for first, last in node.ranges) + "]"
        case Boundary():
            text = r"\b"
        case Concatenation(parts):
            text = "".join(f"({write(part)})" for part in parts) or "()"
        case Union(parts):
            text = "|".join(f"({write(part)})" for part in parts)
        case Intersection(parts):
            text = "&".join(f"({write(part)})" for part in parts)
        case Complement(inner):
            text = f"~({write(inner)})"
        case Repetition(inner, least, most):
            text = f"({write(inner)}){{{least},{'' if most is None else most}}}"
    return text


def _escape(code):
    character = chr(code)
    return f"\\{character}" if character in "\\[]^-" else character


def with_parts(node, change):
    """The same node with its parts changed by a function."""
    match node:
        case Concatenation(parts) | Union(parts) | Intersection(parts):
            return type(node)(tuple(map(change, parts)))
        case Complement(inner):
            return Complement(change(inner))
        case Repetition(inner, least, most):
            return Repetition(change(inner), least, most)
    return node


def twin(node, draw):
    """Another tree for the same lines, after laws of algebra that hold whatever the parts are."""
    node = with_parts(node, lambda part: twin(part, draw))
    if draw.random() < 0.5:
        return node
    return draw.choice([law for law in LAWS if law(node, draw) is not None] or [_twice_complemented])(node, draw)


def _twice_complemented(node, draw):
    return Complement(Complement(node))


def _also_anything(node, draw):
    return Intersection((ANYTHING, node))


def _associated(node, draw):
    if isinstance(node, Concatenation | Union | Intersection) and len(node.parts) > 2:
        at = draw.randrange(1, len(node.parts))
        halves = [part[0] if len(part) == 1 else type(node)(part) for part in (node.parts[:at], node.parts[at:])]
        return type(node)(tuple(halves))
    return None


def _commuted(node, draw):
    return type(node)(node.parts[::-1]) if isinstance(node, Union | Intersection) else None


def _de_morgan(node, draw):
    if not isinstance(node, Union | Intersection):
        return None
    other = Intersection if isinstance(node, Union) else Union
    return Complement(other(tuple(map(Complement, node.parts))))


def _distributed(node, draw):
    """``a(b|c)`` is ``ab|ac``; with ``&`` it is not."""
    if not isinstance(node, Concatenation):
        return None
    places = [at for at, part in enumerate(node.parts) if isinstance(part, Union)]
    if not places:
        return None
    at = draw.choice(places)
    return Union(tuple(Concatenation((*node.parts[:at], part, *node.parts[at + 1 :])) for part in node.parts[at].parts))


def _unrolled(node, draw):
    if not isinstance(node, Repetition):
        return None
    inner, least, most = node
    if least:
        return Concatenation((inner, Repetition(inner, least - 1, most and most - 1)))
    if most is None:
        return draw.choice(
            [
                Union((EMPTY, Concatenation((inner, node)))),
                Concatenation((node, node)),
                Repetition(node, 0, None),
                Concatenation((Repetition(inner, 0, 1), node)),
            ]
        )
    return None


def _split_set(node, draw):
    if not isinstance(node, Characters) or node.ranges[0][0] == node.ranges[0][1]:
        return None
    (first, last), *others = node.ranges
    middle = draw.randrange(first, last)
    return Union((Characters(((first, middle),)), Characters(((middle + 1, last), *others))))


LAWS = [
    _twice_complemented,
    _also_anything,
    _associated,
    _commuted,
    _de_morgan,
    _distributed,
    _unrolled,
    _split_set,
]

"""Other texts for regular expressions of NL-RX that mean the same."""

from stepjepa.tasks.regex_syntax import (
    Boundary,
    Characters,
    Complement,
    Concatenation,
    Intersection,
    Repetition,
    Union,
)


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


def twin(node, draw):
    """Another tree for the same lines, by laws of algebra that hold whatever the parts are."""
    match node:
        case Concatenation(parts) | Union(parts) | Intersection(parts):
            node = type(node)(tuple(twin(part, draw) for part in parts))
        case Complement(inner):
            node = Complement(twin(inner, draw))
        case Repetition(inner, least, most):
            node = Repetition(twin(inner, draw), least, most)
    return node if draw.random() < 0.5 else draw.choice(_rewritten(node, draw))


def _rewritten(node, draw):
    """The node under every law that fits it."""
    found = [Complement(Complement(node))]
    match node:
        case Union(parts) | Intersection(parts):
            found.append(type(node)(parts[::-1]))
            other = Intersection if isinstance(node, Union) else Union
            found.append(Complement(other(tuple(map(Complement, parts)))))
        case Concatenation(parts):
            if len(parts) > 2:
                found.append(Concatenation((parts[0], Concatenation(parts[1:]))))
            # a(b|c) is ab|ac.
            for at, part in enumerate(parts):
                if isinstance(part, Union):
                    choices = tuple(Concatenation((*parts[:at], each, *parts[at + 1 :])) for each in part.parts)
                    found.append(Union(choices))
        case Repetition(inner, 0, None):
            found.append(Union((Concatenation(()), Concatenation((inner, node)))))
            found.append(Repetition(node, 0, None))
        case Repetition(inner, least, most) if least:
            found.append(Concatenation((inner, Repetition(inner, least - 1, most and most - 1))))
        case Characters(((first, last), *others)) if first < last:
            middle = draw.randrange(first, last)
            found.append(Union((Characters(((first, middle),)), Characters(((middle + 1, last), *others)))))
    return found

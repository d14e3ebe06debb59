"""What settings must know of a layout: the modes that have it, and what it contradicts. ``batch.layouts`` builds it."""

from dataclasses import dataclass, replace

from stepjepa.base.errors import UserError


@dataclass(frozen=True)
class LayoutRules:
    """The rules of a layout, without the function that places sequences."""

    name: str  # as on the command line
    modes: tuple[str, ...]  # that have it; the first layout of a mode is its default
    views_in_text: bool = False  # the first message of a pair is taken where it stands in the chat, not by itself
    changes_text: bool = False  # it puts tokens into the main sequence, so that the LM loss is another one


LAYOUTS = {
    rules.name: rules
    for rules in (
        LayoutRules("separate", ("regular", "llm-jepa")),
        LayoutRules("branched", ("step-jepa", "llm-jepa"), views_in_text=True),
        LayoutRules("inplace", ("step-jepa",), views_in_text=True, changes_text=True),
    )
}
"""Layouts by name, in the order of the help text; a user's own are added where they are registered."""


def layouts_of(mode: str) -> tuple[str, ...]:
    """The layouts of a mode; the first one is its default."""
    return tuple(name for name, rules in LAYOUTS.items() if mode in rules.modes)


def changes_text(layout: str | None) -> bool:
    """Whether a layout puts tokens into the main sequence."""
    return layout in LAYOUTS and LAYOUTS[layout].changes_text


def name_layout(function: object, address: str) -> None:
    """Register a layout of the user's own under its address, too (``layout="module:function"``)."""
    rules = next((each for each in LAYOUTS.values() if getattr(each, "place", None) is function), None)
    if rules is None:
        raise UserError(f"layout: '{address}' is no layout; put @stepjepa.layout(...) above the function")
    LAYOUTS[address] = replace(rules, name=address)

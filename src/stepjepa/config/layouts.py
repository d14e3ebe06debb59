"""The properties of layouts that settings are checked against; ``batch.layouts`` has their functions."""

from dataclasses import dataclass, replace

from stepjepa.base.errors import UserError


@dataclass(frozen=True)
class LayoutRules:
    """The rules of a layout, without the function that places sequences."""

    name: str  # as on the command line
    modes: tuple[str, ...]  # that have it; the first layout of a mode is its default
    views_in_text: bool = False  # the first message of a pair is a part of the chat, not rendered alone
    changes_text: bool = False  # it inserts tokens into the main sequence, which changes the LM loss


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
    """Return the layouts of a mode; the first one is its default."""
    return tuple(name for name, rules in LAYOUTS.items() if mode in rules.modes)


def changes_text(layout: str | None) -> bool:
    """Whether a layout inserts tokens into the main sequence."""
    return layout in LAYOUTS and LAYOUTS[layout].changes_text


def name_layout(function: object, address: str) -> None:
    """Register a custom layout under its address, too (``layout="module:function"``)."""
    rules = next((each for each in LAYOUTS.values() if getattr(each, "place", None) is function), None)
    if rules is None:
        raise UserError(f"layout: '{address}' is no layout; put @stepjepa.layout(...) above the function")
    LAYOUTS[address] = replace(rules, name=address)

"""Numbers of things in messages."""

from collections.abc import Sequence


def counted(number: float, noun: str) -> str:
    """Format a number of things: ``1 record``, ``1,234 records``, ``2 processes``."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,.0f} {noun}{ending}"


def listed(names: Sequence[str], most: int) -> str:
    """List at most ``most`` names, and the number of the others: ``a, b and 3 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")

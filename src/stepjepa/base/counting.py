"""Numbers of things in messages."""


def counted(number: float, noun: str) -> str:
    """Format a number of things: ``1 record``, ``1,234 records``, ``2 processes``."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,.0f} {noun}{ending}"

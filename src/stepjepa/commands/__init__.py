"""The sub-commands of the command line, one module each."""

COMMANDS = (
    "train",
    "estimate",
    "inspect",
    "verify",
    "prepare",
    "evaluate",
    "score",
    "analyze",
    "export",
    "report",
    "compare",
    "sweep",
    "rerun",
    "completion",
)
"""In the order in which the overview names them; each is a module ``stepjepa.commands.<name>``."""

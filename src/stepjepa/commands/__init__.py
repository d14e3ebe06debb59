"""The sub-commands of the command line, one module each."""

COMMANDS = (
    *("prepare", "inspect", "verify", "train", "evaluate", "score", "compare", "report", "sweep"),
    *("analyze", "estimate", "export", "rerun", "completion"),
)
"""In the order of a typical workflow; each is a module ``stepjepa.commands.<name>``."""

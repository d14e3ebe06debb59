"""Blocks of documents that are not run, where the reason does not stand beside them in an HTML comment."""

from __future__ import annotations

MEASURES = "measures for minutes, and what it prints depends on the machine"
HUB = "reads a data set or a model of the hub"
LONG = "trains for minutes"
DEVICES = "needs a GPU, or a configuration of the hub"

NOT_RUN: dict[str, list[tuple[str, str]]] = {
    # page -> (what the command begins with, reason)
    "README.md": [
        ("make", "the targets are run by CI"),
        ("pip install stepjepa", "make wheel-test installs the wheel"),
    ],
    "docs/usage.md": [
        ("stepjepa prepare chat", "tests/test_first_hour.py runs it"),
        ("stepjepa prepare gsm8k --dataset", HUB),
        ("stepjepa train --train_file ../shared", LONG),
    ],
    "docs/tutorial.md": [("make", "tests/examples runs it")],
    "CONTRIBUTING.md": [("make", "the targets are run by CI")],
    "SECURITY.md": [("make audit", "asks a database of vulnerabilities")],
    "docs/log.md": [("", "the log says what was run; its commands are those of its day")],
    "docs/results.md": [("", LONG)],
    "docs/performance.md": [("", MEASURES)],
    "docs/reliability.md": [("", "minutes of kills; the quick versions are tests")],
    "docs/first-hour.md": [("", "tests/test_first_hour.py runs the page from its first command to its last")],
    "docs/scale.md": [("stepjepa estimate", DEVICES)],
    "docs/tasks.md": [("stepjepa prepare gsm8k", "needs the raw data set"), ("stepjepa prepare hellaswag", HUB)],
    "docs/ecosystem.md": [("", "models and services of the reader; test_other_tools.py parses what is ours")],
    "docs/coming-from.md": [("", "models and data of the reader; test_other_tools.py parses every command")],
    "examples/README.md": [("", "tests/examples runs every example")],
}


def why_not(page: str, command: str) -> str | None:
    """The reason not to run a command of a page, or None."""
    return next((reason for start, reason in NOT_RUN.get(page, ()) if command.startswith(start)), None)

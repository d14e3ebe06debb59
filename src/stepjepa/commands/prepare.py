"""``stepjepa prepare``: make training files, from raw data sets or on the spot."""

from __future__ import annotations

import argparse

from stepjepa.commands.prepare_chat import CHAT
from stepjepa.commands.prepare_conversions import PREPARED
from stepjepa.commands.prepare_generated import NL_RX, STEPMATH
from stepjepa.commands.prepare_steps import STEPS

SUMMARY = "make training files: from published data sets, raw responses, or generated"

PREPARATIONS = {"chat": CHAT, "steps": STEPS, **PREPARED, "stepmath": STEPMATH, "nl-rx": NL_RX}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A sub-command for each of :data:`PREPARATIONS`."""
    kinds = parser.add_subparsers(dest="preparation", required=True, metavar="KIND", title="kinds")
    for name, preparation in PREPARATIONS.items():
        # Data sets are spelt in both ways.
        other = [name.replace("-", "_")] if "-" in name else []
        inner = kinds.add_parser(
            name, aliases=other, help=preparation.summary, description=preparation.summary, allow_abbrev=False
        )
        preparation.add_arguments(inner)


def run(args: argparse.Namespace) -> int:
    """Run the preparation that was chosen.

    Raises:
        UserError: an input is missing or wrong, an output is there already, or a setting is out of range.
    """
    return PREPARATIONS[args.preparation.replace("_", "-")].run(args)

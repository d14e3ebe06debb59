"""``stepjepa analyze``: look at the representations of trained models."""

# option() makes the field

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from stepjepa.analysis.settings import AnalysisSettings
from stepjepa.errors import UserError, visible
from stepjepa.options import add_options, from_args, option, options_of

SUMMARY = "look at the representations of trained models: numbers and pictures"

EPILOG = """\
Embeds the two views of each test record where training read them: Enc(Text) and Enc(Code) for LLM-JEPA, a step and the
next one for Step-JEPA. Writes analysis.json (all numbers), embeddings.npz, projection.png/.svg and
singular_values.png/.svg to --output_dir; several models stand side by side. --redraw DIR draws the pictures of an
earlier analysis again, from its kept data."""


COMMON = (
    *("model_path", "test_file", "output_dir", "labels", "redraw", "overwrite", "views", "pairs", "layer"),
    *("t_sne_type", "predictions", "projections", "max_examples", "batch_size", "dtype"),
)
"""Options that ``--help`` shows."""


@dataclass
class RedrawFlags:
    """Another way to use the command."""

    redraw: str | None = option(None, "draw the pictures of this folder again, and nothing else", metavar="DIR")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    # --redraw needs none of them.
    add_options(parser, AnalysisSettings, "files", required=())
    add_options(parser, RedrawFlags, "files")


def run(args: argparse.Namespace) -> int:
    """Analyse and print the numbers, or draw again.

    Raises:
        UserError: a flag, a file or a model is wrong.
    """
    from stepjepa.analysis.run import analyze, notes, redraw

    if args.redraw is not None:
        # Everything else went into the data that was kept: another colouring needs another analysis.
        for each, _ in options_of(AnalysisSettings):
            default = None if each.default is MISSING else each.default
            if each.name not in ("labels", "overwrite") and getattr(args, each.name) != default:
                raise UserError(f"--redraw needs no --{each.name}; leave it out")
        print(f"written: {', '.join(map(str, redraw(args.redraw, args.labels)))}")
        return 0
    for each, _ in options_of(AnalysisSettings):
        if each.default is MISSING and getattr(args, each.name) is None:
            raise UserError(f"--{each.name} is missing; name it, or pass --redraw DIR for an earlier analysis")
    analysis = analyze(from_args(AnalysisSettings, args))

    from stepjepa.analysis.files import output_files
    from stepjepa.analysis.numbers import as_markdown

    for model in analysis.models:
        print(f"{model.name}: {_reading(model.config, model.views)}")
    print()
    print(as_markdown([model.name for model in analysis.models], [model.numbers for model in analysis.models]))
    print()
    for note in notes(analysis):
        print(f"note: {visible(note)}")
    print(f"written: {', '.join(map(str, output_files(args.output_dir)))}")
    runs = shlex.join(args.model_path)
    print(f"next: stepjepa report {runs} --output_file report.html --analysis {shlex.quote(args.output_dir)}")
    return 0


def _reading(config: Mapping[str, Any], views: tuple[str, str]) -> str:
    """Which views, and where they are read."""
    count = config["predictors"]
    where = f"behind {count} predictor token{'s' if count > 1 else ''}" if count else "at its own end"
    return f"{config['mode']} views, source {views[0]} read {where}, target {views[1]}"

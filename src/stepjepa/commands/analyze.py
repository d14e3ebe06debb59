"""``stepjepa analyze``: look at the representations of trained models."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import Any

from stepjepa.errors import visible
from stepjepa.inspection.analysis import AnalysisSettings, analyze, as_table, notes, output_files
from stepjepa.options import add_options, from_args

SUMMARY = "look at the representations of trained models: numbers and pictures"

EPILOG = """\
Embeds the two views of each test record where training read them: Enc(Text)
and Enc(Code) for LLM-JEPA, a step and the next one for Step-JEPA. Writes
analysis.json (all numbers), embeddings.npz, projection.png/.svg and
singular_values.png/.svg to --output_dir. Several models share each picture."""


COMMON = (
    *("model_path", "test_file", "output_dir", "overwrite", "views", "pairs", "layer"),
    *("t_sne_type", "projections", "max_examples", "batch_size", "dtype"),
)
"""Options that ``--help`` shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser, AnalysisSettings, "files")


def run(args: argparse.Namespace) -> int:
    """Analyse the models, write the files and print the numbers.

    Raises:
        UserError: a flag, a file or a model is wrong.
    """
    analysis = analyze(from_args(AnalysisSettings, args))
    for model in analysis.models:
        print(f"{model.name}: {_reading(model.config, model.views)}")
    print()
    print(as_table(analysis))
    print()
    for note in notes(analysis):
        print(f"note: {visible(note)}")
    print(f"written: {', '.join(map(str, output_files(args.output_dir)))}")
    runs = shlex.join(args.model_path)
    print(f"next: stepjepa report {runs} --output_file report.html --analysis {shlex.quote(args.output_dir)}")
    return 0


def _reading(config: Mapping[str, Any], views: tuple[str, str]) -> str:
    """One line on the views of a model and the positions at which they are read."""
    count = config["predictors"]
    where = f"behind {count} predictor token{'s' if count > 1 else ''}" if count else "at its own end"
    return f"{config['mode']} views, source {views[0]} read {where}, target {views[1]}"

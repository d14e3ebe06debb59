"""``stepjepa analyze``: look at the representations of trained models."""

from __future__ import annotations

import argparse
import shlex

from stepjepa.commands import Command
from stepjepa.errors import visible
from stepjepa.inspection.analysis import AnalysisSettings
from stepjepa.options import from_args


def run(args: argparse.Namespace) -> int:
    """Analyse the models, write the files and print the numbers."""
    from stepjepa.inspection.analysis import analyze, as_table, notes, output_files

    models = analyze(from_args(AnalysisSettings, args))
    for model in models:
        count = model.config.predictors or 0
        where = f"behind {count} predictor token{'s' if count > 1 else ''}" if count else "at its own end"
        source, target = model.views
        print(f"{model.name}: {model.config.mode} views, source {source} read {where}, target {target}")
    print(f"\n{as_table(models)}\n")
    for note in notes(models):
        print(f"note: {visible(note)}")
    print(f"written: {', '.join(map(str, output_files(args.output_dir)))}")
    more = shlex.join([*args.model_path, "--output_file", "report.html", "--analysis", args.output_dir])
    print(f"next: stepjepa report {more}")
    return 0


ANALYZE = Command(
    run,
    flags=((AnalysisSettings, "files"),),
    common="model_path test_file output_dir overwrite views pairs layer t_sne_type projections max_examples "
    "batch_size dtype",
    epilog="Embeds the two views of each test record where training read them (docs/how-to/representations.md).",
)

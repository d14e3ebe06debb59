"""``stepjepa analyze``: look at the representations of trained models."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from stepjepa.analysis.points import COLOURINGS
from stepjepa.analysis.projections import PROJECTIONS
from stepjepa.arguments import add_switch
from stepjepa.config import CHOICES, DTYPES
from stepjepa.errors import UserError, visible

SUMMARY = "look at the representations of trained models: numbers and pictures"

EPILOG = """\
Embeds the two views of each test record where training read them: Enc(Text) and Enc(Code) for LLM-JEPA, a step and the
next one for Step-JEPA. Writes analysis.json (all numbers), embeddings.npz, projection.png/.svg and
singular_values.png/.svg to --output_dir; several models stand side by side. --redraw DIR draws the pictures of an
earlier analysis again, from its kept data."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    files = parser.add_argument_group("files")
    files.add_argument("--model_path", nargs="+", metavar="PATH", help="run, checkpoint or adapter folders, or hub ids")
    files.add_argument("--test_file", metavar="FILE", help="JSON lines with 'messages'")
    files.add_argument("--output_dir", metavar="DIR", help="gets the numbers, the data and the pictures")
    files.add_argument("--labels", metavar="A,B", help="names of the models (their folders' names)")
    files.add_argument("--redraw", metavar="DIR", help="draw the pictures of this folder again, and nothing else")
    add_switch(files, "--overwrite", help="replace an earlier analysis in --output_dir (off)")
    _add_views(parser)
    picture = parser.add_argument_group("pictures")
    picture.add_argument(
        "--t_sne_type",
        choices=COLOURINGS,
        default="in_n_out",
        help="what colours the points: the view; the field 'group'; the answer; the step's number; whether the model's "
        "own answer is right (in_n_out)",
    )
    picture.add_argument(
        "--predictions", nargs="+", metavar="FILE", help="for answers: the output of 'stepjepa evaluate', one per model"
    )
    picture.add_argument("--score", metavar="NAME", help="for answers: the score that decides (the headline)")
    picture.add_argument(
        "--projections", nargs="+", choices=PROJECTIONS, default=["pca", "tsne"], help="rows of the picture (pca tsne)"
    )
    picture.add_argument(
        "--max_points", type=int, default=1000, metavar="N", help="pairs drawn; numbers are of all (1000)"
    )
    running = parser.add_argument_group("running")
    running.add_argument("--max_examples", type=int, metavar="N", help="a random sample of N records (all)")
    running.add_argument("--batch_size", type=int, default=16, metavar="N", help="records at a time (16)")
    running.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (auto)")
    running.add_argument("--seed", type=int, default=42, metavar="N", help="of samples and projections (42)")
    add_switch(running, "--trust_remote_code", help="run code that comes with the model (off)")


def _add_views(parser: argparse.ArgumentParser) -> None:
    views = parser.add_argument_group("views (by default those of training)")
    views.add_argument("--views", choices=("llm-jepa", "step-jepa"), help="which ones")
    views.add_argument("--pairs", choices=CHOICES["pairs"], help="of each record; all for --t_sne_type steps")
    views.add_argument("--step_separator", metavar="SEP", help="blank (lines), line, or a literal string")
    views.add_argument("--max_length", type=int, metavar="N", help="tokens of a record beyond which it is left out")
    views.add_argument("--layer", type=int, default=-1, metavar="N", help="of hidden_states; 0 is the embeddings (-1)")
    views.add_argument("--pooling", choices=("last", "mean"), default="last", help="the readout, or the view (last)")
    add_switch(views, "--no_predictors", help="read Enc(Text) itself, not behind its predictor tokens (off)")
    add_switch(views, "--use_test_prompts", help="the test file's own system prompt; else that of training")


def run(args: argparse.Namespace) -> int:
    """Analyse and print the numbers, or draw again.

    Raises:
        UserError: a flag, a file or a model is wrong.
    """
    from stepjepa.analysis.run import AnalysisSettings, analyze, notes, redraw

    labels = tuple(name.strip() for name in args.labels.split(",")) if args.labels else ()
    asked = ("model_path", "test_file", "output_dir")
    if args.redraw is not None:
        # Everything else went into the data that was kept: another colouring needs another analysis.
        kept = {each.name: each.default for each in fields(AnalysisSettings) if each.default is not MISSING}
        defaults = dict.fromkeys(asked) | {name: kept[name] for name in kept if name not in ("labels", "overwrite")}
        given = [name for name, default in defaults.items() if _differs(getattr(args, name), default)]
        if given:
            raise UserError(f"--redraw needs no --{given[0]}; leave it out")
        print(f"written: {', '.join(map(str, redraw(args.redraw, labels)))}")
        return 0
    missing = [name for name in asked if getattr(args, name) is None]
    if missing:
        raise UserError(f"--{missing[0]} is missing; name it, or pass --redraw DIR for an earlier analysis")
    values = {each.name: getattr(args, each.name) for each in fields(AnalysisSettings) if hasattr(args, each.name)}
    values |= {
        "model_paths": tuple(args.model_path),
        "labels": labels,
        "projections": tuple(dict.fromkeys(args.projections)),
        "predictions": tuple(args.predictions or ()),
        # A literal separator is typed with \\n for a line end.
        "step_separator": args.step_separator and args.step_separator.replace("\\n", "\n").replace("\\t", "\t"),
    }
    analysis = analyze(AnalysisSettings(**values))

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


def _differs(value: Any, default: Any) -> bool:
    return value is not None and (tuple(value) if isinstance(value, list) else value) != default


def _reading(config: Mapping[str, Any], views: tuple[str, str]) -> str:
    """Which views, and where they are read."""
    count = config["predictors"]
    where = f"behind {count} predictor token{'s' if count > 1 else ''}" if count else "at its own end"
    return f"{config['mode']} views, source {views[0]} read {where}, target {views[1]}"

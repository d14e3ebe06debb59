"""``stepjepa evaluate`` and ``stepjepa score``: score the answers of a model, or of another program."""

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path

from stepjepa.base.files import json_or_empty
from stepjepa.base.json_object import JsonObject
from stepjepa.base.signals import Stopped
from stepjepa.base.terminal import note, visible_lines
from stepjepa.cli.commands import Command
from stepjepa.cli.flags import DetailsFlags, JsonFlags
from stepjepa.cli.parser import from_args
from stepjepa.cli.published import translate_evaluate
from stepjepa.config.option import option
from stepjepa.config.server import ServerSettings
from stepjepa.data.reading_notes import tell_unused
from stepjepa.evaluation.settings import EvaluationSettings, ScoreSettings
from stepjepa.models.sampling import Sampling
from stepjepa.store.folder import RUN_FILE
from stepjepa.store.record import trained_objective
from stepjepa.tasks.base import TaskOptions
from stepjepa.tasks.registry import is_custom

EPILOG = """\
example: stepjepa evaluate --model_path runs/a --test_file test.jsonl \\
  --output_file runs/a/test.jsonl
Writes one JSON line per example and a summary beside the file. The same command
resumes an interrupted evaluation. docs/tasks.md describes tasks and scores."""


@dataclass
class QuantizationFlags:
    """Quantization of the weights."""

    load_in_4bit: bool = option(False, "load the weights in 4 bits; through bitsandbytes")
    load_in_8bit: bool = option(False, "load the weights in 8 bits; through bitsandbytes")


def _tell_summary(summary: JsonObject, output: Path, *, details: bool) -> JsonObject:
    """Print the summary and the two files of an evaluation; return both for ``--json``."""
    from stepjepa.evaluation.output import summary_file
    from stepjepa.evaluation.summary_text import format_summary

    print(visible_lines(format_summary(summary, details=details)))
    if not details:
        print("more figures: the same command with --details")
    print(f"written: {output}, {summary_file(output)}")
    return {**summary, "output_file": str(output), "summary_file": str(summary_file(output))}


def score(args: argparse.Namespace) -> JsonObject:
    """Score the answers of another program and print the summary."""
    from stepjepa.evaluation.predictions import score_predictions

    settings = from_args(ScoreSettings, args, task_options=from_args(TaskOptions, args))
    return _tell_summary(score_predictions(settings), Path(args.output_file), details=args.details)


def evaluate(args: argparse.Namespace) -> JsonObject:
    """Evaluate a model and print the summary."""
    from stepjepa.evaluation.run import Evaluation

    trained = None if args.model_path is None else trained_objective(args.model_path)
    if not args.plain and (trained or {}).get("plain"):
        note("trained without a chat template, so prompts have none (`plain`)")
        args.plain = True
    names = EvaluationSettings.flat_names()
    values = {name: value for name, value in vars(args).items() if name in names}
    evaluation = Evaluation(EvaluationSettings.from_flat(values))
    evaluation.bad.tell()
    tell_unused(evaluation.records.values(), extra=not is_custom(evaluation.task))
    if evaluation.system_prompt is not None:
        named = repr(evaluation.system_prompt) if evaluation.system_prompt else "none"
        print(f"system prompt: that of training ({named})")
    output, count = evaluation.output.path, len(evaluation.records)
    if evaluation.finished:
        print(f"{evaluation.finished} of {count} examples are in {output} already")
    try:
        summary = evaluation.run()
    except Stopped as stop:
        progress = f"{evaluation.finished} of {count} examples are in {output}"
        raise Stopped(stop.number, f"stopped; {progress}; the same command without `overwrite` resumes it") from None
    written = _tell_summary(summary, output, details=args.details)
    if json_or_empty(output.parent / RUN_FILE).get("status") == "finished":
        page = output.parent / "report.html"
        command = ["stepjepa", "report", str(output.parent), "--output_file", str(page)]
        print(f"next: {shlex.join(command + ['--overwrite'] * page.exists())}")
    return written


EVALUATE = Command(
    evaluate,
    flags=(
        *((EvaluationSettings, "files"), (JsonFlags, "files"), (DetailsFlags, "files")),
        *((TaskOptions, "scoring"), (Sampling, "generation"), (QuantizationFlags, "generation")),
        (ServerSettings, "server"),
    ),
    common="model_path test_file columns output_file overwrite json details task spider_path max_examples retrieval "
    "linear_map projection_heads layer pooling similarity server server_model use_test_prompts max_new_tokens "
    "temperature num_samples batch_size dtype load_in_4bit workers",
    epilog=EPILOG,
    translate=translate_evaluate,
)

SCORE = Command(
    score, flags=((ScoreSettings, "files"), (JsonFlags, "files"), (DetailsFlags, "files"), (TaskOptions, "scoring"))
)

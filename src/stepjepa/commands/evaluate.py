"""``stepjepa evaluate``: generate a model's answers to a test file and score them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import dataclass
from typing import Any

from stepjepa.commands.score import JsonFlags, describe_task
from stepjepa.data.records import tell_bad_records
from stepjepa.errors import UserError
from stepjepa.evaluation.settings import EvaluationSettings, Sampling
from stepjepa.options import add_options, from_args, option
from stepjepa.published import EvaluationFlags, follow_evaluation_flags
from stepjepa.run_folder import RUN_FILE
from stepjepa.signals import Stopped
from stepjepa.tasks.base import TaskOptions
from stepjepa.terminal import lines_to_stderr, print_json, visible_lines

SUMMARY = "generate answers for a test file and score them"

EPILOG = """\
example: stepjepa evaluate --model_path runs/a --test_file test.jsonl \\
  --output_file runs/a/test.jsonl
Writes one JSON line per example and a summary beside the file. The same command
resumes an interrupted evaluation, and prints the summary of a finished one.
Text answers have three scores: exact (the answer and nothing else), prefix (the
answer first) and contains (the answer anywhere); 'stopped' is how often the
model ended its turn by itself. docs/tasks.md describes the tasks."""


COMMON = (
    *("model_path", "test_file", "output_file", "overwrite", "json", "task", "spider_path", "max_examples"),
    *("similarity", "use_test_prompts", "max_new_tokens", "temperature", "num_samples", "batch_size"),
    *("dtype", "load_in_4bit", "workers"),
)
"""Options that ``--help`` shows."""


@dataclass
class ModelFlags:
    """How the weights are loaded, and ``--split_tune_untune``, which changes no result."""

    load_in_4bit: bool = option(False, "load the weights in 4 bits; through bitsandbytes")
    load_in_8bit: bool = option(False, "load the weights in 8 bits; through bitsandbytes")
    split_tune_untune: bool = option(
        False, "with --similarity: right and wrong answers apart, which is done anyway", group="scoring"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser, EvaluationSettings, "files")
    add_options(parser, JsonFlags, "files")
    add_options(parser, TaskOptions, "scoring")
    add_options(parser, Sampling, "generation")
    add_options(parser, ModelFlags, "generation")
    add_options(parser, EvaluationFlags, "of the published scripts (docs/published.md)")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the summary."""
    with lines_to_stderr(args.json):
        summary = _evaluate(args)
    if args.json:
        print_json(summary)
    return 0


def _evaluate(args: argparse.Namespace) -> dict[str, Any]:
    from stepjepa.evaluation.prompts import trained_plain
    from stepjepa.evaluation.run import Evaluation
    from stepjepa.evaluation.summary import format_summary

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("every process would write the same file; start one process, without torchrun")
    follow_evaluation_flags(args)
    if args.load_in_4bit and args.load_in_8bit:
        raise UserError("--load_in_4bit and --load_in_8bit exclude each other; leave one out")
    if args.split_tune_untune and args.similarity is None:
        print("note: --split_tune_untune does nothing without --similarity", file=sys.stderr)
    if not args.plain and trained_plain(args.model_path):
        print("note: the model was trained without a chat format, so it is asked without one (--plain)")
        args.plain = True
    settings = from_args(
        EvaluationSettings,
        args,
        task_options=from_args(TaskOptions, args),
        sampling=from_args(Sampling, args),
        quantization="4bit" if args.load_in_4bit else "8bit" if args.load_in_8bit else None,
    )
    evaluation = Evaluation(settings)
    tell_bad_records(evaluation.bad)
    print(describe_task(args.task, evaluation.task.name))
    if evaluation.system_prompt is not None:
        shown = repr(evaluation.system_prompt) if evaluation.system_prompt else "none"
        print(f"system prompt: that of training ({shown})")
    if evaluation.finished:
        print(f"{evaluation.finished} of {len(evaluation.records)} examples are in {evaluation.output.path} already")
    try:
        summary = evaluation.run()
    except Stopped as stop:
        there = f"{evaluation.finished} of {len(evaluation.records)} examples are in {evaluation.output.path}"
        again = "the same command without --overwrite" if args.overwrite else "the same command"
        raise Stopped(stop.number, f"stopped; {there}; {again} goes on") from None
    print(visible_lines(format_summary(summary)))
    print(f"written: {evaluation.output.path}, {evaluation.output.summary_file}")
    folder = evaluation.output.path.parent
    if (folder / RUN_FILE).is_file():
        # Imported late: summarising a finished file needs torch for nothing else.
        from stepjepa.training.hub import write_card

        write_card(folder)
        shown = shlex.quote(str(folder))
        page = shlex.quote(str(folder / "report.html"))
        print(
            f"next: stepjepa report {shown} --output_file {page}; with other runs: stepjepa compare {shown} OTHER ..."
        )
    return {**summary, "output_file": str(evaluation.output.path), "summary_file": str(evaluation.output.summary_file)}

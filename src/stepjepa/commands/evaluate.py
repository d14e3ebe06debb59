"""``stepjepa evaluate``: let a model answer a test file and score it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Any

from stepjepa.arguments import add_bad_records, add_switch
from stepjepa.commands.scoring_flags import add_scoring_group, describe_task, task_options
from stepjepa.config import DTYPES
from stepjepa.data.records import tell_bad_records
from stepjepa.errors import UserError
from stepjepa.published import add_evaluation_flags, follow_evaluation_flags
from stepjepa.run_folder import RUN_FILE
from stepjepa.signals import Stopped
from stepjepa.terminal import lines_to_stderr, print_json, visible_lines

SUMMARY = "generate answers for a test file and score them"

EPILOG = """\
Writes one JSON line per example to --output_file and a summary beside it. Run again with the same flags, it goes on
where it was stopped; a finished file is only summarised. Three ways to be right are told apart for text: exact
(the answer and nothing else), prefix (the answer first, then perhaps more), contains (somewhere); and stopped says how
often the model ended its turn by itself. The tasks are described in docs/tasks.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_files(parser)
    scoring = add_scoring_group(parser)
    scoring.add_argument(
        "--max_examples", type=int, metavar="N", help="the first N records only; beware of files sorted by label"
    )
    scoring.add_argument(
        "--similarity",
        nargs="?",
        const="llm-jepa",
        choices=("llm-jepa", "step-jepa"),
        help="also measure how alike matched and shuffled views are; needs a run folder",
    )
    add_switch(
        scoring, "--split_tune_untune", help="with --similarity: right and wrong answers apart, which is done anyway"
    )
    _add_generation(parser)
    add_evaluation_flags(parser)


def _add_files(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    # The second names are those of the published script.
    files.add_argument(
        "--model_path", "--model_name", required=True, metavar="PATH", help="run folder, adapter folder or hub id"
    )
    files.add_argument("--test_file", "--input_file", required=True, metavar="FILE", help="JSON lines with 'messages'")
    files.add_argument("--output_file", required=True, metavar="FILE", help="JSON lines, one per example")
    add_bad_records(files)
    files.add_argument(
        "--json", action="store_true", help="the summary as JSON on standard output, lines on standard error"
    )
    add_switch(files, "--overwrite", "--no_skip_existing", help="throw away what --output_file holds (off)")


def _add_generation(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_argument_group("prompt")
    add_switch(
        prompt, "--use_test_prompts", help="the test file's own system prompt; else that of training, where it is known"
    )
    add_switch(prompt, "--plain", help="for models trained without a chat format: question, <|perception|>, answer")
    generation = parser.add_argument_group("generation")
    generation.add_argument("--max_new_tokens", type=int, default=256, metavar="N", help="cut answers off there (256)")
    generation.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (0)")
    generation.add_argument("--top_p", type=float, default=1.0, metavar="P", help="of sampling (1)")
    generation.add_argument("--top_k", type=int, default=0, metavar="K", help="of sampling; 0 for all tokens (0)")
    generation.add_argument(
        "--num_samples", type=int, default=1, metavar="N", help="answers per prompt: pass@1, pass@N, majority (1)"
    )
    generation.add_argument("--seed", type=int, default=42, metavar="N", help="of sampling (42)")
    generation.add_argument("--batch_size", type=int, default=16, metavar="N", help="prompts at a time (16)")
    generation.add_argument("--engine", choices=("hf", "vllm"), default="hf", help="vllm must be installed (hf)")
    generation.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (auto)")
    add_switch(generation, "--load_in_4bit", help="quantized weights, through bitsandbytes (off)")
    add_switch(generation, "--load_in_8bit", help="the same with 8 bits (off)")
    add_switch(generation, "--trust_remote_code", help="run code that comes with the model (off)")


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
    from stepjepa.evaluation.settings import EvaluationSettings, Sampling
    from stepjepa.evaluation.summary import format_summary
    from stepjepa.training.card import write_card

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
    sampling: tuple[str, ...] = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "num_samples")
    same: tuple[str, ...] = (
        "model_path",
        "test_file",
        "output_file",
        "task",
        "scoring",
        "startswith",
        "max_examples",
        "batch_size",
        "engine",
        "dtype",
        "trust_remote_code",
        "use_test_prompts",
        "plain",
        "similarity",
        "overwrite",
        "bad_records",
    )
    evaluation = Evaluation(
        EvaluationSettings(
            **{name: getattr(args, name) for name in same},
            task_options=task_options(args),
            sampling=Sampling(**{name: getattr(args, name) for name in sampling}),
            quantization="4bit" if args.load_in_4bit else "8bit" if args.load_in_8bit else None,
        )
    )
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
        write_card(folder)
        shown = shlex.quote(str(folder))
        page = shlex.quote(str(folder / "report.html"))
        print(
            f"next: stepjepa report {shown} --output_file {page}; with other runs: stepjepa compare {shown} OTHER ..."
        )
    return {**summary, "output_file": str(evaluation.output.path), "summary_file": str(evaluation.output.summary_file)}

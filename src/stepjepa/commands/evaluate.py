"""``stepjepa evaluate``: let a model answer a test file and score it."""

from __future__ import annotations

import argparse

from stepjepa.arguments import add_switch
from stepjepa.config import DTYPES
from stepjepa.tasks.base import TASK_NAMES

SUMMARY = "generate answers for a test file and score them"

EPILOG = """\
Writes one JSON line per example to --output_file and a summary beside it. Run again with the same flags, it goes on
where it was stopped; a finished file is only summarised. Three ways to be right are told apart for text: exact
(the answer and nothing else), prefix (the answer first, then perhaps more), contains (somewhere); and stopped says how
often the model ended its turn by itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    files = parser.add_argument_group("files")
    files.add_argument("--model_path", required=True, metavar="PATH", help="run folder, adapter folder or hub id")
    files.add_argument("--test_file", required=True, metavar="FILE", help="JSON lines with 'messages'")
    files.add_argument("--output_file", required=True, metavar="FILE", help="JSON lines, one per example")
    add_switch(files, "--overwrite", help="throw away what --output_file holds (off)")
    scoring = parser.add_argument_group("scoring")
    scoring.add_argument(
        "--task",
        choices=TASK_NAMES,
        default="auto",
        help="generic: text; boxed: numbers in \\boxed{} or after ####; auto: by the right answers (auto)",
    )
    scoring.add_argument(
        "--max_examples", type=int, metavar="N", help="the first N records only; beware of files sorted by label"
    )
    scoring.add_argument(
        "--similarity",
        choices=("llm-jepa", "step-jepa"),
        help="also measure how alike matched and shuffled views are; needs a run folder",
    )
    generation = parser.add_argument_group("generation")
    generation.add_argument("--max_new_tokens", type=int, default=256, metavar="N", help="cut answers off there (256)")
    generation.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (0)")
    generation.add_argument("--seed", type=int, default=42, metavar="N", help="of sampling (42)")
    generation.add_argument("--batch_size", type=int, default=16, metavar="N", help="prompts at a time (16)")
    generation.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (auto)")
    add_switch(generation, "--trust_remote_code", help="run code that comes with the model (off)")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the summary."""
    from stepjepa.evaluation import Evaluation, EvaluationSettings
    from stepjepa.summary import format_summary

    evaluation = Evaluation(
        EvaluationSettings(
            model_path=args.model_path,
            test_file=args.test_file,
            output_file=args.output_file,
            task=args.task,
            max_examples=args.max_examples,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            batch_size=args.batch_size,
            seed=args.seed,
            dtype=args.dtype,
            trust_remote_code=args.trust_remote_code,
            similarity=args.similarity,
            overwrite=args.overwrite,
        )
    )
    how = "recognised by the right answers" if args.task == "auto" else "as asked for"
    print(f"task: {evaluation.task.name} ({how})")
    if evaluation.finished:
        print(f"{evaluation.finished} of {len(evaluation.records)} examples are in {evaluation.output} already")
    print(format_summary(evaluation.run()))
    print(f"written: {evaluation.output}, {evaluation.summary_file}")
    return 0

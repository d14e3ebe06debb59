"""What a training run says when it has ended: what came of it, where everything is, and what to type next."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepjepa.checkpoints import checkpoints
from stepjepa.run_folder import METRICS_FILE, RUN_FILE
from stepjepa.terminal import duration


def next_command(args: argparse.Namespace) -> list[str]:
    """The command that evaluates the run, as a list of words; ``TEST.jsonl`` where no file was held out.

    Args:
        args: of ``commands.train``.
    """
    folder = args.output_dir
    words = ["stepjepa", "evaluate", "--model_path", folder]
    words += ["--test_file", args.eval_file or "TEST.jsonl", "--output_file", str(Path(folder) / "test.jsonl")]
    if args.eval_generate is not None:
        words += ["--max_new_tokens", str(args.eval_max_new_tokens)] if args.eval_max_new_tokens != 256 else []
        words += ["--task", args.eval_task] if args.eval_task != "auto" else []
        words += ["--spider_path", args.spider_path] if args.spider_path is not None else []
        words += ["--missing_databases", args.missing_databases] if args.missing_databases != "error" else []
    words += [f"--{name}" for name in ("trust_remote_code", "load_in_4bit", "load_in_8bit") if getattr(args, name)]
    return words


def closing_rows(folder: Path, record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows to print after the last step.

    Args:
        folder: of the run.
        record: as ``run.json`` has it, finished.
    """
    results = record["results"]
    losses = [("LM loss", results["last_log"].get("lm_loss")), ("held out", results.get("eval_lm_loss"))]
    told = ", ".join(f"{name} {value:.4f}" for name, value in losses if value is not None)
    steps = f"{results['steps']:,} step{'' if results['steps'] == 1 else 's'}"
    taken = f"{steps}, {results['tokens']:,.0f} tokens in {duration(results['train_seconds'])}"
    held = [RUN_FILE, METRICS_FILE]
    if count := len(checkpoints(folder)):
        held.append(f"{count} checkpoint{'' if count == 1 else 's'}")
    return [
        ("done", f"{taken}{f'; {told}' if told else ''}"),
        ("run folder", f"{folder} (the model, {', '.join(held)})"),
    ]


def closing_json(args: argparse.Namespace, record: Mapping[str, Any]) -> dict[str, Any]:
    """The same for programs.

    Args:
        args: of ``commands.train``.
        record: as ``run.json`` has it, finished.

    Returns:
        ``status``, ``run_folder``, ``model``, ``jepa``, ``encoding``, ``counts``, ``parameters`` and ``results`` as in
        ``run.json``, and ``next``, the command that evaluates the run.
    """
    same = ("status", "model", "jepa", "encoding", "parameters", "counts", "eval_counts", "results")
    return {
        "run_folder": str(args.output_dir),
        **{name: record.get(name) for name in same},
        "next": next_command(args),
    }

"""The output of a finished run: results, folder, and the command that evaluates it; as text and as JSON."""

import shlex
from pathlib import Path

from stepjepa.base.counting import counted
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import duration, print_rows
from stepjepa.base.typed_json import to_json
from stepjepa.config.run import RunConfig
from stepjepa.store.folder import METRICS_FILE, PLOT_FILE, RUN_FILE
from stepjepa.store.record import Results, RunRecord

SHARED_WITH_EVALUATION = {
    "max_new_tokens": "eval_max_new_tokens",
    "task": "eval_task",
    **{name: name for name in ("spider_path", "missing_databases", "columns", "trust_remote_code")},
    **{name: name for name in ("load_in_4bit", "load_in_8bit")},
}
"""Setting of ``stepjepa evaluate`` -> the setting of a run from which an evaluation of that run takes its value."""


def evaluation_settings(run: RunConfig) -> JsonObject:
    """Return the settings that the evaluation of a run takes over from it, by their names there, without defaults."""
    values = {name: (getattr(run, own), getattr(RunConfig, own)) for name, own in SHARED_WITH_EVALUATION.items()}
    return {name: value for name, (value, default) in values.items() if value != default}


def next_command(run: RunConfig) -> list[str]:
    """Return the command that evaluates a run on its held-out file; on ``TEST.jsonl`` where no file was held out.

    Answers to held-out records are not named as those to a test file, since settings are chosen on the former.
    """
    folder, file = str(run.output_dir), run.eval_file or "TEST.jsonl"
    command = ["stepjepa", "evaluate", "--model_path", folder, "--test_file", file]
    command += ["--output_file", str(Path(folder) / ("held-out.jsonl" if run.eval_file else "test.jsonl"))]
    for name, value in evaluation_settings(run).items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        command += [f"--{name}", *map(str, values)]
    return command


def last_lines(folder: Path, results: Results) -> list[tuple[str, str]]:
    """Return the rows to print after the last step: the ``results``, and what the run ``folder`` holds."""
    losses = [
        ("LM loss", results.last_log.get("lm_loss")),
        ("held-out LM loss", results.evaluation.get("eval_lm_loss")),
    ]
    shown_losses = [f"{name} {value:.4f}" for name, value in losses if value is not None]
    if results.best_step is not None:
        shown_losses.append(f"the model is the best checkpoint, of step {results.best_step:,}")
    steps = counted(results.steps, "step")
    cost = f"{steps}, {results.tokens or 0:,.0f} tokens in {duration(results.train_seconds or 0.0)}"
    # A run that logged nothing has no picture.
    files = ["the model", RUN_FILE, METRICS_FILE, *([PLOT_FILE] if (folder / PLOT_FILE).is_file() else [])]
    return [("done", "; ".join([cost, *shown_losses])), ("run folder", f"{folder} ({', '.join(files)})")]


def print_finished(run: RunConfig, record: RunRecord) -> None:
    """Print the outcome of a run, its folder and the next command; nothing for a run without results."""
    if record.results is None:
        return
    print_rows(last_lines(Path(str(run.output_dir)), record.results))
    # On a line of its own, so that it can be copied from a terminal of any width.
    chosen_on = "next, on the held-out records (settings are chosen on these, and reported on other test records)"
    label = chosen_on if run.eval_file else "next, with your test records in TEST.jsonl"
    print(f"{label}: {shlex.join(next_command(run))}", flush=True)


def finished_json(run: RunConfig, record: RunRecord) -> JsonObject:
    """Return the JSON output of a run: folder, parts of ``run.json``, and ``next``, the command that evaluates it."""
    names = ("status", "model", "jepa", "encoding", "parameters", "counts", "eval_counts", "results")
    parts = {name: to_json(getattr(record, name)) for name in names}
    return {"run_folder": str(run.output_dir), **parts, "next": next_command(run)}

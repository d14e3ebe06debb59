"""A run folder with an evaluation in it, as a comparison needs it; and whether several can be compared."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stepjepa.arguments import NEEDS_VIEWS, PUBLISHED_WITH_REGULAR
from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.evaluation.output import model_fingerprint
from stepjepa.files import read_jsonl
from stepjepa.run_folder import RUN_FILE, read_run

SUMMARY = ".summary.json"

MEASURES = ("headline", "lenient", "stopped")
"""What is measured of every answer: the score that decides, the one that forgives what follows, whether it ended."""

FIGURES = ("gold_loss", "matched", "shuffled", "tokens", "seconds", "flops")
"""What is measured of a run as a whole: LM loss on the right answers, similarity of matched and of shuffled views;
tokens, seconds and floating-point operations of training."""

# What regular runs have no use for.
_OF_VIEWS = (*NEEDS_VIEWS, *PUBLISHED_WITH_REGULAR, "jepa_loss_type", "infonce_temperature", "step_separator")

# Fields of TrainingArguments that leave the trained weights as they are, and the seeds.
_NO_SETTING = frozenset(
    (
        *("seed", "data_seed", "output_dir", "run_name", "project", "disable_tqdm", "report_to", "debug", "local_rank"),
        *("prediction_loss_only", "push_to_hub", "skip_memory_metrics", "resume_from_checkpoint", "use_cpu"),
        *("enable_jit_checkpoint", "per_device_eval_batch_size", "batch_eval_metrics", "ddp_timeout"),
    )
)
_NO_SETTING_BEGINS = ("logging_", "log_", "save_", "hub_", "eval_", "do_", "include_", "trackio_", "dataloader_")
# The checkpoint that is kept depends on these.
_WITH_BEST = ("eval_strategy", "eval_steps", "save_strategy", "save_steps")
# Of how a model was loaded, what makes another model of it.
_LOADED = ("pretrain", "train_tokenizer", "quantized")
_RENAMED = {"per_device_train_batch_size": "batch_size", "gradient_accumulation_steps": "grad_accum"}

# Settings of an evaluation in which runs may differ, or that the summary says elsewhere.
_NO_PROTOCOL = frozenset(
    (
        *("model", "base_model", "predictions", "similarity", "seed", "batch_size"),
        *("test_file", "examples", "task", "headline"),
    )
)

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")


@dataclass(frozen=True)
class EvaluatedRun:
    """What one run came to.

    Attributes:
        folder: of the run.
        evaluation: name of the evaluation in it.
        seed: of training; ``7/3`` where order and weights had seeds of their own (``--data_seed 3``).
        settings: everything that decides what is trained, apart from data and seed; the arm.
        protocol: what must be equal for runs to be compared: data, test, task, how answers are made and scored.
        versions: of the packages.
        steps: optimizer steps.
        indices: of the examples that were evaluated, counted from 0 in the test file.
        examples: for each of ``MEASURES`` one number per example, in the order of ``indices``; None if unknown.
        figures: for each of ``FIGURES`` a number; None if it is unknown or not finite.
        model: fingerprint of the model that was evaluated, if it is known.
        views: whose similarity was measured: ``llm-jepa`` or ``step-jepa``; None if it was not.
        loaded: how the model was loaded for training: dtype, chat template, attention; empty if it is not known.
    """

    folder: Path
    evaluation: str
    seed: str
    settings: dict[str, Any]
    protocol: dict[str, Any]
    versions: dict[str, str]
    steps: int
    indices: list[int]
    examples: dict[str, list[float] | None]
    figures: dict[str, float | None]
    model: str | None
    views: str | None
    loaded: dict[str, Any]

    @property
    def files(self) -> list[Path]:
        """What was read."""
        return [self.folder / name for name in (RUN_FILE, f"{self.evaluation}{SUMMARY}", f"{self.evaluation}.jsonl")]

    def mean(self, measure: str) -> float | None:
        """The mean of one of ``MEASURES``."""
        values = self.examples[measure]
        return None if values is None else math.fsum(values) / len(values)

    def verdicts(self, measure: str) -> list[bool] | None:
        """Right or wrong for each example; None where a score lies between, as that of several samples may."""
        values = self.examples[measure]
        if values is None or not all(value in (0, 1) for value in values):
            return None
        return [bool(value) for value in values]


def read_evaluated_run(folder: str | os.PathLike[str], evaluation: str | None = None) -> EvaluatedRun:
    """Read a run folder.

    Args:
        folder: a finished run with an evaluation in it.
        evaluation: which one, as in ``--output_file NAME.jsonl``; needed only where there are several.

    Raises:
        UserError: no run folder, an unfinished run, no such evaluation, one of another model, or files that can't be
            read.
    """
    path = Path(folder)
    run = read_run(path)
    if run.get("status") != "finished":
        raise UserError(
            f"the run is not finished (status {run.get('status')}); go on with --resume_from_checkpoint last, or leave "
            "it out",
            path=path,
        )
    summary_file = _summary_file(path, evaluation)
    try:
        summary = json.loads(summary_file.read_text(encoding="utf-8"))
        _refuse_another_model(summary_file, summary)
        indices, examples = _examples(summary_file, summary)
        similarity = summary.get("similarity") or {}
        return EvaluatedRun(
            path,
            summary_file.name.removesuffix(SUMMARY),
            _seed(run["training"]),
            _settings(run),
            _protocol(run, summary),
            run.get("versions", {}),
            run["results"]["steps"],
            indices,
            examples,
            _figures(
                gold_loss=summary["gold_loss"],
                matched=similarity.get("matched_similarity"),
                shuffled=similarity.get("shuffled_similarity"),
                tokens=run["results"]["tokens"],
                seconds=run["results"]["train_seconds"],
                # Runs of an earlier version did not count them.
                flops=run["results"].get("flops"),
            ),
            summary.get("settings", {}).get("model"),
            summary.get("settings", {}).get("similarity"),
            dict(run.get("loaded") or {}),
        )
    except UserError:
        raise
    except KeyError as error:
        raise UserError(
            f"{RUN_FILE} or {summary_file.name} lacks {error}; train and evaluate again", path=path
        ) from None
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"can't be read as an evaluation ({error}); evaluate again", path=summary_file) from None


def _figures(**values: float | None) -> dict[str, float | None]:
    # A model that has diverged has a loss that is no number.
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}


def _summary_file(folder: Path, evaluation: str | None) -> Path:
    names = sorted(file.name.removesuffix(SUMMARY) for file in folder.glob(f"*{SUMMARY}"))
    if evaluation is None:
        if len(names) == 1:
            return folder / f"{names[0]}{SUMMARY}"
        if names:
            raise UserError(f"holds several evaluations; pass --evaluation with one of {', '.join(names)}", path=folder)
        raise UserError(
            "holds no finished evaluation; run 'stepjepa evaluate' with an --output_file in the run folder", path=folder
        )
    wanted = evaluation.removesuffix(SUMMARY).removesuffix(".jsonl")
    if wanted not in names:
        there = f"there is {', '.join(names)}" if names else "there is none"
        raise UserError(f"holds no finished evaluation '{wanted}' ({there}); evaluate the run", path=folder)
    return folder / f"{wanted}{SUMMARY}"


def _seed(training: dict[str, Any]) -> str:
    seed, of_data = training["seed"], training.get("data_seed")
    return f"{seed}" if of_data in (None, seed) else f"{seed}/{of_data}"


def _settings(run: dict[str, Any]) -> dict[str, Any]:
    """Flat; what does not apply is left out, so that it never tells two arms apart."""
    # A run of an earlier version did what the default of a newer option does.
    jepa = {each.name: each.default for each in fields(JepaConfig)} | run["jepa"]
    idle = _OF_VIEWS if jepa["mode"] == "regular" else ()
    settings = {name: value for name, value in jepa.items() if name not in idle}
    if jepa["jepa_loss_type"] != "infonce":
        settings.pop("infonce_temperature", None)
    lora = run.get("lora")
    settings |= {"model": run["model"], "lora": lora is not None}
    settings |= {f"lora_{name}": value for name, value in (lora or {}).items()}
    if lora is not None and lora["alpha"] is None:
        settings["lora_alpha"] = 2 * lora["rank"]
    settings |= {name: (run.get("loaded") or {}).get(name) or False for name in _LOADED}
    training = run["training"]
    kept = _WITH_BEST if training.get("load_best_model_at_end") else ()
    for name, value in training.items():
        if name in kept or not (name in _NO_SETTING or name.startswith(_NO_SETTING_BEGINS)):
            settings[_RENAMED.get(name, name)] = value
    if "order" in run:
        settings["batch_size"] = run["order"]["records_per_micro_step"]
    settings["same_flop"] = bool(run.get("same_flop"))
    if settings["same_flop"]:
        # Worked out from the compute of these epochs, with the order of the data, and so with the seed.
        settings.pop("max_steps", None)
    elif settings.get("max_steps", -1) > 0:
        settings.pop("num_train_epochs", None)
    return settings


def _protocol(run: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    protocol: dict[str, Any] = {}
    for part in ("train", "data"):
        if part in run["data"]:
            found = run["data"][part]
            protocol |= {"training data (sha256)": found["sha256"]}
            protocol |= {name: found[name] for name in ("eval_split", "split_seed") if name in found}
    protocol["system prompts of training"] = run.get("system_prompts")
    protocol["test file (sha256)"] = summary["test_fingerprint"]
    protocol["number of examples"] = summary["n"]
    protocol |= {name: summary[name] for name in ("task", "headline", "lenient")}
    settings = summary.get("settings", {})
    return protocol | {name: value for name, value in settings.items() if name not in _NO_PROTOCOL}


def _refuse_another_model(summary_file: Path, summary: dict[str, Any]) -> None:
    """Refuse an evaluation of a checkpoint, or of what the folder held before; weights may have been removed since."""
    folder, evaluated = summary_file.parent, summary.get("settings", {}).get("model")
    if evaluated is None or not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        return
    if evaluated != model_fingerprint(folder):
        raise UserError(
            "is of another model than the one that is in the folder now; evaluate that one, with --overwrite",
            path=summary_file,
        )


def _examples(summary_file: Path, summary: dict[str, Any]) -> tuple[list[int], dict[str, list[float] | None]]:
    """The examples and their scores, checked against the means of the summary."""
    path = summary_file.with_name(summary_file.name.removesuffix(SUMMARY) + ".jsonl")
    lines = [line for _, line in read_jsonl(path, "file of an evaluation")]
    indices: list[int] = [line.get("index", -1) for line in lines]
    if len(lines) != summary["n"] or indices != sorted(set(indices)):
        raise UserError(
            f"its {len(lines)} lines are not the {summary['n']} examples of {summary_file.name}; evaluate again",
            path=path,
        )
    stopped = [line["stopped"] for line in lines]
    found: dict[str, list[float] | None] = {
        name: [float(line["scores"][summary[name]]) for line in lines] for name in ("headline", "lenient")
    }
    found["stopped"] = None if None in stopped else [float(value) for value in stopped]
    for name, values in found.items():
        if values is not None:
            mean = summary["scores"][summary.get(name, name)]["mean"]
            if not math.isclose(math.fsum(values) / len(values), mean, abs_tol=1e-9):
                raise UserError(f"its lines don't give the mean of {summary_file.name}; evaluate again", path=path)
    return indices, found


def refuse_different(runs: Sequence[EvaluatedRun]) -> None:
    """Refuse runs that can't be compared.

    Raises:
        UserError: one of them has other data, another test, or was asked or scored in another way than the first.
    """
    first = runs[0]
    for run in runs[1:]:
        for what in first.protocol | run.protocol:
            ours, theirs = run.protocol.get(what), first.protocol.get(what)
            if ours != theirs:
                raise UserError(
                    f"can't be compared with {first.folder}: {what.replace('_', ' ')} is {_short(ours)} instead of "
                    f"{_short(theirs)}; train and evaluate all runs alike, or leave this one out",
                    path=run.folder,
                )
        if other := set(run.indices) ^ set(first.indices):
            raise UserError(
                f"can't be compared with {first.folder}: only one of them was asked example {min(other)} (counted from "
                "0); evaluate all runs alike, or leave this one out",
                path=run.folder,
            )


def _short(value: Any) -> str:
    text = "unknown" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."

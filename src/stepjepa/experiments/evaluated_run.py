"""A run folder with an evaluation in it, every field checked; and whether several can be compared.

``report``, ``compare`` and ``sweep`` read runs here and nowhere else.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stepjepa.arguments import NEEDS_VIEWS, PUBLISHED_WITH_REGULAR
from stepjepa.config import JepaConfig
from stepjepa.data.prompts import FORMS
from stepjepa.errors import UserError, shown
from stepjepa.evaluation.output import model_fingerprint
from stepjepa.evaluation.summary import describe_trained_on
from stepjepa.fields import Fields, checked_fields, read_fields
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

_TRAIN_AGAIN = "restore the file, or train again into another folder"
_EVALUATE_AGAIN = "evaluate the run again, with --overwrite"


@dataclass(frozen=True)
class EvaluatedRun:
    """Results of one run.

    Attributes:
        evaluation: name of the evaluation in the folder.
        seed: of training; ``7/3`` where order and weights had seeds of their own (``--data_seed 3``).
        settings: everything that decides what is trained, apart from data and seed; the arm.
        protocol: what must be equal for runs to be compared: data, test, task, how answers are made and scored.
        indices: of the examples that were evaluated, counted from 0 in the test file.
        examples: for each of ``MEASURES`` one number per example, in the order of ``indices``; None if unknown.
        figures: for each of ``FIGURES`` a number; None if it is unknown or not finite.
        model: fingerprint of the model that was evaluated, if it is known.
        views: whose similarity was measured: ``llm-jepa`` or ``step-jepa``; None if it was not.
        loaded: how the model was loaded for training: dtype, chat template, attention; empty if it is not known.
        trained_on: which share of the test prompts was trained on, in words; None if none was, or it is not known.
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
    trained_on: str | None = None

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
    run = checked_fields(read_run(path), path / RUN_FILE, _TRAIN_AGAIN)
    if run.text("status") != "finished":
        raise UserError(
            f"the run is not finished (status {shown(run.text('status'))}); go on with --resume_from_checkpoint last, "
            "or leave it out",
            path=path,
        )
    file = _summary_file(path, evaluation)
    summary = read_fields(file, "summary of an evaluation", _EVALUATE_AGAIN)
    if is_of_another_model(path, summary.values):
        raise UserError(
            "is of another model than the one that is in the folder now; evaluate that one, with --overwrite", path=file
        )
    settings, protocol = _settings(run), _protocol(run, summary)
    indices, examples = _examples(file, summary)
    results, similarity = run.inner("results"), summary.inner_or_none("similarity")
    seen = summary.inner_or_none("trained_on")
    evaluated, loaded, versions = (
        fields.inner_or_none(name) for fields, name in ((summary, "settings"), (run, "loaded"), (run, "versions"))
    )
    return EvaluatedRun(
        path,
        file.name.removesuffix(SUMMARY),
        _seed(run.inner("training")),
        settings,
        protocol,
        {} if versions is None else {name: versions.text(name) for name in versions},
        results.whole("steps", 0),
        indices,
        examples,
        {
            "gold_loss": summary.number_or_none("gold_loss"),
            "matched": None if similarity is None else similarity.number_or_none("matched_similarity"),
            "shuffled": None if similarity is None else similarity.number_or_none("shuffled_similarity"),
            "tokens": results.amount_or_none("tokens"),
            "seconds": results.amount_or_none("train_seconds"),
            # Runs of an earlier version did not count them.
            "flops": results.amount_or_none("flops"),
        },
        None if evaluated is None else evaluated.text_or_none("model"),
        None if evaluated is None else evaluated.text_or_none("similarity"),
        {} if loaded is None else dict(loaded.values),
        None if seen is None else describe_trained_on({form: seen.number(form) for form in FORMS}),
    )


def _summary_file(folder: Path, evaluation: str | None) -> Path:
    names = sorted(file.name.removesuffix(SUMMARY) for file in folder.glob(f"*{SUMMARY}"))
    if evaluation is None and not names:
        raise UserError(
            "holds no finished evaluation; run 'stepjepa evaluate' with an --output_file in the run folder", path=folder
        )
    if evaluation is None and len(names) > 1:
        raise UserError(
            f"holds several evaluations ({', '.join(names)}); leave one in it, or name one where the command takes "
            "--evaluation",
            path=folder,
        )
    wanted = names[0] if evaluation is None else evaluation.removesuffix(SUMMARY).removesuffix(".jsonl")
    if wanted not in names:
        there = ", ".join(names) or "none"
        raise UserError(f"holds no finished evaluation '{wanted}' (there is {there}); evaluate the run", path=folder)
    return folder / f"{wanted}{SUMMARY}"


def _seed(training: Fields) -> str:
    seed, of_data = training.whole("seed"), training.whole_or_none("data_seed")
    return f"{seed}" if of_data in (None, seed) else f"{seed}/{of_data}"


def _settings(run: Fields) -> dict[str, Any]:
    """Flat; what does not apply is left out, so that it never tells two arms apart."""
    own = run.inner("jepa")
    own.text("mode")
    # A run of an earlier version did what the default of a newer option does.
    jepa = {each.name: each.default for each in fields(JepaConfig)} | dict(own.values)
    idle = _OF_VIEWS if jepa["mode"] == "regular" else ()
    settings = {name: value for name, value in jepa.items() if name not in idle}
    if jepa["jepa_loss_type"] != "infonce":
        settings.pop("infonce_temperature", None)
    lora = run.inner_or_none("lora")
    settings |= {"model": run.text("model"), "lora": lora is not None}
    if lora is not None:
        settings |= {f"lora_{name}": value for name, value in lora.values.items()}
        if lora.number_or_none("alpha") is None:
            settings["lora_alpha"] = 2 * lora.whole("rank", 1)
    loaded = run.inner_or_none("loaded")
    settings |= {name: (loaded.values.get(name) if loaded is not None else None) or False for name in _LOADED}
    training = run.inner("training")
    kept = _WITH_BEST if training.values.get("load_best_model_at_end") else ()
    for name, value in training.values.items():
        if name in kept or not (name in _NO_SETTING or name.startswith(_NO_SETTING_BEGINS)):
            settings[_RENAMED.get(name, name)] = value
    order = run.inner_or_none("order")
    if order is not None:
        settings["batch_size"] = order.whole("records_per_micro_step", 1)
    settings["same_flop"] = bool(run.values.get("same_flop"))
    if settings["same_flop"]:
        # Worked out from the compute of these epochs, with the order of the data, and so with the seed.
        settings.pop("max_steps", None)
    elif (training.whole_or_none("max_steps") or 0) > 0:
        settings.pop("num_train_epochs", None)
    return settings


def _protocol(run: Fields, summary: Fields) -> dict[str, Any]:
    protocol: dict[str, Any] = {}
    data = run.inner("data")
    for part in ("train", "data"):
        found = data.inner_or_none(part)
        if found is not None:
            protocol |= {"training data (sha256)": _identity(found)}
            protocol |= {name: found.values[name] for name in ("eval_split", "split_seed") if name in found}
    protocol["system prompts of training"] = run.values.get("system_prompts")
    protocol["test file (sha256)"] = summary.text("test_fingerprint")
    protocol["number of examples"] = summary.whole("n", 1)
    protocol |= {name: summary.text(name) for name in ("task", "headline", "lenient")}
    settings = summary.inner_or_none("settings")
    known = {} if settings is None else settings.values
    return protocol | {name: value for name, value in known.items() if name not in _NO_PROTOCOL}


def _identity(data: Fields) -> str:
    """What tells a file of training data apart; one that was streamed was not read to its end for that."""
    if "sha256" in data:
        return data.text("sha256")
    return f"{data.text('sha256_of_first_mib')} of the first MiB, {data.whole('bytes', 0)} bytes"


def is_of_another_model(folder: Path, summary: Mapping[str, Any]) -> bool:
    """Whether an evaluation is of a checkpoint, or of what the folder held before; weights may have been removed."""
    settings = summary.get("settings")
    # Answers of another program name no model.
    evaluated = settings.get("model") if isinstance(settings, dict) else None
    has_weights = any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
    return evaluated is not None and has_weights and evaluated != model_fingerprint(folder)


def _examples(file: Path, summary: Fields) -> tuple[list[int], dict[str, list[float] | None]]:
    """The examples and their scores, checked against the means of the summary."""
    path = file.with_name(file.name.removesuffix(SUMMARY) + ".jsonl")
    lines = [
        checked_fields(value, path, _EVALUATE_AGAIN, line=number)
        for number, value in read_jsonl(path, "file of answers")
    ]
    indices = [line.whole("index", 0) for line in lines]
    count = summary.whole("n", 1)
    if len(lines) != count or indices != sorted(set(indices)):
        raise UserError(
            f"its {len(lines)} lines are not the {count} examples of {file.name}; {_EVALUATE_AGAIN}", path=path
        )
    stopped = [line.number_or_none("stopped") for line in lines]
    ended = [value for value in stopped if value is not None]
    found: dict[str, list[float] | None] = {
        name: [line.inner("scores").number(summary.text(name)) for line in lines] for name in ("headline", "lenient")
    }
    found["stopped"] = ended if len(ended) == len(stopped) else None
    scores = summary.inner("scores")
    means = {name: scores.inner(name).number("mean") for name in scores}
    for name, values in found.items():
        if values is not None:
            score = "stopped" if name == "stopped" else summary.text(name)
            if score not in means:
                raise scores.wrong(score, "the mean of a score")
            if not math.isclose(math.fsum(values) / len(values), means[score], abs_tol=1e-9):
                raise UserError(f"its lines don't give the mean of {file.name}; {_EVALUATE_AGAIN}", path=path)
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

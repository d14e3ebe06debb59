"""Run folders: which ones are meant, and an evaluated one; whether several can be compared."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import read_jsonl
from stepjepa.config.jepa import DEFAULTS, NEEDS_VIEWS
from stepjepa.evaluation.output import describe_trained_on, model_fingerprint
from stepjepa.fields import Fields, read_fields
from stepjepa.store.folder import RUN_FILE, read_run

SUMMARY = ".summary.json"
SWEEP_FILE = "sweep.json"

MEASURES = ("headline", "lenient", "stopped")
"""What is measured of every answer: the score that decides, the one that forgives what follows, whether it ended."""

FIGURES = ("gold_loss", "matched", "shuffled", "tokens", "seconds", "flops")
"""What is measured of a run as a whole: LM loss on the right answers, similarity of matched and of shuffled views;
tokens, seconds and floating-point operations of training."""

# Fields of TrainingArguments that leave the trained weights as they are, and the seeds.
_NO_SETTING = (
    *("seed", "data_seed", "output_dir", "run_name", "project", "disable_tqdm", "report_to", "debug", "local_rank"),
    *("prediction_loss_only", "push_to_hub", "skip_memory_metrics", "resume_from_checkpoint", "use_cpu"),
    *("enable_jit_checkpoint", "per_device_eval_batch_size", "batch_eval_metrics", "ddp_timeout"),
)
_NO_SETTING_BEGINS = ("logging_", "log_", "save_", "hub_", "eval_", "do_", "include_", "trackio_", "dataloader_")
# The checkpoint that is kept depends on these.
_WITH_BEST = ("eval_strategy", "eval_steps", "save_strategy", "save_steps")
_RENAMED = {"per_device_train_batch_size": "batch_size", "gradient_accumulation_steps": "grad_accum"}

# Settings of an evaluation in which runs may differ, or that the summary says elsewhere.
_NO_PROTOCOL = (
    *("model", "base_model", "predictions", "similarity", "seed", "batch_size"),
    *("test_file", "examples", "task", "headline"),
)

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")

_TRAIN_AGAIN = "restore the file, or train again into another folder"
_EVALUATE_AGAIN = "evaluate the run again, with --overwrite"


@dataclass(frozen=True)
class RunFolder:
    """A run folder, with the arm of its sweep (None outside of sweeps) and whether that arm is the baseline."""

    folder: Path
    arm: str | None = None
    is_baseline: bool = False


def find_run_folders(folders: Sequence[str | os.PathLike[str]]) -> list[RunFolder]:
    """The run folders that are meant: the folder of a sweep stands for its finished trials, of which one is needed."""
    found: dict[Path, RunFolder] = {}
    for folder in map(Path, folders):
        is_sweep = (folder / SWEEP_FILE).is_file() and not (folder / RUN_FILE).is_file()
        for each in _finished_trials(folder) if is_sweep else [RunFolder(folder)]:
            if found.setdefault(each.folder.resolve(), each) is not each:
                raise UserError("is named twice; leave it out once", path=each.folder)
    return list(found.values())


def _finished_trials(folder: Path) -> list[RunFolder]:
    sweep, found = read_fields(folder / SWEEP_FILE, "file of a sweep", "start the sweep again"), []
    try:
        baseline = sweep.values["grid"]["baseline"]
        trials = [(folder / each["name"], str(each["label"]), each["arm"]) for each in sweep.values["trials"]]
    except (KeyError, TypeError):
        raise sweep.fault("is damaged") from None
    for run, label, arm in trials:
        # A sweep file from another machine must not name folders outside of the sweep.
        inside = run.resolve().is_relative_to(folder.resolve())
        if inside and (run / RUN_FILE).is_file() and read_run(run).get("status") == "finished":
            found.append(RunFolder(run, label, arm == baseline))
    if not found:
        raise UserError("none of the trials of this sweep is finished; go on with it, or name run folders", path=folder)
    return found


def run_names(folders: Sequence[Path]) -> list[str]:
    """Name each run by its path below the folder that holds them all: sweeps give many the same last name."""
    paths = [folder.resolve() for folder in folders]
    parent = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(parent)) for path in paths]


@dataclass(frozen=True)
class EvaluatedRun:
    """Results of one run. What is not known is None or empty."""

    folder: Path
    evaluation: str  # its name in the folder
    seed: str  # of training; 7/3 where order and weights had seeds of their own (--data_seed 3)
    settings: dict[str, Any]  # all that decides what is trained, apart from data and seed: the arm
    protocol: dict[str, Any]  # what must be equal for runs to be compared: data, test, how answers are made and scored
    versions: dict[str, str]
    steps: int
    indices: list[int]  # of the examples that were evaluated, counted from 0 in the test file
    examples: dict[str, list[float] | None]  # for each of MEASURES a number per example
    figures: dict[str, float | None]  # for each of FIGURES a number
    model: str | None  # fingerprint of the model that was evaluated
    views: str | None  # whose similarity was measured: llm-jepa or step-jepa
    loaded: dict[str, Any]  # how the model was loaded for training: dtype, chat template, attention
    trained_on: str | None = None  # which share of the test prompts was trained on, in words

    def mean(self, measure: str) -> float | None:
        """The mean of one of ``MEASURES``, or one of ``FIGURES``."""
        if measure in FIGURES:
            return self.figures[measure]
        values = self.examples[measure]
        return None if values is None else math.fsum(values) / len(values)

    def verdicts(self, measure: str) -> list[bool] | None:
        """Right or wrong for each example; None where a score lies between, as that of several samples may."""
        values = self.examples[measure]
        return [bool(value) for value in values] if values is not None and set(values) <= {0, 1} else None


def read_evaluated_run(folder: str | os.PathLike[str], evaluation: str | None = None) -> EvaluatedRun:
    """Read a finished run and the evaluation ``NAME.jsonl`` in it, which must be named only where there are several."""
    path = Path(folder)
    run = Fields(read_run(path), path / RUN_FILE, _TRAIN_AGAIN)
    if (status := run.text("status")) != "finished":
        raise UserError(f"the run is not finished (status {shown(status)}); resume it, or leave it out", path=path)
    file = _summary_file(path, evaluation)
    summary = read_fields(file, "summary of an evaluation", _EVALUATE_AGAIN)
    if is_of_another_model(path, summary.values):
        raise UserError(f"is of another model than the folder holds now; {_EVALUATE_AGAIN}", path=file)
    results, similarity, evaluated = run.inner("results"), _inner(summary, "similarity"), _inner(summary, "settings")
    shares = summary.inner_or_none("trained_on")
    training = run.inner("training")
    seed, data_seed = training.whole("seed"), training.whole_or_none("data_seed")
    # In this order, in which errors are of most use.
    settings, protocol = _settings(run), _protocol(run, summary)
    indices, examples = _examples(file, summary)
    return EvaluatedRun(
        folder=path,
        evaluation=file.name.removesuffix(SUMMARY),
        seed=f"{seed}" if data_seed in (None, seed) else f"{seed}/{data_seed}",
        settings=settings,
        protocol=protocol,
        versions={name: str(version) for name, version in _inner(run, "versions").values.items()},
        steps=results.whole("steps", 0),
        indices=indices,
        examples=examples,
        figures={
            "gold_loss": summary.number_or_none("gold_loss"),
            "matched": similarity.number_or_none("matched_similarity"),
            "shuffled": similarity.number_or_none("shuffled_similarity"),
            "tokens": results.number_or_none("tokens"),
            "seconds": results.number_or_none("train_seconds"),
            # The first edition did not count them.
            "flops": results.number_or_none("flops"),
        },
        model=evaluated.text_or_none("model"),
        views=evaluated.text_or_none("similarity"),
        loaded=dict(_inner(run, "loaded").values),
        trained_on=describe_trained_on(shares and {form: shares.number(form) for form in ("exact", "normalised")}),
    )


def _inner(outer: Fields, name: str) -> Fields:
    """A nested object; an empty one where there is none."""
    return outer.inner_or_none(name) or Fields({}, "", "")


def _summary_file(folder: Path, evaluation: str | None) -> Path:
    names = sorted(file.name.removesuffix(SUMMARY) for file in folder.glob(f"*{SUMMARY}"))
    found = [name for name in names if evaluation in (None, name, f"{name}.jsonl", f"{name}{SUMMARY}")]
    if len(found) != 1:
        which = "" if evaluation is None else f" {shown(evaluation)}"
        told = "several evaluations" if found else f"no finished evaluation{which}"
        remedy = "pass --evaluation NAME" if found else "evaluate with an --output_file in the folder"
        raise UserError(f"holds {told} (there is {', '.join(names) or 'none'}); {remedy}", path=folder)
    return folder / f"{found[0]}{SUMMARY}"


def _settings(run: Fields) -> dict[str, Any]:
    """Flat; what does not apply is omitted, so that it never tells two arms apart."""
    own, lora, order = run.inner("jepa"), run.inner_or_none("lora"), run.inner_or_none("order")
    # A run of an earlier version did what the default of a newer option does.
    settings = DEFAULTS | dict(own.values)
    if own.text("mode") == "regular":
        settings = {name: value for name, value in settings.items() if name not in NEEDS_VIEWS}
    if settings.get("jepa_loss_type") != "infonce":
        settings.pop("infonce_temperature", None)
    settings |= {"model": run.text("model"), "lora": lora is not None}
    if lora is not None:
        settings |= {f"lora_{name}": value for name, value in lora.values.items()}
        if settings.get("lora_alpha") is None:
            settings["lora_alpha"] = 2 * lora.whole("rank", 1)
    loaded = _inner(run, "loaded").values
    settings |= {name: loaded.get(name) or False for name in ("pretrain", "train_tokenizer", "quantized")}
    training = run.inner("training").values
    kept = _WITH_BEST if training.get("load_best_model_at_end") else ()
    for name, value in training.items():
        if name in kept or not (name in _NO_SETTING or name.startswith(_NO_SETTING_BEGINS)):
            settings[_RENAMED.get(name, name)] = value
    if order is not None:
        settings["batch_size"] = order.whole("records_per_micro_step", 1)
    settings["same_flop"] = bool(run.values.get("same_flop"))
    if settings["same_flop"]:
        # Worked out from the compute of these epochs, with the order of the data, and so with the seed.
        settings.pop("max_steps", None)
    elif (run.inner("training").whole_or_none("max_steps") or 0) > 0:
        settings.pop("num_train_epochs", None)
    return settings


def _protocol(run: Fields, summary: Fields) -> dict[str, Any]:
    protocol: dict[str, Any] = {}
    for part in ("train", "data"):
        found = run.inner("data").inner_or_none(part)
        if found is not None:
            # The first edition could stream a file, and knew the beginning alone.
            name = "sha256" if "sha256" in found or "bytes" not in found else "sha256_of_first_mib"
            protocol["training data (sha256)"] = found.text(name)
            protocol |= {name: found.values[name] for name in ("eval_split", "split_seed", "bytes") if name in found}
    protocol["system prompts of training"] = run.values.get("system_prompts")
    protocol["test file (sha256)"] = summary.text("test_fingerprint")
    protocol["number of examples"] = summary.whole("n", 1)
    protocol |= {name: summary.text(name) for name in ("task", "headline", "lenient")}
    settings = _inner(summary, "settings").values
    return protocol | {name: value for name, value in settings.items() if name not in _NO_PROTOCOL}


def is_of_another_model(folder: Path, summary: Mapping[str, Any]) -> bool:
    """Whether an evaluation is of a checkpoint, or of what the folder held before; weights may have been removed."""
    settings = summary.get("settings")
    # Answers of another program name no model.
    evaluated = settings.get("model") if isinstance(settings, dict) else None
    has_weights = any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
    return evaluated is not None and has_weights and evaluated != model_fingerprint(folder)


def _examples(file: Path, summary: Fields) -> tuple[list[int], dict[str, list[float] | None]]:
    path = file.with_name(file.name.removesuffix(SUMMARY) + ".jsonl")
    lines = [Fields(value, path, _EVALUATE_AGAIN, number) for number, value in read_jsonl(path, "file of answers")]
    indices = [line.whole("index", 0) for line in lines]
    if len(lines) != summary.whole("n", 1):
        raise UserError(f"its {len(lines)} lines are not the examples of {file.name}; {_EVALUATE_AGAIN}", path=path)
    found: dict[str, list[float] | None] = {"stopped": None}
    for measure in ("headline", "lenient"):
        name = summary.text(measure)
        found[measure] = [line.inner("scores").number(name) for line in lines]
    if all(line.values.get("stopped") is not None for line in lines):
        found["stopped"] = [line.number("stopped") for line in lines]
    return indices, found


def refuse_different(runs: Sequence[EvaluatedRun], only: Sequence[str] = ()) -> None:
    """Raise ``UserError`` if a run has other data, another test, or was asked or scored in another way.

    With ``only``, the examples and these parts of the protocol must be equal, in all runs of which they are known: of
    the answers of another program it is not known how they were made.
    """
    first = runs[0]
    known = {what: value for run in reversed(runs) for what, value in run.protocol.items() if value is not None}
    for run in runs[1:]:
        said = [
            f"{what.replace('_', ' ')} is {_short(ours)} instead of {_short(theirs)}"
            for what in only or first.protocol | run.protocol
            if (ours := run.protocol.get(what)) != (theirs := (known if only else first.protocol).get(what))
            if not (only and ours is None)
        ]
        if not said and run.indices != first.indices:
            said = ["they were not asked the same examples"]
        if said:
            fault = f"can't be compared with {first.folder}: {said[0]}"
            raise UserError(f"{fault}; train and evaluate all alike, or leave this one out", path=run.folder)


def _short(value: Any) -> str:
    text = "unknown" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."

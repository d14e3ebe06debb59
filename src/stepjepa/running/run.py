"""``run``: one training run, from its description to its folder: read, build, train, save, describe."""

from __future__ import annotations

import html
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Unpack, cast

import transformers
from transformers.trainer_utils import SaveStrategy

from stepjepa.base.arguments import check_path
from stepjepa.base.errors import UserError, unexpected, unexpected_as_user_errors
from stepjepa.base.files import DISK_REMEDIES, locked
from stepjepa.base.json_object import JsonObject
from stepjepa.base.other_names import OtherNames
from stepjepa.base.processes import check_launch, is_main_process
from stepjepa.base.signals import Interruptions, Stopped
from stepjepa.base.terminal import print_rows
from stepjepa.base.typed_json import Origin, from_json, to_json
from stepjepa.batch.prepare import CacheDir, prepare
from stepjepa.config.run import PATHS, RunConfig
from stepjepa.data.reading_notes import describe_columns
from stepjepa.data.record import Data, Record
from stepjepa.evaluation.answering import AnswerScores
from stepjepa.models.loading import add_lora
from stepjepa.models.token_rows import adapter_rows
from stepjepa.running.data import read_data
from stepjepa.running.finished import evaluation_settings
from stepjepa.running.first_screen import first_screen
from stepjepa.running.held_out_scores import check_metric, held_out_scores
from stepjepa.running.loading import load_model_and_tokenizer
from stepjepa.running.metrics_plot import draw_metrics
from stepjepa.running.passed_objects import PassedObjects
from stepjepa.running.precision import with_launched_precision
from stepjepa.running.process import check_agreement, restored_process, say
from stepjepa.running.training_arguments import training_arguments
from stepjepa.store import folder as run_folder
from stepjepa.store.hub import check_uploadable, upload
from stepjepa.store.record import Lora, RunRecord, Source, read_record
from stepjepa.store.resume import FinishedError
from stepjepa.training import argument_checks
from stepjepa.training.description import describe_objects, describe_run
from stepjepa.training.plan import EqualCompute, EqualComputeCallback, equal_compute
from stepjepa.training.saving import resume_hint
from stepjepa.training.stop import StopCallback
from stepjepa.training.trainer import JepaTrainer

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

    from stepjepa.evaluation.options import EvaluationOptions
    from stepjepa.evaluation.scores import Scores
    from stepjepa.objectives.inputs import Chat
    from stepjepa.objectives.jepa import Jepa
    from stepjepa.objectives.objective import Objective

# A run without a checkpoint begins again in its folder, if its settings are those of before.
_SAME_SETTINGS = "with `resume_from_checkpoint auto`"


class Run(OtherNames):
    """A training run by its folder; :func:`stepjepa.run` returns one.

    Attributes:
        folder: the run folder, with the trained model, ``run.json``, ``run.yaml`` and ``metrics.jsonl``.

    Raises:
        UserError: the folder holds no ``run.json``, or a damaged one.

    Example:
        >>> run = Run("runs/a")
        >>> run.evaluate("test.jsonl")["exact"]
        >>> run.answer("lines with a number")
    """

    elsewhere: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("embed", "index", "encode", "jepa"), "Jepa.from_pretrained(run.folder) embeds and searches"),
        **dict.fromkeys(("model", "tokenizer", "generate"), "stepjepa.load_for_inference(run.folder) loads the model"),
        **dict.fromkeys(("state", "log_history", "history"), "run.record.results and metrics.jsonl have the losses"),
        "metrics": "run.record.results has the losses, run.evaluate(file) the scores",
        "answers": "Jepa.from_pretrained(run.folder).answers answers several questions",
    }

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(check_path("folder", folder, "a run folder"))
        self._record = read_record(self.folder)

    @property
    def record(self) -> RunRecord:
        """The contents of ``run.json``: data, launches, results, versions."""
        return self._record

    @cached_property
    def config(self) -> RunConfig:
        """The configuration, as ``run.yaml`` has it; ``UserError`` for a folder of 0.2.0, which has none."""
        return RunConfig.read(self.folder / run_folder.CONFIG_FILE)

    def evaluate(
        self,
        test_file: str | os.PathLike[str],
        *,
        output_file: str | os.PathLike[str] | None = None,
        **settings: Unpack[EvaluationOptions],
    ) -> Scores:
        """Evaluate the trained model: :func:`stepjepa.evaluate` with its folder.

        Settings that evaluations share with the run (columns, task, trusted code) have the run's values by default.

        Args:
            test_file: records, as for training.
            output_file: JSON lines; None for ``NAME.jsonl`` in the run folder, by the name of the test file.
            settings: as for :func:`stepjepa.evaluate`.

        Returns:
            The scores, with the file of answers and the summary.

        Raises:
            TypeError: there is no such setting.
            UserError: as for :func:`stepjepa.evaluate`.
        """
        from stepjepa.evaluation.run import evaluate

        # A folder of 0.2.0 has no configuration.
        shared = evaluation_settings(self.config) if (self.folder / run_folder.CONFIG_FILE).is_file() else {}
        if "model_path" in settings:
            raise TypeError("Run.evaluate has no argument 'model_path'; stepjepa.evaluate(path, file) takes any folder")
        options = cast("EvaluationOptions", {**shared, **settings})
        return evaluate(self.folder, test_file, output_file=output_file, **options)

    @cached_property
    def _jepa(self) -> Jepa:
        from stepjepa.objectives.jepa import Jepa

        return Jepa.from_pretrained(self.folder)

    def answer(self, question: Chat, *, max_new_tokens: int = 256) -> str:
        """Answer a question, or the messages of a chat, greedily; the model is loaded at the first call.

        The prompt is that of an evaluation: chat template and system prompt of training.

        Args:
            question: a text, messages up to the turn to be generated, or a record of them, with its ``tools``.
            max_new_tokens: maximum number of tokens in the answer.
        """
        return self._jepa.answer(question, max_new_tokens=max_new_tokens)

    def __repr__(self) -> str:
        return f"Run('{self.folder}': {', '.join(f'{name} {value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        rows = {"folder": self.folder, **self._facts()}
        cells = (f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items())
        return f"<table>{''.join(cells)}</table>"

    def _facts(self) -> JsonObject:
        """Return status, model, mode, steps and losses, as far as they are known."""
        record, results = self.record, self.record.results
        facts: JsonObject = {
            "status": record.status,
            "model": record.model,
            "mode": (record.jepa or {}).get("mode"),
        }
        if results is not None:
            facts["steps"] = results.steps
            losses = {"LM loss": results.last_log.get("lm_loss"), "held out": results.evaluation.get("eval_lm_loss")}
            facts |= {name: f"{value:.4f}" for name, value in losses.items() if value is not None}
        return {name: value for name, value in facts.items() if value is not None}


def run(
    config: RunConfig,
    *,
    model: PreTrainedModel | nn.Module | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    train_dataset: Data | None = None,
    eval_dataset: Data | None = None,
    objective: Objective | None = None,
    callbacks: Sequence[TrainerCallback] | None = (),
    command: Sequence[str] | None = None,
) -> Run:
    """Train as ``stepjepa train`` does: read, build, train, evaluate, save, and describe all of it in the run folder.

    Logging, progress bars, signal handlers and the process group are restored at the end.

    Args:
        config: the run, in plain values.
        model: a causal language model to train, in place of ``config.model_name``; changed in place.
        tokenizer: in place of the model's own; gets predictor tokens.
        train_dataset: records, dicts with ``messages``, a data frame or a ``Dataset``, in place of files of the
            configuration.
        eval_dataset: held-out records, likewise.
        objective: terms instead of those in ``config.jepa``, which still sets mode, layout and readouts.
        callbacks: further callbacks of the Trainer.
        command: the command line that started the run, for its record.

    Returns:
        The finished run; with ``resume_from_checkpoint="auto"`` also one that was finished before.

    Raises:
        TypeError: ``config`` is no ``RunConfig``, or an object is one of another kind.
        ValueError: an object is passed beside a setting that it replaces.
        UserError: any other failure. Before the first step no file is left behind; later it names what is saved.
        Stopped: a signal asked the run to stop; a checkpoint is saved.

    Example:
        >>> config = RunConfig(model_name="preset:tiny", train_file="train.jsonl", output_dir="runs/a")
        >>> run(config).evaluate("test.jsonl")
    """
    given: object = config  # a caller without types may pass a dict
    if not isinstance(given, RunConfig):
        kind = type(given).__name__
        raise TypeError(f"config: expected RunConfig(...), got {kind}; RunConfig.read(path) reads a file")
    passed = PassedObjects(
        model, tokenizer, train_dataset, eval_dataset, objective, argument_checks.as_callbacks(callbacks)
    )
    passed.check(config)
    check_launch()
    # A copy is checked again: a field may have been assigned, with another folder than the one that is guarded below.
    config = with_launched_precision(replace(config))
    with restored_process():
        if not logging.getLogger().isEnabledFor(logging.INFO):
            transformers.logging.set_verbosity_error()
        # Before any random draw: an adapter's weights are drawn in set-up.
        transformers.set_seed(config.finetune_seed)
        run_folder.check_is_folder(Path(str(config.output_dir)))
        lock = locked(Path(str(config.output_dir))) if is_main_process() else nullcontext()
        trainer = None
        try:
            with lock, unexpected_as_user_errors():
                trainer = _run(config, passed, None if command is None else list(command))
        except FinishedError as finished:
            # A restarted job or notebook cell passes `auto`, for which a finished run is no error.
            if str(config.resume_from_checkpoint).lower() != "auto":
                raise
            if is_main_process():
                print(finished, file=sys.stderr)
    # After the process group has ended: other processes don't wait for the upload.
    if trainer is not None and trainer.args.push_to_hub and is_main_process():
        _upload(trainer)
    return Run(str(config.output_dir))


def _upload(trainer: JepaTrainer) -> None:
    folder = Path(str(trainer.args.output_dir))
    check_uploadable(folder)
    say(f"uploaded: {upload(folder, str(trainer.hub_model_id), revision=trainer.args.hub_revision)}")


def _run(config: RunConfig, passed: PassedObjects, command: list[str] | None) -> JepaTrainer:
    """Read the data, build the trainer, train, save and record the run."""
    start = time.monotonic()  # the clock of a machine may be set meanwhile
    folder, checkpoint = run_folder.open_run_folder(str(config.output_dir), config.resume_from_checkpoint, say)
    has_eval = config.eval_file is not None or config.data_file is not None or passed.eval_dataset is not None
    # Wrong settings are refused before records are read, which may take minutes.
    training = training_arguments(config, has_eval)
    if not passed.callbacks:
        check_metric(config, training, passed.objective)
    train_records, eval_records, files = read_data(config, passed.train_dataset, passed.eval_dataset)
    trainer, further_rows = _build(config, passed, training, train_records, eval_records)
    # From here on: a bar for saved weights would break the progress bar of the training.
    transformers.logging.disable_progress_bar()
    equal = _limit_compute(trainer, config) if config.same_flop else None
    if is_main_process():
        print_rows(first_screen(config, trainer, equal, {**further_rows, "resumed from": checkpoint}))
    _check_same_start(config, files, checkpoint)
    record = replace(
        describe_run(config, trainer, command=command, data=files),
        lora=None if config.lora is None else from_json(Lora, vars(config.lora), Origin("lora", "pass another value")),
        same_flop=asdict(equal) if equal else None,
    )
    recorder, resumes = trainer.recorder, config.resume_from_checkpoint is not None
    recorder.describe(record, replace(config, objects=describe_objects(trainer, passed.names)), start)
    with (
        _explaining_failures(trainer, folder, checkpoint),
        recorder.launch(checkpoint, resumes=resumes, allow_changes=config.allow_changes, refuse_finished=True),
    ):
        metrics = _train_and_evaluate(trainer, folder, checkpoint)
        if is_main_process():
            draw_metrics(folder)
        # `push_to_hub` uploads the run folder later, when it is complete.
        recorder.finish(save=True, evaluation=metrics)
    return trainer


def _check_same_start(config: RunConfig, files: Mapping[str, Source], checkpoint: str | None) -> None:
    """Raise ``UserError`` in every process if they were started with other data, settings or checkpoints."""
    # Paths may differ between machines; the contents of the files are compared.
    settings = {name: value for name, value in config.to_flat().items() if name not in PATHS}
    resumed = checkpoint and Path(checkpoint).name
    check_agreement({"data": to_json(files), "settings": settings, "checkpoints": resumed})


def _build(
    config: RunConfig,
    passed: PassedObjects,
    training: TrainingArguments,
    train_records: Sequence[Record],
    eval_records: Sequence[Record],
) -> tuple[JepaTrainer, dict[str, str | None]]:
    """Return the trainer of a run, and rows for ``first_screen``: columns, held-out answers, retrieval."""
    jepa = config.jepa
    texts = (message["content"] for record in train_records for message in record.messages)
    model, tokenizer = load_model_and_tokenizer(config, passed, texts, training)
    cache: CacheDir = False if config.no_cache else config.cache_dir
    data, held_out = prepare(train_records, tokenizer, jepa, cache_dir=cache, say=say), None
    if eval_records:
        held_out = prepare(eval_records, tokenizer, jepa, what="evaluation data", cache_dir=cache, say=say)
    if config.lora is not None:
        model = add_lora(model, config.lora, adapter_rows(model, tokenizer, plain=jepa.plain))
    scores, retrieval, rows = held_out_scores(config, eval_records, train_records, model, tokenizer)
    trainer = JepaTrainer(
        model,
        training,
        jepa,
        train_dataset=data,
        eval_dataset=held_out,
        processing_class=tokenizer,
        objective=passed.objective,
        callbacks=passed.callbacks,
        answer_scores=scores,
        retrieval_scores=retrieval,
        track_flop=config.track_flop,
        group_by=config.group_by,
    )
    return trainer, {"columns": describe_columns(train_records[0]), **rows}


def _limit_compute(trainer: JepaTrainer, config: RunConfig) -> EqualCompute:
    """Stop a run when it has used the FLOPs of a regular run; save after those of each regular epoch."""
    equal = equal_compute(trainer.plan, trainer.args.num_train_epochs)
    trainer.args.max_steps = equal.steps
    if "save_strategy" not in config.trainer:
        trainer.args.save_strategy = SaveStrategy.EPOCH
    trainer.add_callback(EqualComputeCallback(equal))
    return equal


# -- training ----------------------------------------------------------------------------------------------------------


def _train_and_evaluate(trainer: JepaTrainer, folder: Path, checkpoint: str | None) -> dict[str, float]:
    """Train, evaluate the held-out records unless the last step did, and return the metrics of both."""
    scores = trainer.answer_scores
    with closing(scores) if isinstance(scores, AnswerScores) else nullcontext():
        metrics = _train(trainer, folder, checkpoint)
        if trainer.held_out:
            metrics |= trainer.recorder.evaluation() or trainer.evaluate()
    return metrics


def _train(trainer: JepaTrainer, folder: Path, checkpoint: str | None) -> dict[str, float]:
    """Train until the end or a signal, and return the metrics of the training."""

    def announce_stop(number: int) -> None:
        name = signal.Signals(number).name
        say(f"{name}: saving a checkpoint at the end of this step, then stopping; once more to stop at once")

    request = Interruptions(announce_stop)
    trainer.add_callback(StopCallback(request, trainer.args.world_size, trainer.args.device))
    try:
        with request:
            return dict(trainer.train_steps(checkpoint).metrics)
    except Stopped as stop:
        # Callbacks of trackers close their files.
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        saved = folder / f"checkpoint-{trainer.state.global_step}"
        hint = (
            "it holds the model only" if trainer.args.save_only_model else "resume with `resume_from_checkpoint last`"
        )
        raise Stopped(stop.number, f"stopped; {saved} is saved; {hint}", by_all=stop.by_all) from None


@contextmanager
def _explaining_failures(trainer: JepaTrainer, folder: Path, checkpoint: str | None) -> Iterator[None]:
    """Raise any error of a run as a ``UserError`` that says how to resume it."""
    try:
        yield
    except UserError:
        raise
    except Stopped as stop:
        if stop.by_all or not trainer.recorder.trained:
            raise
        # While the model was evaluated or saved.
        hint = resume_hint(folder, again=_SAME_SETTINGS)
        raise Stopped(stop.number, f"interrupted after the last step; {hint}") from None
    except OSError as error:
        if error.errno not in DISK_REMEDIES:
            raise
        hint = resume_hint(folder, "once it can be written to, ", again=_SAME_SETTINGS)
        raise UserError(f"{error.strerror}; {hint}", path=error.filename or folder) from None
    except Exception as error:  # any error becomes one line
        message, trained = unexpected(error), trainer.recorder.trained
        if trained:
            hint = resume_hint(folder, again=_SAME_SETTINGS)
            message = f"the run failed after step {trainer.state.global_step} ({message}); {hint}"
        raise UserError(f"{message}; `debug 2` shows where it was", path=None if trained else checkpoint) from None

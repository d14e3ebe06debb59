"""Settings of evaluations, without importing torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from stepjepa.base.errors import UserError
from stepjepa.base.files import check_output_file
from stepjepa.base.json_object import JsonObject
from stepjepa.config.batch_sizes import ANSWERED
from stepjepa.config.jepa import Dtype, Pooling, Quantization
from stepjepa.config.option import FROM_ONE, check_effects, check_values, option
from stepjepa.config.server import ServerSettings
from stepjepa.models.sampling import Sampling
from stepjepa.tasks.base import TaskOptions
from stepjepa.tasks.registry import AUTO, TASKS, load_task

_SIMILARITY = "cosines of matched and shuffled views of a run; without a value, those of training"
_RETRIEVAL = "rank all distinct answers by cosine for each question; how often the right one is nearest"
_LINEAR_MAP = "also rank behind a linear map; it is fitted on the pairs of this file, the model is not trained"
_HEADS = "also rank behind projection heads; two small networks that InfoNCE trains on the pairs of `linear_map`"
_LAYER = "index in hidden_states of the embeddings; 0 is the input embeddings, -1 the last (that of training)"
_POOLING = "hidden state of the last token, or the mean of all; without it the pooling of training"
_BAD = "lines that are no valid record: error, or skip them and report how many"
_TASK = f"how answers are scored; {', '.join(TASKS)}, your module:Class, or auto, which recognises the records"
_SCORING = "rules of scoring; reference adds those of the published evaluation, mistakes included"
_QUANTIZATIONS: dict[str, Quantization] = {"load_in_4bit": "4bit", "load_in_8bit": "8bit"}
_NESTED = {"task_options": TaskOptions, "sampling": Sampling, "serving": ServerSettings}
_PREDICTIONS = "JSON lines with 'index' (from 0), 'generated' (a text, or a list of samples), optionally 'stopped'"


@dataclass(frozen=True, kw_only=True)
class ScoringSettings:
    """The settings that ``stepjepa evaluate`` and ``stepjepa score`` share; UserError if a value is not allowed."""

    test_file: str | os.PathLike[str] = option(
        help="records to evaluate; JSON lines, JSON, CSV, TSV, Parquet or Arrow",
        group="files",
        names=("input_file",),
        metavar="FILE",
        path=True,
    )
    output_file: str | os.PathLike[str] = option(
        help="file of answers and scores, JSON lines, one per example", group="files", metavar="FILE", path=True
    )
    overwrite: bool = option(False, "replace what `output_file` holds", group="files", names=("no_skip_existing",))
    task: str = option(AUTO, _TASK, group="scoring", metavar="NAME")
    task_options: TaskOptions = field(default_factory=TaskOptions)
    scoring: Literal["own", "reference"] = option("own", _SCORING, group="scoring")
    startswith: bool = option(
        False, "make the score of answers that begin right (prefix) the headline", group="scoring", names=("statswith",)
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.task != AUTO:
            load_task(self.task)
        self.check_output(self.test_file, "test file")

    @property
    def selection(self) -> JsonObject:
        """The settings that choose the task and its scores, as the keyword arguments of ``selection.Selection``."""
        names = ("task", "scoring", "startswith")
        return {**{name: getattr(self, name) for name in names}, "options": self.task_options}

    def check_output(self, source: str | os.PathLike[str], what: str) -> None:
        """Raise ``UserError`` if the output file is a folder or the source, which the message calls ``what``."""
        output = check_output_file(self.output_file, overwrite=True)  # a folder, that is
        if output.suffix != ".jsonl":
            raise UserError("`output_file` holds JSON lines; end its name in .jsonl", path=self.output_file)
        if output.resolve() == Path(source).resolve():
            raise UserError(f"`output_file` is the {what}; name another", path=self.output_file)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(ScoringSettings):
    """Settings of an evaluation; UserError if a value is not allowed, or the output would replace the test file."""

    model_path: str | None = option(
        None,
        "run, adapter folder or hub id; may be left out with `server`",
        group="files",
        names=("model_name",),
        metavar="PATH",
        path="or name",
    )
    max_examples: int | None = option(
        None,
        "evaluate only the first N records; misleading where a file is sorted by label",
        group="scoring",
        allowed=FROM_ONE,
    )
    similarity: Literal["own", "llm-jepa", "step-jepa"] | None = option(None, _SIMILARITY, group="scoring", const="own")
    retrieval: bool = option(False, _RETRIEVAL, group="scoring")
    layer: int | None = option(None, _LAYER, group="scoring", only_with="retrieval")
    pooling: Pooling | None = option(None, _POOLING, group="scoring", only_with="retrieval")
    linear_map: str | os.PathLike[str] | None = option(
        None, _LINEAR_MAP, group="scoring", only_with="retrieval", metavar="FILE", path=True
    )
    projection_heads: bool = option(False, _HEADS, group="scoring", only_with="linear_map")
    batch_size: int = option(ANSWERED, "prompts at a time", group="generation", allowed=FROM_ONE)
    sampling: Sampling = field(default_factory=Sampling)
    dtype: Dtype = option("auto", "dtype of the weights", group="generation")
    quantization: Quantization | None = None  # of the weights, by bitsandbytes
    trust_remote_code: bool = option(False, "run code that comes with the model", group="generation")
    use_test_prompts: bool = option(
        False,
        "keep the system prompt of the test file; otherwise that of training replaces it, where it is known",
        group="prompt",
    )
    plain: bool = option(
        False,
        "prompt without a chat template, as a model trained with `plain`: question, <|perception|>, answer",
        group="prompt",
    )
    serving: ServerSettings = field(default_factory=ServerSettings)
    columns: list[str] | None = option(None, "column names of prompt and answer", metavar="NAME", group="files")
    bad_records: Literal["error", "skip"] = option("error", _BAD, group="files")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_effects(vars(self), EvaluationSettings)
        if self.linear_map is not None:
            self.check_output(self.linear_map, "file of `linear_map`")
        if self.plain and self.use_test_prompts:
            raise UserError("`use_test_prompts` does nothing with `plain`, which shows no system prompt; leave it out")
        if self.serving.server:
            self._check_server()
        elif self.model_path is None:
            raise UserError("model_path: name the run to evaluate, or a `server` that answers")

    @classmethod
    def flat_names(cls) -> set[str]:
        """Return the names of all settings of :meth:`from_flat`."""
        own = {setting.name for setting in fields(cls)} - {*_NESTED, "quantization"}
        return own.union(_QUANTIZATIONS, *({setting.name for setting in fields(part)} for part in _NESTED.values()))

    @classmethod
    def from_flat(cls, settings: Mapping[str, Any]) -> Self:
        """Make the settings of an evaluation from flat ones, which have the names of the flags.

        Args:
            settings: fields of this class and of the classes nested in it; ``load_in_4bit`` or ``load_in_8bit``.

        Raises:
            TypeError: there is no such setting.
            UserError: both quantizations are set, or see the class.
        """
        settable = cls.flat_names()
        if unknown := [name for name in settings if name not in settable]:
            raise TypeError(f"evaluate: expected settings among {', '.join(sorted(settable))}, got '{unknown[0]}'")
        quantizations = [bits for name, bits in _QUANTIZATIONS.items() if settings.get(name)]
        if len(quantizations) > 1:
            raise UserError(f"{' and '.join(f'`{name}`' for name in _QUANTIZATIONS)} exclude each other; leave one out")

        def values_of(kind: type) -> JsonObject:
            return {setting.name: settings[setting.name] for setting in fields(kind) if setting.name in settings}

        parts = {name: kind(**values_of(kind)) for name, kind in _NESTED.items()}
        return cls(quantization=next(iter(quantizations), None), **parts, **values_of(cls))

    def _check_server(self) -> None:
        """Raise ``UserError`` for a missing setting that a server needs, or one without effect on a server."""
        completions = self.serving.completions
        if completions and self.model_path is None:
            raise UserError("completions: needs `model_path`, whose chat template renders the prompts")
        unused = {
            "similarity": self.similarity,
            "retrieval": self.retrieval,
            "batch_size": self.batch_size != ANSWERED,
            "dtype": self.dtype != "auto",
            "quantization": self.quantization,
            "plain": self.plain and not completions,
            "trust_remote_code": self.trust_remote_code and not completions,
        }
        for name in (name for name, value in unused.items() if value):
            remedy = {"batch_size": "set `concurrency`", "plain": "add `completions`"}.get(name, "leave it out")
            raise UserError(f"{name}: has no effect on a server; {remedy}")


@dataclass(frozen=True, kw_only=True)
class ScoreSettings(ScoringSettings):
    """Settings of ``score_predictions``; UserError if a value is not allowed or a file would be replaced."""

    predictions: str | os.PathLike[str] = option(help=_PREDICTIONS, group="files", metavar="FILE", path=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_output(self.predictions, "file of predictions")
        check_output_file(self.output_file, self.overwrite)

"""The description of a training run, in plain values: :class:`RunConfig`. Free of torch.

Flags of ``stepjepa train``, a YAML file, Python and the file in the run folder are four spellings of it. Python nests
three parts (``jepa``, ``lora``, ``trainer``); the other three spellings are flat, with the names of the flags.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from stepjepa.base.arguments import expanded, kind_of
from stepjepa.base.errors import UserError, shown
from stepjepa.base.json_object import JsonObject
from stepjepa.config.flat_file import line_of, read_flat
from stepjepa.config.jepa import Dtype, JepaConfig, Quantization, check_objective_effects
from stepjepa.config.lora import LoraFlag, LoraSettings
from stepjepa.config.option import (
    FROM_ONE,
    FROM_ZERO,
    POSITIVE,
    SHARE,
    Option,
    check_effects,
    check_values,
    documented,
    has_effect,
    option,
    options_of,
    short_repr,
)
from stepjepa.config.shortcuts import JEPA, SHORTCUTS, TERMS, read_objective
from stepjepa.config.trainer import read_trainer_field, trainer_options, unknown_setting

GroupBy = Literal["prompt"]
"""The common property of records that are drawn together."""

PASSED_OBJECTS = ("model", "tokenizer", "train_dataset", "eval_dataset", "objective")
"""Arguments of :func:`stepjepa.run` that take objects; the file of a run folder has a description of each."""

OF_TRAINERS = ("optimizer", "trainer_class")
"""What a ``JepaTrainer`` may have that :func:`stepjepa.run` does not take, and the file describes all the same."""


_OBJECTS_OF_NAMES = {
    "model_name": "model",
    **dict.fromkeys(("train_file", "data_file", "dataset"), "train_dataset"),
    "eval_file": "eval_dataset",
}
"""Setting that names a model or data -> the argument of :func:`stepjepa.run` that takes an object in its place."""

EXCLUSIVE = (
    *(("train_file", "data_file", "dataset"), ("data_file", "eval_file"), ("no_cache", "cache_dir")),
    *(("load_in_4bit", "load_in_8bit"), ("plain", "chat_template")),
)
"""Groups of settings that exclude each other."""

_data = partial(option, group="data")
_model = partial(option, group="model")
_answers = partial(option, group="answers during training", only_with="eval_generate or eval_retrieval")
_held_out = partial(option, only_with="eval_file or data_file")
_run = partial(option, group="run")
_launch = partial(option, group="run", launch=True)


_WITH_ADAPTER = "run(config, model=peft.get_peft_model(model, peft_config))"


def _in_parts(name: str, value: object) -> dict[str, str]:
    """Return settings that are no field of ``RunConfig``, by the names of their flags, as they are passed to it."""
    parts = {setting.flag: f"jepa=JepaConfig({setting.name}={value!r})" for setting in JEPA}
    parts |= {setting.flag: f"lora=LoraSettings({setting.name}={value!r})" for setting in LORA}
    parts |= {other: f"{setting.name}={value!r}" for setting in OPTIONS for other in setting.about.get("names", ())}
    if name == "peft_config":
        parts[name] = f"lora=LoraSettings(rank=...), or {_WITH_ADAPTER}"
    return {argument: f"trainer={{'{argument}': {value!r}}}" for argument in trainer_options()} | parts


@documented(_in_parts)
@dataclass(kw_only=True)
class RunConfig:
    """A training run: data, model, adapter, objective, answers during training, and the Trainer's settings.

    Holds plain values only; models, data sets and callbacks are arguments of :func:`stepjepa.run`. Three parts are
    nested, which flags and files spell flat: ``jepa`` is a :class:`JepaConfig`, ``lora`` a ``LoraSettings`` (None: all
    weights are trained), and ``trainer`` has fields of ``transformers.TrainingArguments``. ``objects`` describes what a
    run was passed in Python; it is read from the file in a run folder.

    Example:
        >>> data = {"model_name": "preset:tiny", "train_file": "train.jsonl", "output_dir": "runs/a"}
        >>> RunConfig(**data, jepa=JepaConfig(mode="regular"), trainer={"max_steps": 100})

    Raises:
        TypeError: there is no such argument; the message suggests a similar one.
        UserError: a value has another type than its field, is not allowed, has no effect, or contradicts another one;
            the message names the fields and the remedy.
    """

    train_file: str | None = _data(
        None, "JSON lines, JSON, CSV, TSV, Parquet or Arrow; messages or columns", metavar="FILE", path=True
    )
    columns: list[str] | None = _data(
        None, "column names of prompt and answer (recognised by their usual names)", metavar="NAME"
    )
    bad_records: Literal["error", "skip"] = _data("error", "invalid lines: error; or skip and report how many")
    cache_dir: str | None = _data(None, "folder for prepared data (~/.cache/stepjepa)", metavar="DIR", path=True)
    no_cache: bool = _data(False, "do not use the cache of prepared data")
    eval_file: str | None = _data(None, "held-out records, for losses during training", metavar="FILE", path=True)
    data_file: str | None = _data(
        None, "single file, split by `eval_split` into train and held-out records", metavar="FILE", path=True
    )
    dataset: list[str] | None = _data(
        None, "files, folders or hub data sets NAME:SUBSET:SPLIT, mixed", metavar="NAME", path="or name"
    )
    dataset_weights: list[float] | None = _data(
        None, "mixing weight of each `dataset`, without repetition (all records)", metavar="W", only_with="dataset"
    )
    eval_split: float = _data(
        0.2, "share of `data_file` held out; a question is on one side", allowed=SHARE, only_with="data_file"
    )
    split_by: Literal["question", "record"] = _data(
        "question",
        "question: equal questions are on one side; record: draw held-out records one by one, as 0.2.0 did",
        only_with="data_file",
    )
    split_seed: int = _data(42, "seed of the split, or of the mixture", only_with="data_file or dataset_weights")

    model_name: str | None = _model(
        None, "folder, hub id, or preset:tiny, preset:small ...", metavar="NAME", path="or name"
    )
    chat_template: str | None = _model(
        None, "Jinja file instead of the tokenizer's own template", metavar="FILE", path=True
    )
    trust_remote_code: bool = _model(False, "run code that comes with the model")
    dtype: Dtype = _model("float32", "dtype of the weights")
    pretrain: bool = _model(False, "start from random weights; with configuration and tokenizer of `model_name`")
    attn_implementation: str | None = _model(None, "as in transformers: sdpa, eager ...", metavar="NAME")
    lora: LoraSettings | None = None
    load_in_4bit: bool = _model(False, "frozen weights in 4 bits, through bitsandbytes (QLoRA)", only_with="lora")
    load_in_8bit: bool = _model(False, "frozen weights in 8 bits, through bitsandbytes", only_with="lora")

    jepa: JepaConfig = field(default_factory=JepaConfig)

    eval_generate: int | None = _answers(
        None,
        "answer and score N held-out records at every evaluation",
        names=("max_eval_samples",),
        allowed=FROM_ONE,
        only_with="eval_file or data_file",
    )
    eval_retrieval: bool = _answers(
        False,
        "find held-out answers by their embeddings at every evaluation; logs eval_retrieval_hits_at_1 and the like",
        only_with="eval_file or data_file",
    )
    eval_task: str = _answers("auto", "as `task` of 'stepjepa evaluate'", metavar="NAME")
    eval_max_new_tokens: int = _answers(
        256, "tokens an answer", names=("max_new_tokens_eval",), allowed=FROM_ONE, only_with="eval_generate"
    )
    spider_path: str | None = _answers(None, "folder of Spider's databases", metavar="DIR", path=True)
    missing_databases: Literal["error", "skip"] = _answers(
        "error", "record without database: error; skip: leave it out"
    )

    output_dir: str | None = _run(None, "run folder; must be empty or new, unless resuming", metavar="DIR", path=True)
    batch_size: int = _run(4, "records per micro-batch", names=("per_device_train_batch_size",), allowed=FROM_ONE)
    group_by: GroupBy | None = _run(
        None,
        "draw records together that share a prompt, or a long beginning of one; it is computed once a micro-batch",
    )
    grad_accum: int = _run(4, "micro-batches a step", names=("gradient_accumulation_steps",), allowed=FROM_ONE)
    learning_rate: float = _run(2e-5, "peak learning rate", metavar="LR", allowed=FROM_ZERO)
    num_epochs: float = _run(3.0, "passes over the data", names=("num_train_epochs",), metavar="N", allowed=POSITIVE)
    eval_steps: int | None = _run(
        None,
        "evaluate every N steps (once an epoch)",
        names=("eval_accuracy_steps",),
        allowed=FROM_ONE,
        only_with="eval_file or data_file",
    )
    finetune_seed: int = _run(42, "seed", names=("seed",), allowed=(lambda seed: 0 <= seed < 2**32, "0 to 2**32 - 1"))
    track_flop: bool = _run(False, "measure the FLOPs of the first 10 steps; print them beside the derived ones")
    same_flop: bool = _run(False, "stop once the FLOPs of `regular` for `num_epochs` are spent")
    resume_from_checkpoint: str | None = _launch(
        None, "checkpoint folder, last, or auto (last if any)", metavar="DIR", path="or name"
    )
    allow_changes: bool = _launch(
        False, "resume although data, order or objective have changed", only_with="resume_from_checkpoint"
    )

    trainer: JsonObject = field(default_factory=dict)
    """Fields of ``transformers.TrainingArguments`` that have no field here."""

    objects: dict[str, JsonObject] = field(default_factory=dict)
    """Descriptions of objects that a run was passed in Python, by the names in :data:`PASSED_OBJECTS`, as in
    ``{"train_dataset": {"records": 5, "sha256": ...}}``: read from the file of its folder. A run needs them again."""

    def __post_init__(self) -> None:
        for setting in OPTIONS:
            if setting.type is str:
                setattr(self, setting.name, _path_as_text(getattr(self, setting.name)))
        self._check_types()
        check_values(self)
        if own_settings := [name for name in self.trainer if name in FLAT]:
            raise UserError(f"trainer: '{own_settings[0]}' is set by `{FLAT[own_settings[0]].flag}`; use that instead")
        fields = {name: value for name, value in self.trainer.items() if value is not None}
        self.trainer = {name: _trainer_setting(name, value) for name, value in fields.items()}
        self._check_contradictions()

    def _check_types(self) -> None:
        """Raise ``UserError`` for an object where a name or settings are expected; it says how the object is passed."""
        for name, argument in _OBJECTS_OF_NAMES.items():
            value = getattr(self, name)
            names = value if isinstance(value, list | tuple) and name == "dataset" else [value]
            if not all(isinstance(item, str | None) for item in names):
                if name == "eval_file" and isinstance(value, float):
                    raise UserError(f"eval_file: expected a name, got {value}; a share is `data_file` and `eval_split`")
                kind = type(value).__name__
                raise UserError(
                    f"{name}: expected a name, got an object ({kind}); pass it as run(config, {argument}=...)"
                )
        parts: tuple[tuple[str, type], ...] = (("jepa", JepaConfig), ("lora", LoraSettings), ("trainer", dict))
        for name, kind_of_part in parts:
            part = getattr(self, name)
            if not (isinstance(part, kind_of_part) or (name == "lora" and part is None)):
                remedy = f"; an adapter of PEFT is {_WITH_ADAPTER}" if name == "lora" else ""
                raise UserError(f"{name}: expected {kind_of_part.__name__}(...), got {shown(str(part))}{remedy}")

    def __repr__(self) -> str:
        return short_repr(self, RunConfig())

    def _values(self) -> JsonObject:
        """Return the value of every option by its name, and of ``lora``."""
        return {**{setting.name: getattr(self, setting.name) for setting in OPTIONS}, "lora": self.lora}

    def _check_contradictions(self) -> None:
        """Raise ``UserError`` for settings that have no effect or contradict each other."""
        values = self._values()
        # Held-out records may be passed beside the configuration, see ``check_required``.
        held_out = self.eval_file or "passed"
        check_effects({**values, "eval_file": held_out}, RunConfig)
        check_objective_effects(self.jepa, own_terms="objective" in self.objects)
        if self.jepa.mode == "regular" and self.eval_retrieval:
            raise UserError("`eval_retrieval`: mode 'regular' has no views to embed; leave one out")
        values["plain"] = self.jepa.plain
        for names in EXCLUSIVE:
            named = [name for name in names if values[name] not in (None, False)]
            if len(named) > 1:
                raise UserError(f"`{named[0]}` and `{named[1]}` exclude each other; leave one out")
        if self.trainer.get("bf16") and self.trainer.get("fp16"):
            raise UserError("`bf16` and `fp16` exclude each other; leave one out")
        if self.lora is not None and (self.pretrain or str(self.model_name).startswith("preset:")):
            raise UserError("`lora` needs trained weights, and presets have random weights, as with `pretrain`")
        if self.group_by is not None and not self.jepa.share_prefixes:
            raise UserError("`group_by` saves nothing with `share_prefixes` false; leave one out")
        if self.same_flop and self.trainer.get("max_steps", -1) > 0:
            raise UserError("`same_flop` works out the number of steps, and `max_steps` names it; leave one out")

    def check_required(self, passed: Collection[str] = ()) -> None:
        """Raise ``UserError`` if a run can't begin with these settings.

        Args:
            passed: names of the arguments in :data:`PASSED_OBJECTS` that are passed beside the configuration.
        """
        values = self._values()
        held_out = self.eval_file or ("passed" if "eval_dataset" in passed else None)
        check_effects({**values, "eval_file": held_out}, RunConfig)
        for name, description in self.objects.items():
            if name not in passed:
                details = ", ".join(f"{key} {value}" for key, value in description.items())
                remedy = f"pass {name}= to stepjepa.run again"
                if name in OF_TRAINERS:
                    remedy = "only that program can train this run again"
                raise UserError(f"{name}: an object of a Python program ({details}); {remedy}")
        if self.output_dir is None:
            raise UserError("output_dir: expected a run folder, got None")
        if self.model_name is None and "model" not in passed:
            raise UserError("model_name: expected a folder, a hub id or a preset, got None")
        data = (self.train_file, self.data_file, self.dataset)
        if all(source is None for source in data) and "train_dataset" not in passed:
            raise UserError("name the data with one of `train_file`, `data_file` and `dataset`")

    @property
    def quantized(self) -> Quantization | None:
        """The quantization of the frozen weights; None if they are not quantized."""
        return "4bit" if self.load_in_4bit else "8bit" if self.load_in_8bit else None

    # -- the flat spelling ---------------------------------------------------------------------------------------------

    def to_flat(self, *, launch: bool = False) -> JsonObject:
        """Return every setting that has an effect, by the name of its flag, in the order of ``stepjepa train --help``.

        Settings that are None are left out, as are those that belong to one launch (``resume_from_checkpoint``,
        ``allow_changes``) unless ``launch`` is set. ``from_flat`` makes an equal configuration of the result.
        """
        terms, lora = self.jepa.terms, self.lora or LoraSettings()
        values = {
            **{setting.flag: getattr(self, setting.name) for setting in OPTIONS},
            **{setting.flag: getattr(lora, setting.name) for setting in LORA},
            **{setting.flag: getattr(self.jepa, setting.name) for setting in JEPA},
            "lora": self.lora is not None,
            "eval_file": self.eval_file or self.objects.get("eval_dataset"),
            "term": [term["term"] for term in terms] or None,
            "term_args": [term.get("args", {}) for term in terms] or None,
        }
        views = self.jepa.uses_views
        flat = {
            setting.flag: values[setting.flag]
            for setting in WRITTEN
            if has_effect(setting, values) and (views or not setting.about.get("views"))
            if launch or not setting.about.get("launch")
        }
        flat |= {"eval_file": self.eval_file, **self.trainer, **self.objects}
        return {name: value for name, value in flat.items() if value is not None}

    @classmethod
    def from_flat(cls, values: Mapping[str, object], note: Callable[[str], None] = lambda text: None) -> RunConfig:
        """Make a configuration of settings by the names of their flags, shortcuts such as ``regular`` among them.

        Args:
            values: names with underscores; a value is of its field's type or a text of it, and None means that it is
                not named.
            note: is called with one line about a setting that has no effect, but is common in published commands.

        Raises:
            UserError: a name is unknown or occurs twice, or see :class:`RunConfig`.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"values: expected a dict of settings, got {kind_of(values)}")
        settings: JsonObject = {}
        objects, trainer = {}, {}
        for key, value in values.items():
            if value is None:
                continue
            if key in ("jepa", "trainer") and isinstance(value, Mapping):
                raise UserError(f"{key}: its settings stand beside the others here; name them without it")
            setting = FLAT.get(key)
            if setting is None and key in (*PASSED_OBJECTS, *OF_TRAINERS) and isinstance(value, Mapping):
                objects[key] = json.loads(json.dumps(value, default=str))  # numbers without their spelling
            elif setting is None:
                trainer[key] = _trainer_setting(key, value)
            elif setting.flag in settings:
                raise UserError(f"{key}: is set twice, as `{setting.flag}`, too; leave one out")
            else:
                settings[setting.flag] = setting.convert(value)
        settings["jepa"] = read_objective(settings, note)
        lora = {part.name: settings.pop(part.flag) for part in LORA if part.flag in settings}
        if settings.pop("lora", False):
            settings["lora"] = LoraSettings(**lora)
        elif idle := [part.flag for part in LORA if lora.get(part.name, part.default) != part.default]:
            raise UserError(f"`{idle[0]}` does nothing without `lora`; add it or leave it out")
        return cls(**settings, trainer=trainer, objects=objects)

    @classmethod
    def read(cls, path: str | os.PathLike[str], note: Callable[[str], None] = lambda text: None) -> RunConfig:
        """Read a YAML file of ``name: value`` lines, by the names of flags.

        Args:
            path: the file.
            note: is called with one line about a setting that has no effect, but is common in published commands.

        Raises:
            UserError: as for :meth:`from_flat`; the message begins with file and line.
        """
        path = expanded(path)
        values = read_flat(path)
        try:
            return cls.from_flat(values, note)
        except UserError as error:
            raise UserError(str(error), path=path, line=line_of(path, *_words(error))) from None

    def to_yaml(self, *, launch: bool = False) -> str:
        """Return the text of a YAML file that :meth:`read` reads as an equal configuration."""
        import yaml

        return yaml.safe_dump(self.to_flat(launch=launch), sort_keys=False, allow_unicode=True, width=10**6)


def _path_as_text(value: object) -> object:
    """Return a path as a text, those of a list, too; any other value is returned unchanged."""
    if isinstance(value, list | tuple):
        return [_path_as_text(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _words(error: UserError) -> list[str]:
    return str(error).replace("`", " ").replace("'", " ").replace(":", " ").split()


def _trainer_setting(name: str, value: object) -> Any:
    """Check a setting of ``TrainingArguments``; the error for an unknown name suggests our settings, too."""
    try:
        return read_trainer_field(name, value)
    except UserError as error:
        if str(error).startswith("unknown setting"):
            raise UserError(unknown_setting(name, tuple(FLAT))) from None
        raise


OPTIONS = tuple(options_of(RunConfig))
LORA = tuple(options_of(LoraSettings))

GROUPS = ("data", "model", "objective", "loss", "answers during training", "run")
"""Headings of the settings, in the order of files and help texts; those of the objective have none of their own."""

WRITTEN: tuple[Option, ...] = tuple(
    sorted(
        (*OPTIONS, *options_of(LoraFlag), *LORA, *JEPA, *TERMS),
        key=lambda setting: GROUPS.index(setting.about.get("group", "objective")),
    )
)
"""The settings of the flat spelling, in order."""

FLAT: dict[str, Option] = {name: setting for setting in (*WRITTEN, *SHORTCUTS) for name in setting.spellings}
"""Every spelling of a setting, shortcuts among them -> the setting."""

PATHS = frozenset(setting.flag for setting in OPTIONS if setting.about.get("path") is True)
"""Settings that hold paths, which may differ on another machine."""

"""Describe a training run for ``run.yaml`` and ``run.json``, from a ``JepaTrainer`` and the arguments it was passed."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from stepjepa.base.errors import UserError
from stepjepa.base.files import fingerprint
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note
from stepjepa.base.typed_json import default_of, to_json
from stepjepa.batch.collate import Encoding
from stepjepa.batch.dataset import Prepared
from stepjepa.batch.tokenize import COUNTS
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.option import has_effect, options_of
from stepjepa.config.run import FLAT, GroupBy, RunConfig
from stepjepa.config.trainer import changed_defaults
from stepjepa.models.architecture import base_model
from stepjepa.models.fingerprint import weights_fingerprint
from stepjepa.models.weights import parameter_counts
from stepjepa.objectives.objective import Objective
from stepjepa.store.environment import machine, versions
from stepjepa.store.fingerprint import hub_commit, model_fingerprint
from stepjepa.store.folder import CONFIG_FILE
from stepjepa.store.metric_names import UNNAMED
from stepjepa.store.record import Lora, Order, RunRecord, Source, Training
from stepjepa.training.interface import TrainerInterface
from stepjepa.training.recorded_objective import jepa_as_trained

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Fields of TrainingArguments that belong to one launch, that ``JepaTrainer`` sets itself, or that are a secret.
NOT_WRITTEN = (
    *("output_dir", "resume_from_checkpoint", "hub_token", "local_rank", "debug", "disable_tqdm", "eval_steps"),
    *("remove_unused_columns", "logging_nan_inf_filter", "dataloader_pin_memory", "ddp_find_unused_parameters"),
    *("do_train", "do_eval", "do_predict", "per_device_eval_batch_size"),
)


class DescribedTrainer(TrainerInterface, Protocol):
    """Attributes of a ``JepaTrainer`` that a description uses, beside those of :class:`TrainerInterface`."""

    jepa: JepaConfig
    objective: Objective
    encoding: Encoding
    encoding_reason: str
    group_by: GroupBy | None

    @property
    def tracker(self) -> object | None: ...


# -- run.yaml ----------------------------------------------------------------------------------------------------------


def describe_objects(trainer: DescribedTrainer, names: Collection[str]) -> dict[str, JsonObject]:
    """Describe objects that a run was passed in Python, by their names in ``config.run.PASSED_OBJECTS``."""
    objects: dict[str, JsonObject] = {}
    if "model" in names:
        digest = weights_fingerprint(trainer.model, trainer.processing_class)
        objects["model"] = {"object": type(base_model(trainer.model)).__name__, "sha256": digest}
    if "tokenizer" in names:
        objects["tokenizer"] = _describe_tokenizer(trainer.processing_class)
    if "objective" in names:
        objects["objective"] = describe_objective(trainer.objective)
    if "train_dataset" in names and trainer.prepared is not None:
        objects["train_dataset"] = _describe_records(trainer.prepared)
    if "eval_dataset" in names and trainer.held_out:
        sets = {name: _describe_records(prepared) for name, prepared in trainer.held_out.items()}
        objects["eval_dataset"] = sets.get(UNNAMED, sets)
    return objects


def _describe_records(prepared: Prepared) -> JsonObject:
    source = source_of(prepared, None)
    return {"records": source.records, "sha256": source.sha256}


def config_of(trainer: DescribedTrainer) -> RunConfig:
    """Make the ``RunConfig`` of a trainer's run; objects that it was passed are replaced by descriptions."""
    passed, args = trainer.passed, trainer.args
    # A function changed the views of the records, so the file alone does not describe them.
    train = None if passed.has_views else passed.train
    is_object = {
        "model": passed.model is None,
        "tokenizer": passed.has_tokenizer,
        "objective": passed.has_objective,
        "train_dataset": train is None,
        "eval_dataset": passed.held_out is None,
    }
    objects = describe_objects(trainer, [name for name, is_passed in is_object.items() if is_passed])
    is_file = train is not None and Path(train).is_file()
    return RunConfig(
        model_name=passed.model,
        train_file=train if is_file else None,
        dataset=[train] if train is not None and not is_file else None,
        eval_file=passed.held_out,
        jepa=_with_effect(trainer.jepa),
        output_dir=str(args.output_dir),
        batch_size=args.per_device_train_batch_size,
        grad_accum=args.gradient_accumulation_steps,
        learning_rate=args.learning_rate,
        num_epochs=args.num_train_epochs,
        eval_steps=_eval_steps(args) if passed.held_out is not None else None,
        finetune_seed=args.seed,
        track_flop=trainer.tracker is not None,
        group_by=trainer.group_by,
        trainer=_named_fields(args),
        objects=objects | _of_trainer(trainer),
    )


def _of_trainer(trainer: DescribedTrainer) -> dict[str, JsonObject]:
    """Describe what only a program can make again, by the names in ``config.run.OF_TRAINERS``."""
    objects: dict[str, JsonObject] = {}
    if trainer.optimizer_cls_and_kwargs is not None:
        kind, values = trainer.optimizer_cls_and_kwargs
        objects["optimizer"] = {"object": kind.__name__, **{name: str(value) for name, value in values.items()}}
    if type(trainer).__module__.partition(".")[0] != "stepjepa":
        digest = hashlib.sha256(_source(type(trainer)).encode()).hexdigest()
        objects["trainer_class"] = {"object": type(trainer).__name__, "sha256": digest}
    return objects


def _eval_steps(args: TrainingArguments) -> int | None:
    return int(args.eval_steps) if str(args.eval_strategy.value) == "steps" and args.eval_steps >= 1 else None


def _with_effect(jepa: JepaConfig) -> JepaConfig:
    """Return the settings of the objective; every option without effect is set to its default."""
    values, defaults = vars(jepa), vars(JepaConfig(mode=jepa.mode))
    idle = [
        setting.name
        for setting in options_of(JepaConfig)
        if not has_effect(setting, values) or (setting.about.get("views") and not jepa.uses_views)
    ]
    return dataclasses.replace(jepa, **{name: defaults[name] for name in idle})


def _named_fields(args: TrainingArguments) -> JsonObject:
    """Return the fields of ``TrainingArguments`` that differ from the defaults of ``stepjepa train``."""
    # Of a subclass, such as TRL's SFTConfig, the fields of its own are not read, and its defaults are none of ours.
    defaults = {field.name: _plain(field.default) for field in dataclasses.fields(TrainingArguments) if field.init}
    defaults |= {name: _plain(value) for name, value in changed_defaults().items()}
    values = args.to_dict()
    # ``TrainingArguments`` leaves out a part of its accelerator's configuration.
    written = values.get("accelerator_config") or {}
    defaults["accelerator_config"] = {
        name: default for name, default in AcceleratorConfig().to_dict().items() if name in written
    }
    named: JsonObject = {}
    for name, raw in values.items():
        if name in FLAT or name in NOT_WRITTEN or name not in defaults:
            continue
        value, default = _plain(raw), defaults[name]
        if value == default or (value is False and default is None):
            continue
        if value is None:
            # A file can't express None, except that of report_to.
            named |= {name: "none"} if name == "report_to" else {}
        else:
            named[name] = value
    return named


def _plain(value: object) -> object:
    """Convert a value to the form of a file: an enum to its text, an empty value to None."""
    value = getattr(value, "value", value)
    is_empty = value is dataclasses.MISSING or value == "none" or (isinstance(value, str | list | dict) and not value)
    return None if is_empty else value


def _describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> JsonObject:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = repr((None if backend is None else backend.to_str(), tokenizer.chat_template))
    return {"object": type(tokenizer).__name__, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def describe_objective(objective: Objective) -> JsonObject:
    """Describe an ``Objective`` that was passed in Python, with a hash of its settings and of the code of own terms."""
    terms = {name: re.sub(r" at 0x[0-9a-f]+", "", repr(term)) for name, term in objective.terms.items()}
    code = [_source(type(term)) for term in objective.terms.values()]
    digest = hashlib.sha256(repr((sorted(terms.items()), code, objective.layer)).encode()).hexdigest()
    return {"object": "Objective", "sha256": digest, "terms": terms}


def _source(kind: type) -> str:
    """Return the source code of a user's class; empty for classes of this package, and for code without a file."""
    if kind.__module__.partition(".")[0] == "stepjepa":
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


# -- run.json ----------------------------------------------------------------------------------------------------------


def source_of(prepared: Prepared, name: str | None) -> Source:
    """Describe the records of a data set that was read from ``name``; None for records in memory."""
    count = prepared.counts["records"] + prepared.counts.get("skipped", 0)
    if prepared.summary is None:
        return Source(file=name, records=count, sha256=prepared.dataset.fingerprints().texts)
    if name is not None and Path(name).is_file():
        return Source(file=Path(name).name, records=count, sha256=fingerprint(name))
    return Source(file=name, records=count, sha256=prepared.summary.sha256)


def source_of_held_out(sets: Mapping[str, Prepared], name: str | None) -> Source:
    """Describe held-out records as :func:`source_of` does; several sets by their names."""
    if UNNAMED in sets:
        return source_of(sets[UNNAMED], name)
    sources = {of_set: source_of(prepared, None) for of_set, prepared in sets.items()}
    records = sum(source.records or 0 for source in sources.values())
    return Source(records=records, other={"sets": {of_set: to_json(source) for of_set, source in sources.items()}})


def _summed_counts(sets: Mapping[str, Prepared]) -> JsonObject:
    """Add up the counts of all sets of held-out records."""
    return {name: sum(prepared.counts.get(name, 0) for prepared in sets.values()) for name in COUNTS}


# Fields of ``LoraConfig`` that the record has under other names, and those that say nothing about an adapter.
_RENAMED = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_dora", "use_rslora", "trainable_token_indices")
_NOT_OF_ADAPTER = (
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    "inference_mode",
)


def _adapter(model: nn.Module) -> Lora | None:
    """Describe the adapter of a PEFT model: LoRA's usual settings, its others if they are set, and all of other types.

    None for a model without an adapter.
    """
    config: Any = getattr(model, "peft_config", {}).get(getattr(model, "active_adapter", None))
    if config is None:
        return None
    kind, values = str(getattr(config.peft_type, "value", config.peft_type)), config.to_dict()
    left_out = (*_NOT_OF_ADAPTER, *(_RENAMED if kind == "LORA" else ()))
    others = {
        field.name: json.loads(json.dumps(values[field.name], default=_as_list))
        for field in dataclasses.fields(config)
        if field.name in values and field.name not in left_out and values[field.name] != default_of(field)
    }
    if kind != "LORA":
        return Lora(other={"type": kind, **others})
    targets = config.target_modules
    settings = {
        "dropout": config.lora_dropout,
        "targets": targets if isinstance(targets, str) else ",".join(sorted(targets or ())),
        "dora": config.use_dora,
        "rslora": config.use_rslora,
    }
    return Lora(rank=config.r, alpha=config.lora_alpha, other=settings | others)


def _as_list(value: object) -> object:
    """Convert a set to a sorted list, and anything else that JSON lacks to text."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def describe(trainer: DescribedTrainer) -> tuple[RunRecord, RunConfig | None]:
    """Describe the run of a trainer by what it was passed; without a ``RunConfig`` where no file can describe it."""
    try:
        config = config_of(trainer)
    except UserError as error:
        # transformers accepts settings that our file format does not.
        if trainer.is_world_process_zero():
            note(f"{CONFIG_FILE} is not written, since it can't describe this run: {error}")
        config = None
    return describe_run(config, trainer), config


def _loading(config: RunConfig, model: PreTrainedModel) -> JsonObject:
    """Describe how the base model was loaded."""
    return {
        "dtype": config.dtype if config.model_name else str(model.dtype).removeprefix("torch."),
        "pretrain": config.pretrain,
        "train_tokenizer": None,  # of earlier versions
        "quantized": config.quantized,
        "chat_template": None if config.chat_template is None else fingerprint(config.chat_template),
        "attn_implementation": config.attn_implementation,
    }


def _order(args: TrainingArguments, group_by: GroupBy | None) -> Order:
    """Describe the order in which records are trained."""
    return Order(
        seed=args.seed,
        data_seed=args.data_seed,
        records_per_micro_step=args.per_device_train_batch_size * args.world_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        train_sampling_strategy=str(args.train_sampling_strategy),
        group_by=group_by,
    )


def describe_run(
    config: RunConfig | None,
    trainer: DescribedTrainer,
    *,
    command: list[str] | None = None,
    data: Mapping[str, Source] | None = None,
) -> RunRecord:
    """Describe a run that begins.

    Args:
        config: the run's settings; None where they are not known.
        trainer: it has the data and the model.
        command: the command line as it was typed; None for a run from Python.
        data: files that the records were read from; None for those that the trainer was passed.
    """
    trainable, total = parameter_counts(trainer.model)
    training, prepared, passed = trainer.args, trainer.prepared, trainer.passed
    if prepared is None:
        raise ValueError("train: expected a train_dataset, got none; pass one to JepaTrainer")
    base = base_model(trainer.model)
    config = config or RunConfig(model_name=passed.model)
    name = config.model_name or base.config.name_or_path or type(base).__name__
    if data is None:
        data = {"train": source_of(prepared, None if passed.has_views else passed.train)}
        if trainer.held_out:
            data["eval"] = source_of_held_out(trainer.held_out, passed.held_out)
    return RunRecord(
        status="running",
        command=command,
        directory=str(Path.cwd()),
        model=name,
        model_fingerprint=model_fingerprint(name) if Path(name).is_dir() else hub_commit(name),
        machine=machine(use_cpu=training.use_cpu),
        versions=versions(),
        jepa=jepa_as_trained(trainer),
        objective=describe_objective(trainer.objective) if passed.has_objective else None,
        loaded=_loading(config, base),
        encoding={"used": trainer.encoding, "because": trainer.encoding_reason},
        lora=_adapter(trainer.model),
        training=Training.of(training),
        order=_order(training, trainer.group_by),
        data=dict(data),
        counts=prepared.counts,
        eval_counts=_summed_counts(trainer.held_out) if trainer.held_out else None,
        tokens={**prepared.tokens, "ratio": prepared.tokens["all"] / prepared.tokens["main"]},
        template=prepared.template,
        parameters={"trained": trainable, "total": total},
    )

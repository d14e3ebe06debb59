"""Read an evaluated run: its settings, its results, and the scores of its answers."""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import read_json_object, read_jsonl
from stepjepa.base.json_object import JsonObject
from stepjepa.base.typed_json import Origin, at_least, from_json, to_json, unknown_fields
from stepjepa.config.jepa import NEEDS_VIEWS
from stepjepa.evaluation.output import RETRIEVAL_METRICS
from stepjepa.evaluation.summary_text import MAPS, describe_readout, describe_trained_on
from stepjepa.store.fingerprint import model_fingerprint
from stepjepa.store.folder import SUMMARY
from stepjepa.store.record import Fingerprints, Results, RunRecord, complete_objective, origin_of, read_record
from stepjepa.study.sweep_place import sweep_evaluation

T = TypeVar("T")

MEASURES = ("headline", "lenient", "stopped")
"""Measures of an answer: the headline score, the score that ignores text after the answer, whether it stopped."""

FIGURES = ("gold_loss", "matched", "shuffled", "tokens", "seconds", "flops")
"""Measures of a whole run: LM loss on the gold answers, similarity of matched and of shuffled views; tokens, seconds
and FLOPs of training."""

RETRIEVAL_MEASURES = tuple(f"retrieval_{name}" for name in RETRIEVAL_METRICS)
"""Measures of retrieval of a whole run, from evaluations with ``retrieval``: hits at 1 and 10, MRR, nDCG at 10."""

MAP_MEASURES = {of_map: tuple(f"{of_map}_{name}" for name in RETRIEVAL_METRICS) for of_map in MAPS}
"""The same behind each of ``summary_text.MAPS``, from evaluations with ``linear_map`` and with ``projection_heads``."""

RANKING_MEASURES = (*RETRIEVAL_MEASURES, *(name for measures in MAP_MEASURES.values() for name in measures))
"""All of these."""

HITS_AT_1 = RETRIEVAL_MEASURES[0]
"""The measure of retrieval that is named first: the share of questions whose nearest answer is right."""

LOADING = ("dtype", "chat_template", "attn_implementation")
"""How the model was loaded for training, in ``loaded``: facts that should be equal but need not be."""

# Fields of TrainingArguments that do not affect the trained weights, and the seeds.
_NON_SETTINGS = (
    *("seed", "data_seed", "output_dir", "run_name", "project", "disable_tqdm", "report_to", "debug", "local_rank"),
    *("prediction_loss_only", "push_to_hub", "skip_memory_metrics", "resume_from_checkpoint", "use_cpu"),
    *("enable_jit_checkpoint", "per_device_eval_batch_size", "batch_eval_metrics", "ddp_timeout"),
)
_NON_SETTING_PREFIXES = ("logging_", "log_", "save_", "hub_", "eval_", "do_", "include_", "trackio_", "dataloader_")
# Fields that decide which checkpoint is the best.
_WITH_BEST = ("eval_strategy", "eval_steps", "save_strategy", "save_steps")
_RENAMED = {"per_device_train_batch_size": "batch_size", "gradient_accumulation_steps": "grad_accum"}

# Settings of an evaluation in which runs may differ, or which another field of the summary holds.
_NON_PROTOCOL = (
    *("model", "base_model", "predictions", "similarity", "retrieval", "seed", "batch_size"),
    *("test_file", "examples", "task", "headline", "server_model"),
)

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")

_EVALUATE_AGAIN = "evaluate the run again, with `overwrite`"


@dataclass(frozen=True, kw_only=True)
class _Similarity:
    matched_similarity: float | None = None
    shuffled_similarity: float | None = None


@dataclass(frozen=True, kw_only=True)
class _RetrievalScore:
    mean: float


@dataclass(frozen=True, kw_only=True)
class _Ranking:
    hits_at_1: _RetrievalScore
    hits_at_10: _RetrievalScore
    mrr: _RetrievalScore
    ndcg_at_10: _RetrievalScore
    readout: JsonObject
    queries: int | None = None
    candidates: int | None = None


@dataclass(frozen=True, kw_only=True)
class _MappedRanking(_Ranking):
    file: str = "an unknown file"
    records: int | None = None
    fit: str | None = None
    every_layer: bool | None = None
    all_layers: bool = False


@dataclass(frozen=True, kw_only=True)
class _Retrieval(_Ranking):
    linear_map: _MappedRanking | None = None
    projection_heads: _MappedRanking | None = None

    def behind(self, of_map: str) -> _MappedRanking | None:
        return {"linear_map": self.linear_map, "projection_heads": self.projection_heads}[of_map]


@dataclass(frozen=True, kw_only=True)
class _EvaluationSettings:
    model: str | None = None
    similarity: str | None = None
    other: JsonObject = unknown_fields()


@dataclass(frozen=True, kw_only=True)
class _Summary:
    """The fields of an evaluation's summary that are read."""

    test_fingerprint: str
    n: int = at_least(1)
    task: str
    headline: str
    lenient: str
    gold_loss: float | None = None
    similarity: _Similarity = field(default_factory=_Similarity)
    retrieval: _Retrieval | None = None
    trained_on: dict[str, float] | None = None
    settings: _EvaluationSettings = field(default_factory=_EvaluationSettings)


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """The fields of a line of the answers file that are read."""

    index: int = at_least(0)
    scores: dict[str, float | None]
    stopped: float | None = None


@dataclass(frozen=True)
class EvaluatedRun:
    """Results of one run. Unknown values are None or empty."""

    folder: Path
    evaluation: str  # its name in the folder
    seed: str  # of training; 7/3 for seed 7 with data_seed 3
    settings: JsonObject  # all settings that affect the trained weights, except data and seed: they define the arm
    protocol: JsonObject  # must be equal to compare runs: data, test set, generation and scoring
    versions: dict[str, str]
    steps: int
    indices: list[int]  # of the evaluated examples, from 0 in the test file
    examples: dict[str, list[float] | None]  # each of MEASURES -> one number per example
    figures: dict[str, float | None]  # each of FIGURES and RANKING_MEASURES -> its value
    model: str | None  # fingerprint of the evaluated model
    views: str | None  # mode of the views whose similarity was measured: llm-jepa or step-jepa
    loaded: JsonObject  # how the model was loaded for training: dtype, chat template, attention
    trained_on: str | None = None  # sentence on the share of test prompts that were trained on
    fingerprints: Fingerprints = field(default_factory=Fingerprints)
    mixed: tuple[str, ...] = ()  # changes between launches that affect the weights: no clean seed of its arm
    noted: tuple[str, ...] = ()  # other changes between launches: versions, machines, processes
    readout: str | None = None  # where the embeddings of retrieval were read
    ranked: str | None = None  # what retrieval ranked: views, and numbers of queries and candidates
    ranks_steps: bool = False  # retrieval ranked next steps, not answers
    map_records: str | None = None  # which records the linear map in front of retrieval is fitted on, and by what
    head_records: str | None = None  # which records the projection heads are trained on

    def fitted_on(self, of_map: str) -> str | None:
        """Return which records one of ``summary_text.MAPS`` is fitted on; None if there is no such map."""
        return {"linear_map": self.map_records, "projection_heads": self.head_records}[of_map]

    def __repr__(self) -> str:
        return f"EvaluatedRun('{self.folder}', evaluation {self.evaluation}, seed {self.seed})"

    def mean(self, measure: str) -> float | None:
        """Return the mean over examples of one of ``MEASURES``, or the value of one of the ``figures``."""
        if measure not in MEASURES:
            # Figures that were kept by an earlier version have no retrieval.
            return self.figures.get(measure)
        values = self.examples[measure]
        return None if values is None else math.fsum(values) / len(values)

    def verdicts(self, measure: str) -> list[bool] | None:
        """Return whether each example is right; None if a score is fractional, as a mean over samples may be."""
        values = self.examples[measure]
        return [bool(value) for value in values] if values is not None and set(values) <= {0, 1} else None


def readouts(runs: Iterable[EvaluatedRun]) -> dict[bool, list[str]]:
    """Return where embeddings of retrieval were read, in runs that were trained with views (True) and without."""
    kinds: dict[bool, list[str]] = {}
    for run in runs:
        if run.readout is not None:
            kind = kinds.setdefault(run.settings["mode"] != "regular", [])
            if run.readout not in kind:
                kind.append(run.readout)
    return kinds


def read_evaluated_run(folder: str | os.PathLike[str], evaluation: str | None = None) -> EvaluatedRun:
    """Read a finished run and its evaluation ``NAME.jsonl``; the name is needed only if there are several.

    Args:
        folder: run folder.
        evaluation: name of the evaluation; None if the run has one.

    Raises:
        UserError: the run is not finished, or has no such evaluation of its weights; or a file is damaged.
    """
    path = Path(folder)
    record = read_record(path)
    if record.status is None and not record.launches:
        fault = "holds a model that was saved outside of its run, by `save_model` or `Jepa.save`"
        raise UserError(f"{fault}; name the folder of a run, or leave it out", path=path)
    if record.status != "finished":
        status = "None" if record.status is None else shown(record.status)
        raise UserError(f"the run is not finished (status {status}); resume it, or leave it out", path=path)
    file = _summary_file(path, evaluation)
    values = read_json_object(file, "summary of an evaluation", _EVALUATE_AGAIN)
    if is_of_another_model(path, values):
        raise UserError(f"is of another model than the one in the folder; {_EVALUATE_AGAIN}", path=file)
    results = _required(path, "results", record.results)
    training = _required(path, "training", record.training)
    summary = from_json(_Summary, values, Origin(file, _EVALUATE_AGAIN))
    seed, data_seed = training.seed, training.data_seed
    if seed is None:
        raise origin_of(path).missing("training.seed", "a whole number")
    # Read the run before the answers: if both are damaged, the error of the run is the more useful one.
    settings, protocol = _settings(path, record), _protocol(path, record, summary)
    views = settings["mode"] != "regular"
    indices, examples = _examples(file, summary)
    return EvaluatedRun(
        folder=path,
        evaluation=file.name.removesuffix(SUMMARY),
        seed=f"{seed}" if data_seed in (None, seed) else f"{seed}/{data_seed}",
        settings=settings,
        protocol=protocol,
        versions={name: str(version) for name, version in record.versions.items()},
        steps=results.steps,
        indices=indices,
        examples=examples,
        figures=_figures(results, summary),
        model=summary.settings.model,
        views=summary.settings.similarity,
        loaded=record.loaded,
        trained_on=_describe_trained_on(file, summary),
        readout=None if summary.retrieval is None else describe_readout(summary.retrieval.readout),
        ranked=None if summary.retrieval is None else _describe_ranked(summary.retrieval),
        ranks_steps=summary.retrieval is not None and summary.retrieval.readout.get("views") == "step-jepa",
        map_records=_describe_map_records(summary, "linear_map", views),
        head_records=_describe_map_records(summary, "projection_heads", views),
        fingerprints=record.fingerprints or Fingerprints(),
        mixed=tuple(record.changes(mixed=True)),
        noted=tuple(record.changes(mixed=False)),
    )


def _figures(results: Results, summary: _Summary) -> dict[str, float | None]:
    """Return each of :data:`FIGURES` and of the measures of retrieval; None for one that was not measured."""
    return {
        "gold_loss": summary.gold_loss,
        "matched": summary.similarity.matched_similarity,
        "shuffled": summary.similarity.shuffled_similarity,
        "tokens": results.tokens,
        "seconds": results.train_seconds,
        # None in runs of 0.1, which did not count FLOPs.
        "flops": results.flops,
        **_ranking_figures(RETRIEVAL_MEASURES, summary.retrieval),
        **{
            name: value
            for of_map, measures in MAP_MEASURES.items()
            for name, value in _ranking_figures(measures, _behind(summary, of_map)).items()
        },
    }


def _behind(summary: _Summary, of_map: str) -> _MappedRanking | None:
    """Return the retrieval behind one of ``summary_text.MAPS``; None if it was not measured."""
    return None if summary.retrieval is None else summary.retrieval.behind(of_map)


def _ranking_figures(measures: Sequence[str], ranking: _Ranking | None) -> dict[str, float | None]:
    """Return each of :data:`RETRIEVAL_MEASURES` or of :data:`MAP_MEASURES`; None if it was not measured."""
    scores = [None if ranking is None else getattr(ranking, name) for name in RETRIEVAL_METRICS]
    return {name: score and score.mean for name, score in zip(measures, scores, strict=True)}


def _describe_ranked(ranking: _Ranking) -> str:
    """Describe what was ranked: ``100 queries among 93 candidates (views llm-jepa)``."""
    queries, candidates = (
        "unknown" if count is None else f"{count:,}" for count in (ranking.queries, ranking.candidates)
    )
    return f"{queries} queries among {candidates} candidates (views {ranking.readout.get('views')})"


def _describe_map_records(summary: _Summary, of_map: str, has_views: bool) -> str | None:
    """Describe what a map is fitted on: ``900 records of train.jsonl (sha256 0123456789ab)``; None for no map.

    The same file has the same description under any folder. A linear map without a ``fit`` is of a version that tried
    ridge regression alone; one without ``every_layer`` of a version that read a model with a JEPA objective in one
    place, which is no fair comparison with one without. Projection heads without ``all_layers`` are of a version that
    tried single layers alone.
    """
    mapped = _behind(summary, of_map)
    if mapped is None:
        return None
    records = "records" if mapped.records is None else counted(mapped.records, "record")
    asked = summary.settings.other.get("retrieval")
    digest = asked.get("linear_map") if isinstance(asked, dict) else None
    content = f" (sha256 {str(digest)[:12]})" if digest else ""
    fits = ", by ridge regression alone" if mapped.fit is None and of_map == "linear_map" else ""
    every_layer = not has_views if mapped.every_layer is None else mapped.every_layer
    places = "" if every_layer else ", read in one place alone"
    if every_layer and of_map == "projection_heads" and not mapped.all_layers:
        places = ", read in single layers alone"
    return f"{records} of {Path(mapped.file).name}{content}{fits}{places}"


def _required(folder: Path, name: str, part: T | None) -> T:
    """Return a part of the run record; raise ``UserError`` if it is missing, since a finished run must have it."""
    if part is None:
        raise origin_of(folder).missing(name, "a text" if name == "model" else "an object")
    return part


def _describe_trained_on(file: Path, summary: _Summary) -> str | None:
    shares = summary.trained_on
    for form in ("exact", "normalised"):
        if shares is not None and form not in shares:
            raise Origin(file, _EVALUATE_AGAIN).missing(f"trained_on.{form}", "a number")
    return describe_trained_on(shares)


def _summary_file(folder: Path, evaluation: str | None) -> Path:
    """Return the summary of an evaluation; raise ``UserError`` unless exactly one matches.

    Of several evaluations of a trial, that of its sweep is read where none is named.
    """
    names = sorted(file.name.removesuffix(SUMMARY) for file in folder.glob(f"*{SUMMARY}"))
    if evaluation is None and len(names) > 1:
        evaluation = sweep_evaluation(folder)
    matching = [name for name in names if evaluation in (None, name, f"{name}.jsonl", f"{name}{SUMMARY}")]
    if len(matching) != 1:
        label = "" if evaluation is None else f" {shown(evaluation)}"
        contents = "several evaluations" if matching else f"no finished evaluation{label}"
        remedy = "pass `evaluation NAME`" if matching else "evaluate with an `output_file` in the folder"
        raise UserError(f"holds {contents} (there is {', '.join(names) or 'none'}); {remedy}", path=folder)
    return folder / f"{matching[0]}{SUMMARY}"


def _settings(folder: Path, record: RunRecord) -> JsonObject:
    """Return the settings of an arm as a flat dict, without those that have no effect and must not distinguish arms."""
    own, lora = _required(folder, "jepa", record.jepa), record.lora
    training = _required(folder, "training", record.training)
    settings = complete_objective(own)
    if own["mode"] == "regular":
        settings = {name: value for name, value in settings.items() if name not in NEEDS_VIEWS}
    if settings.get("jepa_loss_type") != "infonce":
        settings.pop("infonce_temperature", None)
        settings.pop("infonce_negatives", None)
    settings |= {"model": _required(folder, "model", record.model), "lora": lora is not None}
    if lora is not None:
        settings |= {f"lora_{name}": value for name, value in to_json(lora).items()}
        if lora.alpha is None and lora.rank is not None:
            settings["lora_alpha"] = 2 * lora.rank
    settings |= {name: record.loaded.get(name) or False for name in ("pretrain", "train_tokenizer", "quantized")}
    decides_best = _WITH_BEST if training.load_best_model_at_end else ()
    for name, value in to_json(training).items():
        if name in decides_best or not (name in _NON_SETTINGS or name.startswith(_NON_SETTING_PREFIXES)):
            settings[_RENAMED.get(name, name)] = value
    if record.order is not None:
        if record.order.records_per_micro_step is None:
            raise origin_of(folder).missing("order.records_per_micro_step", "a whole number of at least 1")
        settings["batch_size"] = record.order.records_per_micro_step
        settings["group_by"] = record.order.group_by
    if record.objective is not None:
        # Custom terms that were passed in Python replace those of ``jepa``.
        settings["objective"] = str(record.objective.get("sha256"))[:8]
    settings["same_flop"] = bool(record.same_flop)
    if settings["same_flop"]:
        # max_steps is computed from the FLOPs of these epochs, which depend on the data order, and so on the seed.
        settings.pop("max_steps", None)
    elif (training.max_steps or 0) > 0:
        settings.pop("num_train_epochs", None)
    return settings


def _protocol(folder: Path, record: RunRecord, summary: _Summary) -> JsonObject:
    """Return the facts that must be equal to compare runs: data, test set, generation and scoring."""
    protocol: JsonObject = {}
    for part in ("train", "data"):
        source = record.data.get(part)
        if source is not None:
            # Version 0.1 could stream a file, and then hashed only its beginning.
            streamed = source.sha256 is None and source.bytes is not None
            digest = source.sha256_of_first_mib if streamed else source.sha256
            if digest is None:
                raise origin_of(folder).missing(f"data.{part}.sha256", "a text")
            protocol["training data (sha256)"] = digest
            split = {name: getattr(source, name) for name in ("eval_split", "split_by", "split_seed", "bytes")}
            protocol |= {name: value for name, value in split.items() if value is not None}
    protocol["system prompts of training"] = record.system_prompts
    protocol["test file (sha256)"] = summary.test_fingerprint
    protocol["number of examples"] = summary.n
    protocol |= {name: getattr(summary, name) for name in ("task", "headline", "lenient")}
    return protocol | {name: value for name, value in summary.settings.other.items() if name not in _NON_PROTOCOL}


def is_of_another_model(folder: Path, summary: JsonObject) -> bool:
    """Return whether an evaluation is of other weights than the folder holds, such as a checkpoint's.

    False if the weights have been removed, or the summary names no model.
    """
    settings = summary.get("settings")
    # Predictions of another program name no model.
    evaluated = settings.get("model") if isinstance(settings, dict) else None
    has_weights = any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
    return evaluated is not None and has_weights and evaluated != model_fingerprint(folder)


def _examples(file: Path, summary: _Summary) -> tuple[list[int], dict[str, list[float] | None]]:
    """Read the indices of the evaluated examples, and each of ``MEASURES`` per example."""
    path = file.with_name(file.name.removesuffix(SUMMARY) + ".jsonl")

    def refuse(error: UserError) -> None:
        raise UserError(f"{error}; {_EVALUATE_AGAIN}")

    numbered = read_jsonl(path, "file of answers", on_error=refuse)
    lines = [(Origin(path, _EVALUATE_AGAIN, number), value) for number, value in numbered]
    if len(lines) != summary.n:
        fault = f"has {counted(len(lines), 'line')} for the {counted(summary.n, 'example')} of {file.name}"
        raise UserError(f"{fault}; {_EVALUATE_AGAIN}", path=path)
    answers = [from_json(_Answer, value, origin) for origin, value in lines]
    examples: dict[str, list[float] | None] = {"stopped": None}
    for measure, name in (("headline", summary.headline), ("lenient", summary.lenient)):
        scores = [answer.scores.get(name) for answer in answers]
        if None in scores:
            raise lines[scores.index(None)][0].missing(f"scores.{name}", "a number")
        examples[measure] = [score for score in scores if score is not None]
    stopped = [answer.stopped for answer in answers]
    if None not in stopped:
        examples["stopped"] = [value for value in stopped if value is not None]
    return [answer.index for answer in answers], examples

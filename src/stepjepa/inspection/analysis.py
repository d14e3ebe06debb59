"""Analyse the embeddings of trained models: numbers, data, pictures. Torch is imported when a model is loaded.

An analysis writes analysis.json (settings and numbers), embeddings.npz (arrays ``n/source``, ``n/target``, ``n/record``
and ``n/pair`` for all pairs of the n-th model) and projection.png.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.columns import aligned_columns, numbered_names
from stepjepa.base.errors import UserError, raising_user_errors
from stepjepa.base.files import atomic_write, check_output_file, fingerprint, json_text, locked
from stepjepa.base.json_object import JsonObject
from stepjepa.config.batch_sizes import EMBEDDED
from stepjepa.config.jepa import Dtype, JepaConfig, Pooling
from stepjepa.config.option import FROM_ONE, FROM_ZERO, check_values, option
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.reading_notes import tell_unused
from stepjepa.data.record import Record
from stepjepa.data.sources import read_records
from stepjepa.inspection.plots import BOTH_VIEWS, COLOURED_BY, Points, draw_projection, write_figure
from stepjepa.models.names import check_trained
from stepjepa.store.prompts import training_system_prompt, with_system_prompt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stepjepa.objectives.view_embeddings import ViewEmbeddings

Value = TypeVar("Value")

JSON_FILE, DATA_FILE = "analysis.json", "embeddings.npz"
NEXT_STEP = "next step"
MOST_POINTS = 1000  # most pairs in a picture; numbers are computed from all pairs

_VIEWS = "views (by default those of training)"


@dataclass(frozen=True)
class AnalysisSettings:
    """Models, test file, and how their views are read and drawn; UserError if a value is out of range."""

    model_path: list[str] = option(
        help="run, checkpoint or adapter folders, or hub ids", group="files", metavar="PATH", path="or name"
    )
    test_file: str = option(
        help="JSON lines, JSON, CSV, TSV, Parquet or Arrow", group="files", metavar="FILE", path=True
    )
    output_dir: str = option(
        help="folder of the numbers, the data and the pictures", group="files", metavar="DIR", path=True
    )
    columns: list[str] | None = option(
        None, "column names of prompt and answer (recognised by their usual names)", group="files", metavar="NAME"
    )
    overwrite: bool = option(False, "replace an earlier analysis in `output_dir`", group="files")
    views: Literal["llm-jepa", "step-jepa"] | None = option(None, "kind of views", group=_VIEWS)
    pairs: Literal["first", "all"] | None = option(
        None, "pairs of each record; all for `t_sne_type steps`", group=_VIEWS
    )
    layer: int | None = option(None, "index of hidden_states to read; 0 is the embeddings, -1 the last", group=_VIEWS)
    pooling: Pooling | None = option(None, "read one token, or the mean as in training", group=_VIEWS)
    use_test_prompts: bool = option(
        False, "keep the test file's own system prompt; else that of training", group=_VIEWS
    )
    t_sne_type: str = option(
        "in_n_out",
        "what colours the points: the view; the field 'group'; the answer; the step's number",
        group="pictures",
        choices=tuple(COLOURED_BY),
    )
    max_examples: int | None = option(
        None, "analyse a random sample of N records (all)", group="running", allowed=FROM_ONE
    )
    batch_size: int = option(EMBEDDED, "sequences at a time", group="running", allowed=FROM_ONE)
    dtype: Dtype = option("auto", "dtype of the weights", group="running")
    seed: int = option(42, "seed of samples and t-SNE", group="running", allowed=FROM_ZERO)
    trust_remote_code: bool = option(False, "run code that comes with the model", group="running")

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class ModelViews:
    """The embeddings of the test records by one model, and their metrics."""

    model_path: str
    views: tuple[str, str]  # names of source and target
    config: JepaConfig  # says where the views were read
    embeddings: ViewEmbeddings  # with indices of records in the test file, from 0
    numbers: JsonObject  # see embeddings.embedding_metrics


def output_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the paths of all files that an analysis writes."""
    return [Path(folder) / name for name in (JSON_FILE, DATA_FILE, "projection.png")]


def analyze_models(settings: AnalysisSettings) -> list[ModelViews]:
    """Embed the test records with each model; write numbers, data and pictures to ``settings.output_dir``."""
    files = output_files(settings.output_dir)
    _check_free(files, settings.overwrite)
    # Before records are read, which may take minutes.
    for path in settings.model_path:
        check_trained(path)
    configs = zip(settings.model_path, choose_configs(settings), strict=True)
    bad = BadRecords(settings=("columns",))
    digest = fingerprint(settings.test_file)
    records = read_records(settings.test_file, bad=bad, columns=settings.columns)
    tell_unused(records)
    sample = {index: records[index] for index in sampled(len(records), settings.max_examples, settings.seed).tolist()}
    models = [_embed_model(path, config, sample, settings) for path, config in configs]
    points = {
        model.model_path: choose_points(model.embeddings, records, model.views, settings, model.config.pair_distance)
        for model in models
    }
    figure = draw_projection(points, settings.t_sne_type, Path(settings.test_file).name, settings.seed)
    with locked(Path(settings.output_dir)):
        # Another analysis may have been written meanwhile.
        _check_free(files, settings.overwrite)
        _write(files, models, figure, settings, digest)
    return models


def _check_free(files: Sequence[Path], overwrite: bool) -> None:
    """Raise ``UserError`` if one of the files of an analysis exists, or none can be written."""
    for file in files:
        if file.exists() and not overwrite:
            raise UserError("already exists; name another `output_dir` or pass `overwrite`", path=file)
        check_output_file(file, overwrite=True)


def _write(
    files: Sequence[Path], models: Sequence[ModelViews], figure: Figure, settings: AnalysisSettings, digest: str
) -> None:
    """Write the numbers, the data and the picture of an analysis; an earlier one stays until all are written.

    Args:
        files: from :func:`output_files`.
        models: the analysed models.
        figure: the picture.
        settings: of the analysis.
        digest: SHA-256 of the test file.
    """
    arrays: dict[str, Any] = {
        f"{number}/{name}": array
        for number, model in enumerate(models)
        for name, array in vars(model.embeddings).items()
        if isinstance(array, np.ndarray)
    }
    parts = ("model_path", "views", "numbers")
    described_models = [
        {**{name: getattr(model, name) for name in parts}, "config": model.config.to_dict()} for model in models
    ]
    recorded = {name: value for name, value in asdict(settings).items() if name not in ("output_dir", "overwrite")}
    source = {"test_file": settings.test_file, "test_fingerprint": digest, "settings": recorded}
    with atomic_write(files[0]) as numbers, atomic_write(files[1], "wb") as data, atomic_write(files[2], "wb") as drawn:
        numbers.write(json_text({**source, "models": described_models}))
        np.savez_compressed(data, **arrays)
        write_figure(figure, drawn, "png")
        for stream in (numbers, data, drawn):
            stream.flush()
        # It gets its name last: if it is there, the other files are those of the same analysis.
        files[0].unlink(missing_ok=True)


def _embed_model(
    path: str, config: JepaConfig, records: Mapping[int, Record], settings: AnalysisSettings
) -> ModelViews:
    """Embed ``records``, by their index, with one model, and compute the metrics; the model is freed at the end."""
    from stepjepa.evaluation.embeddings import embedding_metrics
    from stepjepa.evaluation.run import pair_embedder
    from stepjepa.models.loading import load_for_inference

    prompt, chats = None if settings.use_test_prompts else training_system_prompt(path), list(records.values())
    chats = chats if prompt is None else with_system_prompt(chats, prompt)
    model, tokenizer = load_for_inference(path, dtype=settings.dtype, trust_remote_code=settings.trust_remote_code)
    embeddings = pair_embedder(model, tokenizer, config, settings.batch_size)(chats)
    embeddings = replace(embeddings, record=np.asarray(list(records))[embeddings.record])
    views = view_names(config.mode, config.reverse_pred)
    return ModelViews(path, views, config, embeddings, embedding_metrics(embeddings))


def choose_configs(settings: AnalysisSettings) -> list[JepaConfig]:
    """Return the settings that read the views of each model: the same pairs for all, each with its own readout.

    UserError if the models were trained on different views, pairs or separators, and no setting decides.
    """
    from stepjepa.objectives.reading import changed_readout, reading_config
    from stepjepa.store.record import trained_objective

    def decided(name: str, values: set[Value], setting: Value | None = None) -> Value | None:
        """Return a setting, or the value that all models were trained with if it is None."""
        if setting is None and len(values) > 1:
            difference = f"different {name} ({', '.join(sorted(map(repr, values)))})"
            raise UserError(
                f"the models were trained with {difference}; pass `views` and `pairs`, or analyze one by one"
            )
        return next(iter(values), None) if setting is None else setting

    trained = [trained_objective(path) for path in settings.model_path]
    recorded = [config for config in trained if config is not None]
    views = decided("views", {objective["mode"] for objective in recorded} - {"regular"}, settings.views) or "llm-jepa"
    steps = settings.t_sne_type == "steps"
    if steps and views != "step-jepa":
        raise UserError(f"`t_sne_type steps` colours the views of step-jepa, not of {views}; pass `views step-jepa`")
    # Pairs and separators matter only for models that were trained on these views.
    of_views = [objective for objective in recorded if objective["mode"] == views]
    changes: JsonObject = {
        "pairs": decided("pairs", {"all"} if steps else {objective["pairs"] for objective in of_views}, settings.pairs),
        "step_separator": decided("step_separator", {objective["step_separator"] for objective in of_views}),
        # Records of earlier versions lack it.
        "steps_from": decided("steps_from", {objective.get("steps_from", "content") for objective in of_views}),
        "max_length": min((objective["max_length"] for objective in of_views or recorded), default=None),
        "jepa_layer": settings.layer,
        "pooling": settings.pooling,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    with raising_user_errors():
        return [changed_readout(reading_config(config, views), changes) for config in trained]


def view_names(mode: str, reverse_pred: bool) -> tuple[str, str]:
    """Return the names of source and target in a ``mode``, ``llm-jepa`` or ``step-jepa``; swapped if reversed."""
    first, second = ("question", "answer") if mode == "llm-jepa" else ("step", NEXT_STEP)
    return (second, first) if reverse_pred else (first, second)


def sampled(count: int, most: int | None, seed: int) -> NDArray[np.int64]:
    """Return the indices of a seeded sample of ``most`` of ``count`` items, ascending; None samples all."""
    return np.sort(np.random.default_rng(seed).choice(count, min(count, most or count), replace=False))


def choose_points(
    embeddings: ViewEmbeddings,
    records: Sequence[Record],
    views: tuple[str, str],
    settings: AnalysisSettings,
    pair_distance: int,
) -> Points:
    """Return the points of one model with their labels.

    Args:
        embeddings: of its pairs.
        records: those of the test file.
        views: names of source and target, from :func:`view_names`.
        settings: the property that colours the points, and the seed of their sample.
        pair_distance: steps between source and target in Step-JEPA.

    Raises:
        UserError: a record lacks the field that colours its points.
    """
    colouring = settings.t_sne_type
    targets = (False, True) if colouring in BOTH_VIEWS else (views[1] == "question",)
    sample = sampled(len(embeddings.record), MOST_POINTS, settings.seed)
    is_target, chosen = np.repeat(targets, len(sample)), np.tile(sample, len(targets))
    vectors = np.where(is_target[:, None], embeddings.target[chosen], embeddings.source[chosen])
    labels = []
    for index, pair, target in zip(embeddings.record[chosen], embeddings.pair[chosen], is_target, strict=True):
        view = views[int(target)]
        if colouring == "in_n_out":
            labels.append(f"Enc({view})")
        elif colouring == "steps":
            labels.append(f"step {pair + pair_distance * (view == NEXT_STEP)}")
        elif colouring == "paraphrase":
            labels.append(f"group {group_of(records[index])}")
        else:
            labels.append(" ".join(records[index].answer.split()))
    return Points(vectors, is_target, tuple(labels))


def group_of(record: Record) -> str:
    """Return the group of paraphrases that a record belongs to; UserError if its field ``group`` is missing."""
    value = record.extra.get("group")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        fault = "no field 'group' with a name or a number, as 'stepjepa prepare paraphrase' writes it"
        raise UserError(fault, path=record.path, line=record.line)
    return str(value)


def notes(models: Sequence[ModelViews]) -> list[str]:
    """Return caveats on the numbers, one sentence each."""
    sentences = [f"{model.model_path}: {note}" for model in models for note in model.numbers["notes"]]
    first, *others = ({*zip(model.embeddings.record, model.embeddings.pair, strict=True)} for model in models)
    if any(other != first for other in others):
        sentences.append("the models were read on different pairs, since some have other lengths")
    return sentences


def as_table(models: Sequence[ModelViews]) -> str:
    """Format the numbers as text, with one column for each model; names are those of analysis.json, but for ``n``."""
    columns = [dict(_cells(model.numbers)) for model in models]
    heads, legend = numbered_names([model.model_path for model in models])
    rows = [(name, *(column.get(name, "–") for column in columns)) for name in columns[0]]
    return f"{legend}{aligned_columns(('', *(heads[model.model_path] for model in models)), rows)}"


def _cells(numbers: JsonObject, within: str = "") -> Iterator[tuple[str, str]]:
    for key, value in numbers.items():
        name = "pairs" if key == "n" else key
        if isinstance(value, dict):
            yield from _cells(value, f"{within}{name} ")
        elif not isinstance(value, list):
            yield f"{within}{name}", "–" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"

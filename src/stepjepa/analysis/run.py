"""Look at the representations of trained models: embed, compute, keep, draw. Free of torch until a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepjepa.analysis.files import REST, Analysis, ModelAnalysis, check_folder, save
from stepjepa.analysis.plots import write_figures
from stepjepa.analysis.points import (
    choose_classes,
    choose_points,
    group_of,
    project,
    sampled,
    view_names,
)
from stepjepa.analysis.settings import AnalysisSettings, read_labels
from stepjepa.data.prompts import training_system_prompt, with_system_prompt
from stepjepa.data.records import Record
from stepjepa.data.sources import read_records
from stepjepa.errors import UserError
from stepjepa.files import fingerprint

if TYPE_CHECKING:
    from stepjepa.analysis.representations import ViewEmbeddings
    from stepjepa.config import JepaConfig


def analyze(settings: AnalysisSettings) -> Analysis:
    """Embed the test records with each model, write numbers, data and pictures.

    Returns:
        What was written to ``settings.output_dir``.

    Raises:
        UserError: a file, a model or a setting is wrong.
    """
    check_folder(settings.output_dir, settings.overwrite)
    records = read_records(settings.test_file)
    chosen = sampled(len(records), settings.max_examples or len(records), settings.seed).tolist()
    read = fingerprint(settings.test_file)
    names, configs = model_names(settings), choose_configs(settings)
    models, labels = [], []
    for place, path in enumerate(settings.model_path):
        embeddings = _embed(path, records, chosen, configs[place], settings)
        views = view_names(configs[place].mode, configs[place].reverse_pred)
        points = choose_points(
            embeddings,
            settings.t_sne_type,
            records,
            views=views,
            most=settings.max_points,
            seed=settings.seed,
        )
        drawn = {each: project(each, points.vectors, settings.seed) for each in settings.projections}
        labels.append(points.labels)
        models.append(
            ModelAnalysis(
                name=names[place],
                model_path=path,
                views=views,
                config=configs[place].to_dict(),
                numbers=_numbers(embeddings, views, records, settings),
                captions={each: caption for each, (_, caption) in drawn.items()},
                arrays={**vars(embeddings), "is_target": points.is_target},
                planes={each: plane for each, (plane, _) in drawn.items()},
            )
        )
    classes = choose_classes(list(chain.from_iterable(labels)), settings.t_sne_type)
    for model, own in zip(models, labels, strict=True):
        of_class = [classes.index(label) if label in classes else REST for label in own]
        model.arrays["classes"] = np.asarray(of_class)
    described = {name: value for name, value in asdict(settings).items() if name not in ("output_dir", "overwrite")}
    described["model_paths"] = described.pop("model_path")
    described["labels"] = read_labels(settings.labels, len(models))
    analysis = Analysis(settings.test_file, read, described, tuple(classes), tuple(models))
    save(analysis, settings.output_dir)
    write_figures(analysis, settings.output_dir)
    return analysis


def notes(analysis: Analysis) -> list[str]:
    """What a reader of the numbers must know, as sentences."""
    found = [f"{model.name}: {note}" for model in analysis.models for note in model.numbers["notes"]]
    first = analysis.models[0]
    for model in analysis.models[1:]:
        if not all(np.array_equal(model.arrays[name], first.arrays[name]) for name in ("record", "pair")):
            found.append(
                f"{first.name} and {model.name} were read on different pairs (their tokenizers leave out different "
                "records); raise --max_length"
            )
    return found


def model_names(settings: AnalysisSettings) -> list[str]:
    """The labels, or the shortest ends of the paths that tell the models apart."""
    if settings.labels:
        return list(read_labels(settings.labels, len(settings.model_path)))
    paths = [Path(path).parts for path in settings.model_path]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise UserError("--model_path names a model twice; leave one out, or tell them apart by --labels")


def choose_configs(settings: AnalysisSettings) -> list[JepaConfig]:
    """How the views are read from each model: all on the same pairs, each where it was trained to be read.

    Raises:
        UserError: the models were trained on different views or pairs, and no flag decides.
    """
    from stepjepa.analysis.similarity import reading_config, refuse_stripped
    from stepjepa.run_folder import trained_objective

    if not settings.no_predictors:
        for path in settings.model_path:
            refuse_stripped(path)
    trained = [trained_objective(path) for path in settings.model_path]
    known = [each for each in trained if each is not None]
    views = settings.views
    if views is None:
        modes = sorted({each["mode"] for each in known} - {"regular"})
        if len(modes) > 1:
            raise UserError(f"the models were trained on different views ({', '.join(modes)}); pass --views")
        views = modes[0] if modes else "llm-jepa"
    if settings.t_sne_type == "steps" and views != "step-jepa":
        raise UserError(f"--t_sne_type steps colours the views of step-jepa, not of {views}; pass --views step-jepa")
    # Only who was trained on these views has had a choice of pairs and separators.
    same = [each for each in known if each["mode"] == views]
    changes: dict[str, Any] = {"predictors": 0, "front_pred": False} if settings.no_predictors else {}
    for name, of in {"pairs": same, "step_separator": same, "max_length": same or known}.items():
        values = sorted({each[name] for each in of})
        if (given := getattr(settings, name)) is not None:
            values = [given]
        elif name == "pairs" and settings.t_sne_type == "steps":
            values = ["all"]
        if len(values) > 1:
            different = ", ".join(map(str, values))
            raise UserError(f"the models were trained with different {name} ({different}); pass --{name}")
        if values:
            changes[name] = values[0]
    return [replace(reading_config(each, views), **changes) for each in trained]


def _embed(
    path: str, records: list[Record], chosen: Sequence[int], config: JepaConfig, settings: AnalysisSettings
) -> ViewEmbeddings:
    """The embeddings of the chosen records by one model, which is freed again."""
    from stepjepa.analysis.representations import Reading, embed_views
    from stepjepa.models.loading import load_for_inference

    prompt = None if settings.use_test_prompts else training_system_prompt(path)
    shown = records if prompt is None else with_system_prompt(records, prompt)
    model, tokenizer = load_for_inference(path, dtype=settings.dtype, trust_remote_code=settings.trust_remote_code)
    reading = Reading(settings.layer, settings.pooling)
    some = [shown[index] for index in chosen]
    embeddings = embed_views(model, tokenizer, some, config, reading, batch_size=settings.batch_size)
    return replace(embeddings, record=np.asarray(chosen)[embeddings.record])


def _numbers(
    embeddings: ViewEmbeddings, views: tuple[str, str], records: Sequence[Record], settings: AnalysisSettings
) -> dict[str, Any]:
    from stepjepa.analysis.numbers import analyse, within_and_between

    numbers = analyse(embeddings, seed=settings.seed)
    if settings.t_sne_type == "paraphrase":
        texts = embeddings.target if views[1] == "text" else embeddings.source
        numbers["groups"] = within_and_between(texts, [group_of(records[index]) for index in embeddings.record])
    return numbers

"""Evaluate a model on a test file. Torch is imported only to generate and to embed."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Unpack

from tqdm import tqdm

from stepjepa.base.arguments import check_path
from stepjepa.base.errors import UserError, raising_user_errors
from stepjepa.base.files import fingerprint, locked, write_json
from stepjepa.base.json_object import JsonObject
from stepjepa.base.settings_in_text import renaming_settings
from stepjepa.base.terminal import note
from stepjepa.config.batch_sizes import EMBEDDED
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.questions import not_in_test
from stepjepa.data.record import Record
from stepjepa.data.sources import read_records
from stepjepa.evaluation.answering import Batcher
from stepjepa.evaluation.judging import Engine
from stepjepa.evaluation.options import EvaluationOptions
from stepjepa.evaluation.output import OutputFile
from stepjepa.evaluation.prompts import notes_on_prompts
from stepjepa.evaluation.scores import Scores
from stepjepa.evaluation.selection import Selection
from stepjepa.evaluation.settings import EvaluationSettings
from stepjepa.models.names import check_model_name, check_trained, is_hub_id
from stepjepa.store.fingerprint import model_fingerprint, tell_changed_base
from stepjepa.store.prompts import share_trained_on, training_system_prompt, with_system_prompt
from stepjepa.store.record import record_of, trained_objective
from stepjepa.tasks.registry import source_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from stepjepa.config.jepa import JepaConfig
    from stepjepa.evaluation.mapped_retrieval import MappedRetrieval
    from stepjepa.evaluation.retrieval import Retrieval
    from stepjepa.objectives.fitted import Fitted
    from stepjepa.objectives.pair_embedding import PairEmbedder
    from stepjepa.objectives.view_embeddings import ViewEmbeddings

Loader: TypeAlias = "Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]"


def _with_views_named(settings: EvaluationSettings) -> EvaluationSettings:
    """Return settings in which ``similarity`` names the views: for ``own`` those that the model was trained with.

    A model that was trained without views has those of ``llm-jepa``.
    """
    if settings.similarity != "own":
        return settings
    trained = None if settings.model_path is None else trained_objective(settings.model_path)
    of_steps = trained is not None and trained["mode"] == "step-jepa"
    return replace(settings, similarity="step-jepa" if of_steps else "llm-jepa")


class Evaluation:
    """The evaluation of one model on one test file.

    The output file grows batch by batch. The same settings resume an interrupted evaluation, with the same batches and
    so the same answers as an uninterrupted one.

    Attributes:
        records: the records by position in the test file, with the system prompt that the model gets.
        bad: the skipped lines of the test file.
        system_prompt: the system prompt of training, which replaces that of the test file; None if it does not.
    """

    def __init__(self, settings: EvaluationSettings) -> None:
        self.settings = settings = _with_views_named(settings)
        self._check_model()
        self.bad = BadRecords(settings.bad_records, settings=("bad_records", "columns"))
        records = read_records(settings.test_file, bad=self.bad, columns=settings.columns)
        self.selection = Selection(records[: settings.max_examples], **settings.selection)
        self.task, self.records = self.selection.task, self.selection.records
        if self.bad.count:
            self.selection.left_out["bad record"] = self.bad.count
        self.system_prompt = None
        if settings.model_path is not None and not (settings.use_test_prompts or settings.plain):
            self.system_prompt = training_system_prompt(settings.model_path)
        self._map_records: list[Record] = []
        if settings.linear_map is not None:
            map_bad = BadRecords(settings.bad_records, settings=("bad_records", "columns"))
            self._map_records = read_records(settings.linear_map, bad=map_bad, columns=settings.columns)
            map_bad.tell()
        if self.system_prompt is not None:
            records = with_system_prompt(list(self.records.values()), self.system_prompt)
            self.records = dict(zip(self.records, records, strict=True))
            self._map_records = with_system_prompt(self._map_records, self.system_prompt)
        self._identity = self._make_identity()
        indices = self.records.keys()
        self.output = OutputFile(settings.output_file, indices, self._identity, overwrite=settings.overwrite)

    def _check_model(self) -> None:
        """Raise ``UserError`` for a model that can't be evaluated; reading the records may take minutes."""
        settings, path = self.settings, self.settings.model_path
        if path is not None and settings.serving.server:
            check_model_name(path)  # only its tokenizer is used
        elif path is not None:
            check_trained(path)
            record = record_of(path)
            tell_changed_base(path, None if record is None else record.model_fingerprint)
            if settings.similarity:
                self._similarity_config()

    @property
    def finished(self) -> int:
        """Number of examples with a line in the output file."""
        return len(self.output.done)

    def _make_identity(self) -> JsonObject:
        """Return the settings that must be equal for lines to belong to one evaluation."""
        settings, sampling = self.settings, asdict(self.settings.sampling)
        # Greedy answers do not depend on seed and batch size.
        drawn: JsonObject = {
            "seed": sampling.pop("seed"),
            "batch_size": None if settings.serving.server else settings.batch_size,
        }
        columns = {} if settings.columns is None else {"columns": settings.columns}
        # The server's address is left out: it may change when the server is restarted.
        served = {name: getattr(settings.serving, name) for name in ("server_model", "completions")}
        return {
            "model": None if settings.model_path is None else model_fingerprint(settings.model_path),
            "test_file": fingerprint(settings.test_file),
            "examples": len(self.records),
            "task": self.task.name,
            "task_source": source_fingerprint(self.task),
            "task_options": self.selection.options,
            "headline": self.selection.headline,
            "prompt": {"system": self.system_prompt, "plain": settings.plain, **columns},
            **{name: getattr(settings, name) for name in ("scoring", "dtype", "quantization", "similarity")},
            # None if it is off, so that an evaluation of an earlier version counts as the same.
            "retrieval": self._retrieval_identity() if settings.retrieval else None,
            # "hf" is the built-in engine, under the name that it had in earlier versions.
            "engine": "server" if settings.serving.server else "hf",
            **(served if settings.serving.server else {}),
            **sampling,
            **(drawn if settings.sampling.temperature > 0 else dict.fromkeys(drawn)),
        }

    def _retrieval_identity(self) -> JsonObject:
        settings = self.settings
        identity: JsonObject = {"layer": settings.layer, "pooling": settings.pooling}
        if settings.linear_map is not None:
            identity["linear_map"] = fingerprint(settings.linear_map)
        return identity | ({"projection_heads": True} if settings.projection_heads else {})

    def run(self, load: Loader | None = None) -> JsonObject:
        """Generate the missing lines, and write the summary; a finished evaluation does not load the model.

        Args:
            load: returns model and tokenizer; None loads those of ``settings.model_path``.

        Returns:
            The summary; its ``generated_now``, ``seconds`` and ``tokens_per_second`` are those of this call.

        Raises:
            UserError: another process evaluates into the same file.
        """
        with locked(self.output.path):
            self.output.read()
            return self._run(load)

    def _run(self, load: Loader | None) -> JsonObject:
        summary = self.output.summary()
        if summary is not None:
            return summary
        before = set(self.output.done)
        load = functools.cache(load or self._load)
        # Before generating, so that records without views or a folder without run.json end the evaluation at once.
        views = self._embed_views(load) if self.settings.similarity else None
        retrieval, mapped = self._retrieval(load) if self.settings.retrieval else (None, {})
        try:
            seconds = 0.0 if self.output.complete else self._answer(self._engine(load))
        finally:
            self.task.close()
        similarity = None if views is None else self._compare(views)
        ranking = None
        if retrieval is not None:
            ranking = retrieval.summary()
            self._add_ranks("ranks", retrieval)
            for name, behind in mapped.items():
                ranking[name] = behind.summary()
                self._add_ranks(f"{name}_ranks", behind.retrieval)
        lines = self.output.finish()
        fresh = [line for line in lines if line["index"] not in before]
        summary = self._summarise(lines, similarity, ranking) | _cost(fresh, seconds)
        write_json(self.output.summary_file, summary)
        return summary

    def _summarise(
        self, lines: Sequence[JsonObject], similarity: JsonObject | None, retrieval: JsonObject | None
    ) -> JsonObject:
        """Return the summary of the lines, without the cost of this call."""
        path, address = self.settings.model_path, self.settings.serving.server
        return {
            "model_path": path,
            **({"server": address, "not_measured": self._not_measured()} if address else {}),
            "test_file": str(self.settings.test_file),
            "test_fingerprint": self._identity["test_file"],
            **self.selection.summarise(lines),
            "similarity": similarity,
            "retrieval": retrieval,
            "trained_on": None if path is None else share_trained_on(path, self.records.values()),
            "settings": self._identity,
        }

    def _compare(self, views: ViewEmbeddings) -> JsonObject:
        """Summarise how alike views are, also of right and of wrong answers; add each record's cosine to its line."""
        from stepjepa.evaluation.embeddings import record_cosines, similarity_quantiles, similarity_totals

        parts: dict[bool, list[float | None]] = {True: [], False: []}
        for index, value in zip(self.records, record_cosines(views, len(self.records)), strict=True):
            line = self.output.done[index]
            line["similarity"] = value
            parts[line["error"] is None].append(value)
        of_parts = dict(zip(("right", "wrong"), map(similarity_quantiles, parts.values()), strict=True))
        return {**similarity_totals(views), **of_parts}

    def _add_ranks(self, name: str, retrieval: Retrieval) -> None:
        """Add to each record's line, under ``name``, the ranks of the first right candidates of its queries."""
        for index, ranks in zip(self.records, retrieval.of_records(len(self.records)), strict=True):
            self.output.done[index][name] = ranks

    def _not_measured(self) -> str:
        """Name the scores that need likelihoods, which a server does not return."""
        by_likelihood = any(self.task.continuations(record) for record in self.records.values())
        choices = ", multiple choice by likelihood (an answer counts by what it says)" if by_likelihood else ""
        return f"gold_loss{choices}; a server gives no likelihoods"

    def _similarity_config(self) -> JepaConfig:
        from stepjepa.evaluation.embeddings import similarity_config

        config = similarity_config(str(self.settings.model_path), str(self.settings.similarity))
        return replace(config, plain=self.settings.plain)

    def _embed_views(self, load: Loader) -> ViewEmbeddings:
        embedder = pair_embedder(*load(), self._similarity_config(), self.settings.batch_size)
        return embedder(list(self.records.values()))

    def _retrieval(self, load: Loader) -> tuple[Retrieval, dict[str, MappedRetrieval]]:
        """Rank the distinct answers of the test file for each question, and again behind each map that is asked for.

        Maps are named as in ``summary_text.MAPS``. They are tried at every layer of every model, unless a readout is
        named, so that a model without a JEPA objective has no choice that one with an objective lacks.
        """
        from stepjepa.evaluation.map_fitting import draw_pairs, fit_map, places_to_try, train_heads
        from stepjepa.evaluation.mapped_retrieval import rank_behind_map
        from stepjepa.evaluation.retrieval import answer_names, rank_targets
        from stepjepa.models.architecture import number_of_layers
        from stepjepa.objectives.reading import embedding_config, has_objective

        settings, records, path = self.settings, list(self.records.values()), str(self.settings.model_path)
        readout: JsonObject = {"layer": settings.layer, "pooling": settings.pooling}
        trained = trained_objective(path)
        named = settings.layer is not None or settings.pooling is not None
        if not named and not has_objective(trained):
            # One command evaluates models with an objective and their baseline, which has none.
            readout["pooling"] = "mean"
            note(
                "the model has no JEPA objective, which would say where its embeddings are read: retrieval takes the "
                "mean of a text's last hidden states; `layer` and `pooling` name another readout"
            )
        with raising_user_errors():
            config = embedding_config(trained, path=path, **readout)
        config = replace(config, plain=settings.plain)
        names = answer_names(self.task, records, config)
        embedder = pair_embedder(*load(), config, settings.batch_size)
        retrieval = rank_targets(embedder(records), names, config)
        if settings.linear_map is None:
            return retrieval, {}
        layers = None if named else number_of_layers(load()[0])
        places = places_to_try(
            embedder.place, layers, has_objective=has_objective(trained), all_layers=settings.projection_heads
        )
        known, file = not_in_test(self._map_records, records), settings.linear_map
        drawn = draw_pairs(embedder, known, places, file=file, kind="records whose question is not in the test file")
        maps: dict[str, Fitted] = {"linear_map": fit_map(drawn)}
        if settings.projection_heads:
            maps["projection_heads"] = train_heads(drawn)
        left_out = len(self._map_records) - len(known)
        return retrieval, {
            name: rank_behind_map(embedder, fitted, records, names, file=file, left_out=left_out, every_layer=not named)
            for name, fitted in maps.items()
        }

    def _load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        from stepjepa.models.loading import load_for_inference

        names = ("dtype", "quantization", "trust_remote_code")
        path = str(self.settings.model_path)
        return load_for_inference(path, **{name: getattr(self.settings, name) for name in names})

    def _answer(self, engine: Engine) -> float:
        """Write the missing lines, and return the seconds spent on answering and scoring them."""
        output, count, seconds = self.output, len(self.records), 0.0
        bar = tqdm(total=count, initial=self.finished, desc="evaluate", unit="ex", disable=None)
        with bar, closing(engine.answer_missing(output.done)) as parts:
            while True:
                began = time.perf_counter()
                try:
                    lines = next(parts, None)
                except UserError as error:
                    if not (self.settings.serving.server and self.finished):
                        raise
                    progress = f"{self.finished} of {count} answers are in {output.path}"
                    raise UserError(f"{error}; {progress}, and the same call asks for the others") from None
                seconds += time.perf_counter() - began
                if lines is None:
                    return seconds
                output.add(lines)
                bar.update(len(lines))

    def _prompts_as_text(self) -> dict[int, str] | None:
        """Return rendered prompts for a server that takes texts; None for one that takes messages."""
        settings = self.settings
        if not settings.serving.completions:
            return None
        from stepjepa.evaluation.prompts import rendered_prompts
        from stepjepa.models.loading import load_tokenizer

        tokenizer = load_tokenizer(str(settings.model_path), trust_remote_code=settings.trust_remote_code)
        return rendered_prompts(self.records, tokenizer, plain=settings.plain)

    def _engine(self, load: Loader) -> Engine:
        """Make the engine: a server, or the model that ``load`` loads; print notes on its prompts."""
        settings, headline = self.settings, self.selection.headline
        if settings.serving.server:
            from stepjepa.evaluation.server import ServerEngine

            prompts, parts = self._prompts_as_text(), (settings.serving, settings.sampling)
            return ServerEngine(self.task, self.records, *parts, headline=headline, prompts=prompts)
        from stepjepa.models.generation import Generator

        generator = Generator(*load(), settings.sampling, plain=settings.plain)
        engine = Batcher(self.task, self.records, generator, batch_size=settings.batch_size, headline=headline)
        for line in notes_on_prompts(engine.examples, self.records, generator.tokenizer, generator.template):
            note(line)
        return engine


def _cost(fresh: Sequence[JsonObject], seconds: float) -> JsonObject:
    """Return number, seconds and speed of the lines that one call has generated."""
    tokens = [line["new_tokens"] for line in fresh]
    is_measured = fresh and seconds and None not in tokens
    return {
        "generated_now": len(fresh),
        "seconds": seconds,
        "tokens_per_second": sum(tokens) / seconds if is_measured else None,
    }


def pair_embedder(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: JepaConfig, batch_size: int = EMBEDDED
) -> PairEmbedder:
    """Make the function that embeds both views of the pairs of records, with a model that is loaded already.

    Args:
        model: set up as in training, or an untrained one.
        tokenizer: that of the model.
        config: of :func:`~stepjepa.objectives.reading.reading_config`.
        batch_size: sequences at a time.
    """
    from stepjepa.objectives.jepa import Jepa

    with renaming_settings({"jepa_layer": "layer"}), raising_user_errors():
        jepa = Jepa(model, tokenizer, config, device=model.device, processes=1, rows=False, heads=False)
    return jepa.pair_embedder(batch_size)


# -- from Python -------------------------------------------------------------------------------------------------------


def evaluate(
    model_path: str | os.PathLike[str] | None,
    test_file: str | os.PathLike[str],
    *,
    output_file: str | os.PathLike[str] | None = None,
    **settings: Unpack[EvaluationOptions],
) -> Scores:
    """Answer the records of a test file with a trained model, score the answers, and write both.

    A second call with the same settings resumes an interrupted evaluation, or returns the scores of a finished one.

    Args:
        model_path: run folder, checkpoint folder, adapter or hub id; may be None if a ``server`` answers.
        test_file: records, as for training.
        output_file: JSON lines; None for ``NAME.jsonl`` in the run folder, by the name of the test file. A hub id and a
            server have no such folder.
        settings: the flags of ``stepjepa evaluate`` (:class:`EvaluationOptions`), such as ``task``, ``max_new_tokens``
            or ``overwrite=True``. With ``server="http://127.0.0.1:8000/v1"`` and ``server_model="NAME"`` a server
            answers.

    Returns:
        The scores, with the file of answers and the summary.

    Raises:
        TypeError: there is no such setting, or a path is no path.
        ValueError: no ``output_file`` is named, and ``model_path`` is None or a hub id.
        UserError: a setting or a file is wrong, the output file holds an evaluation with other settings, or a server
            does not answer.
    """
    if model_path is not None:
        model_path = check_path(
            "model_path", model_path, "a run folder, a checkpoint folder or a hub id", "save the model in a folder"
        )
    test_file = check_path(
        "test_file", test_file, "the path of a file", "write the records to a file, one JSON object a line"
    )
    if output_file is not None:
        output_file = check_path("output_file", output_file, "the path of a file")
    if model_path is None and output_file is None:
        raise ValueError("evaluate: expected an output_file where model_path is None, got None")
    if output_file is None and is_hub_id(model_path or ""):
        # A folder by that name would be taken for the model from then on.
        raise ValueError("evaluate: expected an output_file where model_path is no folder but a hub id, got None")
    # As 'stepjepa evaluate' does: prompts have the form of training.
    trained = None if model_path is None else trained_objective(model_path)
    values: JsonObject = {"plain": bool((trained or {}).get("plain")), **settings}
    output = Path(output_file or Path(model_path or "") / f"{Path(test_file).stem}.jsonl")
    paths = {
        "model_path": model_path,
        "test_file": test_file,
        "output_file": str(output),
    }
    return Scores(output, Evaluation(EvaluationSettings.from_flat({**values, **paths})).run())

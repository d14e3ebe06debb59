"""Evaluate a model on a test file. Torch is imported only to generate."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import IO, Any

from tqdm import tqdm

from stepjepa.data.prompts import share_trained_on, training_system_prompt, with_system_prompt
from stepjepa.data.records import bad_records
from stepjepa.data.sources import read_records
from stepjepa.errors import UserError, is_out_of_memory
from stepjepa.evaluation.batcher import Batcher
from stepjepa.evaluation.judging import select_records
from stepjepa.evaluation.output import OutputFile, model_fingerprint
from stepjepa.evaluation.prompts import make_template
from stepjepa.evaluation.settings import EvaluationSettings
from stepjepa.files import fingerprint, write_json
from stepjepa.tasks.registry import users_source

Loader = Callable[[], tuple[Any, Any]]


class Evaluation:
    """The evaluation of one model on one test file.

    The output file grows batch by batch. The same settings resume an interrupted evaluation, with the same batches and
    so the same answers as an uninterrupted one.

    Args:
        settings: see :class:`~stepjepa.evaluation.settings.EvaluationSettings`.

    Attributes:
        selection: the task, and the records that are evaluated.
        task: the task, which scores the answers.
        records: the records by position in the test file, with the system prompt that the model is shown.
        bad: the skipped lines of the test file; None if a bad line is an error.
        system_prompt: the system prompt of training, which replaces that of the test file; None if it does not.
        output: the file of lines.

    Raises:
        UserError: the test file is wrong, or the output file belongs to another evaluation.
    """

    def __init__(self, settings: EvaluationSettings) -> None:
        self.settings = settings
        self.bad = bad_records(settings.bad_records)
        records = read_records(settings.test_file, bad=self.bad, columns=settings.columns)
        self.selection = select_records(settings, records[: settings.max_examples])
        self.task, self.records = self.selection.task, self.selection.records
        if self.bad is not None and self.bad.count:
            self.selection.left_out["bad record"] = self.bad.count
        self.system_prompt = None
        if not (settings.use_test_prompts or settings.plain):
            self.system_prompt = training_system_prompt(settings.model_path)
        if self.system_prompt is not None:
            shown = with_system_prompt(list(self.records.values()), self.system_prompt)
            self.records = dict(zip(self.records, shown, strict=True))
        self._identity = self._make_identity()
        self.output = OutputFile(
            settings.output_file, self.records.keys(), self._identity, overwrite=settings.overwrite
        )

    @property
    def finished(self) -> int:
        """Number of examples that have their line."""
        return len(self.output.done)

    def _make_identity(self) -> dict[str, Any]:
        """The settings that must be equal for lines to belong to one evaluation."""
        settings, sampling = self.settings, asdict(self.settings.sampling)
        # Greedy answers do not depend on seed and batch size.
        drawn = {"seed": sampling.pop("seed"), "batch_size": settings.batch_size}
        columns = {} if settings.columns is None else {"columns": settings.columns}
        return {
            "model": model_fingerprint(settings.model_path),
            "test_file": fingerprint(settings.test_file),
            "examples": len(self.records),
            "task": self.task.name,
            "task_source": users_source(self.task),
            "task_options": self.selection.options(settings.task_options),
            "headline": self.selection.headline,
            "prompt": {"system": self.system_prompt, "plain": settings.plain, **columns},
            **{name: getattr(settings, name) for name in ("scoring", "dtype", "quantization", "similarity")},
            # Kept so that an evaluation of an earlier version is still recognised as the same.
            "engine": "hf",
            **sampling,
            **(drawn if settings.sampling.temperature > 0 else dict.fromkeys(drawn)),
        }

    def run(self, load: Loader | None = None) -> dict[str, Any]:
        """Generate the missing lines and write the summary; a finished evaluation does not load the model.

        Args:
            load: returns model and tokenizer; by default they are loaded from ``settings.model_path``.

        Returns:
            The summary as written beside the lines: the keys of ``summary.summarise``, and ``model_path``,
            ``test_file``, ``test_fingerprint``, ``left_out``, ``task``, ``lenient``, ``details``, ``similarity``,
            ``trained_on`` (see ``data.prompts``), ``settings``, ``generated_now``, ``seconds`` and
            ``tokens_per_second``. The last three are those of this run; the speed is None if it generated nothing.

        Raises:
            UserError: the model can't be loaded, the batch needs too much memory, or a record has too many tokens.
        """
        written = self.output.summary()
        if written is not None:
            return written
        kept = set(self.output.done)
        load = functools.cache(load or self._load)
        # Before generating, so that records without views or a folder without run.json end the evaluation at once.
        measured = self._measure_similarity(load) if self.settings.similarity else None
        try:
            seconds = 0.0 if self.output.complete else self._generate(load)
        finally:
            self.task.close()
        if measured is not None:
            for index, value in zip(self.records, measured.per_record, strict=True):
                self.output.done[index]["similarity"] = value
        lines = self.output.finish()
        fresh = [line for line in lines if line["index"] not in kept]
        summary = {
            "model_path": self.settings.model_path,
            "test_file": str(self.settings.test_file),
            "test_fingerprint": self._identity["test_file"],
            **self.selection.summarise(lines),
            "similarity": None if measured is None else {**measured.totals, **_similarity_by_verdict(lines)},
            "trained_on": share_trained_on(self.settings.model_path, self.records.values()),
            "settings": self._identity,
            "generated_now": len(fresh),
            "seconds": seconds,
            "tokens_per_second": sum(line["new_tokens"] for line in fresh) / seconds if fresh else None,
        }
        write_json(self.output.summary_file, summary)
        return summary

    def _load(self) -> tuple[Any, Any]:
        from stepjepa.models.loading import load_for_inference

        settings = self.settings
        return load_for_inference(
            settings.model_path,
            dtype=settings.dtype,
            quantization=settings.quantization,
            trust_remote_code=settings.trust_remote_code,
        )

    def _measure_similarity(self, load: Loader) -> Any:
        """Measure the similarity of the views of the test records."""
        from stepjepa.analysis.similarity import compare_views, similarity_config

        config = similarity_config(self.settings.model_path, str(self.settings.similarity))
        config = replace(config, plain=self.settings.plain)
        records = list(self.records.values())
        with self._memory():
            return compare_views(*load(), records, config, batch_size=self.settings.batch_size)

    def _generate(self, load: Loader) -> float:
        """Write the missing lines, and return the seconds spent on generating and scoring them."""
        settings, output = self.settings, self.output
        from stepjepa.evaluation.generation import Generator

        model, tokenizer = load()
        template, size = make_template(tokenizer, plain=settings.plain), settings.batch_size
        engine = Generator(model, tokenizer, template.end_of_turn_ids, settings.sampling)
        batcher = Batcher(
            self.task, self.records, engine, tokenizer, template, batch_size=size, headline=self.selection.headline
        )
        examples, seconds = batcher.examples, 0.0
        bar = tqdm(total=len(examples), initial=self.finished, desc="evaluate", unit="ex", disable=None)
        stream: IO[str] | None = None
        with bar, ExitStack() as stack:
            for number, start in enumerate(range(0, len(examples), size)):
                # A batch with missing lines is run as a whole, since its padding affects the last bits of the results.
                batch = examples[start : start + size]
                missing = {example.index for example in batch}.difference(output.done)
                if not missing:
                    continue
                began = time.perf_counter()
                with self._memory():
                    lines = batcher.lines(batch, number)
                seconds += time.perf_counter() - began
                if stream is None:
                    # Opened only now: a wrong flag must not cost the results of another evaluation.
                    stream = stack.enter_context(
                        output.begin(model_path=settings.model_path, test_file=str(settings.test_file))
                    )
                output.add(stream, [line for line in lines if line["index"] in missing])
                bar.update(len(missing))
        return seconds

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """Turn an out-of-memory error into one that names the remedy."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            flags = "--batch_size or --num_samples" if self.settings.sampling.num_samples > 1 else "--batch_size"
            raise UserError(f"out of memory with --batch_size {self.settings.batch_size}; lower {flags}") from None


def _similarity_by_verdict(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Quantiles of the similarities of records with right and with wrong answers."""
    from stepjepa.analysis.similarity import similarity_quantiles

    return {
        name: similarity_quantiles(line["similarity"] for line in lines if (line["error"] is None) == right)
        for name, right in (("right", True), ("wrong", False))
    }

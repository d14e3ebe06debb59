"""Evaluate a model on a test file. Free of torch until it generates."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import IO, Any

from stepjepa.chat.system_prompts import training_system_prompt, with_system_prompt
from stepjepa.data.records import bad_records
from stepjepa.data.sources import read_records
from stepjepa.data.trained_prompts import share_trained_on
from stepjepa.errors import UserError
from stepjepa.evaluation.batcher import Batcher
from stepjepa.evaluation.judging import choose_records
from stepjepa.evaluation.output import OutputFile, model_fingerprint
from stepjepa.evaluation.prompts import make_template
from stepjepa.evaluation.settings import EvaluationSettings
from stepjepa.files import fingerprint
from stepjepa.memory import is_out_of_memory
from stepjepa.tasks.registry import users_source

Loader = Callable[[], tuple[Any, Any]]


class Evaluation:
    """One test file, one model, one output file.

    The output file grows by a line per example as batches finish, the longest prompts first, so that memory problems
    show at once. Started again with the same settings it resumes: the batches, and so the answers, are those of an
    uninterrupted run. At the end the lines are sorted into the order of the test file.

    Args:
        settings: see :class:`~stepjepa.evaluation.settings.EvaluationSettings`.

    Attributes:
        asked: the records that are evaluated and their task.
        task: scores the answers.
        records: by position in the test file, with the system prompt that is shown.
        bad: the skipped lines of the test file; None where a bad line is an error.
        system_prompt: the prompt of training, which replaces the test file's own; None where that stays.
        output: the file of lines.

    Raises:
        UserError: the test file is wrong, or the output file belongs to something else.
    """

    def __init__(self, settings: EvaluationSettings) -> None:
        self.settings = settings
        self.bad = bad_records(settings.bad_records)
        records = read_records(settings.test_file, bad=self.bad)
        self.asked = choose_records(settings, records[: settings.max_examples])
        self.task, self.records = self.asked.task, self.asked.records
        if self.bad is not None and self.bad.count:
            self.asked.left_out["bad record"] = self.bad.count
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
        """How many examples have their line already."""
        return len(self.output.done)

    def _make_identity(self) -> dict[str, Any]:
        """The settings that must be equal for lines to belong to one evaluation."""
        settings, sampling = self.settings, asdict(self.settings.sampling)
        # Greedy answers depend on neither.
        drawn = {"seed": sampling.pop("seed"), "batch_size": settings.batch_size}
        return {
            "model": model_fingerprint(settings.model_path),
            "test_file": fingerprint(settings.test_file),
            "examples": len(self.records),
            "task": self.task.name,
            "task_source": users_source(self.task),
            "task_options": self.asked.options(settings.task_options),
            "headline": self.asked.headline,
            "prompt": {"system": self.system_prompt, "plain": settings.plain},
            **{name: getattr(settings, name) for name in ("scoring", "engine", "dtype", "quantization", "similarity")},
            **sampling,
            **(drawn if settings.sampling.temperature > 0 else dict.fromkeys(drawn)),
        }

    def run(self, load: Loader | None = None) -> dict[str, Any]:
        """Generate what is missing, then summarise; a finished output is summarised without loading the model.

        Args:
            load: gives model and tokenizer, called only if something is to be generated; by default they are loaded
                from ``settings.model_path``.

        Returns:
            The summary, as written beside the lines: see ``summary.summarise``, and ``model_path``, ``test_file``,
            ``test_fingerprint``, ``task``, ``headline``, ``lenient``, ``similarity``, ``settings``; ``trained_on``, see
            ``data.trained_prompts``; ``generated_now`` examples in ``seconds`` at ``tokens_per_second`` (of this run
            alone, None if it generated nothing).

        Raises:
            UserError: the model can't be loaded, is too large for the memory with this batch size, or has too few
                positions.
        """
        output = self.output
        written = output.summary()
        if written is not None:
            return written
        kept = set(output.done)
        load = functools.cache(load or self._load)
        # Before generating, so that records without views, or a folder without a run, are noticed at once.
        similarities = self._similarities(load)
        try:
            seconds = 0.0 if output.complete else self._generate(load)
        finally:
            self.task.close()
        for index, value in zip(self.records, similarities.get("per_record", ()), strict=False):
            output.done[index]["similarity"] = value
        lines = output.finish()
        fresh = [line for line in lines if line["index"] not in kept]
        tokens = sum(line["new_tokens"] for line in fresh)
        summary = {
            "model_path": self.settings.model_path,
            "test_file": str(self.settings.test_file),
            "test_fingerprint": self._identity["test_file"],
            **self.asked.summarise(lines),
            "similarity": self._similarity_summary(similarities["totals"], lines) if similarities else None,
            "trained_on": share_trained_on(self.settings.model_path, self.records.values()),
            "settings": self._identity,
            "generated_now": len(fresh),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if fresh else None,
        }
        output.write_summary(summary)
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

    def _similarities(self, load: Loader) -> dict[str, Any]:
        """How alike the views of the test records are to the model."""
        if self.settings.similarity is None:
            return {}
        from stepjepa.analysis.similarity import compare_views, similarity_config

        config = similarity_config(self.settings.model_path, self.settings.similarity)
        config = replace(config, plain=self.settings.plain)
        model, tokenizer = load()
        size = self.settings.batch_size
        with self._memory():
            return compare_views(model, tokenizer, list(self.records.values()), config, batch_size=size)._asdict()

    def _similarity_summary(self, totals: dict[str, float], lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The totals, and the similarities of right and of wrong answers apart."""
        from stepjepa.analysis.similarity import similarity_quantiles

        right: dict[bool, list[float]] = {True: [], False: []}
        for line in lines:
            if line["similarity"] is not None:
                right[line["error"] is None].append(line["similarity"])
        return {
            **totals,
            "right": similarity_quantiles(right[True]),
            "wrong": similarity_quantiles(right[False]),
        }

    def _generate(self, load: Loader) -> float:
        """Write the missing lines; returns the seconds that answering, weighing and judging took."""
        from tqdm import tqdm

        from stepjepa.evaluation.engines import make_engine

        settings = self.settings
        engine, tokenizer = make_engine(settings, load)
        template = make_template(tokenizer, plain=settings.plain)
        batcher = Batcher(
            self.task,
            self.records,
            engine,
            tokenizer,
            template,
            batch_size=settings.batch_size,
            headline=self.asked.headline,
        )
        examples = batcher.examples
        seconds, tokens = 0.0, 0
        bar = tqdm(
            total=len(examples),
            initial=self.finished,
            desc="evaluate",
            unit="ex",
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
        )
        stream: IO[str] | None = None
        with bar, ExitStack() as stack:
            for number, start in enumerate(range(0, len(examples), settings.batch_size)):
                # A batch is always run whole, also if some of its lines are there: its padding shapes the floats.
                batch = examples[start : start + settings.batch_size]
                missing = [example.index for example in batch if example.index not in self.output.done]
                if not missing:
                    continue
                began = time.perf_counter()
                with self._memory():
                    lines = batcher.lines(batch, number)
                seconds += time.perf_counter() - began
                fresh = [line for line in lines if line["index"] in missing]
                if stream is None:
                    # Only now, when answers are there: a slip in a flag must not cost the results of another run.
                    about = {"model_path": settings.model_path, "test_file": str(settings.test_file)}
                    stream = stack.enter_context(self.output.begin(**about))
                self.output.add(stream, fresh)
                tokens += sum(line["new_tokens"] for line in fresh)
                bar.update(len(missing))
                bar.set_postfix_str(f"{tokens / seconds:.0f} tokens/s")
        return seconds

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """Turn running out of memory into an error with the remedy."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            flags = "--batch_size or --num_samples" if self.settings.sampling.num_samples > 1 else "--batch_size"
            raise UserError(f"out of memory with --batch_size {self.settings.batch_size}; lower {flags}") from None

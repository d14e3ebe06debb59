"""Evaluate a model on a test file: one line per example, resumable, and a summary. Free of torch until it generates."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepjepa.errors import UserError
from stepjepa.files import fingerprint, read_jsonl, write_json, write_jsonl
from stepjepa.records import read_records
from stepjepa.summary import summarise
from stepjepa.tasks.base import TASK_NAMES, choose_task

if TYPE_CHECKING:
    from stepjepa.generation import Example, Generator

Loader = Callable[[], tuple[Any, Any]]


@dataclass(frozen=True)
class EvaluationSettings:
    """What is evaluated and how.

    Attributes:
        model_path: model folder, adapter folder or hub id.
        test_file: JSON lines with ``messages``.
        output_file: where the lines go; ``<name>.summary.json`` and ``<name>.jsonl.meta.json`` stand beside it.
        task: how answers are scored, see ``tasks.base``; ``auto`` goes by the truths.
        max_examples: only so many records, from the beginning of the file.
        max_new_tokens: where an answer is cut off.
        temperature: 0 for greedy.
        batch_size: prompts per batch.
        seed: of sampling.
        dtype: of the weights, see ``model.DTYPES``.
        trust_remote_code: run code that comes with the model.
        similarity: views whose similarity is measured on the test records and put into the summary: ``llm-jepa``,
            ``step-jepa`` or None.
        overwrite: throw away what ``output_file`` holds.

    Raises:
        UserError: a number is out of range, or the output would replace the test file.
    """

    model_path: str
    test_file: str | os.PathLike[str]
    output_file: str | os.PathLike[str]
    task: str = "auto"
    max_examples: int | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    batch_size: int = 16
    seed: int = 42
    dtype: str = "auto"
    trust_remote_code: bool = False
    similarity: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("max_examples", "max_new_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name}: expected 1 or more, got {value}")
        if not (0 <= self.temperature < math.inf):
            raise UserError(f"--temperature: expected 0 (greedy) or more, got {self.temperature}")
        if self.seed < 0:
            raise UserError(f"--seed: expected 0 or more, got {self.seed}")
        if self.task not in TASK_NAMES:
            raise UserError(f"--task: expected one of {', '.join(TASK_NAMES)}, got '{self.task}'")
        if Path(self.output_file).is_dir():
            raise UserError("is a folder; name a file in it", path=self.output_file)
        if Path(self.output_file).resolve() == Path(self.test_file).resolve():
            raise UserError("--output_file is the test file; name another", path=self.output_file)


class Evaluation:
    """One test file, one model, one output file.

    The output file grows by one line per example as batches finish, the longest prompts first, so that memory problems
    show at once. Started again with the same settings it goes on where it was stopped: the batches are those of an
    uninterrupted run, so the answers are too. At the end the lines are put into the order of the test file.

    Args:
        settings: see :class:`EvaluationSettings`.

    Attributes:
        task: how answers are scored.
        records: what is asked.
        summary_file: where the summary goes.

    Raises:
        UserError: the test file is wrong, or the output file belongs to something else.
    """

    def __init__(self, settings: EvaluationSettings) -> None:
        self.settings = settings
        records = read_records(settings.test_file)
        self.task = choose_task(settings.task, records)
        self.records = records[: settings.max_examples]
        # A record without a usable truth must not stop the run after an hour of generating.
        self.truths = [self.task.truth(record) for record in self.records]
        self.output = Path(settings.output_file)
        self.summary_file = self.output.with_suffix(".summary.json")
        self._meta_file = self.output.with_name(self.output.name + ".meta.json")
        self._identity = self._make_identity()
        self._done = self._resume()

    @property
    def finished(self) -> int:
        """How many examples have their line already."""
        return len(self._done)

    def _make_identity(self) -> dict[str, Any]:
        """What must be equal for lines to belong together."""
        settings, sampled = self.settings, self.settings.temperature > 0
        return {
            "model": model_fingerprint(settings.model_path),
            "test_file": fingerprint(settings.test_file),
            "examples": len(self.records),
            "task": self.task.name,
            "max_new_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "dtype": settings.dtype,
            "similarity": settings.similarity,
            # Greedy answers depend on neither.
            "seed": settings.seed if sampled else None,
            "batch_size": settings.batch_size if sampled else None,
        }

    def _resume(self) -> dict[int, dict[str, Any]]:
        """The lines that are there, by index."""
        if self.settings.overwrite or not self.output.exists():
            return {}
        if not self._meta_file.is_file():
            raise UserError(
                f"is there already, without the {self._meta_file.name} of an evaluation to go on with; name another "
                "--output_file or pass --overwrite",
                path=self.output,
            )
        self._compare(self._read_meta())
        _drop_half_line(self.output)
        done: dict[int, dict[str, Any]] = {}
        for number, line in read_jsonl(self.output):
            index = line.get("index")
            if not isinstance(index, int) or not 0 <= index < len(self.records) or index in done:
                raise UserError(
                    f"index {index} does not belong here; name another --output_file or pass --overwrite",
                    path=self.output,
                    line=number,
                )
            done[index] = line
        return done

    def _read_meta(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._meta_file.read_text(encoding="utf-8"))["identity"])
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError):
            raise UserError(
                "can't be read, so there is no telling what the output file holds; pass --overwrite to start anew",
                path=self._meta_file,
            ) from None

    def _compare(self, begun: dict[str, Any]) -> None:
        different = [name for name, value in self._identity.items() if begun.get(name) != value]
        if not different:
            return
        words = [
            f"another {name.replace('_', ' ')}"
            if name in ("model", "test_file")
            else f"{name} {begun.get(name)} instead of {self._identity[name]}"
            for name in different
        ]
        raise UserError(
            f"was begun with {', '.join(words)}; name another --output_file, or pass --overwrite to start anew",
            path=self.output,
        )

    def run(self, load: Loader | None = None) -> dict[str, Any]:
        """Generate what is missing, then summarise; a finished output is summarised without loading the model.

        Args:
            load: gives model and tokenizer, called only if something is to be generated; by default they are loaded
                from ``settings.model_path``.

        Returns:
            The summary, as written to :attr:`summary_file`: see ``summary.summarise``, and ``model_path``,
            ``test_file``, ``test_fingerprint``, ``task``, ``headline``, ``lenient``, ``similarity``, ``settings``;
            ``generated_now`` examples in ``seconds`` at ``tokens_per_second`` (of this run alone, None if it
            generated nothing).

        Raises:
            UserError: the model can't be loaded, is too large for the memory with this batch size, or has too few
                positions.
        """
        if len(self._done) == len(self.records) and self.summary_file.is_file():
            return dict(json.loads(self.summary_file.read_text(encoding="utf-8")))
        kept = set(self._done)
        load = functools.cache(load or self._load)
        # Before generating, so that records without views, or a folder without a run, are noticed at once.
        similarity = self._similarity(load) if self.settings.similarity is not None else None
        seconds = self._generate(load) if len(kept) < len(self.records) else 0.0
        lines = [self._done[index] for index in range(len(self.records))]
        write_jsonl(self.output, lines)
        fresh = [line for line in lines if line["index"] not in kept]
        tokens = sum(line["new_tokens"] for line in fresh)
        summary = {
            "model_path": self.settings.model_path,
            "test_file": str(self.settings.test_file),
            "test_fingerprint": self._identity["test_file"],
            "task": self.task.name,
            "headline": self.task.headline,
            "lenient": self.task.lenient,
            **summarise(lines),
            "similarity": similarity,
            "settings": self._identity,
            "generated_now": len(fresh),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if fresh else None,
        }
        write_json(self.summary_file, summary)
        return summary

    def _load(self) -> tuple[Any, Any]:
        from stepjepa.model import load_for_inference

        settings = self.settings
        return load_for_inference(
            settings.model_path, dtype=settings.dtype, trust_remote_code=settings.trust_remote_code
        )

    def _similarity(self, load: Loader) -> dict[str, float]:
        """How alike the views of the test records are to the model."""
        from stepjepa.similarity import measure_similarity, similarity_config

        assert self.settings.similarity is not None
        config = similarity_config(self.settings.model_path, self.settings.similarity)
        model, tokenizer = load()
        return measure_similarity(model, tokenizer, self.records, config, batch_size=self.settings.batch_size)

    def _generate(self, load: Loader) -> float:
        """Write the missing lines; returns the seconds that the model took."""
        from torch import OutOfMemoryError
        from tqdm import tqdm

        from stepjepa.generation import Generator, make_examples

        settings = self.settings
        model, tokenizer = load()
        generator = Generator(
            model,
            tokenizer,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
        )
        examples = make_examples(self.records, tokenizer)
        generator.check_lengths(examples, self.records)
        examples.sort(key=lambda example: (-len(example.prompt_ids), example.index))
        if not self._done:
            # Only now, when the model is there: a slip in --model_path must not cost the results of another.
            for file in (self.output, self.summary_file):
                file.unlink(missing_ok=True)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        # Before the first line, so that no line is ever without it.
        write_json(
            self._meta_file,
            {"model_path": settings.model_path, "test_file": str(settings.test_file), "identity": self._identity},
        )
        seconds, tokens = 0.0, 0
        bar = tqdm(
            total=len(examples),
            initial=len(self._done),
            desc="evaluate",
            unit="ex",
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
        )
        with bar, self.output.open("a", encoding="utf-8") as stream:
            for number, start in enumerate(range(0, len(examples), settings.batch_size)):
                # A batch is always run whole, also if some of its lines are there: its padding shapes the floats.
                batch = examples[start : start + settings.batch_size]
                missing = [example.index for example in batch if example.index not in self._done]
                if not missing:
                    continue
                began = time.perf_counter()
                try:
                    lines = self._answer(generator, batch, number)
                except OutOfMemoryError:
                    raise UserError(
                        f"out of memory with --batch_size {settings.batch_size}; lower it"
                        + (", what is finished is kept" if self._done and not settings.temperature else "")
                    ) from None
                seconds += time.perf_counter() - began
                for line in lines:
                    if line["index"] in missing:
                        stream.write(json.dumps(line, ensure_ascii=False) + "\n")
                        self._done[line["index"]] = line
                        tokens += line["new_tokens"]
                stream.flush()
                bar.update(len(missing))
                bar.set_postfix_str(f"{tokens / seconds:.0f} tokens/s")
        return seconds

    def _answer(self, generator: Generator, batch: Sequence[Example], number: int) -> list[dict[str, Any]]:
        answers = generator.answer([example.prompt_ids for example in batch], number)
        losses = generator.gold_losses(batch)
        lines = []
        for example, answer, loss in zip(batch, answers, losses, strict=True):
            record = self.records[example.index]
            if not math.isfinite(loss):
                raise UserError(
                    f"the model's loss on this record is {loss}; its numbers overflow: try --dtype float32",
                    path=record.path,
                    line=record.line,
                )
            scored = self.task.score(record, answer.text)
            lines.append(
                {
                    "index": example.index,
                    "prompt": example.prompt,
                    "truth": self.truths[example.index],
                    "generated": answer.text,
                    "extracted": scored.extracted,
                    "scores": scored.scores,
                    "stopped": answer.stopped,
                    "new_tokens": answer.new_tokens,
                    "gold_loss": loss / example.gold_tokens,
                    "gold_tokens": example.gold_tokens,
                }
            )
        return lines


def _drop_half_line(path: Path) -> None:
    """Cut off what follows the last line end: a line that was being written when the run was stopped."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


# What decides a model's answers. A run folder holds much else, evaluations of this very model among it.
_MODEL_FILES = (
    "*.safetensors",
    "pytorch_model*.bin",
    "adapter_model.bin",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_CHUNK, _CHUNKS = 2**16, 256


def model_fingerprint(path: str | os.PathLike[str]) -> str:
    """Says whether two runs used the same model: a hash for a folder, the name itself for a hub id.

    Of large weight files a few hundred pieces all over the file are hashed: training again changes all of them, and
    reading a large model whole would take as long as loading it.
    """
    folder = Path(path)
    if not folder.is_dir():
        return str(path)
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _MODEL_FILES for file in folder.glob(pattern)}):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            if size <= _CHUNK * _CHUNKS:
                digest.update(stream.read())
            else:
                for piece in range(_CHUNKS):
                    stream.seek(piece * (size - _CHUNK) // (_CHUNKS - 1))
                    digest.update(stream.read(_CHUNK))
    return digest.hexdigest()

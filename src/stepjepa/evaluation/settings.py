"""What an evaluation is told to do."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stepjepa.config import DTYPES
from stepjepa.errors import UserError
from stepjepa.tasks.base import TaskOptions
from stepjepa.tasks.registry import AUTO, load_task

ENGINES = ("hf", "vllm")
SCORINGS = ("own", "reference")
QUANTIZATIONS = ("4bit", "8bit")
SIMILARITIES = ("llm-jepa", "step-jepa")
LOWEST_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, and how many.

    Attributes:
        max_new_tokens: where an answer is cut off.
        temperature: 0 for greedy.
        top_p: only the likeliest tokens that together have this probability; 1 for all.
        top_k: only so many of the likeliest tokens; 0 for all.
        seed: of the draws.
        num_samples: answers per prompt; 1 unless tokens are drawn.

    Raises:
        UserError: a number is out of range, or has no effect on greedy answers.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 42
    num_samples: int = 1

    def __post_init__(self) -> None:
        for name, low in (("max_new_tokens", 1), ("num_samples", 1), ("top_k", 0), ("seed", 0)):
            if getattr(self, name) < low:
                raise UserError(f"--{name}: expected {low} or more, got {getattr(self, name)}")
        # What lies between divides logits by next to nothing.
        if not (self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < math.inf):
            raise UserError(
                f"--temperature: expected 0 (greedy) or {LOWEST_TEMPERATURE:g} or more, got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top_p: expected more than 0 and at most 1, got {self.top_p}")
        if self.temperature == 0:
            for name, neutral in (("num_samples", 1), ("top_p", 1.0), ("top_k", 0)):
                if getattr(self, name) != neutral:
                    raise UserError(
                        f"--{name} does nothing to greedy answers; set --temperature above 0 or leave it out"
                    )


@dataclass(frozen=True)
class EvaluationSettings:
    """What is evaluated and how.

    Attributes:
        model_path: model folder, adapter folder or hub id.
        test_file: JSON lines with ``messages``.
        output_file: where the lines go; ``<stem>.summary.json`` and ``<name>.meta.json`` stand beside it.
        task: how answers are scored, see ``tasks.registry``; ``auto`` goes by the records.
        task_options: settings of the task.
        scoring: ``own``, or ``reference`` for the rules of the published evaluation.
        startswith: answers count by how they begin.
        max_examples: only so many records, from the beginning of the file.
        batch_size: prompts per batch.
        sampling: how tokens are chosen.
        engine: ``hf`` for transformers, ``vllm``.
        dtype: of the weights, see ``config.DTYPES``.
        quantization: ``4bit`` or ``8bit`` through bitsandbytes, None for neither.
        trust_remote_code: run code that comes with the model.
        use_test_prompts: show the test file's own system prompt rather than that of training.
        plain: the model was trained without a chat format.
        similarity: views whose similarity is measured on the test records and put beside the scores: ``llm-jepa``,
            ``step-jepa`` or None.
        overwrite: throw away what ``output_file`` holds.
        bad_records: ``error``, or ``skip`` to leave lines of the test file out that are no record; positions are then
            those among the others.

    Raises:
        UserError: a value is out of range, or the output would replace the test file.
    """

    model_path: str
    test_file: str | os.PathLike[str]
    output_file: str | os.PathLike[str]
    task: str = AUTO
    task_options: TaskOptions = field(default_factory=TaskOptions)
    scoring: str = "own"
    startswith: bool = False
    max_examples: int | None = None
    batch_size: int = 16
    sampling: Sampling = field(default_factory=Sampling)
    engine: str = "hf"
    dtype: str = "auto"
    quantization: str | None = None
    trust_remote_code: bool = False
    use_test_prompts: bool = False
    plain: bool = False
    similarity: str | None = None
    overwrite: bool = False
    bad_records: str = "error"

    def __post_init__(self) -> None:
        for name in ("max_examples", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name}: expected 1 or more, got {value}")
        check_choice("engine", self.engine, ENGINES)
        check_choice("scoring", self.scoring, SCORINGS)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("quantization", self.quantization, (None, *QUANTIZATIONS))
        check_choice("similarity", self.similarity, (None, *SIMILARITIES))
        check_choice("bad_records", self.bad_records, ("error", "skip"))
        if self.task != AUTO:
            load_task(self.task)
        if self.engine == "vllm" and (self.similarity or self.quantization):
            other = "similarity" if self.similarity else "load_in_" + str(self.quantization)
            raise UserError(f"--{other} needs --engine hf; leave one of the two out")
        if self.plain and self.use_test_prompts:
            raise UserError("--use_test_prompts does nothing with --plain, which shows no system prompt; leave it out")
        check_output(self.output_file, self.test_file, "test file")


def check_choice(name: str, value: str | None, known: Sequence[str | None]) -> None:
    """Refuse a value that is none of those a setting may have.

    Raises:
        UserError: it is not.
    """
    if value not in known:
        raise UserError(f"--{name}: expected one of {', '.join(map(str, known))}, got '{value}'")


def check_output(output: str | os.PathLike[str], source: str | os.PathLike[str], what: str) -> None:
    """Refuse an output file that is a folder or would replace what is read.

    Raises:
        UserError: it is one of the two.
    """
    if Path(output).is_dir():
        raise UserError("is a folder; name a file in it", path=output)
    if Path(output).resolve() == Path(source).resolve():
        raise UserError(f"--output_file is the {what}; name another", path=output)

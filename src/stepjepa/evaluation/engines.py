"""What generates: transformers in this process, or vLLM where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.evaluation.judging import Answer
from stepjepa.evaluation.prompts import Example, Span, make_template
from stepjepa.evaluation.settings import EvaluationSettings


class Engine(Protocol):
    """One model that answers and weighs."""

    def answer(self, prompts: Sequence[Sequence[int]], batch_number: int = 0) -> list[list[Answer]]:
        """Samples for each prompt."""
        ...

    def log_probabilities(self, spans: Sequence[Span]) -> list[float]:
        """How likely each span's weighed tokens are."""
        ...

    def check_length(self, example: Example, longest: int, record: Record) -> None:
        """Refuse an example that the model has no positions for."""
        ...


def make_engine(settings: EvaluationSettings, load: Callable[[], tuple[Any, Any]]) -> tuple[Engine, Any]:
    """The engine that is asked for, and its tokenizer.

    Args:
        settings: of the evaluation.
        load: gives model and tokenizer for ``hf``.

    Raises:
        UserError: vLLM is asked for and is not installed, or the model can't be loaded.
    """
    if settings.engine == "vllm":
        if importlib.util.find_spec("vllm") is None:
            raise UserError("--engine vllm: vLLM is not installed; install it ('pip install vllm') or use --engine hf")
        from stepjepa.evaluation.vllm_engine import VllmEngine

        engine = VllmEngine(settings)
        return engine, engine.tokenizer
    from stepjepa.evaluation.generation import Generator

    model, tokenizer = load()
    template = make_template(tokenizer, plain=settings.plain)
    return Generator(model, tokenizer, template.end_of_turn_ids, settings.sampling), tokenizer

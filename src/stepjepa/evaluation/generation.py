"""Let a model answer prompts in batches, and weigh texts that are given."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stepjepa.chat.predictors import all_predictor_ids
from stepjepa.evaluation.judging import Answer
from stepjepa.evaluation.prompts import Span
from stepjepa.evaluation.settings import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Generator:
    """Answers batches of prompts with one model.

    Greedy unless ``sampling.temperature`` is above 0; then tokens are drawn, each batch from a generator seeded by
    ``sampling.seed`` and the batch's number, so that batches can be run in any order or again. What the model's own
    ``generation_config`` says of sampling and penalties is left aside, its stop tokens are not.

    Args:
        model: in evaluation mode, perhaps with an adapter; it is not changed.
        tokenizer: its tokenizer; it is not changed.
        end_of_turn_ids: tokens that end an answer beside the eos tokens.
        sampling: how tokens are chosen, and how many.

    Attributes:
        stop_ids: tokens that end an answer: those of the template's end of turn and every eos token.
        positions: how many tokens the model has positions for; None for no limit.
        max_new_tokens: of ``sampling``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_of_turn_ids: Sequence[int],
        sampling: Sampling,
    ) -> None:
        from transformers import GenerationConfig

        # PEFT would hand its wrapper's generation settings down to the model and leave them there.
        self.model: Any = model.get_base_model() if hasattr(model, "peft_config") else model
        model = self.model
        self.tokenizer = tokenizer
        self.sampling = sampling
        own = model.generation_config
        ends = _as_list(own.eos_token_id if own is not None else None) + _as_list(tokenizer.eos_token_id)
        self.stop_ids = sorted({*end_of_turn_ids, *ends})
        # Padding is masked wherever it stands, so any token does; a stop token is one that every tokenizer here has.
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.stop_ids[0]
        rows = model.get_input_embeddings().weight.shape[0]
        # Predictor tokens are no text, and rows beyond the tokenizer's last token stand for nothing at all.
        never = [*all_predictor_ids(tokenizer), *range(len(tokenizer), rows)]
        settings: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            settings = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "num_return_sequences": sampling.num_samples,
            }
        self.positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self.max_new_tokens = sampling.max_new_tokens
        self._config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            num_beams=1,
            use_cache=True,
            eos_token_id=self.stop_ids,
            pad_token_id=self._pad,
            suppress_tokens=never or None,
            **settings,
        )

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Sequence[int]], batch_number: int = 0) -> list[list[Answer]]:
        """Continue prompts, best of similar length, until every one has stopped or ``max_new_tokens`` is reached."""
        ids, mask = self._pad_rows(prompts, left=True)
        with _fresh_generation_config(self.model), _seeded(self.model.device, self.sampling.seed, batch_number):
            output = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=self._config)
        answers = [self._read(row) for row in output[:, ids.shape[1] :].tolist()]
        count = self.sampling.num_samples
        return [answers[at : at + count] for at in range(0, len(answers), count)]

    def _read(self, generated: list[int]) -> Answer:
        end = next((index for index, token in enumerate(generated) if token in self.stop_ids), None)
        text = self.tokenizer.decode(
            generated if end is None else generated[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return Answer(str(text), end is not None, len(generated) if end is None else end + 1)

    @torch.inference_mode()
    def log_probabilities(self, spans: Sequence[Span]) -> list[float]:
        """The natural logarithm of the probability of each span's weighed tokens, given what stands before them."""
        ids, mask = self._pad_rows([span.ids for span in spans], left=False)
        low = min(span.start for span in spans) - 1
        options: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            # Logits of whole prompts are most of the memory where the vocabulary is large.
            options["logits_to_keep"] = torch.arange(low, ids.shape[1], device=ids.device)
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits
        offset = low if options else 0
        losses = []
        for row, span in enumerate(spans):
            first, last = span.start, len(span.ids)
            predictions = logits[row, first - 1 - offset : last - 1 - offset].float()  # [weighed, V]
            losses.append(F.cross_entropy(predictions, ids[row, first:last], reduction="sum"))
        return [-float(loss) for loss in torch.stack(losses).tolist()]

    def _pad_rows(self, rows: Sequence[Sequence[int]], *, left: bool) -> tuple[Tensor, Tensor]:
        """``[B, T]`` ids and mask."""
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), int(self._pad))
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            place = slice(width - len(row), width) if left else slice(0, len(row))
            ids[index, place] = torch.tensor(row)
            mask[index, place] = 1
        return ids.to(self.model.device), mask.to(self.model.device)


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


@contextmanager
def _fresh_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Hide the model's own settings: ``generate`` takes from them whatever a given configuration leaves open."""
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _seeded(device: torch.device, seed: int, batch_number: int) -> Iterator[None]:
    """Seed the global generators, which ``generate`` draws from, and put them back afterwards."""
    digest = hashlib.sha256(f"{seed}:{batch_number}".encode()).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest[:7]))
        yield

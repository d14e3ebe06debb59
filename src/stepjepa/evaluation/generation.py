"""Generate answers to prompts in batches, and compute the likelihoods of given texts."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stepjepa.chat.tokens import all_predictor_ids
from stepjepa.evaluation.judging import Answer
from stepjepa.evaluation.prompts import Span
from stepjepa.evaluation.settings import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Generator:
    """Generates answers with a transformers model.

    Decoding is greedy unless ``sampling.temperature`` is above 0. Sampling is seeded for each batch by
    ``sampling.seed`` and the number of the batch, so batches can be run in any order, or again. Of the model's own
    ``generation_config`` only the stop tokens are used, not sampling and penalties.

    Args:
        model: the model in evaluation mode, perhaps with an adapter; it is not changed.
        tokenizer: its tokenizer; it is not changed.
        end_of_turn_ids: tokens that end an answer, beside the eos tokens.
        sampling: settings of decoding.

    Attributes:
        stop_ids: tokens that end an answer: the template's end of turn and every eos token.
        positions: number of tokens that the model has positions for; None for no limit.
        max_new_tokens: greatest length of an answer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_of_turn_ids: Sequence[int],
        sampling: Sampling,
    ) -> None:
        from transformers import GenerationConfig

        # PEFT would copy the generation settings of its wrapper to the model and leave them there.
        self.model: Any = model.get_base_model() if hasattr(model, "peft_config") else model
        model = self.model
        self.tokenizer = tokenizer
        self.sampling = sampling
        own = model.generation_config
        ends = _as_list(own.eos_token_id if own is not None else None) + _as_list(tokenizer.eos_token_id)
        self.stop_ids = sorted({*end_of_turn_ids, *ends})
        # Padding is masked, so any token will do; every tokenizer here has a stop token.
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.stop_ids[0]
        # Predictor tokens are no text, and embedding rows after the tokenizer's last token belong to no token.
        rows = model.get_input_embeddings().weight.shape[0]
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
        """Generate answers until each has stopped or has ``max_new_tokens`` tokens.

        Args:
            prompts: token ids; padding costs least if their lengths are similar.
            batch_number: seeds sampling, together with ``sampling.seed``.

        Returns:
            The samples of each prompt.
        """
        ids, mask = self._pad_rows(prompts, left=True)
        with _fresh_generation_config(self.model), _seeded(self.model.device, self.sampling.seed, batch_number):
            output = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=self._config)
        answers = [self._decode(row) for row in output[:, ids.shape[1] :].tolist()]
        count = self.sampling.num_samples
        return [answers[at : at + count] for at in range(0, len(answers), count)]

    def _decode(self, generated: list[int]) -> Answer:
        end = next((index for index, token in enumerate(generated) if token in self.stop_ids), None)
        text = self.tokenizer.decode(
            generated if end is None else generated[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return Answer(str(text), end is not None, len(generated) if end is None else end + 1)

    @torch.inference_mode()
    def log_probabilities(self, spans: Sequence[Span]) -> list[float]:
        """The natural logarithm of the probability of each span's scored tokens, given the tokens before them."""
        ids, mask = self._pad_rows([span.ids for span in spans], left=False)
        low = min(span.start for span in spans) - 1
        options: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            # With a large vocabulary the logits of whole prompts would take most of the memory.
            options["logits_to_keep"] = torch.arange(low, ids.shape[1], device=ids.device)
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits
        offset = low if options else 0
        losses = []
        for row, span in enumerate(spans):
            first, last = span.start, len(span.ids)
            predictions = logits[row, first - 1 - offset : last - 1 - offset].float()  # [scored tokens, V]
            losses.append(F.cross_entropy(predictions, ids[row, first:last], reduction="sum"))
        return [-float(loss) for loss in torch.stack(losses).tolist()]

    def _pad_rows(self, rows: Sequence[Sequence[int]], *, left: bool) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask, ``[B, T]`` each, padded on the left or the right."""
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
    """Hide the model's own settings, from which ``generate`` takes every value that its argument leaves unset."""
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _seeded(device: torch.device, seed: int, batch_number: int) -> Iterator[None]:
    """Seed the global random generators, which ``generate`` uses, and restore them afterwards."""
    digest = hashlib.sha256(f"{seed}:{batch_number}".encode()).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest[:7]))
        yield

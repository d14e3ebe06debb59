"""Generate answers to prompts in batches, and compute the likelihood of texts."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from stepjepa.base.json_object import JsonObject
from stepjepa.chat.content import separates_thought
from stepjepa.chat.marks import Message
from stepjepa.chat.plain_template import PlainTemplate
from stepjepa.chat.template import ChatTemplate
from stepjepa.chat.tokens import TextTokenizer
from stepjepa.chat.turn_text import Tools, Variables
from stepjepa.models.architecture import base_model
from stepjepa.models.sampling import Answer, Sampling, Span
from stepjepa.models.token_rows import never_generated

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Generator:
    """Generates answers with a transformers model.

    Decoding is greedy unless ``sampling.temperature`` is above 0. Sampling is seeded for each batch by
    ``sampling.seed`` and the number of the batch, so batches can be run in any order, and repeated. Of the model's own
    ``generation_config`` only the stop tokens are used, not sampling and penalties.

    Args:
        model: in evaluation mode, perhaps with an adapter; not changed.
        tokenizer: not changed.
        sampling: length of answers, temperature and seed.
        plain: render records without a chat format.

    Attributes:
        stop_ids: the tokens that end an answer.
        positions: maximum number of tokens of prompt and answer together; None for no limit.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, *, plain: bool = False
    ) -> None:
        # PEFT would copy the generation settings of its wrapper to the model and leave them there.
        self.model = model = base_model(model)
        self.tokenizer, self.sampling = tokenizer, sampling
        self.template = PlainTemplate(tokenizer) if plain else ChatTemplate(tokenizer)
        configured = getattr(model.generation_config, "eos_token_id", None)
        configured = configured if isinstance(configured, list) else [configured]
        ends = {*self.template.stop_ids, tokenizer.eos_token_id, *configured}
        self.stop_ids = sorted(ends - {None})
        # Padding is masked, so any token will do; every tokenizer here has a stop token.
        self._pad = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.stop_ids[0])
        self.positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        settings: JsonObject = {"do_sample": sampling.temperature > 0, "num_return_sequences": sampling.num_samples}
        if sampling.temperature > 0:
            settings |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
        self._config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            num_beams=1,
            use_cache=True,
            eos_token_id=self.stop_ids,
            pad_token_id=self._pad,
            suppress_tokens=never_generated(model, tokenizer) or None,
            **settings,
        )

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = None, variables: Variables = None) -> list[int]:
        """Return the tokens of the prompt for the next assistant turn of a chat."""
        prompt = self.template.prompt(messages, tools, variables)
        (tokens,) = TextTokenizer(self.tokenizer)([prompt], [self.template.prompt_own(messages)])
        ids: list[int] = tokens.ids.tolist()
        return ids

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Sequence[int]], batch_number: int = 0) -> list[list[Answer]]:
        """Generate the samples of each prompt; sampling is seeded by ``batch_number`` and ``sampling.seed``."""
        ids, mask = self._pad_rows(prompts, "left")
        with _fresh_generation_config(self.model), _seeded(self.model.device, self.sampling.seed, batch_number):
            output = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=self._config)
        answers = [self._decode(row) for row in output[:, ids.shape[1] :].tolist()]
        count = self.sampling.num_samples
        return [answers[at : at + count] for at in range(0, len(answers), count)]

    def _decode(self, generated: list[int]) -> Answer:
        end = next((index for index, token in enumerate(generated) if token in self.stop_ids), None)
        options: JsonObject = {"clean_up_tokenization_spaces": False}
        text = str(self.tokenizer.decode(generated[:end], skip_special_tokens=False, **options))
        closer = self.template.closer.strip()
        # Some models separate thought and content by special tokens.
        if not separates_thought(text):
            text = str(self.tokenizer.decode(generated[:end], skip_special_tokens=True, **options))
            ids = self.tokenizer(closer, add_special_tokens=False)["input_ids"] if closer else []
            closer = str(self.tokenizer.decode(ids, skip_special_tokens=True, **options)).strip()
        if end is not None and closer and text.rstrip().endswith(closer):
            text = text.rstrip().removesuffix(closer)
        return Answer(text, end is not None, len(generated) if end is None else end + 1)

    @torch.inference_mode()
    def log_probabilities(self, spans: Sequence[Span]) -> list[float]:
        """Return the log probability of each span's scored tokens, given the tokens before them (natural logarithm)."""
        ids, mask = self._pad_rows([span.ids for span in spans], "right")
        low, options = 0, JsonObject()
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            # With a large vocabulary the logits of whole prompts would take most of the memory.
            low = min(span.start for span in spans) - 1
            options["logits_to_keep"] = torch.arange(low, ids.shape[1], device=ids.device)
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits
        losses = []
        for row, span in enumerate(spans):
            first, last = span.start, len(span.ids)
            predictions = logits[row, first - 1 - low : last - 1 - low].float()  # [scored tokens, V]
            losses.append(F.cross_entropy(predictions, ids[row, first:last], reduction="sum"))
        return [-float(loss) for loss in torch.stack(losses).tolist()]

    def _pad_rows(self, rows: Sequence[Sequence[int]], side: str) -> tuple[Tensor, Tensor]:
        """Return token ids and attention mask, ``[B, T]`` each, padded on the ``left`` or the ``right``."""
        tensors = [torch.tensor(row) for row in rows]
        ids = pad_sequence(tensors, batch_first=True, padding_value=self._pad, padding_side=side)
        mask = pad_sequence([torch.ones_like(row) for row in tensors], batch_first=True, padding_side=side)
        return ids.to(self.model.device), mask.to(self.model.device)


@contextmanager
def _fresh_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Hide the model's own settings, from which ``generate`` takes every value that its argument leaves unset."""
    settings = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings


@contextmanager
def _seeded(device: torch.device, seed: int, batch_number: int) -> Iterator[None]:
    """Seed the global random generators, which ``generate`` uses, and restore them afterwards."""
    digest = hashlib.sha256(f"{seed}:{batch_number}".encode()).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest[:7]))
        yield

"""Let a model answer prompts in batches, and measure its loss on the right answers."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stepjepa.errors import UserError
from stepjepa.predictors import all_predictor_ids
from stepjepa.records import Record
from stepjepa.segments import Tokens
from stepjepa.template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Example:
    """A record as tokens.

    Attributes:
        index: position in the test file, counted from 0.
        prompt: the text that the model is shown.
        prompt_ids: its tokens.
        gold_ids: tokens of prompt, right answer and end of turn.
        gold_start: the first of ``gold_ids`` that belongs to the answer.
    """

    index: int
    prompt: str
    prompt_ids: list[int]
    gold_ids: list[int]
    gold_start: int

    @property
    def gold_tokens(self) -> int:
        """Tokens of the right answer, the end of turn included."""
        return len(self.gold_ids) - self.gold_start


class Answer(NamedTuple):
    """What a model said.

    Attributes:
        text: everything before the first stop token, special tokens left out.
        stopped: the model ended its turn by itself.
        new_tokens: how many tokens it generated, the stop token included.
    """

    text: str
    stopped: bool
    new_tokens: int


def make_examples(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Render and tokenise records as in training.

    Raises:
        UserError: the chat template can't render one of them.
    """
    template = ChatTemplate(tokenizer)
    prompts, rendered = [], []
    for record in records:
        try:
            prompts.append(template.prompt(record.messages[:-1]))
            rendered.append(template.render(record.messages))
        except UserError as error:
            raise UserError(str(error), path=record.path, line=record.line) from None
    # The template has written the special tokens. The tokenizer's warning about long texts is left to the model check.
    prompt_ids = tokenizer(prompts, add_special_tokens=False, verbose=False)["input_ids"]
    gold = tokenizer(
        [whole.text for whole in rendered], add_special_tokens=False, verbose=False, return_offsets_mapping=True
    )
    examples = []
    for index, (prompt, whole) in enumerate(zip(prompts, rendered, strict=True)):
        offsets = np.asarray(gold["offset_mapping"][index], np.int32).reshape(-1, 2)
        tokens = Tokens(np.asarray(gold["input_ids"][index], np.int32), offsets[:, 0], offsets[:, 1])
        start, end = whole.spans[-1][0], whole.turn_ends[-1]
        # Nothing predicts the first token of a row.
        first = max(1, tokens.first_overlapping(start))
        ids = tokens.ids[: tokens.first_from(end)].tolist()
        examples.append(Example(index, prompt, prompt_ids[index], ids, first))
    return examples


class Generator:
    """Answers batches of prompts with one model.

    Greedy unless ``temperature`` is above 0; then tokens are drawn from the whole distribution, each batch from a
    generator seeded by ``seed`` and the batch's number, so that batches can be run in any order or again. What the
    model's own ``generation_config`` says of sampling and penalties is left aside, its stop tokens are not.

    Args:
        model: in evaluation mode; it is not changed.
        tokenizer: its tokenizer; it is not changed.
        max_new_tokens: where an answer is cut off.
        temperature: 0 for greedy.
        seed: of sampling.

    Attributes:
        stop_ids: tokens that end an answer: the template's end of turn and every eos token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 42,
    ) -> None:
        from transformers import GenerationConfig

        self.model = model
        self.tokenizer = tokenizer
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        own = model.generation_config
        ends = _as_list(own.eos_token_id if own is not None else None) + _as_list(tokenizer.eos_token_id)
        self.stop_ids = sorted({*ChatTemplate(tokenizer).end_of_turn_ids, *ends})
        # Padding is masked wherever it stands, so any token does; a stop token is one that every tokenizer here has.
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.stop_ids[0]
        rows = model.get_input_embeddings().weight.shape[0]
        # Predictor tokens are no text, and rows beyond the tokenizer's last token stand for nothing at all.
        never = [*all_predictor_ids(tokenizer), *range(len(tokenizer), rows)]
        settings: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            settings = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        self._config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            num_beams=1,
            use_cache=True,
            eos_token_id=self.stop_ids,
            pad_token_id=self._pad,
            suppress_tokens=never or None,
            **settings,
        )

    def check_lengths(self, examples: Sequence[Example], records: Sequence[Record]) -> None:
        """Refuse what the model has no positions for.

        Raises:
            UserError: a prompt with its answer, generated or right, is longer than the model's positions.
        """
        positions = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if positions is None:
            return
        for example in examples:
            length, record = len(example.prompt_ids), records[example.index]
            if length + self.max_new_tokens > positions:
                raise UserError(
                    f"the prompt's {length} tokens and {self.max_new_tokens} new ones are more than the model's "
                    f"{positions} positions; lower --max_new_tokens or remove the record",
                    path=record.path,
                    line=record.line,
                )
            if len(example.gold_ids) > positions:
                raise UserError(
                    f"prompt and answer have {len(example.gold_ids)} tokens, more than the model's {positions} "
                    "positions; remove the record",
                    path=record.path,
                    line=record.line,
                )

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Sequence[int]], batch_number: int = 0) -> list[Answer]:
        """Continue prompts until every one has stopped or ``max_new_tokens`` is reached.

        Args:
            prompts: token ids, best of similar length.
            batch_number: seeds the draws if the temperature is above 0.
        """
        ids, mask = self._pad_rows(prompts, left=True)
        with _fresh_generation_config(self.model), _seeded(self.model.device, self.seed, batch_number):
            output = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=self._config)
        return [self._read(row) for row in output[:, ids.shape[1] :].tolist()]

    def _read(self, generated: list[int]) -> Answer:
        end = next((index for index, token in enumerate(generated) if token in self.stop_ids), None)
        text = self.tokenizer.decode(
            generated if end is None else generated[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return Answer(str(text), end is not None, len(generated) if end is None else end + 1)

    @torch.inference_mode()
    def gold_losses(self, examples: Sequence[Example]) -> list[float]:
        """For each example the summed cross entropy, in nats, of its right answer and end of turn.

        Divide by ``Example.gold_tokens`` for the mean per token.
        """
        ids, mask = self._pad_rows([example.gold_ids for example in examples], left=False)
        low = min(example.gold_start for example in examples) - 1
        options: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            # Logits of whole prompts are most of the memory where the vocabulary is large.
            options["logits_to_keep"] = torch.arange(low, ids.shape[1], device=ids.device)
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits
        offset = low if options else 0
        losses = []
        for row, example in enumerate(examples):
            first, last = example.gold_start, len(example.gold_ids)
            predictions = logits[row, first - 1 - offset : last - 1 - offset].float()  # [labels, V]
            losses.append(F.cross_entropy(predictions, ids[row, first:last], reduction="sum"))
        return [float(loss) for loss in torch.stack(losses).tolist()]

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

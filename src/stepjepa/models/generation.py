"""Generate answers to prompts in batches, compute the likelihood of texts, write a model's generation settings."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from stepjepa.base.errors import UserError, one_line
from stepjepa.base.json_object import JsonObject
from stepjepa.base.processes import is_main_process
from stepjepa.base.terminal import note
from stepjepa.chat.content import MARKS
from stepjepa.chat.marks import Message
from stepjepa.chat.plain_template import PlainTemplate
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.chat.template import ChatTemplate
from stepjepa.chat.tokens import TextTokenizer
from stepjepa.chat.turn_text import Tools, Variables
from stepjepa.models.architecture import base_model
from stepjepa.models.sampling import Answer, Sampling, Span
from stepjepa.models.token_rows import add_stop_tokens

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
        # Some models separate thought and content by special tokens.
        if not any(mark in text for mark in MARKS):
            text = str(self.tokenizer.decode(generated[:end], skip_special_tokens=True, **options))
        if end is not None and (closer := self.template.closer.strip()) and text.rstrip().endswith(closer):
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


def never_generated(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that stand for no text: predictor tokens, and embedding rows without a token.

    Rows without a token are those beyond the last id of the tokenizer, and gaps between its ids. The tokens that end a
    turn may have higher ids than a gap.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    return [*all_predictor_ids(tokenizer), *sorted({*range(rows)}.difference(tokenizer.get_vocab().values()))]


def set_generation_defaults(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> None:
    """Make a model's ``generate`` stop at the tokens ``ends``, and never produce an id that stands for no text.

    It stops at the tokenizer's end of text, too, as :class:`Generator` and most servers do, even if that ends no turn:
    a model whose configuration names another token would continue behind it.
    The settings are part of the model: every folder that it is saved to has them, see :func:`save_generation_config`.
    """
    settings = model.generation_config
    if settings is None:  # the model can't generate
        return
    ends = [*ends, *([] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)])]
    add_stop_tokens(model, ends)
    suppressed = {*(settings.suppress_tokens or ())}
    # An earlier set-up suppressed the last rows, which the tokenizer may use by now.
    last = model.get_input_embeddings().weight.shape[0] - 1
    while last in suppressed:
        suppressed.remove(last)
        last -= 1
    settings.suppress_tokens = sorted(suppressed.union(never_generated(model, tokenizer)).difference(ends)) or None
    _make_savable(settings)


# Settings of ``generate`` that it uses only where it samples, or only where it searches with beams.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_BEAMS = ("early_stopping", "length_penalty")
_OF_VLLM = ("temperature", "top_p", "top_k", "min_p")  # that vLLM takes from a folder, without ``do_sample``, too


def _make_savable(settings: GenerationConfig) -> None:
    """Set generation settings without effect to None, in place.

    transformers loads such settings, but refuses to save them once any setting has been changed.

    Raises:
        UserError: transformers would refuse to save the settings for another reason, at the end of training.
    """
    try:
        settings.validate(strict=True)
        return
    except ValueError:
        before = settings.to_diff_dict()
    unused = {name: "do_sample" for name in _SAMPLING if not settings.do_sample}
    unused |= {name: "num_beams" for name in _BEAMS if settings.num_beams in (None, 1)}
    for name in unused:
        setattr(settings, name, None)
    try:
        settings.validate(strict=True)
    except ValueError as error:
        fault = f"{GENERATION_CONFIG_NAME} of the model can't be saved again ({one_line(error)})"
        raise UserError(f"{fault}; correct it in the model's folder") from None
    dropped = [f"{name} {before[name]}" for name in unused if before.get(name) is not None]
    switches = " and ".join(dict.fromkeys(unused[name] for name in unused if before.get(name) is not None))
    of_vllm = {name: before[name] for name in _OF_VLLM if name in unused and before.get(name) is not None}
    remedy = f"; vLLM would sample by them: serve with --override-generation-config '{json.dumps(of_vllm)}'"
    if is_main_process():
        fault = f"{', '.join(dropped)} left out, which transformers uses and saves only with {switches}"
        note(f"{GENERATION_CONFIG_NAME}: {fault}{remedy if of_vllm else ''}")


def serve_as_trained(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    plain: bool,
    variables: Mapping[str, object] | None = None,
) -> None:
    """Prepare model and tokenizer so that any program that loads them from a folder uses the prompts of training.

    Writes the variables that training fixes into the chat template (see ``ChatTemplate``), and the stop tokens into
    the generation settings.

    Args:
        model: its ``generation_config`` gets the stop tokens, in place.
        tokenizer: its ``chat_template`` is replaced by the one that is served; further named templates stay.
        plain: the format without a chat template.
        variables: of the chat template, ``JepaConfig.chat_template_kwargs``.

    Raises:
        UserError: the template can't be used, or the tokenizer could not be loaded again.
    """
    _check_class_name(tokenizer)
    if plain:
        stop_ids = PlainTemplate(tokenizer).stop_ids
    else:
        template = ChatTemplate(tokenizer, variables)
        tokenizer.chat_template, stop_ids = template.saved, template.stop_ids
    set_generation_defaults(model, tokenizer, stop_ids)


def _check_class_name(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``UserError`` for a tokenizer of a model's own code whose saved folder could not be loaded.

    transformers saves ``auto_map`` in the form that it loads only if module or class has "Tokenizer" in its name.
    """
    kind = type(tokenizer)
    reference = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
    if kind._auto_class is not None and "Tokenizer" not in reference:
        fault = f"transformers saves the tokenizer's class {reference} so that it can't be loaded, for its name"
        remedy = f"rename it to {kind.__name__}Tokenizer in its file and in tokenizer_config.json"
        raise UserError(f"{fault}; in a copy of the model's folder, {remedy} (tokenizer_class and auto_map)")


def save_generation_config(model: PreTrainedModel, folder: str | Path) -> None:
    """Write the generation settings of a model beside its adapter: PEFT does not save them, as transformers does."""
    settings = getattr(base_model(model), "generation_config", None)
    if hasattr(model, "peft_config") and settings is not None:
        settings.save_pretrained(folder)


def load_generation_config(model: PreTrainedModel, folder: str | Path) -> None:
    """Load the generation settings of an adapter's folder into a model, if the folder has any."""
    if (Path(folder) / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


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

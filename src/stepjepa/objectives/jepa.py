"""``Jepa``: a model, a tokenizer and an objective bound once; collates, gives losses, embeds, answers, saves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import torch
from torch import nn

from stepjepa.base.arguments import expanded
from stepjepa.base.json_object import JsonObject
from stepjepa.base.processes import is_main_process
from stepjepa.batch.collate import Collator
from stepjepa.batch.micro_batch import Batch
from stepjepa.batch.record_collator import RecordCollator
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.chat.special_tokens import predictor_ids
from stepjepa.config.batch_sizes import ANSWERED, EMBEDDED
from stepjepa.config.jepa import JepaConfig, Pooling, Quantization
from stepjepa.data.record import Record
from stepjepa.models.architecture import attach_heads, base_model, evaluating, number_of_layers
from stepjepa.models.encode import check_layer
from stepjepa.models.generation import Generator
from stepjepa.models.loading import load_for_inference
from stepjepa.models.sampling import Sampling
from stepjepa.objectives.asking import answer_all
from stepjepa.objectives.cached_pairs import CachedPairs
from stepjepa.objectives.embedding import Embedder, ViewTokenizer
from stepjepa.objectives.index import TextIndex
from stepjepa.objectives.inputs import Chat, EmbedOptions, EmbedsByOtherNames, Inputs, as_questions, fitted_of
from stepjepa.objectives.objective import Counts, Losses, Objective, averaged_counts, checked_batches, jepa_loss
from stepjepa.objectives.packing import make_collator, packing
from stepjepa.objectives.pair_cache import cache_pairs, check_has_pairs, needed_terms
from stepjepa.objectives.pair_embedding import PairEmbedder
from stepjepa.objectives.provenance import Provenance, record_in_loop, save_with_record, trained_config
from stepjepa.objectives.reading import ViewReader, has_objective, reading_config
from stepjepa.objectives.setup import check_heads, check_loop, check_own, check_parts, set_up, set_up_attention
from stepjepa.objectives.term import Context, process_count
from stepjepa.objectives.view_embeddings import SideEmbeddings, ViewEmbeddings
from stepjepa.store.prompts import common_system_prompt
from stepjepa.store.record import RunRecord, record_of
from stepjepa.views.layouts import LAYOUTS
from stepjepa.views.sequences import Kind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


class Jepa(EmbedsByOtherNames):
    """A causal language model, its tokenizer and a ``JepaConfig``, bound once and used everywhere.

    It adds predictor tokens and their rows, switches attention to trees, attaches the heads of terms, and sets how the
    model generates. Make it before the optimizer, and before the model is wrapped (DDP, FSDP, ``accelerator.prepare``,
    ``compile``).

    Args:
        model: a causal language model, or a PEFT wrapper of one; changed in place.
        tokenizer: fast, with a chat template unless ``config.plain``; gets the tokens that it lacks.
        config: mode, layout and objective; the defaults are those of LLM-JEPA.
        objective: terms instead of those that ``config`` describes; mode, layout and readouts still come from config.
        seed: of new embedding rows, of the heads of terms, and of what terms draw.
        device: the device of micro-batches, or its type; None for the accelerator if there is one, else the model's.
            The length of rows depends on it.
        processes: number that train together; None for those of the process group, or 1 without one.
        autocast: dtype of the ``torch.autocast`` around ``loss``, used to decide how a GPU runs trees; None without.
        rows: add predictor tokens, their embedding rows and stop tokens; False if the model has them already.
        heads: attach new heads; if False, ``loss`` raises an error for an objective whose heads the model lacks.

    Attributes:
        encoding: ``tree`` or ``rows``, the form in which micro-batches are run; ``encoding_reason`` says why.
        system_prompt: put in front of the questions of :meth:`answer`; None for no change. :meth:`from_pretrained`
            sets it to the system prompt of training, if all records had the same.

    Raises:
        ValueError: the model can't run this objective; the message names the remedy.

    Example:
        >>> jepa = Jepa(model, tokenizer, JepaConfig(jepa_loss_type="infonce"))
        >>> for batch in DataLoader(records, batch_size=8, shuffle=True, collate_fn=jepa.collate):
        ...     out = jepa.loss(model, batch.to(model.device))
        ...     out.loss.backward()
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        config: JepaConfig | None = None,
        *,
        objective: Objective | None = None,
        seed: int = 42,
        device: torch.device | str | None = None,
        processes: int | None = None,
        autocast: torch.dtype | None = None,
        rows: bool = True,
        heads: bool = True,
    ) -> None:
        check_parts(model, tokenizer, config)
        self.model, self.tokenizer, self.config, self.seed = model, tokenizer, config or JepaConfig(), seed
        self.system_prompt: str | None = None
        self._provenance = Provenance(self.config.to_dict())
        self._calls, self._own_objective = 0, objective
        self._checked: nn.Module | None = None  # the model of the last loss
        base = base_model(model)
        if device is None:
            # A model on the CPU will be moved to the accelerator later, if there is one.
            device = torch.accelerator.current_accelerator(check_available=True) or base.device
        self._device_type = torch.device(device).type
        self._processes, self._autocast = processes or process_count(), autocast
        if rows:
            self.encoding, self.encoding_reason = set_up(model, tokenizer, self.config, seed)
        else:
            self.encoding, self.encoding_reason = set_up_attention(model, self.config)
        if heads:
            attach_heads(model, self.objective.heads(base.config.get_text_config(), seed))
        self.record_tokenizer = RecordTokenizer(tokenizer, self.config)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        quantization: Quantization | None = None,
        device: str | torch.device | None = None,
        trust_remote_code: bool = False,
    ) -> Jepa:
        """Load a trained model with its tokenizer, its adapter (merged), the run's settings and its system prompt.

        Nothing is added to the model. Embeddings are read where :func:`~stepjepa.objectives.reading.embedding_config`
        says.

        Args:
            path: run folder, checkpoint folder or hub id.
            dtype: of the weights; ``auto`` for the checkpoint's own.
            quantization: ``4bit`` or ``8bit`` through bitsandbytes, None for neither.
            device: where to put the model; None for the accelerator if there is one, else the CPU.
            trust_remote_code: run code that comes with the model.

        Raises:
            UserError: no model can be loaded from there.
        """
        model, tokenizer = load_for_inference(
            path, dtype=dtype, quantization=quantization, device=device, trust_remote_code=trust_remote_code
        )
        record = record_of(expanded(path)) or RunRecord()
        config, device = trained_config(record), base_model(model).device
        jepa = cls(model, tokenizer, config, device=device, rows=False, heads=False)
        jepa._provenance = Provenance.of(record)
        jepa.system_prompt = common_system_prompt(record.system_prompts or [])
        return jepa

    def __repr__(self) -> str:
        config, views = self.config, ""
        if config.uses_views:
            number = config.used_predictors
            views = f", layout {config.layout}, {number} predictor token{'' if number == 1 else 's'}"
        return f"Jepa({type(base_model(self.model)).__name__}, {config.mode}{views}, encoding {self.encoding})"

    # -- records to losses ---------------------------------------------------------------------------------------------

    @cached_property
    def objective(self) -> Objective:
        """The terms of the loss; made when they are first needed, since a term may be code from the user."""
        return self._own_objective or Objective.from_config(self.config, self.model)

    @cached_property
    def collator(self) -> Collator:
        """The collator that makes micro-batches of tokenised records; ``JepaTrainer`` uses it, too."""
        return make_collator(
            self.model,
            self.tokenizer,
            self.config,
            encoding=self.encoding,
            device_type=self._device_type,
            processes=self._processes,
            prompt_labels="prompt_loss" in self.objective.terms,
            whole_pairs=True,
            autocast=self._autocast,
        )

    @cached_property
    def collate(self) -> RecordCollator:
        """Makes a batch: ``jepa.collate(records, views=True)``, or ``DataLoader(..., collate_fn=jepa.collate)``.

        Records are ``Record`` or dicts with ``messages``; ``views=False`` makes a batch as in regular training. The
        batch is on the CPU. ``UserError`` for a record that is wrong, or too long for ``config.over_length``.
        """
        return RecordCollator(self.record_tokenizer, self.collator)

    def counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Return the denominators of the terms' means over the batches of an optimizer step, for ``counts`` of a loss.

        Every process must call it for its own batches. The counts of all processes are added up and divided by the
        number of processes, since DDP and FSDP average gradients.
        """
        batches = checked_batches(batches)
        return averaged_counts(self.objective.counts(batches), batches[0].input_ids.device)

    def step_pairs(self, model: nn.Module, batches: Sequence[Batch], *, step: int | None = None) -> list[CachedPairs]:
        """Run the first pass over the batches of an optimizer step, with ``compare_pairs_in='step'``.

        Every process must call it, with equally many batches; ``model`` and ``step`` are as for :meth:`loss`.

        Returns:
            The argument ``pairs`` of :meth:`loss` for each batch.

        Raises:
            ValueError: ``compare_pairs_in`` is not ``step``, or what :meth:`loss` refuses.
        """
        self._check(model, *batches)
        terms = needed_terms(self.config, self.objective.terms)
        context = Context(self._calls if step is None else step, self.seed, gather=self.objective.gather)
        gathers = model is not self.model  # wrapped weights may be gathered by all processes together
        return cache_pairs(model, batches, terms, context, layer=self.objective.layer, every_batch=gathers)

    def loss(
        self,
        model: nn.Module,
        batch: Batch,
        counts: Counts | None = None,
        *,
        pairs: CachedPairs | None = None,
        step: int | None = None,
        progress: float | None = None,
    ) -> Losses:
        """Run the model on a batch; calling the ``Jepa`` itself does the same.

        Args:
            model: the one of the constructor, wrapped or not.
            batch: of :meth:`collate`, on the model's device.
            counts: of the whole optimizer step, see :meth:`counts`; None if the step has this batch alone.
            pairs: of :meth:`step_pairs`, with ``compare_pairs_in='step'``; None if the step has this batch alone.
            step: number of the optimizer step, which seeds the draws of SIGReg and STP; None counts the calls from 0.
            progress: completed fraction of the run, for ``lbd_schedule``; None for the weight itself.

        Returns:
            ``loss`` to call ``backward()`` on, ``parts``, the mean of each term, and ``monitors``.

        Raises:
            ValueError: the objective needs ``JepaTrainer``, or a head that the model lacks.
        """
        self._check(model, batch)
        check_has_pairs(self.config, self.objective.terms, counts, pairs)
        counts = self.counts([batch]) if counts is None else counts
        step = self._calls if step is None else step
        self._calls += 1
        records = replace(batch.records, rng_keys=tuple((step, index) for _, index in batch.records.rng_keys))
        context = Context(step, self.seed, progress, self.objective.gather, cached=pairs)
        return jepa_loss(model, Batch(batch | {"records": records}), self.objective, counts, context)

    __call__ = loss

    def _check(self, model: nn.Module, *batches: Batch) -> None:
        """Raise an error for what is no batch; once for each model, for missing heads and what a loop can't have."""
        if self._checked is model and all(isinstance(batch, Batch) for batch in batches):
            return
        for batch in batches:
            check_own(model, batch, self.model)
        check_loop(self.config, self.objective.terms, own_terms=self._own_objective is not None)
        self._provenance.check_objective()
        with torch.device("meta"):
            needed = self.objective.heads(base_model(self.model).config.get_text_config(), self.seed)
        check_heads(model, needed)
        self._checked = model

    # -- embeddings and answers ----------------------------------------------------------------------------------------

    def embed(self, inputs: Inputs, side: Kind = "source", **options: Unpack[EmbedOptions]) -> NDArray[np.float32]:
        """Embed one side of texts or records at the readout of training; a predictor head is not applied.

        In LLM-JEPA a text is a question or an answer, rendered in the model's chat template. In layout ``branched`` a
        question is read behind :attr:`system_prompt`, as in training. In Step-JEPA a text alone can only be a predicted
        step. A record gives a row for every question, answer or step, see :meth:`embed_steps`; its chat may end with
        the question.

        Args:
            inputs: texts; or records, or dicts with ``messages``.
            side: ``source``, the view that predicts, or ``target``, the view that is predicted.
            options: see :meth:`embedder`.

        Returns:
            float32 ``[R, D]`` in the order of the inputs, of length 1 unless ``raw``; R is the number of texts.

        Raises:
            UserError: a text is empty or too long, a record is wrong or has no such view; the message names its line.
                Or the model was trained without a JEPA objective, and neither ``layer`` nor ``pooling`` is named.
        """
        return self.embed_steps(inputs, side, **options).vectors

    def embed_steps(self, inputs: Inputs, side: Kind = "source", **options: Unpack[EmbedOptions]) -> SideEmbeddings:
        """Embed as :meth:`embed` does, with the same arguments; the result also says from which view each row is."""
        return self.embedder(side, **options)(inputs)

    def embedder(self, side: Kind = "source", **options: Unpack[EmbedOptions]) -> Embedder:
        """Make the function that :meth:`embed` calls; for a stream of blocks make it once.

        Args:
            side: ``source`` or ``target``.
            options: ``batch_size``: sequences at a time (32), which changes the last bits of the result at most.
                ``raw``: don't divide vectors by their lengths (False).
                ``layer``: index of ``hidden_states`` to read, instead of that of training.
                ``pooling``: ``last`` or ``mean``, instead of that of training.
                ``max_length``: most tokens of a text, instead of those of training.
                ``linear_map``: from :func:`stepjepa.fit_linear_map`; vectors are those behind it, read where it says.
                ``projection_heads``: the same from :func:`stepjepa.fit_projection_heads`, instead of a linear map.

        Raises:
            ValueError: ``side`` or an option has a value that is not allowed, or a readout is named beside a map.
            UserError: the model was trained without a JEPA objective, and neither ``layer`` nor ``pooling`` is named.
        """
        config = self._provenance.of_options(options)
        check_layer(number_of_layers(self.model), config.jepa_layer, "layer")
        tokenizer, fitted = ViewTokenizer(self.tokenizer, config, side), fitted_of(options)
        if tokenizer.behind_prompt:
            tokenizer.system = self._provenance.system_message(self.system_prompt, fitted)
        reader = self._reader(config, options.get("batch_size", EMBEDDED))
        return Embedder(tokenizer, reader, side, options.get("raw", False), fitted)

    @property
    def has_objective(self) -> bool:
        """Whether the model was trained with a JEPA objective, which says where its embeddings are read."""
        return has_objective(self._provenance.settings)

    @property
    def reads_system_prompt(self) -> bool:
        """Whether a bare question is read behind a system prompt: that of training, or :attr:`system_prompt`."""
        config = self._reading_config()
        return config.mode == "llm-jepa" and LAYOUTS[str(config.layout)].views_in_text and not config.plain

    def index(self, texts: Inputs, side: Kind = "target", **options: Unpack[EmbedOptions]) -> TextIndex:
        """Embed texts to be searched: ``jepa.index(answers).search(questions, k=10)``.

        Args:
            texts: the corpus; equal texts are one entry.
            side: the side of the corpus; queries are on the other one.
            options: see :meth:`embedder`.

        Raises:
            ValueError: ``texts`` are records, or ``raw`` is set: a search compares by cosine.
            UserError: as for :meth:`embed`.
        """
        return TextIndex.of(self, texts, side, **options)

    def embed_pairs(self, records: Iterable[Record | JsonObject], *, batch_size: int = EMBEDDED) -> ViewEmbeddings:
        """Embed both views of all pairs of some records, at the readouts of training.

        Args:
            records: as for :meth:`collate`; those without a pair, or longer than ``max_length``, give no row.
            batch_size: sequences at a time, which changes the last bits of the result at most.

        Raises:
            UserError: a record is wrong, no record has a pair, or an embedding is not finite.
        """
        return self.pair_embedder(batch_size)(records)

    def pair_embedder(
        self,
        batch_size: int = EMBEDDED,
        *,
        layer: int | None = None,
        pooling: Pooling | None = None,
        max_length: int | None = None,
    ) -> PairEmbedder:
        """Make the function that :meth:`embed_pairs` calls; it also reads several layers and poolings in one pass.

        ``layer`` and ``pooling`` are as for :meth:`embedder`; ``max_length`` is that of a record.
        """
        of_training = layer is None and pooling is None
        config = self._reading_config() if of_training else self._provenance.read_at(layer, pooling)
        config = config if max_length is None else replace(config, max_length=max_length)
        return PairEmbedder(RecordTokenizer(self.tokenizer, config), self._reader(config, batch_size))

    def _reading_config(self) -> JepaConfig:
        """Return the settings for reading views as this model was trained; LLM-JEPA's for a regular model."""
        return reading_config(self._provenance.settings, self.config.mode if self.config.uses_views else "llm-jepa")

    def _reader(self, config: JepaConfig, batch_size: int) -> ViewReader:
        predictors = predictor_ids(self.tokenizer, config.used_predictors)
        options = packing(self.model, self.config, base_model(self.model).device.type)
        return ViewReader(self.model, config, predictors, self.encoding, options, batch_size)

    def answer(self, question: Chat, *, max_new_tokens: int = 256) -> str:
        """Answer greedily, with the prompt and the stop tokens of training, as ``stepjepa evaluate`` does.

        :attr:`system_prompt` is put in front of a chat that has no system message of its own.

        Args:
            question: the text of a user message; messages up to the turn to be generated; or a record of them, with
                ``tools`` and ``chat_template_kwargs`` beside ``messages``; its last answer is not part of the prompt.
            max_new_tokens: most tokens of the answer.

        Returns:
            The text before the first stop token, without special tokens.

        Raises:
            UserError: the chat template refuses the messages, or prompt and answer exceed the model's positions.
        """
        return self.answers([question], max_new_tokens=max_new_tokens, batch_size=1)[0]

    def answers(self, questions: Iterable[Chat], *, max_new_tokens: int = 256, batch_size: int = ANSWERED) -> list[str]:
        """Answer several questions as :meth:`answer` does, ``batch_size`` at a time.

        Args:
            questions: each as for :meth:`answer`.
            max_new_tokens: most tokens of an answer.
            batch_size: prompts at a time.

        Raises:
            ValueError: a single text in place of a list, or a chat without messages.
            UserError: see :meth:`answer`.
        """
        generator = Generator(self.model, self.tokenizer, Sampling(max_new_tokens), plain=self.config.plain)
        prompt = None if self.config.plain else self.system_prompt
        with evaluating(self.model):
            return answer_all(generator, [question.behind(prompt) for question in as_questions(questions)], batch_size)

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write model, tokenizer and settings, for ``from_pretrained`` of this class and of plain transformers or PEFT.

        The first process writes, without wrappers (DDP, FSDP) and without the heads of terms. No file is ever
        incomplete under its final name. An existing folder keeps its other files, but for the weights of an earlier
        save.

        Raises:
            UserError: the folder holds a run with other settings.
        """
        if not is_main_process():
            return
        own_terms = None if self._own_objective is None else self._own_objective.names
        record = record_in_loop(self.config, own_terms, self.system_prompt)
        save_with_record(Path(expanded(folder)), self.model, self.tokenizer, record)


JepaLoss = Jepa
"""The name of :class:`Jepa` before it embedded and answered."""

"""Compare the pairs of a whole optimizer step at the memory of one micro-batch (GradCache, arXiv 2101.06983).

A term that compares pairs, such as InfoNCE, is a function of the embeddings of all pairs. A first pass without
gradients gives these embeddings; from them come the term and its gradient with respect to each embedding. In the second
pass, the usual one, the embeddings of a micro-batch get those gradients. So a step has the gradient of one micro-batch
with all its records, for one more forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn, cast

import torch
from torch import Tensor, nn

from stepjepa.batch.micro_batch import Batch
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.encode import encode
from stepjepa.models.encoded import Encoded
from stepjepa.objectives.cached_pairs import CachedPairs, CachedTerm, RandomState
from stepjepa.objectives.term import Context, Term, checked_sum


def terms_of_steps(config: JepaConfig, terms: Mapping[str, Term]) -> dict[str, Term]:
    """Return the terms that compare the pairs of a step, by name: none where ``compare_pairs_in`` is not ``step``."""
    if config.compare_pairs_in != "step":
        return {}
    return {name: term for name, term in terms.items() if term.of_pairs and term.compares_pairs}


def check_compared_pairs(config: JepaConfig, terms: Mapping[str, Term]) -> None:
    """Raise a ``ValueError`` if ``compare_pairs_in`` is ``step``, and no term compares pairs."""
    if config.compare_pairs_in == "step" and not terms_of_steps(config, terms):
        raise ValueError(
            "compare_pairs_in 'step' does nothing, since no loss compares pairs; take `jepa_loss_type infonce`, or "
            "leave it out"
        )


def needed_terms(config: JepaConfig, terms: Mapping[str, Term]) -> dict[str, Term]:
    """Return :func:`terms_of_steps`; raise a ``ValueError`` if there is none, so that no first pass is needed."""
    if not (needed := terms_of_steps(config, terms)):
        raise ValueError("step_pairs: compare_pairs_in is 'micro-batch', which needs none; set it to 'step'")
    return needed


def check_has_pairs(
    config: JepaConfig, terms: Mapping[str, Term], counts: object | None, pairs: CachedPairs | None
) -> None:
    """Raise a ``ValueError`` if a batch is trained without the pairs of the step that its terms compare.

    Args:
        config: of the objective.
        terms: the terms, by name.
        counts: of a step of several batches; None for a step of one, whose pairs are compared anyway.
        pairs: of :func:`cache_pairs`; None without a first pass.
    """
    if counts is not None and pairs is None and torch.is_grad_enabled() and terms_of_steps(config, terms):
        raise ValueError("pairs: compare_pairs_in 'step' needs those of jepa.step_pairs(model, batches)")


def cache_pairs(
    model: nn.Module,
    batches: Sequence[Batch],
    terms: Mapping[str, Term],
    context: Context,
    *,
    layer: int = -1,
    every_batch: bool = False,
    around: Callable[[Batch], AbstractContextManager[None]] = lambda batch: nullcontext(),
) -> list[CachedPairs]:
    """Run the first pass over the micro-batches of a step, and work out the terms that compare their pairs.

    With several processes it is a collective call.

    Args:
        model: as for :func:`~stepjepa.objectives.objective.jepa_loss`, in training.
        batches: all micro-batches of the step on this process, on the model's device.
        terms: those of :func:`terms_of_steps`.
        context: of the step.
        layer: the layer that embeddings are read from.
        every_batch: also run micro-batches without pairs, for weights that all processes gather together.
        around: makes a context in which a micro-batch is run.

    Returns:
        For each micro-batch the ``Context.cached`` of its second pass.

    Raises:
        ValueError: a term reads more of a micro-batch than its pairs.
    """
    sizes = [batch.pairs for batch in batches]
    # One pass, at least, tells the width of embeddings, which a process without pairs needs, too.
    runs = [every_batch or size > 0 or not any(sizes) for size in sizes]
    states: list[RandomState | None] = []
    embedded: list[tuple[Tensor, Tensor]] = []
    for batch, run in zip(batches, runs, strict=True):
        states.append(RandomState(batch.input_ids) if run else None)
        if run:
            with torch.no_grad(), around(batch):
                embedded.append(_embed(model, batch, context, layer))
    sources, targets = (torch.cat(side) for side in zip(*embedded, strict=True))
    # In 16 bits a gradient that no loss scale has raised yet may vanish.
    exact = torch.promote_types(sources.dtype, torch.float32)
    source, target = (side.to(exact).requires_grad_() for side in (sources, targets))
    pairs = _Pairs((source, target)), _Keys(len(source), torch.cat([batch.pair_keys for batch in batches]))
    cached: list[dict[str, CachedTerm]] = [{} for _ in batches]
    for name, term in terms.items():
        value, gradients = _value_and_gradients(term, *pairs, context)
        parts = zip(*(gradient.split(sizes) for gradient in gradients), strict=True)
        for number, (of_source, of_target) in enumerate(parts):
            share = value * (sizes[number] / max(len(source), 1))
            cached[number][name] = CachedTerm(share, of_source, of_target)
    return [CachedPairs(*parts) for parts in zip(cached, targets.split(sizes), states, strict=True)]


def _embed(model: nn.Module, batch: Batch, context: Context, layer: int) -> tuple[Tensor, Tensor]:
    """Return the source and target embeddings ``[P, D]`` of a micro-batch."""

    def evaluate(encoded: Encoded) -> dict[str, Tensor]:
        if context.ema_states is not None:
            encoded.replace_targets(context.ema_states)
        return dict(zip(("source", "target"), encoded.pairs, strict=True))

    result = encode(model, batch, evaluate, layer=layer)
    return result["source"], result["target"]


@dataclass(frozen=True)
class _PairsOnly:
    """What a term can read of a step; anything else of its micro-batches is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(
            f"compare_pairs_in 'step' gives a term 'encoded.pairs', 'batch.pairs' and 'batch.pair_keys' alone, and one "
            f"reads '{name}'; use compare_pairs_in 'micro-batch' with it"
        )


@dataclass(frozen=True)
class _Pairs(_PairsOnly):
    """In place of ``Encoded``."""

    pairs: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Keys(_PairsOnly):
    """In place of ``Batch``."""

    pairs: int
    pair_keys: Tensor


def _value_and_gradients(
    term: Term, encoded: _Pairs, batch: _Keys, context: Context
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the sum of a term over the pairs of a step, and its gradients with respect to their embeddings."""
    source, target = encoded.pairs
    with torch.enable_grad():
        value = checked_sum(term, cast(Encoded, encoded), cast(Batch, batch), context)
    if not value.requires_grad:
        return value, (torch.zeros_like(source), torch.zeros_like(target))
    # A target that the term does not train has none.
    of_source, of_target = torch.autograd.grad(value, (source, target), allow_unused=True, materialize_grads=True)
    return value.detach(), (of_source, of_target)

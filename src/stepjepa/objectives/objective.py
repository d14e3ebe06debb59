"""The objective: weighted terms, each a sum over a micro-batch divided by its count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepjepa.base.arguments import kind_of
from stepjepa.base.errors import UserError
from stepjepa.batch.micro_batch import Batch
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.encode import check_layer, encode
from stepjepa.models.encoded import Encoded
from stepjepa.objectives.alignment import Alignment, Covariance, SIGReg, Variance, make_distance
from stepjepa.objectives.monitors import MONITORS, MetricWindow
from stepjepa.objectives.router import router_loss
from stepjepa.objectives.term import Context, Term, checked_sum, gather_rows, load_term, no_gather, process_count
from stepjepa.objectives.text import LMLoss, PromptLoss, SemanticTube

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _terms(config: JepaConfig) -> Iterator[Term]:
    """Yield the terms that a configuration describes."""
    yield LMLoss(config.gamma)
    if config.prompt_loss_weight:
        yield PromptLoss(config.prompt_loss_weight)
    if config.uses_views:
        yield Alignment(
            config.lbd,
            make_distance(config.jepa_loss_type, config.infonce_temperature, config.infonce_negatives),
            through_target=config.target_grad == "on",
            schedule=config.lbd_schedule,
            warmup=config.lbd_warmup,
            head=None if config.predictor_head == "none" else config.predictor_head,
        )
        for kind, weight in ((SIGReg, config.sigreg), (Variance, config.variance), (Covariance, config.covariance)):
            if weight:
                yield kind(weight)
    if config.stp:
        yield SemanticTube(config.stp, config.jepa_layer)
    for entry in config.terms:
        yield load_term(entry["term"], entry["args"])


def _checked(terms: object) -> list[Term]:
    """Return the terms as a list; raise a ``TypeError`` for what is no term, and for one without a name."""
    if isinstance(terms, Term) or not isinstance(terms, Iterable):
        raise TypeError(f"terms: expected a list of terms, got {type(terms).__name__}; write [LMLoss(), ...]")
    checked = list(terms)
    for term in checked:
        if isinstance(term, type):
            raise TypeError(f"terms: expected {term.__name__}(...), got the class; call it")
        if not isinstance(term, Term):
            raise TypeError(f"terms: expected a stepjepa.Term, got {type(term).__name__}; write a class of it")
        if not hasattr(term, "name"):
            raise TypeError(f"terms: {type(term).__name__} has no name; put @stepjepa.term('my_loss') above the class")
    return checked


# Term name -> denominator of its mean, summed over the optimizer step.
Counts = Mapping[str, Tensor | float]


class Objective:
    """A weighted sum of terms, such as ``gamma * LM loss + lbd * alignment loss`` (arXiv 2509.14252, eq. 2).

    Args:
        terms: with distinct names, such as ``[LMLoss(), Alignment(0.1, InfoNCE())]``.
        layer: index in transformers' ``hidden_states`` of the layer that embeddings are read from; -1 is the last.
    """

    def __init__(self, terms: Iterable[Term], layer: int = -1) -> None:
        self.terms: dict[str, Term] = {}
        for term in _checked(terms):
            if term.name in self.terms:
                raise UserError(f"two terms are called '{term.name}'; leave one, or give one another name")
            self.terms[term.name] = term
        self.layer = layer
        self.names = list(self.terms)
        self.of_pairs = [name for name, term in self.terms.items() if term.of_pairs]
        self.compares_pairs = any(term.compares_pairs for term in self.terms.values())
        self.reads_router_logits = any(term.reads_router_logits for term in self.terms.values())
        # All layers whose hidden states are read.
        self.layers = sorted({layer, -1, *(layer for term in self.terms.values() for layer in term.layers)})

    @property
    def gather(self) -> Callable[[Tensor], tuple[Tensor, int]]:
        """The ``Context.gather`` of a training: of all processes if a term compares pairs, else of none."""
        return gather_rows if self.compares_pairs else no_gather

    @property
    def metrics(self) -> list[str]:
        """Names of what is measured on held-out records: the terms, their weighted sum, and monitors of pairs."""
        return [*self.names, "loss", *(MONITORS if self.of_pairs else ())]

    def __repr__(self) -> str:
        return f"Objective({' + '.join(f'{term.weight:g} {name}' for name, term in self.terms.items())})"

    @classmethod
    def from_config(cls, config: JepaConfig, model: nn.Module | None = None) -> Objective:
        """Make the objective that a configuration describes.

        Args:
            config: weights and kinds of the terms.
            model: if it is a mixture of experts, its router loss is a term; None for no such term.

        Raises:
            UserError: a user's term can't be loaded, or two terms have one name.
            ValueError: ``config.router_loss`` has a weight, and the model has no router loss.
        """
        router = None if model is None else router_loss(config, model)
        return cls([*_terms(config), *([] if router is None else [router])], config.jepa_layer)

    def counts(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the denominators of the terms' means, summed over micro-batches."""
        batches = list(batches)
        return {name: float(sum(map(term.count, batches))) for name, term in self.terms.items()}

    def heads(self, config: PreTrainedConfig, seed: int = 42) -> dict[str, nn.Module]:
        """Make the trained modules of the terms, by the names under which they are saved.

        Args:
            config: of the decoder (``model.config.get_text_config()``).
            seed: their weights depend on it and on ``config`` alone.

        Raises:
            ValueError: the decoder lacks a layer that a term reads.
        """
        for layer in self.layers:
            check_layer(int(config.num_hidden_layers), layer, "layer of a term")
        heads: dict[str, nn.Module] = {}
        with torch.random.fork_rng(devices=[]):
            for name, term in self.terms.items():
                torch.default_generator.manual_seed(seed)
                if (head := term.modules(config)) is not None:
                    heads[term.head_name or name] = head
        return heads

    def sums(self, encoded: Encoded, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Compute the sum of each term over one micro-batch, not yet divided by counts or weighted.

        Args:
            encoded: hidden states and logits of the micro-batch.
            batch: the micro-batch.
            context: step, seed and gathering of rows.
        """
        cached = {} if context.cached is None else context.cached.terms
        return {
            name: cached[name].sum(*encoded.pairs) if name in cached else checked_sum(term, encoded, batch, context)
            for name, term in self.terms.items()
        }

    def means(self, sums: Mapping[str, Tensor], counts: Counts, progress: float | None = None) -> dict[str, Tensor]:
        """Divide the sums by ``counts`` (a count of 0 counts as 1); add ``loss``, the weighted sum of the means.

        Weights are those at a completed fraction ``progress`` of the run; None for the weights without schedules.
        """
        if not isinstance(counts, Mapping) or sums.keys() - counts.keys():
            got = ", ".join(map(str, counts)) or "none" if isinstance(counts, Mapping) else kind_of(counts)
            raise ValueError(f"counts: expected those of {', '.join(sums)}, as counts(batches) gives them, got {got}")
        parts = {name: value / (float(counts[name]) or 1.0) for name, value in sums.items()}
        weighted = [self.terms[name].weight_at(progress) * part for name, part in parts.items()]
        return parts | {"loss": torch.stack(weighted).sum()}


def checked_batches(batches: object) -> list[Batch]:
    """Return the batches of a step as a list; TypeError for what is no list of batches, ValueError for none."""
    # A batch is a mapping, and so an iterable, too.
    if isinstance(batches, Batch) or not isinstance(batches, Iterable):
        raise TypeError(f"batches: expected a list of batches, got {kind_of(batches)}; put one by itself into a list")
    if not (checked := list(batches)):
        raise ValueError("batches: expected at least one batch, got none")
    if wrong := [batch for batch in checked if not isinstance(batch, Batch)]:
        raise TypeError(f"batches: expected those of jepa.collate(records), got {kind_of(wrong[0])}")
    return checked


def averaged_counts(counts: dict[str, float], device: torch.device) -> dict[str, float]:
    """Return the sums of counts over all processes, divided by the number of processes; a collective call.

    Args:
        counts: of this process, by the names of terms.
        device: of the processes' communication.
    """
    if (processes := process_count()) == 1:
        return counts
    values = torch.tensor([*counts.values()], dtype=torch.float64, device=device)
    dist.all_reduce(values)
    return dict(zip(counts, (values / processes).tolist(), strict=True))


class Losses(NamedTuple):
    """The result of :func:`jepa_loss`.

    ``parts`` and ``sums`` have gradients, so that terms can be weighed outside of an ``Objective``. A part that is kept
    keeps the activations of its pass: detach it, or take its ``item()``, as ``repr`` and the trainer do.

    Attributes:
        loss: the weighted sum of the terms' means, a scalar to call ``backward()`` on.
        parts: term -> its mean, a scalar.
        sums: term -> its sum over the micro-batch, a scalar.
        source: ``[P, D]`` source embeddings, without gradient.
        target: ``[P, D]`` target embeddings, without gradient.
    """

    loss: Tensor
    parts: dict[str, Tensor]
    sums: dict[str, Tensor]
    source: Tensor
    target: Tensor

    def __repr__(self) -> str:
        values = {"loss": self.loss, **self.parts}
        return f"Losses({', '.join(f'{name} {float(value.detach()):.4f}' for name, value in values.items())})"

    @property
    def monitors(self) -> dict[str, float]:
        """Similarities, effective ranks and retrieval of the pairs, as they are logged; waits for the device."""
        window = MetricWindow(max(len(self.source), 1))
        window.add_pairs(self.source, self.target)
        return window.monitors()


def jepa_loss(
    model: nn.Module,
    batch: Batch,
    objective: Objective,
    counts: Counts | None = None,
    context: Context | None = None,
) -> Losses:
    """Compute the objective on a micro-batch: one forward pass, with all terms evaluated inside it.

    Args:
        model: a causal language model, possibly wrapped (PEFT, DDP, FSDP), prepared by ``objectives.setup.set_up``.
        batch: made by ``batch.collate.Collator``, on the model's device.
        objective: the terms.
        counts: denominators of the whole optimizer step, over accumulation and processes; None for those of this
            micro-batch. The gradients of the micro-batches then add up to the gradient of the step's mean. DDP and FSDP
            average gradients over processes, so multiply the loss by the number of processes there.
        context: step, seed and progress of the run.
    """
    context = context or Context()

    cached = context.cached

    def evaluate(encoded: Encoded) -> dict[str, Tensor]:
        if context.ema_states is not None and cached is not None:
            encoded.fix_targets(cached.target)
        elif context.ema_states is not None:
            encoded.replace_targets(context.ema_states)
        source, target = encoded.pairs
        return {**objective.sums(encoded, batch, context), "source": source.detach(), "target": target.detach()}

    routers = objective.reads_router_logits
    replayed = nullcontext() if cached is None or cached.random is None else cached.random.replayed(batch.input_ids)
    with replayed:
        sums = encode(model, batch, evaluate, layer=objective.layer, layers=objective.layers, router_logits=routers)
    source, target = sums.pop("source"), sums.pop("target")
    parts = objective.means(sums, objective.counts([batch]) if counts is None else counts, context.progress)
    return Losses(parts.pop("loss"), parts, sums, source, target)

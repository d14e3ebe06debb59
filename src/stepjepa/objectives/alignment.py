"""Terms on pairs of embeddings: alignment by a distance, and regularizers against collapse to one vector."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepjepa.config.jepa import DEFAULTS
from stepjepa.models.architecture import PredictorHead
from stepjepa.objectives.cosine import cosine_distance, unit_vectors
from stepjepa.objectives.precision import without_autocast
from stepjepa.objectives.term import Context, Term, term

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from stepjepa.batch.micro_batch import Batch
    from stepjepa.models.encoded import Encoded


class Distance(Protocol):
    """The loss of pairs of embeddings.

    It maps the source and target embeddings ``[P, D]`` of P pairs to the sum of their losses, a float32 scalar.
    """

    @property
    def compares_pairs(self) -> bool:
        """Whether the loss of a pair depends on the other pairs of the batch, as that of a contrastive loss does.

        Such a distance is a :class:`ContrastiveDistance`: it gets the targets of all processes, and the records of an
        optimizer step are not sorted by length, so that negatives are a random sample of all records.
        """

    def __call__(self, source: Tensor, target: Tensor, /) -> Tensor: ...


class ContrastiveDistance(Distance, Protocol):
    """A distance with ``compares_pairs`` True.

    If it has an attribute ``excludes_equal`` that is True, it gets a fourth argument: the candidates that are no
    negatives of a source, see :func:`equal_partners`. For any other distance all candidates are negatives.
    """

    def __call__(self, source: Tensor, target: Tensor, first: int = 0, /) -> Tensor:
        """Sum over the sources ``[P, D]``; row ``first + i`` of the candidates ``[Q, D]`` is the target of source i."""


class _ExcludingDistance(ContrastiveDistance, Protocol):
    """A contrastive distance with ``excludes_equal`` True."""

    def __call__(self, source: Tensor, target: Tensor, first: int = 0, excluded: Tensor | None = None, /) -> Tensor: ...


def _is_contrastive(distance: Distance) -> TypeGuard[ContrastiveDistance]:
    return distance.compares_pairs


def _excludes_equal(distance: ContrastiveDistance) -> TypeGuard[_ExcludingDistance]:
    return bool(getattr(distance, "excludes_equal", False))


def equal_partners(keys: Tensor, context: Context) -> Tensor:
    """Find pairs that are no negatives of each other: their sources, or their targets, have the same tokens.

    Two answers to one question are both right, and so are two questions with one answer. Like ``context.gather`` this
    is a collective call: every process must make it.

    Args:
        keys: ``[P, 2]`` int64, hashes of the tokens of each pair's source and target: ``Batch.pair_keys``, or those of
            pairs of a term's own, by ``hash_tokens``.
        context: it gathers the keys of all processes.

    Returns:
        ``[P, Q]`` bool: whether pair q of all processes, in the order of ``context.gather``, has the source or the
        target of pair p of this process. False for the pair itself.
    """
    candidates, first = context.gather(keys)
    equal = (keys[:, None] == candidates).any(dim=-1)
    index = torch.arange(len(keys), device=keys.device)
    # Not by indexed assignment, which would copy a False to the device and wait for it.
    return equal & (index[:, None] + first != torch.arange(len(candidates), device=keys.device))


@dataclass(frozen=True)
class Cosine:
    """``1 - cos(s, t)`` of each pair: the loss of LLM-JEPA (arXiv 2509.14252, eq. 3).

    Any constant map minimises it, too; watch the shuffled similarity.
    """

    compares_pairs = False

    def __call__(self, source: Tensor, target: Tensor) -> Tensor:
        return cosine_distance(source, target).sum()


@dataclass(frozen=True)
class L2:
    """Euclidean distance ``|s - t|`` of each pair."""

    compares_pairs = False

    def __call__(self, source: Tensor, target: Tensor) -> Tensor:
        distances: Tensor = torch.linalg.vector_norm(source.float() - target.float(), dim=-1)
        return distances.sum()


@dataclass(frozen=True)
class MSE:
    """Mean over the D dimensions of ``(s - t)^2`` of each pair."""

    compares_pairs = False

    def __call__(self, source: Tensor, target: Tensor) -> Tensor:
        return (source.float() - target.float()).square().mean(dim=-1).sum()


@dataclass(frozen=True)
class InfoNCE:
    """Cross-entropy of finding each source's target among all targets of the batch (van den Oord et al., 2018).

    Logits are cosines over ``temperature``. A constant does not minimise it. It depends on which pairs share a batch,
    and is 0 for a batch of one pair. With ``excludes_equal`` the targets of :func:`equal_partners` are not among the
    negatives; without it the formula is the published one.
    """

    compares_pairs = True

    temperature: float = DEFAULTS["infonce_temperature"]
    excludes_equal: bool = True

    def __call__(self, source: Tensor, target: Tensor, first: int = 0, excluded: Tensor | None = None) -> Tensor:
        """Sum the losses of the sources, a float32 scalar.

        Args:
            source: ``[P, D]``.
            target: ``[Q, D]`` candidates of all processes.
            first: row ``first + i`` of the candidates is the target of source i.
            excluded: ``[P, Q]`` bool, candidates that are no negatives of a source; never its own target.
        """
        (source, source_valid), (target, target_valid) = unit_vectors(source), unit_vectors(target)
        with without_autocast(source):
            logits = source @ target.T / self.temperature
        if excluded is not None:
            logits = logits.masked_fill(excluded, -math.inf)
        right = torch.arange(first, first + len(logits), device=logits.device)
        losses = torch.logsumexp(logits, dim=-1) - logits.gather(1, right[:, None])[:, 0]
        return losses.masked_fill(~(source_valid & target_valid[right]), 0).sum()


def make_distance(
    name: str,
    temperature: float = DEFAULTS["infonce_temperature"],
    negatives: str = DEFAULTS["infonce_negatives"],
) -> Distance:
    """Make the distance of a ``jepa_loss_type``; only ``infonce`` has a temperature and negatives.

    Args:
        name: ``cosine``, ``l2``, ``mse`` or ``infonce``.
        temperature: divides the cosines of InfoNCE.
        negatives: ``distinct`` leaves out targets that are equal to the right one.
    """
    infonce = InfoNCE(temperature, excludes_equal=negatives == "distinct")
    distances: dict[str, Distance] = {"cosine": Cosine(), "l2": L2(), "mse": MSE(), "infonce": infonce}
    return distances[name]


@dataclass
class _OfPairs(Term):
    of_pairs = True

    def count(self, batch: Batch) -> int:
        return batch.pairs


@term("jepa_loss", "alignment loss")
@dataclass
class Alignment(_OfPairs):
    """Mean distance between source and target embedding: the second term of LLM-JEPA (arXiv 2509.14252, eq. 2).

    The weight, lambda of the paper, follows a schedule over the run: ``constant``; ``warmup`` rises from 0 over the
    first share ``warmup`` of the run; ``cosine`` falls to 0 along half a cosine. ValueError for a distance that does
    not say whether it compares pairs, TypeError for what is no distance.

    Attributes:
        weight: of the mean in the objective, before its schedule.
        distance: the loss of pairs: ``Cosine()``, ``L2()``, ``MSE()``, ``InfoNCE()``, or one of your own.
        through_target: train the model through the target embedding, too.
        schedule: ``constant``, ``warmup`` or ``cosine``.
        warmup: share of the run in which ``warmup`` rises.
        head: kind of the predictor head on the source, ``linear`` or ``mlp``; None for none.
    """

    head_name = "predictor_head"

    weight: float = DEFAULTS["lbd"]
    distance: Distance = field(default_factory=Cosine)
    through_target: bool = True
    schedule: str = "constant"
    warmup: float = DEFAULTS["lbd_warmup"]
    head: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.distance, type) or not callable(self.distance):
            got = f"the class {self.distance.__name__}" if isinstance(self.distance, type) else repr(self.distance)
            raise TypeError(f"distance: expected one such as InfoNCE(), got {got}; write Alignment(0.1, InfoNCE())")
        if not isinstance(getattr(self.distance, "compares_pairs", None), bool):
            name = getattr(self.distance, "__name__", type(self.distance).__name__)
            raise ValueError(
                f"distance: expected '{name}' to have the attribute 'compares_pairs', True (the loss of a pair depends "
                "on the other pairs, as in contrastive losses) or False; set it, on a function, too"
            )

    @property
    def compares_pairs(self) -> bool:  # type: ignore[override]  # depends on a setting here
        return self.distance.compares_pairs

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        source, target = encoded.pairs
        if not self.through_target:
            target = target.detach()
        if _is_contrastive(self.distance):
            candidates, first = context.gather(target)
            if _excludes_equal(self.distance):
                return self.distance(source, candidates, first, equal_partners(batch.pair_keys, context))
            return self.distance(source, candidates, first)
        return self.distance(source, target)

    def weight_at(self, progress: float | None) -> float:
        if progress is None or self.schedule == "constant":
            return self.weight
        if self.schedule == "warmup":
            return self.weight * min(1.0, progress / self.warmup)
        return self.weight * 0.5 * (1 + math.cos(math.pi * progress))

    @property
    def logged_weight(self) -> str | None:
        return None if self.schedule == "constant" else "lbd"

    def modules(self, config: PreTrainedConfig) -> nn.Module | None:
        return None if self.head is None else PredictorHead(self.head, int(config.hidden_size))


@dataclass
class Regularizer(_OfPairs):
    """A term against collapse, on the embeddings of a micro-batch of all processes; 0 for fewer than two pairs.

    The values of both sides, source and target, are summed, or averaged for SIGReg, as in their papers.
    """

    compares_pairs = True

    def value(self, embeddings: Tensor, context: Context) -> Tensor:
        """Compute the penalty on one side's embeddings ``[P, D]``, a float32 scalar."""
        values = embeddings.float()
        with without_autocast(values):
            return self._penalty(values, context) if len(values) > 1 else values.sum() * 0

    @abstractmethod
    def _penalty(self, values: Tensor, context: Context) -> Tensor: ...

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        source, target = (self.value(context.gather(side)[0], context) for side in encoded.pairs)
        # Each process weighs the value by its own pairs, so that all processes together count every pair once.
        return (source + target) * batch.pairs


@term("sigreg_loss", "SIGReg")
@dataclass
class SIGReg(Regularizer):
    """Sketched isotropic Gaussian regularisation (LeJEPA, arXiv 2511.08544).

    Projects on random directions and averages the Epps-Pulley statistic of each projection, the distance between its
    characteristic function and that of the standard normal distribution:
    ``N * integral |mean exp(itx) - exp(-t^2/2)|^2 exp(-t^2/2) dt`` over -3 to 3, by the trapezoidal rule at 33 points.

    Attributes:
        weight: of the mean in the objective.
        directions: M, their number; drawn at every step from seed and step alone, so that every process draws the same.
    """

    weight: float = 0.05
    directions: int = 256

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        return super().__call__(encoded, batch, context) / 2

    def _penalty(self, values: Tensor, context: Context) -> Tensor:
        count, width = values.shape
        # Drawn on the CPU: other devices have other generators.
        generator = torch.Generator().manual_seed(context.seed * 1_000_003 + context.step)
        sketch = torch.randn((width, self.directions), generator=generator).to(values.device, non_blocking=True)
        projected = values @ F.normalize(sketch, dim=0)  # [P, M]
        # The integrand is even, so integrating over half the line is enough.
        t = torch.linspace(0, 3, 17, device=values.device)
        normal = torch.exp(-(t**2) / 2)
        angles = projected[:, :, None] * t  # [P, M, 17]
        difference = (angles.cos().mean(0) - normal) ** 2 + angles.sin().mean(0) ** 2  # [M, 17]
        return (2 * count * torch.trapezoid(difference * normal, t, dim=-1)).mean()


@term("variance_loss", "variance")
@dataclass
class Variance(Regularizer):
    """Hinge on the standard deviation of every dimension: ``mean_d max(0, 1 - sqrt(var_d + 1e-4))``.

    The variance term of VICReg (arXiv 2105.04906, eq. 1 and 2, with gamma 1).

    Attributes:
        weight: of the mean in the objective.
    """

    def _penalty(self, values: Tensor, context: Context) -> Tensor:
        return F.relu(1 - torch.sqrt(values.var(dim=0) + 1e-4)).mean()


@term("covariance_loss", "covariance")
@dataclass
class Covariance(Regularizer):
    """Squares of the covariances between different dimensions, summed and divided by D.

    The covariance term of VICReg (arXiv 2105.04906, eq. 3 and 4).

    Attributes:
        weight: of the mean in the objective.
    """

    def _penalty(self, values: Tensor, context: Context) -> Tensor:
        count, width = values.shape
        centred = values - values.mean(0)
        # The squares of all D x D entries, from the smaller of two products: |Z'Z|^2 = |ZZ'|^2.
        products = centred @ centred.T if width > count else centred.T @ centred
        variances = centred.square().sum(0).square().sum()
        return (products.square().sum() - variances) / (count - 1) ** 2 / width

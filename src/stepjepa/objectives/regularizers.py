"""Terms that act on one set of embeddings, against collapse: SIGReg, and VICReg's variance and covariance.

Each acts on all source and on all target embeddings of a micro-batch, over all processes; the values are added up, or
averaged for SIGReg, as their papers do. All of them need several embeddings to say anything: for less than two they are
0.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stepjepa.objectives.term import Context, Term, term

if TYPE_CHECKING:
    from stepjepa.batch.collate import Batch
    from stepjepa.models.encode import Encoded


@dataclass
class Regularizer(Term):
    """A term on the embeddings of both sides."""

    of_pairs = True

    @property
    def compares_pairs(self) -> bool:
        """All of them do."""
        return True

    def count(self, batch: Batch) -> int:
        """Pairs."""
        return batch.pairs

    @abstractmethod
    def value(self, embeddings: Tensor, context: Context) -> Tensor:
        """What is to be small, of one side's embeddings ``[P, D]``: a float32 scalar, 0 for less than two."""

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """The value of both sides, times this process's share of the pairs."""
        source, target = encoded.pairs
        sides = (self.value(context.gather(side)[0], context) for side in (source, target))
        # Each process brings in its own share of pairs, so that all together bring in one for every pair.
        return sum(sides, start=source.new_zeros((), dtype=torch.float32)) * len(source)


@term("sigreg_loss", "SIGReg")
@dataclass
class SIGReg(Regularizer):
    """Sketched isotropic Gaussian regularisation (LeJEPA, arXiv 2511.08544).

    Projects on random directions and averages the Epps-Pulley statistic of each projection, the distance between its
    characteristic function and that of the standard normal distribution:
    ``N * integral |mean exp(itx) - exp(-t^2/2)|^2 exp(-t^2/2) dt`` over -3 to 3, by the trapezoidal rule at 33 points.

    Attributes:
        directions: M, how many are drawn, anew at every step; by seed and step alone, so that every process draws the
            same.
    """

    weight: float = 0.05
    directions: int = 256

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """The mean of both sides, not their sum."""
        return super().__call__(encoded, batch, context) / 2

    def value(self, embeddings: Tensor, context: Context) -> Tensor:
        """The statistic, averaged over the directions."""
        values = embeddings.float()
        count, width = values.shape
        if count < 2:
            return values.sum() * 0
        # Drawn on the CPU: other devices have other generators.
        generator = torch.Generator().manual_seed(context.seed * 1_000_003 + context.step)
        sketch = torch.randn((width, self.directions), generator=generator).to(values.device)
        projected = values @ F.normalize(sketch, dim=0)  # [P, M]
        # The integrand is even, so half the line will do.
        t = torch.linspace(0, 3, 17, device=values.device)
        normal = torch.exp(-(t**2) / 2)
        angles = projected[:, :, None] * t  # [P, M, 17]
        apart = (angles.cos().mean(0) - normal) ** 2 + angles.sin().mean(0) ** 2  # [M, 17]
        return (2 * count * torch.trapezoid(apart * normal, t, dim=-1)).mean()


@term("variance_loss", "variance")
@dataclass
class Variance(Regularizer):
    """Hinge on the standard deviation of every dimension: ``mean_d max(0, 1 - sqrt(var_d + 1e-4))``.

    The variance term of VICReg (arXiv 2105.04906, eq. 1 and 2, with gamma 1).
    """

    def value(self, embeddings: Tensor, context: Context) -> Tensor:
        """See the class."""
        values = embeddings.float()
        if len(values) < 2:
            return values.sum() * 0
        return F.relu(1 - torch.sqrt(values.var(dim=0) + 1e-4)).mean()


@term("covariance_loss", "covariance")
@dataclass
class Covariance(Regularizer):
    """Squares of the covariances between different dimensions, summed and divided by D.

    The covariance term of VICReg (arXiv 2105.04906, eq. 3 and 4).
    """

    def value(self, embeddings: Tensor, context: Context) -> Tensor:
        """See the class."""
        values = embeddings.float()
        count, width = values.shape
        if count < 2:
            return values.sum() * 0
        centred = values - values.mean(0)
        # The squares of all D x D entries, from the smaller of two products: |Z'Z|^2 = |ZZ'|^2.
        products = centred @ centred.T if width > count else centred.T @ centred
        every = products.square().sum()
        own = centred.square().sum(0).square().sum()
        return (every - own) / (count - 1) ** 2 / width

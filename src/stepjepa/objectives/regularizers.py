"""Terms that act on one set of embeddings, against collapse: SIGReg, and VICReg's variance and covariance.

Each takes the embeddings of a batch and returns its value; the objective decides on what it acts and how batches are
averaged. All of them need several embeddings to say anything: for less than two they are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stepjepa.objectives.alignment import apart


class Regularizer(Protocol):
    """Embeddings ``[P, D]`` of a batch, and the number of the step, to a float32 scalar."""

    def __call__(self, embeddings: Tensor, step: int) -> Tensor: ...


@dataclass(frozen=True)
class SIGReg:
    """Sketched isotropic Gaussian regularisation (LeJEPA, arXiv 2511.08544).

    Projects on random directions and averages the Epps-Pulley statistic of each projection, the distance between its
    characteristic function and that of the standard normal distribution:
    ``N * integral |mean exp(itx) - exp(-t^2/2)|^2 exp(-t^2/2) dt`` over -3 to 3, by the trapezoidal rule at 33 points.

    Args:
        directions: M, how many are drawn, anew at every step.
        seed: of the directions; they depend on it and on the step alone, so that every process draws the same.
    """

    directions: int = 256
    seed: int = 42

    def __call__(self, embeddings: Tensor, step: int) -> Tensor:
        values = embeddings.float()
        count, width = values.shape
        if count < 2:
            return values.sum() * 0
        # Drawn on the CPU: other devices have other generators.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        sketch = torch.randn((width, self.directions), generator=generator).to(values.device)
        projected = values @ F.normalize(sketch, dim=0)  # [P, M]
        # The integrand is even, so half the line will do.
        t = torch.linspace(0, 3, 17, device=values.device)
        normal = torch.exp(-(t**2) / 2)
        angles = projected[:, :, None] * t  # [P, M, 17]
        apart = (angles.cos().mean(0) - normal) ** 2 + angles.sin().mean(0) ** 2  # [M, 17]
        return (2 * count * torch.trapezoid(apart * normal, t, dim=-1)).mean()


@dataclass(frozen=True)
class Variance:
    """Hinge on the standard deviation of every dimension: ``mean_d max(0, 1 - sqrt(var_d + 1e-4))``.

    The variance term of VICReg (arXiv 2105.04906, eq. 1 and 2, with gamma 1).
    """

    def __call__(self, embeddings: Tensor, step: int = 0) -> Tensor:
        del step
        values = embeddings.float()
        if len(values) < 2:
            return values.sum() * 0
        return F.relu(1 - torch.sqrt(values.var(dim=0) + 1e-4)).mean()


@dataclass(frozen=True)
class Covariance:
    """Squares of the covariances between different dimensions, summed and divided by D.

    The covariance term of VICReg (arXiv 2105.04906, eq. 3 and 4).
    """

    def __call__(self, embeddings: Tensor, step: int = 0) -> Tensor:
        del step
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


def tube(triples: Tensor) -> Tensor:
    """Semantic Tube Prediction (arXiv 2602.22617): ``1 - cos(h_t - h_r, h_r - h_s)``, summed over the triples.

    It is 0 where hidden states move on a straight line, and where two of the three are one and the same.

    Args:
        triples: ``[S, 3, D]``, hidden states at places s < r < t of a row.

    Returns:
        A float32 scalar; 0 for no triples.
    """
    first, second, third = triples.float().unbind(dim=1)
    return apart(third - second, second - first).sum()

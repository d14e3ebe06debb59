"""Cosines of embeddings, exact where an embedding has no direction.

A vector of length 0 has no direction and no cosine. A pair with such a vector adds exactly 0 to a loss that compares
directions, and gets exactly 0 as its gradient.
"""

import torch
from torch import Tensor

SHORTEST = 1e-8
"""Length up to which a vector has no direction; the gradient of its direction grows with the inverse of its length."""


def unit_vectors(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Divide vectors ``[..., D]`` by their lengths, in float32.

    Returns the unit vectors, and a mask ``[...]`` of the vectors that have a direction. The others become zeros, with
    gradients of zero.
    """
    values = vectors.float()
    lengths = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    # Not `lengths > SHORTEST`: a length of NaN must stay NaN.
    short = lengths <= SHORTEST
    # Masked before the division: masked after it, the gradient would be 0 * inf.
    return values.masked_fill(short, 0) / lengths.masked_fill(short, 1), ~short[..., 0]


def cosine_distance(first: Tensor, second: Tensor) -> Tensor:
    """Compute ``1 - cos`` of two vectors.

    Args:
        first: ``[..., D]``.
        second: ``[..., D]``.

    Returns:
        ``[...]`` float32: exactly 0, without a gradient, where one of the two has no direction.
    """
    (first, first_valid), (second, second_valid) = unit_vectors(first), unit_vectors(second)
    return (1 - (first * second).sum(-1)).masked_fill(~(first_valid & second_valid), 0)

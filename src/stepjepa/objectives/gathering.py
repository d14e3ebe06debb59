"""Embeddings of all processes as one batch, with gradients: what a loss needs that compares the pairs of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Gather(torch.autograd.Function):
    """Concatenate the rows of all processes; the gradient of each process's rows is summed over all processes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        width = rows.shape[1]
        most = max(counts)
        padded = rows.new_zeros((most, width))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient)
        start = sum(ctx.counts[: dist.get_rank()])
        return gradient[start : start + ctx.counts[dist.get_rank()]], None


def gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """The rows of all processes, in the order of their ranks.

    Every process must call it, also with no rows.

    Args:
        rows: ``[P, D]`` of this process; P may differ from process to process.

    Returns:
        ``[P of all, D]``, through which gradients flow back to where each row came from, and the index in it of this
        process's first row.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows, 0
    mine = torch.tensor([len(rows)], device=rows.device)
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    counts = [int(count) for count in torch.cat(found).tolist()]
    if not sum(counts):
        return rows, 0
    gathered: Tensor = _Gather.apply(rows, counts)
    return gathered, sum(counts[: dist.get_rank()])

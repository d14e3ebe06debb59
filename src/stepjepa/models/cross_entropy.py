"""Exact cross-entropy of next tokens, in chunks, without the logits of a whole batch.

With a vocabulary of 128,000 tokens the logits of a batch, their softmax and their gradient take more memory than
everything else. Here they exist for one chunk of states at a time: the gradients of a chunk are computed while its
logits exist, so that nothing is computed twice. A state with several labels goes through the head once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Head = tuple[Tensor, Tensor | None]
"""Weight and bias of a linear layer."""

ReplacedRows = tuple[Tensor, Tensor]
"""Token ids ``[K]``, and rows ``[K, D]`` that replace those of a weight; see ``trained_rows.TrainedRows``."""

# Minimum number of logits in a chunk: matrix products of few rows are slow.
FEWEST_LOGITS = 2**20
# The minimum on a GPU, where every chunk costs some dozen launches and one more pass over the gradient of the weight.
# On an H100 2**27 logits take three quarters of the time of 3 * 2**24, and 2**28 hardly less (docs/performance.md).
FEWEST_GPU_LOGITS = 2**27


def summed_cross_entropy(
    states: Tensor,
    head: Head,
    label_ids: Tensor,
    rows: Tensor,
    chunk: int | None = None,
    *,
    trained: ReplacedRows | None = None,
) -> Tensor:
    """Compute ``cross_entropy(linear(states, *head)[rows], label_ids, reduction="sum")`` in float32, in chunks.

    Args:
        states: ``[U, D]``.
        head: weight ``[V, D]`` and bias ``[V]``, or None, of the LM head.
        label_ids: ``[N]``.
        rows: ``[N]``, the index of the state that predicts each label.
        chunk: number of states at a time; by default :func:`states_at_once`.
        trained: rows that replace those of the head's weight; None for none.

    Returns:
        The sum, a float32 scalar, which can be differentiated once.
    """
    if chunk is None:
        chunk = states_at_once(*head[0].shape, on_gpu=states.is_cuda)
    trained_ids, trained_values = (None, None) if trained is None else trained
    # Those with a gradient come first.
    arguments = states, *head, trained_values, trained_ids, label_ids, rows, chunk, torch.is_grad_enabled()
    total: Tensor = _SummedCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]  # torch does not type it
    return total


def states_at_once(vocabulary: int, width: int, *, on_gpu: bool) -> int:
    """Return the number of states in a chunk: ``D / 4``, so that its logits are small compared with the head's weight.

    It is larger if a chunk would have less than ``FEWEST_LOGITS`` logits, or ``FEWEST_GPU_LOGITS`` on a GPU.

    Args:
        vocabulary: V, the number of logits of a state.
        width: D.
        on_gpu: the states are on a GPU.
    """
    return max(width // 4, (FEWEST_GPU_LOGITS if on_gpu else FEWEST_LOGITS) // vocabulary, 1)


class _HeadParameters(NamedTuple):
    """The parameters of an LM head, in the dtype in which it multiplies."""

    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    trained: ReplacedRows | None  # rows that replace those of the weight

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits ``[C, V]`` of states ``[C, D]``, in float32."""
        logits = F.linear(states, self.weight, self.bias)
        if self.trained is not None:
            ids, values = self.trained
            logits.index_copy_(1, ids, F.linear(states, values))
        # One launch. Not by log_softmax's argument `dtype`, for which bfloat16 is copied while the logits are there.
        return logits.float()


class _Gradients:
    """The gradients of the summed loss, added up chunk by chunk; None for arguments that need none.

    Args:
        head: the parameters of the LM head.
        states: ``[U, D]`` all states, in the same dtype.
        needed: whether states, weight, bias and trained rows need a gradient, in this order.
        dtype: in which the gradient of the weight is added up.
    """

    def __init__(self, head: _HeadParameters, states: Tensor, needed: Sequence[bool], dtype: torch.dtype) -> None:
        of_states, of_weight, of_bias, of_trained = needed
        self._head, weight = head, head.weight
        self.states = torch.empty_like(states) if of_states else None
        self.weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if of_weight else None
        self.bias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if of_bias else None
        self.trained: Tensor | None = None
        if of_trained and head.trained is not None:
            self.trained = torch.zeros_like(head.trained[1], dtype=torch.float32)

    def add(self, errors: Tensor, states: Tensor, part: slice) -> None:
        """Add the gradients of a chunk, all but that of the bias.

        Args:
            errors: ``[C, V]`` gradient of the chunk's logits, in the dtype of products; may be overwritten.
            states: ``[C, D]`` the chunk's states.
            part: the chunk among all states.
        """
        of_trained: tuple[Tensor, Tensor] | None = None  # errors [C, K] of the trained rows, and the rows
        if self._head.trained is not None:
            ids, values = self._head.trained
            of_trained = errors[:, ids], values
            # The frozen rows in their places have no part in the logits.
            errors.index_fill_(1, ids, 0)
            if self.trained is not None:
                self.trained += of_trained[0].T @ states
        if self.states is not None:
            torch.mm(errors, self._head.weight, out=self.states[part])
            if of_trained is not None:
                torch.addmm(self.states[part], *of_trained, out=self.states[part])
        if self.weight is not None and self.weight.dtype == errors.dtype:
            # torch's FLOP counter knows addmm, but not addmm_.
            torch.addmm(self.weight, errors.T, states, out=self.weight)
        elif self.weight is not None:
            self.weight += errors.T @ states


class _SummedCrossEntropy(torch.autograd.Function):
    """Computes the gradients of the sum in the forward pass; the backward pass scales them by the upstream gradient."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, trained_values: Tensor | None, *constants: Any
    ) -> Tensor:
        """Compute the sum; arguments are those of :func:`summed_cross_entropy`, those with a gradient first."""
        trained_ids, label_ids, rows, chunk, differentiate = constants
        needed = [differentiate and is_needed for is_needed in ctx.needs_input_grad[:4]]
        dtype = multiplies_in(states)
        # Not bincount: its result has a shape that depends on values, which a dry run does not have.
        ones = torch.ones_like(rows, dtype=torch.float32)
        labels_of_state = ones.new_zeros(len(states)).index_add_(0, rows, ones)[:, None]
        with torch.autocast(states.device.type, enabled=False):
            values, total = states.to(dtype), states.new_zeros((), dtype=torch.float32)
            trained = None if trained_values is None else (trained_ids, trained_values.to(dtype))
            head = _HeadParameters(weight.to(dtype), None if bias is None else bias.to(dtype), trained)
            # In 16 bits the contributions of later chunks would be rounded away.
            gradients = _Gradients(head, values, needed, torch.float32 if len(states) > chunk else dtype)
            for start in range(0, len(states), chunk):
                part = slice(start, start + chunk)
                log_shares = head.logits(values[part]).log_softmax(-1)
                # Mask the labels of other chunks: selecting the chunk's own would need a device synchronisation.
                place = (rows - start).clamp(0, len(log_shares) - 1) * log_shares.shape[1] + label_ids
                in_chunk = (rows >= start) & (rows < start + chunk)
                # masked_fill, not a product: the loss of another chunk's label may be infinite here.
                total -= log_shares.view(-1)[place].masked_fill(~in_chunk, 0).sum()
                if not any(needed):
                    continue
                # d loss / d logits = number of labels * softmax - the sum of their one-hot vectors, in the same memory.
                errors = log_shares.exp_().mul_(labels_of_state[part])
                # Not index_put_ with accumulate, which sorts the places on a GPU.
                errors.view(-1).scatter_add_(0, place, -in_chunk.float())
                del log_shares
                if gradients.bias is not None:
                    gradients.bias += errors.sum(0)
                # Bound to the same name, so that of two copies only one exists while gradients are added.
                errors = errors.to(dtype)
                gradients.add(errors, values[part], part)
                del errors
        results = (gradients.states, gradients.weight, gradients.bias, gradients.trained)
        ctx.gradients = [
            None if gradient is None or argument is None else gradient.to(argument.dtype)
            for gradient, argument in zip(results, (states, weight, bias, trained_values), strict=True)
        ]
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("expected one backward pass through the LM loss, got a second one")
        if torch.is_grad_enabled():
            # The gradients were computed without a graph: a penalty on them would have no gradient, silently.
            raise RuntimeError("create_graph: the LM loss has no second derivative; compute it from Encoded.logits")
        # In place: one of the gradients is as large as the head's weight.
        scaled = [None if gradient is None else gradient.mul_(upstream[0]) for gradient in gradients]
        return (*scaled, *[None] * 5)  # none for the five constants


def multiplies_in(states: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer multiplies these states: that of autocast, or their own."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype

"""Next-token prediction without the logits of a whole batch: LM head and cross-entropy in chunks, exact.

With a vocabulary of 128,000 the logits of a batch, their softmax and their gradient take more memory than everything
else. Here they exist for some rows at a time: the gradients of a chunk are taken while its logits are there, so that
nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEWEST_LOGITS = 2**20
"""A chunk is not cut smaller than this many logits: products of few rows are slow."""

# Causal model -> whether its logits are what its head gives, unchanged.
_plain: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def summed_cross_entropy(states: Tensor, head: nn.Linear, label_ids: Tensor, chunk: int | None = None) -> Tensor:
    """``cross_entropy(head(states), label_ids, reduction="sum")`` in single precision, in chunks of rows.

    Args:
        states: ``[N, D]``, hidden states at the labelled positions.
        head: the LM head, ``[V, D]``; its gradient is taken if it is trained.
        label_ids: ``[N]`` int64, the tokens to be predicted.
        chunk: rows of a chunk; None takes a quarter of D, so that a chunk of logits is small beside the head's weight,
            but at least ``FEWEST_LOGITS`` logits.

    Returns:
        A float32 scalar. It can be differentiated once.
    """
    if chunk is None:
        vocabulary, width = head.weight.shape
        chunk = max(width // 4, FEWEST_LOGITS // vocabulary, 1)
    found: Tensor = _SummedCrossEntropy.apply(
        states, head.weight, head.bias, _Labels(label_ids, chunk, torch.is_grad_enabled())
    )
    return found


class _Labels(NamedTuple):
    ids: Tensor
    chunk: int
    differentiate: bool


class _SummedCrossEntropy(torch.autograd.Function):
    """The gradients of the sum are taken in the forward pass, and multiplied by what comes back."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, labels: _Labels) -> Tensor:
        wanted = [labels.differentiate and needed for needed in ctx.needs_input_grad[:3]]
        device = states.device.type
        dtype = multiplies_in(states)
        several = len(states) > labels.chunk
        with torch.autocast(device, enabled=False):
            values, matrix = states.to(dtype), weight.to(dtype)
            total = states.new_zeros((), dtype=torch.float32)
            # 16 bits would swallow what the later chunks add.
            summed = torch.float32 if several else dtype
            by_state = torch.empty_like(values) if wanted[0] else None
            by_weight = torch.zeros(weight.shape, dtype=summed, device=weight.device) if wanted[1] else None
            by_bias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if wanted[2] else None
            for start in range(0, len(values), labels.chunk):
                rows = slice(start, start + labels.chunk)
                logits = F.linear(values[rows], matrix, None if bias is None else bias.to(dtype)).float()
                ids = labels.ids[rows, None]
                norms = logits.logsumexp(-1, keepdim=True)
                total += (norms - logits.gather(1, ids)).sum()
                if not any(wanted):
                    continue
                # d loss / d logits = softmax - one-hot, in the memory of the logits.
                errors = logits.sub_(norms).exp_().scatter_add_(1, ids, torch.full_like(norms, -1.0))
                if by_bias is not None:
                    by_bias += errors.sum(0)
                errors = errors.to(dtype)
                if by_state is not None:
                    torch.mm(errors, matrix, out=by_state[rows])
                if by_weight is not None and summed == dtype:
                    # Unlike addmm_, torch's FLOP counter knows this one.
                    torch.addmm(by_weight, errors.T, values[rows], out=by_weight)
                elif by_weight is not None:
                    by_weight += errors.T @ values[rows]
                del logits, errors
        ctx.gradients = [
            None if gradient is None else gradient.to(like.dtype)
            for gradient, like in ((by_state, states), (by_weight, weight), (by_bias, weight if bias is None else bias))
        ]
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("expected one backward pass through the LM loss, got a second one")
        # In place: one of them is as large as the head's weight.
        return (*(None if gradient is None else gradient.mul_(upstream[0]) for gradient in gradients), None)


def multiplies_in(states: Tensor) -> torch.dtype:
    """The dtype of a linear layer's product here, under autocast or not."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def plain_head(model: nn.Module) -> nn.Linear | None:
    """The LM head of a model whose loss can be computed in chunks; None if it must be left to the model.

    That it is a linear layer, not an adapter's or a quantized one, and that the model gives out the very tensor that
    the layer made: some scale or cap their logits afterwards. Found by a pass of one token, once for each model.

    Args:
        model: a causal language model, possibly wrapped.
    """
    causal = model
    while not hasattr(causal, "get_output_embeddings") and isinstance(getattr(causal, "module", None), nn.Module):
        causal = causal.module  # type: ignore[assignment]  # checked on the line above
    head = causal.get_output_embeddings()  # type: ignore[operator]  # a method of every PreTrainedModel
    if type(head) is not nn.Linear:
        return None
    if causal not in _plain:
        _plain[causal] = _gives_out_its_logits(causal, head)
    return head if _plain[causal] else None


def _gives_out_its_logits(model: nn.Module, head: nn.Linear) -> bool:
    made: list[Tensor] = []
    handle = head.register_forward_hook(lambda _module, _args, output: made.append(output))
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            ids = torch.zeros((1, 1), dtype=torch.long, device=next(model.parameters()).device)
            given = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    finally:
        handle.remove()
        for module, mode in modes:
            module.training = mode
    return len(made) == 1 and given is made[0]


class ChunkedLoss:
    """A hook on the LM head: a pass through it leaves its hidden states here and gives no logits; the last one computes
    the loss of all. On the head itself, so that whoever shards its weight has brought it together.

    Args:
        head: of :func:`plain_head`; None leaves everything to the model.
        label_ids: of each pass to come, ``[N]``; the head is called with ``[1, N, D]``.

    Attributes:
        loss: summed over all passes, once they have been; None if the model is left to it.
    """

    def __init__(self, head: nn.Linear | None, label_ids: Sequence[Tensor]) -> None:
        self._head = head
        self._label_ids = label_ids
        self._states: list[Tensor] = []
        self.loss: Tensor | None = None

    @property
    def took_over(self) -> bool:
        """Whether the last pass gave no logits."""
        return bool(self._states)

    def __call__(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Called before the head."""
        assert self._head is not None
        if multiplies_in(args[0]) == torch.float16:
            # Its small gradients live on the scale that comes back with the loss.
            return None
        self._states.append(args[0][0])
        if len(self._states) == len(self._label_ids):
            self.loss = summed_cross_entropy(torch.cat(self._states), self._head, torch.cat([*self._label_ids]))
        return (args[0][:, :0],)


@contextmanager
def chunked_loss(head: nn.Linear | None, label_ids: Sequence[Tensor]) -> Iterator[ChunkedLoss]:
    """Take the loss in chunks in the passes inside the block; arguments as of :class:`ChunkedLoss`."""
    chunked = ChunkedLoss(head, label_ids)
    handle = None if head is None else head.register_forward_pre_hook(chunked)
    try:
        yield chunked
    finally:
        if handle is not None:
            handle.remove()

"""Next-token prediction without the logits of a whole batch: LM head and exact cross-entropy in chunks.

With a vocabulary of 128,000 tokens the logits of a batch, their softmax and their gradient take more memory than
everything else. Here they exist for one chunk of states at a time: the gradients of a chunk are computed while its
logits exist, so that nothing is computed twice. A state at which several labels are read goes through the head once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from stepjepa.models.architecture import base_model, causal_model, find_decoder

Head = tuple[Tensor, Tensor | None]
"""Weight and bias of a linear layer."""

# Minimum number of logits in a chunk: matrix products of few rows are slow.
FEWEST_LOGITS = 2**20

# Causal model -> whether its logits are the unchanged output of its LM head.
_plain: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def summed_cross_entropy(
    states: Tensor, head: Head, label_ids: Tensor, rows: Tensor, chunk: int | None = None
) -> Tensor:
    """``cross_entropy(linear(states, *head)[rows], label_ids, reduction="sum")`` in float32, in chunks of states.

    States ``[U, D]``, head ``[V, D]`` with a bias ``[V]``, labels ``[N]``, and ``rows`` ``[N]``, the state at which
    each label is read.
    The default ``chunk`` is a quarter of D states, so that a chunk of logits is small beside the head's weight, but at
    least ``FEWEST_LOGITS`` logits. The sum, a float32 scalar, can be differentiated once.
    """
    if chunk is None:
        vocabulary, width = head[0].shape
        chunk = max(width // 4, FEWEST_LOGITS // vocabulary, 1)
    given = states, *head, label_ids, rows, chunk, torch.is_grad_enabled()
    found: Tensor = _SummedCrossEntropy.apply(*given)
    return found


class _SummedCrossEntropy(torch.autograd.Function):
    """Computes the gradients of the sum in the forward pass; the backward pass scales them by the upstream gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, *labels: Any) -> Tensor:
        label_ids, rows, chunk, differentiate = labels
        wanted = [differentiate and needed for needed in ctx.needs_input_grad[:3]]
        dtype = multiplies_in(states)
        # Not bincount: the shape of its result depends on values, which a dry run does not have.
        ones = torch.ones_like(rows, dtype=torch.float32)
        shared = ones.new_zeros(len(states)).index_add_(0, rows, ones)[:, None]
        with torch.autocast(states.device.type, enabled=False):
            values, matrix = states.to(dtype), weight.to(dtype)
            total = states.new_zeros((), dtype=torch.float32)
            # In 16 bits the contributions of later chunks would be rounded away.
            summed = torch.float32 if len(states) > chunk else dtype
            by_state = torch.empty_like(values) if wanted[0] else None
            by_weight = torch.zeros(weight.shape, dtype=summed, device=weight.device) if wanted[1] else None
            by_bias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if wanted[2] else None
            for start in range(0, len(states), chunk):
                part = slice(start, start + chunk)
                logits = F.linear(values[part], matrix, None if bias is None else bias.to(dtype)).float()
                # Mask the labels of other chunks: selecting the chunk's own would need a device synchronisation.
                place = (rows - start).clamp(0, len(logits) - 1), label_ids
                own = (rows >= start) & (rows < start + chunk)
                norms = logits.logsumexp(-1, keepdim=True)
                # masked_fill, not a product: the loss of another chunk's label may be infinite here.
                total += (norms[place[0], 0] - logits[place]).masked_fill(~own, 0).sum()
                if not any(wanted):
                    continue
                # d loss / d logits = number of labels * softmax - their one-hot vectors, in the memory of the logits.
                errors = logits.sub_(norms).exp_().mul_(shared[part])
                errors.index_put_(place, -own.float(), accumulate=True)
                if by_bias is not None:
                    by_bias += errors.sum(0)
                errors = errors.to(dtype)
                if by_state is not None:
                    torch.mm(errors, matrix, out=by_state[part])
                if by_weight is not None and summed == dtype:
                    # torch's FLOP counter knows addmm, but not addmm_.
                    torch.addmm(by_weight, errors.T, values[part], out=by_weight)
                elif by_weight is not None:
                    by_weight += errors.T @ values[part]
                del logits, errors
        dtypes = states.dtype, weight.dtype, (weight if bias is None else bias).dtype
        found = zip((by_state, by_weight, by_bias), dtypes, strict=True)
        ctx.gradients = [None if gradient is None else gradient.to(own) for gradient, own in found]
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("expected one backward pass through the LM loss, got a second one")
        # In place: one of the gradients is as large as the head's weight.
        return (*(None if gradient is None else gradient.mul_(upstream[0]) for gradient in gradients), *[None] * 4)


def multiplies_in(states: Tensor) -> torch.dtype:
    """The dtype in which a linear layer multiplies these states: autocast's, or their own."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


class _Decoded(BaseModelOutputWithPast):
    """The output of a decoder that was not run: whatever a model's own forward pass reads but the states is None."""

    def __getattr__(self, name: str) -> None:
        return None


class LMHead:
    """The LM head of a causal language model, including the model's own scaling and capping of logits.

    Use it inside the model's forward pass, where sharded weights are gathered; see ``encode.encode``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._causal = causal_model(model)
        self.module: nn.Module = self._causal.get_output_embeddings()
        if self._causal not in _plain:
            _plain[self._causal] = _gives_out_its_logits(self._causal, self.module)
        self.is_plain = _plain[self._causal]

    def logits(self, states: Tensor) -> Tensor:
        """``[..., D]`` hidden states to ``[..., V]`` logits."""
        flat = states.reshape(1, -1, states.shape[-1])
        found: Tensor = self.module.forward(flat) if self.is_plain else self._by_the_model(flat)
        return found.reshape(*states.shape[:-1], found.shape[-1])

    def cross_entropy(self, states: Tensor, label_ids: Tensor, rows: Tensor | None = None) -> Tensor:
        """Summed cross-entropy of labels ``[N]``, a float32 scalar; ``rows`` as in :func:`summed_cross_entropy`."""
        if rows is None:
            rows = torch.arange(len(label_ids), device=label_ids.device)
        # In float16 small gradients underflow unless scaled, and the loss scale arrives only in the backward pass.
        half = multiplies_in(states) == torch.float16
        parameters = None if half or not self.is_plain else self._parameters()
        if parameters is not None:
            return summed_cross_entropy(states, parameters, label_ids, rows)
        logits = self.logits(states).float()
        return (logits.logsumexp(-1)[rows] - logits[rows, label_ids]).sum()

    def _parameters(self) -> Head | None:
        """Weight and bias of the head; None where it is more than a linear layer."""
        if type(self.module) is nn.Linear:
            return self.module.weight, self.module.bias
        # PEFT's wrapper of a head that is tied to embeddings of which some rows are trained.
        adapter: Any = getattr(self.module, "token_adapter", None)
        base = None if adapter is None else adapter.get_base_layer()
        if type(base) is not nn.Linear or adapter.disable_adapters or adapter.merged:
            return None
        return adapter.get_merged_weights(adapter.active_adapters), base.bias

    def _by_the_model(self, states: Tensor) -> Tensor:
        """Logits from the model's own forward pass, with its decoder replaced by the given hidden states."""
        base = base_model(self._causal)
        stand_in = {"forward": lambda *_, **__: _Decoded(last_hidden_state=states)}
        ids = torch.zeros((1, states.shape[1]), dtype=torch.long, device=states.device)
        with (
            _replaced(find_decoder(base), **stand_in, _forward_hooks={}),
            _replaced(self.module, _forward_pre_hooks={}),
        ):
            found: Tensor = base.forward(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        return found


@contextmanager
def _replaced(module: nn.Module, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a module inside the block."""
    own = {name: module.__dict__[name] for name in attributes if name in module.__dict__}
    module.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del module.__dict__[name]
        module.__dict__.update(own)


def _gives_out_its_logits(model: nn.Module, head: nn.Module) -> bool:
    """Whether a model neither scales nor caps its head's output, by a pass of one token."""
    made: list[Tensor] = []
    handle = head.register_forward_hook(lambda _module, _args, output: made.append(output))
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            ids = torch.zeros((1, 1), dtype=torch.long, device=next(model.parameters()).device)
            given = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    finally:
        handle.remove()
        for module, mode in modes:
            module.training = mode
    if len(made) != 1:
        return False
    # Wrappers for mixed precision convert the output to float32.
    return given is made[0] or (given.dtype != made[0].dtype and torch.equal(given, made[0].to(given.dtype)))

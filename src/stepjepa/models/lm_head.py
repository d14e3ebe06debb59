"""Next-token prediction without the logits of a whole batch: LM head and exact cross-entropy in chunks.

With a vocabulary of 128,000 tokens the logits of a batch, their softmax and their gradient take more memory than
everything else. Here they exist for one chunk of states at a time: the gradients of a chunk are computed while its
logits exist, so that nothing is computed twice. A state with several labels goes through the head once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from stepjepa.models.architecture import base_model, causal_model, find_decoder
from stepjepa.models.trained_rows import TrainedRows, trained_rows

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

Head = tuple[Tensor, Tensor | None]
"""Weight and bias of a linear layer."""

# Minimum number of logits in a chunk: matrix products of few rows are slow.
FEWEST_LOGITS = 2**20
# The minimum on a GPU, where every chunk costs some dozen launches and one more pass over the gradient of the weight.
# On an H100 2**27 logits take three quarters of the time of 3 * 2**24, twice as many hardly less (docs/performance.md).
FEWEST_GPU_LOGITS = 2**27


def summed_cross_entropy(
    states: Tensor,
    head: Head,
    label_ids: Tensor,
    rows: Tensor,
    chunk: int | None = None,
    *,
    trained: TrainedRows | None = None,
) -> Tensor:
    """Compute ``cross_entropy(linear(states, *head)[rows], label_ids, reduction="sum")`` in float32, in chunks.

    Args:
        states: ``[U, D]``.
        head: weight ``[V, D]`` and bias ``[V]``, or None, of the LM head.
        label_ids: ``[N]``.
        rows: ``[N]``, the index of the state that predicts each label.
        chunk: number of states at a time; by default :func:`states_at_once`.
        trained: rows that replace those of the head's weight.

    Returns:
        The sum, a float32 scalar, which can be differentiated once.
    """
    if chunk is None:
        chunk = states_at_once(*head[0].shape, on_gpu=states.is_cuda)
    index, values = (None, None) if trained is None else trained
    arguments = states, *head, values, index, label_ids, rows, chunk, torch.is_grad_enabled()
    total: Tensor = _SummedCrossEntropy.apply(*arguments)
    return total


def states_at_once(vocabulary: int, width: int, *, on_gpu: bool) -> int:
    """Return the number of states in a chunk: ``D / 4``, so that its logits are small beside the head's weight.

    It is raised where a chunk would have less than ``FEWEST_LOGITS`` logits, or ``FEWEST_GPU_LOGITS`` on a GPU.
    """
    return max(width // 4, (FEWEST_GPU_LOGITS if on_gpu else FEWEST_LOGITS) // vocabulary, 1)


class _SummedCrossEntropy(torch.autograd.Function):
    """Computes the gradients of the sum in the forward pass; the backward pass scales them by the upstream gradient."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, trained: Tensor | None, *labels: Any
    ) -> Tensor:
        trained_index, label_ids, rows, chunk, differentiate = labels
        needs_grad = [differentiate and needed for needed in ctx.needs_input_grad[:4]]
        dtype = multiplies_in(states)
        # Not bincount: its result has a shape that depends on values, which a dry run does not have.
        ones = torch.ones_like(rows, dtype=torch.float32)
        shared = ones.new_zeros(len(states)).index_add_(0, rows, ones)[:, None]
        with torch.autocast(states.device.type, enabled=False):
            values, matrix = states.to(dtype), weight.to(dtype)
            total = states.new_zeros((), dtype=torch.float32)
            # In 16 bits the contributions of later chunks would be rounded away.
            summed = torch.float32 if len(states) > chunk else dtype
            by_state = torch.empty_like(values) if needs_grad[0] else None
            by_weight = torch.zeros(weight.shape, dtype=summed, device=weight.device) if needs_grad[1] else None
            by_bias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if needs_grad[2] else None
            own_rows = None if trained is None else trained.to(dtype)
            by_trained = (
                None if trained is None or not needs_grad[3] else torch.zeros_like(trained, dtype=torch.float32)
            )
            for start in range(0, len(states), chunk):
                part = slice(start, start + chunk)
                logits = F.linear(values[part], matrix, None if bias is None else bias.to(dtype))
                if own_rows is not None:
                    logits.index_copy_(1, trained_index, F.linear(values[part], own_rows))
                # One launch. Not with its argument `dtype`, for which bfloat16 is copied while the logits are there.
                logits = logits.float()
                log_shares = logits.log_softmax(-1)
                del logits
                # Mask the labels of other chunks: selecting the chunk's own would need a device synchronisation.
                place = (rows - start).clamp(0, len(log_shares) - 1) * log_shares.shape[1] + label_ids
                in_chunk = (rows >= start) & (rows < start + chunk)
                # masked_fill, not a product: the loss of another chunk's label may be infinite here.
                total -= log_shares.view(-1)[place].masked_fill(~in_chunk, 0).sum()
                if not any(needs_grad):
                    continue
                # d loss / d logits = number of labels * softmax - the sum of their one-hot vectors, in the same memory.
                errors = log_shares.exp_().mul_(shared[part])
                # Not index_put_ with accumulate, which sorts the places on a GPU.
                errors.view(-1).scatter_add_(0, place, -in_chunk.float())
                del log_shares
                if by_bias is not None:
                    by_bias += errors.sum(0)
                errors = errors.to(dtype)
                if own_rows is not None:
                    of_trained = errors[:, trained_index]
                    errors.index_fill_(1, trained_index, 0)
                    if by_trained is not None:
                        by_trained += of_trained.T @ values[part]
                if by_state is not None:
                    torch.mm(errors, matrix, out=by_state[part])
                    if own_rows is not None:
                        torch.addmm(by_state[part], of_trained, own_rows, out=by_state[part])
                if by_weight is not None and summed == dtype:
                    # torch's FLOP counter knows addmm, but not addmm_.
                    torch.addmm(by_weight, errors.T, values[part], out=by_weight)
                elif by_weight is not None:
                    by_weight += errors.T @ values[part]
                del errors
        dtypes = [each.dtype if each is not None else None for each in (states, weight, bias, trained)]
        gradients = zip((by_state, by_weight, by_bias, by_trained), dtypes, strict=True)
        ctx.gradients = [None if gradient is None else gradient.to(dtype) for gradient, dtype in gradients]
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("expected one backward pass through the LM loss, got a second one")
        # In place: one of the gradients is as large as the head's weight.
        return (*(None if gradient is None else gradient.mul_(upstream[0]) for gradient in gradients), *[None] * 5)


def multiplies_in(states: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer multiplies these states: that of autocast, or their own."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


class _DecoderOutput(BaseModelOutputWithPast):
    """Stand-in for the output of a decoder that is not run: every attribute but last_hidden_state is None."""

    def __getattr__(self, name: str) -> None:
        return None


class Around(NamedTuple):
    """Whether a model's forward pass computes something before or after its LM head."""

    before: bool = False  # the LM head is called with something else than the decoder returned (MiniCPM3, BERT)
    after: bool = (
        False  # the logits are not what the LM head returned: they are scaled, capped or cut (Gemma-2, Cohere)
    )


# Causal model -> what lies around its LM head; determined once by a forward pass.
_around: WeakKeyDictionary[nn.Module, Around] = WeakKeyDictionary()


class LMHead:
    """The LM head of a causal language model, with all that the model computes between its decoder and its logits.

    Use it inside the model's forward pass, where sharded weights are gathered; see ``encode.encode``.

    The first instance for a model must be made before the model is wrapped or sharded (``setup.set_up`` does). It runs
    the model on a few tokens to test whether the LM head's input is the decoder's output, and whether its output are
    the logits. On the meta device, where no test is possible, both are assumed.

    Raises:
        ValueError: the model has no LM head, or does not call it exactly once, or its logits at a position depend on
            more than the decoder's state there, so that no LM loss at single positions would be the model's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._causal = causal_model(model)
        module = self._causal.get_output_embeddings()
        if module is None:
            raise ValueError(f"expected a causal language model with an LM head, got {_name(self._causal)} without one")
        self.module: nn.Module = module
        if self._causal not in _around:
            meta = next(self._causal.parameters()).device.type == "meta"
            _around[self._causal] = Around() if meta else _try(self, self._causal)
        self.around = _around[self._causal]

    def describe(self) -> str | None:
        """Describe what lies between decoder and LM head; None if the head reads the decoder's own states."""
        if not self.around.before:
            return None
        name = _name(self._causal)
        return f"{name} changes the decoder's states before its LM head reads them; its own code does so in the LM loss"

    def logits(self, states: Tensor) -> Tensor:
        """Map last hidden states ``[..., D]`` to logits ``[..., V]``."""
        flat = states.reshape(1, -1, states.shape[-1])
        logits: Tensor = self._run_model(flat) if any(self.around) else self.module.forward(flat)
        return logits.reshape(*states.shape[:-1], logits.shape[-1])

    def cross_entropy(self, states: Tensor, label_ids: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the summed cross-entropy of labels, a float32 scalar.

        Args:
            states: ``[U, D]`` last hidden states.
            label_ids: ``[N]`` tokens to be predicted.
            rows: ``[N]``, the index of the state that predicts each label; None for one label per state.
        """
        if rows is None:
            rows = torch.arange(len(label_ids), device=label_ids.device)
        # In float16 small gradients underflow unless scaled, and the loss scale arrives only in the backward pass.
        half = multiplies_in(states) == torch.float16
        parameters = None if half or self.around.after else self._parameters()
        if parameters is not None:
            return summed_cross_entropy(self.inputs(states), parameters, label_ids, rows, trained=self._trained_rows())
        logits = self.logits(states).float()
        return (logits.logsumexp(-1)[rows] - logits[rows, label_ids]).sum()

    def inputs(self, states: Tensor) -> Tensor:
        """Return the inputs ``[U, D]`` of the LM head for last hidden states ``[U, D]``."""
        if not self.around.before:
            return states
        inputs: list[Tensor] = []

        def catch(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            inputs.append(args[0])
            return (args[0][:, :0],)

        self._run_model(states[None], catch)
        return inputs[0][0]

    def _parameters(self) -> Head | None:
        """Return weight and bias of the head; None if it is more than a linear layer."""
        if type(self.module) is nn.Linear:
            return self.module.weight, self.module.bias
        adapter: Any = getattr(self.module, "token_adapter", None)
        if type(_base_of_tied(self.module)) is not nn.Linear or adapter.disable_adapters or adapter.merged:
            return None
        return adapter.get_base_layer().weight, None

    def _trained_rows(self) -> TrainedRows | None:
        """Return the rows of a tied head that an adapter trains; None if there are none."""
        adapter = getattr(self.module, "token_adapter", None)
        return None if adapter is None else trained_rows(adapter)

    def _run_model(self, states: Tensor, before_head: Callable[..., tuple[Tensor, ...]] | None = None) -> Tensor:
        """Run the model's own forward pass with last hidden states ``[1, U, D]`` in place of its decoder's output.

        Returns the logits, ``[1, U, V]``. ``before_head`` is a forward pre-hook of the LM head for this pass; the hooks
        that the head already has are not run.
        """
        base = base_model(self._causal)
        stand_in = {"forward": lambda *_, **__: _DecoderOutput(last_hidden_state=states)}
        ids = torch.zeros((1, states.shape[1]), dtype=torch.long, device=states.device)
        hooks = {} if before_head is None else {"before_head": before_head}
        with (
            _replaced(find_decoder(base), **stand_in, _forward_hooks={}),
            _replaced(self.module, _forward_pre_hooks=hooks),
        ):
            logits: Tensor = base.forward(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        return logits


@contextmanager
def _replaced(module: nn.Module, **attributes: object) -> Iterator[None]:
    """Replace attributes of a module inside the block."""
    previous = {name: module.__dict__[name] for name in attributes if name in module.__dict__}
    module.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del module.__dict__[name]
        module.__dict__.update(previous)


class _Pass(NamedTuple):
    """Inputs and outputs of the parts of a model in one forward pass."""

    states: Tensor  # [1, T, D]: the decoder's output
    head_input: Tensor  # [1, T, D]
    head_output: Tensor  # [1, T, V]
    logits: Tensor  # [1, T, V]


@torch.no_grad()
def _try(head: LMHead, model: nn.Module) -> Around:
    """Determine what the model's forward pass computes around its LM head; ValueError as described in LMHead."""
    if getattr(_base_of_tied(head.module), "bias", None) is not None:
        raise ValueError(
            f"PEFT leaves out the bias of the tied LM head of {_name(model)} while it trains single embedding rows, "
            "and a merged model has it again; train all weights, without an adapter"
        )
    replaced = _observe(head, model, replace_head=True)
    around = Around(
        before=not _same(replaced.head_input, replaced.states), after=not _same(replaced.logits, replaced.head_output)
    )
    if any(around):
        # The states in another order, without the tokens that they belong to, must have the same logits.
        observed = _observe(head, model, replace_head=False)
        reordered = head._run_model(observed.states.flip(1)).flip(1)
        if reordered.shape != observed.logits.shape or not _near(reordered, observed.logits):
            raise ValueError(
                f"the logits of {_name(model)} at a position depend on more than its decoder's state there, so that "
                "they can't be computed at the labelled positions alone; choose another causal language model"
            )
    return around


def _observe(head: LMHead, model: nn.Module, *, replace_head: bool) -> _Pass:
    """Run a model on five tokens, and replace the decoder's output by random states.

    States are random so that no zero weight hides a part of the model; there are five tokens, since a mean over
    positions would change nothing with one. With ``replace_head`` the LM head's output is random, too, and dropout
    outside the decoder, a part of the training loss, is switched on.
    """
    tensors: dict[str, Tensor] = {}
    calls = {"decoder": 0, "LM head": 0}
    generator, device = torch.Generator().manual_seed(0), next(model.parameters()).device

    def draw(like: Tensor, name: str) -> Tensor:
        """Draw random values in the shape of a tensor, and record them under a name."""
        # Large values, so that a soft cap changes them in 16 bits, too. A copy is kept: a model may write into its own.
        drawn = torch.randn(like.shape, generator=generator).mul(10).to(like)
        tensors[name] = drawn.clone()
        return drawn

    def after_decoder(
        _module: nn.Module, _args: tuple[object, ...], output: ModelOutput | tuple[Tensor, ...]
    ) -> ModelOutput | tuple[Tensor, ...]:
        """Count the call of the decoder, and replace its states by random values."""
        calls["decoder"] += 1
        return with_states(output, draw(output[0], "states"))

    def before_head(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Count the call of the LM head, and record its input."""
        calls["LM head"] += 1
        tensors["head_input"] = args[0].clone()

    def after_head(_module: nn.Module, _args: tuple[object, ...], output: Tensor) -> Tensor:
        """Record the output of the LM head, or replace it by random values."""
        if replace_head:
            return draw(output, "head_output")
        tensors["head_output"] = output
        return output

    decoder = find_decoder(model)
    handles = [
        decoder.register_forward_hook(after_decoder),
        head.module.register_forward_pre_hook(before_head),
        head.module.register_forward_hook(after_head),
    ]
    modes = [(module, module.training) for module in model.modules()]
    ids = torch.arange(5, device=device)[None]
    try:
        model.train(replace_head)
        decoder.eval()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            tensors["logits"] = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    for part, count in calls.items():
        if count != 1:
            raise ValueError(f"expected {_name(model)} to call its {part} once in a pass, got {count} calls")
    return _Pass(**tensors)


def _base_of_tied(module: nn.Module) -> nn.Module | None:
    """Return the layer inside PEFT's wrapper of a tied head of which some rows are trained; None for other heads."""
    adapter: Any = getattr(module, "token_adapter", None)
    return None if adapter is None else adapter.get_base_layer()


def with_states(output: ModelOutput | tuple[Tensor, ...], states: Tensor) -> ModelOutput | tuple[Tensor, ...]:
    """Return a decoder's output, tuple or ``ModelOutput``, with its last hidden states replaced."""
    if isinstance(output, tuple):
        return states, *output[1:]
    return type(output)(**{**output, "last_hidden_state": states})


def _same(value: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors hold the same numbers; wrappers for mixed precision convert the dtype."""
    return value.shape == expected.shape and torch.equal(value, expected.to(value.dtype))


def _near(logits: Tensor, expected: Tensor) -> bool:
    """Return whether logits differ by rounding alone, 1 % of their norm, and are infinite at the same places."""
    finite = expected.isfinite()
    difference = (logits - expected)[finite].float().norm()
    return torch.equal(logits.isfinite(), finite) and bool(difference <= 0.01 * expected[finite].float().norm())


def _name(model: nn.Module) -> str:
    return type(base_model(model)).__name__

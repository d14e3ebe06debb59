"""The LM head of a model: the logits of single positions, with all that the model computes around its head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from stepjepa.models.architecture import base_model, causal_model, find_decoder, keeping_modes
from stepjepa.models.cross_entropy import Head, multiplies_in, summed_cross_entropy
from stepjepa.models.trained_rows import TrainedRows, trained_rows

if TYPE_CHECKING:
    from transformers.utils import ModelOutput


class _DecoderOutput(BaseModelOutputWithPast):
    """Stand-in for the output of a decoder that is not run: every attribute but last_hidden_state is None."""

    def __getattr__(self, name: str) -> None:
        return None


class Around(NamedTuple):
    """Whether a model's forward pass computes something before or after its LM head."""

    # The LM head is called with something else than the decoder returned (MiniCPM3, BERT).
    before: bool = False
    # The logits are not what the LM head returned: they are scaled, capped or cut (Gemma-2, Cohere).
    after: bool = False


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
        """Return weight and bias of the head; None if it is more than a linear layer, with or without trained rows."""
        if type(self.module) is nn.Linear:
            return self.module.weight, self.module.bias
        adapter = _token_adapter(self.module)
        if adapter is None or adapter.disable_adapters or adapter.merged:
            return None
        base = adapter.get_base_layer()
        return (base.weight, None) if type(base) is nn.Linear else None

    def _trained_rows(self) -> TrainedRows | None:
        """Return the rows of a tied head that an adapter trains; None if there are none."""
        adapter = _token_adapter(self.module)
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
    adapter = _token_adapter(head.module)
    if adapter is not None and getattr(adapter.get_base_layer(), "bias", None) is not None:
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
    ids = torch.arange(5, device=device)[None]
    try:
        with keeping_modes(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
            model.train(replace_head)
            decoder.eval()
            tensors["logits"] = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    for part, count in calls.items():
        if count != 1:
            raise ValueError(f"expected {_name(model)} to call its {part} once in a pass, got {count} calls")
    return _Pass(**tensors)


def _token_adapter(head: nn.Module) -> Any:
    """Return PEFT's layer that trains some rows of a tied LM head; None for any other head."""
    return getattr(head, "token_adapter", None)


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

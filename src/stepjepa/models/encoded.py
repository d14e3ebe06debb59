"""``Encoded``: the hidden states of a micro-batch, as terms of the objective read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from stepjepa.batch.micro_batch import Batch
from stepjepa.models.lm_head import LMHead
from stepjepa.views.sequences import Kind


@dataclass(eq=False)
class Encoded:
    """The hidden states of a micro-batch, and the heads that act on them.

    Attributes:
        states: index of the layer in transformers' ``hidden_states`` (-1: after the final norm) -> hidden states
            ``[cells, D]`` by flat position, in the dtype of the model.
        batch: the micro-batch.
        layer: the layer that embeddings are read from.
        head: the LM head.
        heads: trained modules of terms, by name.
        router_logits: ``[cells, E]`` of each router of a mixture of experts, if requested.
    """

    states: dict[int, Tensor]
    batch: Batch
    layer: int
    head: LMHead
    heads: nn.ModuleDict = field(default_factory=nn.ModuleDict)
    router_logits: tuple[Tensor, ...] = ()

    def __repr__(self) -> str:
        shape = list(next(iter(self.states.values())).shape)
        return f"Encoded(states {shape} of layers {', '.join(map(str, self.states))}; {self.batch!r})"

    def at(self, index: Tensor, layer: int = -1) -> Tensor:
        """Return the hidden states at some positions.

        Args:
            index: ``[...]`` flat positions.
            layer: index in ``hidden_states``; -1, or one that a term names in ``layers``.

        Returns:
            ``[..., D]``, in the dtype of the model.

        Raises:
            ValueError: no term names the layer.
        """
        if layer not in self.states:
            captured = ", ".join(map(str, self.states))
            raise ValueError(f"expected a layer that a term names in 'layers' ({captured}), got {layer}")
        return self.states[layer][index]

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Source embeddings ``[P, D]`` (after the predictor head, if there is one) and target embeddings ``[P, D]``."""
        states = self.states[self.layer]
        source, target = pool_readouts(states, self.batch, "source"), pool_readouts(states, self.batch, "target")
        if "predictor_head" in self.heads:
            source = self.heads["predictor_head"](source)
        return source, target

    def replace_targets(self, ema_states: Callable[[Batch, int], Tensor]) -> None:
        """Replace the target embeddings by those of the averaged weights (``Context.ema_states``)."""
        target = self.pairs[1]
        if len(target):
            target = pool_readouts(ema_states(self.batch, self.layer), self.batch, "target")
        # Even without pairs, so that no process waits for another one in the backward pass.
        self.fix_targets(target)

    def fix_targets(self, target: Tensor) -> None:
        """Replace the target embeddings by constants ``[P, D]``, which get no gradient."""
        self.pairs = self.pairs[0], target.detach()

    def token_loss(self, index: Tensor, token_ids: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the summed cross-entropy of tokens, a float32 scalar, without the logits of the whole batch.

        Args:
            index: ``[U]`` flat positions whose last hidden states go through the LM head.
            token_ids: ``[N]`` the tokens to predict.
            rows: ``[N]`` the position, as an index into ``index``, that predicts each token; None for one token per
                position.
        """
        return self.head.cross_entropy(self.states[-1][index], token_ids, rows)

    def logits(self, index: Tensor) -> Tensor:
        """Return the logits ``[U, V]`` at flat positions ``[U]``."""
        return self.head.logits(self.states[-1][index])


def pool_readouts(states: Tensor, batch: Batch, kind: Kind) -> Tensor:
    """Return the embeddings ``[P, D]`` of one side of the pairs from hidden states ``[cells, D]``; means in float32.

    Args:
        states: hidden states of all cells of the rows.
        batch: has the places of the readouts.
        kind: ``source`` or ``target``.
    """
    last, tokens, pair = batch.readouts(kind)
    if tokens is None or pair is None:
        return states[last]
    summed = torch.zeros((len(last), states.shape[-1]), dtype=torch.float32, device=states.device)
    summed = summed.index_add(0, pair, states[tokens].float())
    # Not bincount: the host would wait for the device to learn the size of its result.
    counts = summed.new_zeros(len(last)).index_add(0, pair, torch.ones_like(pair, dtype=torch.float32))
    return (summed / counts[:, None]).to(states.dtype)

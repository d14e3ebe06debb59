"""FLOPs of a forward and backward pass: a formula fitted to torch's count of a few passes, and torch's live count.

The count has the multiplications and additions of matrix products (``[m, k]`` by ``[k, n]`` is ``2 m k n``):
projections, attention, LM head, and their backward passes. As in torch, attention counts as dense, every query of a row
against every key, even for trees, where FlexAttention skips blocks; by segments, every query of a call against every
key of that call. It leaves out rotary angles and the loss, about a thousandth of the total, and the modules of a
user's own terms, whose inputs are unknown here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from stepjepa.batch.micro_batch import Batch
from stepjepa.config.jepa import JepaConfig
from stepjepa.training.flop_counts import fit_decoder, flops_before_head, head_flops, predictor_head_flops
from stepjepa.training.recomputation import Recomputation

if TYPE_CHECKING:
    from transformers import TrainingArguments


def has_first_pass(config: JepaConfig, args: TrainingArguments) -> bool:
    """Return whether steps have a first pass, see ``objectives.pair_cache``; one of one micro-batch needs none."""
    return config.compare_pairs_in == "step" and args.gradient_accumulation_steps > 1


class Shape(NamedTuple):
    """The counts of a micro-batch that determine its cost."""

    tokens: int  # computed, padding included
    squares: int  # (query, key) pairs of attention
    labels: int  # positions that go through the LM head; those of the prompt loss are counted separately
    pairs: int  # of embeddings
    passes: int = 1

    @classmethod
    def of(cls, batch: Batch) -> Shape:
        """Return the shape of a micro-batch."""
        shapes = [one_pass.input_ids.shape for one_pass in batch.passes]
        # The LM loss and the prompt loss call the head one after the other, each with its own positions.
        labels = len(batch.head_index) + len(batch.prompt_index)
        squares = sum(map(_squares, batch.passes))
        return cls(sum(shape.numel() for shape in shapes), squares, labels, batch.pairs, len(shapes))


def _squares(batch: Batch) -> int:
    """Count the (query, key) pairs of attention in one pass: of all calls by segments, or of whole rows."""
    segments = batch.trees and batch.trees.segments
    if segments:
        return segments.scores
    rows, length = batch.input_ids.shape
    return rows * length * length


@dataclass(frozen=True)
class FlopModel:
    """FLOPs of the forward and backward passes of a micro-batch as a function of its :class:`Shape`."""

    token: int = 0  # per token of the rows, padding included
    square: int = 0  # per (query, key) of a row: attention
    label: int = 0  # per labelled position: the LM head
    pair: int = 0  # per pair: the predictor head
    fixed: int = 0  # per pass: adapted weights of experts, which PEFT recomputes; one state before the LM head
    token_rows: int = 0  # the part of ``label`` that trains token rows of an otherwise frozen head
    # Forward passes without a backward pass, of a micro-batch with pairs: of averaged weights, and the first of two
    # passes where the pairs of a step are compared.
    forward_token: int = 0
    forward_square: int = 0
    forward_fixed: int = 0
    forward_pair: int = 0

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        recomputed: Recomputation | None = None,
        ema: bool = False,
        first_pass: bool = False,
    ) -> FlopModel:
        """Fit the cost to passes of three lengths; a large model's on fake tensors, if its operations allow that.

        Args:
            model: a causal language model or a PEFT wrapper of one, not wrapped by DDP or FSDP; it is not changed.
            recomputed: the blocks that are recomputed in the backward pass; None for none.
            ema: averaged weights encode the target: one more forward pass of the decoder, without backward pass.
            first_pass: a forward pass gives the embeddings of a step before its training (``compare_pairs_in``).
        """
        decoder, head, before_head = fit_decoder(model, recomputed), head_flops(model), flops_before_head(model)
        predictor_head = predictor_head_flops(model)
        return cls(
            token=decoder.both.token,
            square=decoder.both.square,
            label=head.label + before_head.both,
            pair=predictor_head.both,
            # In every pass one state goes through the model's own layers before the head, see ``encode``.
            fixed=decoder.both.fixed + before_head.forward,
            token_rows=head.token_rows,
            forward_token=(ema + first_pass) * decoder.forward.token,
            forward_square=(ema + first_pass) * decoder.forward.square,
            forward_fixed=first_pass * (decoder.forward.fixed + before_head.forward),
            forward_pair=first_pass * predictor_head.forward,
        )

    @classmethod
    def of_training(cls, model: nn.Module, config: JepaConfig, args: TrainingArguments) -> FlopModel:
        """Fit the cost of a training with these settings, see :meth:`of`."""
        passes = {"ema": config.target_grad == "ema", "first_pass": has_first_pass(config, args)}
        return cls.of(model, recomputed=Recomputation.of(args), **passes)

    def of_shape(self, shape: Shape) -> int:
        """Return the FLOPs of a micro-batch of this shape, forward and backward."""
        total = shape.tokens * self.token + shape.squares * self.square + shape.passes * self.fixed
        total += shape.labels * self.label + shape.pairs * self.pair
        if shape.pairs:
            total += shape.tokens * self.forward_token + shape.squares * self.forward_square
            total += shape.passes * self.forward_fixed + shape.pairs * self.forward_pair
        return total

    def of_batch(self, batch: Batch) -> int:
        """Return the FLOPs of a micro-batch, forward and backward, padding included."""
        return self.of_shape(Shape.of(batch))

    def regular(self, *, trains_rows: bool = False) -> FlopModel:
        """Return the cost of regular training; ``trains_rows`` if that trains token rows, too, as with ``plain``."""
        rows = 0 if trains_rows else self.token_rows
        return FlopModel(self.token, self.square, self.label - rows, 0, self.fixed, self.token_rows - rows)

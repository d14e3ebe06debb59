"""What a micro-batch needs and does, from a forward and backward pass that is run on shapes alone."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepjepa.batch.collate import Batch
from stepjepa.compute.live_memory import Kind, LiveMemory
from stepjepa.compute.memory import Sharding
from stepjepa.compute.shapes import empty_batch, running
from stepjepa.compute.work import Work, WorkCounter
from stepjepa.models.lm_head import LMHead
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.term import Context

MASKS, LOGITS, HEAD, PAIRS, OTHERS = "masks", "logits", "gradient of head", "gathered pairs", "activations"
KINDS = (OTHERS, MASKS, LOGITS, HEAD, PAIRS)


@dataclass(frozen=True)
class Activations:
    """Bytes of tensors beside what is kept from step to step, at the worst moment of a micro-batch.

    Attributes:
        bytes: of all of them; gradients count while they are made.
        kinds: bytes of each of ``KINDS``: attention masks of every form and layer; logits, their softmax and their
            gradient; the gradient of the head's weight, which is taken together with the loss; what InfoNCE and the
            regularizers bring together; all else.
        with_gradients: the most that these and the gradients that are whole by then take together, where each
            micro-batch begins without gradients.
        work: of the pass.
    """

    bytes: int
    kinds: dict[str, int]
    with_gradients: int
    work: Work


def activations_of(
    model: Any,
    batch: Batch,
    objective: Objective,
    sharding: Sharding,
    mixed: torch.dtype | None,
    *,
    processes: int = 1,
) -> Activations | None:
    """Run a micro-batch on shapes.

    Args:
        model: on the meta device, set up for the objective.
        batch: of ``collate.Collator``.
        objective: the terms.
        sharding: see ``memory.choose_sharding``.
        mixed: dtype of autocast, or None.
        processes: number of them, whose pairs are brought together where they are compared.

    Returns:
        None if the model can't be run on shapes alone, see ``shapes.running``.
    """
    # A block that was brought together, or weights of 16 bits, need no copy for autocast.
    whole = mixed if sharding.halves or sharding.weights > 1 else None
    autocast = torch.autocast("cpu", dtype=mixed) if mixed is not None else nullcontext()
    context = Context(gather=lambda rows: (rows.repeat(processes, 1), 0))
    try:
        with running(model, whole):
            # Tried out before the first pass, as the trainer does.
            LMHead(model)
            with LiveMemory(model, _kinds(model, batch, processes)) as memory, WorkCounter() as counter:
                inputs = empty_batch(batch)
                with autocast:
                    loss = jepa_loss(model, inputs, objective, context=context).loss
                loss.backward()
            found = {name: memory.at_peak.get(name, 0) for name in KINDS}
            return Activations(memory.peak, found, memory.peak_with_gradients, counter.work)
    except RuntimeError:
        return None


def _kinds(model: Any, batch: Batch, processes: int) -> Kind:
    """Tells tensors apart by their shapes, since that is all there is."""
    rows = {tuple(each["input_ids"].shape) for each in batch.passes}
    vocabulary, width = model.get_input_embeddings().weight.shape
    pairs = batch.pairs * processes

    def kind(tensor: Tensor) -> str:
        shape = tuple(tensor.shape)
        if len(shape) in (3, 4) and shape[-1] == shape[-2] and (shape[0], shape[-1]) in rows:
            # One mask for all heads; with more of them these are scores.
            if len(shape) == 3 or shape[1] == 1:
                return MASKS
        elif shape and shape[-1] == vocabulary and shape != (width, vocabulary):
            return LOGITS
        elif shape == (vocabulary, width):
            return HEAD
        elif processes > 1 and shape in ((pairs, width), (batch.pairs, pairs)):
            return PAIRS
        return OTHERS

    return kind

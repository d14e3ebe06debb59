"""NEFTune's noise on embeddings (``neftune_noise_alpha``) in rows that hold several sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from stepjepa.batch.micro_batch import Batch
from stepjepa.models.architecture import base_model


@contextmanager
def noise_of_sequences(model: nn.Module, batch: Batch, alpha: float | None) -> Iterator[None]:
    """Scale the noise inside the block to the longest sequence of a micro-batch, as if each had a row of its own.

    transformers divides by the root of the length of the row, so that noise would shrink with the tokens in a row.

    Args:
        model: not wrapped by DDP or FSDP; transformers has switched the noise on, or there is none.
        batch: on the model's device.
        alpha: of transformers' ``TrainingArguments``.
    """
    embedding = base_model(model).get_input_embeddings()
    positions = [one_pass.position_ids for one_pass in batch.passes if one_pass.position_ids is not None]
    if alpha is None or not positions or "neftune_noise_alpha" not in vars(embedding):
        yield
        return
    # Waits for the device, with this noise alone.
    longest = 1 + max(int(of_pass.max()) for of_pass in positions)

    def scale(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        vars(module)["neftune_noise_alpha"] = alpha * math.sqrt(inputs[0].shape[1] / longest)

    handle = embedding.register_forward_pre_hook(scale)
    try:
        yield
    finally:
        handle.remove()
        vars(embedding)["neftune_noise_alpha"] = alpha

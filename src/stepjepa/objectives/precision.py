"""Products in float32 inside a model's mixed precision."""

import torch
from torch import Tensor


def without_autocast(values: Tensor) -> torch.autocast:
    """Disable autocast on the device of ``values`` inside the block.

    Terms run inside the autocast of a model, and so may monitors and ranks; it would round their float32 products to 16
    bits.
    """
    return torch.autocast(values.device.type, enabled=False)

"""Which of torch's attention kernels train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Have ``scaled_dot_product_attention`` take FlashAttention, or the memory-efficient kernel, rather than cuDNN's.

    On Hopper torch prefers cuDNN for 16 bits, which plans its kernel anew for every new shape, and nearly every
    micro-batch has one. Inside the block alone; elsewhere the process keeps its choice.
    """
    cuda = torch.backends.cuda
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(before)

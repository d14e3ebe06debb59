"""The choice among torch's attention kernels while training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Exclude cuDNN's kernel from ``scaled_dot_product_attention`` inside the block; other kernels take its place.

    On Hopper torch prefers cuDNN for 16 bits. cuDNN plans a kernel for every new shape, and nearly every
    micro-batch has one. FlashAttention and the memory-efficient kernel need no plan.
    """
    cuda = torch.backends.cuda
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(before)

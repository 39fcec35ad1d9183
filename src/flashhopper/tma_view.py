"""Views of tensors that TMA can load: base addresses and strides are multiples of 16 bytes."""

from __future__ import annotations

import torch

from flashhopper.problem import TensorFacts

TMA_ALIGNMENT = 16  # bytes: base address and strides (CUDA driver API, cuTensorMapEncodeTiled)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its base address does not fit."""
    return tensor.clone() if tensor.data_ptr() % TMA_ALIGNMENT else tensor


def _fits_tma(stride: int, unit: int) -> bool:
    """Whether a stride in elements is a multiple of 16 bytes below 2**40 bytes; ``unit`` is 16 bytes in elements."""
    return stride % unit == 0 and stride < 2**40 * unit // TMA_ALIGNMENT


class TmaView:
    """Makes a tensor's strides fit TMA, multiples of 16 bytes. One that matters and does not fit costs one copy."""

    def __init__(self, facts: TensorFacts):
        unit = TMA_ALIGNMENT // facts.dtype.itemsize
        # The stride of an extent of 1 is never used: any multiple will do where the tensor's own does not.
        used = zip(facts.shape[:3], facts.stride[:3], strict=True)
        self.stride = (*(unit if extent == 1 and not _fits_tma(stride, unit) else stride for extent, stride in used), 1)
        self.copies = any(stride % unit for stride in self.stride[:3])
        self.changes = self.copies or self.stride != tuple(facts.stride)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.copies:
            return tensor.clone(memory_format=torch.contiguous_format)
        return tensor.as_strided(tensor.shape, self.stride)

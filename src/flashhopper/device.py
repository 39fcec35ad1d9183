"""The card that the kernels need."""

from __future__ import annotations

from functools import lru_cache

import torch

HOPPER = (9, 0)


@lru_cache(maxsize=64)
def hopper_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a Hopper card; RuntimeError for any other."""
    properties = torch.cuda.get_device_properties(device)
    found = (properties.major, properties.minor)
    if found != HOPPER:
        raise RuntimeError(
            f"{properties.name} on {device} has compute capability {found[0]}.{found[1]}; FlashHopper's kernels need a "
            "Hopper GPU (9.0: H100, H200, H800, H20). CPU tensors run through the reference on any machine."
        )
    return int(properties.multi_processor_count)

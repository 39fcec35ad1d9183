"""FlashHopper: exact attention for NVIDIA Hopper GPUs, written in Python."""

from flashhopper._version import __version__
from flashhopper.api import (
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_fp8_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    quantize_fp8,
)
from flashhopper.fp8_tensor import Fp8Tensor

__all__ = [
    "Fp8Tensor",
    "__version__",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_fp8_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "quantize_fp8",
]

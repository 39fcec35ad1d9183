"""What the facts of several kernels rest on: the card's sizes, element types, and the error for what does not fit."""

from __future__ import annotations

from typing import Literal

WARP_THREADS = 32
WARPGROUP_THREADS = 128
ROWS_PER_WARPGROUP = 64  # M of one WGMMA instruction (PTX ISA 9.7.15, wgmma.mma_async)
REGISTER_FILE = 65536  # 32-bit registers of one Hopper SM
MAX_REGISTERS_PER_THREAD = 255
KEYS_PER_SCALE = 128  # FP8: rows of K that share a scale
QUERIES_PER_SCALE = ROWS_PER_WARPGROUP  # FP8: rows of Q that share a scale
SMEM_BYTES_PER_CTA = 232448  # 227 KiB, the opt-in limit of compute capability 9.0

Dtype = Literal["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
WarpgroupOrder = Literal["free", "stagger", "ping_pong", "relay"]

ELEMENT_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
E4M3: Dtype = "float8_e4m3fn"
E5M2: Dtype = "float8_e5m2"
FP8_MAX_EXPONENT: dict[Dtype, int] = {E4M3: 8, E5M2: 15}
"""FP8 types. The largest number of each is 1.75 times 2 to this power."""


class ConfigError(ValueError):
    """A configuration that cannot run on the card; the message says which limit it breaks and by how much."""


def check_padded_dims(dtype: str, head_dim: int, head_dim_v: int) -> None:
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"dtype={dtype!r}: accepted are {', '.join(ELEMENT_BYTES)}")
    for name, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if value % 32 or not 64 <= value <= 256:
            raise ConfigError(f"{name}={value} must be a multiple of 32 from 64 to 256; TMA pads what is smaller")

"""FP8: quantised tensors, how they are asked for, and what they must be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from flashhopper import reference_fp8, reference_fp8_varlen
from flashhopper.config import KEYS_PER_SCALE, QUERIES_PER_SCALE, ScaleKind
from flashhopper.problem import DTYPES, MAX_EXTENT, MAX_HEAD_DIM, RaggedFacts, RaggedTensors, exceeds
from flashhopper.reference_fp8 import E4M3, FP8_DTYPES, SCALE_KINDS, WHOLE_SEQUENCE
from flashhopper.reference_fp8_varlen import Sequences

Role = Literal["q", "k", "v"]
ROWS_PER_SCALE: dict[Role, int] = {"q": QUERIES_PER_SCALE, "k": KEYS_PER_SCALE, "v": WHOLE_SEQUENCE}
FP8_NAMES = " and ".join(map(str, FP8_DTYPES))
MULTIPLE = 16  # of head dims: TMA's strides are multiples of 16 bytes


@dataclass(frozen=True, eq=False)
class Fp8Tensor:
    """A quantised q, k or v, as :func:`quantize_fp8` makes it and :func:`flash_attn_func` takes it."""

    role: Role
    data: torch.Tensor
    """e4m3 or e5m2. q and k: ``(batch, seqlen, heads, head_dim)``. v: ``(batch, heads, head_dim_v, slots)``, transposed
    for the tensor cores, keys in the kernels' order and padded with zeros to a multiple of 128. Of a ragged batch
    without the batch dimension: sequence i has the slots from 128 · (cu_seqlens[i] // 128 + i) of 128 · (total // 128 +
    batch)."""
    scale: torch.Tensor
    """fp32. q and k: ``(batch, heads, blocks)``, one for ``rows_per_scale`` rows; of a ragged batch ``(heads, total //
    rows_per_scale + batch)``, those of sequence i from block cu_seqlens[i] // rows_per_scale + i. v: ``(batch, heads,
    head_dim_v)``."""
    shape: tuple[int, ...]
    """Of the tensor that was quantised: ``(batch, seqlen, heads, head_dim)`` or ``(total, heads, head_dim)``."""
    source_dtype: torch.dtype
    """Of the tensor that was quantised, and so of attention's result."""
    rows_per_scale: int
    mean: torch.Tensor | None = None
    """v: what was subtracted from each channel, fp32 ``(batch, heads, head_dim_v)``; None if nothing was."""
    hadamard_seed: int | None = None
    """q and k: of the random signs before the Hadamard transform; None without transform."""
    sequences: Sequences | None = None
    """Of a ragged batch: the lengths it was quantised with."""

    @cached_property
    def facts(self) -> tuple[Any, ...]:
        """All that a call's checks and plan look at, of a tensor of a dense batch."""
        layout = self.data.dtype, self.data.device, self.data.shape, self.data.stride(), self.scale.shape
        recipe = self.role, self.source_dtype, self.rows_per_scale, self.mean is None, self.hadamard_seed
        return *layout, *recipe, self.shape, self.sequences is None

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """Of ``data``."""
        return self.data.dtype

    def dequantize(self) -> torch.Tensor:
        """What the quantised numbers stand for, fp32 of ``shape``; transform and mean are undone. Of a ragged batch it
        reads the lengths, for which it waits; rows that are not used are 0."""
        if self.sequences is not None:
            return self._dequantize_sequences(self.sequences)
        if self.role == "v":
            x = reference_fp8.restore_values(self.data, self.shape[1]).float() * self.scale[:, None]
            return x if self.mean is None else x + self.mean[:, None]
        scale = reference_fp8.rows_of_scales(self.scale, self.rows_per_scale, self.shape[1])
        x = self.data.float() * scale
        return x if self.hadamard_seed is None else reference_fp8.inverse_hadamard(x, self.hadamard_seed)

    def _dequantize_sequences(self, sequences: Sequences) -> torch.Tensor:
        total = self.shape[0]
        if self.role == "v":
            mean = torch.zeros_like(self.scale) if self.mean is None else self.mean
            return reference_fp8_varlen.restore_values(self.data, self.scale, mean, total, sequences)
        x = self.data.float() * reference_fp8_varlen.rows_of_scales(self.scale, self.rows_per_scale, total, sequences)
        return x if self.hadamard_seed is None else reference_fp8.inverse_hadamard(x, self.hadamard_seed)


class Fp8QKV(NamedTuple):
    """What :func:`quantize_fp8` returns; a field is None where nothing was given."""

    q: Any
    k: Any
    v: Any


class Fp8Recipe(NamedTuple):
    """How 16-bit tensors are quantised: :func:`quantize_fp8`'s keyword arguments."""

    scales: ScaleKind = "power_of_two"
    hadamard: bool = True
    center_v: bool = True
    seed: int = 0
    dtype: torch.dtype = E4M3

    def validate(self) -> None:
        if self.scales not in SCALE_KINDS:
            raise ValueError(f"scales is {self.scales!r}; accepted are {' and '.join(map(repr, SCALE_KINDS))}")
        for name in ("hadamard", "center_v"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {type(getattr(self, name)).__name__}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an int, got {type(self.seed).__name__}")
        if self.dtype not in tuple(FP8_DTYPES):
            raise TypeError(f"dtype is {self.dtype!r}; accepted are {FP8_NAMES}")


class Lengths(NamedTuple):
    """:func:`quantize_fp8`'s arguments of these names."""

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None

    @classmethod
    def of(cls, ragged: RaggedTensors | None) -> Lengths:
        return cls() if ragged is None else cls(*ragged[2:])

    def side(self, role: Role) -> Sequences | None:
        """Of q, or of k and v; None if dense."""
        if role == "q":
            return None if self.cu_seqlens_q is None else Sequences("q", self.cu_seqlens_q, self.seqused_q)
        return None if self.cu_seqlens_k is None else Sequences("k", self.cu_seqlens_k, self.seqused_k)

    def check_pairs(self) -> None:
        """ValueError for used lengths of sequences that are not there: before tensors are taken for dense ones."""
        for side, cu_seqlens, seqused in (
            ("q", self.cu_seqlens_q, self.seqused_q),
            ("k", self.cu_seqlens_k, self.seqused_k),
        ):
            if cu_seqlens is None and seqused is not None:
                raise ValueError(f"seqused_{side} is given, cu_seqlens_{side} is not")

    def check(self, q: Any, k: Any, v: Any) -> None:
        """TypeError or ValueError for lengths that fit no tensor given."""
        for side, cu_seqlens, seqused, owner in (
            ("q", self.cu_seqlens_q, self.seqused_q, q),
            ("k", self.cu_seqlens_k, self.seqused_k, v if k is None else k),
        ):
            if cu_seqlens is None:
                continue
            if owner is None:
                raise ValueError(f"cu_seqlens_{side} is given, but no tensor whose sequences it could describe")
            # A ragged batch's own check, with this side as both.
            try:
                RaggedFacts.of(RaggedTensors(0, 0, cu_seqlens, cu_seqlens, seqused, seqused)).check(owner.device)
            except (TypeError, ValueError) as error:
                message = str(error).replace("seqlens_q", f"seqlens_{side}").replace("seqused_q", f"seqused_{side}")
                raise type(error)(message) from None


DENSE = Lengths()


def check_source(name: str, x: torch.Tensor, is_ragged: bool) -> None:
    """TypeError or ValueError for a tensor that cannot be quantised."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; accepted are {', '.join(map(str, DTYPES))}")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on device {x.device}; accepted are cpu and cuda tensors")
    layout = "total, heads, head_dim" if is_ragged else "batch, seqlen, heads, head_dim"
    if x.dim() != layout.count(",") + 1:
        shape = tuple(x.shape)
        raise ValueError(f"{name} must have {layout.count(',') + 1} dimensions ({layout}), got shape {shape}")
    if any(map(exceeds, x.shape)):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; each extent may be at most {MAX_EXTENT}")
    check_head_dim(name, x.shape[-1])
    if x.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {x.stride()}; the last dimension (head_dim) must be contiguous (stride 1)"
        )


def check_head_dim(name: str, head_dim: int) -> None:
    if head_dim % MULTIPLE or not MULTIPLE <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"{name} has head_dim {head_dim}; accepted with FP8 are multiples of {MULTIPLE} from {MULTIPLE} to "
            f"{MAX_HEAD_DIM}"
        )


def are_quantised(q: Any, k: Any, v: Any) -> bool:
    """Whether q, k and v come from :func:`quantize_fp8`; TypeError if some of them do."""
    kinds = [isinstance(x, Fp8Tensor) for x in (q, k, v)]
    if any(kinds) and not all(kinds):
        names = ", ".join([f"{name} {_describe(x)}" for name, x in (("q", q), ("k", k), ("v", v))])
        raise TypeError(f"q, k and v must all come from quantize_fp8 or all be tensors of one dtype, got {names}")
    return all(kinds)


def _describe(x: Any) -> str:
    return "quantised" if isinstance(x, Fp8Tensor) else str(getattr(x, "dtype", type(x).__name__))


def check_roles(q: Fp8Tensor, k: Fp8Tensor, v: Fp8Tensor) -> None:
    """ValueError unless each was quantised as what it is, TypeError unless all were to one type."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.role != name:
            raise ValueError(f"{name} was quantised as {x.role}: each of q, k and v has a layout of its own")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} was quantised to {x.dtype}, q to {q.dtype}: all must have the same dtype")


def check_sequences(q: Fp8Tensor, k: Fp8Tensor, v: Fp8Tensor, ragged: RaggedTensors | None) -> None:
    """ValueError unless each was quantised with the call's own lengths: blocks of scales lie by them. What is in the
    tensors is not compared, for which a GPU would have to be waited for."""
    lengths = Lengths.of(ragged)
    for name, x, side in (("q", q, lengths.side("q")), ("k", k, lengths.side("k")), ("v", v, lengths.side("v"))):
        if side is None:
            if x.sequences is not None:
                raise ValueError(f"{name} was quantised as a ragged batch: flash_attn_varlen_func takes it")
            continue
        if x.sequences is None:
            raise ValueError(f"{name} was quantised without cu_seqlens_{side.side}")
        if x.sequences.cu_seqlens is not side.cu_seqlens:
            raise ValueError(f"cu_seqlens_{side.side} is not the tensor that {name} was quantised with")
        if x.sequences.seqused is not side.seqused:
            raise ValueError(f"seqused_{side.side} is not what {name} was quantised with")

"""FP8: quantised tensors, what makes them, and attention on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from flashhopper import launch_fp8, reference, reference_fp8, reference_fp8_varlen, reference_varlen
from flashhopper.config import KEYS_PER_SCALE, QUERIES_PER_SCALE, ScaleKind
from flashhopper.options import AttentionOptions
from flashhopper.problem import (
    DTYPES,
    MAX_EXTENT,
    MAX_HEAD_DIM,
    AttentionProblem,
    RaggedFacts,
    RaggedTensors,
    SoftmaxTensors,
    TensorFacts,
    exceeds,
)
from flashhopper.reference_fp8 import E4M3, E5M2, FP8_DTYPES, SCALE_KINDS, WHOLE_SEQUENCE, Operands
from flashhopper.reference_fp8_varlen import Sequences
from flashhopper.unproven import refuse_unproven

Role = Literal["q", "k", "v"]
Accumulate = Literal["two_level", "fast"]
ACCUMULATE: tuple[Accumulate, ...] = ("two_level", "fast")
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

    def check(self, q: Any, k: Any, v: Any) -> None:
        """TypeError or ValueError for lengths that fit no tensor given."""
        for side, cu_seqlens, seqused, owner in (
            ("q", self.cu_seqlens_q, self.seqused_q, q),
            ("k", self.cu_seqlens_k, self.seqused_k, v if k is None else k),
        ):
            if cu_seqlens is None:
                if seqused is not None:
                    raise ValueError(f"seqused_{side} is given, cu_seqlens_{side} is not")
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


def quantize(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    recipe: Fp8Recipe,
    lengths: Lengths = DENSE,
    engine: Any = None,
) -> Fp8QKV:
    """See :func:`flashhopper.quantize_fp8`. ``engine``: what has ``quantize_rows`` and ``quantize_values``, by default
    that of the tensors' device."""
    recipe.validate()
    given: tuple[tuple[Role, torch.Tensor | None], ...] = (("q", q), ("k", k), ("v", v))
    for name, x in given:
        if x is not None:
            check_source(name, x, lengths.side(name) is not None)
    lengths.check(q, k, v)
    for _, x in given:
        if x is not None:
            refuse_e5m2(recipe.dtype, x.device)
    with torch.no_grad():
        quantised = [None if x is None else _quantize(name, x, recipe, lengths.side(name), engine) for name, x in given]
    return Fp8QKV(*quantised)


def engine_of(x: torch.Tensor) -> Any:
    """What quantises a tensor: kernels, or plain PyTorch with the same bits."""
    return reference_fp8_varlen if x.device.type == "cpu" else launch_fp8


def _quantize(role: Role, x: torch.Tensor, recipe: Fp8Recipe, sequences: Sequences | None, engine: Any) -> Fp8Tensor:
    engine = engine_of(x) if engine is None else engine
    rows, shape = ROWS_PER_SCALE[role], tuple(x.shape)
    if role == "v":
        data, scale, mean = engine.quantize_values(x, recipe.scales, recipe.center_v, sequences, recipe.dtype)
        mean = mean if recipe.center_v else None
        return Fp8Tensor(role, data, scale, shape, x.dtype, rows, mean=mean, sequences=sequences)
    seed = recipe.seed if recipe.hadamard else None
    data, scale = engine.quantize_rows(x, rows, recipe.scales, seed, sequences, recipe.dtype)
    return Fp8Tensor(role, data, scale, shape, x.dtype, rows, hadamard_seed=seed, sequences=sequences)


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
    _check_head_dim(name, x.shape[-1])
    if x.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {x.stride()}; the last dimension (head_dim) must be contiguous (stride 1)"
        )


def _check_head_dim(name: str, head_dim: int) -> None:
    if head_dim % MULTIPLE or not MULTIPLE <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"{name} has head_dim {head_dim}; accepted with FP8 are multiples of {MULTIPLE} from {MULTIPLE} to "
            f"{MAX_HEAD_DIM}"
        )


def is_fp8(q: Any, k: Any, v: Any) -> bool:
    """Whether one of the tensors is quantised, or raw FP8."""
    try:
        return q.dtype in FP8_DTYPES or k.dtype in FP8_DTYPES or v.dtype in FP8_DTYPES
    except AttributeError:  # no tensor
        return any(getattr(x, "dtype", None) in FP8_DTYPES for x in (q, k, v))


class Descales(NamedTuple):
    """FA3's factors for raw FP8 tensors: fp32 with one element or ``(batch, heads_k)``, or None for 1."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None

    def refuse(self, why: str) -> None:
        for name, value in zip(self._fields, self, strict=True):
            if value is not None:
                raise ValueError(f"{name}_descale is for {FP8_NAMES} tensors; {why}")

    def of_heads(self, name: Role, batch: int, heads_k: int, device: torch.device) -> torch.Tensor:
        """The factor of each head, fp32 ``(batch, heads_k)``, an expanded view."""
        value = getattr(self, name)
        if value is None:
            return torch.ones(1, 1, device=device).expand(batch, heads_k)
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}_descale must be a torch.Tensor or None, got {type(value).__name__}")
        if value.dtype != torch.float32:
            raise TypeError(f"{name}_descale has dtype {value.dtype}; accepted is torch.float32")
        if value.device != device:
            raise ValueError(f"{name}_descale is on {value.device}, q on {device}: all must be on the same device")
        if value.numel() == 1 and value.dim() <= 1:
            return value.view(1, 1).expand(batch, heads_k)
        if tuple(value.shape) != (batch, heads_k):
            raise ValueError(
                f"{name}_descale has shape {tuple(value.shape)}; accepted are one element, or one for each batch and "
                f"key head: ({batch}, {heads_k})"
            )
        return value


NO_DESCALES = Descales()


def refuse(descales: Descales, accumulate: Any) -> None:
    """For 16-bit tensors: ValueError for an argument that has no meaning with them."""
    if descales is NO_DESCALES and accumulate == "two_level":
        return
    descales.refuse("q, k and v are not")
    if accumulate != "two_level":
        raise ValueError(f"fp8_accumulate is {accumulate!r}, but q, k and v are not FP8")


class _Inputs(NamedTuple):
    """One FP8 call: its problem, and what the kernel reads once it is asked for."""

    problem: AttentionProblem
    operands: Callable[[], Operands]
    ragged: RaggedTensors | None


def attention(
    q: Any,
    k: Any,
    v: Any,
    options: AttentionOptions,
    descales: Descales,
    accumulate: Accumulate,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out, in the dtype that was quantised (bfloat16 for raw FP8), and LSE; neither is differentiable."""
    check_accumulate(accumulate)
    inputs = checked_inputs((q, k, v), options, descales, softmax_tensors, ragged)
    if inputs.problem.device.type == "cpu":
        return _reference_attention(inputs, softmax_tensors)
    with torch.no_grad():
        return launch_fp8.forward(inputs.operands(), inputs.problem, accumulate == "fast", ragged=ragged)


def checked_inputs(
    tensors: tuple[Any, Any, Any],
    options: AttentionOptions,
    descales: Descales,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors | None,
) -> _Inputs:
    """The one place where an FP8 call is checked."""
    make = _quantized_inputs if are_quantised(*tensors) else _raw_inputs
    inputs = make(tensors, options, descales, ragged)
    inputs.problem.validate()
    if any(tensor is not None for tensor in softmax_tensors):
        inputs.problem.check_softmax_tensors(softmax_tensors)
    if inputs.problem.device.type != "cpu":
        _refuse_on_cuda(options, softmax_tensors)
        refuse_e5m2(tensors[0].dtype, inputs.problem.device)
    return inputs


def are_quantised(q: Any, k: Any, v: Any) -> bool:
    """Whether q, k and v come from :func:`quantize`; TypeError if some of them do."""
    kinds = [isinstance(x, Fp8Tensor) for x in (q, k, v)]
    if any(kinds) and not all(kinds):
        names = ", ".join([f"{name} {_describe(x)}" for name, x in (("q", q), ("k", k), ("v", v))])
        raise TypeError(f"q, k and v must all come from quantize_fp8 or all be tensors of one dtype, got {names}")
    return all(kinds)


def check_accumulate(accumulate: Any) -> None:
    if accumulate not in ACCUMULATE:
        raise ValueError(f"fp8_accumulate is {accumulate!r}; accepted are {' and '.join(map(repr, ACCUMULATE))}")


def refuse_e5m2(dtype: torch.dtype, device: torch.device) -> None:
    """NotImplementedError on CUDA tensors, until a card has run it."""
    if dtype is E5M2 and device.type != "cpu":
        refuse_unproven("FP8 in e5m2")


def _refuse_on_cuda(options: AttentionOptions, softmax_tensors: SoftmaxTensors) -> None:
    """What the FP8 kernels lack, whatever the 16-bit ones have."""
    if options.softcap != 0.0:
        raise NotImplementedError(f"softcap={options.softcap!r} is not there yet with FP8 on CUDA tensors")
    for name, tensor in softmax_tensors._asdict().items():
        if tensor is not None:
            raise NotImplementedError(f"{name} is not there yet with FP8 on CUDA tensors")


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


def _quantized_inputs(
    tensors: tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor],
    options: AttentionOptions,
    descales: Descales,
    ragged: RaggedTensors | None,
) -> _Inputs:
    q, k, v = tensors
    descales.refuse("quantised tensors carry their scales")
    check_roles(q, k, v)
    check_sequences(q, k, v, ragged)
    if q.hadamard_seed != k.hadamard_seed:
        raise ValueError(f"q was transformed with seed {q.hadamard_seed}, k with {k.hadamard_seed}: they must be equal")
    q_facts, k_facts, v_facts = (_facts(x.shape, x.source_dtype, x.device) for x in (q, k, v))
    problem = AttentionProblem(q_facts, k_facts, v_facts, options, None if ragged is None else RaggedFacts.of(ragged))

    def operands() -> Operands:
        mean = torch.zeros_like(v.scale) if v.mean is None else v.mean
        scales = q.scale, k.scale, v.scale, mean
        rows = q.rows_per_scale, k.rows_per_scale, problem.rows_k
        return Operands(q.data, k.data, v.data, *scales, *rows, is_centered=v.mean is not None)

    return _Inputs(problem, operands, ragged)


def check_raw(q: Any, k: Any, v: Any) -> None:
    """TypeError unless all are tensors of one FP8 type, which one of them is."""
    found = next((x.dtype for x in (q, k, v) if getattr(x, "dtype", None) in FP8_DTYPES), E4M3)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype != found:
            raise TypeError(f"{name} has dtype {x.dtype}; with another of q, k and v in {found} all must have it")


def _raw_inputs(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: AttentionOptions,
    descales: Descales,
    ragged: RaggedTensors | None,
) -> _Inputs:
    q, k, v = tensors
    check_raw(q, k, v)
    q_facts, k_facts, v_facts = (TensorFacts.of(x)._replace(dtype=torch.bfloat16) for x in (q, k, v))
    problem = AttentionProblem(q_facts, k_facts, v_facts, options, None if ragged is None else RaggedFacts.of(ragged))
    problem.validate()
    for name, x in (("q", q), ("v", v)):
        _check_head_dim(name, x.shape[-1])
    batch, heads_k = problem.batch, problem.num_heads_k
    q_factor, k_factor, v_factor = (descales.of_heads(name, batch, heads_k, q.device) for name in ("q", "k", "v"))

    def operands() -> Operands:
        group = problem.num_heads // heads_k
        q_scale = q_factor[:, :, None].expand(batch, heads_k, group).reshape(batch, problem.num_heads, 1)
        v_scale = v_factor[:, :, None].expand(batch, heads_k, problem.head_dim_v).contiguous()
        k_scale = k_factor[:, :, None].contiguous()
        if ragged is not None:  # a block holds a whole sequence, and each sequence has its own
            q_scale, k_scale = (x[..., 0].t().contiguous() for x in (q_scale, k_scale))
        slots = engine_of(q).transpose_values(v, Lengths.of(ragged).side("v"))
        scales = q_scale, k_scale, v_scale, torch.zeros_like(v_scale)
        return Operands(q, k, slots, *scales, WHOLE_SEQUENCE, WHOLE_SEQUENCE, problem.rows_k)

    return _Inputs(problem, operands, ragged)


def _facts(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> TensorFacts:
    """Those of a contiguous tensor."""
    stride = [1]
    for extent in reversed(shape[1:]):
        stride.append(stride[-1] * extent)
    return TensorFacts(shape, tuple(reversed(stride)), dtype, device)


def _reference_attention(inputs: _Inputs, softmax_tensors: SoftmaxTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in fp32 on what the quantised tensors stand for; the transform of q and k need not be undone."""
    problem, options = inputs.problem, inputs.problem.options
    arguments: dict[str, Any] = {
        "softmax_scale": problem.softmax_scale,
        "causal": options.causal,
        "window_size": options.window_size,
        "attention_chunk": options.attention_chunk,
        "softcap": float(options.softcap),
        "learnable_sink": softmax_tensors.learnable_sink,
        "alibi_slopes": softmax_tensors.alibi_slopes,
    }
    lengths = Lengths.of(inputs.ragged)
    q_side, k_side = lengths.side("q"), lengths.side("k")
    if inputs.ragged is None or q_side is None or k_side is None:
        out, lse = reference.attention(*inputs.operands().dequantized(), **arguments)
    else:
        q, k, v = reference_fp8_varlen.dequantized(inputs.operands(), q_side, k_side)
        out, lse = reference_varlen.attention(q, k, v, inputs.ragged, **arguments)
    return out.to(problem.dtype), lse

"""FP8: what makes quantised tensors, and attention on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from flashhopper import launch_fp8, reference, reference_fp8_varlen, reference_varlen
from flashhopper.fp8_tensor import (
    DENSE,
    FP8_NAMES,
    ROWS_PER_SCALE,
    Fp8QKV,
    Fp8Recipe,
    Fp8Tensor,
    Lengths,
    Role,
    are_quantised,
    check_head_dim,
    check_roles,
    check_sequences,
    check_source,
)
from flashhopper.options import AttentionOptions
from flashhopper.problem import (
    NO_SOFTMAX_TENSORS,
    AttentionProblem,
    RaggedFacts,
    RaggedTensors,
    SoftmaxTensors,
    TensorFacts,
)
from flashhopper.reference_fp8 import E4M3, FP8_DTYPES, WHOLE_SEQUENCE, Operands
from flashhopper.reference_fp8_varlen import Sequences

Accumulate = Literal["two_level", "fast"]
ACCUMULATE: tuple[Accumulate, ...] = ("two_level", "fast")


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
    lengths.check_pairs()
    for name, x in given:
        if x is not None:
            check_source(name, x, lengths.side(name) is not None)
    lengths.check(q, k, v)
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
    key: Any = None
    is_plain = ragged is None and descales is NO_DESCALES and softmax_tensors is NO_SOFTMAX_TENSORS
    if is_plain and accumulate in ACCUMULATE and type(q) is type(k) is type(v) is Fp8Tensor and q.sequences is None:
        key = id(options), accumulate, q.facts, k.facts, v.facts
        known = _known.get(key)
        if known is not None:
            result: tuple[torch.Tensor, torch.Tensor] = known.plan(_operands(q, k, v), None)
            return result
    check_accumulate(accumulate)
    inputs = checked_inputs((q, k, v), options, descales, softmax_tensors, ragged)
    if inputs.problem.device.type == "cpu":
        return _reference_attention(inputs, softmax_tensors)
    with torch.no_grad():
        operands, is_fast = inputs.operands(), accumulate == "fast"
        if key is not None:
            if len(_known) >= MAX_KNOWN:
                _known.clear()
            _known[key] = _Known(options, launch_fp8.plan_of(operands, inputs.problem, is_fast))
        return launch_fp8.forward(operands, inputs.problem, is_fast, ragged=ragged)


class _Known(NamedTuple):
    options: AttentionOptions
    """Held, so that no other object can get its id, by which it is known: one object has values of the same types."""
    plan: Any


MAX_KNOWN = 1024
_known: dict[Any, _Known] = {}
"""Plans of dense calls on quantised tensors, which passed all checks."""


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
    return inputs


def check_accumulate(accumulate: Any) -> None:
    if accumulate not in ACCUMULATE:
        raise ValueError(f"fp8_accumulate is {accumulate!r}; accepted are {' and '.join(map(repr, ACCUMULATE))}")


def _refuse_on_cuda(options: AttentionOptions, softmax_tensors: SoftmaxTensors) -> None:
    """What the FP8 kernels lack, whatever the 16-bit ones have."""
    if options.softcap != 0.0:
        raise NotImplementedError(f"softcap={options.softcap!r} is not there yet with FP8 on CUDA tensors")
    for name, tensor in softmax_tensors._asdict().items():
        if tensor is not None:
            raise NotImplementedError(f"{name} is not there yet with FP8 on CUDA tensors")


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

    return _Inputs(problem, lambda: _operands(q, k, v), ragged)


def _operands(q: Fp8Tensor, k: Fp8Tensor, v: Fp8Tensor) -> Operands:
    mean = torch.zeros_like(v.scale) if v.mean is None else v.mean
    scales = q.scale, k.scale, v.scale, mean
    rows_k = v.shape[0] if v.sequences is not None else v.shape[1]
    rows = q.rows_per_scale, k.rows_per_scale, rows_k
    return Operands(q.data, k.data, v.data, *scales, *rows, is_centered=v.mean is not None)


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
        check_head_dim(name, x.shape[-1])
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

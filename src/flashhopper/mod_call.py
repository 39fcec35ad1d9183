"""The ``score_mod``, ``mask_mod`` and ``mod_tensors`` of one call: checked, traced, and evaluated on torch tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashhopper.mods import MaskMod, ScoreMod
from flashhopper.problem import MAX_EXTENT
from flashhopper.programs import KINDS, Kind, Program, TensorType, evaluate, trace_mask, trace_score

DTYPES = {getattr(torch, name): name for name in KINDS}


class Mods(NamedTuple):
    """What a call computes of its scores, and the tensors that it reads for that, without those that are None."""

    score: Program | None
    mask: Program | None
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, score_mod: ScoreMod | None, mask_mod: MaskMod | None, mod_tensors: Any) -> Mods | None:
        """None without functions. The errors of :func:`flash_attn_func` that have to do with these arguments alone."""
        for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function or None, got {type(function).__name__}")
        if not isinstance(mod_tensors, (tuple, list)):
            raise TypeError(f"mod_tensors must be a tuple of tensors, got {type(mod_tensors).__name__}")
        types = tuple(None if x is None else _type_of(i, x) for i, x in enumerate(mod_tensors))
        if score_mod is None and mask_mod is None:
            if mod_tensors:
                raise ValueError("mod_tensors is given without a score_mod or mask_mod that reads it")
            return None
        score = None if score_mod is None else trace_score(score_mod, types)
        mask = None if mask_mod is None else trace_mask(mask_mod, types)
        return cls(score, mask, tuple(x for x in mod_tensors if x is not None))

    @property
    def key(self) -> tuple[Any, ...]:
        """What a plan depends on; programs know the dtypes of the tensors."""
        return self.score, self.mask, tuple(x.device for x in self.tensors)

    def check_device(self, device: torch.device) -> None:
        """ValueError unless the tensors are on q's device; TypeError for fp64 on a GPU."""
        for tensor in self.tensors:
            if tensor.device != device:
                raise ValueError(
                    f"a tensor of mod_tensors is on {tensor.device}, q on {device}: all must be on the same device"
                )
            if tensor.is_cuda and tensor.dtype == torch.float64:
                raise TypeError("a tensor of mod_tensors has dtype torch.float64, which is accepted on the CPU alone")


def _type_of(index: int, tensor: Any) -> TensorType:
    name = f"mod_tensors[{index}]"
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(tensor).__name__}")
    if tensor.dtype not in DTYPES:
        accepted = ", ".join(map(str, DTYPES))
        raise TypeError(f"{name} has dtype {tensor.dtype}; accepted are {accepted} (torch.float64 on the CPU)")
    if any(extent > MAX_EXTENT for extent in tensor.shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; each extent may be at most {MAX_EXTENT}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{name} requires a gradient, which is not there yet; detach it")
    return TensorType(DTYPES[tensor.dtype], tensor.dim())


class Pairs(NamedTuple):
    """Which pairs of queries and keys some scores are of: integers that broadcast to the scores' shape."""

    batch: torch.Tensor
    head: torch.Tensor
    q_idx: torch.Tensor
    kv_idx: torch.Tensor

    def scores(self, mods: Mods, scores: torch.Tensor) -> torch.Tensor:
        """Scores after ``score_mod``, differentiable; computed in fp32 at least."""
        if mods.score is None:
            return scores
        precise = scores.to(torch.promote_types(scores.dtype, torch.float32))
        engine = TorchEngine(precise.dtype, scores.device, mods.tensors)
        (result,) = evaluate(mods.score, self._asdict() | {"score": precise}, engine)
        return torch.broadcast_to(result, scores.shape).to(scores.dtype)

    def hidden(self, mods: Mods) -> torch.Tensor:
        """Where ``mask_mod`` says no; broadcasts to the scores' shape."""
        assert mods.mask is not None
        engine = TorchEngine(torch.float32, self.q_idx.device, mods.tensors)
        (visible,) = evaluate(mods.mask, self._asdict(), engine)
        hidden: torch.Tensor = ~visible
        return hidden


_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "neg": operator.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "where": torch.where,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "to_int": lambda x: x.to(torch.int32),
}


class TorchEngine:
    """Evaluates programs on torch tensors."""

    def __init__(self, dtype: torch.dtype, device: torch.device, tensors: tuple[torch.Tensor, ...]) -> None:
        """``dtype``: of floats."""
        self.dtypes: dict[str, torch.dtype] = {"float": dtype, "int": torch.int32, "bool": torch.bool}
        self.device, self.tensors = device, tensors
        self.operations = _OPERATIONS | {"to_float": lambda x: x.to(dtype)}

    def constant(self, kind: Kind, number: float) -> torch.Tensor:
        return torch.tensor(number, dtype=self.dtypes[kind], device=self.device)

    def load(self, number: int, indices: list[torch.Tensor]) -> torch.Tensor:
        """Elements of a tensor; IndexError where an index is out of range."""
        tensor = self.tensors[number].detach()
        values = tensor[tuple(indices)] if indices else tensor
        return values.to(self.dtypes[KINDS[DTYPES[tensor.dtype]]])

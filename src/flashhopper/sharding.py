"""How DTensors are cut for the operators of :mod:`flashhopper.torch_library`: by batch or by heads, nothing else.

DTensor brings inputs that are cut otherwise, by sequence for example, into one of these forms.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from flashhopper import torch_library
from flashhopper.torch_library import NUM_RESULTS, Call

_registered: list[bool] = []


def is_dtensor(x: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # importing it takes a second that others need not spend
    return module is not None and isinstance(x, module.DTensor)


def register() -> None:
    """Tell DTensor the rules.

    Raises:
        NotImplementedError: this PyTorch has nothing to register a rule with.
    """
    if _registered:
        return
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError as error:
        raise NotImplementedError(
            f"flash_attn_func on DTensors needs torch.distributed.tensor.experimental.register_sharding, which torch"
            f" {torch.__version__} lacks; call it on the local shards (to_local, local_map)"
        ) from error
    operators = torch.ops.flashhopper
    register_sharding(operators.attention.default)(_of_attention)
    register_sharding(operators.attention_backward.default)(_of_attention_backward)
    _registered.append(True)


def _attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    register()
    return torch_library.attention(*arguments)


# With torch 2.13 the first graph is right; after an eager call on DTensors the partitioner fails at LSE's gradient.
attention: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.compiler.disable(
    _attention,
    reason="flash_attn_func on DTensors is not there in compiled graphs; call it outside, or on the local shards"
    " (to_local, local_map)",
)
"""As :func:`flashhopper.torch_library.attention`, for DTensors."""


def heads_can_be_cut(heads_k: int, mesh_shape: Iterable[int]) -> bool:
    """Whether each process gets the key heads of its query heads, over whichever dimensions of the mesh they are cut.

    A cut into more parts than there are heads is none: DTensor never makes it.
    """
    sizes = tuple(mesh_shape)
    subsets = (subset for n in range(len(sizes) + 1) for subset in itertools.combinations(sizes, n))
    return all(heads_k % parts == 0 for parts in map(math.prod, subsets) if parts <= heads_k)


Placements = tuple[list[Any], list[Any]]
"""Of outputs, and of arguments; None for what is no tensor."""


class _Cut:
    """One dimension of q, k and v, and the same of all that goes with them; or, with None, no cut."""

    def __init__(self, name: str | None, call: Call) -> None:
        from torch.distributed.tensor import Partial, Replicate, Shard

        heads_of_q = len(call.q.shape) - 2  # (batch, seqlen, heads, head_dim) or, ragged, (total, heads, head_dim)
        self.whole: Any = Replicate()
        self.total: Any = Partial()
        self.qkv: Any = self.whole
        self.lse: Any = self.whole
        self.sink: Any = self.whole
        self.slopes: Any = self.whole
        self.is_sum = name == "batch"
        if name == "batch":
            self.qkv = self.lse = Shard(0)
        elif name == "heads":
            self.qkv, self.lse, self.sink = Shard(heads_of_q), Shard(heads_of_q - 1), Shard(0)
        slopes = call.softmax_tensors.alibi_slopes
        if slopes is not None and name == "heads":
            self.slopes = Shard(len(slopes.shape) - 1)
        elif slopes is not None and name == "batch" and len(slopes.shape) == 2:
            self.slopes = Shard(0)

    def arguments(self, call: Call) -> list[Any]:
        """Of the operator's arguments; lengths of a ragged batch are whole."""
        sink, slopes = call.softmax_tensors
        softmax = (None if sink is None else self.sink, None if slopes is None else self.slopes)
        others = call.flat()[5:]
        return [self.qkv] * 3 + [*softmax] + [self.whole if hasattr(x, "mesh") else None for x in others]


def _cuts(call: Call) -> list[_Cut]:
    k: Any = call.k
    names: list[str | None] = [None]
    if call.ragged is None:
        names.append("batch")
    if heads_can_be_cut(k.shape[-2], k.mesh.shape):
        names.append("heads")
    return [_Cut(name, call) for name in names]


def _of_attention(*arguments: Any) -> Sequence[Placements]:
    call = Call.of(arguments)
    return [([cut.qkv, cut.lse], cut.arguments(call)) for cut in _cuts(call)]


def _of_attention_backward(*arguments: Any) -> Sequence[Placements]:
    call, grad_lse = Call.of(arguments[NUM_RESULTS:]), arguments[1]
    placements = []
    for cut in _cuts(call):
        dsink = cut.whole  # of no elements, without a sink
        if call.softmax_tensors.learnable_sink is not None:
            dsink = cut.total if cut.is_sum else cut.sink
        results = [cut.qkv, None if grad_lse is None else cut.lse, cut.qkv, cut.lse]
        placements.append(([cut.qkv] * 3 + [dsink], results + cut.arguments(call)))
    return placements

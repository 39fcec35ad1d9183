"""A call that ``torch.compile`` does not look into. Apart from the rest: the decorator imports the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="score_mod and mask_mod of flashhopper run outside of graphs")  # type: ignore[untyped-decorator]
def uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, computed outside of any graph that is being recorded."""
    return function(*arguments)

"""Kernels that compile for ``sm_90a`` but that no card has run yet: an error beats a result that nobody has checked.

What stands here is refused on CUDA tensors, unless the environment variable FLASHHOPPER_UNPROVEN is 1, as the GPU tests
set it. An entry goes when its tests have passed on a card.
"""

from __future__ import annotations

import os

VARIABLE = "FLASHHOPPER_UNPROVEN"


def refuse_unproven(what: str) -> None:
    """NotImplementedError, unless the user asked for it."""
    if os.environ.get(VARIABLE) != "1":
        raise NotImplementedError(
            f"not there yet on CUDA tensors: {what}. The kernels compile, but no card has run them; {VARIABLE}=1 in the"
            " environment uses them all the same"
        )

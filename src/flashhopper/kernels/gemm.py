"""One WGMMA group: the matrix product every consumer issues."""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def gemm(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, zero_init: Constexpr[bool]):
    """Issue acc (+)= a · bᵀ as one WGMMA group. The atom is private: ``set`` on the caller's would escape the loop."""
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not zero_init)
    for k_block in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k_block], b[None, None, k_block], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()

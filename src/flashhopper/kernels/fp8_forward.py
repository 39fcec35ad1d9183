"""The FP8 forward kernel: e4m3 or e5m2 operands with scales, V transposed, a 16-bit O."""

from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from flashhopper.config import KEYS_PER_SCALE, KernelSpec
from flashhopper.kernels.cta import Cta
from flashhopper.kernels.epilogue import Output
from flashhopper.kernels.features import fake_feature_args
from flashhopper.kernels.forward import ELEMENTS, WORKSPACE_INTS, ForwardKernel
from flashhopper.kernels.fp8_mma import Fp8Consumer, Scales
from flashhopper.kernels.fp8_softmax import make_fp8_softmax
from flashhopper.kernels.load import TmaOperand
from flashhopper.kernels.mma import Consumer, Operands
from flashhopper.kernels.ragged import Rows, own_block


class TransposedValues(TmaOperand):
    """V with its keys contiguous. In a ragged batch each sequence has slots of its own, whole blocks of them, zeros
    after its keys: tiles need no bound."""

    def partition(self, head: Int32, batch: Int32, rows: Rows | None = None) -> tuple[cute.Tensor, cute.Tensor]:
        if rows is None:
            return super().partition(head, batch)
        first_slot = own_block(rows.start, batch, KEYS_PER_SCALE) * KEYS_PER_SCALE
        return self.partition_view(cute.domain_offset((0, first_slot), self.gX[None, None, head, 0]))


class Fp8ForwardKernel(ForwardKernel):
    """Attention forward on e4m3 or e5m2 operands. V comes as ``(batch, heads_k, head_dim_v, slots)``: 8-bit WGMMAs want
    the summed extent contiguous, and the order of keys within it matches P's registers.

    P is e4m3 whatever V is (PTX ISA 9.7.15.5.2, wgmma.mma_async: .atype and .btype of 8 bits may differ): its range is
    made to fit, and a bit of its mantissa would be lost.
    """

    value_modes: ClassVar[list[int]] = [2, 3, 1, 0]
    value_major = OperandMajorMode.K
    value_operand: ClassVar[type[TmaOperand]] = TransposedValues

    def __init__(self, spec: KernelSpec):
        super().__init__(spec)
        self.probability_element = Float8E4M3FN

    def tma_view(self, m: cute.Tensor, rows_mode: int) -> cute.Tensor:
        if rows_mode == 1:
            return cute.make_tensor(m.iterator, cute.select(m.layout, mode=self.value_modes))
        return super().tma_view(m, rows_mode)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        workspace: cute.Tensor,
        scale_Q: cute.Tensor,
        scale_K: cute.Tensor,
        scale_V: cute.Tensor,
        mean_V: cute.Tensor,
        log2_rows_Q: Int32,
        log2_rows_K: Int32,
        softmax_scale_log2: Float32,
        max_ctas: Int32,
        feature_args: Any,
        stream: Any,
    ):
        """As the 16-bit kernel, with V ``(batch, heads_k, head_dim_v, slots)``; scales fp32, of Q ``(batch, heads,
        blocks)``, of K ``(batch, heads_k, blocks)``, of V and its mean ``(batch, heads_k, head_dim_v)``. Of a ragged
        batch each sequence has scale blocks and slots of its own (:func:`own_block`); all but V's scales and means, of
        which there is one each per sequence, have a batch of 1."""
        scales = (scale_Q, scale_K, scale_V, mean_V, log2_rows_Q, log2_rows_K)
        self.launch((mQ, mK, mV), (mO, mLSE, workspace), softmax_scale_log2, max_ctas, feature_args, stream, scales)

    def make_consumer(
        self, cta: Cta, operands: Operands, output: Output, index: Int32, softmax_scale_log2: Float32, scales: tuple
    ) -> Consumer:
        softmax = make_fp8_softmax(self.spec.config.softmax, softmax_scale_log2)
        return Fp8Consumer(cta, operands, softmax, output, index, Scales(scales[:4], scales[4:]))


def compile_fp8_forward(spec: KernelSpec, options: str = "--enable-tvm-ffi") -> Any:
    """Compile the kernel of a spec for the current target; needs neither a tensor nor a GPU.

    The result takes ``(q, k, v, out, lse, workspace, scale_q, scale_k, scale_v, mean_v, log2_rows_q, log2_rows_k,
    softmax_scale_log2, max_ctas, feature_args)``, on torch's current stream; ``feature_args`` is a
    :class:`FeatureArgs`, or None without features.
    """
    batch, seqlen_q, seqlen_k, slots, heads, heads_k = (cute.sym_int() for _ in range(6))
    head_dim, head_dim_v = (cute.sym_int(divisibility=16) for _ in range(2))
    sequences = cute.sym_int() if spec.features.ragged else batch

    def tensor(dtype: Any, shape: tuple[Any, Any, Any, Any], unit: int) -> Any:
        strides = tuple(cute.sym_int64(divisibility=unit) for _ in range(3))  # TMA: multiples of 16 bytes
        return make_fake_tensor(ELEMENTS[dtype], shape, (*strides, 1), assumed_align=16)

    def scales(entries: Any, num_heads: Any, extent: Any) -> Any:
        strides = (cute.sym_int64(), cute.sym_int64())
        return make_fake_tensor(Float32, (entries, num_heads, extent), (*strides, 1), assumed_align=4)

    lse = make_fake_compact_tensor(Float32, (batch, heads, seqlen_q), stride_order=(2, 1, 0), assumed_align=4)
    workspace = make_fake_compact_tensor(Int32, (WORKSPACE_INTS,), assumed_align=16)
    return cute.compile(
        Fp8ForwardKernel(spec),
        tensor(spec.dtype, (batch, seqlen_q, heads, head_dim), 16),
        tensor(spec.dtype, (batch, seqlen_k, heads_k, head_dim), 16),
        tensor(spec.dtype, (batch, heads_k, head_dim_v, slots), 16),
        tensor(spec.out_dtype, (batch, seqlen_q, heads, head_dim_v), 8),
        lse,
        workspace,
        scales(batch, heads, cute.sym_int()),
        scales(batch, heads_k, cute.sym_int()),
        scales(sequences, heads_k, spec.head_dim_v),
        scales(sequences, heads_k, spec.head_dim_v),
        Int32(7),
        Int32(7),
        Float32(1.0),
        Int32(1),
        fake_feature_args(spec.features),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )

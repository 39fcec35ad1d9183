"""The smallest kernel worth compiling: y = s·x. The DSL reads kernels from their file, so it has one."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

THREADS = 128


class Scale:
    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, scale: Float32, stream: Any):
        self.kernel(mX, mY, scale).launch(
            grid=(cute.ceil_div(mX.shape[0], THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor, scale: Float32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * THREADS + thread
        if index < mX.shape[0]:
            mY[index] = mX[index] * scale


def compile_scale(options: str) -> Any:
    extent = cute.sym_int()
    mX, mY = (make_fake_compact_tensor(Float32, (extent,), assumed_align=16) for _ in range(2))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(Scale(), mX, mY, Float32(1.0), stream, options=options)

"""Small backward passes that run under compute-sanitizer. Prints how many came out right.

Inputs are made and results checked on the CPU, so that the card sees copies, fills and our kernels only.
"""

from __future__ import annotations

import itertools

import torch

from flashhopper import launch, launch_backward
from flashhopper.options import AttentionOptions
from flashhopper.reference import attention

HEAD_DIMS = (56, 120, 248)  # the last columns of each tile are past the tensor's end
CASES = ((200, 300, False), (150, 100, True), (130, 1, True))  # seqlen_q, seqlen_k, deterministic


def is_right(head_dim: int, causal: bool, seqlen_q: int, seqlen_k: int, deterministic: bool) -> bool:
    """One forward and one backward of 2 query heads on 1 key head, with a gradient of LSE, against fp32."""
    sizes = (seqlen_q, 2), (seqlen_k, 1), (seqlen_k, 1)
    tensors = [torch.randn(1, s, h, head_dim).bfloat16() for s, h in sizes]
    grad_out, grad_lse = torch.randn(1, seqlen_q, 2, head_dim).bfloat16(), torch.randn(1, 2, seqlen_q)
    options = AttentionOptions(causal=causal, deterministic=deterministic)
    on_card = [x.cuda() for x in tensors]
    result = launch.forward(*on_card, options)
    *gradients, _ = launch_backward.backward(grad_out.cuda(), *on_card, *result, options, grad_lse=grad_lse.cuda())
    inputs = [x.float().requires_grad_() for x in tensors]
    ref = attention(*inputs, softmax_scale=head_dim**-0.5, causal=causal)
    expected = torch.autograd.grad(ref, inputs, (grad_out.float(), grad_lse))
    errors = [
        (x.cpu().float() - y).abs().max() / (y.abs().max() + 0.1) for x, y in zip(gradients, expected, strict=True)
    ]
    right = max(errors) < 0.03
    name = f"d{head_dim} {'causal' if causal else 'full'} {seqlen_q} x {seqlen_k} deterministic={deterministic}"
    print(f"{name}: {'right' if right else 'WRONG'}", flush=True)
    return bool(right)


def main() -> None:
    torch.manual_seed(0)
    results = [is_right(*which, *case) for which in itertools.product(HEAD_DIMS, (False, True)) for case in CASES]
    torch.cuda.synchronize()
    print(f"right: {sum(results)} of {len(results)}")


if __name__ == "__main__":
    main()

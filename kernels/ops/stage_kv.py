"""Staging: K and V of one loop of a step as attention reads them, finite and BF16, in one launch (Sec. 4).

::

    staged[0, t, h, i] = bf16(clamp(k[t, h, i], +-65280)), NaN as 0        staged[1]: the same of v

Roofline: each value is read once and written once, 4 bytes; for a decode step of 64 tokens of Ouro (16 heads, D = 128)
that is 1 MB, 0.25 us at 4.3 TB/s: a step sees the latency of one launch instead of four.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from residualquant.attention import BF16_LIMIT, LIMIT, to_bf16
from residualquant.errors import check_count
from residualquant.kernels.checks import FLOATS, check_tensors, sizes
from residualquant.kernels.triton_common import check_device, round_bf16

BLOCK = 1024  # values at a time


def stage_kv_reference(staged: Tensor, k: Tensor, v: Tensor) -> None:
    """What :func:`stage_kv` does, in plain torch."""
    for kept, given in zip(staged, (k, v)):
        kept.copy_(to_bf16(given))


@triton.jit
def stage_kv_kernel(
    staged, k, v, sanitised, staged_stride, staged_token_stride, k_token_stride, v_token_stride,
    COUNT: tl.constexpr, LIMIT: tl.constexpr, CODED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK of the COUNT = H D values of one token (axis 0), of K or V (axis 2)."""
    token = tl.program_id(0).to(tl.int64)
    is_v = tl.program_id(2)
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = value < COUNT
    given = k + token * k_token_stride
    if is_v > 0:
        given = v + token * v_token_stride
    x = tl.load(given + value, mask=inside, other=0.0).to(tl.float32)
    if sanitised is not None:
        changed = tl.sum(tl.where(tl.abs(x) <= CODED, 0, 1))
        if changed > 0:
            tl.atomic_add(sanitised, changed)
    _, x = round_bf16(tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -LIMIT), LIMIT))
    kept = staged + is_v.to(tl.int64) * staged_stride + token * staged_token_stride
    tl.store(kept + value, x.to(staged.dtype.element_ty), mask=inside)


def stage_kv(staged: Tensor, k: Tensor, v: Tensor, sanitised: Tensor | None = None, *, check: bool = True) -> None:
    """Keep K and V of one loop of a step, finite, in ``staged``.

    Allocates nothing and never waits for the GPU.

    Args:
        staged: [2, T, H, D] bf16 (or another floating-point dtype), the last two axes contiguous, as those of k and v.
        k, v: [T, H, D] of one floating-point dtype, post-RoPE.
        sanitised: int32 [1], increased by the values that were NaN, infinite or beyond +-65504.
        check: raise ValueError as below; to leave out where such arguments were checked before.

    Raises:
        ValueError: an argument of another shape, dtype or device.
    """
    if check:
        _check(staged, k, v, sanitised)
    tokens, heads, head_dim = k.shape
    count = heads * head_dim
    if tokens:
        stage_kv_kernel[(tokens, triton.cdiv(count, BLOCK), 2)](
            staged, k, v, sanitised, *staged.stride()[:2], k.stride(0), v.stride(0),
            COUNT=count, LIMIT=BF16_LIMIT, CODED=LIMIT, BLOCK=BLOCK,
        )  # fmt: skip


def _check(staged, k, v, sanitised) -> None:
    shape = sizes("k", k, "T, H, D")
    check_device(k.device)
    check_tensors(
        k.device,
        staged=(staged, [[2, *shape]], FLOATS, 2),
        k=(k, [shape], FLOATS, 2),
        v=(v, [shape], (k.dtype,), 2),
        sanitised=(sanitised, [[1]], (torch.int32,), 1),
    )


def stage_kv_cost(tokens: int, heads: int, head_dim: int, state_bytes: int = 2) -> tuple[int, int]:
    """Bytes that one call must move, and no operations.

    Raises:
        ValueError: a count that is no integer or negative.
    """
    for name, count in dict(tokens=tokens, heads=heads, head_dim=head_dim, state_bytes=state_bytes).items():
        check_count(name, count, 0)
    return 2 * tokens * heads * head_dim * (state_bytes + 2), 0

"""FlashAttention 3 as vLLM brings it: the BF16 baseline of the kernels' benchmark."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def flash_attention_ways(heads: int, head_dim: int, context: int, batch: int) -> dict[str, Callable]:
    """Ways to attend with one query token, by layout of the past; none where vLLM or its kernels are not installed.

    FlashAttention chooses the number of splits itself.

    Args:
        heads, head_dim: H, D.
        context, batch: past tokens and sequences.

    Returns:
        functions of k and v, each bf16 with ``batch * context * H * D`` values, by name.
    """
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return {}
    q = torch.randn(batch, heads, head_dim, device="cuda").bfloat16()
    queries, tokens = (torch.arange(batch + 1, device="cuda", dtype=torch.int32) * step for step in (1, context))
    pages = torch.arange(batch * context // 16, device="cuda", dtype=torch.int32).view(batch, -1)
    past = {
        "contiguous": ((-1, heads, head_dim), dict(cu_seqlens_k=tokens)),
        "paged": ((-1, 16, heads, head_dim), dict(seqused_k=tokens[1:] - tokens[:-1], block_table=pages)),
    }

    def attend(name: str, k: Tensor, v: Tensor) -> None:
        shape, where = past[name]
        flash_attn_varlen_func(
            q, k.view(shape), v.view(shape), max_seqlen_q=1, cu_seqlens_q=queries, max_seqlen_k=context, fa_version=3,
            **where,
        )  # fmt: skip

    return {f"FlashAttention 3, {name}": lambda k, v, name=name: attend(name, k, v) for name in past}

"""FlashAttention as vLLM brings it: for prompts that have no packed past, and the kernels' BF16 baseline."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def prompt_attention(head_dim: int) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], None] | None:
    """Causal attention of whole prompts, by the version that vLLM's own models get; None where vLLM has none.

    Returns:
        a function of ``out`` [T, Hq, D] to write to, q [T, Hq, D], k and v [T, H, D], all three bf16, ``starts`` int32
        [B + 1], where each prompt begins, and the length of the longest.
    """
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version, is_flash_attn_varlen_func_available

    if not is_flash_attn_varlen_func_available():
        return None
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    version = get_flash_attn_version(head_size=head_dim)

    def attend(out: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> None:
        written = out if out.dtype == q.dtype else torch.empty_like(q)
        flash_attn_varlen_func(
            q, k, v, max_seqlen_q=longest, cu_seqlens_q=starts, max_seqlen_k=longest, cu_seqlens_k=starts, causal=True,
            num_splits=1, out=written, fa_version=version,
        )  # fmt: skip
        if written is not out:
            out.copy_(written)

    return attend


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


def flash_attention_prefill_ways(queries: int, past: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Ways of causal attention of one sequence's last ``queries`` tokens over ``past`` more and each other; none where
    vLLM or its kernels are not installed.

    Returns:
        functions of q [T, H, D], k and v [past + T, H, D], all bf16, by name.
    """
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return {}
    asked, held = (torch.tensor([0, count], device="cuda", dtype=torch.int32) for count in (queries, past + queries))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(
            q, k, v, max_seqlen_q=queries, cu_seqlens_q=asked, max_seqlen_k=past + queries, cu_seqlens_k=held,
            causal=True, fa_version=3,
        )  # fmt: skip

    return {"FlashAttention 3": attend}

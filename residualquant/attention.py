"""Attention over a BF16 step and a past kept in rotated space (Sec. 4).

    score = (q U_K) . Zhat_K        out = (sum_t p_t Zhat_V,t) U_V^T        softmax and accumulation in FP32

The past is never rotated back: the query is rotated once and the output once. All of it is plain PyTorch; grouped
queries are folded into the query axis, so Hq = H and Hq = G*H take the same path. (A float64 model is served in
float64 throughout; that is for tests, where codes must not flip by the order of a sum.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from residualquant.residual import LIMIT

BF16_LIMIT = 65280.0  # 65504, the codec's limit, is no BF16 value: it would be rounded up beyond itself


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What attention over the past is computed in for queries of ``dtype``: FP32, or FP64 for FP64."""
    return torch.promote_types(dtype, torch.float32)


def make_finite(x: Tensor) -> Tensor:
    """``x`` with NaN replaced by 0 and everything else within +-65280, the largest BF16 value within the codec's limit.

    A NaN that stayed in K or V would spoil other tokens, since 0 * NaN = NaN in the sum of values.
    """
    return make_finite_(x.clone())


def make_finite_(x: Tensor) -> Tensor:
    """:func:`make_finite` in place."""
    return x.nan_to_num_(nan=0.0).clamp_(-BF16_LIMIT, BF16_LIMIT)


def to_bf16(x: Tensor) -> Tensor:
    """``x`` as attention reads it: finite and rounded to BF16."""
    return make_finite(x).to(torch.bfloat16)


def count_unusable(x: Tensor, kept: int = 0) -> Tensor:
    """Number of values that :func:`make_finite` has to replace, for each index of the first ``kept`` dimensions."""
    low, high = x.aminmax() if x.numel() else (x.new_zeros(()),) * 2
    if (low >= -LIMIT) & (high <= LIMIT):  # one wait for a GPU; false for NaN; counting takes thirty times as long
        return torch.zeros(x.shape[:kept], dtype=torch.long, device=x.device)
    return (~(x.abs() <= LIMIT)).sum(tuple(range(kept, x.dim())))


def rotate(x: Tensor, matrix: Tensor | None) -> Tensor:
    """``x @ T`` for x [..., Hx, D]: T is [D, D], or [H, D, D] with Hx = G*H consecutive query heads per KV head."""
    if matrix is None:
        return x
    matrix = matrix.to(x.dtype)
    if matrix.dim() == 2:
        return x @ matrix
    grouped = x.unflatten(-2, (matrix.shape[0], -1))
    return (grouped @ matrix).flatten(-3, -2)


def rotate_back(x: Tensor, matrix: Tensor | None) -> Tensor:
    """``x @ T^T``, the inverse of :func:`rotate` for an orthogonal T."""
    return rotate(x, None if matrix is None else matrix.transpose(-1, -2))


def attend_prompt(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None) -> Tensor:
    """Causal attention within one forward, as every prefill runs: BF16 values, no past.

    Args:
        q: [B, T, Hq, D]; k, v: [B, T, H, D].
        valid: [B, T] bool, False on padding. A padded query sees only itself, so that it stays finite.

    Returns:
        [B, T, Hq, D] in the dtype of q.
    """
    mask = None
    if valid is not None:
        length = q.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        mask = (causal & valid[:, None, :]) | torch.eye(length, dtype=torch.bool, device=q.device)
        mask = mask[:, None]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.to(q.dtype).transpose(1, 2),
        v.to(q.dtype).transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def attend_one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """One query token per row over one stretch of keys, in the dtype given: FP32.

    Args:
        q: [B, H, G, D], G query heads per KV head; k, v: [B, H, S, D], in the space q is in.
        bias: [B, 1, 1, S], 0 where a row may look and -inf elsewhere.

    Returns:
        [B, H, G, D], in the space v is in.
    """
    scores = torch.matmul(q * k.shape[-1] ** -0.5, k.transpose(-1, -2))
    weights = torch.softmax(scores.add_(bias), dim=-1)
    return torch.matmul(weights, v)


def attend_past_and_step(
    q: Tensor,
    past: tuple[Tensor, Tensor],
    step: tuple[Tensor, Tensor],
    matrices: tuple[Tensor | None, Tensor | None],
    mask: Tensor | None = None,
) -> Tensor:
    """Attention of T new tokens over a packed past and their own BF16 K and V (the general form of Sec. 4).

    Each part gives a partial sum and its log-sum-exp; the two are merged as a split-KV kernel merges its splits, and
    the inverse rotation of the past's part is done there, once:
    ``out = w * (sum_t p_t Zhat_V,t) U_V^T + (1 - w) * sum_t p_t V_t``.

    Args:
        q: [B, T, Hq, D], not rotated.
        past: Zhat_K, Zhat_V [B, S, H, D] FP32 in rotated space.
        step: K, V [B, T, H, D] BF16 of this forward, in the original space.
        matrices: rotations of K and of V.
        mask: [B, T, S + T] bool, what each query may see of past and step; None: all of the past, causal in the step.

    Returns:
        [B, T, Hq, D] in the dtype of q.
    """
    length = q.shape[1]
    if mask is None:
        mask = torch.ones(length, past[0].shape[1] + length, dtype=torch.bool, device=q.device)
        mask = mask.tril(past[0].shape[1])[None]
    query = q.to(compute_dtype(q.dtype))
    past_out, past_lse = _partial(rotate(query, matrices[0]), *past, mask[:, :, :-length])
    step_out, step_lse = _partial(query, *step, mask[:, :, -length:])
    weight = torch.sigmoid(past_lse - step_lse)[..., None]
    merged = torch.lerp(step_out, rotate_back(past_out, matrices[1]), weight)
    return merged.to(q.dtype)


def _partial(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax-weighted values [B, T, Hq, D] and log-sum-exp [B, T, Hq] of one stretch; 0 and -inf where it is empty."""
    heads, dim = k.shape[2], k.shape[3]
    grouped = q.unflatten(2, (heads, -1)) * dim**-0.5
    scores = torch.einsum("bthgd,bshd->bthgs", grouped, k.to(q.dtype))
    scores = scores.masked_fill(~mask[:, :, None, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    return torch.einsum("bthgs,bshd->bthgd", weights, v.to(q.dtype)).flatten(2, 3), lse.flatten(2, 3)


class PackedAttention:
    """The ``attend`` hook that runs a looped model on a :class:`residualquant.cache.PackedCache` (Sec. 4).

    Every loop reads the past packed and this forward's tokens in BF16; after the last loop the cache packs them. One
    forward may be a whole prompt, a chunk of one, or a single token.

    Args:
        cache: the packed cache; tokens are added to it.
        valid: [B, S] bool over cache columns, False on padding (left, right or between); later columns are valid.
    """

    def __init__(self, cache, valid: Tensor | None = None):
        self.cache = cache
        self.valid = valid

    def __call__(self, loop: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = self.cache.past(loop, layer)
        matrices = self.cache.matrices(loop, layer)
        step = self.cache.stage(loop, layer, k, v)
        if past[0].shape[1] == 0:
            return attend_prompt(q, *step, self._columns(0, q.shape[1]))
        return attend_past_and_step(q, past, step, matrices, self._mask(past[0].shape[1], q))

    def _columns(self, start: int, stop: int) -> Tensor | None:
        """Valid columns start … stop-1, [B, stop - start]; None where all are."""
        if self.valid is None or self.valid.shape[1] <= start:
            return None
        known = self.valid[:, start:stop]
        return F.pad(known, (0, stop - start - known.shape[1]), value=True)

    def _mask(self, past: int, q: Tensor) -> Tensor | None:
        columns = self._columns(0, past + q.shape[1])
        if columns is None:
            return None
        causal = torch.ones(q.shape[1], columns.shape[1], dtype=torch.bool, device=q.device).tril(past)
        itself = torch.zeros_like(causal).diagonal_scatter(torch.ones_like(causal[:, 0]), past)
        return (causal & columns[:, None]) | itself

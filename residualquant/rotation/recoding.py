"""The codec of Sec. 3.2 as calibration sees it: in the original basis, and differentiable in the rotation.

With a reference's reconstruction held constant, the residual of a loop does not depend on the rotation, since least
squares, norms and differences are the same in every basis::

    Y_r = X_r - alpha_r sg(Xhat_p) - m_r;    Xhat_r = alpha_r sg(Xhat_p) + D(Q(Y_r T)) T^T + m_r;    mu_r = m_r T

so the gradient reaches ``T`` through the loop's own codes only (App. G: straight-through rounding, and no gradient
through reconstructed references).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from residualquant.affine import CLIP, dequantize, quantize
from residualquant.config import RAW_BITS, KVQuantConfig
from residualquant.residual import Step, _coefficient, coding_steps, reconstruct


class _StraightThrough(torch.autograd.Function):
    """``dequantize(quantize(x))``, and the gradient it would have if neither codes nor metadata were rounded."""

    @staticmethod
    def forward(ctx, x: Tensor, bits: int, group_size: int, int2_clip: float) -> Tensor:
        codes, metadata = quantize(x, bits, group_size, int2_clip)
        ctx.save_for_backward(x, codes, metadata)
        ctx.levels, ctx.clip = 2**bits - 1, int2_clip if bits == 2 else CLIP[bits]
        return dequantize(codes, metadata)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, codes, metadata = ctx.saved_tensors
        scale, offset = metadata.float().split(1, -1)
        x, codes, grad = (t.unflatten(-1, (metadata.shape[-2], -1)) for t in (x, codes, grad))
        place = (x - offset).div_(torch.where(scale > 0, scale, 1.0))
        inside = (place - 0.5).ceil_().eq_(codes).mul_(scale > 0)  # 1 where the code was not clamped
        own = grad * inside
        d_scale = torch.sub(grad * codes, place.mul_(own)).sum(-1, keepdim=True) * (scale > 0)
        d_offset = (grad - own).sum(-1, keepdim=True)
        # scale = (hi - lo) clip / levels;  offset = (lo + hi - (hi - lo) clip) / 2
        d_hi = d_scale * (ctx.clip / ctx.levels) + d_offset * ((1 - ctx.clip) / 2)
        for end, d_end in ((x.amax(-1, keepdim=True), d_hi), (x.amin(-1, keepdim=True), d_offset - d_hi)):
            at_end = torch.eq(x, end, out=inside)
            own.addcmul_(at_end, d_end / at_end.sum(-1, keepdim=True))
        return own.flatten(-2), None, None, None


def straight_through(x: Tensor, bits: int, group_size: int, int2_clip: float = 0.9) -> Tensor:
    """``dequantize(*quantize(x, ...))`` (Sec. 2.1), bit for bit, with a straight-through gradient.

    Rounding (of codes, scale and offset) counts as the identity; a clamped code has no gradient of its own, and what
    moves the ends of a group moves scale and offset.

    Args:
        x: [..., D] fp32, finite.
        bits, group_size, int2_clip: as for :func:`residualquant.affine.quantize`.
    """
    return _StraightThrough.apply(x, bits, group_size, int2_clip)


def _target(x: Tensor, step: Step, rebuilt: dict[int, Tensor], cfg: KVQuantConfig) -> tuple[Tensor, Tensor | None]:
    """What one step quantises, and the prediction it was taken from (None for the anchor and direct coding)."""
    own = x[step.slice]
    if step.reference is None:
        return own, None
    alpha = _coefficient(own, rebuilt[step.reference], cfg.coefficient)
    prediction = rebuilt[step.reference] if alpha is None else alpha.float() * rebuilt[step.reference]
    return own - prediction, prediction


def _rebuild(
    target: Tensor, prediction: Tensor | None, step: Step, cfg: KVQuantConfig, matrix: Tensor, centre: Tensor | None
) -> Tensor:
    if step.bits == RAW_BITS:
        return target
    value = prediction
    if step.bits:
        residual = target if centre is None else target - centre
        coded = straight_through(residual @ matrix, step.bits, step.group_size, cfg.int2_clip) @ matrix.mT
        value = coded if value is None else value + coded
    value = value if centre is None else value + centre
    return value.expand_as(target)


def recode(x: Tensor, cfg: KVQuantConfig, matrix: Tensor, centres: Tensor | None = None) -> Tensor:
    """What a cache of ``cfg`` gives back for ``x``, rotated back to the original basis; differentiable in ``matrix``.

    Args:
        x: [L, H, T, D] K or V of one loop group.
        cfg: how they are coded.
        matrix: [H, D, D] fp32.
        centres: [L, H, D] fp32, the fixed means m in the original basis, or None.

    Returns:
        [L, H, T, D] fp32.
    """
    x = x.float()
    rebuilt: dict[int, Tensor] = {}
    parts: dict[int, Tensor] = {}
    for step in coding_steps(cfg):
        target, prediction = _target(x, step, rebuilt, cfg)
        centre = None if centres is None else centres[step.slice].unsqueeze(2)
        parts[step.loops.start] = value = _rebuild(target, prediction, step, cfg, matrix, centre)
        rebuilt |= zip(step.loops, value.detach())
    return torch.cat([parts[first] for first in sorted(parts)])


@torch.no_grad()
def fixed_means(tensors: Sequence[Tensor], cfg: KVQuantConfig, matrix: Tensor) -> Tensor:
    """Means over all tokens of what each loop quantises: of the anchor, and of each other loop's residual (App. G).

    A residual is taken from references that were rebuilt with their own means, loop by loop in coding order.

    Args:
        tensors: the texts' [L, H, T, D].
        cfg: how they are coded.
        matrix: [H, D, D] fp32.

    Returns:
        [L, H, D] fp32, in the original basis.
    """
    loops, heads, _, dim = tensors[0].shape
    centres = torch.zeros(loops, heads, dim, device=matrix.device)
    tokens = sum(x.shape[2] for x in tensors)
    steps = coding_steps(cfg)
    references = {step.reference for step in steps}
    rebuilt: list[dict[int, Tensor]] = [{} for _ in tensors]
    for step in steps:
        total = torch.zeros(len(step.loops), heads, dim, dtype=torch.float64, device=matrix.device)
        for x, known in zip(tensors, rebuilt):
            total += _target(x.float(), step, known, cfg)[0].sum(2, dtype=torch.float64)
        centre = centres[step.slice] = (total / tokens).float()
        if not references.isdisjoint(step.loops):
            for x, known in zip(tensors, rebuilt):
                target, prediction = _target(x.float(), step, known, cfg)
                value = _rebuild(target, prediction, step, cfg, matrix, centre.unsqueeze(2))
                known |= zip(step.loops, value)
    return centres


def quantisation_targets(x: Tensor, cfg: KVQuantConfig) -> Tensor:
    """What each loop quantises if nothing is rotated: ``x`` itself for the anchor and direct coding, else the residual.

    Args:
        x: [L, ..., D] K or V of one loop group.
        cfg: how it is coded; its rotation does not count.

    Returns:
        [L, ..., D] fp32.
    """
    rebuilt = dict(enumerate(reconstruct(x, replace(cfg, rotation="none"))))
    parts = {step.loops.start: _target(x.float(), step, rebuilt, cfg)[0] for step in coding_steps(cfg)}
    return torch.cat([parts[first] for first in sorted(parts)])

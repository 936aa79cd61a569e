"""Residual coding of one loop group across loops (Sec. 3.2): the codec itself.

The anchor loop is quantised alone.  Every other loop is predicted from its reference, as that will be *reconstructed*,
times a coefficient per token and head, and only the residual is quantised::

    anchor:  c_a = Q(Z_a - mu_a);               Zhat_a = D(c_a) + mu_a
    others:  alpha_r = coefficient(Z_r, Zhat_p);  c_r = Q(Z_r - alpha_r Zhat_p - mu_r)
             Zhat_r = alpha_r Zhat_p + D(c_r) + mu_r

Loops that share a reference and a precision are coded together in one *step*, and long inputs in blocks of tokens, so
that the work fits a processor's cache and the peak memory stays near the input's.  Sums run in a fixed order, so the
bytes of a token do not depend on what it is batched with: whole, chunked and token-by-token writes agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from residualquant import layout
from residualquant.affine import FP8, dequantize, pack_codes, quantize, unpack_codes
from residualquant.config import RAW_BITS, KVQuantConfig
from residualquant.rotation import Rotation, rotation_for

LIMIT = 65504.0  # the largest FP16 value: inputs are clamped to +-LIMIT before coding
BLOCK_VALUES = {"cpu": 2**20, "cuda": 2**24}  # values of all loops that are coded at a time


@dataclass(frozen=True, eq=False)
class PackedLoop:
    """Stored bytes of one loop; a part that is absent has width 0.

    Attributes:
        codes: [..., D b / 8] uint8, or [..., D] at the model's dtype for 16 bits.
        metadata: [..., 2 D / g] uint8: FP8 scale and offset of each group in turn.
        alpha: [..., 1 or 0] bf16.
    """

    codes: Tensor
    metadata: Tensor
    alpha: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three parts, in the order of the page layout."""
        return self.codes, self.metadata, self.alpha


@dataclass(frozen=True, eq=False)
class PackedKV:
    """The K or V states of one loop group, packed.

    Attributes:
        config: how they were coded.
        head_dim: channels per head (D).
        loops: the bytes, loop by loop.
        rotation: the basis they are in, or None.
        sanitised: 0-d int64, input values that were NaN, infinite or beyond +-65504.
    """

    config: KVQuantConfig
    head_dim: int
    loops: tuple[PackedLoop, ...]
    rotation: Rotation | None
    sanitised: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the codes, metadata and coefficients take (App. A.3)."""
        return sum(part.numel() * part.element_size() for loop in self.loops for part in loop.tensors)

    def unpacked_codes(self, loop: int) -> Tensor:
        """Codes of ``loop`` (from 0): [..., D] uint8.

        Raises:
            ValueError: a loop of 0 or 16 bits, which has no codes, or no such loop.
        """
        if not 0 <= loop < self.config.loops or self.config.group_sizes[loop] is None:
            raise ValueError(f"loop {loop} has no codes in a cache of bits {self.config.bits}")
        return unpack_codes(self.loops[loop].codes, self.config.bits[loop], self.head_dim)

    def map(self, change: Callable[[Tensor], Tensor]) -> PackedKV:
        """The same states with ``change`` applied to every stored tensor: index, crop or move, without recoding."""
        loops = tuple(PackedLoop(*map(change, loop.tensors)) for loop in self.loops)
        return PackedKV(self.config, self.head_dim, loops, self.rotation, self.sanitised)


def concatenate(parts: list[PackedKV], dim: int) -> PackedKV:
    """Packed states one after the other along ``dim`` (counted without the loops), without recoding."""
    first = parts[0]
    loops = tuple(
        PackedLoop(*(torch.cat(tensors, dim) for tensors in zip(*(part.loops[loop].tensors for part in parts))))
        for loop in range(first.config.loops)
    )
    return PackedKV(first.config, first.head_dim, loops, first.rotation, sum(part.sanitised for part in parts))


def encode(x: Tensor, cfg: KVQuantConfig, rotation: Rotation | None = None) -> PackedKV:
    """Packed K or V states of one loop group (Sec. 3.2).

    NaN counts as 0 and values are clamped to +-65504; ``PackedKV.sanitised`` counts both.

    Args:
        x: [L, ..., H, D] or [L, ..., D], any float dtype; keys are post-RoPE.
        cfg: how to code, for L loops.
        rotation: of this layer, K or V; needed for "oscar" and "optr_h", made here for "hadamard".

    Raises:
        ValueError: another number of loops, a head size that the groups do not divide, a rotation of another shape,
            or one where the configuration has none.
    """
    rotation = _check_input(x, cfg, rotation)
    head_dim, raw_dtype = x.shape[-1], x.dtype if x.dtype == torch.float16 else torch.bfloat16
    x, shape = _as_tokens(x, rotation)
    parts = []
    for block in _blocks(x):
        clean = _sanitise(x[:, block], cfg)
        loops: list[PackedLoop | None] = [None] * cfg.loops
        for step, states in _code(_rotate(clean, rotation), cfg, rotation, rebuild_all=False):
            for i, loop in enumerate(step.loops):
                raw = clean[loop].to(raw_dtype) if step.bits == RAW_BITS else None
                loops[loop] = _pack(states, i, step.bits, raw)
        parts.append(PackedKV(cfg, head_dim, tuple(loops), rotation, (clean != x[:, block]).sum()))
    packed = parts[0] if len(parts) == 1 else concatenate(parts, 0)
    return packed.map(lambda stored: stored.reshape(*shape[1:-1], stored.shape[-1]))


def reconstruct(x: Tensor, cfg: KVQuantConfig, rotation: Rotation | None = None) -> Tensor:
    """``decode(encode(x, cfg, rotation), space="rotated")``, bit for bit, without packing: the engine's fast path.

    Args:
        x, cfg, rotation: as for :func:`encode`.

    Returns:
        [L, ..., D] fp32 in the rotated space.

    Raises:
        ValueError: as :func:`encode`.
    """
    rotation = _check_input(x, cfg, rotation)
    x, shape = _as_tokens(x, rotation)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for block in _blocks(x):
        z = _rotate(_sanitise(x[:, block], cfg), rotation)
        for step, states in _code(z, cfg, rotation, rebuild_all=True):
            out[step.slice, block] = states.rebuilt
    return out.reshape(shape)


def decode(packed: PackedKV, space: str = "original") -> Tensor:
    """The states that the packed bytes stand for (Sec. 3.2).

    Args:
        packed: from :func:`encode`.
        space: "original", or "rotated" to leave out the inverse rotation, as attention in the rotated space wants.

    Returns:
        [L, ..., D] fp32.

    Raises:
        ValueError: another ``space``.
    """
    if space not in ("original", "rotated"):
        raise ValueError(f'space must be "original" or "rotated", got {space!r}')
    ...

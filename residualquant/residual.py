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

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from residualquant import layout
from residualquant.affine import CLIP, FP8, dequantize, pack_valid_codes, quantize_by, unpack_codes
from residualquant.config import RAW_BITS, KVQuantConfig
from residualquant.rotation import Rotation, rotation_for

LIMIT = 65504.0  # the largest FP16 value: inputs are clamped to +-LIMIT before coding
CPU_BLOCK_VALUES = 2**18  # values coded at a time: what fits the cache of a core
GPU_BLOCK_VALUES = 2**26  # enough to fill a GPU


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
        sanitised: 0-d int, input values that were NaN, infinite or beyond +-65504.
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


@dataclass(frozen=True)
class Step:
    """Consecutive loops that are coded together: same reference, same precision.

    Attributes:
        loops: the loops, from 0.
        reference: the loop that predicts them, or None.
        bits: of each of them.
        group_size: channels per scale and offset; None for 0 and 16 bits.
    """

    loops: range
    reference: int | None
    bits: int
    group_size: int | None

    @property
    def slice(self) -> slice:
        """The loops as an index."""
        return slice(self.loops.start, self.loops.stop)


def coding_steps(cfg: KVQuantConfig) -> tuple[Step, ...]:
    """The steps that code (or rebuild) a loop group, each after the step of its reference."""
    return _steps(cfg, cfg.bits)


@lru_cache(maxsize=256)
def _steps(cfg: KVQuantConfig, kinds: tuple) -> tuple[Step, ...]:
    """:func:`coding_steps`, where loops of one of the ``kinds`` may be coded together."""
    order = sorted(range(cfg.loops), key=lambda loop: (len(layout.loops_read(cfg, loop)), loop))
    steps: list[Step] = []
    for loop in order:
        step = Step(range(loop, loop + 1), cfg.reference_of(loop), cfg.bits[loop], cfg.group_sizes[loop])
        last = steps[-1] if steps else None
        alike = last and (last.reference, kinds[last.loops.start]) == (step.reference, kinds[loop])
        if alike and last.loops.stop == loop:
            steps[-1] = Step(range(last.loops.start, loop + 1), step.reference, step.bits, step.group_size)
        else:
            steps.append(step)
    return tuple(steps)


class Mixture:
    """Codecs of n rows that are coded together, each by its own: they differ in bits, clip and coefficient alone.

    Args:
        codecs: for each kind of row; more than one only of equal :func:`mixes_with`.
        kinds: which of them each row has, [n] int; None where there is one.
    """

    def __init__(self, codecs: Sequence[KVQuantConfig], kinds: Tensor | None = None):
        self.like = codecs[0]
        self.steps = coding_steps(self.like)
        self._levels = self._clip = self._norm_ratio = self._unit = None
        self._coefficient = self.like.coefficient
        if len(codecs) == 1:
            return
        self.steps = _steps(self.like, self.like.group_sizes)

        def of_rows(values: list) -> Tensor:
            return torch.tensor(values, device=kinds.device)[kinds]

        self._levels = of_rows([[2.0**bits - 1 for bits in c.bits] for c in codecs]).T
        self._clip = of_rows([[_clip(c, bits) for bits in c.bits] for c in codecs]).T
        coefficients = {c.coefficient for c in codecs}
        if len(coefficients) > 1:
            self._coefficient = None
            self._norm_ratio = of_rows([c.coefficient == "norm_ratio" for c in codecs])
            self._unit = of_rows([c.coefficient == "unit" for c in codecs])
        else:
            self._coefficient = coefficients.pop()

    def quantize(self, residual: Tensor, step: Step, rows: slice) -> tuple[Tensor, Tensor]:
        """Codes and metadata of a step's loops, residual [k, n, ..., D]."""
        if self._levels is None:
            levels, clip = 2**step.bits - 1, _clip(self.like, step.bits)
        else:
            shape = (*residual.shape[:2], *(1,) * (residual.dim() - 2))
            levels, clip = (table[step.slice, rows].reshape(shape) for table in (self._levels, self._clip))
        return quantize_by(residual, levels, clip, step.group_size)

    def coefficient(self, target: Tensor, reference: Tensor, rows: slice) -> Tensor | None:
        """alpha of each token and head, [k, n, ..., 1] bf16; None for 1."""
        if self._coefficient:
            return _coefficient(target, reference, self._coefficient)
        shape = (target.shape[1], *(1,) * (target.dim() - 2))
        norm_ratio, unit = (mask[rows].view(shape) for mask in (self._norm_ratio, self._unit))
        energy = _dot(reference, reference)
        product = _dot(target, torch.where(norm_ratio, target, reference))
        alpha = torch.where(norm_ratio, product.sqrt() / energy.sqrt(), product / energy)
        return torch.where(unit, 1.0, _valid(alpha, energy))


def _clip(cfg: KVQuantConfig, bits: int) -> float:
    return cfg.int2_clip if bits == 2 else CLIP.get(bits, 1.0)


def mixes_with(cfg: KVQuantConfig) -> object:
    """Codecs of which this is equal can be a :class:`Mixture`; one with loops without codes only with its like."""
    if None in cfg.group_sizes:
        return cfg
    return cfg.reference, cfg.group_sizes, cfg.rounding


def encode(x: Tensor, cfg: KVQuantConfig, rotation: Rotation | Tensor | None = None) -> PackedKV:
    """Packed K or V states of one loop group (Sec. 3.2).

    NaN counts as 0 and values are clamped to +-65504; ``PackedKV.sanitised`` counts both.

    Args:
        x: [L, ..., H, D] or [L, ..., D], any float dtype; keys are post-RoPE.
        cfg: how to code, for L loops.
        rotation: of this layer, K or V, or only its matrix [D, D] or [H, D, D]; needed for "oscar" and "optr_h",
            made here for "hadamard".

    Raises:
        ValueError: another number of loops, a head size that the groups do not divide, a rotation of another shape,
            or one where the configuration has none.
    """
    rotation = _check_input(x, cfg, rotation)
    tokens = x.reshape(cfg.loops, *_token_shape(x.shape[1:], rotation))
    parts = []
    for block in _blocks(tokens):
        given = tokens[:, block].float()
        clean = _sanitise(given)
        sanitised = (clean != given).sum(dtype=torch.int32)
        z = _rotate(_round_raw_loops(clean, cfg, x.dtype), rotation)
        loops: dict[int, PackedLoop] = {}
        for coded in _code(z, Mixture([cfg]), slice(None), _means(rotation), rebuild_all=False):
            loops |= _pack(coded, clean, _raw_dtype(x.dtype))
        parts.append(PackedKV(cfg, x.shape[-1], tuple(loops[i] for i in range(cfg.loops)), rotation, sanitised))
    packed = concatenate(parts, 0) if len(parts) > 1 else parts[0]
    return packed.map(lambda stored: stored.reshape(*x.shape[1:-1], stored.shape[-1]))


def reconstruct(x: Tensor, cfg: KVQuantConfig, rotation: Rotation | Tensor | None = None) -> Tensor:
    """``decode(encode(x, cfg, rotation), space="rotated")``, bit for bit, without packing: the engine's fast path.

    Args:
        x, cfg, rotation: as for :func:`encode`.

    Returns:
        [L, ..., D] fp32 in the rotated space.

    Raises:
        ValueError: as :func:`encode`.
    """
    rotation = _check_input(x, cfg, rotation)
    tokens = x.reshape(cfg.loops, *_token_shape(x.shape[1:], rotation))
    out = torch.empty(tokens.shape, dtype=torch.float32, device=x.device)
    for block in _blocks(tokens):
        clean = _round_raw_loops(_sanitise(tokens[:, block].float()), cfg, x.dtype)
        out[:, block] = reconstruct_rotated(_rotate(clean, rotation), Mixture([cfg]), _means(rotation))
    return out.reshape(x.shape)


def reconstruct_rotated(z: Tensor, mixture: Mixture, means: Tensor | None = None) -> Tensor:
    """Zhat of states that are in their rotated space already, each token in its own if need be (Sec. 3.2).

    Args:
        z: [L, n, ..., D] fp32, finite; the loops of a group and n tokens.
        mixture: how each token is coded; rotations do not count.
        means: mu of the anchor and of the other loops' residuals, [L, n or 1, ..., D] fp32, or None.

    Returns:
        [L, n, ..., D] fp32.
    """
    out = torch.empty(z.shape, dtype=torch.float32, device=z.device)
    for block in _blocks(z):
        own = means if means is None or means.shape[1] == 1 else means[:, block]
        for coded in _code(z[:, block], mixture, block, own, rebuild_all=True):
            out[coded.step.slice, block] = coded.rebuilt
    return out


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
    cfg, rotation = packed.config, packed.rotation
    shape = (*packed.loops[0].codes.shape[:-1], packed.head_dim)
    tokens = packed.map(lambda stored: stored.reshape(*_token_shape(shape, rotation)[:-1], stored.shape[-1]))
    out = torch.empty(cfg.loops, *_token_shape(shape, rotation), device=packed.loops[0].codes.device)
    for block in _blocks(out):
        z = out[:, block]
        for step in coding_steps(cfg):
            z[step.slice] = _unpack(tokens, step, block, z)
        if space == "original" and rotation is not None:
            z.copy_(rotation.unrotate(z))
            for loop, bits in enumerate(cfg.bits):
                if bits == RAW_BITS:
                    z[loop] = tokens.loops[loop].codes[block]
    return out.reshape(cfg.loops, *shape)


@dataclass(frozen=True, eq=False)
class _Coded:
    """One step's loops [k, ...]: codes and metadata (None for 0 and 16 bits), alpha, and Zhat where it is needed."""

    step: Step
    codes: Tensor | None
    metadata: Tensor | None
    alpha: Tensor | None
    rebuilt: Tensor | None


def _code(z: Tensor, mixture: Mixture, rows: slice, means: Tensor | None, rebuild_all: bool) -> Iterator[_Coded]:
    """Code the rotated states z [L, n, ..., D] step by step; Zhat is rebuilt for references, or for all loops.

    ``rows`` are their places in the mixture.
    """
    cfg, references = mixture.like, {step.reference for step in mixture.steps}
    rebuilt: dict[int, Tensor] = {}
    for step in mixture.steps:
        target, mean = z[step.slice], None if means is None else means[step.slice]
        codes = metadata = alpha = prediction = None
        if step.bits == RAW_BITS:
            zhat = target
        else:
            if step.reference is not None:
                alpha = mixture.coefficient(target, rebuilt[step.reference], rows)
                prediction = _predict(alpha, rebuilt[step.reference], cfg)
            if step.bits:
                residual = target if prediction is None else _round(target - prediction, cfg)
                residual = residual if mean is None else residual - mean
                codes, metadata = mixture.quantize(residual, step, rows)
            needed = rebuild_all or not references.isdisjoint(step.loops)
            zhat = _rebuild(prediction, codes, metadata, mean, cfg).expand_as(target) if needed else None
        if zhat is not None:
            rebuilt |= zip(step.loops, zhat)
        yield _Coded(step, codes, metadata, alpha, zhat)


def _coefficient(target: Tensor, reference: Tensor, kind: str) -> Tensor | None:
    """alpha of each token and head, [k, n, ..., 1] bf16; 0 where <R, R> is 0, subnormal or not finite; None for 1."""
    if kind == "unit":
        return None
    energy = _dot(reference, reference)
    if kind == "ls":
        alpha = _dot(target, reference) / energy
    else:
        alpha = _dot(target, target).sqrt() / energy.sqrt()
    return _valid(alpha, energy)


def _valid(alpha: Tensor, energy: Tensor) -> Tensor:
    """alpha in bf16, 0 where the energy <R, R> of its reference is 0, subnormal or not finite."""
    valid = (energy >= torch.finfo(torch.float32).tiny) & (energy < torch.inf)
    return (torch.where(valid, alpha, 0.0) + 0.0).bfloat16()  # + 0.0: a zero has no sign in the bytes


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products over channels, [..., 1] fp32, always summed in the same order (halves onto each other)."""
    terms = a * b
    while terms.shape[-1] % 2 == 0:
        low, high = terms.chunk(2, -1)
        terms = low + high
    total, *rest = terms.split(1, -1)
    for term in rest:
        total = total + term
    return total


def _predict(alpha: Tensor | None, reference: Tensor, cfg: KVQuantConfig) -> Tensor:
    return reference if alpha is None else _round(alpha.float() * reference, cfg)


def _rebuild(
    prediction: Tensor | None, codes: Tensor | None, metadata: Tensor | None, mean: Tensor | None, cfg: KVQuantConfig
) -> Tensor:
    """Zhat = alpha R + D(c) + mu, of the terms that there are."""
    value = prediction
    if codes is not None:
        coded = dequantize(codes, metadata)
        value = coded if value is None else value + coded
    return _round(value if mean is None else value + mean, cfg)


def _round(value: Tensor, cfg: KVQuantConfig) -> Tensor:
    return value.bfloat16().float() if cfg.rounding == "bf16" else value


def _means(rotation: Rotation | None) -> Tensor | None:
    """mu of every loop, [L, 1, ..., D], or None."""
    return None if rotation is None or rotation.means is None else rotation.means.float().unsqueeze(1)


def _pack(coded: _Coded, clean: Tensor, raw_dtype: torch.dtype) -> dict[int, PackedLoop]:
    """Stored bytes of each loop of a step; ``clean`` [L, n, ..., D] are the states in the original space."""
    step = coded.step
    states = clean[step.slice]
    codes = metadata = states.new_empty(*states.shape[:-1], 0, dtype=torch.uint8)
    alpha = codes.bfloat16() if coded.alpha is None else coded.alpha
    if step.bits == RAW_BITS:
        codes = states.to(raw_dtype)
    elif step.bits:
        codes = pack_valid_codes(coded.codes, step.bits)
        metadata = coded.metadata.view(torch.uint8).flatten(-2)
    return {loop: PackedLoop(codes[i], metadata[i], alpha[i]) for i, loop in enumerate(step.loops)}


def _unpack(tokens: PackedKV, step: Step, block: slice, z: Tensor) -> Tensor:
    """Zhat of a step's loops, [k, n, ..., D], from their bytes and from the references already in ``z``."""
    cfg, rotation = tokens.config, tokens.rotation
    parts = zip(*(tokens.loops[loop].tensors for loop in step.loops))
    stored_codes, stored_metadata, alpha = (torch.stack([part[block] for part in loops]) for loops in parts)
    if step.bits == RAW_BITS:
        return _rotate(stored_codes.float(), rotation)
    means = _means(rotation)
    codes = metadata = prediction = None
    if step.reference is not None:
        prediction = _predict(alpha if alpha.shape[-1] else None, z[step.reference].unsqueeze(0), cfg)
    if step.bits:
        codes = unpack_codes(stored_codes, step.bits, tokens.head_dim)
        metadata = stored_metadata.view(FP8).unflatten(-1, (-1, 2))
    return _rebuild(prediction, codes, metadata, None if means is None else means[step.slice], cfg)


def _check_input(x: Tensor, cfg: KVQuantConfig, rotation: Rotation | Tensor | None) -> Rotation | None:
    """The rotation to use, after checking that input, configuration and rotation fit together."""
    shape = list(x.shape)
    if cfg.layer_bits:
        raise ValueError(f"x is of one layer: give cfg.for_layer(n), got layer_bits={cfg.layer_bits}")
    if not x.is_floating_point():
        raise ValueError(f"x must have a floating-point dtype, got {x.dtype}")
    if len(shape) < 2 or shape[0] != cfg.loops:
        raise ValueError(f"x must have shape [{cfg.loops}, ..., D] for bits {cfg.bits}, got {shape}")
    layout.check_head_dim(cfg, shape[-1])
    if rotation is None:
        return rotation_for(cfg, shape[-1], x.device)
    if isinstance(rotation, Tensor):
        rotation = Rotation(rotation)
    if cfg.rotation == "none":
        raise ValueError('a rotation was given, but the configuration has rotation="none"')
    if rotation.head_dim != shape[-1] or (rotation.heads and (len(shape) < 3 or shape[-2] != rotation.heads)):
        raise ValueError(f"a rotation of shape {list(rotation.matrix.shape)} does not fit x of shape {shape}")
    if rotation.means is not None and rotation.means.shape[0] != cfg.loops:
        raise ValueError(f"means of {rotation.means.shape[0]} loops do not fit {cfg.loops} loops")
    return rotation


def _token_shape(shape: torch.Size | tuple[int, ...], rotation: Rotation | None) -> tuple[int, ...]:
    """[N, D] for states [..., D]; [N, H, D] for [..., H, D] where each head has its own rotation."""
    kept = 2 if rotation is not None and rotation.heads else 1
    return (math.prod(shape[:-kept]), *shape[-kept:])


def _blocks(tokens: Tensor) -> Iterator[slice]:
    """Slices of the tokens of [L, N, ...] that hold about as many values as a block may; at least one."""
    count = tokens.shape[1]
    per_token = max(1, tokens[:, :1].numel())
    size = max(1, (CPU_BLOCK_VALUES if tokens.device.type == "cpu" else GPU_BLOCK_VALUES) // per_token)
    return (slice(start, start + size) for start in range(0, max(count, 1), size))


def _sanitise(x: Tensor) -> Tensor:
    """A copy of fp32 x with NaN as 0 and values within +-65504, so that no token can spoil another's attention."""
    return x.nan_to_num(nan=0.0).clamp_(-LIMIT, LIMIT)


def _raw_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a 16-bit loop is stored in: the model's dtype where that has 16 bits, else BF16."""
    return dtype if dtype == torch.float16 else torch.bfloat16


def _round_raw_loops(clean: Tensor, cfg: KVQuantConfig, dtype: torch.dtype) -> Tensor:
    """The same states, 16-bit loops rounded in place to what will be stored."""
    for loop, bits in enumerate(cfg.bits):
        if bits == RAW_BITS:
            clean[loop] = clean[loop].to(_raw_dtype(dtype))
    return clean


def _rotate(x: Tensor, rotation: Rotation | None) -> Tensor:
    return x if rotation is None else rotation.rotate(x)

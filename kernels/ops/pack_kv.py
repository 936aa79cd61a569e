"""The writer: new tokens of one layer, all loops of a group, coded and stored into pages in one launch (Sec. 3.2, 4).

By kernels/cuda/pack_kv.cu where it knows the layout (bits 2 and 4, BF16 states) and there is a compiler, else by the
Triton kernel here, which knows every layout and is several times slower with a rotation.

Per token and KV head, for K and for V, with S the tokens of a page, in 16-bit words (``residualquant.layout``)::

    plane      words per token   word w of token t of the page
    codes      b D / 16          K: t b D/16 + w        V: (t // 2) b D/8 + 2 w + t mod 2
    metadata   D / g             t D/g + w              scale | offset << 8, both FP8 e4m3fn
    alpha      1                 t                      BF16

Every plane is written in whole 16-bit words and each word belongs to one token, also where V interleaves token pairs.
A program owns whole tokens of one head, so no two programs, and no two lanes, write the same word: no atomics, no
read-modify-write, whatever the order of the slots (which must differ from each other, as in any slot mapping).

Roofline: a token of one layer of Ouro (4 loops, 16 heads, D = 128, INT2/4 g=32) is read once as 32 KiB of BF16 and
written as 6.2 KiB; the 32 rotations of 128 x 128 FP16 are 1 MiB, read by all programs but once from memory.  At batch
64 that is 3.5 MB, 0.8 us at 4.3 TB/s: a decode step sees the latency of one launch and of four dependent loops, not the
traffic.  In a prefill the instructions, 60 per value and more with a rotation, outweigh the traffic: see NOTES.md.

Codes depend on the last bit of every step before them, so the kernel fixes what a compiler may otherwise choose:
no contraction into fused multiply-adds, IEEE division, and inner products summed in one order.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from residualquant.kernels.build import start, warn_of_triton
from residualquant.kernels.checks import (
    FLOATS,
    check_cost,
    check_packed,
    check_slot_mapping,
    check_tensors,
    sizes,
)
from residualquant.kernels.pack_kv_cuda import (
    WriterCall,
    choose_parts,
    coding_plan,
    fill_arguments,
    first_words,
    head_stride,
    library_for,
)
from residualquant.kernels.triton_common import check_device, round_bf16, times_matrix, word_offsets
from residualquant.kernels.tuning import tuned
from residualquant.layout import PageLayout, stored_bytes
from residualquant.pages import write_pages
from residualquant.residual import encode
from residualquant.rotation import Rotation

WARP_CHANNELS = 32  # channels that a warp holds of a rotated tile: groups of 16 and 32 then need no other warp
OPERATIONS_PER_VALUE = 20  # minimum, maximum, two inner products, prediction, division, rounding, clamps, packing


def pack_kv_reference(
    pages: Tensor,
    layout: PageLayout,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    k_matrix: Tensor | None = None,
    v_matrix: Tensor | None = None,
    k_means: Tensor | None = None,
    *,
    group: int = 0,
) -> Tensor:
    """What :func:`pack_kv` does, in plain torch: the codec, then the reference writer of pages.

    Returns:
        0-d int: input values that were NaN, infinite or beyond +-65504.
    """
    stored = slots >= 0
    packed = []
    for x, matrix, means in ((k, k_matrix, k_means), (v, v_matrix, None)):
        packed.append(encode(x[:, stored].float(), layout.config, rotation_of(matrix, means, x.shape[2])))
    write_pages(pages, layout, slots[stored].long(), *packed, group=group)
    return packed[0].sanitised + packed[1].sanitised


def rotation_of(matrix: Tensor | None, means: Tensor | None, heads: int) -> Rotation | None:
    """The rotation that a kernel's arguments stand for: one matrix per head, also where all heads share it."""
    return None if matrix is None else Rotation(matrix.expand(heads, *matrix.shape[-2:]), means)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def pack_kv_kernel(
    words, slots, k, v, k_matrix, v_matrix, k_means, sanitised, rotated, tokens,
    loop_stride, token_stride, head_stride, k_matrix_stride, v_matrix_stride,
    block_stride, page_head_stride, k_start, v_start,
    RUNS: tl.constexpr, LOOPS: tl.constexpr, COEFFICIENT: tl.constexpr, CHAINED: tl.constexpr, S: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One block of tokens of one head by the RUNS of :func:`coding_runs`; program axis 2 is K or V, then the part: each
    codes its share of the loops, and all of them the anchor, which the first stores."""
    head = tl.program_id(1).to(tl.int64)
    is_v = tl.program_id(2) // PARTS
    part = tl.program_id(2) % PARTS
    channel = tl.arange(0, BLOCK_D)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
    stored = slot >= 0
    inside = stored[:, None] & (channel < D)[None, :]
    t = slot % S
    first_page = words + slot // S * block_stride + head * page_head_stride + tl.where(is_v > 0, v_start, k_start)
    x = (v if is_v > 0 else k) + token[:, None] * token_stride + head * head_stride + channel[None, :]
    rotation = k_matrix
    if k_matrix is not None:
        rotation = _load_matrix(
            k_matrix + head * k_matrix_stride, v_matrix + head * v_matrix_stride, is_v, D, BLOCK_D, WARPS
        )
    ANCHORED: tl.constexpr = RUNS[len(RUNS) - 1][4]  # the first run is the anchor
    reference = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    upcoming = _load_loop(x, inside, 0 if ANCHORED else part, loop_stride, RUNS, 0)
    for r in tl.static_range(len(RUNS)):
        first = 0 if ANCHORED and r == 0 else part
        following = upcoming
        if r + 1 < len(RUNS):
            upcoming = _load_loop(x, inside, part, loop_stride, RUNS, r + 1)
        if RUNS[r][4] and not CHAINED:
            energy = _dot(reference, reference, D)
        for step in range((RUNS[r][10] + PARTS - 1) // PARTS):
            j = first + step * PARTS
            loop = RUNS[r][0] + j * RUNS[r][8]
            page = first_page + j * RUNS[r][9]
            own = j < RUNS[r][10]
            if ANCHORED and r == 0:
                own = part == 0
            mine = stored & own
            z = _take(following, rotation, sanitised, own, WARPS, D)
            following = _load_loop(x, inside, j + PARTS, loop_stride, RUNS, r)
            if rotated is not None:
                at = (((is_v * LOOPS + loop) * tokens + token) * tl.num_programs(1) + head) * D
                tl.store(rotated + at[:, None] + channel[None, :], z, mask=inside & own)
            prediction = tl.zeros_like(z)
            if RUNS[r][4]:
                if CHAINED:
                    energy = _dot(reference, reference, D)
                prediction = _predict(page, t, mine, z, reference, energy, RUNS[r][7], COEFFICIENT, D)
            mean = _load_mean(k_means, loop, head, is_v, LOOPS, D, BLOCK_D)
            value = prediction
            if RUNS[r][1] > 0:
                value = prediction + _code(page, t, mine, is_v, z - prediction - mean, RUNS, r, D)
            if CHAINED or (ANCHORED and r == 0):
                reference = value + mean


@triton.jit
def _load_loop(x, inside, j, loop_stride, RUNS: tl.constexpr, r: tl.constexpr):
    """States of the j-th loop of run r; 0 where there is none."""
    loop = tl.cast(RUNS[r][0] + j * RUNS[r][8], tl.int64)
    return tl.load(x + loop * loop_stride, mask=inside & (j < RUNS[r][10]), other=0.0)


@triton.jit
def _take(x, rotation, sanitised, own, WARPS: tl.constexpr, D: tl.constexpr):
    """Z of fp32, fp16 or bf16 states: NaN as 0, clamped to +-65504, counted if own, and rotated by a matrix if any."""
    z = x.to(tl.float32)
    changed = tl.sum(tl.where(tl.abs(z) <= 65504.0, 0, 1))
    if changed > 0:  # hardly ever: a branch keeps the clamp out of every value's way
        z = tl.minimum(tl.maximum(tl.where(z == z, z, 0.0), -65504.0), 65504.0)
        if sanitised is not None:
            tl.atomic_add(sanitised, changed, mask=own)
    if rotation is not None:
        z = _rotate(z, rotation, WARPS, D)
    return z


@triton.jit
def _load_mean(means, loop, head, is_v, LOOPS: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """The fixed means of a loop's keys, [1, W]; 0 for V, for a loop that there is not, or without means."""
    mean = tl.zeros([W], tl.float32)
    if means is not None:
        channel = tl.arange(0, W)
        at = means + (loop * tl.num_programs(1) + head) * D + channel
        mean = tl.load(at, mask=(channel < D) & (is_v == 0) & (loop < LOOPS), other=0.0)
    return mean[None, :]


@triton.jit
def _load_matrix(matrix, matrix_of_v, is_v, D: tl.constexpr, W: tl.constexpr, WARPS: tl.constexpr):
    """[W, W] matrix of D rows and columns, its columns so ordered that each warp computes contiguous channels.

    A matrix instruction gives each warp every WARPS-th strip of 8 columns; :func:`_rotate` names the channels again.
    One of 256 columns is too large to keep: that is its address, and each product reads it.
    """
    if is_v > 0:
        matrix = matrix_of_v
    if W <= 128:
        row = tl.arange(0, W)
        column = row // 8 % WARPS * (W // WARPS) + row // (8 * WARPS) * 8 + row % 8
        inside = (row < D)[:, None] & (column < D)[None, :]
        rotation = tl.load(matrix + row[:, None] * D + column[None, :], mask=inside, other=0.0)
    else:
        rotation = matrix
    return rotation


@triton.jit
def _rotate(x, rotation, WARPS: tl.constexpr, D: tl.constexpr):
    """x T: FP16 products, summed in FP32, for a matrix from :func:`_load_matrix`."""
    T: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    if W <= 128:
        z = tl.reshape(tl.dot(x.to(tl.float16), rotation), [T, W // WARPS // 8, WARPS, 8])
        z = tl.reshape(tl.permute(z, (0, 2, 1, 3)), [T, W])
    else:
        z = times_matrix(x, rotation, D, False)
    return z


@triton.jit
def _predict(
    page, t, stored, z, reference, energy, FIRST: tl.constexpr, COEFFICIENT: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """alpha R, after storing alpha in the plane from word FIRST (Sec. 3.2)."""
    prediction = reference
    if COEFFICIENT != "unit":
        words, alpha = round_bf16(_coefficient(z, reference, energy, COEFFICIENT, D))
        _store_words(page, t, stored, words, 0, FIRST, 1)
        prediction = alpha * reference
    return prediction


@triton.jit
def _code(page, t, stored, is_v, residual, RUNS: tl.constexpr, r: tl.constexpr, D: tl.constexpr):
    """The values that a loop's codes stand for, after storing codes and metadata; it belongs to run r."""
    codes, metadata, value = _quantize(residual, RUNS[r][1], RUNS[r][2], RUNS[r][3])
    _store_codes(page, t, stored, codes, is_v, RUNS[r][5], RUNS[r][1], D)
    _store_words(page, t, stored, metadata, 0, RUNS[r][6], D // RUNS[r][2])
    return value


@triton.jit
def _dot(a, b, D: tl.constexpr):
    """Inner products over channels, [T, 1]: halves are added onto each other while D is even, then the rest in turn."""
    T: tl.constexpr = a.shape[0]
    W: tl.constexpr = a.shape[1]
    terms = a * b
    if D == W:
        for level in tl.static_range(1, 9):
            if (W >> level) > 0:
                terms = tl.sum(tl.reshape(terms, [T, 2, W >> level]), 1)
    else:
        # D = 3 W/4, of which x, y, z are the thirds: the halves are then (x, first half of y) and (the rest of y, z).
        tl.static_assert(D == W // 4 * 3)
        thirds = tl.reshape(tl.permute(tl.reshape(terms, [T, 4, W // 4]), (0, 2, 1)), [T, W // 4, 2, 2])
        even, odd = tl.split(thirds)
        x, z = tl.split(even)
        y, _ = tl.split(odd)
        for level in tl.static_range(1, 8):
            if (W // 4 >> level) > 0:
                x0, x1 = _halves(x)
                y0, y1 = _halves(y)
                z0, z1 = _halves(z)
                x = x0 + y1
                y = x1 + z0
                z = y0 + z1
        terms = x + y + z
    return terms


@triton.jit
def _halves(x):
    """[T, W] as its first and its last W/2 columns."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def _coefficient(z, reference, energy, COEFFICIENT: tl.constexpr, D: tl.constexpr):
    """alpha of each token, [T, 1] fp32; 0 where <R, R> is 0, subnormal or not finite (Sec. 3.2)."""
    valid = (energy >= 1.1754943508222875e-38) & (energy < float("inf"))
    energy = tl.where(valid, energy, 1.0)
    if COEFFICIENT == "ls":
        alpha = tl.math.div_rn(_dot(z, reference, D), energy)
    else:
        alpha = tl.math.div_rn(tl.math.sqrt_rn(_dot(z, z, D)), tl.math.sqrt_rn(energy))
    return tl.where(valid, alpha, 0.0) + 0.0


@triton.jit
def _round_e4m3(x):
    """FP8 e4m3fn bits of x, clamped to +-448, to nearest even, and their value."""
    x = tl.minimum(tl.maximum(x + 0.0, -448.0), 448.0)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & -0x100000
    # Below 2^-6 steps are 2^-9, the spacing of FP32 numbers at 2^14.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = magnitude < 0x3C800000
    code = tl.where(small, shifted.to(tl.int32, bitcast=True) - 0x46800000, (normal >> 20) - 0x3C0)
    value = tl.where(small, shifted - 16384.0, normal.to(tl.float32, bitcast=True))
    return code | ((bits >> 24) & 0x80), tl.where(bits < 0, -value, value)


@triton.jit
def _quantize(x, BITS: tl.constexpr, G: tl.constexpr, CLIP: tl.constexpr):
    """Codes [T, D], metadata words [T, D/G] and the values that they stand for [T, D] (Sec. 2.1)."""
    T: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    LEVELS: tl.constexpr = 2**BITS - 1
    groups = tl.reshape(x, [T, W // G, G])
    lo = tl.min(groups, 2)
    hi = tl.max(groups, 2)
    width = (hi - lo) * CLIP
    scale_code, scale = _round_e4m3(tl.math.div_rn(width, LEVELS * 1.0))
    offset_code, offset = _round_e4m3((lo + hi - width) * 0.5)
    scale = scale[:, :, None]
    offset = offset[:, :, None]
    # The code is the number of c with (x - offset) / scale > c + 1/2.  A quotient a little too large gives it or one
    # more; (c - 1/2) scale is exact in FP32 and decides, as the correctly rounded quotient would: scale has 4 bits.
    step = tl.where(scale > 0.0, scale, 1.0)
    above = groups - offset
    codes = tl.minimum(tl.ceil(above * tl.math.div_rn(1.000001, step) - 0.5), LEVELS * 1.0)
    codes = tl.maximum(tl.where(above <= (codes - 0.5) * step, codes - 1.0, codes), 0.0)
    value = tl.reshape(offset + scale * codes, [T, W])
    return tl.reshape(codes.to(tl.int32), [T, W]), scale_code | (offset_code << 8), value


@triton.jit
def _store_codes(page, t, stored, codes, interleaved, FIRST: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr):
    if BITS == 3:  # a plane of the low two bits, then one of the high bit, of the same token
        low = _pack(codes & 3, 2)
        high = _pack(codes >> 2, 1)
        _store_words(page, t, stored, low, interleaved, FIRST, 3 * D // 16, 0, D // 8)
        _store_words(page, t, stored, high, interleaved, FIRST, 3 * D // 16, D // 8, D // 16)
    else:
        _store_words(page, t, stored, _pack(codes, BITS), interleaved, FIRST, BITS * D // 16)


@triton.jit
def _pack(codes, BITS: tl.constexpr):
    """16-bit words of codes [T, D]: code i at bits ``b (i mod 16/b)`` of word ``i // (16/b)``."""
    PER_WORD: tl.constexpr = 16 // BITS
    parts = tl.reshape(codes, [codes.shape[0], codes.shape[1] // PER_WORD, PER_WORD])
    return tl.sum(parts << (tl.arange(0, PER_WORD) * BITS)[None, None, :], 2)


@triton.jit
def _store_words(
    page, t, stored, values, interleaved,
    FIRST: tl.constexpr, TOKEN: tl.constexpr, BEGIN: tl.constexpr = 0, COUNT: tl.constexpr = None,
):  # fmt: skip
    """Words BEGIN .. BEGIN + COUNT (all, by default) of each token, of TOKEN words, in the plane from word FIRST."""
    LIMIT: tl.constexpr = TOKEN if COUNT is None else COUNT
    word = tl.arange(0, values.shape[1])
    at = word_offsets(t[None, :], (word + BEGIN)[:, None], interleaved, TOKEN)
    inside = stored[None, :] & (word < LIMIT)[:, None]
    tl.store(page[None, :] + FIRST + at, tl.trans(values.to(tl.int16)), mask=inside)


def pack_kv(
    pages: Tensor,
    layout: PageLayout,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    k_matrix: Tensor | None = None,
    v_matrix: Tensor | None = None,
    k_means: Tensor | None = None,
    *,
    group: int = 0,
    sanitised: Tensor | None = None,
    rotated: Tensor | None = None,
    check: bool = True,
    check_slots: bool = False,
) -> None:
    """Code new tokens of one layer, all loops of a group, into their slots, in place (Sec. 3.2, 4).

    Allocates nothing and never waits for the GPU, unless ``check_slots``, so it can be captured into a CUDA graph.
    A token's bytes do not depend on the tokens beside it.

    Args:
        pages: uint8 [blocks, H, page_bytes_per_head].
        layout: of the pages; bits 0, 1, 2, 3, 4, 8, any reference policy and coefficient, rounding "fp32".
        slots: int64 or int32 [T]; slot s is token ``s mod S`` of block ``s // S``; negative: a token to leave out.
            No slot may occur twice.
        k, v: [L, T, H, D] bf16, fp16 or fp32, post-RoPE, with the same strides.
        k_matrix, v_matrix: rotations, [H, D, D] or [D, D] fp16; both or none.  States are rounded to FP16 before the
            product, which is summed in FP32.
        k_means: [L, H, D] fp32, subtracted in the rotated space (OptR-H), or None.
        group: which loop group of the layer.
        sanitised: int32 [1], increased by the values that were NaN, infinite or beyond +-65504.
        rotated: fp32 [2, L, T, H, D], receives the rotated K and V that are coded, for tests.
        check: raise ValueError as below; to leave out where such arguments were checked before.
        check_slots: make sure that every slot lies in the pages and occurs once; waits for the GPU.

    Raises:
        ValueError: an argument of another shape, dtype or device, or a layout that the kernel does not write.
    """
    if check:
        _check(pages, layout, slots, k, v, k_matrix, v_matrix, k_means, group, sanitised, rotated)
    if check_slots:
        check_slot_mapping(slots, len(pages) * layout.page_tokens)
    if k.shape[1] == 0:
        return
    call = WriterCall(pages, layout, slots, k, v, k_matrix, v_matrix, k_means, group, sanitised, rotated)
    library = _choose(call)
    if library is None:
        _launch_triton(call)
    else:
        arguments = fill_arguments(call, processors(pages.device))
        start(library, "pack_kv", arguments, torch.cuda.current_stream(pages.device).cuda_stream)


def _choose(call: WriterCall) -> ctypes.CDLL | None:
    """The library of the CUDA kernel, or None for Triton, with a warning where that is on a GPU."""
    found = library_for(call)
    if not isinstance(found, str):
        return found
    if call.pages.device.type == "cuda":
        warn_of_triton("the writer", found)
    return None


def _launch_triton(call: WriterCall) -> None:
    layout, cfg, words = call.layout, call.layout.config, call.pages.view(torch.int16)
    tokens, heads, head_dim = call.k.shape[1:]
    options = tuned("pack_kv", words.device, head_dim, call.k.dtype)
    width = triton.next_power_of_2(head_dim)
    blocks = triton.cdiv(tokens, options["BLOCK_T"])
    parts = choose_parts(cfg, blocks * heads * 2, processors(words.device))
    pack_kv_kernel[(blocks, heads, 2 * parts)](
        words, call.slots, call.k, call.v, call.k_matrix, call.v_matrix, call.k_means, call.sanitised, call.rotated,
        tokens, *call.k.stride()[:3], head_stride(call.k_matrix), head_stride(call.v_matrix),
        *words.stride()[:2], *first_words(layout, call.group),
        RUNS=coding_runs(layout), LOOPS=cfg.loops, COEFFICIENT=cfg.coefficient,
        CHAINED=cfg.reference in ("previous", "next"),
        S=layout.page_tokens, D=head_dim, BLOCK_D=width, WARPS=width // WARP_CHANNELS, PARTS=parts,
        num_warps=width // WARP_CHANNELS, enable_fp_fusion=False, **options,
    )  # fmt: skip


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 0 for a CPU, whose interpreter does one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def coding_runs(layout: PageLayout) -> tuple[tuple, ...]:
    """The coding plan with like loops together: each run is the entry of its first loop, then the step from loop to
    loop, the step from word to word of every plane, and how many loops.

    The kernel loops over a run instead of repeating its code, which would outgrow the instruction cache.
    """
    runs: list[tuple] = []
    for entry in coding_plan(layout):
        if runs:
            *first, step, word_step, count = runs[-1]
            plane = 5 if entry[1] else 7  # like loops have like planes, one loop after another
            steps = (entry[0] - first[0], entry[plane] - first[plane])
            if first[1:5] == [*entry[1:5]] and (count == 1 or steps == (count * step, count * word_step)):
                runs[-1] = (*first, steps[0] // count, steps[1] // count, count + 1)
                continue
        runs.append((*entry, 0, 0, 1))
    return tuple(runs)


def _check(pages, layout, slots, k, v, k_matrix, v_matrix, k_means, group, sanitised, rotated) -> None:
    _, tokens, heads, _ = sizes("k", k, "L, T, H, D")
    sizes("v", v, "L, T, H, D")
    check_device(k.device)
    check_packed(k.device, heads, layout, pages, k_matrix, v_matrix, k_means, group)
    states = [layout.config.loops, tokens, heads, layout.head_dim]
    check_tensors(
        k.device,
        slots=(slots, [[tokens]], (torch.int64, torch.int32), 1),
        k=(k, [states], FLOATS, 1),
        v=(v, [states], (k.dtype,), 1),
        sanitised=(sanitised, [[1]], (torch.int32,), 1),
        rotated=(rotated, [[2, *states]], (torch.float32,), 5),
    )
    if k.stride() != v.stride():
        raise ValueError(f"k and v must have equal strides, got {k.stride()} and {v.stride()}")


def pack_kv_cost(layout: PageLayout, tokens: int, heads: int, state_bytes: int = 2) -> tuple[int, int]:
    """Bytes that one call must move (each input once, each output once) and operations that it must do.

    Args:
        layout: of the pages.
        tokens: new tokens (T).
        heads: KV heads (H).
        state_bytes: of one value of k and v.

    Raises:
        ValueError: no layout, or a count that is no integer or negative.
    """
    check_cost(layout, tokens=tokens, heads=heads, state_bytes=state_bytes)
    cfg, head_dim = layout.config, layout.head_dim
    values = 2 * cfg.loops * tokens * heads * head_dim
    matrices = 2 * heads * head_dim**2 if cfg.rotation != "none" else 0
    moved = values * state_bytes + 2 * matrices + 8 * tokens + 2 * tokens * heads * stored_bytes(cfg, head_dim)
    rotation = 2 * head_dim if matrices else 0
    return moved, values * (rotation + OPERATIONS_PER_VALUE)

"""The writer, byte for byte against the codec and the reference page writer (Triton's interpreter without a GPU)."""

import dataclasses
import warnings
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from residualquant import KVQuantConfig, preset  # noqa: E402
from residualquant.bench import kernels as bench  # noqa: E402
from residualquant.errors import ResidualQuantError  # noqa: E402
from residualquant.kernels import pack_kv as writer  # noqa: E402
from residualquant.kernels.build import (  # noqa: E402
    compile_variant,
    compiler,
    start,
    warn_of_triton,
    writer_variant_for,
)
from residualquant.kernels.pack_kv import pack_kv, pack_kv_cost, pack_kv_reference  # noqa: E402
from residualquant.kernels.pack_kv_cuda import WriterCall, fill_arguments  # noqa: E402
from residualquant.layout import PageLayout, stored_bytes  # noqa: E402
from residualquant.pages import allocate_pages, read_pages  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = 0xA5

CASES = [  # head_dim, bits, group size, reference, coefficient
    (128, (2, 2, 2, 4), 32, "last", "ls"),
    (128, (2, 2, 2, 4), 16, "last", "ls"),
    (128, (4, 4, 4, 4), 32, "last", "ls"),
    (128, (4, 2, 2, 2), 64, "first", "norm_ratio"),
    (128, (4, 2, 2, 2), 32, "previous", "unit"),
    (128, (2, 2, 2, 4), 32, "next", "ls"),
    (128, (2, 2, 2, 4), 32, "direct", "ls"),
    (96, (2, 2, 2, 4), 32, "last", "ls"),
    (96, (2, 2, 2, 2, 2, 2, 2, 4), 16, "last", "norm_ratio"),
    (96, (3, 1, 8), 32, "previous", "ls"),
    (96, (3, 1, 8), 16, "direct", "ls"),
    (64, (2, 0, 3), 64, "last", "unit"),
    (64, (8, 1, 0), 16, "first", "ls"),
]


def states(shape, seed, dtype=torch.float32):
    """Random states with outlier channels, tokens of one value, zeros, ties, and values that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape[-1], generator=generator).exp()
    x[1:] += x[:1]  # loops resemble each other
    x[:, 0] = (x[:, 0] * 4).round() / 4
    x[0, 1, 0], x[:, 2, 0] = 0.0, 0.25
    x[-1, 1, -1, 3], x[0, 2, -1, 5], x[0, 1, -1, -1] = torch.nan, torch.inf, -1e30
    return x.to(dtype).to(DEVICE)


def slots_for(tokens, blocks, seed):
    """Distinct slots in random order, some negative."""
    slots = torch.randperm(16 * blocks, generator=torch.Generator().manual_seed(seed))[:tokens]
    slots[3::7] = -1
    return slots.to(DEVICE)


def poisoned_pages(layout, blocks, heads):
    return allocate_pages(layout, blocks, heads, DEVICE).fill_(POISON)


def check_bytes(layout, tokens, heads, dtype=torch.float32, seed=0):
    blocks = -(-tokens // 16) + 1
    k, v = (states((layout.config.loops, tokens, heads, layout.head_dim), seed + i, dtype) for i in (1, 2))
    slots = slots_for(tokens, blocks, seed)
    pages, expected = (poisoned_pages(layout, blocks, heads) for _ in range(2))
    sanitised = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    pack_kv(pages, layout, slots, k, v, sanitised=sanitised, check_slots=True)
    count = pack_kv_reference(expected, layout, slots, k, v)
    assert torch.equal(pages, expected)
    assert sanitised.item() == count.item() > 0


def layout_of(head_dim, bits, group_size, reference, coefficient, **more):
    cfg = KVQuantConfig(bits=bits, group_size=group_size, reference=reference, coefficient=coefficient, **more)
    return PageLayout(cfg, head_dim)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_byte_is_the_reference(case):
    check_bytes(layout_of(*case), tokens=5, heads=1)


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[6], CASES[11]], ids=str)
def test_loops_in_parts(case, monkeypatch):
    """What a step of few tokens does on a GPU; sanitised values of the anchor are still counted once."""
    monkeypatch.setattr(writer, "processors", lambda device: 132)
    assert writer.choose_parts(layout_of(*case).config, 2, 132) > 1
    check_bytes(layout_of(*case), tokens=5, heads=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_byte_is_the_reference_from_16_bit_states(dtype):
    check_bytes(layout_of(64, (2, 4), 16, "last", "ls"), tokens=5, heads=2, dtype=dtype)


@given(
    bits=st.tuples(*[st.sampled_from((1, 2, 3, 4, 8))] * 2),
    group_size=st.sampled_from((16, 32)),
    reference=st.sampled_from(("last", "first", "direct")),
    coefficient=st.sampled_from(("ls", "norm_ratio", "unit")),
    values=st.lists(st.floats(width=32), min_size=64, max_size=64),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=15, deadline=None)
def test_every_byte_is_the_reference_for_any_values(bits, group_size, reference, coefficient, values, seed):
    layout = layout_of(64, bits, group_size, reference, coefficient)
    x = torch.tensor(values, dtype=torch.float32).expand(2, 2, 1, 64).clone().to(DEVICE)
    x[1] += torch.randn(64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    pages, expected = (poisoned_pages(layout, 1, 1) for _ in range(2))
    slots = torch.tensor([6, 7], device=DEVICE)
    pack_kv(pages, layout, slots, x, x.flip(1))
    pack_kv_reference(expected, layout, slots, x, x.flip(1))
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("levels", [3, 15])
def test_division_by_levels_is_correctly_rounded(levels):
    """The CUDA writer takes a product and one correction: right for every significand."""
    x = torch.arange(2**23, 2**24, dtype=torch.float64)
    inverse = torch.tensor(1 / levels).double()
    quotient = (x * inverse).float().double()
    assert torch.equal((quotient + (x - quotient * levels) * inverse).float(), x.float() / torch.tensor(levels).float())


def test_codes_on_and_beside_every_tie():
    """4-bit codes of values at, one FP32 step below and one above each midpoint, for many scales and offsets."""
    layout = layout_of(128, (4,), 16, "direct", "ls", int4_group_size=32)
    scale = torch.tensor([m * 2.0**e for e in (-6, 0, 3) for m in (1, 1.125, 1.375, 1.75, 1.875)])[:, None]
    offset = torch.tensor([0.0, -1.0, 0.4375, -9.0])
    low, high = offset.expand(15, 4), offset + 15 * scale
    ties = (offset + (torch.arange(15)[:, None, None] + 0.5) * scale).permute(1, 2, 0)
    beside = torch.stack((ties.nextafter(ties - 1), ties.nextafter(ties + 1)))
    groups = [torch.cat((low[..., None], high[..., None], ties, b), -1) for b in beside]  # [15, 4, 32]
    k, v = (group.reshape(1, 15, 1, 128).to(DEVICE) for group in groups)
    pages, expected = (poisoned_pages(layout, 1, 1) for _ in range(2))
    slots = torch.arange(15, device=DEVICE)
    pack_kv(pages, layout, slots, k, v)
    pack_kv_reference(expected, layout, slots, k, v)
    assert torch.equal(pages, expected)
    packed, _ = read_pages(pages, layout, slots)
    assert packed.unpacked_codes(0).unique().tolist() == list(range(16))


@triton.jit
def rounding_kernel(x, code, value, N: tl.constexpr):
    i = tl.arange(0, N)
    bits, rounded = writer._round_e4m3(tl.load(x + i))
    tl.store(code + i, bits.to(tl.int8))
    tl.store(value + i, rounded)


def test_fp8_metadata_rounds_as_torch_does():
    finite = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (finite[1:] + finite[:-1]) / 2
    x = torch.cat((finite, halves, halves.nextafter(halves * 2), halves.nextafter(halves * 0)))
    x = torch.cat((x, torch.tensor([0.0, 448.1, 1e9, 2.0**-10, 2.0**-11, 1e-30, 464.0])))
    x = torch.nn.functional.pad(torch.cat((x, -x)), (0, 2048))[:2048].to(DEVICE)
    code, value = torch.empty_like(x, dtype=torch.uint8), torch.empty_like(x)
    rounding_kernel[(1,)](x, code.view(torch.int8), value, 2048)
    expected = (x + 0.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(code, expected.view(torch.uint8))
    assert torch.equal(value, expected.float())


def rotations(heads, head_dim, loops, seed=0):
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.linalg.qr(torch.randn(2, heads, head_dim, head_dim, generator=generator))[0].half()
    means = torch.randn(loops, heads, head_dim, generator=generator) * 0.3
    return *(matrix.contiguous().to(DEVICE) for matrix in matrices), means.to(DEVICE)


def check_rotated(layout, tokens, heads, dtype=torch.float32, shared=False):
    """Bytes are the reference's for the rotated values that the kernel itself computed, which are nearly exact."""
    loops, head_dim = layout.config.loops, layout.head_dim
    generator = torch.Generator().manual_seed(5)
    k, v = (torch.randn(loops, tokens, heads, head_dim, generator=generator).to(dtype).to(DEVICE) for _ in range(2))
    k[0, 1, 0, 2] = torch.nan
    k_matrix, v_matrix, means = rotations(heads, head_dim, loops)
    if shared:
        k_matrix, v_matrix = k_matrix[0], v_matrix[0]
    rotated = torch.full((2, *k.shape), torch.nan, device=DEVICE)
    blocks = -(-tokens // 16)
    pages, expected = (poisoned_pages(layout, blocks, heads) for _ in range(2))
    slots = torch.arange(tokens, device=DEVICE)
    pack_kv(pages, layout, slots, k, v, k_matrix, v_matrix, means, rotated=rotated)
    identity = torch.eye(head_dim, dtype=torch.float16, device=DEVICE)
    pack_kv_reference(expected, layout, slots, rotated[0], rotated[1], identity, identity, means)
    assert torch.equal(pages, expected)
    for x, z, matrix in ((k, rotated[0], k_matrix), (v, rotated[1], v_matrix)):
        exact = torch.einsum("lthd,hde->lthe", x.half().double().nan_to_num(), matrix.double().expand(heads, -1, -1))
        assert (z - exact).abs().max() < 1e-4


def test_rotation_of_a_large_head():
    check_rotated(PageLayout(preset("INT2/4 g=32", rotation="optr_h"), 256), tokens=5, heads=2)


@pytest.mark.parametrize("shared", [False, True], ids=["a matrix per head", "one matrix"])
def test_rotation_and_key_means(shared):
    check_rotated(layout_of(64, (2, 4), 32, "last", "ls", rotation="optr_h"), tokens=3, heads=2, shared=shared)


CUDA_CASES = {  # head_dim, bits, group size, reference, coefficient, rotation, multiprocessors
    "Ouro": (128, (2, 2, 2, 4), 32, "last", "ls", "optr_h", 0),
    "Ouro, in parts": (128, (2, 2, 2, 4), 32, "last", "ls", "optr_h", 132),
    "g = 16": (128, (2, 2, 2, 4), 16, "last", "ls", "none", 0),
    "Huginn": (96, (2, 2, 2, 4), 32, "last", "ls", "optr_h", 0),
    "direct, g = 16, in parts": (96, (2, 2, 4), 16, "direct", "ls", "none", 132),
    "first, g = 64": (64, (4, 2, 2), 64, "first", "norm_ratio", "none", 132),
    "chained": (64, (2, 2, 4), 32, "next", "ls", "optr_h", 0),
    "unit": (64, (4, 4), 32, "previous", "unit", "none", 0),
}


@pytest.mark.parametrize("name", CUDA_CASES)
def test_cuda_source_on_cpu(cpu_library, name):
    """Every byte is the reference's, of the rotated values that the kernel itself computed; slots are scattered."""
    *coding, rotation, processors = CUDA_CASES[name]
    layout, tokens, heads = layout_of(*coding, rotation=rotation), 45, 2
    k, v = (states((layout.config.loops, tokens, heads, layout.head_dim), s, torch.bfloat16).cpu() for s in (1, 2))
    slots = slots_for(tokens, 4, 0).cpu()
    pages, expected = (allocate_pages(layout, 4, heads, "cpu").fill_(POISON) for _ in range(2))
    sanitised, rotated = torch.zeros(1, dtype=torch.int32), torch.full((2, *k.shape), torch.nan)
    turn = (None, None, None)
    if rotation != "none":
        turn = tuple(x.cpu() for x in rotations(heads, layout.head_dim, layout.config.loops))
    call = WriterCall(pages, layout, slots, k, v, *turn, sanitised=sanitised, rotated=rotated)
    start(cpu_library(writer_variant_for(layout)), "pack_kv", fill_arguments(call, processors), 0)
    stored = slots >= 0
    states_coded = (x[:, stored] for x in rotated)
    identity = None if rotation == "none" else torch.eye(layout.head_dim, dtype=torch.float16)
    pack_kv_reference(expected, layout, slots[stored], *states_coded, identity, identity, turn[2])
    assert torch.equal(pages, expected)
    for x, z, matrix in ((k, rotated[0], turn[0]), (v, rotated[1], turn[1])):
        clean = x.float().nan_to_num(0, torch.inf, -torch.inf).clamp(-65504, 65504)[:, stored]
        if matrix is not None:
            clean = torch.einsum("lthd,hde->lthe", clean.half().double(), matrix.double())
        error = (z[:, stored] - clean).abs() / clean.abs().amax(-1, keepdim=True).clamp(min=1)
        assert error.max() < (0 if matrix is None else 1e-6) + 1e-30
    assert sanitised.item() == sum((~(x[:, stored].float().abs() <= 65504)).sum().item() for x in (k, v)) > 0


@pytest.mark.parametrize("architecture", ["sm_90", "sm_120"])
def test_cuda_source_compiles(architecture, tmp_path):
    if compiler() is None:
        pytest.skip("no nvcc")
    variant = writer_variant_for(layout_of(128, (2, 2, 2, 4), 32, "last", "ls", rotation="optr_h"))
    log = compile_variant(variant, architecture, tmp_path / "k.so")
    assert "pack_kv_kernel" in log and " 0 bytes spill stores" in log, log


def test_what_the_cuda_writer_knows():
    def why_not(*case):
        return writer_variant_for(layout_of(*case))

    assert "head_dim" in why_not(256, (2, 4), 32, "last", "ls") and "bits" in why_not(128, (3, 4), 32, "last", "ls")
    cfg = KVQuantConfig(bits=(2, 2, 4), group_size=16, int4_group_size=32)
    variant = writer_variant_for(PageLayout(cfg, 128))
    assert (variant.first_bits, variant.first_group, variant.other_bits, variant.other_group) == (4, 32, 2, 16)


def test_one_piece_or_token_by_token():
    """Also: a token's write leaves the other token of its pair as it is."""
    layout = PageLayout(preset("INT2/4 g=32", loops=2, rotation="hadamard"), 64)
    k, v = (states((2, 4, 1, 64), seed) for seed in (1, 2))
    k_matrix, v_matrix, _ = rotations(1, 64, 2)
    slots = torch.tensor([3, 9, 2, 8], device=DEVICE)
    together, alone = (poisoned_pages(layout, 1, 1) for _ in range(2))
    pack_kv(together, layout, slots, k, v, k_matrix, v_matrix)
    for t in range(4):
        pack_kv(alone, layout, slots[t : t + 1], k[:, t : t + 1], v[:, t : t + 1], k_matrix, v_matrix)
    assert torch.equal(together, alone)


def test_loop_groups_and_strided_pages():
    """The second group of a layer, into every other block of a larger allocation."""
    layout = dataclasses.replace(layout_of(64, (2, 4), 32, "last", "ls"), groups=2)
    k, v = (states((2, 5, 1, 64), seed) for seed in (1, 2))
    pages, expected = (poisoned_pages(layout, 4, 1) for _ in range(2))
    slots = torch.arange(14, 19, device=DEVICE)
    pack_kv(pages[::2], layout, slots, k, v, group=1)
    pack_kv_reference(expected[::2], layout, slots, k, v, group=1)
    assert torch.equal(pages, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": lambda x: x[..., :-16]}, "pages must be"),
        ({"pages": lambda _: None}, "pages must be .* got None"),
        ({"pages": lambda x: x.new_empty(x.numel() + 8)[8:].view(x.shape)}, "multiple of 16 bytes, got address"),
        (
            {"pages": lambda x: x.new_empty(*x.shape[:2], x.shape[2] + 8)[..., :-8]},
            "multiples of 16 bytes, got strides",
        ),
        ({"pages": lambda x: x.to("meta")}, "pages must be on .* got meta"),
        ({"slots": lambda x: x.float()}, "slots must be .* got .* torch.float32"),
        ({"slots": lambda x: x.short()}, "slots must be .* got .* torch.int16"),
        ({"slots": lambda x: x[:2]}, r"slots must be \[3\] .* got \[2\]"),
        ({"slots": lambda x: x.repeat(2)[::2]}, "slots must be contiguous"),
        ({"slots": lambda _: None}, "slots must be a tensor, got None"),
        ({"slots": lambda x: x.to("meta")}, "slots must be on .* got meta"),
        ({"slots": lambda x: x + 16, "check_slots": lambda _: True}, "slots must be below 16, got 18"),
        ({"slots": lambda x: x // 2, "check_slots": lambda _: True}, r"a slot must not occur twice, got \[0\]"),
        ({"k": lambda x: x.double()}, "k must be .* torch.float64"),
        ({"k": lambda x: x[:1]}, r"k must be .*, got \[1, 3, 1, 64\]"),
        ({"k": lambda x: x[0]}, r"k must be .* \[L, T, H, D\], got \[3, 1, 64\]"),
        ({"k": lambda x: x[:, :, :0]}, "at least one KV head, got 0"),
        ({"k": lambda _: None}, "k must be a tensor .* got None"),
        ({"v": lambda _: None}, "v must be a tensor .* got None"),
        ({"v": lambda x: x.half()}, "v must be .* torch.float16"),
        ({"v": lambda x: x.repeat(1, 1, 1, 2)[..., ::2]}, "v must be contiguous"),
        ({"v": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)}, "equal strides, got"),
        ({"k_matrix": lambda _: torch.eye(64).half().to(DEVICE)}, "rotation='none' needs no matrices"),
        ({"k_matrix": lambda _: torch.eye(64).to(DEVICE)}, "k_matrix must be .* torch.float32"),
        ({"k_matrix": lambda _: torch.zeros(1, 64, 80).half().to(DEVICE)[..., :64]}, "k_matrix must be contiguous"),
        ({"layout": lambda _: None}, "layout must be a PageLayout, got None"),
        ({"layout": lambda _: PageLayout(KVQuantConfig(bits=(2, 16)), 64)}, r"bits must be among .* got \(2, 16\)"),
        ({"layout": lambda _: PageLayout(KVQuantConfig(bits=(2, 4)), 32)}, "head_dim must be one of .* got 32"),
        ({"layout": lambda _: layout_of(64, (2, 4), 32, "last", "ls", rounding="bf16")}, "rounding must be"),
        ({"layout": lambda _: layout_of(64, (2, 4), 32, "last", "ls", rotation="oscar")}, "needs both matrices"),
        ({"group": lambda _: 1}, "group must be an integer from 0 to 0, got 1"),
        ({"group": lambda _: 0.0}, "group must be an integer from 0 to 0, got 0.0"),
        (
            {"sanitised": lambda _: torch.zeros(2, dtype=torch.int32, device=DEVICE)},
            r"sanitised must be \[1\] .* got \[2\]",
        ),
        ({"rotated": lambda _: torch.zeros(2, 2, 3, 1, 64).half().to(DEVICE)}, "rotated must be .* torch.float16"),
    ],
)
def test_wrong_arguments(change, message):
    layout = layout_of(64, (2, 4), 32, "last", "ls")
    k = torch.zeros(2, 3, 1, 64, device=DEVICE)
    arguments = {"pages": poisoned_pages(layout, 1, 1), "layout": layout, "slots": torch.arange(3, device=DEVICE)}
    arguments |= {"k": k, "v": k.clone(), "k_matrix": None, "check_slots": False, "group": 0}
    arguments |= {"sanitised": None, "rotated": None}
    arguments |= {name: edit(arguments[name]) for name, edit in change.items()}
    with pytest.raises(ValueError, match=message):
        pack_kv(**arguments)


def test_loops_that_lie_far_apart():
    """Further than 32 bits count, as in a long buffer in which steps are staged."""
    layout = PageLayout(preset("INT2/4 g=32"), 64)
    far = 2**30 + 64
    room = torch.empty(3 * far + 1024, dtype=torch.bfloat16, device=DEVICE)
    states = [room.as_strided((4, 5, 1, 64), (far, 64, 64, 1), start) for start in (0, 512)]
    for x in states:
        x.copy_(torch.randn(x.shape))
    pages, expected = (allocate_pages(layout, 1, 1, DEVICE) for _ in range(2))
    pack_kv(pages, layout, torch.arange(5, device=DEVICE), *states)
    pack_kv_reference(expected, layout, torch.arange(5, device=DEVICE), *states)
    assert torch.equal(pages, expected)


def test_no_tokens_are_no_launch():
    layout = layout_of(64, (2, 4), 32, "last", "ls")
    pages, k = poisoned_pages(layout, 1, 1), torch.zeros(2, 0, 1, 64, device=DEVICE)
    pack_kv(pages, layout, torch.arange(0, device=DEVICE), k, k.clone(), check_slots=True)
    assert (pages == POISON).all()


def test_cost_at_ouro_shape():
    layout = PageLayout(preset("INT2/4 g=32", rotation="optr_h"), 128)
    moved, operations = pack_kv_cost(layout, tokens=64, heads=16)
    states_read, matrices, slots = 2 * 4 * 64 * 16 * 128 * 2, 2 * 16 * 128 * 128 * 2, 64 * 8
    assert moved == states_read + matrices + slots + 2 * 64 * 16 * stored_bytes(layout.config, 128) == 3_551_744
    assert operations > 2 * 4 * 64 * 16 * 128 * 2 * 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": None}, "layout must be a PageLayout, got None"),
        ({"tokens": -64}, "tokens must be at least 0, got -64"),
        ({"heads": 1.5}, "heads must be an integer, got 1.5"),
        ({"state_bytes": -2}, "state_bytes must be at least 0, got -2"),
    ],
)
def test_what_has_no_cost_is_named(change, message):
    layout = PageLayout(preset("INT2/4 g=32", rotation="optr_h"), 128)
    with pytest.raises(ValueError, match=message):
        pack_kv_cost(**{**dict(layout=layout, tokens=64, heads=16), **change})


@pytest.mark.parametrize("rotation", ["optr_h", "none"])
def test_benchmark_gives_a_time_only_where_the_bytes_are_right(monkeypatch, rotation):
    monkeypatch.setitem(bench.MODELS, "tiny", (2, 64))
    monkeypatch.setattr(bench, "WRITER_LAYERS", 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    launched = []
    monkeypatch.setattr(
        bench, "time_launches", lambda launches: launched.extend(x() for x in launches) or (2.0, 1.0, 3.0)
    )
    case = bench.WriterCase("tiny", rotation, 20, DEVICE)
    row = bench.measure_writer(case)
    assert (row.model, row.rotation, row.tokens, row.median_us, len(launched)) == ("tiny", rotation, 20, 2e6, 2)
    assert row.moved_bytes == pack_kv_cost(case.layout, 20, 2)[0]

    def spoil(pages, layout, slots, *rest, **more):
        pack_kv(pages, layout, slots, *rest, **more)
        pages[slots[0] // 16, 0, 0] ^= 1

    monkeypatch.setattr(bench, "pack_kv", spoil)
    with pytest.raises(ResidualQuantError, match="20 tokens of tiny: other bytes than the reference; no time given"):
        bench.measure_writer(case)
    assert len(launched) == 2


@pytest.mark.parametrize(("place", "told"), [("cuda", 1), ("cpu", 0)])
def test_a_writer_that_falls_back_on_a_gpu_says_why_once(monkeypatch, place, told):
    call = SimpleNamespace(pages=SimpleNamespace(device=torch.device(place)))
    monkeypatch.setattr(writer, "library_for", lambda call: "no nvcc to compile the CUDA kernels with")
    warn_of_triton.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert writer._choose(call) is writer._choose(call) is None
    expected = "the writer runs by Triton, which is slower: no nvcc to compile the CUDA kernels with"
    assert [str(warning.message) for warning in caught] == [expected] * told
    warn_of_triton.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CASES, (256, (2, 2, 2, 4), 32, "last", "ls")], ids=str)
def test_every_byte_on_a_gpu(case, dtype):
    check_bytes(layout_of(*case), tokens=131, heads=3, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("label", ["INT2/4 g=32", "INT2/4 g=16", "INT2 g=32"])
def test_rotation_on_a_gpu(label, head_dim):
    check_rotated(PageLayout(preset(label, rotation="optr_h"), head_dim), tokens=131, heads=3, dtype=torch.bfloat16)


@pytest.mark.gpu
def test_graph_replay_is_eager():
    layout = PageLayout(preset("INT2/4 g=32", rotation="optr_h"), 128)
    k_matrix, v_matrix, means = rotations(2, 128, 4)
    k, v = (states((4, 33, 2, 128), seed, torch.bfloat16) for seed in (1, 2))
    slots = slots_for(33, 4, 0)
    eager, replayed = (poisoned_pages(layout, 4, 2) for _ in range(2))
    arguments = (layout, slots, k, v, k_matrix, v_matrix, means)
    pack_kv(eager, *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack_kv(replayed, *arguments)
    replayed.fill_(POISON)
    for tensor, seed in ((k, 3), (v, 4)):
        tensor.copy_(states((4, 33, 2, 128), seed, torch.bfloat16))
    slots.copy_(slots_for(33, 4, 9))
    graph.replay()
    eager.fill_(POISON)
    pack_kv(eager, *arguments)
    assert torch.equal(replayed, eager)

"""Storage arithmetic against the paper (App. A.3, App. D), and the page layout against a byte-by-byte reading of it."""

from dataclasses import replace

import pytest
import torch

from residualquant import KVQuantConfig, encode, preset
from residualquant.layout import (
    PageLayout,
    bytes_read_per_step,
    capacity_ratio,
    effective_bits,
    logical_reads,
    loop_bytes,
    loops_read,
    model_effective_bits,
    stored_bytes,
    token_bytes,
    traffic_ratio,
)
from residualquant.layout_page import page_markdown
from residualquant.models.base import KVShape
from residualquant.pages import allocate_pages, read_pages, write_pages

# (loops, head_dim, preset, reference) -> effective bits: the paper's numbers, unrounded.
EFFECTIVE_BITS = {
    (4, 128, "INT2 g=32", "last"): 2.59375,
    (4, 128, "INT2 g=16", "last"): 3.09375,
    (4, 128, "INT2/4 g=32", "last"): 3.09375,
    (4, 128, "INT2/4 g=16", "last"): 3.46875,
    (4, 128, "INT4 g=32", "last"): 4.59375,
    (4, 128, "INT2 g=32", "direct"): 2.5,
    (4, 128, "INT2 g=16", "direct"): 3.0,
    (4, 128, "INT2/4 g=32", "direct"): 3.0,
    (4, 128, "INT2/4 g=16", "direct"): 3.375,
    (4, 128, "INT4 g=32", "direct"): 4.5,
    (4, 96, "INT2/4 g=32", "last"): 3.125,
    (4, 96, "INT2/4 g=16", "last"): 3.5,
    (8, 96, "INT2/4 g=32", "last"): 2 + 2 / 8 + 16 / 32 + 16 * 7 / (8 * 96),
    (8, 96, "INT2/4 g=16", "last"): (7 * 3 + 4.5) / 8 + 16 * 7 / (8 * 96),
    (16, 96, "INT2/4 g=32", "last"): 2.78125,
    (16, 96, "INT2/4 g=16", "last"): 3.25,
    (4, 128, "BF16", "last"): 16.0,
}


@pytest.mark.parametrize(("row", "expected"), EFFECTIVE_BITS.items(), ids=str)
def test_effective_bits(row, expected):
    loops, head_dim, label, reference = row
    cfg = preset(label, loops=loops, reference=reference)
    assert effective_bits(cfg, head_dim) == cfg.effective_bits(head_dim) == expected


def test_effective_bits_as_printed():
    huginn = {g: [preset(f"INT2/4 g={g}", loops=loops) for loops in (4, 8, 16)] for g in (16, 32)}
    assert [f"{cfg.effective_bits(96):.5f}" for cfg in huginn[32]] == ["3.12500", "2.89583", "2.78125"]
    assert [f"{cfg.effective_bits(96):.5f}" for cfg in huginn[16]] == ["3.50000", "3.33333", "3.25000"]
    saved = [100 * (1 - preset("INT2/4 g=32").effective_bits(128) / 16)]
    saved += [100 * (1 - huginn[g][2].effective_bits(96) / 16) for g in (32, 16)]
    assert [f"{value:.1f}" for value in saved] == ["80.7", "82.6", "79.7"]


@pytest.mark.parametrize("reference", ["first", "previous", "next"])
def test_every_reference_policy_stores_the_same(reference):
    for label in ("INT2 g=32", "INT2 g=16", "INT2/4 g=32", "INT2/4 g=16", "INT4 g=32"):
        assert preset(label, reference=reference).effective_bits(128) == preset(label).effective_bits(128)


def test_other_precisions():
    assert KVQuantConfig(bits=(3, 2, 1, 4)).effective_bits(128) == 3.09375
    assert KVQuantConfig(bits=(4, 2, 0, 4)).effective_bits(128) == 2.96875
    assert KVQuantConfig(bits=(3, 3, 2, 4)).effective_bits(128) == 3.59375
    assert preset("INT2 g=32", coefficient="unit").effective_bits(128) == 2.5
    assert preset("INT2 g=32", coefficient="norm_ratio").effective_bits(128) == 2.59375
    assert KVQuantConfig(bits=(0, 0, 0, 4), coefficient="unit").effective_bits(128) == 4.5 / 4
    assert KVQuantConfig(bits=(8, 16)).effective_bits(128) == (8 + 16 / 32 + 16 + 16 / 128) / 2


FIRST_BF16 = preset("INT2/4 g=32", layer_bits=((0, (16,) * 4),))


def test_layers_with_bits_of_their_own_count_by_their_share():
    """24 layers of Ouro-1.4B, the first in BF16: means over layers."""
    assert stored_bytes(FIRST_BF16, 128, 24) == (1024 + 23 * 198) / 24
    assert effective_bits(FIRST_BF16, 128, 24) == FIRST_BF16.effective_bits(128, 24) == (16 + 23 * 3.09375) / 24
    assert capacity_ratio(FIRST_BF16, 128, 24) == 16 / effective_bits(FIRST_BF16, 128, 24)
    assert bytes_read_per_step(FIRST_BF16, 128, 24) == (1024 + 23 * 414) / 24
    assert logical_reads(FIRST_BF16, 24) == (4 + 23 * 7) / 24
    assert traffic_ratio(FIRST_BF16, 128, 24) == 1024 / bytes_read_per_step(FIRST_BF16, 128, 24)
    assert token_bytes(FIRST_BF16, KVShape(4, 24, 16, 128)) == 2 * 16 * (1024 + 23 * 198)
    assert isinstance(stored_bytes(preset("INT2/4 g=32"), 128), int)


@pytest.mark.parametrize("layers", [None, 0])
def test_layers_with_bits_of_their_own_need_the_number_of_layers(layers):
    with pytest.raises(ValueError, match=f"needs the number of layers, more than that; got {layers}"):
        effective_bits(FIRST_BF16, 128, layers)
    with pytest.raises(ValueError, match="one layer"):
        PageLayout(FIRST_BF16, 128)
    with pytest.raises(ValueError, match="one layer"):
        encode(torch.zeros(4, 1, 128), FIRST_BF16)
    with pytest.raises(ValueError, match="head_dim 80 is not divisible by the group size 32 of loop 0"):
        effective_bits(preset("INT2 g=16", layer_bits=((1, (4,) * 4),)), 80, 4)


def test_the_whole_model_counts_the_layers_that_run_once():
    """Huginn: 32 recurrences of 4 layers, 4 layers that run once, coded at 4.5 bits."""
    cfg, shape = preset("INT2/4 g=32"), KVShape(32, 4, 55, 96)
    assert token_bytes(cfg, shape, 4) == 2 * 55 * (8 * 4 * stored_bytes(cfg, 96) + 4 * 54)
    assert model_effective_bits(cfg, shape) == effective_bits(cfg, 96) == 3.125
    assert model_effective_bits(cfg, shape, 4) == pytest.approx((128 * 3.125 + 4 * 4.5) / 132)
    assert model_effective_bits(preset("BF16"), shape, 4) == 16


def test_bytes_per_token_head():
    int24, bf16 = preset("INT2/4 g=32"), preset("BF16")
    assert [loop_bytes(int24, loop, 128) for loop in range(4)] == [42, 42, 42, 72]
    assert loop_bytes(preset("INT2 g=16"), 0, 128) == 50
    assert loop_bytes(bf16, 0, 128) == 256
    assert (stored_bytes(int24, 128), stored_bytes(bf16, 128)) == (198, 1024)


@pytest.mark.parametrize(("reference", "expected"), [("last", 414), ("first", 414), ("previous", 540), ("next", 540)])
def test_bytes_read_per_step(reference, expected):
    assert bytes_read_per_step(preset("INT2/4 g=32", reference=reference), 128) == expected


def test_capacity_is_not_traffic():
    cfg, direct, bf16 = preset("INT2/4 g=32"), preset("INT2/4 g=32", reference="direct"), preset("BF16")
    assert (bytes_read_per_step(direct, 128), bytes_read_per_step(bf16, 128)) == (192, 1024)
    assert f"{capacity_ratio(cfg, 128):.2f}" == "5.17"
    assert f"{traffic_ratio(cfg, 128):.2f}" == "2.47"
    assert traffic_ratio(bf16, 128) == capacity_ratio(bf16, 128) == 1.0


def test_logical_reads():
    for loops in (4, 8, 16, 32):
        shared = [logical_reads(preset("INT2 g=32", loops=loops, reference=r)) for r in ("last", "first")]
        chained = [logical_reads(preset("INT2 g=32", loops=loops, reference=r)) for r in ("previous", "next")]
        assert shared == [2 * loops - 1] * 2
        assert chained == [loops * (loops + 1) // 2] * 2
        assert logical_reads(preset("INT2 g=32", loops=loops, reference="direct")) == loops
    assert f"{10 / 7:.2f} {32 * 33 / 2 / 63:.2f}" == "1.43 8.38"
    assert 8 * logical_reads(preset("INT2/4 g=32")) == 56
    assert 8 * logical_reads(preset("INT2/4 g=32", reference="next")) == 80
    assert loops_read(preset("INT2 g=32", reference="previous"), 2) == (2, 1, 0)


@pytest.mark.parametrize(("head_dim", "group_size"), [(96, 64), (80, 32), (72, 16), (0, 16), (-64, 16)])
def test_head_dim_must_divide(head_dim, group_size):
    cfg = preset("INT2 g=32", group_size=group_size)
    with pytest.raises(ValueError, match=str(head_dim)):
        stored_bytes(cfg, head_dim)
    with pytest.raises(ValueError, match=str(head_dim)):
        PageLayout(cfg, head_dim)


PAGE_CONFIGS = [
    preset("INT2/4 g=32"),
    preset("INT2 g=16", reference="previous"),
    preset("INT2/4 g=16", reference="direct"),
    preset("INT2 g=32", coefficient="unit"),
    preset("BF16"),
    KVQuantConfig(bits=(3, 0, 1, 8)),
    KVQuantConfig(bits=(16, 2, 4, 2), reference="first"),
]
CONFIG_IDS = [f"{cfg.label} {cfg.reference} {cfg.coefficient}" for cfg in PAGE_CONFIGS]


@pytest.mark.parametrize("cfg", PAGE_CONFIGS, ids=CONFIG_IDS)
@pytest.mark.parametrize(("head_dim", "page_tokens", "groups"), [(128, 16, 1), (96, 48, 1), (64, 16, 2)])
def test_planes_tile_the_page(cfg, head_dim, page_tokens, groups):
    layout = PageLayout(cfg, head_dim, page_tokens, groups)
    assert layout.version == 1
    assert layout.page_bytes_per_head == 2 * groups * page_tokens * stored_bytes(cfg, head_dim)
    assert all(plane.offset % 16 == 0 for plane in layout.planes)
    assert layout.planes[0].loop == (0 if cfg.anchor is None else cfg.anchor)
    positions = [
        layout.offset_of(plane, token, byte)
        for plane in layout.planes
        for token in range(page_tokens)
        for byte in range(plane.token_bytes)
    ]
    assert sorted(positions) == list(range(layout.page_bytes_per_head))


def _packed(cfg, head_dim, tokens=21, heads=3, seed=0):
    x = torch.randn(cfg.loops, tokens, heads, head_dim, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return encode(x, cfg)


@pytest.mark.parametrize("cfg", PAGE_CONFIGS, ids=CONFIG_IDS)
@pytest.mark.parametrize(("head_dim", "page_tokens"), [(128, 16), (96, 32), (64, 16)])
def test_pages_give_back_what_was_written(cfg, head_dim, page_tokens):
    layout = PageLayout(cfg, head_dim, page_tokens)
    k, v = _packed(cfg, head_dim, seed=1), _packed(cfg, head_dim, seed=2)
    slots = torch.randperm(4 * page_tokens, generator=torch.Generator().manual_seed(3))[:21]
    pages = allocate_pages(layout, 4, 3)
    write_pages(pages, layout, slots, k, v)
    for written, read in zip((k, v), read_pages(pages, layout, slots)):
        for a, b in zip(written.loops, read.loops):
            assert all(torch.equal(s, t) and s.dtype == t.dtype for s, t in zip(a.tensors, b.tensors))
    other = torch.tensor([s for s in range(4 * page_tokens) if s not in slots.tolist()])
    untouched = read_pages(pages, layout, other)
    assert not any(part.any() for packed in untouched for loop in packed.loops for part in loop.tensors)


def test_bytes_lie_where_offset_of_says():
    cfg = KVQuantConfig(bits=(3, 2, 1, 4), group_size=16)
    layout = PageLayout(cfg, 64, 16, groups=2)
    k, v = _packed(cfg, 64, tokens=16, seed=4), _packed(cfg, 64, tokens=16, seed=5)
    pages = allocate_pages(layout, 2, 3)
    write_pages(pages, layout, torch.arange(16, 32), k, v, group=1)
    assert not pages[0].any()
    for kv, packed in (("k", k), ("v", v)):
        for loop, kind in ((0, "codes"), (1, "metadata"), (2, "alpha"), (3, "codes")):
            plane = layout.plane(kv, loop, kind, group=1)
            assert plane.interleaved == (kv == "v" and kind == "codes")
            stored = getattr(packed.loops[loop], kind).contiguous().view(torch.uint8)
            for token in (0, 1, 14, 15):
                at = [layout.offset_of(plane, token, byte) for byte in range(plane.token_bytes)]
                assert torch.equal(pages[1, :, at], stored[token])


def test_a_write_touches_its_own_half_words():
    layout = PageLayout(preset("INT2/4 g=32"), 128)
    packed = _packed(layout.config, 128, tokens=2)
    pages = allocate_pages(layout, 1, 3)
    write_pages(pages, layout, torch.tensor([6]), *(packed.map(lambda t: t[:1]),) * 2)
    first = pages.view(torch.int16) != 0
    pages.zero_()
    write_pages(pages, layout, torch.tensor([7]), *(packed.map(lambda t: t[1:]),) * 2)
    assert not (first & (pages.view(torch.int16) != 0)).any()


def test_pages_refuse_what_does_not_fit():
    cfg = preset("INT2 g=32")
    layout = PageLayout(cfg, 128)
    pages, packed, slots = allocate_pages(layout, 2, 3), _packed(cfg, 128), torch.arange(21)
    other = _packed(preset("INT2 g=16"), 128)
    with pytest.raises(ValueError, match="group_size=16"):
        write_pages(pages, layout, slots, other, packed)
    with pytest.raises(ValueError, match=r"\[20, 3\]"):
        write_pages(pages, layout, slots[:20], packed, packed)
    half = encode(torch.ones(4, 21, 3, 128, dtype=torch.float16), preset("BF16"))
    layout = PageLayout(preset("BF16"), 128)
    with pytest.raises(ValueError, match="float16"):
        write_pages(allocate_pages(layout, 2, 3), layout, slots, half, half)
    with pytest.raises(ValueError, match="no plane"):
        layout.plane("k", 0, "alpha")


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (torch.tensor([-1, 0]), "slots must be from 0 to 31, got -1 to 0"),
        (torch.tensor([0, 32]), "slots must be from 0 to 31, got 0 to 32"),
        (torch.tensor([True, False]), r"slots must be \[T\] of torch.int64 or int32, got \[2\] of torch.bool"),
        (torch.tensor([[0, 1]]), r"slots must be \[T\] .*, got \[1, 2\]"),
        ([0, 1], r"slots must be a Tensor, got \[0, 1\]"),
    ],
    ids=str,
)
def test_slots_that_pages_do_not_have(slots, message):
    layout = PageLayout(preset("INT2 g=32"), 128)
    pages, packed = allocate_pages(layout, 2, 3), _packed(layout.config, 128).map(lambda t: t[:2])
    with pytest.raises(ValueError, match=message):
        write_pages(pages, layout, slots, packed, packed)
    with pytest.raises(ValueError, match=message):
        read_pages(pages, layout, slots)
    assert not pages.any()


@pytest.mark.parametrize("change", [lambda x: x[..., :-16], lambda x: x.float(), lambda x: x[0]])
def test_pages_of_another_layout(change):
    layout = PageLayout(preset("INT2 g=32"), 128)
    with pytest.raises(ValueError, match=r"pages must be \[blocks, H, \d+\] of torch.uint8, got \["):
        read_pages(change(allocate_pages(layout, 2, 3)), layout, torch.arange(2))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda c: loop_bytes(c, -1, 128), "loop must be an integer from 0 to 3, got -1"),
        (lambda c: loop_bytes(c, 0, 7), "head_dim must be a positive multiple of 16, got 7"),
        (lambda c: loops_read(c, 4), "loop must be an integer from 0 to 3, got 4"),
        (lambda c: token_bytes(c, KVShape(6, 2, 2, 64)), "6 loops are not whole groups of 4"),
        (lambda c: token_bytes(replace(c, layer_bits=((5, (2, 2, 2, 2)),)), KVShape(4, 2, 2, 64)), "number of layers"),
        (lambda c: model_effective_bits(c, KVShape(4, 2, 2, 64), -1), "edge_layers must be at least 0, got -1"),
        (lambda c: PageLayout(c, 64, 24), "page_tokens must be a multiple of 16, got 24"),
        (lambda c: PageLayout(c, 64, 16.0), "page_tokens must be an integer, got 16.0"),
        (lambda c: PageLayout(c, 64, groups=0), "groups must be at least 1, got 0"),
        (lambda c: PageLayout(c, 64, groups=True), "groups must be an integer, got True"),
        (lambda c: PageLayout("INT2/4 g=32", 64), "config must be a KVQuantConfig, got 'INT2/4 g=32'"),
        (lambda c: PageLayout(c, 64).planes_of("x"), 'kv must be "k" or "v", got \'x\''),
        (lambda c: (x := PageLayout(c, 64)).offset_of(x.planes[0], 16, 0), "token must be an integer from 0 to 15"),
        (lambda c: (x := PageLayout(c, 64)).offset_of(x.planes[0], 0, -1), "byte must be an integer from 0 to 31"),
        (lambda c: allocate_pages(PageLayout(c, 64), -1, 2), "blocks must be at least 0, got -1"),
    ],
)
def test_what_has_no_bytes_is_named(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(preset("INT2/4 g=32"))


def test_the_documented_layout_is_current(root):
    page = root / "docs" / "page_layout.md"
    assert page.read_text() == page_markdown(), "run python -m residualquant.layout_page"


def test_groups_that_are_not_there():
    """Nothing is written to or read from a loop group that the pages lack."""
    layout = PageLayout(preset("INT2/4 g=32"), 64, 16, 2)
    for group in (-1, 2):
        with pytest.raises(ValueError, match=f"group must be an integer from 0 to 1, got {group}"):
            layout.planes_of("k", group)

"""The packed cache: bytes, mutations and windows; attention over a packed past."""

import pytest
import torch
from stand_ins import CODECS

from residualquant import layout
from residualquant.attention import PackedAttention, attend_past_and_step, attend_prompt, rotate, to_bf16
from residualquant.cache import PackedCache
from residualquant.config import KVQuantConfig, preset
from residualquant.models.base import EDGE, KVShape
from residualquant.models.ouro import Ouro, OuroConfig
from residualquant.residual import encode
from residualquant.rotation import Rotation

SHAPE = KVShape(loops=4, layers=2, kv_heads=2, head_dim=64)
CONFIGS = [
    *CODECS,
    preset("INT2 g=32", sink_tokens=2, recent_tokens=3),
    preset("INT2 g=32", rotation="hadamard", layer_bits=((0, (16,) * 4),)),
]
IDS = [f"{c.label} {c.reference} {c.rotation} {c.sink_tokens}" for c in CONFIGS]
each_config = pytest.mark.parametrize("cfg", CONFIGS, ids=IDS)


def random_kv(tokens, batch=3, shape=SHAPE, seed=0):
    """K and V [L, B, T, H, D] whose loops resemble each other."""
    torch.manual_seed(seed)
    base = torch.randn(2, 1, batch, tokens, shape.kv_heads, shape.head_dim)
    k, v = base + 0.3 * torch.randn(2, shape.loops, *base.shape[2:])
    return k, v


def filled(cfg, tokens=7, batch=3, shape=SHAPE, rotations=None):
    cache = PackedCache(shape, cfg, rotations)
    for layer in range(shape.layers):
        cache.append(layer, *random_kv(tokens, batch, shape, seed=layer))
    return cache


def same(a, b):
    """Equal tensors, or a clear failure."""
    assert a.shape == b.shape and torch.equal(a, b), f"{list(a.shape)} differ"


def same_bytes(one, other):
    """Both caches store the same bytes in every layer."""
    assert one.nbytes == other.nbytes
    for a, b in zip(one._layers, other._layers):
        for x, y in ((a.sink, b.sink), (a.recent, b.recent)):
            assert (x is None) == (y is None)
            if x is not None:
                same(x, y)
        assert (a.packed is None) == (b.packed is None)
        for pair, twin in zip(a.packed or (), b.packed or ()):
            for p, q in zip(pair, twin):
                for mine, theirs in zip(p.loops, q.loops):
                    for x, y in zip(mine.tensors, theirs.tensors):
                        same(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def random_rotations(shape, loops, seed=0):
    torch.manual_seed(seed)
    keys = [(g, n, kind) for g in range(shape.loops // loops) for n in range(shape.layers) for kind in "kv"]
    return {
        key: Rotation(torch.linalg.qr(torch.randn(shape.kv_heads, shape.head_dim, shape.head_dim))[0]) for key in keys
    }


# ---- bytes --------------------------------------------------------------------------------------------------------


@each_config
def test_nbytes_equals_the_arithmetic(cfg):
    tokens, batch = 9, 3
    windowed = min(tokens, cfg.sink_tokens + cfg.recent_tokens)
    raw = 2 * SHAPE.loops * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 2
    packed = layout.token_bytes(cfg, SHAPE)
    assert filled(cfg, tokens, batch).nbytes == batch * ((tokens - windowed) * packed + windowed * raw)


@pytest.mark.parametrize("cfg", [CONFIGS[0], CONFIGS[2], CONFIGS[7]], ids=str)
def test_layers_that_run_once_are_cached_like_one_loop(cfg):
    """Direct INT4 without rotation; their windows and bytes are counted as the others'."""
    cache, tokens = PackedCache(SHAPE, cfg, edge_layers=2), 9
    for layer in range(SHAPE.layers):
        cache.append(layer, *random_kv(tokens, seed=layer))
    k, v = random_kv(tokens, seed=5)
    cache.append(2, k[:1], v[:1])
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        given = [x[0, :, start:stop].transpose(1, 2) for x in (k, v)]
        keys, _ = cache.update(*given, SHAPE.loops * SHAPE.layers + 1)
        assert keys.shape[2] == stop == cache.get_seq_length(SHAPE.loops * SHAPE.layers + 1)
    reference = PackedCache(KVShape(1, 2, 2, 64), cfg.for_edge)
    for layer in range(2):
        reference.append(layer, k[:1], v[:1])
        for ours, theirs, past in zip(cache.read(2 + layer), reference.read(layer), cache.past(EDGE, layer)):
            same(ours, theirs)
            same(past, theirs[0])
        assert cache.matrices(EDGE, layer) == (None, None)
    assert cache.nbytes - filled(cfg, tokens).nbytes == reference.nbytes
    if not cfg.recent_tokens:
        assert cache.nbytes == 3 * tokens * layout.token_bytes(cfg, SHAPE, 2)
    cache.crop(4)
    cache.reorder_cache(torch.tensor([2, 2]))
    same(cache.read(3)[1], reference.read(1)[1][:, [2, 2], :4])


@each_config
@pytest.mark.parametrize("sizes", [(7,), (1,) * 7, (3, 4), (5, 1, 1)], ids=str)
def test_whole_chunked_and_token_by_token_writes_store_the_same_bytes(cfg, sizes):
    cache = PackedCache(SHAPE, cfg)
    for layer in range(SHAPE.layers):
        for k, v in zip(*(x.split(sizes, 2) for x in random_kv(7, seed=layer))):
            cache.append(layer, k, v)
    same_bytes(cache, filled(cfg))


def test_packed_bytes_are_those_of_a_fresh_encode():
    cfg = preset("INT2/4 g=32", rotation="hadamard")
    k, _ = random_kv(7, seed=1)
    fresh = encode(k.to(torch.bfloat16), cfg)
    stored = filled(cfg)._layers[1].packed[0][0]
    for a, b in zip(stored.loops, fresh.loops):
        for x, y in zip(a.tensors, b.tensors):
            same(x.view(torch.uint8), y.view(torch.uint8))


def test_read_gives_bf16_values_back_when_off():
    k, v = random_kv(7, seed=0)
    keys, values = filled(preset("BF16")).read(0)
    same(keys, to_bf16(k).float())
    same(values, to_bf16(v).float())


def test_loops_are_coded_in_groups_of_the_configuration():
    cfg = KVQuantConfig(bits=(2, 4))
    keys, _ = filled(cfg).read(0)
    halves = PackedCache(KVShape(2, 2, 2, 64), cfg)
    k, v = random_kv(7, seed=0)
    halves.append(0, k[2:], v[2:])
    same(keys[2:], halves.read(0)[0])


def test_unusable_values_are_counted_and_spoil_no_other_token():
    k, v = random_kv(7)
    k[0, 0, 2, 0, 3], v[1, 1, 4, 1, 5] = torch.nan, torch.inf
    cache = PackedCache(SHAPE, preset("INT2/4 g=32"))
    cache.append(0, k, v)
    assert int(cache.sanitised) == 2
    clean = filled(preset("INT2/4 g=32")).read(0)
    for ours, theirs in zip(cache.read(0), clean):
        assert ours.isfinite().all()
        differs = (ours != theirs).flatten(3).any(-1).any(0)
        assert differs.sum() <= 1


def test_loops_come_in_turn_and_in_one_shape():
    cache = filled(preset("INT2/4 g=32"))
    k, v = random_kv(1)
    with pytest.raises(ValueError, match="expects loop 0 next, got loop 1"):
        cache.stage(1, 0, k[0], v[0])
    cache.stage(0, 0, k[0], v[0])
    with pytest.raises(ValueError, match="expects loop 1 next, got loop 0"):
        cache.stage(0, 0, k[0], v[0])
    with pytest.raises(ValueError, match=r"loop 1 must bring K of \[3, 1, 2, 64\], got \[3, 2, 2, 64\]"):
        cache.stage(1, 0, *(x[1].repeat(1, 2, 1, 1) for x in (k, v)))
    with pytest.raises(ValueError, match=r"k must be \[B, T, 2, 64\], got \[3, 1, 64\]"):
        cache.stage(1, 0, k[1, :, :, 0], v[1, :, :, 0])
    with pytest.raises(ValueError, match=r"v must be \[B, T, 2, 64\], got \[3, 1, 2, 32\]"):
        cache.stage(1, 0, k[1], v[1, ..., :32])
    with pytest.raises(ValueError, match="holds 3 sequences, got a batch of 2"):
        cache.stage(1, 0, k[1, :2], v[1, :2])
    with pytest.raises(ValueError, match=r"k must have a floating-point dtype, got torch\.uint8"):
        cache.stage(1, 0, k[1].byte(), v[1])
    with pytest.raises(ValueError, match=r"k must be \[B, H, T, D\], got \[1, 2, 64\]"):
        cache.update(k[1, 0], v[1], 2)
    for loop in range(1, 4):
        cache.stage(loop, 0, k[loop], v[loop])
    assert cache.length(0) == 8


def test_values_beyond_bf16s_largest_within_the_limit_are_that_in_every_precision():
    """65504, the codec's limit, would be rounded up to 65536 in a raw loop and not in a coded one."""
    k, v = random_kv(2, 1)
    k[:, 0, 0, 0, 0] = 1e9
    cache = PackedCache(SHAPE, KVQuantConfig(bits=(2, 2, 16, 16)))
    cache.append(0, k, v)
    assert int(cache.sanitised) == 4 and cache.read(0)[0][2:, 0, 0, 0, 0].tolist() == [65280.0] * 2


# ---- windows ------------------------------------------------------------------------------------------------------


def test_windows_hold_the_first_and_last_tokens_in_bf16():
    cfg = preset("INT2 g=32", sink_tokens=2, recent_tokens=3)
    keys, values = filled(cfg, 9).read(0)
    plain, k = filled(preset("INT2 g=32"), 9).read(0)[0], to_bf16(random_kv(9)[0]).float()
    same(keys[:, :, :2], k[:, :, :2])
    same(keys[:, :, 6:], k[:, :, 6:])
    same(keys[:, :, 2:6], plain[:, :, 2:6])
    assert values.shape == keys.shape


def test_windows_wider_than_the_sequence_pack_nothing():
    keys, _ = filled(preset("INT2 g=32", sink_tokens=4, recent_tokens=8), 7).read(0)
    same(keys, to_bf16(random_kv(7)[0]).float())


def test_window_tokens_are_rotated_when_the_past_is():
    cfg = preset("INT2 g=32", rotation="hadamard", recent_tokens=2)
    cache = filled(cfg)
    rotated, original = cache.read(0, "rotated")[0], cache.read(0)[0]
    back = cache.rotations.shared.unrotate(rotated)
    torch.testing.assert_close(back, original, atol=1e-5, rtol=1e-5)


# ---- mutations ----------------------------------------------------------------------------------------------------


def of_rows(cfg, rows, tokens=7):
    """A cache encoded afresh from ``rows`` of the batch and the first tokens."""
    cache = PackedCache(SHAPE, cfg)
    for layer in range(SHAPE.layers):
        k, v = (x[:, rows, :tokens] for x in random_kv(7, seed=layer))
        cache.append(layer, k, v)
    return cache


@each_config
def test_reorder_select_and_repeat_equal_a_fresh_encode(cfg):
    cache = filled(cfg)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    same_bytes(cache, of_rows(cfg, [2, 0, 0]))
    cache = filled(cfg)
    cache.batch_select_indices(torch.tensor([1]))
    same_bytes(cache, of_rows(cfg, [1]))
    cache.batch_repeat_interleave(2)
    same_bytes(cache, of_rows(cfg, [1, 1]))


@each_config
@pytest.mark.parametrize("length", [0, 1, 4, 7, 99, -3])
def test_crop_equals_a_fresh_encode(cfg, length):
    keep = 4 if length == -3 else min(length, 7)
    cache = filled(cfg)
    cache.crop(length)
    assert cache.get_seq_length() == keep
    keys, values = cache.read(1)
    if not cfg.recent_tokens:
        same_bytes(cache, of_rows(cfg, [0, 1, 2], keep)) if keep else None
    before = filled(cfg).read(1)
    same(keys, before[0][:, :, :keep])
    same(values, before[1][:, :, :keep])


@each_config
def test_a_cropped_cache_goes_on_as_one_that_never_held_more(cfg):
    cache = filled(cfg)
    cache.crop(4)
    for layer in range(SHAPE.layers):
        k, v = (x[:, :, 4:] for x in random_kv(7, seed=layer))
        cache.append(layer, k, v)
    if not cfg.recent_tokens:
        same_bytes(cache, filled(cfg))
    assert cache.length() == 7


def test_mutations_reach_the_forward_in_flight():
    cfg = preset("INT2/4 g=32")
    k, v = random_kv(9)
    cache = PackedCache(SHAPE, cfg)
    cache.append(0, k[:, :, :6], v[:, :, :6])
    for loop in range(2):
        cache.stage(loop, 0, k[loop, :, 6:], v[loop, :, 6:])
    assert cache.get_seq_length(2) == 9 and cache.length() == 6
    cache.crop(8)
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    rows = [1, 1, 0]
    for loop in range(2, 4):
        cache.stage(loop, 0, k[loop, rows, 6:8], v[loop, rows, 6:8])
    fresh = PackedCache(SHAPE, cfg)
    fresh.append(0, k[:, rows, :8], v[:, rows, :8])
    same_bytes(cache, fresh)


def test_reset_forgets_everything():
    cache = filled(preset("INT2/4 g=32"))
    cache.reset()
    assert cache.nbytes == 0 and cache.get_seq_length() == 0
    cache.append(0, *random_kv(2, batch=1))


def test_positions_cannot_be_shifted():
    cache = filled(preset("INT2/4 g=32"))
    cache.shift_positions(0)
    with pytest.raises(ValueError, match="cannot be shifted, got offset -4"):
        cache.shift_positions(-4)


# ---- Hugging Face style -------------------------------------------------------------------------------------------


@each_config
def test_update_returns_the_decoded_past_and_the_bf16_step(cfg):
    cache, reference = PackedCache(SHAPE, cfg), PackedCache(SHAPE, cfg)
    for start, stop in ((0, 5), (5, 6), (6, 8)):
        steps = [[x[:, :, start:stop] for x in random_kv(8, seed=n)] for n in range(SHAPE.layers)]
        for loop in range(SHAPE.loops):
            for layer, (k, v) in enumerate(steps):
                index = loop * SHAPE.layers + layer
                assert cache.get_seq_length(index) == start
                keys, values = cache.update(k[loop].transpose(1, 2), v[loop].transpose(1, 2), index)
                assert cache.get_seq_length(index) == stop
                old = reference.read(layer)[0][loop] if start else k[loop][:, :0]
                same(keys.transpose(1, 2), torch.cat([old, to_bf16(k[loop]).float()], 1))
                assert values.shape == keys.shape
        for layer, (k, v) in enumerate(steps):
            reference.append(layer, k, v)
    same_bytes(cache, reference)


def test_wrong_input_is_refused_with_its_value():
    cache = filled(preset("INT2/4 g=32"))
    k, v = random_kv(1)
    with pytest.raises(ValueError, match="layer must be from 0 to 1, got 2"):
        cache.append(2, k, v)
    with pytest.raises(ValueError, match=r"k must be \[4, B, T, 2, 64\], got \[3, 3, 1, 2, 64\]"):
        cache.append(0, k[:3], v)
    with pytest.raises(ValueError, match="holds 3 sequences, got a batch of 2"):
        cache.append(0, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match=r"one shape and device, got \[4, 3, 1, 2, 64\] on cpu and \[4, 3, 0, 2, 64\]"):
        cache.append(0, k, v[:, :, :0])
    with pytest.raises(ValueError, match=r"v must have a floating-point dtype, got torch\.int64"):
        cache.append(0, k, v.long())
    with pytest.raises(ValueError, match=r"one shape and device, got .* on cpu and .* on meta"):
        cache.append(0, k, v.to("meta"))
    with pytest.raises(ValueError, match="lives on cpu, got k and v on meta"):
        cache.append(0, k.to("meta"), v.to("meta"))
    with pytest.raises(ValueError, match="below 8, got 8"):
        cache.update(k[0], v[0], 8)
    for loop, layer in ((4, 0), (0, 2), (-2, 0), (EDGE, 0)):
        for read in (cache.past, cache.matrices):
            with pytest.raises(ValueError, match=f"no layer {layer} in loop {loop}"):
                read(loop, layer)
    with pytest.raises(ValueError, match="bits for 3 loops, got a model of 4 loops"):
        PackedCache(SHAPE, KVQuantConfig(bits=(2, 2, 4)))
    with pytest.raises(ValueError, match=r"no oscar rotation was given for \(0, 0, 'k'\)"):
        PackedCache(SHAPE, preset("INT2 g=32", rotation="oscar"))
    with pytest.raises(ValueError, match=r"must fit 2 heads of 64 channels, got \[128, 128\]"):
        wrong = {(0, n, kind): Rotation(torch.eye(128)) for n in range(2) for kind in "kv"}
        PackedCache(SHAPE, preset("INT2 g=32", rotation="oscar"), wrong)


# ---- attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("per_head", [False, True])
def test_attention_in_rotated_space_equals_attention_in_the_original(heads, per_head):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, heads, 64), *to_bf16(torch.randn(2, 2, 9, 2, 64)).float()
    matrix = torch.linalg.qr(torch.randn(2, 64, 64))[0]
    matrix = matrix if per_head else matrix[0]
    past = (rotate(k[:, :6], matrix), rotate(v[:, :6], matrix))
    out = attend_past_and_step(q, past, (k[:, 6:], v[:, 6:]), (matrix, matrix))
    truth = attend_prompt(torch.cat([torch.zeros(2, 6, heads, 64), q], 1), k, v)[:, 6:]
    torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-5)


def test_an_empty_past_has_no_weight():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 3, 4, 64), torch.randn(1, 3, 2, 64), torch.randn(1, 3, 2, 64)
    out = attend_past_and_step(q, (k[:, :0], v[:, :0]), (k, v), (None, None))
    torch.testing.assert_close(out, attend_prompt(q, k, v), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def run_packed(model, cache, ids, sizes, valid=None, positions=None):
    """Logits [B, T, V] of one sequence of forwards of ``sizes`` tokens."""
    attention, start, out = PackedAttention(cache, valid), 0, []
    for size in sizes:
        own = slice(start, start + size)
        at = torch.arange(start, start + size).expand(len(ids), -1) if positions is None else positions[:, own]
        out.append(model(ids[:, own], at, attention).logits)
        start += size
    return torch.cat(out, 1)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = OuroConfig(64, 96, 2, 4, 2, 64, 97, total_ut_steps=4)
    return Ouro(config).double().eval().requires_grad_(False)  # no code flips by the order of a sum


def test_chunked_prefill_equals_whole_prefill_when_off(model):
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(0))
    whole = run_packed(model, PackedCache(SHAPE, preset("BF16")), ids, [12])
    for sizes in ([5, 7], [1] * 12, [4, 1, 7]):
        chunked = run_packed(model, PackedCache(SHAPE, preset("BF16")), ids, sizes)
        torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)


@each_config
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_equal_unpadded_sequences(model, cfg, side):
    lengths, steps = [5, 8, 3], 3
    torch.manual_seed(1)
    rows = [torch.randint(97, (n + steps,)) for n in lengths]
    ids, positions = torch.zeros(3, 8 + steps, dtype=torch.long), torch.zeros(3, 8 + steps, dtype=torch.long)
    valid = torch.ones(3, 8, dtype=torch.bool)
    for i, (row, n) in enumerate(zip(rows, lengths)):
        prompt = slice(8 - n, 8) if side == "left" else slice(0, n)
        ids[i, prompt], positions[i, prompt] = row[:n], torch.arange(n)
        ids[i, 8:], positions[i, 8:] = row[n:], torch.arange(n, n + steps)
        valid[i] = False
        valid[i, prompt] = True
    if cfg.sink_tokens:
        pytest.skip("windows count columns, padding included")
    padded = run_packed(model, PackedCache(SHAPE, cfg), ids, [8, 1, 1, 1], valid, positions)
    assert padded.isfinite().all()
    for i, (row, n) in enumerate(zip(rows, lengths)):
        alone = run_packed(model, PackedCache(SHAPE, cfg), row[None], [n, 1, 1, 1])
        torch.testing.assert_close(padded[i, 8:], alone[0, n:], atol=1e-5, rtol=1e-5)

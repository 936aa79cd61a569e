"""Inspection of a configuration on traced states, against the formulas written out token by token."""

import dataclasses
import json
import warnings
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from residualquant.config import KVQuantConfig, preset
from residualquant.errors import ResidualQuantError
from residualquant.inspect import MEASURES, Traced, draw_inspection, inspect_trace, loop_means, worst
from residualquant.models import Huginn, HuginnConfig
from residualquant.models.base import KVShape
from residualquant.residual import decode, encode
from residualquant.rotation import Rotation


def text(loops=4, layers=2, heads=2, per_head=2, tokens=12, queries=5, dim=64, seed=0, noise=0.4):
    """States whose loops resemble each other, in the axes of a trace."""
    g = torch.Generator().manual_seed(seed)

    def like(*shape):
        common = torch.randn(1, *shape[1:], generator=g)
        return (common + noise * torch.randn(shape, generator=g)).bfloat16()

    q = torch.randn(loops, layers, heads * per_head, queries, dim, generator=g).bfloat16()
    return SimpleNamespace(q=q, k=like(loops, layers, heads, tokens, dim), v=like(loops, layers, heads, tokens, dim))


def random_rotations(shape, loops, seed=0):
    torch.manual_seed(seed)
    total, layers, heads, _, dim = shape
    keys = [(g, n, kind) for g in range(total // loops) for n in range(layers) for kind in "kv"]
    return {key: Rotation(torch.linalg.qr(torch.randn(heads, dim, dim))[0]) for key in keys}


def written_out(x, cfg, layer, head, loop, of, rotation=None):
    """The three measures of one row, one text: a decode step for every query, one key at a time."""
    group, inner = divmod(loop, cfg.loops)
    states = {"K": x.k, "V": x.v}[of][group * cfg.loops : (group + 1) * cfg.loops, layer].float()
    packed = encode(states.transpose(1, 2), cfg, rotation)
    coded = decode(packed).transpose(1, 2)[:, head]
    own = states[inner, head]
    predictor = cfg.reference_of(inner)
    left = own
    if predictor is not None:
        alpha = packed.loops[inner].alpha[:, head].float() if cfg.stores_alpha(inner) else 1.0
        left = own - alpha * coded[predictor]
    k, v = x.k[loop, layer, head].float(), x.v[loop, layer, head].float()
    tokens, energy, error = len(k), 0.0, 0.0
    per_head = x.q.shape[2] // x.k.shape[2]
    for q in x.q[loop, layer, head * per_head : (head + 1) * per_head].float():
        for place, query in enumerate(q):
            at = tokens - len(q) + place
            stored = [s for s in range(at) if s >= cfg.sink_tokens and s < at - cfg.recent_tokens]
            keys, values = k[: at + 1].clone(), v[: at + 1].clone()
            for s in stored:
                (keys if of == "K" else values)[s] = coded[inner][s]
            plain, moved = (
                (a @ query / len(query) ** 0.5).softmax(0) @ b for a, b in ((k[: at + 1], v[: at + 1]), (keys, values))
            )
            energy, error = energy + plain.square().sum(), error + (moved - plain).square().sum()
    share = (left.square().sum() / own.square().sum(), (coded[inner] - own).square().sum() / own.square().sum())
    return {"residual_energy": share[0].item(), "nmse": share[1].item(), "attention_error": (error / energy).item()}


CASES = {
    "the method": (preset("INT2/4 g=32", rotation="hadamard"), {}),
    "direct": (preset("INT2 g=32", reference="direct"), {}),
    "chain, unit": (preset("INT2/4 g=16", reference="previous", coefficient="unit"), {}),
    "no codes, raw anchor": (KVQuantConfig(bits=(0, 2, 0, 16)), {}),
    "two groups, one query head per KV head": (KVQuantConfig(bits=(2, 4)), {"per_head": 1}),
    "windows": (preset("INT2 g=32", sink_tokens=2, recent_tokens=3), {}),
    "D = 96, one KV head": (preset("INT2/4 g=32", rotation="hadamard"), {"dim": 96, "heads": 1, "per_head": 3}),
    "calibrated": (preset("INT2/4 g=32", rotation="oscar"), {}),
    "all queries": (preset("INT2 g=32"), {"queries": 12}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_the_formulas_value(name):
    cfg, sizes = CASES[name]
    x = text(**sizes)
    rotations = random_rotations(x.k.shape, cfg.loops) if cfg.rotation == "oscar" else None
    table = inspect_trace([x], cfg, rotations)
    assert len(table) == 2 * x.k.shape[0] * x.k.shape[1] * x.k.shape[2]
    for row in table.itertuples():
        loop, layer = row.loop - 1, row.layer - 1
        rotation = (rotations or {}).get((loop // cfg.loops, layer, row.of.lower()))
        expected = written_out(x, cfg, layer, row.head - 1, loop, row.of, rotation)
        for measure, value in expected.items():
            assert getattr(row, measure) == pytest.approx(value, rel=1e-3, abs=1e-9), (row, measure)


def test_loop_groups_of_a_long_recurrence():
    x = text(loops=32, layers=1, heads=2, tokens=6, queries=2, dim=96)
    table = inspect_trace([x], preset("INT2/4 g=32")).set_index(["loop", "of", "head"])
    for loop in range(1, 33):
        anchor = -(-loop // 4) * 4
        row = table.loc[loop, "K", 1]
        assert (row.bits, row.reference) == ((4, 0) if loop == anchor else (2, anchor))
        assert (row.residual_energy == 1) == (loop == anchor)


def test_a_recurrent_model_at_hand():
    torch.manual_seed(0)
    model = Huginn(HuginnConfig(128, 2, 64, 50, 1, 2, 1, mean_recurrence=8)).eval()
    seen = Traced.live(model, [list(range(9)), list(range(5))], queries=3)
    assert (seen.shape, seen.layers) == (KVShape(8, 2, 2, 64), [0, 1])
    table = inspect_trace(seen.texts, preset("INT2/4 g=32", rotation="hadamard"))
    assert len(table) == 8 * 2 * 2 * 2 and set(table[table.loop == 5].reference) == {8}
    assert table[list(MEASURES)].notna().all(axis=None)


def test_a_layer_of_its_own_precision():
    x = text()
    plain, mixed = preset("INT2 g=32"), preset("INT2 g=32", layer_bits=((1, (16, 16, 16, 16)),))
    table, base = inspect_trace([x], mixed), inspect_trace([x], plain)
    raw = table.layer == 2
    assert set(table[raw].bits) == {16} and (table[raw][["nmse", "attention_error"]] == 0).all(axis=None)
    pd.testing.assert_frame_equal(table[~raw], base[~raw])


def test_texts_are_pooled_by_energy_and_seen_one_by_one():
    cfg, few, many = preset("INT2/4 g=32"), text(tokens=6, queries=3), text(tokens=30, queries=3, seed=1)
    alive = []

    def stream():
        for x in (few, many):
            alive.append(x)
            yield x

    both = inspect_trace(stream(), cfg)
    assert len(alive) == 2
    alone = [inspect_trace([x], cfg) for x in (few, many)]
    weight = [x.k[0, 0, 0].float().square().sum().item() for x in (few, many)]
    expected = sum(w * t.nmse[0] for w, t in zip(weight, alone)) / sum(weight)
    assert both.nmse[0] == pytest.approx(expected, rel=1e-5)


def test_the_last_queries_count_and_a_window_over_all_tokens_errs_nowhere():
    x = text(queries=12)
    cut = SimpleNamespace(q=x.q[..., -3:, :], k=x.k, v=x.v)
    cfg = preset("INT2 g=32")
    pd.testing.assert_frame_equal(inspect_trace([x], cfg, queries=3), inspect_trace([cut], cfg))
    assert (inspect_trace([x], dataclasses.replace(cfg, recent_tokens=12)).attention_error == 0).all()


def test_a_trace_of_some_layers():
    x = text(layers=3)
    part = SimpleNamespace(q=x.q[:, 2:], k=x.k[:, 2:], v=x.v[:, 2:])
    cfg = preset("INT2 g=32", rotation="oscar")
    rotations = random_rotations(x.k.shape, 4)
    whole = inspect_trace([x], cfg, rotations)
    found = inspect_trace([part], cfg, rotations, layers=[2])
    pd.testing.assert_frame_equal(found, whole[whole.layer == 3].reset_index(drop=True))


def test_values_that_are_not_finite_spoil_nothing_else():
    x = text()
    good = inspect_trace([x], preset("INT2 g=32"))
    x.v[0, 0, 0, 3, 5] = x.q[0, 0, 0, 1, 2] = torch.nan
    with pytest.warns(RuntimeWarning, match="^2 values of q, k and v were NaN"):
        bad = inspect_trace([x], preset("INT2 g=32"))
    assert bad[list(MEASURES)].notna().all(axis=None)
    other = (bad.layer == 2) | (bad["head"] == 2)
    pd.testing.assert_frame_equal(bad[other], good[other])


def test_states_of_zeros():
    x = SimpleNamespace(**{name: torch.zeros_like(value) for name, value in vars(text()).items()})
    table = inspect_trace([x], preset("INT2 g=32", reference="direct"))
    assert (table[list(MEASURES)] == 0).all(axis=None)
    draw_inspection(table)


BAD = {
    "no text": ([], preset("INT2 g=32"), {}, "at least one text"),
    "loops": ([text()], preset("INT2 g=32", loops=3), {}, "do not divide into groups of 3"),
    "queries": ([text()], preset("INT2 g=32"), {"queries": 0}, "queries must be at least 1, got 0"),
    "two models": ([text(), text(layers=3)], preset("INT2 g=32"), {}, r"must hold 2 layers of .*got k of \[4, 3"),
    "layers": ([text()], preset("INT2 g=32"), {"layers": [0]}, "must hold 1 layers"),
    "no layer": ([text()], preset("INT2 g=32"), {"layers": []}, r"different numbers from 0, got \[\]"),
    "layers below 0": ([text()], preset("INT2 g=32"), {"layers": [0, -1]}, r"from 0, got \[0, -1\]"),
    "a layer twice": ([text()], preset("INT2 g=32"), {"layers": [1, 1]}, r"from 0, got \[1, 1\]"),
    "no rotations": ([text()], preset("INT2 g=32", rotation="optr_h"), {}, "no optr_h rotation was given"),
    "groups": ([text(dim=80)], preset("INT2 g=32"), {}, "80 is not divisible by the group size 32"),
}


@pytest.mark.parametrize("case", BAD)
def test_nonsense_is_refused(case):
    texts, cfg, options, sentence = BAD[case]
    with pytest.raises(ValueError, match=sentence):
        inspect_trace(texts, cfg, **options)


@pytest.mark.parametrize("cfg", [preset("INT2 g=32", reference="direct"), preset("BF16")])
def test_a_heat_map_of_equal_or_absent_values_is_drawn_without_a_warning(cfg):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw_inspection(inspect_trace([text(layers=1, tokens=6)], cfg)).png.startswith(b"\x89PNG")


def test_summaries():
    table = inspect_trace([text()], preset("INT2/4 g=32"))
    top = worst(table, 3)
    assert len(top) == 3 and top.attention_error.min() >= table.drop(top.index).attention_error.max()
    means = loop_means(table)
    assert len(means) == 8
    mine = table[(table.of == "V") & (table.loop == 2)]
    assert means[(means.of == "V") & (means.loop == 2)].nmse.item() == pytest.approx(mine.nmse.mean())


# ------------------------------------------------------------------------------------------- trace files


SHAPE = {"loops": 4, "layers": 3, "kv_heads": 2, "head_dim": 64}


def write(path, texts, loops=(0, 1, 2, 3), layers=(0, 2), drop="", **about):
    """A trace file as ``residualquant trace`` writes it."""
    tensors = {f"{i}.{name}": getattr(x, name).contiguous() for i, x in enumerate(texts) for name in "qkv"}
    tensors |= {f"{i}.ids": torch.arange(x.k.shape[3]) for i, x in enumerate(texts)}
    tensors = {name: x for name, x in tensors.items() if name != drop}
    known = {"format": 1, "model": "tiny", "weights": "0" * 64, "kv_shape": SHAPE}
    known |= {"kept": {"loops": loops, "layers": layers}, **about}
    save_file(tensors, path, {"about": json.dumps(known)})
    return path


def test_a_trace_file_gives_what_its_states_give(tmp_path):
    texts = [text(tokens=7), text(tokens=9, seed=1)]
    seen = Traced.open(write(tmp_path / "t.safetensors", texts))
    assert (seen.model, seen.weights, seen.shape, seen.layers) == ("tiny", "0" * 64, KVShape(**SHAPE), [0, 2])
    cfg = preset("INT2/4 g=32")
    pd.testing.assert_frame_equal(
        inspect_trace(seen.texts, cfg, layers=seen.layers), inspect_trace(texts, cfg, layers=[0, 2])
    )


HARM = {
    "absent": (lambda p: p.unlink(), "there is no trace .*`residualquant trace` makes one"),
    "empty": (lambda p: p.write_bytes(b""), "is truncated or no trace"),
    "cut": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "is truncated or no trace"),
    "text": (lambda p: p.write_text("notes"), "is truncated or no trace"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "is truncated or no trace"),
    "other tensors": (lambda p: save_file({"x": torch.ones(1)}, p), "is no trace: it lacks 'about'"),
    "no shapes": (lambda p: save_file({"x": torch.ones(1)}, p, {"about": '{"format": 1}'}), "lacks 'kv_shape'"),
    "no texts": (lambda p: write(p, []), "it holds no texts"),
    "FP32": (lambda p: write(p, [SimpleNamespace(**vars(text()) | {"v": text().v.float()})]), "got BF16, BF16, F32"),
    "layers below 0": (lambda p: write(p, [text()], layers=(-1, 0)), r"different numbers from 0, got \[-1, 0\]"),
    "layers of words": (lambda p: write(p, [text()], layers=("a", "b")), r"numbers from 0, got \['a', 'b'\]"),
    "no JSON": (lambda p: save_file({"x": torch.ones(1)}, p, {"about": "{"}), "is truncated or no trace"),
    "a list": (lambda p: save_file({"x": torch.ones(1)}, p, {"about": "[]"}), "is truncated or no trace"),
    "format": (lambda p: write(p, [text()], format=9), "its format is 9, this version reads 1"),
    "no shape": (lambda p: write(p, [text()], kv_shape=None), "is truncated or no trace"),
    "other shape": (lambda p: write(p, [text()], kv_shape=SHAPE | {"head_dim": 32}), "of a text have shapes"),
    "no values": (lambda p: write(p, [text()], drop="0.v"), "is truncated or no trace"),
    "other layers": (lambda p: write(p, [text()], layers=(0,)), "of a text have shapes"),
    "odd loops": (lambda p: write(p, [text()], loops=("a", 1, 2, 3)), "is truncated or no trace"),
    "some loops": (lambda p: write(p, [text(loops=2)], loops=(0, 3)), "holds loops 1, 4 only, all 4 are needed"),
    "odd heads": (lambda p: write(p, [SimpleNamespace(**vars(text()) | {"q": text().q[:, :, :3]})]), "have shapes"),
}


@pytest.mark.parametrize("case", HARM)
def test_a_file_that_is_no_whole_trace_is_one_sentence(tmp_path, case):
    path = write(tmp_path / "t.safetensors", [text()])
    harm, sentence = HARM[case]
    harm(path)
    with pytest.raises(ResidualQuantError, match=sentence):
        Traced.open(path)

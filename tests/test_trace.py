"""Traces of queries, keys and values: what the model attends with, what the file says, and what is refused."""

import json
import struct

import pytest
import torch
from safetensors import safe_open
from stand_ins import TextTokenizer

from residualquant import cli
from residualquant.errors import ResidualQuantError
from residualquant.models import Huginn, HuginnConfig, Ouro, OuroConfig
from residualquant.models.base import EDGE, causal_attention
from residualquant.rotation.states import LAST_QUERIES
from residualquant.trace import Selection, captured_bytes, collect, visit, write_trace

TEXTS = [[5, 7, 11, 2, 3], [13, 17, 19, 23, 4, 6, 8]]


@pytest.fixture(scope="module")
def ouro():
    torch.manual_seed(0)
    return Ouro(OuroConfig(64, 96, 3, 4, 2, 32, 258, total_ut_steps=4)).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def huginn():
    torch.manual_seed(0)
    shape = HuginnConfig(64, 2, 96, 97, 2, 2, 1, mean_recurrence=32, block_size=64)
    return Huginn(shape).eval().requires_grad_(False)


def attended(model, ids):
    """What attention is given, by (loop, layer), with K and V rounded as the cache rounds them."""
    seen = {}

    def attend(loop, layer, q, k, v):
        k, v = k.bfloat16().to(q.dtype), v.bfloat16().to(q.dtype)
        seen[loop, layer] = tuple(x[0].bfloat16().transpose(0, 1) for x in (q, k, v))
        return causal_attention(loop, layer, q, k, v)

    with torch.no_grad():
        model(torch.tensor([ids]), attend=attend)
    return seen


def test_states_are_what_the_model_attends_with(ouro):
    for queries in (None, 4):
        for ids, text in zip(TEXTS, collect(ouro, TEXTS, [2, 0], queries)):
            seen, n = attended(ouro, ids), queries or len(ids)
            assert text.q.shape == (4, 2, 4, n, 32) and text.k.shape == (4, 2, 2, len(ids), 32)
            for loop in range(4):
                for index, layer in enumerate([2, 0]):
                    q, k, v = seen[loop, layer]
                    assert torch.equal(text.q[loop, index], q[:, -n:])
                    assert torch.equal(text.k[loop, index], k) and torch.equal(text.v[loop, index], v)


def test_memory_is_counted(ouro):
    for queries in (None, 6):
        kept = collect(ouro, TEXTS, [1], queries)
        assert sum(text.nbytes for text in kept) == captured_bytes(ouro.kv_shape, 4, TEXTS, queries)
    assert LAST_QUERIES == 64


def test_edge_layers_are_seen_only_when_asked_for(huginn):
    places = {edge: [] for edge in (False, True)}
    for edge, seen in places.items():
        visit(huginn, TEXTS[0], lambda loop, layer, q, k, v, seen=seen: seen.append((loop, layer)), edge)
    looped = [(loop, layer) for loop in range(32) for layer in range(2)]
    assert places[False] == looped
    assert places[True] == [(EDGE, 0), (EDGE, 1), *looped, (EDGE, 2)]
    with pytest.raises(ValueError, match="got 0 tokens"):
        visit(huginn, [], lambda *a: None)


@pytest.mark.parametrize("edge", [False, True])
def test_the_file_holds_what_was_asked_for(huginn, tmp_path, edge):
    keep = Selection(loops=(31, 3), layers=(1,), edge=edge)
    path = write_trace(huginn, TEXTS, tmp_path / "a" / "t.safetensors", keep, source="two lists")
    assert [p.name for p in path.parent.iterdir()] == ["t.safetensors"]
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
        names = {f"{i}.{prefix}{x}" for i in (0, 1) for prefix in ("", "edge_") for x in "qkv" if edge or not prefix}
        assert set(file.keys()) == names | {"0.ids", "1.ids"}
        for i, ids in enumerate(TEXTS):
            assert file.get_tensor(f"{i}.ids").tolist() == ids
            seen = attended(huginn, ids)
            for index, name in enumerate("qkv"):
                kept = file.get_tensor(f"{i}.{name}")
                assert kept.dtype == torch.bfloat16 and kept.shape == (2, 1, 2, len(ids), 32)
                for at, loop in enumerate((31, 3)):
                    assert torch.equal(kept[at, 0], seen[loop, 1][index])
                if edge:
                    edges = file.get_tensor(f"{i}.edge_{name}")
                    assert edges.shape == (1, 3, 2, len(ids), 32)
                    assert all(torch.equal(edges[0, layer], seen[EDGE, layer][index]) for layer in range(3))
    assert (about["model"], about["weights"], about["source"]) == ("huginn", "random", "two lists")
    assert about["kept"] == {"loops": [31, 3], "layers": [1], "queries": None, "edge": edge}
    assert about["compute_dtype"] == "float32" and about["provenance"]["packages"]["torch"] == torch.__version__
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert length % 8 == 0


def test_bad_selections_leave_nothing(ouro, tmp_path):
    for keep, sentence in (
        (Selection(loops=(4,)), r"loops must be different numbers from 0 to 3, got \[4\]"),
        (Selection(layers=(0, 0)), r"layers must be different numbers from 0 to 2, got \[0, 0\]"),
        (Selection(layers=()), r"layers must be .* got \[\]"),
        (Selection(edge=True), "no layers that run once"),
    ):
        with pytest.raises(ValueError, match=sentence):
            write_trace(ouro, TEXTS, tmp_path / "t.safetensors", keep)
    for texts in ([], [[3], []]):
        with pytest.raises(ValueError, match="at least one token each"):
            write_trace(ouro, texts, tmp_path / "t.safetensors")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_or_impossible_trace_leaves_nothing(ouro, tmp_path):
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(ouro, TEXTS, tmp_path / "t.safetensors", done=stop)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ResidualQuantError, match="could not be written"):
        write_trace(ouro, TEXTS, tmp_path / "file" / "t.safetensors")


def test_the_command(ouro, tmp_path, capsys, monkeypatch):
    ouro.tokenizer = TextTokenizer()
    monkeypatch.setattr("residualquant.models.load_model", lambda name, device=None: ouro)
    out = tmp_path / "t.safetensors"
    cli.main(["trace", "--task", "stubs", "--n", "1", "--loops", "4", "--layers", "1", "3", "--out", str(out)])
    assert "stubs, train problems 0 to 0" in capsys.readouterr().out
    with safe_open(out, "pt") as file:
        assert file.get_tensor("0.k").shape[:3] == (1, 2, 2)
        assert json.loads(file.metadata()["about"])["kept"]["layers"] == [0, 2]
    note = tmp_path / "note.txt"
    note.write_text("hello")
    cli.main(["trace", "--text", str(note), "--out", str(out)])
    with safe_open(out, "pt") as file:
        assert file.get_tensor("0.ids").tolist() == TextTokenizer().encode("hello").ids
    with pytest.raises(SystemExit, match="2"):
        cli.main(["trace", "--layers", "4", "--out", str(out)])
    assert "layers must be different numbers" in capsys.readouterr().err

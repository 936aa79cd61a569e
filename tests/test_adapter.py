"""A looped model that is not ours, from docs/examples, through everything the package does with a model."""

import importlib
import re
import sys

import pandas as pd
import pytest

from residualquant import generate, load_model, preset
from residualquant.evals.run import evaluate
from residualquant.inspect import Traced, inspect_trace
from residualquant.models.base import KVShape
from residualquant.repro.records import read_records
from residualquant.repro.snippets import with_outputs
from residualquant.rotation.calibration import CalibrationSizes, calibrated, rotations_hash
from residualquant.trace import write_trace

WORDS = "Adam has 3 apples. Bea has twice as many."


@pytest.fixture(scope="module")
def example(root):
    """docs/examples/looped_llama.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "docs" / "examples")
        return importlib.import_module("looped_llama")


@pytest.fixture(scope="module")
def tokenizer():
    return load_model("mini-ouro-maths", device="cpu").tokenizer


@pytest.fixture(scope="module")
def model(example, tokenizer):
    return example.build(tokenizer)


def attentive(example, tokenizer):
    """The model in FP64, its weights so large that what attention sees decides the tokens."""
    model = example.build(tokenizer).double()
    for weights in model.parameters():
        if weights.dim() > 1:
            weights.mul_(3)
    return model


@pytest.fixture(scope="module")
def learnt(model, tmp_path_factory):
    """A configuration of two loops, and OptR-H rotations calibrated for it."""
    config = preset("INT2/4 g=32", loops=2, rotation="optr_h")
    sizes = CalibrationSizes(fit=2, holdout=2, steps=2)
    return config, calibrated(model, config, "words", sizes, tmp_path_factory.mktemp("rotations"), progress=False)


def test_the_example_is_short_and_has_grouped_queries_and_two_loops(root, model):
    assert len((root / "docs" / "examples" / "looped_llama.py").read_text().splitlines()) < 120
    assert model.kv_shape == KVShape(2, 2, 2, 64) and model.config.num_attention_heads == 4
    assert model.stop_ids == {1}


def test_weights_and_seed_decide_the_hash(example, tokenizer, model):
    assert example.build(tokenizer).weights_hash == model.weights_hash != example.build(tokenizer, 1).weights_hash


def test_decoding_with_the_cache_equals_decoding_without_one(example, tokenizer):
    model = attentive(example, tokenizer)
    for text in (WORDS, "A", "x = 3 * (4 + 5)"):
        cached, uncached = example.decode_twice(model, tokenizer.encode(text).ids)
        assert cached == uncached and len(cached) == 16


def ignore_positions(model):
    forward = model.forward
    model.forward = lambda ids, positions=None, *rest, **options: forward(ids, None, *rest, **options)


def one_loop_for_all(model):
    forward = model.forward

    def harmed(ids, positions, attend, **options):
        return forward(ids, positions, lambda loop, layer, *qkv: attend(0, layer, *qkv), **options)

    model.forward = lambda ids, positions=None, attend=None, **options: harmed(ids, positions, attend, **options)


def look_at_other_tokens(model):
    embed = model.embed.forward
    model.embed.forward = lambda ids: embed(ids) - embed(ids).mean(1, keepdim=True)


@pytest.mark.parametrize("harm", [ignore_positions, one_loop_for_all, look_at_other_tokens])
def test_the_check_finds_what_the_recipe_warns_of(example, tokenizer, harm):
    model = attentive(example, tokenizer)
    harm(model)
    cached, uncached = example.decode_twice(model, tokenizer.encode(WORDS).ids)
    assert cached != uncached


def test_it_generates_with_and_without_calibrated_rotations(model, learnt):
    config, rotations = learnt
    assert isinstance(generate(model, WORDS, "INT2/4 g=32", max_new_tokens=4)[0], str)
    assert isinstance(generate(model, WORDS, config, max_new_tokens=4, rotations=rotations)[0], str)


def test_it_is_evaluated_with_calibrated_rotations(model, learnt, tmp_path):
    config, rotations = learnt
    configs = [preset("BF16", loops=2), preset("INT2 g=32", loops=2), config]
    cells = evaluate(
        model, "words", configs, 3, tmp_path / "r.jsonl", rotations={2: rotations}, max_new_tokens=4, progress=False
    )
    assert all(cell.is_complete for cell in cells) and len(read_records(tmp_path / "r.jsonl").cells) == 3
    assert [c.identity["rotations"] for c in cells] == [None, None, rotations_hash(rotations)]
    assert cells[0].identity["weights"] == model.weights_hash and cells[0].identity["decoding"]["eos"] == [1]


def test_it_is_traced_and_inspected(model, learnt, tmp_path):
    config, rotations = learnt
    ids = model.tokenizer.encode(WORDS).ids
    seen = Traced.open(write_trace(model, [ids], tmp_path / "t.safetensors"))
    assert (seen.shape, seen.weights, seen.layers) == (model.kv_shape, model.weights_hash, [0, 1])
    table = inspect_trace(seen.texts, config, rotations, queries=4)
    assert len(table) == 2 * 2 * 2 * 2 and (table.attention_error > 0).all()
    assert (table[table.loop == 2].residual_energy == 1).all()
    live = inspect_trace(Traced.live(model, [ids], queries=4).texts, config, rotations)
    pd.testing.assert_frame_equal(live, table)


def test_the_pages_snippets_print_what_stands_below_them(root, tmp_path, monkeypatch):
    """Numbers with a point to a few percent (another CPU sums in another order), everything else to the letter."""
    (tmp_path / "docs").symlink_to(root / "docs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    page = (root / "docs" / "bring_your_own_model.md").read_text()
    made, number = with_outputs(page), re.compile(r"\d+\.\d+")
    assert number.sub("#", made) == number.sub("#", page)
    assert [*map(float, number.findall(made))] == pytest.approx([*map(float, number.findall(page))], rel=0.05, abs=0.02)
    assert page.count("```text") == page.count("```python") == 4


def test_outputs_take_the_place_of_those_before():
    page = "Text.\n\n```python\nx = 2\n```\n\n```python\nprint(x + 1)\n```\n\n```text\nold\n```\n\nMore.\n"
    assert with_outputs(page) == page.replace("old", "3") and with_outputs(with_outputs(page)) == with_outputs(page)

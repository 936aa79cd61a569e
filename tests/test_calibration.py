"""Calibrating a whole (tiny) model: what is kept and refused, resuming, memory, and decoding with the result."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stand_ins import TextTokenizer
from test_optr_h import random_gram
from test_oscar import random_states

from residualquant import cli
from residualquant.attention import PackedAttention
from residualquant.cache import PackedCache
from residualquant.config import preset
from residualquant.engine import iter_decode
from residualquant.errors import ResidualQuantError
from residualquant.evals.tasks import EOS_ID, MODELS, TASKS, is_test_prompt, problems
from residualquant.evals.texts import (
    calibration_tasks,
    calibration_texts,
    problem_ids,
    shared_texts,
    training_texts,
    unseen_texts,
)
from residualquant.models import Huginn, HuginnConfig, Ouro, OuroConfig, load_model
from residualquant.repro.traces import problem_tokens
from residualquant.rotation import calibration
from residualquant.rotation.calibration import (
    CalibrationSizes,
    calibrate,
    calibrated,
    calibrated_many,
    load_rotations,
    loss_table,
    output_gram,
    rotations_hash,
)
from residualquant.rotation.hadamard import hadamard_matrix
from residualquant.rotation.measure import attention_errors, compare_rotations, rotation_errors
from residualquant.rotation.optr_h import Fit, OptRHSettings, fit_optr_h, judge, losses_of
from residualquant.rotation.recoding import fixed_means, recode
from residualquant.rotation.states import BATCH_VALUES, attend, batch, batches, states_of, tokens_of
from residualquant.trace import Captured, collect
from residualquant.training import ProblemStream, TrainConfig

QUICK = OptRHSettings(steps=4, check_every=2, queries=8)
CONFIG = preset("INT2/4 g=32", rotation="optr_h")


def tiny_model(seed=0, heads=4, kv_heads=2, loops=4, dim=64, vocabulary=97, dtype=torch.float64):
    """A random Ouro whose queries come in groups; FP64, so that the order of sums flips no code."""
    torch.manual_seed(seed)
    config = OuroConfig(64, 96, 2, heads, kv_heads, dim, vocabulary, total_ut_steps=loops)
    model = Ouro(config).to(dtype).eval()
    for p in model.requires_grad_(False).parameters():
        if p.dim() > 1:
            p.mul_(4)
    model.name, model.weights_hash = f"tiny-{seed}", f"{seed}" * 64
    return model


def random_texts(seed=0, n=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 97, (14 + 5 * i,), generator=generator).tolist() for i in range(n)]


def run(model, out, cfg=CONFIG, seed=0, **options):
    options = {"settings": QUICK, "progress": False, "task": "random"} | options
    return calibrate(model, {out: cfg}, random_texts(seed), random_texts(seed + 1), **options)[out]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def artefact(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("rotations")
    return out, run(model, out)


def same(a, b):
    return rotations_hash(a) == rotations_hash(b) and a.keys() == b.keys()


# ------------------------------------------------------------------------------------------------------- states


def test_states_of_units_batched_and_padded():
    """Heads of every unit follow each other; a text in a batch has the weights and outputs that it has alone."""
    model, texts = tiny_model(), random_texts()
    captured = collect(model, texts, [1, 0], queries=16)
    units = [(1, 0), (0, 1), (1, 1)]
    alone = [states_of(text, units, [1, 0], 2) for text in captured]
    assert alone[0].q.shape == (2, 6, 1, 2, 14, 64) and alone[2].k.shape == (2, 6, 1, 24, 64)
    assert torch.equal(alone[1].k[:, 2:4, 0], captured[1].k[:2, 0])
    assert torch.equal(alone[1].q[:, 4:, 0].flatten(1, 2), captured[1].q[2:, 0])
    together = batch(alone)
    assert together.lengths == (14, 19, 24) and together.q.shape == (2, 6, 3, 2, 16, 64)
    weights = together.own_weights
    out = attend(weights, together.v.float())
    for i, one in enumerate(alone):
        n, t = one.q.shape[-2], one.k.shape[-2]
        own = weights[:, :, i : i + 1, :, -n:]
        assert torch.allclose(own[..., :t], one.own_weights, atol=1e-6) and not own[..., t:].any()
        assert torch.allclose(out[:, :, i : i + 1, :, -n:], attend(one.own_weights, one.v.float()), atol=1e-4)
        values = torch.rand(out.shape[:-1])
        expected = values[:, :, i, :, -n:].mean((0, 2, 3))
        assert torch.allclose(together.mean_of(values)[:, i], expected, atol=1e-6)
    assert [b.lengths for b in batches(alone[::-1], 2 * alone[1].k.numel())] == [(14, 19), (24,)]
    assert [b.lengths for b in batches(alone, 1)] == [(14,), (19,), (24,)]
    pieces = tokens_of([s.k for s in alone], 10**9)
    assert len(pieces) == 1 and torch.equal(pieces[0], torch.cat([s.k.squeeze(2) for s in alone], 2))


# ---------------------------------------------------------------------------------------------------- calibrate


@pytest.mark.parametrize("memory", [1, 2**40])
def test_one_layer_at_a_time_or_all_together_is_the_same(model, artefact, tmp_path, memory, monkeypatch):
    passes = []

    def counted(*arguments):
        passes.append(arguments[2])
        return collect(*arguments)

    monkeypatch.setattr(calibration, "collect", counted)
    assert same(run(model, tmp_path, memory_bytes=memory), artefact[1])
    assert passes[::2] == ([[0], [1]] if memory == 1 else [[0, 1]])


@pytest.mark.parametrize("rotation", ["optr_h", "oscar"])
def test_all_units_and_texts_at_once_is_what_each_gives_alone(rotation, monkeypatch):
    """As a GPU does it: heads of all layers and loop groups in one program, texts padded to one length."""
    cfg = preset("INT2/4 g=32", loops=2, rotation=rotation)
    layers, groups, settings = [0, 1], 2, OptRHSettings(steps=2, check_every=1, queries=16)
    model = tiny_model()
    fit, held = (collect(model, random_texts(seed), layers) for seed in (0, 1))
    units = [(g, n) for n in layers for g in range(groups)]

    def fits(units):
        gram = torch.cat([output_gram(model, layer) for _, layer in units])
        parts = ([states_of(t, units, layers, 2) for t in texts] for texts in (fit, held))
        return calibration._fit(*parts, gram, cfg, units, settings, lambda: None)

    alone = {unit: found for one in units for unit, found in fits([one]).items()}
    for device in BATCH_VALUES:
        monkeypatch.setitem(BATCH_VALUES, device, 10**9)
    together = fits(units)
    assert together.keys() == alone.keys()
    for unit in units:
        for kind in "kv":
            a, b = alone[unit][kind], together[unit][kind]
            assert torch.allclose(a.before, b.before, rtol=1e-3) and torch.allclose(a.after, b.after, rtol=0.05)
            if rotation == "oscar":
                assert torch.allclose(a.matrix, b.matrix, atol=2e-3)


def test_a_fit_is_the_one_that_the_method_describes():
    """Against the plainest form of it: one head and one text at a time, in a loop (App. G)."""
    _, gram = random_gram(per_head=1)
    settings = OptRHSettings(steps=2, check_every=1, queries=8)
    fit, held = ([random_states(per_head=1, tokens=20 + s, seed=s) for s in range(n, n + 3)] for n in (0, 10))
    found = fit_optr_h(fit, held, gram, CONFIG, settings)[0]
    for head in range(2):
        angles = torch.zeros(64, 64, requires_grad=True)
        adam, generator = torch.optim.Adam([angles], lr=0.02), torch.Generator().manual_seed(0)
        losses = []
        for _ in range(3):
            turned = hadamard_matrix(64) @ torch.linalg.matrix_exp(angles - angles.T)
            stored = turned.detach().half().float()
            centres = fixed_means([s.k[:, head : head + 1, 0] for s in fit], CONFIG, stored[None])
            losses.append(sum(plain_key_loss(s, head, gram, stored, centres) for s in held).item() / 3)
            drawn = torch.randperm(3, generator=generator)[:2].tolist()
            adam.zero_grad()
            (sum(plain_key_loss(fit[i], head, gram, turned, centres) for i in drawn) / 2).backward()
            adam.step()
        assert abs(found.before[head] / losses[0] - 1) < 1e-3
        assert abs(found.after[head] / min(losses) - 1) < 2e-2


def plain_key_loss(states, head, gram, matrix, centres):
    """L_K of one head on one text, from its formula."""
    k = recode(states.k[:, head : head + 1, 0], CONFIG, matrix[None], centres)[:, 0]
    total = 0
    for loop in range(4):
        q, true_k, v = (x[loop, head, 0].float() for x in (states.q.squeeze(3), states.k, states.v))
        q, tokens = q[-8:], true_k.shape[0]
        hidden = torch.arange(tokens)[None] > torch.arange(tokens - 8, tokens)[:, None]
        true, read = ((q @ x.T / 8).masked_fill(hidden, -torch.inf) for x in (true_k, k[loop]))
        divergence = torch.nn.functional.kl_div(read.log_softmax(-1).clamp(min=-99), true.softmax(-1), reduction="sum")
        moved = (read.softmax(-1) - true.softmax(-1)) @ v
        total = total + divergence / 8 + ((moved @ gram[head, 0]) * moved).sum() / 8
    return total / 4


@pytest.mark.parametrize(
    "cfg",
    [
        preset("INT2 g=16", rotation="optr_h", reference="direct"),
        preset("INT2/4 g=32", rotation="oscar"),
        preset("INT2/4 g=32", rotation="optr_h", reference="previous"),
        preset("INT2/4 g=32", loops=2, rotation="optr_h"),
    ],
    ids=lambda cfg: f"{cfg.rotation} {cfg.reference} {cfg.loops}",
)
def test_kinds_of_rotations(model, tmp_path, cfg):
    rotations = run(model, tmp_path, cfg)
    assert set(rotations) == {(g, n, kind) for g in range(4 // cfg.loops) for n in range(2) for kind in "kv"}
    for (_, _, kind), rotation in rotations.items():
        assert rotation.matrix.shape == (2, 64, 64) and rotation.matrix.dtype == torch.float16
        has_means = cfg.rotation == "optr_h" and kind == "k"
        assert (rotation.means is None) != has_means
    assert same(load_rotations(tmp_path, model, cfg), rotations)
    rows = loss_table(tmp_path)
    assert len(rows) == 2 * 2 * len(rotations) / 2
    if cfg.rotation == "optr_h":
        assert all(float(row["after"]) <= float(row["Hadamard"]) for row in rows)


def test_a_layer_of_other_bits_is_fitted_to_them(model, artefact, tmp_path):
    cfg = preset("INT4 g=32", rotation="optr_h", layer_bits=((1, CONFIG.bits),))
    found = run(model, tmp_path, cfg)
    for (group, layer, kind), rotation in found.items():
        other = artefact[1][group, layer, kind]
        assert torch.equal(rotation.matrix, other.matrix) == (layer == 1)
    assert same(run(model, tmp_path, cfg), found) and same(load_rotations(tmp_path, model, cfg), found)
    with pytest.raises(ResidualQuantError, match="calibrated for layer_bits="):
        load_rotations(tmp_path, model, replace(cfg, layer_bits=()))
    texts = random_texts(seed=7)
    both = attention_errors(model, [cfg, CONFIG], texts, {0: found, 1: artefact[1]}, queries=8)
    assert torch.equal(both[0][0, 1, "k"], both[1][0, 1, "k"]) and (both[0][0, 0, "k"] < both[1][0, 0, "k"]).all()


def test_deterministic_by_seed(model, artefact, tmp_path):
    assert same(run(model, tmp_path / "again"), artefact[1])
    assert not same(run(model, tmp_path / "other", settings=replace(QUICK, seed=1)), artefact[1])


def test_an_interrupted_calibration_goes_on(model, artefact, tmp_path, monkeypatch):
    fit_unit, fitted = calibration._fit, []

    def stop_at_the_second(*arguments):
        if len(fitted) == 1:
            raise KeyboardInterrupt
        fitted.append(arguments)
        return fit_unit(*arguments)

    monkeypatch.setattr(calibration, "_fit", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path)
    with pytest.raises(ResidualQuantError, match=r"loop group 1 of layer 2 is missing.*again to finish"):
        load_rotations(tmp_path, model, CONFIG)
    with pytest.raises(ResidualQuantError, match="another settings"):
        run(model, tmp_path, settings=replace(QUICK, steps=5))
    monkeypatch.setattr(calibration, "_fit", lambda *a: fitted.append(a) or fit_unit(*a))
    assert same(run(model, tmp_path), artefact[1]) and len(fitted) == 2
    assert same(run(model, tmp_path), artefact[1]) and len(fitted) == 2


def test_progress_shows_losses_before_and_after(model, tmp_path, capsys):
    run(model, tmp_path, progress=True)
    shown = capsys.readouterr()
    assert ": K " in shown.out + shown.err and "->" in shown.out + shown.err


def test_what_cannot_be_calibrated(model, tmp_path):
    for cfg in (preset("BF16", rotation="oscar"), preset("INT2 g=32", rotation="hadamard")):
        with pytest.raises(ValueError, match=r"got (the BF16 cache|rotation='hadamard')"):
            run(model, tmp_path, cfg)
    with pytest.raises(ValueError, match="got 0 and 3"):
        calibrate(model, {tmp_path: CONFIG}, [], random_texts())
    with pytest.raises(ValueError, match="3 loops"):
        run(model, tmp_path, preset("INT2 g=32", loops=3, rotation="oscar"))
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------ artefact


def test_what_the_artefact_says(artefact, model):
    out, rotations = artefact
    about = json.loads((out / "calibration.json").read_text())
    assert (about["model"], about["weights"]) == (model.name, model.weights_hash)
    assert about["config"] == CONFIG.to_dict() and about["settings"]["steps"] == 4
    assert len(about["texts"]) == 64 and (about["fit_texts"], about["held_out"]) == (3, 3)
    assert len(about["losses"]["0.1"]["k"]["before"]) == 2
    assert same(load_rotations(out, model, replace(CONFIG, recent_tokens=5)), rotations)  # windows do not matter
    stored = load_file(out / "rotations.safetensors")
    for matrix in (x.double() for name, x in stored.items() if name.endswith("matrix")):
        assert (matrix.mT @ matrix - torch.eye(64)).abs().max() < 1e-3


@pytest.mark.parametrize(
    "change, sentence",
    [
        (dict(model=tiny_model(seed=1)), r"calibrated for tiny-0 \(weights 000000000000\), not for tiny-1"),
        (dict(cfg=replace(CONFIG, group_size=16)), "calibrated for group_size=32, the configuration has 16"),
        (dict(cfg=preset("INT2 g=32", rotation="optr_h")), r"calibrated for bits=\[2, 2, 2, 4\]"),
        (dict(cfg=replace(CONFIG, reference="next")), "calibrated for reference='last'"),
        (dict(cfg=replace(CONFIG, rotation="oscar")), "calibrated for rotation='optr_h'"),
    ],
)
def test_another_model_or_configuration_is_one_sentence(artefact, model, change, sentence):
    asked = {"model": model, "cfg": CONFIG} | change
    with pytest.raises(ResidualQuantError, match=sentence) as caught:
        load_rotations(artefact[0], **asked)
    assert "\n" not in str(caught.value)


def test_another_shape_is_one_sentence(artefact):
    other = tiny_model(heads=4, kv_heads=4)
    with pytest.raises(ResidualQuantError, match=r"is of a cache of .*kv_heads=2.* not .*kv_heads=4"):
        load_rotations(artefact[0], other, CONFIG)


def test_damaged_artefacts(artefact, model, tmp_path):
    out, _ = artefact
    weights, about = (out / name for name in ("rotations.safetensors", "calibration.json"))

    def attempt(weights_bytes, about_text):
        (tmp_path / weights.name).write_bytes(weights_bytes)
        (tmp_path / about.name).write_text(about_text)
        with pytest.raises(ResidualQuantError) as caught:
            load_rotations(tmp_path, model, CONFIG)
        return str(caught.value)

    with pytest.raises(ResidualQuantError, match="holds no calibration: run"):
        load_rotations(tmp_path / "nowhere", model, CONFIG)
    whole, text = weights.read_bytes(), about.read_text()
    assert "damaged" in attempt(whole[:-100], text)
    assert "damaged" in attempt(whole, text[:-50])
    assert "damaged" in attempt(whole, "[]")
    assert "two different calibrations" in attempt(whole, text.replace('"fit_texts": 3', '"fit_texts": 4'))

    def changed(name, value):
        with safe_open(weights, framework="pt") as file:
            metadata = file.metadata()
        save_file(load_file(weights) | {name: value}, tmp_path / weights.name, metadata)
        return attempt((tmp_path / weights.name).read_bytes(), text)

    half = load_file(weights)["0.0.k.matrix"]
    assert "orthogonal within 0.001" in changed("0.0.k.matrix", half * 1.01)
    assert "shape does not fit 2 heads of 64" in changed("0.1.v.matrix", half[:1].clone())
    assert "means are not finite" in changed("0.0.k.means", torch.full((4, 2, 64), torch.nan))


# ---------------------------------------------------------------------------------------------------- end to end


def test_decoding_with_calibrated_rotations(model, artefact):
    """The batched engine against the packed cache, one sequence at a time; with 8 bits it is plain decoding."""
    prompts, rotations = random_texts(seed=5), artefact[1]
    fine = preset("INT2/4 g=32", rotation="optr_h", bits=(8, 8, 8, 8), reference="direct")
    plain = {key: replace(r, means=None) for key, r in rotations.items()}
    configs = [CONFIG, fine, preset("BF16")]
    given = {0: rotations, 1: plain}
    done = {
        (c.config_index, c.prompt_index): c.tokens
        for c in iter_decode(model, prompts, configs, 6, set(), rotations=given, progress=False)
    }
    for index, ids in enumerate(prompts):
        assert done[0, index] == decode_packed(model, ids, CONFIG, rotations, 6)
        assert len(done[1, index]) == 6
    agree = [done[1, i][:2] == done[2, i][:2] for i in range(len(prompts))]
    assert any(agree)


@torch.no_grad()
def decode_packed(model, ids, cfg, rotations, count):
    cache = PackedCache(model.kv_shape, cfg, rotations)
    attend, tokens = PackedAttention(cache), []
    new, position = list(ids), 0
    for _ in range(count):
        positions = torch.arange(position, position + len(new))[None]
        logits = model(torch.tensor([new]), positions, attend=attend, last_only=True).logits
        position += len(new)
        new = [int(logits[0, -1].argmax())]
        tokens += new
    return tokens


def test_errors_of_rotations(model, artefact):
    third = random_texts(seed=7)
    configs = [replace(CONFIG, rotation="none"), replace(CONFIG, rotation="hadamard"), CONFIG, preset("BF16")]
    *found, lossless = attention_errors(model, configs, third, {2: artefact[1]}, queries=8)
    for errors in found:
        assert errors.keys() == artefact[1].keys()
        assert all(e.shape == (2,) and (e > 0).all() for e in errors.values())
    assert max(float(e.max()) for e in lossless.values()) < 1e-10
    assert any((found[1][key] != found[2][key]).any() for key in found[2])
    with pytest.raises(ValueError, match="no optr_h rotation was given"):
        attention_errors(model, configs, third)


def test_the_table_of_errors_is_of_a_third_split_and_compared(tmp_path):
    model = tiny_model(vocabulary=258, dtype=torch.float32)
    model.tokenizer = SimpleNamespace(encode=lambda text: TextTokenizer().encode(text[::20]))
    sizes = CalibrationSizes(fit=2, holdout=2, steps=1)
    given = calibrated(model, CONFIG, "stubs", sizes, tmp_path, progress=False)
    frame = rotation_errors(model, "stubs", [replace(CONFIG, rotation="hadamard"), CONFIG], {1: given}, sizes, n=2)
    assert len(frame) == 2 * 2 * 2 * 2 and set(frame["split"]) == {"training problems 4 to 5 of stubs+asserts"}
    texts = unseen_texts(model, "asserts", 2, 2, 2)
    expected = attention_errors(model, [CONFIG], texts, {0: given})[0][0, 1, "v"]
    rows = frame.query("rotation == 'optr_h' and layer == 2 and of == 'V'")
    assert rows["error"].tolist() == expected.tolist() and rows["head"].tolist() == [1, 2]
    own, other = (frame[frame["rotation"] == r]["error"] for r in ("optr_h", "hadamard"))
    compared = compare_rotations(frame, "optr_h", "hadamard")
    assert compared == {
        "mean_ratio": own.mean() / other.mean(),
        "median_ratio": own.median() / other.median(),
        "lower": (own.to_numpy() < other.to_numpy()).mean(),
        "cells": 8,
    }
    with pytest.raises(ValueError, match="no errors of rotation 'oscar'"):
        compare_rotations(frame, "optr_h", "oscar")
    with pytest.raises(ValueError, match="not measured on the same"):
        compare_rotations(frame[frame.index > 0], "optr_h", "hadamard")


def test_calibration_texts_are_a_familys_training_problems_and_disjoint():
    model = SimpleNamespace(name="m", family="ouro", tokenizer=TextTokenizer())
    fit, held = calibration_texts(model, "words", 5, 3, seed=0)
    assert (len(fit), len(held)) == (5, 3) and calibration_texts(model, "algebra", 5, 3, seed=0) == (fit, held)
    assert calibration_texts(model, "words", 5, 3, seed=1) != (fit, held)
    both = training_texts(model, "words", 4) + training_texts(model, "algebra", 4)
    assert sorted(fit + held) == sorted(both)
    third = unseen_texts(model, "words", 5, 3, 5)
    assert len(third) == 5 and not any(text in both for text in third)
    words = training_texts(model, "words", 3, 4)
    assert third == shared_texts(model, "words", 5, 8) and third[::2] == words
    assert shared_texts(model, "words", 4, 9) == shared_texts(model, "words", 8, 8)[1:5]
    assert not any(is_test_prompt(p.prompt) for t in ("words", "algebra") for p in problems(t, 8, "train"))
    huginn = SimpleNamespace(name="m", family="huginn", tokenizer=TextTokenizer())
    assert calibration_tasks(model, "asserts") == ("stubs", "asserts") and calibration_tasks(huginn, "words") == TASKS
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"got {sizes[0]} and {sizes[1]}"):
            calibration_texts(model, "words", *sizes)
    with pytest.raises(ValueError, match="unknown task 'wrods'"):
        calibration_texts(model, "wrods", 1, 1)
    model.tokenizer = None
    with pytest.raises(ResidualQuantError, match="no tokenizer"):
        calibration_texts(model, "words", 1, 1)


@pytest.mark.parametrize("task", TASKS)
def test_training_and_calibration_and_traces_tokenise_as_decoding_does(task):
    """Prompt and solution each on its own: what decoding feeds the model, and what it was trained on."""
    model = load_model(MODELS["ouro"][task], device="cpu")
    encode = model.tokenizer.encode
    for index, problem in enumerate(problems(task, 4, "train")):
        ids = encode(problem.prompt).ids + encode(problem.solution).ids
        prompt, solution = problem_ids(model.tokenizer, problem)
        assert prompt + solution == ids
        assert training_texts(model, task, 1, index) == [ids] == [problem_tokens(model, task, index)]
    two = [encode(problem.prompt).ids + encode(problem.solution).ids for problem in problems(task, 2, "train")]
    assert problem_tokens(model, task, 1, preceding=1) == two[0] + encode("\n").ids + two[1]
    config = TrainConfig(tasks=(task,), level_weights=(0,) * 7 + (1,), batch=3, tokens=400)
    ids, weights = next(iter(ProblemStream(config, model.tokenizer.to_str())))
    for row, weight in zip(ids.tolist(), weights):
        start, end = (weight < 1).int().argmin().item(), row.index(EOS_ID)
        prompt, solution = map(model.tokenizer.decode, (row[:start], row[start:end]))
        assert row[:end] == encode(prompt).ids + encode(solution).ids


@pytest.mark.parametrize("rotation", ["optr_h", "oscar"])
def test_calibrated_keeps_and_finds_what_fits(tmp_path, monkeypatch, rotation):
    """One artefact for both tasks of a family; another configuration, size or family is another folder."""
    model = tiny_model(vocabulary=258, dtype=torch.float32)
    model.tokenizer = SimpleNamespace(encode=lambda text: TextTokenizer().encode(text[::20]))
    sizes, cfg = CalibrationSizes(fit=1, holdout=1, steps=1), replace(CONFIG, rotation=rotation)
    found = calibrated(model, cfg, "stubs", sizes, tmp_path, progress=False)
    assert len(found) == 4 and len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(calibration, "collect", None)  # nothing is captured for what is there
    assert same(calibrated(model, cfg, "asserts", sizes, tmp_path, progress=False), found)
    monkeypatch.undo()
    once = []
    monkeypatch.setattr(calibration, "collect", lambda *a: once.append(a) or collect(*a))
    two_loops = preset("INT2 g=32", 2, rotation=rotation)
    others = [cfg, replace(cfg, group_size=16), replace(cfg, reference="direct"), two_loops]
    many = calibrated_many(model, others, "asserts", sizes, tmp_path, progress=False)
    assert same(many[0], found) and len(once) == 2 and len(many[3]) == 8  # one capture to fit, one to choose
    assert len(list(tmp_path.iterdir())) == 4
    assert len({rotations_hash(m) for m in many}) == (4 if rotation == "optr_h" else 3)  # OSCAR's ignore the group size
    calibrated(model, cfg, "stubs", replace(sizes, seed=1), tmp_path, progress=False)
    assert len(list(tmp_path.iterdir())) == 5
    with pytest.raises(ValueError, match="fit must be at least 1, got 0"):
        CalibrationSizes(fit=0)


@pytest.mark.parametrize("rotation", ["optr_h", "oscar"])
@pytest.mark.parametrize("loops", [4, 8, 16])
def test_loop_groups_of_huginn(tmp_path, rotation, loops):
    """Each group of recurrences has its own matrices, orthogonal; prelude and coda have none."""
    torch.manual_seed(0)
    shape = HuginnConfig(192, 2, 96, 97, 1, 2, 1, mean_recurrence=32, block_size=64)
    model = Huginn(shape).eval().requires_grad_(False)
    cfg = preset("INT2/4 g=32", loops=loops, rotation=rotation)
    settings = OptRHSettings(steps=1, queries=4)
    texts = [text[:6] for text in random_texts()]
    found = calibrate(model, {tmp_path: cfg}, texts[:1], texts[1:2], settings=settings, progress=False)[tmp_path]
    assert set(found) == {(g, n, kind) for g in range(32 // loops) for n in range(2) for kind in "kv"}
    for (_, _, kind), r in found.items():
        assert r.matrix.shape == (2, 96, 96) and (r.means is None) == (kind == "v" or rotation == "oscar")
        assert (r.matrix.double().mT @ r.matrix.double() - torch.eye(96)).abs().max() < 1e-3
    if rotation == "oscar":
        assert rotations_hash({(0, 0, "k"): found[0, 0, "k"]}) != rotations_hash({(0, 0, "k"): found[1, 0, "k"]})


def test_the_command(tmp_path, capsys, monkeypatch):
    model = tiny_model(vocabulary=258, dtype=torch.float32)
    model.tokenizer = TextTokenizer()
    monkeypatch.setattr("residualquant.models.load_model", lambda name, device=None: model)
    argv = ["calibrate", "--out", str(tmp_path), "--task", "asserts", "--fit", "1", "--holdout", "1", "--steps", "1"]
    cli.main(argv)
    out = capsys.readouterr().out
    assert "Hadamard" in out and "rotations in" in out
    (folder,) = tmp_path.iterdir()
    assert len(load_rotations(folder, model, CONFIG)) == 4
    for wrong, sentence in (
        (["--task", "wrods"], "unknown task"),
        (["--rotation", "hadamard"], "got rotation='hadamard'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main([*argv, *wrong])
        err = capsys.readouterr().err
        assert sentence in err and err.count("\n") == 1


@pytest.mark.gpu
def test_the_gpu_captures_what_the_processor_captures(model):
    """To BF16's rounding: norms are taken in FP32, so a stored value may round the other way, and later ones follow."""
    texts = random_texts(0) + random_texts(1)
    for here, there in zip(collect(model, texts), collect(tiny_model().to("cuda"), texts)):
        for name in "qkv":
            x, y = (getattr(captured, name).double().cpu() for captured in (here, there))
            assert (x - y).norm() < 2**-9 * x.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("cfg", [CONFIG, replace(CONFIG, rotation="oscar")], ids=lambda c: c.rotation)
def test_the_gpu_fits_what_the_processor_fits(model, tmp_path, cfg, monkeypatch):
    """From the same states: one BF16 value that rounds differently already moves a head's loss by up to a percent.

    Codes at a tie may still flip, and Adam turns what has hardly a gradient either way: so heads agree before fitting,
    their sum agrees afterwards, and the losses that the GPU gives for its rotations are those that the processor finds.
    """

    def captured_here(there, *what):
        return [Captured(*(x.to(there.device) for x in (t.q, t.k, t.v))) for t in collect(model, *what)]

    monkeypatch.setattr(calibration, "collect", captured_here)
    settings = OptRHSettings(steps=2, check_every=1, queries=8)
    texts = random_texts(0), random_texts(1)
    losses = []
    for device in ("cpu", "cuda"):
        there = tiny_model().to(device)
        calibrate(there, {tmp_path / device: cfg}, *texts, settings=settings, progress=False)
        losses.append(json.loads((tmp_path / device / "calibration.json").read_text())["losses"])
    here, there = losses
    found = judged(model, load_rotations(tmp_path / "cuda", model, cfg), texts[1], cfg, queries=8)
    for unit, kinds in here.items():
        for kind, loss in kinds.items():
            assert there[unit][kind]["before"] == pytest.approx(loss["before"], rel=0.005)
            assert there[unit][kind]["after"] == pytest.approx(found[unit, kind].tolist(), rel=0.005)
    for kind in "kv":
        sums = [sum(sum(kinds[kind]["after"]) for kinds in where.values()) for where in losses]
        assert sums[1] == pytest.approx(sums[0], rel=0.05)


def judged(model, rotations, texts, cfg, queries):
    """OptR-H's losses of every head under ``rotations``: {("group.layer", "k" or "v"): [H]}."""
    losses = {}
    for (group, layer, kind), rotation in sorted(rotations.items(), key=lambda item: item[0]):
        unit = [(group, layer)]
        states = [states_of(t, unit, [layer], cfg.loops).last(queries) for t in collect(model, texts, [layer])]
        of_key, read_weights, of_value = losses_of(output_gram(model, layer), cfg)
        fit = Fit(rotation.matrix, rotation.means, *[None] * 3)
        centres = None if fit.means is None else (fit.means.unsqueeze(2) @ fit.matrix.float().inverse()).squeeze(2)
        if kind == "k":  # which comes before "v"
            key, loss, texts_of = fit, of_key, states
        else:
            loss, texts_of = of_value, [(s, read_weights(s, key)) for s in states]
        losses[f"{group}.{layer}", kind] = judge(fit.matrix, centres, loss, texts_of, None, 0).after
    return losses


def test_the_losses_kept_are_those_of_the_rotations_kept(model, artefact):
    """Read back from the file, on the texts that chose them."""
    out, rotations = artefact
    kept = json.loads((out / "calibration.json").read_text())["losses"]
    for (unit, kind), found in judged(model, rotations, random_texts(1), CONFIG, QUICK.queries).items():
        assert kept[unit][kind]["after"] == pytest.approx(found.tolist(), rel=0.005)

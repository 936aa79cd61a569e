"""Calibrating a whole (tiny) model: what is kept and refused, resuming, memory, and decoding with the result."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stand_ins import TextTokenizer

from residualquant import cli
from residualquant.attention import PackedAttention
from residualquant.bench import calibration as bench
from residualquant.cache import PackedCache
from residualquant.config import preset
from residualquant.engine import iter_decode
from residualquant.errors import ResidualQuantError
from residualquant.evals.tasks import is_test_prompt, problems
from residualquant.evals.texts import calibration_texts, training_texts
from residualquant.models.base import causal_attention
from residualquant.models.ouro import Ouro, OuroConfig
from residualquant.rotation import calibration
from residualquant.rotation.calibration import calibrate, load_rotations, loss_table, rotations_hash
from residualquant.rotation.measure import attention_errors
from residualquant.rotation.optr_h import OptRHSettings
from residualquant.rotation.states import collect_states, layer_bytes

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
    return calibrate(model, cfg, random_texts(seed), random_texts(seed + 1), out, **options)


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


def test_states_are_what_the_model_attends_with(model):
    """Attention over the states kept gives the model's own logits' inputs: queries, keys, values, all loops."""
    ids = random_texts()[0]
    seen = {}

    def attend(loop, layer, q, k, v):
        seen[loop, layer] = q[0], k[0], v[0]
        return causal_attention(loop, layer, q, k.bfloat16().to(q.dtype), v.bfloat16().to(q.dtype))

    with torch.no_grad():
        model(torch.tensor([ids]), attend=attend)
    whole, last = (collect_states(model, [ids], [1], n)[1][0] for n in (None, 5))
    assert whole.q.shape == (4, 4, len(ids), 64) and last.q.shape == (4, 4, 5, 64)
    assert torch.equal(whole.last(5).q, last.q) and torch.equal(whole.k, last.k)
    for loop in range(4):
        for kept, x in zip((whole.q, whole.k, whole.v), seen[loop, 1]):
            assert torch.equal(kept[loop].transpose(0, 1), x.bfloat16())
    assert torch.equal(whole.group(1, 2).k, whole.k[2:])


def test_memory_is_counted(model):
    for queries in (None, 6):
        kept = collect_states(model, random_texts(), [0], queries)[0]
        held = sum(x.numel() * x.element_size() for states in kept for x in (states.q, states.k, states.v))
        assert held == layer_bytes(model, random_texts(), queries)


# ---------------------------------------------------------------------------------------------------- calibrate


@pytest.mark.parametrize("memory", [1, 2**40])
def test_one_layer_at_a_time_or_all_together_is_the_same(model, artefact, tmp_path, memory, monkeypatch):
    passes = []
    collect = calibration.collect_states

    def counted(*arguments):
        passes.append(arguments[2])
        return collect(*arguments)

    monkeypatch.setattr(calibration, "collect_states", counted)
    assert same(run(model, tmp_path, memory_bytes=memory), artefact[1])
    assert passes[::2] == ([[0], [1]] if memory == 1 else [[0, 1]])


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


def test_deterministic_by_seed(model, artefact, tmp_path):
    assert same(run(model, tmp_path / "again"), artefact[1])
    assert not same(run(model, tmp_path / "other", settings=replace(QUICK, seed=1)), artefact[1])


def test_an_interrupted_calibration_goes_on(model, artefact, tmp_path, monkeypatch):
    fit_layer, fitted = calibration._fit_layer, []

    def stop_at_the_second(*arguments):
        if len(fitted) == 1:
            raise KeyboardInterrupt
        fitted.append(arguments)
        return fit_layer(*arguments)

    monkeypatch.setattr(calibration, "_fit_layer", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path)
    with pytest.raises(ResidualQuantError, match=r"layer 2 is missing.*again to finish"):
        load_rotations(tmp_path, model, CONFIG)
    with pytest.raises(ResidualQuantError, match="another settings"):
        run(model, tmp_path, settings=replace(QUICK, steps=5))
    monkeypatch.setattr(calibration, "_fit_layer", lambda *a: fitted.append(a) or fit_layer(*a))
    assert same(run(model, tmp_path), artefact[1]) and len(fitted) == 2
    assert same(run(model, tmp_path), artefact[1]) and len(fitted) == 2


def test_progress_shows_losses_per_layer_and_head(model, tmp_path, capsys):
    run(model, tmp_path, progress=True)
    shown = capsys.readouterr()
    assert "layer 2, loop group 1, K: " in shown.out + shown.err and "->" in shown.out + shown.err


def test_what_cannot_be_calibrated(model, tmp_path):
    for cfg in (preset("BF16", rotation="oscar"), preset("INT2 g=32", rotation="hadamard")):
        with pytest.raises(ValueError, match=r"got (the BF16 cache|rotation='hadamard')"):
            run(model, tmp_path, cfg)
    with pytest.raises(ValueError, match="got 0 and 3"):
        calibrate(model, CONFIG, [], random_texts(), tmp_path)
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
    assert len(about["losses"]["1"]["0.k"]["before"]) == 2
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


def test_errors_on_texts_that_nobody_saw(model, artefact):
    third = random_texts(seed=7)
    none = attention_errors(model, replace(CONFIG, rotation="none"), third, queries=8)
    hadamard = attention_errors(model, replace(CONFIG, rotation="hadamard"), third, queries=8)
    fitted = attention_errors(model, CONFIG, third, artefact[1], queries=8)
    assert none.keys() == hadamard.keys() == fitted.keys() == artefact[1].keys()
    for errors in (none, hadamard, fitted):
        assert all(e.shape == (2,) and (e > 0).all() for e in errors.values())
    lossless = attention_errors(model, preset("BF16"), third)
    assert max(float(e.max()) for e in lossless.values()) < 1e-10
    assert any((hadamard[key] != fitted[key]).any() for key in fitted)


def test_calibration_texts_are_training_problems_and_disjoint():
    model = SimpleNamespace(name="m", tokenizer=TextTokenizer())
    fit, held = calibration_texts(model, "words", 4, seed=0)
    assert len(fit) == len(held) == 4 and calibration_texts(model, "words", 4, seed=0) == (fit, held)
    assert calibration_texts(model, "words", 4, seed=1) != (fit, held)
    assert sorted(fit + held) == sorted(training_texts(model, "words", 8))
    assert not any(text in fit + held for text in training_texts(model, "words", 4, start=8))
    assert not any(is_test_prompt(p.prompt) for p in problems("words", 8, "train"))
    with pytest.raises(ValueError, match="got 0"):
        calibration_texts(model, "words", 0)
    model.tokenizer = None
    with pytest.raises(ResidualQuantError, match="no tokenizer"):
        calibration_texts(model, "words", 1)


def test_the_command(tmp_path, capsys, monkeypatch):
    model = tiny_model(vocabulary=258, dtype=torch.float32)
    model.tokenizer = TextTokenizer()
    monkeypatch.setattr("residualquant.models.load_model", lambda name, device=None: model)
    argv = ["calibrate", "--out", str(tmp_path), "--task", "asserts", "--examples", "1", "--steps", "1"]
    cli.main(argv)
    out = capsys.readouterr().out
    assert "Hadamard" in out and "rotations in" in out
    rotations = load_rotations(tmp_path, model, CONFIG)
    assert len(rotations) == 4
    for wrong, sentence in (
        (["--config", "INT2 g=32"], "another config"),
        (["--task", "wrods"], "unknown task"),
        (["--rotation", "hadamard"], "got rotation='hadamard'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main([*argv, *wrong])
        err = capsys.readouterr().err
        assert sentence in err and err.count("\n") == 1


def test_the_benchmark_of_one_layer():
    shape = OuroConfig(64, 96, 6, 4, 2, 64, 97)
    cost = bench.measure("cpu", shape, examples=2, tokens=12, settings=QUICK)
    assert cost.seconds > 0 and cost.state_bytes == 4 * 4 * 64 * 2 * (4 * 8 + 2 * 2 * 12)
    assert "6 layers" in cost.describe() and "peak" not in cost.describe()


@pytest.mark.gpu
def test_a_layer_of_ouro_on_the_gpu():
    assert bench.measure("cuda").seconds <= 10

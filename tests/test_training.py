"""Training: deterministic data, test prompts kept out, and a run that saves a model which loads and goes on."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
import tyro

from residualquant.errors import ResidualQuantError
from residualquant.evals.tasks import EOS_ID, LEVELS, PAD_ID, is_test_prompt
from residualquant.models import load_model
from residualquant.models.loading import model_folder
from residualquant.training import (
    ProblemStream,
    TrainConfig,
    _start,
    build_tokenizer,
    draw_recurrences,
    held_out,
    looped_loss,
    recurrent_loss,
    settings_of,
    solved_share,
    train,
    weighted_cross_entropy,
)

TINY = TrainConfig(
    model="tiny",
    hidden_size=32,
    intermediate_size=32,
    layers=1,
    heads=2,
    head_dim=16,
    loops=2,
    steps=2,
    batch=4,
    tokens=192,
    workers=0,
    device="cpu",
    compile=False,
)

SHAPE = ("hidden_size", "intermediate_size", "layers", "prelude", "coda", "heads", "head_dim", "loops", "rope_theta")
TINY_HUGINN = dataclasses.replace(TINY, architecture="huginn", loops=4, recurrences=(2.0, 5.0), gradient_loops=2)


def test_shipped_tokenizers_are_those_that_training_builds():
    for name in ("maths", "code"):
        folder = model_folder(f"mini-ouro-{name}")
        settings = json.loads((folder / "train_config_before.json").read_text())
        built = build_tokenizer(TrainConfig(tasks=tuple(settings["tasks"]), vocab_size=settings["vocab_size"]))
        assert built.to_str(pretty=True) == (folder / "tokenizer.json").read_text()


def test_make_train_runs_what_made_the_shipped_models():
    root = Path(__file__).resolve().parents[1]
    shown = subprocess.run(["make", "-n", "train"], cwd=root, capture_output=True, text=True, check=True).stdout
    lines = shown.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line.split(" train ", 1)[1]) for line in lines if ".cli train " in line]
    runs = [tyro.cli(TrainConfig, args=command, config=(tyro.conf.OmitArgPrefixes,)) for command in commands]
    assert [run.model for run in runs[1::2]] == ["mini-ouro-maths", "mini-ouro-code", "mini-huginn"]
    for first, second in zip(runs[::2], runs[1::2], strict=True):
        assert second.init == first.out / first.model
        folder = model_folder(second.model)
        for run, file in ((first, "train_config_before.json"), (second, "train_config.json")):
            assert run.out.is_relative_to("data/runs/train")  # never over the shipped ones
            shape = {name: getattr(first, name) for name in SHAPE}  # the second run's is its checkpoint's
            asked = dataclasses.replace(run, init=run.init and run.init.name, out=TrainConfig.out, **shape)
            settings = dataclasses.asdict(TrainConfig()) | json.loads((folder / file).read_text())
            assert json.loads(json.dumps(dataclasses.asdict(asked), default=str)) == json.loads(
                json.dumps(settings, default=str)
            )


@pytest.mark.parametrize("name", ["mini-ouro-maths", "mini-ouro-code", "mini-huginn"])
def test_settings_of_a_shipped_model_state_its_shape(name):
    model = load_model(name, device="cpu")
    recorded = json.loads((model_folder(name) / "train_config.json").read_text())
    said = settings_of(TrainConfig(architecture=type(model).__name__.lower()), model)
    there = recorded.keys() & {*SHAPE, "vocab_size"}
    assert len(there) >= 8 and {n: recorded[n] for n in there} == {n: said[n] for n in there}


def test_training_stream_is_deterministic_and_free_of_test_prompts():
    tokenizer = build_tokenizer(TINY)
    batches = [next(iter(ProblemStream(TINY, tokenizer.to_str()))) for _ in range(2)]
    assert torch.equal(batches[0][0], batches[1][0]) and torch.equal(batches[0][1], batches[1][1])
    ids, weights = batches[0]
    for row, weight in zip(ids, weights):
        prompt = tokenizer.decode(row[(weight > 0) & (weight < 1)].tolist())
        assert prompt.startswith(("Question:", "Problem:")) and not is_test_prompt(prompt)
        solved = row[weight == 1].tolist()
        assert solved[-1] == EOS_ID and PAD_ID not in solved


def test_loss_supervises_every_loop():
    torch.manual_seed(0)
    tokenizer = build_tokenizer(TINY)
    ids, weights = next(iter(ProblemStream(TINY, tokenizer.to_str())))
    model = _start(TINY)
    loss, last = looped_loss(model, ids, weights, TINY)
    assert loss.isfinite() and abs(last.item() - torch.log(torch.tensor(512.0)).item()) < 0.5
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_training_a_huginn_lowers_its_loss_to_what_is_worth_learning():
    """A batch learnt by heart: every solution comes out right, at more recurrences than were trained, too."""
    torch.manual_seed(0)
    config = dataclasses.replace(TINY_HUGINN, hidden_size=64, head_dim=32, level_weights=(1,), tokens=128, batch=2)
    model = _start(config)
    ids, weights = next(iter(ProblemStream(config, model.tokenizer.to_str())))
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(60):
        loss, _ = recurrent_loss(model, ids, weights, 2 + step % 4, config.gradient_loops, weighted_cross_entropy)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > 5 and losses[-1] < 0.3
    assert solved_share(model, ids, weights) == 1.0  # at 4 recurrences
    model.config = dataclasses.replace(model.config, mean_recurrence=12)
    assert solved_share(model, ids, weights) == 1.0


def test_recurrences_are_drawn_around_their_mean():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([draw_recurrences(12.0, generator) for _ in range(2000)], dtype=torch.float)
    assert drawn.min() >= 1 and abs(drawn.mean() - 12) < 0.6 and 24 < drawn.max() < 80
    assert {draw_recurrences(1.0, generator) for _ in range(20)} == {1}


def test_checks_are_of_problems_that_are_neither_trained_on_nor_tested(monkeypatch):
    monkeypatch.setattr("residualquant.training.CHECK_PROBLEMS", 3)
    tokenizer = build_tokenizer(TINY)
    batches = held_out(dataclasses.replace(TINY, level_weights=(0, 1, 1)), tokenizer)
    assert list(batches) == ["words 2", "words 3", "algebra 2", "algebra 3"]
    for ids, weights in batches.values():
        prompts = [tokenizer.decode(row[(w > 0) & (w < 1)].tolist()) for row, w in zip(ids, weights)]
        assert prompts and not any(map(is_test_prompt, prompts))


@pytest.mark.parametrize(("config", "loops"), [(TINY, 2), (TINY_HUGINN, 4)])
def test_trained_model_is_saved_described_and_can_go_on(tmp_path, config, loops):
    folder = train(dataclasses.replace(config, out=tmp_path / "first"))
    assert load_model(str(folder)).kv_shape.loops == loops
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [1]}
    other = {"hidden_size": 96, "heads": 3, "head_dim": 32, "layers": 2}  # the checkpoint decides, not these
    again = train(dataclasses.replace(config, init=folder, out=tmp_path / "second", level_weights=(0, 1), **other))
    before, after = (json.loads((f / "train_config.json").read_text()) for f in (folder, again))
    assert {n: after[n] for n in SHAPE} == {n: before[n] for n in SHAPE} and after["level_weights"] == [0, 1]
    assert (again / "train_log_before.jsonl").read_bytes() == (folder / "train_log.jsonl").read_bytes()
    assert "went on from tiny" in (again / "README.md").read_text()
    assert str(tmp_path) not in (again / "train_config.json").read_text()


def test_other_tasks_can_start_from_a_trained_model(tmp_path):
    """With a tokenizer of their own; the text that both tokenizers know keeps its embeddings."""
    folder = train(dataclasses.replace(TINY_HUGINN, out=tmp_path / "first"))
    config = dataclasses.replace(TINY_HUGINN, init=folder, new_tokenizer=True, tasks=("stubs",))
    first, model = load_model(str(folder), device="cpu"), _start(config)
    assert model.tokenizer.to_str() == build_tokenizer(config).to_str() != first.tokenizer.to_str()
    old, new = first.tokenizer.get_vocab(), model.tokenizer.get_vocab()
    rows = [old.get(token) for token in sorted(new, key=new.get)]
    assert 0 < rows.count(None) < 400
    kept, before = model.lm_head.weight, first.lm_head.weight
    assert all(torch.equal(kept[i], before[row]) for i, row in enumerate(rows) if row is not None)
    assert torch.equal(kept.sort(0).values, before.sort(0).values)  # no row twice
    assert torch.equal(model.transformer.adapter.weight, first.transformer.adapter.weight)
    with pytest.raises(ValueError, match="must have 512 tokens"):
        _start(dataclasses.replace(config, vocab_size=400))


def test_training_without_the_gpu_it_asks_for_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ResidualQuantError, match="no CUDA GPU"):
        train(dataclasses.replace(TINY, device="cuda"))


@pytest.mark.parametrize(
    "setting",
    [{"steps": 0}, {"batch": 0}, {"heads": 0}, {"warmup": 0}, {"workers": -1}, {"device": "tpu"}, {"tasks": ("wrods",)},
     {"architecture": "raven"}, {"hidden_size": 48, "architecture": "huginn"}, {"recurrences": (0.0, 4.0)},
     {"gradient_loops": 0}, {"tasks": ()}, {"level_weights": ()}, {"level_weights": (0, 0)},
     {"level_weights": (1,) * (len(LEVELS) + 1)}],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused_before_anything_is_written(tmp_path, setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        train(dataclasses.replace(TINY, out=tmp_path, **setting))
    assert not list(tmp_path.iterdir())


def test_problems_that_never_fit_are_said(tmp_path):
    with pytest.raises(ResidualQuantError, match="fits into 5 tokens"):
        train(dataclasses.replace(TINY, out=tmp_path, tokens=5, workers=0))


def test_training_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    import residualquant.training as training

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "save_model", full)
    with pytest.raises(OSError, match="No space left"):
        train(dataclasses.replace(TINY, out=tmp_path))
    assert list(tmp_path.iterdir()) == []

"""What calibrating takes: measured, recorded, and estimated for other models from the record."""

import json
from dataclasses import replace

import pytest
import torch
from test_calibration import CONFIG, QUICK

from residualquant import cli
from residualquant.bench import calibration as bench
from residualquant.bench import runs
from residualquant.errors import ResidualQuantError
from residualquant.models import Huginn, HuginnConfig, Ouro, OuroConfig
from residualquant.repro import paths
from residualquant.rotation.calibration import calibrate
from residualquant.rotation.optr_h import OptRHSettings


def test_the_benchmark_of_one_layer():
    shape = OuroConfig(64, 96, 6, 4, 2, 64, 97)
    cost = bench.measure("cpu", shape, examples=2, tokens=12, settings=QUICK)
    assert cost.seconds > 0 and cost.state_bytes == 4 * 4 * 64 * 2 * (4 * 8 + 2 * 2 * 12)
    assert (cost.layers, cost.peak_bytes) == (6, None)


def test_the_benchmarks_record(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda device: bench.Cost(2.0, 2**30, 2**31, 24))
    bench.record(tmp_path / "calibration.json", "cpu")
    kept = json.loads((tmp_path / "calibration.json").read_text())
    assert kept["seconds_per_layer"] == 2.0 and kept["estimated_seconds"] == 48.0 and kept["peak_gib"] == 2.0
    assert kept["protocol"]["tokens"] == 400 and kept["provenance"]["packages"]["torch"] == torch.__version__


def test_a_mini_is_calibrated_in_five_minutes_on_two_cores():
    """At the paper's sizes, by the committed record; its CPU seconds are those of both cores together."""
    kept = runs.recorded("calibration")
    assert kept["command"] == "residualquant " + " ".join(runs.COMMANDS["calibration"])
    for option in ("--model mini-ouro-maths", "--fit 128", "--holdout 128", f"--steps {OptRHSettings().steps}"):
        assert option in kept["command"]
    assert kept["cpu_seconds"] <= 300


def test_estimates_are_given_without_a_measured_mini_and_refused_without_a_layer(monkeypatch):
    layer = runs.recorded("calibration", "h200")
    monkeypatch.setattr(bench, "recorded", lambda name, folder="bench": layer if folder == "h200" else None)
    assert "Measured" not in bench.estimates("mini-huginn")[1]
    monkeypatch.setattr(bench, "recorded", lambda name, folder="bench": None)
    with pytest.raises(ResidualQuantError, match=r"calibration\.json is missing"):
        bench.estimates("mini-huginn")


def test_estimates_need_no_weights(tmp_path, capsys):
    """The shape of the record gets the record's numbers; more states take longer in proportion, fewer no less time."""
    shapes = {"ouro-2.6b": OuroConfig(num_hidden_layers=48), "gqa": OuroConfig(num_key_value_heads=2)}
    shapes["wide"] = OuroConfig(4096, num_attention_heads=32, num_key_value_heads=32)
    for name, config in shapes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config.to_dict()))
    kept = json.loads((paths.shipped_data_dir("h200", "calibration.json")).read_text())
    layer, peak = kept["seconds_per_layer"], kept["peak_gib"]
    (deep, ouro), how = bench.estimates(str(tmp_path / "ouro-2.6b"))
    assert ouro["a layer"] == deep["a layer"] == f"{layer:.1f} s" and ouro["peak"] == f"{peak:.1f} GiB"
    assert ouro["Q, K, V of a layer"] == f"{kept['state_gib']} GiB"
    assert (ouro["all layers"], deep["all layers"]) == (f"{24 * layer / 60:.1f} min", f"{48 * layer / 60:.1f} min")
    assert "80 steps on 128 + 128 texts of 400 tokens" in how
    grouped = bench.estimates(str(tmp_path / "gqa"))[0][0]
    assert grouped["a layer"] == ouro["a layer"] and float(grouped["peak"].split()[0]) < peak / 3
    assert bench.estimates(str(tmp_path / "wide"))[0][0]["a layer"] == f"{2 * layer:.1f} s"
    cli.main(["calibrate", "--estimate", "--model", "mini-huginn"])
    out = capsys.readouterr().out
    assert "mini-huginn" in out and "Ouro-1.4B" in out and "CPU time" in out


@pytest.mark.gpu
def test_a_layer_of_ouro_on_the_gpu():
    assert bench.measure("cuda").seconds <= 10


@pytest.mark.gpu
@pytest.mark.parametrize("name, seconds", [("ouro", 8), ("huginn", 20)])
def test_a_mini_on_the_gpu(tmp_path, name, seconds):
    """The shapes of the minis and the paper's sizes; fitting alone, since capturing serves all configurations."""
    torch.manual_seed(0)
    if name == "ouro":
        mini = Ouro(OuroConfig(256, 704, 4, 2, 2, 128, 512))
    else:
        mini = Huginn(HuginnConfig(288, 3, 768, 512, 1, 2, 1, mean_recurrence=32))
    mini = mini.cuda().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(2, 500, (256, 300), generator=generator).tolist()
    warm = {tmp_path / "warm": replace(CONFIG, group_size=16)}
    calibrate(mini, warm, texts[:2], texts[2:4], settings=replace(QUICK, queries=64), progress=False)
    calibrate(mini, {tmp_path / "one": CONFIG}, texts[:128], texts[128:], progress=False)
    taken = json.loads((tmp_path / "one" / "calibration.json").read_text())["seconds"]
    print(f"\n{name}: {taken} s")
    assert taken <= seconds

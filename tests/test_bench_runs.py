"""What the package's commands take: measured in an empty workspace, kept, and read back."""

import json

import pytest

from residualquant.bench import runs
from residualquant.errors import ResidualQuantError
from residualquant.repro import paths


def test_a_command_is_measured_in_an_empty_workspace(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    monkeypatch.setattr(runs, "COMMANDS", {"bits": ("tables", "--profile", "smoke", "--only", "storage")})
    runs.main([])
    kept = json.loads((tmp_path / "data" / "bench" / "bits.json").read_text())
    assert [f.name for f in tmp_path.rglob("*") if f.is_file()] == ["bits.json"]  # its own output lay elsewhere
    assert kept["command"] == "residualquant tables --profile smoke --only storage"
    assert kept["cpu_seconds"] > 0.1 and kept["seconds"] > 0.1 and 50 < kept["peak_mib"] < 4000
    assert kept["disk_mib"] == 0.0 and kept["provenance"]["cores"] >= 1
    assert runs.recorded("bits") == kept and "wrote data/bench/bits.json" in capsys.readouterr().out


def test_a_command_that_fails_leaves_no_record(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    monkeypatch.setattr(runs, "COMMANDS", {"bad": ("tables", "--profile", "smoke", "--only", "table0")})
    with pytest.raises(ResidualQuantError, match="failed with 2"):
        runs.record("bad")
    with pytest.raises(ValueError, match="no command 'worse'; known: bad"):
        runs.record("worse")
    assert not list(tmp_path.rglob("*.json")) and runs.recorded("bad") is None
    paths.write_atomic(paths.data_dir("bench") / "bad.json", "{")
    with pytest.raises(ResidualQuantError, match=r"bad\.json cannot be read"):
        runs.recorded("bad")

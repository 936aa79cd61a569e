"""The CPU benchmark: its ceiling, its rows, and the codec's peak memory at the size of a real layer."""

import csv

import pytest

from residualquant import preset
from residualquant.bench import cpu


def test_peak_memory_of_a_16k_token_layer():
    """K and V of one Ouro-1.4B layer: at most three times their BF16 input, the input included."""
    ratio = cpu.peak_over_input(preset("INT2/4 g=32", rotation="hadamard"), tokens=16384)
    assert 1 < ratio <= 3


def test_expected_time_counts_passes_and_products():
    machine = cpu.Machine(copy_bandwidth=1e10, pass_seconds=1e-10, matrix_rate=1e11)
    direct, last = preset("INT2 g=32", reference="direct"), preset("INT2 g=32")
    assert cpu.expected_seconds("encode", direct, 128, 10**9, machine) == pytest.approx(1.5)
    assert cpu.expected_seconds("encode", last, 128, 10**9, machine) == pytest.approx(1.5 + 0.3 + 0.05)
    assert cpu.expected_seconds("decode", last, 128, 10**9, machine) == pytest.approx(0.6 + 0.15)
    rotated = preset("INT2 g=32", rotation="hadamard", reference="direct")
    assert cpu.expected_seconds("decode", rotated, 128, 10**9, machine) == pytest.approx(0.6 + 0.3 + 2.56)


def test_rows_and_csv(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    small = cpu.measure
    monkeypatch.setattr(cpu, "measure", lambda tokens: small(tokens=8, trials=1, peak=False))
    cpu.main()
    out = capsys.readouterr().out
    assert out.index("What is expected") < out.index("copy bandwidth")
    with (tmp_path / "data" / "bench" / "cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and {row["operation"] for row in rows} == {"encode", "decode"}
    for row in rows:
        assert all(row[name] for name in ("cpu", "threads", "torch", "protocol"))
        fraction = float(row["gb_per_s"]) / float(row["copy_gb_per_s"])
        assert float(row["fraction_of_copy"]) == pytest.approx(fraction, rel=0.01)

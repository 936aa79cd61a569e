"""The benchmark of the kernels: what it needs, draws and leaves behind when it is cut off."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from residualquant.bench import kernels as bench
from residualquant.errors import ResidualQuantError


def row_of(kind, **known):
    """A row of a benchmark's table, 1 in all numbers but those known."""
    fields = {field.name: "" if field.type == "str" else 1 for field in dataclasses.fields(kind)}
    return kind(**{**fields, **known})


def test_benchmark_needs_a_gpu_and_draws_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResidualQuantError, match="no GPU"):
        bench.run(quick=True, prefer="cuda", models=["Ouro-1.4B"])
    rows = [
        row_of(bench.Timing, model=model, reference="last", operation=operation, read_bytes=10**9)
        for model in bench.MODELS
        for operation in bench.LOOPS
    ]
    assert [path.name for path in bench.draw_roofline(rows)] == ["kernels.png", "kernels.pdf"]


def test_only_a_whole_grid_replaces_the_benchmark_s_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    folder, shapes = tmp_path / "data" / "h200", len(bench.CONTEXTS) * len(bench.BATCHES) * len(bench.MODELS)
    measured, limit = [], 3

    def measure(model, context, batch, *_):
        if len(measured) == limit:
            raise KeyboardInterrupt
        measured.append((model, context, batch))
        yield row_of(bench.Timing, model=model, context=context, batch=batch)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: bench.Copy("none", 1e12))
    monkeypatch.setattr(bench, "WriterCase", lambda *_: None)
    monkeypatch.setattr(bench, "measure_writer", lambda _: row_of(bench.WriterTiming))
    monkeypatch.setattr(bench.prefill, "measure", lambda _: [row_of(bench.prefill.PrefillTiming)])
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "MEMORY_BYTES", 2**60)

    def lines():
        return {path.name: path.read_text().count("\n") - 1 for path in folder.iterdir()}

    with pytest.raises(KeyboardInterrupt):
        bench.run(quick=False, prefer="cuda", models=list(bench.MODELS))
    whole = {"writer.csv": 4 * len(bench.WRITER_TOKENS), "prefill.csv": 2}
    assert lines() == {**whole, "kernels.partial.csv": 3}
    limit = None
    measured.clear()
    kernels, *_ = bench.run(quick=False, prefer="cuda", models=list(bench.MODELS))
    assert lines() == {**whole, "kernels.csv": shapes} and len(set(measured)) == shapes
    assert kernels.written == folder / "kernels.csv"
    for options in ({"quick": True}, {"prefer": "triton"}, {"models": ["Ouro-1.4B"]}):
        monkeypatch.setattr(bench, "CONTEXTS", (2048,))
        bench.run(**{"quick": False, "prefer": "cuda", "models": list(bench.MODELS), **options})
        assert {"kernels.partial.csv", "writer.partial.csv", "prefill.partial.csv"} <= {*lines()}
        assert lines()["kernels.csv"] == shapes

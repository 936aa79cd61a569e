"""Pictures: the same bytes twice, no dates, every label drawn, traces kept whole; one vector followed and back."""

import contextlib
import dataclasses
import re

import pandas as pd
import pytest
import stand_ins
import torch

from residualquant import decode, encode, preset
from residualquant.errors import ResidualQuantError
from residualquant.models import Ouro, OuroConfig
from residualquant.repro import (
    cells,
    figures,
    layouts,
    method,
    paths,
    plots,
    profiles,
    rotations,
    storage,
    surfaces,
    tables,
    traces,
)
from residualquant.trace import visit

N = 6
TINY = profiles.Profile("tiny", {"ouro": {"words": N, "algebra": N}, "huginn": {"words": N}})


@contextlib.contextmanager
def tiny_home(home):
    """Folder ``home`` as a workspace with stand-in records and a trace of the profile "tiny"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESIDUALQUANT_HOME", str(home))
        patch.setitem(profiles.PROFILES, "tiny", TINY)
        patch.setattr(profiles, "_lack_of_model", lambda name: "")
        stand_ins.install(patch, ("words", "algebra"), N)
        cells.compute_cells(TINY, progress=False)
        make_trace().save(home / "data" / "tiny" / traces.TRACE_FILE)
        keep_analyses(home / "data" / "tiny")
        yield home


def keep_analyses(folder):
    """Made-up numbers of three problems in the files of Table 1, Figure 3 and the rotations' errors."""
    nmse = {f"{reference}_{loop}": 0.1 for reference in ("first", "last") for loop in ("1", "2", "3", "4", "avg")}
    states = {f"{kind}_{loop}": 7.0 for kind in "kv" for loop in range(1, 5)}
    states |= {f"int{b}_{a}_{r}": 2.0 + (a == "unit") for b in (2, 4) for r in (1, 2, 3) for a in ("unit", "ls")}
    for name, row in (("table1", nmse), ("figure3", states)):
        rows = pd.DataFrame([{"key": "x", "problem": i} | row for i in range(3)])
        paths.write_atomic(folder / f"{name}_problems.csv", rows.to_csv(index=False))
    about = {"key": "x", "model": "m", "config": "INT2/4 g=32", "reference": "last", "layer": 1, "loop_group": 1}
    first, n = sum(TINY.calibration[kind] for kind in ("fit", "holdout")), min(rotations.MOST_TEXTS, TINY.texts)
    about |= {"of": "K", "head": 1, "n": n, "split": f"training problems {first} to {first + n - 1} of words"}
    made = {"hadamard": 3, "oscar": 2, "optr_h": 1}
    errors = pd.DataFrame(about | {"rotation": rotation, "error": error} for rotation, error in made.items())
    paths.write_atomic(folder / "rotation_errors.csv", errors.to_csv(index=False))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with tiny_home(tmp_path_factory.mktemp("home")) as home:
        yield home


def make_trace(loops=4, tokens=40, dim=128):
    torch.manual_seed(0)
    last = torch.randn(tokens, dim)
    k = torch.stack([last + (loops - 1 - r) * 0.2 * torch.randn(tokens, dim) for r in range(loops)])
    return traces.Trace(k.bfloat16().float(), 3, 2, "mini-ouro-maths", "0" * 64, traces.describe_prompt("words", 0))


def tiny_model(**changes):
    torch.manual_seed(0)
    settings = dict(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=60, total_ut_steps=3,
    )  # fmt: skip
    return Ouro(OuroConfig(**settings | changes)).eval().requires_grad_(False)


# ------------------------------------------------------------------------------------------------ pictures


@pytest.mark.parametrize("label", [label for label in figures.FIGURES if label != "pareto"])
def test_every_figure_is_drawn(home, label):
    drawn = figures.FIGURES[label]("tiny")
    assert drawn.alt and len(drawn.figure.axes) >= 1


@pytest.mark.parametrize("label", ["figure1_left", "figure2", "table1", "table4"])
def test_figures_are_saved_and_the_same_twice(home, label):
    figures.figure(label, "tiny")
    files = [home / "figures" / "tiny" / f"{label}{suffix}" for suffix in (".png", ".pdf")]
    first = [file.read_bytes() for file in files]
    assert first[0].startswith(b"\x89PNG") and first[1].startswith(b"%PDF")
    figures.figure(label, "tiny")
    assert [file.read_bytes() for file in files] == first
    assert not re.search(rb"CreationDate|ModDate|tIME", b"".join(first))
    assert not list(files[0].parent.glob(".*"))


def test_labels_are_those_of_the_paper():
    of_tables = {f"table{n}" for n in (1, 2, 3, 4, 5, 8, 9)}
    of_figures = {"figure1_left", "figure2", "figure3_middle", "figure3_right", "figure5"}
    assert set(figures.FIGURES) == of_tables | of_figures | {"storage", "pareto"}
    with pytest.raises(ValueError, match="no figure 'figure3'; known figures: storage, "):
        figures.figure("figure3", "tiny")


def test_pictures_show_themselves_at_reading_size(home):
    picture = plots.draw_figure1_left(tables.table("figure1_left", "tiny"))
    data, size = picture._repr_png_()
    assert data == picture.png
    assert size["width"] == round(plots.COLUMN * plots.SCREEN_DPI)


def test_style_of_the_caller_does_not_leak_in_or_out(home):
    import matplotlib

    bars = storage.bits_table(), storage.reads_table(), storage.accesses_table()
    plain = plots.draw_storage(*bars).png
    with matplotlib.rc_context({"font.size": 31, "axes.grid": False}):
        assert plots.draw_storage(*bars).png == plain
        assert matplotlib.rcParams["font.size"] == 31


def test_missing_configurations_leave_gaps_only(home):
    table = tables.table("table2", "tiny")
    assert table.accuracy_pct.isna().sum() == 5 * 17
    few = table[(table["reference"] != "direct") & (table["benchmark"] == "words")]
    assert plots.draw_table("table2", few).png.startswith(b"\x89PNG")


def test_a_table_without_a_needed_column_is_refused(home):
    with pytest.raises(ValueError, match="lacks the column 'rotation'"):
        plots.draw_table("table2", tables.table("table2", "tiny").drop(columns="rotation"))
    with pytest.raises(ValueError, match="unknown step 'seventh'"):
        plots.draw_figure1_left(tables.table("figure1_left", "tiny").replace({"step": {"bf16": "seventh"}}))


def test_rows_are_recognised(home):
    rows = layouts.with_words(tables.table("table2", "tiny"))
    words = rows[rows["place"] == "words (GSM8K), Huginn"]
    assert len(words) == 17
    counts = words.groupby("method")["precision"].nunique().to_dict()
    coded = ("direct", "direct + OptR-H", "residual", "residual + OptR-H")
    assert counts == {"BF16": 1} | dict.fromkeys(coded, 4)
    residual = words[words["method"] == "residual"]
    for changed in ({"coefficient": "unit"}, {"reference": "first"}):
        assert set(layouts.with_words(residual.assign(**changed))["method"]) == {"other"}
    assert all(name in plots.SERIES for label in plots.DOTS for name in drawn_series(label))


def drawn_series(label):
    rows = layouts.with_words(tables.table(label, "tiny"))
    return set(rows[plots.DOTS[label][2]]) - {"BF16", "other"}


def test_missing_records_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    monkeypatch.setitem(profiles.PROFILES, "tiny", dataclasses.replace(TINY, name="tiny"))
    monkeypatch.setattr(traces, "KEPT_IN", "tiny")
    for label in ("table2", "pareto", "figure1_left", "figure2", "table1", "table9"):
        with pytest.raises(ResidualQuantError):
            figures.figure(label, "tiny")
    assert not list(tmp_path.rglob("*.png"))


# ------------------------------------------------------------------------------------------------ traces


def test_trace_is_what_the_cache_would_hold():
    model = tiny_model()
    ids = list(range(3, 23))
    seen = {}
    visit(model, ids, lambda loop, layer, q, k, v: seen.__setitem__((loop, layer), k.clone()))
    assert sorted(seen) == [(loop, layer) for loop in range(3) for layer in range(2)]
    trace = traces.collect_trace(model, ids, layer=2, head=1)
    assert trace.k.shape == (3, 20, 32)
    for loop in range(3):
        assert torch.equal(trace.k[loop], seen[loop, 1][:, 0])
    assert torch.equal(trace.k, trace.k.bfloat16().float())


@pytest.mark.parametrize(("layer", "head", "name"), [(0, 1, "layer"), (3, 1, "layer"), (1, 0, "head"), (1, 3, "head")])
def test_a_layer_or_head_that_is_not_there_is_refused(layer, head, name):
    with pytest.raises(ValueError, match=f"{name} must be between 1 and 2"):
        traces.collect_trace(tiny_model(), [3, 4], layer, head)
    with pytest.raises(ValueError, match="got 0 tokens"):
        traces.collect_trace(tiny_model(), [], 1, 1)


def test_trace_survives_the_file_and_damage_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    trace, path = make_trace(), tmp_path / "t.safetensors"
    assert trace.save(path) and not trace.save(path)
    back = traces.Trace.load(path)
    assert torch.equal(back.k, trace.k)
    assert dataclasses.replace(back, k=trace.k) == trace
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ResidualQuantError, match=r"t\.safetensors is truncated"):
        traces.Trace.load(path)
    with pytest.raises(ResidualQuantError, match=r"gone\.safetensors is missing"):
        traces.Trace.load(tmp_path / "gone.safetensors")


def test_another_trace_than_the_kept_one_needs_compute(home):
    assert traces.figure_trace("tiny").layer == 3
    with pytest.raises(ResidualQuantError, match="set compute = True"):
        traces.figure_trace("tiny", layer=4)


def test_the_trace_of_a_profile_without_its_own_is_the_committed_one(home):
    shared = traces.kept_trace("full")
    assert torch.equal(shared.k, traces.kept_trace("mini").k) and shared.model == "mini-ouro-maths"
    assert not torch.equal(shared.k, traces.kept_trace("tiny").k)


def test_surfaces_are_those_of_the_paper():
    trace = make_trace()
    first, second = trace.k[0].double(), trace.k[1].double()
    alpha = (first * second).sum(-1) / (first * first).sum(-1)
    two = list(traces.figure2_surfaces(trace).values())
    assert torch.equal(two[0], trace.k[0].abs()) and torch.equal(two[1], trace.k[1].abs())
    assert torch.allclose(two[2].double(), (second - alpha[:, None] * first).abs(), atol=1e-5)
    rows = traces.figure5_surfaces(trace)
    assert len(rows) == 3
    for r, row in enumerate(rows):
        own, last, difference = row.values()
        assert torch.equal(own, trace.k[r].abs()) and torch.equal(last, trace.k[3].abs())
        assert torch.equal(difference, (trace.k[r] - trace.k[3]).abs())
    shares = traces.surface_table(trace, "figure5").query("surface.str.contains(' - ')")["energy_share"]
    assert list(shares) == sorted(shares, reverse=True)
    assert traces.ls_coefficient(torch.ones(2, 4), torch.zeros(2, 4)).tolist() == [0, 0]


def test_pooling_loses_no_peak():
    values = torch.rand(1001, 130)
    values[777, 99] = 9.0
    small = surfaces.pool_peaks(values, 96, 128)
    assert small.shape == (96, 128) and small.max() == 9.0
    assert torch.equal(surfaces.pool_peaks(values[:50], 96, 130), values[:50])


def test_the_picture_says_where_it_was_taken():
    trace = make_trace()
    assert "paper" not in surfaces.where_taken(trace)
    assert "nearest to the paper's layer 3" in surfaces.where_taken(dataclasses.replace(trace, layer=2))


# ------------------------------------------------------------------------------------------------ one vector


@pytest.mark.parametrize("reference", ["last", "first", "previous", "next"])
@pytest.mark.parametrize("rotation", ["none", "hadamard"])
def test_a_vector_is_followed_as_the_codec_codes_it(reference, rotation):
    x = make_trace().k[:, 7]
    config = preset("INT2/4 g=32", reference=reference, rotation=rotation)
    journey = method.follow(x, config)
    assert torch.equal(journey.back, decode(encode(x, config)))
    assert torch.allclose(journey.prediction + journey.coded, journey.rebuilt, atol=1e-6)
    assert torch.equal(journey.residual, journey.z - journey.prediction)
    assert journey.alpha[journey.anchor] == 0
    planes = method.stored_planes(journey)
    assert sum(len(data) for _, data in planes) == 198
    assert planes[0][0].loop == journey.anchor
    assert int(journey.page.count_nonzero()) > 0
    table = method.journey_table(journey)
    assert list(table["bytes"].sort_values()) == [42, 42, 42, 72]
    for draw in (method.draw_loops, method.draw_rotation, method.draw_anchor, method.draw_page, method.draw_return):
        assert draw(journey).figure.axes
    assert method.draw_residual(journey, journey.others[0] + 1).figure.axes


def test_what_cannot_be_followed_is_refused():
    x = make_trace().k[:, 7]
    for config in (preset("INT2 g=32", reference="direct"), preset("BF16")):
        with pytest.raises(ValueError, match="needs an anchor and codes"):
            method.follow(x, config)
    with pytest.raises(ValueError, match=r"loop must be one of \[1, 2, 3\], got 4"):
        method.draw_residual(method.follow(x, preset("INT2/4 g=32")), 4)


def test_plots_need_no_pyplot():
    """The figures hold no global state and touch no display."""
    import subprocess
    import sys

    code = (
        "import sys, residualquant.repro.plots as p; f = p.new_figure(2, 2); f.subplots(); p.Picture(f, '').png;"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_pareto_takes_the_mean_table(home):
    mean = tables.table("table2_mean", "tiny")
    with pytest.raises(ResidualQuantError, match="none has all of its tasks measured"):
        plots.draw_pareto(mean)
    assert isinstance(plots.draw_pareto(mean.assign(accuracy_pct=50.0, ci_low=45.0, ci_high=55.0)), plots.Picture)
    assert list(dict.fromkeys(mean["model"])) == ["ouro", "huginn", "all"] and len(mean) == 3 * 17

"""The run policy: anew on a clone, resumed when interrupted, "up to date" when finished, compared with the old."""

import dataclasses
import json
import sys
import types
from functools import partial

import pandas as pd
import pytest
import stand_ins

from residualquant.errors import ResidualQuantError
from residualquant.repro import analyses, figures, paths, profiles, rotations, run, tables
from residualquant.repro.records import Lock

N = 6
TINY = profiles.Profile("tiny", {"ouro": {"words": N, "algebra": N}}, only=profiles._smoke_cells())


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A workspace in which models cost nothing and the notebooks only write their tables."""
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    monkeypatch.setitem(profiles.PROFILES, "tiny", TINY)
    monkeypatch.setattr(profiles, "_lack_of_model", lambda name: "")
    stand_ins.install(monkeypatch, ("words", "algebra"), N)
    monkeypatch.setattr(run, "package_hash", lambda: "one")  # whoever edits the sources meanwhile

    measured = []
    def measure(name, read, profile, compute=False):
        return measured.append(name) if compute else read(profile)

    for module, name in (
        (analyses, "nmse_by_problem"), (analyses, "states_by_problem"), (rotations, "rotation_errors_of")
    ):  # fmt: skip
        monkeypatch.setattr(module, name, partial(measure, name, getattr(module, name)))

    def run_notebooks(profile, compute=False):
        assert compute and {"nmse_by_problem", "states_by_problem", "rotation_errors_of"} == set(measured)
        for label in ("table2", "table2_mean", "figure1_left"):
            tables.table(label, profile, compute=compute)

    def write_report(profile):
        page = paths.figures_dir(profile) / "report.html"
        paths.write_atomic(page, "<html></html>")
        return page

    monkeypatch.setattr("residualquant.repro.notebooks.run_notebooks", run_notebooks)
    report = types.ModuleType("residualquant.repro.report")
    report.write_report = write_report
    monkeypatch.setitem(sys.modules, "residualquant.repro.report", report)
    return tmp_path


def reproduce(**options):
    said = []
    run.reproduce("tiny", log=said.append, **options)
    return "\n".join(said)


def bytes_of(home):
    return {
        f.relative_to(home): f.read_bytes()
        for f in home.rglob("*")
        if f.is_file() and not any(part.startswith(".") for part in f.relative_to(home).parts)
    }


def no_decoding(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a model ran")

    monkeypatch.setattr("residualquant.engine.iter_decode", refuse)


def test_a_finished_run_is_up_to_date_and_changes_no_byte(home, monkeypatch):
    said = reproduce()
    assert "computing everything anew" in said and "nothing is committed" in said
    assert run.read_marker("tiny")["state"] == "finished"
    first = bytes_of(home)
    assert len(pd.read_csv(paths.data_dir("tiny") / "table2.csv")) == 136
    no_decoding(monkeypatch)
    assert "up to date" in reproduce()
    assert bytes_of(home) == first


def test_a_changed_output_or_package_is_not_up_to_date(home, monkeypatch):
    reproduce()
    table = paths.data_dir("tiny") / "table2.csv"
    whole = table.read_bytes()
    table.unlink()
    no_decoding(monkeypatch)  # the answers are still there
    assert "going on with the run" in reproduce()
    assert table.read_bytes() == whole
    monkeypatch.setattr(run, "package_hash", lambda: "other")
    assert "going on with the run" in reproduce()
    assert "up to date" in reproduce()


def test_an_interrupted_run_goes_on_and_keeps_its_answers(home, monkeypatch):
    import residualquant.engine as engine

    whole, calls = engine.iter_decode, []

    def broken(model, prompts, configs, **options):
        for i, done in enumerate(whole(model, prompts, configs, **options)):
            if i == 7:
                raise KeyboardInterrupt
            yield done

    monkeypatch.setattr(engine, "iter_decode", broken)
    with pytest.raises(KeyboardInterrupt):
        reproduce()
    assert run.read_marker("tiny")["state"] == "running"

    def counted(model, prompts, configs, **options):
        calls.append(len(prompts) * len(configs) - len(options["skip"]))
        return whole(model, prompts, configs, **options)

    monkeypatch.setattr(engine, "iter_decode", counted)
    assert "going on with the run" in reproduce()
    assert sum(calls) == N * (3 + 8) - 7


def test_committed_results_are_compared_with_and_never_read(home, monkeypatch):
    reproduce()
    run.marker_path("tiny").unlink()  # as after cloning: committed files, no marker
    table = pd.read_csv(paths.data_dir("tiny") / "table2.csv")
    table.loc[0, "correct"] -= 1
    table.loc[0, "accuracy_pct"] = 100 * table.loc[0, "correct"] / N
    table.loc[1, ["correct", "accuracy_pct"]] = [0, -5.0]
    table.to_csv(paths.data_dir("tiny") / "table2.csv", index=False)
    said = reproduce()
    assert "computing everything anew" in said
    assert "table2.csv: 9 cells against the committed ones: 7 identical, 1 within the 95 % interval, 1 outside" in said
    assert "figure1_left.csv: identical to the committed file, byte for byte" in said
    assert "answers: 66 of 66 identical word for word" in said
    assert (paths.committed_dir("tiny") / "table2.csv").is_file()


def test_fresh_starts_over_and_keeps_what_was_committed(home):
    reproduce()
    assert "nothing is committed to compare with" in reproduce(fresh=True)  # nor are a run's own results, ever
    run.marker_path("tiny").unlink()
    paths.write_atomic(paths.data_dir("tiny") / "table2.csv", "committed\n1\n")
    reproduce()
    assert "computing everything anew" in reproduce(fresh=True)
    assert (paths.committed_dir("tiny") / "table2.csv").read_text() == "committed\n1\n"
    assert len(pd.read_csv(paths.data_dir("tiny") / "table2.csv")) == 136


def test_killed_while_setting_committed_files_aside(home, monkeypatch):
    reproduce()
    data, aside = paths.data_dir("tiny"), paths.committed_dir("tiny")
    paths.write_atomic(run.marker_path("tiny"), json.dumps({"state": "starting"}))
    whole = (data / "figure1_left.csv").read_bytes()
    aside.mkdir(exist_ok=True)
    (data / "figure1_left.csv").rename(aside / "figure1_left.csv")
    assert "computing everything anew" in reproduce()
    assert (aside / "figure1_left.csv").read_bytes() == whole and (aside / "table2.csv").is_file()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"state": []}', '{"state": "x"}', '{"state": "running"}', '{"state": "finished"}']
)
def test_a_damaged_marker_means_never_run(home, text):
    paths.write_atomic(run.marker_path("tiny"), text)
    assert run.read_marker("tiny") == {"state": "never"}


def test_two_runs_of_one_profile_refuse(home):
    with Lock(paths.data_dir("tiny") / "run"), pytest.raises(ResidualQuantError, match="another run"):
        reproduce()


def test_tables_and_figures_come_from_the_records_without_a_model(home, monkeypatch):
    reproduce()
    no_decoding(monkeypatch)
    first = bytes_of(home)
    said = []
    run.make_tables("tiny", ["table2", "figure1_left"], log=said.append)
    assert bytes_of(home) == first and said[0].endswith("table2.csv")
    drawn = []
    monkeypatch.setattr(figures, "figure", lambda label, profile: drawn.append((label, profile)))
    run.make_figures("tiny", ["table2"], log=said.append)
    assert drawn == [("table2", "tiny")]
    with pytest.raises(ValueError, match="no table 'tabel2'; known: storage, table1"):
        run.make_tables("tiny", ["tabel2"])
    with pytest.raises(ValueError, match="no figure 'x'"):
        run.make_figures("tiny", ["x"])
    with pytest.raises(ResidualQuantError, match=r"table1_problems\.csv is missing: `make reproduce PROFILE=tiny`"):
        run.make_tables("tiny", ["table1"])
    said.clear()
    run.make_tables("tiny", log=said.append)  # all that can be made
    assert "table table1 left out: data/tiny/table1_problems.csv is missing" in "\n".join(said)
    assert "data/tiny/table9.csv" in said and "data/tiny/table2.csv" in said


def test_a_missing_gpu_is_one_sentence(home, monkeypatch):
    gpu = dataclasses.replace(TINY, device="cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ResidualQuantError, match=r"lacks: a CUDA GPU .none is visible to torch."):
        run.reproduce(gpu)
    assert run.read_marker("tiny")["state"] == "never"

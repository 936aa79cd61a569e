"""Notebooks: no logic in them, strict parameters, the right kernel, and all or nothing on disk."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import nbformat
import pytest
import stand_ins

from residualquant.errors import ResidualQuantError
from residualquant.repro import cells, notebooks, paths, profiles, tables

NAMES = notebooks.notebook_names()
ALLOWED = (
    ast.Module, ast.Import, ast.ImportFrom, ast.alias, ast.Expr, ast.Assign, ast.Call, ast.Name, ast.Constant,
    ast.Attribute, ast.keyword, ast.List, ast.Load, ast.Store,
)  # fmt: skip


def read(name):
    return nbformat.read(notebooks.notebook_path(name), as_version=4)


def code_cells(name):
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


# ------------------------------------------------------------------------------------------------ as stored


def test_the_notebooks_of_this_version_are_there():
    assert NAMES == [
        "00_method", "01_storage", "02_figure2", "03_figure5", "04_table1", "05_figure3_middle", "06_figure3_right",
        "07_rotations", "10_table2", "11_figure1_left", "12_table3", "13_table4", "14_table5", "15_table8", "16_table9",
        "20_claims", "30_serving",
    ]  # fmt: skip
    labels = {name.split("_", 1)[1] for name in NAMES} - {"method", "serving"}
    assert labels == (set(tables.TABLES) | {"figure2", "figure5"}) - {"table2_mean"}


@pytest.mark.parametrize("name", NAMES)
def test_no_logic_and_one_call_per_cell(name):
    for cell in code_cells(name)[1:]:
        tree = ast.parse(cell.source)
        strange = [type(node).__name__ for node in ast.walk(tree) if not isinstance(node, ALLOWED)]
        assert not strange, (cell.source, strange)
        work = [s for s in tree.body if not isinstance(s, (ast.Import, ast.ImportFrom))]
        assert len(work) == 1, cell.source
        for node in ast.walk(tree):
            if isinstance(node, (ast.Name, ast.Attribute, ast.alias)):
                words = [getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", "")]
                assert not any(word.split(".")[-1].startswith("_") for word in words), cell.source


@pytest.mark.parametrize("name", NAMES)
def test_shape_of_a_notebook(name):
    book = read(name)
    nbformat.validate(book)
    first, second = book.cells[:2]
    assert first.cell_type == "markdown"
    for word in ("**Claim", "**Label:**", "**Cost"):
        assert word in first.source
    assert second.metadata.tags == ["parameters"]
    for line in second.source.splitlines():
        assert len(line) > 0 and "  # " in line, line
    assert "provenance_table(profile)" in book.cells[-1].source
    assert [cell.id for cell in book.cells] == [f"cell-{i + 1:02d}" for i in range(len(book.cells))]
    assert book.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("name", NAMES)
def test_stored_stripped(name):
    for cell in code_cells(name):
        assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_literals_with_a_default_profile(name):
    known = notebooks.parameters_of(notebooks.notebook_path(name))
    assert known["profile"] == "mini"
    assert known.get("compute", False) is False


# ------------------------------------------------------------------------------------------------ refused at once


def test_misspelt_names_are_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"10_table2 has no parameter 'profil'; known parameters: profile, compute$"):
        notebooks.run_notebook("10_table2", {"profil": "smoke"})
    with pytest.raises(ValueError, match=r"no notebook '99_x'; known notebooks: 00_method, "):
        notebooks.run_notebook("99_x")


@pytest.mark.parametrize(("name", "value"), [("compute", "yes"), ("compute", 1), ("profile", 3), ("profile", True)])
def test_wrong_types_are_refused(name, value):
    with pytest.raises(ValueError, match=f"parameter '{name}' of 10_table2 must be of type (bool|str), got {value!r}"):
        notebooks.run_notebook("10_table2", {name: value})


@pytest.mark.parametrize("profile", ["nonsense", "../../../x"])
def test_an_unknown_profile_makes_no_folder(home, profile):
    write(home, "90_ok", ["profile = 'mini'"], tagged=True)
    with pytest.raises(ValueError, match="unknown profile"):
        notebooks.run_notebook("90_ok", {"profile": profile})
    assert [p.name for p in home.iterdir()] == ["notebooks"]


def test_a_missing_kernel_is_one_sentence(home, monkeypatch):
    monkeypatch.setattr(notebooks, "KERNEL", "none-such")
    write(home, "90_ok", ["n = 3\nprofile = 'tiny'"], tagged=True)
    with pytest.raises(ResidualQuantError, match="90_ok: no Jupyter kernel 'none-such'"):
        notebooks.run_notebook("90_ok")
    assert files(home) == ["notebooks/90_ok.ipynb"]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [("n = 1 + 1", "may only hold"), ("n: int = 1", "may only hold"), ("if True:\n    n = 1", "may only hold")],
)
def test_a_parameters_cell_with_more_than_literals_is_refused(home, source, complaint):
    with pytest.raises(ResidualQuantError, match=complaint):
        notebooks.parameters_of(write(home, "90_bad", [source], tagged=True))


def test_a_damaged_notebook_is_one_sentence(home):
    path = write(home, "90_bad", ["n = 1"])
    with pytest.raises(ResidualQuantError, match="one cell tagged 'parameters', it has 0"):
        notebooks.parameters_of(path)
    old = json.dumps({"nbformat": "x", "cells": []})
    for text in (path.read_text()[:50], "", "[]", "5", "[" * 100_000, '{"nbformat": 4, "nbformat_minor": 5}', old):
        path.write_text(text)
        with pytest.raises(ResidualQuantError, match=r"90_bad\.ipynb is not a readable notebook"):
            notebooks.parameters_of(path)


def test_the_command_line_says_one_sentence(capsys):
    assert notebooks.main(["run", "10_table2", "-p", "profil", "smoke"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: 10_table2 has no parameter 'profil'") and "\n" not in said
    assert notebooks.main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == NAMES


# ------------------------------------------------------------------------------------------------ running


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A workspace with notebooks of its own."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    return tmp_path


def write(home, name, sources, tagged=False, kernel="python3"):
    """A small notebook: ``n = 3`` as parameters unless the first source is ``tagged`` as such."""
    book = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": kernel, "display_name": kernel, "language": "x"}})
    book.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    if tagged:
        book.cells[0].metadata["tags"] = ["parameters"]
    path = home / "notebooks" / f"{name}.ipynb"
    nbformat.write(book, path)
    return path


def files(home):
    return sorted(str(p.relative_to(home)) for p in home.rglob("*") if p.is_file())


def test_a_foreign_kernel_name_is_overruled_and_parameters_arrive(home):
    write(home, "90_ok", ["n = 3\nprofile = 'tiny'", "print(n * 7)"], tagged=True, kernel="none-such")
    target = notebooks.run_notebook("90_ok", {"n": 6})
    assert paths.show(target) == "data/runs/tiny/90_ok.ipynb"
    book = nbformat.read(target, as_version=4)
    assert book.cells[-1].outputs[0].text == "42\n"
    assert files(home) == ["data/runs/tiny/90_ok.ipynb", "notebooks/90_ok.ipynb"]


def test_a_failing_cell_leaves_what_was_there_and_is_shown_in_short(home, capsys):
    write(home, "90_ok", ["n = 3\nprofile = 'tiny'", "print('first')", "1 / (n - 3)", "print('never')"], tagged=True)
    good = notebooks.run_notebook("90_ok", {"n": 4}).read_bytes()
    with pytest.raises(ResidualQuantError, match=r"^90_ok, cell 3: ZeroDivisionError: division by zero$"):
        notebooks.run_notebook("90_ok")
    shown = capsys.readouterr().err
    assert "1 / (n - 3)" in shown and "\x1b[3" not in shown.split("the failing cell:")[1]
    assert len(shown.split("the failing cell:")[1].splitlines()) < 20
    assert (home / "data/runs/tiny/90_ok.ipynb").read_bytes() == good
    assert files(home) == ["data/runs/tiny/90_ok.ipynb", "notebooks/90_ok.ipynb"]


def test_a_dead_kernel_is_one_sentence(home):
    write(home, "90_dies", ["n = 3\nprofile = 'tiny'", "import os", "os._exit(1)"], tagged=True)
    with pytest.raises(ResidualQuantError, match="90_dies: its Python process died"):
        notebooks.run_notebook("90_dies")
    assert files(home) == ["notebooks/90_dies.ipynb"]


def test_a_folder_that_cannot_be_written_is_one_sentence(home):
    write(home, "90_ok", ["n = 3\nprofile = 'tiny'"], tagged=True)
    (home / "data").write_text("in the way")
    with pytest.raises(ResidualQuantError, match=r"data/runs/tiny/90_ok\.ipynb could not be written"):
        notebooks.run_notebook("90_ok")


# ------------------------------------------------------------------------------------------------ two at a time

MEET = """
import pathlib, time
def say(word): pathlib.Path(word).touch()
def hear(word):
    end = time.monotonic() + 100
    while not pathlib.Path(word).exists():
        assert time.monotonic() < end, f"{word} was not said"
        time.sleep(0.05)
"""


def speaker(home, name, source, parameters="profile = 'mini'"):
    """A notebook that can say words to others and hear theirs."""
    write(home, name, [parameters, MEET, source], tagged=True)


@pytest.fixture
def five_cores(home, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(5)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return home


def test_two_run_at_the_same_time_and_share_the_cores(five_cores, monkeypatch):
    threads = "import os; print(os.environ['OMP_NUM_THREADS'], profile)"
    speaker(five_cores, "90_a", f"say('a'); hear('b'); {threads}")
    speaker(five_cores, "91_b", f"hear('a'); say('b'); {threads}")
    speaker(five_cores, "92_c", f"assert pathlib.Path('data/runs/smoke/93_d.ipynb').exists(); {threads}")
    speaker(five_cores, "93_d", threads)
    monkeypatch.setattr(notebooks, "ALONE", ("92_c",))
    done = notebooks.run_notebooks("smoke")
    assert [path.stem for path in done] == notebooks.notebook_names()
    assert {paths.show(path.parent) for path in done} == {"data/runs/smoke"}
    said = [nbformat.read(path, as_version=4).cells[-1].outputs[0].text for path in done]
    assert said == ["2 smoke\n", "2 smoke\n", "5 smoke\n", "2 smoke\n"]


def test_one_core_runs_one_at_a_time(five_cores, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    speaker(five_cores, "90_a", "assert not list(pathlib.Path('data/runs/smoke').glob('.91*'))")
    speaker(five_cores, "91_b", "assert pathlib.Path('data/runs/smoke/90_a.ipynb').exists()")
    assert len(notebooks.run_notebooks("smoke")) == 2


def test_a_failure_leaves_what_runs_and_nothing_more_is_begun(five_cores, capsys):
    speaker(five_cores, "90_good", "say('a'); hear('b'); time.sleep(2)")
    speaker(five_cores, "91_bad", "hear('a'); say('b'); 1 / 0")
    speaker(five_cores, "92_never", "say('c')")
    with pytest.raises(ResidualQuantError, match=r"^91_bad, cell 4: ZeroDivisionError: division by zero$"):
        notebooks.run_notebooks("smoke")
    assert "1 / 0" in capsys.readouterr().err
    assert [f for f in files(five_cores) if "runs" in f] == ["data/runs/smoke/90_good.ipynb"]
    assert not (five_cores / "c").exists()


def test_two_failures_are_told_in_the_order_of_the_notebooks(five_cores, capsys):
    speaker(five_cores, "90_late", "say('a'); hear('b'); time.sleep(2); [][7]")
    speaker(five_cores, "91_early", "hear('a'); say('b'); 1 / 0")
    complaint = r"^90_late, cell 4: IndexError: list index out of range; 91_early, cell 4: ZeroDivisionError: "
    with pytest.raises(ResidualQuantError, match=complaint):
        notebooks.run_notebooks("smoke")
    shown = capsys.readouterr().err
    assert 0 < shown.index("[][7]") < shown.index("1 / 0")


def test_an_interruption_ends_all_kernels(home):
    told = "import os; pathlib.Path('{0}').write_text(str(os.getpid())); os.rename('{0}', '{0}.pid')"
    wait = "try: time.sleep(600)\nfinally: say('a.ended')"
    speaker(home, "90_heeds", f"{told.format('a')}\n{wait}")
    speaker(home, "91_ignores", f"{told.format('b')}\nimport signal; signal.signal(2, signal.SIG_IGN); time.sleep(600)")
    speaker(home, "92_never", "say('c')")
    code = "from residualquant.repro import notebooks as n; n.PATIENCE = 3; n.os.sched_getaffinity = lambda _: {0, 1}; "
    process = subprocess.Popen([sys.executable, "-c", code + "n.run_notebooks('smoke')"], stderr=subprocess.PIPE)
    limit = time.monotonic() + 100
    while not all((home / f"{name}.pid").exists() for name in "ab"):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1].decode()
    assert "KeyboardInterrupt" in said and process.returncode != 0
    for name in "ab":
        with pytest.raises(ProcessLookupError):
            os.kill(int((home / f"{name}.pid").read_text()), 0)
    assert (home / "a.ended").exists() and not (home / "c").exists()
    assert not list((home / "data" / "runs" / "smoke").iterdir())


# ------------------------------------------------------------------------------------------------ all of them


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """A workspace with stand-in records of the smoke profile and small random models under the shipped names."""
    from residualquant.models import Ouro, OuroConfig, save_model
    from residualquant.training import TrainConfig, build_tokenizer

    home = tmp_path_factory.mktemp("smoke")
    shutil.copytree(paths.notebooks_dir(), home / "notebooks")
    profile = profiles.PROFILES["smoke"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESIDUALQUANT_HOME", str(home))
        patch.setattr(profiles, "_lack_of_model", lambda name: "")
        config = OuroConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
            head_dim=128, vocab_size=512, total_ut_steps=4,
        )  # fmt: skip
        tokenizer = build_tokenizer(TrainConfig())
        save_model(Ouro(config), home / "data" / "models" / "mini-ouro-maths", tokenizer)
        stand_ins.install(patch)
        cells.compute_cells(profile, progress=False)
        yield home


# One notebook of each kind: continuous integration executes every notebook at smoke size anyway.
@pytest.mark.parametrize(("name", "compute"), [("03_figure5", True), ("04_table1", True), ("13_table4", False)])
def test_a_notebook_runs_from_a_fresh_kernel_and_shows_its_table_and_picture(smoke, name, compute):
    chosen = {"profile": "smoke", "compute": compute}
    book = nbformat.read(notebooks.run_notebook(name, chosen), as_version=4)
    kinds = [set(out.get("data", {})) for cell in book.cells for out in cell.get("outputs", [])]
    assert any("image/png" in kind for kind in kinds) and any("text/html" in kind for kind in kinds)
    assert not any(out.output_type == "error" for cell in book.cells for out in cell.get("outputs", []))

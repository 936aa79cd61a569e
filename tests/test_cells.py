"""Cells: what the labels ask for, each configuration once; in one piece or in parts, scored at once or later."""

import dataclasses
import subprocess
import sys
from typing import ClassVar

import pytest
import stand_ins

from residualquant.config import preset
from residualquant.errors import ResidualQuantError
from residualquant.repro import cells, cost, paths, profiles
from residualquant.repro.labels import BF16, LABELS, lines
from residualquant.repro.profiles import PROFILES, Profile
from residualquant.repro.records import finished_name, list_records, read_records
from residualquant.rotation.calibration import CALIBRATED

N = 2
TINY = Profile("tiny", {"ouro": {"words": N, "algebra": N + 2}, "huginn": {"words": N}})


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    monkeypatch.setattr(profiles, "_lack_of_model", lambda name: "")
    stand_ins.install(monkeypatch, n=N + 2)
    return tmp_path


# ------------------------------------------------------------------------------------------------ labels and plans


def test_the_papers_rows_are_the_cells():
    counts = {label: len(lines(label)) for label in LABELS}
    assert counts == {"table2": 136, "figure1_left": 6, "table3": 25, "table4": 13, "table5": 29, "table8": 13,
                      "table9": 73}  # fmt: skip
    for label in LABELS:
        found = [(line.family, line.benchmark, line.config) for line in lines(label)]
        assert len(set(found)) == len(found) and found[0][2] == BF16
    full = next(x for x in lines("table3") if x.paper_pct == 76.0)
    assert full.config == preset("INT2/4 g=32", rotation="optr_h")
    first = next(x for x in lines("table9") if x.paper_pct == 24.8)
    assert (first.config.bits, first.config.reference, first.config.coefficient) == ((4, 2, 2, 2), "first", "unit")
    assert {x.config.bits for x in lines("table5") if x.config.label == "INT4 g=32"} == {(4, 4, 4, 4)}
    assert [len(x.config.bits) for x in lines("table8")[1::4]] == [4, 8, 16]
    with pytest.raises(ValueError, match="no accuracy table 'table1'"):
        lines("table1")


def test_a_plan_is_the_union_of_the_labels():
    full = PROFILES["full"].plan
    assert {place: len(found) for place, found in full.items()} == {
        ("ouro", "words"): 17, ("ouro", "algebra"): 88, ("ouro", "stubs"): 17, ("ouro", "asserts"): 17,
        ("huginn", "words"): 25, ("huginn", "algebra"): 17, ("huginn", "stubs"): 17, ("huginn", "asserts"): 17,
    }  # fmt: skip
    sizes = {place: PROFILES["full"].n_of(place) for place in full}
    assert sizes["ouro", "words"] == sizes["ouro", "algebra"] == 800 and sizes["huginn", "stubs"] == 400
    assert len(PROFILES["mini"].plan["ouro", "algebra"]) == 88 and PROFILES["mini"].n_of(("ouro", "algebra")) == 100
    assert all(place in full and set(found) <= set(full[place]) for place, found in PROFILES["smoke"].plan.items())


def test_a_labels_cells_include_what_its_rows_are_tested_against():
    found = PROFILES["full"].cells_of(["table4"])
    assert list(found) == [("ouro", "algebra")]
    assert {BF16, preset("INT4 g=32", reference="direct")} < set(found["ouro", "algebra"])
    assert len(found["ouro", "algebra"]) == 13
    assert PROFILES["full"].cells_of(LABELS) == PROFILES["full"].plan


def test_another_place_or_part_is_refused(home):
    with pytest.raises(ValueError, match="'tiny' has no model 'mini-x'; it has mini-ouro-maths, mini-huginn"):
        cells.compute_cells(TINY, models=["mini-x"])
    with pytest.raises(ValueError, match="no task 'poems'"):
        cells.compute_cells(TINY, tasks=["poems"])
    with pytest.raises(ValueError, match="got 3/2"):
        cells.compute_cells(TINY, part=(3, 2))
    assert not list(home.iterdir())


# ------------------------------------------------------------------------------------------------ computing


def answers(folder):
    """{(file, configuration, problem): (response, correct)} of all records in a folder."""
    return {
        (file.name, repr(cell.identity["kv"]), cell.identity["n"], a.problem): (a.response, a.correct)
        for file in list_records(folder)
        for cell in read_records(file).cells.values()
        for a in cell.answers.values()
    }


def test_parts_scored_later_give_what_one_run_gives(home, monkeypatch):
    calibrated = []
    monkeypatch.setattr(
        "residualquant.rotation.calibration.calibrated_many",
        lambda model, configs, *rest: calibrated.append((model.name, *configs))
        or stand_ins.calibrated_many(model, configs, *rest),
    )
    cells.compute_cells(TINY, progress=False)
    whole = answers(paths.records_dir("tiny"))
    assert len(whole) == sum(TINY.n_of(place) * len(found) for place, found in TINY.plan.items())
    assert len(cells.read_cells(TINY)) == sum(map(len, TINY.plan.values()))
    calibrated.clear()
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(home / "other"))
    for i in (1, 2, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("residualquant.evals.scorers.score", None)  # a machine without scorers
            cells.compute_cells(TINY, part=(i, 3), score=False, progress=False, memory_bytes=2**28)
    learnt = [(name, config) for name, *configs in calibrated for config in configs]
    assert len({config for name, config in learnt if name == "mini-ouro-maths"}) == 39
    with pytest.raises(ResidualQuantError, match=r"no cell of table2, .* is measured; `make reproduce PROFILE=tiny`"):
        cells.read_cells(dataclasses.replace(TINY, problems={"ouro": {"algebra": N + 2}}))
    said = list(cells.collect_cells(TINY))
    assert answers(paths.records_dir("tiny")) == whole
    assert said[0] == f"mini-huginn.words.jsonl: {25 * N} answers from 3 parts"
    assert next(cells.collect_cells(TINY)).endswith(" 0 answers from 3 parts")


def test_what_is_damaged_is_not_collected(home):
    tiny = dataclasses.replace(TINY, problems={"huginn": {"words": N}})
    cells.compute_cells(tiny, progress=False)
    file = finished_name(list_records(paths.records_dir("tiny"))[0])
    damaged = file.read_bytes()[:-50]
    file.write_bytes(damaged)
    with pytest.raises(ResidualQuantError, match=r"mini-huginn\.words\.jsonl\.xz is damaged"):
        list(cells.collect_cells(tiny))
    assert file.read_bytes() == damaged


def test_a_part_replaces_older_cells(home, monkeypatch):
    tiny = dataclasses.replace(TINY, problems={"huginn": {"words": N}})
    monkeypatch.setattr("residualquant.evals.run.method_hash", lambda: "old")
    cells.compute_cells(tiny, progress=False)
    monkeypatch.setattr("residualquant.evals.run.method_hash", lambda: "new")
    cells.compute_cells(tiny, part=(1, 2), progress=False)
    list(cells.collect_cells(tiny))
    (file,) = list_records(paths.records_dir("tiny"))
    found = read_records(file).cells.values()
    assert len(found) == 25 and sorted(cell.identity["method"] for cell in found) == ["new"] * 13 + ["old"] * 12


def test_one_label_computes_its_own_cells_only(home):
    cells.compute_cells(TINY, ["table8"], progress=False)
    assert len(cells.read_cells(TINY, ["table8"])) == 15  # with the direct baselines, which Table 2 has
    assert cells.coverage(TINY, ["table8"]) == ""
    assert len(cells.read_cells(TINY, ["table2"])) == 7  # those that both labels show
    assert cells.coverage(TINY, ["table2"]) == "7 of 51 cells measured; `make reproduce PROFILE=tiny` computes the rest"
    with pytest.raises(ResidualQuantError, match="no cell of table9 is measured; `make reproduce PROFILE=tiny`"):
        cells.read_cells(TINY, ["table9"])


class PartOfARun:
    """A process of compute_all_cells that does its work here and at once."""

    started: ClassVar = []
    failing: ClassVar = []

    def __init__(self, command, env, process_group, preexec_fn):
        self.started.append((command[command.index("cells") :], env["OMP_NUM_THREADS"], env["TQDM_POSITION"]))
        part = tuple(map(int, command[command.index("--part") + 1].split("/")))
        self.code = 2 if part in self.failing else cells.compute_cells(TINY, part=part, score=False, progress=False)

    def poll(self):
        return self.code or 0

    def wait(self):
        assert self.poll() is not None


def test_processes_share_a_profiles_cells(home, monkeypatch):
    two = dataclasses.replace(TINY, processes=2)
    monkeypatch.setattr(cells, "Popen", PartOfARun)
    monkeypatch.setattr(cells, "cores", lambda: 2)
    monkeypatch.setattr(PartOfARun, "started", [])
    monkeypatch.setattr(PartOfARun, "failing", [(2, 2)])
    with pytest.raises(ResidualQuantError, match="part 2/2 of the cells of tiny failed"):
        cells.compute_all_cells(two)
    monkeypatch.setattr(PartOfARun, "failing", [])
    cells.compute_all_cells(two)
    asked, threads, place = PartOfARun.started[-1]
    assert asked == ["cells", "--profile", "tiny", "--no-score", "--memory-gib", "3.0", "--part", "2/2"]
    assert int(threads) >= 1 and place == "1" and len(PartOfARun.started) == 4
    assert cells.coverage(two) == "" and not any(paths.parts_dir("tiny").iterdir())
    next(paths.records_dir("tiny").glob("*.xz")).unlink()  # what is there is kept: no part begins anew
    cells.compute_all_cells(two)
    assert len(PartOfARun.started) == 4 and cells.coverage(two) == ""


def test_a_run_begun_by_two_processes_goes_on_in_one(home, monkeypatch):
    two = dataclasses.replace(TINY, processes=2)
    monkeypatch.setattr(cells, "Popen", PartOfARun)
    monkeypatch.setattr(cells, "cores", lambda: 2)
    monkeypatch.setattr(PartOfARun, "failing", [(2, 2)])
    with pytest.raises(ResidualQuantError, match="part 2/2 of the cells of tiny failed"):
        cells.compute_all_cells(two)
    monkeypatch.setattr(cells, "cores", lambda: 1)
    cells.compute_all_cells(two)
    assert cells.coverage(two) == "" and not any(paths.parts_dir("tiny").iterdir())
    rows = cost.read_timings(paths.records_dir("tiny") / cost.TIMING)
    assert {row["part"] for row in rows} == {"1of2", ""}  # what the first process answered is not decoded again


def test_parts_made_by_hand_are_left_alone(home):
    by_hand = paths.parts_dir("tiny") / "1of1"
    by_hand.mkdir(parents=True)
    cells.remove_parts(TINY)
    assert by_hand.is_dir()


@pytest.mark.parametrize("interrupted", [True, False])
def test_all_processes_end_when_one_fails_or_the_run_is_interrupted(home, monkeypatch, interrupted):
    """Real ones that stay for long, but for the one that fails."""
    two, started = dataclasses.replace(TINY, processes=2), []

    def start(command, **options):
        fails = not interrupted and command[-1] == "1/2"
        script = "raise SystemExit(3)" if fails else "import time; time.sleep(60)"
        started.append(subprocess.Popen([sys.executable, "-c", script], **options))
        return started[-1]

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(cells, "Popen", start)
    monkeypatch.setattr(cells, "cores", lambda: 2)
    if interrupted:
        monkeypatch.setattr(cells.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt if interrupted else ResidualQuantError):
        cells.compute_all_cells(two)
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_a_cell_counts_once_it_has_all_answers_and_scores(home):
    tiny = dataclasses.replace(TINY, problems={"huginn": {"words": N}})
    cells.compute_cells(tiny, score=False, progress=False)
    with pytest.raises(ResidualQuantError, match="no cell of table8 is measured"):
        cells.read_cells(tiny, ["table8"])
    list(cells.collect_cells(tiny))
    assert cells.coverage(tiny) == ""
    more = dataclasses.replace(tiny, problems={"huginn": {"words": N + 1}})
    with pytest.raises(ResidualQuantError, match="no cell of table8 is measured"):
        cells.read_cells(more, ["table8"])


def test_every_step_that_computes_something_is_timed(home):
    cells.compute_cells(TINY, progress=False)
    file = paths.records_dir("tiny") / cost.TIMING
    rows = cost.read_timings(file)
    decoded = [(row["model"], row["task"]) for row in rows if row["step"] == "decode"]
    assert decoded == [("mini-ouro-maths", "words"), ("mini-ouro-maths", "algebra"), ("mini-huginn", "words")]
    assert all(float(row["seconds"]) >= 0 and row["torch"] and row["machine"] and row["date"] for row in rows)
    assert {row["part"] for row in rows} == {""}
    cells.compute_cells(TINY, progress=False)  # everything is there
    assert cost.read_timings(file) == rows
    assert cost.model_time("tiny") == (pytest.approx(sum(float(row["seconds"]) for row in rows)), rows[0]["machine"])


def test_times_of_parts_are_collected_once(home):
    for i in (1, 2):
        cells.compute_cells(TINY, part=(i, 2), progress=False)
    for _ in range(2):
        list(cells.collect_cells(TINY))
    rows = cost.read_timings(paths.records_dir("tiny") / cost.TIMING)
    assert [row["part"] for row in rows] == ["1of2"] * 3 + ["2of2"] * 3
    assert cost.model_time("tiny")[0] == pytest.approx(sum(float(row["seconds"]) for row in rows) / 2)


@pytest.mark.parametrize("machine, seconds", [("2 cores of a CPU", 50 + 35), ("NVIDIA H200", 50 + 30 + 40)])
def test_parts_share_a_cpu_and_take_turns_on_a_gpu(home, machine, seconds):
    rows = [
        dict.fromkeys(cost.COLUMNS, "x") | {"seconds": took, "machine": machine, "part": part}
        for took, part in (("50", ""), ("30", "1of2"), ("40", "2of2"))
    ]
    paths.write_atomic(paths.records_dir("tiny") / cost.TIMING, cost._text(rows))
    assert cost.model_time("tiny") == (seconds, machine)


def test_parts_share_the_calibrations_too(home):
    mini = PROFILES["mini"]
    for model in cells._share(mini, (1, 2))[0]:
        shares = [cells._share(mini, (i, 2))[0][model] for i in (1, 2)]
        learnt = [sum(config.rotation in CALIBRATED for config in share) for share in shares]
        assert abs(len(shares[0]) - len(shares[1])) <= 1 and abs(learnt[0] - learnt[1]) <= 1 <= min(learnt)


def test_a_step_that_is_stopped_is_timed_and_damage_is_said(tmp_path):
    with pytest.raises(KeyboardInterrupt), cost.timed(tmp_path / "t.csv", tmp_path, "cpu", model="m", step="decode"):
        (tmp_path / "answers").write_text("one")
        raise KeyboardInterrupt
    (row,) = cost.read_timings(tmp_path / "t.csv")
    assert row["model"] == "m" and row["cores"].isdigit()
    (tmp_path / "t.csv").write_text("part,seconds\n1of2,-3\n")
    with pytest.raises(ResidualQuantError, match=r"t\.csv is damaged"):
        cost.read_timings(tmp_path / "t.csv")


@pytest.mark.parametrize("changes", [{"part": "1of0"}, {"part": "x"}, {"seconds": "inf"}, {"seconds": "abc"}])
def test_damaged_timings(tmp_path, changes):
    row = dict.fromkeys(cost.COLUMNS, "1") | {"part": "1of2"}
    file = tmp_path / cost.TIMING
    for values, sound in ((row, True), (row | changes, False)):
        file.write_text(",".join(values) + "\n" + ",".join(values.values()) + "\n")
        if sound:
            assert cost.read_timings(file) == [row]
        else:
            with pytest.raises(ResidualQuantError, match="is damaged: "):
                cost.read_timings(file)

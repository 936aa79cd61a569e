"""Tables and claims from stand-in answers: columns, tests against the right rows, the paper's numbers, same bytes."""

import dataclasses
import lzma
import re

import numpy as np
import pandas as pd
import pytest
import stand_ins

from residualquant.errors import ResidualQuantError
from residualquant.repro import cells, paper, paths, profiles, records, stats, tables, verdicts
from residualquant.repro.profiles import FIGURE1, METHODS, PRECISIONS, PROFILES, TABLE2, Method, Profile, profile_of

WHAT = ["model", "benchmark", "config", "bits_per_loop", "group_size", "reference", "coefficient", "rotation"]
MEASURED = ["effective_bits", "n", "correct", "accuracy_pct", "ci_low", "ci_high", "p_vs_direct", "p_vs_bf16"]
COLUMNS = [*WHAT, *MEASURED, "paper_pct"]
N = 12
TINY = Profile("tiny", dict.fromkeys(("words", "algebra", "stubs", "asserts"), N))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A workspace with the records of a whole tiny profile."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("RESIDUALQUANT_HOME", str(home))
        patch.setattr(profiles, "_lack_of_model", lambda name: "")
        patch.setattr("residualquant.evals.run.SCORE_EVERY", 10_000)
        stand_ins.install(patch, n=N)
        cells.compute_cells(TINY, progress=False)
        yield home


def test_table2_has_every_method_on_every_task(home):
    table = tables.table2(TINY)
    assert list(table.columns) == COLUMNS
    assert len(table) == 17 * 4 and not table.duplicated(["benchmark", *COLUMNS[2:8]]).any()
    assert set(table.model) == {"mini-ouro-maths", "mini-ouro-code"}
    assert (table.n == N).all() and np.allclose(table.accuracy_pct, 100 * table.correct / N, atol=1e-4)
    assert ((table.ci_low <= table.accuracy_pct) & (table.accuracy_pct <= table.ci_high)).all()
    assert set(table.rotation) == {"none", "hadamard"}
    first = table[table.benchmark == "words"].effective_bits.tolist()
    assert first[:5] == [16, 2.5, 2.5, 2.59375, 2.59375] and first[-4:] == [3.375, 3.375, 3.46875, 3.46875]


def test_the_papers_numbers_stand_beside_the_right_rows(home):
    table = tables.table2(TINY).set_index(["benchmark", "bits_per_loop", "group_size", "reference", "rotation"])
    assert table.loc[("words", "2,2,2,2", 32, "direct", "none")].paper_pct == 33.66
    assert table.loc[("algebra", "2,2,2,2", 32, "direct", "hadamard")].paper_pct == 55.40
    assert table.loc[("words", "2,2,2,4", 16, "last", "hadamard")].paper_pct == 77.63
    assert table.paper_pct.notna().all()


def test_p_values_compare_with_direct_of_the_same_bits_and_with_bf16(home):
    table, read = tables.table2(TINY), cells.read_cells(TINY)
    row = table[(table.benchmark == "words") & (table.config == "INT2/4 g=32") & (table.reference == "last")].iloc[0]
    method, direct = Method("residual_ls", (2, 2, 2, 4), 32), Method("direct", (2, 2, 2, 4), 32)
    for column, other in (("p_vs_direct", direct), ("p_vs_bf16", Method("bf16"))):
        pair = stats.Pair.of(read["words", method].correct, read["words", other].correct)
        assert row[column] == pytest.approx(stats.mcnemar_exact(pair), rel=1e-3)
    plain = (table.reference == "direct") & (table.rotation == "none")
    assert table[plain | (table.config == "BF16")].p_vs_direct.isna().all()
    assert table[~plain & (table.config != "BF16")].p_vs_direct.notna().all()
    assert table[table.config == "BF16"].p_vs_bf16.isna().all()


def test_the_mean_weighs_tasks_equally(home):
    table, mean = tables.table2(TINY), tables.table2_mean(TINY)
    assert list(mean.columns) == COLUMNS and len(mean) == 17 and (mean.benchmark == "mean").all()
    assert np.allclose(mean.accuracy_pct, table.accuracy_pct.to_numpy().reshape(4, 17).mean(0), atol=1e-3)
    assert mean.paper_pct[0] == pytest.approx((79.23 + 75 + 71.95 + 74.34) / 4)
    assert (mean.n == 4 * N).all()


def test_figure1_left_goes_step_by_step(home):
    table = tables.figure1_left(TINY)
    assert list(table.step) == paper.read_paper("figure1_left").step.tolist()
    assert list(table.paper_pct) == [75.0, 27.8, 57.2, 60.6, 71.6, 76.0]
    assert list(table.effective_bits) == paper.read_paper("figure1_left").effective_bits.tolist()
    assert list(table.coefficient) == ["none", "none", "unit", "ls", "ls", "ls"]
    assert table.p_vs_previous.isna().tolist() == [True, True, False, False, False, False]


def test_tables_are_written_and_written_again_without_changing_a_byte(home):
    for make, label in ((tables.table2, "table2"), (tables.figure1_left, "figure1_left"), (verdicts.claims, "claims")):
        make(TINY)
        file = paths.data_dir("tiny") / f"{label}.csv"
        first = file.read_bytes()
        made = make(TINY)
        assert file.read_bytes() == first
        assert list(pd.read_csv(file).columns) == list(made.columns)


def test_every_claim_is_judged_by_a_paired_test(home):
    table = verdicts.claims(TINY)
    assert set(table.claim) == {claim.name for claim in verdicts.CLAIMS}
    assert set(table.verdict) <= {"reproduced", "not reproduced", "undecided"}
    single = table[~table.comparison.str.startswith("all ")]
    assert single.p.between(0, 1).all() and single.paper_difference.notna().all()
    unit = single[single.claim == "ls_above_unit"].iloc[0]
    assert unit.paper_difference == pytest.approx(3.4) and unit.tasks == "algebra"
    better = single[single.kind == "better"]
    assert ((better.p < 0.05) == (better.verdict != "undecided")).all()


def test_a_claim_is_reproduced_only_where_every_comparison_is(home):
    table = verdicts.claims(TINY)
    for _, group in table.groupby("claim"):
        *parts, whole = group.verdict.tolist()
        if whole == "reproduced":
            assert set(parts) == {"reproduced"}
        assert ("not reproduced" in parts) == (whole == "not reproduced")


def test_another_models_values_get_no_verdict_only_the_order(home):
    laid_out = tables.compare(tables.table2(TINY))
    assert list(laid_out.columns)[4:] == ["Paper", "Ours", "Δ", "n", "95 % CI", "Verdict"]
    assert set(laid_out.Verdict) - {"–"} <= {
        f"{verdict}: {order} direct"
        for verdict in ("reproduced", "not reproduced", "undecided")
        for order in ("above", "below")
    }
    assert (laid_out[laid_out.Method.isin(["BF16", "Direct"])].Verdict == "–").all()
    text = tables.markdown(laid_out)
    assert text.count("\n") == len(laid_out) + 1 and "hadamard" in text


def test_the_papers_own_model_is_judged_by_value():
    row = {"model": "Ouro-1.4B", "paper_pct": 75.0, "ci_low": 71.0, "ci_high": 79.0}
    assert tables._verdict(pd.Series(row), None) == "reproduced"
    assert tables._verdict(pd.Series(row | {"ci_high": 74.0}), None) == "not reproduced"


def test_the_summary_has_a_row_per_method_and_a_column_per_task(home):
    summary = tables.summary(TINY)
    assert summary.shape == (17, 8) and summary.columns[-1] == "mean"
    assert all(re.fullmatch(r"\d+\.\d \(\d+\.\d\)", cell) for cell in summary["words (gsm8k)"])


def test_missing_answers_are_one_sentence(home):
    more = dataclasses.replace(TINY, problems={"words": N + 1})
    with pytest.raises(ResidualQuantError, match=r"holds 0 of 13 answers for words, bf16 BF16; `make reproduce"):
        tables.table2(more)


def test_a_damaged_record_line_stops_a_table(home, tmp_path, monkeypatch):
    source = paths.records_dir("tiny") / cells.records_name(TINY, "words")
    text = lzma.decompress(records.finished_name(source).read_bytes())
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    copy = paths.records_dir("tiny") / source.name
    paths.write_atomic(copy, text.replace(b'"tokens":', b'"tokens" :', 1))
    with pytest.raises(ResidualQuantError, match=r"line 2 of data.tiny.records.*is damaged"):
        tables.table2(dataclasses.replace(TINY, problems={"words": N}))


def test_profiles_hold_what_the_paper_compares():
    assert len(TABLE2) == 17 == 1 + len(METHODS) * len(PRECISIONS)
    assert len({m.config for m in TABLE2}) == 17
    assert len(profile_of("smoke").methods) == 5 and profile_of("smoke").problems["words"] == 8
    assert profile_of("mini").problems == {"words": 200, "algebra": 200, "stubs": 100, "asserts": 100}
    assert min(profile_of("full").problems.values()) >= 400 and profile_of("full").device == "cuda"
    extra = set(profile_of("mini").methods_of("algebra")) - set(TABLE2)
    assert extra == {FIGURE1["last_loop_residual"]} and FIGURE1["last_loop_residual"].config.coefficient == "unit"
    assert profile_of("mini").methods_of("words") == TABLE2
    with pytest.raises(ValueError, match="unknown profile 'mni'; known: smoke, mini, full, paper"):
        profile_of("mni")


def test_the_paper_profile_says_what_is_missing():
    with pytest.raises(
        ResidualQuantError, match=r"'paper' cannot run here, it lacks: .*gsm8k, math500, humaneval, mbpp"
    ):
        PROFILES["paper"].check()


def test_the_papers_numbers_are_found_by_label():
    assert paper.table2_accuracy("bf16", "", 0)["math500"] == 75.0
    with pytest.raises(ValueError, match="no label 'table99'; known: claims"):
        paper.read_paper("table99")


def test_records_name_their_schema(home):
    cell = next(iter(cells.read_cells(TINY, tasks=["words"]).values()))
    assert cell.identity["schema"] == records.SCHEMA and cell.identity["scorers"]
    assert {"commit", "date", "packages", "cpu"} <= cell.provenance.keys()

"""Tables and claims from stand-in answers: columns, tests against the right rows, the paper's numbers, same bytes."""

import dataclasses
import lzma
import re

import numpy as np
import pandas as pd
import pytest
import stand_ins
from test_plots import keep_analyses

from residualquant.config import preset
from residualquant.errors import ResidualQuantError
from residualquant.repro import cells, claims, layouts, markup, paper, paths, profiles, readme, records, stats, tables
from residualquant.repro.labels import BF16, LABELS, direct_of
from residualquant.repro.profiles import PROFILES, Profile, profile_of

WHERE = ["model", "benchmark", "stands_for"]
CODED = ["config", "bits_per_loop", "group_size", "reference", "coefficient", "rotation"]
MEASURED = ["effective_bits", "model_bits", "n", "correct", "accuracy_pct", "ci_low", "ci_high"]
COLUMNS = [*WHERE, *CODED, *MEASURED, "paper_pct", "delta_pct", "p_vs_direct", "p_vs_bf16"]
N = 6
TASKS = ("words", "algebra", "stubs", "asserts")
TINY = Profile("tiny", {"ouro": dict.fromkeys(TASKS, N), "huginn": dict.fromkeys(TASKS, N)})
PARTLY = dataclasses.replace(TINY, problems={"ouro": {"words": N}, "huginn": {"words": N}})


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A workspace with the records of a whole tiny profile, and made-up analyses."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("RESIDUALQUANT_HOME", str(home))
        patch.setattr(profiles, "_lack_of_model", lambda name: "")
        patch.setattr("residualquant.evals.run.SCORE_EVERY", 10_000)
        stand_ins.install(patch, n=N)
        cells.compute_cells(TINY, progress=False)
        keep_analyses(home / "data" / "tiny")
        yield home


def test_table2_has_every_method_on_every_task_of_both_families(home):
    table = tables.table("table2", TINY)
    assert list(table.columns) == COLUMNS
    assert len(table) == 17 * 8 and not table.duplicated([*WHERE, *CODED[1:]]).any()
    assert set(table.model) == {"mini-ouro-maths", "mini-ouro-code", "mini-huginn"}
    assert (table.n == N).all() and np.allclose(table.accuracy_pct, 100 * table.correct.astype(float) / N, atol=1e-4)
    assert ((table.ci_low <= table.accuracy_pct) & (table.accuracy_pct <= table.ci_high)).all()
    assert set(table.rotation) == {"none", "optr_h"}


def test_bits_are_of_the_loops_and_of_the_whole_model(home):
    table = tables.table("table2", TINY).set_index(["model", "benchmark", "config", "reference", "rotation"])
    ouro = table.loc[("mini-ouro-maths", "words", "INT2/4 g=32", "last", "none")]
    huginn = table.loc[("mini-huginn", "words", "INT2/4 g=32", "last", "none")]
    assert ouro.effective_bits == ouro.model_bits == 3.09375
    assert huginn.effective_bits == 3.125
    assert huginn.model_bits == pytest.approx((64 * 3.125 + 2 * 4.5) / 66, abs=1e-6)
    assert list(tables.table("table8", TINY).effective_bits.round(5).unique()) == [
        16, 3.5, 3.125, 3.33333, 2.89583, 3.25, 2.78125,
    ]  # fmt: skip


def test_the_papers_numbers_stand_beside_the_right_rows(home):
    table = tables.table("table2", TINY)
    assert (table.delta_pct - (table.accuracy_pct - table.paper_pct)).abs().max() < 1e-3
    table = table.set_index(["model", "benchmark", "bits_per_loop", "group_size", "reference", "rotation"])
    assert table.loc[("mini-ouro-maths", "words", "2,2,2,2", 32, "direct", "none")].paper_pct == 33.66
    assert table.loc[("mini-ouro-maths", "algebra", "2,2,2,2", 32, "direct", "optr_h")].paper_pct == 55.40
    assert table.loc[("mini-huginn", "asserts", "2,2,2,4", 16, "last", "optr_h")].paper_pct == 39.42
    for label in LABELS:
        assert tables.table(label, TINY).paper_pct.notna().all()


def test_p_values_compare_with_direct_of_the_same_bits_and_with_bf16(home):
    table, read = tables.table("table9", TINY), cells.read_cells(TINY)
    row = table[(table.config == "INT2/4 g=32") & (table.reference == "first") & (table.rotation == "oscar")].iloc[0]
    config = preset("INT2/4 g=32", reference="first", rotation="oscar")
    assert direct_of(config).bits == (4, 2, 2, 2)
    for column, other in (("p_vs_direct", direct_of(config)), ("p_vs_bf16", BF16)):
        pair = stats.Pair.of(read["ouro", "algebra", config].correct, read["ouro", "algebra", other].correct)
        assert row[column] == pytest.approx(stats.mcnemar_exact(pair), rel=1e-3)
    plain = (table.reference == "direct") & (table.rotation == "none")
    assert table[plain | (table.config == "BF16")].p_vs_direct.isna().all()
    assert table[~plain & (table.config != "BF16")].p_vs_direct.notna().all()
    assert table[table.config == "BF16"].p_vs_bf16.isna().all()


def test_means_weigh_tasks_equally(home):
    table, mean = tables.table("table2", TINY), tables.table("table2_mean", TINY)
    assert list(mean.columns) == COLUMNS and list(dict.fromkeys(mean.model)) == ["ouro", "huginn", "all"]
    by_task = table.accuracy_pct.to_numpy().reshape(8, 17)
    assert np.allclose(mean[mean.model == "all"].accuracy_pct, by_task.mean(0), atol=1e-3)
    assert np.allclose(mean[mean.model == "huginn"].accuracy_pct, by_task[4:].mean(0), atol=1e-3)
    printed = [float(row["accuracy_pct"]) for row in paper.printed("table2") if row["model"] == "mean"]
    assert sorted(mean[mean.model == "all"].paper_pct.round(2)) == pytest.approx(sorted(printed), abs=0.011)
    assert (mean[mean.model == "all"].n == 8 * N).all()


def test_figure1_left_goes_step_by_step(home):
    table = tables.table("figure1_left", TINY)
    printed = paper.printed("figure1_left")
    assert list(table.step) == [row["step"] for row in printed]
    assert list(table.paper_pct) == [75.0, 27.8, 57.2, 60.6, 71.6, 76.0]
    assert list(table.effective_bits) == [float(row["effective_bits"]) for row in printed]
    assert list(table.coefficient) == ["none", "none", "unit", "ls", "ls", "ls"]
    assert table.p_vs_previous.isna().tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize("label", tables.TABLES)
def test_tables_are_written_when_told_and_written_again_without_changing_a_byte(home, label):
    file = paths.data_dir("tiny") / f"{label}.csv"
    read = tables.table(label, TINY)
    assert not file.exists()  # reading changes no file
    made = tables.table(label, TINY, write=True)
    first = file.read_bytes()
    assert tables.table(label, TINY, write=True).equals(made) and read.equals(made)
    assert file.read_bytes() == first
    assert list(pd.read_csv(file).columns) == list(made.columns)


def test_what_a_profile_does_not_measure_is_left_open(home):
    table = tables.table("table2", PARTLY)
    assert table.accuracy_pct.notna().sum() == 2 * 17 and len(table) == 8 * 17
    laid_out = layouts.summary("table2", table, tables.table("table2_mean", PARTLY))
    assert laid_out["stubs (HumanEval), Ouro"][0] == "– (72.0)" and laid_out["mean, all"][0] == "– (52.9)"
    assert set(layouts.compare(table[table.benchmark == "stubs"]).Ours) == {"–"}
    assert tables.table("table9", PARTLY).accuracy_pct.isna().all()


def test_what_the_records_lack_is_left_open_and_counted(home):
    larger = dataclasses.replace(TINY, problems=TINY.problems | {"huginn": dict.fromkeys(TASKS, N + 1)})
    table = tables.table("table2", larger)
    assert table.attrs["note"] == "68 of 136 cells measured; `make reproduce PROFILE=tiny` computes the rest"
    assert table.accuracy_pct.notna().sum() == 68
    for laid_out in (layouts.summary("table2", table), layouts.compare(table)):
        assert laid_out.attrs["note"] in markup.show(laid_out)._repr_html_()
    assert tables.table("table4", larger).attrs["note"] == ""
    mean = tables.table("table2_mean", larger)
    assert (mean.accuracy_pct.notna() == (mean.model == "ouro")).all()
    whole = claims.whole_claims(claims.claims(larger)).query("family == 'all'").set_index("claim")
    assert set(whole.loc[["1", "2", "8", "9"]].verdict) == {"not measured"}
    assert whole.loc["2"].comparisons.startswith("68 of 136 cells measured")
    assert whole.loc["4a"].comparisons == "0 of 3 comparisons reproduced, 0 refuted, 2 not measured"
    assert whole.loc["5"].verdict != "not measured"


# ------------------------------------------------------------------------------------------------ claims


def test_every_claim_is_judged_by_a_paired_test(home):
    table = claims.claims(TINY)
    whole = claims.whole_claims(table)
    assert list(whole[whole.family == "all"].claim) == [claim.number for claim in claims.CLAIMS]
    assert set(whole[whole.family == "huginn"].claim) == {"1", "2", "4a", "4b", "8"}
    alone = table[(table.family == "huginn") & (table.comparison != "all")]
    assert len(alone) == 4 + 4 + 2 + 4 + 2
    assert not alone.tasks.str.contains("ouro").any()
    table = table[table.family == "all"]
    assert {claim.number.rstrip("abc") for claim in claims.CLAIMS} == {str(n) for n in range(1, 11)}
    single = table[table.comparison != "all"]
    assert len(single) == sum(len(claim.comparisons) for claim in claims.CLAIMS)
    assert single.p.between(0, 1).all() and single.paper_difference.notna().all() and (single.p_holm >= single.p).all()
    ls = single[single.claim == "3b"].iloc[0]
    assert ls.paper_difference == pytest.approx(3.6) and ls.tasks == "ouro:algebra"
    huginn = single[single.claim == "9"]
    assert set(huginn.tasks) == {"huginn:words"} and len(huginn) == 8
    better = single[single.kind == "better"]
    assert ((better.p_holm < 0.05) == (better.verdict != "undecided")).all()


def test_most_of_the_papers_own_numbers_are_on_the_side_of_its_claims(home):
    single = claims.claims(TINY)
    single = single[(single.family == "all") & (single.comparison != "all") & (single.kind.isin(["better", "higher"]))]
    share = single.groupby("claim").paper_difference.apply(lambda d: (d > 0).mean())
    partly = share[share < 1]  # in the paper, too, some cells are on the other side
    assert set(partly.index) == {"3a", "7b"} and partly["3a"] > 0.5 and partly["7b"] == 0


def test_the_last_loop_is_judged_in_every_column_of_table3(home):
    single = claims.claims(TINY).query("comparison != 'all' and claim.str.startswith('7')")
    sides = single.assign(side=single.comparison.str.split(" against ")).explode("side")
    column = sides.side.str.split("last |previous |next |first ").str[1]
    assert dict(zip(sides.claim, column)) == {"7a": "ls + optr_h", "7b": "ls", "7c": "unit"}
    assert column.groupby(sides.claim).nunique().eq(1).all()
    assert set(single.groupby("claim").size()) == {6}
    judged = set(single[single.claim == "7a"].comparison + " " + single[single.claim == "7a"].kind)
    assert "INT2/4 g=32 last ls + optr_h against INT2/4 g=32 first ls + optr_h better" in judged
    assert "INT2 g=16 last ls + optr_h against INT2 g=16 next ls + optr_h not worse" in judged


def test_conclusions_are_read_from_the_tables(home):
    said = readme._conclusions(TINY)
    whole = claims.whole_claims(claims.claims(TINY)).query("family == 'all'")
    mean = tables.table("table2_mean", TINY).query("model == 'ouro' and config == 'BF16'").accuracy_pct.iloc[0]
    assert said.startswith("**Ouro-shaped") and f"BF16 cache {mean:.1f} %" in said and "**Huginn-shaped" in said
    listed = said.rpartition(":** ")[2]
    for verdict, part in whole.groupby("verdict"):
        assert re.search(rf"(^|; ){verdict}: {', '.join(part.claim)}[;.]", listed)
    partly = readme._conclusions(PARTLY)
    assert "-shaped" not in partly and "not measured: 1, 2" in partly


def verdict_of(*rows, most=False):
    claim = claims.Claim("1", "text", (None,) * len(rows), most)
    judged = claims._decide([{"p": p, "n": 9, "_says": says, "_opposite": opposite} for p, says, opposite in rows])
    return [row["verdict"] for row in judged], claims._whole(claim, judged, "")["verdict"]


def test_a_claim_is_reproduced_only_where_every_comparison_is():
    good, bad, open_ = (1e-4, True, 1.0), (1e-4, False, 1e-4), (0.4, True, 1.0)
    assert verdict_of(good, good) == (["reproduced"] * 2, "reproduced")
    assert verdict_of(good, open_) == (["reproduced", "undecided"], "undecided")
    assert verdict_of(good, bad) == (["reproduced", "not reproduced"], "not reproduced")
    assert verdict_of(good, good, bad, most=True)[1] == "reproduced"
    assert verdict_of(good, bad, bad, most=True)[1] == "not reproduced"
    assert verdict_of((0.03, True, 1.0), open_)[0] == ["undecided", "undecided"]  # 0.03 is 0.06 after Holm


def test_claims_without_results_say_what_is_missing(home, tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    table = claims.whole_claims(claims.claims(TINY))
    assert set(table.verdict) == {"not measured"}
    assert table.comparisons.str.contains("`make reproduce PROFILE=tiny`").all()


# ------------------------------------------------------------------------------------------------ for readers


def test_another_models_values_get_no_verdict_only_the_order(home):
    laid_out = layouts.compare(tables.table("table2", TINY))
    assert list(laid_out.columns)[5:] == ["Paper", "Ours", "Δ", "n", "95 % CI", "Verdict"]
    assert set(laid_out.Verdict) - {"–"} <= {
        f"{verdict}: {order} direct"
        for verdict in ("reproduced", "not reproduced", "undecided")
        for order in ("above", "below")
    }
    assert (laid_out[laid_out.Method.isin(["BF16", "Direct"])].Verdict == "–").all()
    text = layouts.markdown(laid_out)
    assert text.count("\n") == len(laid_out) + 1 and "OptR-H" in text


def test_the_papers_own_model_is_judged_by_value():
    row = {"model": "Ouro-1.4B", "accuracy_pct": 76.0, "paper_pct": 75.0, "ci_low": 71.0, "ci_high": 79.0}
    assert layouts._verdict(pd.Series(row), None) == "reproduced"
    assert layouts._verdict(pd.Series(row | {"ci_high": 74.0}), None) == "not reproduced"


def test_summaries_have_the_papers_layout(home):
    shapes = {"table2": (17, 11), "figure1_left": (6, 3), "table3": (9, 5), "table4": (5, 5), "table5": (8, 5),
              "table8": (7, 4), "table9": (17, 10)}  # fmt: skip
    for label in LABELS:
        summary = layouts.summary(label, tables.table(label, TINY))
        assert summary.shape == shapes[label], label
        filled = summary.iloc[:, len(layouts.LAYOUTS[label][0]) :].to_numpy().ravel()
        assert all(re.fullmatch(r"|\d+\.\d \(\d+\.\d\)", cell) for cell in filled)
        assert sum(bool(cell) for cell in filled) == len(tables.table(label, TINY))
    bits = layouts.summary("table2", tables.table("table2", TINY), tables.table("table2_mean", TINY))["Effective bits"]
    assert bits[0] == "16" and bits[4] == "2.594 / 2.625" and bits[1] == "2.5" and len(bits) == 17
    with pytest.raises(ValueError, match="no layout for 'table1'"):
        layouts.summary("table1", pd.DataFrame())


def test_missing_answers_are_one_sentence(home):
    more = dataclasses.replace(TINY, problems={"ouro": {"words": N + 1}})
    with pytest.raises(ResidualQuantError, match=r"no cell of table2 is measured; `make reproduce PROFILE=tiny`"):
        tables.table("table2", more)
    with pytest.raises(ValueError, match="no table 'tabel2'; known: storage, table1"):
        tables.table("tabel2", TINY)


def test_a_damaged_record_line_stops_a_table(home, tmp_path, monkeypatch):
    source = paths.records_dir("tiny") / cells.records_name(TINY, ("ouro", "words"))
    text = lzma.decompress(records.finished_name(source).read_bytes())
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    copy = paths.records_dir("tiny") / source.name
    paths.write_atomic(copy, text.replace(b'"tokens":', b'"tokens" :', 1))
    with pytest.raises(ResidualQuantError, match=r"line 2 of data.tiny.records.*is damaged"):
        tables.table("table2", dataclasses.replace(TINY, problems={"ouro": {"words": N}}))


def test_profiles_hold_what_the_paper_compares():
    assert profile_of("mini").describe().startswith("Ouro: words 100, algebra 100, stubs 100, asserts 100; Huginn:")
    assert min(map(profile_of("full").n_of, profile_of("full").plan)) >= 200
    assert profile_of("full").device == "cuda"
    with pytest.raises(ValueError, match="unknown profile 'mni'; known: smoke, mini, full, paper"):
        profile_of("mni")


def test_the_paper_profile_says_what_is_missing():
    with pytest.raises(
        ResidualQuantError, match=r"'paper' cannot run here, it lacks: .*gsm8k, math500, humaneval, mbpp"
    ):
        PROFILES["paper"].check()


def test_the_papers_numbers_are_found_by_label():
    with pytest.raises(ValueError, match="no label 'table99'; known: claims"):
        paper.printed("table99")


def test_records_name_their_schema(home):
    cell = next(iter(cells.read_cells(TINY, ["table4"]).values()))
    assert cell.identity["schema"] == records.SCHEMA and cell.identity["scorers"]
    assert {"commit", "date", "packages", "cpu"} <= cell.provenance.keys()

"""Storage arithmetic: every number the paper prints, digit by digit, and the bytes that are really allocated."""

import pandas as pd
import pytest

from residualquant import layout, preset
from residualquant.config import KVQuantConfig
from residualquant.repro import storage, tables


@pytest.fixture(scope="module")
def table():
    return storage.storage_table()


def test_every_printed_number_is_reproduced(table):
    wrong = table[table["verdict"] != "reproduced"]
    assert wrong.empty, wrong[["label", "paper", "ours"]].to_string()
    assert len(table) >= 69


def test_every_claim_about_bits_and_reads_is_judged(table):
    analytic = {
        "kv_storage_reduction_2224_g32", "kv_footprint_ratio_2224_g32", "ls_coefficient_bits_ouro",
        "effective_bits_residual_2222_g32", "effective_bits_residual_2222_g16", "effective_bits_residual_2224_g32",
        "effective_bits_residual_2224_g16", "huginn_16loop_g16_reduction", "huginn_16loop_g32_reduction",
        "logical_access_ratio_L4", "logical_access_ratio_L32", "huginn_accesses_chained", "huginn_accesses_shared",
        "int4_anchor_extra_storage",
    }  # fmt: skip
    assert set(storage._claims()) == analytic
    assert {line["claim"] for line in storage.printed("claims")} >= analytic
    assert len(table[table["where"].str.startswith(("abstract", "Sec.", "App."))]) == len(analytic)


EXACT = [  # loops, D, label, direct bits, residual bits
    (4, 128, "INT2 g=32", 2.5, 2.59375),
    (4, 128, "INT2 g=16", 3.0, 3.09375),
    (4, 128, "INT2/4 g=32", 3.0, 3.09375),
    (4, 128, "INT2/4 g=16", 3.375, 3.46875),
    (4, 128, "INT4 g=32", 4.5, 4.59375),
    (4, 96, "INT2/4 g=32", 3.0, 3.125),
    (4, 96, "INT2/4 g=16", 3.375, 3.5),
    (8, 96, "INT2/4 g=32", 2.75, 2.89583333333333333),
    (8, 96, "INT2/4 g=16", 3.1875, 3.33333333333333333),
    (16, 96, "INT2/4 g=32", 2.625, 2.78125),
    (16, 96, "INT2/4 g=16", 3.09375, 3.25),
]


@pytest.mark.parametrize(("loops", "dim", "label", "direct", "residual"), EXACT)
def test_effective_bits_to_the_last_digit(loops, dim, label, direct, residual):
    assert preset(label, loops=loops, reference="direct").effective_bits(dim) == direct
    assert preset(label, loops=loops).effective_bits(dim) == pytest.approx(residual, abs=1e-15)


def test_group_size_of_every_loop_of_every_row_of_table5(table):
    rows = table[table["where"] == "Table 5"]
    assert len(rows) == len(storage.printed("table5")) == 28
    for line, (_, row) in zip(storage.printed("table5"), rows.iterrows()):
        bits = tuple(map(int, line["bits_per_loop"].split(",")))
        expected = ["32" if b == 4 else line["int2_group_size"] for b in bits]
        assert row["group_sizes"] == ",".join(expected)
        assert row["bits_per_loop"] == line["bits_per_loop"]


def test_bytes_of_one_token_and_head():
    table = storage.bytes_table().set_index("config")
    assert (table["stored_bytes"] == table["packed_bytes"]).all()
    assert table.loc["INT2/4 g=32, residual", "stored_bytes"] == 198
    assert table.loc["BF16", "stored_bytes"] == 1024
    cfg = preset("INT2/4 g=32")
    assert [layout.loop_bytes(cfg, loop, 128) for loop in range(4)] == [42, 42, 42, 72]
    assert layout.loop_bytes(preset("INT2 g=16"), 0, 128) == 50
    assert round(table.loc["INT2/4 g=32, residual", "capacity_ratio"], 2) == 5.17
    assert round(table.loc["INT2/4 g=32, residual", "traffic_ratio"], 2) == 2.47


def test_split_into_codes_metadata_and_coefficients_adds_up():
    bits = storage.bits_table().set_index("config")
    total = bits.sum(axis=1)
    for name, expected in (("INT2 g=32, residual", 2.59375), ("INT2/4 g=16, direct", 3.375)):
        assert total[name] == expected
    assert set(bits["coefficient_bits"]) == {0.0, 0.09375}


def test_reads_per_step():
    reads = storage.reads_table().set_index("policy")
    assert reads["bytes_read"].to_dict() == {
        "BF16": 1024, "direct": 192, "last (method)": 414, "first": 414, "next": 540, "previous": 540,
    }  # fmt: skip
    for row in storage.accesses_table().itertuples():
        assert (row.shared, row.chained) == (2 * row.loops - 1, row.loops * (row.loops + 1) // 2)


@pytest.mark.parametrize(
    ("value", "paper", "ours"), [(3.25, "3.3", "3.3"), (2.59375, "2.6", "2.6"), (3.0, "3.0", "3.0"), (80.0, "80", "80")]
)
def test_numbers_are_rounded_as_printed_and_halves_up(value, paper, ours):
    assert storage.round_as(value, paper) == ours


def test_another_digit_is_not_reproduced():
    assert storage._row("x", "y", "%", "80.6", 80.664)["verdict"] == "differs"


def test_bits_of_tokens_that_keep_some_loops():
    assert storage.kept_loops_bits(preset("BF16")) == pytest.approx(9.4)
    flashloop = KVQuantConfig(bits=(4, 4, 4, 4), reference="direct")
    assert storage.kept_loops_bits(flashloop) == pytest.approx(4.5 * 2.35 / 4)


def test_written_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    tables.table("storage", "smoke", write=True)
    path = tmp_path / "data" / "smoke" / "storage.csv"
    before = path.read_bytes(), path.stat().st_mtime_ns
    tables.table("storage", "smoke", write=True)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert list(pd.read_csv(path).columns) == storage.COLUMNS

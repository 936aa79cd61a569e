"""The report: one file that loads nothing, every label in it, the same bytes twice, honest about what is missing."""

import re
from html.parser import HTMLParser

import pandas as pd
import pytest
from test_plots import tiny_home

from residualquant.errors import ResidualQuantError
from residualquant.repro import markup, paths, report, traces
from residualquant.repro.figures import FIGURES


class Page(HTMLParser):
    """Tags that need closing are closed in order; ids, links and sources are collected."""

    VOID = frozenset({"meta", "img", "br", "link", "input", "hr"})

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.sources, self.alts = [], [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if "href" in found else []
        self.sources += [found["src"]] if "src" in found else []
        self.alts += [found.get("alt", "")] if tag == "img" else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with tiny_home(tmp_path_factory.mktemp("home")) as home:
        yield home


@pytest.fixture(scope="module")
def text(home):
    return report.write_report("tiny").read_text()


def test_the_page_is_whole_and_loads_nothing(text):
    page = Page(text)
    assert page.ids == list(report.SECTIONS)
    assert page.links == [f"#{label}" for label in report.SECTIONS]
    assert len(page.sources) == len(FIGURES) - 1  # a mean of Table 2 needs all four tasks
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert all(page.alts)
    assert not re.search(r"https?://|@import|url\(", re.sub(r"base64,[^\"]+", "", text))
    assert "viewport" in text and "@media print" in text and text.count('missing">') == 1


def test_paper_stands_beside_ours(text):
    assert re.search(r"\d\d\.\d \(27\.8\)", text)  # direct INT2 g=32 on MATH500
    assert "69 of 69" in text
    assert text.count("reproduced</span>") >= 69


def test_a_second_page_has_the_same_bytes(home, text):
    assert report.write_report("tiny").read_text() == text


def test_what_is_missing_is_said_and_the_rest_is_made(home, text, monkeypatch):
    monkeypatch.setattr(traces, "KEPT_IN", "tiny")
    (home / "data" / "tiny" / traces.TRACE_FILE).rename(home / "aside")
    try:
        page = report.write_report("tiny").read_text()
    finally:
        (home / "aside").rename(home / "data" / "tiny" / traces.TRACE_FILE)
    assert page.count("kv_trace.safetensors is missing") == 2
    assert len(Page(page).sources) == len(FIGURES) - 3


def test_an_unknown_profile_is_refused():
    with pytest.raises(ValueError, match="unknown profile 'huge'"):
        report.write_report("huge")


def test_a_page_that_cannot_be_written_leaves_nothing(home, monkeypatch):
    def full(path, content):
        if path.suffix == ".html":
            raise ResidualQuantError("the disk is full")
        return True

    monkeypatch.setattr(paths, "write_atomic", full)
    with pytest.raises(ResidualQuantError, match="disk is full"):
        report.write_report("tiny")


# ------------------------------------------------------------------------------------------------ tables as HTML


def test_cells_are_escaped_rounded_and_coloured():
    table = pd.DataFrame(
        {"name": ["<b>", "x"], "accuracy_pct": [80.0, 7.25], "p_vs_bf16": [0.01234, float("nan")], "n": [200, 8],
         "verdict": ["reproduced", "not reproduced: above direct"], "capacity_ratio": [5.1717, 1.0]}
    )  # fmt: skip
    shown = markup.table_html(table, new_block="name")
    for piece in ("&lt;b&gt;", ">80.0<", ">7.2<", ">0.012<", ">–<", ">200<", ">5.17<", 'class="yes"', 'class="no"'):
        assert piece in shown
    assert "<b>" not in shown and shown.count('class="first"') == 1
    assert "accuracy %" in shown and "p vs BF16" in shown


def test_a_column_of_counts_is_one_of_numbers_also_where_some_are_missing():
    shown = markup.table_html(pd.DataFrame({"n": pd.array([200, None], dtype="Int64")}))
    assert '<td class="num">200</td>' in shown and '<td class="num">–</td>' in shown


def test_counts_agree_with_their_noun():
    assert [markup.counted(n, "task") for n in (0, 1, 2)] == ["0 tasks", "1 task", "2 tasks"]


def test_an_empty_table_is_a_table():
    assert "<table>" in markup.table_html(pd.DataFrame({"a": []}))


def test_a_p_beyond_what_is_written_is_a_bound():
    assert markup.cell_text(1e-300, "p_vs_bf16") == "< 1e-300" and markup.cell_text(0.0123, "p") == "0.012"


def test_notebooks_show_every_row():
    shown = markup.show(pd.DataFrame({"a": range(500)}))._repr_html_()
    assert shown.count("<tr") == 501 and "<style>" in shown

"""What the notebook on serving does without vLLM, and how it says that a server did not start."""

import sys

import pytest
import stand_ins

from residualquant.config import preset
from residualquant.errors import ResidualQuantError
from residualquant.repro import serving

ROWS = [
    {"KV cache": "BF16", "tokens that fit": 65_536, "tokens per second": 50.5},
    {"KV cache": "INT2/4 g=32", "tokens that fit": 338_816, "tokens per second": 13.0},
]


@pytest.fixture
def no_vllm(monkeypatch, tmp_path):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    monkeypatch.delenv("VLLM_ENV", raising=False)
    monkeypatch.setattr("residualquant.vllm.serve.check_installed", lambda: raise_absent())
    return tmp_path


def raise_absent():
    raise ResidualQuantError("serving needs vLLM")


def test_without_vllm_one_sentence_says_how_to_install_it(no_vllm, capsys):
    found = serving.serve_and_measure("mini-ouro-maths", "INT2/4 g=32", "hadamard", 2, 1, 4)
    said = capsys.readouterr().out.strip()
    assert "make setup-vllm" in said and "\n" not in said
    shown = [serving.serving_table(found), serving.answers_table(found), serving.draw_serving(found)]
    assert shown == [None, None, None]


def test_the_environment_of_make_setup_vllm_is_used_where_there_is_one(no_vllm):
    python = no_vllm / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert serving.server_python() == str(python)


def test_this_interpreter_is_used_where_vllm_is_installed(no_vllm, monkeypatch):
    monkeypatch.setattr("residualquant.vllm.serve.check_installed", lambda: None)
    assert serving.server_python() == sys.executable


def test_numbers_below_one_are_refused():
    with pytest.raises(ValueError, match="clients must be at least 1, got 0"):
        serving.serve_and_measure("mini-ouro-maths", "INT2/4 g=32", "hadamard", 2, 0, 4)


def test_both_engines_are_compared_on_what_both_answered(tmp_path, monkeypatch):
    from residualquant.evals import run
    from residualquant.vllm import decode

    model, n, configs = stand_ins.stand_in_model(), 12, [preset("INT2 g=32"), preset("INT2/4 g=32")]
    stand_ins.install(monkeypatch, ["words"], n)
    paths = [tmp_path / "torch.jsonl", tmp_path / "vllm.jsonl"]
    (torch, _) = run.evaluate(model, "words", configs, n, paths[0], progress=False)
    right = stand_ins.decoder_for("words", n)

    def all_right(model, prompts, asked, **options):  # as BF16 mostly is
        yield from right(model, prompts, [preset("BF16") for _ in asked], **options)

    monkeypatch.setattr(decode, "check", lambda *_: None)
    monkeypatch.setattr(decode, "iter_decode", all_right)
    (vllm,) = run.evaluate(model, "words", configs[:1], n, paths[1], engine="vllm", progress=False)
    (row,) = serving.compare_engines(paths).to_dict("records")
    solved = [sum(cell.correct.values()) for cell in (torch, vllm)]
    assert 0 < solved[0] < solved[1]
    assert (row["task"], row["config"], row["n"], row["vllm"]) == ("words", "INT2 g=32", n, decode.VLLM_VERSION)
    assert [row["torch_correct"], row["vllm_correct"]] == solved
    assert row["only_vllm"] - row["only_torch"] == solved[1] - solved[0]
    assert 0 < row["p"] < 1


def test_a_server_that_does_not_start_is_one_error_with_its_last_words(tmp_path):
    with (
        pytest.raises(ResidualQuantError, match="no model 'nowhere'"),
        serving.running_server(["nowhere"], tmp_path / "log"),
    ):
        pytest.fail("it started")


def test_table_and_figure_show_every_row():
    found = serving.Serving("mini-ouro-maths", ROWS)
    assert "338816" in serving.serving_table(found)._repr_html_()
    panels = serving.draw_serving(found).figure.axes
    assert [text.get_text() for axis in panels for text in axis.texts] == ["65,536", "338,816", "50", "13"]


def test_samples_of_a_metric_are_read_with_their_labels(monkeypatch, tmp_path):
    text = 'a_total 3.0\nsome{format="bf16",le="+Inf"} 4\nsome{format="packed"} 2.5\nsomething 1\n'
    page = tmp_path / "metrics"
    page.write_text(text)
    server = serving.Server(tmp_path.as_uri(), tmp_path / "log", None)
    assert server.samples("some") == [({"format": "bf16", "le": "+Inf"}, 4.0), ({"format": "packed"}, 2.5)]
    assert server.metric("some") == 6.5 and server.metric("a_total") == 3
    with pytest.raises(ResidualQuantError, match="no metric so"):
        server.metric("so")

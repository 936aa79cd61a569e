"""What the notebook on serving does without vLLM, and how it says that a server did not start."""

import json
import sys

import pytest
import stand_ins

from residualquant.config import preset
from residualquant.errors import ResidualQuantError
from residualquant.repro import readme, serving

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


def speeds(step, prompt):
    row = {"tokens": 100, "requests": 2, "step_ms": 1.0, "tokens_per_second": step, "prefill_tokens_per_second": prompt}
    return {"tokens_that_fit": int(10 * prompt), "rows": [row]}


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Packed prompts take 2 s instead of 1, packed answers 10 ms a token instead of 20; of Huginn raw, in another run,
    there is the capacity alone."""
    monkeypatch.setattr(readme.paths, "data_dir", lambda profile: tmp_path)
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.9}
    protocol = {"config": {"preset": "INT2 g=32", "rotation": "none"}, "options": options, "compiled": False}
    ouro = {"packed": speeds(100.0, 50), "raw": speeds(50.0, 100), "protocol": protocol | {"model": "ouro"}}
    raw = {"tokens_that_fit": 35, "provenance": {"date": "2026-12-01T01:24:40+00:00", "commit": "2"}}
    huginn = {"packed": speeds(5.0, 7), "raw": raw, "protocol": protocol | {"model": "huginn"}}
    checks = [
        {"name": "a", "answers": {"tokens_each": 8, "tokens_that_agree": [8, 3]}, "commit": "1", "note": "so"},
        {"name": "b", "tests": {"passed": 2, "failed": ["test_x"]}, "commit": "1"},
    ]
    record = {"gpu": "GPU", "checks": checks, "not_measured": ["c"]}
    for name, value in (("vllm_speed", ouro), ("vllm_speed_huginn", huginn), ("vllm", record)):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    answers = "model,task,config,n,torch_correct,vllm_correct,only_torch,only_vllm,p,vllm\nm,words,c,9,5,6,1,2,1.0,0\n"
    (tmp_path / "vllm_accuracy.csv").write_text(answers)


def cells(block):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line[:1] == "|"]


def test_the_recommendation_weighs_slower_prompts_against_faster_answers(records):
    text = readme.choice_block()
    assert cells(text)[-1] == ["100 x 2", "2.00", "0.50", "100 answer tokens"]
    assert '--config "INT2 g=32" --rotation none -- --max-num-seqs 2' in text and "holds 0.50 times" in text


def test_what_was_not_measured_is_a_dash_and_another_run_is_named(records):
    text = readme.speed_block()
    rows = cells(text)
    assert ["Ouro-1.4B", "Generated tokens per second, 100 x 2", "100", "50", "2.00"] in rows
    assert ["Huginn-0125", "Tokens that fit", "70", "35", "2.00"] in rows
    assert ["Huginn-0125", "Prompt tokens per second, 100 x 2", "7", "–", "–"] in rows
    assert text.endswith("Huginn-0125's BF16 column is of another run, on 2026-12-01, commit 2.")


def test_checks_say_what_parted_and_what_failed(records):
    text = readme.checks_block()
    assert cells(text)[2:] == [
        ["a", "1 of 2 answers alike, 8 tokens each; the others for 3 tokens", "1"],
        ["b", "2 passed, 1 failed", "1"],
    ]
    assert "- a: so." in text and text.endswith("Not measured: c.")

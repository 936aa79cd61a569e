"""What serving does without vLLM: its command and what that refuses, and what the notebook shows."""

import json
import sys

import pytest
import stand_ins

from residualquant import cli
from residualquant.config import preset
from residualquant.errors import ResidualQuantError
from residualquant.models.loading import model_folder
from residualquant.repro import readme, serving
from residualquant.vllm import bench
from residualquant.vllm.serve import check_served, environment, serve_command

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


# ------------------------------------------------------------------------------------------------- the command

OURO, HUGINN = "mini-ouro-maths", "mini-huginn"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ((OURO, "--loops", "50000000"), "loops must be at most 4, got 50000000"),
        ((OURO, "--loops", "2", "--bits", "2", "2", "2", "4"), "equally many loops, got loops=2 and bits=(2, 2, 2, 4)"),
        ((OURO, "--config", "BF16", "--bits", "2", "2", "2", "4"), 'preset "BF16" keeps K and V as they are, got'),
        ((OURO, "--rotation", "optr_h", "--rotations", "/nowhere"), "/nowhere holds no calibration"),
        ((OURO, "--rotation", "optr_h", "--rotations", __file__), "test_serving.py holds no calibration"),
        ((OURO, "--layer-bits", "1:3"), "layer-bits cannot be served, pages of all layers have one size: got ('1:3',)"),
        ((HUGINN, "--group-size", "64"), "head_dim 96 is not divisible by the group size 64 of loop 0"),
        (
            (OURO, "--", "--additional-config", "{}"),
            "--additional-config is set by the options of `residualquant serve`",
        ),
        ((OURO, "--", "--additional_config.residualquant.preset=x"), "--additional-config is set by the options"),
        ((OURO, "--", "--model", "other"), "--model is set by the options of `residualquant serve`"),
        ((OURO, "--", "--port", "1", "--kv-cache-dtype=fp8"), "does not take this option of vLLM"),
        ((OURO, "--", "-pp", "2"), "(docs/serving.md, Refused): got -pp 2"),
        ((OURO, "--", "--speculative-config", "{}"), "got --speculative-config {}"),
    ],
)
def test_what_cannot_be_served_is_refused_before_vllm_starts(capsys, argv, sentence):
    end = argv.index("--") if "--" in argv else len(argv)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", *argv[:end], "--only-print", *argv[end:]])
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


def test_options_that_ask_for_nothing_are_handed_to_vllm(capsys):
    extra = ["--kv_cache_dtype", "auto", "-pp", "1", "--port", "8001"]
    cli.main(["serve", OURO, "--config", "BF16", "--only-print", "--", *extra])
    assert capsys.readouterr().out.strip().endswith(" ".join(extra))


@pytest.fixture
def checkpoint(tmp_path):
    """A function that writes config.json, of the mini model with changes or of any bytes, and gives its folder."""

    def write(content=b"", **changes):
        values = json.loads((model_folder(OURO) / "config.json").read_text())
        folder = tmp_path / "odd"
        folder.mkdir()
        (folder / "config.json").write_bytes(content or json.dumps(values | changes).encode())
        return folder

    return write


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[]", "it must hold an object, got list"),
        (b"null", "it must hold an object, got NoneType"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b"{not json", "Expecting property name"),
        (b"\xff\xfe\x00", "can't decode byte"),
        ({"model_type": None}, "model_type is None, expected one of"),
        ({"model_type": ["ouro"]}, r"model_type is \['ouro'\], expected one of"),
        ({"model_type": "huginn_raven"}, "'huginn_raven' is RavenForCausalLM's, got the architecture OuroForCausalLM"),
        ({"architectures": 5}, "architectures must be a list of names, got 5"),
        ({"architectures": {"a": 1}}, "architectures must be a list of names, got {'a': 1}"),
        ({"architectures": [["x"]]}, r"architectures must be a list of names, got \[\['x'\]\]"),
        ({"architectures": "OuroForCausalLM"}, "architectures must be a list of names, got 'OuroForCausalLM'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer, got 0"),
        ({"head_dim": "128"}, "head_dim must be a positive integer, got '128'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0"),
        ({"total_ut_steps": 10**9}, "total_ut_steps must be at most 1024, got 1000000000"),
    ],
)
def test_an_odd_config_json_is_one_sentence_that_names_it(checkpoint, content, sentence):
    folder = checkpoint(**content) if isinstance(content, dict) else checkpoint(content)
    with pytest.raises(ResidualQuantError, match=rf"config\.json of odd cannot be used: .*{sentence}") as caught:
        check_served(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("head_dim", "sentence"), [(50, "positive multiple of 16, got 50"), (32, "Hadamard rotation needs a head_dim of")]
)
def test_heads_that_cannot_be_coded_are_refused(checkpoint, head_dim, sentence):
    folder = checkpoint(head_dim=head_dim)
    with pytest.raises(ValueError, match=sentence):
        serve_command(folder, {"preset": "INT2/4 g=32", "rotation": "hadamard"})
    serve_command(folder, {"preset": "BF16", "rotation": "hadamard"})


def test_what_is_left_out_of_config_json_has_its_default(checkpoint):
    config = check_served(checkpoint(head_dim=None, num_attention_heads=None, num_key_value_heads=None))
    assert (config.num_attention_heads, config.num_key_value_heads) == (16, 16)
    assert config.head_dim == config.hidden_size // 16


def test_the_command_is_of_texts_and_names_no_option_that_is_a_folder(checkpoint, monkeypatch):
    folder = checkpoint()
    monkeypatch.chdir(folder.parent)
    folder.rename("-odd")
    line = serve_command(folder.parent / "-odd", {"preset": "BF16"})
    assert all(isinstance(word, str) for word in line)
    assert serve_command("./-odd", {"preset": "BF16"})[:3] == ["vllm", "serve", "./-odd"]
    with pytest.raises(ValueError, match="extra must be a sequence of options, got the text '--port'"):
        serve_command("./-odd", {"preset": "BF16"}, "--port")


def test_a_folder_of_metrics_that_is_not_there(monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")
    with pytest.raises(ResidualQuantError, match=r"PROMETHEUS_MULTIPROC_DIR must name a folder .* got '/nowhere'"):
        environment()


@pytest.mark.parametrize("words", [(), ("x.json", "hugin"), ("x.json", "ouro", "huginn"), ("x.json", "packed", "raw")])
def test_the_benchmark_takes_no_other_words(words, monkeypatch):
    monkeypatch.setattr(bench.subprocess, "run", lambda *_, **__: pytest.fail("it started"))
    with pytest.raises(SystemExit, match=rf"takes FILE \[ouro\|huginn\] .* got {' '.join(words) or 'nothing'}"):
        bench.main(*words)

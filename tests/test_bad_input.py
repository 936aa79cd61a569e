"""What a caller of the Python functions can get wrong: a ValueError or ResidualQuantError that names the value."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from stand_ins import ScriptedModel, TextTokenizer

from residualquant import KVQuantConfig, cli, load_model, preset
from residualquant.errors import ResidualQuantError
from residualquant.evals.run import evaluate
from residualquant.evals.tasks import MOST_PROBLEMS, problem_of, problems
from residualquant.inspect import inspect_trace
from residualquant.models.loading import read_kv_shape
from residualquant.repro import paths
from residualquant.repro.labels import lines
from residualquant.repro.tables import table
from residualquant.rotation.calibration import CalibrationSizes, calibrate, calibrated
from residualquant.rotation.optr_h import OptRHSettings

CODED = preset("INT2/4 g=32")
LEARNT = preset("INT2/4 g=32", rotation="oscar")


@pytest.fixture
def model():
    model = ScriptedModel()
    model.tokenizer = TextTokenizer()
    model.config.num_attention_heads = 4
    return model


NUMBERS = [0, -1, 1.5, "1", None, True]


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize(
    "call",
    [
        lambda model, value: evaluate(model, "words", [CODED], value, "unused"),
        lambda model, value: inspect_trace([], CODED, queries=value),
        lambda model, value: CalibrationSizes(fit=value),
        lambda model, value: CalibrationSizes(holdout=value),
        lambda model, value: OptRHSettings(batch=value),
        lambda model, value: OptRHSettings(queries=value),
        lambda model, value: OptRHSettings(check_every=value),
    ],
    ids=["evaluate n", "inspect queries", "fit", "holdout", "batch", "queries", "check_every"],
)
def test_counts(model, call, value):
    with pytest.raises(ValueError, match=rf"must be (an integer|at least 1), got {value!r}$"):
        call(model, value)


@pytest.mark.parametrize("value", [-1, 1.5, "1", None, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda value: problems("words", value),
        lambda value: problems("words", 1, start=value),
        lambda value: CalibrationSizes(steps=value),
        lambda value: CalibrationSizes(seed=value),
        lambda value: OptRHSettings(steps=value),
        lambda value: OptRHSettings(seed=value),
    ],
    ids=["n", "start", "sizes.steps", "sizes.seed", "steps", "seed"],
)
def test_counts_that_may_be_0(call, value):
    with pytest.raises(ValueError, match=rf"must be (an integer|at least 0), got {value!r}$"):
        call(value)


MODEL = "mini-ouro-maths"
CALLS = {
    "max_new_tokens": (lambda m: evaluate(m, "words", [CODED], 1, "x", max_new_tokens=2.5), "an integer, got 2.5"),
    "one configuration": (lambda m: evaluate(m, "words", CODED, 1, "x"), r"configs must be a Sequence, got KVQuant"),
    "labels": (lambda m: evaluate(m, "words", ["BF16"], 1, "x"), "a configuration must be a KVQuantConfig, got 'BF16'"),
    "list of rotations": (lambda m: evaluate(m, "words", [CODED], 1, "x", rotations=[1]), r"a Mapping, got \[1\]"),
    "task": (lambda m: evaluate(m, None, [CODED], 1, "x"), "unknown task None; known: words"),
    "label to calibrate": (lambda m: calibrated(m, "INT2 g=32", "words"), "must be a KVQuantConfig, got 'INT2 g=32'"),
    "label to inspect": (lambda m: inspect_trace([], "BF16"), "config must be a KVQuantConfig, got 'BF16'"),
    "too many problems": (lambda m: problems("words", 10**12), f"exceed {MOST_PROBLEMS} together, got 1000000000000"),
    "far problems": (lambda m: problems("words", 1, start=10**12), "got 1 and 1000000000000"),
    "problem of a number": (lambda m: problem_of(5), "no procedural task has a problem 5"),
    "problem of long digits": (lambda m: problem_of("words/8/" + "9" * 5000), "no procedural task has a problem"),
    "problem of odd digits": (lambda m: problem_of("words/8/²"), "no procedural task has a problem 'words/8/²'"),
    "seed": (lambda m: CalibrationSizes(seed=2**63), r"below 2\^63, got 9223372036854775808"),
    "learning rate": (lambda m: OptRHSettings(learning_rate="0.1"), "learning_rate must be a float, got '0.1'"),
    "no learning": (lambda m: OptRHSettings(learning_rate=float("nan")), "learning_rate must be above 0, got nan"),
    "token": (lambda m: calibrate(m, {"x": LEARNT}, [[1, 64]], [[1]]), "token ids from 0 to 63, got 64"),
    "token below 0": (lambda m: calibrate(m, {"x": LEARNT}, [[1]], [[-1]]), "token ids from 0 to 63, got -1"),
    "text": (lambda m: calibrate(m, {"x": LEARNT}, ["abc"], [[1]]), "token ids from 0 to 63, got 'a'"),
    "empty text": (lambda m: calibrate(m, {"x": LEARNT}, [[]], [[1]]), "token ids from 0 to 63, got an empty one"),
    "device": (lambda m: load_model(MODEL, device=["cpu"]), r"device must be cpu or cuda, got \['cpu'\]"),
    "dtype by name": (lambda m: load_model(MODEL, dtype="float16"), "dtype must be one of .*, got 'float16'"),
    "dtype of integers": (lambda m: load_model(MODEL, dtype=torch.int8), "dtype must be one of .*, got torch.int8"),
    "head_dim": (lambda m: CODED.effective_bits("128"), "head_dim must be a positive multiple of 16, got '128'"),
    "two profiles": (lambda m: table("table2", ["full"]), r"unknown profile \['full'\]"),
}


@pytest.mark.parametrize("case", CALLS)
def test_arguments(model, tmp_path, monkeypatch, case):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    call, sentence = CALLS[case]
    with pytest.raises(ValueError, match=sentence):
        call(model)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ checkpoints


def _config(**changes):
    def harm(folder):
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | changes))

    return harm


def _text(text):
    return lambda folder: (folder / "config.json").write_text(text)


HARM = {
    "a list": (_text("[]"), r"config.json of harmed cannot be used: it must hold an object, got list"),
    "null": (_text("null"), "it must hold an object, got NoneType"),
    "nested": (_text("[" * 100_000), "it is nested too deeply"),
    "bytes": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "config.json of harmed cannot be used"),
    "kind of a list": (_config(model_type=["ouro"]), r"model_type is \['ouro'\], expected one of"),
    "no heads": (_config(num_key_value_heads=0), "num_key_value_heads must be a positive integer, got 0"),
    "heads in words": (_config(num_attention_heads="2"), "num_attention_heads must be a positive integer, got '2'"),
    "heads by halves": (_config(num_attention_heads=2.0), "num_attention_heads must be a positive integer, got 2.0"),
    "loops": (_config(total_ut_steps=10**9), "total_ut_steps must be at most 1024, got 1000000000"),
    "layers": (_config(num_hidden_layers=-1), "num_hidden_layers must be a positive integer, got -1"),
    "norms": (_config(rms_norm_eps="small"), "rms_norm_eps must be a positive number, got 'small'"),
    "a tensor twice": (
        lambda folder: shutil.copy(folder / "model.safetensors", folder / "other.safetensors"),
        "harmed holds lm_head.weight in two files, other.safetensors and one before it",
    ),
}


@pytest.mark.parametrize("case", HARM)
def test_a_checkpoint_that_cannot_be_used_is_one_sentence(tmp_path, case):
    harm, sentence = HARM[case]
    folder = tmp_path / "harmed"
    shutil.copytree(paths.models_dir() / MODEL, folder)
    harm(folder)
    with pytest.raises(ResidualQuantError, match=sentence) as caught:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def test_weights_may_lie_in_several_files(tmp_path):
    folder = tmp_path / "split"
    shutil.copytree(paths.models_dir() / MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    for file, part in (("model", names[::2]), ("other", names[1::2])):
        save_file({name: weights[name] for name in part}, folder / f"{file}.safetensors")
    whole, split = load_model(MODEL, device="cpu"), load_model(str(folder), device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), split.state_dict().values(), strict=True))
    assert read_kv_shape(str(folder)) == (whole.kv_shape, whole.config.num_attention_heads)


# ------------------------------------------------------------------------------------------------ surroundings


def test_a_home_that_is_a_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path / "home"))
    for argv in (["info"], ["tables", "--only", "storage"], ["calibrate", "--fit", "1"], ["collect"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(argv)
        err = capsys.readouterr().err
        assert f"RESIDUALQUANT_HOME must name a folder, got the file {tmp_path}/home" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried"),
        RuntimeError("x: can't allocate memory: y\nz"),
    ],
    ids=["Python", "CUDA", "CPU"],
)
def test_no_more_memory_is_one_sentence(monkeypatch, capsys, error):
    def fail():
        raise error

    monkeypatch.setattr("residualquant.repro.info.print_info", fail)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["info"])
    err = capsys.readouterr().err
    assert err.startswith("residualquant: out of memory: ") and err.count("\n") == 1


def test_other_errors_of_torch_stay_visible(monkeypatch):
    def fail():
        raise RuntimeError("the size of tensor a must match")

    monkeypatch.setattr("residualquant.repro.info.print_info", fail)
    with pytest.raises(RuntimeError, match="size of tensor a"):
        cli.main(["info"])


ERRORS = "model,rotation,config,reference,layer,loop_group,of,head,error,n,split\nm,hadamard,c,last,1,1,K,1,"


@pytest.mark.parametrize(
    "text",
    [
        "key,error\n1,2\n",
        *(f"{ERRORS}{error},64,training problems 256 to 319 of words\n" for error in ("abc", "nan", "inf", "-1", "")),
        f"{ERRORS}1,64,training problems 96 to 159 of words\n",  # of another profile
    ],
)
def test_damaged_errors_of_rotations(tmp_path, monkeypatch, capsys, text):
    file = tmp_path / "data" / "full" / "rotation_errors.csv"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["tables", "--profile", "full", "--only", "rotations"])
    err = capsys.readouterr().err
    assert "data/full/rotation_errors.csv is damaged" in err and err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "model,method\nmean,bf16\n", None])
def test_damaged_numbers_of_the_paper(tmp_path, monkeypatch, text):
    shutil.copytree(paths.paper_dir(), tmp_path / "data" / "paper")
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    file = tmp_path / "data" / "paper" / "table2.csv"
    file.write_bytes(b"\xff\xfe" if text is None else text.encode())
    with pytest.raises(ResidualQuantError, match="data/paper") as caught:
        lines.__wrapped__("table3")
    assert "\n" not in str(caught.value)


def test_odd_types_of_a_configuration():
    for bits in ("2224", 4, None, (2.0, 2, 2, 4), (True, 2, 2, 4), [[2], [2]]):
        with pytest.raises(ValueError, match="got "):
            KVQuantConfig(bits=bits)

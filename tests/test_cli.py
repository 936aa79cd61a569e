"""The command line: help that is enough, quick to start, one sentence and exit code 2 for what the user can mend."""

import errno
import os
import subprocess
import sys
import time

import pytest
import stand_ins
import torch

from residualquant import cli
from residualquant.config import preset
from residualquant.models import Huginn, HuginnConfig, Ouro, OuroConfig
from residualquant.repro import paths
from residualquant.repro.records import list_records, read_records
from residualquant.repro.run import marker_path, run_lock
from residualquant.rotation import calibration


def call(capsys, *argv):
    """(exit code, stdout, stderr) of a command run in this process."""
    code = 0
    try:
        cli.main(argv)
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    return tmp_path


def test_commands_ask_for_huge_pages_unless_told_otherwise(capsys, monkeypatch):
    for own, expected in (("0", "0"), (None, "1")):
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
        if own is None:
            monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
        assert call(capsys, "bits", "BF16")[0] == 0
        assert os.environ["THP_MEM_ALLOC_ENABLE"] == expected


def test_help_names_every_command_and_starts_quickly():
    environment = {**os.environ, "COLUMNS": "100"}
    command = [sys.executable, "-m", "residualquant.cli", "--help"]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert time.monotonic() - begun < 10  # about 1 s on an idle machine
    assert done.returncode == 0
    for name in cli.COMMANDS:
        assert f" {name} " in done.stdout


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_explains_its_options(capsys, command):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0 and "--help" in out and len(out) > 200


def test_bits_prints_the_storage_arithmetic(capsys):
    code, out, _ = call(capsys, "bits", "INT2/4 g=32", "--head-dim", "128")
    assert code == 0
    for value in ("3.09375", "42,42,42,72", "198", "5.17x", "414", "2.47x"):
        assert value in out
    assert "2.89062" not in out and "2222" not in out
    code, out, err = call(capsys, "bits", "INT2/4 g=32", "--reference", "direct", "--bits", "4", "2", "0", "4")
    assert (code, out) == (2, "") and "loop 2 has no reference" in err


def test_bits_lists_every_label_when_none_is_given(capsys):
    code, out, _ = call(capsys, "bits")
    assert code == 0 and all(label in out for label in ("BF16", "INT2 g=16", "INT2/4 g=16", "INT4 g=32"))


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (("bits", "INT3"), "unknown preset 'INT3'; known presets: BF16"),
        (("bits", "INT2 g=32", "--head-dim", "100"), "100"),
        (("bits", "INT2 g=32", "--rotation", "fourier"), "rotation must be one of"),
        (("eval", "--task", "wrods"), "unknown task 'wrods'; known: words"),
        (("tables", "--profile", "mni"), "unknown profile 'mni'; known: smoke, mini, full, paper"),
        (("reproduce", "--profile", "paper"), "'paper' cannot run here, it lacks:"),
        (("figures", "--only", "figure99"), "no figure 'figure99'"),
        (("tables", "--profile", "paper", "--only", "table2"), "no cell of table2 is measured; nothing in this"),
        (("eval", "--task", "words", "--model", "nobody"), "no model 'nobody'"),
        (("eval", "--task", "words", "--n", "0"), "n must be at least 1, got 0"),
        (("inspect", "--task", "wrods"), "unknown task 'wrods'; known: words"),
        (("inspect", "--model", "nobody"), "no model 'nobody'"),
        (("inspect", "--queries", "0"), "queries must be at least 1, got 0"),
        (("inspect", "--trace", "nowhere"), "there is no trace nowhere: `residualquant trace` makes one"),
        (("bits", "--loops", "1000000000"), "loops must be at most 128, got 1000000000"),
        (("bits", "--loops", "0"), "loops must be at least 1, got 0"),
        (("bits", "--loops", "2", "--bits", "2", "2", "2", "4"), "as many loops as --loops, got (2, 2, 2, 4) and 2"),
        (("eval", "--task", "words", "--n", "1000000000000"), "exceed 1000000 together, got 1000000000000 and 0"),
        (("eval", "--task", "words", "--records", ""), "records must name a file, got the folder '.'"),
        (("eval", "--task", "words", "--records", "/"), "records must name a file, got the folder '/'"),
        (("calibrate", "--seed", "99999999999999999999"), "seed must be below 2^63, got 99999999999999999999"),
        (("calibrate", "--seed", "-1"), "seed must be at least 0, got -1"),
        (("calibrate", "--estimate", "--model", "nobody"), "no model 'nobody'"),
        (("calibrate", "--estimate", "--task", "wrods"), "unknown task 'wrods'"),
        (("cells", "--part", ""), "part must be i/k, such as 1/4, got ''"),
        (("trace", "--out", "x", "--n", "0"), "n must be at least 1, got 0"),
        (("trace", "--out", "."), "out must name a file, got the folder '.'"),
        (("trace", "--out", "x", "--layers", "0", "1"), "layers must be different numbers from 1 to 4, got 0 1"),
        (("trace", "--out", "x", "--layers", "2", "2"), "layers must be different numbers from 1 to 4, got 2 2"),
        (("trace", "--out", "x", "--loops", "5"), "loops must be different numbers from 1 to 4, got 5"),
        (("trace", "--out", "x", "--text", "/dev/null"), "/dev/null is empty: got 0 characters"),
        (("trace", "--out", "x", "--text", sys.executable), "is no text in UTF-8: invalid"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_code_2(capsys, home, argv, sentence):
    code, _, err = call(capsys, *argv)
    assert code == 2 and sentence in err
    assert err.startswith("residualquant: ") and err.count("\n") == 1


def test_a_full_disk_is_one_sentence(capsys, monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr("residualquant.repro.info.print_info", full)
    code, _, err = call(capsys, "info")
    assert code == 2 and err == "residualquant: [Errno 28] No space left on device: 'x'\n"


def test_interrupted_says_how_to_go_on(capsys, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr("residualquant.repro.info.print_info", stop)
    code, _, err = call(capsys, "info")
    assert code == 130 and "the same command goes on" in err


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_DEBUG", "1")
    with pytest.raises(ValueError, match="unknown preset"):
        cli.main(["bits", "INT3"])


def test_info_names_machine_models_and_profiles(capsys, home):
    code, out, _ = call(capsys, "info")
    assert code == 0
    for word in ("torch", "GPU", "Models in", "smoke", "mini", "full", "paper", "not run here"):
        assert word in out
    assert f"{len(list_records(paths.shipped_records_dir('mini')))} files of records" in out


HOLD = """
import sys, time
from residualquant.repro.run import _write_marker, run_lock
with run_lock("mini"):
    _write_marker("mini", state="running", started="today")
    print("held", flush=True)
    time.sleep(100)
"""


def test_info_tells_a_run_that_goes_on_from_one_that_was_interrupted(capsys, home):
    def state():
        out = call(capsys, "info")[1]
        return next(line for line in out.splitlines() if line.startswith("  mini "))

    held = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    try:
        assert held.stdout.readline() == "held\n"
        assert state().endswith(f"; running (process {held.pid})")
    finally:
        held.kill()
        held.wait()
    assert (paths.data_dir("mini") / ".run.lock").read_text() == str(held.pid)  # killed, its name stays
    assert state().endswith("; interrupted: `make reproduce PROFILE=mini` goes on")
    with run_lock("mini"):  # asking has left nothing behind
        pass
    paths.write_atomic(marker_path("mini"), "{}")
    assert state().endswith("; not run here")


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, "\xff", '{"model_type": [{"a": 1}]}'])
def test_info_lists_a_damaged_model_among_the_others(capsys, home, text):
    for name in ("good", "harmed"):
        (home / "data" / "models" / name).mkdir(parents=True)
    (home / "data/models/good/config.json").write_text('{"model_type": "ouro", "total_ut_steps": 4}')
    (home / "data/models/harmed/config.json").write_bytes(text.encode("latin-1"))
    code, out, err = call(capsys, "info")
    assert (code, err) == (0, "") and "  good: ouro, 4 loops, 0.0 MiB\n" in out
    assert out.count("  harmed: ") == 1


@pytest.fixture
def tiny_model(monkeypatch):
    """A random Ouro that reads bytes."""
    torch.manual_seed(0)
    config = OuroConfig(64, 96, 1, 1, 1, 64, 258, total_ut_steps=4)
    model = Ouro(config).eval()
    model.name, model.weights_hash, model.tokenizer = "tiny", "0" * 64, stand_ins.TextTokenizer()
    model.tokenizer.decode = lambda ids: "".join(chr(i) for i in ids)
    monkeypatch.setattr("residualquant.models.load_model", lambda name, device=None: model)
    return model


EVAL = ("eval", "--task", "words", "--config")


def test_eval_runs_a_model_and_resumes(capsys, home, tiny_model, monkeypatch):
    argv = (*EVAL, "BF16", "INT2 g=32", "INT2/4 g=32", "--n", "2", "--max-new-tokens", "4")
    code, out, err = call(capsys, *argv)
    assert code == 0, err
    assert "INT2/4 g=32" in out and "95 % CI" in out and "p against BF16" in out and "with edge" not in out
    file = paths.runs_dir("eval") / "tiny.words.jsonl.xz"
    assert file.name in out
    records = read_records(file)
    assert len(records.cells) == 3 and all(c.is_complete for c in records.cells.values())
    assert call(capsys, *argv[:-1], "3")[0] == 0  # shorter answers are other answers: both are kept
    assert len(read_records(file).cells) == 6
    whole = file.read_bytes()
    monkeypatch.setattr("residualquant.engine.iter_decode", None)
    assert call(capsys, *argv)[0] == 0 and file.read_bytes() == whole


def test_eval_calibrates_keeps_and_takes_rotations(capsys, home, tiny_model, monkeypatch):
    real, few = calibration.calibrated_many, calibration.CalibrationSizes(fit=1, holdout=1, steps=1)
    monkeypatch.setattr(calibration, "calibrated_many", lambda *a, folder: real(*a, few, folder, False))
    argv = (*EVAL, "BF16", "INT2 g=32", "--n", "1", "--max-new-tokens", "2", "--rotation", "optr_h")
    code, out, err = call(capsys, *argv)
    assert code == 0 and "optr_h" in out, err
    (folder,) = (paths.runs_dir("rotations")).glob("*")
    file = paths.runs_dir("eval") / "tiny.words.jsonl.xz"
    kept = file.read_bytes()
    monkeypatch.setattr(calibration, "calibrated_many", None)
    monkeypatch.setattr("residualquant.engine.iter_decode", None)
    for given in (folder, folder.parent):
        assert call(capsys, *argv, "--rotations", str(given))[:2] == (0, out) and file.read_bytes() == kept
    code, _, err = call(capsys, *EVAL, "INT2 g=16", *argv[5:], "--rotations", str(folder.parent))
    assert code == 2 and "must be of tiny, INT2 g=16, last, optr_h; these are: none; name its folder" in err
    code, _, err = call(capsys, *EVAL, "INT2 g=16", *argv[5:], "--rotations", str(folder))
    assert code == 2 and "was calibrated for group_size=32, the configuration has 16" in err


def test_eval_counts_the_layers_that_run_once_apart(capsys, home, tiny_model, monkeypatch):
    torch.manual_seed(0)
    model = Huginn(HuginnConfig(64, 1, 64, 258, 1, 2, 1, mean_recurrence=8)).eval()
    model.name, model.weights_hash, model.tokenizer = "tiny", "0" * 64, tiny_model.tokenizer
    monkeypatch.setattr("residualquant.models.load_model", lambda name, device=None: model)
    code, out, err = call(capsys, *EVAL, "BF16", "INT2/4 g=32", "--n", "1", "--max-new-tokens", "2")
    assert code == 0 and "with edge layers" in out, err
    core = preset("INT2/4 g=32").effective_bits(64)
    row = next(line for line in out.splitlines() if line.startswith("INT2/4"))
    assert f" {core:.4g} " in row and f" {(16 * core + 2 * 4.5) / 18:.4g} " in row


def test_eval_without_bf16_tests_nothing(capsys, home, tiny_model):
    code, out, err = call(capsys, *EVAL, "INT2 g=32", "--n", "1", "--max-new-tokens", "2")
    assert code == 0 and "p against" not in out, err


def test_inspect_writes_table_and_heat_map(capsys, home, tiny_model):
    code, out, err = call(capsys, "inspect", "--n", "1", "--queries", "3", "--rotation", "hadamard")
    assert code == 0 and "data/runs/inspect/tiny.words" in out, err
    folder = paths.runs_dir("inspect") / "tiny.words"
    assert {f.name for f in folder.iterdir()} == {"inspect.csv", "inspect.png", "inspect.pdf"}
    lines = (folder / "inspect.csv").read_text().splitlines()
    assert lines[0] == "layer,loop,head,of,bits,reference,residual_energy,nmse,attention_error" and len(lines) == 9


def test_inspect_reads_what_trace_wrote(capsys, home, tiny_model):
    file = home / "t.safetensors"
    assert call(capsys, "trace", "--n", "1", "--out", str(file))[0] == 0
    code, out, err = call(capsys, "inspect", "--trace", str(file), "--queries", "3")
    assert code == 0 and "data/runs/inspect/tiny.t" in out, err
    tiny_model.weights_hash = "1" * 64
    code, _, err = call(capsys, "inspect", "--trace", str(file), "--rotation", "optr_h")
    assert code == 2 and err == "residualquant: t.safetensors is not of tiny as it is now: its weights are others\n"


def test_eval_without_a_tokenizer_is_one_sentence(capsys, home, tiny_model):
    tiny_model.tokenizer = None
    code, _, err = call(capsys, "eval", "--task", "words", "--n", "2")
    assert code == 2 and err == "residualquant: the model tiny has no tokenizer.json beside its weights\n"


def test_layers_of_their_own_precision(capsys, home, tiny_model):
    """Layers count from 1 on the command line; with both raw the whole cache is BF16."""
    argv = (*EVAL, "INT2 g=32", "--n", "1", "--max-new-tokens", "2", "--layer-bits", "1:16,16,16,4")
    code, out, err = call(capsys, *argv)
    assert code == 0 and "INT2 g=32, layer 1 INT[16,16,16,4]" in out, err
    (cell,) = read_records(paths.runs_dir("eval") / "tiny.words.jsonl.xz").cells.values()
    assert cell.identity["kv"]["layer_bits"] == [[0, [16, 16, 16, 4]]]
    inspected = ("inspect", "--n", "1", "--queries", "3", "--config", "INT2 g=32", "--layer-bits", "1:4,4,4,4")
    code, out, err = call(capsys, *inspected)
    assert code == 0 and "layer 1 INT4" in out, err
    assert ",4,4," in (paths.runs_dir("inspect") / "tiny.words" / "inspect.csv").read_text().splitlines()[1]


@pytest.mark.parametrize(
    "options",
    [
        ("--layer-bits", "0:4,4,4,4"),
        ("--layer-bits", "2:4,4,4,4"),
        ("--layer-bits", "1:4,4"),
        ("--layer-bits", "1:4,4,4,4", "1:4,4,4,2"),
        ("--layer-bits", "1=4,4,4,4"),
        ("--layer-bits", "1:5,4,4,4"),
        ("--max-new-tokens", "0"),
        ("--bits", "2", "2", "4"),
        ("--n", "0"),
        ("--loops", "3"),
        ("--loops", "0"),
        ("--rotations", "nowhere"),
        ("--rotations", "nowhere", "--rotation", "optr_h"),
    ],
)
def test_a_refused_eval_writes_nothing(capsys, home, tiny_model, options):
    code, _, err = call(capsys, *EVAL, "INT2 g=32", "--n", "1", *options)
    assert code == 2 and err.startswith("residualquant: ") and err.count("\n") == 1
    assert "layer_bits must" not in err  # which counts layers from 0
    assert not list(home.rglob("*"))


def test_a_device_is_not_replaced_by_records(capsys, home, tiny_model, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    code, _, err = call(capsys, *EVAL, "INT2 g=32", "--n", "1", "--records", str(tmp_path / "pipe"))
    assert code == 2 and "records must name a file, got the device" in err and (tmp_path / "pipe").is_fifo()


def test_a_file_where_calibrations_should_go(capsys, home, tiny_model, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        code, _, err = call(capsys, "calibrate", "--task", "words", "--fit", "1", "--holdout", "1", "--out", str(out))
        assert code == 2 and "out must name a folder" in err and err.count("\n") == 1


def test_nothing_to_collect_is_one_sentence(capsys, home):
    code, _, err = call(capsys, "collect", "--profile", "smoke")
    assert code == 2 and "there are no answers in data/runs/smoke/parts or data/smoke/records" in err, err


def test_the_paper_profile_leaves_the_papers_numbers_alone(capsys, home):
    assert call(capsys, "tables", "--profile", "paper", "--only", "storage")[1] == "data/paper_models/storage.csv\n"
    assert not paths.paper_dir().is_relative_to(home)


def test_tables_find_the_shipped_records_after_another_table_was_written(capsys, home):
    assert call(capsys, "tables", "--profile", "full", "--only", "storage")[0] == 0
    folder = paths.shipped_records_dir("full")
    assert list_records(folder) and not folder.is_relative_to(home)
    assert call(capsys, "figures", "--profile", "full", "--only", "figure2")[0] == 0

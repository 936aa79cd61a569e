"""Records: resumed after a kill, damage found and redone, one writer, a full disk, the same bytes every time."""

import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import stand_ins
import torch

import residualquant.engine
from residualquant.config import preset
from residualquant.errors import ResidualQuantError
from residualquant.evals import run as evals_run
from residualquant.models.base import KVShape
from residualquant.repro import paths
from residualquant.repro.records import (
    Answer,
    Lock,
    Records,
    Writer,
    finished_name,
    key_of,
    list_records,
    read_records,
)
from residualquant.rotation import Rotation
from residualquant.rotation.calibration import rotations_hash

PLACE = {"date": "today"}
HERE = Path(__file__).parent


def identity(name="a", n=3):
    return {"task": "words", "kv": {"bits": [2, 2]}, "n": n, "name": name}


def fill(path, name="a", n=3, scored=True):
    with Writer(path) as writer:
        cell = writer.start(identity(name, n), PLACE)
        for i in reversed(range(n)):
            writer.add(cell, Answer(f"p{i}", i, f"text\n{i} é \u2028", 5, True))
        if scored:
            writer.score(cell, {f"p{i}": i % 2 == 0 for i in range(n)})
    return path


def only(records):
    """The one cell of ``records``."""
    (cell,) = records.cells.values()
    return cell


def finish(path):
    with Writer(path) as writer:
        return writer.finish()


def text_of(path):
    """What is in a finished file, expanded by the standard library and not by the code under test."""
    assert not path.exists()
    return lzma.decompress(finished_name(path).read_bytes())


def unfinish(path):
    """Lay the text of a finished file open, as while a run goes on."""
    path.write_bytes(text_of(path))
    finished_name(path).unlink()


def test_answers_and_scores_come_back(tmp_path):
    records = read_records(fill(tmp_path / "r.jsonl"))
    cell = only(records)
    assert cell.is_complete and cell.provenance == PLACE
    assert cell.correct == {"p0": True, "p1": False, "p2": True}
    assert cell.answers["p1"].response == "text\n1 é \u2028"


def test_a_finished_file_is_sorted_and_finishing_again_changes_no_byte(tmp_path):
    path = fill(tmp_path / "r.jsonl")
    assert finish(path)
    first = text_of(path)
    assert [json.loads(line).get("index") for line in first.splitlines()] == [None, 0, 1, 2]
    assert b'"kind":"score"' not in first
    assert not finish(path) and text_of(path) == first
    other = tmp_path / "other.jsonl"
    fill(other, "b"), fill(other, "a")
    both = tmp_path / "both.jsonl"
    fill(both, "a"), fill(both, "b")
    finish(other), finish(both)
    assert finished_name(other).read_bytes() == finished_name(both).read_bytes()


def test_a_finished_file_is_small_and_any_xz_reads_it(tmp_path):
    path = fill(tmp_path / "r.jsonl", n=50)
    plain = path.read_bytes()
    finish(path)
    assert list_records(tmp_path) == [path] and not path.exists()
    assert len(finished_name(path).read_bytes()) < len(plain) / 3
    if xzcat := shutil.which("xzcat"):
        shown = subprocess.run([xzcat, finished_name(path)], capture_output=True, check=True).stdout
        assert len(shown.splitlines()) == 51 and shown == text_of(path)  # the scores are merged into the answers


def test_the_same_content_compressed_otherwise_is_left_alone(tmp_path):
    path = fill(tmp_path / "r.jsonl")
    finish(path)
    other = lzma.compress(text_of(path), preset=0)
    assert other != finished_name(path).read_bytes()
    finished_name(path).write_bytes(other)
    assert not finish(path) and finished_name(path).read_bytes() == other and not path.exists()


def test_killed_before_the_plain_file_is_removed(tmp_path, monkeypatch):
    path = fill(tmp_path / "r.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            finish(path)
    packed = finished_name(path).read_bytes()
    assert path.exists() and list_records(tmp_path) == [path]
    assert only(read_records(path)).correct == {"p0": True, "p1": False, "p2": True}
    assert not finish(path) and finished_name(path).read_bytes() == packed and not path.exists()


def test_a_finished_file_is_expanded_and_gone_on_with(tmp_path):
    path = fill(tmp_path / "r.jsonl")
    finish(path)
    packed = finished_name(path).read_bytes()
    fill(finished_name(path), "b", 2)  # either name means the same records
    assert finished_name(path).read_bytes() == packed and len(Records(path).cells) == 2  # the plain file counts
    assert len(read_records(finished_name(path)).cells) == 2
    assert finish(path) and len(text_of(path).splitlines()) == 7
    assert len(read_records(path).cells) == 2
    assert sorted(f.name for f in tmp_path.iterdir()) == [".r.jsonl.lock", "r.jsonl.xz"]


@pytest.mark.parametrize("harm", ["cut", "flip", "text", "empty", "tail"])
def test_a_damaged_finished_file_is_one_sentence_and_is_mended(tmp_path, harm):
    path = fill(tmp_path / "r.jsonl", n=1000)
    finish(path)
    whole, packed = only(read_records(path)), finished_name(path).read_bytes()
    half = len(packed) // 2
    flipped = packed[:half] + bytes([packed[half] ^ 255]) + packed[half + 1 :]
    harmed = {"cut": packed[:half], "flip": flipped, "text": b"text\n", "empty": b"", "tail": packed + b"more"}
    finished_name(path).write_bytes(harmed[harm])
    with pytest.raises(ResidualQuantError, match=r"r.jsonl.xz is damaged \(its compressed data.*make reproduce"):
        read_records(path)
    with Writer(path) as writer:
        assert len(writer.records.damage) == 1
        cell = writer.start(identity(n=1000), PLACE)
        kept = dict(cell.answers)
        assert all(whole.answers[p] == a for p, a in kept.items())
        assert len(kept) == {"text": 0, "empty": 0, "tail": 1000}.get(harm, len(kept))
        assert harm not in ("cut", "flip") or 0 < len(kept) < 1000
        for answer in whole.answers.values():
            if answer.problem not in kept:
                writer.add(cell, answer)
        assert writer.finish()
    assert finished_name(path).read_bytes() == packed and not path.exists()


def test_unscored_answers_are_kept(tmp_path):
    cell = only(read_records(fill(tmp_path / "r.jsonl", scored=False)))
    assert len(cell.answers) == 3 and not cell.is_complete and cell.correct == {}


def test_writing_goes_on_after_a_file_was_finished(tmp_path):
    path = fill(tmp_path / "r.jsonl")
    with Writer(path) as writer:
        writer.finish()
        assert not path.exists()
        writer.add(writer.start(identity("b", 1), PLACE), Answer("p0", 0, "x", 1, True, True))
        assert len(read_records(path).cells) == 2
        writer.finish()
    assert len(read_records(path).cells) == 2 and len(text_of(path).splitlines()) == 6


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_truncated_line_is_found_reported_and_only_it_is_lost(tmp_path, cut):
    path = fill(tmp_path / "r.jsonl")
    finish(path)
    unfinish(path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ResidualQuantError, match=r"line 4 of .*r.jsonl is damaged .*make reproduce"):
        read_records(path)
    with Writer(path) as writer:
        assert len(writer.records.damage) == 1
        cell = only(writer.records)
        assert sorted(cell.answers) == ["p0", "p1"]
        writer.add(cell, Answer("p2", 2, "again", 1, True, True))
    assert only(read_records(path)).is_complete


@pytest.mark.parametrize("line", [0, 2])
def test_an_edited_line_is_found(tmp_path, line):
    path = fill(tmp_path / "r.jsonl")
    finish(path)
    unfinish(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"words"' if line == 0 else b"text", b'"wards"' if line == 0 else b"test")
    path.write_bytes(b"".join(lines))
    records = Records(path)
    assert len(records.damage) == 1 and "checksum" in records.damage[0]
    with Writer(path) as writer:  # answers whose header was lost are found again by their key
        cell = writer.start(identity(), PLACE)
        assert len(cell.answers) == (3 if line == 0 else 2)


@pytest.mark.parametrize("junk", [b"\0\0\0\n", b"{}\n", b"[1]\n", b'{"kind":"cell"}\n', b"\xff\xfe\n", b"\n", b'"x"'])
def test_junk_lines_are_damage_not_crashes(tmp_path, junk):
    path = fill(tmp_path / "r.jsonl")
    whole = path.read_bytes()
    path.write_bytes(junk + whole if junk.endswith(b"\n") else whole + junk)
    assert len(Records(path).damage) == 1
    with Writer(path) as writer:
        assert only(writer.records).is_complete
    assert only(read_records(path)).is_complete


def test_the_key_changes_with_anything_that_changes_the_result():
    chosen = evals_run.problems("words", 2)
    base = {"max_new_tokens": 8, "seed": 0}
    model = stand_ins.stand_in_model()
    keys = {key_of(evals_run.identity_of(model, "words", chosen, preset("INT2 g=32"), **base))}
    keys.add(key_of(evals_run.identity_of(model, "words", chosen, preset("INT2 g=16"), **base)))
    keys.add(key_of(evals_run.identity_of(model, "words", chosen[:1], preset("INT2 g=32"), **base)))
    keys.add(key_of(evals_run.identity_of(model, "words", chosen, preset("INT2 g=32"), max_new_tokens=9, seed=0)))
    keys.add(key_of(evals_run.identity_of(model, "words", chosen, preset("INT2 g=32"), max_new_tokens=8, seed=1)))
    for rotations in (turned(1), turned(2)):
        keys.add(key_of(evals_run.identity_of(model, "words", chosen, preset("INT2 g=32"), rotations, **base)))
    model.weights_hash = "1" * 64
    keys.add(key_of(evals_run.identity_of(model, "words", chosen, preset("INT2 g=32"), **base)))
    model.edge_shape = KVShape(1, 2, 2, 128)
    keys.add(key_of(evals_run.identity_of(model, "words", chosen, preset("INT2 g=32"), **base)))
    model.stop_ids = {1, 2}
    keys.add(key_of(evals_run.identity_of(model, "words", chosen, preset("INT2 g=32"), **base)))
    model.state_seed = 1  # of a model that starts from random numbers
    keys.add(key_of(evals_run.identity_of(model, "words", chosen, preset("INT2 g=32"), **base)))
    assert len(keys) == 11


def test_two_writers_refuse(tmp_path):
    path = fill(tmp_path / "r.jsonl")
    with Writer(path), pytest.raises(ResidualQuantError, match=f"another run .process {os.getpid()}."):
        Writer(path).__enter__()
    with Writer(path) as writer:
        assert only(writer.records).is_complete


FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, {here!r})
from test_records import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path({path!r})
size = path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 500, size + 500))
try:
    with Writer(path) as writer:
        cell = writer.start(identity("b", 9), PLACE)
        for i in range(9):
            writer.add(cell, Answer(f"p{{i}}", i, "x" * 60, 5, True))
except ResidualQuantError as error:
    print(error)
try:
    paths.write_atomic(path.with_name("table.csv"), "x" * (size + 1000))
except ResidualQuantError as error:
    print(error)
"""


def test_a_full_disk_is_one_sentence_and_leaves_whole_lines(tmp_path):
    path = fill(tmp_path / "r.jsonl")
    script = FULL_DISK.format(here=str(HERE), path=str(path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert "r.jsonl could not be extended" in lines[0] and "answers are safe" in lines[0]
    assert "table.csv could not be written" in lines[1]
    assert not Records(path).damage and len(Records(path).cells) == 2
    assert sorted(f.name for f in tmp_path.iterdir()) == [".r.jsonl.lock", "r.jsonl"]


def test_write_atomic_says_whether_it_changed_anything(tmp_path):
    assert paths.write_atomic(tmp_path / "new" / "a.csv", "a\n")
    assert not paths.write_atomic(tmp_path / "new" / "a.csv", "a\n")
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["a.csv"]


# ------------------------------------------------------------------------------------------- evaluate


CONFIGS = [preset("BF16"), preset("INT2 g=32"), preset("INT2/4 g=32")]


@pytest.fixture
def engine(monkeypatch):
    stand_ins.install(monkeypatch, ("words",))


def evaluate(path, configs=CONFIGS, n=8):
    return evals_run.evaluate(stand_ins.stand_in_model(), "words", configs, n, path, progress=False)


def test_evaluate_answers_and_scores_everything_once(engine, tmp_path, monkeypatch):
    cells = evaluate(tmp_path / "r.jsonl")
    assert all(cell.is_complete for cell in cells)
    assert sum(cells[0].correct.values()) >= sum(cells[1].correct.values())
    first = (tmp_path / "r.jsonl.xz").read_bytes()
    monkeypatch.setattr("residualquant.engine.iter_decode", None)  # nothing is left to decode
    assert [c.correct for c in evaluate(tmp_path / "r.jsonl")] == [c.correct for c in cells]
    assert (tmp_path / "r.jsonl.xz").read_bytes() == first and not (tmp_path / "r.jsonl").exists()


def test_a_finished_file_with_all_that_is_asked_for_is_read_whoever_holds_it(engine, tmp_path):
    cells = evaluate(tmp_path / "r.jsonl")
    with Lock(tmp_path / "r.jsonl"):
        assert [c.correct for c in evaluate(tmp_path / "r.jsonl", CONFIGS[1:])] == [c.correct for c in cells[1:]]
        with pytest.raises(ResidualQuantError, match="being written by another run"):
            evaluate(tmp_path / "r.jsonl", n=9)


def test_what_a_finished_file_lacks_in_scores_is_made_up_for(engine, tmp_path):
    half = evals_run.evaluate(
        stand_ins.stand_in_model(), "words", CONFIGS, 8, tmp_path / "r.jsonl", score=False, progress=False
    )
    assert not any(cell.is_complete for cell in half) and (tmp_path / "r.jsonl.xz").is_file()
    assert all(cell.is_complete for cell in evaluate(tmp_path / "r.jsonl"))


def test_evaluate_adds_only_what_is_missing(engine, tmp_path):
    evaluate(tmp_path / "r.jsonl", CONFIGS[:1])
    evaluate(tmp_path / "r.jsonl", CONFIGS)
    at_once = tmp_path / "other.jsonl"
    evaluate(at_once, CONFIGS)
    ours, theirs = read_records(tmp_path / "r.jsonl"), read_records(at_once)
    assert {k: c.correct for k, c in ours.cells.items()} == {k: c.correct for k, c in theirs.cells.items()}


def test_changed_code_supersedes_old_answers(engine, tmp_path, monkeypatch):
    evaluate(tmp_path / "r.jsonl")
    old = set(read_records(tmp_path / "r.jsonl").cells)
    monkeypatch.setattr(evals_run, "method_hash", lambda: "other")
    evaluate(tmp_path / "r.jsonl", CONFIGS[:2])
    new = read_records(tmp_path / "r.jsonl").cells
    assert len(new) == 3 and len(old & set(new)) == 1


def test_evaluate_reports_damage_and_computes_it_again(engine, tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    evaluate(path)
    whole = read_records(path)
    unfinish(path)
    path.write_bytes(path.read_bytes()[:-9])
    evaluate(path)
    assert capsys.readouterr().err.count("is damaged") == 1
    assert {k: c.correct for k, c in read_records(path).cells.items()} == {k: c.correct for k, c in whole.cells.items()}


def turned(seed):
    """Calibrated rotations of the stand-in model, of one loop group: random orthogonal matrices."""
    torch.manual_seed(seed)
    places = [(0, layer, kind) for layer in range(2) for kind in "kv"]
    return {place: Rotation(torch.linalg.qr(torch.randn(2, 128, 128))[0]) for place in places}


OPTR_H = preset("INT2 g=32", rotation="optr_h")


def test_configurations_that_differ_in_rotations_only_are_told_apart(engine, tmp_path):
    def run(configs, rotations):
        model = stand_ins.stand_in_model()
        return evals_run.evaluate(model, "words", configs, 8, tmp_path / "r.jsonl", rotations=rotations, progress=False)

    first, second = turned(1), turned(2)
    both = run([OPTR_H, OPTR_H, CONFIGS[0]], {0: first, 1: second})
    assert [c.identity["rotations"] for c in both] == [rotations_hash(first), rotations_hash(second), None]
    run([OPTR_H], {0: second})
    assert set(read_records(tmp_path / "r.jsonl").cells) == {c.key[:16] for c in both}


def test_rotations_reach_the_decoder_with_their_configuration_when_others_are_done(engine, tmp_path, monkeypatch):
    seen = []
    inner = residualquant.engine.iter_decode

    def iter_decode(model, prompts, configs, rotations, **options):
        seen.append((configs, rotations))
        return inner(model, prompts, configs, **options)

    monkeypatch.setattr(residualquant.engine, "iter_decode", iter_decode)
    evaluate(tmp_path / "r.jsonl", CONFIGS[:2])
    rotations = turned(1)
    model = stand_ins.stand_in_model()
    configs = [*CONFIGS[:2], OPTR_H]
    evals_run.evaluate(model, "words", configs, 8, tmp_path / "r.jsonl", rotations={2: rotations}, progress=False)
    assert seen == [(CONFIGS[:2], {}), ([OPTR_H], {0: rotations})]


def test_recalibration_for_other_weights_supersedes(engine, tmp_path):
    model = stand_ins.stand_in_model()
    for weights, rotations in (("1" * 64, turned(1)), ("2" * 64, turned(2))):
        model.weights_hash = weights
        evals_run.evaluate(model, "words", [OPTR_H], 8, tmp_path / "r.jsonl", rotations={0: rotations}, progress=False)
    assert len(read_records(tmp_path / "r.jsonl").cells) == 1


def test_memory_is_limited_for_the_torch_engine_alone(tmp_path):
    given = (stand_ins.stand_in_model(), "words", CONFIGS, 3, tmp_path / "r.jsonl")
    with pytest.raises(ValueError, match="memory_bytes is for engine 'torch', got 4096 with 'vllm'"):
        evals_run.evaluate(*given, engine="vllm", memory_bytes=4096)
    with pytest.raises(ValueError, match="memory_bytes must be at least 1, got 0"):
        evals_run.evaluate(*given, memory_bytes=0)
    assert not (tmp_path / "r.jsonl").exists()


BAD = {
    "no problem": ([CONFIGS[0]], 0, {}, "n must be at least 1, got 0"),
    "no configuration": ([], 3, {}, "one or more configurations"),
    "twice": ([CONFIGS[1]] * 2, 3, {}, r"distinct codecs, got \['INT2 g=32', 'INT2 g=32'\]"),
    "two ways to be off": ([CONFIGS[0], preset("BF16", rotation="hadamard")], 3, {}, "distinct codecs"),
    "same rotations twice": ([OPTR_H] * 2, 3, {0: turned(1), 1: turned(1)}, "distinct codecs"),
    "not calibrated": ([OPTR_H], 3, {}, "INT2 g=32 with rotation='optr_h' needs .*`residualquant calibrate`"),
    "for none": ([CONFIGS[1]], 3, {0: turned(1)}, "rotations were given for INT2 g=32, whose rotation='none'"),
    "for nobody": ([CONFIGS[1]], 3, {1: turned(1)}, "given for configuration 1, but there are 1"),
    "incomplete": ([OPTR_H], 3, {0: {(0, 0, "k"): turned(1)[0, 0, "k"]}}, r"no optr_h rotation .* \(0, 0, 'v'\)"),
    "group size": ([preset("INT2 g=32", group_size=64)], 3, {}, "96 is not divisible by the group size 64"),
    "other loops": ([preset("INT2 g=32", loops=3)], 3, {}, "do not divide into groups of 3"),
}


@pytest.mark.parametrize("case", BAD)
def test_evaluate_refuses_nonsense_and_writes_nothing(engine, tmp_path, case):
    configs, n, rotations, sentence = BAD[case]
    model = stand_ins.stand_in_model()
    if case == "group size":
        model.kv_shape = KVShape(4, 2, 2, 96)
    with pytest.raises(ValueError, match=sentence):
        evals_run.evaluate(model, "words", configs, n, tmp_path / "r.jsonl", rotations=rotations)
    assert not list(tmp_path.iterdir())


HARM = {
    "no tokenizer": ({"tokenizer": None}, "has no tokenizer.json"),
    "no stop token": ({"stop_ids": set()}, "has no stop token"),
    "short": ({"config": SimpleNamespace(vocab_size=258, max_position_embeddings=300)}, "exceed the model's 300 posit"),
    "other words": ({"config": SimpleNamespace(vocab_size=50)}, "ids must be below 50"),
}


@pytest.mark.parametrize("case", HARM)
def test_a_model_that_cannot_be_evaluated_is_refused_and_nothing_is_written(engine, tmp_path, case):
    attributes, sentence = HARM[case]
    model = stand_ins.stand_in_model()
    vars(model).update(attributes)
    with pytest.raises((ValueError, ResidualQuantError), match=sentence):
        evals_run.evaluate(model, "words", CONFIGS, 3, tmp_path / "r.jsonl")
    assert not list(tmp_path.iterdir())


def test_killed_half_way_and_run_again_nothing_is_lost_or_computed_twice(tmp_path):
    path, log = tmp_path / "r.jsonl", tmp_path / "log.txt"

    def start(delay):
        command = [sys.executable, str(HERE / "stand_ins.py"), str(path), "words", "20", str(log), str(delay)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    process = start(0.05)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (path.is_file() and path.read_bytes().count(b'"answer"') >= 13):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = Records(path)
    kept = {(key, a.problem): a.response for key, c in before.cells.items() for a in c.answers.values()}
    assert 13 <= len(kept) < 60
    decoded = log.read_text().splitlines()
    assert len(decoded) - len(kept) in (0, 1)  # at most the one whose line was not written yet

    process = start(0)
    assert "done" in process.communicate(timeout=120)[0]
    after = read_records(path)
    answers = {(key, a.problem): a.response for key, c in after.cells.items() for a in c.answers.values()}
    assert len(answers) == 60 and all(c.is_complete for c in after.cells.values())
    assert kept.items() <= answers.items()
    again = log.read_text().splitlines()[len(decoded) :]
    assert len(again) == 60 - len(kept)
    assert len(set(again) & set(decoded)) <= 1

    finished = finished_name(path).read_bytes()
    assert "done" in start(0).communicate(timeout=120)[0]
    assert finished_name(path).read_bytes() == finished and not path.exists()


@pytest.mark.parametrize("text", ["my notes\n", "no line end", "{}\n", "[" * 100_000 + "\n"])
def test_a_file_that_is_no_records_is_left_alone(tmp_path, text):
    path = tmp_path / "notes.jsonl"
    path.write_text(text)
    with pytest.raises(ResidualQuantError, match="holds no records"), Writer(path):
        pass
    assert path.read_text() == text

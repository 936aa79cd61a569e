"""`engine="vllm"` of the evaluation: the same prompts, stop tokens and records, from the paged cache."""

import pytest
import torch

from residualquant.config import preset
from residualquant.errors import ResidualQuantError
from residualquant.evals import run as evals_run
from residualquant.models import load_model
from residualquant.repro.records import Records
from residualquant.repro.stats import Pair, mcnemar_exact
from residualquant.rotation.calibration import calibrate
from residualquant.vllm import decode
from residualquant.vllm.attention import LoopedAttention

MODEL = "mini-ouro-maths"
CONFIG = preset("INT4 g=32", rotation="hadamard")
N = 6  # six answers that one engine alone solves are significant
LEVEL = 0.05


@pytest.fixture(scope="module")
def model():
    return load_model(MODEL, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module", params=["words", "algebra"])
def cells(request, model, tmp_path_factory):
    """{engine: cell} on the first N problems of a task, both engines in one file."""
    path, found = tmp_path_factory.mktemp("records") / "r.jsonl", {}
    for engine in ("torch", "vllm"):
        (found[engine],) = evals_run.evaluate(model, request.param, [CONFIG], N, path, engine=engine, progress=False)
    return found


def test_accuracy_is_that_of_the_torch_engine(cells):
    pair = Pair.of(cells["vllm"].correct, cells["torch"].correct)
    assert pair.n == N and mcnemar_exact(pair) > LEVEL
    for cell in cells.values():
        assert cell.is_complete
        assert sum(cell.correct.values()) > N / 2  # so that an engine that is wrong throughout is told from it
        assert sum(answer.finished for answer in cell.answers.values()) > N / 2


def test_only_the_engine_tells_the_identities_apart(cells):
    ours, torchs = cells["vllm"].identity, cells["torch"].identity
    assert ours == torchs | decode.identity()
    assert not decode.identity().keys() & torchs.keys()


def test_both_engines_answers_stay_in_one_file_and_none_is_decoded_again(model, tmp_path, monkeypatch):
    asked, begin = [], decode._run
    monkeypatch.setattr(
        decode, "_run", lambda engine, prompts, rows, *a: begin(engine, prompts, asked.append(rows) or rows, *a)
    )
    path, few = tmp_path / "r.jsonl", {"max_new_tokens": 4, "progress": False}
    whole = evals_run.evaluate(model, "words", [CONFIG], 4, path, **few)
    with monkeypatch.context() as patch:  # killed after two answers
        patch.setattr(decode, "Completion", _limited(decode.Completion, 2))
        with pytest.raises(KeyboardInterrupt):
            evals_run.evaluate(model, "words", [CONFIG], 4, path, engine="vllm", **few)
    (cell,) = evals_run.evaluate(model, "words", [CONFIG], 4, path, engine="vllm", **few)
    assert [len(rows) for rows in asked] == [4, 2]
    assert evals_run.evaluate(model, "words", [CONFIG], 4, path, engine="vllm", **few)[0].answers == cell.answers
    assert len(asked) == 2
    assert set(Records(path).cells) == {cell.key[:16], whole[0].key[:16]}


def _limited(kind, count):
    """``kind``, until it was made ``count`` times."""
    made = []

    def make(*args):
        if len(made) == count:
            raise KeyboardInterrupt
        made.append(kind(*args))
        return made[-1]

    return make


def test_calibrated_rotations_reach_every_layer(tiny_ouro, tmp_path, monkeypatch):
    config, folder = preset("INT2/4 g=32", rotation="oscar"), tmp_path / "calibrated"
    tiny = load_model(tiny_ouro, device="cpu", dtype=torch.float32)
    given = calibrate(tiny, {folder: config}, [[1, 2, 3, 4] * 8], [[5, 6, 7] * 8], progress=False)[folder]
    seen = []

    def look(engine, *_):
        modules = engine.model_executor.driver_worker.worker.get_model().modules()
        seen.extend(module.paged for module in modules if isinstance(module, LoopedAttention))
        return iter(())

    monkeypatch.setattr(decode, "_run", look)
    list(decode.iter_decode(tiny, [[1, 2]], [config], 4, set(), rotations={0: given}, progress=False))
    assert len(seen) == tiny.kv_shape.layers
    for layer, pages in enumerate(seen):
        for kind in "kv":
            assert torch.equal(pages.rotation(0, kind).matrix, given[0, layer, kind].matrix)


def test_what_vllm_cannot_decode_is_refused_before_anything_is_written(model, tmp_path):
    def ask(asked, **options):
        evals_run.evaluate(asked, "words", [CONFIG], 2, tmp_path / "r.jsonl", **options)

    with pytest.raises(ValueError, match="unknown engine 'tensorrt'; known: torch, vllm"):
        ask(model, engine="tensorrt")
    with pytest.raises(ValueError, match="no BF16 windows"):
        decode.check(model, [preset("INT2/4 g=32", recent_tokens=64)])
    unsaved = load_model(MODEL, device="cpu")
    del unsaved.folder
    with pytest.raises(ResidualQuantError, match="mini-ouro-maths was not loaded from one"):
        ask(unsaved, engine="vllm")
    assert not list(tmp_path.iterdir())

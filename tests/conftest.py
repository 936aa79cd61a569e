"""What every test shares: no network, one thread each, foreign test data by environment variable, GPU tests counted."""

import ctypes
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background: what tests start and interrupt would, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder of test data that is not this project's (golden traces, benchmark files); skips where there is none."""
    folder = os.environ.get("RESIDUALQUANT_TEST_DATA", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("RESIDUALQUANT_TEST_DATA names no folder")
    return Path(folder)


@pytest.fixture(scope="session")
def cpu_library(root, tmp_path_factory):
    """Compiles a variant of a CUDA source for this CPU: the kernel's own text, other primitives."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    from residualquant.kernels.build import sources

    built = {}

    def build(variant) -> ctypes.CDLL:
        if variant not in built:
            folder = tmp_path_factory.mktemp("cuda_on_cpu")
            for source in sources(variant.SOURCE):
                shutil.copy(source, folder)
            shutil.copy(root / "tests" / "cuda_on_cpu" / "primitives.cuh", folder)
            flags = ["-O1", "-std=c++17", "-ffp-contract=off", "-x", "c++", "-shared", "-fPIC", "-fno-gnu-unique"]
            target = folder / "variant.so"
            subprocess.run(["g++", *flags, *variant.macros, "-o", target, folder / variant.SOURCE], check=True)
            built[variant] = ctypes.CDLL(str(target))
        return built[variant]

    return build


@pytest.fixture
def loaded_loop_bounds(monkeypatch):
    """Let the interpreter take a loaded scalar (to it, an array of one element) as the bound of a loop."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def pytest_configure(config):
    """Without a GPU Triton interprets its kernels. It decides so when first imported, by whatever test that is."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config, items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.stash[_GPU_TESTS] = len(gpu)
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


_GPU_TESTS = pytest.StashKey[int]()


def pytest_terminal_summary(terminalreporter):
    reports = [r for kind in ("passed", "failed", "skipped") for r in terminalreporter.getreports(kind)]
    gpu = [r for r in reports if "gpu" in getattr(r, "keywords", ()) and r.when in ("call", "setup")]
    run = sum(r.outcome != "skipped" for r in gpu if r.when == "call")
    terminalreporter.write_line(f"GPU tests: {run} run, {sum(r.outcome == 'skipped' for r in gpu)} skipped")

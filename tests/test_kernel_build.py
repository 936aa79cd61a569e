"""Libraries of the CUDA kernels: built ahead or on first use, and what is said where there is none."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from residualquant import preset
from residualquant.errors import ResidualQuantError
from residualquant.kernels import build, decode_attention
from residualquant.kernels.build import variant_for
from residualquant.layout import PageLayout


def test_libraries_built_ahead_need_no_compiler(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    monkeypatch.setattr(build, "compiler", lambda: None)
    variant = variant_for(PageLayout(preset("INT2/4 g=32"), 128), 0)
    build.load_variant.cache_clear()
    assert "no nvcc" in build.load_variant(variant, "sm_90")
    with pytest.raises(ResidualQuantError, match="there is no nvcc"):
        build.main(["sm_90"])
    path = build.library_path(variant, "sm_90")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"damaged")
    build.load_variant.cache_clear()
    assert f"/{path.name}: file too short" in build.load_variant(variant, "sm_90")
    path.unlink()
    _compile(path, 'extern "C" long decode_attention_arguments_bytes() { return 0; }')
    build.load_variant.cache_clear()
    assert not isinstance(build.load_variant(variant, "sm_90"), str)
    other = variant_for(PageLayout(preset("INT2/4 g=32"), 128), 3)
    _compile(build.library_path(other, "sm_90"), "")
    assert "undefined symbol" in build.load_variant(other, "sm_90")
    build.load_variant.cache_clear()


def _compile(path, source):
    subprocess.run(["g++", "-shared", "-x", "c++", "-", "-o", str(path)], input=source.encode(), check=True)


@pytest.mark.parametrize("loop", [-1, 4, "0", True])
def test_a_loop_that_is_not_there_has_no_variant(loop):
    with pytest.raises(ValueError, match="loop must be an integer from 0 to 3, got"):
        variant_for(PageLayout(preset("INT2/4 g=32"), 128), loop)


def test_a_compiler_that_refuses_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    monkeypatch.setattr(build, "compiler", lambda: "/bin/false")
    variant = variant_for(PageLayout(preset("INT2/4 g=32"), 128), 0)
    build.load_variant.cache_clear()
    assert "failed" in build.load_variant(variant, "sm_90")
    build.load_variant.cache_clear()


@pytest.mark.parametrize("name", ["sm_80", "90", "foo"])
def test_architectures_that_cannot_be_built_are_named(name):
    with pytest.raises(ResidualQuantError, match=f"sm_90 or newer.*{name}"):
        build.main([name])


def test_the_slower_way_is_told_once_per_operation_and_reason():
    build.warn_of_triton.cache_clear()
    with pytest.warns(UserWarning) as told:
        for operation in ("the writer", "decode attention", "the writer"):
            for reason in ("no nvcc", "no nvcc", "bits must be 2 or 4"):
                build.warn_of_triton(operation, reason)
    texts = [str(warning.message) for warning in told]
    assert len(texts) == 4 == len(set(texts))
    assert texts[0] == "the writer runs by Triton, which is slower: no nvcc"
    build.warn_of_triton.cache_clear()


def test_a_decode_kernel_that_falls_back_on_a_gpu_says_why_once(monkeypatch):
    q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 2, 64))
    past = SimpleNamespace(layout=None, pages=torch.zeros(1, 2, 16))
    monkeypatch.setattr(decode_attention, "_library", lambda *_: "no nvcc here")
    build.warn_of_triton.cache_clear()
    with pytest.warns(UserWarning, match="decode attention runs by Triton, which is slower: no nvcc here") as told:
        assert [decode_attention._choose(None, q, past, 0)[0] for _ in range(2)] == ["triton"] * 2
    assert len(told) == 1
    with pytest.raises(ResidualQuantError, match="the CUDA decode kernel cannot be used: no nvcc here"):
        decode_attention._choose("cuda", q, past, 0)
    build.warn_of_triton.cache_clear()

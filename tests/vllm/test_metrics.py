"""Prometheus metrics of the packed cache, in an engine of this process (what a server shows: test_server.py)."""

import atexit
import os

import pytest
import torch
from asking import greedy, run
from prometheus_client import REGISTRY

from residualquant.vllm.metrics import RunningCount, remove_folder_at_exit
from residualquant.vllm.paged import PackedPages
from residualquant.vllm.paged_cuda import KernelPages
from residualquant.vllm.serve import METRICS_FOLDER

PROMPTS = [[1, 2, 3, 4, 5], [6] * 40]
NEW_TOKENS = 7


def read(name, **labels):
    return REGISTRY.get_sample_value(f"residualquant:{name}", labels)


def counted_in(engine):
    before = {name: read(name) for name in ("packed_tokens_total", "kv_bytes_saved_total", "sanitised_values_total")}
    run(engine, PROMPTS, greedy(NEW_TOKENS))
    return {name: read(name) - value for name, value in before.items()}


@pytest.fixture(scope="module")
def engine(start_engine, tiny_ouro):
    settings = {"preset": "INT2/4 g=32", "rotation": "hadamard"}
    return start_engine(tiny_ouro, additional_config={"residualquant": settings}, enable_prefix_caching=False)


def test_tokens_and_bytes_are_those_of_the_requests(engine):
    counted = counted_in(engine)
    tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * (NEW_TOKENS - 1)  # the last one's K and V are never made
    assert counted["packed_tokens_total"] == tokens
    bf16 = 2 * 4 * 2 * 2 * 64 * 2  # K and V, loops, layers, KV heads, channels, bytes
    assert read("kv_bytes_per_token", format="bf16") == bf16
    packed = read("kv_bytes_per_token", format="packed")
    assert 4.5 < bf16 / packed < 5.5
    assert counted["kv_bytes_saved_total"] == tokens * (bf16 - packed)


def test_sanitised_values_are_counted(engine, monkeypatch):
    assert counted_in(engine)["sanitised_values_total"] == 0
    pages = KernelPages if torch.cuda.is_available() else PackedPages
    stage, spoilt = pages.stage, []

    def spoil(self, staged, k, v):
        if not spoilt:
            spoilt.append(k.clone())
            k[0, 0, :3] = torch.tensor([torch.nan, torch.inf, 1e6])
            v[0, 1, 0] = -torch.inf
        stage(self, staged, k, v)

    monkeypatch.setattr(pages, "stage", spoil)
    assert counted_in(engine)["sanitised_values_total"] == 4


def test_a_running_count_gives_what_is_new_and_survives_its_overflow():
    count = RunningCount(torch.device("cpu"))
    count.tensor.add_(2**31 - 2)
    assert count.new() == 2**31 - 2
    count.tensor.add_(5)
    assert [count.new(), count.new()] == [5, 0]


def test_the_raw_cache_counts_nothing(start_engine, tiny_ouro):
    assert set(counted_in(start_engine(tiny_ouro)).values()) == {0}


@pytest.mark.parametrize("own", [True, False])
def test_the_folder_of_a_server_goes_when_it_ends(own, tmp_path, monkeypatch):
    folder = tmp_path / f"{METRICS_FOLDER}{os.getpid() if own else 1}-x"
    folder.mkdir()
    at_exit = []
    monkeypatch.setattr(atexit, "register", lambda call, *args, **options: at_exit.append((call, args, options)))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    remove_folder_at_exit()
    for call, args, options in at_exit:
        call(*args, **options)
    assert folder.exists() is not own

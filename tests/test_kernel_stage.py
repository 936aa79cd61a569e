"""Staging of a step's K and V, value for value against torch (Triton's interpreter without a GPU)."""

import pytest
import torch

triton = pytest.importorskip("triton")

from residualquant.attention import count_unusable  # noqa: E402
from residualquant.kernels.stage_kv import stage_kv, stage_kv_cost, stage_kv_reference  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AWKWARD = [0.0, -0.0, 1e-30, 65279.0, 65281.0, 65504.0, 70000.0, 3e38, torch.inf, -torch.inf, torch.nan, -1e9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 2, 64), (5, 3, 96), (3, 16, 128)])
def test_values_are_those_of_torch(dtype, tokens, heads, head_dim):
    draw = torch.Generator().manual_seed(0)
    qkv = 100 * torch.randn(tokens, 3 * heads * head_dim, generator=draw)
    qkv.flatten()[torch.randperm(qkv.numel(), generator=draw)[: len(AWKWARD)]] = torch.tensor(AWKWARD)
    _, k, v = (x.unflatten(-1, (heads, head_dim)) for x in qkv.to(DEVICE, dtype).chunk(3, -1))
    kept = torch.full((2, 4, tokens + 2, heads, head_dim), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    expected = kept.clone()
    sanitised = torch.full((1,), 7, dtype=torch.int32, device=DEVICE)
    stage_kv(kept[:, 1, :tokens], k, v, sanitised)
    assert sanitised.item() == 7 + count_unusable(torch.stack([k, v]).float()).item()
    stage_kv_reference(expected[:, 1, :tokens], k, v)
    assert torch.equal(kept.view(torch.int16), expected.view(torch.int16))


def test_no_token_is_no_launch():
    empty = torch.empty(0, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    stage_kv(torch.empty(2, 0, 2, 64, dtype=torch.bfloat16, device=DEVICE), empty, empty)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"staged": lambda x: x[:, :2]}, r"staged must be \[2, 3, 2, 64\] .* got \[2, 2, 2, 64\]"),
        ({"staged": lambda _: None}, "staged must be a tensor, got None"),
        ({"staged": lambda x: x.int()}, "staged must be .* torch.int32"),
        ({"k": lambda x: x.mT.contiguous().mT}, "k must be contiguous"),
        ({"k": lambda x: x[0]}, r"k must be .* \[T, H, D\], got \[2, 64\]"),
        ({"k": lambda _: None}, "k must be a tensor .* got None"),
        ({"v": lambda x: x.half()}, "v must be .* torch.float16"),
        ({"v": lambda _: None}, "v must be a tensor, got None"),
        ({"v": lambda x: x.to("meta")}, "v must be on .* got meta"),
        ({"sanitised": lambda x: x.long()}, "sanitised must be .* torch.int64"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    arguments = {name: torch.zeros(3, 2, 64, device=DEVICE) for name in "kv"}
    arguments |= {"staged": torch.zeros(2, 3, 2, 64, device=DEVICE)}
    arguments |= {"sanitised": torch.zeros(1, dtype=torch.int32, device=DEVICE)}
    arguments |= {name: edit(arguments[name]) for name, edit in change.items()}
    with pytest.raises(ValueError, match=message):
        stage_kv(**arguments)


def test_cost_is_one_reading_and_one_writing():
    assert stage_kv_cost(64, 16, 128) == (2 * 64 * 16 * 128 * 4, 0)

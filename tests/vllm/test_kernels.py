"""Packed pages by kernels: the same steps as the plain pages take, on Triton's interpreter where there is no GPU."""

import random
from itertools import pairwise

import pytest
import torch
from asking import greedy, run, tokens_of

from residualquant.attention import attend_prompt
from residualquant.cache import LayerRotations
from residualquant.config import KVQuantConfig, preset
from residualquant.layout import PageLayout
from residualquant.models.base import KVShape
from residualquant.rotation import Rotation
from residualquant.vllm import paged_cuda
from residualquant.vllm.flash_attention import prompt_attention
from residualquant.vllm.layers import AttentionLayers
from residualquant.vllm.paged import PackedPages, StepBatch
from residualquant.vllm.paged_cuda import KernelPages, Scratch, why_not
from residualquant.vllm.startup import check_paged

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, HEAD_DIM, S = 2, 64, 16
TOLERANCE = 1e-2  # of an attention output of order 1: BF16 queries, FP16 products
HALF_UNIT = 2**-8 if DEVICE.type == "cuda" else 0.0  # of a BF16 number: what FlashAttention gives is one


class InterpretedPages(KernelPages):
    """Keeps the BF16 values of a step as FP32, which the interpreter multiplies right."""

    step_dtype = torch.float32

    def stage(self, staged, k, v):
        super().stage(staged, k.bfloat16(), v.bfloat16())


pytestmark = pytest.mark.usefixtures("loaded_loop_bounds")


def error(out, expected):
    """The largest difference that rounding an output to BF16 does not explain."""
    return ((out - expected).abs() - HALF_UNIT * expected.abs()).max().item()


def rotations_for(config, loops):
    """Random ones, with means, where the configuration's are calibrated."""
    draw, groups = torch.Generator().manual_seed(1), loops // config.loops
    given = {}
    for group in range(groups if config.rotation == "optr_h" else 0):
        for kind in "kv":
            matrix = torch.linalg.qr(torch.randn(HEADS, HEAD_DIM, HEAD_DIM, generator=draw))[0]
            means = 0.3 * torch.randn(config.loops, HEADS, HEAD_DIM, generator=draw) if kind == "k" else None
            given[group, 0, kind] = Rotation(matrix.half(), means)
    return LayerRotations(config, KVShape(loops, 1, HEADS, HEAD_DIM), DEVICE, given)


def both(config, query_groups=1, loops=4):
    """The plain pages and those by kernels of one layer."""
    layout, rotations = PageLayout(config, HEAD_DIM, S, loops // config.loops), rotations_for(config, loops)
    scratch = Scratch(3, HEADS * query_groups, HEADS, HEAD_DIM, 64, DEVICE)
    kernels = KernelPages if DEVICE.type == "cuda" else InterpretedPages
    return PackedPages(layout, rotations, 0), kernels(layout, rotations, 0, scratch)


@pytest.mark.parametrize(
    ("label", "overrides", "loops", "query_groups"),
    [
        ("INT2/4 g=32", {"rotation": "hadamard"}, 4, 1),
        ("INT2 g=16", {"rotation": "optr_h", "loops": 2}, 4, 2),
        ("INT4 g=32", {"reference": "direct"}, 2, 1),
    ],
)
def test_the_self_check_passes_with_kernels(label, overrides, loops, query_groups):
    """With a default device that shows what is made without one: vLLM builds a model with the GPU as default."""
    config = preset(label, **({"loops": loops} | overrides))
    pages = both(config, query_groups, loops)[1]
    for dtype in (torch.float32, torch.bfloat16) if DEVICE.type == "cuda" else (torch.float32,):
        with torch.device("meta"):
            assert check_paged(pages, query_groups, HEADS, DEVICE, dtype) < TOLERANCE


@pytest.fixture(params=["kernels alone", "prompts by FlashAttention"])
def asked_of_flash_attention(request, monkeypatch):
    """(starts, queries) of the calls of vLLM's FlashAttention, which is plain torch on a CPU; None without it."""
    if request.param == "kernels alone":
        monkeypatch.setattr(paged_cuda, "prompt_attention", lambda head_dim: None)
        return None
    asked, found = [], prompt_attention(HEAD_DIM)

    def attend(out, q, k, v, starts, longest):
        asked.append((starts.tolist(), len(q)))
        if found is not None:
            return found(out, q, k, v, starts, longest)
        for begin, end in pairwise(starts.tolist()):
            if begin < end:
                out[begin:end] = attend_prompt(*(x[None, begin:end].float() for x in (q, k, v)))[0]

    monkeypatch.setattr(paged_cuda, "prompt_attention", lambda head_dim: attend)
    return asked


def test_a_mixed_step_with_padding_is_what_the_plain_pages_make_of_it(asked_of_flash_attention):
    """Two decodes, a piece of a prompt, a whole prompt, and a request and a token that are padding."""
    plain, kernels = both(preset("INT2/4 g=32", rotation="optr_h"), query_groups=2)
    draw = torch.Generator().manual_seed(0)

    def states(tokens):
        base = torch.randn(2, 1, tokens, HEADS, HEAD_DIM, generator=draw)
        near = base + 0.3 * torch.randn(2, 4, tokens, HEADS, HEAD_DIM, generator=draw)
        return near.bfloat16().to(DEVICE)

    table = torch.randperm(15, generator=draw).int().view(5, 3).to(DEVICE)
    pasts, new = [17, 5, 20, 0, 0], [1, 1, 7, 18, 0]
    known, slots = [], []
    for row, (past, count) in enumerate(zip(pasts, new)):
        tokens = torch.arange(past + count, device=DEVICE)
        places = table[row, tokens // S].long() * S + tokens % S
        known.append(places[:past])
        slots.append(places[past:])
    starts = torch.tensor([0, *new]).cumsum(0).int()
    batch = StepBatch(
        query_start=starts.to(DEVICE), query_start_cpu=starts,
        seq_lens=torch.tensor([p + n for p, n in zip(pasts, new)], dtype=torch.int32, device=DEVICE),
        block_table=table, slots=torch.cat(slots), decodes=2, beginnings=2,
    )  # fmt: skip
    filled, step = states(sum(pasts)), states(sum(new))
    q = torch.randn(4, sum(new), 2 * HEADS, HEAD_DIM, generator=draw).bfloat16().float().to(DEVICE)
    results = []
    for pages_of in (plain, kernels):
        pages = torch.full((15, HEADS, plain.layout.page_bytes_per_head), 255, dtype=torch.uint8, device=DEVICE)
        filled, step = filled.to(pages_of.step_dtype), step.to(pages_of.step_dtype)
        pages_of.write(pages, torch.cat(known), *filled)
        outs = [pages_of.attend(loop, q[loop], *step[:, loop], pages, batch) for loop in range(4)]
        slots = batch.slots.clone()
        slots[3] = -1
        pages_of.write(pages, slots, *step)
        results.append((torch.stack(outs).float(), pages))
    (expected, expected_pages), (out, pages) = results
    assert error(out, expected) < TOLERANCE
    assert (pages != expected_pages).float().mean() < 1e-3  # the plain rotation sums in FP64
    if asked_of_flash_attention is not None:
        assert asked_of_flash_attention == [([0, 18, 18], 18)] * 4


def test_every_number_of_requests_has_scratch_that_stays_where_it_is():
    scratch = Scratch(5, 4, 2, HEAD_DIM, 4096, DEVICE)
    for requests in range(1, 6):
        assert requests <= len(scratch.of(requests).lse) < 2 * requests
        assert scratch.of(requests) is scratch.of(requests)


def test_a_value_that_is_not_finite_stays_with_its_token():
    _, kernels = both(preset("INT2/4 g=32"))
    k = torch.tensor([1.0, torch.nan, torch.inf, -1e30, 7.0], device=DEVICE)[:, None, None].repeat(1, HEADS, HEAD_DIM)
    staged = torch.empty(2, 5, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    kernels.stage(staged, k, k)
    assert staged[:, :, 0, 0].tolist() == [[1.0, 0.0, 65280.0, -65280.0, 7.0]] * 2


def test_every_step_of_an_engine_is_what_the_plain_pages_make_of_it(start_engine, tiny_ouro, monkeypatch):
    """Chunked prompts, mixed steps and decodes; on a GPU 48 requests, with preemption and prefix hits."""
    kinds, errors, wrong = set(), [], []
    at_once, budget, new_tokens = (8, 64, 12) if DEVICE.type == "cuda" else (3, 16, 4)

    class Compared(type(both(preset("INT2/4 g=32"))[1])):
        def attend(self, loop, q, k, v, pages, batch, out=None):
            expected = PackedPages.attend(self, loop, q.to(self.step_dtype).to(q.dtype), k, v, pages, batch)
            out = super().attend(loop, q, k, v, pages, batch, out)
            errors.append(error(out, expected))
            pasts = batch.seq_lens.cpu() - batch.query_start_cpu.diff()
            first = len(pasts) - batch.beginnings
            assert not pasts[first:].any()
            kinds.add((batch.decodes > 0, bool(pasts[batch.decodes : first].any()), batch.beginnings > 0))
            return out

        def write(self, pages, slots, k, v):
            expected = pages.clone()
            PackedPages.write(self, expected, slots, k, v)
            super().write(pages, slots, k, v)
            wrong.append((pages != expected).sum().item() / (len(slots) * self.token_bytes))

    def by_kernels(self, vllm_config, config, rotations, device):
        layout = PageLayout(config, self.shape.head_dim, vllm_config.cache_config.block_size)
        scratch = Scratch(at_once, self.heads, self.kv_heads, self.shape.head_dim, 256, device)
        return [Compared(layout, rotations, layer, scratch) for layer in range(self.shape.layers)]

    monkeypatch.setattr(AttentionLayers, "_packed", by_kernels)
    settings = {"residualquant": {"preset": "INT2/4 g=32", "rotation": "hadamard"}}
    engine = start_engine(
        tiny_ouro, additional_config=settings, max_num_batched_tokens=budget, max_num_seqs=at_once,
        num_gpu_blocks_override=16, disable_log_stats=False,
    )  # fmt: skip
    errors.clear(), wrong.clear(), kinds.clear()
    prompts, draw = [list(range(3, 3 + length)) for length in (5, 30, 17)], random.Random(0)
    if DEVICE.type == "cuda":
        prompts += [prompts[1][: draw.choice((0, 16))] + draw.choices(range(320), k=32) for _ in range(45)]
    outputs = run(engine, prompts, greedy(new_tokens))
    assert [len(tokens) for tokens in tokens_of(outputs)] == [new_tokens] * len(prompts)
    assert {(True, False, False), (False, False, True)} < kinds and any(d and c for d, c, _ in kinds)
    assert max(errors) < TOLERANCE
    assert max(wrong) < 1e-3
    if DEVICE.type == "cuda":
        (preemptions,) = (metric.value for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions")
        assert preemptions and any(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize(
    ("config", "head_dim", "reason"),
    [
        (preset("INT2/4 g=32"), 128, None),
        (KVQuantConfig((3, 3)), 128, r"bits 0, 1, 2, 4, 8, got (3, 3)"),
        (KVQuantConfig((2, 16)), 128, r"bits 0, 1, 2, 4, 8, got (2, 16)"),
        (KVQuantConfig((2, 4), rounding="bf16"), 128, "rounding \"fp32\", got 'bf16'"),
        (preset("INT2/4 g=32"), 32, "a head_dim of 64, 96, 128, 256, got 32"),
    ],
)
def test_what_kernels_lack_is_named(config, head_dim, reason):
    assert why_not(config, head_dim) == reason

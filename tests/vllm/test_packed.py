"""The packed cache in the engine against the package's own cache and decoder, on a shipped model."""

import random

import pytest
import torch
from asking import greedy, run, tokens_of
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from residualquant.attention import PackedAttention
from residualquant.cache import PackedCache
from residualquant.config import preset
from residualquant.engine import iter_decode
from residualquant.errors import ResidualQuantError
from residualquant.evals.tasks import problems
from residualquant.models import load_model
from residualquant.models.loading import model_folder
from residualquant.rotation.calibration import calibrate
from residualquant.vllm.attention import LoopedAttention
from residualquant.vllm.ouro import OuroForCausalLM
from residualquant.vllm.paged import PackedPages

MODEL = "mini-ouro-maths"
CONFIG = preset("INT2/4 g=32", rotation="hadamard")
SETTINGS = {"residualquant": {"preset": "INT2/4 g=32", "rotation": "hadamard"}}
NEW_TOKENS = 24
GREEDY = greedy(NEW_TOKENS)
BUDGET = 512


@pytest.fixture(scope="module")
def reference():
    return load_model(MODEL, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(reference):
    return [reference.tokenizer.encode(p.prompt).ids for p in problems("algebra", 3)]


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine(
        model_folder(MODEL), additional_config=SETTINGS, max_model_len=BUDGET, max_num_batched_tokens=BUDGET
    )


@pytest.fixture(autouse=True)
def empty_prefix_cache(engine):
    assert engine.reset_prefix_cache()


def continuation(model, prompt, pieces):
    """Greedy tokens of the plain model on the packed cache, the prompt given in pieces of these lengths."""
    attend = PackedAttention(PackedCache(model.kv_shape, CONFIG))
    ids, start, tokens = list(prompt), 0, []
    for size in [*pieces, *[1] * (NEW_TOKENS - 1)]:
        positions = torch.arange(start, start + size)[None]
        logits = model(torch.tensor([ids[start : start + size]]), positions, attend, last_only=True).logits
        start += size
        if start >= len(prompt):
            tokens.append(int(logits[0, -1].argmax()))
            ids.append(tokens[-1])
    return tokens


def test_tokens_are_those_of_the_torch_engine(engine, reference, prompts):
    outputs = run(engine, prompts, GREEDY)
    assert [o.num_cached_tokens for o in outputs] == [0] * len(prompts)
    decoded = iter_decode(reference, prompts, [CONFIG], NEW_TOKENS, set(), progress=False)
    expected = {done.prompt_index: done.tokens for done in decoded}
    assert tokens_of(outputs) == [expected[n] for n in range(len(prompts))]


def test_an_engine_whose_packed_path_is_wrong_does_not_start(start_engine, tiny_ouro, monkeypatch):
    write = PackedPages.write
    monkeypatch.setattr(PackedPages, "write", lambda self, pages, slots, k, v: write(self, pages, slots, v, k))
    with pytest.raises(ResidualQuantError, match="differs from the reference"):
        start_engine(tiny_ouro, additional_config=SETTINGS, max_num_batched_tokens=64)


def test_a_prefix_hit_reads_the_packed_past(engine, reference, prompts):
    (prompt,) = prompts[:1]
    run(engine, [prompt], GREEDY)
    (output,) = run(engine, [prompt], GREEDY)
    hit = (len(prompt) - 1) // 16 * 16
    assert output.num_cached_tokens == hit > 0
    assert tokens_of([output]) == [continuation(reference, prompt, [hit, len(prompt) - hit])]


@pytest.fixture
def seen(monkeypatch):
    """(loop, layer, q, k, v, output) of every call of attention."""
    calls, attend = [], LoopedAttention.attend

    def record(self, loop, q, k, v, batch, out):
        attend(self, loop, q, k, v, batch, out)
        layer = int(self.layer_name.split(".")[2])
        calls.append((loop, layer, *(x.clone() for x in (q, k, v, out))))

    monkeypatch.setattr(LoopedAttention, "attend", record)
    return calls


def worst_difference(seen, cache):
    """Between the calls of one request and attention over ``cache``."""
    expected = PackedAttention(cache)
    return max(
        (expected(loop, layer, q[None], k[None], v[None])[0] - out).abs().max().item()
        for loop, layer, q, k, v, out in seen
    )


def test_attention_of_every_step_is_the_reference(engine, prompts, seen):
    run(engine, prompts[:1], GREEDY)
    shape = load_model(MODEL, device="cpu").kv_shape
    assert len(seen) == shape.loops * shape.layers * NEW_TOKENS
    assert worst_difference(seen, PackedCache(shape, CONFIG)) < 1e-3


def test_attention_of_every_step_with_calibrated_rotations(start_engine, tiny_ouro, seen, tmp_path):
    model, config = load_model(tiny_ouro, device="cpu", dtype=torch.float32), preset("INT2/4 g=32", rotation="optr_h")
    texts = [[random.Random(seed).choices(range(320), k=64) for seed in range(first, first + 4)] for first in (0, 9)]
    rotations = calibrate(model, {tmp_path: config}, *texts, progress=False)[tmp_path]
    settings = {"preset": "INT2/4 g=32", "rotation": "optr_h", "rotations": str(tmp_path)}
    engine = start_engine(tiny_ouro, additional_config={"residualquant": settings}, max_num_batched_tokens=64)
    run(engine, [random.Random(0).choices(range(320), k=100)], greedy(8))  # the prompt goes in two pieces
    assert len(seen) == model.kv_shape.loops * model.kv_shape.layers * 9
    assert worst_difference(seen, PackedCache(model.kv_shape, config, rotations)) < 1e-3
    assert worst_difference(seen, PackedCache(model.kv_shape, CONFIG)) > 0.1


def test_given_the_same_past_every_step_is_the_torch_engines(engine, reference, prompts, monkeypatch):
    """The torch engine's tokens, K and V are put in place of vLLM's, which would come to other codes by rounding."""
    logits, past = [], []

    def recorded(attend):
        def call(loop, layer, q, k, v):
            past.append((k[0].clone(), v[0].clone()))
            return attend(loop, layer, q, k, v)

        return call

    (prompt,) = prompts[:1]
    hooks = [
        reference.register_forward_pre_hook(lambda model, args: (*args[:2], recorded(args[2]))),
        reference.register_forward_hook(lambda model, args, out: logits.append(out.logits[0, -1])),
    ]
    (decoded,) = iter_decode(reference, [prompt], [CONFIG], NEW_TOKENS, set(), progress=False)
    for hook in hooks:
        hook.remove()
    attend, compute_logits = LoopedAttention.attend, OuroForCausalLM.compute_logits
    theirs, states, forced = iter(past), [], zip(logits, decoded.tokens)
    worst = []

    def attend_with_theirs(self, loop, q, k, v, batch, out):
        for mine, given in zip((k, v), next(theirs)):
            states.append(((mine - given).norm() / given.norm()).item())
            mine.copy_(given)
        attend(self, loop, q, k, v, batch, out)

    def choose_theirs(self, hidden_states):
        own = compute_logits(self, hidden_states)
        expected, token = next(forced)
        worst.append((own[0] - expected).abs().max().item())
        return torch.zeros_like(own).index_fill_(1, torch.tensor(token), 1.0)

    monkeypatch.setattr(LoopedAttention, "attend", attend_with_theirs)
    monkeypatch.setattr(OuroForCausalLM, "compute_logits", choose_theirs)
    assert tokens_of(run(engine, [prompt], GREEDY)) == [decoded.tokens]
    assert len(worst) == NEW_TOKENS and next(theirs, None) is None
    assert max(states) < 1e-5 and max(worst) < 1e-4


def test_tokens_that_fit_by_vllms_own_count(engine):
    config = engine.llm_engine.vllm_config
    shape = load_model(MODEL, device="cpu").kv_shape
    plain = FullAttentionSpec(
        block_size=16, num_kv_heads=shape.kv_heads, head_size=shape.head_dim, dtype=torch.bfloat16
    )
    specs = {f"model.layers.{n}.attn": plain for n in range(shape.loops * shape.layers)}
    (bf16,) = get_kv_cache_configs(config, [specs], [2**30])
    assert config.cache_config.num_gpu_blocks / bf16.num_blocks >= 4.9


def test_pages_can_be_taken_back_and_must_fit(engine):
    layer = engine.llm_engine.vllm_config.compilation_config.static_forward_context["model.layers.0.self_attn.attn"]
    pages = layer.kv_cache
    layer.kv_cache = torch.tensor([])  # as vLLM does when it has measured the memory of CUDA graphs
    assert layer.kv_cache is None
    with pytest.raises(ValueError, match=r"needs pages of \[H, bytes\] = "):
        layer.kv_cache = pages[:, :1]
    layer.kv_cache = pages
    assert layer.kv_cache is pages

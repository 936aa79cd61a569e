"""Huginn in the engine against the package's own decoder and cache, on the shipped model."""

import pytest
import torch
from asking import greedy, run, tokens_of
from torch.nn.functional import scaled_dot_product_attention

from residualquant.attention import PackedAttention
from residualquant.cache import PackedCache
from residualquant.config import preset
from residualquant.engine import iter_decode
from residualquant.evals.tasks import problems
from residualquant.layout import token_bytes
from residualquant.models import load_model
from residualquant.models.base import EDGE
from residualquant.models.loading import model_folder
from residualquant.vllm.attention import LoopedAttention

MODEL = "mini-huginn"
NEW_TOKENS = 4
GREEDY = greedy(NEW_TOKENS)
BUDGET = 512
SETTINGS = {
    "off": None,
    "4 recurrences": {"preset": "INT2/4 g=32", "rotation": "hadamard"},
    "16 recurrences": {"preset": "INT2 g=16", "loops": 16},
}


def config_of(settings):
    fields = dict(settings or {"preset": "BF16"})
    return preset(fields.pop("preset"), **fields)


@pytest.fixture(scope="module")
def reference():
    return load_model(MODEL, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(reference):
    return [reference.tokenizer.encode(p.prompt).ids for p in problems("words", 2, family="huginn")]


@pytest.fixture(scope="module", params=list(SETTINGS))
def served(request, start_engine):
    """(settings, engine)."""
    settings = SETTINGS[request.param]
    extra = {} if settings is None else {"residualquant": settings}
    return settings, start_engine(
        model_folder(MODEL), additional_config=extra, max_model_len=BUDGET, max_num_batched_tokens=BUDGET
    )


class RawAttention:
    """Attention over all tokens so far, raw, at the dtype that they come in."""

    def __init__(self):
        self.kept = {}

    def __call__(self, loop, layer, q, k, v):
        past = self.kept.get((loop, layer), (k[:, :0], v[:, :0]))
        self.kept[loop, layer] = k, v = [torch.cat(pair, 1) for pair in zip(past, (k, v))]
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


def attention_of(settings, model):
    if settings is None:
        return RawAttention()
    return PackedAttention(PackedCache(model.kv_shape, config_of(settings), edge_layers=model.edge_layers))


def test_tokens_are_those_of_the_torch_engine(served, reference, prompts):
    settings, engine = served
    assert engine.reset_prefix_cache()
    decoded = iter_decode(reference, prompts, [config_of(settings)], NEW_TOKENS, set(), progress=False)
    expected = {done.prompt_index: done.tokens for done in decoded}
    assert tokens_of(run(engine, prompts, GREEDY)) == [expected[n] for n in range(len(prompts))]


def test_attention_of_every_step_is_the_reference_also_after_a_prefix_hit(served, reference, prompts, monkeypatch):
    settings, engine = served
    seen, attend = [], LoopedAttention.attend

    def record(self, loop, q, k, v, batch, out):
        attend(self, loop, q, k, v, batch, out)
        where = self.layer_name.split(".")
        seen.append((where[1], int(where[2]), loop, *(x.clone() for x in (q, k, v, out))))

    (prompt,) = prompts[:1]
    hit = (len(prompt) - 1) // 16 * 16
    monkeypatch.setattr(LoopedAttention, "attend", record)
    assert engine.reset_prefix_cache()
    whole = run(engine, [prompt[: hit + 1]], GREEDY)
    first = seen.copy()
    seen.clear()
    again = run(engine, [prompt], GREEDY)
    assert [o.num_cached_tokens for o in (*whole, *again)] == [0, hit]
    # the cache gets the tokens that the pages of the hit hold, then those of the second run
    head = [(*call[:3], *(x[:hit] for x in call[3:])) for call in first if len(call[3]) > 1]
    edge = reference.config.n_layers_in_prelude
    expected = attention_of(settings, reference)
    worst = 0.0
    for part, layer, loop, q, k, v, out in [*head, *seen]:
        where = (loop, layer) if part == "core_block" else (EDGE, layer + edge * (part == "coda"))
        difference = expected(*where, q[None], k[None], v[None])[0] - out
        worst = max(worst, difference.abs().max().item())
    assert len(seen) == NEW_TOKENS * (reference.config.mean_recurrence * reference.kv_shape.layers + 2)
    assert worst < 1e-3


def test_every_token_begins_where_the_plain_model_begins(served, reference):
    positions = torch.arange(40)
    model = served[1].llm_engine.model_executor.driver_worker.worker.get_model()
    assert torch.equal(model.transformer.initial_state(positions), reference.initial_state(positions[None])[0])


def test_pages_take_what_the_arithmetic_says(served, reference):
    settings, engine = served
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    assert {type(layer) for layer in layers} == {LoopedAttention}
    assert [layer.loops for layer in layers] == [1, 32, 32, 1]
    taken = sum(layer.kv_heads * layer.paged.token_bytes for layer in layers)
    config, shape = config_of(settings), reference.kv_shape
    fp32 = 2 if settings is None else 1
    assert taken == fp32 * token_bytes(config, shape, reference.edge_layers)

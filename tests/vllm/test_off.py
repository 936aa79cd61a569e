"""With the codec off the engine must answer as vLLM's own Ouro does, whatever the scheduler does with the requests."""

import random

import pytest
import torch
from vllm import ModelRegistry, SamplingParams

from residualquant.vllm.layers import AttentionLayers

TOLERANCE = 1e-4  # of a log-probability, FP32
BLOCKS = 40  # of 16 tokens: less than eight long requests need
BUDGET = 64  # tokens per step: most prompts are prefilled in chunks


@pytest.fixture(scope="module")
def stock(start_engine, tiny_ouro):
    ModelRegistry.register_model("StockOuroForCausalLM", "vllm.model_executor.models.ouro:OuroForCausalLM")
    overrides = {"architectures": ["StockOuroForCausalLM"]}
    return start_engine(tiny_ouro, hf_overrides=overrides, max_num_batched_tokens=2048, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def ours(start_engine, tiny_ouro):
    return start_engine(
        tiny_ouro, max_num_batched_tokens=BUDGET, num_gpu_blocks_override=BLOCKS, disable_log_stats=False
    )


@pytest.fixture(autouse=True)
def empty_prefix_cache(ours):
    assert ours.reset_prefix_cache()


def prompt(length, seed):
    return random.Random(seed).choices(range(320), k=length)


def greedy(tokens):
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=0)


def run(engine, prompts, params):
    return engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def assert_same(ours, stock):
    for mine, theirs in zip(ours, stock, strict=True):
        for a, b in zip(mine.outputs, theirs.outputs, strict=True):
            assert list(a.token_ids) == list(b.token_ids)
            chosen = ([step[t].logprob for step, t in zip(x.logprobs, x.token_ids)] for x in (a, b))
            assert max(abs(p - q) for p, q in zip(*chosen)) < TOLERANCE


def compare(ours, stock, prompts, params):
    outputs = run(ours, prompts, params)
    assert_same(outputs, run(stock, prompts, params))
    return outputs


def scheduler(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler


def test_the_two_models_are_not_the_same_code(ours, stock):
    names = [type(e.llm_engine.model_executor.driver_worker.worker.get_model()).__module__ for e in (ours, stock)]
    assert names == ["residualquant.vllm.ouro", "vllm.model_executor.models.ouro"]


def test_vllms_own_attention_which_a_gpu_gets(start_engine, tiny_ouro, stock, monkeypatch):
    init = AttentionLayers.__init__

    def as_on_a_gpu(self, *args):
        init(self, *args)
        self._pages = None

    monkeypatch.setattr(AttentionLayers, "__init__", as_on_a_gpu)
    engine = start_engine(tiny_ouro, max_num_batched_tokens=BUDGET)
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context
    assert {type(layer).__name__ for layer in layers.values()} == {"Attention"} and len(layers) == 8
    compare(engine, stock, [prompt(n, n) for n in (1, 16, 100)], greedy(10))


def test_plain(ours, stock):
    compare(ours, stock, [prompt(n, n) for n in (1, 5, 15, 16, 17)], greedy(12))


def test_chunked_prefill(ours, stock):
    compare(ours, stock, [prompt(n, n) for n in (65, 96, 129, 200)], greedy(10))


def test_prefixes_shared_within_one_step(ours, stock):
    shared = prompt(17, "shared")
    outputs = compare(ours, stock, [[*shared, 1, 2, 3], [*shared, 4, 5]], greedy(10))
    early = 16 if torch.cuda.is_available() else 0  # our pages are not written before the step ends, vLLM's are
    assert [o.num_cached_tokens for o in outputs] == [0, early]


def test_prefix_hits_after_free_and_reuse(ours, stock):
    shared = prompt(80, "prefix")
    first = run(ours, [shared], greedy(1))  # one step fills every block, the last one included
    outputs = compare(ours, stock, [[*shared, 1, 2, 3]], greedy(10))
    assert [o[0].num_cached_tokens for o in (first, outputs)] == [0, 80]
    run(ours, [prompt(200, n) for n in range(6)], greedy(4))  # all pages go to others
    outputs = compare(ours, stock, [[*shared, 7]], greedy(10))
    assert outputs[0].num_cached_tokens == 0


def test_prefix_hits_while_the_first_request_runs(ours, stock):
    shared = prompt(33, "running")
    prompts = [shared, prompt(48, "between"), [*shared, 9], [*shared, 8, 7]]
    outputs = compare(ours, stock, prompts, greedy(24))
    assert [o.num_cached_tokens for o in outputs] == [0, 0, 32, 32]


def test_preemption(ours, stock):
    def preemptions():
        (counter,) = (metric for metric in ours.get_metrics() if metric.name == "vllm:num_preemptions")
        return counter.value

    before = preemptions()
    compare(ours, stock, [prompt(50, n) for n in range(8)], greedy(40))
    assert preemptions() > before


def test_sampling_several_with_seeds(ours, stock):
    for seed, length in ((1, 20), (2, 5)):  # three whole prompts fit a step: on a CPU vLLM cannot seed a piece of one
        params = SamplingParams(n=3, seed=seed, temperature=1.0, max_tokens=20, ignore_eos=True, logprobs=0)
        (output,) = compare(ours, stock, [prompt(length, seed)], params)
        assert len({tuple(o.token_ids) for o in output.outputs}) == 3


def test_abort_in_mid_flight(ours, stock):
    engine, prompts = ours.llm_engine, [prompt(60, n) for n in range(4)]
    for n, ids in enumerate(prompts):
        engine.add_request(str(n), {"prompt_token_ids": ids}, greedy(20))
    finished = []
    for step in range(200):
        finished += [o for o in engine.step() if o.finished]
        if step == 3:  # one in the middle of its prompt, one decoding, one not begun
            engine.abort_request(["0", "2"])
        if not engine.has_unfinished_requests():
            break
    finished.sort(key=lambda o: int(o.request_id))
    assert [o.request_id for o in finished] == ["1", "3"]
    assert_same(finished, run(stock, [prompts[1], prompts[3]], greedy(20)))
    free = scheduler(ours).kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == BLOCKS - 1  # vLLM keeps block 0 for padding


def test_two_hundred_requests_that_arrive_at_random(ours, stock):
    rng = random.Random(0)
    prefixes = [prompt(n, f"p{n}") for n in (16, 40, 90)]
    prompts = [rng.choice([[], *prefixes]) + prompt(rng.randint(1, 60), n) for n in range(200)]
    params = [greedy(rng.randint(1, 12)) for _ in prompts]
    engine, waiting, finished = ours.llm_engine, list(range(200)), []
    while waiting or engine.has_unfinished_requests():
        for _ in range(rng.choice([0, 0, 1, 1, 2, 9]) if waiting else 0):
            if waiting:
                n = waiting.pop(0)
                engine.add_request(str(n), {"prompt_token_ids": prompts[n]}, params[n])
        finished += [output for output in engine.step() if output.finished]
    finished.sort(key=lambda output: int(output.request_id))
    assert_same(finished, run(stock, prompts, params))
    assert sum(bool(output.num_cached_tokens) for output in finished) > 50

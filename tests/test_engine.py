"""The batched decode engine against plain decoding on a packed cache, one sequence at a time.

Models are float64 here, so that sums taken in another order flip no code and tokens can be compared exactly.
"""

import dataclasses

import pytest
import torch
from stand_ins import CODECS, ScriptedModel

from residualquant.attention import PackedAttention, attend_prompt, to_bf16
from residualquant.cache import PackedCache
from residualquant.config import KVQuantConfig, preset
from residualquant.engine import Completion, _Decoder, generate, iter_decode
from residualquant.models.ouro import Ouro, OuroConfig
from residualquant.rotation import Rotation

NEW = 10
EOS = {1}
CONFIGS = [
    *CODECS,
    preset("INT2/4 g=32", rotation="oscar"),
    preset("INT2 g=32", sink_tokens=2, recent_tokens=3),
    preset("INT2 g=32", rotation="hadamard", recent_tokens=4),
]


def tiny_model(heads=4, kv_heads=2, loops=4, seed=0):
    torch.manual_seed(seed)
    model = Ouro(OuroConfig(64, 96, 2, heads, kv_heads, 64, 97, total_ut_steps=loops)).double().eval()
    for p in model.requires_grad_(False).parameters():
        if p.dim() > 1:
            p.mul_(4)
    return model


def random_rotations(shape, loops=4, seed=0):
    torch.manual_seed(seed)
    keys = [(g, n, kind) for g in range(shape.loops // loops) for n in range(shape.layers) for kind in "kv"]
    return {
        key: Rotation(torch.linalg.qr(torch.randn(shape.kv_heads, shape.head_dim, shape.head_dim))[0]) for key in keys
    }


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 97, (n,), generator=generator).tolist() for n in (5, 9, 14, 9, 20, 3)]


@torch.no_grad()
def decode_plainly(model, prompt, step, eos=EOS, limit=NEW):
    """Greedy tokens; ``step(ids so far, new ones)`` gives the logits [V] of the last."""
    ids, new, out = list(prompt), list(prompt), []
    while len(out) < limit:
        token = int(step(ids, new).argmax())
        if token in eos:
            break
        out.append(token)
        ids.append(token)
        new = [token]
    return out


def decode_packed(model, prompt, cfg, rotations=None, **kwargs):
    attention = PackedAttention(PackedCache(model.kv_shape, cfg, rotations))

    def step(ids, new):
        positions = torch.arange(len(ids) - len(new), len(ids))[None]
        return model(torch.tensor([new]), positions, attention, last_only=True).logits[0, 0]

    return decode_plainly(model, prompt, step, **kwargs)


def decode_by_prefill(model, prompt, **kwargs):
    """No cache at all: every token runs the whole sequence again, K and V rounded to BF16."""

    def attend(loop, layer, q, k, v):
        return attend_prompt(q, to_bf16(k), to_bf16(v))

    def step(ids, new):
        return model(torch.tensor([ids]), None, attend, last_only=True).logits[0, 0]

    return decode_plainly(model, prompt, step, **kwargs)


def decode_all(model, prompts, configs, limit=NEW, eos=EOS, **kwargs):
    found = {}
    for done in iter_decode(model, prompts, configs, limit, eos, progress=False, **kwargs):
        assert (done.config_index, done.prompt_index) not in found
        found[done.config_index, done.prompt_index] = done.tokens
    assert len(found) == len(prompts) * len(configs)
    return found


@pytest.fixture(scope="module")
def together(model, prompts):
    """All configurations and prompts in one batch."""
    return decode_all(model, prompts, CONFIGS, rotations={7: random_rotations(model.kv_shape)})


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1)], ids=str)
def test_decoding_with_quantisation_off_equals_decoding_without_a_cache(prompts, heads):
    model = tiny_model(*heads)
    found = decode_all(model, prompts, [preset("BF16")])
    for index, prompt in enumerate(prompts):
        assert found[0, index] == decode_by_prefill(model, prompt)


@pytest.mark.parametrize("index", range(len(CONFIGS)), ids=lambda i: f"{i} {CONFIGS[i].label} {CONFIGS[i].rotation}")
def test_the_engine_equals_the_packed_cache_token_for_token(model, prompts, together, index):
    rotations = random_rotations(model.kv_shape) if CONFIGS[index].rotation == "oscar" else None
    for place, prompt in enumerate(prompts):
        assert together[index, place] == decode_packed(model, prompt, CONFIGS[index], rotations)


def test_configurations_do_change_the_tokens(together, prompts):
    """Otherwise the tests above would compare nothing."""
    answers = {tuple(tuple(together[c, p]) for p in range(len(prompts))) for c in range(len(CONFIGS))}
    assert len(answers) >= 6


@pytest.mark.parametrize("index", [0, 2, 4, 8])
def test_a_batch_of_many_configurations_equals_runs_of_one(model, prompts, together, index):
    alone = decode_all(model, prompts, [CONFIGS[index]])
    assert alone == {(0, p): together[index, p] for p in range(len(prompts))}


@pytest.mark.parametrize("limits", [{"max_rows": 1}, {"max_rows": 7}, {"memory_bytes": 1}], ids=str)
def test_small_batches_give_the_same_tokens(model, prompts, together, limits):
    few = [CONFIGS[i] for i in (0, 2, 8)]
    found = decode_all(model, prompts, few, **limits)
    assert found == {(c, p): together[i, p] for c, i in enumerate((0, 2, 8)) for p in range(len(prompts))}


def test_the_plan_keeps_to_rows_and_memory(model, prompts):
    decoder = _Decoder(model, prompts, CONFIGS[:3], NEW, EOS, {})
    assert decoder.plan(None, None) == (1, 6)
    assert decoder.plan(9, None) == (3, 1)
    assert decoder.plan(1, 1) == (1, 1)
    one = 4 * 2 * 4 * 2 * 2 * 64 * 3 * 30
    lanes, per_lane = decoder.plan(6, 2 * one)
    assert lanes * per_lane == 2


def test_sequences_end_at_a_stop_token_and_rows_are_refilled(model, prompts):
    eos = set(range(1, 40))
    configs = [CONFIGS[i] for i in (0, 1, 2, 8)]
    kinds = set()
    for done in iter_decode(model, prompts, configs, 12, eos, max_rows=8, progress=False):
        truth = decode_packed(model, prompts[done.prompt_index], configs[done.config_index], eos=eos, limit=12)
        assert done.tokens == truth
        assert done.finished == (len(truth) < 12)
        kinds.add((done.finished, bool(truth)))
    assert (True, True) in kinds


def test_one_new_token_needs_no_decode_step(model, prompts):
    found = decode_all(model, prompts, CONFIGS[:2], limit=1, eos=set())
    for index, prompt in enumerate(prompts):
        assert found[0, index] == found[1, index] == decode_by_prefill(model, prompt, eos=set(), limit=1)


def test_the_same_call_gives_the_same_completions_in_the_same_order(model, prompts):
    runs = [list(iter_decode(model, prompts, CONFIGS[:4], NEW, {1, 5, 9}, progress=False)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert isinstance(runs[0][0], Completion)


def test_unwanted_pairs_are_left_out_and_change_nothing_else(model, prompts):
    few = CONFIGS[:3]
    whole = {(c.config_index, c.prompt_index): c for c in iter_decode(model, prompts, few, NEW, EOS, progress=False)}
    skip = {(0, 0), (1, 0), (2, 0), (1, 3), (2, 5)}
    rest = list(iter_decode(model, prompts, few, NEW, EOS, progress=False, skip=skip))
    assert {(c.config_index, c.prompt_index): c for c in rest} == {k: c for k, c in whole.items() if k not in skip}
    assert len(rest) == len(whole) - len(skip)


def test_completions_arrive_while_others_are_still_decoded(model, prompts):
    stream = iter_decode(model, prompts, CONFIGS[:2], NEW, set(), max_rows=2, progress=False)
    first = next(stream)
    assert first.prompt_index == 4 and not first.finished  # the longest prompt goes first
    stream.close()


def test_nothing_of_a_bad_token_reaches_other_rows(prompts):
    model = tiny_model()
    clean = decode_all(model, prompts, CONFIGS[:3])
    model.model.embed_tokens.weight[96] = torch.nan
    others = [p for p in range(len(prompts)) if 96 not in prompts[p]]
    assert others
    with pytest.warns(RuntimeWarning, match="of K and V"):
        found = decode_all(model, [*prompts, [5, 96, 7, 96]], CONFIGS[:3])
    for c in range(3):
        for p in others:
            assert found[c, p] == clean[c, p] or 96 in clean[c, p]


def test_unusable_values_are_counted_for_every_configuration():
    """Prompt and decoded tokens, padding and finished rows left out."""
    model = ScriptedModel()
    bad = model.following([5, 8], 2)[1]
    model.tables[0][bad, 0, 0, 0, 0], model.tables[0][bad, 9, 1, 1, 3] = torch.nan, 1e9
    configs = [preset("BF16"), preset("INT2/4 g=32", rotation="hadamard")]
    prompts = [[5, 8], [1, 2, 3, 4, 5]]
    expected = sum((ids + model.following(ids, 4)[:3]).count(bad) for ids in prompts)
    assert 2 * expected > 0
    with pytest.warns(RuntimeWarning) as caught:
        decode_all(model, prompts, configs, limit=4, eos=set())
    assert [str(w.message).partition(" were")[0] for w in caught] == [
        f"{2 * expected} values of K and V under BF16, last, rotation none",
        f"{2 * expected} values of K and V under INT2/4 g=32, last, rotation hadamard",
    ]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompts": []}, "at least one prompt and one configuration are needed, got 0 and 1"),
        ({"configs": []}, "at least one prompt and one configuration are needed, got 1 and 0"),
        ({"prompts": [[3], []]}, "prompt 1 is empty"),
        ({"prompts": [[3, 97]]}, "prompt 0 holds token 97; ids must be below 97"),
        ({"prompts": [[3, -2]]}, "prompt 0 holds token -2"),
        ({"configs": [KVQuantConfig(bits=(2, 2, 4))]}, "bits for 3 loops, got a model of 4 loops"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"configs": [preset("INT2 g=32", layer_bits=((2, (4,) * 4),))]}, "layer_bits names layer 2, got a model of 2"),
        ({"max_rows": 0}, "max_rows must be at least 1, got 0"),
        ({"configs": [preset("INT2 g=32", rotation="optr_h")]}, "no optr_h rotation was given"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_requests_are_refused_before_anything_runs(model, change, message):
    request = {"prompts": [[3, 4]], "configs": [preset("BF16")], "max_new_tokens": 4, "eos_ids": EOS, **change}
    with pytest.raises(ValueError, match=message):
        iter_decode(model, **request)


def test_a_prompt_beyond_the_models_positions_is_refused(model):
    long = tiny_model()
    long.config = dataclasses.replace(model.config, max_position_embeddings=12)
    with pytest.raises(
        ValueError, match="prompt 0 is too long: got 9 tokens, which with 4 new ones exceed the model's 12"
    ):
        iter_decode(long, [[3] * 9], [preset("BF16")], 4, EOS)
    assert len(decode_all(long, [[3] * 8], [preset("BF16")], limit=4)) == 1


@pytest.fixture(scope="module")
def speaking_model():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    model = tiny_model()
    vocab = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 97)}}
    model.tokenizer = Tokenizer(WordLevel(vocab, unk_token="<pad>"))
    model.tokenizer.pre_tokenizer = Whitespace()
    return model


def test_generate_continues_texts(speaking_model):
    texts = ["w5 w9 w33", "w8"]
    ids = [[5, 9, 33], [8]]
    for config in ("BF16", "INT2/4 g=32", preset("INT2 g=32", rotation="hadamard")):
        cfg = preset(config) if isinstance(config, str) else config
        answers = generate(speaking_model, texts, config, max_new_tokens=6)
        truth = [decode_packed(speaking_model, i, cfg, limit=6) for i in ids]
        assert answers == [" ".join(f"w{t}" for t in tokens) for tokens in truth]
    assert generate(speaking_model, texts[1], max_new_tokens=6) == [
        generate(speaking_model, texts, max_new_tokens=6)[1]
    ]


def test_generate_refuses_what_it_cannot_do(model, speaking_model):
    with pytest.raises(ValueError, match="needs a model with a tokenizer"):
        generate(model, "w5")
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        generate(speaking_model, "")
    with pytest.raises(ValueError, match="unknown preset 'INT5'"):
        generate(speaking_model, "w5", "INT5")

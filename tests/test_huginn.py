"""Huginn: its arithmetic against a plain re-statement, its random state, its checkpoint's names, and wrong ones."""

from __future__ import annotations

import json
import math
from statistics import NormalDist

import pytest
import torch
from safetensors.torch import load_file, save_file

from residualquant.errors import ResidualQuantError
from residualquant.evals.tasks import problems
from residualquant.models import Huginn, HuginnConfig, KVShape, load_model, save_model
from residualquant.models.base import EDGE
from residualquant.models.huginn import truncated_normal
from residualquant.models.loading import model_folder

TINY = HuginnConfig(
    n_embd=32,
    n_heads=2,
    intermediate_size=24,
    vocab_size=40,
    n_layers_in_prelude=1,
    n_layers_in_recurrent_block=2,
    n_layers_in_coda=1,
    mean_recurrence=3,
    block_size=64,
)


@pytest.fixture
def model() -> Huginn:
    torch.manual_seed(0)
    model = Huginn(TINY).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if "norm" in name or "ln_f" in name:
            p.copy_(torch.rand_like(p) + 0.5)
        elif "qk_bias" in name:
            p.copy_(torch.randn_like(p))
        else:
            p.mul_(3)
    return model


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    return save_model(Huginn(TINY), tmp_path / "tiny")


def _norm(weight, x):
    return weight * x * (x.pow(2).mean(-1, keepdim=True) + TINY.norm_eps).rsqrt()


def _turn(x):
    """Rotary embedding of x [T, D] by complex multiplication: channel 2i pairs with 2i + 1."""
    angle = torch.arange(len(x)).double()[:, None] * 50_000.0 ** (-torch.arange(0, x.shape[1], 2).double() / x.shape[1])
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


def _block(w: dict, prefix: str, x):
    """One layer on x [T, hidden], written out head by head and token by token."""
    q, k, v = (w[f"{prefix}.attn.Wqkv.weight"] @ _norm(w[f"{prefix}.norm_1.weight"], x).T).T.split(32, dim=-1)
    bias, heads = w[f"{prefix}.attn.qk_bias"], []
    for head, part in enumerate((slice(0, 16), slice(16, 32))):
        qh, kh = _turn(q[:, part] + bias[0, 0, head]), _turn(k[:, part] + bias[1, 0, head])
        rows = [torch.softmax(kh[: t + 1] @ qh[t] / 4, 0) @ v[: t + 1, part] for t in range(len(x))]
        heads.append(torch.stack(rows))
    attended = torch.cat(heads, -1) @ w[f"{prefix}.attn.proj.weight"].T
    x = _norm(w[f"{prefix}.norm_2.weight"], attended + x)
    gate, up = (_norm(w[f"{prefix}.norm_3.weight"], x) @ w[f"{prefix}.mlp.fc.weight"].T).split(24, dim=-1)
    mlp = (gate * torch.sigmoid(gate) * up) @ w[f"{prefix}.mlp.proj.weight"].T
    return _norm(w[f"{prefix}.norm_4.weight"], mlp + x)


def test_logits_are_those_of_the_formulas(model):
    w = {k.removeprefix("transformer."): v.double() for k, v in model.state_dict().items()}
    ids = torch.randint(0, 40, (9,))
    e = _block(w, "prelude.0", w["wte.weight"][ids] * math.sqrt(32))
    s = model.initial_state(torch.arange(9)[None])[0].double()
    for _ in range(3):
        s = torch.cat([s, e], -1) @ w["adapter.weight"].T
        for layer in range(2):
            s = _block(w, f"core_block.{layer}", s)
    x = _norm(w["ln_f.weight"], _block(w, "coda.0", _norm(w["ln_f.weight"], s)))
    expected = (x @ w["wte.weight"].T).float()
    output = model(ids[None])
    torch.testing.assert_close(output.logits[0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(ids[None], last_only=True).logits, output.logits[:, -1:])
    assert output.exit_probabilities is None


def test_attend_sees_the_edge_once_and_the_core_in_every_recurrence(model):
    calls = []

    def attend(loop, layer, q, k, v):
        calls.append((loop, layer))
        assert q.shape == k.shape == v.shape == (2, 5, 2, 16)
        return torch.zeros_like(q)

    model(torch.randint(0, 40, (2, 5)), attend=attend)
    core = [(loop, layer) for loop in range(3) for layer in range(2)]
    assert calls == [(EDGE, 0), *core, (EDGE, 1)]
    assert model.kv_shape == KVShape(3, 2, 2, 16) and model.edge_shape == KVShape(1, 2, 2, 16)


class _Cache:
    """Keys and values of all past tokens, by loop and layer; queries are the newest tokens."""

    def __init__(self):
        self.kept = {}

    def __call__(self, loop, layer, q, k, v):
        past = self.kept.get((loop, layer))
        k, v = (k, v) if past is None else (torch.cat([past[0], k], 1), torch.cat([past[1], v], 1))
        self.kept[loop, layer] = k, v
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def test_decoding_with_a_cache_equals_one_pass(model):
    ids, cache = torch.randint(0, 40, (2, 8)), _Cache()
    logits = [model(ids[:, :5], attend=cache).logits]
    for t in range(5, 8):
        positions = torch.full((2, 1), t)
        logits.append(model(ids[:, t : t + 1], positions, cache).logits)
    logits = torch.cat(logits, 1)
    torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[1:], model(ids[1:]).logits, rtol=1e-4, atol=1e-5)  # nor do neighbours matter


def test_initial_state_is_a_function_of_seed_and_position(model):
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])  # the second row is padded in front
    state = model.initial_state(positions)
    assert torch.equal(state[1, 2:], state[0, :2]) and torch.equal(state[1, 0], state[0, 0])
    assert torch.equal(state[:1, 3:], model.initial_state(torch.tensor([[3]])))
    assert not torch.equal(state[0, 0], state[0, 1])
    other = model.initial_state(positions, torch.tensor([[0], [1]]))
    assert torch.equal(other[0], state[0]) and not torch.equal(other[1], state[1])


def test_truncated_normal_has_the_moments_it_should():
    z = truncated_normal(torch.arange(3)[:, None], torch.arange(400).expand(3, 400), 100).double()
    assert z.abs().max() < 3
    variance = 1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2))
    assert abs(z.mean().item()) < 0.012 and abs(z.var().item() - variance) < 0.02  # 4 standard errors
    assert torch.corrcoef(z.flatten(1)).fill_diagonal_(0).abs().max() < 0.02
    assert torch.corrcoef(z[0].T[:8]).fill_diagonal_(0).abs().max() < 0.2


def _restated_normal(seed: int, position: int, channel: int, channels: int) -> float:
    """The number of (seed, position, channel) in Python's own unbounded integers."""
    word = (1 << 64) - 1

    def mixed(x):
        x = ((x & word) ^ (x & word) >> 30) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ x >> 27) * 0x94D049BB133111EB & word
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    uniform = ((mixed(mixed(seed + golden) + (position * channels + channel) * golden) >> 40) + 0.5) / 2**24
    low, high = NormalDist().cdf(-3), NormalDist().cdf(3)
    return NormalDist().inv_cdf(low + uniform * (high - low))


def test_truncated_normal_is_the_counter_based_one_described():
    seeds, positions = [0, 3, 2**61 + 5], [0, 7, 4095]
    z = truncated_normal(torch.tensor(seeds)[:, None], torch.tensor(positions).expand(3, 3), 6)
    expected = [[[_restated_normal(s, p, c, 6) for c in range(6)] for p in positions] for s in seeds]
    torch.testing.assert_close(z, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_state_has_the_published_scale():
    state = Huginn(TINY).initial_state(torch.arange(500)[None])
    assert abs(state.std().item() - math.sqrt(2 / 5) * 0.9865) < 0.01


def test_only_the_last_recurrences_pass_a_gradient_on(model):
    """The gradient through the last two of five recurrences is that of two recurrences from the state before them."""
    model.requires_grad_(True)
    ids, states, recur = torch.randint(0, 40, (2, 6)), [], model.recur

    def recorded(state, *rest):
        states.append(state)
        return recur(state, *rest)

    def gradients(**loops):
        model.zero_grad()
        model.hidden_states(ids, **loops).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    model.recur = recorded
    truncated = gradients(loops=5, gradient_loops=2)
    assert [s.requires_grad for s in states] == [False, False, False, True, True]
    full = gradients(loops=5)
    model.initial_state = lambda *_: states[3].detach()
    for two, expected in zip(truncated, gradients(loops=2), strict=True):
        torch.testing.assert_close(two, expected)
    assert not all(torch.allclose(a, b) for a, b in zip(truncated, full))


def test_truncation_does_not_change_the_output(model):
    ids = torch.randint(0, 40, (2, 6))
    assert torch.equal(model.hidden_states(ids, loops=5), model.hidden_states(ids, loops=5, gradient_loops=2))
    with pytest.raises(ValueError, match="got 0"):
        model.hidden_states(ids, loops=0)
    with pytest.raises(ValueError, match=r"must be \[B, T\]"):
        model.hidden_states(ids[0])


def test_published_checkpoint_names():
    with torch.device("meta"):
        model = Huginn(HuginnConfig())
    parts = "norm_1.weight norm_2.weight norm_3.weight norm_4.weight attn.Wqkv.weight attn.qk_bias attn.proj.weight"
    blocks = [f"{group}.{n}" for group, count in (("prelude", 2), ("core_block", 4), ("coda", 2)) for n in range(count)]
    expected = {
        f"transformer.{b}.{part}" for b in blocks for part in (*parts.split(), "mlp.fc.weight", "mlp.proj.weight")
    }
    expected |= {f"transformer.{name}.weight" for name in ("wte", "adapter", "ln_f")}
    assert set(model.state_dict()) == expected
    assert sum(p.numel() for p in model.parameters()) == 3_564_976_800  # as published, tied weights counted once
    assert model.state_dict()["transformer.prelude.0.attn.qk_bias"].shape == (2, 1, 55, 96)
    assert model.kv_shape == KVShape(32, 4, 55, 96)
    # what the published files hold besides: in all, 15,645,600,384 bytes of FP32
    derived = sum(math.prod(shape) for shape in model.derived_shapes.values())
    assert 4 * (3_564_976_800 + derived) == 15_645_600_384


def test_saved_model_loads_as_it_was_with_tied_weights_once(folder):
    model = load_model(str(folder), device="cpu", dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    assert model.config == TINY and "lm_head.weight" not in stored
    assert all(torch.equal(model.state_dict()[k], v) for k, v in stored.items())
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["RavenForCausalLM"]


def _add(folder, **tensors):
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")


def test_tensors_that_the_model_derives_are_checked_and_dropped(folder):
    ids = torch.randint(0, 40, (1, 5))
    before = load_model(str(folder), device="cpu")(ids).logits
    _add(folder, **{"lm_head.weight": torch.zeros(40, 32), "freqs_cis": torch.zeros(1, 64, 1, 8, 2)})
    assert torch.equal(load_model(str(folder), device="cpu")(ids).logits, before)
    _add(folder, freqs_cis=torch.zeros(1, 32, 1, 8, 2))
    with pytest.raises(ResidualQuantError, match="freqs_cis has shape"):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"tie_embeddings": False}, "tie_embeddings must be True, got False"),
        ({"injection_type": "add"}, "injection_type must be 'linear', got 'add'"),
        ({"n_heads": 3}, "even multiple of n_heads"),
        ({"n_heads": 0}, "n_heads must be a positive integer, got 0"),
        ({"mean_recurrence": "many"}, "mean_recurrence must be a positive integer, got 'many'"),
        ({"rope_base": -1}, "rope_base must be a positive number"),
        ({"n_layers_in_coda": 10**12}, "implies 1000000000003 layers"),
        ({"n_embd": 64}, "has shape"),
        ({"padded_vocab_size": 48}, "has shape"),
        ({"model_type": "raven"}, "model_type is 'raven', expected one of"),
    ],
)
def test_unusable_configuration_is_refused_in_one_sentence(folder, values, sentence):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    with pytest.raises(ResidualQuantError, match=sentence):
        load_model(str(folder), device="cpu")


def test_the_shipped_mini_solves_problems_and_its_state_converges():
    model = load_model("mini-huginn", device="cpu")
    assert model.kv_shape == KVShape(32, 2, 3, 96) and model.edge_shape == KVShape(1, 2, 3, 96)
    assert (model_folder("mini-huginn") / "model.safetensors").stat().st_size <= 8 << 20
    (problem,) = problems("words", 1, level=2)
    prompt, solution = (model.tokenizer.encode(text).ids for text in (problem.prompt, problem.solution))
    ids = torch.tensor([prompt + solution])
    logits = model(ids[:, :-1]).logits[0, len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == solution
    shallow = model(ids[:, :-1], loops=16).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(shallow, logits, rtol=0, atol=1e-2)


@pytest.mark.gpu
def test_the_state_is_the_same_on_a_gpu():
    seeds, positions = torch.arange(4)[:, None], torch.arange(500).expand(4, 500)
    assert torch.equal(
        truncated_normal(seeds, positions, 96), truncated_normal(seeds.cuda(), positions.cuda(), 96).cpu()
    )

"""Ouro: its arithmetic against a plain re-statement, its checkpoint's names, and checkpoints that must be refused."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from residualquant.errors import ResidualQuantError
from residualquant.evals.tasks import MODELS
from residualquant.models import KVShape, Ouro, OuroConfig, load_model, save_model
from residualquant.models.loading import model_folder

TINY = OuroConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=40,
    total_ut_steps=3,
)


@pytest.fixture
def model() -> Ouro:
    torch.manual_seed(0)
    model = Ouro(TINY).double().eval().requires_grad_(False)
    for norm in (m for m in model.modules() if type(m).__name__ == "RMSNorm"):
        norm.weight.copy_(torch.rand_like(norm.weight) + 0.5)
        norm.forward = lambda x, w=norm.weight: w * x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    return model


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    return save_model(Ouro(TINY), tmp_path / "tiny")


def _turn(x, theta: float):
    """Rotary embedding of x [T, H, D] by complex multiplication: channel i pairs with i + D/2."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x)).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def _restated(model: Ouro, ids) -> list:
    """Hidden states after each loop, one sequence, written out token by token and head by head."""
    h, states = model.model.embed_tokens(ids), []
    for _ in range(TINY.total_ut_steps):
        for layer in model.model.layers:
            a, x = layer.self_attn, layer.input_layernorm(h)
            q, k = (_turn(p(x).view(len(ids), -1, 16), TINY.rope_theta) for p in (a.q_proj, a.k_proj))
            v = a.v_proj(x).view(len(ids), -1, 16)
            heads = []
            for head in range(4):
                kv = head // 2
                rows = []
                for t in range(len(ids)):
                    weights = torch.softmax(k[: t + 1, kv] @ q[t, head] / 4, 0)
                    rows.append(weights @ v[: t + 1, kv])
                heads.append(torch.stack(rows))
            h = h + layer.input_layernorm_2(a.o_proj(torch.cat(heads, -1)))
            x = layer.post_attention_layernorm(h)
            m = layer.mlp
            h = h + layer.post_attention_layernorm_2(
                m.down_proj(torch.nn.functional.silu(m.gate_proj(x)) * m.up_proj(x))
            )
        h = model.model.norm(h)
        states.append(h)
    return states


def test_forward_is_sandwich_norms_rotary_and_a_norm_after_every_loop(model):
    ids = torch.randint(0, 40, (9,))
    ours = model.hidden_states(ids[None])
    for mine, restated in zip(ours, _restated(model, ids), strict=True):
        torch.testing.assert_close(mine[0], restated, rtol=1e-5, atol=1e-6)
    output = model(ids[None])
    torch.testing.assert_close(output.logits[0], model.lm_head(ours[-1])[0].float())
    torch.testing.assert_close(model(ids[None], last_only=True).logits, output.logits[:, -1:])


def test_exit_probabilities_follow_the_gate_and_sum_to_one(model):
    ids = torch.randint(0, 40, (2, 5))
    gates = [torch.sigmoid(model.model.early_exit_gate(h)[..., 0]) for h in model.hidden_states(ids)]
    expected = torch.stack([gates[0], (1 - gates[0]) * gates[1], (1 - gates[0]) * (1 - gates[1])]).float()
    torch.testing.assert_close(model(ids).exit_probabilities, expected)


def test_fewer_loops_are_a_prefix_of_more(model):
    ids = torch.randint(0, 40, (1, 6))
    for short, full in zip(model.hidden_states(ids, loops=2), model.hidden_states(ids)):
        assert torch.equal(short, full)
    with pytest.raises(ValueError, match="got 0"):
        model.hidden_states(ids, loops=0)


def test_attend_sees_every_loop_and_layer_with_its_own_keys(model):
    seen = {}

    def attend(loop, layer, q, k, v):
        seen[loop, layer] = (q.shape, k, v)
        return torch.zeros_like(q)

    model(torch.randint(0, 40, (2, 5)), attend=attend)
    assert sorted(seen) == [(loop, layer) for loop in range(3) for layer in range(2)]
    assert seen[0, 0][0] == (2, 5, 4, 16) and seen[0, 0][1].shape == (2, 5, 2, 16)
    assert not torch.equal(seen[0, 0][1], seen[1, 0][1])


def test_kv_shape_and_bytes(model):
    assert model.kv_shape == KVShape(3, 2, 2, 16)
    assert model.kv_bytes_per_token() == 2 * 3 * 2 * 2 * 16 * 2
    assert Ouro.kv_bytes_per_token(model, 3.09375) == 2 * 3 * 2 * 2 * 16 * 3.09375 / 8


def test_published_checkpoint_names():
    with torch.device("meta"):
        names = Ouro(OuroConfig()).state_dict()
    layer = (
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj "
        "input_layernorm input_layernorm_2 post_attention_layernorm post_attention_layernorm_2"
    ).split()
    expected = {f"model.layers.{n}.{part}.weight" for n in range(24) for part in layer}
    expected |= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    expected |= {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    assert set(names) == expected
    assert round(sum(v.numel() for v in names.values()) / 1e9, 1) == 1.4


def test_saved_model_loads_as_it_was(folder):
    model = load_model(str(folder), device="cpu", dtype=torch.bfloat16)
    assert model.config == TINY and model.name == "tiny" and len(model.weights_hash) == 64
    for key, value in load_file(folder / "model.safetensors").items():
        assert torch.equal(model.state_dict()[key], value)
    assert load_model(str(folder), device="cpu").weights_hash == model.weights_hash


@pytest.mark.parametrize("name", ["mini-ouro-maths", "mini-huginn"])
def test_loading_draws_no_values_and_does_without_torchs_compiler(name):
    code = f"import sys; from residualquant import load_model; load_model({name!r}, device='cpu')"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch._dynamo' in sys.modules)"], check=True)


def test_shipped_minis_are_as_small_as_promised_and_know_their_tokenizer():
    for name in dict.fromkeys(MODELS["ouro"].values()):
        model = load_model(name, device="cpu")
        assert model.kv_shape == KVShape(4, 4, 2, 128)
        assert sum(p.numel() for p in model.parameters()) < 4e6
        assert model.tokenizer.get_vocab_size() == model.config.vocab_size


@pytest.mark.parametrize("name", ["mini-ouro-maths", "mini-ouro-code", "mini-huginn"])
def test_shipped_minis_tell_a_server_their_end_token_as_saving_does(name, tmp_path):
    model = load_model(name, device="cpu")
    shipped = (model_folder(name) / "generation_config.json").read_text()
    assert set(json.loads(shipped)["eos_token_id"]) == model.stop_ids
    assert shipped == (save_model(model, tmp_path, model.tokenizer) / "generation_config.json").read_text()


def _rewrite(folder, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def _store_as_integers(folder) -> None:
    _rewrite(folder, lambda w: w.update({"lm_head.weight": w["lm_head.weight"].int()}))


def _set(config: dict):
    def change(folder) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))

    return change


def _truncate(folder) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_truncate, "truncated or not safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x80\x02pickle"), "truncated or not safetensors"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no .safetensors file"),
        (lambda f: _rewrite(f, lambda w: w.pop("model.norm.weight")), "lacks 'model.norm.weight'"),
        (lambda f: _rewrite(f, lambda w: w.update(extra=torch.zeros(1))), "unknown tensor 'extra'"),
        (lambda f: _rewrite(f, lambda w: w["lm_head.weight"].fill_(float("nan"))), "not finite"),
        (_set({"hidden_size": 64}), "has shape"),
        (_set({"model_type": "llama"}), "model_type is 'llama'"),
        (_set({"num_attention_heads": 3}), "multiple of num_key_value_heads"),
        (_set({"num_hidden_layers": "two"}), "'two'"),
        (_set({"num_hidden_layers": 10**12}), "implies 1000000000000 layers"),
        (_set({"num_attention_heads": -1, "num_key_value_heads": -1}), "positive integer, got -1"),
        (_set({"hidden_size": True}), "positive integer, got True"),
        (_set({"rope_theta": "x"}), "rope_theta must be a positive number"),
        (_set({"rms_norm_eps": float("nan")}), "rms_norm_eps must be a positive number"),
        (_set({"max_position_embeddings": [1]}), "max_position_embeddings must be a positive integer"),
        (_store_as_integers, "is stored as torch.int32"),
        (_set({"num_key_value_heads": 0}), "config.json of tiny cannot be used"),
        (lambda f: (f / "config.json").write_text("{"), "config.json of tiny cannot be used"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json of tiny cannot be used"),
    ],
)
def test_unusable_checkpoint_is_refused_in_one_sentence(folder, damage, sentence):
    damage(folder)
    with pytest.raises(ResidualQuantError, match=sentence) as error:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(error.value)


def test_unknown_model_names_those_that_are_here():
    with pytest.raises(ResidualQuantError, match=r"no model 'mini'.*mini-ouro-code"):
        load_model("mini", device="cpu")


def test_missing_gpu_is_said():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ResidualQuantError, match="no CUDA GPU"):
        load_model("mini-ouro-maths", device="cuda")


@pytest.mark.parametrize("device", ["tpu", "mps", "meta"])
def test_unknown_device_is_named(device):
    with pytest.raises(ValueError, match=f"device must be cpu or cuda, got '{device}'"):
        load_model("mini-ouro-maths", device=device)


def test_a_full_disk_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResidualQuantError, match=r"model\.safetensors could not be written \(No space left"):
        save_model(Ouro(TINY), tmp_path / "tiny")
    assert not list((tmp_path / "tiny").iterdir())

"""A looped Llama in the form this package needs: grouped queries, and the same layers run more than once.

Every loop adds the embedding to the state it is given. ``docs/bring_your_own_model.md`` goes through this file step by
step; running it checks the model, on random weights.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residualquant.attention import attend_prompt, to_bf16
from residualquant.config import preset
from residualquant.engine import generate, iter_decode
from residualquant.models.base import KVShape, LoopedModel, LoopedOutput, RMSNorm, causal_attention
from residualquant.models.ouro import apply_rotary, rotary_tables


@dataclass(frozen=True)
class LoopedLlamaConfig:
    vocab_size: int
    hidden_size: int = 96
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    loops: int = 2
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 4096


class Layer(nn.Module):
    def __init__(self, c: LoopedLlamaConfig):
        super().__init__()
        self.head_dim, width, heads = c.head_dim, c.hidden_size, c.num_attention_heads * c.head_dim
        self.q, self.o = nn.Linear(width, heads, bias=False), nn.Linear(heads, width, bias=False)
        self.k, self.v = (nn.Linear(width, c.num_key_value_heads * c.head_dim, bias=False) for _ in "kv")
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        self.attention_norm, self.mlp_norm = RMSNorm(width, 1e-5), RMSNorm(width, 1e-5)

    def forward(self, h: Tensor, rotary: tuple[Tensor, Tensor], attend) -> Tensor:
        x = self.attention_norm(h)
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q, self.k, self.v))
        out = attend(apply_rotary(q, rotary), apply_rotary(k, rotary), v)  # the cache sees keys after RoPE
        h = h + self.o(out.flatten(-2).to(h.dtype))
        x = self.mlp_norm(h)
        return h + self.down(F.silu(self.gate(x)) * self.up(x))


class LoopedLlama(LoopedModel):
    name, family = "looped-llama", "ouro"

    def __init__(self, config: LoopedLlamaConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, 1e-5)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def kv_shape(self) -> KVShape:
        c = self.config
        return KVShape(c.loops, c.num_hidden_layers, c.num_key_value_heads, c.head_dim)

    def output_weight(self, layer: int) -> Tensor:
        """W_O of a layer, [hidden, Hq D]: calibration weighs attention errors with it."""
        return self.layers[layer].o.weight

    def forward(self, ids, positions=None, attend=None, loops=None, last_only=False) -> LoopedOutput:
        attend = causal_attention if attend is None else attend
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        rotary = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        embedded = self.embed(ids)
        h = torch.zeros_like(embedded)
        for loop in range(self.config.loops if loops is None else loops):
            h = h + embedded
            for index, layer in enumerate(self.layers):
                h = layer(h, rotary, lambda q, k, v, r=loop, n=index: attend(r, n, q, k, v))
        return LoopedOutput(self.lm_head(self.norm(h[:, -1:] if last_only else h)).float())


def build(tokenizer, seed: int = 0) -> LoopedLlama:
    """A looped Llama of random weights that reads and writes with ``tokenizer``; load yours here instead."""
    torch.manual_seed(seed)
    model = LoopedLlama(LoopedLlamaConfig(tokenizer.get_vocab_size())).eval().requires_grad_(False)
    stored = b"".join(x.contiguous().numpy().tobytes() for x in model.state_dict().values())
    model.tokenizer, model.weights_hash = tokenizer, hashlib.sha256(stored).hexdigest()
    return model


@torch.no_grad()
def decode_twice(model: LoopedModel, prompt: list[int], new: int = 16) -> tuple[list[int], list[int]]:
    """``new`` greedy tokens from the cache with the codec off, and from a full forward pass per token: the same."""

    def attend(loop, layer, q, k, v):
        return attend_prompt(q, to_bf16(k), to_bf16(v))  # a cache holds BF16

    full = list(prompt)
    for _ in range(new):
        full.append(int(model(torch.tensor([full]), attend=attend).logits[0, -1].argmax()))
    off = preset("BF16", loops=model.kv_shape.loops)
    (done,) = iter_decode(model, [list(prompt)], [off], new, set(), progress=False)
    return done.tokens, full[len(prompt) :]


if __name__ == "__main__":
    from residualquant import load_model

    llama = build(load_model("mini-ouro-maths").tokenizer)
    cached, uncached = decode_twice(llama.double(), llama.tokenizer.encode("Adam has 3 apples").ids)
    print("decoding with the cache equals decoding without one:", cached == uncached)
    print(generate(llama, "Adam has 3 apples", "INT2/4 g=32", max_new_tokens=16))

"""Huginn (the recurrent-depth language model of the paper's Sec. 2.2) in plain PyTorch.

A prelude turns tokens into e; a core of few layers runs again and again on a state s that starts as noise, each time
from an adapter's mix of s and e; a coda turns the last state into logits. Every recurrence is a loop of the KV cache;
prelude and coda run once and are the model's edge (:mod:`residualquant.models.base`).

Parameter names are those of the published checkpoint (``transformer.core_block.N.attn.Wqkv.weight`` …).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residualquant.models.base import EDGE, Attend, KVShape, LoopedModel, LoopedOutput, RMSNorm, causal_attention

# what config.json may say about the architecture's variants, and the only value implemented
FIXED = {
    "bias": False,
    "block_class_name": "SandwichBlock",
    "injection_type": "linear",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "norm_class_name": "RMSNorm_llama",
    "qk_bias": True,
    "state_init": "like-init",
    "tie_embeddings": True,
}
STATE_CUT = 3.0  # the initial state is a normal variable kept within this many standard deviations


@dataclass(frozen=True)
class HuginnConfig:
    """Architecture of a Huginn checkpoint, in the field names of its ``config.json``."""

    n_embd: int = 5280
    n_heads: int = 55
    intermediate_size: int = 17920
    vocab_size: int = 65536
    n_layers_in_prelude: int = 2
    n_layers_in_recurrent_block: int = 4
    n_layers_in_coda: int = 2
    mean_recurrence: int = 32
    rope_base: float = 50_000.0
    norm_eps: float = 1e-6
    block_size: int = 4096
    model_type: str = "huginn_raven"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name} must be a positive integer, got {value!r}")
        if self.n_embd % (2 * self.n_heads):
            raise ValueError(
                f"n_embd must be an even multiple of n_heads (rotary embeddings turn pairs of channels), "
                f"got {self.n_embd} and {self.n_heads}"
            )

    @classmethod
    def from_dict(cls, values: dict) -> HuginnConfig:
        """The fields of this class found in ``values``; training and generation settings are ignored.

        Raises:
            ValueError: a variant of the architecture that is not implemented.
        """
        for name, only in FIXED.items():
            if values.get(name, only) != only:
                raise ValueError(f"{name} must be {only!r}, got {values[name]!r}")
        known = {f.name for f in fields(cls)}
        values = {**values, "vocab_size": values.get("padded_vocab_size", values.get("vocab_size"))}
        return cls(**{k: v for k, v in values.items() if k in known and v is not None})

    def to_dict(self) -> dict:
        return asdict(self) | {"padded_vocab_size": self.vocab_size, "n_layers": self.num_hidden_layers} | FIXED

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_heads

    @property
    def num_attention_heads(self) -> int:
        return self.n_heads

    @property
    def num_hidden_layers(self) -> int:
        """Layers that have weights of their own."""
        return self.n_layers_in_prelude + self.n_layers_in_recurrent_block + self.n_layers_in_coda

    @property
    def max_position_embeddings(self) -> int:
        return self.block_size

    @property
    def init_std(self) -> float:
        """Standard deviation sqrt(2 / (5 n_embd)) of new weights and, before scaling, of the initial state."""
        return math.sqrt(2 / (5 * self.n_embd))

    @property
    def embed_scale(self) -> float:
        """Factor sqrt(n_embd) on embeddings and on the initial state."""
        return math.sqrt(self.n_embd)


def rotary_tables(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, 1, D/2] FP32 at ``positions`` [B, T]: pair i turns by position * base^(-2i/D)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None, None].float() * base**-exponents
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the neighbouring channels (2i, 2i + 1) of ``x`` [B, T, H, D], in FP32; same dtype back."""
    cos, sin = tables
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


# the constants of splitmix64 as int64, whose arithmetic wraps
GOLDEN, MIX = 0x9E3779B97F4A7C15 - (1 << 64), (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def _hash(x: Tensor) -> Tensor:
    """A well-mixed int64 for every int64 but 0: the finaliser of splitmix64."""
    for shift, factor in zip((30, 27), MIX):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def truncated_normal(seeds: Tensor, positions: Tensor, channels: int) -> Tensor:
    """Standard normal numbers within ±3 [B, T, channels] FP32, each a function of (seed, position, channel) alone.

    Args:
        seeds: int64, broadcast against ``positions``.
        positions: [B, T] int64.
    """
    counter = positions[..., None] * channels + torch.arange(channels, device=positions.device)
    bits = _hash(_hash(seeds + GOLDEN)[..., None] + counter * GOLDEN)
    # FP64 and one rounding: CPU and GPU round their FP32 erfinv differently
    uniform = (((bits >> 40) & ((1 << 24) - 1)).double() + 0.5) / (1 << 24)
    within = math.erf(STATE_CUT / math.sqrt(2))
    return (math.sqrt(2) * torch.erfinv((2 * uniform - 1) * within)).float()


class HuginnAttention(nn.Module):
    def __init__(self, c: HuginnConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.Wqkv = nn.Linear(c.n_embd, 3 * c.n_embd, bias=False)
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, c.n_heads, c.head_dim))
        self.proj = nn.Linear(c.n_embd, c.n_embd, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Callable[..., Tensor]) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.Wqkv(x).chunk(3, dim=-1))
        q, k = (apply_rotary((y + bias).to(y.dtype), rotary) for y, bias in zip((q, k), self.qk_bias))
        return self.proj(attend(q, k, v).flatten(-2).to(x.dtype))


class HuginnMLP(nn.Module):
    def __init__(self, c: HuginnConfig):
        super().__init__()
        self.fc = nn.Linear(c.n_embd, 2 * c.intermediate_size, bias=False)
        self.proj = nn.Linear(c.intermediate_size, c.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class HuginnBlock(nn.Module):
    """One layer; the norms after its sub-blocks follow the residual sum (sandwich norm)."""

    def __init__(self, c: HuginnConfig):
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3, self.norm_4 = (RMSNorm(c.n_embd, c.norm_eps) for _ in range(4))
        self.attn = HuginnAttention(c)
        self.mlp = HuginnMLP(c)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Callable[..., Tensor]) -> Tensor:
        x = self.norm_2(self.attn(self.norm_1(x), rotary, attend) + x)
        return self.norm_4(self.mlp(self.norm_3(x)) + x)


class HuginnTrunk(nn.Module):
    """Everything under ``transformer.`` in the checkpoint."""

    def __init__(self, c: HuginnConfig):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.prelude = nn.ModuleList(HuginnBlock(c) for _ in range(c.n_layers_in_prelude))
        self.adapter = nn.Linear(2 * c.n_embd, c.n_embd, bias=False)
        self.core_block = nn.ModuleList(HuginnBlock(c) for _ in range(c.n_layers_in_recurrent_block))
        self.coda = nn.ModuleList(HuginnBlock(c) for _ in range(c.n_layers_in_coda))
        self.ln_f = RMSNorm(c.n_embd, c.norm_eps)


_plain_attention = partial(causal_attention, EDGE)  # one object for all loops: compiled code is not specialised


class Huginn(LoopedModel):
    """A recurrent-depth language model. See the module's docstring; build one with `residualquant.load_model`."""

    name = family = "huginn"
    state_seed = 0  # of the initial state at inference: with it, decoding token by token equals one pass

    def __init__(self, config: HuginnConfig):
        super().__init__()
        self.config = config
        self.transformer = HuginnTrunk(config)
        self.edge_layers = config.n_layers_in_prelude + config.n_layers_in_coda
        self._initialise()

    def _initialise(self) -> None:
        """Huginn's initialisation, but for the adapter."""
        c = self.config
        depth = self.edge_layers + c.n_layers_in_recurrent_block * c.mean_recurrence
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = c.init_std / math.sqrt(2 * depth) if name.endswith("proj.weight") else c.init_std
                nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std)
        # a small model learns sooner when what one recurrence writes is where the next one reads it
        halves = self.transformer.adapter.weight.detach().chunk(2, dim=1)
        for half in halves:
            half.mul_(0.1).diagonal().add_(math.sqrt(0.5))

    @property
    def lm_head(self) -> nn.Embedding:
        """The embedding: input and output weights are one."""
        return self.transformer.wte

    @property
    def kv_shape(self) -> KVShape:
        c = self.config
        return KVShape(c.mean_recurrence, c.n_layers_in_recurrent_block, c.n_heads, c.head_dim)

    def output_weight(self, layer: int) -> Tensor:
        return self.transformer.core_block[layer].attn.proj.weight

    @property
    def derived_shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        return {
            "lm_head.weight": (c.vocab_size, c.n_embd),
            "freqs_cis": (1, c.block_size, 1, c.head_dim // 2, 2),
        }

    def begin(
        self, ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The prelude: e [B, T, n_embd] and the rotary tables of ``positions``. ``attend(layer, q, k, v)``."""
        c = self.config
        rotary = rotary_tables(positions, c.head_dim, c.rope_base)
        x = self.transformer.wte(ids) * c.embed_scale
        for index, block in enumerate(self.transformer.prelude):
            x = block(x, rotary, partial(attend, index))
        return x, rotary

    def initial_state(self, positions: Tensor, seeds: Tensor | None = None) -> Tensor:
        """State s before the first recurrence [B, T, n_embd] FP32: truncated normal, drawn anew for each position.

        Args:
            positions: [B, T] int64.
            seeds: [B, 1] int64; ``state_seed`` for every row when None.
        """
        if seeds is None:
            seeds = torch.full_like(positions[:, :1], self.state_seed)
        scale = self.config.init_std * self.config.embed_scale
        return truncated_normal(seeds, positions, self.config.n_embd) * scale

    def recur(self, state: Tensor, e: Tensor, rotary: tuple[Tensor, Tensor], attend: Callable[..., Tensor]) -> Tensor:
        """One recurrence: s = core(adapter([s, e])), [B, T, n_embd]. ``attend(layer, q, k, v)``."""
        x = self.transformer.adapter(torch.cat([state, e], dim=-1))
        for index, block in enumerate(self.transformer.core_block):
            x = block(x, rotary, partial(attend, index))
        return x

    def finish(self, state: Tensor, rotary: tuple[Tensor, Tensor], attend: Callable[..., Tensor]) -> Tensor:
        """The coda, with the final norm before and after it, [B, T, n_embd]. ``attend(layer, q, k, v)``."""
        x = self.transformer.ln_f(state)
        for index, block in enumerate(self.transformer.coda, start=self.config.n_layers_in_prelude):
            x = block(x, rotary, partial(attend, index))
        return self.transformer.ln_f(x)

    def hidden_states(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        attend: Attend | None = None,
        loops: int | None = None,
        gradient_loops: int | None = None,
        seeds: Tensor | None = None,
    ) -> Tensor:
        """Normed hidden states [B, T, n_embd] after the coda.

        Args:
            ids, positions, attend, loops: as in :class:`LoopedModel`.
            gradient_loops: only this many recurrences, the last, pass a gradient on; all when None.
            seeds: [B, 1] int64 of the initial state; ``state_seed`` when None.

        Raises:
            ValueError: ids that are not [B, T], or a loop count below 1.
        """
        if ids.dim() != 2:
            raise ValueError(f"ids must be [B, T], got shape {tuple(ids.shape)}")
        loops = self.config.mean_recurrence if loops is None else loops
        if loops < 1:
            raise ValueError(f"loops must be at least 1, got {loops}")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)

        def attend_in(loop: int) -> Callable[..., Tensor]:
            return _plain_attention if attend is None else partial(attend, loop)

        e, rotary = self.begin(ids, positions, attend_in(EDGE))
        state = self.initial_state(positions, seeds).to(e.dtype)
        without = 0 if gradient_loops is None else max(0, loops - gradient_loops)
        with torch.no_grad():
            for loop in range(without):
                state = self.recur(state, e.detach(), rotary, attend_in(loop))
        if e.requires_grad:
            state.requires_grad_()  # every recurrence with a gradient is then the same graph, compiled once
        for loop in range(without, loops):
            state = self.recur(state, e, rotary, attend_in(loop))
        return self.finish(state, rotary, attend_in(EDGE))

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        attend: Attend | None = None,
        loops: int | None = None,
        last_only: bool = False,
    ) -> LoopedOutput:
        """Logits after the last recurrence, of every token or (``last_only``) of the last one. Arguments as above."""
        x = self.hidden_states(ids, positions, attend, loops)
        return LoopedOutput(F.linear(x[:, -1:] if last_only else x, self.lm_head.weight).float())

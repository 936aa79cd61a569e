"""Ouro (the looped language model of the paper's Sec. 2.2) in plain PyTorch.

The same N layers run L times ("loops"). The final norm follows every loop; its output feeds the next loop, the
exit gate and, after the last loop, the language-model head.

Parameter names are those of the published checkpoints (``model.layers.N.self_attn.q_proj.weight`` …).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residualquant.models.base import Attend, KVShape, LoopedModel, LoopedOutput, RMSNorm, causal_attention


@dataclass(frozen=True)
class OuroConfig:
    """Architecture of an Ouro checkpoint, in the field names of its ``config.json``."""

    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 128
    vocab_size: int = 49152
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    total_ut_steps: int = 4
    early_exit_threshold: float = 1.0
    max_position_embeddings: int = 65536
    model_type: str = "ouro"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "total_ut_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    @classmethod
    def from_dict(cls, values: dict) -> OuroConfig:
        """The fields of this class found in ``values``; others (training or generation settings) are ignored."""
        known = {f.name for f in fields(cls)}
        values = {"head_dim": values.get("hidden_size", 0) // max(1, values.get("num_attention_heads", 1)), **values}
        return cls(**{k: v for k, v in values.items() if k in known and v is not None})

    def to_dict(self) -> dict:
        return asdict(self)


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, 1, D] FP32 of split-half rotary embeddings at ``positions`` [B, T]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None, None].float() * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + D/2) of ``x`` [B, T, H, D]; same dtype back."""
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return (x * cos.to(x.dtype)) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


class OuroAttention(nn.Module):
    def __init__(self, c: OuroConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Callable[..., Tensor]) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = attend(apply_rotary(q, rotary), apply_rotary(k, rotary), v)
        return self.o_proj(out.flatten(-2).to(x.dtype))


class OuroMLP(nn.Module):
    def __init__(self, c: OuroConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class OuroLayer(nn.Module):
    """One layer with norms before and after each sub-block (sandwich norm)."""

    def __init__(self, c: OuroConfig):
        super().__init__()
        self.self_attn = OuroAttention(c)
        self.mlp = OuroMLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.input_layernorm_2 = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm_2 = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, h: Tensor, rotary: tuple[Tensor, Tensor], attend: Callable[..., Tensor]) -> Tensor:
        h = h + self.input_layernorm_2(self.self_attn(self.input_layernorm(h), rotary, attend))
        return h + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(h)))


class OuroTrunk(nn.Module):
    """Embedding, layers, final norm and exit gate: everything under ``model.`` in the checkpoint."""

    def __init__(self, c: OuroConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(OuroLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.early_exit_gate = nn.Linear(c.hidden_size, 1)


class Ouro(LoopedModel):
    """A looped language model. See the module's docstring; build one with :func:`residualquant.load_model`."""

    name = family = "ouro"

    def __init__(self, config: OuroConfig):
        super().__init__()
        self.config = config
        self.model = OuroTrunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def output_weight(self, layer: int) -> Tensor:
        return self.model.layers[layer].self_attn.o_proj.weight

    @property
    def kv_shape(self) -> KVShape:
        c = self.config
        return KVShape(c.total_ut_steps, c.num_hidden_layers, c.num_key_value_heads, c.head_dim)

    def hidden_states(
        self, ids: Tensor, positions: Tensor | None = None, attend: Attend | None = None, loops: int | None = None
    ) -> list[Tensor]:
        """Normed hidden states [B, T, hidden] after each loop.

        Args:
            ids: [B, T] int64 token ids.
            positions: [B, T] int64; 0 … T-1 when None. The same positions are used in every loop.
            attend: called as ``attend(loop, layer, q, k, v)`` with q [B, T, Hq, D] and k, v [B, T, H, D], post-RoPE;
                returns [B, T, Hq, D]. None: causal attention among the tokens given.
            loops: how many loops to run; ``config.total_ut_steps`` when None.

        Raises:
            ValueError: ids that are not [B, T], or a loop count below 1.
        """
        if ids.dim() != 2:
            raise ValueError(f"ids must be [B, T], got shape {tuple(ids.shape)}")
        loops = self.config.total_ut_steps if loops is None else loops
        if loops < 1:
            raise ValueError(f"loops must be at least 1, got {loops}")
        attend = causal_attention if attend is None else attend
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        rotary = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        h, states = self.model.embed_tokens(ids), []
        for loop in range(loops):
            for index, layer in enumerate(self.model.layers):
                h = layer(h, rotary, lambda q, k, v, r=loop, n=index: attend(r, n, q, k, v))
            h = self.model.norm(h)
            states.append(h)
        return states

    def exit_probabilities(self, states: list[Tensor]) -> Tensor:
        """Probability [L, B, T] of leaving after each loop (reported only: all loops always run)."""
        gates = torch.stack([torch.sigmoid(self.model.early_exit_gate(h).squeeze(-1).float()) for h in states])
        stay = torch.cumprod(torch.cat([torch.ones_like(gates[:1]), 1 - gates[:-1]]), dim=0)
        return torch.cat([stay[:-1] * gates[:-1], stay[-1:]])

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        attend: Attend | None = None,
        loops: int | None = None,
        last_only: bool = False,
    ) -> LoopedOutput:
        """Logits after the last loop, of every token or (``last_only``) of the last one. Arguments as above."""
        states = self.hidden_states(ids, positions, attend, loops)
        if last_only:
            states = [h[:, -1:] for h in states]
        return LoopedOutput(self.lm_head(states[-1]).float(), self.exit_probabilities(states))

"""Huginn (the paper's Sec. 2.2) over vLLM's layers: every recurrence is a loop of the core's KV cache.

Prelude and coda run once; where the core is packed, they are coded directly at INT4 g=32. The initial state of a token
depends on its position alone, so a token has the state it has in :class:`residualquant.models.huginn.Huginn`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix
from vllm.model_executor.utils import set_weight_attrs
from vllm.sequence import IntermediateTensors

from residualquant.models.huginn import Huginn, HuginnConfig, apply_rotary, rotary_tables, truncated_normal
from residualquant.vllm.causal_lm import LoopedLM
from residualquant.vllm.layers import AttentionLayers

Rotary = tuple[Tensor, Tensor]


class HuginnAttention(nn.Module):
    """Projections, bias of Q and K, and rotary embedding of one layer around its attention."""

    def __init__(self, config: HuginnConfig, attention: AttentionLayers, layer: int, quant_config, prefix: str):
        super().__init__()
        self.heads, self.head_dim = attention.heads, config.head_dim
        self.Wqkv = QKVParallelLinear(
            config.n_embd, config.head_dim, config.n_heads,
            bias=False, quant_config=quant_config, prefix=f"{prefix}.Wqkv",
        )  # fmt: skip
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, self.heads, self.head_dim))
        set_weight_attrs(self.qk_bias, {"weight_loader": self._load_bias})
        self.proj = RowParallelLinear(
            config.n_embd, config.n_embd, bias=False, quant_config=quant_config, prefix=f"{prefix}.proj"
        )
        self.attn = attention.make(layer, f"{prefix}.attn")

    def _load_bias(self, parameter: Tensor, loaded: Tensor) -> None:
        """This process's heads of a bias [2, 1, H, D]."""
        parameter.data.copy_(loaded.narrow(2, get_tensor_model_parallel_rank() * self.heads, self.heads))

    def forward(self, loop: int, rotary: Rotary, x: Tensor) -> Tensor:
        qkv, _ = self.Wqkv(x)
        q, k, v = qkv.chunk(3, dim=-1)
        q, k = (
            apply_rotary(y.unflatten(-1, (self.heads, self.head_dim)) + bias, rotary).flatten(-2)
            for y, bias in zip((q, k), self.qk_bias)
        )
        out, _ = self.proj(self.attn(loop, q, k, v))
        return out


class HuginnMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: HuginnConfig, quant_config, prefix: str):
        super().__init__()
        self.fc = MergedColumnParallelLinear(
            config.n_embd, [config.intermediate_size] * 2,
            bias=False, quant_config=quant_config, prefix=f"{prefix}.fc",
        )  # fmt: skip
        self.proj = RowParallelLinear(
            config.intermediate_size, config.n_embd, bias=False, quant_config=quant_config, prefix=f"{prefix}.proj"
        )
        self.activation = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.fc(x)
        out, _ = self.proj(self.activation(gate_up))
        return out


class HuginnBlock(nn.Module):
    """One layer; the norms after its sub-blocks follow the residual sum."""

    def __init__(self, config: HuginnConfig, attention: AttentionLayers, layer: int, quant_config, prefix: str):
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3, self.norm_4 = (
            RMSNorm(config.n_embd, eps=config.norm_eps) for _ in range(4)
        )
        self.attn = HuginnAttention(config, attention, layer, quant_config, f"{prefix}.attn")
        self.mlp = HuginnMLP(config, quant_config, f"{prefix}.mlp")

    def forward(self, loop: int, rotary: Rotary, x: Tensor) -> Tensor:
        x = self.norm_2(self.attn(loop, rotary, self.norm_1(x)) + x)
        return self.norm_4(self.mlp(self.norm_3(x)) + x)


@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0}
)
class HuginnTrunk(nn.Module):
    """Everything under ``transformer.`` in the checkpoint."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = config = HuginnConfig.from_dict(vllm_config.model_config.hf_config.to_dict())
        quant_config = vllm_config.quant_config

        def blocks(attention: AttentionLayers, name: str, count: int, first: int = 0) -> nn.ModuleList:
            return nn.ModuleList(
                HuginnBlock(config, attention, first + n, quant_config, f"{prefix}.{name}.{n}") for n in range(count)
            )

        edge, looped = AttentionLayers(vllm_config, edge=True), AttentionLayers(vllm_config)
        self.wte = VocabParallelEmbedding(
            config.vocab_size, config.n_embd, quant_config=quant_config, prefix=f"{prefix}.wte"
        )
        self.prelude = blocks(edge, "prelude", config.n_layers_in_prelude)
        self.adapter = ReplicatedLinear(
            2 * config.n_embd, config.n_embd, bias=False, quant_config=quant_config, prefix=f"{prefix}.adapter"
        )
        self.core_block = blocks(looped, "core_block", config.n_layers_in_recurrent_block)
        self.coda = blocks(edge, "coda", config.n_layers_in_coda, config.n_layers_in_prelude)
        self.ln_f = RMSNorm(config.n_embd, eps=config.norm_eps)

    def initial_state(self, positions: Tensor) -> Tensor:
        """The state before the first recurrence, [T, n_embd] FP32."""
        seed = torch.full_like(positions[:1], Huginn.state_seed)
        config = self.config
        return truncated_normal(seed, positions, config.n_embd) * (config.init_std * config.embed_scale)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        config = self.config
        rotary = rotary_tables(positions, config.head_dim, config.rope_base)
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        x = x * config.embed_scale
        for block in self.prelude:
            x = block(0, rotary, x)
        state = self.initial_state(positions).to(x.dtype)
        for loop in range(config.mean_recurrence):
            state, _ = self.adapter(torch.cat([state, x], dim=-1))
            for block in self.core_block:
                state = block(loop, rotary, state)
        state = self.ln_f(state)
        for block in self.coda:
            state = block(0, rotary, state)
        return self.ln_f(state)


class RavenForCausalLM(LoopedLM):
    """Huginn as vLLM runs it. Weights load by the names of the published checkpoint."""

    packed_modules_mapping = {"Wqkv": ["Wqkv"], "fc": ["fc"]}  # noqa: RUF012 (vLLM's name and form)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.transformer = HuginnTrunk(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "transformer"))
        self.make_head(vllm_config, prefix, self.transformer.config.n_embd, tied=True)

    @property
    def trunk(self) -> HuginnTrunk:
        return self.transformer

    @property
    def embedding(self) -> VocabParallelEmbedding:
        return self.transformer.wte

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loader = AutoWeightsLoader(self, skip_prefixes=["lm_head.", "freqs_cis"])  # tied, and computed
        return loader.load_weights(weights)

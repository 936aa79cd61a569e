"""Ouro (the paper's Sec. 2.2) over vLLM's layers: the same N layers run L times, with one attention layer each.

The final norm follows every loop and its output feeds the next. All loops always run, so the exit gate is not loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from residualquant.vllm.causal_lm import LoopedLM
from residualquant.vllm.layers import AttentionLayers


class OuroAttention(nn.Module):
    """Projections and rotary embedding of one layer, shared by its loops, around its looped attention."""

    def __init__(self, config, attention: AttentionLayers, layer: int, quant_config, prefix: str):
        super().__init__()
        dim = config.head_dim
        self.widths = [attention.heads * dim, attention.kv_heads * dim, attention.kv_heads * dim]
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, dim, config.num_attention_heads, config.num_key_value_heads,
            bias=False, quant_config=quant_config, prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * dim, config.hidden_size,
            bias=False, quant_config=quant_config, prefix=f"{prefix}.o_proj",
        )  # fmt: skip
        self.rotary_emb = get_rope(
            dim, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters
        )
        self.attn = attention.make(layer, f"{prefix}.attn")

    def forward(self, loop: int, positions: Tensor, h: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(h)
        q, k, v = qkv.split(self.widths, dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        out, _ = self.o_proj(self.attn(loop, q, k, v))
        return out


class OuroMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config, quant_config, prefix: str):
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [config.intermediate_size] * 2,
            bias=False, quant_config=quant_config, prefix=f"{prefix}.gate_up_proj",
        )  # fmt: skip
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size,
            bias=False, quant_config=quant_config, prefix=f"{prefix}.down_proj",
        )  # fmt: skip
        self.activation = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(self.activation(gate_up))
        return out


class OuroLayer(nn.Module):
    """One layer with norms before and after each sub-block; the norms before it also add the residual stream."""

    def __init__(self, config, attention: AttentionLayers, layer: int, quant_config, prefix: str):
        super().__init__()
        self.self_attn = OuroAttention(config, attention, layer, quant_config, f"{prefix}.self_attn")
        self.mlp = OuroMLP(config, quant_config, f"{prefix}.mlp")
        for name in (
            "input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"
        ):  # fmt: skip
            setattr(self, name, RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, loop: int, positions: Tensor, h: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h, residual = self.input_layernorm(h, residual)
        h = self.input_layernorm_2(self.self_attn(loop, positions, h))
        h, residual = self.post_attention_layernorm(h, residual)
        return self.post_attention_layernorm_2(self.mlp(h)), residual


@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0}
)
class OuroTrunk(nn.Module):
    """Embedding, layers and final norm: everything under ``model.`` in the checkpoint."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.loops = config.total_ut_steps
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size,
            quant_config=vllm_config.quant_config, prefix=f"{prefix}.embed_tokens",
        )  # fmt: skip
        attention = AttentionLayers(vllm_config)
        self.layers = nn.ModuleList(
            OuroLayer(config, attention, layer, vllm_config.quant_config, f"{prefix}.layers.{layer}")
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for loop in range(self.loops):
            residual = torch.zeros_like(h)
            for layer in self.layers:
                h, residual = layer(loop, positions, h, residual)
            h, _ = self.norm(h, residual)
        return h


class OuroForCausalLM(LoopedLM):
    """Ouro as vLLM runs it. Weights load by the names of the published checkpoints."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )
    packed_modules_mapping = {  # noqa: RUF012 (vLLM's name and form)
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.model = OuroTrunk(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.make_head(vllm_config, prefix, config.hidden_size, tied=config.tie_word_embeddings)

    @property
    def trunk(self) -> OuroTrunk:
        return self.model

    @property
    def embedding(self) -> VocabParallelEmbedding:
        return self.model.embed_tokens

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loader = AutoWeightsLoader(self, skip_prefixes=["model.early_exit_gate."])
        return loader.load_weights(weights, mapper=self.hf_to_vllm_mapper)

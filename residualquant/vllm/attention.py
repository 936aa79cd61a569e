"""The looped attention layer: one per physical layer, with the pages of all its loops.

Loop by loop it stages the step's K and V and attends to packed past and staged step; after the last loop it packs the
step into its pages (Sec. 4).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend

from residualquant.vllm.backend import LoopedBackend, LoopedKVSpec
from residualquant.vllm.paged import PagedKV, StepBatch
from residualquant.vllm.startup import report_pages

OP_NAME = "vllm::residualquant_looped_attention"


class LoopedAttention(nn.Module, AttentionLayerBase):
    """Attention of all loops of one layer.

    Args:
        paged: how this layer's K and V lie in pages.
        loops: of the model.
        heads, kv_heads: of this process.
        name: the layer's unique name.
    """

    def __init__(self, paged: PagedKV, loops: int, heads: int, kv_heads: int, head_dim: int, name: str):
        super().__init__()
        self.paged, self.loops, self.num_heads, self.kv_heads, self.head_dim = paged, loops, heads, kv_heads, head_dim
        self.layer_name = name
        self._pages: Tensor | None = None
        vllm_config = get_current_vllm_config()
        self._cache_config = vllm_config.cache_config
        # K and V of every loop of the step in hand; allocated once, so that a captured graph finds it where it was.
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.staged = torch.zeros(2, loops, tokens, kv_heads, head_dim, dtype=paged.step_dtype)
        self._layers = vllm_config.compilation_config.static_forward_context
        if name in self._layers:
            raise ValueError(f"attention layers need different names, got {name!r} twice")
        self._layers[name] = self

    @property
    def kv_cache(self) -> Tensor | None:
        """The pages, uint8 [blocks, H, S * token_bytes]; vLLM sets them when it has allocated its cache."""
        return self._pages

    @kv_cache.setter
    def kv_cache(self, pages: Tensor) -> None:
        if not len(pages):  # vLLM takes back the few pages that it measured the memory of CUDA graphs with
            self._pages = None
            return
        expected = (self.kv_heads, self.paged.page_tokens * self.paged.token_bytes)
        if tuple(pages.shape[1:]) != expected:
            raise ValueError(f"{self.layer_name} needs pages of [H, bytes] = {expected}, got {tuple(pages.shape[1:])}")
        self._pages = pages
        layers = [layer for layer in self._layers.values() if isinstance(layer, LoopedAttention)]
        if len(pages) == self._cache_config.num_gpu_blocks and all(layer.kv_cache is not None for layer in layers):
            report_pages(layers)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return LoopedBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> LoopedKVSpec:
        if vllm_config.cache_config.block_size != self.paged.page_tokens:
            raise ValueError(
                f"pages are laid out for {self.paged.page_tokens} tokens, got a block_size of "
                f"{vllm_config.cache_config.block_size} after the model was built"
            )
        return LoopedKVSpec(
            block_size=self.paged.page_tokens,
            num_kv_heads=self.kv_heads,
            head_size=self.paged.token_bytes,
            dtype=torch.uint8,
        )

    def forward(self, loop: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one loop: q [T, Hq * D], k and v [T, H * D], post-RoPE, to [T, Hq * D]."""
        out = torch.empty_like(q)
        torch.ops.vllm.residualquant_looped_attention(q, k, v, out, self.layer_name, loop)
        return out

    def attend(self, loop: int, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch, out: Tensor) -> None:
        """One loop of a step: q [T, Hq, D], k and v [T, H, D], into out [T, Hq, D]; the last loop fills the pages."""
        staged = self.staged[:, :, : len(q)]
        own = staged[:, loop]
        self.paged.stage(own, k, v)
        self.paged.attend(loop, q, *own, self.kv_cache, batch, out)
        if loop == self.loops - 1:
            self.paged.write(self.kv_cache, batch.slots, *staged)


def looped_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer_name: str, loop: int) -> None:
    """The custom op: finds the layer and the step by name, so that a compiled graph can be cut here."""
    context = get_forward_context()
    layer: LoopedAttention = context.no_compile_layers[layer_name]
    metadata = context.attn_metadata
    if metadata is None:  # a dry run, before there are pages
        out.zero_()
        return
    batch = metadata[layer_name]
    q, k, v, out = (x[: batch.tokens].view(batch.tokens, -1, layer.head_dim) for x in (q, k, v, out))
    layer.attend(loop, q, k, v, batch, out)


def _looped_attention_fake(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer_name: str, loop: int) -> None:
    return None


direct_register_custom_op(
    op_name=OP_NAME.removeprefix("vllm::"),
    op_func=looped_attention,
    mutates_args=["out"],
    fake_impl=_looped_attention_fake,
)

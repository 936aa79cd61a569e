"""The attention layers of a looped model in this process: plain pages, pages by kernels, or vLLM's own attention.

| | CPU | GPU |
|---|---|---|
| packed | :class:`PackedPages` | :class:`residualquant.vllm.paged_cuda.KernelPages` |
| raw | :class:`RawPages` | vLLM's own attention, one layer per loop |
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from residualquant.cache import LayerRotations
from residualquant.config import KVQuantConfig
from residualquant.layout import PageLayout
from residualquant.models.base import KVShape
from residualquant.vllm.attention import LoopedAttention
from residualquant.vllm.paged import PackedPages, PagedKV, RawPages
from residualquant.vllm.settings import edge_shape, kv_shape, layer_rotations, settings_of
from residualquant.vllm.startup import check_paged


class PlainAttention(nn.Module):
    """vLLM's own attention, one layer for each loop of one of the model's layers.

    Args:
        loops, layers: of the model.
        heads, kv_heads: of this process.
        name: of the layer, with its number.
    """

    def __init__(self, loops: int, layers: int, heads: int, kv_heads: int, head_dim: int, name: str):
        super().__init__()
        config, index = get_current_vllm_config(), extract_layer_index(name)
        self.loops = nn.ModuleList(
            Attention(
                heads, head_dim, head_dim**-0.5, num_kv_heads=kv_heads,
                cache_config=config.cache_config, quant_config=config.quant_config,
                prefix=name.replace(f".{index}.", f".{loop * layers + index}."),
            )
            for loop in range(loops)
        )  # fmt: skip

    def forward(self, loop: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one loop: q [T, Hq * D], k and v [T, H * D], post-RoPE, to [T, Hq * D]."""
        return self.loops[loop](q, k, v)


class AttentionLayers:
    """Makes the attention layers of one kind, looped ones or those that run once, all with pages alike.

    Args:
        vllm_config: vLLM's configuration.
        edge: for the layers that run once.
    """

    def __init__(self, vllm_config: VllmConfig, edge: bool = False):
        hf_config, config = vllm_config.model_config.hf_config, settings_of(vllm_config).config
        size, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.shape = edge_shape(hf_config) if edge else kv_shape(hf_config)
        self.kv_heads, self.heads = self.shape.kv_heads // size, hf_config.num_attention_heads // size
        device = torch.get_default_device()
        own = slice(rank * self.kv_heads, (rank + 1) * self.kv_heads)
        self._pages: list[PagedKV] | None = None  # None: vLLM's
        if not config.is_off:
            if edge:
                config = config.for_edge
                rotations = LayerRotations(config, self.shape, device)
            else:
                rotations = layer_rotations(vllm_config, own, device)
            self._pages = self._packed(vllm_config, config, rotations, device)
            dtype = torch.float32 if device.type == "cpu" else vllm_config.model_config.dtype
            check_paged(self._pages[0], self.heads // self.kv_heads, self.kv_heads, device, dtype)
        elif device.type == "cpu":
            dtype, page_tokens = vllm_config.model_config.dtype, vllm_config.cache_config.block_size
            self._pages = [RawPages(self.shape.loops, self.shape.head_dim, dtype, page_tokens)] * self.shape.layers

    def _packed(
        self, vllm_config: VllmConfig, config: KVQuantConfig, rotations: LayerRotations, device: torch.device
    ) -> list[PagedKV]:
        shape: KVShape = self.shape
        layout = PageLayout(config, shape.head_dim, vllm_config.cache_config.block_size, shape.loops // config.loops)
        if device.type == "cpu":
            return [PackedPages(layout, rotations, layer) for layer in range(shape.layers)]
        from residualquant.vllm.paged_cuda import KernelPages, Scratch

        requests = max(2, vllm_config.scheduler_config.max_num_seqs)  # the self-check has two
        tokens = vllm_config.model_config.max_model_len
        scratch = Scratch(requests, self.heads, self.kv_heads, shape.head_dim, tokens, device)
        return [KernelPages(layout, rotations, layer, scratch) for layer in range(shape.layers)]

    def make(self, layer: int, name: str) -> nn.Module:
        """The attention of one layer: a module that maps (loop, q, k, v) to its output."""
        shape = self.shape
        if self._pages is None:
            return PlainAttention(shape.loops, shape.layers, self.heads, self.kv_heads, shape.head_dim, name)
        return LoopedAttention(self._pages[layer], shape.loops, self.heads, self.kv_heads, shape.head_dim, name)

"""What every looped model gives the engine, the cache and the calibration; and the parts that models share.

A looped model runs some layers several times. Attention is passed in as a function, so a model knows nothing about
caches, padding or quantisation: whoever calls it decides what the past looks like. Layers that run once before or
after the loops (Huginn's prelude and coda) are its *edge*: they have a KV cache too, which no loop predicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EDGE = -1  # the ``loop`` with which ``attend`` is called for a layer that is not looped

Attend = Callable[[int, int, Tensor, Tensor, Tensor], Tensor]

STOP_TOKENS = ("<eos>", "<|endoftext|>", "<|im_end|>", "<|end_text|>", "<|end_turn|>", "</s>")


@dataclass(frozen=True)
class KVShape:
    """Size of one token's KV cache: K and V, each [loops, layers, kv_heads, head_dim]."""

    loops: int
    layers: int
    kv_heads: int
    head_dim: int


@dataclass
class LoopedOutput:
    """``logits`` [B, T, V] (or [B, 1, V]) FP32 after the last loop; ``exit_probabilities`` [L, B, T] FP32 or None."""

    logits: Tensor
    exit_probabilities: Tensor | None = None


class LoopedModel(nn.Module):
    """Base of the looped models; :func:`residualquant.load_model` builds one.

    A subclass gives ``config`` (with ``vocab_size``, ``num_attention_heads`` and ``max_position_embeddings``),
    ``kv_shape``, ``output_weight``, ``lm_head`` and ``forward``. It calls ``attend(loop, layer, q, k, v)`` once for
    every layer of every loop, in order, with q [B, T, Hq, D] and k, v [B, T, H, D], post-RoPE, and gets
    [B, T, Hq, D] back; for the ``edge_layers`` layers that are not looped it calls ``attend(EDGE, layer, q, k, v)``,
    ``layer`` counted from 0 over prelude and coda.
    ``family`` ("ouro" or "huginn") says which family's task levels are put to the model.
    """

    family = "ouro"
    tokenizer = None
    name = "looped"
    weights_hash = "random"
    edge_layers = 0

    @property
    def derived_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that a published checkpoint stores although the model computes or shares them."""
        return {}

    @property
    def kv_shape(self) -> KVShape:
        """Shape of the looped layers' KV cache."""
        raise NotImplementedError

    @property
    def edge_shape(self) -> KVShape | None:
        """Shape of the KV cache of the layers that run once, or None without such layers."""
        s = self.kv_shape
        return KVShape(1, self.edge_layers, s.kv_heads, s.head_dim) if self.edge_layers else None

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def stop_ids(self) -> set[int]:
        """Ids of the tokenizer's end tokens (``STOP_TOKENS``); empty without a tokenizer."""
        if self.tokenizer is None:
            return set()
        return {i for i in map(self.tokenizer.token_to_id, STOP_TOKENS) if i is not None}

    def output_weight(self, layer: int) -> Tensor:
        """Output projection of a looped layer's attention, [d_model, Hq D]."""
        raise NotImplementedError

    def kv_bytes_per_token(self, bits_per_element: float = 16.0) -> float:
        """Bytes of K and V of one token over all loops and looped layers at ``bits_per_element`` (16 = BF16)."""
        s = self.kv_shape
        return 2 * s.loops * s.layers * s.kv_heads * s.head_dim * bits_per_element / 8

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        attend: Attend | None = None,
        loops: int | None = None,
        last_only: bool = False,
    ) -> LoopedOutput:
        """Logits after the last loop, of every token or (``last_only``) of the last one.

        Args:
            ids: [B, T] int64 token ids.
            positions: [B, T] int64; 0 … T-1 when None. The same positions are used in every loop.
            attend: see the class; None: causal attention among the tokens given.
            loops: how many loops to run; the configuration's own count when None.
        """
        raise NotImplementedError


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(self.weight.dtype)


def causal_attention(loop: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention within the tokens given, no past and no padding. q [B, T, Hq, D], k, v [B, T, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)

"""Packed pages by the GPU kernels of :mod:`residualquant.kernels`: one writer launch a step, nothing that waits.

Requests with one token go to decode attention, whose scratch is made once, so steps of such requests can be captured
into CUDA graphs. The beginnings of prompts, which have no packed past, go to the attention of vLLM's own models, later
pieces to chunked prefill. Queries are read as BF16 and rotations as FP16.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from residualquant.cache import LayerRotations
from residualquant.config import KVQuantConfig
from residualquant.kernels.checks import HEAD_DIMS
from residualquant.kernels.decode_attention import Past, Workspace, decode_attention, workspace
from residualquant.kernels.pack_kv import pack_kv
from residualquant.kernels.prefill_attention import prefill_attention
from residualquant.kernels.stage_kv import stage_kv
from residualquant.layout import PageLayout
from residualquant.rotation import Rotation
from residualquant.vllm.flash_attention import prompt_attention
from residualquant.vllm.metrics import sanitised
from residualquant.vllm.paged import PackedPages, StepBatch

BITS = (0, 1, 2, 4, 8)  # that both the writer and decode attention know


def why_not(config: KVQuantConfig, head_dim: int) -> str | None:
    """Why there are no kernels for pages of ``config``, or None."""
    if not set(config.bits) <= set(BITS):
        return f"bits {', '.join(map(str, BITS))}, got {config.bits}"
    if config.rounding != "fp32":
        return f'rounding "fp32", got {config.rounding!r}'
    if head_dim not in HEAD_DIMS:
        return f"a head_dim of {', '.join(map(str, HEAD_DIMS))}, got {head_dim}"
    return None


class Scratch:
    """Scratch of decode attention for every number of requests, shared by all layers and loops.

    One request wants its past split into more parts than each of many, so there is one workspace per power of two.

    Args:
        requests: the most at a time.
        heads, kv_heads, head_dim: Hq, H, D of this process.
        tokens: the longest past.
        device: where.
    """

    def __init__(
        self, requests: int, heads: int, kv_heads: int, head_dim: int, tokens: int, device: torch.device | str
    ):
        sizes = (1 << power for power in range((requests - 1).bit_length() + 1))
        self._workspaces = [workspace(size, heads, kv_heads, head_dim, tokens, device) for size in sizes]

    def of(self, requests: int) -> Workspace:
        """The workspace for ``requests`` requests."""
        return self._workspaces[(requests - 1).bit_length()]


class KernelPages(PackedPages):
    """:class:`PackedPages` by kernels.

    Args:
        layout, rotations, layer: as there.
        scratch: for the most requests at a time.
    """

    def __init__(self, layout: PageLayout, rotations: LayerRotations, layer: int, scratch: Scratch):
        super().__init__(layout, rotations, layer)
        self._scratch, self._prompt_attention = scratch, prompt_attention(layout.head_dim)
        self._check = layer == 0  # of the kernels' arguments: those of other layers differ in nothing that is checked
        groups = range(layout.groups)
        self._rotations = {(group, kind): self._as_read(group, kind) for group in groups for kind in "kv"}
        self._operands = [self._matrices(group) for group in groups]

    def _as_read(self, group: int, kind: str) -> Rotation | None:
        """A rotation as the kernels read it."""
        given = self.rotations.get(group, self.layer, kind)
        if given is None:
            return None
        means = None if given.means is None else given.means.float().contiguous()
        return Rotation(given.matrix.half().contiguous(), means)

    def rotation(self, group: int, kind: str) -> Rotation | None:
        return self._rotations[group, kind]

    def _matrices(self, group: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Matrices of K and of V, and means of K."""
        k, v = self.rotation(group, "k"), self.rotation(group, "v")
        return (None, None, None) if k is None or v is None else (k.matrix, v.matrix, k.means)

    def stage(self, staged: Tensor, k: Tensor, v: Tensor) -> None:
        stage_kv(staged, k, v, sanitised(staged.device).tensor, check=self._check)

    def write(self, pages: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for group, operands in enumerate(self._operands):
            loops = slice(group * self.layout.config.loops, (group + 1) * self.layout.config.loops)
            pack_kv(pages, self.layout, slots, k[loops], v[loops], *operands, group=group, check=self._check)

    def attend(
        self, loop: int, q: Tensor, k: Tensor, v: Tensor, pages: Tensor, batch: StepBatch, out: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(q) if out is None else out
        q = q.to(self.step_dtype)
        group, inner = divmod(loop, self.layout.config.loops)
        operands, decodes = self._operands[group], batch.decodes
        if self._prompt_attention is None and batch.beginnings:
            batch = replace(batch, beginnings=0)
        if decodes:
            past = Past(pages, self.layout, batch.block_table[:decodes], batch.decode_pasts, *operands, group)
            own = (x[:decodes] for x in (q, k, v))
            decode_attention(*own, past, inner, self._scratch.of(decodes), out=out[:decodes], check=self._check)
        if decodes + batch.beginnings < len(batch.seq_lens):
            prefill_attention(
                out, q, k, v, pages, self.layout, inner, *batch.continued, batch.longest,
                self.layout.head_dim**-0.5, *operands, group=group, check=self._check,
            )  # fmt: skip
        if batch.beginnings:
            own = (x[batch.first_beginning :] for x in (out, q, k, v))
            self._prompt_attention(*own, batch.beginning_starts, batch.longest)
        return out

"""K and V of one layer in the pages of a serving engine: write a step, read the past, attend. Plain torch.

A page holds ``page_tokens`` tokens of one layer, all loops, K and V: uint8 [blocks, H, page bytes]. :class:`RawPages`
keeps values as they are, :class:`PackedPages` keeps what the codec makes of them, laid out as
:class:`residualquant.layout.PageLayout` says. On a GPU kernels do what PackedPages does
(:mod:`residualquant.vllm.paged_cuda`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from residualquant.attention import attend_past_and_step, attend_prompt, count_unusable, make_finite_
from residualquant.cache import LayerRotations
from residualquant.layout import PageLayout, loops_read
from residualquant.pages import read_pages, write_pages
from residualquant.residual import PackedKV, decode, encode
from residualquant.rotation import Rotation
from residualquant.vllm.metrics import sanitised


@dataclass(frozen=True)
class StepBatch:
    """The requests of one step: first those with a single token, ``decodes`` of them, then longer pieces of prompts,
    of which the last ``beginnings`` are the first of their prompts.

    Attributes:
        query_start: int32 [R + 1], first token of each request within the step.
        query_start_cpu: the same on the host.
        seq_lens: int32 [R], tokens of each request, past and step; 0 for a request that is padding.
        block_table: int32 [R, blocks], its pages in order.
        slots: int [T], where each token of the step goes: token ``slot mod S`` of page ``slot // S``; -1: nowhere.
        decodes: requests with one token.
        beginnings: requests at the end that have no past.
    """

    query_start: Tensor
    query_start_cpu: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slots: Tensor
    decodes: int
    beginnings: int = 0

    @cached_property
    def decode_pasts(self) -> Tensor:
        """int32 [decodes], tokens before this step of the requests with one token."""
        return (self.seq_lens[: self.decodes] - 1).clamp_(min=0)

    @cached_property
    def continued(self) -> tuple[Tensor, Tensor, Tensor]:
        """Block table, ``query_start`` and ``seq_lens`` of the longer pieces that have a past."""
        end = len(self.seq_lens) - self.beginnings
        return (
            self.block_table[self.decodes : end],
            self.query_start[self.decodes : end + 1],
            self.seq_lens[self.decodes : end],
        )

    @cached_property
    def first_beginning(self) -> int:
        """The first token of the requests that have no past."""
        return int(self.query_start_cpu[len(self.seq_lens) - self.beginnings])

    @cached_property
    def beginning_starts(self) -> Tensor:
        """int32 [beginnings + 1], first token of each request that has no past, counted from the first of them."""
        starts = self.query_start[len(self.seq_lens) - self.beginnings :]
        return starts - starts[0]

    @cached_property
    def longest(self) -> int:
        """The most tokens that a request has in this step."""
        return int(self.query_start_cpu.diff().max())

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """(requests, tokens) of what is attended together: all decodes, then every longer piece by itself."""
        if self.decodes:
            yield slice(0, self.decodes), slice(0, self.decodes)
        starts = self.query_start_cpu.tolist()
        for row in range(self.decodes, len(starts) - 1):
            if starts[row] < starts[row + 1]:
                yield slice(row, row + 1), slice(starts[row], starts[row + 1])


class PagedKV:
    """One layer's pages.

    Attributes:
        page_tokens: tokens per page (S).
        token_bytes: bytes of one token and KV head, all loops, K and V.
        step_dtype: what attention reads of the step's own K and V.
    """

    page_tokens: int
    token_bytes: int
    step_dtype: torch.dtype

    def stage(self, staged: Tensor, k: Tensor, v: Tensor) -> None:
        """Keep K and V [T, H, D] of one loop of the step as attention reads them, in ``staged`` [2, T, H, D]."""
        staged[0].copy_(k)
        staged[1].copy_(v)

    def write(self, pages: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put the tokens of a step into their pages.

        Args:
            pages: uint8 [blocks, H, S * token_bytes], changed in place.
            slots: int [T]; -1 for a token to leave out.
            k, v: [L, T, H, D], all loops.
        """
        raise NotImplementedError

    def past(self, pages: Tensor, slots: Tensor, loop: int) -> tuple[Tensor, Tensor]:
        """K and V [T, H, D] of one loop of the tokens in ``slots`` [T], in rotated space where there is a rotation."""
        raise NotImplementedError

    def matrices(self, loop: int) -> tuple[Tensor | None, Tensor | None]:
        """The rotations of K and of V that :meth:`past` is in."""
        return None, None

    def attend(
        self, loop: int, q: Tensor, k: Tensor, v: Tensor, pages: Tensor, batch: StepBatch, out: Tensor | None = None
    ) -> Tensor:
        """Attention of a step over its requests' pages and over itself, causal within the step (Sec. 4).

        Args:
            loop: from 0.
            q: [T, Hq, D]; k, v: [T, H, D], of this loop and step, as :meth:`stage` keeps them.
            pages: uint8 [blocks, H, S * token_bytes].
            batch: whose tokens these are.
            out: [T, Hq, D] to write to, in the dtype of q; made by default.

        Returns:
            ``out``.
        """
        out = torch.empty_like(q) if out is None else out
        for rows, tokens in batch.parts():
            count = rows.stop - rows.start
            own = [x[tokens].unflatten(0, (count, -1)) for x in (q, k, v)]
            length = own[0].shape[1]
            attended = self._attend_part(loop, own, pages, batch.block_table[rows], batch.seq_lens[rows] - length)
            out[tokens] = attended.flatten(0, 1)
        return out

    def _attend_part(
        self, loop: int, step: list[Tensor], pages: Tensor, block_table: Tensor, lengths: Tensor
    ) -> Tensor:
        """Requests with equally many new tokens: q, k, v [B, T, ...], ``lengths`` [B] of their pasts."""
        q, k, v = step
        longest = int(lengths.max())
        if longest == 0:
            return attend_prompt(q, k, v)
        columns = torch.arange(longest, device=q.device)
        slots = block_table[:, columns // self.page_tokens].long() * self.page_tokens + columns % self.page_tokens
        known = columns < lengths[:, None]
        past = [x.unflatten(0, known.shape) for x in self.past(pages, slots.flatten(), loop)]
        past = [torch.where(known[..., None, None], x, 0.0) for x in past]  # pages hold anything beyond a past
        size = q.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        mask = torch.cat([known[:, None].expand(-1, size, -1), causal.expand(len(known), -1, -1)], -1)
        return attend_past_and_step(q, tuple(past), (k, v), self.matrices(loop), mask)


class RawPages(PagedKV):
    """Values as they are, at the model's dtype: per head K then V, loop by loop, [H, 2, L, S, D]."""

    def __init__(self, loops: int, head_dim: int, dtype: torch.dtype, page_tokens: int):
        self.page_tokens, self.step_dtype = page_tokens, dtype
        self.token_bytes = 2 * loops * head_dim * dtype.itemsize
        self._shape = (2, loops, page_tokens, head_dim)

    def _view(self, pages: Tensor) -> Tensor:
        """[blocks, S, H, 2, L, D]."""
        return pages.view(self.step_dtype).unflatten(-1, self._shape).permute(0, 4, 1, 2, 3, 5)

    def write(self, pages: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        stored = slots >= 0
        where = slots[stored].long()
        values = torch.stack([k[:, stored], v[:, stored]]).permute(2, 3, 0, 1, 4)
        self._view(pages)[where // self.page_tokens, where % self.page_tokens] = values

    def past(self, pages: Tensor, slots: Tensor, loop: int) -> tuple[Tensor, Tensor]:
        values = self._view(pages)[:, :, :, :, loop]
        return values[slots // self.page_tokens, slots % self.page_tokens].unbind(2)


class PackedPages(PagedKV):
    """What the codec makes of the loops of every loop group (Sec. 3.2), in the project's page layout.

    Args:
        layout: of the pages.
        rotations: of all layers, of the heads in these pages.
        layer: whose pages these are.
    """

    step_dtype = torch.bfloat16

    def __init__(self, layout: PageLayout, rotations: LayerRotations, layer: int):
        self.layout, self.rotations, self.layer = layout, rotations, layer
        self.page_tokens = layout.page_tokens
        self.token_bytes = layout.page_bytes_per_head // layout.page_tokens

    def rotation(self, group: int, kind: str) -> Rotation | None:
        """The rotation of K ("k") or V ("v") of one loop group."""
        return self.rotations.get(group, self.layer, kind)

    def stage(self, staged: Tensor, k: Tensor, v: Tensor) -> None:
        for x in (k, v):
            sanitised(x.device).tensor.add_(count_unusable(x.float()))
        super().stage(staged, k, v)
        make_finite_(staged)

    def write(self, pages: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        stored = slots >= 0
        where, config = slots[stored].long(), self.layout.config
        for group in range(self.layout.groups):
            loops = slice(group * config.loops, (group + 1) * config.loops)
            packed = (
                encode(x[loops][:, stored], config, self.rotation(group, kind)) for x, kind in ((k, "k"), (v, "v"))
            )
            write_pages(pages, self.layout, where, *packed, group=group)

    def past(self, pages: Tensor, slots: Tensor, loop: int) -> tuple[Tensor, Tensor]:
        group, inner = divmod(loop, self.layout.config.loops)
        needed = sorted(loops_read(self.layout.config, inner))
        k, v = (
            _decode_loops(replace(packed, rotation=self.rotation(group, kind)), needed)[needed.index(inner)]
            for packed, kind in zip(read_pages(pages, self.layout, slots, group, needed), "kv")
        )
        return k, v

    def matrices(self, loop: int) -> tuple[Tensor | None, Tensor | None]:
        return self.rotations.of_loop(loop, self.layer, "k"), self.rotations.of_loop(loop, self.layer, "v")


def _decode_loops(packed: PackedKV, loops: list[int]) -> Tensor:
    """Some loops of packed states, which no other predicts, in rotated space: [len(loops), ..., D]."""
    config, rotation = packed.config, packed.rotation
    if rotation is not None and rotation.means is not None and len(rotation.means) > 1:
        rotation = replace(rotation, means=rotation.means[loops])
    part = replace(config, bits=tuple(config.bits[n] for n in loops))
    kept = tuple(packed.loops[n] for n in loops)
    return decode(replace(packed, config=part, loops=kept, rotation=rotation), "rotated")

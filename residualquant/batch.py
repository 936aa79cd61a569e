"""What the engine's rows share: rotations of many configurations stacked, codings done together, dequantised caches.

A *row* is one sequence under one configuration. All its K and V of one token are [slots, 2 (K, V), H, D]: a *slot* is
one (loop, layer), loop by loop, and after them come the layers that run once. So whatever is done per slot is one
operation for all of them, and rows under different configurations differ only in which matrices rotate them
(:class:`RotationStack`) and which codec reads them (:class:`Coding`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from residualquant.attention import attend_one
from residualquant.cache import LayerRotations
from residualquant.config import RAW_BITS, KVQuantConfig
from residualquant.models.base import EDGE, KVShape
from residualquant.residual import Mixture, mixes_with, reconstruct_rotated


@dataclass(frozen=True)
class Slots:
    """The (loop, layer) pairs of a model that have K and V, numbered: ``shape`` of the loops, then the edge layers."""

    shape: KVShape
    edge_layers: int = 0

    @property
    def looped(self) -> int:
        """Slots of the looped layers."""
        return self.shape.loops * self.shape.layers

    @property
    def count(self) -> int:
        return self.looped + self.edge_layers

    def of(self, loop: int, layer: int) -> int:
        """The slot that ``attend(loop, layer, ...)`` means."""
        return self.looped + layer if loop == EDGE else loop * self.shape.layers + layer

    def values(self, rows: int, capacity: int) -> int:
        """Values of K and V that ``rows`` sequences of ``capacity`` tokens have."""
        return 2 * self.count * self.shape.kv_heads * self.shape.head_dim * rows * capacity


class RotationStack:
    """The rotations of C configurations, stacked so that the rows of all of them are rotated in one batched product.

    All have the same number of loops per group. Hadamard's matrix, the same everywhere, is a stack of its own.

    Args:
        rotations: of each configuration; all of them shared ones, or all calibrated.
        shape: KV shape of the model.
    """

    def __init__(self, rotations: Sequence[LayerRotations], shape: KVShape):
        first = rotations[0]
        self.shape, self.loops, self.means = shape, first.loops, None
        if first.is_shared:
            self._matrix = first.shared.matrix.double()
        else:
            groups = shape.loops // self.loops
            places = [(g, n, kind) for g in range(groups) for n in range(shape.layers) for kind in "kv"]
            own = [[r.get(*place) for r in rotations] for place in places]
            size = (shape.kv_heads, shape.head_dim, shape.head_dim)
            stacked = torch.stack([torch.stack([r.matrix.double().expand(size) for r in place]) for place in own])
            self._matrix = stacked.unflatten(0, (groups, shape.layers, 2))
            if any(r.means is not None for place in own for r in place):
                self.means = self._stack_means(own).unflatten(0, (groups, shape.layers, 2)).permute(4, 3, 0, 1, 2, 5, 6)

    @property
    def is_shared(self) -> bool:
        """True where one matrix rotates everything."""
        return self._matrix.dim() == 2

    def index(self, rows_of: Mapping[int, Tensor], spare: int) -> Tensor:
        """The rows [C, n] of each configuration (by its place), filled up with the row ``spare``; C is 1 if shared."""
        if self.is_shared:
            return torch.cat(list(rows_of.values()))[None]
        every = [rows_of.get(place, torch.empty(0, dtype=torch.long)) for place in range(self._matrix.shape[3])]
        return torch.nn.utils.rnn.pad_sequence(every, batch_first=True, padding_value=spare)

    def _stack_means(self, own: list[list]) -> Tensor:
        """[places, C, loops of a group, H, D]; zeros where a rotation has no means."""
        means = self._matrix.new_zeros(
            len(own), len(own[0]), self.loops, self.shape.kv_heads, self.shape.head_dim, dtype=torch.float32
        )
        for place, rotations in enumerate(own):
            for column, rotation in enumerate(rotations):
                if rotation.means is not None:
                    given = rotation.means
                    means[place, column] = given if given.dim() == 3 else given[:, None]
        return means

    def rotate(self, x: Tensor, column: int | None = None) -> Tensor:
        """States of the loops in rotated space, as the codec rotates them: summed in FP64, rounded once.

        Args:
            x: [C, n, loops * layers, 2, H, D]: n rows of each configuration.
            column: the place of the one configuration that all rows belong to; C is 1.

        Returns:
            The same shape, FP32.
        """
        return self._multiply(x, self._matrix, column)

    def unrotate(self, z: Tensor, column: int | None = None) -> Tensor:
        """The inverse of :meth:`rotate`, as the codec has it."""
        return self._multiply(z, self._matrix.mT, column)

    def _multiply(self, x: Tensor, matrix: Tensor, column: int | None) -> Tensor:
        if self.is_shared:
            return (x.double() @ matrix).float()
        groups, layers = matrix.shape[:2]
        matrix = matrix if column is None else matrix[:, :, :, column : column + 1]
        split = x.unflatten(2, (groups, self.loops, layers)).permute(2, 4, 5, 0, 6, 1, 3, 7)
        z = split.to(torch.float64, memory_format=torch.contiguous_format).flatten(5, 6) @ matrix
        return z.float().unflatten(5, split.shape[5:7]).permute(3, 5, 0, 6, 1, 2, 4, 7).flatten(2, 4)


@dataclass(frozen=True, eq=False)
class Coding:
    """States that are coded in one call.

    Attributes:
        mixture: their codecs, of one loop group.
        rows: their rows, [n], or all.
        slots: their slots, whole loops; an index of the slots of some layers, [loops * layers].
        loops: loops that the slots have.
        means: mu of rotated rows, [L, n or 1, groups, layers, 2, H, D], or None.
    """

    mixture: Mixture
    rows: Tensor | slice
    slots: Tensor | slice
    loops: int
    means: Tensor | None = None

    def apply(self, z: Tensor) -> None:
        """Replace the states ``z`` [rows, slots, 2, H, D], in rotated space, by what the packed cache gives back."""
        both = isinstance(self.rows, Tensor) and isinstance(self.slots, Tensor)
        index = (self.rows[:, None], self.slots) if both else (self.rows, self.slots)
        own, loops = z[index].float(), self.mixture.like.loops
        grouped = own.unflatten(1, (self.loops // loops, loops, -1)).movedim(2, 0)
        z[index] = reconstruct_rotated(grouped, self.mixture, self.means).movedim(0, 2).flatten(1, 3).to(z.dtype)


Member = tuple[KVQuantConfig, Tensor | slice, "tuple[RotationStack, int] | None"]


def codings(slots: Slots, rows_of: Sequence[Member], device: torch.device) -> list[Coding]:
    """How the rows of every configuration are coded, in few calls.

    Args:
        slots: of the model.
        rows_of: (configuration, its rows, its rotations as a stack and the place in it).
        device: of the states.
    """
    found: dict[tuple, list[Member]] = {}
    for cfg, rows, rotation in rows_of:
        layers_of: dict[KVQuantConfig, list[int]] = {}
        for layer in range(slots.shape.layers):
            layers_of.setdefault(cfg.for_layer(layer).codec, []).append(layer)
        for codec, layers in layers_of.items():
            found.setdefault((mixes_with(codec), tuple(layers)), []).append((codec, rows, rotation))
        if slots.edge_layers:
            codec = cfg.for_edge.codec
            found.setdefault((mixes_with(codec), None), []).append((codec, rows, None))
    made = []
    for (_, layers), members in found.items():
        if members[0][0].is_off:
            continue
        mixture, rows = _mix(members)
        if layers is None:
            made.append(Coding(mixture, rows, slice(slots.looped, slots.count), 1))
            continue
        own: Tensor | slice = slice(slots.looped)
        if len(layers) < slots.shape.layers:
            own = torch.tensor([slots.of(loop, n) for loop in range(slots.shape.loops) for n in layers], device=device)
        made.append(Coding(mixture, rows, own, slots.shape.loops, _means_of(members, layers)))
    return made


def _mix(members: Sequence[Member]) -> tuple[Mixture, Tensor | slice]:
    """The codecs of some configurations as one, and the rows of all."""
    codecs = list(dict.fromkeys(codec for codec, _, _ in members))
    if len(members) == 1:
        return Mixture(codecs), members[0][1]
    kinds = torch.cat([torch.full_like(rows, codecs.index(codec)) for codec, rows, _ in members])
    return Mixture(codecs, kinds), torch.cat([rows for _, rows, _ in members])


def raw_slots(slots: Slots, cfg: KVQuantConfig) -> list[int]:
    """The slots of the loops that ``cfg`` stores raw."""
    looped = ((loop, n) for loop in range(slots.shape.loops) for n in range(slots.shape.layers))
    return [slots.of(loop, n) for loop, n in looped if cfg.for_layer(n).bits[loop % cfg.loops] == RAW_BITS]


def _means_of(members: Sequence[Member], layers: tuple[int, ...]) -> Tensor | None:
    """mu of every row, [L, n or 1, groups, layers, 2, H, D]; None where no rotation has means."""
    parts = []
    given = [rotation[0].means for *_, rotation in members if rotation is not None]
    like = next((means for means in given if means is not None), None)
    if like is None:
        return None
    for _, rows, rotation in members:
        stack, place = rotation or (None, 0)
        means = torch.zeros_like(like[:, 0]) if stack is None or stack.means is None else stack.means[:, place]
        count = rows.numel() if isinstance(rows, Tensor) else 1
        parts.append(means[:, None, :, list(layers)].expand(-1, count, *(-1,) * 5))
    return torch.cat(parts, 1)


class DecodeCache:
    """Dequantised caches of many sequences, each under its own configuration: what a decode step reads (Sec. 4).

    ``data`` [slots, 2 (K, V), rows, H, capacity, D] holds what the packed cache would decode to. Rows are right-padded:
    row i has its tokens in columns 0 … lengths[i] - 1. During a step the column ``lengths[i]`` holds the current token
    in BF16 precision; :meth:`commit` replaces it by its reconstruction.
    Reading it runs at memory bandwidth, 8 * S * H * D bytes per row and slot.

    Args:
        slots: of the model.
        configs: the configuration of every row.
        lengths: tokens that every row starts with.
        capacity: most tokens a row may reach.
        storage: flat tensor (FP32) of finite values to live in, at least ``slots.values(rows, capacity)`` long.
    """

    def __init__(
        self,
        slots: Slots,
        configs: Sequence[KVQuantConfig],
        lengths: Sequence[int],
        capacity: int,
        storage: Tensor,
    ):
        heads, dim = slots.shape.kv_heads, slots.shape.head_dim
        size = (slots.count, 2, len(configs), heads, capacity, dim)
        self.data = storage[: slots.values(len(configs), capacity)].view(size)
        self.configs = list(configs)
        self.lengths = torch.tensor(lengths, dtype=torch.long, device=storage.device)
        self.longest = max(lengths)
        self._index = torch.arange(len(configs), device=storage.device)
        self._bias = None
        self._late = None
        widest = max((cfg.recent_tokens for cfg in configs), default=0)
        if widest:
            self._late = storage.new_zeros(*size[:4], widest, dim)

    @property
    def rows(self) -> int:
        """Sequences held."""
        return len(self.configs)

    def fill(self, row: int, start: int, raw: Tensor, rebuilt: Tensor) -> None:
        """Put tokens of a prompt into its row, the first of them at column ``start``.

        Args:
            raw: [T, slots, 2, H, D] of BF16 precision, for the BF16 windows.
            rebuilt: the same tokens as the packed cache decodes them.
        """
        raw, rebuilt = (x.permute(1, 2, 3, 0, 4) for x in (raw, rebuilt))
        self.data[:, :, row, :, start : start + rebuilt.shape[3]] = rebuilt
        if self.configs[row].has_windows:
            self._fill_windows(row, start, raw, rebuilt)

    def _fill_windows(self, row: int, start: int, raw: Tensor, rebuilt: Tensor) -> None:
        """What :meth:`fill` does where a row keeps BF16 values; raw, rebuilt: [slots, 2, H, T, D]."""
        cfg, length, stop = self.configs[row], int(self.lengths[row]), start + raw.shape[3]
        late = max(length - cfg.recent_tokens, start)
        for first, last in ((start, min(cfg.sink_tokens, stop)), (late, stop)):
            if first < last:
                self.data[:, :, row, :, first:last] = raw[..., first - start : last - start, :]
        if cfg.recent_tokens and late < stop:
            slots = torch.arange(late, stop, device=raw.device) % cfg.recent_tokens
            self._late[:, :, row, :, slots] = rebuilt[..., late - start :, :].to(self._late.dtype)

    def begin_step(self) -> None:
        """Prepare the mask [rows, 1, 1, S] of the next token: all columns up to ``lengths[i]``, its own."""
        columns = torch.arange(self.longest + 1, device=self.lengths.device)
        hidden = columns[None] > self.lengths[:, None]
        bias = torch.zeros(hidden.shape, dtype=self.data.dtype, device=hidden.device)
        self._bias = bias.masked_fill_(hidden, -torch.inf)[:, None, None]

    def attend(self, slot: int, q: Tensor, kv: Tensor) -> Tensor:
        """Attention of the current token of every row over its past and itself.

        Args:
            q: [rows, H, G, D], the queries of every KV head.
            kv: [rows, 2, H, D] of BF16 precision, the key and the value.

        Returns:
            [rows, H, G, D].
        """
        data, seen = self.data[slot], self.longest + 1
        data[:, self._index, :, self.lengths] = kv
        return attend_one(q, data[0, :, :, :seen], data[1, :, :, :seen], self._bias)

    def commit(self, raw: Tensor, rebuilt: Tensor) -> None:
        """End the step: the current tokens become past.

        Args:
            raw: [rows, slots, 2, H, D] of BF16 precision, for the BF16 windows.
            rebuilt: what the packed cache decodes them to.
        """
        windowed = [row for row, cfg in enumerate(self.configs) if cfg.has_windows]
        plain = self._index
        if windowed:
            self._commit_windowed(windowed, raw, rebuilt)
            kept = [row for row in range(self.rows) if row not in set(windowed)]
            plain = torch.tensor(kept, dtype=torch.long, device=self.lengths.device)
            rebuilt = rebuilt[plain]
        self.data[:, :, plain, :, self.lengths[plain]] = rebuilt
        self.lengths += 1
        self.longest += 1

    def _commit_windowed(self, rows: list[int], raw: Tensor, rebuilt: Tensor) -> None:
        """Put BF16 values into the windows; write the reconstruction of the token that leaves the recent one."""
        lengths = self.lengths.tolist()
        for row in rows:
            cfg, position, late = self.configs[row], lengths[row], rebuilt[row]
            self.data[:, :, row, :, position] = raw[row]
            if cfg.recent_tokens:
                slot = self._late[:, :, row, :, position % cfg.recent_tokens]
                late, old = slot.clone(), late
                slot.copy_(old)
            leaving = position - cfg.recent_tokens
            if leaving >= cfg.sink_tokens:
                self.data[:, :, row, :, leaving] = late

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Let all but ``rows`` go, moving as few as possible.

        Returns:
            The former index of every row that is left, in the new order.
        """
        order, kept = list(range(len(rows))), set(rows)
        moving = [row for row in rows if row >= len(rows)]
        for hole in order:
            if hole not in kept:
                order[hole] = moving.pop(0)
                self.data[:, :, hole, :, : self.longest] = self.data[:, :, order[hole], :, : self.longest]
                if self._late is not None:
                    self._late[:, :, hole] = self._late[:, :, order[hole]]
        self.data = self.data[:, :, : len(rows)]
        self.configs = [self.configs[row] for row in order]
        self.lengths = self.lengths[torch.tensor(order, dtype=torch.long, device=self.lengths.device)]
        self._index = self._index[: len(rows)]
        return order

"""KV caches of looped models: the packed one, which is the truth, and the engine's dequantised copy of it.

:class:`PackedCache` stores codes, FP8 metadata and coefficients of every layer, as :mod:`residualquant.residual` packs
them; every mutation works on those, so nothing is ever quantised twice. :class:`DecodeCache` trades memory for speed:
what a decode step reads is kept as FP32 values in rotated space, equal bit for bit to decoding the packed bytes.
Memory figures come from the packed cache alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from residualquant.attention import attend_one, count_unusable, to_bf16
from residualquant.config import KVQuantConfig
from residualquant.models.base import KVShape
from residualquant.residual import PackedKV, concatenate, decode, encode, reconstruct
from residualquant.rotation import Rotation, rotation_for

RotationMap = Mapping[tuple[int, int, str], Rotation]


def loop_groups(shape: KVShape, cfg: KVQuantConfig) -> int:
    """How many groups of ``cfg.loops`` loops the model's loops make.

    Raises:
        ValueError: the model's loops do not divide into such groups.
    """
    if shape.loops % cfg.loops:
        raise ValueError(
            f"the configuration has bits for {cfg.loops} loops, got a model of {shape.loops} loops, "
            f"which do not divide into groups of {cfg.loops}"
        )
    return shape.loops // cfg.loops


class LayerRotations:
    """The rotation of every (loop group, layer, K or V) of one configuration; None where there is no rotation.

    Args:
        cfg: the configuration; "none" and "hadamard" need nothing else.
        shape: KV shape of the model.
        device: where the matrices live.
        calibrated: ``{(group, layer, "k" or "v"): Rotation}`` for the rotations that are calibrated.

    Raises:
        ValueError: a calibrated rotation that is missing, or that does not fit the heads.
    """

    def __init__(
        self, cfg: KVQuantConfig, shape: KVShape, device: torch.device | str, calibrated: RotationMap | None = None
    ):
        self.loops = cfg.loops
        self.shared: Rotation | None = None
        needed = cfg.rotation in ("oscar", "optr_h") and not cfg.is_off
        self._calibrated = (calibrated or {}) if needed else None
        if self._calibrated is None:
            self.shared = rotation_for(cfg, shape.head_dim, device)
            return
        for group in range(loop_groups(shape, cfg)):
            for layer in range(shape.layers):
                for kind in "kv":
                    rotation = self._calibrated.get((group, layer, kind))
                    if rotation is None:
                        raise ValueError(f"no {cfg.rotation} rotation was given for {(group, layer, kind)}")
                    if rotation.head_dim != shape.head_dim or rotation.heads not in (None, shape.kv_heads):
                        raise ValueError(
                            f"the rotation of {(group, layer, kind)} must fit {shape.kv_heads} heads of "
                            f"{shape.head_dim} channels, got {list(rotation.matrix.shape)}"
                        )

    @property
    def is_shared(self) -> bool:
        """True where all layers, K and V have the same rotation (or none)."""
        return self._calibrated is None

    def get(self, group: int, layer: int, kind: str) -> Rotation | None:
        """The rotation of one loop group, layer and ``kind`` "k" or "v"."""
        return self.shared if self._calibrated is None else self._calibrated[group, layer, kind]

    def of_loop(self, loop: int, layer: int, kind: str) -> Tensor | None:
        """The FP32 matrix, [D, D] or [H, D, D], of one loop of the model."""
        rotation = self.get(loop // self.loops, layer, kind)
        return None if rotation is None else rotation.matrix.float()

    def rotate_all(self, kv: Tensor) -> Tensor:
        """``kv`` [loops, layers, 2, ..., H, D] in rotated space, FP32."""
        if self.is_shared:
            return kv.float() if self.shared is None else self.shared.rotate(kv)
        out = torch.empty(kv.shape, dtype=torch.float32, device=kv.device)
        for loop in range(kv.shape[0]):
            for layer in range(kv.shape[1]):
                for index, kind in enumerate("kv"):
                    out[loop, layer, index] = self.get(loop // self.loops, layer, kind).rotate(kv[loop, layer, index])
        return out


def reconstruct_all(kv: Tensor, cfg: KVQuantConfig, rotations: LayerRotations) -> Tensor:
    """What a cache of ``cfg`` gives back for the BF16 values ``kv``, in rotated space.

    Loops are split into the configuration's groups, and all layers, K and V are coded in one call where they share a
    rotation.

    Args:
        kv: [loops, layers, 2, ..., H, D], K then V.

    Returns:
        The same shape, FP32.
    """
    grouped = kv.unflatten(0, (-1, cfg.loops))
    if rotations.is_shared:
        return reconstruct(grouped.transpose(0, 1), cfg, rotations.shared).transpose(0, 1).flatten(0, 1)
    out = torch.empty(grouped.shape, dtype=torch.float32, device=kv.device)
    for group in range(grouped.shape[0]):
        for layer in range(kv.shape[1]):
            for index, kind in enumerate("kv"):
                x = grouped[group, :, layer, index]
                out[group, :, layer, index] = reconstruct(x, cfg, rotations.get(group, layer, kind))
    return out.flatten(0, 1)


@dataclass
class _Layer:
    """One layer's tokens, oldest first: BF16 sinks, packed ones, BF16 recent ones, and the forward in flight.

    ``packed[group]`` is (K, V) of a loop group, its tensors [B, T, H, ...]. Windows are [B, T, 2, loops, H, D] BF16.
    ``staged[loop]`` is (K, V) [B, T, H, D] BF16 of the loops done so far.
    """

    packed: list[tuple[PackedKV, PackedKV]] | None = None
    sink: Tensor | None = None
    recent: Tensor | None = None
    staged: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def packed_length(self) -> int:
        return 0 if self.packed is None else self.packed[0][0].loops[0].codes.shape[1]

    @property
    def length(self) -> int:
        windows = sum(w.shape[1] for w in (self.sink, self.recent) if w is not None)
        return self.packed_length + windows


class PackedCache:
    """KV cache of a looped model in packed form: codes, FP8 metadata and coefficients, and BF16 windows if asked.

    Tokens go in by :meth:`append` (all loops of a layer at once), or loop by loop through :meth:`stage` or the
    Hugging Face style :meth:`update`; they are packed when the last loop has delivered them. ``sink_tokens`` counts
    cache columns, so a left-padded batch spends them on padding.

    Args:
        shape: KV shape of the model.
        cfg: the configuration; its loops must divide the model's.
        rotations: ``{(group, layer, "k" or "v"): Rotation}`` where the configuration's rotation is calibrated.
        device: where matrices live; tokens stay where they come from.

    Raises:
        ValueError: loops that do not divide, or a calibrated rotation that is missing or of another shape.
    """

    def __init__(
        self,
        shape: KVShape,
        cfg: KVQuantConfig,
        rotations: RotationMap | None = None,
        device: torch.device | str = "cpu",
    ):
        self.shape, self.config = shape, cfg
        self.groups = loop_groups(shape, cfg)
        self.rotations = LayerRotations(cfg, shape, device, rotations)
        self.sanitised: Tensor | int = 0
        self._layers = [_Layer() for _ in range(shape.layers)]

    @property
    def nbytes(self) -> int:
        """Bytes stored: codes, metadata, coefficients, and 16 bits per value of the windows (App. A.3)."""
        total = 0
        for layer in self._layers:
            total += sum(part.nbytes for pair in layer.packed or () for part in pair)
            total += sum(w.numel() * w.element_size() for w in (layer.sink, layer.recent) if w is not None)
        return total

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Add tokens of one layer, all loops at once.

        Args:
            layer: from 0.
            k: [L, B, T, H, D], post-RoPE keys; v: the same shape. Rounded to BF16 first.

        Raises:
            ValueError: another shape, or another batch than the cache holds.
        """
        s = self.shape
        for name, x in (("k", k), ("v", v)):
            if x.dim() != 5 or (x.shape[0], *x.shape[3:]) != (s.loops, s.kv_heads, s.head_dim):
                raise ValueError(f"{name} must be [{s.loops}, B, T, {s.kv_heads}, {s.head_dim}], got {list(x.shape)}")
        if k.shape != v.shape:
            raise ValueError(f"k and v must have one shape, got {list(k.shape)} and {list(v.shape)}")
        self._check_layer(layer)
        kv = torch.stack([k, v]).to(torch.bfloat16).permute(2, 3, 0, 1, 4, 5)
        self._check_batch(layer, kv.shape[0])
        self.sanitised = self.sanitised + count_unusable(kv)
        self._push(self._layers[layer], layer, kv)

    def _push(self, state: _Layer, layer: int, kv: Tensor) -> None:
        """Add ``kv`` [B, T, 2, loops, H, D]: fill the sinks, queue the rest, pack what leaves the recent window."""
        room = self.config.sink_tokens - (0 if state.sink is None else state.sink.shape[1])
        if room > 0:
            state.sink = _join(state.sink, kv[:, :room])
            kv = kv[:, room:]
        queue = _join(state.recent, kv)
        leaving = max(0, queue.shape[1] - self.config.recent_tokens)
        state.recent = queue[:, leaving:].clone() if self.config.recent_tokens else None
        if leaving:
            new = self._encode(layer, queue[:, :leaving])
            if state.packed is not None:
                new = [
                    tuple(concatenate(list(parts), 1) for parts in zip(old, fresh))
                    for old, fresh in zip(state.packed, new)
                ]
            state.packed = new

    def _encode(self, layer: int, kv: Tensor) -> list[tuple[PackedKV, PackedKV]]:
        loops = kv.permute(2, 3, 0, 1, 4, 5).unflatten(1, (self.groups, self.config.loops))
        return [
            tuple(
                encode(loops[index, group], self.config, self.rotations.get(group, layer, kind))
                for index, kind in enumerate("kv")
            )
            for group in range(self.groups)
        ]

    def read(self, layer: int, space: str = "original") -> tuple[Tensor, Tensor]:
        """K and V [L, B, S, H, D] FP32 of the tokens packed or windowed so far, "original" or "rotated" (Sec. 3.2)."""
        self._check_layer(layer)
        k, v = (
            torch.cat([self._read_group(layer, group, index, space) for group in range(self.groups)])
            for index in (0, 1)
        )
        return k, v

    def past(self, loop: int, layer: int) -> tuple[Tensor, Tensor]:
        """Zhat_K and Zhat_V [B, S, H, D] FP32 of one loop in rotated space, without the forward in flight."""
        group, inner = divmod(loop, self.config.loops)
        k, v = (self._read_group(layer, group, index, "rotated")[inner] for index in (0, 1))
        return k, v

    def matrices(self, loop: int, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Rotations of K and V of one loop, as FP32 matrices."""
        return self.rotations.of_loop(loop, layer, "k"), self.rotations.of_loop(loop, layer, "v")

    def _read_group(self, layer: int, group: int, index: int, space: str) -> Tensor:
        """K (index 0) or V of the loops of one group: [loops of the group, B, S, H, D] FP32."""
        state, own = self._layers[layer], slice(group * self.config.loops, (group + 1) * self.config.loops)
        rotation = self.rotations.get(group, layer, "kv"[index]) if space == "rotated" else None
        parts = []
        for stored in (state.sink, state.packed, state.recent):
            if isinstance(stored, list):
                parts.append(decode(stored[group][index], space))
            elif stored is not None:
                raw = to_bf16(stored[:, :, index, own]).float().movedim(2, 0)
                parts.append(raw if rotation is None else rotation.rotate(raw))
        if not parts:
            return torch.empty(self.config.loops, 0, 0, self.shape.kv_heads, self.shape.head_dim)
        return torch.cat(parts, dim=2)

    def stage(self, loop: int, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep K and V [B, T, H, D] of one loop of this forward; the last loop packs them all (Sec. 4).

        Returns:
            K and V as this forward's attention reads them: BF16, finite.

        Raises:
            ValueError: a loop out of turn, or another batch or length than the loops before.
        """
        self._check_layer(layer)
        state = self._layers[layer]
        if loop != len(state.staged):
            raise ValueError(f"layer {layer} expects loop {len(state.staged)} next, got loop {loop}")
        if loop and k.shape != state.staged[0][0].shape:
            raise ValueError(f"loop {loop} must bring K of {list(state.staged[0][0].shape)}, got {list(k.shape)}")
        state.staged[loop] = (k.to(torch.bfloat16), v.to(torch.bfloat16))
        if len(state.staged) == self.shape.loops:
            keys, values = zip(*state.staged.values())
            state.staged = {}
            self.append(layer, torch.stack(keys), torch.stack(values))
        return to_bf16(k), to_bf16(v)

    def update(self, k: Tensor, v: Tensor, layer_idx: int, cache_kwargs: dict | None = None) -> tuple[Tensor, Tensor]:
        """Hugging Face style: add K and V of one (loop, layer) and get all that this forward may attend to.

        Args:
            k, v: [B, H, T, D], post-RoPE.
            layer_idx: loop * N + layer.
            cache_kwargs: ignored.

        Returns:
            K and V [B, H, S + T, D] in the dtype of k: the past as decoded, in the original space, then these tokens
            in BF16.

        Raises:
            ValueError: a ``layer_idx`` out of range or out of turn.
        """
        loop, layer = self._split_index(layer_idx)
        group, inner = divmod(loop, self.config.loops)
        past = [self._read_group(layer, group, index, "original")[inner] for index in (0, 1)]
        step = self.stage(loop, layer, k.transpose(1, 2), v.transpose(1, 2))
        keys, values = (
            (torch.cat([old.to(k.dtype), new.to(k.dtype)], 1) if old.shape[1] else new.to(k.dtype)).transpose(1, 2)
            for old, new in zip(past, step)
        )
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that (loop, layer) has seen, ``layer_idx`` = loop * N + layer; the forward in flight counts."""
        loop, layer = self._split_index(layer_idx)
        state = self._layers[layer]
        return state.length + (state.staged[loop][0].shape[1] if loop in state.staged else 0)

    def length(self, layer: int = 0) -> int:
        """Tokens packed or windowed in ``layer``."""
        self._check_layer(layer)
        return self._layers[layer].length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was (beam search); ``beam_idx`` [B']."""
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows ``indices`` [B'] in that order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times in place."""
        self._map(lambda t: t.repeat_interleave(repeats, 0))

    def crop(self, max_length: int) -> None:
        """Keep the first ``max_length`` tokens; a negative number removes that many from the end.

        Tokens already packed stay packed: a recent window that was cropped fills up again with new tokens.
        """
        for state in self._layers:
            flight = max((k.shape[1] for k, _ in state.staged.values()), default=0)
            total = state.length + flight
            keep = max(0, total + max_length) if max_length < 0 else min(max_length, total)
            left = [keep]
            for part in (state.sink.shape[1] if state.sink is not None else 0, state.packed_length):
                left.append(max(0, left[-1] - part))
            left.append(max(0, keep - state.length))
            self._map_layer(state, *(lambda t, n=n: t[:, :n].clone() for n in left))

    def reset(self) -> None:
        """Forget all tokens, those in flight and the count of sanitised values included."""
        self._layers = [_Layer() for _ in self._layers]
        self.sanitised = 0

    def shift_positions(self, offset: int) -> None:
        """Refused: packed keys are post-RoPE and cannot be rotated to other positions.

        Raises:
            ValueError: always, unless ``offset`` is 0.
        """
        if offset:
            raise ValueError(f"keys are packed after RoPE, so their positions cannot be shifted, got offset {offset}")

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        for state in self._layers:
            self._map_layer(state, change, change, change, change)

    @staticmethod
    def _map_layer(state: _Layer, sink: Callable, packed: Callable, recent: Callable, staged: Callable) -> None:
        """Apply one change of [B, T, ...] tensors to each kind of stored token."""
        state.sink = None if state.sink is None else sink(state.sink)
        state.recent = None if state.recent is None else recent(state.recent)
        if state.packed is not None:
            state.packed = [tuple(part.map(packed) for part in pair) for pair in state.packed]
        state.staged = {loop: (staged(k), staged(v)) for loop, (k, v) in state.staged.items()}

    def _split_index(self, layer_idx: int) -> tuple[int, int]:
        if not 0 <= layer_idx < self.shape.loops * self.shape.layers:
            raise ValueError(
                f"layer_idx must be loop * {self.shape.layers} + layer, below "
                f"{self.shape.loops * self.shape.layers}, got {layer_idx}"
            )
        return divmod(layer_idx, self.shape.layers)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.shape.layers:
            raise ValueError(f"layer must be from 0 to {self.shape.layers - 1}, got {layer}")

    def _check_batch(self, layer: int, batch: int) -> None:
        state = self._layers[layer]
        stored = state.sink if state.sink is not None else state.recent
        held = None
        if stored is not None:
            held = stored.shape[0]
        elif state.packed is not None:
            held = state.packed[0][0].loops[0].codes.shape[0]
        if held not in (None, batch):
            raise ValueError(f"the cache holds {held} sequences, got a batch of {batch}")


def _join(old: Tensor | None, new: Tensor) -> Tensor:
    return new.contiguous() if old is None else torch.cat([old, new], 1)


class DecodeCache:
    """Dequantised caches of many sequences, each under its own configuration: what a decode step reads (Sec. 4).

    ``data`` [loops, layers, 2 (K, V), rows, H, capacity, D] in each row's rotated space holds what the packed
    cache would decode to. Rows are right-padded: row i has its tokens in columns 0 … lengths[i] - 1. During a step the
    column ``lengths[i]`` holds the current token in BF16 precision; :meth:`commit` replaces it by its reconstruction.
    Reading it runs at memory bandwidth, 8 * S * H * D bytes per row, loop and layer.

    Args:
        shape: KV shape of the model.
        configs: the configuration of every row.
        capacity: most tokens a row may reach.
        storage: flat tensor (FP32) of finite values to live in, at least :meth:`numel` long.
    """

    def __init__(self, shape: KVShape, configs: Sequence[KVQuantConfig], capacity: int, storage: Tensor):
        size = (shape.loops, shape.layers, 2, len(configs), shape.kv_heads, capacity, shape.head_dim)
        self.data = storage[: self.numel(shape, len(configs), capacity)].view(size)
        self.configs = list(configs)
        self.lengths = torch.zeros(len(configs), dtype=torch.long, device=storage.device)
        self.longest = 0
        self._index = torch.arange(len(configs), device=storage.device)
        self._bias = None
        self._late = None
        widest = max((cfg.recent_tokens for cfg in configs), default=0)
        if widest:
            self._late = storage.new_zeros(*size[:5], widest, shape.head_dim)

    @staticmethod
    def numel(shape: KVShape, rows: int, capacity: int) -> int:
        """FP32 values that ``rows`` sequences of ``capacity`` tokens take."""
        return 2 * shape.loops * shape.layers * shape.kv_heads * shape.head_dim * rows * capacity

    @property
    def rows(self) -> int:
        """Sequences held."""
        return len(self.configs)

    def fill(self, row: int, raw: Tensor, rebuilt: Tensor) -> None:
        """Put a prompt into an empty row.

        Args:
            raw: [loops, layers, 2, T, H, D] BF16 values in the row's rotated space, for the BF16 windows.
            rebuilt: the same tokens as the packed cache decodes them, rotated space.
        """
        cfg, length = self.configs[row], rebuilt.shape[3]
        target = self.data[:, :, :, row, :, :length]
        target.copy_(rebuilt.transpose(3, 4))
        sink, recent = min(cfg.sink_tokens, length), min(cfg.recent_tokens, length)
        target[..., :sink, :] = raw[:, :, :, :sink].transpose(3, 4)
        if recent:
            target[..., length - recent :, :] = raw[:, :, :, length - recent :].transpose(3, 4)
            slots = torch.arange(length - recent, length, device=raw.device) % cfg.recent_tokens
            late = rebuilt[:, :, :, length - recent :].transpose(3, 4)
            self._late[:, :, :, row].index_copy_(4, slots, late.to(self._late.dtype))
        self.lengths[row] = length
        self.longest = max(self.longest, length)

    def begin_step(self) -> None:
        """Prepare the mask [rows, 1, 1, S] of the next token: all columns up to ``lengths[i]``, its own."""
        columns = torch.arange(self.longest + 1, device=self.lengths.device)
        hidden = columns[None] > self.lengths[:, None]
        bias = torch.zeros(hidden.shape, dtype=self.data.dtype, device=hidden.device)
        self._bias = bias.masked_fill_(hidden, -torch.inf)[:, None, None]

    def attend(self, loop: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the current token of every row over its past and itself.

        Args:
            q: [rows, Hq, D]; k, v: [rows, H, D]; FP32 in each row's rotated space, k and v of BF16 precision.

        Returns:
            [rows, Hq, D] FP32, in the rotated space of V.
        """
        keys, values = self.data[loop, layer]
        keys[self._index, :, self.lengths] = k
        values[self._index, :, self.lengths] = v
        seen = self.longest + 1
        return attend_one(q, keys[:, :, :seen], values[:, :, :seen], self._bias)

    def commit(self, rebuilt: Tensor) -> None:
        """End the step: the current tokens become past.

        Args:
            rebuilt: [loops, layers, 2, rows, H, D], what the packed cache decodes them to.
        """
        windowed = [row for row, cfg in enumerate(self.configs) if cfg.sink_tokens or cfg.recent_tokens]
        plain = self._index
        if windowed:
            self._commit_windowed(windowed, rebuilt)
            kept = [row for row in range(self.rows) if row not in set(windowed)]
            plain = torch.tensor(kept, dtype=torch.long, device=self.lengths.device)
            rebuilt = rebuilt.index_select(3, plain)
        self.data[:, :, :, plain, :, self.lengths[plain]] = rebuilt.movedim(3, 0)
        self.lengths += 1
        self.longest += 1

    def _commit_windowed(self, rows: list[int], rebuilt: Tensor) -> None:
        """Leave BF16 values in the windows; write the reconstruction of the token that leaves the recent one."""
        lengths = self.lengths.tolist()
        for row in rows:
            cfg, position, late = self.configs[row], lengths[row], rebuilt[:, :, :, row]
            if cfg.recent_tokens:
                slot = self._late[:, :, :, row, :, position % cfg.recent_tokens]
                late, old = slot.clone(), late
                slot.copy_(old)
            leaving = position - cfg.recent_tokens
            if leaving >= cfg.sink_tokens:
                self.data[:, :, :, row, :, leaving] = late

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
                self.data[:, :, :, hole, :, : self.longest] = self.data[:, :, :, order[hole], :, : self.longest]
                if self._late is not None:
                    self._late[:, :, :, hole] = self._late[:, :, :, order[hole]]
        self.data = self.data[:, :, :, : len(rows)]
        self.configs = [self.configs[row] for row in order]
        self.lengths = self.lengths[torch.tensor(order, dtype=torch.long, device=self.lengths.device)]
        self._index = self._index[: len(rows)]
        return order

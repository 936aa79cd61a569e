"""The packed KV cache of a looped model: the codes, FP8 metadata and coefficients of :mod:`residualquant.residual`.

Every mutation works on those, so nothing is ever quantised twice. Memory figures come from here; what the engine reads
while it decodes is a dequantised copy (:mod:`residualquant.batch`), equal to this bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from residualquant.attention import count_unusable, to_bf16
from residualquant.config import KVQuantConfig
from residualquant.models.base import EDGE, KVShape
from residualquant.residual import PackedKV, concatenate, decode, encode
from residualquant.rotation import Rotation, rotation_for

RotationMap = Mapping[tuple[int, int, str], Rotation]


def loop_groups(shape: KVShape, cfg: KVQuantConfig) -> int:
    """How many groups of ``cfg.loops`` loops the model's loops make.

    Raises:
        ValueError: the model's loops do not divide into such groups, or it lacks a layer that has bits of its own.
    """
    if cfg.layer_bits and cfg.layer_bits[-1][0] >= shape.layers:
        raise ValueError(f"layer_bits names layer {cfg.layer_bits[-1][0]}, got a model of {shape.layers} layers")
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
        self._calibrated: dict[tuple[int, int, str], Rotation] | None = None
        if cfg.rotation not in ("oscar", "optr_h") or cfg.is_off:
            self.shared = rotation_for(cfg, shape.head_dim, device)
            return
        self._calibrated = {}
        for group in range(loop_groups(shape, cfg)):
            for layer in range(shape.layers):
                for kind in "kv":
                    rotation = (calibrated or {}).get((group, layer, kind))
                    if rotation is None:
                        raise ValueError(f"no {cfg.rotation} rotation was given for {(group, layer, kind)}")
                    if rotation.head_dim != shape.head_dim or rotation.heads not in (None, shape.kv_heads):
                        raise ValueError(
                            f"the rotation of {(group, layer, kind)} must fit {shape.kv_heads} heads of "
                            f"{shape.head_dim} channels, got {list(rotation.matrix.shape)}"
                        )
                    self._calibrated[group, layer, kind] = rotation.to(device)

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


@dataclass
class _Layer:
    """One layer's tokens, oldest first: BF16 sinks, packed ones, BF16 recent ones, and the forward in flight.

    The K and V of ``loops`` loops (one in a layer that runs once) are coded in groups by ``config``: ``packed[group]``
    is (K, V) of a group, its tensors [B, T, H, ...]. Windows are [B, T, 2, loops, H, D] BF16. ``staged[loop]`` is
    (K, V) [B, T, H, D] of the loops done so far.
    """

    config: KVQuantConfig
    loops: int
    packed: list[tuple[PackedKV, PackedKV]] | None = None
    sink: Tensor | None = None
    recent: Tensor | None = None
    staged: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def groups(self) -> int:
        return self.loops // self.config.loops

    @property
    def stored(self) -> Tensor | None:
        """Some tensor [B, ...] of what is stored."""
        if self.packed is not None:
            return self.packed[0][0].loops[0].codes
        return self.sink if self.sink is not None else self.recent

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
    Hugging Face style :meth:`update`; they are packed when the last loop has delivered them. Layers that run once are
    numbered after the looped ones, have one loop, and are coded as ``cfg.for_edge``. ``sink_tokens`` counts cache
    columns, so a left-padded batch spends them on padding. The cache lives where its first tokens come from.

    Args:
        shape: KV shape of the model.
        cfg: the configuration; its loops must divide the model's.
        rotations: ``{(group, layer, "k" or "v"): Rotation}`` where the configuration's rotation is calibrated.
        edge_layers: how many layers run once.

    Raises:
        ValueError: loops that do not divide, or a calibrated rotation that is missing or of another shape.
    """

    def __init__(
        self, shape: KVShape, cfg: KVQuantConfig, rotations: RotationMap | None = None, *, edge_layers: int = 0
    ):
        loop_groups(shape, cfg)
        self.shape, self.config, self.edge_layers = shape, cfg, edge_layers
        self._given = rotations
        self.rotations = LayerRotations(cfg, shape, "cpu", rotations)
        self.device = torch.device("cpu")
        self.reset()

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
            layer: from 0; the layers that run once follow the looped ones.
            k: [L, B, T, H, D], post-RoPE keys; v: the same shape. Rounded to BF16 first.

        Raises:
            ValueError: another shape, dtype or device, or another batch than the cache holds.
        """
        state, s = self._layer(layer), self.shape
        for name, x in (("k", k), ("v", v)):
            if x.dim() != 5 or (x.shape[0], *x.shape[3:]) != (state.loops, s.kv_heads, s.head_dim):
                raise ValueError(
                    f"{name} must be [{state.loops}, B, T, {s.kv_heads}, {s.head_dim}], got {list(x.shape)}"
                )
        self._check_pair(state, k, v, batch=1)
        self._move(k.device)
        self.sanitised = self.sanitised + count_unusable(k) + count_unusable(v)
        self._push(state, layer, torch.stack([to_bf16(k), to_bf16(v)]).permute(2, 3, 0, 1, 4, 5))

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
            new = self._encode(state, layer, queue[:, :leaving])
            if state.packed is not None:
                new = [
                    tuple(concatenate(list(parts), 1) for parts in zip(old, fresh))
                    for old, fresh in zip(state.packed, new)
                ]
            state.packed = new

    def _encode(self, state: _Layer, layer: int, kv: Tensor) -> list[tuple[PackedKV, PackedKV]]:
        loops = kv.permute(2, 3, 0, 1, 4, 5).unflatten(1, (state.groups, state.config.loops))
        return [
            tuple(
                encode(loops[index, group], state.config, self._rotation(group, layer, kind))
                for index, kind in enumerate("kv")
            )
            for group in range(state.groups)
        ]

    def _rotation(self, group: int, layer: int, kind: str) -> Rotation | None:
        return self.rotations.get(group, layer, kind) if layer < self.shape.layers else None

    def read(self, layer: int, space: str = "original") -> tuple[Tensor, Tensor]:
        """K and V [L, B, S, H, D] FP32 of the tokens packed or windowed so far, "original" or "rotated" (Sec. 3.2)."""
        groups = range(self._layer(layer).groups)
        k, v = (torch.cat([self._read_group(layer, group, index, space) for group in groups]) for index in (0, 1))
        return k, v

    def past(self, loop: int, layer: int) -> tuple[Tensor, Tensor]:
        """Zhat_K and Zhat_V [B, S, H, D] FP32 of one loop in rotated space, without the forward in flight.

        Args:
            loop, layer: as the model calls ``attend``; ``loop`` is ``EDGE`` for a layer that runs once.

        Raises:
            ValueError: no such loop or layer.
        """
        layer, group, inner = self._locate(loop, layer)
        k, v = (self._read_group(layer, group, index, "rotated")[inner] for index in (0, 1))
        return k, v

    def matrices(self, loop: int, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Rotations of K and V of one loop (or ``EDGE``) and layer, as FP32 matrices."""
        self._locate(loop, layer)
        k, v = (None if loop == EDGE else self.rotations.of_loop(loop, layer, kind) for kind in "kv")
        return k, v

    def _read_group(self, layer: int, group: int, index: int, space: str) -> Tensor:
        """K (index 0) or V of the loops of one group: [loops of the group, B, S, H, D] FP32."""
        state = self._layers[layer]
        own = slice(group * state.config.loops, (group + 1) * state.config.loops)
        rotation = self._rotation(group, layer, "kv"[index]) if space == "rotated" else None
        parts = []
        for stored in (state.sink, state.packed, state.recent):
            if isinstance(stored, list):
                parts.append(decode(stored[group][index], space))
            elif stored is not None:
                raw = stored[:, :, index, own].float().movedim(2, 0)
                parts.append(raw if rotation is None else rotation.rotate(raw))
        if not parts:
            return torch.empty(state.config.loops, 0, 0, self.shape.kv_heads, self.shape.head_dim)
        return torch.cat(parts, dim=2)

    def stage(self, loop: int, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep K and V [B, T, H, D] of one loop of this forward; the last loop packs them all (Sec. 4).

        ``loop`` is ``EDGE`` for a layer that runs once, which is packed at once.

        Returns:
            K and V as this forward's attention reads them: BF16, finite.

        Raises:
            ValueError: a loop out of turn, another batch or length than the loops before, or what :meth:`append`
                refuses.
        """
        layer, group, inner = self._locate(loop, layer)
        state, turn = self._layers[layer], group * self._layers[layer].config.loops + inner
        if turn != len(state.staged):
            raise ValueError(f"layer {layer} expects loop {len(state.staged)} next, got loop {loop}")
        s = self.shape
        for name, x in (("k", k), ("v", v)):
            if x.dim() != 4 or tuple(x.shape[2:]) != (s.kv_heads, s.head_dim):
                raise ValueError(f"{name} must be [B, T, {s.kv_heads}, {s.head_dim}], got {list(x.shape)}")
        self._check_pair(state, k, v, batch=0)
        if turn and k.shape != state.staged[0][0].shape:
            raise ValueError(f"loop {loop} must bring K of {list(state.staged[0][0].shape)}, got {list(k.shape)}")
        state.staged[turn] = (k, v)
        if len(state.staged) == state.loops:
            keys, values = zip(*state.staged.values())
            state.staged = {}
            self.append(layer, torch.stack(keys), torch.stack(values))
        return to_bf16(k), to_bf16(v)

    def update(self, k: Tensor, v: Tensor, layer_idx: int, cache_kwargs: dict | None = None) -> tuple[Tensor, Tensor]:
        """Hugging Face style: add K and V of one (loop, layer) and get all that this forward may attend to.

        Args:
            k, v: [B, H, T, D], post-RoPE.
            layer_idx: loop * N + layer; the layers that run once follow at L * N.
            cache_kwargs: ignored.

        Returns:
            K and V [B, H, S + T, D] in the dtype of k: the past as decoded, in the original space, then these tokens
            in BF16.

        Raises:
            ValueError: a ``layer_idx`` out of range or out of turn.
        """
        loop, layer = self._split_index(layer_idx)
        for name, x in (("k", k), ("v", v)):
            if x.dim() != 4:
                raise ValueError(f"{name} must be [B, H, T, D], got {list(x.shape)}")
        place, group, inner = self._locate(loop, layer)
        past = [self._read_group(place, group, index, "original")[inner] for index in (0, 1)]
        step = self.stage(loop, layer, k.transpose(1, 2), v.transpose(1, 2))
        keys, values = (
            (torch.cat([old.to(k.dtype), new.to(k.dtype)], 1) if old.shape[1] else new.to(k.dtype)).transpose(1, 2)
            for old, new in zip(past, step)
        )
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that (loop, layer) has seen, ``layer_idx`` as for :meth:`update`; the forward in flight counts."""
        loop, layer = self._split_index(layer_idx)
        state = self._layers[self._locate(loop, layer)[0]]
        return state.length + (state.staged[loop][0].shape[1] if loop in state.staged else 0)

    def length(self, layer: int = 0) -> int:
        """Tokens packed or windowed in ``layer``."""
        return self._layer(layer).length

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
        looped = [_Layer(self.config.for_layer(layer), self.shape.loops) for layer in range(self.shape.layers)]
        self._layers = looped + [_Layer(self.config.for_edge, 1) for _ in range(self.edge_layers)]
        self.sanitised: Tensor | int = 0

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
        looped = self.shape.loops * self.shape.layers
        if not 0 <= layer_idx < looped + self.edge_layers:
            raise ValueError(
                f"layer_idx must be loop * {self.shape.layers} + layer, below {looped + self.edge_layers}, "
                f"got {layer_idx}"
            )
        return divmod(layer_idx, self.shape.layers) if layer_idx < looped else (EDGE, layer_idx - looped)

    def _locate(self, loop: int, layer: int) -> tuple[int, int, int]:
        """The layer counted through all, and the group and the loop within it, of ``attend(loop, layer, ...)``."""
        looped = loop != EDGE
        count, loops = (self.shape.layers, self.shape.loops) if looped else (self.edge_layers, 1)
        if not 0 <= layer < count or (looped and not 0 <= loop < loops):
            raise ValueError(f"no layer {layer} in loop {loop}: got a model of {loops} loops of {count} layers")
        return (layer, *divmod(loop, self.config.loops)) if looped else (self.shape.layers + layer, 0, 0)

    def _layer(self, layer: int) -> _Layer:
        if not 0 <= layer < len(self._layers):
            raise ValueError(f"layer must be from 0 to {len(self._layers) - 1}, got {layer}")
        return self._layers[layer]

    def _check_pair(self, state: _Layer, k: Tensor, v: Tensor, batch: int) -> None:
        """Whether K and V fit each other and what the layer holds; their dimension ``batch`` is the batch."""
        for name, x in (("k", k), ("v", v)):
            if not x.is_floating_point():
                raise ValueError(f"{name} must have a floating-point dtype, got {x.dtype}")
        if k.shape != v.shape or k.device != v.device:
            about = [f"{list(x.shape)} on {x.device}" for x in (k, v)]
            raise ValueError(f"k and v must have one shape and device, got {about[0]} and {about[1]}")
        held = state.stored
        if held is not None and held.shape[0] != k.shape[batch]:
            raise ValueError(f"the cache holds {held.shape[0]} sequences, got a batch of {k.shape[batch]}")
        if held is not None and held.device != k.device:
            raise ValueError(f"the cache lives on {held.device}, got k and v on {k.device}")

    def _move(self, device: torch.device) -> None:
        """Take the rotations to where the tokens are."""
        if device != self.device:
            self.rotations, self.device = LayerRotations(self.config, self.shape, device, self._given), device


def _join(old: Tensor | None, new: Tensor) -> Tensor:
    return new.contiguous() if old is None else torch.cat([old, new], 1)

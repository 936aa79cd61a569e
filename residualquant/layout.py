"""Every bit and byte count of the method, and the layout of a page.  No tensors here.

Three kinds of number are kept apart: what is *stored* per token and head (capacity), what is *read* per decode step to
rebuild all loops (traffic), and how many stored loop states that means (logical reads, App. D). All are per layer:
means over ``layers`` layers, which must be given where some have bits of their own (``cfg.layer_bits``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import TYPE_CHECKING

from residualquant.config import RAW_BITS, KVQuantConfig
from residualquant.errors import check_count, check_index, check_type

if TYPE_CHECKING:
    from residualquant.models.base import KVShape

ALPHA_BYTES = 2  # BF16
METADATA_BYTES_PER_GROUP = 2  # FP8 e4m3fn scale, then FP8 e4m3fn offset


def check_head_dim(cfg: KVQuantConfig, head_dim: int) -> None:
    """Check that heads of ``head_dim`` channels split into whole groups and whole bytes.

    Raises:
        ValueError: ``head_dim`` is not a positive multiple of 16, or not of some loop's group size in some layer.
    """
    if not isinstance(head_dim, int) or head_dim <= 0 or head_dim % 16:
        raise ValueError(f"head_dim must be a positive multiple of 16, got {head_dim!r}")
    for one in {cfg.for_layer(layer) for layer in (None, *dict(cfg.layer_bits))}:
        for loop, group_size in enumerate(one.group_sizes):
            if group_size is not None and head_dim % group_size:
                raise ValueError(f"head_dim {head_dim} is not divisible by the group size {group_size} of loop {loop}")


def _by_layer(cfg: KVQuantConfig, layers: int | None) -> list[KVQuantConfig]:
    """The configuration of every layer; of one for all where they do not differ."""
    if not cfg.layer_bits:
        return [cfg]
    if layers is None or layers <= cfg.layer_bits[-1][0]:
        raise ValueError(f"layer_bits={cfg.layer_bits} needs the number of layers, more than that; got {layers}")
    return [cfg.for_layer(layer) for layer in range(layers)]


def codes_bytes(cfg: KVQuantConfig, loop: int, head_dim: int) -> int:
    """Bytes of codes (or of raw BF16 values) of one token and head of ``loop``."""
    return cfg.bits[loop] * head_dim // 8


def metadata_bytes(cfg: KVQuantConfig, loop: int, head_dim: int) -> int:
    """Bytes of FP8 scales and offsets of one token and head of ``loop``."""
    group_size = cfg.group_sizes[loop]
    return 0 if group_size is None else METADATA_BYTES_PER_GROUP * head_dim // group_size


def alpha_bytes(cfg: KVQuantConfig, loop: int) -> int:
    """Bytes of the BF16 coefficient of one token and head of ``loop``."""
    return ALPHA_BYTES if cfg.stores_alpha(loop) else 0


def loop_bytes(cfg: KVQuantConfig, loop: int, head_dim: int) -> int:
    """Bytes that one token and head of ``loop`` takes, K or V (App. A.3).

    Raises:
        ValueError: a head size that does not fit, or a loop that there is not.
    """
    check_head_dim(cfg, head_dim)
    check_index("loop", loop, cfg.loops)
    return codes_bytes(cfg, loop, head_dim) + metadata_bytes(cfg, loop, head_dim) + alpha_bytes(cfg, loop)


def stored_bytes(cfg: KVQuantConfig, head_dim: int, layers: int | None = None) -> float:
    """Bytes that one token and head takes over all loops of the group, K or V (App. A.3); whole without layer_bits."""
    check_head_dim(cfg, head_dim)
    return mean(sum(loop_bytes(c, loop, head_dim) for loop in range(c.loops)) for c in _by_layer(cfg, layers))


def effective_bits(cfg: KVQuantConfig, head_dim: int, layers: int | None = None) -> float:
    """Stored bits per value: ``mean_r(b_r + 16/g_r) + 16 (L-1) / (L D)`` (App. A.3).

    The last term counts the stored coefficients only.  Rotations, means, padding, BF16 windows, buffers and layers that
    run once are not part of it.
    """
    return 8 * stored_bytes(cfg, head_dim, layers) / (cfg.loops * head_dim)


def token_bytes(cfg: KVQuantConfig, shape: KVShape, edge_layers: int = 0) -> int:
    """Bytes that one packed token takes in a whole model: K and V of all heads, loops and layers, run once or not.

    Raises:
        ValueError: a head size that does not fit, loops that are not whole groups, or a layer that there is not.
    """
    check_head_dim(cfg, shape.head_dim)
    check_count("edge_layers", edge_layers, 0)
    if shape.loops % cfg.loops:
        raise ValueError(f"{shape.loops} loops are not whole groups of {cfg.loops}, for which there are bits")
    layers = _by_layer(cfg, shape.layers)
    looped = shape.loops // cfg.loops * sum(stored_bytes(c, shape.head_dim) for c in layers)
    looped *= shape.layers // len(layers)
    return 2 * shape.kv_heads * (looped + edge_layers * stored_bytes(cfg.for_edge, shape.head_dim))


def model_effective_bits(cfg: KVQuantConfig, shape: KVShape, edge_layers: int = 0) -> float:
    """Stored bits per value of a whole model, the layers that run once included."""
    values = 2 * shape.kv_heads * shape.head_dim * (shape.loops * shape.layers + edge_layers)
    return 8 * token_bytes(cfg, shape, edge_layers) / values


def capacity_ratio(cfg: KVQuantConfig, head_dim: int, layers: int | None = None) -> float:
    """How many times more tokens fit than with a BF16 cache: 16 / b_eff."""
    return RAW_BITS / effective_bits(cfg, head_dim, layers)


def loops_read(cfg: KVQuantConfig, loop: int) -> tuple[int, ...]:
    """The stored loops that rebuild ``loop``: itself, its reference, the reference of that one, and so on.

    Raises:
        ValueError: there is no such loop.
    """
    check_index("loop", loop, cfg.loops)
    chain = [loop]
    while (reference := cfg.reference_of(chain[-1])) is not None:
        chain.append(reference)
    return tuple(chain)


def logical_reads(cfg: KVQuantConfig, layers: int | None = None) -> float:
    """Stored loop states read per decode step: 2L-1 for a shared anchor, L(L+1)/2 for a chain (App. D)."""
    return mean(sum(len(loops_read(c, loop)) for loop in range(c.loops)) for c in _by_layer(cfg, layers))


def bytes_read_per_step(cfg: KVQuantConfig, head_dim: int, layers: int | None = None) -> float:
    """Bytes read per decode step for all loops of one past token and head, K or V."""
    check_head_dim(cfg, head_dim)
    read = []
    for c in _by_layer(cfg, layers):
        sizes = [loop_bytes(c, loop, head_dim) for loop in range(c.loops)]
        read.append(sum(sizes[stored] for loop in range(c.loops) for stored in loops_read(c, loop)))
    return mean(read)


def traffic_ratio(cfg: KVQuantConfig, head_dim: int, layers: int | None = None) -> float:
    """How many times fewer bytes a decode step reads than with a BF16 cache: the ceiling of any speed-up."""
    return RAW_BITS // 8 * head_dim * cfg.loops / bytes_read_per_step(cfg, head_dim, layers)


PAGE_LAYOUT_VERSION = 1  # raise it with any change of offset, order or interleaving
PLANE_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Plane:
    """One part of a page of one head: the codes, metadata or coefficients of one loop for all tokens of the page.

    Attributes:
        kv: "k" or "v".
        group: loop group, from 0.
        loop: loop within the group, from 0.
        kind: "codes", "metadata" or "alpha".
        offset: first byte within the head's part of the page.
        token_bytes: bytes of one token.
        interleaved: whether tokens 2i and 2i+1 alternate in 16-bit words, else token follows token.
    """

    kv: str
    group: int
    loop: int
    kind: str
    offset: int
    token_bytes: int
    interleaved: bool


@dataclass(frozen=True)
class PageLayout:
    """Where every byte of a page is, for the kernels, the serving plugin and the torch reference alike.

    A page holds ``page_tokens`` tokens of one layer, all loops: uint8 [blocks, H, page_bytes_per_head].  Per head come
    K, then V; within each, loop group by loop group; within a group the planes of the anchor, then those of every other
    loop in order (with direct coding: of every loop in order).  A plane covers all tokens of the page and starts at a
    multiple of 16 bytes.  V codes are interleaved by token pair in 16-bit words, so that one 32-bit load gives a matrix
    instruction the same channels of two tokens, and a token's write never shares a half-word with another's.

    Attributes:
        config: of one loop group.
        head_dim: channels per head (D).
        page_tokens: tokens per page (S), a multiple of 16.
        groups: loop groups per layer: 1 for Ouro, 8 for Huginn's 32 recurrences in groups of 4.

    Raises:
        ValueError: a page size that is no multiple of 16, no group, a head size that does not fit, or bits of several
            layers (each has pages of its own).
    """

    config: KVQuantConfig
    head_dim: int
    page_tokens: int = 16
    groups: int = 1

    def __post_init__(self) -> None:
        check_type("config", self.config, KVQuantConfig)
        check_head_dim(self.config, self.head_dim)
        if self.config.layer_bits:
            raise ValueError(
                f"a page holds one layer: give config.for_layer(n), got layer_bits={self.config.layer_bits}"
            )
        check_count("page_tokens", self.page_tokens)
        if self.page_tokens % 16:
            raise ValueError(f"page_tokens must be a multiple of 16, got {self.page_tokens}")
        check_count("groups", self.groups)

    @property
    def version(self) -> int:
        """Version of the layout, to be stored with pages and checked by kernels."""
        return PAGE_LAYOUT_VERSION

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """Every plane of one head, in the order of its bytes; planes without bytes are left out."""
        planes: list[Plane] = []
        offset = 0
        for kv in ("k", "v"):
            for group in range(self.groups):
                for loop, kind, token_bytes in self._parts():
                    interleaved = kv == "v" and kind == "codes"
                    planes.append(Plane(kv, group, loop, kind, offset, token_bytes, interleaved))
                    offset += _round_up(token_bytes * self.page_tokens, PLANE_ALIGNMENT)
        return tuple(planes)

    def _parts(self) -> list[tuple[int, str, int]]:
        """(loop, kind, bytes per token) of one group, anchor first, without empty parts."""
        cfg = self.config
        parts = []
        for loop in sorted(range(cfg.loops), key=lambda loop: (loop != cfg.anchor, loop)):
            parts.append((loop, "codes", codes_bytes(cfg, loop, self.head_dim)))
            parts.append((loop, "metadata", metadata_bytes(cfg, loop, self.head_dim)))
            parts.append((loop, "alpha", alpha_bytes(cfg, loop)))
        return [part for part in parts if part[2]]

    @property
    def page_bytes_per_head(self) -> int:
        """Bytes of one head in a page, K and V.  Planes need no padding, so this is the storage arithmetic exactly."""
        last = self.planes[-1]
        return last.offset + _round_up(last.token_bytes * self.page_tokens, PLANE_ALIGNMENT)

    def planes_of(self, kv: str, group: int = 0) -> tuple[Plane, ...]:
        """The planes of K or of V of one loop group.

        Raises:
            ValueError: no such group in this layout.
        """
        if kv not in ("k", "v"):
            raise ValueError(f'kv must be "k" or "v", got {kv!r}')
        check_index("group", group, self.groups)
        return tuple(plane for plane in self.planes if (plane.kv, plane.group) == (kv, group))

    def plane(self, kv: str, loop: int, kind: str, group: int = 0) -> Plane:
        """The plane of that name.

        Raises:
            ValueError: no such plane in this layout.
        """
        for plane in self.planes_of(kv, group):
            if (plane.loop, plane.kind) == (loop, kind):
                return plane
        raise ValueError(f"a page of bits {self.config.bits} has no plane {(kv, group, loop, kind)}")

    def offset_of(self, plane: Plane, token: int, byte: int) -> int:
        """Where byte ``byte`` of token ``token`` of the page lies, counted within the head's part of the page.

        Raises:
            ValueError: the plane has no such token or byte.
        """
        check_index("token", token, self.page_tokens)
        check_index("byte", byte, plane.token_bytes)
        if plane.interleaved:
            return plane.offset + token // 2 * 2 * plane.token_bytes + byte // 2 * 4 + token % 2 * 2 + byte % 2
        return plane.offset + token * plane.token_bytes + byte


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

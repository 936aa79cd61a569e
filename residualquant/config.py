"""What can be chosen about the codec: one frozen, validated dataclass, and the paper's configurations by their labels.

A configuration describes one *loop group*: the loops whose KV states are coded together (all 4 loops of Ouro; 4, 8 or
16 of Huginn's 32 recurrences, Sec. 3.2).  Loops are counted from 0 here and from 1 in prose.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, SupportsIndex

BITS = (0, 1, 2, 3, 4, 8, 16)
GROUP_SIZES = (16, 32, 64)
REFERENCES = ("last", "first", "previous", "next", "direct")
COEFFICIENTS = ("ls", "norm_ratio", "unit")
ROTATIONS = ("none", "hadamard", "oscar", "optr_h")
ROUNDINGS = ("fp32", "bf16")

RAW_BITS = 16  # a loop of 16 bits is stored as it is: no codes, no metadata, no coefficient


@dataclass(frozen=True)
class KVQuantConfig:
    """How the K or V states of one loop group are coded (Sec. 3.2).

    Attributes:
        bits: precision of every loop, each one of 0, 1, 2, 3, 4, 8, 16.  0 keeps only the scaled reference,
            16 keeps the BF16 values themselves; all loops 16 switches the codec off.
        group_size: channels that share one scale and offset in loops of 1-3 bits.
        int4_group_size: the same for loops of 4 and 8 bits.
        reference: which reconstructed loop predicts the others; "direct" codes every loop alone.
        coefficient: alpha of the prediction: least squares, norm ratio, or 1 (then nothing is stored).
        rotation: change of basis before coding (Sec. 3.3).  "oscar" and "optr_h" need a calibrated ``Rotation``.
        int2_clip: factor on the half-range of a 2-bit group.
        rounding: "fp32", or "bf16" to round prediction, residual and reconstruction as the authors' exporter does.
        sink_tokens: first tokens that the cache keeps in BF16.
        recent_tokens: last tokens that the cache keeps in BF16 until they leave the window.
        layer_bits: other ``bits`` for single layers (from 0), as ``((layer, bits), ...)``: a first layer whose keys
            have outliers may need more. Integer sequences of any kind are taken.

    Raises:
        ValueError: any value outside these choices; the message names it.
    """

    bits: tuple[int, ...] = (2, 2, 2, 4)
    group_size: int = 32
    int4_group_size: int = 32
    reference: str = "last"
    coefficient: str = "ls"
    rotation: str = "none"
    int2_clip: float = 0.9
    rounding: str = "fp32"
    sink_tokens: int = 0
    recent_tokens: int = 0
    layer_bits: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", _bits_of("bits", self.bits))
        object.__setattr__(self, "layer_bits", _layer_bits_of(self.layer_bits, self.loops))
        _check_choice("group_size", self.group_size, GROUP_SIZES)
        _check_choice("int4_group_size", self.int4_group_size, GROUP_SIZES)
        _check_choice("reference", self.reference, REFERENCES)
        _check_choice("coefficient", self.coefficient, COEFFICIENTS)
        _check_choice("rotation", self.rotation, ROTATIONS)
        _check_choice("rounding", self.rounding, ROUNDINGS)
        if not 0.0 < self.int2_clip <= 1.0:
            raise ValueError(f"int2_clip must be above 0 and at most 1, got {self.int2_clip!r}")
        for name in ("sink_tokens", "recent_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
        if self.rounding == "bf16" and self.rotation != "none":
            raise ValueError(f'rounding="bf16" is defined for rotation="none" only, got rotation={self.rotation!r}')
        for loop, bits in enumerate(self.bits):
            if bits == 0 and self.reference_of(loop) is None:
                raise ValueError(f"loop {loop} has no reference, so it needs more than 0 bits, got bits={self.bits}")
        for layer, _ in self.layer_bits:
            self.for_layer(layer)

    def for_layer(self, layer: int | None) -> KVQuantConfig:
        """How ``layer`` (from 0) is coded: this configuration with that layer's bits, and no overrides any more.

        None means a layer that has no bits of its own.
        """
        if not self.layer_bits:
            return self
        return dataclasses.replace(self, bits=dict(self.layer_bits).get(layer, self.bits), layer_bits=())

    @property
    def for_edge(self) -> KVQuantConfig:
        """How layers that run once are coded: directly at INT4 g=32 without rotation, or raw where the codec is off."""
        bits = (RAW_BITS,) if self.is_off else (4,)
        windows = {"sink_tokens": self.sink_tokens, "recent_tokens": self.recent_tokens}
        return KVQuantConfig(bits, reference="direct", **windows)

    @property
    def codec(self) -> KVQuantConfig:
        """What decides the codes of states that are in their rotated space already; equal for whoever codes alike."""
        kept = {}
        if any(bits in (1, 2, 3) for bits in self.bits):
            kept["group_size"] = self.group_size
        if any(bits in (4, 8) for bits in self.bits):
            kept["int4_group_size"] = self.int4_group_size
        if 2 in self.bits:
            kept["int2_clip"] = self.int2_clip
        if any(self.reference_of(loop) is not None for loop in range(self.loops)):
            kept["coefficient"] = self.coefficient
        return KVQuantConfig(self.bits, reference=self.reference, rounding=self.rounding, **kept)

    @property
    def loops(self) -> int:
        """Loops in the group (L)."""
        return len(self.bits)

    @property
    def is_off(self) -> bool:
        """True where every loop of every layer is stored raw: the plain BF16 cache."""
        precisions = (self.bits, *(bits for _, bits in self.layer_bits))
        return all(bits == RAW_BITS for loops in precisions for bits in loops)

    @property
    def has_windows(self) -> bool:
        """True where the cache keeps some tokens in BF16."""
        return self.sink_tokens + self.recent_tokens > 0

    @property
    def anchor(self) -> int | None:
        """The loop coded first and alone, or None for direct coding (Sec. 3.2)."""
        if self.reference == "direct":
            return None
        return 0 if self.reference in ("first", "previous") else self.loops - 1

    @property
    def group_sizes(self) -> tuple[int | None, ...]:
        """Channels per scale and offset, loop by loop; None where a loop has no codes (0 and 16 bits).

        The group size goes with the bits, not with the role of the loop.
        """
        return tuple(self._group_size(bits) for bits in self.bits)

    def _group_size(self, bits: int) -> int | None:
        if bits in (0, RAW_BITS):
            return None
        return self.int4_group_size if bits >= 4 else self.group_size

    def reference_of(self, loop: int) -> int | None:
        """The loop whose reconstruction predicts ``loop``; None for the anchor, raw loops and direct coding."""
        if self.anchor is None or loop == self.anchor or self.bits[loop] == RAW_BITS:
            return None
        return {"last": self.anchor, "first": self.anchor, "previous": loop - 1, "next": loop + 1}[self.reference]

    def stores_alpha(self, loop: int) -> bool:
        """True where a BF16 coefficient is stored for every token and head of ``loop``."""
        return self.reference_of(loop) is not None and self.coefficient != "unit"

    def effective_bits(self, head_dim: int, layers: int | None = None) -> float:
        """Stored bits per K or V value, b_eff of App. A.3; see :func:`residualquant.layout.effective_bits`."""
        from residualquant.layout import effective_bits

        return effective_bits(self, head_dim, layers)

    @property
    def label(self) -> str:
        """The paper's name of the precision: "BF16", "INT2 g=32", "INT2/4 g=16", or the bits spelt out.

        A layer with bits of its own follows as in "INT2 g=32, layer 0 BF16".
        """
        if self.layer_bits:
            others = (f"layer {n} {self.for_layer(n).label.partition(' ')[0]}" for n, _ in self.layer_bits)
            return ", ".join((dataclasses.replace(self, layer_bits=()).label, *others))
        if self.is_off:
            return "BF16"
        kinds = sorted(set(self.bits))
        low = any(bits in (1, 2, 3) for bits in kinds)
        size = self.group_size if low else self.int4_group_size
        if len(kinds) == 1:
            return f"INT{kinds[0]} g={size}"
        if self.bits == _int2_4(self.loops, self.reference):
            return f"INT2/4 g={size}"
        return f"INT[{','.join(map(str, self.bits))}] g={size}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; :meth:`from_dict` reads them back.

        ``layer_bits`` is left out where there are none, so that what was measured before them keeps its name.
        """
        values = {**dataclasses.asdict(self), "bits": list(self.bits)}
        overrides = [[layer, list(bits)] for layer, bits in values.pop("layer_bits")]
        return {**values, "layer_bits": overrides} if overrides else values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> KVQuantConfig:
        """The configuration that :meth:`to_dict` wrote.

        Raises:
            ValueError: an unknown name, or a value that the constructor refuses.
        """
        unknown = sorted(set(values) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"unknown name in a KV configuration: {', '.join(unknown)}")
        return cls(**values)


def _check_choice(name: str, value: Any, choices: tuple) -> None:
    if type(value) is not type(choices[0]) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def _bits_of(name: str, value: Any) -> tuple[int, ...]:
    """The precisions of a loop group as plain integers."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a sequence of one precision per loop, got {value!r}")
    bits = tuple(operator.index(b) if isinstance(b, SupportsIndex) and not isinstance(b, bool) else b for b in value)
    if not bits:
        raise ValueError(f"{name} must name at least one loop, got ()")
    for one in bits:
        _check_choice(f"{name} of a loop", one, BITS)
    return bits


def _layer_bits_of(value: Any, loops: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The overrides in order of their layers."""
    try:
        pairs = [(operator.index(layer), bits) for layer, bits in value]
    except (TypeError, ValueError):
        raise ValueError(f"layer_bits must be pairs (layer, bits of every loop), got {value!r}") from None
    given = [(layer, _bits_of("layer_bits", bits)) for layer, bits in pairs]
    layers = [layer for layer, _ in given]
    if len(set(layers)) < len(layers) or min(layers, default=0) < 0 or any(len(bits) != loops for _, bits in given):
        raise ValueError(f"layer_bits must name distinct layers from 0, each with bits of {loops} loops, got {value!r}")
    return tuple(sorted(given))


def _int2_4(loops: int, reference: str) -> tuple[int, ...]:
    """2 bits for every loop but the anchor, which has 4; ascending where the policy has no first-loop anchor."""
    low = (2,) * (loops - 1)
    return (4, *low) if reference in ("first", "previous") else (*low, 4)


_PRESET_PRECISION = {  # label of the paper -> (kind of bits, group size of the 2-bit loops)
    "BF16": ("16", 32),
    "INT2 g=32": ("2", 32),
    "INT2 g=16": ("2", 16),
    "INT2/4 g=32": ("2/4", 32),
    "INT2/4 g=16": ("2/4", 16),
    "INT4 g=32": ("4", 32),
}


def preset(label: str, loops: int = 4, **overrides: Any) -> KVQuantConfig:
    """The configuration that the paper calls ``label``: Last-loop references, least squares, no rotation.

    Args:
        label: one of ``PRESETS``.
        loops: loops of the group.
        overrides: any field of :class:`KVQuantConfig`, such as ``reference="direct"`` or ``rotation="hadamard"``.
            With ``reference="first"`` or ``"previous"`` the 4 bits of INT2/4 go to the first loop, the anchor.

    Raises:
        ValueError: an unknown label or field, or a value that the configuration refuses.
    """
    if label not in _PRESET_PRECISION:
        raise ValueError(f"unknown preset {label!r}; known presets: {', '.join(_PRESET_PRECISION)}")
    if not isinstance(loops, int) or loops < 1:
        raise ValueError(f"loops must be an integer of at least 1, got {loops!r}")
    kind, group_size = _PRESET_PRECISION[label]
    reference = overrides.get("reference", "last")
    bits = _int2_4(loops, reference) if kind == "2/4" else (int(kind),) * loops
    return KVQuantConfig.from_dict({"bits": bits, "group_size": group_size, **overrides})


PRESETS: dict[str, KVQuantConfig] = {label: preset(label) for label in _PRESET_PRECISION}

"""What the commands' options are, and how those are read that need more than their type."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from residualquant.errors import check_count

Profile = Annotated[str, tyro.conf.arg(help="smoke (minutes), mini (2-core CPU), full (one GPU) or paper.")]
Only = Annotated[tuple[str, ...], tyro.conf.arg(help="Labels to make, such as table2 figure1_left; all when empty.")]
Bits = Annotated[
    tuple[int, ...] | None, tyro.conf.arg(help="Bits of each loop, such as 4 2 0 4; overrides the label's.")
]
LayerBits = Annotated[
    tuple[str, ...] | None,
    tyro.conf.arg(help="Bits of each loop for single layers (from 1), such as 1:16,16,16,16 2:4,4,4,4."),
]
MOST_GROUP_LOOPS = 128  # a configuration lists every one of them


@dataclass(frozen=True)
class KVOptions:
    """Changes applied to every label given; what is not given stays as the label has it."""

    reference: str | None = None
    """What predicts a loop: last (the method), first, previous, next, or direct for none."""
    coefficient: str | None = None
    """How the reference is scaled: ls (least squares), norm_ratio or unit."""
    rotation: str | None = None
    """Change of basis before coding: none, hadamard, or oscar and optr_h, which are calibrated."""
    bits: Bits = None
    loops: int | None = None
    """Loops coded together (Huginn: 4, 8 or 16 of its 32); 4, or all of a model that has fewer, when left out."""
    group_size: int | None = None
    """Channels per scale and offset in loops of 1-3 bits: 16, 32 or 64."""
    int2_clip: float | None = None
    """Factor on the half-range of a 2-bit group (the method: 0.9)."""
    layer_bits: LayerBits = None

    @property
    def given(self) -> dict[str, Any]:
        """What is not left out, as KVQuantConfig takes it."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        if self.layer_bits is not None:
            values["layer_bits"] = [_layer_bits(text) for text in self.layer_bits]
        return values

    def configs(self, labels: Sequence[str], model_loops: int = 4, model_layers: int | None = None):
        """The KV configurations of ``labels``, changed as asked; BF16 stays as it is."""
        from residualquant.config import preset

        changes = {name: value for name, value in self.given.items() if name != "loops"}
        most = max((layer + 1 for layer, _ in changes.get("layer_bits", ())), default=1)
        if model_layers is not None and most > model_layers:
            raise ValueError(f"layer-bits must name layers from 1 to {model_layers}, got {most}")
        loops = min(4, model_loops) if self.loops is None else self.loops
        check_count("loops", loops, most=MOST_GROUP_LOOPS)
        if None not in (self.loops, self.bits) and len(self.bits) != loops:
            raise ValueError(f"bits must be of as many loops as --loops, got {self.bits} and {loops}")
        layers = Counter(layer for layer, _ in changes.get("layer_bits", ()))
        for layer, bits in changes.get("layer_bits", ()):
            if layers[layer] > 1 or len(bits) != loops:
                got = f"{layer + 1}:{','.join(map(str, bits))}"
                raise ValueError(f"layer-bits must name each layer once, with bits of {loops} loops, got {got}")
        configs = [preset(label, loops, **({} if label == "BF16" else changes)) for label in labels]
        return list(dict.fromkeys(configs))


Changes = Annotated[KVOptions, tyro.conf.arg(name="")]


def _layer_bits(text: str) -> tuple[int, list[int]]:
    """(layer from 0, bits of each loop) of "1:16,16,16,16"."""
    if not re.fullmatch(r"[1-9]\d{0,5}:\d{1,2}(,\d{1,2})*", text, re.ASCII):
        raise ValueError(f"layer-bits must be a layer (from 1) and bits of each loop, such as 1:4,4,4,4, got {text!r}")
    layer, _, precisions = text.partition(":")
    return int(layer) - 1, [int(one) for one in precisions.split(",")]


def label_of(config) -> str:
    """The configuration's label, its layers counted from 1 as everywhere on the command line."""
    return re.sub(r"(?<=layer )\d+", lambda layer: str(int(layer[0]) + 1), config.label)


def check_file(name: str, path: Path | None) -> None:
    """``path`` can be the name of a file to write: a regular one, as it is replaced."""
    if path is not None and (not path.name or (path.exists() and not path.is_file())):
        kind = "folder" if not path.name or path.is_dir() else "device"
        raise ValueError(f"{name} must name a file, got the {kind} {str(path)!r}")


def check_folder(name: str, path: Path | None) -> None:
    """``path`` can be the name of a folder to write to."""
    if path is not None and (other := next((p for p in (path, *path.parents) if p.exists()), path)).is_file():
        raise ValueError(f"{name} must name a folder, got {str(path)!r}, where {str(other)!r} is a file")


def from_0(name: str, chosen: tuple[int, ...] | None, count: int) -> tuple[int, ...] | None:
    """Numbers from 1 as a user gives them, counted from 0."""
    if chosen is None:
        return None
    if not chosen or not set(chosen) <= set(range(1, count + 1)) or len(set(chosen)) < len(chosen):
        given = " ".join(map(str, chosen)) or "none"
        raise ValueError(f"{name} must be different numbers from 1 to {count}, got {given}")
    return tuple(i - 1 for i in chosen)


def read_text_file(file: Path) -> str:
    """The text of ``file``, which is not empty."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error.reason} at byte {error.start}") from error
    if not text:
        raise ValueError(f"{file} is empty: got 0 characters")
    return text

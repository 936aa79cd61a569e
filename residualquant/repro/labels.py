"""The cells of every accuracy table: each row of the paper's own (``data/paper/*.csv``) as a KV configuration.

A line says on which family of models and which benchmark a configuration is measured and what the paper prints there.
Nothing else declares a cell: a profile computes the union of all labels' lines, each configuration once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from residualquant.config import KVQuantConfig, preset
from residualquant.errors import ResidualQuantError
from residualquant.evals.benchmarks import BENCHMARKS
from residualquant.repro.paper import printed
from residualquant.repro.paths import paper_dir, show

LABELS = ("table2", "figure1_left", "table3", "table4", "table5", "table8", "table9")
BF16 = preset("BF16")
FAMILIES = ("ouro", "huginn")
HEAD_DIM = {"ouro": 128, "huginn": 96}  # of the paper's models


@dataclass(frozen=True)
class Line:
    """One number of a label: on what, with which cache, and what the paper prints; ``step`` in Figure 1 only."""

    family: str
    benchmark: str
    config: KVQuantConfig
    paper_pct: float
    step: str = ""


def coded(bits: str, group_size: str, reference: str, coefficient: str = "", rotation: str = "") -> KVQuantConfig:
    """The configuration of a printed row; what a row leaves empty is the method's own choice."""
    return KVQuantConfig(
        bits=tuple(map(int, bits.split(","))),
        group_size=int(group_size or 32),
        reference=reference,
        coefficient=coefficient or "ls",
        rotation=rotation or "none",
    )


def direct_of(config: KVQuantConfig) -> KVQuantConfig:
    """Direct coding with the same bits and group sizes and no rotation."""
    return replace(config, reference="direct", coefficient="ls", rotation="none")


def name_of(config: KVQuantConfig) -> str:
    """ "BF16", "INT2 g=32 direct", "INT2/4 g=16 last ls + optr_h" and the like, in one line of text."""
    if config.is_off:
        return "BF16"
    coefficient = "" if config.reference == "direct" else f" {config.coefficient}"
    rotation = "" if config.rotation == "none" else f" + {config.rotation}"
    loops = "" if config.loops == 4 else f" of {config.loops} loops"
    return f"{config.label}{loops} {config.reference}{coefficient}{rotation}"


def _table2() -> Iterator[Line]:
    for row in printed("table2"):
        if row["model"] == "mean":
            continue
        base, _, rotation = row["method"].partition("+")
        if base == "optr_h":
            base, rotation = "direct", "optr_h"
        reference = "direct" if base == "direct" else "last"
        config = BF16 if base == "bf16" else coded(
            row["bits_per_loop"], row["int2_group_size"], reference, rotation=rotation
        )  # fmt: skip
        yield Line(row["model"].split("-")[0], row["benchmark"], config, float(row["accuracy_pct"]))


def _math500_bf16() -> Line:
    return next(line for line in _table2() if (line.family, line.benchmark) == ("ouro", "math500"))


def _tables_3_and_9(label: str) -> Iterator[Line]:
    for row in printed(label):
        group_size, reference = row["precision"].rsplit("g", 1)[1], row["reference"].split("_")[0]
        config = coded(row["bits_per_loop"], group_size, reference, row["scaling"], row["rotation"])
        yield Line("ouro", "math500", config, float(row["math500_pct"]))


def _table4() -> Iterator[Line]:
    for row in printed("table4"):
        precision, group_size = row["precision"].rsplit("_g", 1)
        bits = ",".join([precision.removeprefix("int")] * 4)
        yield Line("ouro", "math500", _coded_by(row, bits, group_size), float(row["math500_pct"]))


def _table5() -> Iterator[Line]:
    for row in printed("table5"):
        config = _coded_by(row, row["bits_per_loop"], row["int2_group_size"])
        yield Line("ouro", "math500", config, float(row["math500_pct"]))


def _coded_by(row: dict[str, str], bits: str, group_size: str) -> KVQuantConfig:
    reference = "direct" if row["method"] == "direct" else "last"
    return coded(bits, group_size, reference, rotation=row["rotation"])


def _table8() -> Iterator[Line]:
    for row in printed("table8"):
        loops = int(row["loops_per_group"] or 0)
        bits = ",".join("2" * (loops - 1) + "4")
        config = coded(bits, row["int2_group_size"], "last", rotation=row["rotation"]) if loops else BF16
        yield Line("huginn", "gsm8k", config, float(row["gsm8k_pct"]))


FIGURE1_CONFIGS = {
    "bf16": BF16,
    "direct_int2": preset("INT2 g=32", reference="direct"),
    "last_loop_residual": preset("INT2 g=32", coefficient="unit"),
    "ls_scaling": preset("INT2 g=32"),
    "rotation_optr_h": preset("INT2 g=32", rotation="optr_h"),
    "mixed_precision": preset("INT2/4 g=32", rotation="optr_h"),
}


def _figure1_left() -> Iterator[Line]:
    for row in printed("figure1_left"):
        yield Line("ouro", "math500", FIGURE1_CONFIGS[row["step"]], float(row["math500_pct"]), row["step"])


@lru_cache
def lines(label: str) -> tuple[Line, ...]:
    """Every line of a label, the BF16 cache first on each benchmark.

    Raises:
        ValueError: not one of ``LABELS``.
        ResidualQuantError: the paper's numbers are damaged.
    """
    if label not in LABELS:
        raise ValueError(f"no accuracy table {label!r}; known: {', '.join(LABELS)}")
    try:
        return _lines(label)
    except (LookupError, TypeError, ValueError, StopIteration) as error:
        where = show(paper_dir())
        raise ResidualQuantError(f"the paper's numbers for {label}, in {where}, are damaged: {error!r}") from error


def _lines(label: str) -> tuple[Line, ...]:
    if label == "table2":
        order = [(f, b) for f in FAMILIES for b in BENCHMARKS]
        return tuple(sorted(_table2(), key=lambda line: order.index((line.family, line.benchmark))))
    if label in ("table3", "table9"):
        return (_math500_bf16(), *_tables_3_and_9(label))
    makers = {"table4": _table4, "table5": _table5, "table8": _table8, "figure1_left": _figure1_left}
    head = (_math500_bf16(),) if label in ("table4", "table5") else ()
    return (*head, *makers[label]())

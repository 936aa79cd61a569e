"""Every bit, byte, read and capacity number the paper prints, computed again and compared digit by digit.

Nothing here is measured: the numbers follow from the configuration alone (Sec. 3.4, App. A.3, D and E), so each must
equal the paper's at the precision it is printed with. ``packed_bytes`` closes the circle: it encodes real tensors and
counts the bytes that come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING

from residualquant import layout
from residualquant.config import KVQuantConfig, preset
from residualquant.repro.labels import HEAD_DIM, lines
from residualquant.repro.paper import printed

if TYPE_CHECKING:
    import pandas as pd

OURO_DIM, HUGINN_DIM, HUGINN_LOOPS = HEAD_DIM["ouro"], HEAD_DIM["huginn"], 32
COLUMNS = ["label", "where", "unit", "bits_per_loop", "group_sizes", "paper", "ours", "exact", "verdict"]
# App. J: share of the tokens that keep 4, 3 and 2 loops of prefill K/V in the combination with FlashLoop.
KEPT_LOOPS = {4: 0.10, 3: 0.15, 2: 0.75}


def round_as(value: float, paper: str) -> str:
    """``value`` with as many decimals as ``paper`` has, halves up: 3.25 beside "3.3" is "3.3"."""
    return str(Decimal(repr(value)).quantize(Decimal(paper), ROUND_HALF_UP))


def _row(label: str, where: str, unit: str, paper: str, exact: float, cfg: KVQuantConfig | None = None) -> dict:
    ours = round_as(exact, paper)
    return {
        "label": label,
        "where": where,
        "unit": unit,
        "bits_per_loop": "" if cfg is None else _runs(cfg.bits),
        "group_sizes": "" if cfg is None else _runs("-" if g is None else g for g in cfg.group_sizes),
        "paper": paper,
        "ours": ours,
        "exact": exact,
        "verdict": "reproduced" if ours == paper else "differs",
    }


def _runs(values) -> str:
    values = [str(v) for v in values]
    return ",".join(values) if len(values) <= 4 else f"{len(values) - 1}x{values[0]},{values[-1]}"


def _saved_pct(cfg: KVQuantConfig, head_dim: int) -> float:
    return 100 * (1 - cfg.effective_bits(head_dim) / 16)


def _access_ratio(loops: int) -> float:
    chained = layout.logical_reads(preset("INT2 g=32", loops=loops, reference="previous"))
    return chained / layout.logical_reads(preset("INT2 g=32", loops=loops))


def _huginn_reads(reference: str) -> int:
    return HUGINN_LOOPS // 4 * layout.logical_reads(preset("INT2/4 g=32", reference=reference))


def _claims() -> dict[str, tuple[float, KVQuantConfig | None, str]]:
    """{claim: our value, the configuration it is of, what it says}."""
    int24, int2, unit = preset("INT2/4 g=32"), preset("INT2 g=32"), preset("INT2 g=32", coefficient="unit")
    bits24, bits2, bits_unit = (cfg.effective_bits(OURO_DIM) for cfg in (int24, int2, unit))
    rows = {
        "kv_storage_reduction_2224_g32": (_saved_pct(int24, OURO_DIM), int24, "KV bytes saved against BF16"),
        "kv_footprint_ratio_2224_g32": (layout.capacity_ratio(int24, OURO_DIM), int24, "BF16 bytes / ours"),
        "ls_coefficient_bits_ouro": (bits2 - bits_unit, int2, "least-squares coefficients"),
        "int4_anchor_extra_storage": (100 * (bits24 / bits2 - 1), int24, "extra bytes of an INT4 anchor"),
        "logical_access_ratio_L4": (_access_ratio(4), None, "chained / shared reads, 4 loops"),
        "logical_access_ratio_L32": (_access_ratio(32), None, "chained / shared reads, 32 loops"),
        "huginn_accesses_chained": (_huginn_reads("previous"), None, "Huginn, eight groups of 4, chained"),
        "huginn_accesses_shared": (_huginn_reads("last"), None, "Huginn, eight groups of 4, shared anchor"),
    }
    for name, label in (("2222", "INT2"), ("2224", "INT2/4")):
        for g in (32, 16):
            cfg = preset(f"{label} g={g}")
            what = f"effective bits, [{','.join(name)}] g={g}, residual LS"
            rows[f"effective_bits_residual_{name}_g{g}"] = cfg.effective_bits(OURO_DIM), cfg, what
    for g in (32, 16):
        cfg, what = preset(f"INT2/4 g={g}", loops=16), f"KV bytes saved, Huginn, 16-loop groups, g={g}"
        rows[f"huginn_16loop_g{g}_reduction"] = _saved_pct(cfg, HUGINN_DIM), cfg, what
    return rows


def _claim_rows() -> Iterator[dict]:
    ours = _claims()
    for line in printed("claims"):
        if line["claim"] in ours:
            value, cfg, label = ours[line["claim"]]
            place = line["where"] if line["where"] == "abstract" else f"{_place(line['where'])} {line['where']}"
            yield _row(label, place, line["unit"], line["value"], float(value), cfg)


def _place(where: str) -> str:
    return "Sec." if where[0].isdigit() else "App."


def _table5_rows() -> Iterator[dict]:
    for row, line in zip(printed("table5"), lines("table5")[1:]):  # less the BF16 baseline
        method = "direct" if row["method"] == "direct" else "residual LS, last"
        label = f"effective bits, [{row['bits_per_loop']}], {method}, {_rotation(row)}"
        yield _effective(label, "Table 5", row, line.config, OURO_DIM)


def _table8_rows() -> Iterator[dict]:
    for row, line in zip(printed("table8"), lines("table8")):
        kind = f"groups of {row['loops_per_group']} loops, {_rotation(row)}" if row["loops_per_group"] else "BF16"
        yield _effective(f"effective bits, Huginn, {kind}", "Table 8", row, line.config, HUGINN_DIM)


def _figure1_rows() -> Iterator[dict]:
    for row, line in zip(printed("figure1_left"), lines("figure1_left")):
        label = f"effective bits, step {row['step'].replace('_', ' ')}"
        yield _effective(label, "Figure 1", row, line.config, OURO_DIM)


def _rotation(row: dict[str, str]) -> str:
    return "OptR-H" if row["rotation"] == "optr_h" else "no rotation"


def _effective(label: str, where: str, row: dict[str, str], cfg: KVQuantConfig, head_dim: int) -> dict:
    return _row(label, where, "bits/element", row["effective_bits"], cfg.effective_bits(head_dim), cfg)


def kept_loops_bits(cfg: KVQuantConfig, head_dim: int = OURO_DIM) -> float:
    """Prefill bits per element of ``cfg``'s kind when tokens keep only some loops (App. J), over all four loops.

    A token's last kept loop is its anchor; direct coding and BF16 have none. BF16 counts 16 bits per kept loop.
    """
    total = 0.0
    for kept, share in KEPT_LOOPS.items():
        part = KVQuantConfig(bits=cfg.bits[-kept:], group_size=cfg.group_size, reference=cfg.reference)
        total += share * kept * part.effective_bits(head_dim)
    return total / cfg.loops


def _table10_rows() -> Iterator[dict]:
    configs = {
        "bf16+sparse": preset("BF16"),
        "flashloop": KVQuantConfig(bits=(4, 4, 4, 4), reference="direct"),
        "residualquant_g16+sparse": preset("INT2/4 g=16"),
        "residualquant_g32+sparse": preset("INT2/4 g=32"),
    }
    for line in printed("table10"):
        method, cfg = line["method"], configs[line["method"]]
        name = method.replace("_", " ").replace("+", " + ")
        shown = None if method == "flashloop" else cfg  # its own coding, g=64 with FP16 metadata, costs the same bits
        prefill, decode = kept_loops_bits(cfg), cfg.effective_bits(OURO_DIM)
        yield _row(f"prefill bits, {name}", "Table 10", "bits/element", line["prefill_bits"], prefill, shown)
        yield _row(f"decode bits, {name}", "Table 10", "bits/element", line["decode_bits"], decode, shown)


def storage_table() -> pd.DataFrame:
    """One row per printed number: label, where, unit, bits and group size per loop, paper, ours, exact, verdict.

    ``ours`` is rounded as the paper's number is printed; the verdict is "reproduced" when both are the same digits.
    """
    import pandas as pd

    sources = (_claim_rows, _figure1_rows, _table5_rows, _table8_rows, _table10_rows)
    return pd.DataFrame([row for source in sources for row in source()], columns=COLUMNS)


def _configurations() -> dict[str, KVQuantConfig]:
    chosen = {"BF16": preset("BF16")}
    for label in ("INT2 g=32", "INT2 g=16", "INT2/4 g=32", "INT2/4 g=16", "INT4 g=32"):
        chosen[f"{label}, direct"] = preset(label, reference="direct")
        chosen[f"{label}, residual"] = preset(label)
    return chosen


def packed_bytes(cfg: KVQuantConfig, head_dim: int = OURO_DIM, tokens: int = 16) -> float:
    """Bytes per token and head of a real packed group of ``cfg.loops`` loops: random input, encoded and counted."""
    import torch

    from residualquant.residual import encode

    x = torch.randn(cfg.loops, tokens, 2, head_dim, generator=torch.Generator().manual_seed(0))
    return encode(x.to(torch.bfloat16), cfg).nbytes / (2 * tokens)


def bytes_table(head_dim: int = OURO_DIM) -> pd.DataFrame:
    """Per configuration, for K or V of all four loops of one token and head: bytes stored and read, and the ratios.

    ``stored_bytes`` is arithmetic, ``packed_bytes`` counts what ``encode`` really allocates. The capacity gain over
    BF16 is larger than the ceiling of the traffic gain, because a residual is read together with its anchor.
    """
    import pandas as pd

    return pd.DataFrame(
        {
            "config": name,
            "effective_bits": cfg.effective_bits(head_dim),
            "stored_bytes": layout.stored_bytes(cfg, head_dim),
            "packed_bytes": packed_bytes(cfg, head_dim),
            "saved_pct": _saved_pct(cfg, head_dim),
            "capacity_ratio": layout.capacity_ratio(cfg, head_dim),
            "read_bytes": layout.bytes_read_per_step(cfg, head_dim),
            "traffic_ratio": layout.traffic_ratio(cfg, head_dim),
        }
        for name, cfg in _configurations().items()
    )


def bits_table(head_dim: int = OURO_DIM) -> pd.DataFrame:
    """Effective bits of each configuration, split into codes, FP8 metadata and coefficients (App. A.3)."""
    import pandas as pd

    def per_element(cfg: KVQuantConfig, part: Callable[[int], int]) -> float:
        return 8 * sum(part(loop) for loop in range(cfg.loops)) / (cfg.loops * head_dim)

    return pd.DataFrame(
        {
            "config": name,
            "codes_bits": per_element(cfg, lambda r, c=cfg: layout.codes_bytes(c, r, head_dim)),
            "metadata_bits": per_element(cfg, lambda r, c=cfg: layout.metadata_bytes(c, r, head_dim)),
            "coefficient_bits": per_element(cfg, lambda r, c=cfg: layout.alpha_bytes(c, r)),
        }
        for name, cfg in _configurations().items()
        if not cfg.is_off
    )


def reads_table(head_dim: int = OURO_DIM) -> pd.DataFrame:
    """Bytes read per decode step for all loops of one past token and head under each reference policy, INT2/4 g=32."""
    import pandas as pd

    names = {"direct": "direct", "last": "last (method)", "first": "first", "next": "next", "previous": "previous"}
    configs = {"BF16": preset("BF16")} | {n: preset("INT2/4 g=32", reference=r) for r, n in names.items()}
    return pd.DataFrame(
        {
            "policy": name,
            "logical_reads": layout.logical_reads(cfg),
            "bytes_read": layout.bytes_read_per_step(cfg, head_dim),
            "ratio": layout.traffic_ratio(cfg, head_dim),
        }
        for name, cfg in configs.items()
    )


def accesses_table() -> pd.DataFrame:
    """Logical reads per step of a shared anchor, 2L-1, and of a chain, L(L+1)/2, and their ratio (App. D)."""
    import pandas as pd

    rows = []
    for loops in (2, 4, 8, 16, 32):
        shared = layout.logical_reads(preset("INT2 g=32", loops=loops))
        chained = layout.logical_reads(preset("INT2 g=32", loops=loops, reference="previous"))
        rows.append({"loops": loops, "shared": shared, "chained": chained, "ratio": chained / shared})
    return pd.DataFrame(rows)

"""What a profile's run cost: wall time, machine and disk, kept in ``data/<profile>/cost.json`` for README's table."""

from __future__ import annotations

import json

from residualquant.repro import paths
from residualquant.repro.provenance import provenance


def disk_bytes(profile: str) -> int:
    """Bytes of a profile's data and figures (hidden files, such as what an earlier run left to compare with, aside)."""
    return sum(file.stat().st_size for file in paths.visible_outputs(profile))


def write_cost(profile: str, seconds: float, device: str) -> None:
    """Record a run that was computed from nothing to the end without interruption."""
    made = provenance(device)
    cost = {
        "seconds": round(seconds, 1),
        "bytes": disk_bytes(profile),
        "machine": made.get("gpu") or f"{made['cores']} cores of {made['cpu']}",
        "date": made["date"],
        "commit": made["commit"],
        "torch": made["packages"]["torch"],
    }
    paths.write_atomic(paths.data_dir(profile) / "cost.json", json.dumps(cost, indent=1) + "\n")


def read_cost(profile: str) -> dict | None:
    """What ``write_cost`` recorded, or None where no complete run is committed."""
    file = paths.shipped_data_dir(profile) / "cost.json"
    return json.loads(file.read_text()) if file.is_file() else None

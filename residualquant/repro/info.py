"""What ``residualquant info`` prints: versions, devices, models found, and the state of every profile."""

from __future__ import annotations

import json

from residualquant.repro import paths
from residualquant.repro.profiles import PROFILES, Profile
from residualquant.repro.provenance import provenance
from residualquant.repro.records import list_records
from residualquant.repro.run import read_marker


def print_info() -> None:
    """Print environment, models and profiles in a few lines."""
    made = provenance()
    print(f"residualquant {made['residualquant']}, commit {made['commit']}, in {paths.workspace()}")
    print(
        f"Python {made['python']} on {made['system']}, {made['cpu']}, {made['cores']} cores, {made['threads']} threads"
    )
    print(", ".join(f"{name} {version}" for name, version in made["packages"].items()))
    print(f"GPU: {_gpus()}\n\nModels in {paths.show(paths.models_dir())}:")
    for line in _models() or ["none"]:
        print(f"  {line}")
    print("\nProfiles:")
    for profile in PROFILES.values():
        print(f"  {profile.name:6} {_state(profile)}")


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none that torch can use"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _models() -> list[str]:
    lines = []
    for file in sorted(paths.models_dir().glob("*/config.json")):
        size = sum(f.stat().st_size for f in file.parent.glob("*.safetensors")) / 2**20
        values = json.loads(file.read_text())
        shape = ", ".join(
            f"{values[key]} {word}"
            for key, word in (("total_ut_steps", "loops"), ("num_hidden_layers", "layers"), ("head_dim", "head dim"))
            if key in values
        )
        lines.append(f"{file.parent.name}: {values.get('model_type', '?')}, {shape}, {size:.1f} MiB")
    return lines


def _state(profile: Profile) -> str:
    marker = read_marker(profile.name)
    files = list_records(paths.shipped_records_dir(profile.name))
    sizes = ", ".join(f"{task} {n}" for task, n in profile.problems.items())
    run = {"never": "not run here", "finished": f"finished {marker.get('finished', '')}"}.get(
        marker["state"], "interrupted: `make reproduce` goes on"
    )
    records = f"records of {len(files)} tasks" if files else "no records"
    return f"{sizes}; {len(profile.methods)} configurations; {profile.device}; {profile.cost}; {records}; {run}"

"""What ``residualquant info`` prints: versions, devices, models found, and the state of every profile."""

from __future__ import annotations

from pathlib import Path

from residualquant.repro import paths
from residualquant.repro.markup import counted
from residualquant.repro.profiles import PROFILES, Profile
from residualquant.repro.provenance import provenance
from residualquant.repro.records import list_records
from residualquant.repro.run import read_marker, run_lock

_SHAPE = {
    "total_ut_steps": "loops",
    "mean_recurrence": "loops",
    "num_hidden_layers": "layers",
    "n_layers_in_recurrent_block": "looped layers",
    "head_dim": "head dim",
}


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
    return [f"{file.parent.name}: {_describe(file)}" for file in sorted(paths.models_dir().glob("*/config.json"))]


def _describe(file: Path) -> str:
    """Kind, shape and size of the checkpoint whose ``config.json`` is ``file``."""
    try:
        values = paths.parse_json(file.read_bytes())
        shape = [f"{values[key]} {word}" for key, word in _SHAPE.items() if key in values]
        kind = values.get("model_type", "unknown kind")
        size = sum(f.stat().st_size for f in file.parent.glob("*.safetensors")) / 2**20
    except (OSError, ValueError) as error:
        return f"config.json cannot be read ({error})"
    return ", ".join([str(kind), *shape, f"{size:.1f} MiB"])


def _state(profile: Profile) -> str:
    files = list_records(paths.shipped_records_dir(profile.name))
    records = f"{counted(len(files), 'file')} of records" if files else "no records"
    return f"{profile.describe()}; {profile.device}; {profile.cost}; {records}; {_run(profile)}"


def _run(profile: Profile) -> str:
    """Whether the profile runs now, was interrupted, has finished or never ran here."""
    if holder := run_lock(profile.name).holder():
        return f"running (process {holder})"
    marker = read_marker(profile.name)
    if marker["state"] == "never":
        return "not run here"
    if marker["state"] == "finished":
        return f"finished {marker['finished']}"
    return f"interrupted: `make reproduce PROFILE={profile.name}` goes on"

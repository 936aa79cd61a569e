"""What a learned rotation is worth before anything is generated: attention-output errors on a third split (App. G).

Hadamard, OSCAR and OptR-H code K and V of the Ouro-shaped model with INT2/4 g=32; the texts are training problems that
neither fitting nor choosing has seen. ``data/<profile>/rotation_errors.csv`` keeps every layer, head and K | V.
"""

from __future__ import annotations

import hashlib
import json
from itertools import combinations
from typing import TYPE_CHECKING

from residualquant.config import preset
from residualquant.errors import ResidualQuantError
from residualquant.repro import paths
from residualquant.repro.profiles import Profile, profile_of
from residualquant.repro.tables import write_csv, write_table

if TYPE_CHECKING:
    import pandas as pd

COMPARED = ("hadamard", "oscar", "optr_h")
BENCHMARK = "math500"  # whose stand-in's model and training problems are used
MOST_TEXTS = 64
COLUMNS = ("model", "rotation", "config", "reference", "layer", "loop_group", "of", "head", "error", "n", "split")


def rotation_errors_of(profile: str | Profile, compute: bool = False) -> pd.DataFrame:
    """The table of :func:`residualquant.rotation.measure.rotation_errors`, kept as ``rotation_errors.csv``.

    Raises:
        ResidualQuantError: nothing is kept and ``compute`` is False, or the model is not here.
    """
    import pandas as pd

    profile, name = profile_of(profile), "rotation_errors"
    if compute:
        _measure(profile, name)
    file = paths.shipped_data_dir(profile.name, f"{name}.csv")
    if not file.is_file():
        raise ResidualQuantError(f"{paths.show(file)} is missing: `make reproduce PROFILE={profile.name}` makes it")
    try:
        errors = pd.read_csv(file)[list(COLUMNS)].astype({"error": float, "n": int})
        if not errors["error"].between(0, float("inf"), inclusive="left").all():
            raise ValueError("an error must be a finite number of at least 0")
        first, n = sum(profile.calibration[kind] for kind in ("fit", "holdout")), min(MOST_TEXTS, profile.texts)
        if not errors["split"].str.startswith(f"training problems {first} to {first + n - 1} of ").all():
            raise ValueError("the problems are not this profile's")
        return errors
    except (OSError, ValueError, KeyError) as error:
        raise ResidualQuantError(f"{paths.show(file)} is damaged: {error}") from error


def _measure(profile: Profile, name: str) -> None:
    """Calibrate what is missing and measure, unless the file holds just that already."""
    from residualquant.models import load_model
    from residualquant.repro.provenance import hash_sources, method_hash
    from residualquant.rotation.calibration import CALIBRATED, CalibrationSizes, calibrated_many
    from residualquant.rotation.measure import rotation_errors

    task = profile.task_for(BENCHMARK)
    model = load_model(profile.models["ouro"][task], device=profile.device)
    sizes = CalibrationSizes(**profile.calibration, seed=profile.seed)
    n = min(MOST_TEXTS, profile.texts)
    code = hash_sources(sorted((paths.PACKAGE / "rotation").glob("*.py")))
    made_of = json.dumps([model.weights_hash, method_hash(), code, task, n, profile.device, profile.calibration])
    key = hashlib.sha256(made_of.encode()).hexdigest()[:12]
    file = paths.data_dir(profile.name) / f"{name}.csv"
    if file.is_file() and file.read_text().partition("\n")[2].startswith(key):
        return
    configs = [preset("INT2/4 g=32", rotation=rotation) for rotation in COMPARED]
    learnt = [i for i, config in enumerate(configs) if config.rotation in CALIBRATED]
    where = paths.rotations_dir(profile.name)
    rotations = dict(zip(learnt, calibrated_many(model, [configs[i] for i in learnt], task, sizes, where)))
    errors = rotation_errors(model, task, configs, rotations, sizes, n)
    errors["error"] = errors["error"].map(lambda error: float(f"{error:.6g}"))
    errors.insert(0, "key", key)
    write_csv(name, errors, profile)


def rotations(profile: str | Profile = "mini", compute: bool = False) -> pd.DataFrame:
    """Each rotation against those before it.

    ``mean_ratio`` and ``median_ratio`` are over all (layer, head, K | V); ``lower_pct`` is the share with less error.
    """
    from residualquant.rotation.measure import compare_rotations

    profile = profile_of(profile)
    errors, rows = rotation_errors_of(profile, compute), []
    for against, rotation in combinations(COMPARED, 2):
        found = compare_rotations(errors, rotation, against)
        rows.append(
            {
                "rotation": rotation,
                "against": against,
                "config": errors["config"].iloc[0],
                "mean_ratio": round(found["mean_ratio"], 4),
                "median_ratio": round(found["median_ratio"], 4),
                "lower_pct": round(100 * found["lower"], 2),
                "heads": found["cells"],
                "n": int(errors["n"].iloc[0]),
                "split": errors["split"].iloc[0],
            }
        )
    return write_table("rotations", rows, profile)

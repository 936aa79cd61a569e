"""Table 1 and Figure 3 (middle, right): what the states of the loops look like; no token is generated.

Each analysis runs the Ouro-shaped model over whole problems with their solutions (teacher forcing, no truncation),
keeps one row of numbers per problem in ``data/<profile>/<label>_problems.csv``, and tabulates means over the problems,
all problems weighing the same, with bootstrap intervals. The forward pass runs on the CPU in FP32 whatever the profile.
A file made with other weights, code or sizes is made again when ``compute`` is given.

With K_r [T, H, D] the post-RoPE keys of loop r in one layer, rounded to BF16 as the cache holds them:

* Table 1: ``||Khat_r - K_r||_F^2 / max(||K_r||_F^2, 1e-30)`` over all tokens, layers, heads and channels, INT2 g=32,
  alpha = 1, no rotation, references First and Last.
* Figure 3 (middle): mean norm of K_r and V_r over tokens, layers and heads.
* Figure 3 (right): mean of ``||K_r - alpha R||^2`` over the same, before any residual is coded; R is the reconstructed
  last loop (INT2 or INT4, g=32), alpha 1 or the stored least-squares coefficient.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from residualquant.config import KVQuantConfig, preset
from residualquant.errors import ResidualQuantError
from residualquant.repro import paths
from residualquant.repro.profiles import Profile, profile_of
from residualquant.repro.stats import bootstrap_mean
from residualquant.repro.tables import write_table

if TYPE_CHECKING:
    import pandas as pd

REFERENCES = ("first", "last")
ANCHOR_BITS = (2, 4)
NMSE_TASK, NMSE_SPLIT = "math500", "test"  # the benchmark whose stand-in Table 1 reads
STATES_TASK, STATES_SPLIT = "gsm8k", "train"  # Figure 3


def nmse_of(k: Tensor) -> dict[str, float]:
    """Table 1's numbers of one problem: {"first_1": …, "first_avg": …, "last_1": …}; k [L, N, H, T, D]."""
    k = k.float()
    energy = (k * k).flatten(1).sum(1).clamp(min=1e-30)
    found = {}
    for reference in REFERENCES:
        config = preset("INT2 g=32", len(k), reference=reference, coefficient="unit")
        error = _reconstruct(k, config) - k
        nmse = ((error * error).flatten(1).sum(1) / energy).tolist()
        found |= {f"{reference}_{r + 1}": value for r, value in enumerate(nmse)}
        found[f"{reference}_avg"] = sum(nmse) / len(nmse)
    return found


def states_of(k: Tensor, v: Tensor) -> dict[str, float]:
    """Figure 3's numbers of one problem: norms "k_1" … "v_1" …, errors "int2_unit_1" …; k, v [L, N, H, T, D]."""
    k, v, found = k.float(), v.float(), {}
    for kind, x in (("k", k), ("v", v)):
        found |= {f"{kind}_{r + 1}": float(loop.norm(dim=-1).mean()) for r, loop in enumerate(x)}
    for bits in ANCHOR_BITS:
        anchor = _reconstruct(k[-1:], KVQuantConfig(bits=(bits,), reference="direct"))[0]
        for r in range(len(k) - 1):
            for name, alpha in (("unit", 1.0), ("ls", _stored_coefficient(k[r], anchor))):
                error = k[r] - alpha * anchor
                found[f"int{bits}_{name}_{r + 1}"] = float((error * error).sum(-1).mean())
    return found


def _reconstruct(x: Tensor, config: KVQuantConfig) -> Tensor:
    from residualquant.residual import reconstruct

    return reconstruct(x, config).float()


def _stored_coefficient(x: Tensor, reference: Tensor) -> Tensor:
    from residualquant.repro.traces import ls_coefficient

    return ls_coefficient(x, reference).bfloat16().float()[..., None]


# ------------------------------------------------------------------------------------------------ problem by problem


def nmse_by_problem(profile: str | Profile, compute: bool = False) -> pd.DataFrame:
    """One row per problem: columns first_1 … first_avg, last_1 … last_avg; ``attrs["tasks"]`` says of which task.

    Raises:
        ResidualQuantError: nothing is kept and ``compute`` is False, or the model is not here.
    """
    return _by_problem(
        "table1", profile_of(profile), compute, NMSE_TASK, NMSE_SPLIT, lambda text: nmse_of(text.k)
    )  # fmt: skip


def states_by_problem(profile: str | Profile, compute: bool = False) -> pd.DataFrame:
    """One row per problem with the columns of :func:`states_of`.

    Raises:
        ResidualQuantError: as for :func:`nmse_by_problem`.
    """
    return _by_problem(
        "figure3", profile_of(profile), compute, STATES_TASK, STATES_SPLIT, lambda text: states_of(text.k, text.v)
    )


def _by_problem(
    label: str, profile: Profile, compute: bool, benchmark: str, split: str, measure: Callable[..., dict[str, float]]
) -> pd.DataFrame:
    import pandas as pd

    name, task = f"{label}_problems.csv", profile.task_for(benchmark)
    file = paths.data_dir(profile.name) / name if compute else paths.shipped_data_dir(profile.name, name)
    if not compute and not file.is_file():
        raise ResidualQuantError(f"{paths.show(file)} is missing: `make reproduce PROFILE={profile.name}` makes it")
    if compute:
        _measure(file, profile, task, split, measure)
    try:
        table = pd.read_csv(file)
        kept = table.drop(columns=["key", "problem"])
    except (OSError, ValueError, KeyError) as error:
        raise ResidualQuantError(f"{paths.show(file)} is damaged: {error}") from error
    kept.attrs["tasks"] = f"ouro:{task}"
    return kept


def _measure(file, profile: Profile, task: str, split: str, measure: Callable[..., dict[str, float]]) -> None:
    """Run the model over the profile's problems, unless ``file`` holds just that already."""
    import pandas as pd
    from tqdm.auto import tqdm

    from residualquant.evals.texts import training_texts
    from residualquant.models import load_model
    from residualquant.trace import collect

    model = load_model(profile.models["ouro"][task], device="cpu")
    key = _key(model, task, split, profile.texts)
    if file.is_file() and file.read_text().split("\n", 2)[1].startswith(key):
        return
    rows = []
    texts = training_texts(model, task, profile.texts, 0, split)
    for index, ids in enumerate(tqdm(texts, desc=file.stem, unit="text")):
        (text,) = collect(model, [ids], queries=1)
        rows.append({"key": key, "problem": index, **{k: f"{v:.6g}" for k, v in measure(text).items()}})
    content = io.StringIO()
    pd.DataFrame(rows).to_csv(content, index=False, lineterminator="\n")
    paths.write_atomic(file, content.getvalue())


def _key(model, task: str, split: str, n: int) -> str:
    from residualquant.evals.tasks import TASKS_VERSION, frozen
    from residualquant.repro.provenance import hash_sources, method_hash

    code = hash_sources([paths.PACKAGE / "repro" / "analyses.py", paths.PACKAGE / "trace.py"])
    level = frozen(task, model.family).level
    made_of = [model.weights_hash, method_hash(), code, task, level, TASKS_VERSION, split, n]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]


# ------------------------------------------------------------------------------------------------ tables


def table1(profile: str | Profile = "mini", compute: bool = False) -> pd.DataFrame:
    """Table 1, key NMSE x 1000 by reference and loop, beside the paper's; ``table1.csv``."""
    from residualquant.repro.paper import printed

    profile = profile_of(profile)
    nmse, rows = nmse_by_problem(profile, compute), []
    for row in printed("table1"):
        mean, low, high = bootstrap_mean((1000 * nmse[f"{row['reference']}_{row['loop']}"]).tolist())
        paper = float(row["key_nmse_x1000"])
        rows.append(
            {
                "reference": row["reference"],
                "loop": row["loop"],
                "n": len(nmse),
                **_rounded(nmse_x1000=mean, ci_low=low, ci_high=high),
                "paper_nmse_x1000": paper,
                "delta": round(mean - paper, 4),
            }
        )
    return write_table("table1", rows, profile)


def figure3_middle(profile: str | Profile = "mini", compute: bool = False) -> pd.DataFrame:
    """Figure 3 (middle): mean norm of K and V in every loop; ``figure3_middle.csv``."""
    profile = profile_of(profile)
    states, rows = states_by_problem(profile, compute), []
    for name in (c for c in states.columns if c.startswith(("k_", "v_"))):
        kind, loop = name.split("_")
        mean, low, high = bootstrap_mean(states[name].tolist())
        about = {"kind": kind.upper(), "loop": int(loop), "n": len(states)}
        rows.append(about | _rounded(norm=mean, ci_low=low, ci_high=high))
    return write_table("figure3_middle", rows, profile)


def figure3_right(profile: str | Profile = "mini", compute: bool = False) -> pd.DataFrame:
    """Figure 3 (right): how far alpha times the last loop is from the others; ``figure3_right.csv``.

    ``reduced_pct`` is what least squares takes off the error of alpha = 1; ``paper_max_reduced_pct`` the largest that
    the paper reports.
    """
    from residualquant.repro.paper import printed

    profile = profile_of(profile)
    paper = {row["claim"]: float(row["value"]) for row in printed("claims")}
    states, rows = states_by_problem(profile, compute), []
    for name in (c for c in states.columns if c.startswith("int")):
        anchor, coefficient, loop = name.split("_")
        mean, low, high = bootstrap_mean(states[name].tolist())
        unit = float(states[f"{anchor}_unit_{loop}"].mean())
        rows.append(
            {
                "anchor": anchor.upper(),
                "loop": int(loop),
                "coefficient": coefficient,
                "n": len(states),
                **_rounded(mse=mean, ci_low=low, ci_high=high),
                "reduced_pct": round(100 * (1 - mean / unit), 4),
                "paper_max_reduced_pct": paper["key_prediction_mse_reduction_by_ls_max"],
            }
        )
    return write_table("figure3_right", rows, profile)


def _rounded(**values: float) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in values.items()}

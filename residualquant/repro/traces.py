"""Keys of a model on a prompt: the data behind Figures 2 and 5."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residualquant.errors import ResidualQuantError
from residualquant.repro.markup import counted
from residualquant.trace import collect

if TYPE_CHECKING:
    import pandas as pd

    from residualquant.models.base import LoopedModel

PAPER_LAYER, PAPER_HEAD = 3, 2  # counted from 1, Figures 2 and 5
PAPER_PROBLEM = 3  # the fourth training problem
TRACE_FILE = "kv_trace.safetensors"
KEPT_IN = "mini"  # the profile with which the trace is committed: nothing of a profile enters it


@dataclass(frozen=True)
class Trace:
    """Keys of one layer and KV head over a prompt, all loops: ``k`` [L, T, D] FP32, post-RoPE, exactly BF16.

    ``layer`` and ``head`` count from 1, as in the paper; ``asked`` is the pair that was wanted, which a small
    model may not have.
    """

    k: Tensor
    layer: int
    head: int
    model: str
    weights_hash: str
    prompt: str
    asked: list[int] = field(default_factory=lambda: [PAPER_LAYER, PAPER_HEAD])

    def save(self, path: Path) -> bool:
        """Write the trace as one safetensors file (BF16), the same bytes every time. False if it was there already."""
        from safetensors.torch import save

        from residualquant.repro.paths import write_atomic

        about = {n: getattr(self, n) for n in ("layer", "head", "model", "weights_hash", "prompt", "asked")}
        keys = {"k": self.k.to(torch.bfloat16).contiguous()}
        return write_atomic(Path(path), save(keys, metadata={"about": json.dumps(about, sort_keys=True)}))

    @classmethod
    def load(cls, path: Path) -> Trace:
        """The trace written by :meth:`save`.

        Raises:
            ResidualQuantError: the file is absent, truncated or no trace.
        """
        from safetensors import SafetensorError, safe_open

        from residualquant.repro.paths import parse_json, show

        try:
            with safe_open(path, framework="pt") as file:
                about = parse_json(file.metadata()["about"])
                return cls(file.get_tensor("k").float(), **about)
        except FileNotFoundError as error:
            raise ResidualQuantError(f"{show(Path(path))} is missing: `make reproduce` makes it") from error
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ResidualQuantError(f"{show(Path(path))} is truncated or not a trace: {error}") from error


def collect_trace(model: LoopedModel, ids: list[int], layer: int, head: int, prompt: str = "") -> Trace:
    """Keys of one layer and KV head (from 1) over the tokens ``ids``. Peak memory: one layer beside the result.

    Raises:
        ValueError: a layer or head the model does not have.
    """
    shape = model.kv_shape
    if not 1 <= layer <= shape.layers:
        raise ValueError(f"layer must be between 1 and {shape.layers}, got {layer}")
    if not 1 <= head <= shape.kv_heads:
        raise ValueError(f"head must be between 1 and {shape.kv_heads}, got {head}")
    (text,) = collect(model, [ids], [layer - 1])
    return Trace(text.k[:, 0, head - 1].float().cpu(), layer, head, model.name, model.weights_hash, prompt)


def problem_tokens(model: LoopedModel, task: str, index: int, preceding: int = 0) -> list[int]:
    """Token ids of a training problem's prompt and solution, after those of the ``preceding`` problems before it.

    Raises:
        ValueError: more preceding problems than there are.
        ResidualQuantError: the model has no tokenizer.
    """
    from residualquant.evals.texts import tokenizer_of, training_texts

    if not 0 <= preceding <= index:
        raise ValueError(f"preceding must be between 0 and {index}, got {preceding}")
    between = tokenizer_of(model).encode("\n").ids
    texts = training_texts(model, task, preceding + 1, index - preceding)
    return [i for text in texts[:-1] for i in text + between] + texts[-1]


def describe_prompt(task: str, preceding: int) -> str:
    """ "training problem 4 of 'words' with its solution", and what stands before it."""
    text = f"training problem {PAPER_PROBLEM + 1} of {task!r} with its solution"
    return text + (f", after the {counted(preceding, 'problem')} before it" if preceding else "")


def kept_trace(profile: str) -> Trace:
    """The trace of the profile's own run, ``data/<profile>/kv_trace.safetensors``, else the one committed in ``mini``.

    Raises:
        ResidualQuantError: there is none, or it is damaged.
    """
    from residualquant.repro.paths import shipped_data_dir

    own = shipped_data_dir(profile, TRACE_FILE)
    return Trace.load(own if own.is_file() else shipped_data_dir(KEPT_IN, TRACE_FILE))


def figure_trace(
    profile: str = "mini",
    compute: bool = False,
    model: str = "mini-ouro-maths",
    task: str = "words",
    preceding: int = 0,
    layer: int = PAPER_LAYER,
    head: int = PAPER_HEAD,
) -> Trace:
    """The trace of Figures 2 and 5 of a profile: by default layer 3, KV head 2, the fourth training problem.

    The paper puts the three preceding examples before the fourth (573 tokens of GSM8K). The minis are trained on one
    problem at a time, up to 384 tokens, so ``preceding`` is 0 for them. A model with fewer layers or heads gives its
    last one, and the picture says so. The forward pass runs on the CPU in FP32 whatever the profile, so that the trace
    does not depend on the machine.

    Args:
        compute: run the model and write ``data/<profile>/kv_trace.safetensors``; otherwise :func:`kept_trace`.

    Raises:
        ResidualQuantError: the file is missing or damaged, or was made with other arguments (only without ``compute``).
    """
    from residualquant.models import load_model
    from residualquant.repro.paths import data_dir

    prompt = describe_prompt(task, preceding)
    if not compute:
        trace = kept_trace(profile)
        if (trace.model, trace.prompt, trace.asked) != (model, prompt, [layer, head]):
            raise ResidualQuantError(
                f"the trace kept for {profile} is of {trace.model}, layer {trace.layer}, head {trace.head}, "
                f"{trace.prompt}: set compute = True for another one"
            )
        return trace
    loaded = load_model(model, device="cpu")
    ids = problem_tokens(loaded, task, PAPER_PROBLEM, preceding)
    there = min(layer, loaded.kv_shape.layers), min(head, loaded.kv_shape.kv_heads)
    trace = replace(collect_trace(loaded, ids, *there, prompt), asked=[layer, head])
    trace.save(data_dir(profile) / TRACE_FILE)
    return trace


def ls_coefficient(x: Tensor, reference: Tensor) -> Tensor:
    """Least-squares alpha [...] of ``x`` [..., D] on ``reference`` (Sec. 3.2), unquantised; 0 where it is undefined."""
    power = (reference * reference).sum(-1)
    return torch.where(power > 0, (x * reference).sum(-1) / power, torch.zeros_like(power))


def figure2_surfaces(trace: Trace) -> dict[str, Tensor]:
    """The three surfaces of Figure 2, each |.| [T, D]: loop 1, loop 2, and loop 2 less alpha times loop 1 (LS).

    Raises:
        ValueError: a trace of fewer than two loops.
    """
    if len(trace.k) < 2:
        raise ValueError(f"Figure 2 needs two loops, the trace has {len(trace.k)}")
    first, second = trace.k[0], trace.k[1]
    residual = second - ls_coefficient(second, first)[:, None] * first
    return {r"$|K_1|$": first.abs(), r"$|K_2|$": second.abs(), r"$|K_2-\alpha_2K_1|$": residual.abs()}


def figure5_surfaces(trace: Trace) -> list[dict[str, Tensor]]:
    """The rows of Figure 5, loops 1 … L-1: |K_r|, |K_L| and |K_r - K_L| (alpha = 1, unquantised), each [T, D]."""
    loops = len(trace.k)
    if loops < 2:
        raise ValueError(f"Figure 5 needs two loops, the trace has {loops}")
    last = trace.k[-1]
    return [
        {
            f"$|K_{r + 1}|$": trace.k[r].abs(),
            f"$|K_{loops}|$": last.abs(),
            f"$|K_{r + 1}-K_{loops}|$": (trace.k[r] - last).abs(),
        }
        for r in range(loops - 1)
    ]


def surface_table(trace: Trace, label: str) -> pd.DataFrame:
    """The surfaces of ``label`` in numbers: mean, 99th percentile, maximum, and energy as a share of the loop's own.

    Raises:
        ValueError: a label other than "figure2" or "figure5".
    """
    import pandas as pd

    if label not in ("figure2", "figure5"):
        raise ValueError(f"label must be 'figure2' or 'figure5', got {label!r}")
    surfaces = [(2, figure2_surfaces(trace))] if label == "figure2" else enumerate(figure5_surfaces(trace), start=1)
    rows = []
    for loop, group in surfaces:
        own = float((trace.k[loop - 1] ** 2).sum())
        for name, values in group.items():
            plain = name.strip("$").replace(r"\alpha", "alpha").replace("_", "").replace("-", " - ")
            plain = plain.replace("alpha2K1", "alpha2 K1")
            rows.append(
                {
                    "loop": loop,
                    "surface": plain,
                    "mean": float(values.mean()),
                    "p99": float(values.flatten().quantile(0.99)),
                    "max": float(values.max()),
                    "energy_share": float((values**2).sum()) / own,
                }
            )
    return pd.DataFrame(rows)

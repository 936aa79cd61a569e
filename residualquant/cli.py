"""The ``residualquant`` command. Each subcommand is a function; its signature is its command line.

Errors meant for the user end as one sentence on stderr and exit code 2 (RESIDUALQUANT_DEBUG=1 shows the traceback).
Heavy imports happen inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from residualquant.errors import ResidualQuantError

Profile = Annotated[str, tyro.conf.arg(help="smoke (minutes), mini (2-core CPU), full (one GPU) or paper.")]
Only = Annotated[tuple[str, ...], tyro.conf.arg(help="Labels to make, such as table2 figure1_left; all when empty.")]
Bits = Annotated[
    tuple[int, ...] | None, tyro.conf.arg(help="Bits of each loop, such as 4 2 0 4; overrides the label's.")
]


@dataclass(frozen=True)
class KVOptions:
    """Changes applied to every label given; what is not given stays as the label has it."""

    reference: str | None = None
    """What predicts a loop: last (the method), first, previous, next, or direct for none."""
    coefficient: str | None = None
    """How the reference is scaled: ls (least squares), norm_ratio or unit."""
    rotation: str | None = None
    """Change of basis before coding: none or hadamard (oscar and optr_h: see calibrate)."""
    bits: Bits = None
    group_size: int | None = None
    """Channels per scale and offset in loops of 1-3 bits: 16, 32 or 64."""
    int2_clip: float | None = None
    """Factor on the half-range of a 2-bit group (the method: 0.9)."""

    def configs(self, labels: Sequence[str]):
        """The KV configurations of ``labels``, changed as asked; BF16 stays as it is."""
        from residualquant.config import preset

        changes = {k: v for k, v in vars(self).items() if v is not None}
        configs = [preset(label) if label == "BF16" else preset(label, **changes) for label in labels]
        return list(dict.fromkeys(configs))


def bits(
    labels: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    kv: Annotated[KVOptions, tyro.conf.arg(name="")] = KVOptions(),
    head_dim: int = 128,
) -> None:
    """Effective bits, bytes, reads and capacity of KV configurations: arithmetic, no model.

    Example: residualquant bits "INT2/4 g=32" --rotation hadamard --head-dim 96

    Args:
        labels: The paper's labels, such as "INT2/4 g=32"; every one it uses when left out.
        kv: Changes applied to every label.
        head_dim: Channels per head (Ouro 128, Huginn 96).
    """
    from residualquant import layout
    from residualquant.config import PRESETS

    rows = [
        {
            "config": config.label,
            "reference": "none" if config.is_off else config.reference,
            "bits per loop": ",".join(map(str, config.bits)),
            "group sizes": ",".join("-" if g is None else str(g) for g in config.group_sizes),
            "effective bits": f"{layout.effective_bits(config, head_dim):.6g}",
            "bytes per loop": ",".join(str(layout.loop_bytes(config, loop, head_dim)) for loop in range(config.loops)),
            "stored bytes": layout.stored_bytes(config, head_dim),
            "capacity": f"{layout.capacity_ratio(config, head_dim):.3g}x",
            "read bytes": layout.bytes_read_per_step(config, head_dim),
            "traffic": f"{layout.traffic_ratio(config, head_dim):.3g}x",
        }
        for config in kv.configs(labels or tuple(PRESETS))
    ]
    _print_table(rows)
    print(f"Per token and head, for K or V, head_dim {head_dim}. Capacity and traffic: BF16's bytes over these.")


def evaluate(
    task: Annotated[str, tyro.conf.Positional],
    labels: Annotated[tuple[str, ...], tyro.conf.Positional] = ("BF16", "INT2/4 g=32"),
    kv: Annotated[KVOptions, tyro.conf.arg(name="")] = KVOptions(),
    n: int = 100,
    model: str | None = None,
    device: str | None = None,
    max_new_tokens: int | None = None,
    records: Path | None = None,
) -> None:
    """Accuracy of KV configurations on one task; answers are kept, so asking again or for more labels resumes.

    Example: residualquant eval words BF16 "INT2 g=32" "INT2/4 g=32" --rotation hadamard --n 200

    Args:
        task: words, algebra, stubs or asserts (standing for GSM8K, MATH500, HumanEval, MBPP).
        labels: The paper's labels; all are decoded together. Every other row is tested against the first.
        kv: Changes applied to every label but BF16.
        n: Problems of the test split.
        model: A shipped model's name, a folder or a hub id; the task's own mini model when left out.
        device: cpu or cuda; the GPU where there is one when left out.
        max_new_tokens: Longest answer; the task's own limit when left out.
        records: JSONL file of the answers; data/runs/eval/<model>.<task>.jsonl when left out. Finished, it is
            compressed: .gz is added to its name.
    """
    from residualquant.evals.run import evaluate as run
    from residualquant.evals.tasks import MODEL_OF_TASK, TASKS
    from residualquant.models import load_model
    from residualquant.repro.paths import runs_dir, show
    from residualquant.repro.records import finished_name
    from residualquant.repro.stats import Pair, mcnemar_exact, wilson

    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    configs = kv.configs(labels)
    loaded = load_model(model or MODEL_OF_TASK[task], device=device)
    records = records or runs_dir("eval") / f"{loaded.name}.{task}.jsonl"
    cells = run(loaded, task, configs, n, records, max_new_tokens=max_new_tokens)
    rows = []
    for config, cell in zip(configs, cells):
        low, high = wilson(sum(cell.correct.values()), n)
        p = mcnemar_exact(Pair.of(cell.correct, cells[0].correct)) if cell is not cells[0] else None
        rows.append(
            {
                "config": config.label,
                "reference": "none" if config.is_off else config.reference,
                "coefficient": "none" if config.anchor is None or config.is_off else config.coefficient,
                "rotation": config.rotation,
                "bits": f"{config.effective_bits(loaded.kv_shape.head_dim):.4g}",
                "n": n,
                "accuracy %": f"{100 * sum(cell.correct.values()) / n:.1f}",
                "95 % CI": f"{100 * low:.1f} - {100 * high:.1f}",
                "p against the first": "" if p is None else f"{p:.3g}",
            }
        )
    _print_table(rows)
    print(f"{loaded.name}, {task}, greedy; answers in {show(finished_name(records))}")


def calibrate(
    out: Path,
    config: str = "INT2/4 g=32",
    kv: Annotated[KVOptions, tyro.conf.arg(name="")] = KVOptions(rotation="optr_h"),
    task: str = "words",
    model: str | None = None,
    examples: int = 128,
    seed: int = 0,
    steps: int = 80,
    learning_rate: float = 0.02,
    device: str | None = None,
) -> None:
    """Fit the rotations of one KV configuration on a task's training problems; an interrupted run goes on.

    Example: residualquant calibrate --config "INT2/4 g=32" --rotation optr_h --task words --out data/runs/rotations

    Args:
        out: Folder for the rotations (safetensors) and what they are of (JSON).
        config: The paper's label of the configuration they are for.
        kv: Changes applied to the label; --rotation is optr_h or oscar.
        task: words, algebra, stubs or asserts: whose training problems, with their solutions, to use.
        model: A shipped model's name, a folder or a hub id; the task's own mini model when left out.
        examples: Problems to fit with; as many others choose each head's rotation.
        seed: Which of these problems are which, and the order in which they are drawn.
        steps: Optimiser steps for K, and as many for V (optr_h).
        learning_rate: Of the optimiser (optr_h).
        device: cpu or cuda; the GPU where there is one when left out.
    """
    from residualquant.evals.tasks import MODEL_OF_TASK, TASKS
    from residualquant.evals.texts import calibration_texts
    from residualquant.models import load_model
    from residualquant.repro.paths import show
    from residualquant.rotation.calibration import calibrate as run
    from residualquant.rotation.calibration import loss_table
    from residualquant.rotation.optr_h import OptRHSettings

    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    (asked,) = kv.configs([config])
    settings = OptRHSettings(steps=steps, learning_rate=learning_rate, seed=seed)
    loaded = load_model(model or MODEL_OF_TASK[task], device=device)
    texts = calibration_texts(loaded, task, examples, seed)
    run(loaded, asked, *texts, out, task=task, settings=settings)
    _print_table(loss_table(out))
    print(f"{loaded.name}, {asked.label}, {asked.reference}: rotations in {show(out)}; losses are of held-out problems")


def serve(
    model: Annotated[str, tyro.conf.Positional],
    config: str = "INT2/4 g=32",
    kv: Annotated[KVOptions, tyro.conf.arg(name="")] = KVOptions(rotation="hadamard"),
    rotations: Path | None = None,
    only_print: bool = False,
) -> None:
    """Serve a looped model with vLLM from a compressed cache: prints the vllm command and runs it.

    What follows ``--`` is handed to vLLM. Example: residualquant serve ByteDance/Ouro-1.4B -- --port 8001

    Args:
        model: A shipped model's name, a folder or a hub id.
        config: The paper's label; BF16 serves from plain pages.
        kv: Changes applied to the label.
        rotations: Folder that `calibrate` wrote, for --rotation oscar and optr_h.
        only_print: Print the command, run nothing.
    """


def _serve_command(extra: Sequence[str]) -> Callable[..., None]:
    """``serve`` with the options after ``--``, which are vLLM's."""
    import shlex
    from functools import wraps

    @wraps(serve)
    def command(model, config, kv, rotations, only_print):
        from residualquant.vllm.serve import ENVIRONMENT, check_installed, serve_command

        settings = {"preset": config, **vars(kv), "rotations": rotations and str(rotations)}
        line = serve_command(model, {k: v for k, v in settings.items() if v is not None}, extra)
        print(shlex.join([*(f"{k}={v}" for k, v in ENVIRONMENT.items()), *line]), flush=True)
        if not only_print:
            check_installed()
            program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
            os.execve(program[0], program + line[2:], os.environ | ENVIRONMENT)

    return command


def reproduce(profile: Profile = "mini", fresh: bool = False) -> None:
    """Compute every table and figure anew; an interrupted run goes on, a finished one is up to date.

    Committed results are never its input: they are set aside and compared with at the end.

    Args:
        profile: What to compute.
        fresh: Start over even if a run is finished or half done.
    """
    from residualquant.repro.run import reproduce as run

    run(profile, fresh=fresh)


def tables(profile: Profile = "mini", only: Only = ()) -> None:
    """Make tables again from the records, running no model.

    Args:
        profile: Whose records.
        only: Labels to make.
    """
    from residualquant.repro.run import make_tables

    make_tables(profile, only)


def figures(profile: Profile = "mini", only: Only = ()) -> None:
    """Make figures again from the records, running no model.

    Args:
        profile: Whose records.
        only: Labels to make.
    """
    from residualquant.repro.run import make_figures

    make_figures(profile, only)


def report(profile: Profile = "mini") -> None:
    """Write figures/<profile>/report.html: every table and figure, the paper's numbers beside ours, one file.

    Args:
        profile: Whose results.
    """
    from residualquant.repro.paths import show
    from residualquant.repro.report import write_report

    print(show(write_report(profile)))


def info() -> None:
    """Versions, devices, models found, and the state of every profile."""
    from residualquant.repro.info import print_info

    print_info()


def train() -> None:
    """Train one small model on the procedural tasks (one GPU, minutes).

    The defaults are the first of the two runs behind mini-ouro-maths; `make train` does all four of both minis.
    """


def _train_command() -> Callable[..., None]:
    """``train`` with the training settings as its options (importing them loads torch)."""
    from residualquant.training import TrainConfig
    from residualquant.training import train as run

    def command(config):
        run(config)

    command.__annotations__ = {"config": Annotated[TrainConfig, tyro.conf.arg(name="")], "return": None}
    command.__doc__ = train.__doc__
    return command


def _print_table(rows: list[dict]) -> None:
    from tabulate import tabulate

    print(tabulate(rows, headers="keys", disable_numparse=True))


COMMANDS: dict[str, Callable[..., None]] = {
    "bits": bits,
    "train": train,
    "calibrate": calibrate,
    "eval": evaluate,
    "serve": serve,
    "reproduce": reproduce,
    "tables": tables,
    "figures": figures,
    "report": report,
    "info": info,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one subcommand. Exits with 2 and one sentence for an error the user can act on, 130 when interrupted."""
    argv = sys.argv[1:] if argv is None else list(argv)
    commands = COMMANDS | ({"train": _train_command()} if argv[:1] == ["train"] else {})
    if argv[:1] == ["serve"]:
        own = argv.index("--") if "--" in argv else len(argv)
        commands, argv = commands | {"serve": _serve_command(argv[own + 1 :])}, argv[:own]
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands, args=argv or ["--help"], prog="residualquant", config=(tyro.conf.OmitArgPrefixes,),
            description="KV cache quantisation for looped transformers: evaluate it, reproduce the paper's results.",
        )  # fmt: skip
    except (ResidualQuantError, ValueError, OSError) as error:
        if os.environ.get("RESIDUALQUANT_DEBUG"):
            raise
        print(f"residualquant: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("residualquant: interrupted; the same command goes on where it stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

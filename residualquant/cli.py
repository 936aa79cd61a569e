"""The ``residualquant`` command. Each subcommand is a function; its signature is its command line.

Errors meant for the user end as one sentence on stderr and exit code 2 (RESIDUALQUANT_DEBUG=1 shows the traceback).
Heavy imports happen inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from residualquant.errors import ResidualQuantError, check_count
from residualquant.options import (
    Changes,
    KVOptions,
    Only,
    Profile,
    check_file,
    check_folder,
    from_0,
    label_of,
    read_text_file,
)

NO_CHANGES, WITH_OPTR_H, WITH_HADAMARD = KVOptions(), KVOptions(rotation="optr_h"), KVOptions(rotation="hadamard")


def bits(
    labels: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    kv: Changes = NO_CHANGES,
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
    task: str,
    config: tuple[str, ...] = ("BF16", "INT2/4 g=32"),
    kv: Changes = NO_CHANGES,
    rotations: Path | None = None,
    n: int = 100,
    model: str | None = None,
    device: str | None = None,
    max_new_tokens: int | None = None,
    records: Path | None = None,
    engine: Literal["torch", "vllm"] = "torch",
) -> None:
    """Accuracy of KV configurations on one task; answers are kept, so asking again or for more labels resumes.

    Example: residualquant eval --task words --config BF16 "INT2 g=32" "INT2/4 g=32" --rotation optr_h --n 200

    Args:
        task: words, algebra, stubs or asserts (standing for GSM8K, MATH500, HumanEval, MBPP).
        config: The paper's labels; all are decoded together. Where BF16 is one, the others are tested against it.
        kv: Changes applied to every label but BF16.
        rotations: Folder of calibrations; oscar and optr_h are calibrated first, under data/runs, when left out.
        n: Problems of the test split.
        model: A shipped model's name, a folder or a hub id; the task's own mini model when left out.
        device: cpu or cuda; the GPU where there is one when left out.
        max_new_tokens: Longest answer; the task's own limit when left out.
        records: JSONL file of the answers; data/runs/eval/<model>.<task>.jsonl when left out. Finished, it is
            compressed: .xz is added to its name.
        engine: What decodes: torch, or vllm (the serving plugin's paged cache; needs vLLM).
    """
    from residualquant.evals.run import evaluate as run
    from residualquant.repro.paths import runs_dir, show
    from residualquant.repro.records import finished_name

    for name, value in (("n", n), ("max_new_tokens", max_new_tokens)):
        if value is not None:
            check_count(name, value)  # before minutes of calibration
    check_file("records", records)
    loaded = _load(task, model, device)
    shape = loaded.kv_shape
    configs = kv.configs(config, shape.loops, shape.layers)
    learnt = _rotations(loaded, configs, task, rotations)
    records = records or runs_dir("eval") / f"{loaded.name}.{task}.jsonl"
    options = {"rotations": learnt, "max_new_tokens": max_new_tokens, "engine": engine}
    cells = run(loaded, task, configs, n, records, **options)
    bf16 = next((cell for asked, cell in zip(configs, cells) if asked.is_off), None)
    _print_table([_accuracy_row(loaded, *pair, bf16) for pair in zip(configs, cells)])
    print(f"{loaded.name}, {task}, greedy; answers in {show(finished_name(records))}")


def _accuracy_row(model, config, cell, bf16) -> dict:
    """What ``eval`` prints of one configuration; ``bf16`` is the cell to test it against, or None."""
    from residualquant.layout import effective_bits, model_effective_bits
    from residualquant.repro.stats import Pair, mcnemar_exact, wilson

    shape = model.kv_shape
    n, right = cell.identity["n"], sum(cell.correct.values())
    low, high = wilson(right, n)
    row = {
        "config": label_of(config),
        "reference": "none" if config.is_off else config.reference,
        "coefficient": "none" if config.anchor is None or config.is_off else config.coefficient,
        "rotation": "none" if config.is_off else config.rotation,
        "bits": f"{effective_bits(config, shape.head_dim, shape.layers):.4g}",
        "with edge layers": f"{model_effective_bits(config, shape, model.edge_layers):.4g}",
        "n": n,
        "accuracy %": f"{100 * right / n:.1f}",
        "95 % CI": f"{100 * low:.1f} - {100 * high:.1f}",
    }
    if not model.edge_layers:
        del row["with edge layers"]
    if bf16 is not None:
        row["p against BF16"] = "" if cell is bf16 else f"{mcnemar_exact(Pair.of(cell.correct, bf16.correct)):.3g}"
    return row


def _model_name(task: str, model: str | None) -> str:
    """The model asked for, or the task's own."""
    from residualquant.evals.tasks import MODELS, TASKS

    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    return MODELS["ouro"][task] if model is None else model


def _load(task: str, model: str | None, device: str | None):
    from residualquant.models import load_model

    return load_model(_model_name(task, model), device=device)


def _rotations(model, configs, task: str, folder: Path | None) -> dict:
    """{index: rotations} of the calibrated configurations: those in ``folder``, or calibrated where there is none."""
    from residualquant.repro.paths import runs_dir
    from residualquant.rotation.calibration import CALIBRATED, calibrated_many

    learnt = [i for i, config in enumerate(configs) if config.rotation in CALIBRATED and not config.is_off]
    if folder is not None:
        if not learnt:
            raise ValueError(f"no configuration here uses the rotations in {folder}: give --rotation optr_h or oscar")
        return {i: _kept_rotations(model, configs[i], folder) for i in learnt}
    wanted = [configs[i] for i in learnt]
    return dict(zip(learnt, calibrated_many(model, wanted, task, folder=runs_dir("rotations")))) if learnt else {}


def _kept_rotations(model, config, folder: Path):
    """The rotations in ``folder``, or in the one folder within whose calibration is of this model and configuration."""
    from residualquant.rotation.artefact import ABOUT_FILE, load_rotations

    inner = [file.parent for file in sorted(folder.glob(f"*/{ABOUT_FILE}"))]
    if not inner:
        return load_rotations(folder, model, config)
    fitting = []
    for one in inner:
        with contextlib.suppress(ResidualQuantError):
            fitting.append((one.name, load_rotations(one, model, config)))
    if len(fitting) != 1:
        names = ", ".join(name for name, _ in fitting) or "none"
        what = f"{model.name}, {label_of(config)}, {config.reference}, {config.rotation}"
        raise ResidualQuantError(f"one calibration in {folder} must be of {what}; these are: {names}; name its folder")
    return fitting[0][1]


def inspect(
    task: str = "words",
    config: str = "INT2/4 g=32",
    kv: Changes = NO_CHANGES,
    trace: Path | None = None,
    rotations: Path | None = None,
    n: int = 8,
    queries: int = 64,
    model: str | None = None,
    device: str | None = None,
    out: Path | None = None,
) -> None:
    """Where a KV configuration loses accuracy: residual energy, NMSE and attention error of every layer, loop and head.

    Writes inspect.csv, and the same as heat maps, and prints the means of every loop and the ten worst places.

    Example: residualquant inspect --task words --config "INT2/4 g=32" --rotation hadamard

    Args:
        task: words, algebra, stubs or asserts: whose training problems, with their solutions, to look at.
        config: The paper's label of the configuration.
        kv: Changes applied to the label.
        trace: File that the trace command wrote, to look at instead of problems.
        rotations: Folder of calibrations; oscar and optr_h are calibrated first, under data/runs, when left out.
        n: Problems to look at, none of which calibration has seen.
        queries: Last queries of each problem that the attention error is taken over.
        model: A shipped model's name, a folder or a hub id; the trace's or the task's own model when left out.
        device: cpu or cuda; the GPU where there is one when left out.
        out: Folder of the results; data/runs/inspect/<model>.<task>, or <model>.trace-<its name>, when left out.
    """
    from residualquant.evals.texts import unseen_texts
    from residualquant.inspect import Traced, draw_inspection, inspect_trace, loop_means, worst
    from residualquant.repro.paths import runs_dir, show, write_atomic
    from residualquant.rotation.calibration import CALIBRATED, CalibrationSizes

    check_count("n", n)
    check_count("queries", queries)
    if trace is None:
        loaded, sizes = _load(task, model, device), CalibrationSizes()
        seen = Traced.live(loaded, unseen_texts(loaded, task, sizes.fit, sizes.holdout, n), queries)
    else:
        loaded, seen = None, Traced.open(trace)
    (asked,) = kv.configs([config], seen.shape.loops, seen.shape.layers)
    learnt = None
    if asked.rotation in CALIBRATED or rotations is not None:
        loaded = loaded or _load(task, model or seen.model, "cpu")
        if loaded.weights_hash != seen.weights:
            raise ResidualQuantError(f"{show(trace)} is not of {loaded.name} as it is now: its weights are others")
        learnt = _rotations(loaded, [asked], task, rotations).get(0)
    table = inspect_trace(seen.texts, asked, learnt, seen.layers, queries)
    out = out or runs_dir("inspect") / f"{seen.model}.{task if trace is None else f'trace-{trace.stem}'}"
    write_atomic(out / "inspect.csv", table.to_csv(index=False, float_format="%.6g"))
    draw_inspection(table).save(out, "inspect")
    for rows in (loop_means(table), worst(table)):
        _print_table(rows.map(lambda x: f"{x:.4g}" if isinstance(x, float) else x).to_dict("records"))
    print(f"{seen.model}, {label_of(asked)}: means over layers and heads, worst places; everything in {show(out)}")


def calibrate(
    config: str = "INT2/4 g=32",
    kv: Changes = WITH_OPTR_H,
    task: str = "words",
    model: str | None = None,
    fit: int = 128,
    holdout: int = 128,
    steps: int = 80,
    seed: int = 0,
    out: Path | None = None,
    device: str | None = None,
    estimate: bool = False,
) -> None:
    """Fit the rotations of one KV configuration on training problems; an interrupted run goes on.

    The problems are those of all tasks that the model serves (maths or code; all four for Huginn).

    Example: residualquant calibrate --config "INT2/4 g=32" --rotation optr_h --task words

    Args:
        config: The paper's label of the configuration they are for.
        kv: Changes applied to the label; --rotation is optr_h or oscar.
        task: words or algebra (maths), stubs or asserts (code): whose training problems, with solutions, to use.
        model: A shipped model's name, a folder or a hub id; the task's own mini model when left out.
        fit: Problems to fit with.
        holdout: Others, which choose each head's rotation.
        steps: Optimiser steps for K, and as many for V (optr_h).
        seed: Which of these problems are which, and the order in which they are drawn.
        out: Folder for calibrations, each in a folder of its own; data/runs/rotations when left out.
        device: cpu or cuda; the GPU where there is one when left out.
        estimate: Only print what it would take in time and memory at the paper's sizes, without loading the model.
    """
    from residualquant.repro.paths import show
    from residualquant.rotation import calibration

    if estimate:
        from residualquant.bench.calibration import estimates

        rows, how = estimates(_model_name(task, model))
        _print_table(rows)
        print(how)
        return
    check_folder("out", out)
    sizes = calibration.CalibrationSizes(fit, holdout, steps, seed)
    begun, loaded = time.monotonic(), _load(task, model, device)
    shape = loaded.kv_shape
    (asked,) = kv.configs([config], shape.loops, shape.layers)
    calibration.calibrated(loaded, asked, task, sizes, out)
    folder = calibration.artefact_folder(loaded, asked, task, sizes, out)
    _print_table(calibration.loss_table(folder))
    print(
        f"{loaded.name}, {label_of(asked)}: rotations in {show(folder)}; losses are of held-out problems; "
        f"{time.monotonic() - begun:.0f} s (--estimate: other models)"
    )


def trace(
    out: Path,
    model: str | None = None,
    task: str = "words",
    n: int = 8,
    start: int = 0,
    split: str = "train",
    text: tuple[Path, ...] = (),
    loops: tuple[int, ...] | None = None,
    layers: tuple[int, ...] | None = None,
    edge: bool = False,
    device: str | None = None,
) -> None:
    """Write the post-RoPE queries, keys and values of a model on some texts to one safetensors file (BF16).

    The texts are a task's problems with their solutions, or files. Text i (from 0) gives i.ids [T], i.q [loops, layers,
    query heads, T, D], i.k and i.v [loops, layers, KV heads, T, D].

    Example: residualquant trace --task words --n 4 --layers 3 --out data/runs/trace/words.safetensors

    Args:
        out: The file to write.
        model: A shipped model's name, a folder or a hub id; the task's own mini model when left out.
        task: words, algebra, stubs or asserts.
        n: Problems of the task.
        start: The first of them, from 0.
        split: train or test.
        text: Text files to use instead of problems, each one text.
        loops: Loops to keep, from 1; all when left out.
        layers: Layers to keep, from 1; all when left out.
        edge: Also keep the layers that run once (Huginn's prelude and coda), as i.edge_q, i.edge_k, i.edge_v.
        device: cpu or cuda; the GPU where there is one when left out.
    """
    from tqdm.auto import tqdm

    from residualquant.evals.texts import tokenizer_of, training_texts
    from residualquant.repro.paths import show
    from residualquant.trace import Selection, write_trace

    check_count("n", n)
    check_file("out", out)
    loaded = _load(task, model, device)
    shape = loaded.kv_shape
    chosen = from_0("loops", loops, shape.loops), from_0("layers", layers, shape.layers)
    keep = Selection(*chosen, edge=edge).resolve(loaded)
    if text:
        texts = [tokenizer_of(loaded).encode(read_text_file(file)).ids for file in text]
        source = ", ".join(file.name for file in text)
    else:
        texts = training_texts(loaded, task, n, start, split)
        source = f"{task}, {split} problems {start} to {start + n - 1} with their solutions"
    with tqdm(total=len(texts), desc=f"trace {loaded.name}") as bar:
        write_trace(loaded, texts, out, keep, source, bar.update)
    print(f"{loaded.name}, {source}: {out.stat().st_size / 2**20:.1f} MiB in {show(out)}")


def serve(
    model: Annotated[str, tyro.conf.Positional],
    config: str = "INT2/4 g=32",
    kv: Changes = WITH_HADAMARD,
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
        from residualquant.vllm.serve import ENVIRONMENT, check_installed, environment, serve_command

        if kv.layer_bits is not None:
            raise ValueError(f"layer-bits cannot be served, pages of all layers have one size: got {kv.layer_bits}")
        settings = {"preset": config, **kv.given} | ({"rotations": str(rotations)} if rotations else {})
        line = serve_command(model, settings, extra)
        print(shlex.join([*(f"{k}={v}" for k, v in ENVIRONMENT.items()), *line]), flush=True)
        if not only_print:
            check_installed()
            program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
            os.execve(program[0], program + line[2:], os.environ | environment())

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


def cells(
    profile: Profile = "mini",
    models: Annotated[tuple[str, ...], tyro.conf.arg(help="Only these models, such as mini-ouro-maths.")] = (),
    tasks: Annotated[tuple[str, ...], tyro.conf.arg(help="Only these tasks, such as algebra.")] = (),
    part: str | None = None,
    memory_gib: float | None = None,
    score: bool = True,
) -> None:
    """Calibrate rotations and decode the missing answers of a profile: what reproduce begins with, split as wanted.

    Examples: residualquant cells --profile full --part 3/8 --no-score, as one of eight processes; or, for one of
    several on a GPU, --models mini-huginn --part 1/1 --memory-gib 80 --no-score.

    Args:
        profile: What to compute.
        models: Only these models.
        tasks: Only these tasks.
        part: i/k: only every k-th configuration from the i-th on, into records of its own; collect joins them.
        memory_gib: Most memory for caches, where several processes share a device; when not given, 4 GiB on a CPU and
            70 % of what is free on a GPU.
        score: Score the answers here; otherwise collect does.
    """
    from residualquant.repro.cells import compute_cells

    index = tuple(map(int, part.split("/"))) if part and re.fullmatch(r"\d+/\d+", part) else None
    if part is not None and not index:
        raise ValueError(f"part must be i/k, such as 1/4, got {part!r}")
    if memory_gib is not None and not 0 < memory_gib < math.inf:
        raise ValueError(f"memory_gib must be above 0, got {memory_gib}")
    memory = None if memory_gib is None else max(1, int(memory_gib * 2**30))
    compute_cells(profile, models=models, tasks=tasks, part=index, memory_bytes=memory, score=score)


def collect(profile: Profile = "mini") -> None:
    """Join the records of a run that was split into parts, and score what was left open. No model runs.

    Args:
        profile: Whose records.
    """
    from residualquant.repro.cells import collect_cells

    for sentence in collect_cells(profile):
        print(sentence)


def tables(profile: Profile = "mini", only: Only = (), compute: bool = False) -> None:
    """Make tables again from the records, running no model unless told to.

    Args:
        profile: Whose records.
        only: Labels to make.
        compute: First compute what is missing (Table 1 and Figure 3 take minutes, accuracies may take hours).
    """
    from residualquant.repro.run import make_tables

    make_tables(profile, only, compute)


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

    The defaults are the first of the two runs behind mini-ouro-maths; `make train` does all six of the three minis.
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
    "trace": trace,
    "eval": evaluate,
    "serve": serve,
    "inspect": inspect,
    "reproduce": reproduce,
    "cells": cells,
    "collect": collect,
    "tables": tables,
    "figures": figures,
    "report": report,
    "info": info,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one subcommand. Exits with 2 and one sentence for an error the user can act on, 130 when interrupted."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch's large tensors in huge pages: read twice as fast
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
    except (MemoryError, RuntimeError) as error:  # torch raises a RuntimeError of its own for either kind of memory
        if os.environ.get("RESIDUALQUANT_DEBUG") or not _is_out_of_memory(error):
            raise
        print(f"residualquant: out of memory: {str(error).split(chr(10))[0] or 'Python got no more'}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        what = "finished answers and rotations are kept: the same command goes on with them"
        print(f"residualquant: interrupted; {what}", file=sys.stderr)
        sys.exit(130)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or bool(re.search("out of memory|allocate memory", str(error)))


if __name__ == "__main__":
    main()

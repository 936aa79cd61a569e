"""Throughput and peak memory of the torch codec on this CPU: ``python -m residualquant.bench.cpu``.

What is expected, before anything is timed.  A codec that made one pass over memory would run at the copy bandwidth.
This one is a chain of elementwise torch calls over blocks that fit a core's cache, so it is bound by the number of
those passes, and with a rotation by the FP64 product (2 D operations per value) as well.  The *ceiling* is therefore

    time >= values * (passes * time of an in-cache FP32 addition + 2 D / FP64 matrix rate)

with both rates measured in the same run.  Results are given as fractions of the copy bandwidth of the same run, beside
that ceiling.  The torch codec is the reference that others are tested against; speed is the kernels' business.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from residualquant.bench import write_timings
from residualquant.config import KVQuantConfig, preset
from residualquant.errors import ResidualQuantError
from residualquant.repro.paths import data_dir, show
from residualquant.repro.provenance import provenance
from residualquant.residual import CPU_BLOCK_VALUES, decode, encode, reconstruct

OURO_1_4B = (4, 16, 128)  # loops, KV heads, head dim
PROTOCOL = "one layer of Ouro-1.4B's shape, K, BF16 input; 1 warm-up, median of {trials}"
TRIALS = 5

# Elementwise FP32 passes over a block, per value, of each part of the codec, counted in the source.
ENCODE_PASSES = 5 + 10  # sanitise and count 5; min, max and the code formula 7; cast and pack 3
RESIDUAL_PASSES = 4  # product, its folding, prediction, subtraction
REBUILD_PASSES = 2  # scale, add
DECODE_PASSES = 4 + REBUILD_PASSES  # stack, unpack, to FP32, store
ROTATION_PASSES = 3  # to FP64 and back


@dataclass(frozen=True)
class Machine:
    """Rates of this machine, measured in the same run: bytes/s, seconds per value, operations/s."""

    copy_bandwidth: float
    pass_seconds: float
    matrix_rate: float


@dataclass(frozen=True)
class Timing:
    """One row of data/bench/cpu.csv."""

    operation: str
    config: str
    reference: str
    rotation: str
    tokens: int
    bytes_moved: int
    seconds: float
    gb_per_s: float
    copy_gb_per_s: float
    fraction_of_copy: float
    expected_ceiling: float
    peak_over_input: float | None
    cpu: str
    threads: int
    torch: str
    protocol: str


def measure_machine() -> Machine:
    """Copy bandwidth (read and write counted), time of an in-cache pass, and FP64 matrix rate."""
    source = torch.ones(2**27, dtype=torch.bfloat16)
    target = torch.ones_like(source)
    copy = _median_seconds(lambda: target.copy_(source), TRIALS)
    block = torch.ones(CPU_BLOCK_VALUES)
    one_pass = _median_seconds(lambda: torch.add(block, block), 50)
    rows, matrix = torch.ones(CPU_BLOCK_VALUES // 128, 128).double(), torch.ones(128, 128).double()
    product = _median_seconds(lambda: rows @ matrix, 50)
    return Machine(4 * source.numel() / copy, one_pass / block.numel(), 2 * 128 * rows.numel() / product)


def expected_seconds(operation: str, cfg: KVQuantConfig, head_dim: int, values: int, machine: Machine) -> float:
    """The ceiling of the module's text, as a time for ``values`` values."""
    predicted = sum(cfg.reference_of(loop) is not None for loop in range(cfg.loops)) / cfg.loops
    if operation == "encode":
        passes = ENCODE_PASSES + RESIDUAL_PASSES * predicted + (REBUILD_PASSES / cfg.loops if predicted else 0)
    else:
        passes = DECODE_PASSES + 2 * predicted
    rotated = cfg.rotation != "none"
    passes += ROTATION_PASSES * rotated
    return values * (passes * machine.pass_seconds + rotated * 2 * head_dim / machine.matrix_rate)


def measure(tokens: int, trials: int = TRIALS, peak: bool = True) -> list[Timing]:
    """Timings of encode and decode, with and without residuals and rotation, at ``tokens`` tokens."""
    machine = measure_machine()
    peak_ratio = peak_over_input(preset("INT2/4 g=32")) if peak else None
    loops, heads, head_dim = OURO_1_4B
    x = torch.randn(loops, tokens, heads, head_dim).bfloat16()
    about = (provenance()["cpu"], torch.get_num_threads(), torch.__version__, PROTOCOL.format(trials=trials))
    rows = []
    for reference in ("direct", "last"):
        for rotation in ("none", "hadamard"):
            cfg = preset("INT2/4 g=32", reference=reference, rotation=rotation)
            packed = encode(x, cfg)
            if not torch.equal(decode(packed, "rotated"), reconstruct(x, cfg)):
                raise ResidualQuantError(f"decode disagrees with reconstruct for {cfg}: no time is reported")
            operations = {
                "encode": (lambda cfg=cfg: encode(x, cfg), 2 * x.numel() + packed.nbytes),
                "decode": (lambda packed=packed: decode(packed), packed.nbytes + 4 * x.numel()),
            }
            for operation, (call, moved) in operations.items():
                seconds = _median_seconds(call, trials)
                expected = expected_seconds(operation, cfg, head_dim, x.numel(), machine)
                speed, copy = moved / seconds, machine.copy_bandwidth
                measured = (seconds, speed / 1e9, copy / 1e9, speed / copy, moved / expected / copy)
                row = (operation, cfg.label, reference, rotation, tokens, moved, *measured)
                memory = peak_ratio if (operation, reference, rotation) == ("encode", "last", "none") else None
                rows.append(Timing(*row, memory, *about))
    return rows


def peak_over_input(cfg: KVQuantConfig, tokens: int = 16384) -> float:
    """Peak memory of encoding K and V of one layer over the bytes of their BF16 input (the input itself included).

    Measured in a fresh process, as the high-water mark of its resident memory.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak_in_this_process, cfg, tokens).result()


def _peak_in_this_process(cfg: KVQuantConfig, tokens: int) -> float:
    loops, heads, head_dim = OURO_1_4B
    states = torch.ones(2, loops, 64, heads, head_dim, dtype=torch.bfloat16)
    encode(states[0], cfg)  # so that libraries and threads are up before the baseline
    before = _status_bytes("VmRSS")
    states = torch.empty(2, loops, tokens, heads, head_dim, dtype=torch.bfloat16).normal_()
    packed = [encode(one, cfg) for one in states]
    peak = _status_bytes("VmHWM") - before
    del packed
    return peak / (2 * states.numel())


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ResidualQuantError(f"this system does not report {name}, so peak memory cannot be measured")


def _median_seconds(call: Callable[[], object], trials: int) -> float:
    call()
    seconds = []
    for _ in range(trials):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    """Say what is expected, measure, print one line per row and write the CSV."""
    print(__doc__.split("\n\n", 1)[1])
    rows = measure(tokens=2048)
    first = rows[0]
    print(f"{first.cpu}, {first.threads} threads, torch {first.torch}")
    print(f"copy bandwidth {first.copy_gb_per_s:.1f} GB/s; {first.protocol}\n")
    for row in rows:
        memory = f", peak memory {row.peak_over_input:.2f}x the BF16 input" if row.peak_over_input else ""
        print(
            f"{row.operation} {row.config} {row.reference:6s} {row.rotation:8s} {row.gb_per_s:6.3f} GB/s = "
            f"{row.fraction_of_copy:6.2%} of copying (ceiling {row.expected_ceiling:.2%}){memory}"
        )
    path = write_timings(data_dir("bench") / "cpu.csv", Timing, rows)
    print(f"\nwrote {show(path)}")


if __name__ == "__main__":
    main()

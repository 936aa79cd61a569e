"""CUDA kernels compiled ahead of time by plain nvcc and loaded by ctypes: ``python -m residualquant.kernels.build``.

A *variant* is one set of compile-time choices (head size, bits, group sizes, ...) and becomes one shared library with
a C interface, so neither torch's ABI nor its extension builder is involved and a build takes seconds. Libraries lie in
``build/kernels`` under a hash of the sources and the flags: those built ahead need no compiler, what is missing is
compiled on first use.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import ClassVar

import torch

from residualquant.config import PRESETS, preset
from residualquant.errors import ResidualQuantError, check_type
from residualquant.kernels.checks import HEAD_DIMS
from residualquant.layout import PageLayout, loops_read
from residualquant.repro.paths import kernels_dir, show
from residualquant.residual import coding_steps

FLAGS = ("-std=c++17", "-O3", "--shared", "-Xcompiler", "-fPIC", "-Xptxas", "-v")
CODE_BITS = (2, 4)
MOST_KINDS = 4
WRITER_HEAD_DIMS = (64, 96, 128)
WRITER_GROUPS = (16, 32, 64, 128)
MOST_LOOPS = 16
OLDEST = 90  # FP8 conversion needs sm_89, bulk prefetch sm_90


class Compiled:
    """Compile-time choices of one CUDA source; the macro of a field is its name in capitals."""

    SOURCE: ClassVar[str]
    FLAGS: ClassVar[tuple[str, ...]] = ()

    @property
    def macros(self) -> list[str]:
        """Definitions for the compiler."""
        return [f"-D{name.upper()}={value}" for name, value in dataclasses.asdict(self).items()]


@dataclass(frozen=True)
class Variant(Compiled):
    """Compile-time choices of decode_attention.cu.

    Attributes:
        head_dim: channels per head (D).
        page_tokens: tokens per page (S).
        kinds: stored loops that are read: 1 alone, 2 an anchor and a residual, up to 4 in a chain.
        first_bits, first_group: precision of the loop that is rebuilt first (the anchor).
        other_bits, other_group: of the others.
        has_alpha: whether the others store a coefficient.
        query_heads: query heads per KV head that one block serves.
    """

    SOURCE = "decode_attention.cu"

    head_dim: int
    page_tokens: int
    kinds: int
    first_bits: int
    first_group: int
    other_bits: int
    other_group: int
    has_alpha: int
    query_heads: int


@dataclass(frozen=True)
class WriterVariant(Compiled):
    """Compile-time choices of pack_kv.cu.

    Attributes:
        head_dim: channels per head (D).
        first_bits, first_group: precision of the loop that is coded first.
        other_bits, other_group: the other precision that occurs, or the same.
        rotated: whether there are rotations.
    """

    SOURCE = "pack_kv.cu"
    FLAGS = ("-fmad=false",)  # a fused multiply-add would round otherwise than the codec

    head_dim: int
    first_bits: int
    first_group: int
    other_bits: int
    other_group: int
    rotated: int


def variant_for(layout: PageLayout, loop: int, queries_per_head: int = 1) -> Variant | str:
    """The variant that reads ``loop`` of pages of ``layout``, or why there is none.

    Args:
        layout: of the pages.
        loop: loop within its group, from 0.
        queries_per_head: query heads per KV head.

    Raises:
        ValueError: no layout, or a loop that it has not.
    """
    check_type("layout", layout, PageLayout)
    cfg = layout.config
    kinds = loops_read(cfg, loop)[::-1]
    first, others = kinds[0], kinds[1:]
    precisions = {(cfg.bits[kind], cfg.group_sizes[kind]) for kind in others} or {(2, 32)}
    if layout.head_dim not in HEAD_DIMS:
        return f"head_dim must be one of {', '.join(map(str, HEAD_DIMS))}, got {layout.head_dim}"
    if any(cfg.bits[kind] not in CODE_BITS for kind in kinds):
        return f"bits must be 2 or 4, got {[cfg.bits[kind] for kind in kinds]} for loop {loop}"
    if len(precisions) > 1:
        return f"the residuals of a chain must have one precision, got {sorted(precisions)} for loop {loop}"
    if len(kinds) > MOST_KINDS:
        return f"at most {MOST_KINDS} stored loops can be read at once, got {len(kinds)} for loop {loop}"
    ((other_bits, other_group),) = precisions
    has_alpha = int(bool(others) and cfg.coefficient != "unit")
    room = layout.head_dim <= 128 and len(kinds) <= 2  # in registers, for the sums of two query heads
    query_heads = 2 if room and queries_per_head % 2 == 0 else 1
    codes = (cfg.bits[first], cfg.group_sizes[first], other_bits, other_group)
    return Variant(layout.head_dim, layout.page_tokens, len(kinds), *codes, has_alpha, query_heads)


def paper_variants() -> list[Variant]:
    """Every variant that the paper's configurations need, for Ouro (D = 128) and Huginn (D = 96)."""
    found: dict[Variant, None] = {}
    for head_dim in (128, 96):
        for label in PRESETS:
            for reference in ("last", "direct", "next"):
                layout = PageLayout(preset(label, reference=reference), head_dim)
                for loop in range(layout.config.loops):
                    variant = variant_for(layout, loop)
                    if isinstance(variant, Variant):
                        found[variant] = None
    return list(found)


def writer_variant_for(layout: PageLayout) -> WriterVariant | str:
    """The variant that writes pages of ``layout``, or why there is none."""
    cfg = layout.config
    precisions = list(dict.fromkeys((step.bits, step.group_size) for step in coding_steps(cfg)))
    if layout.head_dim not in WRITER_HEAD_DIMS:
        return f"head_dim must be one of {', '.join(map(str, WRITER_HEAD_DIMS))}, got {layout.head_dim}"
    if any(bits not in CODE_BITS for bits in cfg.bits):
        return f"bits must be 2 or 4, got {cfg.bits}"
    if any(group not in WRITER_GROUPS for _, group in precisions):
        return f"groups must have {', '.join(map(str, WRITER_GROUPS))} channels, got {cfg.group_sizes}"
    if len(precisions) > 2 or cfg.loops > MOST_LOOPS:
        return f"at most 2 precisions and {MOST_LOOPS} loops can be written, got {cfg.bits}"
    return WriterVariant(layout.head_dim, *precisions[0], *precisions[-1], int(cfg.rotation != "none"))


def paper_writer_variants() -> list[WriterVariant]:
    """Every variant of the writer that the paper's configurations need, for Ouro (D = 128) and Huginn (D = 96)."""
    layouts = [
        PageLayout(preset(label, reference=reference, rotation=rotation), head_dim)
        for head_dim in (128, 96)
        for label in PRESETS
        for reference in ("last", "direct", "next")
        for rotation in ("optr_h", "none")
    ]
    return [found for found in dict.fromkeys(map(writer_variant_for, layouts)) if isinstance(found, WriterVariant)]


def sources(name: str) -> list[Path]:
    """A CUDA source and the headers beside it: in the checkout, or inside an installed package."""
    here = Path(__file__).resolve().parent
    folder = next(folder for folder in (here / "cuda", here.parent / "cuda") if folder.is_dir())
    return [folder / name, *sorted(folder.glob("*.cuh"))]


@lru_cache(maxsize=1)
def compiler() -> str | None:
    """Path of nvcc: on the PATH, under $CUDA_HOME or in /usr/local/cuda; None where there is none."""
    for folder in (None, os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if found := shutil.which("nvcc", path=None if folder is None else f"{folder}/bin"):
            return found
    return None


def library_path(variant: Compiled, architecture: str) -> Path:
    """Where the library of ``variant`` for ``architecture`` ("sm_90") is kept."""
    digest = hashlib.sha256()
    for source in sources(variant.SOURCE):
        digest.update(source.read_bytes())
    digest.update(repr((variant.macros, architecture, FLAGS, variant.FLAGS)).encode())
    return kernels_dir() / f"{Path(variant.SOURCE).stem}_{architecture}_{digest.hexdigest()[:16]}.so"


def compile_variant(variant: Compiled, architecture: str, target: Path) -> str:
    """Compile ``variant`` into ``target``; returns what the assembler says about registers and shared memory.

    Raises:
        ResidualQuantError: there is no compiler, or it refuses; the message holds its output.
    """
    if compiler() is None:
        raise ResidualQuantError("there is no nvcc on the PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    flags = (*FLAGS, *variant.FLAGS, *variant.macros)
    source = sources(variant.SOURCE)[0]
    command = [compiler(), f"-arch={architecture}", *flags, "-o", str(unfinished), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ResidualQuantError(f"{' '.join(command)} failed:\n{done.stderr}")
    unfinished.replace(target)
    return done.stderr


@lru_cache(maxsize=256)
def load_variant(variant: Compiled, architecture: str) -> ctypes.CDLL | str:
    """The library of ``variant``, compiled if need be, or why there is none."""
    path = library_path(variant, architecture)
    if not path.exists():
        if compiler() is None:
            return "no nvcc to compile the CUDA kernels with"
        try:
            compile_variant(variant, architecture, path)
        except ResidualQuantError as error:
            return str(error)
    try:
        library = ctypes.CDLL(str(path))
        getattr(library, f"{Path(variant.SOURCE).stem}_arguments_bytes")
    except (OSError, AttributeError) as error:
        return f"delete the damaged {show(path)} ({error})"
    return library


def library_on(device: torch.device, variant: Compiled | str) -> ctypes.CDLL | str:
    """The library of ``variant`` for a GPU, or why there is none: that is then the variant, or the GPU is too old."""
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < OLDEST:
        return f"it needs compute capability {OLDEST / 10}, got {major}.{minor}"
    return variant if isinstance(variant, str) else load_variant(variant, f"sm_{major}{minor}")


@cache
def warn_of_triton(operation: str, reason: str) -> None:
    """Say, once per process, operation and reason, that the operation of the caller's caller runs by Triton."""
    warnings.warn(f"{operation} runs by Triton, which is slower: {reason}", stacklevel=4)


def start(library: ctypes.CDLL, operation: str, arguments: ctypes.Structure, stream: int) -> None:
    """Start the kernel ``operation`` of ``library`` on ``stream``.

    Raises:
        ResidualQuantError: the library has other arguments, or CUDA refuses; the message holds its error code.
    """
    if getattr(library, f"{operation}_arguments_bytes")() != ctypes.sizeof(arguments):
        raise ResidualQuantError(
            f"the compiled {operation} takes other arguments than this version: run `make kernels`"
        )
    if status := getattr(library, operation)(ctypes.byref(arguments), ctypes.c_void_p(stream)):
        raise ResidualQuantError(f"the CUDA kernel {operation} could not be started: CUDA error {status}")


def main(architectures: list[str]) -> None:
    """Compile the paper's variants, for the GPU here or for the architectures named, and say what each takes."""
    if not architectures:
        if not torch.cuda.is_available():
            raise ResidualQuantError("no GPU here: name the architectures, as in `make kernels ARCH=sm_90`")
        architectures = ["sm_{}{}".format(*torch.cuda.get_device_capability())]
    for name in architectures:
        number = re.fullmatch(r"sm_(\d+)[af]?", name)
        if not number or int(number[1]) < OLDEST:
            raise ResidualQuantError(
                f"CUDA kernels need sm_{OLDEST} or newer (older GPUs take Triton's, unbuilt), got {name!r}"
            )
    variants = [*paper_variants(), *paper_writer_variants()]
    jobs = [(variant, architecture) for architecture in architectures for variant in variants]

    def build(job: tuple[Compiled, str]) -> str:
        path, begun = library_path(*job), time.perf_counter()
        if path.exists():
            return "up to date"
        log = compile_variant(*job, path)
        kernel = log.index(f"{Path(job[0].SOURCE).stem}_kernel")
        usage = next(line for line in log[kernel:].splitlines() if "Used" in line)
        return f"{usage.split(':')[-1].split(',')[0].strip()}, {time.perf_counter() - begun:.0f} s"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (variant, architecture), outcome in zip(jobs, pool.map(build, jobs)):
            print(f"{architecture} {variant}: {outcome}")
    print(f"{len(jobs)} variants in {show(kernels_dir())}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ResidualQuantError as error:
        sys.exit(f"error: {error}")

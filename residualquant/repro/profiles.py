"""What a run computes, in four sizes. A profile is data: everything it decides is a field.

``smoke`` shows in minutes that everything works; ``mini`` (the default) is sized for a 2-core CPU; ``full`` runs the
same mini models on one GPU with enough problems to tell the methods apart; ``paper`` names the paper's own models and
benchmarks. Every output path contains the profile's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from residualquant.errors import ResidualQuantError
from residualquant.evals.tasks import MODEL_OF_TASK, STANDS_FOR, TASKS

if TYPE_CHECKING:
    from residualquant.config import KVQuantConfig

# The four precisions of the paper's Table 2: bits per loop, and the group size of the 2-bit loops.
PRECISIONS = (((2, 2, 2, 2), 32), ((2, 2, 2, 2), 16), ((2, 2, 2, 4), 32), ((2, 2, 2, 4), 16))
METHODS = ("direct", "optr_h", "residual_ls", "residual_ls+optr_h")
FIGURE1_STEPS = ("bf16", "direct_int2", "last_loop_residual", "ls_scaling", "rotation_optr_h", "mixed_precision")
FIGURE1_TASK = "algebra"
ROTATION = "hadamard"  # stands in for OptR-H until a calibrated rotation is there; every table says so


@dataclass(frozen=True)
class Method:
    """One row of Table 2 by the paper's names: ``bf16`` or one of ``METHODS``, at one precision."""

    name: str
    bits: tuple[int, ...] = (16, 16, 16, 16)
    group_size: int = 32
    coefficient: str = "ls"

    @property
    def config(self) -> KVQuantConfig:
        """The KV configuration; the paper's OptR-H rows get ``ROTATION``."""
        from residualquant.config import KVQuantConfig, preset

        if self.name == "bf16":
            return preset("BF16")
        return KVQuantConfig(
            bits=self.bits,
            group_size=self.group_size,
            reference="last" if self.name.startswith("residual_ls") else "direct",
            coefficient=self.coefficient,
            rotation=ROTATION if self.name.endswith("optr_h") else "none",
        )


TABLE2 = (Method("bf16"), *(Method(name, bits, g) for bits, g in PRECISIONS for name in METHODS))
_INT2, _INT24 = PRECISIONS[0], PRECISIONS[2]
FIGURE1 = dict(
    zip(
        FIGURE1_STEPS,
        (
            Method("bf16"),
            Method("direct", *_INT2),
            Method("residual_ls", *_INT2, coefficient="unit"),
            Method("residual_ls", *_INT2),
            Method("residual_ls+optr_h", *_INT2),
            Method("residual_ls+optr_h", *_INT24),
        ),
    )
)
_SMOKE = tuple(m for m in TABLE2 if m in FIGURE1.values())


@dataclass(frozen=True)
class Profile:
    """Size, place and models of one run. ``problems`` gives n per task, ``models`` the checkpoint per task."""

    name: str
    problems: Mapping[str, int]
    methods: tuple[Method, ...] = TABLE2
    device: str = "cpu"
    max_rows: int | None = None
    seed: int = 0
    models: Mapping[str, str] = field(default_factory=lambda: dict(MODEL_OF_TASK))
    stands_for: Mapping[str, str] = field(default_factory=lambda: dict(STANDS_FOR))
    cost: str = ""

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.problems)

    def methods_of(self, task: str) -> tuple[Method, ...]:
        """Table 2's methods and, on the task of Figure 1 (left), those of its steps that Table 2 lacks."""
        extra = [m for m in FIGURE1.values() if task == FIGURE1_TASK and m not in self.methods]
        return (*self.methods, *extra)

    def to_dict(self) -> dict:
        return asdict(self)

    def check(self) -> None:
        """Whether this machine can run the profile.

        Raises:
            ResidualQuantError: no GPU where the profile wants one, or models and benchmarks that are not here.
        """
        import torch

        lacks = []
        if self.device == "cuda" and not torch.cuda.is_available():
            lacks.append("a CUDA GPU (none is visible to torch)")
        lacks += [_lack_of_model(m) for m in dict.fromkeys(self.models[t] for t in self.tasks)]
        foreign = [t for t in self.tasks if t not in TASKS]
        if foreign:
            lacks.append(f"loaders for the benchmarks {', '.join(foreign)} (not in this version)")
        if lacks := [lack for lack in lacks if lack]:
            raise ResidualQuantError(
                f"profile {self.name!r} cannot run here, it lacks: {'; '.join(lacks)} "
                f"(`make tables PROFILE={self.name}` reads committed records instead)"
            )


def _lack_of_model(name: str) -> str:
    from residualquant.models.loading import HUB_REVISIONS
    from residualquant.repro.paths import models_dir, show

    if name in HUB_REVISIONS:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json", revision=HUB_REVISIONS[name])
        return "" if isinstance(cached, str) else f"the checkpoint {name} at revision {HUB_REVISIONS[name][:7]}"
    folder = models_dir() / name
    here = (folder / "config.json").is_file()
    return "" if here else f"the checkpoint {show(folder)} (`residualquant train` makes it)"


def _sizes(maths: int, code: int) -> dict[str, int]:
    return dict(zip(TASKS, (maths, maths, code, code)))


_OURO = "ByteDance/Ouro-1.4B"
PROFILES = {
    p.name: p
    for p in (
        Profile("smoke", _sizes(8, 8), methods=_SMOKE, cost="under 5 minutes on 2 CPU cores"),
        Profile("mini", _sizes(200, 100), cost="about 40 minutes on 2 CPU cores"),
        Profile("full", _sizes(800, 400), device="cuda", cost="about 5 minutes on one H200"),
        Profile(
            "paper",
            {"gsm8k": 1319, "math500": 500, "humaneval": 164, "mbpp": 378},
            device="cuda",
            models=dict.fromkeys(("gsm8k", "math500", "humaneval", "mbpp"), _OURO),
            stands_for={b: b for b in ("gsm8k", "math500", "humaneval", "mbpp")},
            cost="declared; not runnable in this version",
        ),
    )
}


def profile_of(profile: str | Profile) -> Profile:
    """The profile of that name (a Profile passes through).

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(profile, Profile):
        return profile
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}; known: {', '.join(PROFILES)}")
    return PROFILES[profile]

"""Train a small Ouro- or Huginn-shaped model on the procedural tasks, on one GPU in minutes.

Ouro's loss: the cross-entropy after every loop, weighted by the exit distribution plus a floor (so that every loop
learns), minus an entropy bonus that keeps the gate from collapsing. Huginn's: the cross-entropy after a random number
of recurrences from a random state, with a gradient through the last few only; the mean number grows during the run.
Prompts weigh little, solutions fully. Problems are made on the fly by worker processes; a problem whose prompt belongs
to the test split is never used.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residualquant.errors import ResidualQuantError
from residualquant.evals.tasks import EOS_ID, LEVELS, PAD_ID, TASKS, Problem, is_test_prompt, make_problem, problems
from residualquant.evals.texts import problem_ids
from residualquant.models import Huginn, HuginnConfig, LoopedModel, Ouro, OuroConfig, load_model, save_model

RECURRENCE_SPREAD = 0.5  # standard deviation of the logarithm of the recurrences' rate, as Huginn's
CHECK_EVERY, CHECK_PROBLEMS = 1000, 64
WORD = r" ?\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a training run. The defaults are those of the first run of the shipped minis."""

    model: str = "mini-ouro-maths"
    """Name of the model, also of its folder under --out."""
    architecture: Literal["ouro", "huginn"] = "ouro"
    tasks: tuple[str, ...] = ("words", "algebra")
    """Procedural tasks to learn, in equal parts."""
    level_weights: tuple[int, ...] = (1, 1, 2, 4, 2)
    """Share of each level, from level 1 up."""
    init: Path | None = None
    """Folder of a checkpoint to go on from, with its tokenizer; the shape settings below are then the checkpoint's."""
    new_tokenizer: bool = False
    """With init: a tokenizer of these tasks replaces the checkpoint's; tokens that both have keep their embedding."""
    out: Path = Path("data/runs/train")
    """Folder that will hold the model's folder."""
    hidden_size: int = 256
    intermediate_size: int = 704
    layers: int = 4
    """Looped layers."""
    prelude: int = 1
    """Huginn: layers before the loops."""
    coda: int = 1
    """Huginn: layers after the loops."""
    heads: int = 2
    head_dim: int = 128
    loops: int = 4
    """Loops at inference."""
    recurrences: tuple[float, float] = (6.0, 18.0)
    """Huginn: mean number of loops of a training step, at the start and at the end of the run."""
    gradient_loops: int = 8
    """Huginn: the last loops of a step, which pass a gradient on."""
    rope_theta: float = 10_000.0
    vocab_size: int = 512
    steps: int = 6500
    """Optimiser steps at most."""
    max_seconds: float = 400.0
    """Wall-clock limit; the learning-rate schedule ends at whichever limit comes first."""
    batch: int = 256
    tokens: int = 352
    """Longest problem (prompt + solution); longer ones are not used."""
    learning_rate: float = 3e-3
    warmup: int = 200
    weight_decay: float = 0.05
    prompt_weight: float = 0.02
    """Weight of a prompt's token in the loss; a solution's is 1."""
    loop_floor: float = 0.1
    entropy_bonus: float = 0.1
    workers: int = 14
    seed: int = 0
    device: str = "cuda"
    compile: bool = True

    def check(self) -> None:
        """Raises ValueError for a setting that training would fail on, or wait for, later."""
        positive = (
            "hidden_size intermediate_size layers heads head_dim loops steps batch tokens warmup max_seconds "
            "prompt_weight learning_rate rope_theta prelude coda gradient_loops"
        )
        for name in positive.split():
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.architecture not in ("ouro", "huginn"):
            raise ValueError(f"architecture must be ouro or huginn, got {self.architecture!r}")
        if self.architecture == "huginn" and self.hidden_size != self.heads * self.head_dim:
            raise ValueError(
                f"hidden_size of a huginn must be heads * head_dim, got {self.hidden_size} and "
                f"{self.heads} * {self.head_dim}"
            )
        if len(self.recurrences) != 2 or not all(1 <= r < math.inf for r in self.recurrences):
            raise ValueError(f"recurrences must be two means of at least 1, got {self.recurrences}")
        if self.workers < 0:
            raise ValueError(f"workers must be at least 0, got {self.workers}")
        if self.device.split(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")
        if not self.tasks or not set(self.tasks) <= set(TASKS):
            raise ValueError(f"tasks must be some of {', '.join(TASKS)}, got {self.tasks}")
        shares = self.level_weights
        if not 0 < len(shares) <= len(LEVELS) or min(shares) < 0 or not any(shares):
            raise ValueError(f"level_weights must be 1 to {len(LEVELS)} shares, not all 0, got {shares}")


def build_tokenizer(config: TrainConfig):
    """A byte-level BPE trained on the tasks' own training text (deterministic).

    A digit is always a token of its own; the space before a number belongs to its first digit.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    levels = range(1, len(config.level_weights) + 1)
    made = (make_problem(task, level, f"bpe{s}") for task in config.tasks for level in levels for s in range(400))
    text = (p.prompt + p.solution for p in made if not is_test_prompt(p.prompt))
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    if tokenizer.token_to_id("<pad>") != PAD_ID or tokenizer.token_to_id("<eos>") != EOS_ID:
        raise ResidualQuantError("the tokenizer did not keep the ids of <pad> and <eos>")
    return tokenizer


Encoded = tuple[list[int], list[int]]  # tokens of a prompt and of its solution


def _encode(tokenizer, problem: Problem) -> Encoded:
    prompt, solution = problem_ids(tokenizer, problem)
    return prompt, [*solution, EOS_ID]


def _padded(rows: list[Encoded], tokens: int, prompt_weight: float) -> tuple[Tensor, Tensor]:
    """ids [B, tokens + 1] int64 and the weights [B, tokens + 1] FP32 of their losses."""
    ids, weights = torch.full((len(rows), tokens + 1), PAD_ID), torch.zeros(len(rows), tokens + 1)
    for row, (prompt, solution) in enumerate(rows):
        end = len(prompt) + len(solution)
        ids[row, :end] = torch.tensor(prompt + solution)
        weights[row, : len(prompt)], weights[row, len(prompt) : end] = prompt_weight, 1.0
    return ids, weights


class ProblemStream(torch.utils.data.IterableDataset):
    """Endless batches (ids [B, T+1] int64, weights [B, T+1] FP32); one independent stream per worker."""

    def __init__(self, config: TrainConfig, tokenizer_json: str):
        self.config, self.tokenizer_json = config, tokenizer_json

    def __iter__(self):
        from tokenizers import Tokenizer

        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.config.seed}/{worker.id if worker else 0}")
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        while True:
            yield self._batch(rng, tokenizer)

    def _batch(self, rng: random.Random, tokenizer) -> tuple[Tensor, Tensor]:
        c = self.config
        levels = range(1, len(c.level_weights) + 1)
        rows: list[Encoded] = []
        tried = 0
        while len(rows) < c.batch:
            tried += 1
            if tried > 1000 and not rows:
                raise ResidualQuantError(f"no problem of these tasks and levels fits into {c.tokens} tokens")
            level = rng.choices(levels, c.level_weights)[0]
            problem = make_problem(rng.choice(c.tasks), level, rng.getrandbits(60))
            if is_test_prompt(problem.prompt):
                continue
            prompt, solution = _encode(tokenizer, problem)
            if len(prompt) + len(solution) <= c.tokens + 1:
                rows.append((prompt, solution))
        return _padded(rows, c.tokens, c.prompt_weight)


def held_out(config: TrainConfig, tokenizer) -> dict[str, tuple[Tensor, Tensor]]:
    """Batches as above of problems that training will not draw, none of the test split: "task level" → batch."""
    batches = {}
    for task in config.tasks:
        for level in (n for n, share in enumerate(config.level_weights, start=1) if share):
            rows = [_encode(tokenizer, p) for p in problems(task, CHECK_PROBLEMS, "train", level=level)]
            if rows := [row for row in rows if sum(map(len, row)) <= config.tokens + 1]:
                batches[f"{task} {level}"] = _padded(rows, config.tokens, config.prompt_weight)
    return batches


@torch.no_grad()
def solved_share(model: LoopedModel, ids: Tensor, weights: Tensor) -> float:
    """Share of a batch's solutions that greedy decoding would get right throughout, found in one pass over them."""
    right = model(ids[:, :-1]).logits.argmax(-1) == ids[:, 1:]
    return (right | (weights[:, 1:] < 1)).all(dim=1).float().mean().item()


def looped_loss(model: Ouro, ids: Tensor, weights: Tensor, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Training loss, and the last loop's weighted cross-entropy, of one batch."""
    states = model.hidden_states(ids[:, :-1])
    exits = model.exit_probabilities(states)
    targets, w = ids[:, 1:], weights[:, 1:]
    losses = []
    for h in states:
        logits = model.lm_head(h).float()
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(w))
    per_loop = torch.stack(losses)
    entropy = -(exits * torch.log(exits + 1e-9)).sum(0)
    total = ((exits + config.loop_floor) * per_loop).sum(0) - config.entropy_bonus * entropy
    return (total * w).sum() / w.sum(), (per_loop[-1] * w).sum() / w.sum()


def recurrent_loss(
    model: Huginn, ids: Tensor, weights: Tensor, loops: int, gradient_loops: int, cross_entropy: Callable
) -> tuple[Tensor, Tensor]:
    """Training loss of one batch after ``loops`` recurrences from random states, and the same without gradient."""
    seeds = torch.randint(2**62, (len(ids), 1), device=ids.device)
    h = model.hidden_states(ids[:, :-1], loops=loops, gradient_loops=gradient_loops, seeds=seeds)
    ce = cross_entropy(h, model.lm_head.weight, ids[:, 1:], weights[:, 1:])
    return ce, ce.detach()


def weighted_cross_entropy(h: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy of the tokens [B, T] weighing ``weights``, from hidden states [B, T, hidden]."""
    losses = F.cross_entropy(F.linear(h, head).float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def draw_recurrences(mean: float, generator: torch.Generator) -> int:
    """A number of recurrences, at least 1: Huginn's law, a Poisson variable of a log-normal rate."""
    rate = (mean - 1) * torch.exp(RECURRENCE_SPREAD * torch.randn((), generator=generator) - RECURRENCE_SPREAD**2 / 2)
    return 1 + int(torch.poisson(rate, generator=generator))


Objective = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def _objective(model: LoopedModel, config: TrainConfig) -> Objective:
    """(ids, weights, share of the run that is done) → training loss and last loop's cross-entropy; compiled if asked.

    Of a Huginn the parts are compiled, not the loop over them: its length changes from step to step.
    """
    if isinstance(model, Ouro):
        loss = torch.compile(looped_loss, dynamic=False) if config.compile else looped_loss
        return lambda ids, weights, done: loss(model, ids, weights, config)
    cross_entropy = weighted_cross_entropy
    if config.compile:
        cross_entropy = torch.compile(cross_entropy, dynamic=False)
        for part in ("begin", "recur", "finish"):
            setattr(model, part, torch.compile(getattr(model, part), dynamic=False))
    generator = torch.Generator().manual_seed(config.seed)
    first, last = config.recurrences

    def objective(ids: Tensor, weights: Tensor, done: float) -> tuple[Tensor, Tensor]:
        loops = draw_recurrences(first + (last - first) * done, generator)
        return recurrent_loss(model, ids, weights, loops, config.gradient_loops, cross_entropy)

    return objective


def _done(config: TrainConfig, step: int, seconds: float) -> float:
    """Share of the run that is over: of its steps or of its time, whichever is more."""
    return min(1.0, max(step / config.steps, seconds / config.max_seconds))


def _learning_rate(config: TrainConfig, step: int, done: float) -> float:
    decay = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * min(1.0, (step + 1) / config.warmup) * decay


_BEFORE = (
    " It went on from {}, whose settings and log are `train_config_before.json` and `train_log_before.jsonl`; the "
    "table below is of this second run."
)


def _model_card(config: TrainConfig, summary: dict) -> str:
    rows = "\n".join(f"| {k} | {v} |" for k, v in summary.items())
    return (
        f"# {config.model}\n\nA small {config.architecture.title()}-shaped looped language model that this project "
        f"trained on its own procedural tasks ({', '.join(config.tasks)}). It knows nothing else. Licence: Apache-2.0, "
        f"as the project.\n\n"
        f"Made by `residualquant train` with the settings of `train_config.json`; `train_log.jsonl` is its log."
        f"{_BEFORE.format(config.init.name) if config.init else ''}\n\n"
        f"| | |\n|---|---|\n{rows}\n"
    )


# {setting: field of the model's configuration}; a Huginn's head_dim follows from n_embd and n_heads
_SHAPE = {
    "ouro": {
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "head_dim": "head_dim",
        "loops": "total_ut_steps",
        "rope_theta": "rope_theta",
    },
    "huginn": {
        "hidden_size": "n_embd",
        "intermediate_size": "intermediate_size",
        "layers": "n_layers_in_recurrent_block",
        "prelude": "n_layers_in_prelude",
        "coda": "n_layers_in_coda",
        "heads": "n_heads",
        "loops": "mean_recurrence",
        "rope_theta": "rope_base",
    },
}


def _new_model(config: TrainConfig, vocabulary: int) -> LoopedModel:
    shape = {field: getattr(config, setting) for setting, field in _SHAPE[config.architecture].items()}
    if config.architecture == "huginn":
        return Huginn(HuginnConfig(**shape, vocab_size=vocabulary, block_size=4 * config.tokens))
    longest = 4 * config.tokens
    return Ouro(
        OuroConfig(
            **shape, num_key_value_heads=config.heads, vocab_size=vocabulary, max_position_embeddings=longest
        )
    )


def settings_of(config: TrainConfig, model: LoopedModel) -> dict:
    """What ``train_config.json`` says: every setting but ``out``; the shape is the model's, which ``init`` decides."""
    fields = _SHAPE[config.architecture] | {"head_dim": "head_dim", "vocab_size": "vocab_size"}
    shape = {setting: getattr(model.config, field) for setting, field in fields.items()}
    settings = asdict(config) | shape | {"init": config.init and config.init.name}
    del settings["out"]
    return settings


def _start(config: TrainConfig) -> LoopedModel:
    """The model to train: new, or the checkpoint of ``config.init`` in FP32; its tokenizer set.

    Raises:
        ValueError: the checkpoint is of another architecture than the one asked for.
    """
    if config.init is not None:
        model = load_model(str(config.init), device="cpu", dtype=torch.float32)
        if type(model).__name__.lower() != config.architecture:
            raise ValueError(f"architecture is {config.architecture}, but {config.init} holds a {type(model).__name__}")
        if config.new_tokenizer:
            _change_tokenizer(model, build_tokenizer(config))
        return model
    tokenizer = build_tokenizer(config)
    model = _new_model(config, tokenizer.get_vocab_size())
    model.tokenizer = tokenizer
    return model


@torch.no_grad()
def _change_tokenizer(model: LoopedModel, tokenizer) -> None:
    """Give ``model`` another tokenizer of as many tokens; those that the old one lacks get the embeddings it frees."""
    old, new = model.tokenizer.get_vocab(), tokenizer.get_vocab()
    if len(old) != len(new):
        raise ValueError(f"the new tokenizer must have {len(old)} tokens as the checkpoint's, got {len(new)}")
    freed = iter(sorted(old.keys() - new.keys()))
    order = [old[token] if token in old else old[next(freed)] for token in sorted(new, key=new.get)]
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)] + [model.lm_head.weight]
    for weight in {id(w): w for w in embeddings}.values():
        weight.copy_(weight[order])
    model.tokenizer = tokenizer


def train(config: TrainConfig) -> Path:
    """Train, save and describe one model; returns its folder.

    Raises:
        ValueError: a setting out of its range.
        ResidualQuantError: no GPU where one was asked for, no problem that fits, or a loss that is not finite.
    """
    config.check()
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ResidualQuantError("training was asked to run on 'cuda', but no CUDA GPU is visible here")
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(config.device)
    model = _start(config).to(device).requires_grad_(True).train()
    tokenizer = model.tokenizer
    with _whole_folder(config.out / config.model) as folder:
        if config.init is not None:
            for stem, suffix in (("train_log", ".jsonl"), ("train_config", ".json")):
                (folder / f"{stem}_before{suffix}").write_bytes((config.init / f"{stem}{suffix}").read_bytes())
        started = time.time()
        with (folder / "train_log.jsonl").open("w") as log:
            final = _optimise(model, config, tokenizer, log)
        save_model(model, folder, tokenizer)
        (folder / "train_config.json").write_text(json.dumps(settings_of(config, model), indent=2) + "\n")
        summary = {
            "parameters": sum(p.numel() for p in model.parameters()),
            **final,
            "total seconds": round(time.time() - started),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "torch": torch.__version__,
        }
        (folder / "README.md").write_text(_model_card(config, summary))
    return config.out / config.model


@contextlib.contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder to fill, which becomes ``folder`` when all went well and is removed when not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _optimise(model: LoopedModel, config: TrainConfig, tokenizer, log) -> dict:
    from tqdm.auto import tqdm

    device = torch.device(config.device)
    optimiser = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=device.type == "cuda"
    )
    loader = torch.utils.data.DataLoader(
        ProblemStream(config, tokenizer.to_str()),
        batch_size=None,
        num_workers=config.workers,
        prefetch_factor=8 if config.workers else None,
        pin_memory=device.type == "cuda",
    )
    checks = {k: (ids.to(device), w.to(device)) for k, (ids, w) in held_out(config, tokenizer).items()}
    objective = _objective(model, config)
    started, step, tokens, ce = time.time(), 0, 0, torch.tensor(float("nan"))
    with tqdm(total=config.steps, desc=config.model, mininterval=5) as bar:
        for ids, weights in loader:
            seconds = time.time() - started
            if step >= config.steps or seconds > config.max_seconds:
                break
            done = _done(config, step, seconds)
            for group in optimiser.param_groups:
                group["lr"] = _learning_rate(config, step, done)
            ids, weights = ids.to(device, non_blocking=True), weights.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss, ce = objective(ids, weights, done)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            step += 1
            tokens += ids.numel()
            if step % 250 == 0 or step == 1:
                row = {"step": step, "seconds": round(seconds, 1), "loss": loss.item(), "last_loop_ce": ce.item()}
                if not math.isfinite(row["loss"]):
                    raise ResidualQuantError(f"training diverged: the loss is {row['loss']} at step {step}")
                if step % CHECK_EVERY == 0:
                    row["solved"] = _solved(model, checks, device)
                log.write(json.dumps(row) + "\n")
                log.flush()
                bar.set_postfix(ce=f"{row['last_loop_ce']:.4f}")
            bar.update(1)
    return {
        "steps": step,
        "tokens, millions": round(tokens / 1e6, 1),
        "last-loop cross-entropy": round(ce.item(), 4),
        **{f"solved, {label}": share for label, share in _solved(model, checks, device).items()},
    }


def _solved(model: LoopedModel, checks: dict[str, tuple[Tensor, Tensor]], device: torch.device) -> dict[str, float]:
    """:func:`solved_share` of each held-out batch; uncompiled, which spares a compilation without gradients."""
    with torch.autocast(device.type, torch.bfloat16), torch.compiler.set_stance("force_eager"):
        return {label: round(solved_share(model, *batch), 3) for label, batch in checks.items()}

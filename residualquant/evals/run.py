"""Evaluate KV configurations on a task: decode what is not in the records yet, score it, append it.

All configurations of a task are decoded together (the prefill does not depend on them and is shared), and every
answer is on disk as soon as it is finished.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from residualquant.errors import ResidualQuantError
from residualquant.evals.tasks import EOS_ID, TASKS_VERSION, Problem, frozen, problems
from residualquant.repro.paths import show
from residualquant.repro.provenance import method_hash, provenance
from residualquant.repro.records import SCHEMA, Answer, Cell, Writer

if TYPE_CHECKING:
    from residualquant.config import KVQuantConfig
    from residualquant.models import Ouro

SCORE_EVERY = 256


def identity_of(
    model: Ouro, task: str, chosen: Sequence[Problem], config: KVQuantConfig, *, max_new_tokens: int, seed: int
) -> dict:
    """Everything that decides the answers of one cell; its sha256 is the cell's key."""
    from residualquant.evals.scorers import scorer_versions

    data = json.dumps([asdict(p) for p in chosen], sort_keys=True, default=str)
    return {
        "schema": SCHEMA,
        "model": model.name,
        "weights": model.weights_hash,
        "kv_shape": _plain(asdict(model.kv_shape)),
        "task": task,
        "task_version": TASKS_VERSION,
        "data": hashlib.sha256(data.encode()).hexdigest(),
        "n": len(chosen),
        "kv": _plain(config.to_dict()),
        "decoding": {"strategy": "greedy", "max_new_tokens": max_new_tokens, "eos": [EOS_ID]},
        "seed": seed,
        "scorers": scorer_versions(task),
        "method": method_hash(),
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _plain(value):
    """``value`` as JSON gives it back (tuples become lists), so that identities compare equal after reading."""
    return json.loads(json.dumps(value))


def evaluate(
    model: Ouro,
    task: str,
    configs: Sequence[KVQuantConfig],
    n: int,
    records: str | Path,
    *,
    max_new_tokens: int | None = None,
    max_rows: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> list[Cell]:
    """The cells of ``configs`` on the first ``n`` test problems of ``task``, complete and scored.

    Answers that ``records`` (a JSONL file) holds already are kept; only missing (configuration, problem) pairs are
    decoded. When all are there the file is sorted and compressed (``.gz`` is added to its name).

    Args:
        max_new_tokens: the task's own limit when None.
        max_rows: most sequences decoded at once; the engine's own default when None.

    Raises:
        ValueError: an unknown task, n or max_new_tokens below 1, no configuration, one given twice, or one that the
            model cannot have. Nothing is written then.
        ResidualQuantError: the model has no tokenizer, another process writes the same file, or the disk is full.
    """
    from residualquant.cache import loop_groups

    if n < 1 or not configs or len(set(configs)) < len(configs):
        raise ValueError(f"need n >= 1 and distinct configurations, got n={n} and {[c.label for c in configs]}")
    if model.tokenizer is None:
        raise ResidualQuantError(f"the model {model.name} has no tokenizer.json beside its weights")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if calibrated := [c.rotation for c in configs if c.rotation in ("oscar", "optr_h") and not c.is_off]:
        raise ValueError(f"rotation {calibrated[0]!r} needs calibration, which an evaluation does not do")
    for config in configs:
        loop_groups(model.kv_shape, config)
    chosen = problems(task, n, family=model.family)
    limit = frozen(task, model.family).max_new_tokens if max_new_tokens is None else max_new_tokens
    made = provenance(model.device.type)
    with Writer(Path(records)) as writer:
        for sentence in writer.records.damage:
            print(f"warning: {sentence}; it is computed again", file=sys.stderr)
        identities = [identity_of(model, task, chosen, c, max_new_tokens=limit, seed=seed) for c in configs]
        cells = [writer.start(identity, made) for identity in identities]
        done, total = sum(len(cell.answers) for cell in cells), n * len(configs)
        if progress and done < total:
            print(f"{task}: {done} of {total} answers are in {show(writer.path)}", file=sys.stderr)
        options = {"max_new_tokens": limit, "eos_ids": {EOS_ID}, "max_rows": max_rows, "progress": progress}
        _decode_missing(model, chosen, configs, cells, writer, options)
        _score(task, chosen, cells, writer)
        writer.finish(_superseded(writer, cells))
    return cells


def _decode_missing(
    model: Ouro,
    chosen: Sequence[Problem],
    configs: Sequence[KVQuantConfig],
    cells: Sequence[Cell],
    writer: Writer,
    options: dict,
) -> None:
    """Decode the (configuration, problem) pairs that have no answer; append each answer as it ends."""
    from residualquant.engine import iter_decode

    open_cells = [i for i, cell in enumerate(cells) if len(cell.answers) < len(chosen)]
    group = [(i, p) for i, p in enumerate(chosen) if any(p.problem_id not in cells[c].answers for c in open_cells)]
    if not group:
        return
    skip = {
        (column, row)
        for column, c in enumerate(open_cells)
        for row, (_, problem) in enumerate(group)
        if problem.problem_id in cells[c].answers
    }
    prompts = [model.tokenizer.encode(p.prompt).ids for _, p in group]
    decoded = iter_decode(model, prompts, [configs[c] for c in open_cells], skip=skip, **options)
    for count, done in enumerate(decoded, 1):
        (index, problem), cell = group[done.prompt_index], cells[open_cells[done.config_index]]
        text = model.tokenizer.decode(done.tokens)
        writer.add(cell, Answer(problem.problem_id, index, text, len(done.tokens), done.finished))
        if count % SCORE_EVERY == 0:
            _score(problem.task, chosen, cells, writer)


def _score(task: str, chosen: Sequence[Problem], cells: Sequence[Cell], writer: Writer) -> None:
    """Score every answer of ``cells`` that has no score yet, in one batch for the scorer."""
    from residualquant.evals.scorers import score

    by_id = {p.problem_id: p for p in chosen}
    open_answers = [(cell, a) for cell in cells for a in cell.answers.values() if a.correct is None]
    if not open_answers:
        return
    verdicts = score(task, [by_id[a.problem] for _, a in open_answers], [a.response for _, a in open_answers])
    per_cell: dict[str, dict[str, bool]] = {}
    for (cell, answer), verdict in zip(open_answers, verdicts):
        per_cell.setdefault(cell.key, {})[answer.problem] = bool(verdict)
    for cell in cells:
        if cell.key in per_cell:
            writer.score(cell, per_cell[cell.key])


def _superseded(writer: Writer, cells: Sequence[Cell]) -> list[str]:
    """Keys of older cells that differ in code, weights or scorers only, not in what was asked for."""
    same = ("model", "task", "n", "kv", "decoding", "seed", "device")
    current = {cell.key[:16] for cell in cells}
    finished = [{k: cell.identity[k] for k in same} for cell in cells]
    return [
        short
        for short, cell in writer.records.cells.items()
        if short not in current and {k: cell.identity.get(k) for k in same} in finished
    ]

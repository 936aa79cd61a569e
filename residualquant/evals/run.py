"""Evaluate KV configurations on a task: decode what is not in the records yet, score it, append it.

All configurations of a task are decoded together (the prefill does not depend on them and is shared), and every
answer is on disk as soon as it is finished.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from residualquant.config import KVQuantConfig
from residualquant.errors import ResidualQuantError, check_count, check_type
from residualquant.evals.tasks import TASKS_VERSION, Problem, frozen, problem_of, problems
from residualquant.repro.paths import show
from residualquant.repro.provenance import method_hash, provenance
from residualquant.repro.records import SCHEMA, Answer, Cell, Records, Writer, key_of, plain_name

if TYPE_CHECKING:
    from residualquant.cache import RotationMap
    from residualquant.engine import Completion
    from residualquant.models.base import LoopedModel

    Decoder = Callable[..., Iterator[Completion]]

SCORE_EVERY = 256


def identity_of(
    model: LoopedModel,
    task: str,
    chosen: Sequence[Problem],
    config: KVQuantConfig,
    rotations: RotationMap | None = None,
    *,
    max_new_tokens: int,
    seed: int,
    engine: Mapping | None = None,
) -> dict:
    """Everything that decides the answers of one cell; its sha256 is the cell's key.

    ``engine`` says what is particular to another engine than the torch one.
    """
    from residualquant.evals.scorers import scorer_versions
    from residualquant.rotation.calibration import rotations_hash

    data = json.dumps([asdict(p) for p in chosen], sort_keys=True, default=str)
    return {
        "schema": SCHEMA,
        "model": model.name,
        "weights": model.weights_hash,
        "kv_shape": _plain(asdict(model.kv_shape)),
        "edge_shape": None if model.edge_shape is None else _plain(asdict(model.edge_shape)),
        "task": task,
        "task_version": TASKS_VERSION,
        "data": hashlib.sha256(data.encode()).hexdigest(),
        "n": len(chosen),
        "kv": _plain(config.to_dict()),
        "rotations": None if rotations is None else rotations_hash(rotations),
        "decoding": {"strategy": "greedy", "max_new_tokens": max_new_tokens, "eos": sorted(model.stop_ids)},
        "seed": seed,
        "state_seed": getattr(model, "state_seed", None),
        "scorers": scorer_versions(task),
        "method": method_hash(),
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        **(engine or {}),
    }


def _plain(value):
    """``value`` as JSON gives it back (tuples become lists), so that identities compare equal after reading."""
    return json.loads(json.dumps(value))


def evaluate(
    model: LoopedModel,
    task: str,
    configs: Sequence[KVQuantConfig],
    n: int,
    records: str | Path,
    *,
    rotations: Mapping[int, RotationMap] | None = None,
    max_new_tokens: int | None = None,
    max_rows: int | None = None,
    memory_bytes: int | None = None,
    seed: int = 0,
    score: bool = True,
    progress: bool = True,
    engine: str = "torch",
) -> list[Cell]:
    """The cells of ``configs`` on the first ``n`` test problems of ``task``, complete and (with ``score``) scored.

    Answers that ``records`` (a JSONL file) holds already are kept; only missing (configuration, problem) pairs are
    decoded. When all are there the file is sorted and compressed (``.xz`` is added to its name), and from then on read.

    Args:
        model: a looped model with a tokenizer; its ``weights_hash`` tells its answers from another's.
        rotations: for each configuration (by index) whose rotation is calibrated:
            ``{(group, layer, "k" or "v"): Rotation}``.
        max_new_tokens: the task's own limit when None.
        max_rows, memory_bytes: most sequences decoded at once, most memory for caches; the engine's own when None.
        score: False leaves new answers to :func:`score_records`.
        engine: "torch", or "vllm" for the paged cache of the serving plugin; their answers are different cells.

    Raises:
        ValueError: (before anything is written) an unknown task or engine, a number below 1, no configuration, two of
            one codec, one that the model or engine cannot have, or rotations that are missing or not wanted.
        ResidualQuantError: the model has no tokenizer or stop token, another writes the same file, or the disk is full.
    """
    from residualquant.engine import check_request

    _check_model(model, n, max_new_tokens)
    rotations = rotations or {}
    _check_configs(model, configs, rotations)
    chosen = problems(task, n, family=model.family)
    limit = frozen(task, model.family).max_new_tokens if max_new_tokens is None else max_new_tokens
    prompts = {p.problem_id: model.tokenizer.encode(p.prompt).ids for p in chosen}
    check_request(model, list(prompts.values()), configs, limit, max_rows, memory_bytes)
    iter_decode, particular = _decoder(engine, model, configs, memory_bytes)
    identities = [
        identity_of(model, task, chosen, c, rotations.get(i), max_new_tokens=limit, seed=seed, engine=particular)
        for i, c in enumerate(configs)
    ]
    if cells := _finished(Path(records), identities, score):
        return cells
    options = {"max_new_tokens": limit, "eos_ids": model.stop_ids, "max_rows": max_rows, "progress": progress}
    made = provenance(model.device.type)
    with Writer(Path(records)) as writer:
        cells = [writer.start(identity, made) for identity in identities]
        _say_what_is_there(writer, cells, progress)
        decoded = _decode_missing(iter_decode, model, chosen, prompts, configs, rotations, cells, writer, options)
        _take(decoded, score, task, {p.problem_id: p for p in chosen}, cells, writer)
        writer.finish(_superseded(writer.records, cells))
    return cells


def _finished(path: Path, identities: Sequence[dict], score: bool) -> list[Cell]:
    """The cells of ``identities`` if the records are finished and nothing in them is to change, else none."""
    if plain_name(path).exists():  # a run appends to it, or was cut off
        return []
    records = Records(path)
    cells = [records.cells[short] for i in identities if (short := key_of(i)[:16]) in records.cells]
    whole = all(cell.is_complete if score else len(cell.answers) == cell.identity["n"] for cell in cells)
    if records.damage or len(cells) < len(identities) or not whole:
        return []
    return [] if _superseded(records, cells) else cells


def _decoder(
    engine: str, model: LoopedModel, configs: Sequence[KVQuantConfig], memory_bytes: int | None
) -> tuple[Decoder, dict]:
    """What decodes, and what is particular to it in a record's key: nothing for the torch engine."""
    from residualquant import engine as torch_engine

    if engine == "torch":
        return lambda *given, **options: torch_engine.iter_decode(*given, memory_bytes=memory_bytes, **options), {}
    if engine != "vllm":
        raise ValueError(f"unknown engine {engine!r}; known: torch, vllm")
    if memory_bytes is not None:
        raise ValueError(f"memory_bytes is for engine 'torch', got {memory_bytes} with 'vllm'")
    from residualquant.vllm import decode

    decode.check(model, configs)
    return decode.iter_decode, decode.identity()


def _say_what_is_there(writer: Writer, cells: Sequence[Cell], progress: bool) -> None:
    for sentence in writer.records.damage:
        print(f"warning: {sentence}; it is computed again", file=sys.stderr)
    done, total = sum(len(cell.answers) for cell in cells), sum(cell.identity["n"] for cell in cells)
    if progress and done < total:
        print(f"{cells[0].identity['task']}: {done} of {total} answers are in {show(writer.path)}", file=sys.stderr)


def _check_model(model: LoopedModel, n: int, max_new_tokens: int | None) -> None:
    """It can be asked ``n`` problems, for answers of so many tokens."""
    check_count("n", n)
    if max_new_tokens is not None:
        check_count("max_new_tokens", max_new_tokens)
    if model.tokenizer is None:
        raise ResidualQuantError(f"the model {model.name} has no tokenizer.json beside its weights")
    if not model.stop_ids:
        raise ResidualQuantError(f"the tokenizer of {model.name} has no stop token, so no answer would end")


def _check_configs(model: LoopedModel, configs: Sequence[KVQuantConfig], rotations: Mapping[int, RotationMap]) -> None:
    """Calibrated configurations, and they alone, have rotations that fit the model; no two have the same codec."""
    from residualquant.cache import LayerRotations, loop_groups
    from residualquant.layout import check_head_dim
    from residualquant.rotation.calibration import CALIBRATED, rotations_hash

    check_type("configs", configs, Sequence)
    check_type("rotations", rotations, Mapping)
    codecs = set()
    for index, config in enumerate(configs):
        check_type("a configuration", config, KVQuantConfig)
        loop_groups(model.kv_shape, config)
        wanted = config.rotation in CALIBRATED and not config.is_off
        if wanted and index not in rotations:
            raise ValueError(
                f"{config.label} with rotation={config.rotation!r} needs calibrated rotations: "
                "make them with `residualquant calibrate` and give them"
            )
        if index in rotations and not wanted:
            raise ValueError(f"rotations were given for {config.label}, whose rotation={config.rotation!r} has none")
        LayerRotations(config, model.kv_shape, model.device, rotations.get(index))
        check_head_dim(config, model.kv_shape.head_dim)
        codecs.add(None if config.is_off else (config, rotations_hash(rotations[index]) if wanted else None))
    if not configs or len(codecs) < len(configs):
        raise ValueError(f"need one or more configurations of distinct codecs, got {[c.label for c in configs]}")
    if stray := sorted(set(rotations) - set(range(len(configs)))):
        raise ValueError(f"rotations were given for configuration {stray[0]}, but there are {len(configs)}")


def _decode_missing(
    iter_decode: Decoder,
    model: LoopedModel,
    chosen: Sequence[Problem],
    prompts: Mapping[str, list[int]],
    configs: Sequence[KVQuantConfig],
    rotations: Mapping[int, RotationMap],
    cells: Sequence[Cell],
    writer: Writer,
    options: dict,
) -> Iterator[Answer]:
    """Decode the (configuration, problem) pairs that have no answer; append each answer as it ends and yield it."""
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
    decoded = iter_decode(
        model,
        [prompts[p.problem_id] for _, p in group],
        [configs[c] for c in open_cells],
        rotations={column: rotations[c] for column, c in enumerate(open_cells) if c in rotations},
        skip=skip,
        **options,
    )
    for done in decoded:
        (index, problem), cell = group[done.prompt_index], cells[open_cells[done.config_index]]
        text = model.tokenizer.decode(done.tokens)
        answer = Answer(problem.problem_id, index, text, len(done.tokens), done.finished)
        writer.add(cell, answer)
        yield answer


def _take(decoded: Iterator[Answer], score: bool, task: str, by_id: Mapping[str, Problem], cells, writer) -> None:
    """Wait for all answers, scoring them on the way if wanted."""
    for count, _ in enumerate(decoded, 1):
        if score and count % SCORE_EVERY == 0:
            _score(task, by_id, cells, writer)
    if score:
        _score(task, by_id, cells, writer)


def score_records(records: str | Path) -> int:
    """Score every answer that ``records`` holds without a score; returns how many. No model runs.

    Raises:
        ValueError: an answer to a problem that is not one of the procedural tasks'.
        ResidualQuantError: the scorers are not those that the records name, or another process writes the file.
    """
    count = 0
    with Writer(Path(records)) as writer:
        by_task: dict[str, list[Cell]] = {}
        for cell in writer.records.cells.values():
            by_task.setdefault(cell.identity["task"], []).append(cell)
        for task, cells in by_task.items():
            ids = {a.problem for cell in cells for a in cell.answers.values() if a.correct is None}
            count += _score(task, {name: problem_of(name) for name in ids}, cells, writer)
        writer.finish()
    return count


def _score(task: str, by_id: Mapping[str, Problem], cells: Sequence[Cell], writer: Writer) -> int:
    """Score every answer of ``cells`` that has no score yet, in one batch for the scorer; returns how many."""
    from residualquant.evals.scorers import score

    open_answers = [(cell, a) for cell in cells for a in cell.answers.values() if a.correct is None]
    if not open_answers:
        return 0
    verdicts = score(task, [by_id[a.problem] for _, a in open_answers], [a.response for _, a in open_answers])
    per_cell: dict[str, dict[str, bool]] = {}
    for (cell, answer), verdict in zip(open_answers, verdicts):
        per_cell.setdefault(cell.key, {})[answer.problem] = bool(verdict)
    for cell in cells:
        if cell.key in per_cell:
            writer.score(cell, per_cell[cell.key])
    return len(open_answers)


def _superseded(records: Records, cells: Sequence[Cell]) -> list[str]:
    """Keys of older cells that differ in code, weights or scorers only, not in what was asked for.

    Rotations calibrated for other weights count as such a difference.
    """
    asked = ("model", "task", "n", "kv", "decoding", "seed", "device", "engine")
    current = {cell.key[:16] for cell in cells}

    def replaces(new: dict, old: dict) -> bool:
        same = all(new.get(k) == old.get(k) for k in asked)
        return same and (new["rotations"] == old.get("rotations") or new["weights"] != old.get("weights"))

    return [
        short
        for short, old in records.cells.items()
        if short not in current and any(replaces(cell.identity, old.identity) for cell in cells)
    ]

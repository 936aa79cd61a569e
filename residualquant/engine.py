"""Batched greedy decoding with a quantised KV cache, many configurations at once (Sec. 4).

Prefill does not depend on the configuration (every prompt attends to its own BF16 K and V), so each prompt runs once
and its K and V are coded once per configuration. From there all configurations are decoded together: a batch row is
one (prompt, configuration). On two CPU cores a step's fixed cost and the weights are shared by hundreds of rows, and
what remains is the memory bandwidth of reading every row's past.

Rows live in *lanes*: a few prompts of similar length under all configurations, admitted together, each with its own
:class:`~residualquant.batch.DecodeCache`. Finished rows are dropped from their lane; an empty lane's memory goes to
the next prompts. Memory figures of the method come from the packed cache, not from these dequantised copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from residualquant.attention import attend_prompt, compute_dtype, count_unusable, make_finite, make_finite_
from residualquant.batch import Coding, DecodeCache, RotationStack, Slots, codings, raw_slots
from residualquant.cache import LayerRotations, RotationMap, loop_groups
from residualquant.config import KVQuantConfig, preset
from residualquant.models.base import LoopedModel

BLOCK_VALUES = {"cpu": 2**20, "cuda": 2**28}  # K and V of prompts that are rotated and coded at a time
MAX_ROWS = {"cpu": 544, "cuda": 16384}  # a GPU's step is bound by launches far beyond 4,096 rows
LANE_ROWS = {"cpu": 68, "cuda": 4096}
LEAST_LANES = 4  # where not all prompts fit at once: so that most rows stay busy while a lane runs empty
CPU_MEMORY = 4 * 2**30
CUDA_MEMORY_FRACTION = 0.7
PREFILL_COPIES, PREFILL_FRACTION = 6, 0.25  # of a prompt's K and V that a prefill holds; of the caches' memory for them


@dataclass(frozen=True)
class Completion:
    """One decoded sequence.

    Attributes:
        config_index, prompt_index: which of the configurations and prompts given.
        tokens: the generated ids, without the stop token.
        finished: True where a stop token ended it, False where ``max_new_tokens`` did.
    """

    config_index: int
    prompt_index: int
    tokens: list[int]
    finished: bool


def iter_decode(
    model: LoopedModel,
    prompts: Sequence[Sequence[int]],
    configs: Sequence[KVQuantConfig],
    max_new_tokens: int,
    eos_ids: set[int],
    max_rows: int | None = None,
    rotations: Mapping[int, RotationMap] | None = None,
    progress: bool = True,
    memory_bytes: int | None = None,
    skip: Collection[tuple[int, int]] = (),
) -> Iterator[Completion]:
    """Greedy completions of every prompt under every configuration, yielded as they finish.

    The longest prompts go first. The same call gives the same completions in the same order. K and V that are NaN,
    infinite or beyond +-65504 are replaced, and counted in a RuntimeWarning per configuration at the end.

    Args:
        model: a looped model.
        prompts: token ids.
        configs: KV configurations; ``KVQuantConfig(bits=(16,) * L)`` is the plain BF16 cache.
        max_new_tokens: most tokens to generate per sequence.
        eos_ids: tokens that end a sequence.
        max_rows: most sequences decoded at once; 544 on a CPU and 16384 on a GPU when None.
        rotations: for each configuration (by index) whose rotation is calibrated:
            ``{(group, layer, "k" or "v"): Rotation}``.
        progress: show a progress bar.
        memory_bytes: most memory for the caches; 4 GiB on a CPU and 70 % of what is free on a GPU when None.
        skip: (config_index, prompt_index) pairs that are not wanted, such as those an earlier run has decoded.

    Raises:
        ValueError: no prompt or an empty or too long one, no configuration or one whose loops do not fit the model,
            numbers below 1, or a calibrated rotation that is missing.
    """
    prompts = [list(prompt) for prompt in prompts]
    check_request(model, prompts, configs, max_new_tokens, max_rows, memory_bytes)
    decoder = _Decoder(model, prompts, list(configs), max_new_tokens, set(eos_ids), rotations or {})
    return decoder.run(*decoder.plan(max_rows, memory_bytes), progress, set(skip))


def generate(
    model: LoopedModel,
    prompts: str | Sequence[str],
    config: KVQuantConfig | str = "INT2/4 g=32",
    max_new_tokens: int = 256,
    progress: bool = False,
    rotations: RotationMap | None = None,
) -> list[str]:
    """Greedy continuations of one or more texts, decoded with a quantised KV cache.

    Args:
        model: a looped model with a tokenizer.
        prompts: one text or several.
        config: a configuration or the paper's label of one.
        max_new_tokens: most tokens to generate per text.
        progress: show a progress bar.
        rotations: ``{(group, layer, "k" or "v"): Rotation}`` where the configuration's rotation is calibrated.

    Returns:
        The generated texts, without their prompts and without stop tokens.

    Raises:
        ValueError: a model without tokenizer, an unknown label, or what :func:`iter_decode` refuses.
    """
    if model.tokenizer is None:
        raise ValueError(f"generate() needs a model with a tokenizer, got {model.name!r} without one")
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if isinstance(config, str):
        config = preset(config, loops=model.kv_shape.loops)
    ids = [model.tokenizer.encode(text).ids for text in texts]
    answers = [""] * len(texts)
    given = {} if rotations is None else {0: rotations}
    for done in iter_decode(model, ids, [config], max_new_tokens, model.stop_ids, rotations=given, progress=progress):
        answers[done.prompt_index] = model.tokenizer.decode(done.tokens)
    return answers


def check_request(model, prompts, configs, max_new_tokens, max_rows=None, memory_bytes=None) -> None:
    """Refuse what :func:`iter_decode` cannot do, before anything runs.

    Raises:
        ValueError: as there; the message names the value.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("max_rows", max_rows), ("memory_bytes", memory_bytes)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not prompts or not configs:
        raise ValueError(f"at least one prompt and one configuration are needed, got {len(prompts)} and {len(configs)}")
    limit = getattr(model.config, "max_position_embeddings", None)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty: got 0 tokens, at least 1 is needed")
        if limit is not None and len(prompt) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {index} is too long: got {len(prompt)} tokens, which with {max_new_tokens} new ones "
                f"exceed the model's {limit} positions"
            )
        if not 0 <= min(prompt) <= max(prompt) < model.config.vocab_size:
            bad = min(prompt) if min(prompt) < 0 else max(prompt)
            raise ValueError(f"prompt {index} holds token {bad}; ids must be below {model.config.vocab_size}")
    for cfg in configs:
        loop_groups(model.kv_shape, cfg)


@dataclass
class _Lane:
    """Prompts admitted together, one row per (configuration, prompt).

    Attributes:
        cache, storage: what the rows read, and where it lives.
        tokens: [rows], the newest ones.
        sequences: [rows, 2], configuration and prompt of each row.
        unusable: [rows], how many values of the prompts had to be replaced.
        outputs: [rows, most], the first ``count`` columns of which are known.
        alive: [rows], whether a row is still decoded.
    """

    cache: DecodeCache
    storage: Tensor
    tokens: Tensor
    sequences: np.ndarray
    unusable: Tensor
    outputs: np.ndarray
    alive: np.ndarray
    count: int = 0

    def collect(self, newest: np.ndarray, eos_ids: np.ndarray) -> list[Completion]:
        """Take one new token per row; returns the sequences that end with it."""
        stopped = np.isin(newest, eos_ids)
        self.outputs[:, self.count] = newest
        self.count += 1
        ended = self.alive & (stopped | (self.count == self.outputs.shape[1]))
        self.alive &= ~ended
        done = []
        for row in np.flatnonzero(ended):
            tokens = self.outputs[row, : self.count - stopped[row]].tolist()
            done.append(Completion(*self.sequences[row].tolist(), tokens, bool(stopped[row])))
        return done

    def shrink(self) -> bool:
        """Drop finished rows once an eighth of them is; True where rows moved or went."""
        rows = np.flatnonzero(self.alive)
        if len(self.alive) - len(rows) < max(1, len(self.alive) // 8):
            return False
        order = self.cache.keep(rows.tolist())
        self.tokens = self.tokens[torch.tensor(order, dtype=torch.long, device=self.tokens.device)]
        self.sequences, self.outputs, self.alive = self.sequences[order], self.outputs[order], self.alive[order]
        return True


@dataclass
class _Layout:
    """Which rows of the whole batch belong to which lane and codec, and to the configurations of which rotations.

    ``rotated`` pairs a stack with the rows [C, n] of its configurations, padded by the row after the last one; ``raw``
    are rows and slots that no rotation may touch.
    """

    slices: list[slice]
    codings: list[Coding]
    rotated: list[tuple[RotationStack, Tensor]]
    raw: list[tuple[Tensor, Tensor]]


class _Decoder:
    """One call of :func:`iter_decode`."""

    def __init__(self, model, prompts, configs, max_new_tokens, eos_ids, rotations):
        self.model, self.prompts, self.configs = model, prompts, configs
        self.limit, self.eos_ids = max_new_tokens, np.array(sorted(eos_ids), dtype=np.int64)
        self.slots, self.device = Slots(model.kv_shape, model.edge_layers), model.device
        self.dtype = compute_dtype(model.dtype)
        self.rotations = self._stack(rotations)
        self.spaces = self._share_spaces()
        every = zip(configs, [slice(None)] * len(configs), self.rotations)
        self.alone = [codings(self.slots, [one], self.device) for one in every]
        self.sanitised = [0] * len(configs)
        self._buffers: dict[str, Tensor] = {}

    def _stack(self, given: Mapping[int, RotationMap]) -> list[tuple[RotationStack, int] | None]:
        """The stack that holds each configuration's rotations, and its place there; None without rotation."""
        alike: dict[int | str, dict[int, LayerRotations]] = {}
        for index, cfg in enumerate(self.configs):
            own = LayerRotations(cfg, self.slots.shape, self.device, given.get(index))
            if not own.is_shared:
                alike.setdefault(cfg.loops, {})[index] = own
            elif own.shared is not None:
                alike.setdefault(cfg.rotation, {})[index] = own
        places: list[tuple[RotationStack, int] | None] = [None] * len(self.configs)
        for members in alike.values():
            stack = RotationStack(list(members.values()), self.slots.shape)
            for place, index in enumerate(members):
                places[index] = (stack, place)
        return places

    def _share_spaces(self) -> list[tuple[tuple[RotationStack, int] | None, list[int]]]:
        """Rotations, each with the configurations whose states are in its space."""
        spaces: dict = {}
        for column, rotation in enumerate(self.rotations):
            key = rotation and (id(rotation[0]), None if rotation[0].is_shared else rotation[1])
            spaces.setdefault(key, (rotation, []))[1].append(column)
        return list(spaces.values())

    def plan(self, max_rows: int | None, memory_bytes: int | None) -> tuple[int, int]:
        """How many lanes, and how many prompts in each: at least one prompt under all configurations."""
        kind = self.device.type
        rows = max_rows or MAX_ROWS.get(kind, MAX_ROWS["cuda"])
        if memory_bytes is None:
            cuda = kind == "cuda"
            memory_bytes = int(CUDA_MEMORY_FRACTION * torch.cuda.mem_get_info(self.device)[0]) if cuda else CPU_MEMORY
        width = len(self.configs)
        prompt_bytes = 4 * self.slots.values(width, self._capacity(self.prompts))
        prefill_bytes = PREFILL_COPIES * 4 * self.slots.values(1, max(map(len, self.prompts)))
        lane_rows = min(rows, LANE_ROWS.get(kind, LANE_ROWS["cuda"]))
        at_once = min(rows // width, memory_bytes // prompt_bytes)
        share = at_once if at_once >= len(self.prompts) else at_once // LEAST_LANES
        most = int(PREFILL_FRACTION * memory_bytes) // prefill_bytes
        per_lane = max(1, min(len(self.prompts), lane_rows // width, share, most))
        lanes = max(1, min(rows // (per_lane * width), memory_bytes // (per_lane * prompt_bytes)))
        return min(lanes, -(-len(self.prompts) // per_lane)), per_lane

    def run(self, lane_count: int, per_lane: int, progress: bool, skip: set[tuple[int, int]]) -> Iterator[Completion]:
        """Admit, step and collect until every sequence has been yielded."""
        from tqdm.auto import tqdm

        order = sorted(range(len(self.prompts)), key=lambda i: (-len(self.prompts[i]), i))
        waiting = [order[start : start + per_lane] for start in range(0, len(order), per_lane)][::-1]
        lanes: list[_Lane] = []
        free: list[Tensor | None] = [None] * lane_count
        layout = None
        total = len(self.prompts) * len(self.configs) - len(skip)
        with tqdm(total=total, unit="seq", desc="decode", disable=not progress) as bar:
            while waiting or lanes:
                while waiting and free:
                    lane = self._admit(waiting.pop(), free.pop())
                    lane.alive[:] = [tuple(sequence) not in skip for sequence in lane.sequences.tolist()]
                    lanes.append(lane)
                    layout = None
                    self._count(lane, lane.unusable.cpu().numpy())
                    for done in lane.collect(lane.tokens.cpu().numpy(), self.eos_ids):
                        bar.update()
                        yield done
                changed = [lane.shrink() for lane in lanes]
                if any(changed):
                    free += [lane.storage for lane in lanes if not lane.cache.rows]
                    lanes = [lane for lane in lanes if lane.cache.rows]
                    layout = None
                    if waiting and free:
                        continue
                if not lanes:
                    continue
                layout = layout or self._layout(lanes)
                newest, unusable = self._step(lanes, layout)
                for lane, rows in zip(lanes, layout.slices):
                    self._count(lane, unusable[rows])
                    for done in lane.collect(newest[rows], self.eos_ids):
                        bar.update()
                        yield done

        self._warn()

    def _count(self, lane: _Lane, unusable: np.ndarray) -> None:
        """Add what was replaced in the rows that are still decoded to their configurations' numbers."""
        for row in np.flatnonzero(lane.alive & (unusable > 0)):
            self.sanitised[lane.sequences[row, 0]] += int(unusable[row])

    def _warn(self) -> None:
        for cfg, count in zip(self.configs, self.sanitised):
            if count:
                about = f"{cfg.label}, {cfg.reference}, rotation {cfg.rotation}"
                warnings.warn(
                    f"{count} values of K and V under {about} were NaN, infinite or beyond +-65504 and were replaced",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def _capacity(self, prompts: Sequence[Sequence[int]]) -> int:
        return max(map(len, prompts)) + self.limit

    def _buffer(self, name: str, *size: int) -> Tensor:
        """Scratch of ``size`` that is kept from step to step (fresh pages cost more than the work on them)."""
        numel = torch.Size(size).numel()
        if name not in self._buffers or self._buffers[name].numel() < numel:
            self._buffers[name] = torch.zeros(numel, dtype=self.dtype, device=self.device)
        return self._buffers[name][:numel].view(size)

    @torch.no_grad()
    def _admit(self, indices: list[int], storage: Tensor | None) -> _Lane:
        """Prefill prompts ``indices`` once and code their K and V under every configuration."""
        prompts = [self.prompts[index] for index in indices]
        width, capacity = len(self.configs), self._capacity(prompts)
        if storage is None:
            size = self.slots.values(len(prompts) * width, capacity)
            storage = torch.zeros(size, dtype=self.dtype, device=self.device)
        lengths = [len(prompt) for prompt in prompts for _ in range(width)]
        cache = DecodeCache(self.slots, self.configs * len(prompts), lengths, capacity, storage)
        kv, first, unusable = self._prefill(prompts)
        self._code_prompts(cache, kv, prompts)
        sequences = np.array([(column, index) for index in indices for column in range(width)])
        tokens, unusable = (x.repeat_interleave(width) for x in (first, unusable))
        outputs = np.zeros((len(sequences), self.limit), dtype=np.int64)
        return _Lane(cache, storage, tokens, sequences, unusable, outputs, np.ones(len(sequences), dtype=bool))

    def _code_prompts(self, cache: DecodeCache, kv: Tensor, prompts: list[list[int]]) -> None:
        """Fill the rows of ``cache`` with ``kv`` [B, T, slots, 2, H, D] as every configuration codes it, in blocks."""
        (count, longest), width = kv.shape[:2], len(self.configs)
        padding = [longest - len(prompt) for prompt in prompts]
        size = max(1, BLOCK_VALUES.get(self.device.type, BLOCK_VALUES["cuda"]) // kv[:, 0].numel())
        for start in range(0, longest, size):
            block = kv[:, start : start + size].contiguous()
            for rotation, columns in self.spaces:
                rotated = block.flatten(0, 1).clone()
                looped = rotated[None, :, : self.slots.looped]
                if rotation is not None:
                    stack, place = rotation
                    looped.copy_(stack.rotate(looped, place))
                for column in columns:
                    rebuilt = rotated.clone()
                    for coding in self.alone[column]:
                        coding.apply(rebuilt)
                    if rotation is not None:
                        looped = rebuilt[None, :, : self.slots.looped]
                        looped.copy_(stack.unrotate(looped, place))
                        raw = raw_slots(self.slots, self.configs[column])
                        rebuilt[:, raw] = block.flatten(0, 1)[:, raw]
                    rebuilt = rebuilt.view(block.shape)
                    for prompt in range(count):
                        own, at = slice(max(0, padding[prompt] - start), None), max(0, start - padding[prompt])
                        cache.fill(prompt * width + column, at, block[prompt, own], rebuilt[prompt, own])

    def _prefill(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """K and V of left-padded prompts, the next tokens, and how many values of each prompt had to be replaced.

        Returns:
            [B, T, slots, 2, H, D] of BF16 precision and finite; [B]; [B].
        """
        s, longest = self.slots.shape, max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.device)
        padding = torch.tensor([longest - len(p) for p in prompts], device=self.device)[:, None]
        columns = torch.arange(longest, device=self.device)
        valid = columns >= padding if min(map(len, prompts)) < longest else None
        kv = self._buffer("prompts", len(prompts), longest, self.slots.count, 2, s.kv_heads, s.head_dim)

        def attend(loop: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            step = torch.stack((k, v), 2).to(torch.bfloat16)
            kv[:, :, self.slots.of(loop, layer)] = step
            return attend_prompt(q, *make_finite(step).unbind(2), valid)

        logits = self.model(ids, (columns - padding).clamp(min=0), attend, last_only=True).logits
        unusable = (count_unusable(kv, 2) * (columns >= padding)).sum(1)
        return make_finite_(kv), logits[:, -1].argmax(-1), unusable

    def _layout(self, lanes: list[_Lane]) -> _Layout:
        stops = np.cumsum([lane.cache.rows for lane in lanes])
        slices = [slice(stop - lane.cache.rows, stop) for stop, lane in zip(stops.tolist(), lanes)]
        columns = np.concatenate([lane.sequences[:, 0] for lane in lanes])
        order = np.argsort(columns, kind="stable")
        present, starts = np.unique(columns[order], return_index=True)
        coded, stacks, raw = [], {}, []
        for column, rows in zip(present.tolist(), np.split(order, starts[1:])):
            cfg, rotation, rows = self.configs[column], self.rotations[column], torch.from_numpy(rows)
            coded.append((cfg, rows.to(self.device), rotation))
            if rotation is not None:
                stacks.setdefault(id(rotation[0]), (rotation[0], {}))[1][rotation[1]] = rows
                if slots := raw_slots(self.slots, cfg):
                    raw.append((rows[:, None].to(self.device), torch.tensor(slots, device=self.device)))
        spare = slices[-1].stop
        rotated = [(stack, stack.index(rows, spare).to(self.device)) for stack, rows in stacks.values()]
        return _Layout(slices, codings(self.slots, coded, self.device), rotated, raw)

    @torch.no_grad()
    def _step(self, lanes: list[_Lane], layout: _Layout) -> tuple[np.ndarray, np.ndarray]:
        """Decode one token of every row; the token before it is packed once its last loop is done.

        Returns:
            The new token of every row, and how many values of K and V of the one before had to be replaced.
        """
        s, rows = self.slots.shape, layout.slices[-1].stop
        stage = self._buffer("stage", rows + 1, self.slots.count, 2, s.kv_heads, s.head_dim)
        for lane in lanes:
            lane.cache.begin_step()

        def attend(loop: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            slot = self.slots.of(loop, layer)
            stage[:rows, slot] = torch.cat((k, v), 1).to(torch.bfloat16)
            kv = make_finite(stage[:rows, slot])
            query = q[:, 0].to(self.dtype).unflatten(1, (s.kv_heads, -1))
            out = [lane.cache.attend(slot, query[own], kv[own]) for lane, own in zip(lanes, layout.slices)]
            return torch.cat(out).flatten(1, 2)[:, None].to(q.dtype)

        ids = torch.cat([lane.tokens for lane in lanes])[:, None]
        positions = torch.cat([lane.cache.lengths for lane in lanes])[:, None]
        logits = self.model(ids, positions, attend, last_only=True).logits
        newest = logits[:, -1].argmax(-1)
        unusable = count_unusable(stage[:rows], 1)
        coded = self._code(make_finite_(stage), layout)
        for lane, own in zip(lanes, layout.slices):
            lane.cache.commit(stage[own], coded[own])
            lane.tokens = newest[own]
        newest, unusable = torch.stack((newest, unusable)).cpu().numpy()
        return newest, unusable

    def _code(self, raw: Tensor, layout: _Layout) -> Tensor:
        """The states [rows + 1, slots, 2, H, D] as the packed caches decode them."""
        coded = self._buffer("coded", *raw.shape).copy_(raw)
        looped = coded[:, : self.slots.looped]
        for stack, index in layout.rotated:
            looped[index] = stack.rotate(looped[index]).to(self.dtype)
        for coding in layout.codings:
            coding.apply(coded)
        for stack, index in layout.rotated:
            looped[index] = stack.unrotate(looped[index]).to(self.dtype)
        for index in layout.raw:
            coded[index] = raw[index]
        return coded

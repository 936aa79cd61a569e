"""Batched greedy decoding with a quantised KV cache, many configurations at once (Sec. 4).

Prefill does not depend on the configuration (every prompt attends to its own BF16 K and V), so each prompt runs once
and its K and V are coded once per configuration. From there all configurations are decoded together: a batch row is
one (prompt, configuration). On two CPU cores a step's fixed cost and the weights are shared by hundreds of rows, and
what remains is the memory bandwidth of reading every row's past.

Rows live in *lanes*: a few prompts of similar length under all configurations, admitted together, each with its own
:class:`~residualquant.cache.DecodeCache`. Finished rows are dropped from their lane; an empty lane's memory goes to
the next prompts. Memory figures of the method come from the packed cache, not from these dequantised copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from residualquant.attention import attend_prompt, compute_dtype, make_finite, rotate, rotate_back, to_bf16
from residualquant.cache import DecodeCache, LayerRotations, RotationMap, loop_groups, reconstruct_all
from residualquant.config import RAW_BITS, KVQuantConfig, preset
from residualquant.models.base import LoopedModel

MAX_ROWS = {"cpu": 544, "cuda": 4096}
LANE_ROWS = {"cpu": 68, "cuda": 1024}
CPU_MEMORY = 4 * 2**30
CUDA_MEMORY_FRACTION = 0.7


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

    The longest prompts go first. The same call gives the same completions in the same order.

    Args:
        model: a looped model.
        prompts: token ids.
        configs: KV configurations; ``KVQuantConfig(bits=(16,) * L)`` is the plain BF16 cache.
        max_new_tokens: most tokens to generate per sequence.
        eos_ids: tokens that end a sequence.
        max_rows: most sequences decoded at once; 544 on a CPU and 4096 on a GPU when None.
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
    """Prompts admitted together, one row per (prompt, configuration); ``tokens`` [rows] are the newest ones."""

    cache: DecodeCache
    storage: Tensor
    tokens: Tensor
    sequences: list[tuple[int, int]]
    outputs: list[list[int]] = field(default_factory=list)
    alive: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in self.sequences]
        self.alive = [True] * len(self.sequences)

    def collect(self, newest: list[int], eos_ids: set[int], limit: int) -> list[Completion]:
        """Take one new token per row; returns the sequences that end with it."""
        done = []
        for row, token in enumerate(newest):
            if not self.alive[row]:
                continue
            stopped = token in eos_ids
            if not stopped:
                self.outputs[row].append(token)
            if stopped or len(self.outputs[row]) == limit:
                self.alive[row] = False
                done.append(Completion(*self.sequences[row], self.outputs[row], stopped))
        return done

    def shrink(self) -> bool:
        """Drop finished rows once an eighth of them is; True where rows moved or went."""
        rows = [row for row, alive in enumerate(self.alive) if alive]
        if len(self.alive) - len(rows) < max(1, len(self.alive) // 8):
            return False
        order = self.cache.keep(rows)
        self.tokens = self.tokens[torch.tensor(order, dtype=torch.long, device=self.tokens.device)]
        self.sequences = [self.sequences[row] for row in order]
        self.outputs = [self.outputs[row] for row in order]
        self.alive = [True] * len(rows)
        return True


@dataclass
class _Layout:
    """Which rows of the whole batch belong to which lane, configuration and rotation."""

    slices: list[slice]
    by_config: list[tuple[int, Tensor]]
    by_rotation: list[tuple[LayerRotations, Tensor]]


class _Decoder:
    """One call of :func:`iter_decode`."""

    def __init__(self, model, prompts, configs, max_new_tokens, eos_ids, rotations):
        self.model, self.prompts, self.configs = model, prompts, configs
        self.limit, self.eos_ids = max_new_tokens, eos_ids
        self.shape, self.device, self.dtype = model.kv_shape, model.device, compute_dtype(model.dtype)
        self.rotations = [
            LayerRotations(cfg, self.shape, self.device, rotations.get(index)) for index, cfg in enumerate(configs)
        ]
        self._buffers: dict[str, Tensor] = {}

    def plan(self, max_rows: int | None, memory_bytes: int | None) -> tuple[int, int]:
        """How many lanes, and how many prompts in each: at least one prompt under all configurations."""
        kind = self.device.type
        rows = max_rows or MAX_ROWS.get(kind, MAX_ROWS["cuda"])
        if memory_bytes is None:
            cuda = kind == "cuda"
            memory_bytes = int(CUDA_MEMORY_FRACTION * torch.cuda.mem_get_info(self.device)[0]) if cuda else CPU_MEMORY
        width = len(self.configs)
        prompt_bytes = 4 * DecodeCache.numel(self.shape, width, self._capacity(self.prompts))
        lane_rows = min(rows, LANE_ROWS.get(kind, LANE_ROWS["cuda"]))
        per_lane = max(1, min(len(self.prompts), lane_rows // width, memory_bytes // prompt_bytes))
        lanes = max(1, min(rows // (per_lane * width), memory_bytes // (per_lane * prompt_bytes)))
        return min(lanes, -(-len(self.prompts) // per_lane)), per_lane

    def run(
        self, lane_count: int, per_lane: int, progress: bool, skip: set[tuple[int, int]]
    ) -> Iterator[Completion]:
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
                    lane.alive = [sequence not in skip for sequence in lane.sequences]
                    lanes.append(lane)
                    layout = None
                    for done in lane.collect(lane.tokens.tolist(), self.eos_ids, self.limit):
                        bar.update()
                        yield done
                changed = [lane.shrink() for lane in lanes]
                if any(changed):
                    free += [lane.storage for lane in lanes if not lane.sequences]
                    lanes = [lane for lane in lanes if lane.sequences]
                    layout = None
                    if waiting and free:
                        continue
                if not lanes:
                    continue
                layout = layout or self._layout(lanes)
                newest = self._step(lanes, layout).tolist()
                for lane, rows in zip(lanes, layout.slices):
                    for done in lane.collect(newest[rows], self.eos_ids, self.limit):
                        bar.update()
                        yield done

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
            numel = DecodeCache.numel(self.shape, len(prompts) * width, capacity)
            storage = torch.zeros(numel, dtype=self.dtype, device=self.device)
        cache = DecodeCache(self.shape, self.configs * len(prompts), capacity, storage)
        kv, first = self._prefill(prompts)
        rotated: dict[int, Tensor] = {}
        for column, (cfg, rotations) in enumerate(zip(self.configs, self.rotations)):
            rebuilt = self._rebuild_prompts(kv, cfg, rotations, rotated)
            raw = rotations.rotate_all(to_bf16(kv)) if cfg.sink_tokens or cfg.recent_tokens else rebuilt
            for place, prompt in enumerate(prompts):
                own = slice(kv.shape[4] - len(prompt), None)
                row = place * width + column
                cache.fill(row, raw[:, :, :, place, own], rebuilt[:, :, :, place, own])
        sequences = [(column, index) for index in indices for column in range(width)]
        return _Lane(cache, storage, first.repeat_interleave(width), sequences)

    def _rebuild_prompts(
        self, kv: Tensor, cfg: KVQuantConfig, rotations: LayerRotations, rotated: dict[int, Tensor]
    ) -> Tensor:
        """:func:`reconstruct_all`; ``rotated`` keeps ``kv`` in a rotation's space for the next configuration of it."""
        if rotations.shared is None or RAW_BITS in cfg.bits:
            return reconstruct_all(kv, cfg, rotations)
        key = id(rotations.shared)
        if key not in rotated:
            rotated[key] = rotations.rotate_all(make_finite(kv))
        plain = replace(cfg, rotation="none")
        return reconstruct_all(rotated[key], plain, LayerRotations(plain, self.shape, self.device))

    def _prefill(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """K and V [loops, layers, 2, B, T, H, D] of left-padded prompts, of BF16 precision, and the next tokens [B]."""
        s, longest = self.shape, max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.device)
        padding = torch.tensor([longest - len(p) for p in prompts], device=self.device)[:, None]
        columns = torch.arange(longest, device=self.device)
        valid = columns >= padding if min(map(len, prompts)) < longest else None
        kv = self._buffer("prefill", s.loops, s.layers, 2, len(prompts), longest, s.kv_heads, s.head_dim)

        def attend(loop: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv[loop, layer, 0].copy_(k.to(torch.bfloat16))
            kv[loop, layer, 1].copy_(v.to(torch.bfloat16))
            return attend_prompt(q, to_bf16(k), to_bf16(v), valid)

        logits = self.model(ids, (columns - padding).clamp(min=0), attend, last_only=True).logits
        return kv, logits[:, -1].argmax(-1)

    def _layout(self, lanes: list[_Lane]) -> _Layout:
        slices, start = [], 0
        rows_of: dict[int, list[int]] = {}
        for lane in lanes:
            slices.append(slice(start, start + lane.cache.rows))
            for row, (config_index, _) in enumerate(lane.sequences):
                rows_of.setdefault(config_index, []).append(start + row)
            start += lane.cache.rows
        by_config = [(c, torch.tensor(rows, device=self.device)) for c, rows in sorted(rows_of.items())]
        shared: dict[int, list[Tensor]] = {}
        by_rotation = []
        for c, rows in by_config:
            rotations = self.rotations[c]
            if not rotations.is_shared:
                by_rotation.append((rotations, rows))
            elif rotations.shared is not None:
                shared.setdefault(id(rotations.shared), []).append(rows)
        for key, rows in shared.items():
            owner = next(r for r in self.rotations if r.is_shared and id(r.shared) == key)
            by_rotation.append((owner, torch.cat(rows)))
        return _Layout(slices, by_config, by_rotation)

    @torch.no_grad()
    def _step(self, lanes: list[_Lane], layout: _Layout) -> Tensor:
        """Decode one token of every row [rows]; the token before it is packed once its last loop is done."""
        s, rows = self.shape, layout.slices[-1].stop
        stage = self._buffer("stage", s.loops, s.layers, 2, rows, s.kv_heads, s.head_dim)
        for lane in lanes:
            lane.cache.begin_step()

        def attend(loop: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attend(lanes, layout, stage, loop, layer, q[:, 0], k[:, 0], v[:, 0])[:, None]

        ids = torch.cat([lane.tokens for lane in lanes])[:, None]
        positions = torch.cat([lane.cache.lengths for lane in lanes])[:, None]
        logits = self.model(ids, positions, attend, last_only=True).logits
        newest = logits[:, -1].argmax(-1)
        rebuilt = self._buffer("rebuilt", *stage.shape)
        for config_index, own in layout.by_config:
            cfg, rotations = self.configs[config_index], self.rotations[config_index]
            new = reconstruct_all(stage.index_select(3, own), cfg, rotations)
            rebuilt.index_copy_(3, own, new.to(self.dtype))
        for lane, own in zip(lanes, layout.slices):
            lane.cache.commit(rebuilt[:, :, :, own])
            lane.tokens = newest[own]
        return newest

    def _attend(self, lanes, layout, stage, loop, layer, q, k, v) -> Tensor:
        """One (loop, layer) of a step for all rows: q [rows, Hq, D], k and v [rows, H, D] -> [rows, Hq, D]."""
        query, keys, values = q.to(self.dtype), to_bf16(k).to(self.dtype), to_bf16(v).to(self.dtype)
        stage[loop, layer, 0].copy_(k.to(torch.bfloat16))
        stage[loop, layer, 1].copy_(v.to(torch.bfloat16))
        for rotations, own in layout.by_rotation:
            for x, kind in ((query, "k"), (keys, "k"), (values, "v")):
                x.index_copy_(0, own, rotate(x.index_select(0, own), rotations.of_loop(loop, layer, kind)))
        out = torch.cat(
            [lane.cache.attend(loop, layer, query[r], keys[r], values[r]) for lane, r in zip(lanes, layout.slices)]
        )
        for rotations, own in layout.by_rotation:
            out.index_copy_(0, own, rotate_back(out.index_select(0, own), rotations.of_loop(loop, layer, "v")))
        return out.to(q.dtype)

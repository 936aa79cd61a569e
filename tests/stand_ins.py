"""Models and a decoder that cost nothing: answers are a fixed function of (problem, configuration) or of the ids."""

from __future__ import annotations

import hashlib
import os
import time
from types import SimpleNamespace

import torch

from residualquant.attention import to_bf16
from residualquant.config import KVQuantConfig, preset
from residualquant.evals.tasks import FROZEN, TASKS, problems
from residualquant.models.base import EDGE, KVShape, LoopedModel, LoopedOutput
from residualquant.rotation import Rotation
from residualquant.rotation.hadamard import hadamard_matrix

# what every way of holding and decoding a past is tested with: precisions, references, groups, rotations
CODECS = (
    preset("BF16"),
    preset("INT2 g=32"),
    preset("INT2/4 g=16", rotation="hadamard"),
    preset("INT2/4 g=32", reference="previous"),
    preset("INT4 g=32", reference="direct", rotation="hadamard"),
    KVQuantConfig(bits=(3, 0, 8, 16), group_size=16, rotation="hadamard"),
    KVQuantConfig(bits=(2, 4)),
)


class TextTokenizer:
    """Ids are bytes + 2; 1 ends a text."""

    def token_to_id(self, token):
        return {"<eos>": 1}.get(token)

    def encode(self, text):
        return SimpleNamespace(ids=[b + 2 for b in text.encode()])

    def decode(self, ids):
        return bytes(i - 2 for i in ids).decode()


def stand_in_model(name="mini-ouro-maths"):
    """What ``evaluate`` needs of a model."""
    family = "huginn" if "huginn" in name else "ouro"
    return SimpleNamespace(
        name=name,
        family=family,
        weights_hash="0" * 64,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kv_shape=KVShape(4, 2, 2, 128) if family == "ouro" else KVShape(32, 2, 2, 96),
        edge_shape=None if family == "ouro" else KVShape(1, 2, 2, 96),
        config=SimpleNamespace(vocab_size=258),
        stop_ids={1},
        tokenizer=TextTokenizer(),
    )


SCRIPTED_SHAPE = KVShape(loops=4, layers=2, kv_heads=2, head_dim=64)


class ScriptedModel(LoopedModel):
    """A looped model whose K and V are known beforehand: a function of token, position, loop and layer alone.

    Token t is followed by (5 t + position) mod 64 whatever attention returns, so rows of all configurations decode the
    same tokens. ``edge_layers`` layers run once, half of them before the loops.
    """

    def __init__(self, shape=SCRIPTED_SHAPE, edge_layers=2, query_heads=4):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=64, max_position_embeddings=64)
        self.shape, self.edge_layers, self.query_heads = shape, edge_layers, query_heads
        self.lm_head = torch.nn.Linear(1, 64, bias=False)
        generator = torch.Generator().manual_seed(0)
        size = (shape.loops * shape.layers + edge_layers, 2, shape.kv_heads, shape.head_dim)
        tables = [torch.randn(64, *size, generator=generator) for _ in range(2)]
        tables.append(torch.randn(64, 1, *size[1:], generator=generator))  # loops resemble each other
        self.tables = torch.nn.ParameterList(torch.nn.Parameter(t, requires_grad=False) for t in tables)

    @property
    def kv_shape(self):
        return self.shape

    def states(self, ids, positions):
        """K and V [..., slots, 2, H, D] of tokens [...], FP32; loop by loop, then the layers that run once."""
        by_token, by_position, shared = self.tables
        return 0.3 * by_token[ids] + 0.3 * by_position[positions] + shared[(ids + positions) % 64]

    def bf16_states(self, ids):
        """:meth:`states` of a sequence as the cache gets them: [slots, 2, T, H, D]."""
        positions = torch.arange(len(ids), device=self.device)
        return to_bf16(self.states(torch.tensor(ids, device=self.device), positions)).movedim(0, 2)

    def following(self, ids, count):
        """The ``count`` tokens after a prompt."""
        found = list(ids)
        for _ in range(count):
            found.append((5 * found[-1] + len(found) - 1) % 64)
        return found[len(ids) :]

    def forward(self, ids, positions=None, attend=None, loops=None, last_only=False):
        kv, s, before = self.states(ids, positions), self.shape, self.edge_layers // 2
        order = [(EDGE, n) for n in range(before)]
        order += [(loop, n) for loop in range(s.loops) for n in range(s.layers)]
        order += [(EDGE, n) for n in range(before, self.edge_layers)]
        for loop, layer in order:
            slot = s.loops * s.layers + layer if loop == EDGE else loop * s.layers + layer
            k, v = kv[:, :, slot].unbind(2)
            q = k.nan_to_num().clamp(-4, 4).repeat_interleave(self.query_heads // s.kv_heads, 2)
            out = attend(loop, layer, q, k, v)
            if out.shape != q.shape or not out.isfinite().all():
                raise ValueError(f"attend gave {list(out.shape)} for {list(q.shape)}, or values that are not finite")
        logits = torch.nn.functional.one_hot((5 * ids[:, -1:] + positions[:, -1:]) % 64, 64)
        return LoopedOutput(logits.float())


def decoder_for(task, n, log=None, delay=0.0):
    """An ``iter_decode`` whose rightness falls with the bits; each pair decoded is appended to the file ``log``."""
    gold = {p.prompt: p for family in FROZEN for p in problems(task, n, family=family)}
    tokenizer = TextTokenizer()

    def iter_decode(model, prompts, configs, skip=(), **options):
        for prompt_index, ids in enumerate(prompts):
            problem = gold[tokenizer.decode(ids)]
            for config_index, config in enumerate(configs):
                if (config_index, prompt_index) in skip:
                    continue
                time.sleep(delay)
                if log:
                    with open(log, "a") as file:
                        file.write(f"{problem.problem_id} {config!r}\n")
                digest = hashlib.sha256(f"{problem.problem_id} {config!r}".encode()).digest()[0] / 256
                good = digest < 1 - 1 / config.effective_bits(128)
                text = problem.solution if good else "-1"
                yield SimpleNamespace(
                    config_index=config_index,
                    prompt_index=prompt_index,
                    tokens=tokenizer.encode(text).ids,
                    finished=True,
                )

    return iter_decode


def calibrated_many(model, configs, task, sizes, folder, progress=True, memory_bytes=None):
    """Hadamard matrices in the place of calibrated ones."""
    shape = model.kv_shape
    rotation = Rotation(hadamard_matrix(shape.head_dim).expand(shape.kv_heads, -1, -1))
    return [
        {(g, n, kind): rotation for g in range(shape.loops // c.loops) for n in range(shape.layers) for kind in "kv"}
        for c in configs
    ]


def install(monkeypatch, tasks=TASKS, n=8):
    """Replace model loader, calibration and engine for ``tasks``; all answers then come from ``decoder_for``."""
    import residualquant.engine
    import residualquant.models
    import residualquant.rotation.calibration as calibration

    decoders = {task: decoder_for(task, n) for task in tasks}
    known = {p.prompt: task for task in tasks for family in FROZEN for p in problems(task, n, family=family)}

    def iter_decode(model, prompts, configs, **options):
        task = known[TextTokenizer().decode(prompts[0])]
        return decoders[task](model, prompts, configs, **options)

    monkeypatch.setattr(residualquant.engine, "iter_decode", iter_decode)
    monkeypatch.setattr(calibration, "calibrated_many", calibrated_many, raising=False)
    monkeypatch.setattr(calibration, "CalibrationSizes", dict, raising=False)
    monkeypatch.setattr(residualquant.models, "load_model", lambda name, device=None: stand_in_model(name))


def main():
    """Evaluate in a process of its own: ``stand_ins.py RECORDS TASK N LOG DELAY`` (the kill test)."""
    import sys

    import residualquant.engine
    from residualquant.evals import run

    records, task, n, log, delay = sys.argv[1:]
    run.SCORE_EVERY = 5
    run.method_hash = lambda: "one"  # whoever edits the sources meanwhile
    residualquant.engine.iter_decode = decoder_for(task, int(n), log, float(delay))
    configs = [preset("BF16"), preset("INT2 g=32"), preset("INT2/4 g=32")]
    run.evaluate(stand_in_model(), task, configs, int(n), records)
    print(os.getpid(), "done")


if __name__ == "__main__":
    main()

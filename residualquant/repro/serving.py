"""A server of vLLM with the packed cache, talked to and measured from outside: what the notebook on serving shows.

The server is a process of its own and may have an environment of its own, since vLLM asks for another torch than the
rest of this package: this interpreter where vLLM is installed, else the environment of ``make setup-vllm``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from residualquant.errors import ResidualQuantError
from residualquant.repro.paths import runs_dir, show, workspace

if TYPE_CHECKING:
    import openai
    import pandas as pd

    from residualquant.repro.markup import Shown
    from residualquant.repro.plots import Picture

START_SECONDS = 600
CPU_OPTIONS = ("--enforce-eager",)  # and these: compiling for a CPU takes minutes, and a gigabyte holds enough
CPU_ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
HOW_TO = (
    "vLLM is not installed here, so no server is started: `make setup-vllm` installs it beside this environment "
    "(CPU; a GPU machine: pip install '/path/to/this/clone[vllm]'), then run this notebook again."
)


def server_python() -> str | None:
    """The interpreter that can serve: this one, or that of ``make setup-vllm``; None without vLLM."""
    from residualquant.vllm.serve import check_installed

    with contextlib.suppress(ResidualQuantError):
        check_installed()
        return sys.executable
    own = workspace() / os.environ.get("VLLM_ENV", ".venv-vllm") / "bin" / "python"
    return str(own) if own.is_file() else None


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: where it listens.
        log: file of what it says.
        process: its process.
    """

    url: str
    log: Path
    process: subprocess.Popen

    def client(self) -> openai.OpenAI:
        """A client that asks once."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of every sample of a metric, as ``/metrics`` shows it.

        Raises:
            ResidualQuantError: there is none.
        """
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=60).read().decode()
        found = re.findall(rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        if not found:
            raise ResidualQuantError(f"the server has no metric {name}")
        return [(dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)) for labels, value in found]

    def metric(self, name: str) -> float:
        """The sum of :meth:`samples`."""
        return sum(value for _, value in self.samples(name))


@contextlib.contextmanager
def running_server(
    arguments: Sequence[str], log: Path, python: str = sys.executable, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """``residualquant serve`` with these arguments, ended afterwards.

    Args:
        arguments: of the command; what follows ``--`` is vLLM's, and the port is added.
        log: file for what the server says.
        python: the interpreter of an environment with vLLM.
        environment: variables besides this process's.

    Raises:
        ResidualQuantError: it ended, or did not listen within ten minutes; the end of its log is quoted.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    separator = () if "--" in arguments else ("--",)
    command = [python, "-m", "residualquant.cli", "serve", *arguments, *separator, "--port", str(port)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, start_new_session=True, env=os.environ | dict(environment or {})
        )
    server = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        _wait_until_it_listens(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_it_listens(server: Server) -> None:
    limit = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{server.url}/health", timeout=5)
            return
        ended = server.process.poll() is not None
        if ended or time.monotonic() > limit:
            what = "the server ended" if ended else f"the server does not listen after {START_SECONDS} s"
            said = server.log.read_text(errors="replace")[-2000:]
            raise ResidualQuantError(f"{what}; {show(server.log)} ends: {said}")
        time.sleep(0.5)


@dataclass
class Serving:
    """What :func:`serve_and_measure` found: one row per configuration, nothing without vLLM."""

    model: str
    rows: list[dict] = field(default_factory=list)
    answers: list[dict] = field(default_factory=list)


def serve_and_measure(
    model: str, precision: str, rotation: str, requests: int, clients: int, new_tokens: int, task: str = "words"
) -> Serving:
    """Serve ``model`` from a BF16 and from a packed cache, one after the other; ask both the same and time it.

    Without vLLM one sentence is printed that says how to install it, and nothing is measured.

    Args:
        model: a shipped model's name, a folder or a hub id.
        precision: the paper's label of the packed cache.
        rotation: "hadamard" or "none".
        requests: how many problems of ``task`` are asked, ``clients`` at a time.
        new_tokens: tokens of every answer.
        task: whose test problems.

    Raises:
        ValueError: a number below 1 or an unknown task.
        ResidualQuantError: a server did not start.
    """
    import torch

    from residualquant.evals.tasks import problems

    for name, value in (("requests", requests), ("clients", clients), ("new_tokens", new_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    found, python = Serving(model), server_python()
    if python is None:
        print(HOW_TO)
        return found
    asked, *others = [problem.prompt for problem in problems(task, requests + 1)]
    on_cpu = not torch.cuda.is_available()
    for label, choice in (("BF16", "none"), (precision, rotation)):
        arguments = [model, "--config", label, "--rotation", choice, "--", *(CPU_OPTIONS if on_cpu else ())]
        log = runs_dir("serving") / f"{label.replace('/', '-').replace(' ', '_')}.log"
        with running_server(arguments, log, python, CPU_ENVIRONMENT if on_cpu else None) as server:
            print(f"{label}: the server listens; its log is {show(log)}")
            found.answers.append({"KV cache": label, "question": asked, "answer": _answer(server, model, asked)})
            found.rows.append({"KV cache": label, **_measure(server, model, others, clients, new_tokens)})
            if label == precision:
                size = {labels["format"]: value for labels, value in server.samples("residualquant:kv_bytes_per_token")}
    for row, name in zip(found.rows, ("bf16", "packed")):
        row["KV bytes per token"] = size[name]
    return found


def _answer(server: Server, model: str, prompt: str) -> str:
    """The whole answer, which the model ends by itself."""
    answer = server.client().completions.create(model=model, prompt=prompt, temperature=0, max_tokens=256)
    return answer.choices[0].text


def _measure(server: Server, model: str, prompts: Sequence[str], clients: int, new_tokens: int) -> dict:
    """Capacity and speed of one server."""
    client = server.client()

    def ask(prompt: str) -> int:
        answer = client.completions.create(
            model=model, prompt=prompt, temperature=0, max_tokens=new_tokens, extra_body={"ignore_eos": True}
        )
        return answer.usage.completion_tokens

    begun = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        tokens = sum(pool.map(ask, prompts))
    seconds = time.monotonic() - begun
    ((cache, _),) = server.samples("vllm:cache_config_info")
    return {
        "tokens that fit": int(cache["num_gpu_blocks"]) * int(cache["block_size"]),
        "generated tokens": tokens,
        "seconds": round(seconds, 1),
        "tokens per second": round(tokens / seconds, 1),
    }


def serving_table(found: Serving) -> Shown | None:
    """Capacity and speed as a table for the notebook; None where nothing was measured."""
    return _shown(found.rows)


def answers_table(found: Serving) -> Shown | None:
    """The same question to both servers and their answers; None where nothing was asked."""
    return _shown(found.answers)


def _shown(rows: list[dict]) -> Shown | None:
    import pandas as pd

    from residualquant.repro.markup import show as show_table

    return show_table(pd.DataFrame(rows)) if rows else None


def compare_engines(records: Sequence[Path]) -> pd.DataFrame:
    """vLLM against the torch engine: one row per cell that both have in ``records`` (JSONL files of `eval`).

    Returns:
        model, task, config, reference, rotation, n, what each solved, what only one of them did, p of McNemar's exact
        test, and who made it: device, dtype, gpu, vllm, commit.
    """
    import pandas as pd

    from residualquant.config import KVQuantConfig
    from residualquant.repro.records import Records
    from residualquant.repro.stats import Pair, mcnemar_exact

    engines: dict[str, dict] = {"torch": {}, "vllm": {}}
    for cell in (cell for path in records for cell in Records(path).cells.values()):
        particular = {"engine", "engine_version", "plugin"}
        shared = json.dumps([item for item in sorted(cell.identity.items()) if item[0] not in particular])
        engines[cell.identity.get("engine", "torch")][shared] = cell
    rows = []
    for shared in sorted(engines["torch"].keys() & engines["vllm"].keys()):
        torch, vllm = (engines[name][shared] for name in ("torch", "vllm"))
        pair, identity = Pair.of(torch.correct, vllm.correct), vllm.identity
        config = KVQuantConfig.from_dict(identity["kv"])
        rows.append(
            {
                **{name: identity[name] for name in ("model", "task")},
                "config": config.label, "reference": config.reference, "rotation": config.rotation, "n": pair.n,
                "torch_correct": sum(torch.correct.values()), "vllm_correct": sum(vllm.correct.values()),
                "only_torch": pair.only_first, "only_vllm": pair.only_second, "p": round(mcnemar_exact(pair), 4),
                "device": identity["device"], "dtype": identity["dtype"], "gpu": vllm.provenance.get("gpu"),
                "vllm": identity["engine_version"], "commit": vllm.provenance["commit"],
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def draw_serving(found: Serving) -> Picture | None:
    """Tokens that fit and tokens per second, a bar per cache; None where nothing was measured."""
    from residualquant.repro.plots import INK, TEXT, Picture, house_style, new_figure

    if not found.rows:
        return None
    names = [row["KV cache"] for row in found.rows]
    with house_style():
        figure = new_figure(TEXT, 1.5)
        for axis, column in zip(figure.subplots(1, 2, sharey=True), ("tokens that fit", "tokens per second")):
            values = [row[column] for row in found.rows]
            bars = axis.barh(names, values, height=0.6, color=INK)
            axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=2, fontsize=6.5)
            axis.margins(x=0.2)
            axis.set_xticks([])
            axis.set_title(column)
        axis.invert_yaxis()  # of both panels
    return Picture(figure, f"Capacity and speed of serving {found.model} from a BF16 and from a packed cache")

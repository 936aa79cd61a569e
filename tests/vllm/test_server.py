"""`residualquant serve`: the OpenAI server over a compressed cache, every process of vLLM its own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch

from residualquant.config import preset
from residualquant.engine import iter_decode
from residualquant.evals.tasks import problems
from residualquant.models import load_model

MODEL = "mini-ouro-maths"
MAX_MODEL_LEN = 512
PROMPT = problems("algebra", 1)[0].prompt
START_SECONDS = 540


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(URL, log file) of a running server."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    command = [
        sys.executable, "-m", "residualquant.cli", "serve", MODEL, "--", "--port", str(port),
        "--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4",
    ]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, start_new_session=True,
            env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )  # fmt: skip
    url, limit = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                ended, late = process.poll() is not None, time.monotonic() > limit
                if ended or late:
                    pytest.fail(f"no server after {START_SECONDS} s or it ended:\n{log.read_text()[-4000:]}")
                time.sleep(1)
        yield url, log
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def post(url, **body):
    data = json.dumps({"model": MODEL, "temperature": 0, **body}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=120)


@pytest.fixture(scope="module")
def expected():
    """What the package's own decoder answers."""
    model = load_model(MODEL, device="cpu", dtype=torch.float32)
    ids = model.tokenizer.encode(PROMPT).ids
    (done,) = iter_decode(model, [ids], [preset("INT2/4 g=32", rotation="hadamard")], 16, set(), progress=False)
    return model.tokenizer.decode(done.tokens)


def test_completion(server, expected):
    answer = json.load(post(server[0], prompt=PROMPT, max_tokens=16, ignore_eos=True))
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["completion_tokens"] == 16


def test_streaming(server, expected):
    events = []
    for line in post(server[0], prompt=PROMPT, max_tokens=16, ignore_eos=True, stream=True):
        if line.startswith(b"data: ") and b"[DONE]" not in line:
            events.append(json.loads(line[6:])["choices"][0]["text"])
    assert len(events) > 3
    assert "".join(events) == expected


def test_a_prompt_that_is_too_long_is_the_users_error(server):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server[0], prompt=[5] * (MAX_MODEL_LEN + 1), max_tokens=1)
    assert caught.value.code == 400
    assert str(MAX_MODEL_LEN) in json.load(caught.value)["error"]["message"]
    json.load(post(server[0], prompt=PROMPT, max_tokens=1))  # and the server goes on


def test_the_log_says_what_a_token_costs(server):
    text = server[1].read_text()
    assert "vllm serve" in text  # the command it stands for
    (seconds,) = re.findall(r"residualquant: packed attention checked in ([0-9.]+) s", text)
    assert float(seconds) < 2
    assert "residualquant: KV of one token takes 3,168 bytes, in BF16 16,384 (5.17x)" in text
    assert "tokens fit (BF16: " in text
    assert "residualquant: staging takes 33,554,432 bytes for steps of up to 2,048 tokens" in text

"""`residualquant serve`: the OpenAI server over a compressed cache, every process of vLLM its own."""

import concurrent.futures
import json
import re
import tempfile
import time
from pathlib import Path

import openai
import pytest
import torch

from residualquant.config import preset
from residualquant.engine import iter_decode
from residualquant.evals.tasks import problems
from residualquant.models import load_model
from residualquant.repro.serving import running_server
from residualquant.vllm.serve import METRICS_FOLDER

MODEL = "mini-ouro-maths"
MAX_MODEL_LEN = 512
PROMPT = problems("words", 1)[0].prompt
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # the minis know no roles
SAME_TOKENS = 16  # beyond, a difference of rounding may have changed a code, and with it a token
LENGTH = 40
CLIENTS = 100


class Talk:
    """To a running server: ``complete`` asks, with defaults, and ``metric`` is the server's."""

    def __init__(self, server):
        self.server, self.metric, self.client = server, server.metric, server.client()

    def complete(self, **options):
        return self.client.completions.create(**{"model": MODEL, "prompt": PROMPT, "temperature": 0} | options)

    def wait_until_idle(self):
        """Until no request is running or waiting."""
        limit = time.monotonic() + 60
        while self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting"):
            assert time.monotonic() < limit, "requests are still there after 60 s"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "template.jinja").write_text(TEMPLATE)
    options = ["--enforce-eager"]
    if torch.cuda.is_available():
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        options = ["--compilation-config", json.dumps(graphs), "--gpu-memory-utilization", "0.05"]
        options += ["--kv-cache-memory-bytes", str(2**30)]
    arguments = [
        MODEL, "--", "--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32", *options,
        "--max-num-seqs", "16", "--chat-template", str(folder / "template.jinja"),
    ]  # fmt: skip
    with running_server(arguments, folder / "log", environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}) as server:
        yield Talk(server)
    left = list(Path(tempfile.gettempdir()).glob(f"{METRICS_FOLDER}{server.process.pid}-*"))
    assert not left, "the server left its folder of metrics behind"


@pytest.fixture(scope="module")
def first(server):
    """The answer to a prompt of which nothing is cached."""
    return server.complete(max_tokens=300)


@pytest.fixture(scope="module")
def expected(server, first):
    """How it begins where the cache holds the prompt's first blocks: packed, so it need not be as in ``first``."""
    return server.complete(max_tokens=LENGTH).choices[0].text


def test_a_completion_begins_as_the_torch_engines_and_ends_by_itself(first):
    model = load_model(MODEL, device="cpu", dtype=torch.float32)
    ids = model.tokenizer.encode(PROMPT).ids
    config = preset("INT2/4 g=32", rotation="hadamard")
    (done,) = iter_decode(model, [ids], [config], SAME_TOKENS, model.stop_ids, progress=False)
    assert first.choices[0].text.startswith(model.tokenizer.decode(done.tokens))
    assert first.choices[0].finish_reason == "stop" and first.usage.completion_tokens < 300


def test_streaming_gives_the_same_in_pieces(server, expected):
    pieces = [chunk.choices[0].text for chunk in server.complete(max_tokens=LENGTH, stream=True)]
    assert len(pieces) > 3 and "".join(pieces) == expected


def test_a_chat_by_a_template(server, expected):
    asked = dict(model=MODEL, messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=LENGTH)
    answer = server.client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == expected
    pieces = [chunk.choices[0].delta.content for chunk in server.client.chat.completions.create(**asked, stream=True)]
    assert len(pieces) > 3 and "".join(filter(None, pieces)) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_it_and_is_left_out(server, expected, stream):
    stop = expected[len(expected) // 2 :][:5]
    answer = server.complete(max_tokens=LENGTH, stop=[stop], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == expected[: expected.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_a_length_limit_is_said(server, expected):
    answer = server.complete(max_tokens=5)
    assert answer.choices[0].finish_reason == "length" and expected.startswith(answer.choices[0].text)
    assert answer.usage.completion_tokens == 5


def test_a_prompt_that_is_too_long_is_the_users_error(server):
    for options in ({"prompt": [5] * (MAX_MODEL_LEN + 1)}, {"prompt": [5] * 500, "max_tokens": 100}):
        with pytest.raises(openai.BadRequestError) as caught:
            server.complete(**{"max_tokens": 1} | options)
        assert caught.value.status_code == 400 and str(MAX_MODEL_LEN) in caught.value.message
    server.complete(max_tokens=1)  # and the server goes on


def test_a_client_that_goes_away_frees_what_it_held(server):
    before = server.metric("vllm:generation_tokens_total")
    stream = server.complete(max_tokens=300, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    server.wait_until_idle()
    assert server.metric("vllm:generation_tokens_total") - before < 250
    server.complete(max_tokens=1)
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_hundred_clients_at_once_get_what_each_gets_alone(server):
    prompts = [f"{n} + {n % 7} = " for n in range(CLIENTS)]

    def ask(prompt):
        return server.complete(prompt=prompt, max_tokens=6, extra_body={"ignore_eos": True}).choices[0].text

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
        together = list(clients.map(ask, prompts))
    alike = [ask(prompt) == answer for prompt, answer in zip(prompts[::10], together[::10])]
    # on a GPU sums depend on how many requests are beside, which at times changes a code, and with it a token
    assert sum(alike) > len(alike) / 2 if torch.cuda.is_available() else all(alike)
    assert len(set(together)) > 10
    server.wait_until_idle()
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_the_servers_metrics_show_the_packed_cache(server):
    server.complete(max_tokens=1)
    before = server.metric("residualquant:packed_tokens_total")
    server.complete(prompt=[7] * 21, max_tokens=5, extra_body={"ignore_eos": True})
    assert server.metric("residualquant:packed_tokens_total") - before == 21 + 4
    saved = server.metric("residualquant:kv_bytes_saved_total")
    assert saved == server.metric("residualquant:packed_tokens_total") * (16_384 - 3_168)
    assert server.metric("residualquant:sanitised_values_total") == 0
    assert server.metric("residualquant:kv_bytes_per_token") == 16_384 + 3_168


def test_the_log_says_what_a_token_costs(server):
    text = server.server.log.read_text()
    assert "vllm serve" in text  # the command it stands for
    (seconds,) = re.findall(r"residualquant: packed attention checked in ([0-9.]+) s", text)
    assert float(seconds) < (60 if torch.cuda.is_available() else 2)  # a GPU's kernels are compiled
    assert "residualquant: KV of one token takes 3,168 bytes, in BF16 16,384 (5.17x)" in text
    assert "tokens fit (BF16: " in text
    assert "residualquant: staging takes 33,554,432 bytes for steps of up to 2,048 tokens" in text

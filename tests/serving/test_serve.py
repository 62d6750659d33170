"""`effcompile serve` in a process of its own, and clients over real sockets: answers, streams, errors,
clients that go away.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from generation_models import bare, captured, ids
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

CONTEXT, QUEUE = 64, 8
MODEL = {"num_hidden_layers": 1}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return captured("llama", **MODEL)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A planned generation of two rows, with a tokenizer of 64 words in it."""
    made = tmp_path_factory.mktemp("serve") / "tiny"
    bare(captured("llama", **MODEL), context=CONTEXT, batch=2)[1].save(made)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    command = [sys.executable, "-m", "effcompile", "serve", str(folder), "--port", "0", "--queue", str(QUEUE)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    found = re.match(r"http://127\.0\.0\.1:(\d+)/v1/completions: tiny, 2 requests at once, 8 more wait", said)
    assert found, said
    yield int(found[1])
    process.send_signal(signal.SIGINT)
    assert process.wait(30) in (0, 130, -signal.SIGINT)


def send(port: int, body: Any, path: str = "/v1/completions", method: str = "POST") -> tuple[int, Any]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    link.request(method, path, body if isinstance(body, (bytes, str)) else json.dumps(body))
    answer = link.getresponse()
    text = answer.read().decode()
    link.close()
    return answer.status, json.loads(text) if text.startswith("{") else text


def prompt(seed: int, length: int = 5) -> list[int]:
    found: list[int] = ids(length, seed=seed).tolist()
    return found


def greedy(model: nn.Module, text: list[int], most: int) -> str:
    made = model.generate(torch.tensor([text]), max_new_tokens=most, do_sample=False)
    return " ".join(f"w{token}" for token in made[0, len(text) :].tolist())


def test_a_completion(port: int, model: nn.Module) -> None:
    status, found = send(port, {"model": "tiny", "prompt": "w5 w9 w11", "max_tokens": 6, "temperature": 0})
    assert status == 200 and found["object"] == "text_completion"
    (choice,) = found["choices"]
    assert choice["text"].strip() == greedy(model, [5, 9, 11], 6) and choice["finish_reason"] == "length"
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert send(port, None, "/v1/models", "GET")[1]["data"][0]["id"] == "tiny"


def test_no_request_has_anothers_tokens(port: int, model: nn.Module) -> None:
    """Sixty clients at once, two places: each has its own text or is told to come again, and then comes."""

    def client(seed: int) -> tuple[int, str]:
        body = {"prompt": prompt(seed, 1 + seed % 19), "max_tokens": 1 + seed % 13, "temperature": 0}
        while True:
            status, found = send(port, body)
            if status == 200:
                return seed, found["choices"][0]["text"]
            assert status == 429 and found["error"]["type"] == "overloaded_error"
            time.sleep(0.05)

    with ThreadPoolExecutor(60) as clients:
        for seed, text in clients.map(client, range(60)):
            assert text.strip() == greedy(model, prompt(seed, 1 + seed % 19), 1 + seed % 13)


def test_a_stream_is_the_same_text(port: int, model: nn.Module) -> None:
    status, text = send(
        port, {"prompt": [prompt(1), prompt(2)], "max_tokens": 9, "temperature": 0, "stream": True}
    )
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert status == 200 and events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    for at in (0, 1):
        own = [choice for choice in choices if choice["index"] == at]
        assert "".join(choice["text"] for choice in own).strip() == greedy(model, prompt(at + 1), 9)
        assert [choice["finish_reason"] for choice in own[-2:]] == [None, "length"]


def test_tokens_are_counted_once_whatever_the_choices(port: int) -> None:
    """Of two prompts of five tokens, three choices each; in a stream where that is asked for."""
    body = {"prompt": [prompt(1), prompt(2)], "max_tokens": 2, "n": 3}
    wanted = {"prompt_tokens": 10, "completion_tokens": 12, "total_tokens": 22}
    assert send(port, body)[1]["usage"] == wanted
    _, text = send(port, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *pieces, counts, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert done == "[DONE]" and not any("usage" in json.loads(piece) for piece in pieces)
    assert json.loads(counts)["usage"] == wanted and json.loads(counts)["choices"] == []


def test_a_stop_text_ends_it(port: int, model: nn.Module) -> None:
    words = greedy(model, prompt(4), 12).split()
    _, found = send(
        port, {"prompt": prompt(4), "max_tokens": 12, "temperature": 0, "stop": f"{words[3]} {words[4]}"}
    )
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "stop" and choice["text"].split() == words[:3]


def test_clients_that_go_away_free_their_places(port: int) -> None:
    """More of them than there is room for: were their requests to go on, the last one would be told to come
    again.
    """
    body = json.dumps({"prompt": [5], "max_tokens": 60, "temperature": 0, "n": 2, "stream": True})
    for _ in range(3 * QUEUE):
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        link.request("POST", "/v1/completions", body)
        answer = link.getresponse()
        assert answer.status == 200
        answer.read(1)
        link.close()
        answer.close()
    until = time.monotonic() + 30
    while send(port, {"prompt": [5], "max_tokens": 1, "n": 9})[0] != 200:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": "w1", "model": "other"}, 404, "'tiny' is served"),
        ({"prompt": "w1 " * 60, "max_tokens": 9}, 400, "Ask for 4 or fewer"),
        ({"prompt": ""}, 400, "no tokens"),
        ({"prompt": [999]}, 400, "0 to 63"),
        ({"prompt": "w1", "top_k": 1}, 400, "No field that is served is named 'top_k'"),
        ("no json", 400, "no completion request"),
        (b"x" * (2 << 20), 400, "longer than"),
        ({"prompt": "w1", "n": 16, "max_tokens": 2}, 429, "Try again later"),
    ],
)
def test_errors_are_the_protocols(port: int, body: Any, status: int, said: str) -> None:
    found, answer = send(port, body)
    assert found == status and said in answer["error"]["message"]


_SLOW = """
import sys, time
from effcompile.cli import app
from effcompile.serving.desk import Desk
turn = Desk._turn
Desk._turn = lambda self: (time.sleep(0.2), turn(self))
app(sys.argv[1:])
"""


def test_told_to_stop_it_ends_what_is_under_way_in_words(folder: Path) -> None:
    """An answer, a stream, one that waits and half of a body: uvicorn's own end was a traceback here and
    "Internal Server Error" there.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, "serve", str(folder), "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    port = int(process.stdout.readline().partition(":")[2].partition("127.0.0.1:")[2].partition("/")[0])
    half = socket.create_connection(("127.0.0.1", port))
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    body = {"prompt": [5], "max_tokens": 60}
    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(send, port, {**body, "stream": stream}) for stream in (False, True, False)]
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        answers = [each.result() for each in asked]
    assert process.returncode == 130 and "Traceback" not in said, said
    for status, answer in answers:
        assert (status == 503 and "stopping" in answer["error"]["message"]) or (
            status == 200 and "The server is stopping" in answer
        )
    assert b" 503 " in half.recv(400)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/chat/completions", 404), ("GET", "/v1/completions", 405), ("GET", "/" + "x" * 5000, 404)],
)
def test_other_routes_are_told_which_there_are(port: int, method: str, path: str, status: int) -> None:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    link.request(method, path, "{}")
    answer = link.getresponse()
    said = json.loads(answer.read())["error"]["message"]
    assert answer.status == status and len(said) < 600
    assert f"{method} /" in said and "POST /v1/completions" in said
    link.close()


def test_what_cannot_be_served_is_told(folder: Path, tmp_path: Path, port: int) -> None:
    from typer.testing import CliRunner

    from effcompile.cli import app

    for words, said in (
        ([str(folder), "--tokenizer", str(tmp_path)], "holds no tokenizer"),
        ([str(folder), "--port", str(port)], f"Nothing can listen at 127.0.0.1:{port}"),
        ([str(tmp_path)], "plan.json"),
    ):
        answer = CliRunner().invoke(app, ["serve", *words])
        assert said in str(answer.exception), words

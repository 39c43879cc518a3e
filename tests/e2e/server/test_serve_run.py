"""`serve run` itself: curl, start, failure to start, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import START_TIMEOUT_S, Corral, model, sse, wait_until


def curl(*arguments: str) -> str:
    """What curl prints."""
    command = ["curl", "--silent", "--show-error", "--max-time", "60", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


AS_JSON = ("-H", "Content-Type: application/json", "-d")


def test_curl(corral: Corral) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8})
    url = f"{corral.url}/v1/chat/completions"
    answer = json.loads(curl(url, *AS_JSON, body))
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "big"  # the first, since the request names none
    assert answer["usage"]["completion_tokens"] == 8


def test_curl_streams(corral: Corral) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 8, "stream": True})
    lines = curl("--no-buffer", f"{corral.url}/v1/completions", *AS_JSON, body).split("\n\n")
    *events, done, rest = lines
    assert (done, rest) == ("data: [DONE]", "")
    assert sse(events[-1])["choices"][0]["finish_reason"] == "length"


def test_malformed_json(corral: Corral) -> None:
    answer = curl(
        f"{corral.url}/v1/completions", "--json", '{"prompt": ', "--write-out", "\n%{http_code}"
    )
    body, status = answer.rsplit("\n", 1)
    assert status == "400"
    assert json.loads(body)["error"]["message"].startswith("The body cannot be read as JSON")


def test_health_and_stats(corral: Corral) -> None:
    assert json.loads(curl(f"{corral.url}/health")) == {"status": "ok"}
    stats = json.loads(curl(f"{corral.url}/v1/stats"))
    assert [entry["id"] for entry in stats["models"]] == ["big", "small", "demo"]
    (replica,) = stats["models"][0]["replicas"]
    assert replica["engine"]["n_slots"] == 16
    assert replica["engine"]["compute"]["threads"] == 1


@pytest.mark.long
def test_a_bad_field_stops_the_start_with_one_message(
    gguf: Path, start: Callable[[list[dict[str, Any]]], Corral]
) -> None:
    server = start([model(gguf, "m", n_slotz=4)])
    message = "invalid configuration: models.0.engine.n_slotz: there is no such field, did you mean"
    wait_until(lambda: message in server.log, START_TIMEOUT_S, lambda: f"message in\n{server.log}")
    assert server.log.count(message) == 1
    assert "Traceback" not in server.log


@pytest.mark.long
def test_a_stream_goes_on_when_the_only_replica_was_replaced_and_when_the_server_ends(
    gguf: Path, start: Callable[..., Corral]
) -> None:
    server = start([model(gguf, "m", n_slots=2, n_ctx_slot=2048)], one_machine=True)
    server.wait_ready()
    body = {"prompt": "x", "max_tokens": 6000, "ignore_eos": True, "stream": True}
    body |= {"context_shift": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        next(lines)
        (pid,) = server.pids("ray::ServeReplica:corral:engine-m")
        os.kill(pid, signal.SIGKILL)
        *_, last, done = lines
    assert done == "data: [DONE]"
    assert sse(last)["choices"][0]["finish_reason"] == "length"
    server.wait_ready()
    answer = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})
    assert answer.json()["usage"]["completion_tokens"] == 4

    assert server.pids("raylet")
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        refused = httpx.Response(200)
        while refused.status_code == 200:
            refused = httpx.get(f"{server.url}/v1/models")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "engine_closed"
        *_, last, done = lines
    assert done == "data: [DONE]"
    assert sse(last)["choices"][0]["finish_reason"] == "length"
    server.stop()
    assert server.pids("") == []

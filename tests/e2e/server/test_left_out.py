"""Models whose files are bad: the others are served, and requests for the bad ones learn why."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.common import servers
from tests.e2e.conftest import Corral, model, short_folder, wait_until

CHECKS = {"health_check_period_s": 0.5, "health_check_timeout_s": 5.0}
SIZES = {"n_slots": 1, "n_ctx_slot": 256}


@pytest.fixture(scope="module")
def server(gguf: Path) -> Iterator[Corral]:
    """A model whose file is cut, one that is missing, one whose file can be taken away, and a good one."""
    with short_folder() as directory:
        (directory / "cut.gguf").write_bytes(gguf.read_bytes()[:-1000])
        (directory / "late.gguf").write_bytes(gguf.read_bytes())
        names = "cut", "missing", "late"
        bad = [model(directory / f"{name}.gguf", name, **SIZES) for name in names]
        good = model(gguf, "good", **SIZES)
        asleep = model(gguf, "asleep", **SIZES)
        asleep["keep_alive"] = "1h"
        corral = Corral(directory, [*bad, good, asleep], local=True, serve=CHECKS)
        try:
            servers.wait_ready(corral.process, lambda: servers.is_healthy(corral.url), directory)
            yield corral
        finally:
            corral.stop()


def ask(server: Corral, name: str) -> tuple[int, str]:
    """The status, and the code of an error."""
    body = {"model": name, "prompt": "Hello", "max_tokens": 2}
    answer = server.http.post("/v1/completions", json=body)
    return answer.status_code, answer.json().get("error", {}).get("code", "")


def statuses(server: Corral) -> dict[str, dict[str, Any]]:
    return {card["id"]: card["status"] for card in server.http.get("/v1/models").json()["data"]}


def test_the_others_are_served(server: Corral) -> None:
    for name in ("good", "late", "asleep"):
        assert ask(server, name) == (200, "")
    for name in ("cut", "missing"):
        assert ask(server, name) == (503, "engine_unavailable")
        assert statuses(server)[name]["failed"]
        assert f"The model {name} is left out" in server.log
    assert "not within the file bounds" in statuses(server)["cut"]["reason"]
    assert statuses(server)["good"] == {"value": "loaded"}


def test_a_model_that_cannot_load_again_says_why_at_once(server: Corral) -> None:
    (server.directory / "late.gguf").unlink()
    models = server.http.get("/v1/stats").json()["models"]
    (replica,) = next(model["replicas"] for model in models if model["id"] == "late")
    os.kill(int(replica["replica_id"].rpartition("-")[2]), signal.SIGKILL)
    assert ask(server, "late") == (503, "engine_unavailable")
    assert "late.gguf" in statuses(server)["late"]["reason"]
    assert ask(server, "good") == (200, "")
    assert server.http.get("/health").status_code == 200


def test_workers_that_start_again_serve_the_others(server: Corral) -> None:
    engines = set(server.pids("run.local.engine"))
    for pid in server.pids(""):
        if pid not in engines and pid != server.process.pid:
            os.kill(pid, signal.SIGKILL)
    assert ask(server, "good") == (200, "")
    assert ask(server, "late") == (503, "engine_unavailable")
    (server.directory / "late.gguf").write_bytes(Path(server.directory / "cut.gguf").read_bytes())
    assert ask(server, "good") == (200, "")
    assert server.http.get("/api/tags").status_code == 200


def test_a_start_without_any_model_fails(gguf: Path) -> None:
    with short_folder() as directory:
        (directory / "cut.gguf").write_bytes(gguf.read_bytes()[:-1000])
        bad = [model(directory / f"{name}.gguf", name, **SIZES) for name in ("cut", "missing")]
        server = Corral(directory, bad, local=True)
        assert server.process.wait(60) == 1
        wait_until(lambda: server.pids("") == [], 10, "all are gone")
        for reason in ("not within the file bounds", "missing.gguf"):
            assert reason in server.log

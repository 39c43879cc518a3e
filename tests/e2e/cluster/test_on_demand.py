"""Models that are loaded when somebody asks for them, by real Serve, on a machine with room for one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.common import servers
from tests.e2e.conftest import Corral, model, settings, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
PATIENCE_S = 120


@pytest.fixture(scope="module")
def corral() -> Iterator[Corral]:
    directory = Path(tempfile.mkdtemp(prefix="corral-", dir="/tmp"))
    entries = [model(None, name) | {"keep_alive": "10m"} for name in ("a", "b")]
    with settings({"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}):
        server = Corral(directory, entries)
    server.http.timeout = PATIENCE_S
    try:
        servers.wait_ready(server.process, lambda: servers.is_healthy(server.url), directory)
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


def loaded(corral: Corral) -> list[str]:
    found = corral.http.get("/v1/models").json()["data"]
    return [one["id"] for one in found if one["status"]["value"] == "loaded"]


def ask(corral: Corral, name: str) -> int:
    body = {"model": name, "prompt": "Hello", "max_tokens": 4}
    return corral.http.post("/v1/completions", json=body).status_code


def test_models_come_when_asked_for_and_give_way_to_each_other(corral: Corral) -> None:
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

"""Models that operators add while Ray Serve serves: every ingress has them, and the next start, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.common import servers
from tests.e2e.conftest import Corral, model, settings, short_folder, wait_until
from tests.integration.store.hub_server import Hub

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
PULLED, MADE = "hf.co/owner/name:Q8_0", "mario"
PATIENCE_S = 90
N_INGRESSES = 2


def start(folder: Path, directory: Path) -> Corral:
    entry = model(None, "m") | {"keep_alive": "10m"}
    managing: dict[str, Any] = {"manage_models": True, "downloads": {"folder": str(folder)}}
    deployment = {"num_replicas": N_INGRESSES}
    server = Corral(directory, [entry], args=managing, serve=deployment)
    servers.wait_ready(server.process, lambda: servers.is_healthy(server.url), directory)
    return server


def in_every_ingress(server: Corral, name: str) -> set[bool]:
    """Whether ingresses serve the model: Serve's proxy chooses the ingress of each request at random."""
    seen = set()
    for _ in range(12):
        answer = httpx.get(f"{server.url}/api/tags", timeout=30)
        seen.add(name in [listed["name"] for listed in answer.json()["models"]])
    return seen


def generated(server: Corral, name: str) -> dict[str, Any]:
    body = {"model": name, "prompt": "Hello", "raw": True, "stream": False}
    body |= {"options": {"temperature": 0, "num_predict": 8}}
    answer = server.http.post("/api/generate", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_every_ingress_has_what_was_added_and_so_has_the_next_start(
    hub: Hub, tmp_path: Path
) -> None:
    with settings({"HF_ENDPOINT": hub.url}), short_folder() as directory:
        server = start(tmp_path, directory)
        try:
            pull = {"model": PULLED}
            with server.http.stream("POST", "/api/pull", json=pull, timeout=PATIENCE_S) as answer:
                steps = [json.loads(line) for line in answer.iter_lines()]
            assert steps[-1] == {"status": "success"}, steps
            wait_until(lambda: in_every_ingress(server, PULLED) == {True}, 60, "all know it")
            texts = {generated(server, PULLED)["response"] for _ in range(6)}
            assert len(texts) == 1
            made = {"model": MADE, "from": PULLED, "parameters": {"num_predict": 3}}
            answered = server.http.post(
                "/api/create", json=made | {"stream": False}, timeout=PATIENCE_S
            )
            assert answered.json() == {"status": "success"}
            wait_until(lambda: in_every_ingress(server, f"{MADE}:latest") == {True}, 60, "made")
            gone = server.http.request(
                "DELETE", "/api/delete", json={"model": PULLED}, timeout=PATIENCE_S
            )
            assert gone.status_code == 200, gone.text
            wait_until(lambda: in_every_ingress(server, PULLED) == {False}, 60, "all forget it")
            assert generated(server, MADE)["response"] in texts  # its file is the same
        finally:
            server.stop()
    with settings({"HF_ENDPOINT": hub.url}), short_folder() as directory:
        server = start(tmp_path, directory)
        try:
            wait_until(lambda: in_every_ingress(server, f"{MADE}:latest") == {True}, 60, "kept")
            assert in_every_ingress(server, PULLED) == {False}
            assert generated(server, MADE)["response"] in texts
        finally:
            server.stop()

"""A model comes from a hub: its replica downloads it, and nobody else more than its beginning."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.common.servers import START_TIMEOUT_S
from serve_app.store import gguf_header
from tests.e2e.conftest import Corral, settings, wait_until
from tests.integration.store import hub_server
from tests.integration.store.hub_server import Hub
from tests.integration.store.sharded import split
from tools.random_models.model import SHAPES, write_random_gguf

SHAPE = replace(SHAPES["tiny"], n_layer=12, n_embd=512, n_ff=2048)


@pytest.mark.long
def test_a_server_downloads_its_model_once(
    start: Callable[[list[dict[str, Any]]], Corral], tmp_path: Path
) -> None:
    """While it is held up, everybody may know how far it is."""
    write_random_gguf(tmp_path / "whole.gguf", SHAPE, "q8_0")
    paths = split(tmp_path / "whole.gguf", tmp_path / "model-Q8_0", 3)
    held = threading.Event()
    hub = Hub({path.name: path.read_bytes() for path in paths}, held=held)
    n_bytes = sum(map(len, hub.files.values()))
    with hub_server.running(hub):
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DOWNLOAD_TIMEOUT": str(START_TIMEOUT_S),  # seconds without a byte
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        with settings(environment):
            source = {"repo": "owner/name:Q8_0"}
            engine = {"n_slots": 2, "n_ctx_slot": 256, "threads": 1, "backend": "llama.cpp"}
            corral = start([{"id": "far", "source": source, "engine": engine}])

        def fetching() -> list[dict[str, Any]]:
            try:
                answer = corral.http.get("/v1/stats")
            except httpx.TransportError:
                return []
            if not answer.is_success:  # Serve answers before the ingress does
                return []
            told = answer.json()["models"][0]
            found: list[dict[str, Any]] = told["fetching"]
            return found if not told["replicas"] else []

        wait_until(lambda: bool(fetching()), START_TIMEOUT_S, lambda: corral.log)
        (replica,) = fetching()
        assert replica["stage"] == "downloading"
        assert 0 <= replica["done"] < 1
        read_before = sum(hub.n_bytes.values())
        assert read_before < gguf_header.FIRST_BYTES + 3 * gguf_header.SHARD_BYTES
        held.set()
        corral.wait_ready()
        assert sum(hub.n_bytes.values()) - read_before == n_bytes
        body = {"model": "far", "prompt": "Once", "max_tokens": 4, "ignore_eos": True}
        answer = corral.http.post("/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 4
        (told,) = corral.http.get("/v1/stats").json()["models"]
        assert told["fetching"] == []

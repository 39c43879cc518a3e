"""Whether the server answers, and which models it leaves out."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from serve_app.base.errors import ConfigError, EngineUnavailableError
from serve_app.channel.handle import NoReplicas
from serve_app.config.schema import IngressConfig
from serve_app.server.model_registry import ModelFile, ModelInfo, ServedModel, open_or_leave_out
from tests.doubles.api import build_api
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine

LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
GONE = ModelFile("gone", 256, "", aliases=("other",), problem="/models/gone.gguf does not exist")


def served(name: str, engine: ScriptedEngine, **fields: Any) -> ServedModel:
    return ServedModel(name, N_CTX_SLOT, ByteTokenizer(), engine=engine, **fields)  # type: ignore[arg-type]


def asleep(**fields: Any) -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.is_loaded = False
    for name, value in fields.items():
        setattr(engine, name, value)
    return engine


def left_out() -> ServedModel:
    info = open_or_leave_out(GONE, ModelInfo.open)
    return info.served_by(asleep(failure=EngineUnavailableError(info.problem)))


@asynccontextmanager
async def asked(*models: ServedModel) -> AsyncIterator[httpx.AsyncClient]:
    api = build_api({model.id: model for model in models}, IngressConfig())
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_is_503_until_every_model_can_answer(path: str) -> None:
    loading = asleep()
    ready = served("ready", ScriptedEngine())
    on_demand = served("b", asleep(), waits_for_requests=True)
    async with asked(ready, on_demand, served("loading", loading), left_out()) as client:
        answer = await client.get(path)
        assert (answer.status_code, answer.json()) == (503, LOADING)
        assert answer.headers["retry-after"] == "1"
        for live in ("/livez", "/health/live"):
            assert (await client.get(live)).json() == {"status": "ok"}
        loading.is_loaded = True
        answer = await client.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_models_that_cannot_start_count_only_if_no_other_answers() -> None:
    failing = asleep(failure=ConfigError("it is cut"))
    async with asked(served("cut", failing), left_out()) as client:
        answer = await client.get("/health")
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == f"it is cut; {GONE.problem}"
    async with asked(served("cut", failing), served("ready", ScriptedEngine())) as client:
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("POST", "/v1/completions", {"prompt": "Hi"}),
        (
            "POST",
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
        ),
        ("POST", "/v1/responses", {"input": "Hi"}),
        ("POST", "/v1/embeddings", {"input": "Hi"}),
        ("POST", "/api/generate", {"prompt": "Hi"}),
        ("POST", "/api/show", {}),
        ("POST", "/tokenize", {"content": "Hi"}),
        ("GET", "/props", None),
    ],
)
@pytest.mark.parametrize("name", ["gone", "other"])
async def test_requests_for_a_model_that_is_left_out_learn_why(
    method: str, path: str, body: dict[str, Any] | None, name: str
) -> None:
    async with asked(served("ready", ScriptedEngine()), left_out()) as client:
        sent = {"params": {"model": name}} if body is None else {"json": body | {"model": name}}
        answer = await client.request(method, path, **sent)
        assert answer.status_code == 503, answer.text
        assert GONE.id in answer.text


async def test_lists_have_the_others_and_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        models = served("ready", ScriptedEngine()), left_out()
    assert f"The model gone is left out: {GONE.problem}" in caplog.text
    async with asked(*models) as client:
        ready, gone = (await client.get("/v1/models")).json()["data"]
        assert ready["status"] == {"value": "loaded"}
        failed = {"value": "unloaded", "failed": True, "reason": GONE.problem}
        assert (gone["id"], gone["status"], gone["meta"]) == ("gone", failed, None)
        for path in ("/api/tags", "/api/ps", "/v1/stats", "/metrics", "/slots"):
            answer = await client.get(path)
            assert answer.status_code == 200, answer.text
            assert json.dumps("gone") not in answer.text or path == "/v1/stats"


async def test_calls_of_no_replicas_fail_with_the_reason() -> None:
    handle = NoReplicas("it is cut")
    with pytest.raises(EngineUnavailableError, match="it is cut"):
        await handle.call("is_there")
    assert (handle.running(), await handle.ask_all("stats", timeout_s=1.0)) == (frozenset(), [])

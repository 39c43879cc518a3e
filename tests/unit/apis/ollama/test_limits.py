"""Ollama's routes behind keys and their limits, and over replicas that die."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.base.errors import EngineClosedError
from serve_app.base.values.answers import Accepted, TokenDelta
from serve_app.base.values.requests import GenerationRequest
from serve_app.config.schema import IngressConfig
from serve_app.server.answering.failover import unbroken
from serve_app.server.model_registry import ServedModel
from tests.doubles.api import build_api
from tests.unit.server.harness import HELLO, N_CTX_SLOT, ByteTokenizer, ScriptedEngine, ndjson

SECRET, SMALL = "ana-secret-0123456789", "ben-secret-0123456789"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
ASKING: list[tuple[str, dict[str, Any]]] = [
    ("/api/chat", CHAT),
    ("/api/generate", {"prompt": "Hi"}),
    ("/api/embed", {"input": "Hi"}),
    ("/api/embeddings", {"prompt": "Hi"}),
]
LONG: list[tuple[str, dict[str, Any]]] = [
    ("/api/chat", {"messages": [{"role": "user", "content": "x" * 20}]}),
    ("/api/generate", {"prompt": "x" * 20}),
    ("/api/generate", {"prompt": "x" * 20, "raw": True}),
    ("/api/embed", {"input": ["x" * 10, "x" * 10]}),
    ("/api/embeddings", {"prompt": "x" * 20}),
]


def served(engine: ScriptedEngine, access: IngressConfig) -> httpx.AsyncClient:
    model = ServedModel("m", N_CTX_SLOT, ByteTokenizer(), engine=engine)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(build_api({"m": model}, access))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


@pytest.fixture
async def guarded(engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Ana's key has 40 tokens a minute, Ben's prompts at most 15."""
    file = tmp_path / "keys.yaml"
    ana = {"name": "ana", "key": SECRET, "tokens_per_minute": 40}
    ben = {"name": "ben", "key": SMALL, "max_prompt_tokens": 15}
    file.write_text(yaml.safe_dump({"keys": [ana, ben]}))
    async with served(engine, IngressConfig(api_key_file=file)) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", path) for path, _ in ASKING),
        *(("GET", path) for path in ("/api/tags", "/api/ps", "/api/version")),
        ("POST", "/api/show"),
        ("DELETE", "/api/delete"),
    ],
)
async def test_nothing_without_a_key(
    guarded: httpx.AsyncClient, engine: ScriptedEngine, method: str, path: str
) -> None:
    answer = await guarded.request(method, path, json=CHAT)
    assert (answer.status_code, list(answer.json())) == (401, ["error"])
    assert "API key" in answer.json()["error"]
    assert (engine.requests, engine.texts) == ([], [])


@pytest.mark.parametrize(("path", "body"), ASKING)
async def test_a_key_opens_and_names_its_client(
    guarded: httpx.AsyncClient, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    answer = await guarded.post(path, json=body, headers=bearer(SMALL))
    assert answer.status_code == 200
    assert [*engine.clients, *(request.client for request in engine.requests)] == ["ben"]


@pytest.mark.parametrize(("path", "body"), LONG)
async def test_a_keys_largest_prompt(
    guarded: httpx.AsyncClient, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    answer = await guarded.post(path, json=body, headers=bearer(SMALL))
    assert answer.status_code == 400
    assert "15" in answer.json()["error"]
    assert (engine.requests, engine.texts) == ([], [])


@pytest.mark.parametrize(("path", "body"), LONG)
async def test_a_keys_tokens_of_a_minute(
    guarded: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    statuses = []
    for _ in range(4):
        answer = await guarded.post(path, json=body, headers=bearer(SECRET))
        statuses.append(answer.status_code)
    assert statuses[0] == 200
    assert statuses[-1] == 429
    assert list(answer.json()) == ["error"]
    assert int(answer.headers["retry-after"]) >= 1


class DyingReplicas(ScriptedEngine):
    """Each of them dies before its second token."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Accepted | TokenDelta]:
        async for item in unbroken(request, self._attempt, (0.0,) * 9):
            yield item

    async def _attempt(self, request: GenerationRequest) -> AsyncGenerator[Accepted | TokenDelta]:
        self.requests.append(request)
        yield Accepted()
        n_told = len(request.generated)
        yield HELLO[n_told]
        if HELLO[n_told].end is None:
            raise EngineClosedError("The engine shut down.")


@pytest.mark.parametrize(("path", "body"), ASKING[:2])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_goes_on_where_a_replica_died(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    engine = DyingReplicas()
    async with served(engine, IngressConfig()) as client:
        answer = await client.post(path, json=body | {"stream": stream})
    assert answer.status_code == 200
    lines = ndjson(answer) if stream else [answer.json()]
    said = [
        line["response"] if "response" in line else line["message"]["content"] for line in lines
    ]
    assert "".join(said) == "Hello"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert [request.generated for request in engine.requests] == [(), (1,), (1, 2)]

"""What `/v1/usage` shows: the clients' own counts, whatever the protocol and the end."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.base.errors import EngineFailedError, QueueFullError
from serve_app.base.values.answers import Accepted, TokenDelta
from serve_app.base.values.requests import GenerationRequest
from serve_app.config.schema import IngressConfig, PriceConfig
from serve_app.server.model_registry import ServedModel
from serve_app.server.usage.ledger import Ledger
from tests.doubles.api import build_api
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine, chat

KEYS = {name: f"{name}-secret-0123456789" for name in ("ana", "ben", "op")}


@pytest.fixture
async def server(
    engine: ScriptedEngine, tokenizer: ByteTokenizer, tmp_path: Path
) -> AsyncIterator[httpx.AsyncClient]:
    keys = [
        {
            "name": name,
            "sha256": hashlib.sha256(key.encode()).hexdigest(),
            "admin": name == "op",
            "tokens_per_day": 10**6,
        }
        for name, key in KEYS.items()
    ]
    (tmp_path / "keys").write_text(yaml.safe_dump({"keys": keys}))
    prices = {"second": PriceConfig(prompt=1e6, cached=1e5, generated=1e4, compute_second=7)}
    access = IngressConfig(
        api_key_file=tmp_path / "keys", usage_folder=tmp_path / "usage", prices=prices
    )
    models = {
        name: ServedModel(name, N_CTX_SLOT, tokenizer, engine=engine)  # type: ignore[arg-type]
        for name in ("first", "second")
    }
    transport = httpx.ASGITransport(build_api(models, access), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


def by(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


async def used(server: httpx.AsyncClient, name: str = "op", **query: Any) -> list[dict[str, Any]]:
    answer = await server.get("/v1/usage", params=query, headers=by(name))
    assert answer.status_code == 200, answer.text
    return [result for bucket in answer.json()["data"] for result in bucket["results"]]


def spent(folder: Path) -> float:
    """What is spent of all budgets, once `used` has had the ledger written."""
    with closing(sqlite3.connect(folder / "usage" / "ledger.sqlite")) as file:
        (amount,) = file.execute("SELECT TOTAL(amount) FROM spent").fetchone()
    return float(amount)


class Reached(asyncio.Event):
    """A place of a script where the engine stays."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = asyncio.Event()

    async def wait(self) -> Any:
        self.passed.set()
        return await super().wait()


POSTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", chat()),
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/messages", {**chat(), "max_tokens": 5}),
    ("/v1/responses", {"input": "Hi"}),
    ("/api/chat", chat()),
    ("/api/generate", {"prompt": "x"}),
    ("/completion", {"prompt": "x"}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), POSTS, ids=lambda value: str(value)[:20])
async def test_every_protocol_is_counted_as_its_usage_says(
    server: httpx.AsyncClient, path: str, body: dict[str, Any], stream: bool
) -> None:
    answer = await server.post(path, json={**body, "stream": stream}, headers=by("ana"))
    assert answer.status_code == 200
    (result,) = await used(server, group_by=["api_key_id", "model", "endpoint", "batch"])
    assert result["input_tokens"] == 5  # as the engine's end says
    assert result["output_tokens"] == 2
    assert result["input_cached_tokens"] == 3
    assert result["num_model_requests"] == result["completed"] == 1
    assert result["api_key_id"] == "ana"
    assert result["model"] == "first"
    assert result["endpoint"] == path
    assert result["batch"] is False


async def test_embedded_texts_are_counted(server: httpx.AsyncClient) -> None:
    body = {"input": ["abc", "de"], "model": "second"}
    answer = await server.post("/v1/embeddings", json=body, headers=by("ana"))
    (result,) = await used(server, group_by="model")
    assert result["input_tokens"] == answer.json()["usage"]["prompt_tokens"] == 5
    assert result["output_tokens"] == 0
    assert result["model"] == "second"


async def test_embedded_texts_that_their_client_leaves_are_counted(
    server: httpx.AsyncClient,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    asked = Reached()
    monkeypatch.setattr(engine, "embed", lambda *_, **__: asked.wait())
    body = {"input": ["abc", "de"], "model": "second"}
    posting = asyncio.create_task(server.post("/v1/embeddings", json=body, headers=by("ana")))
    await asyncio.wait_for(asked.passed.wait(), 10)
    posting.cancel()
    await asyncio.gather(posting, return_exceptions=True)
    (result,) = await used(server)
    assert (result["aborted"], result["completed"], result["num_model_requests"]) == (1, 0, 1)
    assert result["input_tokens"] == spent(tmp_path) == 5


async def test_tokens_of_a_stream_that_its_client_leaves_are_counted(
    server: httpx.AsyncClient, engine: ScriptedEngine, tmp_path: Path
) -> None:
    both_came = Reached()
    engine.script = [TokenDelta("a", (1,)), TokenDelta("b", (2,)), both_came]
    body = {"prompt": "four", "stream": True}
    posting = asyncio.create_task(server.post("/v1/completions", json=body, headers=by("ana")))
    await asyncio.wait_for(both_came.passed.wait(), 10)
    (result,) = await used(server)
    assert (result["output_tokens"], result["aborted"]) == (2, 0)
    posting.cancel()
    await asyncio.gather(posting, return_exceptions=True)
    (result,) = await used(server)
    assert (result["input_tokens"], result["output_tokens"]) == (4, 2)
    assert (result["aborted"], result["completed"], result["num_model_requests"]) == (1, 0, 1)
    assert spent(tmp_path) == 4 + 2


async def test_a_request_that_its_client_leaves_before_it_is_accepted_costs_nothing(
    server: httpx.AsyncClient,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    asked = Reached()

    async def generate(_: GenerationRequest) -> AsyncIterator[Accepted]:
        await asked.wait()
        yield Accepted()

    monkeypatch.setattr(engine, "generate", generate)
    body = {"prompt": "four", "stream": True}
    posting = asyncio.create_task(server.post("/v1/completions", json=body, headers=by("ana")))
    await asyncio.wait_for(asked.passed.wait(), 10)
    posting.cancel()
    await asyncio.gather(posting, return_exceptions=True)
    (result,) = await used(server)
    assert (result["refused"], result["aborted"], result["num_model_requests"]) == (1, 0, 0)
    assert (result["input_tokens"], spent(tmp_path)) == (0, 0)


@pytest.mark.parametrize(
    ("script", "outcome", "n_tokens"),
    [
        ([QueueFullError("full", 3)], "refused", (0, 0)),
        ([TokenDelta("a", (1,)), EngineFailedError("lost")], "failed", (4, 1)),
    ],
)
async def test_failures_are_counted_with_what_came_before(
    server: httpx.AsyncClient,
    engine: ScriptedEngine,
    script: list[Any],
    outcome: str,
    n_tokens: tuple[int, int],
) -> None:
    engine.script = script
    body = {"prompt": "four", "stream": True}
    await server.post("/v1/completions", json=body, headers=by("ana"))
    (result,) = await used(server)
    outcomes = {name: result[name] for name in ("completed", "aborted", "failed", "refused")}
    assert outcomes == {name: int(name == outcome) for name in outcomes}
    assert (result["input_tokens"], result["output_tokens"]) == n_tokens


async def test_each_of_several_answers_is_a_request(
    server: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    body = {"prompt": ["x", "y"], "n": 2}
    answer = await server.post("/v1/completions", json=body, headers=by("ana"))
    (result,) = await used(server)
    assert result["num_model_requests"] == 4
    told = answer.json()["usage"]
    assert result["output_tokens"] == told["completion_tokens"] == 8
    assert result["input_tokens"] == told["prompt_tokens"] == 10
    assert result["input_cached_tokens"] == told["prompt_tokens_details"]["cached_tokens"] == 6


async def test_a_client_sees_its_own_usage_and_operators_see_all(server: httpx.AsyncClient) -> None:
    for name, n in (("ana", 1), ("ben", 2)):
        for _ in range(n):
            await server.post("/v1/completions", json={"prompt": "x"}, headers=by(name))
    assert [one["num_model_requests"] for one in await used(server, "ana")] == [1]
    (own,) = await used(server, "ben", group_by="api_key_id")
    assert (own["api_key_id"], own["num_model_requests"]) == ("ben", 2)
    results = await used(server, "op", group_by="api_key_id")
    assert {one["api_key_id"]: one["num_model_requests"] for one in results} == {"ana": 1, "ben": 2}
    assert [one["num_model_requests"] for one in await used(server, api_key_ids="ben")] == [2]
    for path in ("/v1/usage", "/v1/organization/usage/completions"):
        refused = await server.get(path, params={"api_key_ids": "ben"}, headers=by("ana"))
        assert refused.status_code == 403
    assert (await server.get("/v1/usage")).status_code == 401


async def test_buckets_are_openais_and_pages_go_on(server: httpx.AsyncClient) -> None:
    await server.post("/v1/completions", json={"prompt": "x"}, headers=by("ana"))
    query: dict[str, Any] = {"bucket_width": "1m", "limit": 2}
    answer = await server.get("/v1/organization/usage/completions", params=query, headers=by("op"))
    body = answer.json()
    assert body["object"] == "page"
    assert [bucket["end_time"] - bucket["start_time"] for bucket in body["data"]] == [60, 60]
    start = body["data"][0]["start_time"]
    pages, query = [], query | {"start_time": start, "end_time": start + 300}
    for _ in range(3):
        page = (await server.get("/v1/usage", params=query, headers=by("op"))).json()
        pages += page["data"]
        query["page"] = page["next_page"]
    assert not page["has_more"]
    assert [bucket["start_time"] for bucket in pages] == [start + 60 * i for i in range(5)]
    assert sum(one["num_model_requests"] for bucket in pages for one in bucket["results"]) == 1


@pytest.mark.parametrize(
    "query",
    [
        {"group_by": "secret"},
        {"bucket_width": "2d"},
        {"limit": 0},
        {"start_time": -1},
        {"start_time": 2**80},
        {"page": "x"},
    ],
)
async def test_wrong_questions_are_refused(
    server: httpx.AsyncClient, query: dict[str, Any]
) -> None:
    refused = await server.get("/v1/usage", params=query, headers=by("op"))
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"


async def test_a_table_for_spreadsheets(server: httpx.AsyncClient) -> None:
    await server.post("/v1/completions", json={"prompt": "x"}, headers=by("ana"))
    query = {"format": "csv", "group_by": ["model", "api_key_id"]}
    answer = await server.get("/v1/usage", params=query, headers=by("op"))
    assert answer.headers["content-type"].startswith("text/csv")
    (row,) = csv.DictReader(io.StringIO(answer.text))
    assert row["key"] == "ana"
    assert row["model"] == "first"
    assert (row["prompt_tokens"], row["completion_tokens"], row["requests"]) == ("5", "2", "1")


async def test_without_keys_there_is_one_account_and_strangers_see_nothing(
    engine: ScriptedEngine, tokenizer: ByteTokenizer
) -> None:
    models = {"m": ServedModel("m", N_CTX_SLOT, tokenizer, engine=engine)}  # type: ignore[arg-type]
    for access, status in ((IngressConfig(), 200), (IngressConfig(allow_anonymous=True), 403)):
        transport = httpx.ASGITransport(build_api(models, access))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            await client.post("/v1/completions", json={"prompt": "x"})
            answer = await client.get("/v1/usage", params={"group_by": "api_key_id"})
            assert answer.status_code == status


async def test_a_damaged_ledger_is_said_and_stops_no_answer(
    engine: ScriptedEngine, tokenizer: ByteTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "usage").mkdir()
    (tmp_path / "usage" / "ledger.sqlite").write_bytes(bytes(range(256)) * 100)
    models = {"m": ServedModel("m", N_CTX_SLOT, tokenizer, engine=engine)}  # type: ignore[arg-type]
    transport = httpx.ASGITransport(
        build_api(models, IngressConfig(usage_folder=tmp_path / "usage"))
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        answer = await client.get("/v1/usage")
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert message == "The ledger of usage cannot be used now: file is not a database."


@pytest.mark.parametrize(("model", "cost"), [("second", 2 + 0.3 + 0.02), ("first", None)])
async def test_costs_are_told_and_kept(
    server: httpx.AsyncClient, model: str, cost: float | None
) -> None:
    body = {"prompt": "x", "model": model}
    answer = await server.post("/v1/completions", json=body, headers=by("ana"))
    told = answer.headers.get("x-corral-cost")
    assert (told and float(told)) == cost
    assert (await used(server))[0]["cost"] == (cost or 0)


@pytest.mark.parametrize(
    ("model", "price"), [("m", 1.0), ("m:adapter", 1.0), ("m:dear", 3.0), ("n", 2.0)]
)
async def test_a_models_price_is_that_of_its_adapters(model: str, price: float) -> None:
    prices = {name: PriceConfig(prompt=n * 1e6) for name, n in (("m", 1), ("*", 2), ("m:dear", 3))}
    ledger = Ledger(prices=prices)
    assert ledger.counter("", "/v1/completions")(model, {"prompt_tokens": 1}) == price


async def test_limits_of_keys_are_refused_before_an_engine_is_asked(
    engine: ScriptedEngine, tokenizer: ByteTokenizer, tmp_path: Path
) -> None:
    ana = {"name": "ana", "key": KEYS["ana"], "models": ["first"], "max_context_tokens": 10}
    (tmp_path / "keys").write_text(yaml.safe_dump({"keys": [ana]}))
    models = {
        name: ServedModel(name, N_CTX_SLOT, tokenizer, engine=engine)  # type: ignore[arg-type]
        for name in ("first", "second")
    }
    transport = httpx.ASGITransport(
        build_api(models, IngressConfig(api_key_file=tmp_path / "keys"))
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

        async def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            answer = await client.post(path, json=body, headers=by("ana"))
            return answer.status_code, answer.json()

        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/embeddings", {"input": "x"}),
            ("/v1/messages", {**chat(), "max_tokens": 5}),
        ):
            status, answer = await post(path, {**body, "model": "second"})
            assert status == 403
            assert "may not use 'second'" in answer["error"]["message"]
        status, answer = await post("/v1/completions", {"prompt": "x" * 10})
        assert (status, answer["error"]["code"]) == (400, "key_limit_exceeded")
        assert not engine.requests
        assert not engine.texts
        assert (await post("/v1/completions", {"prompt": "x" * 8, "max_tokens": 9}))[0] == 200
        assert engine.requests[0].sampling.max_tokens == 2

"""What stands before the routes: keys, bodies, origins, and whose request it is."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.datastructures import Headers

from serve_app.base.errors import CorralError, DeadlineError, InvalidRequestError
from serve_app.base.values.answers import (
    Accepted,
    FinishReason,
    SequenceEnd,
    Timings,
    TokenDelta,
    Usage,
)
from serve_app.base.values.replicas import RequestRecord
from serve_app.config.schema import IngressConfig
from serve_app.server.access import api_keys, bodies
from serve_app.server.access.auth import secret_of
from serve_app.server.model_registry import ServedModel
from serve_app.server.workers.worker import MAX_BODY_BYTES
from tests.doubles.api import build_api
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine, chat

ANA, BEN = "ana-secret-0123456789", "ben-secret-0123456789"
CHAT = "/v1/chat/completions"
Open = Callable[..., httpx.AsyncClient]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    ana = {"name": "ana", "key": ANA, "max_concurrent_requests": 1, "tokens_per_minute": 100}
    entries = [ana, {"name": "ben", "key": BEN, "max_prompt_tokens": 10}]
    path.write_text(yaml.safe_dump({"keys": entries}))
    return path


@pytest.fixture
async def connect(engine: ScriptedEngine) -> AsyncIterator[Open]:
    clients = []

    def connect(access: IngressConfig, host: str = "127.0.0.1") -> httpx.AsyncClient:
        model = ServedModel("m", N_CTX_SLOT, ByteTokenizer(), engine=engine)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(build_api({"m": model}, access))
        clients.append(httpx.AsyncClient(transport=transport, base_url=f"http://{host}"))
        return clients[-1]

    yield connect
    for client in clients:
        await client.aclose()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers", [bearer(BEN), {"X-Api-Key": BEN}, {"authorization": f"bearer {BEN}"}]
)
async def test_a_key_opens(connect: Open, keys: Path, headers: dict[str, str]) -> None:
    answer = await connect(IngressConfig(api_key_file=keys)).post(
        CHAT, json=chat(), headers=headers
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, bearer("wrong"), {"Authorization": ANA}, {"X-Api-Key": ""}]
)
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/props", "/nowhere", "/openapi.json"])
async def test_nothing_without_a_key(
    connect: Open, keys: Path, engine: ScriptedEngine, path: str, headers: dict[str, str]
) -> None:
    answer = await connect(IngressConfig(api_key_file=keys)).post(
        path, json=chat(), headers=headers
    )
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert engine.requests == []


async def test_while_changed_keys_are_read_the_event_loop_goes_on(
    connect: Open, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(IngressConfig(api_key_file=keys))
    assert (await client.get("/v1/models", headers=bearer(ANA))).status_code == 200
    read, go_on = api_keys.read_keys, threading.Event()
    monkeypatch.setattr(api_keys, "read_keys", lambda path: read(path) if go_on.wait(30) else [])
    keys.write_text(yaml.safe_dump({"keys": [{"name": "ben", "key": BEN}]}))  # noqa: ASYNC240
    asking = [asyncio.create_task(client.get("/v1/models", headers=bearer(k))) for k in (ANA, BEN)]
    assert (await client.get("/health")).status_code == 200
    assert not any(task.done() for task in asking)
    go_on.set()
    assert [(await task).status_code for task in asking] == [401, 200]


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_load_balancers_need_none(connect: Open, keys: Path, path: str) -> None:
    assert (
        await connect(IngressConfig(api_key_file=keys), "10.0.0.1").get(path)
    ).status_code == 200


@pytest.mark.parametrize(
    ("host", "access", "status"),
    [
        ("127.0.0.1", IngressConfig(), 200),
        ("127.8.8.8", IngressConfig(), 200),
        ("[::1]", IngressConfig(), 200),
        ("localhost", IngressConfig(), 200),
        ("10.0.0.1", IngressConfig(), 401),
        ("corral.example", IngressConfig(), 401),
        ("10.0.0.1", IngressConfig(allow_anonymous=True), 200),
    ],
)
async def test_without_keys_only_this_machine_is_answered(
    connect: Open, host: str, access: IngressConfig, status: int
) -> None:
    answer = await connect(access, host).get("/v1/models")
    assert answer.status_code == status
    if status == 401:
        assert "ingress.api_key_file" in answer.json()["error"]["message"]


async def test_slots_are_shared_among_keys_not_users(
    connect: Open, keys: Path, engine: ScriptedEngine
) -> None:
    body = chat(user="somebody")
    await connect(IngressConfig(api_key_file=keys)).post(CHAT, json=body, headers=bearer(BEN))
    await connect(IngressConfig()).post(CHAT, json=body)
    assert [request.client for request in engine.requests] == ["ben", "somebody"]


async def test_keys_share_prefixes_within_their_cache_group(
    connect: Open, tmp_path: Path, engine: ScriptedEngine
) -> None:
    secrets = {name: f"{name}-secret-0123456789" for name in ("ana", "ben", "cai", "dan")}
    entries = [{"name": name, "key": secret} for name, secret in secrets.items()]
    entries[1]["cache_group"] = entries[2]["cache_group"] = "team"
    entries[3]["cache_group"] = "ana"  # the group that ana's key is in by its name
    file = tmp_path / "groups.yaml"
    file.write_text(yaml.safe_dump({"keys": entries}))
    client = connect(IngressConfig(api_key_file=file))
    for salt in ({}, {"cache_salt": "s"}):
        engine.requests.clear()
        for secret in secrets.values():
            await client.post(CHAT, json=chat(user="u", **salt), headers=bearer(secret))
        ana, ben, cai, dan = (request.cache_group for request in engine.requests)
        assert (ben, dan) == (cai, ana)
        assert len({ana, ben, ""}) == 3
        assert not any(name in found for name in ("ana", "team") for found in (ana, ben))


async def test_a_keys_largest_prompt(connect: Open, keys: Path, engine: ScriptedEngine) -> None:
    client = connect(IngressConfig(api_key_file=keys))
    body = {"prompt": ["123456", "12345"]}
    answer = await client.post("/v1/completions", json=body, headers=bearer(BEN))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "key_limit_exceeded")
    assert engine.requests == []


async def test_texts_to_embed_count_as_prompts(
    connect: Open, keys: Path, engine: ScriptedEngine
) -> None:
    client = connect(IngressConfig(api_key_file=keys))
    body = {"input": ["123456", "12345"]}
    answer = await client.post("/v1/embeddings", json=body, headers=bearer(BEN))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "key_limit_exceeded")
    assert engine.texts == []


async def test_a_keys_tokens_are_those_of_prompts_and_answers(
    connect: Open, keys: Path, engine: ScriptedEngine
) -> None:
    client = connect(IngressConfig(api_key_file=keys))
    body = {"prompt": "x" * 49, "max_tokens": 9}
    statuses = []
    for _ in range(2):  # 49 and 3 tokens, of 100
        answer = await client.post("/v1/completions", json=body, headers=bearer(ANA))
        statuses.append(answer.status_code)
    assert statuses == [200, 429]
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(answer.headers["retry-after"]) in (59, 60)
    assert len(engine.requests) == 1


async def test_a_keys_requests_at_once(
    connect: Open, keys: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(IngressConfig(api_key_file=keys))
    running, go_on = asyncio.Event(), asyncio.Event()
    generate = engine.generate

    async def held(request: Any) -> AsyncIterator[Accepted | TokenDelta]:
        running.set()
        await go_on.wait()
        async for item in generate(request):
            yield item

    monkeypatch.setattr(engine, "generate", held)
    first = asyncio.create_task(client.post(CHAT, json=chat(), headers=bearer(ANA)))
    await running.wait()
    second = await client.post(CHAT, json=chat(), headers=bearer(ANA))
    assert (second.status_code, second.headers["retry-after"]) == (429, "1")
    assert (
        await client.get("/v1/stats", headers=bearer(ANA))
    ).status_code == 200  # asks for no work
    go_on.set()
    assert (await first).status_code == 200
    third = await client.post(CHAT, json=chat(), headers=bearer(ANA))
    assert third.status_code == 200


@pytest.mark.parametrize("expects", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large(connect: Open, chunked: bool, expects: bool) -> None:
    """Apache makes a 500 of an answer in the place of 100, unless the connection ends with it."""
    body = json.dumps({"prompt": "x" * MAX_BODY_BYTES}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for i in range(0, len(body), 2**20):
            yield body[i : i + 2**20]

    headers = {"Expect": "100-continue"} if expects else {}
    content = pieces() if chunked else body
    answer = await connect(IngressConfig()).post(CHAT, content=content, headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert answer.headers.get("connection") == ("close" if expects else None)


async def test_a_body_that_does_not_come(connect: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "PROGRESS_S", 0.0)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    answer = await connect(IngressConfig()).post(CHAT, content=pieces())
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")


@pytest.mark.parametrize("ending", [{"type": "http.disconnect"}, RuntimeError("cancelled")])
async def test_a_client_that_leaves_while_it_sends_gets_no_answer(
    engine: ScriptedEngine, ending: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve tells it as ASGI does, or by an exception."""
    model = ServedModel("m", N_CTX_SLOT, ByteTokenizer(), engine=engine)  # type: ignore[arg-type]
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, ending]
    sent = []

    async def receive() -> Any:
        message = messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
    await build_api({"m": model})(scope | {"server": ("127.0.0.1", 80)}, receive, send)
    assert sent == []
    assert caplog.records == []


async def test_no_other_site_may_ask(connect: Open) -> None:
    answer = await connect(IngressConfig()).get(
        "/v1/models", headers={"Origin": "https://evil.example"}
    )
    assert "access-control-allow-origin" not in answer.headers


async def test_a_site_that_may_asks_before_it_sends_its_key(connect: Open, keys: Path) -> None:
    client = connect(IngressConfig(api_key_file=keys, cors_origins=["https://chat.example"]))
    headers = {
        "Origin": "https://chat.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    answer = await client.options(CHAT, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    refused = await client.post(CHAT, json=chat(), headers={"Origin": "https://chat.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"


@pytest.mark.parametrize(("told", "named"), [({}, "*"), ({"Sec-Fetch-Mode": "cors"}, "x-mine")])
async def test_browsers_are_told_the_headers_that_they_may_send(
    connect: Open, keys: Path, told: dict[str, str], named: str
) -> None:
    """All others hear what llama-server says."""
    asked = {
        "Origin": "https://chat.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "x-mine",
    }
    answer = await connect(IngressConfig(api_key_file=keys)).options(CHAT, headers=asked | told)
    assert answer.headers["access-control-allow-headers"] == named
    assert answer.headers["access-control-allow-credentials"] == "true"


async def test_routes_that_were_switched_off(connect: Open, keys: Path) -> None:
    client = connect(IngressConfig(disabled_routes=["/slots", "/v1/completions", "/"]))
    off = [("GET", "/slots"), ("POST", "/slots/0"), ("POST", "/v1/completions"), ("POST", "/")]
    for method, path in off:
        answer = await client.request(method, path, json={})
        assert (answer.status_code, answer.json()["error"]["type"]) == (501, "not_supported_error")
    assert (await client.get("/props")).status_code == 200
    closed = connect(IngressConfig(api_key_file=keys, disabled_routes=["/slots"]))
    assert (await closed.get("/slots")).status_code == 401, "who may not ask is told nothing else"


@pytest.mark.parametrize(
    ("origin", "may"), [("http://localhost:8080", True), ("http://localhost.evil.example", False)]
)
async def test_pages_of_this_machine_may(connect: Open, origin: str, may: bool) -> None:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    answer = await connect(IngressConfig(cors_origins=["localhost"])).options(CHAT, headers=asked)
    assert answer.status_code == 200
    assert answer.headers.get("access-control-allow-origin") == (origin if may else None)


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-1.2:3", True), ("a b", False), ("x" * 129, False)]
)
async def test_requests_carry_their_id(
    connect: Open, engine: ScriptedEngine, given: str, kept: bool
) -> None:
    await connect(IngressConfig()).post(CHAT, json=chat(), headers={"x-request-id": given})
    (request,) = engine.requests
    assert (request.http_id == given) is kept
    assert request.http_id


ENDED = SequenceEnd(FinishReason.LENGTH, Usage(9, 4, 5), Timings(1, 0.5, 2, 0.25, 0.125, 1, 3.5))


async def test_explain(connect: Open, engine: ScriptedEngine) -> None:
    engine.records = [
        RequestRecord("cmpl-a.0", "web-1", "", "ended", ENDED, "r1", "n1"),
        RequestRecord("cmpl-a.1", "web-1", "", "decode", None, "r1", "n1"),
        RequestRecord("cmpl-b", "web-2", "", "waiting", None, "r1", "n1"),
    ]
    client = connect(IngressConfig())
    found = (await client.get("/v1/requests/cmpl-a")).json()
    assert [one["id"] for one in found["sequences"]] == ["cmpl-a.0", "cmpl-a.1"]
    assert (await client.get("/v1/requests/web-1")).json()["sequences"] == found["sequences"]
    ended, running = found["sequences"]
    assert running == {"id": "cmpl-a.1", "replica_id": "r1", "node_id": "n1", "state": "decode"}
    assert (ended["state"], ended["finish_reason"]) == ("ended", "length")
    told = {name: ended["timings"][name] for name in ("queue_ms", "stalled_ms", "preempted_ms")}
    assert told == {"queue_ms": 1000, "stalled_ms": 250, "preempted_ms": 125}
    assert (ended["timings"]["preemptions"], ended["timings"]["mean_batch"]) == (1, 3.5)
    assert ended["timings"]["cache_n"] == 5


async def test_explain_with_a_replica_missing(connect: Open, engine: ScriptedEngine) -> None:
    engine.records = [RequestRecord("cmpl-a", "web-1", "", "decode", None, "r1", "n1")]
    engine.missing = ("r2",)
    client = connect(IngressConfig())
    found = (await client.get("/v1/requests/cmpl-a")).json()
    assert [one["id"] for one in found["sequences"]] == ["cmpl-a"]
    assert found["missing"] == ["r2"]
    unknown = await client.get("/v1/requests/cmpl-b")
    assert unknown.status_code == 404
    assert "These replicas did not answer: r2." in unknown.json()["error"]["message"]


@pytest.mark.parametrize("wanted", ["cmpl", "cmpl-", "nobody"])
async def test_unknown_requests(connect: Open, engine: ScriptedEngine, wanted: str) -> None:
    engine.records = [RequestRecord("cmpl-b", "", "", "waiting")]
    answer = await connect(IngressConfig()).get(f"/v1/requests/{wanted}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")


async def test_a_key_is_told_of_its_own_requests_only(
    connect: Open, keys: Path, engine: ScriptedEngine
) -> None:
    engine.records = [RequestRecord("cmpl-b", "", "ben", "waiting")]
    client = connect(IngressConfig(api_key_file=keys))
    assert (await client.get("/v1/requests/cmpl-b", headers=bearer(BEN))).status_code == 200
    assert (await client.get("/v1/requests/cmpl-b", headers=bearer(ANA))).status_code == 404


async def test_timings_of_a_whole_answer(connect: Open, engine: ScriptedEngine) -> None:
    engine.script = [TokenDelta("a", (97,), ENDED)]
    client = connect(IngressConfig())
    answer = (await client.post(CHAT, json=chat(timings=True))).json()
    assert (answer["timings"]["queue_ms"], answer["timings"]["predicted_n"]) == (1000, 4)
    plain = (await client.post(CHAT, json=chat())).json()["timings"]
    assert plain["predicted_n"] == 4
    assert "queue_ms" not in plain, "what llama-server tells, and no more"


async def test_timings_of_a_stream_come_with_its_end(connect: Open, engine: ScriptedEngine) -> None:
    engine.script = [TokenDelta("a", (97,)), TokenDelta("b", (98,), ENDED)]
    answer = await connect(IngressConfig()).post(CHAT, json=chat(timings=True, stream=True))
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(timings=True, n=2)),
        ("/v1/completions", {"prompt": ["a", "b"], "timings": True}),
        ("/v1/completions", {"prompt": "a", "best_of": 2, "timings": True}),
    ],
)
async def test_timings_are_of_one_answer(connect: Open, path: str, body: dict[str, Any]) -> None:
    answer = await connect(IngressConfig()).post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timings")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat("x" * 4 * N_CTX_SLOT)),
        ("/v1/completions", {"prompt": "x" * 4 * N_CTX_SLOT}),
        ("/completion", {"prompt": "x" * 4 * N_CTX_SLOT}),
    ],
)
async def test_what_cannot_fit_is_not_even_tokenized(
    connect: Open, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def tokenize(*_: object) -> tuple[int, ...]:
        raise CorralError("It was tokenized.")

    for name in ("encode", "encode_chat", "tokenize"):
        monkeypatch.setattr(ByteTokenizer, name, tokenize)
    answer = await connect(IngressConfig()).post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "at least 64 tokens" in error["message"]


@pytest.mark.parametrize(
    ("headers", "secret"),
    [
        ([("authorization", "Bearer abc")], "abc"),
        ([("authorization", "bEaReR   abc  ")], "abc"),
        ([("x-api-key", "abc")], "abc"),
        ([("authorization", "Bearer abc"), ("x-api-key", "xyz")], "abc"),
        ([("authorization", "Basic abc"), ("x-api-key", "xyz")], "xyz"),
        ([("authorization", "BearerX abc")], None),
        ([("authorization", "Bearerabc")], None),
        ([("authorization", "Bearer")], None),
        ([("authorization", "Bearer abc def")], None),
        ([("authorization", "Bearer abc, Bearer def")], None),
        ([("x-api-key", "abc def")], None),
        ([], None),
    ],
)
def test_one_rule_says_what_a_key_is(headers: list[tuple[str, str]], secret: str | None) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers]
    assert secret_of(Headers(raw=raw)) == secret


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_two_keys_of_one_kind_are_refused(name: str) -> None:
    raw = [(name.encode(), b"Bearer abc"), (name.encode(), b"Bearer def")]
    with pytest.raises(InvalidRequestError):
        secret_of(Headers(raw=raw))


async def test_a_missed_deadline_closes_the_door_for_nothing_else(
    connect: Open, keys: Path, engine: ScriptedEngine
) -> None:
    engine.scripts = [[DeadlineError("too late", 7)]]
    client = connect(IngressConfig(api_key_file=keys))
    refused = await client.post(CHAT, json=chat(), headers=bearer(BEN))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
    assert refused.json()["error"]["code"] == "deadline_unmet"
    assert (await client.post(CHAT, json=chat(), headers=bearer(BEN))).status_code == 200


@pytest.fixture
def users(tmp_path: Path) -> IngressConfig:
    """The access of a proxy on this machine."""
    path = tmp_path / "users.yaml"
    ana = {"name": "ana", "key": ANA, "admin": True}
    ben = {"name": "b", "key": BEN, "labels": {"user": "ben@example.com"}}
    gone = {"name": "gone", "key": "x" * 20, "expires": "2020-01-01T00:00:00Z"}
    path.write_text(yaml.safe_dump({"keys": [ana, ben, gone]}))
    proxies = ["10.0.0.0/8", "127.0.0.1"]
    return IngressConfig.model_validate({"api_key_file": path, "trusted_proxies": proxies})


@pytest.mark.parametrize(("user", "client"), [("ana", "ana"), ("ben@example.com", "b")])
async def test_a_trusted_proxy_names_its_user(
    connect: Open, users: IngressConfig, engine: ScriptedEngine, user: str, client: str
) -> None:
    headers = {"X-Forwarded-User": user}
    assert (await connect(users).post(CHAT, json=chat(), headers=headers)).status_code == 200
    assert engine.requests[0].client == client


@pytest.mark.parametrize(
    "headers",
    [
        [("X-Forwarded-User", "nobody")],
        [("X-Forwarded-User", "")],
        [("X-Forwarded-User", "gone")],
        [("X-Forwarded-User", "ana"), ("X-Forwarded-User", "b")],
        [],
    ],
)
async def test_a_user_without_a_key_is_refused(
    connect: Open, users: IngressConfig, headers: list[tuple[str, str]]
) -> None:
    answer = await connect(users).post(CHAT, json=chat(), headers=headers)
    assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_nobody_else_is_believed_who_a_user_is(connect: Open, users: IngressConfig) -> None:
    stranger = users.model_copy(update={"trusted_proxies": users.trusted_proxies[:1]})
    answer = await connect(stranger).post(CHAT, json=chat(), headers={"X-Forwarded-User": "ana"})
    assert answer.json()["error"]["code"] == "invalid_api_key"
    with_key = {"X-Forwarded-User": "ana", **bearer(BEN)}
    answer = await connect(stranger).get("/v1/keys", headers=with_key)
    assert answer.status_code == 403, "the key counts, which is no operator's"


async def test_a_page_of_another_site_does_not_ask_in_a_users_name(
    connect: Open, users: IngressConfig
) -> None:
    headers = {"X-Forwarded-User": "ana", "Origin": "https://evil.example"}
    answer = await connect(users).post(CHAT, json=chat(), headers=headers)
    assert answer.json()["error"]["code"] == "cross_site_request"

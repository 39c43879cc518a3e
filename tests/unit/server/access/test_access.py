"""In which order requests are looked at, what refused ones cost, and what operators may do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.apis.embeddings import preparation as embeddings
from serve_app.apis.page.snapshot import difference, without_requests
from serve_app.base.errors import CorralError, DecodeError, EngineUnavailableError, QueueFullError
from serve_app.base.values.replicas import RequestRecord
from serve_app.config.schema import IngressConfig
from serve_app.server.access import auth
from serve_app.server.access.bodies import BodyLimits
from serve_app.server.model_registry import ServedModel
from tests.doubles.api import build_api
from tests.unit.apis.page.test_snapshot import merged
from tests.unit.server.harness import N_CTX_SLOT, ByteModelFile, ByteTokenizer, ScriptedEngine, chat

ANA, OLGA = "ana-secret-0123456789", "olga-secret-0123456789"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Asgi = Callable[..., Any]


class Answer:
    """What came of a request whose body the test sends piece by piece, or never."""

    def __init__(
        self, app: Asgi, method: str, path: str, query: str = "", peer: str = "127.0.0.1", **h: str
    ) -> None:
        self.pieces: asyncio.Queue[Any] = asyncio.Queue()
        self.n_asked = 0
        self._sent: list[Any] = []
        headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in h.items()]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": headers,
            "server": ("127.0.0.1", 8000),
            "client": (peer, 5),
            "http_version": "1.1",
        }
        self.done = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        self.n_asked += 1
        return await self.pieces.get()

    async def _send(self, message: Any) -> None:
        self._sent.append(message)

    def body(self, body: object) -> None:
        piece = json.dumps(body).encode()
        self.pieces.put_nowait({"type": "http.request", "body": piece, "more_body": False})

    async def json(self) -> Any:
        await self.done
        return json.loads(b"".join(message.get("body", b"") for message in self._sent))

    async def status(self) -> int:
        await self.done
        status: int = self._sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[bytes, bytes]:
        return {name.lower(): value for name, value in self._sent[0]["headers"]}


async def reading(answer: Answer) -> None:
    """Until it wants a piece of the body."""
    while not answer.n_asked:
        assert not answer.done.done(), answer._sent
        await asyncio.sleep(0)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    ana = {"name": "ana", "key": ANA, "max_concurrent_requests": 2, "tokens_per_minute": 100}
    olga = {"name": "olga", "key": OLGA, "admin": True, "min_priority": -5}
    path.write_text(yaml.safe_dump({"keys": [ana, olga]}))
    return path


@pytest.fixture
def app_of(engine: ScriptedEngine) -> Callable[[IngressConfig], Asgi]:
    model = ServedModel("m", N_CTX_SLOT, ByteTokenizer(), engine=engine)  # type: ignore[arg-type]
    return lambda access: build_api({"m": model}, access)


async def ask(
    app: Asgi, method: str, path: str, body: object = None, key: str | None = None, query: str = ""
) -> Answer:
    headers = {"content_type": "application/json"} | ({} if key is None else {"x_api_key": key})
    answer = Answer(app, method, path, query, **headers)
    if body is not None:
        answer.body(body)
    await answer.done
    return answer


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("POST", CHAT, None, 401),
        ("POST", CHAT, "wrong", 401),
        ("POST", "/nowhere", ANA, 404),
        ("POST", "/v1/models", ANA, 405),
        ("POST", "/health", None, 405),
        ("GET", "/health", None, 200),
        ("GET", "/v1/models", ANA, 200),
        ("DELETE", CHAT, ANA, 405),
    ],
)
async def test_who_is_refused_or_asks_without_a_body_is_answered_before_one_comes(
    app_of: Callable[[IngressConfig], Asgi],
    keys: Path,
    method: str,
    path: str,
    key: str,
    status: int,
) -> None:
    answer = await ask(app_of(IngressConfig(api_key_file=keys)), method, path, key=key)
    assert (await answer.status(), answer.n_asked) == (status, 0)


async def test_requests_count_before_their_bodies_come(
    app_of: Callable[[IngressConfig], Asgi], keys: Path
) -> None:
    app = app_of(IngressConfig(api_key_file=keys))
    headers = {"content_type": "application/json", "x_api_key": ANA}
    slow = [Answer(app, "POST", CHAT, **headers) for _ in range(2)]
    for one in slow:
        await reading(one)
    third = await ask(app, "POST", CHAT, key=ANA)
    assert (await third.status(), third.n_asked) == (429, 0)
    assert third.headers[b"retry-after"] == b"1"
    other = await ask(app, "POST", CHAT, chat(), OLGA)
    assert await other.status() == 200
    slow[0].pieces.put_nowait({"type": "http.disconnect"})
    await slow[0].done
    assert await (await ask(app, "POST", CHAT, chat(), ANA)).status() == 200
    slow[1].body(chat())
    assert await slow[1].status() == 200


async def test_beside_slow_bodies_others_are_answered(
    app_of: Callable[[IngressConfig], Asgi], engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each address is a client; the ones that are ended hear it, and that the connection is closed."""
    monkeypatch.setattr(BodyLimits, "of", lambda _: BodyLimits(max_open=5))
    app = app_of(IngressConfig(allow_anonymous=True))
    headers = {"content_type": "application/json"}
    early = Answer(app, "POST", CHAT, peer="10.0.0.2", **headers)
    await reading(early)
    slow = [Answer(app, "POST", CHAT, peer="10.0.0.1", **headers) for _ in range(100)]
    for one in slow[-4:]:
        await reading(one)
    honest = Answer(app, "POST", CHAT, peer="10.0.0.3", **headers)
    honest.body(chat())
    early.body(chat())
    assert (await honest.status(), await early.status()) == (200, 200)
    ended: list[Answer] = []
    async with asyncio.timeout(10):
        while len(ended) < 97:  # three are left, beside early and honest
            await asyncio.sleep(0)
            ended = [one for one in slow if one.done.done()]
    assert len(ended) == 97
    for one in ended:
        assert (await one.json())["error"]["code"] == "rate_limit_exceeded"
        assert (one.headers[b"connection"], one.headers[b"retry-after"]) == (b"close", b"1")
    assert len(engine.requests) == 2
    for one in slow:
        one.pieces.put_nowait({"type": "http.disconnect"})
        await one.done


@pytest.mark.parametrize(
    ("failure", "refunded"),
    [
        (QueueFullError("full", 1), True),
        (EngineUnavailableError("none is up"), True),
        (DecodeError("no"), False),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
async def test_refused_requests_use_no_tokens(
    app_of: Callable[[IngressConfig], Asgi],
    engine: ScriptedEngine,
    keys: Path,
    path: str,
    failure: CorralError,
    refunded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_app.server.usage.accounts.RETRY_S", 0)  # nobody has to wait
    app = app_of(IngressConfig(api_key_file=keys))
    body = {"prompt": "x" * 60} if path == COMPLETIONS else {"input": "x" * 60}
    script, engine.script, engine.refusal = engine.script, [failure], failure
    statuses = [await (await ask(app, "POST", path, body, ANA)).status() for _ in range(3)]
    assert statuses == ([failure.status] * 3 if refunded else [500, 429, 429])
    engine.script, engine.refusal = script, None
    answer = await ask(app, "POST", path, body, ANA)
    assert await answer.status() == (200 if refunded else 429)
    assert await (await ask(app, "POST", path, body, ANA)).status() == 429, "100 are 60 and 40"


async def test_who_comes_back_at_once_is_held_up_but_for_large_bodies(
    app_of: Callable[[IngressConfig], Asgi],
    engine: ScriptedEngine,
    keys: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auth, "HOLD_S", 3600)
    monkeypatch.setattr(auth, "MOST_HELD", 1)
    app = app_of(IngressConfig(api_key_file=keys))
    body = {"prompt": "x"}
    full = QueueFullError("full", 1)
    script, engine.script, engine.refusal = engine.script, [full], full
    assert await (await ask(app, "POST", COMPLETIONS, body, OLGA)).status() == 429
    engine.script, engine.refusal = script, None
    headers = {"content_type": "application/json", "x_api_key": OLGA, "content_length": "20"}
    held = Answer(app, "POST", COMPLETIONS, **headers)
    large = headers | {"content_length": str(auth.MOST_HELD_BYTES + 1)}
    assert await Answer(app, "POST", COMPLETIONS, **large).status() == 429
    assert await (await ask(app, "POST", COMPLETIONS, body, ANA)).status() == 200
    assert await Answer(app, "POST", COMPLETIONS, **headers).status() == 429, "one too many to hold"
    assert not held.done.done()
    held.done.cancel()
    await asyncio.wait([held.done])
    again = Answer(app, "POST", COMPLETIONS, **headers)
    await asyncio.wait([again.done], timeout=0.01)
    assert not again.done.done(), "there is room to hold this one"
    again.done.cancel()


async def test_an_answer_opens_the_door_again(
    app_of: Callable[[IngressConfig], Asgi], engine: ScriptedEngine, keys: Path
) -> None:
    app = app_of(IngressConfig(api_key_file=keys))
    full = QueueFullError("full", 1)
    script, engine.script, engine.refusal = engine.script, [full], full
    slow = Answer(app, "POST", COMPLETIONS, content_type="application/json", x_api_key=OLGA)
    await reading(slow)
    assert await (await ask(app, "POST", COMPLETIONS, {"prompt": "x"}, OLGA)).status() == 429
    engine.script, engine.refusal = script, None
    slow.body({"prompt": "x"})
    assert await slow.status() == 200
    assert await (await ask(app, "POST", COMPLETIONS, {"prompt": "x"}, OLGA)).status() == 200


async def test_a_text_plain_post_of_another_sites_page_reaches_no_engine(
    app_of: Callable[[IngressConfig], Asgi], engine: ScriptedEngine
) -> None:
    headers = {"content_type": "text/plain", "host": "localhost:8000"}
    headers |= {"origin": "https://evil.example", "sec_fetch_site": "cross-site"}
    answer = Answer(app_of(IngressConfig()), "POST", CHAT, **headers)
    assert (await answer.json())["error"]["code"] == "cross_site_request"
    assert (await answer.status(), answer.n_asked) == (403, 0)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("key", "priority", "status"),
    [(ANA, 0, 200), (ANA, 7, 200), (ANA, -1, 403), (OLGA, -5, 200), (OLGA, -6, 403)],
)
async def test_a_keys_priorities(
    app_of: Callable[[IngressConfig], Asgi],
    engine: ScriptedEngine,
    keys: Path,
    key: str,
    priority: int,
    status: int,
) -> None:
    answer = await ask(
        app_of(IngressConfig(api_key_file=keys)), "POST", CHAT, chat(priority=priority), key
    )
    assert await answer.status() == status
    assert [request.priority for request in engine.requests] == [priority] * (status == 200)
    if status == 403:
        error = (await answer.json())["error"]
        assert (error["code"], error["param"]) == ("permission_denied", "priority")


@pytest.mark.parametrize(
    ("access", "status"), [(IngressConfig(), 200), (IngressConfig(allow_anonymous=True), 403)]
)
async def test_without_keys_operators_are_on_their_own_machine(
    app_of: Callable[[IngressConfig], Asgi], access: IngressConfig, status: int
) -> None:
    app = app_of(access)
    erased = await ask(app, "POST", "/slots/0", key=None, query="action=erase", body={})
    assert await erased.status() == status
    assert await (await ask(app, "POST", CHAT, chat(priority=-9))).status() == status
    assert await (await ask(app, "POST", CHAT, chat(priority=1))).status() == 200


@pytest.mark.parametrize(("key", "status"), [(ANA, 403), (OLGA, 200)])
async def test_with_keys_admins_are_operators(
    app_of: Callable[[IngressConfig], Asgi],
    engine: ScriptedEngine,
    keys: Path,
    key: str,
    status: int,
) -> None:
    app = app_of(IngressConfig(api_key_file=keys))
    for path, query, body in [
        ("/slots/0", "action=save", {"filename": "a"}),
        ("/slots/0", "action=restore", {"filename": "a"}),
        ("/slots/0", "action=erase", {}),
        ("/lora-adapters", "", []),
    ]:
        answer = await ask(app, "POST", path, body, key, query)
        assert await answer.status() == status
        if status == 403:
            error = (await answer.json())["error"]
            assert error["code"] == "permission_denied"
            assert "admin: true" in error["message"]
    assert len(engine.slot_actions) == (3 if status == 200 else 0)


async def test_what_is_told_of_others(
    app_of: Callable[[IngressConfig], Asgi], engine: ScriptedEngine, keys: Path
) -> None:
    engine.records = [RequestRecord("cmpl-1", "web-1", "somebody", "decode")]
    app = app_of(IngressConfig(api_key_file=keys))

    async def told(path: str, key: str) -> Any:
        return await (await ask(app, "GET", path, key=key)).json()

    whole, part = await told("/slots", OLGA), await told("/slots", ANA)
    assert [slot["id_task"] for slot in whole] == [None, "cmpl-1"]
    assert set(part[1]) == {"id", "replica_id", "n_ctx", "speculative", "is_processing"}
    assert [slot["is_processing"] for slot in part] == [False, True]
    whole, part = await told("/v1/stats", OLGA), await told("/v1/stats", ANA)
    (whole,), (part,) = (one["models"][0]["replicas"] for one in (whole, part))
    assert "cmpl-1" in json.dumps(whole)
    assert part["engine"]["slots"][1] == {"id": 1, "state": "decode"}
    assert part["engine"] | {"slots": 0} == whole["engine"] | {"slots": 0}
    assert (await told("/v1/requests/web-1", OLGA))["sequences"][0]["id"] == "cmpl-1"
    assert (await told("/v1/requests/web-1", ANA))["error"]["code"] == "request_not_found"
    assert (await told("/props", OLGA))["model_path"] == str(ByteModelFile.path)
    assert (await told("/props", ANA))["model_path"] == ByteModelFile.path.name
    for key, may, status in ((OLGA, True, 200), (ANA, False, 403)):
        assert (await told("/props", key))["endpoint_props"] is may
        assert await (await ask(app, "POST", "/props", {}, key)).status() == status


def test_a_view_without_requests() -> None:
    def view(lane: list[Any], request_id: str | None) -> dict[str, Any]:
        replica = {"running": 1, "slots": {"0": lane}, "requests": {"0": request_id}}
        return {"at": 1, "models": {}, "replicas": {"r1": replica}, "events": {}}

    before = without_requests(view(["prefill", 5, 6, 0, 9], "cmpl-1"))
    assert before["replicas"]["r1"] == {
        "running": 1,
        "slots": {"0": ["prefill", 0, 0, 0, 0]},
        "requests": {"0": None},
    }
    same = without_requests(view(["prefill", 5, 9, 0, 6], "cmpl-1"))
    assert difference(before, same) == {}
    after = without_requests(view(["decode", 5, 15, 1, 0], "cmpl-1"))
    assert merged(before, difference(before, after)) == after
    assert without_requests({}) == {}


async def test_embeddings_that_were_computed_stay_charged_whatever_becomes_of_the_answer(
    app_of: Callable[[IngressConfig], Asgi], keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise QueueFullError("Too many large requests are being read.", 10)

    monkeypatch.setattr(embeddings, "openai_answer", refuse)
    app, body = app_of(IngressConfig(api_key_file=keys)), {"input": "x" * 60}
    refused = await ask(app, "POST", "/v1/embeddings", body, ANA)
    assert await refused.status() == 429
    monkeypatch.undo()
    assert await (await ask(app, "POST", "/v1/embeddings", body, ANA)).status() == 429

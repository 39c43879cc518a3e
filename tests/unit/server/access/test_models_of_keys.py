"""The models that a key may use: every route refuses the others, and no list names them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI

from serve_app.apis.llama_server import routes as llama_routes
from serve_app.apis.page import broadcaster
from serve_app.base.values.adapters import AdapterUse
from serve_app.base.values.replicas import ReplicaStats
from serve_app.config.schema import BatchConfig, IngressConfig
from serve_app.server.access.auth import BATCH_LINE
from serve_app.server.http.request_context import Caller
from serve_app.server.model_registry import Answers, ServedModel
from tests.doubles.api import build_api
from tests.unit.apis.page.test_snapshot import replica
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine, chat
from tests.unit.server.test_model_control import Scene

ANA, OPERATOR, ROOT = (
    "ana-secret-0123456789",
    "operator-secret-0123456789",
    "root-secret-0123456789",
)
"""Two keys for `open` alone, and one for all models."""
SECRET, ALIAS = "classified", "codename"
NAMES = [SECRET, ALIAS, f"{SECRET}:latest", f"library/{SECRET.upper()}", f"{SECRET}:tuned"]
NAMES += [f"{ALIAS}:tuned", "open:tuned"]
"""Names of what they may not use: a model that is the default, and adapters."""
_CHAT = chat()
_TEXT = {"prompt": "x"}
_RANKED = {"query": "a", "documents": ["b"]}
_FORM: dict[str, Any] = {"files": {"file": ("a.wav", b"RIFF")}}
BODIES: dict[str, dict[str, Any]] = {
    "POST /v1/completions": _TEXT,
    "POST /chat/completions": _CHAT,
    "POST /v1/chat/completions": _CHAT,
    "POST /chat/completions/input_tokens": _CHAT,
    "POST /v1/chat/completions/input_tokens": _CHAT,
    "POST /v1/chat/completions/render": _CHAT,
    "POST /v1/completions/render": _TEXT,
    "POST /v1/responses/render": {"input": "x"},
    "POST /completions": _TEXT,
    "POST /completion": _TEXT,
    "POST /infill": {"input_prefix": "a", "input_suffix": "b"},
    "POST /tokenize": {"content": "x"},
    "POST /detokenize": {"tokens": [65]},
    "POST /apply-template": _CHAT,
    "POST /v1/messages": _CHAT | {"max_tokens": 4},
    "POST /v1/messages/count_tokens": _CHAT,
    "POST /responses": {"input": "x"},
    "POST /v1/responses": {"input": "x"},
    "POST /responses/input_tokens": {"input": "x"},
    "POST /v1/responses/input_tokens": {"input": "x"},
    "POST /v2/embed": {"texts": ["x"], "input_type": "search_query"},
    "POST /v1/embeddings": {"input": "x"},
    "POST /embeddings": {"input": "x"},
    "POST /embedding": {"input": "x"},
    "POST /embed": {"inputs": "x"},
    "POST /": {"inputs": "x"},
    "POST /classify": {"input": "x"},
    "POST /v1/classify": {"input": "x"},
    "POST /reranking": _RANKED,
    "POST /rerank": _RANKED,
    "POST /v2/rerank": _RANKED,
    "POST /v1/reranking": _RANKED,
    "POST /v1/rerank": _RANKED,
    "POST /score": {"text_1": "a", "text_2": "b"},
    "POST /v1/score": {"text_1": "a", "text_2": "b"},
    "POST /api/chat": _CHAT,
    "POST /api/generate": {},  # loads the model
    "POST /api/embed": {"input": []},
    "POST /api/embeddings": {},
    "POST /api/show": {},
}
"""Bodies without `model` of the routes that take one there, or the default model."""
QUERIES = {
    "GET /slots": "",
    "GET /props": "",
    "GET /info": "",
    "GET /tokenizer_info": "",
    "GET /metrics": "",
    "GET /lora-adapters": "",
    "POST /slots/{id_slot}": "action=erase",
    "POST /lora-adapters": "",
}
"""Those that take it in the query."""
REQUIRED = {
    "POST /models/load": ["model"],
    "POST /models/unload": ["model"],
    "POST /models": ["model"],
    "POST /api/pull": ["model", "name"],
    "POST /api/copy": ["source", "destination"],
    "POST /api/create": ["model", "name", "from"],
    "DELETE /api/delete": ["model", "name"],
}
"""The fields that name a model for routes that have no default."""
_OWN = "It shows what the key has made itself, and every line of a batch is a request of its own."
_LISTS = "It lists models; the test of lists has it."
EXEMPT = {
    "GET /models": _LISTS,
    "GET /v1/models": _LISTS,
    "GET /v1/stats": _LISTS,
    "GET /v1/live": _LISTS,
    "GET /api/tags": _LISTS,
    "GET /api/ps": _LISTS,
    "GET /models/sse": _LISTS,
    "GET /v1/requests/{request_id}": "It shows the key's own requests; the test of lists has it.",
    "DELETE /v1/responses/{response_id}": "It forgets what the key has made itself.",
    "GET /v1/usage": _OWN,
    "GET /v1/organization/usage/completions": _OWN,
    "POST /v1/files": _OWN,
    "GET /v1/files": _OWN,
    "GET /v1/files/{file_id}": _OWN,
    "GET /v1/files/{file_id}/content": _OWN,
    "DELETE /v1/files/{file_id}": _OWN,
    "POST /v1/batches": _OWN,
    "GET /v1/batches": _OWN,
    "GET /v1/batches/{batch_id}": _OWN,
    "POST /v1/batches/{batch_id}/cancel": _OWN,
    "POST /props": "It changes nothing.",
    "GET /health": "It says nothing of models.",
    "GET /v1/health": "It says nothing of models.",
    "GET /health/live": "It says nothing of models.",
    "GET /livez": "It says nothing of models.",
    "GET /api/version": "It says nothing of models.",
    "GET /": "It says nothing of models.",
    "POST /api/push": "It is refused to everybody.",
    "GET /api/blobs/{digest}": "It is refused to everybody.",
    "POST /api/blobs/{digest}": "It is refused to everybody.",
    "GET /v1/keys": "It is about keys.",
    "POST /v1/keys": "It is about keys.",
    "POST /v1/keys/{name}/rotate": "It is about keys.",
    "DELETE /v1/keys/{name}": "It is about keys.",
}
OTHERWISE = {
    "GET /v1/models/{model_id:path}",
    "DELETE /models",
    "POST /audio/transcriptions",
    "POST /v1/audio/transcriptions",
    "POST /v1/audio/translations",
    "GET /v1/responses/{response_id}",
    "POST /v1/responses/{response_id}/cancel",
    "GET /v1/responses/{response_id}/input_items",
}
"""Routes with tests of their own below."""


class Engine(ScriptedEngine):
    """An engine whose replica has the name of its model."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._stats = Answers((replica(f"{model}-1"),))

    async def stats(self) -> Answers[ReplicaStats]:
        return self._stats


class Host(Scene):
    """A host whose models are all of the configuration."""

    def entry(self, model_id: str) -> Mapping[str, Any]:
        return {"source": {"path": f"/{model_id}.gguf"}}


class Server:
    """The API with keys, and with an engine for each model."""

    def __init__(self, folder: Path) -> None:
        tokenizer: Any = ByteTokenizer()
        adapters = {0: AdapterUse("tuned", 1.0), 1: AdapterUse("free", 1.0)}
        self.engines = {name: Engine(name) for name in (SECRET, "open")}
        self.engines[SECRET].is_loaded = False
        scene = Host(folder)
        scene.models.clear()
        for name, aliases in ((SECRET, (ALIAS,)), ("open", ())):
            engine = self.engines[name]
            model = ServedModel(
                name, N_CTX_SLOT, tokenizer, aliases=aliases, adapters=adapters, engine=engine
            )
            scene.models[name] = model
        self.keys = folder / "keys.yaml"
        self.entries: list[dict[str, Any]] = [
            {"name": "ana", "key": ANA, "models": ["open", "open:free"]},
            {"name": "operator", "key": OPERATOR, "models": ["open"], "admin": True},
            {"name": "root", "key": ROOT, "admin": True},
        ]
        self.write_keys()
        config = IngressConfig(api_key_file=self.keys, batch=BatchConfig(folder=folder / "batches"))
        self.api = build_api(scene.models, config, model_control=scene.control)
        transport = httpx.ASGITransport(self.api, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    def write_keys(self) -> None:
        self.keys.write_text(yaml.safe_dump({"keys": self.entries}))

    async def ask(self, method: str, path: str, key: str = ANA, **sent: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} | sent.pop("headers", {})
        return await self.client.request(method, path, headers=headers, **sent)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has reached the engine of the model that is not to be used."""
        engine = self.engines[SECRET]
        return not (engine.is_loaded or engine.requests or engine.texts or engine.slot_actions)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server(tmp_path)
    async with made.client:
        yield made


def routes(api: FastAPI) -> set[str]:
    pairs = ((route, method) for route in api.routes for method in route.methods)  # type: ignore[attr-defined]
    found = {f"{method} {route.path}" for route, method in pairs if method != "HEAD"}  # type: ignore[attr-defined]
    return found - {"GET /openapi.json"}


def check_refusal(answer: httpx.Response, server: Server, name: str | None) -> None:
    """The answer says no, and the same of a name that nobody has."""
    assert answer.status_code == 403, (answer.request.url, answer.text)
    assert "may not use" in answer.text
    if name != SECRET:
        assert SECRET not in answer.text.replace(name or "", "")
    assert server.is_untouched


async def test_every_route_is_refused_or_exempt(server: Server) -> None:
    tested = BODIES.keys() | QUERIES.keys() | REQUIRED.keys() | EXEMPT.keys() | OTHERWISE
    assert routes(server.api) == tested, "a new route needs a row in one of the tables"


@pytest.mark.parametrize("route", BODIES)
async def test_a_model_in_the_body(server: Server, route: str) -> None:
    method, path = route.split()
    for name in (None, *NAMES, "nobody's"):
        named = {} if name is None else {"model": name}
        for key in (ANA, OPERATOR):
            answer = await server.ask(method, path, key, json=BODIES[route] | named)
            check_refusal(answer, server, name)
    allowed = await server.ask(method, path, json=BODIES[route] | {"model": "open"})
    assert allowed.status_code in (200, 501), allowed.text
    free = await server.ask(method, path, json=BODIES[route] | {"model": "open:free"})
    assert free.status_code in (200, 501), free.text
    unlimited = await server.ask(method, path, ROOT, json=BODIES[route] | {"model": SECRET})
    assert unlimited.status_code == allowed.status_code


@pytest.mark.parametrize("route", QUERIES)
async def test_a_model_in_the_query(server: Server, route: str) -> None:
    method, path = route.replace("{id_slot}", "0").split()
    body: Any = None if method == "GET" else {} if "slots" in path else []
    for name in (None, *NAMES, "nobody's"):
        named = "" if name is None else f"&model={name}"
        answer = await server.ask(method, f"{path}?{QUERIES[route]}{named}", OPERATOR, json=body)
        check_refusal(answer, server, name)
        if body == {} and name is not None:
            answer = await server.ask(
                method, f"{path}?{QUERIES[route]}", OPERATOR, json={"model": name}
            )
            check_refusal(answer, server, name)
    allowed = await server.ask(method, f"{path}?{QUERIES[route]}&model=open", OPERATOR, json=body)
    assert allowed.status_code == 200, allowed.text
    assert SECRET not in allowed.text


@pytest.mark.parametrize("route", REQUIRED)
async def test_a_model_that_an_operator_adds_loads_or_removes(server: Server, route: str) -> None:
    method, path = route.split()
    for field in REQUIRED[route]:
        for name in NAMES:
            others = dict.fromkeys(REQUIRED[route], "open")
            if field == "name":
                del others["model"]
            sent = others | {field: name}
            check_refusal(await server.ask(method, path, OPERATOR, json=sent), server, name)


async def test_a_model_in_the_path_and_in_a_query_that_removes(server: Server) -> None:
    for name in (*NAMES, "nobody's"):
        check_refusal(await server.ask("GET", f"/v1/models/{name}"), server, name)
        answer = await server.ask("DELETE", f"/models?model={name}", OPERATOR)
        check_refusal(answer, server, name)
    assert (await server.ask("GET", "/v1/models/open")).json()["id"] == "open"


@pytest.mark.parametrize(
    "path", ["/audio/transcriptions", "/v1/audio/transcriptions", "/v1/audio/translations"]
)
async def test_a_model_in_a_form(server: Server, path: str) -> None:
    for name in (None, *NAMES, "nobody's"):
        fields = {} if name is None else {"model": name}
        check_refusal(await server.ask("POST", path, data=fields, **_FORM), server, name)
    assert (await server.ask("POST", path, data={"model": "open"}, **_FORM)).status_code == 501


async def test_a_response_of_a_model_that_the_key_may_use_no_more(server: Server) -> None:
    body = {"input": "x", "model": "open", "background": True}
    response_id = (await server.ask("POST", "/v1/responses", json=body)).json()["id"]
    at = f"/v1/responses/{response_id}"
    assert (await server.ask("GET", at)).status_code == 200
    server.entries[0]["models"] = ["other"]
    server.write_keys()
    behind = {"input": "y", "model": "other", "previous_response_id": response_id}
    for answer in (
        await server.ask("GET", at),
        await server.ask("GET", f"{at}?stream=true"),
        await server.ask("GET", f"{at}/input_items"),
        await server.ask("POST", f"{at}/cancel"),
        await server.ask("POST", "/v1/responses", json=behind),
    ):
        check_refusal(answer, server, None)
    assert (await server.ask("DELETE", at)).status_code == 200


async def test_adapters_by_number(server: Server) -> None:
    """A key that may use a model may not use its adapters, unless it may use these, too."""
    assert [
        one["path"] for one in (await server.ask("GET", "/lora-adapters?model=open")).json()
    ] == ["free"]
    for number, status in ((0, 400), (1, 200)):
        body = _TEXT | {"model": "open", "lora": [{"id": number, "scale": 1}]}
        assert (await server.ask("POST", "/completion", json=body)).status_code == status
    assert [[one.id for one in r.adapters] for r in server.engines["open"].requests] == [["free"]]


async def test_the_lines_of_a_batch_are_its_keys(server: Server) -> None:
    """A line is asked for in the name of the key, as any request."""
    account = server.api.state.accounts.find(ANA)

    @asynccontextmanager
    async def as_line() -> AsyncIterator[httpx.AsyncClient]:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            caller = Caller("line", account, "batch", is_operator=False, is_batch_line=True)
            await server.api({**scope, BATCH_LINE: caller}, receive, send)

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch") as client:
            yield client

    async with as_line() as client:
        for name in (None, *NAMES):
            body = _CHAT if name is None else _CHAT | {"model": name}
            check_refusal(await client.post("/v1/chat/completions", json=body), server, name)
        body = _CHAT | {"model": "open"}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_lists_show_what_the_key_may_use(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    exposition = b"".join(
        b'ray_corral_key_requests{key="%s",model="%s"} 1.0\n' % (key, model)
        for key in (b"ana", b"root")
        for model in (b"open", SECRET.encode())
    )
    monkeypatch.setattr(llama_routes, "exposition", lambda: exposition)
    monkeypatch.setattr(broadcaster, "N_FRAMES", 1)
    lists = ["/v1/models", "/models", "/api/tags", "/api/ps", "/v1/stats"]
    lists += ["/metrics?model=open", "/slots?model=open", "/props?model=open"]
    for key in (ANA, OPERATOR, ROOT):
        for path in lists:
            shown = await server.ask("GET", path, key)
            assert shown.status_code == 200
            if key != ROOT:
                assert SECRET not in shown.text, path
                assert ALIAS not in shown.text, path
            if "model=" not in path:
                assert "open" in shown.text
                assert (SECRET in shown.text) is (key == ROOT)
        live = (await server.ask("GET", "/v1/live", key)).text
        assert '"open"' in live
        assert (SECRET in live) is (key == ROOT)
    ids = [one["id"] for one in (await server.ask("GET", "/v1/models")).json()["data"]]
    assert ids == ["open", "open:free"]
    labels = {
        key: [
            line.partition("} ")[0].partition("{")[2]
            for line in (await server.ask("GET", "/metrics?model=open", key)).text.splitlines()
            if line.startswith("ray_corral_key")
        ]
        for key in (ANA, OPERATOR, ROOT)
    }
    assert labels[ANA] == ['key="ana",model="open"']
    assert labels[OPERATOR] == ['key="ana",model="open"', 'key="root",model="open"']
    assert len(labels[ROOT]) == 4

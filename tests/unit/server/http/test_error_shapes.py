"""Errors have one shape on each route, whatever is wrong, in streams too."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from serve_app.base.errors import (
    CorralError,
    DeadlineError,
    DecodeError,
    EngineClosedError,
    ModelLoadingError,
    QueueFullError,
    RateLimitError,
)
from serve_app.config.schema import IngressConfig
from tests.doubles.api import build_api
from tests.unit.server.harness import HELLO, ByteTokenizer, ScriptedEngine
from tests.unit.server.http.test_description import DESCRIPTION, OPERATIONS, POSTS, example_of

JSON = {"Content-Type": "application/json"}
EXAMPLES = {path: example_of(operation) for path, operation in POSTS}
STREAMING = [p for p, op in POSTS if "text/event-stream" in op["responses"]["200"]["content"]]
EVERY_POST = pytest.mark.parametrize("path", EXAMPLES)
EXACT = [path for path in EXAMPLES if not path.startswith("/api/")]
"""Those that refuse what they do not know; Ollama does not."""
EVERY_EXACT_POST = pytest.mark.parametrize("path", EXACT)


@pytest.fixture(autouse=True)
def ranking(tokenizer: ByteTokenizer, request: pytest.FixtureRequest) -> None:
    tokenizer.reranks = any(word in request.node.name for word in ("rerank", "score", "classify"))


def check(answer: httpx.Response, path: str, status: int, param: str | None = None) -> str:
    """The error's message, when all else is as it must be."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    return check_body(answer.json(), path, status, param)


def check_body(
    body: dict[str, Any], path: str, status: int, param: str | None = None, code: str | None = None
) -> str:
    if path.startswith("/api/"):  # Ollama's
        assert body.keys() == {"error"}
        return str(body["error"])
    message: str = body["error"].pop("message")
    assert message
    if path.startswith("/v1/messages"):
        kind = {404: "not_found_error", 500: "api_error"}.get(status, "invalid_request_error")
        assert body == {"type": "error", "error": {"type": kind}}
    else:
        if param == "model":
            code = "model_not_found"
        kind = "server_error" if status == 500 else "invalid_request_error"
        assert body == {"error": {"type": kind, "param": param, "code": code}}
    return message


NO_JSON = [
    (b"{", "truncated"),
    (b"", "Field required"),
    (b"\xff\xfe", "Not UTF-8"),
    (b"\xed\xa0\x80", "Not UTF-8"),
    (b'{"x": NaN}', "invalid character (byte 6)"),
    (b'{"x": -Infinity}', "invalid character (byte 7)"),
    (b'{"x": 1e999}', "Number out of range"),
    (b'{"x": ' + b"9" * 5000 + b"}", "out of range"),
    (b'{"x": "\\ud800 and more"}', "surrogate"),
    (b'{"\\uDFFF": 1}', "surrogate"),
    (b'{"x":' + b"[" * 101 + b"]" * 101 + b"}", "deeper than 100"),
    (b"[" * 200_000, "deeper than 100"),
]


@EVERY_POST
async def test_what_is_no_json(client: httpx.AsyncClient, path: str) -> None:
    for text, part in NO_JSON:
        assert part in check(await client.post(path, content=text, headers=JSON), path, 400)


@EVERY_POST
async def test_what_is_no_object(client: httpx.AsyncClient, path: str) -> None:
    for text in (b"[]", b"[1]", b'"text"', b"7", b"null", b"true"):
        check(await client.post(path, content=text, headers=JSON), path, 400)


@EVERY_EXACT_POST
async def test_wrong_content_type(client: httpx.AsyncClient, path: str) -> None:
    text = json.dumps(EXAMPLES[path]).encode()
    for kind in (b"text/plain", b"application/xml", b"multipart/form-data", b"\xe4"):
        answer = await client.post(path, content=text, headers={b"Content-Type": kind})
        assert "application/json" in check(answer, path, 400)


@EVERY_EXACT_POST
async def test_unknown_field(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path, json=EXAMPLES[path] | {"temprature": 1})
    assert answer.headers["x-corral-ignored"] == "temprature"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (path, name)
        for path in EXACT
        for name in sorted(
            EXAMPLES[path].keys() & {"messages", "prompt", "input", "content", "tokens"}
        )
    ],
)
async def test_missing_field(client: httpx.AsyncClient, path: str, name: str) -> None:
    body = {key: value for key, value in EXAMPLES[path].items() if key != name}
    check(await client.post(path, json=body), path, 400, name)


@EVERY_POST
async def test_unknown_model(client: httpx.AsyncClient, path: str) -> None:
    for name in ("gpt", "", "a\r\nX-Odd: 1", "\0", "../m", "é" * 3000):
        answer = await client.post(path, json=EXAMPLES[path] | {"model": name})
        check(answer, path, 404, "model")
        assert "x-odd" not in answer.headers


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, path, _ in OPERATIONS])
async def test_wrong_method(client: httpx.AsyncClient, method: str, path: str) -> None:
    answer = await client.request("PUT", path)
    check(answer, path, 405)
    assert answer.headers["allow"].lower() in DESCRIPTION["paths"][path]


@pytest.mark.parametrize(
    "path", ["/nowhere", "/v1/nowhere", "/v1/messages/nowhere", "/v1//models", "/%00", "/%ff?%ff"]
)
async def test_unknown_route(client: httpx.AsyncClient, path: str) -> None:
    assert "Not Found" in check(await client.get(path), path, 404)


@pytest.mark.parametrize("path", STREAMING)
@pytest.mark.parametrize(
    ("failure", "code", "told"),
    [
        (DecodeError("llama.cpp said no."), "decode_failed", "llama.cpp said no."),
        (ValueError("a mistake in Corral"), None, "The server failed to handle this request."),
    ],
)
async def test_a_failure_in_mid_stream_is_the_last_event(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    path: str,
    failure: Exception,
    code: str | None,
    told: str,
) -> None:
    engine.script = [HELLO[0], failure]
    answer = await client.post(path, json=EXAMPLES[path] | {"stream": True})
    assert answer.status_code == 200
    event = answer.text.removesuffix("\n\n").split("\n\n")[-1]
    name, _, data = event.rpartition("data: ")
    body = json.loads(data)
    if path.endswith("/responses"):
        assert name == "event: response.failed\n"
        fault = {"code": "server_error", "message": told}
        assert (body["response"]["status"], body["response"]["error"]) == ("failed", fault)
    else:
        assert name == ("event: error\n" if path == "/v1/messages" else "")
        assert check_body(body, path, 500, code=code) == told


def test_every_route_that_streams_is_tried() -> None:
    assert set(STREAMING) == {
        *("/v1/completions", "/v1/chat/completions", "/chat/completions"),
        *("/v1/responses", "/responses", "/v1/messages"),
        *("/completion", "/completions", "/infill"),
    }


async def test_hosts_and_queries_that_are_none(client: httpx.AsyncClient) -> None:
    transport = httpx.ASGITransport(build_api({}, IngressConfig(allow_anonymous=True)))
    async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.1") as anonymous:
        for host in (b"[", b"a\xffb", b"x:y:z"):
            answer = await anonymous.get("/nowhere?\xff", headers={b"Host": host})
            check(answer, "/nowhere", 404)
            answer = await client.get("/nowhere?\xff", headers={b"Host": host})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("kind", [RateLimitError, DeadlineError, QueueFullError, ModelLoadingError])
@pytest.mark.parametrize(
    ("wait_s", "may_retry"), [(1, True), (60, True), (61, False), (86400, False)]
)
async def test_nobody_is_asked_to_sleep_for_long(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    kind: type[RateLimitError],
    wait_s: int,
    may_retry: bool,
) -> None:
    """Packages obey waits of hours and days without a word, unless a header says not to."""
    engine.script = [kind("Later.", wait_s)]
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/api/generate", {"prompt": "x"}),
        ("/completion", {"prompt": "x", "stream": True}),
    ):
        answer = await client.post(path, json=body)
        assert answer.status_code in (429, 503)
        assert answer.headers["retry-after"] == str(wait_s)
        assert answer.headers.get("x-should-retry") == (None if may_retry else "false")


@pytest.mark.parametrize("error", [EngineClosedError("Closed."), CorralError("Failed.")])
async def test_clients_may_retry_what_says_no_wait(
    client: httpx.AsyncClient, engine: ScriptedEngine, error: CorralError
) -> None:
    engine.script = [error]
    assert "x-should-retry" not in (await client.post("/completion", json={"prompt": "x"})).headers

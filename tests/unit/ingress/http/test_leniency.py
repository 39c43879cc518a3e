"""What real clients send and expect beside the letter of the protocols."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import httpx
import pytest

from serve_app.ingress.http import sse
from serve_app.ingress.media.decoder import from_base64
from tests.unit.ingress.harness import ScriptedEngine, chat, events

BODY = json.dumps(chat()).encode()
FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    "headers", [{}, {"content-type": FORM}, {"content-type": f"{FORM}; charset=x"}]
)
async def test_json_without_its_type_as_curl_sends_it(
    client: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    answer = await client.post("/v1/chat/completions", content=BODY, headers=headers)
    assert answer.status_code == 200
    own = {"origin": "http://127.0.0.1"}
    of_page = await client.post("/v1/chat/completions", content=BODY, headers=headers | own)
    assert of_page.status_code == 400
    assert "Content-Type: application/json" in of_page.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
async def test_compressed_bodies_are_refused_as_what_they_are(
    client: httpx.AsyncClient, engine: ScriptedEngine, encoding: str
) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    body = gzip.compress(BODY)
    answer = await client.post("/v1/chat/completions", content=body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (415, "unsupported_content_encoding")
    assert encoding in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/first", "/health", "/api/tags", "/props", "/metrics"]
)
async def test_head_wherever_get_is(client: httpx.AsyncClient, path: str) -> None:
    got, head = await client.get(path), await client.head(path)
    assert (head.status_code, head.headers["content-type"]) == (200, got.headers["content-type"])
    assert head.content == b""
    endless = await client.head("/v1/live")
    assert endless.headers["content-type"].startswith("text/event-stream")
    assert (await client.head("/v1/nothing")).status_code == 404
    assert head.content == b""
    endless = await client.head("/v1/live")
    assert endless.headers["content-type"].startswith("text/event-stream")
    assert (await client.head("/v1/nothing")).status_code == 404


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("", ()),
        ([], ()),
        ([""], ()),
        (["a", "", "b"], ("a", "b")),
        ([str(n) for n in range(40)], tuple(str(n) for n in range(40))),
    ],
)
async def test_stops(
    client: httpx.AsyncClient, engine: ScriptedEngine, stop: Any, expected: tuple[str, ...]
) -> None:
    asked = {"max_tokens": 9, "messages": chat()["messages"]}
    many = [stop] if isinstance(stop, str) else stop
    for path, fields in (
        ("/v1/chat/completions", {"stop": stop}),
        ("/v1/messages", {"stop_sequences": many}),
        ("/api/chat", {"options": {"stop": stop}}),
    ):
        answer = await client.post(path, json=asked | fields)
        assert answer.status_code == 200, answer.text
        assert engine.requests[-1].sampling.stop == expected


async def test_usage_is_null_until_it_comes(client: httpx.AsyncClient) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    *chunks, last, done = events(await client.post("/v1/chat/completions", json=body))
    assert done == "[DONE]"
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["usage"]["total_tokens"] > 0
    plain = events(await client.post("/v1/chat/completions", json=chat(stream=True)))
    assert not any("usage" in chunk for chunk in plain[:-1])


def test_an_event_is_one_line_to_every_reader() -> None:
    body = {"text": "a\u2028b\u2029c\u0085d\ne"}
    (line, *rest) = sse.data(body).decode().splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == body


def test_base64_with_line_ends() -> None:
    data = bytes(range(256))
    assert from_base64(base64.encodebytes(data).decode(), "Picture 1", "messages") == data


@pytest.mark.parametrize(
    ("path", "method"), [("/v1/completions", "encode"), ("/completion", "tokenize")]
)
@pytest.mark.parametrize("prompt", ["", [""]])
async def test_an_empty_prompt_is_the_models_bos(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    method: str,
    prompt: object,
) -> None:
    tokenize = f"tests.unit.ingress.harness.ByteTokenizer.{method}"
    monkeypatch.setattr(tokenize, lambda *_: ())
    refused = await client.post(path, json={"prompt": prompt})
    assert (refused.status_code, "empty" in refused.text) == (400, True)
    monkeypatch.setattr(tokenize, lambda *_: (1,))
    assert (await client.post(path, json={"prompt": prompt})).status_code == 200
    assert engine.requests[-1].prompt == (1,)

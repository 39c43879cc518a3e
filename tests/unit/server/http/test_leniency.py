"""What real clients send and expect beside the letter of the protocols."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from typing import Any

import httpx
import pytest

from serve_app.server.http import sse
from serve_app.server.media.decoder import from_base64
from serve_app.server.workers.worker import MAX_BODY_BYTES
from tests.unit.server.harness import ScriptedEngine, chat, events

BODY = json.dumps(chat()).encode()
PACKED = gzip.compress(BODY, mtime=0)
"""The same in each process of tests: it has no time."""
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


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", PACKED),
        ("x-gzip", PACKED),
        ("GZIP", PACKED),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),
        ("identity", BODY),
    ],
)
async def test_compressed_bodies(
    client: httpx.AsyncClient, engine: ScriptedEngine, encoding: str, packed: bytes
) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    plain = await client.post("/v1/chat/completions", json=chat())
    answer = await client.post("/v1/chat/completions", content=packed, headers=headers)
    assert (answer.status_code, plain.status_code) == (200, 200)
    assert engine.requests[0].prompt == engine.requests[1].prompt


@pytest.mark.parametrize(
    ("packed", "status"),
    [
        (BODY, 400),
        (b"", 400),
        (PACKED[:-9], 400),
        (PACKED + b"more", 400),
        (gzip.compress(b" " * (MAX_BODY_BYTES + 1), mtime=0), 413),
    ],
    ids=["not packed", "empty", "cut", "more behind", "a bomb"],
)
async def test_what_cannot_be_decompressed_is_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine, packed: bytes, status: int
) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = await client.post("/v1/chat/completions", content=packed, headers=headers)
    assert answer.status_code == status, answer.text
    assert engine.requests == []


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip"])
async def test_other_compressed_bodies_are_refused_as_what_they_are(
    client: httpx.AsyncClient, engine: ScriptedEngine, encoding: str
) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    body = PACKED
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


async def test_a_name_that_any_route_lists_works_on_every_route(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    cards = (await client.get("/v1/models")).json()["data"]
    names = {name for card in cards for name in (card["id"], *card["aliases"])}
    names |= {card["name"] for card in (await client.get("/api/tags")).json()["models"]}
    assert names >= {"first", "first:latest", "org/second", "org/second:latest"}
    for name in sorted(names):
        body = {**chat(), "model": name, "max_tokens": 9, "stream": False}
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/apply-template"):
            assert (await client.post(path, json=body)).status_code == 200, (path, name)
        body = {"model": name, "input": "x", "stream": False}
        assert (await client.post("/v1/responses", json=body)).status_code == 200, name
        body |= {"prompt": "x", "content": "x"}
        for path in (
            *("/v1/completions", "/v1/embeddings", "/completion", "/tokenize"),
            *("/api/generate", "/api/embed", "/api/embeddings", "/api/show"),
        ):
            assert (await client.post(path, json=body)).status_code == 200, (path, name)
        assert (await client.get(f"/v1/models/{name}")).status_code == 200, name
        assert (await client.get("/props", params={"model": name})).status_code == 200, name


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"logprobs": False, "top_logprobs": 0}),
        ("/v1/chat/completions", {"max_tokens": 9.0, "temperature": "0.5", "stream": "false"}),
        ("/v1/completions", {"prompt": "x", "stream_options": {}}),
        ("/v1/responses", {"input": ""}),
        ("/v1/messages", {"tools": [{"name": "f"}], "max_tokens": 9}),
        ("/api/chat", {"keep_alive": "300"}),
        ("/api/chat", {"keep_alive": "-1"}),
        ("/api/generate", {"prompt": "x", "keep_alive": "1.5h"}),
    ],
)
async def test_what_asks_for_nothing_is_no_error(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, fields: dict[str, Any]
) -> None:
    answer = await client.post(path, json={**chat(), **fields})
    assert answer.status_code == 200, answer.text
    assert len(engine.requests) == 1


async def test_vllms_name_of_the_repeat_penalty(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    for fields in ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.5, "repeat_penalty": 1.2}):
        answer = await client.post("/v1/chat/completions", json={**chat(), **fields})
        assert "x-corral-ignored" not in answer.headers
        assert engine.requests[-1].sampling.repeat_penalty == 1.2


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
    tokenize = f"tests.unit.server.harness.ByteTokenizer.{method}"
    monkeypatch.setattr(tokenize, lambda *_: ())
    refused = await client.post(path, json={"prompt": prompt})
    assert (refused.status_code, "empty" in refused.text) == (400, True)
    monkeypatch.setattr(tokenize, lambda *_: (1,))
    assert (await client.post(path, json={"prompt": prompt})).status_code == 200
    assert engine.requests[-1].prompt == (1,)

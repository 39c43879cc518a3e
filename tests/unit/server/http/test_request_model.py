"""What Corral does not have is ignored and named, or with `ingress.strict`, refused."""

from __future__ import annotations

from typing import Any, ClassVar

import httpx
import pytest
from pydantic import Field

from serve_app.base.errors import InvalidRequestError
from serve_app.config.schema import IngressConfig
from serve_app.server.access.auth import MOST_IGNORED
from serve_app.server.http.request_model import RequestModel, ignored_fields, parse_body
from serve_app.server.model_registry import ServedModel
from tests.doubles.api import build_api
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine

TEXT = {"prompt": "x"}
CHAT = {"messages": [{"role": "user", "content": "x"}]}
MESSAGES = CHAT | {"max_tokens": 4}


class Part(RequestModel):
    text: str


class Body(RequestModel):
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"audio": (None,), "depth": (0,)}
    REFUSED: ClassVar[frozenset[str]] = frozenset({"audio"})
    INERT: ClassVar[frozenset[str]] = frozenset({"store"})

    parts: list[Part] = Field(default=[])
    schema_of: dict[str, Any] = Field(default={})


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        (b"{}", []),
        (b'{"a": 1, "b": null}', ["a", "b"]),
        (b'{"depth": 0, "audio": null, "store": true}', []),
        (b'{"depth": 1}', ["depth"]),
        (b'{"parts": [{"text": "a", "y": 1}, {"text": "b", "y": 2}]}', ["parts.y"]),
        (b'{"schema_of": {"any": {"thing": 1}}}', []),
    ],
)
def test_what_has_a_meaning_and_is_not_there_is_named_once(body: bytes, ignored: list[str]) -> None:
    with ignored_fields() as found:
        parse_body(Body, body)
    assert found == ignored


def test_nothing_reads_what_is_ignored() -> None:
    read = parse_body(Body, b'{"a": 1, "parts": [{"text": "b", "y": 1}]}')
    assert read.model_dump(exclude_unset=True) == {"parts": [{"text": "b"}]}


def test_what_must_not_be_lost_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'audio' is not supported, except as null"):
        parse_body(Body, b'{"audio": {}}')


def connected(engine: ScriptedEngine, *, strict: bool) -> httpx.AsyncClient:
    model = ServedModel("first", N_CTX_SLOT, ByteTokenizer(), engine=engine)  # type: ignore[arg-type]
    app = build_api({"first": model}, IngressConfig(strict=strict))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


LOOSENED = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}
"""A schema with a keyword that no grammar holds."""
REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", TEXT | {"temprature": 1}, "temprature"),
    (
        "/v1/chat/completions",
        CHAT | {"stream_options": {"x": 1}, "stream": True},
        "stream_options.x",
    ),
    ("/v1/messages", MESSAGES | {"context_management": {}, "n": 2}, "context_management, n"),
    ("/v1/responses", {"input": "x", "truncation": "auto"}, "truncation"),
    ("/v1/embeddings", {"input": "x", "y": 1}, "y"),
    ("/completion", TEXT | {"tfs_z": 0.5, "nobody": 3}, "tfs_z, nobody"),
    ("/api/chat", CHAT | {"stream": False, "options": {"x": 1}}, "options.x"),
    ("/api/embed", {"input": "x", "y": 1}, "y"),
    (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": LOOSENED}}},
        "response_format.properties.a.not",
    ),
    (
        "/v1/chat/completions",
        CHAT | {"tools": [{"function": {"name": "f", "strict": True, "parameters": LOOSENED}}]},
        "tools.f.parameters.properties.a.not",
    ),
    ("/tokenize", {"content": "x", "y\n, ü": 1}, r"y\n, \xfc"),
]


@pytest.mark.parametrize(("path", "body", "ignored"), REQUESTS)
async def test_the_answer_names_what_was_ignored(
    engine: ScriptedEngine, path: str, body: dict[str, Any], ignored: str
) -> None:
    async with connected(engine, strict=False) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-corral-ignored"] == ignored


@pytest.mark.parametrize(("path", "body", "ignored"), REQUESTS)
async def test_strict_servers_refuse_it(
    engine: ScriptedEngine, path: str, body: dict[str, Any], ignored: str
) -> None:
    async with connected(engine, strict=True) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert "Unknown parameter: " in str(answer.json()["error"])
    assert engine.requests == []


OF_ROUTERS = {
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
    "stream": False,
}
OF_CHATS = {
    **OF_ROUTERS,
    "logprobs": False,
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | OF_CHATS),
        ("/v1/completions", TEXT | OF_ROUTERS | {"echo": False}),
        ("/v1/chat/completions/render", CHAT | OF_CHATS),
        (
            "/v1/responses",
            {"input": "Hi", "store": False, "stream": None, "temperature": 1.0, "top_p": 1.0}
            | {"priority": 0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
        ),
    ],
)
async def test_strict_servers_take_what_routers_add(
    engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    """As seen of vllm-router 0.1.17 and sglang-router 0.3.2, where the client sends none of it."""
    async with connected(engine, strict=True) as client:
        assert (await client.post(path, json=body)).status_code == 200
        told = {"skip_special_tokens": False, "top_k": 3, "min_p": 0.5}
        other = {name: value for name, value in told.items() if name in body}
        refused = await client.post(path, json=body | other)
    assert refused.status_code == 400
    assert "Unknown parameter" in refused.json()["error"]["message"]


async def test_only_so_many_are_named(engine: ScriptedEngine) -> None:
    body = TEXT | {f"{i:04}" + "x" * 1000: 1 for i in range(1000)}
    async with connected(engine, strict=False) as client:
        answer = await client.post("/v1/completions", json=body)
    assert len(answer.headers["x-corral-ignored"].split(", ")) == MOST_IGNORED
    assert len(answer.headers["x-corral-ignored"]) < 4400


async def test_the_path_of_a_nested_field_is_named_whole(engine: ScriptedEngine) -> None:
    name = "a_field_that_no_server_has_ever_had_" * 2
    body = {"prompt": "Hi", "structured_outputs": {"regex": "a", name: 1}}
    async with connected(engine, strict=False) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.headers["x-corral-ignored"] == f"structured_outputs.{name}"


async def test_nothing_is_named_where_nothing_is_ignored(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json=TEXT)
    assert "x-corral-ignored" not in answer.headers


async def test_strict_servers_take_a_call_as_langchain_sends_it(engine: ScriptedEngine) -> None:
    """As seen of `@langchain/ollama` 1.3.0; Ollama's own clients tell the call's place."""
    function = {"name": "f", "arguments": {}, "index": 0}
    call = {"id": "c", "type": "function", "function": function}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    body = {"messages": [{"role": "user", "content": "Hi"}, said], "stream": False}
    async with connected(engine, strict=True) as client:
        answer = await client.post("/api/chat", json=body)
    assert answer.status_code == 200, answer.text

"""Anthropic's `thinking`, over a scripted engine and through the `anthropic` package."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import httpx2
import pytest

from serve_app.server.model_registry import ServedModel
from tests.doubles.api import build_api
from tests.unit.apis.anthropic.test_routes import THINKING, TOOL, asked, events_of
from tests.unit.server.answering.test_tools import CALL, script
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine

REASONING = "<think>\nHm,\nso.\n</think>\n\n"
BODY = {"max_tokens": 2048, "thinking": THINKING}
SHOWN = {"type": "thinking", "thinking": "Hm,\nso.", "signature": ""}


@pytest.fixture(autouse=True)
def _thinks(tokenizer: ByteTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer.thinks = True
    # As Qwen3's template does it.
    plain = tokenizer.encode_chat

    def encode_chat(
        messages: Any, tools: Any, extra: Any = None, thinks: bool = True, **_: Any
    ) -> Any:
        asks = (extra or {}).get("enable_thinking")
        return (*plain(messages, tools, {}, thinks), *f"|{asks}".encode())

    monkeypatch.setattr(tokenizer, "encode_chat", encode_chat)


@pytest.fixture
async def package(
    engine: ScriptedEngine, tokenizer: ByteTokenizer
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    model = ServedModel("first", N_CTX_SLOT, tokenizer, engine=engine)  # type: ignore[arg-type]
    transport = httpx2.ASGITransport(build_api({"first": model}))
    async with anthropic.AsyncAnthropic(
        base_url="http://127.0.0.1",
        api_key="none",
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=transport),
    ) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_a_block(
    package: anthropic.AsyncAnthropic, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = script(f"{REASONING}Hello.")
    asking: dict[str, Any] = {"model": "first", "messages": asked()["messages"], **BODY}
    if stream:
        async with package.messages.stream(**asking) as events:
            pieces = [event.thinking async for event in events if event.type == "thinking"]
            message = await events.get_final_message()
        assert len(pieces) > 1
        assert "".join(pieces) == SHOWN["thinking"]
    else:
        message = await package.messages.create(**asking)
    reasoning, text = message.content
    assert reasoning.model_dump(exclude_none=True) == SHOWN
    assert text.type == "text"
    assert text.text == "Hello."
    assert message.stop_reason == "end_turn"
    assert bytes(engine.requests[0].prompt) == b"user:Hi|True"


async def test_the_events_of_reasoning_and_a_call(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = script(f"<think>\n{CALL}</think>\nSo: {CALL}")
    body = asked(stream=True, tools=[TOOL], **BODY)
    events = events_of(await client.post("/v1/messages", json=body))
    starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [block["type"] for block in starts] == ["thinking", "text", "tool_use"]
    of_reasoning = [e for e in events if e.get("index") == 0]
    assert "".join(e["delta"].get("thinking", "") for e in of_reasoning[1:-1]) == CALL
    assert of_reasoning[-2]["delta"] == {"type": "signature_delta", "signature": ""}
    places = [e["index"] for e in events if "index" in e]
    assert places == sorted(places)
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
async def test_without_it_the_model_is_asked_not_to(
    client: httpx.AsyncClient, engine: ScriptedEngine, thinking: Any
) -> None:
    engine.script = script(f"{REASONING}Hello.")  # and does
    body = (await client.post("/v1/messages", json=asked(thinking=thinking))).json()
    assert bytes(engine.requests[0].prompt) == b"user:Hi|False"
    assert body["content"] == [{"type": "text", "text": "Hello."}]


async def test_reasoning_can_be_left_out(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = script(f"{REASONING}Hello.")
    thinking = {"type": "adaptive", "display": "omitted"}
    body = (await client.post("/v1/messages", json=asked(thinking=thinking))).json()
    assert bytes(engine.requests[0].prompt) == b"user:Hi|True"
    assert body["content"] == [{"type": "text", "text": "Hello."}]


async def test_a_model_that_cannot_think_adapts(
    client: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: ByteTokenizer
) -> None:
    tokenizer.thinks = False
    engine.script = script("Hello.")
    body = (await client.post("/v1/messages", json=asked(thinking={"type": "adaptive"}))).json()
    assert body["content"] == [{"type": "text", "text": "Hello."}]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        (BODY, "user:Hi|assistant:(Hm.)Hello.|user:Bye|True"),
        ({}, "user:Hi|assistant:(Hm.)Hello.|user:Bye|False"),
        ({"thinking": {"type": "disabled"}}, "user:Hi|assistant:Hello.|user:Bye|False"),
    ],
)
async def test_reasoning_of_earlier_turns(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any], prompt: str
) -> None:
    turn = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Hello."},
    ]
    body = asked(**fields)
    body["messages"] += [{"role": "assistant", "content": turn}, {"role": "user", "content": "Bye"}]
    response = await client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert bytes(engine.requests[0].prompt).decode() == prompt
    del body["max_tokens"]
    counted = await client.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": len(prompt)}

"""Streams over real connections: where they wait, and where they cannot go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.base.errors import EngineClosedError, EngineFailedError
from serve_app.base.values.answers import TokenDelta, TokenLogprobs
from serve_app.config.schema import IngressConfig
from serve_app.server.http.sse import fail_all
from serve_app.server.model_registry import ServedModel
from tests.doubles.api import build_api
from tests.unit.run.local.conftest import PATIENCE_S, Serve
from tests.unit.server.harness import HELLO, N_CTX_SLOT, ByteTokenizer, Script, ScriptedEngine, chat

OFTEN_S = 0.01
N_PINGS = 3
LOST = EngineFailedError("The engine's process is lost.")
BEGUN = TokenDelta("Hel", (1,))


def api_of(script: Script, interval_s: float = 0.0) -> Any:
    engine = ScriptedEngine()
    engine.script = script
    models = {"m": ServedModel("m", N_CTX_SLOT, ByteTokenizer(), engine=engine)}  # type: ignore[arg-type]
    return build_api(models, IngressConfig(sse_ping_interval_s=interval_s), breaks=True)


# -- a stream that cannot go on -------------------------------------------------------------------

Error = dict[str, Any]
STREAMS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Error]]] = {
    "/v1/chat/completions": (chat(), lambda event: event["error"]),
    "/v1/completions": ({"prompt": "x"}, lambda event: event["error"]),
    "/v1/responses": ({"input": "Hi"}, lambda event: event["response"]["error"]),
    "/v1/messages": (chat(max_tokens=9), lambda event: event["error"]),
    "/completion": ({"prompt": "x"}, lambda event: event["error"]),
    "/infill": ({"input_prefix": "x", "input_suffix": "y"}, lambda event: event["error"]),
    "/api/chat": (chat(), lambda event: {"message": event["error"]}),
    "/api/generate": ({"prompt": "x"}, lambda event: {"message": event["error"]}),
}
ENDS = (b"[DONE]", b"message_stop", b"response.completed", b'"done":true', b'"stop":true')
"""Whatever tells a client that an answer is whole."""


async def raw_answer(port: int, path: str, body: dict[str, Any]) -> bytes:
    """All bytes of the answer to a stream's request, until its connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = json.dumps(body | {"stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + sent)
    found = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    return found


def check_broken(found: bytes, error_of: Callable[[dict[str, Any]], Error], message: str) -> None:
    """Check that a stream has begun, that its last event is this error, and that it has no end."""
    assert found.startswith(b"HTTP/1.1 200")
    assert b"Hel" in found
    assert not any(end in found for end in ENDS)
    assert not found.endswith(b"0\r\n\r\n")
    last = [line for line in found.splitlines() if line.strip(b"data: ").startswith(b"{")][-1]
    assert error_of(json.loads(last.removeprefix(b"data: ")))["message"] == message


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_whose_engine_is_lost_has_an_error_and_no_end(
    path: str, serve: Serve
) -> None:
    body, error_of = STREAMS[path]
    found = await raw_answer(await serve(api_of([BEGUN, LOST])), path, body)
    check_broken(found, error_of, LOST.message)


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_that_is_given_up_has_an_error_and_no_end(path: str, serve: Serve) -> None:
    body, error_of = STREAMS[path]
    stops = EngineClosedError("The server is being stopped.")
    has_begun = asyncio.Event()
    api = api_of([BEGUN, asyncio.Event()])

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        async def look(message: Message) -> None:
            await send(message)
            if b"Hel" in message.get("body", b""):
                has_begun.set()

        await api(scope, receive, look)

    port = await serve(watched)
    reading = asyncio.create_task(raw_answer(port, path, body))
    await asyncio.wait_for(has_begun.wait(), PATIENCE_S)
    await fail_all(api.state.streams, stops, PATIENCE_S)
    for connection in serve.connections():
        connection.give_up()
    check_broken(await reading, error_of, stops.message)


@asynccontextmanager
async def openai_client(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@asynccontextmanager
async def anthropic_client(port: int) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = f"http://127.0.0.1:{port}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


MESSAGES: Any = [{"role": "user", "content": "Hi"}]
CHAT: Any = {"model": "m", "messages": MESSAGES}
RESPONSE: Any = {"model": "m", "input": "Hi"}
MESSAGE: Any = {"model": "m", "messages": MESSAGES, "max_tokens": 9}


async def each(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def chat_create(port: int) -> Any:
    async with openai_client(port) as client:
        return await each(await client.chat.completions.create(**CHAT, stream=True))


async def chat_lines(port: int) -> Any:
    async with openai_client(port) as client:
        ask = client.chat.completions.with_streaming_response.create(**CHAT, stream=True)
        async with ask as answer:
            return await each(answer.iter_lines())


async def chat_helper(port: int) -> Any:
    async with openai_client(port) as client, client.chat.completions.stream(**CHAT) as stream:
        await each(stream)
        return await stream.get_final_completion()


async def completion_create(port: int) -> Any:
    async with openai_client(port) as client:
        return await each(await client.completions.create(model="m", prompt="x", stream=True))


async def response_create(port: int) -> Any:
    async with openai_client(port) as client:
        return await each(await client.responses.create(**RESPONSE, stream=True))


async def response_helper(port: int) -> Any:
    async with openai_client(port) as client, client.responses.stream(**RESPONSE) as stream:
        return await stream.get_final_response()


async def message_create(port: int) -> Any:
    async with anthropic_client(port) as client:
        return await each(await client.messages.create(**MESSAGE, stream=True))


async def message_helper(port: int) -> Any:
    async with anthropic_client(port) as client, client.messages.stream(**MESSAGE) as stream:
        return await stream.get_final_message()


async def message_texts(port: int) -> Any:
    async with anthropic_client(port) as client, client.messages.stream(**MESSAGE) as stream:
        return "".join(await each(stream.text_stream))


WAYS: tuple[Callable[[int], Awaitable[Any]], ...] = (
    *(chat_create, chat_lines, chat_helper, completion_create, response_create),
    *(response_helper, message_create, message_helper, message_texts),
)
"""The ways in which openai's and anthropic's packages read streams."""


@pytest.mark.parametrize("read", WAYS)
async def test_no_way_of_reading_takes_half_an_answer_for_the_whole(
    read: Callable[[int], Awaitable[Any]], serve: Serve
) -> None:
    port = await serve(api_of([BEGUN, LOST]))
    with pytest.raises((openai.APIError, anthropic.APIError, httpx2.RemoteProtocolError)):
        await asyncio.wait_for(read(port), PATIENCE_S)


# -- a stream that waits --------------------------------------------------------------------------


def waiting(n_pings: int = N_PINGS) -> tuple[ASGIApp, list[bytes]]:
    """The API over an engine that waits before its first token and before its last, until its client was
    sent so many pings each time; and the pieces that were sent."""
    gates = asyncio.Event(), asyncio.Event()
    api, pieces = api_of([gates[0], HELLO[0], gates[1], *HELLO[1:]], OFTEN_S), list[bytes]()

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        async def look(message: Message) -> None:
            await send(message)
            if piece := message.get("body", b""):
                pieces.append(piece)
            n_begun = any(b"Hel" in piece for piece in pieces)
            if len(pieces) > (1 + n_begun) * (n_pings + 1):
                gates[n_begun].set()

        await api(scope, receive, look)

    return counted, pieces


@pytest.mark.parametrize("read", WAYS)
async def test_pings_change_nothing_in_what_clients_assemble(
    read: Callable[[int], Awaitable[Any]], serve: Serve
) -> None:
    app, pieces = waiting()
    found = await asyncio.wait_for(read(await serve(app)), PATIENCE_S)
    assert len(pieces) >= 2 * N_PINGS
    assert assembled(found) == "Hello"


def assembled(found: Any) -> str:
    """The text of what a client has read."""
    match found:
        case str():
            return found
        case openai.types.chat.ChatCompletion():
            (choice,) = found.choices
            assert choice.finish_reason == "stop"
            return str(choice.message.content)
        case openai.types.responses.Response():
            assert found.status == "completed"
            return found.output_text
        case anthropic.types.Message():
            assert found.stop_reason == "end_turn"
            return "".join(block.text for block in found.content if block.type == "text")
    return "".join(map(text_of, found))


def text_of(event: Any) -> str:
    """The text of an event, or of a line."""
    if isinstance(event, str):
        body = json.loads(event[6:]) if event.startswith("data: {") else {"choices": []}
        return "".join(c["delta"].get("content") or "" for c in body["choices"])
    if hasattr(event, "choices"):
        texts = [c.text if hasattr(c, "text") else c.delta.content for c in event.choices]
        return "".join(filter(None, texts))
    if event.type == "response.output_text.delta":
        return str(event.delta)
    return str(event.delta.text) if event.type == "content_block_delta" else ""


async def test_several_answers_with_log_probabilities_and_usage_are_assembled(serve: Serve) -> None:
    """A ping is of an answer that runs: one that has ended stays as it is."""
    gate = asyncio.Event()
    deltas = [replace(d, logprobs=(TokenLogprobs(-1.0, ()),) * len(d.token_ids)) for d in HELLO]
    api = api_of(deltas, OFTEN_S)
    api.state.models["m"].engine.scripts = [[*deltas], [deltas[0], gate, *deltas[1:]]]
    n_pieces = 0

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        async def look(message: Message) -> None:
            nonlocal n_pieces
            await send(message)
            n_pieces += 1
            if n_pieces > 12:
                gate.set()

        await api(scope, receive, look)

    options: Any = {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}}
    async with (
        openai_client(await serve(counted)) as client,
        client.chat.completions.stream(**CHAT, **options) as stream,
    ):
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
        whole = await stream.get_final_completion()
    assert [choice.message.content for choice in whole.choices] == ["Hello", "Hello"]
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop"]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 4
    ended = dict.fromkeys((0, 1), False)
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        assert not ended[choice.index]
        ended[choice.index] = choice.finish_reason is not None
    assert ended == {0: True, 1: True}

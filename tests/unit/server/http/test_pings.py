"""Streams that are silent for long send pings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest
from starlette.types import Message

from serve_app.base.errors import DecodeError, EngineFailedError
from serve_app.base.values.answers import Accepted, TokenDelta
from serve_app.base.values.requests import GenerationRequest
from serve_app.config.schema import IngressConfig
from serve_app.server.answering.answers import EventAnswer
from serve_app.server.answering.failover import unbroken
from serve_app.server.http.sse import StreamSend
from serve_app.server.model_registry import ServedModel
from tests.doubles.api import build_api
from tests.unit.server.harness import HELLO, N_CTX_SLOT, ByteTokenizer, ScriptedEngine, chat

PING = b": ping\n\n"
DEFAULT_S = 15


class Clock:
    """The running loop's time, which stands still but for this."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = asyncio.get_running_loop()
        self._now = self.loop.time()
        monkeypatch.setattr(self.loop, "time", lambda: self._now)

    async def wait(self, seconds: float) -> None:
        """So much later, all that is due has been done."""
        await self.settle()
        self._now += seconds
        await self.settle()

    async def settle(self) -> None:
        """Whatever can go on without more time has gone on."""
        for _ in range(50):
            await asyncio.sleep(0)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Client:
    """Keeps what it is sent. It takes something while it is `ready`, and nothing once it has `left`."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.ready = asyncio.Event()
        self.ready.set()
        self.left = False

    async def send(self, message: Message) -> None:
        await self.ready.wait()
        if self.left:
            raise OSError("gone")
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message.get("body", b"<head>") for message in self.messages]


START: Message = {"type": "http.response.start", "status": 200, "headers": []}
LAST: Message = {"type": "http.response.body", "body": b"", "more_body": False}


def event(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def test_a_ping_for_every_silent_interval(clock: Clock) -> None:
    client = Client()
    send = StreamSend(client.send, EventAnswer(), 10)
    await clock.wait(100)
    assert client.bodies == []  # nothing has begun
    await send(START)
    for n_pings in (1, 2, 3):
        await clock.wait(10)
        assert client.bodies == [b"<head>"] + [PING] * n_pings
    await send(LAST)
    await clock.wait(100)
    assert client.bodies[-1] == b""


async def test_no_ping_while_events_come(clock: Clock) -> None:
    client = Client()
    send = StreamSend(client.send, EventAnswer(), 10)
    await send(START)
    for i in range(8):
        await clock.wait(9)
        await send(event(b"%d" % i))
    assert client.bodies == [b"<head>", *(b"%d" % i for i in range(8))]
    await clock.wait(9)
    assert client.bodies[-1] == b"7"
    await clock.wait(1)
    assert client.bodies[-2:] == [b"7", PING]
    send.close()


async def test_events_need_no_timers_of_their_own(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(clock.loop, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            return original(*args, **kwargs)

        return call

    send = StreamSend(Client().send, EventAnswer(), 10)
    for name in ("call_later", "call_at", "create_task", "call_soon"):
        monkeypatch.setattr(clock.loop, name, counted(name))
    await send(START)
    for _ in range(1000):
        await send(event(b"x"))
    assert made == ["call_later", "call_at"]  # the one calls the other
    send.close()


async def test_no_ping_for_who_reads_slowly_and_none_within_a_message(clock: Clock) -> None:
    client = Client()
    send = StreamSend(client.send, EventAnswer(), 10)
    await send(START)
    client.ready.clear()
    sending = asyncio.create_task(send(event(b"much")))
    await clock.wait(50)
    client.ready.set()
    await sending
    assert client.bodies == [b"<head>", b"much"]
    await clock.wait(10)
    assert client.bodies[2:] == [PING]
    send.close()


async def test_an_event_waits_for_a_ping_that_is_on_its_way(clock: Clock) -> None:
    client = Client()
    send = StreamSend(client.send, EventAnswer(), 10)
    await send(START)
    client.ready.clear()
    await clock.wait(10)
    sending = asyncio.create_task(send(LAST))
    await clock.settle()
    client.ready.set()
    await sending
    assert client.bodies == [b"<head>", PING, b""]


async def test_a_client_that_has_left_ends_no_more_than_its_stream(clock: Clock) -> None:
    client = Client()
    send = StreamSend(client.send, EventAnswer(), 10)
    await send(START)
    client.left = True
    await clock.wait(10)
    with pytest.raises(OSError, match="gone"):
        await send(event(b"x"))
    send.close()


# -- through the API ------------------------------------------------------------------------------

NOTHING: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
STREAMS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/chat/completions", chat(), {"choices": [NOTHING | {"delta": {}}]}),
    ("/v1/completions", {"prompt": "x"}, {"choices": [NOTHING | {"text": ""}]}),
    ("/v1/responses", {"input": "Hi"}, {"type": "response.in_progress"}),
    ("/v1/messages", chat(max_tokens=9), {"type": "ping"}),
    ("/completion", {"prompt": "x"}, {"index": 0, "content": "", "tokens": [], "stop": False}),
    ("/infill", {"input_prefix": "x", "input_suffix": "y"}, {"content": "", "stop": False}),
    ("/api/chat", chat(), {"message": {"role": "assistant", "content": ""}, "done": False}),
    ("/api/generate", {"prompt": "x"}, {"response": "", "done": False}),
]
"""What is streamed, and what goes where nothing comes: data that clients count, and that change nothing."""


def read_events(text: str) -> list[dict[str, Any]]:
    """The data of server-sent events, or of lines."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


class Stream:
    """A request's answer as it comes, over ASGI."""

    def __init__(self, engine: Any, path: str, body: dict[str, Any]) -> None:
        models = {"m": ServedModel("m", N_CTX_SLOT, ByteTokenizer(), engine=engine)}  # type: ignore[arg-type]
        self._app = build_api(models, IngressConfig(sse_ping_interval_s=DEFAULT_S))
        self._request = httpx.Request(
            "POST", f"http://127.0.0.1{path}", json={**body, "stream": True}
        )
        self._client = Client()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        request = self._request
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "headers": [(k.lower(), v) for k, v in request.headers.raw],
            "scheme": "http",
            "path": request.url.path,
            "raw_path": request.url.raw_path,
            "query_string": b"",
            "root_path": "",
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
        }
        given = [{"type": "http.request", "body": request.content, "more_body": False}]

        async def receive() -> Message:
            if not given:
                await asyncio.Event().wait()
            return given.pop()

        await self._app(scope, receive, self._client.send)

    @property
    def status(self) -> int | None:
        """None before the headers."""
        return self._client.messages[0]["status"] if self._client.messages else None

    @property
    def text(self) -> str:
        return b"".join(self._client.bodies[1:]).decode()

    async def leave(self) -> None:
        """As Serve does it when the client has left."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def whole(self) -> str:
        await self._task
        return self.text


@pytest.mark.parametrize(("path", "body", "waits"), STREAMS)
@pytest.mark.parametrize(("asked", "interval_s"), [({}, DEFAULT_S), ({"sse_ping_interval": 2}, 2)])
async def test_every_stream_has_its_headers_when_it_is_accepted_and_pings(
    clock: Clock,
    path: str,
    body: dict[str, Any],
    waits: dict[str, Any],
    asked: dict[str, Any],
    interval_s: int,
) -> None:
    engine, token, end = ScriptedEngine(), asyncio.Event(), asyncio.Event()
    engine.script = [token, HELLO[0], end, *HELLO[1:]]
    stream = Stream(engine, path, body | asked)
    await clock.settle()
    assert stream.status == 200
    opening = stream.text

    def check_waits(text: str, n: int) -> None:
        events = read_events(text)
        assert len(events) == n
        assert all(waits.items() <= event.items() for event in events)

    for n_pings in (1, 2):
        await clock.wait(interval_s)
        assert stream.text.startswith(opening)
        check_waits(stream.text.removeprefix(opening), n_pings)
    token.set()
    await clock.settle()
    begun = stream.text
    assert "Hel" in begun
    await clock.wait(interval_s)
    check_waits(stream.text.removeprefix(begun), 1)
    end.set()
    whole = await stream.whole()
    assert "lo" in whole.removeprefix(begun)
    numbers = [event.get("sequence_number") for event in read_events(whole)]
    assert numbers == [*range(len(numbers))] or not any(numbers)


@pytest.mark.parametrize("never", [0, -1])
async def test_pings_can_be_switched_off(clock: Clock, never: int) -> None:
    engine, token = ScriptedEngine(), asyncio.Event()
    engine.script = [token, *HELLO]
    stream = Stream(engine, "/v1/completions", {"prompt": "x", "sse_ping_interval": never})
    await clock.wait(100_000)
    assert (stream.status, stream.text) == (200, "")
    token.set()
    assert "ping" not in await stream.whole()


@pytest.mark.parametrize("value", [-2, 3601, 1.5, "soon"])
@pytest.mark.parametrize(("path", "body", "waits"), STREAMS)
async def test_intervals_are_bounded(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], waits: dict[str, Any], value: object
) -> None:
    answer = await client.post(path, json=body | {"sse_ping_interval": value})
    assert answer.status_code == 400
    assert "sse_ping_interval" in answer.text


async def test_a_failure_after_acceptance_is_an_event(clock: Clock) -> None:
    engine, failing = ScriptedEngine(), asyncio.Event()
    engine.script = [failing, DecodeError("cannot decode")]
    stream = Stream(engine, "/v1/completions", {"prompt": "x"})
    await clock.wait(DEFAULT_S)
    failing.set()
    whole = await stream.whole()
    assert stream.status == 200
    waited, failed = read_events(whole)
    assert waited["choices"] == [NOTHING | {"text": ""}]
    assert failed["error"]["code"] == "decode_failed"


async def test_nothing_is_left_of_a_client_that_leaves(clock: Clock) -> None:
    engine = ScriptedEngine()
    engine.script = [asyncio.Event()]
    before = asyncio.all_tasks()
    stream = Stream(engine, "/v1/completions", {"prompt": "x"})
    await clock.wait(DEFAULT_S)
    text = stream.text
    assert len(read_events(text)) == 1
    await stream.leave()
    await clock.wait(DEFAULT_S)
    assert stream.text == text
    assert asyncio.all_tasks() == before


class LostReplica(ScriptedEngine):
    """Its first attempt is lost after a token; it goes on after a pause."""

    def __init__(self) -> None:
        super().__init__()
        self.n_attempts = 0

    def generate(self, request: GenerationRequest) -> Any:
        return unbroken(request, self._attempt, pauses_s=(40.0,))

    async def _attempt(self, request: GenerationRequest) -> AsyncGenerator[Accepted | TokenDelta]:
        self.n_attempts += 1
        yield Accepted()
        if self.n_attempts == 1:
            yield HELLO[0]
            raise EngineFailedError("The engine replica failed (ActorDiedError).")
        for delta in HELLO[1:]:
            yield delta


async def test_pings_go_on_while_a_failover_waits(clock: Clock) -> None:
    engine = LostReplica()
    stream = Stream(engine, "/v1/completions", {"prompt": "x"})
    await clock.settle()
    begun = stream.text
    assert "Hel" in begun
    await clock.wait(DEFAULT_S)
    await clock.wait(DEFAULT_S)
    assert len(read_events(stream.text)) == len(read_events(begun)) + 2
    assert engine.n_attempts == 1
    await clock.wait(40 - 2 * DEFAULT_S)
    assert engine.n_attempts == 2
    assert (await stream.whole()).endswith("data: [DONE]\n\n")

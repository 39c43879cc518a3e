"""HTTP of a server without a proxy, over real connections."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from math import inf
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

from serve_app.run.local import http
from tests.unit.run.local.conftest import PATIENCE_S, Serve

BODY = "HTTP/1.1 is\r\nnot: a header\r\n\r\nhere"


async def connected(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection over which this was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def test_names_have_capitals_and_bodies_stay_as_they_are(serve: Serve) -> None:
    app = FastAPI()

    @app.get("/")
    def root() -> PlainTextResponse:
        return PlainTextResponse(BODY, headers={"process-start-time-unix": "a-b: c"})

    head = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    reader, writer = await connected(await serve(app), head)
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    head_text, _, body = answer.decode().partition("\r\n\r\n")
    names = [line.partition(":")[0] for line in head_text.split("\r\n")[1:]]
    assert {"Process-Start-Time-Unix", "Content-Type", "Content-Length"} <= set(names)
    assert all(name == name.title() for name in names)
    assert "Process-Start-Time-Unix: a-b: c" in head_text
    assert body == BODY


async def closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server ends the connection without an answer."""
    with suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    return True


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n"])
async def test_a_head_that_does_not_end_is_not_waited_for(
    data: bytes, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_S", 0.05)
    reader, writer = await connected(await serve(FastAPI()), data)
    assert await closed(reader)
    writer.close()


LONG = b"x" * 70_000
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
OVERSIZED = {
    "one header": b"GET /echo HTTP/1.1\r\nHost: a\r\nname: " + LONG + b"\r\n\r\n",
    "many headers": b"GET /echo HTTP/1.1\r\n" + b"name: value\r\n" * 10_000 + b"\r\n",
    "a name": b"GET /echo HTTP/1.1\r\nHost: a\r\n" + LONG + b": a\r\n\r\n",
    "the address": b"GET /echo?" + LONG + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "trailers": CHUNKED + b"1\r\na\r\n0\r\n" + b"name: value\r\n" * 10_000 + b"\r\n",
    "one trailer": CHUNKED + b"1\r\na\r\n0\r\nname: " + LONG + b"\r\n\r\n",
    "chunk extensions": CHUNKED + b"1;" + LONG + LONG + b"\r\na\r\n0\r\n\r\n",
    "a head that does not end": b"GET /echo HTTP/1.1\r\nHost: a\r\nname: " + LONG,
}
"""Requests with more than 64 KiB besides their bodies."""


def echo() -> FastAPI:
    """An application that tells the length of a body, and the trailers among the headers."""
    app = FastAPI()

    @app.api_route("/echo", methods=["GET", "POST"])
    async def answer(request: Request) -> PlainTextResponse:
        body = await request.body()
        return PlainTextResponse(f"{len(body)} bytes, trailer: {request.headers.get('late')}")

    return app


async def answer_to(
    port: int, data: bytes, piece: int = 2**20
) -> tuple[bytes, dict[str, str], bytes]:
    """The status line, the headers and the body of the only answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for start in range(0, len(data), piece):
            writer.write(data[start : start + piece])
            await writer.drain()
            await asyncio.sleep(0)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        status, *lines = head.decode().removesuffix("\r\n\r\n").split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines)
        length = int(fields["content-length"])
        return status.encode(), fields, await reader.readexactly(length)
    finally:
        writer.close()


@pytest.mark.parametrize("piece", [2**20, 1000, 1_003])
@pytest.mark.parametrize("name", OVERSIZED)
async def test_what_is_around_a_body_is_bounded_however_it_comes(
    name: str, piece: int, serve: Serve
) -> None:
    status, fields, body = await answer_to(await serve(echo()), OVERSIZED[name], piece)
    assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert json.loads(body)["error"]["code"] == "header_too_large"
    assert fields["connection"] == "close"


@pytest.mark.parametrize("piece", [2**20, 1000])
async def test_the_bound_holds_for_a_connections_second_request(piece: int, serve: Serve) -> None:
    reader, writer = await connected(await serve(echo()), b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n")
    await asyncio.wait_for(reader.readuntil(b"None"), PATIENCE_S)
    for start in range(0, len(data := OVERSIZED["one header"]), piece):
        writer.write(data[start : start + piece])
    assert b" 431 " in await asyncio.wait_for(reader.readline(), PATIENCE_S)
    writer.close()


async def test_large_requests_within_the_bounds_are_answered(serve: Serve) -> None:
    port = await serve(echo())
    head = b"GET /echo HTTP/1.1\r\nHost: a\r\nname: " + b"x" * 65_000 + b"\r\n\r\n"
    assert (await answer_to(port, head))[0] == b"HTTP/1.1 200 OK"
    crumbs = CHUNKED + b"1\r\na\r\n" * 40_000 + b"0\r\nlate: no\r\n\r\n"
    for piece in (2**20, 5_000):
        assert (await answer_to(port, crumbs, piece))[2] == b"40000 bytes, trailer: None"


async def test_what_is_no_request_gets_an_error(serve: Serve) -> None:
    status, _, body = await answer_to(await serve(echo()), b"\x16\x03\x01\r\n\r\n")
    assert status == b"HTTP/1.1 400 Bad Request"
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"


@pytest.mark.parametrize("piece", [2**20, 7, 1])
@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"Content-Length: 9\r\n", b"Upgrade: "),
        (b"Transfer-Encoding: chunked\r\n", b"4\r\nfour\r\n5\r\nfives\r\n0\r\n\r\n"),
    ],
)
@pytest.mark.parametrize("offer", [OFFER, b"Upgrade: websocket\r\nConnection: upgrade\r\n"])
async def test_an_offer_to_upgrade_is_ignored_and_the_body_is_read(
    offer: bytes, framing: bytes, body: bytes, piece: int, serve: Serve
) -> None:
    port = await serve(echo())
    post = b"POST /echo HTTP/1.1\r\nHost: a\r\n" + offer + framing + b"\r\n" + body
    assert (await answer_to(port, post, piece))[2] == b"9 bytes, trailer: None"


async def test_requests_behind_an_offer_to_upgrade_are_answered(serve: Serve) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: a\r\n" + OFFER + b"Content-Length: 4\r\n\r\nfour"
    plain = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nsix"
    reader, writer = await connected(await serve(echo()), head + head + plain + head)
    for n in (4, 4, 3, 4):
        await asyncio.wait_for(reader.readuntil(b"%d bytes, trailer: None" % n), PATIENCE_S)
    writer.close()


JAVA = """
import java.net.*; import java.net.http.*;
public class Ask {
    public static void main(String[] at) throws Exception {
        var body = HttpRequest.BodyPublishers.ofString("nine here");
        var ask = HttpRequest.newBuilder(URI.create(at[0])).POST(body).build();
        var answer = HttpClient.newHttpClient().send(ask, HttpResponse.BodyHandlers.ofString());
        System.out.print(answer.statusCode() + " " + answer.body());
    }
}
"""


@pytest.mark.skipif(shutil.which("javac") is None, reason="there is no Java compiler here")
async def test_javas_own_client_is_answered(serve: Serve, tmp_path: Path) -> None:
    """It offers HTTP/2 with each request to an http:// address (seen with Java 17.0.15)."""
    (tmp_path / "Ask.java").write_text(JAVA)
    url = f"http://127.0.0.1:{await serve(echo())}/echo"
    command = ["java", "-Xshare:auto", str(tmp_path / "Ask.java"), url]
    asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    told, _ = await asyncio.wait_for(asked.communicate(), PATIENCE_S)
    assert told == b"200 9 bytes, trailer: None"


# -- the limit of connections ---------------------------------------------------------------------

GET = b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"
Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def from_address(address: str, port: int, data: bytes) -> Wire:
    """A connection from an address of this machine, over which this was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    writer.write(data)
    return reader, writer


async def is_answered(wire: Wire) -> bool:
    line = await asyncio.wait_for(wire[0].readline(), PATIENCE_S)
    return line == b"HTTP/1.1 200 OK\r\n"


HELD = {
    "idle": GET,
    "silent": b"",
    "half a head": b"GET /echo HTTP/1.1\r\nHo",
    "half a body": POST + b"half",
    "blank lines": GET + b"\r\n\r\n",
    "an offer": b"GET /echo HTTP/1.1\r\nHost: a\r\n" + OFFER + b"\r\n",
}


@pytest.mark.parametrize("held", HELD)
async def test_newcomers_are_answered_whatever_holds_all_connections(
    held: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "most_connections", lambda: 4)
    port = await serve(echo())
    wires = [await connected(port, HELD[held]) for _ in range(4)]
    if HELD[held].startswith(GET):
        assert all([await is_answered(wire) for wire in wires])
    wires += [await connected(port, GET) for _ in range(4)]
    for wire in wires[4:]:
        assert await is_answered(wire)
    for _, writer in wires:
        writer.close()


async def test_the_longest_idle_of_the_address_with_most_ends_first(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "most_connections", lambda: 4)
    port = await serve(echo())
    addresses = ("127.0.0.2", "127.0.0.3", "127.0.0.3", "127.0.0.3", "127.0.0.4")
    wires = []
    for address in addresses[:4]:
        wires.append(await from_address(address, port, GET))
        assert await is_answered(wires[-1])
    wires.append(await from_address(addresses[4], port, GET))
    assert await is_answered(wires[4])
    await asyncio.wait_for(wires[1][0].read(), PATIENCE_S)
    assert wires[1][0].at_eof()
    for i in (0, 2, 3):
        wires[i][1].write(GET)
        await asyncio.wait_for(wires[i][0].readuntil(b"None"), PATIENCE_S)
        assert await is_answered(wires[i])
    for _, writer in wires:
        writer.close()


async def test_slow_connections_of_one_address_end_before_others_that_are_idle(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "most_connections", lambda: 4)
    app, begun = echo(), asyncio.Queue[None]()

    @app.post("/wait")
    async def wait(request: Request) -> None:
        begun.put_nowait(None)
        await request.body()

    port = await serve(app)
    slow, newcomers = list[Wire](), list[Wire]()
    for _ in range(4):
        half = POST.replace(b"/echo", b"/wait") + b"half"
        slow.append(await from_address("127.0.0.2", port, half))
        await asyncio.wait_for(begun.get(), PATIENCE_S)
    for address in ("127.0.0.3", "127.0.0.4"):
        newcomers.append(await from_address(address, port, b""))
    for wire in slow[:2]:
        assert await closed(wire[0])
    for wire in newcomers:
        wire[1].write(GET)
        assert await is_answered(wire)
    for _, writer in (*slow, *newcomers):
        writer.close()


async def test_of_many_requests_in_one_piece_the_first_are_answered_before_the_connection_ends(
    serve: Serve,
) -> None:
    reader, writer = await connected(await serve(echo()), GET * 5000)
    with suppress(ConnectionError):
        answers = b""
        while piece := await asyncio.wait_for(reader.read(2**16), PATIENCE_S):
            answers += piece
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 1 + http.MOST_PIPELINED
    assert answers.count(b"Connection: close\r\n") == 1
    writer.close()


async def test_answers_go_on_where_newcomers_of_their_address_find_no_room(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another address has more of them."""
    monkeypatch.setattr(http, "most_connections", lambda: 3)
    app, go_on, begun = echo(), asyncio.Event(), asyncio.Queue[None]()

    @app.get("/wait")
    async def wait() -> PlainTextResponse:
        begun.put_nowait(None)
        await go_on.wait()
        return PlainTextResponse("waited")

    port = await serve(app)
    ask = GET.replace(b"/echo", b"/wait")
    wires = []
    for _ in range(3):
        wires.append(await connected(port, ask))
        await asyncio.wait_for(begun.get(), PATIENCE_S)
    status, fields, body = await answer_to(port, b"")
    assert (status, fields["retry-after"]) == (b"HTTP/1.1 429 Too Many Requests", "1")
    assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
    other = await from_address("127.0.0.2", port, GET)
    assert await is_answered(other)
    assert await closed(wires[2][0])
    go_on.set()
    for wire in wires[:2]:
        assert await is_answered(wire)
    for _, writer in (*wires, other):
        writer.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def ports(serve: Serve) -> set[int]:
    """The clients' ports of the connections that are open."""
    return {one.client[1] for one in serve.connections() if one.client is not None}


class Waiting:
    """An application that echoes, that waits, and that answers at length."""

    def __init__(self) -> None:
        self.app, self.go_on = echo(), asyncio.Event()
        self.n_begun = self.n_bytes = 0
        """The answers that wait, and the bytes of the long one that were handed over."""

        @self.app.get("/wait")
        async def wait() -> PlainTextResponse:
            self.n_begun += 1
            await self.go_on.wait()
            return PlainTextResponse("waited")

        @self.app.get("/long")
        async def long() -> StreamingResponse:
            return StreamingResponse(self._parts())

    async def _parts(self) -> AsyncIterator[bytes]:
        for _ in range(512):
            yield b"x" * 2**15
            self.n_bytes += 2**15

    async def wait(self, port: int, address: str = "127.0.0.1") -> Wire:
        """A connection whose client waits for its answer."""
        n = self.n_begun
        wire = await from_address(address, port, GET.replace(b"/echo", b"/wait"))
        await until(lambda: self.n_begun > n)
        return wire


async def unread(serve: Serve, port: int) -> Wire:
    """A connection whose client reads none of its answer."""
    wire = socket.create_connection(("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=wire)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(GET.replace(b"/echo", b"/long"))
    await until(lambda: any(one.flow.write_paused for one in serve.connections()))
    return reader, writer


def port_of(wire: Wire) -> int:
    port: int = wire[1].get_extra_info("sockname")[1]
    return port


@pytest.mark.parametrize(("soon_s", "order"), [(0.0, (2, 1, 0)), (inf, (0, 1, 2))])
async def test_those_that_wait_for_long_end_by_what_they_wait_for_and_others_by_time(
    soon_s: float, order: tuple[int, ...], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads no answer is missed least, and then who asks nothing."""
    monkeypatch.setattr(http, "most_connections", lambda: 3)
    monkeypatch.setattr(http, "_SOON_S", soon_s)
    waiting = Waiting()
    port = await serve(waiting.app)
    wires = [await connected(port, POST + b"half"), await connected(port, GET)]
    assert await is_answered(wires[1])
    wires.append(await unread(serve, port))
    left = [port_of(wire) for wire in wires]
    for expected in [port_of(wires[i]) for i in order]:
        wires.append(await waiting.wait(port))
        await until(lambda: len(ports(serve)) == 3)
        assert [one for one in left if one not in ports(serve)] == [expected]
        left.remove(expected)
    for _, writer in wires:
        writer.close()


@pytest.mark.parametrize("began", [b"", GET[:9], POST, POST + b"half"])
async def test_a_newcomer_is_not_the_first_to_end(
    began: bytes, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever others do on the connections that they got before."""
    monkeypatch.setattr(http, "most_connections", lambda: 4)
    port = await serve(Waiting().app)
    wires = [await unread(serve, port), await connected(port, GET), await connected(port, b"")]
    assert await is_answered(wires[1])
    newcomer = await connected(port, began)
    await until(lambda: port_of(newcomer) in ports(serve))
    wires += [await connected(port, GET) for _ in range(3)]
    for wire in wires[3:]:
        assert await is_answered(wire)
    whole = POST + b"half here" if began.startswith(POST) else GET
    newcomer[1].write(whole.removeprefix(began))
    assert await is_answered(newcomer)
    for _, writer in (*wires, newcomer):
        writer.close()


async def test_the_address_with_most_connections_that_wait_pays_whatever_they_wait_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "most_connections", lambda: 4)
    monkeypatch.setattr(http, "_SOON_S", 0.0)
    port = await serve(echo())
    idle = await from_address("127.0.0.2", port, GET)
    assert await is_answered(idle)
    slow = [await from_address("127.0.0.3", port, POST + b"half") for _ in range(3)]
    newcomer = await from_address("127.0.0.4", port, GET)
    assert await is_answered(newcomer)
    assert await closed(slow[0][0])
    idle[1].write(GET)
    await asyncio.wait_for(idle[0].readuntil(b"None"), PATIENCE_S)
    assert await is_answered(idle)
    for _, writer in (*slow, idle, newcomer):
        writer.close()


async def test_those_that_are_refused_at_the_limit_take_few_files(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "most_connections", lambda: 2)
    monkeypatch.setattr(http, "_MOST_REFUSED", 3)
    waiting = Waiting()
    port = await serve(waiting.app)
    wires = [await waiting.wait(port), await waiting.wait(port)]
    for _ in range(5):
        refused = await connected(port, b"")
        assert b" 429 " in await asyncio.wait_for(refused[0].readline(), PATIENCE_S)
        wires.append(refused)
    await until(lambda: len(ports(serve)) == 2 + 3)
    assert ports(serve) == {port_of(wire) for wire in (*wires[:2], *wires[-3:])}
    waiting.go_on.set()
    for wire in wires[:2]:
        assert await is_answered(wire)
    for _, writer in wires:
        writer.close()


async def test_an_answer_that_nobody_reads_is_not_kept(serve: Serve) -> None:
    """By itself, Linux keeps 2.5 MB and more for a client on the same machine, by and by."""
    waiting = Waiting()
    _, writer = await unread(serve, await serve(waiting.app))
    n_bytes = n_rounds = 0
    while n_rounds < 1000:  # in which nothing more is handed over
        await asyncio.sleep(0)
        n_rounds = 0 if waiting.n_bytes > n_bytes else n_rounds + 1
        n_bytes = waiting.n_bytes
    assert 2**16 < n_bytes < 2**19
    writer.close()


async def test_the_rest_of_a_body_that_was_refused_is_read_for_a_while(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = FastAPI()

    @app.post("/")
    async def refuse() -> PlainTextResponse:
        return PlainTextResponse("no", 413)

    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n"
    port = await serve(app)
    reader, writer = await connected(port, head)
    await asyncio.wait_for(reader.readuntil(b"no"), PATIENCE_S)
    writer.write(b"x" * 300_000 + head)
    assert b"413" in await asyncio.wait_for(reader.readline(), PATIENCE_S)
    writer.close()
    monkeypatch.setattr(http, "HEAD_S", 0.05)
    reader, writer = await connected(port, head)
    await asyncio.wait_for(reader.readuntil(b"no"), PATIENCE_S)
    assert await closed(reader)
    writer.close()


EXPECTS = b"Host: a\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"


async def test_who_expects_to_go_on_gets_100_or_an_answer_that_ends_the_connection(
    serve: Serve,
) -> None:
    """Apache 2.4.71 makes a 500 of an early answer behind which the connection stays."""
    port = await serve(echo())
    status, fields, _ = await answer_to(port, b"POST /none HTTP/1.1\r\n" + EXPECTS)
    assert (status, fields["connection"]) == (b"HTTP/1.1 404 Not Found", "close")
    reader, writer = await connected(port, b"POST /echo HTTP/1.1\r\n" + EXPECTS)
    told = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    assert told == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"nine here")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    assert b"Connection: close" not in head
    writer.close()


@pytest.mark.parametrize(
    ("most_files", "most"), [(200, 100), (1024, 768), (65536, 4096), (resource.RLIM_INFINITY, 4096)]
)
def test_the_limit_of_connections_leaves_files_for_others(
    most_files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most_files, most_files))
    assert http.most_connections.__wrapped__() == most


@pytest.mark.parametrize("n_bytes", [0, 300_000])
async def test_the_request_of_a_client_that_leaves_is_cancelled(n_bytes: int, serve: Serve) -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()
    app = FastAPI()

    @app.post("/")
    async def root(request: Request) -> None:
        assert len(await request.body()) == n_bytes
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    head = f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {n_bytes}\r\n\r\n"
    _, writer = await connected(await serve(app), head.encode() + b"x" * n_bytes)
    await asyncio.wait_for(began.wait(), PATIENCE_S)
    writer.close()
    await asyncio.wait_for(cancelled.wait(), PATIENCE_S)

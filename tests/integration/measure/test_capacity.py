"""The users of `corral capacity`, who ask a server of event streams over HTTP."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from serve_app.cli.measure.capacity import UserLoad, drive
from serve_app.cli.measure.outcomes import ABORTED, COMPLETE, FAILED, REFUSED
from tests.integration.loadtests import sse_rig

N_EVENTS = 5
BUSY = UserLoad(1, mix={"batch": 1}, think_s=0.0)
"""Users who never pause, for a second."""

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[str]:
    answering = set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await answer(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        answering.add(task)
        task.add_done_callback(answering.discard)

    async with await asyncio.start_server(begin, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*answering)


async def streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await sse_rig.answer(reader, writer, N_EVENTS, 0.01, -1)


async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await sse_rig.answer(reader, writer, N_EVENTS, 0.01, 2)


async def test_users_ask_again_until_the_time_is_over() -> None:
    async with served(streams) as url:
        outcomes, wall_s = await drive(url, BUSY, 2)
    assert wall_s >= 1
    ends = Counter(outcome.end for outcome in outcomes)
    assert ends[COMPLETE] > 2
    assert ends[ABORTED] <= 2
    assert ends.keys() <= {COMPLETE, ABORTED}
    complete = [outcome for outcome in outcomes if outcome.end == COMPLETE]
    assert {(one.tokens, one.prompt_tokens, len(one.gaps_s)) for one in complete} == {
        (N_EVENTS, 7, N_EVENTS - 1)
    }
    assert all(one.ttft_s and one.ttft_s < one.wall_s for one in complete)


async def test_a_stream_that_breaks_off_has_failed() -> None:
    async with served(broken) as url:
        outcomes, _ = await drive(url, BUSY, 1)
    assert {outcome.end for outcome in outcomes} <= {FAILED, ABORTED}
    assert outcomes[0].end == FAILED
    assert outcomes[0].tokens == 2


async def test_refused_users_stay_away_as_long_as_they_should() -> None:
    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
            body = b'{"data": [{"id": "rig"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        else:
            writer.write(b"HTTP/1.1 429 No\r\nRetry-After: 9\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with served(refuses) as url:
        outcomes, _ = await drive(url, BUSY, 3)
    assert [(outcome.end, outcome.reason) for outcome in outcomes] == [(REFUSED, "429")] * 3

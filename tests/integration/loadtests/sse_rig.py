"""A server of event streams that does nothing else: what it takes to see how fast the client can read.

    python sse_rig.py PORT EVENTS PAUSE_MS [CUT]

Every POST gets a ping, and a stream of that many one-token events, with a pause after each, and its
usage; with CUT the connection breaks off after so many. GET /asked gives the bodies of all POSTs so far.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
PING = b"8\r\n: ping\n\n\r\n"
_asked: list[str] = []


def chunk(event: dict[str, object] | str) -> bytes:
    """One event as one chunk."""
    data = event if isinstance(event, str) else json.dumps(event)
    body = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(body), body)


async def answer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    n_events: int,
    pause_s: float,
    cut: int,
) -> None:
    """One request, one connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"GET"):
        models = {"data": [{"id": "rig", "n_ctx_slot": 2048}]}
        body = json.dumps(_asked if head.startswith(b"GET /asked") else models).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    else:
        length = re.search(rb"(?i)content-length: (\d+)", head)
        assert length is not None
        _asked.append((await reader.readexactly(int(length[1]))).decode())
        writer.write(CHUNKED + PING)
        token = chunk({"choices": [{"index": 0, "delta": {"content": " word"}}]})
        for i in range(n_events):
            if i == cut or writer.is_closing():
                break
            writer.write(token)
            if pause_s or i % 20 == 19:
                await writer.drain()
                await asyncio.sleep(pause_s)
        if cut < 0:
            usage = {"prompt_tokens": 7, "completion_tokens": n_events}
            writer.write(chunk({"choices": [], "usage": usage}) + chunk("[DONE]") + b"0\r\n\r\n")
    await writer.drain()
    writer.close()


async def main(port: int, n_events: int, pause_ms: float, cut: int = -1) -> None:
    """Serve until killed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer, n_events, pause_ms / 1000, cut)
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=1000)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(
        main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))
    )

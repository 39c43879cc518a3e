"""Many streams at once, whose readers are slow: whether all are complete, and the memory of each.

    python -m loadtests.load.slow_readers [--streams 2000] [--tokens 100] [--bytes-per-s 2000]

Starts `serve run` on loopback with the built-in model, as `make serve` does, but with room for as many
requests. All streams are asked for within some seconds. Each has a small receive buffer, and is read at
that rate. Prints how many were complete, and a table of the memory of the server's processes before and at
its most. The exit status is 1 if a stream was refused, cut or not complete.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from loadtests.common.benchmark import bounded, cpu_name, table, usable_cores
from loadtests.common.processes import command_line, tagged
from loadtests.common.servers import exit_on_sigterm, serve_run
from loadtests.common.streams import Reader

PARTS = {
    "Ingress": "corral:Ingress",
    "proxy": "ProxyActor",
    "haproxy": "haproxy",
    "engine": ":engine-",
}
"""Processes by what their names hold."""
BUFFER_BYTES = 4096
"""Of a reader's socket: what it does not read soon stays with the server."""
EVERY_S, SAMPLE_S = 0.5, 1.0
BEGIN_PER_S = 200
"""Streams that are asked for in a second."""
PATIENCE_S = 1200.0
MAX_WAIT_S = 86_400
"""Nobody is refused for the forecast of a wait, which is high while so many come at once."""
COMPLETE = "complete"


def main() -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.load.slow_readers", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--streams", type=bounded(1, 10_000), default=2000)
    parser.add_argument("--tokens", type=bounded(1, 1000), default=100)
    parser.add_argument("--bytes-per-s", type=bounded(100, 1_000_000), default=2000)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # servers inherit it
    model = {
        "id": "model",
        "source": {"builtin": True},
        "engine": {
            "n_slots": 16,
            "n_ctx_slot": 1024,
            "max_waiting": args.streams,
            "max_wait_s": MAX_WAIT_S,
        },
    }
    room = {"max_ongoing_requests": 2 * args.streams, "num_replicas": 1}
    with serve_run(model, deployment=room) as server:
        assert server.directory is not None
        before = memory_mib(server.directory)
        began = time.monotonic()
        ends, at_most = asyncio.run(
            _read_all(server.url, server.directory, args.streams, args.tokens, args.bytes_per_s)
        )
        took_s = time.monotonic() - began
    print(
        f"{cpu_name()}, {usable_cores()} cores; {args.streams} streams of {args.tokens} tokens, read at"
    )
    print(f"{args.bytes_per_s} bytes/s each, in {took_s:.0f} s: {dict(ends)}\n")
    print(_table(before, at_most, args.streams))
    return int(ends[COMPLETE] != args.streams)


def memory_mib(directory: Path) -> dict[str, float]:
    """Resident memory of the server's PARTS."""
    found: dict[str, float] = {}
    for pid in tagged(directory):
        line = command_line(pid)
        part = next((part for part, name in PARTS.items() if name in line), "others")
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
        found[part] = found.get(part, 0.0) + pages * resource.getpagesize() / 2**20
    return found


async def _read_all(
    url: str, directory: Path, n: int, n_tokens: int, rate: int
) -> tuple[Counter[str], dict[str, float]]:
    """How the streams ended, and the most memory that each part had."""
    async with asyncio.timeout(PATIENCE_S):
        streams = [asyncio.create_task(_stream(url, i, n_tokens, rate)) for i in range(n)]
        at_most: dict[str, float] = {}
        reading = asyncio.gather(*streams)
        while not reading.done():
            for part, mib in (await asyncio.to_thread(memory_mib, directory)).items():
                at_most[part] = max(mib, at_most.get(part, 0.0))
            await asyncio.wait([reading], timeout=SAMPLE_S)
        return Counter(reading.result()), at_most


async def _stream(url: str, number: int, n_tokens: int, rate: int) -> str:
    """COMPLETE, or what was wrong with it."""
    await asyncio.sleep(number / BEGIN_PER_S)
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    body = {
        "prompt": f"Number {number}",
        "max_tokens": n_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    sent = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with socket.socket() as wire:
        wire.setblocking(False)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        await loop.sock_connect(wire, (address.hostname, address.port))
        await loop.sock_sendall(
            wire, f"{head}Connection: close\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent
        )
        read = bytearray()
        while not read.endswith(b"0\r\n\r\n"):
            part = await loop.sock_recv(wire, max(1, round(rate * EVERY_S)))
            if not part:
                return "cut" if read.startswith(b"HTTP/1.1 200") else judged(bytes(read), n_tokens)
            read += part
            await asyncio.sleep(EVERY_S)
    return judged(bytes(read), n_tokens)


def judged(answer: bytes, n_tokens: int) -> str:
    """COMPLETE if this HTTP answer, in chunks, is a stream of so many tokens; else what it is."""
    if not answer.startswith(b"HTTP/1.1 "):
        return "no answer"
    status, content = answer[9:12].decode(), answer.partition(b"\r\n\r\n")[2]
    if status != "200":
        why = re.search(rb'"message": ?"([^"]+)"', content)
        return f"{status}: {why[1].decode()}" if why else status
    reader, chunks = Reader(), content
    while chunks:
        length, _, rest = chunks.partition(b"\r\n")
        n_bytes = int(length, 16)
        reader.feed(0.0, rest[:n_bytes])
        chunks = rest[n_bytes + 2 :] if n_bytes else b""
    found = reader.answer()
    if found.error is not None:
        return found.error
    return COMPLETE if found.tokens == n_tokens else f"{found.tokens} tokens"


def _table(before: Mapping[str, float], at_most: Mapping[str, float], n: int) -> str:
    rows = []
    for part, most in sorted(at_most.items(), key=lambda one: -one[1]):
        more = most - before.get(part, 0.0)
        rows.append((part, f"{before.get(part, 0.0):.0f}", f"{most:.0f}", f"{1024 * more / n:.0f}"))
    return table(("part", "MiB before", "MiB at most", "KiB more for each stream"), rows)


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())

"""Measures what a picture costs: who asks about it, who streams beside it, and who asks again.

    python -m loadtests.compare.pictures [--rounds 3] [--threads N] [--size 1024] [--layers N]
        [--parts alone,beside,users,bad]

The model and its projector have random weights and the shapes of SmolVLM-256M, whose encoder computes a
picture of 1,024 pixels as 17 tiles. Corral (`corral serve --cluster`) and llama-server
take turns with the same fresh pictures; whoever is not asked is stopped meanwhile. Parts:
    alone   the first token about a picture, and about the same picture again
    beside  the same beside two streams, and the gaps of these meanwhile
    users   16 users who ask Corral about one picture at once: tiles that are encoded
    bad     what Corral refuses, and how soon
"""

from __future__ import annotations

import argparse
import base64
import io
import statistics
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from loadtests.common.comparing import ratio_spread
from loadtests.common.servers import Server, exit_on_sigterm, is_healthy, running, serve_run
from loadtests.compare import llama_server
from serve_app.cli.measure.benchmark import (
    BenchmarkError,
    in_turns,
    list_of,
    number_between,
    of_each,
    percentile,
    table,
    usable_cores,
)
from serve_app.cli.measure.outcomes import Reader
from tools.gguf_file import ModelShape
from tools.random_models.model import write_random_gguf
from tools.random_models.projector import IDEFICS3_TOKENS, SHAPES, write_random_projector

CORRAL, LLAMA_SERVER = "corral", "llama-server"
SIDES = (CORRAL, LLAMA_SERVER)
PARTS = ("alone", "beside", "users", "bad")
SMOLVLM = ModelShape("random-smolvlm-256m", 30, 576, 1536, 9, 3, 64, 49280, 8192)
"""The text model's sizes; its architecture is Qwen3's."""
N_SLOTS, N_CTX_SLOT, N_USERS, N_STREAMS = 16, 2048, 16, 2
_CALM_PIECES = 8
"""Of each stream, before the picture comes."""
_TAIL_S = 2.0
"""After the picture, for gaps that are still open to end."""
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Round:
    """What one side took, in seconds; a part that was left out is empty."""

    first_s: float | None = None
    again_s: float | None = None
    beside_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    """Between two tokens of a stream, while the picture was computed."""


def picture(seed: int, size: int) -> bytes:
    """A PNG that nobody has seen."""
    colours = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)
    made = io.BytesIO()
    Image.fromarray(colours).resize((size, size), Image.Resampling.BICUBIC).save(made, "PNG")
    return made.getvalue()


def picture_url(seed: int, size: int) -> str:
    """The same as a data URL."""
    return data_url(picture(seed, size))


def data_url(data: bytes) -> str:
    """A file as a URL."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def asking(words: str, *urls: str, max_tokens: int = 1) -> dict[str, Any]:
    """The body of a chat completion."""
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": words}]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }


def first_token_s(server: Server, body: dict[str, Any]) -> float:
    """Seconds to it. Raises BenchmarkError if there is none."""
    began, reader = time.perf_counter(), Reader()
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, timeout=_TIMEOUT_S
    ) as answer:
        for read in answer.iter_raw():
            if reader.feed(time.perf_counter() - began, read):
                return time.perf_counter() - began
    raise BenchmarkError(f"no token: {reader.answer().error}")


@dataclass
class Streams:
    """Answers that go on; their tokens' times, each answer's in a list of its own."""

    times: list[list[float]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def read(self, server: Server, number: int) -> None:
        """One after the other, until it is over."""
        n = 0
        while not self.over.is_set():
            body = asking(f"Story {number}.{n}: tell it.", max_tokens=N_CTX_SLOT - 256)
            n += 1
            reader, arrivals = Reader(), list[float]()
            self.times.append(arrivals)
            with httpx.stream(
                "POST", f"{server.url}/v1/chat/completions", json=body, timeout=_TIMEOUT_S
            ) as answer:
                for read in answer.iter_raw():
                    now = time.perf_counter()
                    arrivals += [now] * reader.feed(now, read)
                    if self.over.is_set():
                        break

    def gaps_s(self, came: float, done: float) -> tuple[float, ...]:
        """Those that were open at some time between these."""
        return tuple(
            b - a for times in list(self.times) for a, b in pairwise(times) if a < done and b > came
        )


@contextmanager
def streaming(server: Server) -> Iterator[Streams]:
    """Streams that run meanwhile."""
    streams = Streams()
    with ThreadPoolExecutor(N_STREAMS) as pool:
        reading = [pool.submit(streams.read, server, i) for i in range(N_STREAMS)]
        try:
            while sum(len(times) >= _CALM_PIECES for times in streams.times) < N_STREAMS:
                for one in reading:
                    if one.done():
                        one.result()
                time.sleep(0.05)
            yield streams
        finally:
            streams.over.set()
        for one in reading:
            one.result()


def run(server: Server, settings: argparse.Namespace, number: int) -> Round:
    """One side's round."""
    found = Round()
    if "alone" in settings.parts:
        url = picture_url(2 * number, settings.size)
        first = first_token_s(server, asking("What is it?", url))
        again = first_token_s(server, asking("And of what colour is it?", url))
        found = replace(found, first_s=first, again_s=again)
    if "beside" in settings.parts:
        body = asking("What is it?", picture_url(2 * number + 1, settings.size))
        with streaming(server) as streams:
            came = time.perf_counter()
            beside = first_token_s(server, body)
            done = time.perf_counter()
            time.sleep(_TAIL_S)
            gaps = streams.gaps_s(came, done)
        found = replace(found, beside_s=beside, gaps_s=gaps)
    return found


def users(server: Server, size: int) -> str:
    """What 16 users cost who ask about one picture at once."""
    before, began = encoded_tiles(server), time.perf_counter()
    url = picture_url(10**6, size)
    bodies = [asking(f"Question {i}: what is it?", url) for i in range(N_USERS)]
    with ThreadPoolExecutor(N_USERS) as pool:
        times = list(pool.map(lambda body: first_token_s(server, body), bodies))
    n_tiles = encoded_tiles(server) - before
    return (
        f"{N_USERS} users asked about one picture at once: {n_tiles} tiles were encoded, first tokens "
        f"after {min(times):.2f} to {max(times):.2f} s, all within {time.perf_counter() - began:.2f} s."
    )


def encoded_tiles(server: Server) -> int:
    """By all replicas."""
    models = httpx.get(f"{server.url}/v1/stats").json()["models"]
    return sum(one["engine"]["pictures"]["encoded_tiles"] for one in models[0]["replicas"])


def bomb(side: int) -> bytes:
    """A PNG of few bytes and many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        whole = kind + data
        return struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))

    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((side // 8 + 1) * side))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def bad_inputs(size: int) -> dict[str, list[str]]:
    """URLs of pictures that are to be refused, by what they are."""
    good = picture(0, size)
    return {
        "truncated": [data_url(good[: len(good) // 2])],
        "bomb": [data_url(bomb(30_000))],
        "wrong type": [data_url(b"%PDF-1.7")],
        "SVG": [data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>")],
        "no base64": ["data:image/png;base64,????"],
        "50 pictures": [picture_url(0, 64)] * 50,
        "URL, private address": ["http://127.0.0.1:1/a.png"],
        "URL, metadata": ["http://169.254.169.254/latest/meta-data"],
        "URL, name of this machine": ["http://localhost:1/a.png"],
    }


def bad(server: Server, size: int) -> str:
    """What is refused, and how soon. Raises BenchmarkError if something is not."""
    rows = []
    for name, urls in bad_inputs(size).items():
        body = asking("What is it?", *urls)
        began = time.perf_counter()
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=_TIMEOUT_S)
        took_s = time.perf_counter() - began
        if answer.status_code != 400:
            raise BenchmarkError(f"{name}: {answer.status_code} {answer.text[:200]}")
        message = answer.json()["error"]["message"]
        rows.append((name, f"{took_s:.3f}", message))
    return table(("input", "400 after, s", "message"), rows)


def report(rounds: Sequence[dict[str, Round]]) -> str:
    """The table of both sides, and their ratios."""
    by_side = dict(of_each(rounds))
    rows = [_row(side, by_side) for side in by_side]
    header = (
        "server",
        "first token, s",
        "ratio",
        "again, s",
        "times sooner",
        "beside streams, s",
        "gap p99, ms",
        "longest",
    )
    return table(header, rows)


def _row(side: str, by_side: dict[str, list[Round]]) -> list[str]:
    of = by_side[side]
    row = [side, "", "", "", "", "", "", ""]
    firsts = [one.first_s for one in of if one.first_s is not None]
    agains = [one.again_s for one in of if one.again_s is not None]
    besides = [one.beside_s for one in of if one.beside_s is not None]
    gaps = [1000 * gap for one in of for gap in one.gaps_s]
    if firsts:
        theirs = [one.first_s for one in by_side[LLAMA_SERVER]]
        row[1:5] = [
            f"{statistics.median(firsts):.2f}",
            ratio_spread(firsts, theirs),
            f"{statistics.median(agains):.2f}",
            ratio_spread(firsts, agains),
        ]
    if besides:
        row[5] = f"{statistics.median(besides):.2f}"
        if gaps:
            row[6:] = [f"{percentile(gaps, 99):.0f}", f"{max(gaps):.0f}"]
    return row


@contextmanager
def both(settings: argparse.Namespace) -> Iterator[dict[str, Server]]:
    """The servers, with one model and one projector; each is stopped until it is asked."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corral-pictures-")))
        model, projector = folder / "model.gguf", folder / "projector.gguf"
        write_random_gguf(model, SMOLVLM, "q8_0", more_control=IDEFICS3_TOKENS)
        shape = SHAPES["smolvlm-256m"]
        if settings.layers is not None:
            shape = replace(shape, n_layer=settings.layers)
        write_random_projector(projector, shape, SMOLVLM.n_embd)
        program = llama_server.build(usable_cores()) / "llama-server"

        def theirs(_: Path, port: int) -> list[str | Path]:
            return [
                *(program, "--model", model, "--mmproj", projector, "--port", str(port)),
                *("--parallel", str(N_SLOTS), "--ctx-size", str(N_SLOTS * N_CTX_SLOT)),
                *("--threads", str(settings.threads)),
            ]

        engine = {
            "threads": settings.threads,
            "n_slots": N_SLOTS,
            "n_ctx_slot": N_CTX_SLOT,
            "max_stall_ms": settings.max_stall_ms,
        }
        entry = {
            "id": "model",
            "source": {"path": str(model)},
            "projector": {"path": str(projector)},
            "engine": engine,
        }
        servers = {CORRAL: stack.enter_context(serve_run(entry))}
        servers[CORRAL].pause()
        servers[LLAMA_SERVER] = stack.enter_context(running(theirs, is_healthy))
        servers[LLAMA_SERVER].pause()
        yield servers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.compare.pictures", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=number_between(1, 100), default=3)
    parser.add_argument("--threads", type=number_between(1, 1024), default=usable_cores())
    parser.add_argument(
        "--size", type=number_between(16, 2048), default=1024, help="pixels of a side"
    )
    parser.add_argument("--layers", type=number_between(1, 100), help="of the encoder; default: 12")
    parser.add_argument("--max-stall-ms", type=number_between(1, 10_000), default=250)
    parser.add_argument("--parts", type=list_of(str), default=PARTS)
    settings = parser.parse_args()
    exit_on_sigterm()
    with both(settings) as servers:

        def measure(number: int, side: str) -> Round:
            servers[side].go_on()
            try:
                found = run(servers[side], settings, number)
            finally:
                servers[side].pause()
            print(f"round {number}, {side}: {replace(found, gaps_s=())}", file=sys.stderr)
            return found

        if {"alone", "beside"} & set(settings.parts):
            print(report(in_turns(SIDES, settings.rounds, measure, warm_up=False)), flush=True)
        servers[CORRAL].go_on()
        if "users" in settings.parts:
            print(users(servers[CORRAL], settings.size), flush=True)
        if "bad" in settings.parts:
            print(bad(servers[CORRAL], settings.size))


if __name__ == "__main__":
    main()

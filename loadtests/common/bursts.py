"""Users who all ask at once: the client of the HTTP measurements.

It computes on the same cores as the server, so it does little while it measures: it notes when bytes
come, and reads what they say afterwards.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from serve_app.cli.measure.benchmark import BenchmarkError, percentile
from serve_app.cli.measure.outcomes import Reader, StreamedAnswer

TIMEOUT_S = 600.0
NO_HEADERS: Mapping[str, str] = {}
Read = tuple[float, bytes]
"""Bytes of a stream, and when they were there, in seconds from sending the request."""
FIGURES = ("tokens_per_s", "ttft_p50_s", "ttft_p95_s", "itl_p50_ms", "itl_p99_ms")


@dataclass(frozen=True, slots=True)
class Burst:
    """The results of one burst of requests."""

    answers: tuple[StreamedAnswer, ...]
    wall_s: float
    """Seconds from the first request to the last byte."""
    client_cpu_s: float
    """CPU seconds of the client in that time."""
    beside_cpu_s: float | None = None
    """CPU seconds of the server in that time, without the threads that compute; None if it is unknown."""

    @property
    def tokens(self) -> int:
        """Generated, in all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def ttft_s(self) -> list[float]:
        """Seconds to the first text, of each answer that has one."""
        return [answer.ttft_s for answer in self.answers if answer.ttft_s is not None]

    @property
    def client_share(self) -> float:
        """Of one core, what the client used."""
        return self.client_cpu_s / self.wall_s

    @property
    def beside_ms(self) -> float | None:
        """Of `beside_cpu_s`, milliseconds for each token."""
        return None if self.beside_cpu_s is None else 1000 * self.beside_cpu_s / max(1, self.tokens)

    def figures(self) -> dict[str, float]:
        """FIGURES: tokens generated per second of the burst, times to the first text over its users,
        and gaps between texts over all of them. Raises BenchmarkError if there are none."""
        gaps_s = [gap for answer in self.answers for gap in answer.gaps_s]
        if not gaps_s:
            raise BenchmarkError(f"No stream to measure: {[a.error for a in self.answers]}")
        values = (
            self.tokens / self.wall_s,
            percentile(self.ttft_s, 50),
            percentile(self.ttft_s, 95),
            1000 * percentile(gaps_s, 50),
            1000 * percentile(gaps_s, 99),
        )
        return dict(zip(FIGURES, values, strict=True))

    def raw(self) -> dict[str, Any]:
        """Everything, for JSON."""
        totals = {"tokens": self.tokens, "client_share": self.client_share}
        return asdict(self) | totals | self.figures()


def parse_answer(reads: Sequence[Read]) -> StreamedAnswer:
    """The answer in a stream that is over. Raises ValueError if an event is no JSON object."""
    reader = Reader()
    for when, read in reads:
        reader.feed(when, read)
    return reader.answer()


def random_requests(n: int, prompt_tokens: int, max_tokens: int, seed: str) -> list[dict[str, Any]]:
    """Bodies for Corral of prompts that no cache holds, each of random tokens, as many as that, and answers
    of exactly so many. The same seed gives the same ones."""
    rng = random.Random(seed)
    return [
        {
            "prompt": [rng.randrange(300, 500) for _ in range(prompt_tokens)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(n)
    ]


def run(
    url: str, requests: Sequence[Mapping[str, Any]], headers: Mapping[str, str] = NO_HEADERS
) -> Burst:
    """POST these bodies to /v1/completions, all at once, each on a connection of its own, and read the
    streams to their ends. Raises BenchmarkError if one is refused, aiohttp.ClientError if nobody is
    there, TimeoutError after TIMEOUT_S."""
    return asyncio.run(_run(url, requests, [0.0] * len(requests), _stream, headers))


def run_at(url: str, requests: Sequence[Mapping[str, Any]], at_s: Sequence[float]) -> Burst:
    """POST these bodies so many seconds from now, whatever became of others before. A refusal is an
    answer with its error. Raises as `run` does but for that."""
    return asyncio.run(_run(url, requests, at_s, _stream_or_refusal))


async def _run(
    url: str,
    requests: Sequence[Mapping[str, Any]],
    at_s: Sequence[float],
    read: Callable[
        [aiohttp.ClientSession, bytes, float], Awaitable[Sequence[Read] | StreamedAnswer]
    ],
    headers: Mapping[str, str] = NO_HEADERS,
) -> Burst:
    bodies = [json.dumps(body).encode() for body in requests]
    # llama-server closes kept-alive connections after some requests.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        asyncio.timeout(TIMEOUT_S),
        aiohttp.ClientSession(
            url, connector=connector, timeout=aiohttp.ClientTimeout(), headers=headers
        ) as session,
    ):
        cpu, start = time.process_time(), time.perf_counter()
        streams = await asyncio.gather(
            *(read(session, body, start + at) for body, at in zip(bodies, at_s, strict=True))
        )
        wall_s, client_cpu_s = time.perf_counter() - start, time.process_time() - cpu
    answers = (
        stream if isinstance(stream, StreamedAnswer) else parse_answer(stream) for stream in streams
    )
    return Burst(tuple(answers), wall_s, client_cpu_s)


async def _stream_or_refusal(
    session: aiohttp.ClientSession, body: bytes, start: float
) -> Sequence[Read] | StreamedAnswer:
    try:
        return await _stream(session, body, start)
    except BenchmarkError as error:
        return StreamedAnswer((), 0.0, 0, False, None, None, str(error))


async def _stream(session: aiohttp.ClientSession, body: bytes, start: float) -> list[Read]:
    reads: list[Read] = []
    headers = {"Content-Type": "application/json"}
    await asyncio.sleep(start - time.perf_counter())
    async with session.post("/v1/completions", data=body, headers=headers) as response:
        if response.status != 200:
            raise BenchmarkError(f"{response.status}: {await response.text()}")
        with suppress(aiohttp.ClientPayloadError):  # cut off: an answer without its end
            async for data in response.content.iter_any():
                reads.append((time.perf_counter() - start, data))
    return reads

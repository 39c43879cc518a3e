"""Measures the speed of a batch beside people who chat, and their loss by it.

    python -m loadtests.batch.behind_chats --model PATH [--users 2] [--think 3] [--seconds 60] [--rounds 3]
        [--slots 16] [--json FILE]

Starts what `corral serve --cluster` runs, with batches. Each round has three parts of that many seconds: a
batch of `/v1/batches` alone, users alone, and both. A user asks for 64 tokens behind a prompt of about 128
that nobody has sent before, reads the stream, thinks for as long as --think says, and asks again. Lines of
the batch are such requests, too, but for 32 to 96 tokens, so that they get out of step.

The parts of the day that users leave are those in which the engine computes nothing while they are
alone. The batch's part of them is its tokens/s beside the users, divided by its tokens/s alone and
by that share. Users' latencies are compared with those of the same round without the batch.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtests.common.servers import exit_on_sigterm, serve_run
from serve_app.cli.measure.benchmark import SEED, number_between, percentile, spread, table
from serve_app.cli.measure.outcomes import Reader, StreamedAnswer

N_WORDS, N_GENERATED = 64, 64
N_LINES = 4000
"""More than any part of a round can answer."""
_SETTLE_S = 3.0
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Users:
    """The users' figures of one part."""

    ttft_p95_s: float
    gap_p99_s: float
    answers: int


@dataclass(frozen=True, slots=True)
class Round:
    """One round; tokens are generated ones."""

    batch_alone: float
    """Tokens a second."""
    batch_beside: float
    left: float
    """The share of the time in which the engine computed nothing for users alone."""
    alone: Users
    beside: Users

    @property
    def share(self) -> float:
        """Of what users leave, what the batch got."""
        return self.batch_beside / self.batch_alone / self.left


class Clients:
    """Asks one server, with prompts that are all different behind so many words that are not."""

    def __init__(self, url: str, n_shared_words: int = 0) -> None:
        shared = random.Random(-SEED)
        self._shared = [f"{shared.randrange(10**4):04}" for _ in range(n_shared_words)]
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_S)
        self._words = random.Random(SEED)
        self._lock = threading.Lock()

    def body(self) -> dict[str, Any]:
        """A request that nobody has sent before."""
        with self._lock:
            words = [f"{self._words.randrange(10**4):04}" for _ in range(N_WORDS // 2)]
        prompt = " ".join([*self._shared, *words])
        return {"prompt": prompt, "max_tokens": N_GENERATED, "ignore_eos": True}

    def line(self) -> dict[str, Any]:
        """Such a request, for more or fewer tokens."""
        body = self.body()
        with self._lock:
            n_tokens = self._words.randint(N_GENERATED // 2, 3 * N_GENERATED // 2)
        return body | {"max_tokens": n_tokens}

    def engine(self) -> dict[str, Any]:
        """The only engine's statistics."""
        stats = self._http.get("/v1/stats").raise_for_status().json()
        (replica,) = stats["models"][0]["replicas"]
        found: dict[str, Any] = replica["engine"]
        return found

    @contextmanager
    def batch(self) -> Iterator[None]:
        """A batch that is computed meanwhile, and is cancelled and quiet afterwards."""
        lines = (
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": self.line()}
            for i in range(N_LINES)
        )
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        upload = {"file": ("lines.jsonl", text)}
        file = self._post("/v1/files", files=upload, data={"purpose": "batch"})
        asked = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        made = self._post("/v1/batches", json=asked)
        while not self._busy():
            time.sleep(0.1)
        try:
            yield
        finally:
            self._post(f"/v1/batches/{made['id']}/cancel")
            while self._busy():
                time.sleep(0.1)

    def _busy(self) -> bool:
        return any(slot["state"] in ("prefill", "decode") for slot in self.engine()["slots"])

    def _post(self, path: str, **fields: Any) -> dict[str, Any]:
        answer = self._http.post(path, **fields).raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def chat(self, until: float, think_s: float) -> list[StreamedAnswer]:
        """One user's answers, until that time."""
        answers = []
        while time.monotonic() < until:
            answers.append(self._read())
            time.sleep(max(0.0, min(think_s, until - time.monotonic())))
        return answers

    def _read(self) -> StreamedAnswer:
        reader, began = Reader(), time.monotonic()
        body = self.body() | {"stream": True, "stream_options": {"include_usage": True}}
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for read in response.iter_raw():
                reader.feed(time.monotonic() - began, read)
        answer = reader.answer()
        if answer.error:
            raise RuntimeError(answer.error)
        return answer


@dataclass(frozen=True, slots=True)
class Part:
    """The figures of one part of a round."""

    tokens_per_s: float
    """Of all."""
    busy: float
    """The share of the time that the engine spent in steps."""
    seconds: float
    answers: list[StreamedAnswer]


def part(clients: Clients, n_users: int, think_s: float, seconds: float) -> Part:
    """So many users for so long, beside whatever else runs."""
    before, began = clients.engine(), time.monotonic()
    if n_users:
        with ThreadPoolExecutor(n_users) as pool:
            asked = [
                pool.submit(clients.chat, began + seconds, think_s * (1 + i / n_users))
                for i in range(n_users)
            ]
            answers = [answer for one in asked for answer in one.result()]
    else:
        answers = []
        time.sleep(seconds)
    after, took_s = clients.engine(), time.monotonic() - began
    tokens = after["tokens"]["generated_tokens"] - before["tokens"]["generated_tokens"]
    busy = (after["timing"]["step_s"] - before["timing"]["step_s"]) / took_s
    return Part(tokens / took_s, busy, took_s, answers)


def users(answers: list[StreamedAnswer]) -> Users:
    """The users' figures."""
    ttfts = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    return Users(percentile(ttfts, 95), percentile(gaps, 99), len(answers))


def one_round(clients: Clients, settings: argparse.Namespace) -> Round:
    """The three parts."""

    def asked() -> Part:
        return part(clients, settings.users, settings.think, settings.seconds)

    alone = asked()
    with clients.batch():
        time.sleep(_SETTLE_S)
        only_batch = part(clients, 0, 0.0, settings.seconds)
        beside = asked()
    theirs = sum(answer.tokens for answer in beside.answers) / beside.seconds
    return Round(
        batch_alone=only_batch.tokens_per_s,
        batch_beside=beside.tokens_per_s - theirs,
        left=1 - alone.busy,
        alone=users(alone.answers),
        beside=users(beside.answers),
    )


def rows(rounds: list[Round]) -> list[tuple[str, str, str, str]]:
    """Medians, and ranges of the ratios."""

    def compared(name: str, field: str) -> tuple[str, str, str, str]:
        alone = [getattr(one.alone, field) for one in rounds]
        beside = [getattr(one.beside, field) for one in rounds]
        ratios = [b / a for a, b in zip(alone, beside, strict=True)]
        first, second = (f"{1000 * statistics.median(one):.0f}" for one in (alone, beside))
        return name, first, second, spread(ratios)

    alone = statistics.median(one.batch_alone for one in rounds)
    beside = statistics.median(one.batch_beside for one in rounds)
    left = statistics.median(one.left for one in rounds)
    return [
        compared("users' TTFT p95, ms", "ttft_p95_s"),
        compared("users' gap p99, ms", "gap_p99_s"),
        (
            "batch, tokens/s",
            f"{alone:.1f}",
            f"{beside:.1f}",
            spread([one.batch_beside / one.batch_alone for one in rounds]),
        ),
        (f"of the {left:.0%} that users leave", "", "", spread([one.share for one in rounds])),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.batch.behind_chats", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--users", type=number_between(1, 64), default=2)
    parser.add_argument("--think", type=float, default=3.0)
    parser.add_argument("--seconds", type=number_between(5, 600), default=60)
    parser.add_argument("--rounds", type=number_between(1, 20), default=3)
    parser.add_argument("--slots", type=number_between(1, 64), default=16)
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    exit_on_sigterm()
    engine = {"n_slots": settings.slots, "n_ctx_slot": 1024}
    model = {"id": "model", "source": {"path": str(settings.model.resolve())}, "engine": engine}
    with (
        tempfile.TemporaryDirectory() as folder,
        serve_run(model, batch={"folder": folder}) as server,
    ):
        clients = Clients(server.url)
        part(clients, settings.users, 0.0, _SETTLE_S)
        rounds = []
        for number in range(settings.rounds):
            rounds.append(one_round(clients, settings))
            print(f"round {number + 1}: {rounds[-1]}", flush=True)
    print(table(("", "alone", "together", "ratio"), rows(rounds)))
    if settings.json:
        settings.json.write_text(json.dumps([asdict(one) for one in rounds]))


if __name__ == "__main__":
    main()

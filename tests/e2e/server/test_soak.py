"""A server that is treated badly for long: at the end it holds what it held after the first minute.

    pytest tests/e2e/server/test_soak.py -m long --soak-seconds 120

1,000 connections are idle, and 200 streams share 8 slots, of which a third is left at a random moment. The
engine is killed and stopped again and again, and two models on demand push each other out.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtests.common import servers
from loadtests.common.processes import command_line
from tests.e2e.conftest import Corral, model, short_folder, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
N_IDLE, N_STREAMS, N_SLOTS, N_ASLEEP = 1000, 200, 8, 4
KILL_EVERY_S, STOP_EVERY_S, WARM_S = 120.0, 300.0, 60.0
CHECKS = {"health_check_period_s": 1.0, "health_check_timeout_s": 5.0}
SILENCE_S, START_S = 15.0 + 5.0, 120.0
"""The longest times between two bytes of a stream (pings come every 15 s), and until it begins."""
MARGIN, N_LOOKS = 0.05, 7
KEYS = {name: f"sk-soak-{name:-<16}" for name in ("stays", "leaves", "asleep", "operator")}
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "seven", "green", "kites", "today"]


@dataclass
class Books:
    """What the clients counted."""

    ends: Counter[str] = field(default_factory=Counter)
    whole: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """The answers that were read to their end, by key."""
    read: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """What was read of the answers that were left."""
    left: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """The requests that were left, and the most tokens that they could get."""
    longest_silence_s: float = 0.0
    longest_start_s: float = 0.0
    longest_pause_s: float = 0.0
    """The longest that a refused client was told to wait."""


class Client:
    """One of the clients, each of which asks again as soon as it has its answer."""

    def __init__(self, port: int, key: str, names: list[str], books: Books, seed: int) -> None:
        self._port, self._key, self._names, self._books = port, key, names, books
        self._random = random.Random(seed)

    async def run(self, over: asyncio.Event) -> None:
        while not over.is_set():
            name, pause_s = self._random.choice(self._names), 0.0
            try:
                pause_s = await self._ask(name)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                self._books.ends[f"{self._key} {type(error).__name__}"] += 1
            if pause_s:
                self._books.longest_pause_s = max(self._books.longest_pause_s, pause_s)
                with suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), pause_s)

    async def _ask(self, name: str) -> float:
        """Read an answer; the seconds to wait if it was refused."""
        leaves, n_most, read = self._key == "leaves", self._random.randint(4, 32), Counter[str]()
        body = {
            "model": name,
            "prompt": " ".join(self._random.choices(WORDS, k=self._random.randint(4, 60))),
            "max_tokens": n_most,
            "ignore_eos": True,
            "logprobs": 0 if leaves else None,  # so that it can count what it reads
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        began = time.monotonic()
        try:
            writer.write(head("POST", "/v1/completions", self._key, json.dumps(body).encode()))
            try:
                async with asyncio.timeout(self._random.uniform(0.0, 10.0) if leaves else None):
                    return await self._read(reader, began, read)
            except TimeoutError:
                writer.transport.abort()
                self._books.ends[f"{self._key} left"] += 1
                self._books.read[self._key] += read
                self._books.left[self._key].update(requests=1, completion=n_most)
                return 0.0
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, began: float, read: Counter[str]) -> float:
        """Read an answer, and count in `read` what has come."""
        books, usage = self._books, None
        status = int((await reader.readline() or b"- 0 -").split()[1])
        books.longest_start_s = max(books.longest_start_s, time.monotonic() - began)
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        if status != 200:
            _, begins, rest = (await reader.read()).partition(b"{")
            error = json.loads((begins + rest).partition(b"\r\n")[0] or b"{}").get("error", {})
            code = error.get("code", "cut")
            books.ends[f"{self._key} {status} {code}"] += 1
            return float(headers.get("retry-after", 1))
        read["requests"] = 1
        last, is_whole = time.monotonic(), False
        while line := await reader.readline():
            books.longest_silence_s = max(books.longest_silence_s, time.monotonic() - last)
            last = time.monotonic()
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    books.ends[f"{self._key} error {chunk['error']['code']}"] += 1
                    return 0.0
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    read["completion"] += len((choice["logprobs"] or {}).get("tokens", ()))
            is_whole |= line.startswith(b"data: [DONE]")
        books.ends[f"{self._key} {'whole' if is_whole and usage else 'cut'}"] += 1
        if usage is not None:
            books.whole[self._key].update(
                requests=1, prompt=usage["prompt_tokens"], completion=usage["completion_tokens"]
            )
        return 0.0


def head(method: str, path: str, key: str, body: bytes = b"") -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {KEYS[key]}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close" if method == "POST" else "Connection: keep-alive",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def be_idle(port: int, over: asyncio.Event) -> None:
    """Ask once, and keep the connection; open another one when the server ends it."""
    while not over.is_set():
        with suppress(OSError, IndexError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head("GET", "/livez", "stays"))
            waiting = [asyncio.create_task(reader.read()), asyncio.create_task(over.wait())]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            writer.close()
        await asyncio.sleep(0.1)


@dataclass(frozen=True)
class Held:
    """What the server's processes hold."""

    mib: float
    files: float
    threads: float


def held(server: Corral) -> Held:
    """What they hold now, but for the connections of the clients: refused ones wait without any."""
    mib, files, threads, own = 0.0, 0, 0, own_sockets()
    for pid in server.pids(""):
        with suppress(OSError, IndexError):  # a worker that has ended meanwhile
            status = Path(f"/proc/{pid}/status").read_text()
            anonymous = status.partition("RssAnon:")[2].split()[0]
            n_threads = status.partition("Threads:")[2].split()[0]
            mib, threads = mib + int(anonymous) / 2**10, threads + int(n_threads)
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = str(file.readlink())
                    files += not target.startswith("socket:") or target in own
    return Held(mib, files, threads)


def own_sockets() -> set[str]:
    """The sockets that lead to no client, as descriptors name them. Source: proc(5), `/proc/net/unix`, and
    `/proc/net/tcp`: state 10 listens."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {line[9] for line in lines if line[3] == "0A"}
    inodes |= {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    return {f"socket:[{inode}]" for inode in inodes}


def n_dead_sockets(server: Corral) -> int:
    """The descriptors of connections that have ended."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    known = own_sockets() | {f"socket:[{line.split()[9]}]" for line in lines}
    n = 0
    for pid in server.pids(""):
        with suppress(OSError):  # a worker that has ended meanwhile
            targets = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()]
            n += sum(target.startswith("socket:") and target not in known for target in targets)
    return n


def has_replica(server: Corral) -> bool:
    try:
        return bool(server.replicas())
    except (httpx.HTTPError, KeyError, ValueError):
        return False


async def median_held(server: Corral) -> Held:
    """The medians of some seconds: a model may just be loaded. The first model's process is up again."""
    async with asyncio.timeout(START_S):
        while not await asyncio.to_thread(has_replica, server):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    seen = []
    for _ in range(N_LOOKS):
        seen.append(await asyncio.to_thread(held, server))
        await asyncio.sleep(1.0)
    return Held(*(statistics.median(values) for values in zip(*map(astuple, seen), strict=True)))


async def hurt(server: Corral, number: signal.Signals, every_s: float, seconds: float) -> int:
    """Send that signal to the first model's process again and again; how often."""
    n, began = 0, time.monotonic()
    while (n + 1) * every_s < seconds:
        await asyncio.sleep(max(0.5, began + (n + 1) * every_s - time.monotonic()))
        with suppress(httpx.HTTPError, KeyError, ValueError):  # it is being started again
            (replica,) = await asyncio.to_thread(server.replicas)
            pid = int(replica["replica_id"].rpartition("-")[2])
            if "run.local.engine" in command_line(pid):
                os.kill(pid, number)
                n += 1
        if time.monotonic() - began > seconds:
            break
    return n


@pytest.fixture(scope="module")
def server(gguf: Path) -> Iterator[Corral]:
    sizes = {"n_slots": N_SLOTS, "n_ctx_slot": 512, "max_waiting": 512, "cache_ram_mib": 16}
    always = model(None, "always", **sizes)
    always["serve"] |= CHECKS
    asleep = []
    for name in ("one", "other"):
        asleep.append(model(gguf, name, n_slots=2, n_ctx_slot=512, cache_ram_mib=0))
        asleep[-1] |= {"keep_alive": "1m"}
        asleep[-1]["serve"] |= CHECKS
    with short_folder() as directory:
        keys = [{"name": name, "key": key, "tokens_per_day": 10**9} for name, key in KEYS.items()]
        keys[-1]["admin"] = True
        (directory / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
        access: dict[str, Any] = {
            "api_key_file": str(directory / "keys.yaml"),
            "usage_folder": str(directory / "usage"),
            "serve": CHECKS,
        }
        corral = Corral(
            directory, [always, *asleep], local=True, args={"max_loaded_models": 1}, **access
        )
        corral.http.headers["Authorization"] = f"Bearer {KEYS['operator']}"
        try:
            servers.wait_ready(corral.process, lambda: servers.is_healthy(corral.url), directory)
            yield corral
        finally:
            corral.stop()


async def soak(server: Corral, seconds: float) -> tuple[Books, Held, Held, Counter[str]]:
    """The clients' books, what the server held after the first minute and at the end, and what was done.
    The first minute has one of each: pools start threads when they first need them."""
    books, over, warm_s = Books(), asyncio.Event(), min(WARM_S, seconds / 4)
    keys = ["leaves" if i % 3 == 0 else "stays" for i in range(N_STREAMS - N_ASLEEP)]
    clients = [
        Client(server.port, key, ["always"], books, seed) for seed, key in enumerate(keys)
    ] + [
        Client(server.port, "asleep", ["one", "other"], books, 1000 + seed)
        for seed in range(N_ASLEEP)
    ]
    async with asyncio.TaskGroup() as group:
        for _ in range(N_IDLE):
            group.create_task(be_idle(server.port, over))
        for client in clients:
            group.create_task(client.run(over))
        warmed = asyncio.get_running_loop().time() + warm_s
        done = Counter(kills=await hurt(server, signal.SIGKILL, warm_s / 4, warm_s / 3))
        done["stops"] = await hurt(server, signal.SIGSTOP, warm_s / 4, warm_s / 3)
        await asyncio.sleep(warmed - asyncio.get_running_loop().time())
        first = await median_held(server)
        left_s = seconds - warm_s - 2 * N_LOOKS
        kills = group.create_task(
            hurt(server, signal.SIGKILL, min(KILL_EVERY_S, left_s / 3), left_s - 10)
        )
        stops = group.create_task(
            hurt(server, signal.SIGSTOP, min(STOP_EVERY_S, left_s / 2), left_s - 10)
        )
        await asyncio.sleep(left_s)
        last = await median_held(server)
        over.set()
    done.update(kills=kills.result(), stops=stops.result())
    return books, first, last, done


def used(server: Corral) -> dict[str, Counter[str]]:
    """The counts of the ledger, by key, and what its budgets have spent."""
    page = server.http.get("/v1/usage", params={"group_by": "api_key_id", "bucket_width": "1d"})
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for bucket in page.json()["data"]:
        for row in bucket["results"]:
            found[row["api_key_id"]].update(
                requests=row["num_model_requests"],
                prompt=row["input_tokens"],
                completion=row["output_tokens"],
                **{name: row[name] for name in ("completed", "aborted", "failed")},
            )
    with closing(sqlite3.connect(server.directory / "usage" / "ledger.sqlite")) as file:
        query = "SELECT key, SUM(amount) FROM spent WHERE period = 'tokens per day' GROUP BY key"
        for key, spent in file.execute(query):
            found[key]["spent"] += int(spent)
    return found


def settled(server: Corral) -> dict[str, Any]:
    """The first model's state, once nothing runs or waits."""
    until = time.monotonic() + 60
    while True:
        with suppress(ValueError, httpx.HTTPError):
            stats = server.stats()
            queue = stats["queue"]
            if not queue["running"] + queue["waiting"]:
                return stats
        assert time.monotonic() < until, "requests still run"
        time.sleep(0.5)


def test_a_server_that_is_treated_badly_ends_as_it_began(
    server: Corral, request: pytest.FixtureRequest
) -> None:
    seconds = float(request.config.getoption("--soak-seconds"))
    books, first, last, done = asyncio.run(soak(server, seconds))
    stats, ledger = settled(server), used(server)
    print(json.dumps({"ends": books.ends, **done}), first, last)
    print(
        f"start {books.longest_start_s:.1f} s, silence {books.longest_silence_s:.1f} s, "
        f"told to wait {books.longest_pause_s:g} s"
    )
    for key, counts in ledger.items():
        print(key, dict(counts), *(vars(books)[name][key] for name in ("whole", "read", "left")))
    assert min(done.values()) > 1
    assert all(slot["request_id"] is None for slot in stats["slots"])
    assert len(stats["slots"]) == N_SLOTS
    bad = [end for end in books.ends if not end.endswith((" whole", " left"))]
    assert all(" 429 " in end or " 503 " in end for end in bad), books.ends
    assert books.longest_start_s <= START_S
    assert books.longest_silence_s <= SILENCE_S
    for key in ("stays", "leaves", "asleep"):
        counts, whole, left = ledger[key], books.whole[key], books.left[key]
        assert counts["failed"] == 0, key
        assert counts["requests"] == counts["completed"] + counts["aborted"], key
        assert counts["spent"] == counts["prompt"] + counts["completion"], key
        for what in ("requests", "completion"):
            assert whole[what] + books.read[key][what] <= counts[what] <= whole[what] + left[what]
        assert counts["prompt"] >= whole["prompt"], key
        if not left:
            assert counts["prompt"] == whole["prompt"], key
    wait_until(lambda: not n_dead_sockets(server), 30, "ended connections keep their descriptors")
    for what in ("mib", "files", "threads"):
        assert getattr(last, what) == pytest.approx(getattr(first, what), rel=MARGIN), what

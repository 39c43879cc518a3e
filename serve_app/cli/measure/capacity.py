"""Measures how many users a server holds.

    corral capacity --slo ttft_p95=2s,itl_p95=150ms --url http://127.0.0.1:8000

Doubles the users until the SLO is missed, then halves the difference, to a tenth. A load holds if each
percentile is within its bound and nothing was refused or failed. Each number of users is tried once, for
--seconds: where two loads are close, so are their verdicts. With several configurations, each is started,
measured and stopped in turn, and the one that holds the most is named. Percentiles are those of ttft, itl
and e2e at p50, p95 and p99. Progress goes to stderr. CORRAL_API_KEY is the key to ask with.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import yaml

from serve_app.cli.measure import benchmark
from serve_app.cli.measure.benchmark import SEED, Parser, number_between
from serve_app.cli.measure.outcomes import (
    ABORTED,
    COMPLETE,
    FAILED,
    REFUSED,
    Outcome,
    Reader,
    figures,
    heard,
)
from serve_app.cli.measure.users import Ask, Setting, kind_of, parse_mix, user, with_body

UNITS = {"ttft": "s", "itl": "ms", "e2e": "s"}
SILENCE_S = 300.0
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
MOST_BACKOFF_S = 10.0
"""Refused users wait as long as the server says, but not longer."""
_TERM = re.compile(r"(ttft|itl|e2e)_(p50|p95|p99)=(\d+(?:\.\d+)?)(ms|s)")


class LoadError(Exception):
    """The load cannot be put on the server."""


@dataclass(frozen=True, slots=True)
class UserLoad:
    """The load of users: what they do, and how long."""

    run_s: int
    mix: Mapping[str, int]
    think_s: float = 5.0
    seed: int = SEED
    model: str = ""
    """The model that is asked; the server's first if empty."""


@dataclass(frozen=True, slots=True)
class Held:
    """The number of users that a configuration holds."""

    name: str
    users: int
    """0: not even one."""
    figures: Mapping[str, float | None]


class Crowd:
    """The users of one load on one server, who ask, read, think and ask again."""

    def __init__(self, client: httpx2.AsyncClient, load: UserLoad, n_ctx: int) -> None:
        self._client = client
        self._load = load
        self._setting = Setting(n_ctx, load.think_s)
        self._ids = map(str, itertools.count())
        self.outcomes: list[Outcome] = []

    async def run(self, users: int) -> float:
        """Let so many users ask for `run_s` seconds, and abort the rest; returns the seconds spent."""
        began = time.perf_counter()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._load.run_s), asyncio.TaskGroup() as group:
                for number in range(users):
                    group.create_task(self._sit(number))
        return time.perf_counter() - began

    async def _sit(self, number: int) -> None:
        kind = kind_of(number, self._load.mix)
        asks = user(kind, self._load.seed, number, self._setting)
        ask = next(asks)
        named = {"model": self._load.model} if self._load.model else {}
        while True:
            await asyncio.sleep(ask.think_s)
            ask = with_body(ask, **named, user=f"{kind}-{number}")
            text, retry_after_s = await self._send(ask, kind)
            await asyncio.sleep(min(retry_after_s, MOST_BACKOFF_S))
            ask = asks.send(text)

    async def _send(self, ask: Ask, kind: str) -> tuple[str, float]:
        """Send the request, and read its answer to the end: its text, and how long to stay away."""
        start, reader = time.perf_counter(), Reader()
        outcome = Outcome(next(self._ids), kind, time.time(), 0.0, FAILED, "")
        end, reason, retry_after_s = FAILED, "", 0.0
        try:
            async with asyncio.timeout(ask.leave_after_s):
                end, reason, retry_after_s = await self._exchange(ask, start, reader)
        except TimeoutError:
            end, reason = ABORTED, "left"
        except asyncio.CancelledError:
            end, reason = ABORTED, "stopped"
            raise
        except (httpx2.HTTPError, ValueError) as error:
            reason = type(error).__name__
        finally:
            said = heard(reader.answer())
            if ask.read_pause_s:  # the user's own slowness says nothing of the server
                said |= {"ttft_s": None, "gaps_s": ()}
            wall_s = time.perf_counter() - start
            self.outcomes.append(replace(outcome, end=end, reason=reason, wall_s=wall_s, **said))
        return reader.text, retry_after_s

    async def _exchange(self, ask: Ask, start: float, reader: Reader) -> tuple[str, str, float]:
        """How it ended, why, and how long to stay away."""
        async with self._client.stream("POST", ask.path, json=ask.body) as response:
            if response.status_code != 200:
                await response.aread()
                wait = response.headers.get("retry-after", "")
                end = REFUSED if response.status_code == 429 else FAILED
                return end, str(response.status_code), float(wait) if wait.isdecimal() else 0.0
            async for piece in response.aiter_bytes():
                reader.feed(time.perf_counter() - start, piece)
                await asyncio.sleep(ask.read_pause_s)
        if reader.answer().error is None:
            return COMPLETE, "", 0.0
        return FAILED, reader.error_code or "no [DONE]", 0.0


async def drive(url: str, load: UserLoad, users: int) -> tuple[list[Outcome], float]:
    """Put the load on the server: how requests ended, and its seconds. Raises LoadError without a model."""
    key = os.environ.get("CORRAL_API_KEY")
    # A connection for each request, so that none is sent twice where a kept one was closed.
    headers = {"Connection": "close"} | ({"Authorization": f"Bearer {key}"} if key else {})
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=SILENCE_S
    ) as client:
        try:
            crowd = Crowd(client, load, await _context(client, load.model))
        except (httpx2.HTTPError, ValueError, LookupError) as error:
            raise LoadError(f"{url} lists no model: {error!r}") from error
        wall_s = await crowd.run(users)
    return crowd.outcomes, wall_s


async def _context(client: httpx2.AsyncClient, model: str) -> int:
    """Tokens that a request may have, if the server says so as Corral, vLLM or llama-server do; or 4096."""
    listed = (await client.get("/v1/models")).raise_for_status().json()["data"]
    card = next((card for card in listed if card["id"] == model), listed[0])
    if known := card.get("n_ctx_slot") or card.get("max_model_len"):
        return int(known)
    answer = await client.get("/props")
    settings = answer.json().get("default_generation_settings", {}) if answer.is_success else {}
    return int(settings.get("n_ctx") or 4096)


def parse_slo(text: str) -> dict[str, float]:
    """`ttft_p95=2s,itl_p95=150ms` as bounds by the names of figures, in their units. Raises
    ArgumentTypeError."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        term = _TERM.fullmatch(part.strip())
        if term is None:
            raise argparse.ArgumentTypeError(
                f"{part!r}: expected ttft|itl|e2e _p50|p95|p99 =NUMBER ms|s."
            )
        name, percent, value, unit = term.groups()
        seconds = float(value) / (1000 if unit == "ms" else 1)
        bounds[f"{name}_{percent}_{UNITS[name]}"] = seconds * (1000 if UNITS[name] == "ms" else 1)
    return bounds


def misses(
    outcomes: Sequence[Outcome], measured: Mapping[str, float | None], bounds: Mapping[str, float]
) -> list[str]:
    """Why a load with these ends and figures does not hold; empty if it does."""
    missed = []
    for end in (REFUSED, FAILED):
        if n := sum(outcome.end == end for outcome in outcomes):
            missed.append(f"{n} {end}")
    for name, bound in bounds.items():
        value = measured[name]
        if value is None or value > bound:
            missed.append(f"{name} {'unknown' if value is None else f'{value:.3g}'} > {bound:g}")
    return missed


def most_users(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number that holds, to a tenth: from 0 to `limit`. Calls `holds` with each number once."""
    low, high = 0, 1
    while holds(high):
        if high == limit:
            return limit
        low, high = high, min(2 * high, limit)
    while high - low > max(1, low // 10):
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def measure_users(
    url: str, load: UserLoad, bounds: Mapping[str, float], limit: int, name: str
) -> Held:
    """The number of users that this server holds. Raises LoadError."""
    tried: dict[int, Mapping[str, float | None]] = {0: {}}

    def holds(users: int) -> bool:
        outcomes, wall_s = asyncio.run(drive(url, load, users))
        tried[users] = figures(outcomes, wall_s)
        missed = misses(outcomes, tried[users], bounds)
        values = ", ".join(f"{key} {tried[users][key] or 0:.3g}" for key in bounds)
        verdict = f"misses: {'; '.join(missed)}" if missed else "holds"
        print(f"{name}, {users} users: {values}: {verdict}", file=sys.stderr, flush=True)
        return not missed

    users = most_users(holds, limit)
    return Held(name, users, tried[users])


def table(held: Sequence[Held], bounds: Mapping[str, float]) -> str:
    """Every configuration with what it holds, as Markdown, and the best."""
    header = ["configuration", "users", *bounds, "tokens/s"]
    rows = []
    for configuration in held:
        values = [configuration.figures.get(name) for name in (*bounds, "tokens_per_s")]
        cells = ["-" if value is None else f"{value:.3g}" for value in values]
        rows.append([configuration.name, configuration.users, *cells])
    best = max(held, key=lambda each: (each.users, each.figures.get("tokens_per_s") or 0.0))
    return f"{benchmark.table(header, rows)}\n\nHolds the most: {best.name}, {best.users} users."


@contextmanager
def run_server(config: Path) -> Iterator[str]:
    """The URL of a server with this configuration of Serve, as `corral serve` starts it, on a free port of
    loopback, until the block ends. Raises LoadError if it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = {"http_options": {"host": "127.0.0.1", "port": port}}
    try:
        content = {**yaml.safe_load(config.read_text()), **address}
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise LoadError(f"It is not a configuration of Serve: {error}") from error
    with tempfile.TemporaryDirectory(prefix="corral-capacity-") as folder:
        file, log = Path(folder, "serve_config.yaml"), Path(folder, "log")
        file.write_text(json.dumps(content))  # is YAML
        command = [sys.executable, "-P", "-m", "serve_app.run.local.server", str(file)]
        with log.open("wb") as output:
            server = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            if not _starts(server, url):
                text = log.read_text(errors="replace")[-4000:]
                raise LoadError(f"The server did not start:\n{text}")
            yield url
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _starts(server: subprocess.Popen[bytes], url: str) -> bool:
    """Whether an engine of every model answers in time, and the server runs."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(httpx2.HTTPError):
            stats = httpx2.get(f"{url}/v1/stats", timeout=10)
            if stats.is_success and all(model["replicas"] for model in stats.json()["models"]):
                return True
        time.sleep(0.2)
    return False


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="corral capacity", description=__doc__)
    parser.add_model("the model that is asked; by default the server's first", default="")
    add, slo = parser.add_argument, "what users should get"
    add("--slo", type=parse_slo, default="ttft_p95=2s,itl_p95=150ms", help=slo)
    where = parser.add_mutually_exclusive_group()
    url = "a server that runs already"
    where.add_argument("--url", default="http://127.0.0.1:8000", help=url)
    configs = "configuration files; each is served in turn"
    where.add_argument("--configs", type=Path, nargs="+", help=configs)
    add("--mix", type=parse_mix, default="chat=1", help="what users do, as chat=6,rag=2")
    think = "seconds between an answer and the next question"
    add("--think", type=number_between(0.0, 1e6), default=5.0, help=think)
    add("--seconds", type=number_between(5, 3600), default=60, help="the time of each load")
    most = "the highest number of users that is tried"
    add("--most", type=number_between(1, 5000), default=256, help=most)
    add("--seed", type=int, default=SEED, help="decides what is asked")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    benchmark.check_files(*args.configs or ())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # stops the server, too
    load = UserLoad(args.seconds, args.mix, args.think, args.seed, args.model)
    held = []
    for config in args.configs or [None]:
        name = config.stem if config else args.url
        try:
            if config is None:
                held.append(measure_users(args.url.rstrip("/"), load, args.slo, args.most, name))
            else:
                with run_server(config) as url:
                    held.append(measure_users(url, load, args.slo, args.most, name))
        except LoadError as error:
            print(f"{name}: {error}", file=sys.stderr)
    if not held:
        sys.exit("Nothing could be measured.")
    print(table(held, args.slo))


if __name__ == "__main__":
    main()

"""Users of an OpenAI server who behave like users: `locust -f loadtests/locustfile.py --host URL`.

Closed loop: --users people, of kinds by --mix, ask, read, think and ask again. Open loop: with --arrivals,
requests come at random moments (Poisson), so many a second, whether or not earlier ones are answered, and
their times count from when they should have been sent. Either follows --shape over --run-time.

Rows are by type: TTFT, ITL and E2E in milliseconds; TOKENS/S of each user's stream (in the same
columns); GOOD are the answers within --slo-ttft and --slo-itl, REFUSED those with 429, ABORTED
those whose user left. Only E2E rows have failures. "Aggregated" adds up different things: do not
read it. The reports are made from the file of --journal, which has each request with its end.

With --processes N, N workers share the users, or the arrivals, of one process: the same ones with the same
--seed. Each worker writes a journal of its own, the file's name with its number behind it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import gevent
from gevent.pool import Pool
from geventhttpclient import HTTPClient
from locust import LoadTestShape, User, events, task
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtests.load.stream_metrics import Slo
from loadtests.load.users import shapes
from loadtests.load.users.client import LoadClient
from serve_app.cli.measure import users
from serve_app.cli.measure.users import Ask, Setting

MOST_OPEN = 2000
"""Requests of an open loop at the same time."""
MOST_BACKOFF_S = 10.0
"""Refused users wait as long as they are told, but not longer."""
DEFAULT_RUN_S = 300


@events.init_command_line_parser.add_listener
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Locust's own come first."""
    mix = ", ".join(users.KINDS)
    parser.add_argument("--mix", default="chat=6,rag=2,agent=1,code=2,batch=1", help=f"of {mix}")
    parser.add_argument("--arrivals", type=float, default=0.0, help="requests/s: an open loop")
    parser.add_argument("--shape", choices=tuple(shapes.SHAPES), default="constant")
    parser.add_argument("--seed", type=int, default=20, help="of all that users ask")
    parser.add_argument("--think", type=float, default=5.0, help="median pause of a reader, s")
    parser.add_argument("--slo-ttft", type=float, default=2.0, help="time to first token, s")
    parser.add_argument("--slo-itl", type=float, default=0.15, help="mean time of a token after, s")
    parser.add_argument("--model", default="", help="its name; the server's first if left out")
    parser.add_argument("--api-key", default="", env_var="CORRAL_API_KEY", is_secret=True)
    parser.add_argument("--journal", default=os.devnull, help="file of every request and its end")


class Run:
    """The common state of all users of a process while a test runs."""

    def __init__(self, environment: Environment) -> None:
        assert environment.parsed_options is not None
        self.options: Any = environment.parsed_options
        runner = environment.runner
        self.worker = runner.worker_index if isinstance(runner, WorkerRunner) else 0
        self.numbers = itertools.count(self.worker, self.options.workers)
        self.mix = users.parse_mix(self.options.mix)
        host = environment.host or self.options.host
        key = self.options.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.setting = Setting(_context(host, self.options.model, headers), self.options.think)
        self._start = time.perf_counter(), time.process_time()
        self._journal = journal_file(environment).open("w", buffering=1)

        def listen(name: str, kind: str, value: float, error: str) -> None:
            environment.events.request.fire(
                request_type=name,
                name=kind,
                response_time=value,
                response_length=0,
                exception=RuntimeError(error) if error else None,
                context={},
            )

        slo = Slo(self.options.slo_ttft, self.options.slo_itl)
        self.client = LoadClient(host, headers, self._journal, listen, slo)

    def new_user(self) -> tuple[int, str, users.User]:
        """The next user: number, kind, and what they do."""
        number = next(self.numbers)
        kind = users.kind_of(number, self.mix)
        return number, kind, users.user(kind, self.options.seed, number, self.setting)

    def body(self, ask: Ask, kind: str, number: int) -> Ask:
        """The request as this server wants it."""
        named = {"model": self.options.model} if self.options.model else {}
        return users.with_body(ask, **named, user=f"{kind}-{number}")

    def close(self) -> None:
        """The test is over."""
        wall, cpu = self._start
        used = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        self._journal.write(json.dumps({"client": used}) + "\n")
        self._journal.close()


def journal_file(environment: Environment) -> Path:
    """Where this process writes what it sends."""
    assert environment.parsed_options is not None
    journal = Path(environment.parsed_options.journal)
    if not isinstance(environment.runner, WorkerRunner) or journal == Path(os.devnull):
        return journal
    return journal.with_name(f"{journal.name}-{environment.runner.worker_index}")


_runs: list[Run] = []


def _run() -> Run:
    return _runs[-1]


@events.test_start.add_listener
def _start(environment: Environment, **_: object) -> None:
    options: Any = environment.parsed_options
    if not isinstance(environment.runner, WorkerRunner):  # a worker gets them from its master
        options.run_s = float(options.run_time or DEFAULT_RUN_S)
        options.workers = _n_workers(environment)
    if not isinstance(environment.runner, MasterRunner):
        _runs.append(Run(environment))


@events.test_stop.add_listener
def _stop(environment: Environment, **_: object) -> None:
    if not isinstance(environment.runner, MasterRunner):
        _run().close()


def _n_workers(environment: Environment) -> int:
    """Processes that have users."""
    runner = environment.runner
    return int(runner.worker_count) if isinstance(runner, MasterRunner) else 1


class Closed(User):
    """Somebody who asks, reads, thinks and asks again."""

    def on_start(self) -> None:
        """Sit down."""
        self._number, self._kind, self._asks = _run().new_user()
        self._ask = next(self._asks)

    @task
    def turn(self) -> None:
        """Think, ask, read."""
        gevent.sleep(self._ask.think_s)
        ask = _run().body(self._ask, self._kind, self._number)
        answered = _run().client.send(ask, self._kind)
        gevent.sleep(min(answered.retry_after_s, MOST_BACKOFF_S))
        self._ask = self._asks.send(answered.text)


class Arrivals(User):
    """Everybody of an open loop, or every so many of them: each request is somebody's first."""

    @task
    def send_all(self) -> None:
        """All arrivals of the run, in turns with the other workers."""
        run, pool, start = _run(), Pool(MOST_OPEN), time.perf_counter()
        options = run.options
        rng = random.Random(f"{options.seed} arrivals")
        try:
            due = shapes.arrivals(rng, options.shape, options.arrivals, options.run_s)
            for at_s in itertools.islice(due, run.worker, None, options.workers):
                gevent.sleep(max(0.0, at_s - (time.perf_counter() - start)))
                pool.spawn(self._one, run, start + at_s)
            pool.join()
            gevent.sleep(options.run_s)  # until Locust ends it
        finally:
            pool.kill()

    def _one(self, run: Run, due: float) -> None:
        number, kind, asks = run.new_user()
        ask = run.body(next(asks), kind, number)
        run.client.send(ask, kind, late_s=time.perf_counter() - due)


class Shape(LoadTestShape):
    """The number of users as --shape has it, or one for each process of an open loop."""

    use_common_options = True

    def tick(self) -> tuple[int, float, list[type[User]] | None] | None:
        """Users, how many of them come in a second, and of which class; None when the run is over."""
        assert self.runner is not None
        options: Any = self.runner.environment.parsed_options
        run_s = float(options.run_time or DEFAULT_RUN_S)
        if self.get_run_time() >= run_s:
            return None
        if options.arrivals:
            n = _n_workers(self.runner.environment)
            return n, float(n), [Arrivals]
        users = shapes.users_at(options.shape, self.get_run_time(), options.num_users or 1, run_s)
        return users, float(options.spawn_rate or users), [Closed]


def _context(host: str, model: str, headers: dict[str, str]) -> int:
    """Tokens that a request may have, if the server says so as Corral, vLLM or llama-server do; else
    4096."""
    cards = _get(host, "/v1/models", headers)["data"]
    card = next((card for card in cards if card["id"] == model), cards[0])
    if known := card.get("n_ctx_slot") or card.get("max_model_len"):
        return int(known)
    settings = _get(host, "/props", headers).get("default_generation_settings", {})
    return int(settings.get("n_ctx") or 4096)


def _get(host: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
    """The JSON there; nothing if there is no such page."""
    client = HTTPClient.from_url(host, connection_timeout=10, network_timeout=10)
    with closing(client):
        response = client.request("GET", path, headers=headers)
        content: dict[str, Any] = json.loads(response.read()) if response.status_code == 200 else {}
    return content

"""Processes of a server without Ray that hang: they are replaced, and keep no server from ending."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.cluster.test_failover import EXACT, Streams
from tests.e2e.conftest import Corral, model, short_folder, wait_until

CHECKS = {"health_check_period_s": 0.5, "health_check_timeout_s": 2.0}
N_STREAMS = 4


@pytest.fixture(scope="module")
def server(gguf: Path) -> Iterator[Corral]:
    served = model(gguf, "m", n_slots=4, n_ctx_slot=4096, max_waiting=32, **EXACT)
    served["serve"] |= CHECKS
    with short_folder() as directory:
        corral = Corral(directory, [served], local=True, serve=CHECKS)
        try:
            corral.wait_ready()
            yield corral
        finally:
            corral.stop()


def stop_engine(server: Corral) -> int:
    """Stop the process of the model; its id."""
    (pid,) = server.pids("run.local.engine")
    os.kill(pid, signal.SIGSTOP)
    return pid


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_streams_go_on_when_the_engine_is_stopped(server: Corral) -> None:
    streams = Streams(server, N_STREAMS, 600)
    with ThreadPoolExecutor(N_STREAMS) as pool:
        alone = list(pool.map(streams.alone, streams.numbers))
        reading = [pool.submit(streams.read, number) for number in streams.numbers]
        wait_until(lambda: streams.n_begun >= 2, 60, "streams")
        pid = stop_engine(server)
        for stream in reading:
            stream.result(120)
    assert streams.texts == alone
    assert is_gone(pid)
    assert server.stats()["requests"]["failovers"] > 0


def test_workers_and_their_parent_are_replaced(server: Corral) -> None:
    body = {"prompt": "Hello", "max_tokens": 2}
    for _ in range(2):
        assert server.http.post("/v1/completions", json=body).status_code == 200
        engine = set(server.pids("run.local.engine"))
        stopped = [
            pid for pid in server.pids("") if pid != server.process.pid and pid not in engine
        ]
        assert len(stopped) >= 2  # a worker is idle now
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        for pid in stopped:
            wait_until(partial(is_gone, pid), 30, "it is gone")


def test_a_server_with_stopped_processes_ends(server: Corral) -> None:
    """The last test of this server."""
    for pid in server.pids(""):
        if pid != server.process.pid:
            os.kill(pid, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    wait_until(lambda: server.pids("") == [], 10, "all are gone")

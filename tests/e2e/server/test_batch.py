"""Batches through the `openai` package, and processes that are killed meanwhile."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from loadtests.common import processes
from loadtests.common.servers import STOP_TIMEOUT_S
from tests.e2e.conftest import ROOT, Corral, model, short_folder, stopped_at_the_end, wait_until

ENDED = {"completed", "failed", "expired", "cancelled"}
PATIENCE_S = 180
INGRESS, ENGINE = (f"ray::ServeReplica:corral:{name}" for name in ("Ingress", "engine-demo"))


def started_in(directory: Path, batches: Path) -> Corral:
    entry = model(None, "demo", n_slots=4, n_ctx_slot=512)
    return Corral(directory, [entry], batch={"folder": str(batches)})


@pytest.fixture(name="server")
def _server(readers_server: Corral) -> Corral:
    return readers_server


@pytest.fixture
def client(server: Corral) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=10) as made:
        yield made


def begin(client: openai.OpenAI, n_lines: int, endpoint: Any, body: dict[str, Any]) -> str:
    lines = [
        {"custom_id": f"q{i}", "method": "POST", "url": endpoint, "body": body}
        for i in range(n_lines)
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,
        completion_window="1h",  # type: ignore[arg-type]  # Corral takes any window
    ).id


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    def has_ended() -> bool:
        return client.batches.retrieve(batch_id).status in ENDED

    wait_until(has_ended, PATIENCE_S, lambda: str(client.batches.retrieve(batch_id)), every_s=0.2)
    return client.batches.retrieve(batch_id)


def n_done(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed


def until_done(client: openai.OpenAI, batch_id: str, n: int) -> None:
    wait_until(lambda: n_done(client, batch_id) >= n, PATIENCE_S, f"{n} lines are answered")


def until_gone(server: Corral, name: str, pid: int) -> None:
    wait_until(lambda: pid not in server.pids(name), 30, f"{name} is dead")


def answers(client: openai.OpenAI, batch: Any) -> list[Any]:
    return [
        json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()
    ]


CHAT = {"messages": [{"role": "user", "content": "What is the capital of Portugal?"}], "seed": 1}


@pytest.mark.timeout(180)
def test_locust_has_batches_answered(server: Corral, client: openai.OpenAI, tmp_path: Path) -> None:
    locust = [sys.executable, "-m", "locust", "-f", "loadtests/batch/locustfile.py", "--headless"]
    how = ["-u", "2", "-r", "2", "-t", "5s", "--lines", "10", "--line-tokens", "4"]
    files = ["--poll", "0.2", "--csv", str(tmp_path / "locust")]
    done = subprocess.run(
        processes.with_default_signals(*locust, *how, *files, "--host", server.url),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "locust_stats.csv").open() as file:
        rows = {row["Type"]: row for row in csv.DictReader(file)}
    assert int(rows["BATCH"]["Request Count"]) >= 2
    assert {rows[name]["Failure Count"] for name in ("BATCH", "LINE")} == {"0"}
    ends = ENDED | {"cancelling", "finalizing"}
    assert {batch.status for batch in client.batches.list()} <= ends, (
        "no line is asked for any more"
    )


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", CHAT | {"max_tokens": 8}),
        ("/v1/completions", {"prompt": "The capital of Portugal is", "max_tokens": 4}),
        ("/v1/responses", {"input": "Tell me a story.", "max_output_tokens": 4}),
        ("/v1/embeddings", {"input": ["A fox.", "A brave fox."]}),
    ],
)
def test_every_endpoint(client: openai.OpenAI, endpoint: str, body: dict[str, Any]) -> None:
    batch = ended(client, begin(client, 10, endpoint, body))
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (10, 0)
    found = answers(client, batch)
    assert [line["custom_id"] for line in found] == [f"q{i}" for i in range(10)]
    assert {line["response"]["status_code"] for line in found} == {200}


def anonymous_bytes(server: Corral, name: str) -> int:
    """The memory of the server's processes of that name, without what Ray's object store has."""
    pids = processes.tagged(server.directory, name)
    return 1024 * sum(processes.rollup_kib(pid, "Anonymous:") for pid in pids)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_what_nobody_reads_waits_in_no_process() -> None:
    """Serve's own proxy takes all of an answer, whatever its client reads. Ray's object store has what
    waits: it has a bound, and a disk for what is beyond."""
    n_readers, text = 4, b'{"custom_id": "a"}\n' * (2**21)
    with ExitStack() as held:
        directory = held.enter_context(short_folder())
        started = started_in(directory, directory / "batches")
        server = held.enter_context(stopped_at_the_end(started))
        client = held.enter_context(openai.OpenAI(base_url=f"{server.url}/v1", api_key="any"))
        file_id = client.files.create(file=("in.jsonl", text), purpose="batch").id
        names = (INGRESS, "ray::ProxyActor")
        before = sum(anonymous_bytes(server, name) for name in names)
        for _ in range(n_readers):
            reader = held.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", server.port))
            path = f"/v1/files/{file_id}/content"
            reader.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        until, grown = time.monotonic() + 8.0, [0]
        while time.monotonic() < until:
            assert server.http.get("/health", timeout=5.0).status_code == 200
            grown.append(sum(anonymous_bytes(server, name) for name in names) - before)
            time.sleep(0.2)
    assert 0 < max(grown) < 2 * len(text), "of the four files that wait"


@pytest.mark.long
def test_2000_lines_outlive_their_engine_their_ingress_and_their_machine(tmp_path: Path) -> None:
    """The last to be killed is the whole cluster, head and all, at once, as if its power was cut."""
    n_lines = 2000
    body = {"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
    with ExitStack() as ends:
        directories = [ends.enter_context(short_folder()) for _ in range(2)]
        killed = started_in(directories[0], tmp_path / "batches")
        ends.callback(processes.stop, killed.process, directories[0], STOP_TIMEOUT_S)
        killed.wait_ready()
        with openai.OpenAI(base_url=f"{killed.url}/v1", api_key="any", max_retries=10) as client:
            batch_id = begin(client, n_lines, "/v1/completions", body)
            for name, n_before in ((ENGINE, 100), (INGRESS, 400)):
                until_done(client, batch_id, n_before)
                (pid,) = killed.pids(name)
                os.kill(pid, signal.SIGKILL)
                until_gone(killed, name, pid)
                killed.wait_ready()
            until_done(client, batch_id, 900)
            assert n_done(client, batch_id) < n_lines, "they were killed in the middle"
        processes.send(directories[0], signal.SIGKILL)
        heir = ends.enter_context(
            stopped_at_the_end(started_in(directories[1], tmp_path / "batches"))
        )
        with openai.OpenAI(base_url=f"{heir.url}/v1", api_key="any", max_retries=10) as client:
            batch = ended(client, batch_id)
            found = answers(client, batch)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (n_lines, n_lines, 0)
    assert [line["custom_id"] for line in found] == [f"q{i}" for i in range(n_lines)]
    assert len({line["id"] for line in found}) == n_lines
    assert {line["response"]["body"]["usage"]["completion_tokens"] for line in found} == {4}


def test_who_chats_does_not_wait_for_a_batch(server: Corral, client: openai.OpenAI) -> None:
    """All slots are taken by lines that would take long."""
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
    batch_id = begin(client, 40, "/v1/completions", body)
    wait_until(
        lambda: server.stats()["queue"]["background_running"] == 4, 60, "all slots are taken"
    )
    began = time.monotonic()
    first = None
    asked: Any = client.chat.completions
    stream = asked.create(model="corral-demo", max_tokens=16, stream=True, **CHAT)
    for _ in stream:
        first = first or time.monotonic() - began
    stats = server.stats()
    print(f"first token after {first} s; {stats['requests']['preemptions']} lines stepped back")
    assert stats["requests"]["preemptions"] > 0
    assert n_done(client, batch_id) < 40, "it did not wait"
    client.batches.cancel(batch_id)
    assert ended(client, batch_id).status == "cancelled"
    wait_until(lambda: server.stats()["queue"]["background_running"] == 0, 30, "its slots are free")

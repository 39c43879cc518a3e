"""The commands of docs/deploy/ray-serve.md, on a Ray that `ray start --head` has started."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from loadtests.common import processes
from loadtests.common.servers import BUILD, ROOT, STOP_TIMEOUT_S, free_port
from tests.e2e.conftest import (
    DEPLOY_TIMEOUT_S,
    START_TIMEOUT_S,
    all_the_time,
    model,
    short_folder,
    sse,
    wait_until,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(580)]
PREFIXES = ("/one", "/two")
LONG_ANSWER = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
LONGER = {"max_tokens": 20_000, "context_shift": True}


class Head:
    """`ray start --head`, and Ray Serve's commands for it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._gcs, self._dashboard = free_port(), free_port()
        self._environment = os.environ | {
            processes.TAG: str(directory),
            "HOME": str(directory),  # the file with Ray's token, and the profiles
            "XDG_RUNTIME_DIR": str(directory),
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self._dashboard}",
        }
        self._environment.pop("RAY_ADDRESS", None)
        self._run("ray", "get-auth-token", "--generate")
        self._log = directory / "log"
        ports = (f"--port={self._gcs}", f"--dashboard-port={self._dashboard}")
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                processes.with_default_signals(
                    *(_program("ray"), "start", "--head", "--block", "--num-cpus=2"),
                    *(*ports, f"--temp-dir={directory}/ray"),
                ),
                cwd=ROOT,
                env=self._environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        wait_until(self._has_started, START_TIMEOUT_S, self._log.read_text)

    def serve(self, *arguments: str) -> str:
        """What a command of `serve` prints."""
        return self._run("serve", *arguments)

    def run(self, *arguments: str) -> str:
        """What `serve run` prints, which connects to Ray itself."""
        return self._run("serve", "run", "--address", f"127.0.0.1:{self._gcs}", *arguments)

    def deploy(self, *applications: dict[str, Any], **options: object) -> None:
        """`serve deploy` of a file with these applications and options of Serve."""
        config = {"http_options": {"host": "127.0.0.1", "port": self.port}} | options
        path = self.directory / "serve_config.yaml"
        path.write_text(json.dumps(config | {"applications": list(applications)}))  # is YAML
        self.serve("deploy", str(path))

    def statuses(self) -> dict[str, str]:
        """What `serve status` says of each application."""
        applications = yaml.safe_load(self.serve("status"))["applications"]
        return {name: one["status"] for name, one in applications.items()}

    def url(self, prefix: str) -> str:
        return f"http://127.0.0.1:{self.port}{prefix}/v1"

    def _has_started(self) -> bool:
        return "This command will now block" in self._log.read_text()

    def _run(self, program: str, *arguments: str) -> str:
        command = processes.with_default_signals(_program(program), *arguments)
        return subprocess.run(
            command,
            cwd=ROOT,
            env=self._environment,
            check=True,
            timeout=DEPLOY_TIMEOUT_S,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout


def _program(name: str) -> Path:
    return Path(sys.executable).with_name(name)


@pytest.fixture
def head() -> Iterator[Head]:
    with short_folder() as directory:
        one = Head(directory)
        try:
            yield one
        finally:
            processes.stop(one.process, directory, STOP_TIMEOUT_S)


def application(
    gguf: Path, prefix: str, n_slots: int = 2, name: str = "", **ingress: Any
) -> dict[str, Any]:
    """An application that serves one model behind `prefix`."""
    name = name or prefix.strip("/")
    args = {"models": [model(gguf, name, n_slots=n_slots, n_ctx_slot=2048)], "ingress": ingress}
    return {"name": name, "route_prefix": prefix, "import_path": BUILD, "args": args}


@contextmanager
def long_answer(url: str, lines: list[str], **settings: object) -> Iterator[None]:
    """A stream that has begun; when the block ends, it has ended, and `lines` has its events."""
    body = LONG_ANSWER | settings
    begun = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    lines.append(line)
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert begun.wait(120)
        yield
    finally:
        reader.join(240)
    assert not reader.is_alive()


def assert_whole(lines: list[str]) -> None:
    *_, last, done = lines
    assert done == "data: [DONE]"
    assert sse(last)["choices"][0]["finish_reason"] == "length"


def answers(url: str) -> Callable[[], bool]:
    """A function that says whether the models there answer."""

    def ask() -> bool:
        try:
            return httpx.get(f"{url}/models", timeout=60).is_success
        except httpx.TransportError:
            return False

    return ask


def test_deploy_status_config_a_changed_value_and_an_end_without_a_cut(
    gguf: Path, head: Head
) -> None:
    head.deploy(*(application(gguf, prefix) for prefix in PREFIXES))
    running = dict.fromkeys(("one", "two"), "RUNNING")
    wait_until(lambda: head.statuses() == running, START_TIMEOUT_S, lambda: head.serve("status"))
    for prefix in PREFIXES:
        models = httpx.get(f"{head.url(prefix)}/models", timeout=60).json()["data"]
        assert [one["id"] for one in models] == [prefix.strip("/")]
    first, second = yaml.safe_load_all(head.serve("config"))
    assert first["args"]["models"][0]["engine"]["n_slots"] == 2
    assert (first["route_prefix"], second["route_prefix"]) == PREFIXES

    lines: list[str] = []
    with long_answer(head.url("/one"), lines):
        head.deploy(application(gguf, "/one", n_slots=3), application(gguf, "/two"))
    assert_whole(lines)
    wait_until(lambda: head.statuses() == running, START_TIMEOUT_S, lambda: head.serve("status"))
    stats = httpx.get(f"{head.url('/one')}/stats", timeout=60).json()
    assert stats["models"][0]["replicas"][0]["engine"]["n_slots"] == 3

    lines = []
    with long_answer(head.url("/two"), lines):
        head.deploy()  # no application is left, and none is cut
    assert_whole(lines)
    wait_until(lambda: head.statuses() == {}, START_TIMEOUT_S, lambda: head.serve("status"))
    head.serve("shutdown", "--yes")


@pytest.fixture
def alone(gguf: Path, head: Head) -> Callable[..., dict[str, Any]]:
    """A function that deploys an application of these settings of the ingress, without proxies, and
    returns it when it answers."""

    def deploy(**ingress: Any) -> dict[str, Any]:
        one = application(gguf, "/", name="one", **ingress)
        head.deploy(one, proxy_location="Disabled")
        wait_until(answers(head.url("")), START_TIMEOUT_S, lambda: head.serve("status"))
        return one

    return deploy


def engine(url: str) -> dict[str, Any]:
    """The statistics of the one engine there."""
    (replica,) = httpx.get(f"{url}/stats", timeout=60).json()["models"][0]["replicas"]
    found: dict[str, Any] = replica["engine"]
    return found


def ask(url: str, **settings: object) -> http.client.HTTPConnection:
    """A connection whose request is sent, and whose answer is not read."""
    address = urlsplit(f"{url}/completions")
    connection = http.client.HTTPConnection(address.netloc, timeout=120)
    body = json.dumps(LONG_ANSWER | {"max_tokens": 200_000, "context_shift": True} | settings)
    connection.request("POST", address.path, body, {"content-type": "application/json"})
    return connection


def test_without_proxies_a_client_that_leaves_frees_its_slot(
    head: Head, alone: Callable[..., dict[str, Any]]
) -> None:
    alone()
    url = head.url("")
    assert processes.tagged(head.directory, "ServeController")
    assert not processes.tagged(head.directory, "ray::ProxyActor")

    def ended(n_running: int, n_waiting: int, n_left: int) -> Callable[[], bool]:
        def look() -> bool:
            stats = engine(url)
            queue, ended = stats["queue"], stats["requests"]["ended"].get("abort", 0)
            return (queue["running"], queue["waiting"], ended) == (n_running, n_waiting, n_left)

        return look

    kinds = {"stream": True}, {"stream": False}
    running = [ask(url, **kind) for kind in kinds]
    assert running[0].getresponse().readline().startswith(b"data: ")  # in the middle of a stream
    wait_until(ended(2, 0, 0), 60, lambda: str(engine(url)))
    waiting = [ask(url, **kind) for kind in kinds]  # before their first bytes
    wait_until(ended(2, 2, 0), 60, lambda: str(engine(url)))
    for n_left, leaver in enumerate(waiting, 1):
        leaver.close()
        wait_until(ended(2, 2 - n_left, n_left), 60, lambda: str(engine(url)))
    for n_left, leaver in enumerate(running, 1):
        leaver.close()
        wait_until(ended(2 - n_left, 0, 2 + n_left), 60, lambda: str(engine(url)))


def test_without_proxies_no_answer_is_lost_when_the_ingress_is_replaced_or_ends(
    gguf: Path, head: Head, alone: Callable[..., dict[str, Any]]
) -> None:
    alone()
    url = head.url("")
    lines: list[str] = []
    body = {"prompt": "x", "max_tokens": 2}

    def answer(client: int) -> None:
        post = kept.post if client < 2 else httpx.post  # on a kept connection, and on a new one
        answer = post(f"{url}/completions", json=body, timeout=120)
        assert answer.json()["usage"]["completion_tokens"] == 2

    (before,) = processes.tagged(head.directory, "ray::ServeReplica:one:Ingress")
    with httpx.Client() as kept, all_the_time(answer, 4), long_answer(url, lines, **LONGER):
        changed = alone(sse_ping_interval_s=14)
        wait_until(
            lambda: before not in processes.tagged(head.directory),
            120,
            lambda: head.serve("status"),
        )
    assert_whole(lines)
    assert engine(url)["requests"]["ended"].keys() == {"length"}  # the engine is the same one

    head.deploy(changed, application(gguf, "/two"), proxy_location="Disabled")
    refused = "proxy_location: Disabled is for one application at /. Remove it for one at /"
    wait_until(lambda: refused in head.serve("status"), START_TIMEOUT_S, "a second one is refused")
    assert answers(url)()

    lines = []
    with long_answer(url, lines, max_tokens=6000, context_shift=True):
        head.deploy(proxy_location="Disabled")  # no application is left
        late = httpx.post(f"{url}/completions", json=body, timeout=60)
    assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_closed")
    assert int(late.headers["Retry-After"]) >= 1
    assert_whole(lines)
    wait_until(lambda: head.statuses() == {}, START_TIMEOUT_S, lambda: head.serve("status"))


def test_run_of_an_import_path_serves_the_model_of_corral_behind_a_prefix(head: Head) -> None:
    head.serve("start", "--http-host=127.0.0.1", f"--http-port={head.port}")
    head.run("--non-blocking", "--route-prefix", "/llm", BUILD)
    url = head.url("/llm")
    wait_until(answers(url), START_TIMEOUT_S, lambda: head.serve("status"))
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    answer = httpx.post(f"{url}/chat/completions", json=body, timeout=120).json()
    assert (answer["model"], answer["usage"]["completion_tokens"]) == ("corral-demo", 4)

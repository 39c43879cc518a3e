"""Machines and environments that are not as usual: `corral serve` serves in all of them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loadtests.common import processes, servers
from tests.e2e.cli.test_corral import CORRAL, Started, corral
from tests.e2e.conftest import short_folder, wait_until

pytestmark = pytest.mark.long
SHELL = ("sh", "-c")
MACHINES = {
    "another Ray": ("env", "RAY_ADDRESS=127.0.0.1:1"),
    "a proxy for everything": (
        "env",
        "http_proxy=http://127.0.0.1:9",
        "HTTP_PROXY=http://127.0.0.1:9",
    ),
    "an ASCII locale": ("env", "LC_ALL=C", "PYTHONCOERCECLOCALE=0", "PYTHONUTF8=0"),
    "few files": (*SHELL, 'ulimit -n 256; exec "$@"', "sh"),
    "a name that does not resolve": (
        *("unshare", "--uts"),
        *(*SHELL, 'hostname nowhere.invalid; exec "$@"', "sh"),
    ),
    "little shared memory": (
        *("unshare", "--mount"),
        *(*SHELL, 'mount -t tmpfs -o size=8m tmpfs /dev/shm; exec "$@"', "sh"),
    ),
}
"""What is put before the command."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as directory:
        yield directory


def answer(url: str) -> str:
    return corral("chat", "What is the capital of Portugal?", "--temperature", "0", "--url", url)


@pytest.mark.parametrize("machine", MACHINES)
def test_it_serves_on(machine: str, folder: Path) -> None:
    before = MACHINES[machine]
    if before[0] == "unshare" and (os.geteuid() != 0 or shutil.which("unshare") is None):
        pytest.skip("needs root, for a namespace")
    started = Started(folder, "--slots", "2", command=(*before, *CORRAL))
    try:
        started.wait_for("Ctrl-C stops it.")
        assert answer(started.url).strip() == "The capital of Portugal is Lisbon."
    finally:
        processes.stop(started.process, folder, servers.STOP_TIMEOUT_S)


@pytest.mark.parametrize("host", ["::1", "::"])
def test_it_serves_by_ipv6(host: str, folder: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    started = Started(folder, "--slots", "2", "--host", host)
    url = f"http://[::1]:{started.port}"
    try:
        started.wait_for("Ctrl-C stops it.")
        assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok"}
        assert answer(url).strip() == "The capital of Portugal is Lisbon."
    finally:
        processes.stop(started.process, folder, servers.STOP_TIMEOUT_S)


def test_two_servers_on_one_machine(folder: Path) -> None:
    with short_folder() as other_folder:
        first = Started(folder, "--slots", "2")
        second = Started(other_folder, "--slots", "2")
        try:
            for started in (first, second):
                started.wait_for("Ctrl-C stops it.")
                assert answer(started.url).strip() == "The capital of Portugal is Lisbon."
        finally:
            processes.stop(first.process, folder, servers.STOP_TIMEOUT_S)
            processes.stop(second.process, other_folder, servers.STOP_TIMEOUT_S)


def test_a_terminal_that_closes_ends_the_server(folder: Path) -> None:
    started = Started(folder, "--slots", "2")
    try:
        started.wait_for("Ctrl-C stops it.")
        started.process.send_signal(signal.SIGHUP)
        wait_until(
            lambda: not processes.tagged(folder, ""),
            servers.STOP_TIMEOUT_S,
            lambda: str(processes.tagged(folder, "")),
        )
    finally:
        processes.stop(started.process, folder, servers.STOP_TIMEOUT_S)

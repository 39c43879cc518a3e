"""Compares a batch with the usual way without batches: clients in a loop, at llama-server.

    python -m loadtests.batch.against_clients --model PATH [--seconds 40] [--rounds 3] [--slots 16]
        [--clients 16] [--shared-words 0] [--backend llama.cpp]

Starts what `corral serve --cluster` runs, with batches, and llama-server with as many slots and as much
context. In each round both answer lines of the same sizes for so many seconds, in turns, once they are in
full swing; the server whose turn it is not is stopped. At llama-server, each client asks for one line
after the other; `--clients 1` is the simplest script that somebody would write. --shared-words are in
front of every line, as instructions are. --backend is that of Corral's engine. Figures are generated
tokens a second.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from loadtests.batch.behind_chats import N_GENERATED, Clients
from loadtests.common.comparing import compared
from loadtests.common.servers import Server, exit_on_sigterm, serve_run
from loadtests.compare import llama_server, sides
from serve_app.cli.measure.benchmark import (
    in_turns,
    machine,
    machine_line,
    number_between,
    usable_cores,
)

BATCH, LOOP = "a batch", "clients at llama-server"
_N_CTX_SLOT = 1024
_TIMEOUT_S = 120.0
_SWING_S = 240.0
_LOOK_S = 0.1


class Loop:
    """Clients that ask a server for one line after the other."""

    def __init__(self, url: str, n_clients: int, n_shared_words: int) -> None:
        self._url, self._n_clients = url, n_clients
        self._made = Clients(url, n_shared_words)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.n_tokens = 0
        """Generated so far; a line counts when it is there."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """They ask meanwhile, and read their last answers. Raises what a request does."""
        self._over.clear()
        with ThreadPoolExecutor(self._n_clients) as pool:
            asking = [pool.submit(self._ask) for _ in range(self._n_clients)]
            try:
                yield
            finally:
                self._over.set()
            for one in asking:
                one.result()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=_TIMEOUT_S) as http:
            while not self._over.is_set():
                answer = http.post("/v1/completions", json=self._made.line()).raise_for_status()
                with self._lock:
                    self.n_tokens += int(answer.json()["usage"]["completion_tokens"])


def tokens_per_s(count: Callable[[], int], n_at_once: int, seconds: float) -> float:
    """By that count, in so many seconds after twice as many lines as are answered at once. Raises
    TimeoutError if these take too long."""
    first, deadline = count(), time.monotonic() + _SWING_S
    while count() < first + 2 * n_at_once * N_GENERATED:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Too few lines are answered within {_SWING_S:.0f} seconds.")
        time.sleep(_LOOK_S)
    before, began = count(), time.monotonic()
    time.sleep(seconds)
    return (count() - before) / (time.monotonic() - began)


def measure(corral: Server, peer: Server, settings: argparse.Namespace) -> list[dict[str, float]]:
    """The rounds, by ways."""
    clients = Clients(corral.url, settings.shared_words)
    loop = Loop(peer.url, settings.clients, settings.shared_words)

    def turn(number: int, way: str) -> float:
        ours, other = (corral, peer) if way == BATCH else (peer, corral)
        other.pause()
        ours.go_on()
        if way == BATCH:
            with clients.batch():
                count = lambda: int(clients.engine()["tokens"]["generated_tokens"])  # noqa: E731
                found = tokens_per_s(count, settings.slots, settings.seconds)
        else:
            with loop.running():
                found = tokens_per_s(lambda: loop.n_tokens, settings.clients, settings.seconds)
        print(f"round {number}, {way}: {found:.1f} tokens/s", file=sys.stderr, flush=True)
        return found

    return in_turns((BATCH, LOOP), settings.rounds, turn, warm_up=False)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.batch.against_clients", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seconds", type=number_between(5, 600), default=40)
    parser.add_argument("--rounds", type=number_between(1, 20), default=3)
    parser.add_argument("--slots", type=number_between(1, 64), default=16)
    parser.add_argument("--clients", type=number_between(1, 64), default=16)
    parser.add_argument("--shared-words", type=number_between(0, 200), default=0)
    parser.add_argument("--backend", choices=("llama.cpp", "openvino"), default="llama.cpp")
    settings = parser.parse_args()
    exit_on_sigterm()
    threads, model = usable_cores(), settings.model.resolve()
    print(machine_line(machine(model, threads)), file=sys.stderr)
    program = llama_server.build(threads) / "llama-server"
    sizes = sides.Sizes(threads, settings.slots, _N_CTX_SLOT)
    engine = {"n_slots": settings.slots, "n_ctx_slot": _N_CTX_SLOT, "backend": settings.backend}
    entry = {"id": "model", "source": {"path": str(model)}, "engine": engine}
    with (
        tempfile.TemporaryDirectory() as folder,
        sides.start(sides.LLAMA_SERVER, model, sizes, program) as peer,
    ):
        peer.pause()
        with serve_run(entry, batch={"folder": folder}) as corral:
            rounds = measure(corral, peer, settings)
    print(compared(rounds, LOOP, ("", "tokens/s", "ratio"), lambda value: f"{value:.1f}"))


if __name__ == "__main__":
    main()

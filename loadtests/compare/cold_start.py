"""Measures the time to the first token of a model that is not loaded, beside llama-server's.

    python -m loadtests.compare.cold_start --model PATH [--rounds 5] [--server PATH]

Corral runs as `corral serve --cluster` starts it, with the model on demand (`keep_alive`), which was
loaded and profiled before. A round unloads it, waits until it is gone, and times a streamed completion
from its sending to the first token. In the same round llama-server is timed from its start to the first
token of the same request, which is sent as soon as its `/health` says that it is ready, with Ray running
idle beside it. Both have the same slots, context and threads, the file in the page cache, and take turns.
Each prompt is new.

Prints a Markdown table of medians and ranges, and the ratios to llama-server in the same round, also of the
time for each token that follows; and the memory of Corral's process for the model while that is not loaded
(anonymous, resident).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtests.common import processes, servers
from loadtests.common.comparing import ratio_spread
from loadtests.common.servers import Server
from loadtests.compare import llama_server
from loadtests.compare.sides import Sizes, llama_server_command
from serve_app.cli.measure.benchmark import (
    in_turns,
    machine,
    number_between,
    of_each,
    table,
    usable_cores,
)

CORRAL, PEER = "corral", "llama-server"
_PATIENCE_S = 120.0
_SETTLE_S = 2.0
"""Seconds for which a model has been gone before it is asked for."""
_POLL_S = 0.005
_MODEL, _N_TOKENS = "model", 33


def entry(model: Path, sizes: Sizes) -> dict[str, Any]:
    """The model in Corral's configuration: on demand, and never idle for long enough by itself."""
    engine = {"n_slots": sizes.n_slots, "n_ctx_slot": sizes.n_ctx_slot, "threads": sizes.threads}
    return {"id": _MODEL, "source": {"path": str(model)}, "engine": engine, "keep_alive": "12h"}


@dataclass(frozen=True, slots=True)
class Answered:
    """The times of one answer."""

    first_s: float
    """To its first text."""
    token_s: float
    """For each token after that."""


def answered(client: httpx.Client, url: str, prompt: str, began: float) -> Answered:
    """A completion's times since that moment of `perf_counter`. Raises RuntimeError if it has no text."""
    body = {"model": _MODEL, "prompt": prompt, "max_tokens": _N_TOKENS, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0}
    first = 0.0
    with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter() if json.loads(line[6:])["choices"][0]["text"] else 0.0
    if not first:
        raise RuntimeError(f"{url} answered {response.status_code} without a text.")
    return Answered(first - began, (time.perf_counter() - first) / (_N_TOKENS - 1))


def unload(client: httpx.Client, url: str) -> None:
    """Have Corral unload the model. Raises RuntimeError if it does not."""
    client.post(f"{url}/models/unload", json={"model": _MODEL})

    def is_gone() -> bool:
        (card,) = client.get(f"{url}/v1/models").json()["data"]
        return bool(card["status"]["value"] == "unloaded")

    if not processes.within(_PATIENCE_S, is_gone):
        raise RuntimeError("The model is not unloaded.")
    time.sleep(_SETTLE_S)


def peer(client: httpx.Client, program: Path, model: Path, sizes: Sizes, prompt: str) -> Answered:
    """The times from llama-server's start. Raises RuntimeError if it ends, or is late."""
    port = servers.free_port()
    url = f"http://127.0.0.1:{port}"
    command = llama_server_command(program, model, sizes, port)
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _is_healthy(client, url):
            if process.poll() is not None or time.perf_counter() - began > _PATIENCE_S:
                raise RuntimeError("llama-server did not start.")
            time.sleep(_POLL_S)
        return answered(client, url, prompt, began)
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)


def _is_healthy(client: httpx.Client, url: str) -> bool:
    with suppress(httpx.TransportError):
        return client.get(f"{url}/health").is_success
    return False


def idle_mib(server: Server) -> float | None:
    """Memory of the processes that wait for the model; None if there is none."""
    assert server.directory is not None  # it was started here
    found = [
        int(size[1])
        for pid in processes.tagged(server.directory, "ray::ServeReplica")
        if "engine-" in processes.command_line(pid)
        if (size := re.search(r"^RssAnon:\s+(\d+) kB$", _status(pid), re.M))
    ]
    return sum(found) / 1024 if found else None


def _status(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/status").read_text()
    return ""


def measured(model: Path, sizes: Sizes, program: Path, n_rounds: int) -> list[dict[str, Answered]]:
    """Each round's answers, by side."""

    def command(directory: Path, port: int) -> list[str | Path]:
        config = servers.write_config(directory, [entry(model, sizes)], port)
        return servers.one_machine_command(config)

    with (
        servers.running(command, servers.is_healthy) as server,
        httpx.Client(timeout=_PATIENCE_S) as client,
    ):
        answered(client, server.url, "Once, to be profiled", time.perf_counter())

        def one(number: int, side: str) -> Answered:
            prompt = f"{side} {number}: the water and the people say"
            if side == PEER:
                return peer(client, program, model, sizes, prompt)
            unload(client, server.url)
            return answered(client, server.url, prompt, time.perf_counter())

        found = in_turns((CORRAL, PEER), n_rounds, one)
        unload(client, server.url)
        mib = idle_mib(server)
        print("Idle process:", "none" if mib is None else f"{mib:.0f} MiB", "\n")
        return found


def report(rounds: Sequence[dict[str, Answered]]) -> str:
    """The table."""
    rows = []
    for side, answers in of_each(rounds):
        firsts, tokens = [one.first_s for one in answers], [one.token_s for one in answers]
        of_peer = [one[PEER] for one in rounds]
        rows.append(
            (
                side,
                f"{statistics.median(firsts):.2f} ({min(firsts):.2f}-{max(firsts):.2f})",
                ratio_spread(firsts, [one.first_s for one in of_peer]),
                f"{1000 * statistics.median(tokens):.1f}",
                ratio_spread(tokens, [one.token_s for one in of_peer]),
            )
        )
    header = ("side", "first token, s", "ratio", "then, ms for each", "ratio")
    return table(header, rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.compare.cold_start", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=number_between(1, 100), default=5)
    llama_server.add_option(parser)
    parser.add_argument("--slots", type=number_between(1, 64), default=8)
    parser.add_argument("--context", type=number_between(64, 65536), default=1024)
    args = parser.parse_args()
    llama_server.expect(parser, args.server)
    servers.exit_on_sigterm()
    sizes = Sizes(usable_cores(), args.slots, args.context)
    model = args.model.resolve()
    rounds = measured(model, sizes, args.server, args.rounds)
    print(report(rounds), "\n")
    print(json.dumps(machine(model, sizes.threads)))


if __name__ == "__main__":
    main()

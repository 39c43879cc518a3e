"""What the admission window (`batch_wait_timeout_s`) costs a lone request and gains a burst.

    python -m loadtests.admission --model PATH [--windows 0,2,5,10] [--rounds 3]

Starts `serve run` once for each window on loopback, and measures the time to first token, in
milliseconds, of requests that come alone and of bursts that find the engine idle. Fresh prompts
everywhere. The windows take turns, so that a drifting machine does not favour one of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

URL = "http://127.0.0.1:8123"
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_KeepLines)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--windows", default="0,2,5,10", help="milliseconds, comma-separated")
    parser.add_argument("--rounds", type=int, default=3, help="server starts for each window")
    parser.add_argument("--burst", type=int, default=16, help="requests that arrive together")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5, help="lone requests and bursts a start")
    args = parser.parse_args()
    windows = [float(window) for window in args.windows.split(",")]
    lone: dict[float, list[float]] = {window: [] for window in windows}
    burst: dict[float, list[float]] = {window: [] for window in windows}
    for i in range(args.rounds):
        for window in windows:
            print(f"round {i + 1} of {args.rounds}, window {window} ms", file=sys.stderr)
            with _server(args.model, args.burst, window / 1000):
                some_lone, some_burst = asyncio.run(_measure(args))
            lone[window] += some_lone
            burst[window] += some_burst
    print(f"TTFT in ms; bursts of {args.burst}, prompts of {args.prompt_tokens} tokens\n")
    print("| window ms | lone p50 | burst p50 | burst p95 |\n| --- | --- | --- | --- |")
    for window in windows:
        p95 = statistics.quantiles(burst[window], n=20)[-1]
        print(
            f"| {window:g} | {statistics.median(lone[window]):.1f} "
            f"| {statistics.median(burst[window]):.0f} | {p95:.0f} |"
        )


class _KeepLines(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


async def _measure(args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """TTFTs of lone requests and of bursts."""
    lone, burst = [], []
    async with httpx.AsyncClient(base_url=URL, timeout=120) as client:
        await asyncio.gather(*(_ttft(client, args.prompt_tokens) for _ in range(args.burst)))
        for _ in range(args.repeats):
            lone.append(await _ttft(client, args.prompt_tokens))
            requests = (_ttft(client, args.prompt_tokens) for _ in range(args.burst))
            burst += await asyncio.gather(*requests)
    return lone, burst


async def _ttft(client: httpx.AsyncClient, n_tokens: int) -> float:
    """Milliseconds from sending a fresh prompt of random tokens to its first token, of two."""
    body = {
        "prompt": [random.randrange(300, 500) for _ in range(n_tokens)],
        "max_tokens": 2,
        "ignore_eos": True,
        "stream": True,
    }
    start = time.perf_counter()
    first = None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line and first is None:
                first = time.perf_counter()
    if first is None:
        raise RuntimeError("a stream without a token")
    return 1000 * (first - start)


@contextmanager
def _server(model: Path, n_slots: int, window_s: float) -> Iterator[None]:
    """`serve run` with this window, in a Ray cluster of its own."""
    directory = Path(tempfile.mkdtemp(prefix="corral-", dir="/tmp"))  # short: Ray's sockets go in
    config = directory / "serve_config.yaml"
    config.write_text(json.dumps(_config(model, n_slots, window_s)))  # JSON is YAML
    environment = os.environ | {"RAY_TMPDIR": str(directory), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [str(Path(sys.executable).with_name("serve")), "run", str(config)]
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _wait_ready(server, directory / "log")
        yield
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(STOP_TIMEOUT_S)
        shutil.rmtree(directory, ignore_errors=True)


def _config(model: Path, n_slots: int, window_s: float) -> dict[str, object]:
    entry = {
        "id": "model",
        "source": {"path": str(model.resolve())},
        "engine": {"n_slots": n_slots, "n_ctx_slot": 1024},
        "batch_wait_timeout_s": window_s,
    }
    return {
        "http_options": {"host": "127.0.0.1", "port": httpx.URL(URL).port},
        "applications": [
            {"name": "corral", "import_path": "serve_app.app:build", "args": {"models": [entry]}}
        ],
    }


def _wait_ready(server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{URL}/v1/stats").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"no server:\n{log.read_text(errors='replace')}")


if __name__ == "__main__":
    main()

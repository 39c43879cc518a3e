"""What the admission window (`batch_wait_timeout_s`) costs a lone request and gains a burst.

    python -m loadtests.load.admission --model PATH [--windows 0,2,5,10] [--rounds 3]

Starts `serve run` once for each window on loopback, and measures the time to first token, in
milliseconds, of requests that come alone and of bursts that find the engine idle. Fresh prompts
everywhere. The windows take turns, so that a drifting machine does not favour one of them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from loadtests.common.benchmark import percentile
from loadtests.common.servers import exit_on_sigterm, serve_run


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
            with serve_run(_model(args.model, args.burst, window / 1000)) as server:
                some_lone, some_burst = asyncio.run(_measure(server.url, args))
            lone[window] += some_lone
            burst[window] += some_burst
    print(f"TTFT in ms; bursts of {args.burst}, prompts of {args.prompt_tokens} tokens\n")
    print("| window ms | lone p50 | burst p50 | burst p95 |\n| --- | --- | --- | --- |")
    for window in windows:
        print(
            f"| {window:g} | {statistics.median(lone[window]):.1f} "
            f"| {statistics.median(burst[window]):.0f} | {percentile(burst[window], 95):.0f} |"
        )


class _KeepLines(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


async def _measure(url: str, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """TTFTs of lone requests and of bursts."""
    lone, burst = [], []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
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
            if line.startswith("data: ") and first is None:
                first = time.perf_counter()
    if first is None:
        raise RuntimeError("a stream without a token")
    return 1000 * (first - start)


def _model(path: Path, n_slots: int, window_s: float) -> dict[str, Any]:
    return {
        "id": "model",
        "source": {"path": str(path.resolve())},
        "engine": {"n_slots": n_slots, "n_ctx_slot": 1024},
        "batch_wait_timeout_s": window_s,
    }


if __name__ == "__main__":
    exit_on_sigterm()
    main()

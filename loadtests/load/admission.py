"""Measures what `batch_wait_timeout_s` costs a lone request, and what a burst gains by it.

    python -m loadtests.load.admission --model PATH [--windows 0,2,5,10] [--rounds 3]

Starts `serve run` once for each window on loopback, and measures the time to first token, in
milliseconds, of requests that come alone and of bursts that find the engine idle. Every request has a
fresh prompt and a connection of its own. The windows take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.common.benchmark import BenchmarkError, listed, percentile, table
from loadtests.common.bursts import random_requests, run
from loadtests.common.rounds import in_turns, of_each
from loadtests.common.servers import exit_on_sigterm, serve_run


@dataclass(frozen=True, slots=True)
class Found:
    """Times to first token of one start of a server, in milliseconds."""

    lone_ms: list[float]
    """Of requests that came alone."""
    burst_ms: list[float]
    """Of those that came together."""


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_KeepLines)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--windows", type=listed(float), default=(0.0, 2.0, 5.0, 10.0), help="milliseconds"
    )
    parser.add_argument("--rounds", type=int, default=3, help="server starts for each window")
    parser.add_argument("--burst", type=int, default=16, help="requests that arrive together")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5, help="lone requests and bursts a start")
    args = parser.parse_args()

    def measure(number: int, window_ms: float) -> Found:
        print(f"round {number} of {args.rounds}, window {window_ms:g} ms", file=sys.stderr)
        with serve_run(_model(args.model, args.burst, window_ms / 1000)) as server:
            return _measure(server.url, args)

    rounds = in_turns(args.windows, args.rounds, measure, warm_up=False)
    print(f"TTFT in ms; bursts of {args.burst}, prompts of {args.prompt_tokens} tokens\n")
    print(table(("window ms", "lone p50", "burst p50", "burst p95"), map(_row, of_each(rounds))))


def _row(found: tuple[float, Sequence[Found]]) -> tuple[str, ...]:
    window_ms, starts = found
    lone = [ttft_ms for one in starts for ttft_ms in one.lone_ms]
    burst = [ttft_ms for one in starts for ttft_ms in one.burst_ms]
    burst_p50, burst_p95 = (f"{percentile(burst, percent):.0f}" for percent in (50, 95))
    return f"{window_ms:g}", f"{percentile(lone, 50):.1f}", burst_p50, burst_p95


class _KeepLines(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def _measure(url: str, args: argparse.Namespace) -> Found:
    def ttft_ms(n_requests: int) -> list[float]:
        """Of requests that come together, each with a fresh prompt."""
        burst = run(url, random_requests(n_requests, args.prompt_tokens, max_tokens=2))
        if len(burst.ttft_s) < n_requests:
            raise BenchmarkError("An answer had no text.")
        return [1000 * seconds for seconds in burst.ttft_s]

    ttft_ms(args.burst)  # to warm up
    pairs = [(ttft_ms(1), ttft_ms(args.burst)) for _ in range(args.repeats)]
    return Found(
        [ms for lone, _ in pairs for ms in lone], [ms for _, burst in pairs for ms in burst]
    )


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

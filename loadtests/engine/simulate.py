"""Many clients on one engine, as llama.cpp's `examples/parallel` simulates them. No Ray, no HTTP.

    python -m loadtests.engine.simulate --model PATH [--clients 16] [--slots 4] [--requests 4]
        [--shared 0,256] [--continuous on,off] [--prompt-tokens 32] [--min-tokens 16]
        [--max-tokens 64] [--threads N] [--json FILE]

Every client sends its requests one after the other: a prompt of --shared tokens that all have in common
and --prompt-tokens of its own, then as many generated tokens as the seed says, between --min-tokens
and --max-tokens. With continuous batching a client sends its next request at once, and it gets the
first slot that is free. Without, requests are served in batches of as many as there are slots, and the
next batch starts when the whole batch has ended.

Each combination of --shared and --continuous has an engine in a process of its own, with an empty cache
and the same requests, but for the shared part. Speeds are tokens over the total time. TTFT runs from
when the client sent the request, so waiting is part of it.

Progress goes to stderr, a Markdown table to stdout, and every answer to the JSON file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadtests.common import benchmark
from loadtests.common.benchmark import (
    bounded,
    choice,
    listed,
    machine,
    machine_line,
    percentile,
    usable_cores,
)
from loadtests.engine import process
from loadtests.engine.bare_loop import text_tokens
from loadtests.engine.simulation import Answer, Scenario, play


def summary(scenario: Scenario, answers: Sequence[Answer]) -> dict[str, Any]:
    """The scenario's figures: tokens, seconds, and tokens per second of the total time."""
    prompt = sum(answer.usage.prompt_tokens for answer in answers)
    cached = sum(answer.usage.cached_tokens for answer in answers)
    generated = sum(answer.usage.completion_tokens for answer in answers)
    total_s = max(answer.arrivals_s[-1] for answer in answers)
    ttft = [answer.ttft_s for answer in answers]
    itl = [b - a for answer in answers for a, b in pairwise(answer.arrivals_s)]
    return {
        "scenario": asdict(scenario),
        "requests": len(answers),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "generated_tokens": generated,
        "total_s": total_s,
        "cache_hits": cached / prompt,
        "prompt_tps": prompt / total_s,
        "computed_prompt_tps": (prompt - cached) / total_s,
        "generated_tps": generated / total_s,
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p95_s": percentile(ttft, 95),
        "itl_p50_ms": 1000 * percentile(itl, 50) if itl else None,
        "itl_p99_ms": 1000 * percentile(itl, 99) if itl else None,
        "e2e_p50_s": percentile([answer.e2e_s for answer in answers], 50),
        "answers": [asdict(answer) for answer in answers],
    }


_HEADER = (
    "clients",
    "slots",
    "shared tokens",
    "continuous",
    "requests",
    "prompt tokens",
    "cache hits",
    "prompt t/s",
    "of them computed",
    "generated t/s",
    "TTFT p50 s",
    "p95",
    "ITL p50 ms",
    "p99",
    "E2E p50 s",
    "total s",
)


def table(facts: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """A line of facts and a Markdown table, a row for each scenario."""
    rows = []
    for result in results:
        scenario = result["scenario"]
        cells = (
            *(scenario[name] for name in ("clients", "slots", "shared_tokens")),
            "on" if scenario["continuous"] else "off",
            result["requests"],
            result["prompt_tokens"],
            f"{result['cache_hits']:.0%}",
            *(
                f"{result[name]:.1f}"
                for name in ("prompt_tps", "computed_prompt_tps", "generated_tps")
            ),
            f"{result['ttft_p50_s']:.2f}",
            f"{result['ttft_p95_s']:.2f}",
            *(
                "-" if ms is None else f"{ms:.0f}"
                for ms in (result["itl_p50_ms"], result["itl_p99_ms"])
            ),
            f"{result['e2e_p50_s']:.2f}",
            f"{result['total_s']:.1f}",
        )
        rows.append(cells)
    return f"{machine_line(facts)}\n\n{benchmark.table(_HEADER, rows)}"


def measure(model: Path, scenario: Scenario, vocabulary: Sequence[int]) -> dict[str, Any]:
    """One scenario in a fresh process."""
    shape = f"{scenario.shared_tokens} shared, continuous {'on' if scenario.continuous else 'off'}"
    print(f"{shape}: {scenario.clients * scenario.requests} requests ...", file=sys.stderr)
    with process.started(model, scenario.options()) as pool:
        result = summary(scenario, pool.submit(play, scenario, vocabulary).result())
    print(f"{shape}: {result['total_s']:.1f} s", file=sys.stderr, flush=True)
    return result


def parse_args(argv: Sequence[str] | None) -> tuple[Path, list[Scenario], Path | None]:
    """The model, the scenarios, and where the JSON goes."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.engine.simulate", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--clients", type=bounded(1, 1024), default=16)
    parser.add_argument("--slots", type=bounded(1, 64), default=4)
    parser.add_argument("--requests", type=bounded(1, 1000), default=4)
    parser.add_argument("--shared", type=listed(bounded(0, 32768)), default=(0,))
    parser.add_argument("--continuous", type=listed(choice("on", "off")), default=("on",))
    parser.add_argument("--prompt-tokens", type=bounded(1, 32768), default=32)
    parser.add_argument("--min-tokens", type=bounded(1, 4096), default=16)
    parser.add_argument("--max-tokens", type=bounded(1, 4096), default=64)
    parser.add_argument("--threads", type=bounded(1, 512), default=usable_cores())
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args(argv)
    if args.min_tokens > args.max_tokens:
        parser.error("--min-tokens must not be above --max-tokens.")
    first = Scenario(
        clients=args.clients,
        slots=args.slots,
        requests=args.requests,
        shared_tokens=0,
        prompt_tokens=args.prompt_tokens,
        min_tokens=args.min_tokens,
        max_tokens=args.max_tokens,
        continuous=True,
        threads=args.threads,
    )
    scenarios = [
        replace(first, shared_tokens=shared, continuous=continuous == "on")
        for shared in args.shared
        for continuous in args.continuous
    ]
    return args.model, scenarios, args.json


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, print the table, write the JSON."""
    model, scenarios, json_file = parse_args(argv)
    vocabulary = text_tokens(model)
    facts = machine(model, scenarios[0].threads)
    results = [measure(model, scenario, vocabulary) for scenario in scenarios]
    print(table(facts, results))
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

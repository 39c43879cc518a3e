"""Measures what accounting costs: keys, budgets, usage, prices, the request log and traces, on against off.

    python -m loadtests.compare.accounting --model PATH [--users 1,4,16] [--rounds 8] [--threads N]
        [--prompt-tokens 32] [--max-tokens 96] [--json FILE]

Two servers without Ray have the same model. One has an API key with budgets, usage in a folder, prices, a
line in the log for each answer, and spans that go to a file. The other one has none of that. They take
turns, round by round, and the processes of the one that waits are stopped (SIGSTOP). Both get the same
prompts in a round. The ratio is on to off in the same round: of tokens a second, and of off's p99 gap to
on's, so that above 1 is better in both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from loadtests.common import bursts
from loadtests.common.comparing import absolute, ratio_spread
from loadtests.common.servers import (
    BUILD,
    NO_SETTINGS,
    Server,
    corral_is_ready,
    exit_on_sigterm,
    local_command,
    running,
    write_config,
)
from serve_app.cli.measure.benchmark import (
    in_turns,
    list_of,
    machine_and_model,
    number_between,
    of_each,
    spread,
    table,
    usable_cores,
)

ON, OFF = "on", "off"
REST_S = 2.0
KEY = "accounting-secret-0123456789"
HEADERS = {"Authorization": f"Bearer {KEY}"}
_LIMIT = 10**9
FIGURES = ("tokens_per_s", "itl_p99_ms")


def start(
    side: str, model: Path, threads: int, n_slots: int, traces: Path
) -> AbstractContextManager[Server]:
    """The server of a side. Spans go to the file `traces`, if the side has them."""
    engine = {
        **{"n_slots": n_slots, "n_ctx_slot": 1024, "threads": threads, "max_waiting": 256},
        "backend": "llama.cpp",
    }
    entry = {"id": "m", "source": {"path": str(model)}, "engine": engine}

    def command(directory: Path, port: int) -> list[str | Path]:
        ingress: dict[str, Any] = {}
        if side == ON:
            budgets = {
                "tokens_per_minute": _LIMIT,
                "tokens_per_day": _LIMIT,
                "cost_per_month": _LIMIT,
            }
            keys = directory / "keys.yaml"
            keys.write_text(json.dumps({"keys": [{"name": "a", "key": KEY, **budgets}]}))
            ingress = {
                "api_key_file": str(keys),
                "usage_folder": str(directory / "usage"),
                "request_log": True,
                "prices": {"*": {"prompt": 1.0, "generated": 2.0}},
            }
        return local_command(write_config(directory, [entry], port, None, BUILD, **ingress))

    settings = (
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"file://{traces}"} if side == ON else NO_SETTINGS
    )
    return running(command, lambda url: corral_is_ready(url, HEADERS), settings)


def measure(args: argparse.Namespace) -> list[dict[tuple[int, str], Mapping[str, float]]]:
    """The figures of all rounds, by users and side."""
    with ExitStack() as opened:
        servers: dict[str, Server] = {}
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        for side in (OFF, ON):
            servers[side] = opened.enter_context(
                start(side, args.model, args.threads, max(args.users), folder / "traces.jsonl")
            )
            servers[side].pause()

        def run(number: int, way: tuple[int, str]) -> Mapping[str, float]:
            n_users, side = way
            bodies = bursts.random_requests(
                n_users, args.prompt_tokens, args.max_tokens, f"{number} {n_users}"
            )
            servers[side].go_on()
            time.sleep(REST_S)
            figures = bursts.run(servers[side].url, bodies, HEADERS).figures()
            servers[side].pause()
            shown = ", ".join(f"{name} {figures[name]:.1f}" for name in FIGURES)
            print(f"round {number}, {n_users} users, {side}: {shown}", file=sys.stderr, flush=True)
            return figures

        ways = [(n_users, side) for n_users in args.users for side in (OFF, ON)]
        return in_turns(ways, args.rounds, run)


def report(rounds: Sequence[Mapping[tuple[int, str], Mapping[str, float]]]) -> str:
    """The table: medians (min-max) of both sides, and of the ratios of each round."""
    values = dict(of_each(rounds))
    rows = []
    for n_users in sorted({n_users for n_users, _ in values}):
        for name in FIGURES:
            off, on = ([one[name] for one in values[n_users, side]] for side in (OFF, ON))
            ratio = ratio_spread(off, on) if name.endswith("_ms") else ratio_spread(on, off)
            rows.append((n_users, name, spread(off), spread(on), ratio))
    return table(("users", "figure", OFF, ON, "ratio"), rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.compare.accounting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=absolute, required=True)
    parser.add_argument("--users", type=list_of(number_between(1, 64)), default=(1, 4, 16))
    parser.add_argument("--rounds", type=number_between(1, 50), default=8)
    parser.add_argument("--threads", type=number_between(1, 512), default=usable_cores())
    parser.add_argument("--prompt-tokens", type=number_between(1, 512), default=32)
    parser.add_argument("--max-tokens", type=number_between(2, 256), default=96)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args(argv)
    rounds = measure(args)
    print(
        "{cpu}, {cores} cores, {model} ({model_mb} MB).\n".format(**machine_and_model(args.model))
    )
    print(report(rounds))
    if args.json is not None:
        named: list[dict[str, Any]] = [
            {f"{n_users} {side}": dict(figures) for (n_users, side), figures in one.items()}
            for one in rounds
        ]
        args.json.write_text(json.dumps(named, indent=1) + "\n")


if __name__ == "__main__":
    exit_on_sigterm()
    main()

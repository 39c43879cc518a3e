"""Corral and llama-server over HTTP, as their users run them, on the same machine with the same model.

    python -m loadtests.peers --model PATH [--workloads shared,independent] [--users 1,4,8,16]
        [--rounds 3] [--sides corral,bare,llama-server,haproxy] [--threads N] [--server PATH] [--json FILE]

Sides: `corral` is `serve run`, `bare` the same routes and engine without Ray, `llama-server` the one of
--server, or of `python -m loadtests.llama_server`; `haproxy`, if it is named, is `serve run` with Serve's
HAProxy and `cluster/haproxy.env`. All have 16 slots of 1024 tokens. Users all ask at once, with prompts of
token ids, and read streams of 64 tokens. `independent` prompts have 128 random tokens, `shared` ones 512
that are the same for all users and 32 of their own.

One server runs at a time. In every round each side's is started, warmed up with a request, measured and
stopped, in turns: A B C, C B A, ... All sides of a round get the same prompts, and every round and every
number of users fresh ones, so that no cache helps but within a burst; before each burst there is a rest of
REST_S. Ratios are to llama-server in the same round. TTFT is the time to the first text, ITL the gaps
between texts, as the client sees them.

Progress goes to stderr, Markdown tables to stdout, and every single answer to the JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loadtests import bursts, llama_server, peer_report
from loadtests.bare_loop import Prompt, text_tokens
from loadtests.bursts import Burst
from loadtests.common import SEED, bounded, cpu_name
from loadtests.peer_sides import BARE, CORRAL, LLAMA_SERVER, SIDES, Sizes, start
from loadtests.servers import exit_on_sigterm

MAX_TOKENS = 64
REST_S = 5.0
"""Seconds in which a server may do what it puts off until nobody waits."""
MAX_USERS = 48
"""As many as Corral takes: slots, and twice as many that wait."""
WORKLOADS = {"shared": (512, 32), "independent": (0, 128)}
"""Tokens of a prompt: those that all users share, and each one's own."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one invocation measures."""

    model: Path
    workloads: tuple[str, ...]
    users: tuple[int, ...]
    rounds: int
    sides: tuple[str, ...]
    threads: int
    server: Path

    @property
    def points(self) -> list[tuple[str, int]]:
        """The bursts of every side in every round: workload and users."""
        return [(workload, users) for workload in self.workloads for users in self.users]


@dataclass(frozen=True, slots=True)
class Record:
    """One burst, and which it was."""

    round: int
    side: str
    workload: str
    users: int
    burst: Burst


def seed(number: int, workload: str, users: int) -> str:
    """What the prompts of a round's burst are drawn with."""
    return f"{SEED} {number} {workload} {users}"


def draw_prompts(vocabulary: Sequence[int], number: int, workload: str, users: int) -> list[Prompt]:
    """The prompts of a round's burst, one for each user: the same whenever they are asked for."""
    rng = random.Random(seed(number, workload, users))
    n_shared, n_own = WORKLOADS[workload]
    shared = rng.choices(vocabulary, k=n_shared)
    return [(*shared, *rng.choices(vocabulary, k=n_own)) for _ in range(users)]


def request(prompt: Prompt, number: int) -> dict[str, Any]:
    """The body that a user sends, understood alike by both servers, with sampling as they default."""
    return {
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def measure(settings: Settings) -> Iterator[Record]:
    """Every burst, as it ends."""
    vocabulary = text_tokens(settings.model)
    order = list(settings.sides)
    for number in range(1, settings.rounds + 1):
        for side in order:
            with start(side, settings.model, Sizes(settings.threads), settings.server) as url:
                (warm_up,) = draw_prompts(vocabulary, 0, "independent", 1)
                bursts.run(url, [request(warm_up, 0)])
                for workload, users in settings.points:
                    prompts = draw_prompts(vocabulary, number, workload, users)
                    requests = [request(prompt, i) for i, prompt in enumerate(prompts)]
                    time.sleep(REST_S)
                    yield Record(number, side, workload, users, bursts.run(url, requests))
        order.reverse()


def by_point(
    records: Sequence[Record], settings: Settings
) -> dict[str, dict[int, list[dict[str, Burst]]]]:
    """The rounds of each workload and number of users; in them, the sides as the settings order them."""
    found = {(r.round, r.side, r.workload, r.users): r.burst for r in records}
    return {
        workload: {
            users: [
                {side: found[number, side, workload, users] for side in settings.sides}
                for number in range(1, settings.rounds + 1)
            ]
            for users in settings.users
        }
        for workload in settings.workloads
    }


def facts(settings: Settings) -> dict[str, Any]:
    """What the figures depend on. `model_mb` is in units of 10^6 bytes."""
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "model": settings.model.name,
        "model_mb": round(settings.model.stat().st_size / 1e6),
        "versions": {name: version(name) for name in ("corral", "llama-cpp-python", "ray")},
        "sizes": asdict(Sizes(settings.threads)),
        "workloads": {name: WORKLOADS[name] for name in settings.workloads},
        "max_tokens": MAX_TOKENS,
    }
    if LLAMA_SERVER in settings.sides:
        found["versions"][LLAMA_SERVER] = _version_of(settings.server)
    return found


def _version_of(server: Path) -> str:
    done = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=60)
    said = [line for line in (done.stderr + done.stdout).splitlines() if "version" in line]
    return said[0] if said else "unknown"


def report(facts: dict[str, Any], records: Sequence[Record], settings: Settings) -> str:
    """A line of facts, a table for each workload, and what to beware of."""
    lines = [
        "{cpu}, {cores} cores, {model} ({model_mb} MB), {max_tokens} tokens for each user.".format(
            **facts
        ),
        f"Rounds: {settings.rounds}. Medians, and ratios to llama-server in the same round: median "
        "(min-max).",
        f"The client used {max(record.burst.client_share for record in records):.1%} of a core at most.",
    ]
    results = by_point(records, settings)
    for workload, of_workload in results.items():
        n_shared, n_own = WORKLOADS[workload]
        lines += [f"\n{workload}: {n_shared} shared tokens, {n_own} of their own\n"]
        lines += [peer_report.table(of_workload)]
    return "\n".join([*lines, *(f"\nWARNING: {text}" for text in _warnings(results))])


def _warnings(results: dict[str, dict[int, list[dict[str, Burst]]]]) -> Iterator[str]:
    for workload, of_workload in results.items():
        for users, rounds in of_workload.items():
            wanted = [(sum(WORKLOADS[workload]), MAX_TOKENS)] * users
            for number, one in enumerate(rounds, 1):
                for text in peer_report.warnings(one, wanted):
                    yield f"{workload}, {users} users, round {number}: {text}"


def _progress(record: Record) -> None:
    figures = ", ".join(f"{name} {value:.2f}" for name, value in record.burst.figures().items())
    print(
        f"round {record.round}, {record.side}, {record.workload}, {record.users} users: {figures}; "
        f"{record.burst.tokens} tokens, client {record.burst.client_share:.1%} of a core",
        file=sys.stderr,
        flush=True,
    )


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"{unknown} not among {', '.join(known)}.")
        return names

    return parse


def _absolute(text: str) -> Path:
    return Path(text).resolve()  # servers are started elsewhere


def parse_args(argv: Sequence[str] | None) -> tuple[Settings, Path | None]:
    """The settings, and where the JSON goes."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    user_count = bounded(1, MAX_USERS)
    parser.add_argument("--model", type=_absolute, required=True)
    parser.add_argument("--workloads", type=_names(tuple(WORKLOADS)), default=tuple(WORKLOADS))
    parser.add_argument(
        "--users", type=lambda text: tuple(map(user_count, text.split(","))), default=(1, 4, 8, 16)
    )
    parser.add_argument("--rounds", type=bounded(1, 50), default=3)
    parser.add_argument("--sides", type=_names(SIDES), default=(CORRAL, BARE, LLAMA_SERVER))
    parser.add_argument("--threads", type=bounded(1, 512), default=len(os.sched_getaffinity(0)))
    parser.add_argument("--server", type=_absolute, default=llama_server.folder() / "llama-server")
    parser.add_argument("--json", type=Path, default=None)
    args = vars(parser.parse_args(argv))
    json_file: Path | None = args.pop("json")
    settings = Settings(**args)
    if LLAMA_SERVER in settings.sides and not settings.server.is_file():
        parser.error("no llama-server: give --server, or run python -m loadtests.llama_server")
    return settings, json_file


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the JSON."""
    settings, json_file = parse_args(argv)
    known, records = facts(settings), []
    for record in measure(settings):
        _progress(record)
        records.append(record)
    print(report(known, records, settings))
    if json_file is not None:
        json_file.write_text(json.dumps(_document(known, records), indent=1) + "\n")


def _document(facts: dict[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    runs = [
        {"round": r.round, "side": r.side, "workload": r.workload, "users": r.users}
        | {"seed": seed(r.round, r.workload, r.users)}
        | r.burst.raw()
        for r in records
    ]
    return {"machine": facts, "runs": runs}


if __name__ == "__main__":
    exit_on_sigterm()
    main()
